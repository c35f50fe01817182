//! Files: a file system in memory, pipes and other streams, the console, `/proc`.
//!
//! A path is [walked](mod@walk) to an [`Inode`]; opened, that is a [`File`]; a process finds it by a
//! descriptor ([`ProcessFiles`]). Bytes move through a [`Transfer`], straight between the program's memory
//! and where they are kept: the pages of an object of the subsystem, which programs also map ([`regular`]),
//! the ring of a [`pipe`]. What must wait is a [`stream`]; all waiting is there and in [`poll`].
//!
//! *Locks*, from the outside in: the position of a file; the change of a regular file, or the state of a
//! stream; the tree of names; one directory; what `stat` tells. None is held while waiting. They may be
//! held while the program's memory is touched, because a page fault takes none of them.
//!
//! *Descriptions of what the kernel knows* (`/proc`) are texts, made when they are read from the start.

mod descriptors;
pub mod device;
pub mod directory;
pub mod epoll;
pub mod event;
pub mod file;
pub mod inode;
mod live;
pub mod lock;
mod lookup;
mod map;
pub mod pipe;
pub mod poll;
mod proc;
pub mod regular;
mod root;
mod seed;
pub mod signals;
pub mod stream;
pub mod timer;
mod transfer;
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
