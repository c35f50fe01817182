//! Files: a file system in memory, pipes and other streams, the console, `/proc`.
//!
//! A [walk](mod@walk) along a path leads to an [`Inode`]; an opened inode is a [`File`]; a process
//! refers to a file by a descriptor ([`ProcessFiles`]). A [`Transfer`] copies bytes directly
//! between user memory and the storage of a file: the pages of a memory object, which programs can
//! also map ([`regular`]), or the ring of a [`pipe`]. A file whose operations may block is a
//! [`stream`]; all waiting is in that module and in [`poll`].
//!
//! *Locks*, from the outside in: the position of a file; the contents of a regular file, or the
//! state of a stream; the tree of names; one directory; the metadata of an inode. A waiting thread
//! holds no lock. Locks may be held during accesses to user memory, because a page fault takes no
//! lock of this module.
//!
//! *Files on the disk* have their names and modes in memory, and are read page by page on demand
//! ([`regular`], [`cache`]).
//!
//! *Files of `/proc`* and `/sys` are texts, made by a read from the start.

mod attribute;
pub mod cache;
mod descriptors;
pub mod device;
pub mod directory;
pub mod epoll;
pub mod event;
pub mod file;
pub mod inode;
mod listing;
mod live;
pub mod lock;
mod lookup;
mod map;
mod nodes;
pub mod pipe;
pub mod poll;
mod proc;
pub mod regular;
mod root;
mod seed;
mod set;
pub mod signals;
pub mod size;
pub mod stream;
pub mod timer;
mod transfer;
mod usage;
pub mod walk;

pub use crate::path;
pub use descriptors::ProcessFiles;
pub use device::{end_input, fill_random};
pub use file::File;
pub use inode::Inode;
pub use lookup::{path_at, program, read_all};
pub use map::object_to_map;
pub use path::file_name;
pub use regular::Regular;
pub use root::unmount;
pub use seed::mount;
pub use transfer::{MAX_BYTES, Piece, Transfer};
