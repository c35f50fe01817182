//! Directories in memory, and changes of the tree of names.
//!
//! A directory's own lock is held for one lookup, or for one change of its entries. A change of the
//! tree also holds [`TREE`], from its first lookup to its last change, which excludes other
//! changes. Lookups never wait long. Inodes without names are dropped after the locks.

use super::inode::{Body, Inode, Name};
use super::path::NAME_MAX;
use crate::errno::{Errno, Result};
use crate::task::ids::WRITE;
use faultless_bare::heap::try_push;
use faultless_bare::sync::Mutex;
use faultless_collections::{Arc, Map, Slot, Vec};
use linux_raw_sys::general as linux;

/// Held for changes of the tree of names. Taken before any lock of a directory.
static TREE: Mutex<()> = Mutex::new(());

/// Names and their inodes; `None` once the directory was removed.
#[derive(Debug)]
pub struct Directory(Mutex<Option<Map<Name, Arc<Inode>>>>);

impl Default for Directory {
    fn default() -> Self {
        Self(Mutex::new(Some(Map::new())))
    }
}

/// An entry of a listing.
#[derive(Debug)]
pub struct Item {
    /// The name.
    pub name: Name,
    /// The inode number.
    pub number: u64,
    /// The type of the inode, as bits of a mode.
    pub kind: u32,
}

impl Item {
    /// The entry `name` for `inode`.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn try_new(name: &[u8], inode: &Inode) -> Result<Self> {
        Ok(Self { name: Vec::try_from_slice(name)?, number: inode.number, kind: inode.kind() })
    }
}

/// The memory for a new entry.
struct Room {
    slot: Slot<Name, Arc<Inode>>,
    /// The name, for the directory and for the inode.
    names: [Name; 2],
}

impl Room {
    fn try_new(name: &[u8]) -> Result<Self> {
        let names = [Vec::try_from_slice(name)?, Vec::try_from_slice(name)?];
        Ok(Self { slot: Slot::try_new()?, names })
    }
}

impl Directory {
    /// Returns the number of entries.
    pub fn len(&self) -> usize {
        self.0.lock().as_ref().map_or(0, Map::len)
    }

    /// The inode of `name`.
    pub fn get(&self, name: &[u8]) -> Option<Arc<Inode>> {
        self.0.lock().as_ref()?.get(name).cloned()
    }

    /// Adds all entries but `.` and `..` to `items`.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn list(&self, items: &mut Vec<Item>) -> Result<()> {
        let entries = self.0.lock();
        let mut all = entries.iter().flat_map(Map::iter);
        all.try_for_each(|(name, inode)| Ok(try_push(items, Item::try_new(name, inode)?)?))
    }

    /// The inode of the first entry.
    pub fn first(&self) -> Option<Arc<Inode>> {
        self.0.lock().as_ref()?.first().map(|(_, inode)| inode.clone())
    }

    /// Removes the first entry, when the machine ends.
    pub fn take_first(&self) -> Option<Arc<Inode>> {
        self.0.lock().as_mut()?.take_first().map(|(_, inode, _)| inode)
    }

    /// Makes a name lead to `inode`, and returns its old inode, and the second copy of the name.
    ///
    /// # Errors
    /// `ENOENT`: the directory was removed.
    fn set(&self, room: Room, inode: Arc<Inode>) -> Result<(Option<Arc<Inode>>, Name)> {
        let mut entries = self.0.lock();
        let entries = entries.as_mut().ok_or(Errno::ENOENT)?;
        let [name, again] = room.names;
        Ok((entries.insert(room.slot, name, inode), again))
    }

    fn remove(&self, name: &[u8]) -> Option<Arc<Inode>> {
        self.0.lock().as_mut()?.remove(name)
    }

    /// Removes the directory, which is empty: entries can no longer be added.
    fn close(&self) -> Result<()> {
        let mut entries = self.0.lock();
        if entries.as_ref().is_some_and(|entries| !entries.is_empty()) {
            return Err(Errno::ENOTEMPTY);
        }
        *entries = None;
        Ok(())
    }
}

/// Adds `inode` as `name` to a part of `/proc`, in which programs cannot add entries.
///
/// # Errors
/// `ENOMEM`.
pub(super) fn put(
    entries: &Directory,
    directory: &Arc<Inode>,
    name: &[u8],
    inode: &Arc<Inode>,
) -> Result<()> {
    let (_, name) = entries.set(Room::try_new(name)?, inode.clone())?;
    arrive(directory, name, inode);
    Ok(())
}

/// Returns the entries of a directory that can be changed.
fn entries(directory: &Inode) -> Result<&Directory> {
    match &directory.body {
        Body::Directory(entries) => Ok(entries),
        Body::Proc(_) => Err(Errno::EPERM),
        _ => Err(Errno::ENOTDIR),
    }
}

fn check_name(name: &[u8]) -> Result<()> {
    match name {
        b"" | b"." | b".." => Err(Errno::EINVAL),
        name if name.len() > NAME_MAX => Err(Errno::ENAMETOOLONG),
        _ if faultless_bare::heap::low() => Err(Errno::ENOMEM),
        _ => Ok(()),
    }
}

/// Gives `inode` a (further) name.
///
/// # Errors
/// `EEXIST`, `ENOTDIR`, `ENOENT`: the directory was removed; `ENOMEM`.
pub fn link(directory: &Arc<Inode>, name: &[u8], inode: &Arc<Inode>) -> Result<()> {
    check_name(name)?;
    let entries = entries(directory)?;
    let room = Room::try_new(name)?;
    let _tree = TREE.lock();
    if entries.get(name).is_some() {
        return Err(Errno::EEXIST);
    }
    let (_, name) = entries.set(room, inode.clone())?;
    arrive(directory, name, inode);
    directory.touch();
    Ok(())
}

/// Removes the entry `name` if `check` allows the removal for its inode.
fn remove(
    directory: &Arc<Inode>,
    name: &[u8],
    check: impl FnOnce(&Inode) -> Result<()>,
) -> Result<()> {
    let entries = entries(directory)?;
    let gone = {
        let _tree = TREE.lock();
        let inode = entries.get(name).ok_or(Errno::ENOENT)?;
        check(&inode)?;
        let gone = entries.remove(name);
        depart(directory, name, &inode);
        directory.touch();
        (gone, inode)
    };
    drop(gone);
    Ok(())
}

/// Removes a name of an inode that is not a directory.
///
/// # Errors
/// `ENOENT`, `EISDIR`, `ENOTDIR`: the path requires a directory.
pub fn unlink(directory: &Arc<Inode>, name: &[u8], must_be_directory: bool) -> Result<()> {
    remove(directory, name, |inode| match inode.is_directory() {
        true => Err(Errno::EISDIR),
        false if must_be_directory => Err(Errno::ENOTDIR),
        false => Ok(()),
    })
}

/// Removes an empty directory.
///
/// # Errors
/// `ENOENT`, `ENOTDIR`, `ENOTEMPTY`, `EBUSY`.
pub fn remove_directory(directory: &Arc<Inode>, name: &[u8]) -> Result<()> {
    remove(directory, name, |inode| match &inode.body {
        Body::Directory(inner) => inner.close(),
        Body::Proc(_) if inode.is_directory() => Err(Errno::EBUSY),
        _ => Err(Errno::ENOTDIR),
    })
}

/// How to move a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Move {
    /// Replace the inode with the new name.
    Replace,
    /// Fail if something has the new name.
    Keep,
    /// Exchange the two.
    Exchange,
}

/// Moves a name, if `permit` permits to move the inode, and to replace the inode that has the new
/// name.
///
/// # Errors
/// As `rename`.
pub fn rename(
    (from, old): (&Arc<Inode>, &[u8]),
    (to, new): (&Arc<Inode>, &[u8]),
    how: Move,
    permit: impl FnOnce(&Inode, Option<&Inode>) -> Result<()>,
) -> Result<()> {
    let (source, target) = (entries(from)?, entries(to)?);
    check_name(new)?;
    // For both names: `old` gets a new entry if the two are exchanged.
    let rooms = (Room::try_new(new)?, Room::try_new(old)?);
    let gone = {
        let _tree = TREE.lock();
        let inode = source.get(old).ok_or(Errno::ENOENT)?;
        let other = target.get(new);
        if let Body::Proc(_) = inode.body {
            return Err(Errno::EBUSY);
        }
        match (&other, how) {
            (Some(_), Move::Keep) => return Err(Errno::EEXIST),
            (None, Move::Exchange) => return Err(Errno::ENOENT),
            _ => {}
        }
        if let Some(other) = &other {
            if Arc::ptr_eq(other, &inode) {
                return Ok(());
            }
            let is_within = |outer: &Arc<Inode>, inner: &Arc<Inode>| {
                outer.is_directory() && is_inside(inner, outer)
            };
            if how == Move::Exchange && is_within(other, from) {
                return Err(Errno::EINVAL);
            }
        }
        if inode.is_directory() && is_inside(to, &inode) {
            return Err(Errno::EINVAL);
        }
        permit(&inode, other.as_deref())?;
        if let Some(other) = other.as_ref().filter(|_| how == Move::Replace) {
            match (inode.is_directory(), other.is_directory()) {
                (true, false) => return Err(Errno::ENOTDIR),
                (false, true) => return Err(Errno::EISDIR),
                _ => {}
            }
        }
        // The `..` of a directory that gets another parent changes.
        if !Arc::ptr_eq(from, to) {
            let exchanged = other.as_ref().filter(|_| how == Move::Exchange);
            for moved in [Some(&inode), exchanged].into_iter().flatten() {
                if moved.is_directory() {
                    moved.permit(WRITE)?;
                }
            }
        }
        if how == Move::Exchange {
            // Checked to exist.
            let other = other.as_ref().ok_or(Errno::ENOENT)?;
            let (_, new) = target.set(rooms.0, inode.clone())?;
            let (_, old) = source.set(rooms.1, other.clone())?;
            relocate(from, to, new, &inode);
            relocate(to, from, old, other);
        } else {
            match other.as_ref().map(|other| (&other.body, other.is_directory())) {
                Some((Body::Directory(inner), _)) if inode.is_directory() => inner.close()?,
                Some((_, true)) => return Err(Errno::EBUSY),
                _ => {}
            }
            // The new name exists at any time.
            let (_, name) = target.set(rooms.0, inode.clone())?;
            source.remove(old);
            if let Some(other) = &other {
                depart(to, new, other);
            }
            relocate(from, to, name, &inode);
        }
        from.touch();
        to.touch();
        (inode, other)
    };
    drop(gone);
    Ok(())
}

/// Returns whether `inner` is `outer` or below `outer`.
fn is_inside(inner: &Arc<Inode>, outer: &Arc<Inode>) -> bool {
    let mut here = inner.clone();
    loop {
        if Arc::ptr_eq(&here, outer) {
            return true;
        }
        match Inode::parent(&here) {
            Ok(parent) if !Arc::ptr_eq(&parent, &here) => here = parent,
            _ => return false,
        }
    }
}

/// Counts a new name. A directory's `..` is a link to its parent.
fn arrive(directory: &Arc<Inode>, name: Name, inode: &Arc<Inode>) {
    if inode.is_directory() {
        inode.change(|meta| meta.links = 2);
        directory.change(|meta| meta.links += 1);
    }
    inode.enter(directory, name);
}

fn depart(directory: &Arc<Inode>, name: &[u8], inode: &Arc<Inode>) {
    if inode.is_directory() {
        inode.change(|meta| meta.links = 0);
        directory.change(|meta| meta.links -= 1);
    } else {
        inode.change(|meta| meta.links -= 1);
    }
    inode.leave(directory, name);
}

fn relocate(from: &Arc<Inode>, to: &Arc<Inode>, name: Name, inode: &Arc<Inode>) {
    if inode.is_directory() {
        from.change(|meta| meta.links -= 1);
        to.change(|meta| meta.links += 1);
    }
    inode.change(|_| ());
    inode.enter(to, name);
}

/// Adds a name to an inode that has a name.
///
/// # Errors
/// `EPERM`: a directory has only one name. `EMLINK`; otherwise as [`link`].
pub fn link_again(directory: &Arc<Inode>, name: &[u8], inode: &Arc<Inode>) -> Result<()> {
    if inode.is_directory() {
        return Err(Errno::EPERM);
    }
    if let Body::Proc(_) = inode.body {
        return Err(Errno::EXDEV);
    }
    if inode.meta().links >= u32::from(u16::MAX) {
        return Err(Errno::EMLINK);
    }
    // Counted first: an inode with a name has a link.
    inode.change(|meta| meta.links += 1);
    link(directory, name, inode).inspect_err(|_| inode.change(|meta| meta.links -= 1))
}

/// Makes a directory.
///
/// # Errors
/// As [`link`].
pub fn make_directory(directory: &Arc<Inode>, name: &[u8], mode: u32) -> Result<Arc<Inode>> {
    let inode = Inode::try_new(Body::Directory(Directory::default()), mode)?;
    inode.inherit_group(directory);
    link(directory, name, &inode)?;
    Ok(inode)
}

/// `d_type` for the type in a mode.
pub const fn listed_type(kind: u32) -> u8 {
    ((kind & linux::S_IFMT) >> 12) as u8
}
