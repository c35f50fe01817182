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

/// Removes the entry `name` if `permit` permits the removal of its inode, and `close` succeeds.
fn remove(
    directory: &Arc<Inode>,
    name: &[u8],
    permit: impl FnOnce(&Inode) -> Result<()>,
    close: impl FnOnce(&Inode) -> Result<()>,
) -> Result<()> {
    let entries = match entries(directory) {
        Ok(entries) => entries,
        // As on Linux, the errors of the inode come first.
        Err(errno) => return permit(&*directory.lookup(name)?).and(Err(errno)),
    };
    let gone = {
        let _tree = TREE.lock();
        let inode = entries.get(name).ok_or(Errno::ENOENT)?;
        permit(&inode)?;
        close(&inode)?;
        let gone = entries.remove(name);
        depart(directory, name, &inode);
        directory.touch();
        (gone, inode)
    };
    drop(gone);
    Ok(())
}

/// Removes a name of an inode that is not a directory, if `permit` permits the removal. `slash` is
/// set if the path ends in a slash.
///
/// # Errors
/// `ENOENT`, `EISDIR`, `ENOTDIR`: the path requires a directory. The errors of `permit`.
pub fn unlink(
    directory: &Arc<Inode>,
    name: &[u8],
    slash: bool,
    permit: impl FnOnce(&Inode) -> Result<()>,
) -> Result<()> {
    let permit = |inode: &Inode| match inode.is_directory() {
        false if slash => Err(Errno::ENOTDIR),
        false => permit(inode),
        true if slash => Err(Errno::EISDIR),
        true => permit(inode).and(Err(Errno::EISDIR)),
    };
    remove(directory, name, permit, |inode| match inode.body {
        Body::Proc(_) => Err(Errno::EPERM),
        _ => Ok(()),
    })
}

/// Removes an empty directory, if `permit` permits the removal.
///
/// # Errors
/// `ENOENT`, `ENOTDIR`, `ENOTEMPTY`, `EBUSY`. The errors of `permit`.
pub fn remove_directory(
    directory: &Arc<Inode>,
    name: &[u8],
    permit: impl FnOnce(&Inode) -> Result<()>,
) -> Result<()> {
    let permit = |inode: &Inode| {
        permit(inode)?;
        if inode.is_directory() { Ok(()) } else { Err(Errno::ENOTDIR) }
    };
    remove(directory, name, permit, |inode| match &inode.body {
        Body::Directory(inner) => inner.close(),
        _ => Err(Errno::EBUSY),
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

/// The old or the new name of a move.
#[derive(Clone, Copy, Debug)]
pub struct End<'a> {
    /// The directory that contains the name.
    pub directory: &'a Arc<Inode>,
    /// The name.
    pub name: &'a [u8],
    /// Set if the path ends in a slash.
    pub slash: bool,
}

/// Moves a name, if `permit` permits to move the inode, and to replace the inode that has the new
/// name.
///
/// # Errors
/// As `rename`.
pub fn rename(
    before: End<'_>,
    after: End<'_>,
    how: Move,
    permit: impl FnOnce(&Inode, Option<&Inode>) -> Result<()>,
) -> Result<()> {
    let (from, old) = (before.directory, before.name);
    let (to, new) = (after.directory, after.name);
    let (source, target) = (entries(from)?, entries(to)?);
    check_name(new)?;
    // For both names: `old` gets a new entry if the two are exchanged.
    let rooms = (Room::try_new(new)?, Room::try_new(old)?);
    let gone = {
        let _tree = TREE.lock();
        let inode = source.get(old).ok_or(Errno::ENOENT)?;
        let other = target.get(new);
        match (&other, how) {
            (Some(_), Move::Keep) => return Err(Errno::EEXIST),
            (None, Move::Exchange) => return Err(Errno::ENOENT),
            _ => {}
        }
        // A path that ends in a slash requires a directory.
        let other_is_directory = other.as_ref().is_some_and(|other| other.is_directory());
        let after_fits = match how {
            Move::Exchange => other_is_directory,
            Move::Replace | Move::Keep => inode.is_directory(),
        };
        if before.slash && !inode.is_directory() || after.slash && !after_fits {
            return Err(Errno::ENOTDIR);
        }
        let is_within = |outer: &Arc<Inode>, inner: &Arc<Inode>| {
            outer.is_directory() && is_inside(inner, outer)
        };
        if is_within(&inode, to) {
            return Err(Errno::EINVAL);
        }
        if let Some(other) = &other {
            if is_within(other, from) {
                let is_exchange = how == Move::Exchange;
                return Err(if is_exchange { Errno::EINVAL } else { Errno::ENOTEMPTY });
            }
            if Arc::ptr_eq(other, &inode) {
                return Ok(());
            }
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
        // A mount point keeps its name.
        let is_mounted = |inode: &Inode| matches!(inode.body, Body::Proc(_));
        if is_mounted(&inode) || other.as_ref().is_some_and(|other| is_mounted(other)) {
            return Err(Errno::EBUSY);
        }
        if how == Move::Exchange {
            // Checked to exist.
            let other = other.as_ref().ok_or(Errno::ENOENT)?;
            let (_, new) = target.set(rooms.0, inode.clone())?;
            let (_, old) = source.set(rooms.1, other.clone())?;
            relocate(from, to, new, &inode);
            relocate(to, from, old, other);
        } else {
            if let Some(Body::Directory(inner)) = other.as_ref().map(|other| &other.body) {
                inner.close()?;
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
