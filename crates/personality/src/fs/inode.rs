//! Inodes: files of any kind, apart from their names.

use super::device::Device;
use super::directory::Directory;
use super::live::Live;
use super::path::PATH_MAX;
use super::pipe::Pipe;
use super::regular::Regular;
use crate::errno::{Errno, Result};
use crate::task::ids;
use crate::wall;
use alloc::boxed::Box;
use core::fmt;
use core::mem;
use core::sync::atomic::{AtomicU64, Ordering};
use faultless::PAGE_SIZE;
use faultless_bare::sync::Mutex;
use faultless_collections::{Arc, Map, Slot, String, Vec, Weak};
use faultless_disk::Extent;
use linux_raw_sys::general as linux;

/// The bits of a mode by which a program runs as another user or group.
const SET_IDS: u32 = linux::S_ISUID | linux::S_ISGID;

/// A name in a directory, as bytes.
pub type Name = Vec<u8>;

/// The kind and contents of an inode.
#[derive(Debug)]
pub enum Body {
    /// A directory in memory.
    Directory(Directory),
    /// A regular file.
    Regular(Regular),
    /// A symbolic link.
    Link(Vec<u8>),
    /// A named or anonymous pipe.
    Pipe(Arc<Pipe>),
    /// A device.
    Device(Device),
    /// An inode without a name, such as a socket, and its kind.
    Anonymous(&'static str),
    /// A part of `/proc` or `/sys`.
    Proc(Box<dyn Live>),
}

/// The target of a link.
#[derive(Debug)]
pub enum Target {
    /// The target of this path.
    Path(Vec<u8>),
    /// This inode, independent of its path.
    Inode(Arc<Inode>),
}

/// The metadata of an inode.
#[derive(Clone, Copy, Debug)]
pub struct Meta {
    /// Permissions, without the type.
    pub mode: u32,
    /// The owner.
    pub uid: u32,
    /// The owning group.
    pub gid: u32,
    /// The number of names.
    pub links: u32,
    /// Access time; here and below in nanoseconds since 1970.
    pub accessed: u64,
    /// Time of the last change of the contents.
    pub modified: u64,
    /// Time of the last change of contents or metadata.
    pub changed: u64,
    /// Time of creation.
    pub born: u64,
}

impl Meta {
    /// Returns the bits of the mode that a change by the running process clears: the set-user-ID
    /// bit, and the set-group-ID bit if the group may execute the file or the process may not set
    /// the bit.
    pub fn lost_set_ids(&self) -> u32 {
        let loses_group = self.mode & linux::S_IXGRP != 0 || !ids::may_set_group_id(self.gid);
        self.mode & (linux::S_ISUID | if loses_group { linux::S_ISGID } else { 0 })
    }
}

/// The last place of an inode in the tree of names.
#[derive(Debug, Default)]
struct Place {
    directory: Weak<Inode>,
    name: Name,
    /// Set if the inode has left this place.
    left: bool,
}

/// A file of any kind, apart from its names.
pub struct Inode {
    /// Its number.
    pub number: u64,
    /// The kind and contents.
    pub body: Body,
    meta: Mutex<Meta>,
    place: Mutex<Place>,
}

impl fmt::Debug for Inode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "inode {}: {:?}", self.number, self.body)
    }
}

/// The regular files, by the tags of their objects.
static TAGGED: Mutex<Map<u64, Weak<Inode>>> = Mutex::new(Map::new());

/// Returns the path of the regular file whose object has this tag; `None` for an unknown tag.
///
/// # Errors
/// `ENOMEM`.
pub fn path_of_tag(tag: u64) -> Result<Option<Vec<u8>>> {
    let Some(inode) = TAGGED.lock().get(&tag).map(Weak::upgrade) else { return Ok(None) };
    let path = match inode {
        Some(inode) => Inode::path(&inode),
        None => Ok(Vec::try_from_slice(b"/ (deleted)")?),
    };
    match path {
        Err(Errno::ENAMETOOLONG) => Ok(Some(Vec::try_from_slice(b"//toolong")?)),
        path => path.map(Some),
    }
}

/// Returns the regular file whose object has this tag; `None` if there is no such file any more.
pub fn inode_of_tag(tag: u64) -> Option<Arc<Inode>> {
    TAGGED.lock().get(&tag)?.upgrade()
}

/// Returns the first tag after `tag`, and its regular file; the file is `None` if it is being
/// dropped.
pub fn next_tagged(tag: u64) -> Option<(u64, Option<Arc<Inode>>)> {
    let tagged = TAGGED.lock();
    tagged.after(Some(&tag)).map(|(&tag, inode)| (tag, inode.upgrade()))
}

fn new_number() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(1);
    LAST.fetch_add(1, Ordering::Relaxed) + 1
}

impl Inode {
    /// A new inode, without a name.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn try_new(body: Body, mode: u32) -> Result<Arc<Self>> {
        if faultless_bare::heap::low() {
            return Err(Errno::ENOMEM);
        }
        Self::numbered(new_number(), body, mode)
    }

    /// A new regular file, without a name.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn try_new_regular(mode: u32) -> Result<Arc<Self>> {
        Self::try_new_with(mode, Regular::try_new)
    }

    /// A new regular file with contents on the disk, without a name.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn try_new_on_disk(mode: u32, extent: Extent) -> Result<Arc<Self>> {
        Self::try_new_with(mode, |tag| Regular::try_of_extent(extent, tag))
    }

    fn try_new_with(mode: u32, make: impl FnOnce(u64) -> Result<Regular>) -> Result<Arc<Self>> {
        if faultless_bare::heap::low() {
            return Err(Errno::ENOMEM);
        }
        let number = new_number();
        let slot = Slot::try_new()?;
        let inode = Self::numbered(number, Body::Regular(make(number)?), mode)?;
        TAGGED.lock().insert(slot, number, Arc::downgrade(&inode));
        Ok(inode)
    }

    /// An inode with this number.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn numbered(number: u64, body: Body, mode: u32) -> Result<Arc<Self>> {
        let now = wall::now();
        let [uid, gid] = if let Body::Proc(_) = body { [0; 2] } else { ids::owner() };
        let meta = Meta {
            mode: mode & 0o7777,
            uid,
            gid,
            links: 1,
            accessed: now,
            modified: now,
            changed: now,
            born: now,
        };
        let (meta, place) = (Mutex::new(meta), Mutex::default());
        Ok(Arc::try_new(Self { number, body, meta, place })?)
    }

    /// Its metadata.
    pub fn meta(&self) -> Meta {
        *self.meta.lock()
    }

    /// Changes the metadata.
    pub fn change(&self, change: impl FnOnce(&mut Meta)) {
        let mut meta = self.meta.lock();
        change(&mut meta);
        meta.changed = wall::now();
    }

    /// Changes the metadata, unless `change` fails: it contains the checks of the change.
    ///
    /// # Errors
    /// The errors of `change`.
    pub fn try_change(&self, change: impl FnOnce(&mut Meta) -> Result<()>) -> Result<()> {
        let mut meta = self.meta.lock();
        let mut changed = *meta;
        change(&mut changed)?;
        changed.changed = wall::now();
        *meta = changed;
        Ok(())
    }

    /// Checks that the running process has the permissions `wanted`, bits of a mode's class.
    ///
    /// # Errors
    /// `EACCES`.
    pub fn permit(&self, wanted: u32) -> Result<()> {
        self.permit_by(ids::permit, wanted)
    }

    /// Checks like [`permit`](Self::permit), by `check`: [`ids::permit`] or [`ids::permit_real`].
    ///
    /// # Errors
    /// `EACCES`.
    pub fn permit_by(
        &self,
        check: fn([u32; 2], u32, u32) -> Result<()>,
        wanted: u32,
    ) -> Result<()> {
        let meta = self.meta();
        let permitted = check([meta.uid, meta.gid], meta.mode, wanted);
        match &self.body {
            Body::Proc(node) if permitted.is_err() && node.is_always_permitted() => Ok(()),
            _ => permitted,
        }
    }

    /// Notes that the contents were changed. As on Linux, a change by another user than root clears
    /// the set-user-ID bit and the set-group-ID bit of a file.
    pub fn touch(&self) {
        let is_file = self.regular().is_some();
        self.change(|meta| {
            if is_file && meta.mode & SET_IDS != 0 && !ids::is_file_root() {
                meta.mode &= !meta.lost_set_ids();
            }
            meta.modified = wall::now();
        });
    }

    /// Gives a new inode the group of its `directory`, if the directory has the set-group-ID bit. A
    /// new directory has the bit then, too.
    pub fn inherit_group(&self, directory: &Self) {
        const EXECUTED: u32 = linux::S_ISGID | linux::S_IXGRP;
        let above = directory.meta();
        if above.mode & linux::S_ISGID == 0 {
            return;
        }
        let (is_directory, own_group) = (self.is_directory(), ids::may_set_group_id(above.gid));
        self.change(|meta| {
            meta.gid = above.gid;
            if is_directory {
                meta.mode |= linux::S_ISGID;
            } else if meta.mode & EXECUTED == EXECUTED && !own_group {
                meta.mode &= !linux::S_ISGID;
            }
        });
    }

    /// Returns the contents of a regular file.
    pub const fn regular(&self) -> Option<&Regular> {
        match &self.body {
            Body::Regular(regular) => Some(regular),
            _ => None,
        }
    }

    /// Returns the type, as bits of a mode.
    pub fn kind(&self) -> u32 {
        match &self.body {
            Body::Directory(_) => linux::S_IFDIR,
            Body::Regular(_) => linux::S_IFREG,
            Body::Link(_) => linux::S_IFLNK,
            Body::Pipe(_) => linux::S_IFIFO,
            Body::Device(_) => linux::S_IFCHR,
            Body::Anonymous("socket") => linux::S_IFSOCK,
            Body::Anonymous(_) => 0,
            Body::Proc(node) => node.kind(),
        }
    }

    /// Returns whether the inode is a directory.
    pub fn is_directory(&self) -> bool {
        self.kind() == linux::S_IFDIR
    }

    /// Returns whether the inode is a symbolic link.
    pub fn is_link(&self) -> bool {
        self.kind() == linux::S_IFLNK
    }

    /// Returns whether the inode has any execute permission.
    pub fn is_executable(&self) -> bool {
        self.meta().mode & 0o111 != 0
    }

    /// Returns the size in bytes.
    pub fn length(&self) -> u64 {
        match &self.body {
            Body::Regular(regular) => regular.length(),
            Body::Link(path) => path.len() as u64,
            Body::Directory(directory) => 20 * (directory.len() as u64 + 2),
            _ => 0,
        }
    }

    /// Returns the number of used blocks of 512 bytes.
    pub fn blocks(&self) -> u64 {
        match &self.body {
            Body::Regular(regular) => regular.pages() * (PAGE_SIZE / 512),
            _ => 0,
        }
    }

    /// Returns the target of a link.
    ///
    /// # Errors
    /// `EINVAL`: the inode is no link. `ENOENT`: its process has ended.
    pub fn target(&self) -> Result<Target> {
        match &self.body {
            Body::Link(path) => Ok(Target::Path(path.try_clone()?)),
            Body::Proc(node) => node.target(),
            _ => Err(Errno::EINVAL),
        }
    }

    /// The inode of `name`, neither `.` nor `..`, in this directory.
    ///
    /// # Errors
    /// `ENOTDIR`, `ENOENT`.
    pub fn lookup(&self, name: &[u8]) -> Result<Arc<Self>> {
        match &self.body {
            Body::Directory(directory) => directory.get(name).ok_or(Errno::ENOENT),
            Body::Proc(node) => node.lookup(name),
            _ => Err(Errno::ENOTDIR),
        }
    }

    /// Returns the parent directory; the root is its own parent.
    ///
    /// # Errors
    /// `ENOENT`: the parent is gone. `ENOMEM`.
    pub fn parent(this: &Arc<Self>) -> Result<Arc<Self>> {
        if let Body::Proc(node) = &this.body
            && let Some(parent) = node.parent()?
        {
            return Ok(parent);
        }
        this.place.lock().directory.upgrade().ok_or(Errno::ENOENT)
    }

    /// Records a new place.
    pub fn enter(&self, directory: &Arc<Self>, name: Name) {
        let directory = Arc::downgrade(directory);
        let old = mem::replace(&mut *self.place.lock(), Place { directory, name, left: false });
        drop(old);
    }

    /// Records that the inode has left this place.
    pub fn leave(&self, directory: &Arc<Self>, name: &[u8]) {
        let mut place = self.place.lock();
        if place.directory.as_ptr() == Arc::as_ptr(directory) && *place.name == *name {
            place.left = true;
        }
    }

    /// Names an inode outside the tree; `left` is set if the inode was in the tree before.
    pub fn call(&self, name: Name, left: bool) {
        *self.place.lock() = Place { directory: Weak::new(), name, left };
    }

    /// Returns the present or last path.
    ///
    /// # Errors
    /// `ENAMETOOLONG`: the nesting of directories exceeds the maximum path length. `ENOMEM`.
    pub fn path(this: &Arc<Self>) -> Result<Vec<u8>> {
        let written = |text| Ok(String::try_format(text)?.into_bytes());
        match &this.body {
            Body::Anonymous("socket") => return written(format_args!("socket:[{}]", this.number)),
            Body::Anonymous(kind) => return written(format_args!("anon_inode:{kind}")),
            Body::Pipe(_) if this.place.lock().name.is_empty() => {
                return written(format_args!("pipe:[{}]", this.number));
            }
            _ => {}
        }
        let mut names = Vec::new();
        let mut len = 0;
        let mut here = this.clone();
        let mut left = false;
        loop {
            let above = match &here.body {
                Body::Proc(node) => node.parent()?.map(|parent| (node, parent)),
                _ => None,
            };
            let (name, parent) = match above {
                Some((node, parent)) => (node.name()?, Some(parent)),
                None => {
                    let place = here.place.lock();
                    left |= place.left;
                    (place.name.try_clone()?, place.directory.upgrade())
                }
            };
            if parent.as_ref().is_some_and(|parent| Arc::ptr_eq(parent, &here)) {
                break;
            }
            len += 1 + name.len();
            if len >= PATH_MAX {
                return Err(Errno::ENAMETOOLONG);
            }
            names.try_push(name)?;
            match parent {
                Some(parent) => here = parent,
                None => break,
            }
        }
        const DELETED: &[u8] = b" (deleted)";
        let mut path = Vec::try_with_capacity(len.max(1) + DELETED.len())?;
        for name in names.iter().rev() {
            path.try_push(b'/')?;
            path.try_extend_from_slice(name)?;
        }
        if path.is_empty() {
            path.try_push(b'/')?;
        }
        if left {
            path.try_extend_from_slice(DELETED)?;
        }
        Ok(path)
    }
}

impl Drop for Inode {
    fn drop(&mut self) {
        if let Body::Regular(_) = self.body {
            TAGGED.lock().remove(&self.number);
        }
    }
}
