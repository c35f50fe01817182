//! System V interprocess communication: objects that processes find by keys, and that exist until
//! they are removed.
//!
//! Each kind of object has a table, [`Ids`], in which an object is found by its key or its
//! identifier. As on Linux, the identifier is an index in the table and a sequence number. So the
//! identifier of a removed object stays invalid for a long time.

pub mod msg;
pub mod sem;
pub mod shm;

use crate::errno::{Errno, Result};
use crate::task::current;
use crate::task::ids::{own_object, permit_object};
use crate::wall;
use faultless_bare::heap::try_push;
use faultless_collections::Vec;

/// The key of private objects: each call makes a new object.
pub const PRIVATE: i32 = 0;
/// Flag of `…get`: create the object if it does not exist.
const CREATE: u32 = 0o1000;
/// Flag of `…get`: fail if the object exists.
const EXCLUSIVE: u32 = 0o2000;
/// The bits of an identifier for the index.
const PLACE_BITS: u32 = 15;

/// The time in seconds since 1970.
pub fn seconds() -> u64 {
    wall::now() / 1_000_000_000
}

/// The common part of all objects.
#[derive(Clone, Copy, Debug)]
pub struct Common {
    /// Its key.
    pub key: i32,
    /// The owner.
    pub uid: u32,
    /// The owning group.
    pub gid: u32,
    /// The user and the group that made it.
    pub creator: [u32; 2],
    /// Permissions, and flags of the kind.
    pub mode: u32,
    /// The time of the creation, or of the last change of owner and permissions.
    pub changed: u64,
}

impl Common {
    const fn owners(&self) -> [[u32; 2]; 2] {
        [[self.uid, self.gid], self.creator]
    }

    /// Checks that the caller has the permissions `wanted`.
    fn permit(&self, wanted: u32) -> Result<()> {
        permit_object(self.owners(), self.mode, wanted)
    }
}

#[derive(Debug)]
struct Entry<T> {
    id: i32,
    common: Common,
    object: T,
}

/// The objects of one kind.
#[derive(Debug)]
pub struct Ids<T> {
    places: Vec<Option<Entry<T>>>,
    /// The number of objects made, modulo its width in an identifier.
    given: u16,
    most: usize,
}

impl<T> Ids<T> {
    /// An empty table for at most `most` objects.
    pub const fn new(most: usize) -> Self {
        Self { places: Vec::new(), given: 0, most }
    }

    /// Returns the object for `key`: the existing object if `suits` accepts it, or, depending on
    /// `flags`, a new object made by `make` for an identifier.
    ///
    /// # Errors
    /// `ENOENT`: the object does not exist. `EEXIST`: it exists, against `flags`. `ENOSPC`: too
    /// many objects. `ENOMEM`. `EACCES`: the existing object refuses the permissions in `flags` to
    /// the caller. The errors of `suits` and `make`.
    pub fn get(
        &mut self,
        key: i32,
        flags: u32,
        suits: impl FnOnce(&T) -> Result<()>,
        make: impl FnOnce(i32) -> Result<T>,
    ) -> Result<i32> {
        let found = self.all().find(|(_, common, _)| key != PRIVATE && common.key == key);
        if let Some((id, common, object)) = found {
            if flags & CREATE != 0 && flags & EXCLUSIVE != 0 {
                return Err(Errno::EEXIST);
            }
            suits(object)?;
            // A class of permissions that the caller names is wanted, whichever class it is in.
            return common.permit((flags >> 6 | flags >> 3 | flags) & 7).map(|()| id);
        }
        if key != PRIVATE && flags & CREATE == 0 {
            return Err(Errno::ENOENT);
        }
        if faultless_bare::heap::low() {
            return Err(Errno::ENOMEM);
        }
        let place = match self.places.iter().position(Option::is_none) {
            Some(place) => place,
            None if self.places.len() == self.most => return Err(Errno::ENOSPC),
            None => {
                try_push(&mut self.places, None)?;
                self.places.len() - 1
            }
        };
        let id = i32::from(self.given) << PLACE_BITS | place as i32;
        let ids = &current().process.ids;
        let [uid, gid] = [ids.user().effective, ids.group().effective];
        let (creator, mode, changed) = ([uid, gid], flags & 0o777, seconds());
        let common = Common { key, uid, gid, creator, mode, changed };
        self.places[place] = Some(Entry { id, common, object: make(id)? });
        self.given = (self.given + 1) & i16::MAX as u16;
        Ok(id)
    }

    /// Returns the object with identifier `id`.
    ///
    /// # Errors
    /// `EINVAL`: an unknown identifier.
    pub fn find(&mut self, id: i32) -> Result<(&mut Common, &mut T)> {
        let place = usize::try_from(id).map_err(|_| Errno::EINVAL)? & ((1 << PLACE_BITS) - 1);
        match self.places.get_mut(place) {
            Some(Some(entry)) if entry.id == id => Ok((&mut entry.common, &mut entry.object)),
            _ => Err(Errno::EINVAL),
        }
    }

    /// Finds an object like [`find`](Self::find), for a caller that needs the permissions `wanted`.
    ///
    /// # Errors
    /// `EINVAL`, `EACCES`.
    pub fn find_for(&mut self, id: i32, wanted: u32) -> Result<(&mut Common, &mut T)> {
        let (common, object) = self.find(id)?;
        common.permit(wanted)?;
        Ok((common, object))
    }

    /// Finds an object like [`find`](Self::find), for a caller that changes or removes the object.
    ///
    /// # Errors
    /// `EINVAL`, `EPERM`.
    pub fn find_own(&mut self, id: i32) -> Result<(&mut Common, &mut T)> {
        let (common, object) = self.find(id)?;
        own_object(common.owners())?;
        Ok((common, object))
    }

    /// Returns the identifier of the object at an index.
    ///
    /// # Errors
    /// `EINVAL`: an unused index.
    pub fn at(&self, place: i32) -> Result<i32> {
        let place = usize::try_from(place).map_err(|_| Errno::EINVAL)?;
        match self.places.get(place) {
            Some(Some(entry)) => Ok(entry.id),
            _ => Err(Errno::EINVAL),
        }
    }

    /// Removes the object with identifier `id` from the table.
    ///
    /// # Errors
    /// `EINVAL`: an unknown identifier.
    pub fn remove(&mut self, id: i32) -> Result<T> {
        self.find(id)?;
        let place = id as usize & ((1 << PLACE_BITS) - 1);
        self.places[place].take().map(|entry| entry.object).ok_or(Errno::EINVAL)
    }

    /// All objects.
    pub fn all(&self) -> impl Iterator<Item = (i32, &Common, &T)> {
        self.places.iter().flatten().map(|entry| (entry.id, &entry.common, &entry.object))
    }

    /// Returns the first object from index `place` on, and its index.
    pub fn from(&self, place: usize) -> Option<(usize, &T)> {
        let mut places = self.places.iter().enumerate().skip(place);
        places.find_map(|(place, entry)| Some((place, &entry.as_ref()?.object)))
    }

    /// Returns the highest used index; 0 for an empty table.
    pub fn last_place(&self) -> u64 {
        self.places.iter().rposition(Option::is_some).unwrap_or(0) as u64
    }
}

impl<T> Ids<T> {
    /// Sets owner and permissions.
    ///
    /// # Errors
    /// `EINVAL`: an unknown identifier, or an invalid owner. `EPERM`.
    pub fn set(&mut self, id: i32, uid: u32, gid: u32, mode: u32) -> Result<()> {
        let (common, _) = self.find_own(id)?;
        if uid == u32::MAX || gid == u32::MAX {
            return Err(Errno::EINVAL);
        }
        let mode = common.mode & !0o777 | mode & 0o777;
        *common = Common { uid, gid, mode, changed: seconds(), ..*common };
        Ok(())
    }
}

/// Removes all objects, when the machine ends and no process is left.
pub fn clear() {
    shm::clear();
}
