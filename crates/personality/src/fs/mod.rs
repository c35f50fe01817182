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
pub mod pipe;
pub mod poll;
mod proc;
pub mod regular;
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
pub use path::file_name;
pub use regular::Regular;
pub use seed::mount;
pub use transfer::{MAX_BYTES, Piece, Transfer};

use crate::errno::{Errno, Result};
use crate::task::thread::try_current;
use core::sync::atomic::{AtomicPtr, Ordering};
use device::Device;
use faultless::Object;
use faultless::{Backing, MapFlags, Prot};
use faultless::{Shared, try_box};
use faultless_bare::percpu;
use faultless_collections::{Arc, String, Vec};
use inode::Body;
use linux_raw_sys::general as linux;
use regular::Held;
use walk::{Links, Start, walk};

static ROOT: AtomicPtr<Arc<Inode>> = AtomicPtr::new(core::ptr::null_mut());

/// The root of all names. Not before [`mount`].
pub fn root() -> &'static Arc<Inode> {
    let root = ROOT.load(Ordering::Acquire);
    assert!(!root.is_null(), "no file system yet");
    // SAFETY: a leaked box, set once.
    unsafe { &*root }
}

fn set_root(root: Arc<Inode>) -> Result<()> {
    ROOT.store(alloc::boxed::Box::leak(try_box(root)?), Ordering::Release);
    Ok(())
}

/// Drops all files that nobody has open. For the end, when no process is left.
pub fn unmount() {
    // Neither by recursion, as trees are deeper than the stack, nor with a list, which would need memory.
    fn directory(inode: &Inode) -> Option<&directory::Directory> {
        match &inode.body {
            Body::Directory(entries) => Some(entries),
            Body::Proc(node) => node.fixed(),
            _ => None,
        }
    }
    let entries_of = |inode: &Inode| directory(inode)?.first();
    while entries_of(root()).is_some() {
        let (mut here, mut next) = (root().clone(), entries_of(root()));
        while let Some(below) = next {
            next = entries_of(&below);
            match &next {
                Some(_) => here = below,
                None => drop(directory(&here).and_then(directory::Directory::take_first)),
            }
        }
    }
}

/// Where the running thread's process starts its paths; before there is one, the root.
fn start() -> Start {
    match try_current() {
        Some(thread) => thread.process.files.start(),
        None => Start { root: root().clone(), here: root().clone() },
    }
}

/// The program at `path`, as the running thread's process sees it.
///
/// # Errors
/// `EACCES`: it is no regular file, or nobody may run it. Those of [`walk`](fn@walk).
pub fn program(path: &[u8]) -> Result<Arc<Inode>> {
    let inode = walk(&start(), path, Links::Follow)?.existing()?;
    if inode.regular().is_none() || !inode.is_executable() {
        return Err(Errno::EACCES);
    }
    Ok(inode)
}

/// All bytes of a regular file.
///
/// # Errors
/// `EINVAL`: it is another; `ENOMEM`; those of [`walk`](fn@walk).
pub fn read_all(path: &[u8]) -> Result<Vec<u8>> {
    let inode = walk(&start(), path, Links::Follow)?.existing()?;
    let regular = inode.regular().ok_or(Errno::EINVAL)?;
    let len = usize::try_from(regular.length()).map_err(|_| Errno::ENOMEM)?;
    let mut bytes = Vec::try_filled(0, len)?;
    Transfer::to_kernel(&mut bytes, |to| regular.read(to, 0))?;
    Ok(bytes)
}

/// A path that leads where `path` leads from the directory `fd`, in the words of the `…at` calls.
///
/// # Errors
/// `EBADF`, `ENOENT`: the path is empty, and may not be.
pub fn path_at(fd: i32, path: Vec<u8>, flags: u32) -> Result<Vec<u8>> {
    if path.first() == Some(&b'/') || fd == linux::AT_FDCWD {
        return Ok(path);
    }
    if path.is_empty() && flags & linux::AT_EMPTY_PATH == 0 {
        return Err(Errno::ENOENT);
    }
    crate::task::current().process.files.get(fd)?;
    let mut from_directory = String::try_format(format_args!("/proc/self/fd/{fd}"))?.into_bytes();
    if !path.is_empty() {
        from_directory.try_push(b'/')?;
        from_directory.try_extend_from_slice(&path)?;
    }
    Ok(from_directory)
}

/// What a descriptor has to map.
#[derive(Debug)]
pub struct Mapping {
    object: Held,
    may_write: bool,
}

impl Mapping {
    /// It from page `first` on.
    pub fn starting_at(&self, first: u64) -> Backing<'_> {
        Backing { object: &self.object, first, may_write: self.may_write }
    }
}

/// What `mmap` maps of `file`.
///
/// # Errors
/// `EBADF`, `EACCES`, `EPERM`: it is sealed; `ENODEV`: it cannot be mapped; `ENOMEM`.
pub fn object_to_map(file: &File, prot: Prot, flags: MapFlags) -> Result<Mapping> {
    if let file::Kind::Path = file.kind {
        return Err(Errno::EBADF);
    }
    let shared = flags.contains(MapFlags::SHARED);
    if !file.reads() || shared && prot.contains(Prot::WRITE) && !file.writes() {
        return Err(Errno::EACCES);
    }
    match &file.inode.body {
        Body::Regular(regular) => {
            const SEALED: u32 = linux::F_SEAL_WRITE | linux::F_SEAL_FUTURE_WRITE;
            let sealed = regular.seals() & SEALED != 0;
            if shared && sealed && prot.contains(Prot::WRITE) {
                return Err(Errno::EPERM);
            }
            let object: Shared<Object> = regular.map().clone();
            Ok(Mapping { object: Held::new(object), may_write: file.writes() && !sealed })
        }
        Body::Device(Device::Zero) => {
            let object = Object::try_new(percpu::cpu(), Object::MAX_PAGES, 0)?;
            Ok(Mapping { object: Held::new(object), may_write: file.writes() })
        }
        _ => Err(Errno::ENODEV),
    }
}
