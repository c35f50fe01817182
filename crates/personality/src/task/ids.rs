//! The user and group ids of a process, and the permissions derived from the ids.
//!
//! Linux has ids for each thread. Here the ids belong to the process: C libraries set the ids of
//! all threads at once. The effective user id 0 has all capabilities; other ids have no capability.
//! As on Linux, the capabilities for files follow the user id for files.

use super::process::Process;
use super::thread::{current, try_current};
use crate::errno::{Errno, Result};
use core::sync::atomic::{AtomicBool, Ordering};
use faultless_bare::sync::Mutex;
use faultless_collections::Vec;

/// The id of root.
pub const ROOT: u32 = 0;
/// As an argument: the id stays.
pub const SAME: u32 = u32::MAX;
/// The permission to read, as a bit of a mode's class.
pub const READ: u32 = 4;
/// The permission to write.
pub const WRITE: u32 = 2;
/// The permission to execute a file, or to look names up in a directory.
pub const EXECUTE: u32 = 1;

/// The user ids of a process, or the group ids.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Set {
    /// The id of the user who started the process.
    pub real: u32,
    /// The id for permission checks.
    pub effective: u32,
    /// An earlier effective id, to which the process may return.
    pub saved: u32,
    /// The id for files.
    pub file: u32,
}

impl Set {
    fn has(&self, id: u32) -> bool {
        [self.real, self.effective, self.saved].contains(&id)
    }

    /// `setuid(id)`.
    ///
    /// # Errors
    /// `EPERM`.
    pub fn set(&mut self, id: u32, privileged: bool) -> Result<()> {
        if privileged {
            *self = Self { real: id, effective: id, saved: id, file: id };
        } else if id == self.real || id == self.saved {
            (self.effective, self.file) = (id, id);
        } else {
            return Err(Errno::EPERM);
        }
        Ok(())
    }

    /// `setreuid(real, effective)`.
    ///
    /// # Errors
    /// `EPERM`.
    pub fn set_pair(&mut self, real: u32, effective: u32, privileged: bool) -> Result<()> {
        let old = *self;
        let may_real = real == SAME || real == old.real || real == old.effective;
        let may = privileged || may_real && (effective == SAME || old.has(effective));
        if !may {
            return Err(Errno::EPERM);
        }
        if real != SAME {
            self.real = real;
        }
        if effective != SAME {
            self.effective = effective;
        }
        if real != SAME || effective != SAME && effective != old.real {
            self.saved = self.effective;
        }
        self.file = self.effective;
        Ok(())
    }

    /// `setresuid(real, effective, saved)`.
    ///
    /// # Errors
    /// `EPERM`.
    pub fn set_all(&mut self, ids: [u32; 3], privileged: bool) -> Result<()> {
        if !privileged && ids.iter().any(|&id| id != SAME && !self.has(id)) {
            return Err(Errno::EPERM);
        }
        let places = [&mut self.real, &mut self.effective, &mut self.saved];
        for (place, id) in places.into_iter().zip(ids) {
            if id != SAME {
                *place = id;
            }
        }
        self.file = self.effective;
        Ok(())
    }

    /// `setfsuid(id)`. Returns the id before.
    pub fn set_file(&mut self, id: u32, privileged: bool) -> u32 {
        let before = self.file;
        if privileged && id != SAME || self.has(id) {
            self.file = id;
        }
        before
    }
}

/// The ids of a process.
#[derive(Debug)]
pub struct Ids {
    /// The user ids and the group ids.
    sets: Mutex<[Set; 2]>,
    groups: Mutex<Vec<u32>>,
    /// Set if the id for files is not root's; an atomic for frequent reads.
    is_checked: AtomicBool,
    /// Whether other processes of the user may look into the process (`PR_SET_DUMPABLE`). A process
    /// that was root may still have what only root may see.
    is_dumpable: AtomicBool,
}

impl Default for Ids {
    fn default() -> Self {
        let (sets, groups) = (Mutex::new([Set::default(); 2]), Mutex::new(Vec::new()));
        let (is_checked, is_dumpable) = (AtomicBool::new(false), AtomicBool::new(true));
        Self { sets, groups, is_checked, is_dumpable }
    }
}

impl Ids {
    /// The user ids.
    pub fn user(&self) -> Set {
        self.sets.lock()[0]
    }

    /// The group ids.
    pub fn group(&self) -> Set {
        self.sets.lock()[1]
    }

    /// Returns whether the process has all capabilities.
    pub fn is_privileged(&self) -> bool {
        self.user().effective == ROOT
    }

    /// Changes the user ids, or with `groups` the group ids: `change` gets them, and whether the
    /// process is privileged.
    ///
    /// # Errors
    /// The errors of `change`.
    pub fn change<R>(
        &self,
        groups: bool,
        change: impl FnOnce(&mut Set, bool) -> Result<R>,
    ) -> Result<R> {
        let mut sets = self.sets.lock();
        let privileged = sets[0].effective == ROOT;
        let rights = |sets: &[Set; 2]| sets.map(|set| [set.effective, set.file]);
        let before = rights(&sets);
        let result = change(&mut sets[usize::from(groups)], privileged)?;
        if rights(&sets) != before {
            self.set_dumpable(false);
        }
        self.is_checked.store(sets[0].file != ROOT, Ordering::Relaxed);
        Ok(result)
    }

    /// Whether other processes of the user may look into the process.
    pub fn is_dumpable(&self) -> bool {
        self.is_dumpable.load(Ordering::Relaxed)
    }

    /// Sets whether other processes of the user may look into the process.
    pub fn set_dumpable(&self, dumpable: bool) {
        self.is_dumpable.store(dumpable, Ordering::Relaxed);
    }

    /// The supplementary groups.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn groups(&self) -> Result<Vec<u32>> {
        Ok(self.groups.lock().try_clone()?)
    }

    /// Sets the supplementary groups.
    pub fn set_groups(&self, groups: Vec<u32>) {
        *self.groups.lock() = groups;
    }

    /// Takes over the ids of `other`, as a new process does.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn copy_from(&self, other: &Self) -> Result<()> {
        let (sets, groups) = (*other.sets.lock(), other.groups()?);
        *self.sets.lock() = sets;
        *self.groups.lock() = groups;
        self.is_checked.store(sets[0].file != ROOT, Ordering::Relaxed);
        self.set_dumpable(other.is_dumpable());
        Ok(())
    }

    /// Changes the ids as `execve` does.
    pub fn execute(&self) {
        let mut sets = self.sets.lock();
        for set in sets.iter_mut() {
            (set.saved, set.file) = (set.effective, set.effective);
        }
        self.set_dumpable(sets.iter().all(|set| set.effective == set.real));
        self.is_checked.store(sets[0].file != ROOT, Ordering::Relaxed);
    }

    /// Returns whether a file with the permissions `mode`, owned by `owner` (a user and a group),
    /// permits `wanted` to the user `user` of the group `group`.
    fn permits(&self, user: u32, group: u32, owner: [u32; 2], mode: u32, wanted: u32) -> bool {
        let shift = if user == owner[0] {
            6
        } else if group == owner[1] || self.groups.lock().contains(&owner[1]) {
            3
        } else {
            0
        };
        mode >> shift & wanted == wanted
    }
}

/// Returns the owner of new objects of the running process: a user and a group.
pub fn owner() -> [u32; 2] {
    match try_current() {
        Some(thread) if thread.process.ids.is_checked.load(Ordering::Relaxed) => {
            let sets = *thread.process.ids.sets.lock();
            sets.map(|set| set.file)
        }
        Some(thread) => [ROOT, thread.process.ids.group().file],
        None => [ROOT; 2],
    }
}

/// Checks that a file of `owner` with the permissions `mode` permits `wanted` to the running
/// process.
///
/// # Errors
/// `EACCES`.
pub fn permit(owner: [u32; 2], mode: u32, wanted: u32) -> Result<()> {
    let Some(thread) = try_current() else { return Ok(()) };
    let ids = &thread.process.ids;
    if !ids.is_checked.load(Ordering::Relaxed) {
        return Ok(());
    }
    let [user, group] = ids.sets.lock().map(|set| set.file);
    if ids.permits(user, group, owner, mode, wanted) { Ok(()) } else { Err(Errno::EACCES) }
}

/// Checks like [`permit`], but with the real ids, as `access` requires.
///
/// # Errors
/// `EACCES`.
pub fn permit_real(owner: [u32; 2], mode: u32, wanted: u32) -> Result<()> {
    let ids = &current().process.ids;
    let [user, group] = ids.sets.lock().map(|set| set.real);
    let permits = user == ROOT || ids.permits(user, group, owner, mode, wanted);
    if permits { Ok(()) } else { Err(Errno::EACCES) }
}

/// Checks that the running process owns a file of the user `owner`, or is privileged.
///
/// # Errors
/// `EPERM`.
pub fn own(owner: u32) -> Result<()> {
    let Some(thread) = try_current() else { return Ok(()) };
    let ids = &thread.process.ids;
    let owns = !ids.is_checked.load(Ordering::Relaxed) || ids.user().file == owner;
    if owns { Ok(()) } else { Err(Errno::EPERM) }
}

/// Whether the running process is privileged. The kernel itself is, too.
pub fn is_root() -> bool {
    try_current().is_none_or(|thread| thread.process.ids.is_privileged())
}

/// Returns whether the running process has root's capabilities for files, which follow the user id
/// for files (`setfsuid`). The kernel itself has these, too.
pub fn is_file_root() -> bool {
    try_current().is_none_or(|thread| !thread.process.ids.is_checked.load(Ordering::Relaxed))
}

/// Checks that the running process has root's capabilities for files.
///
/// # Errors
/// `EPERM`.
pub fn file_privileged() -> Result<()> {
    if is_file_root() { Ok(()) } else { Err(Errno::EPERM) }
}

/// Returns whether the running process is in the group `group`. The kernel itself is in all groups.
pub fn in_group(group: u32) -> bool {
    let Some(thread) = try_current() else { return true };
    let ids = &thread.process.ids;
    ids.group().file == group || ids.groups.lock().contains(&group)
}

/// Returns whether the running process may set the set-group-ID bit of a file of the group `group`.
pub fn may_set_group_id(group: u32) -> bool {
    is_file_root() || in_group(group)
}

/// Checks that a System V object with the permissions `mode` permits `wanted` to the running
/// process. The object has two owners, a user and a group each: the present owner and the creator.
///
/// # Errors
/// `EACCES`.
pub fn permit_object(owners: [[u32; 2]; 2], mode: u32, wanted: u32) -> Result<()> {
    if is_root() {
        return Ok(());
    }
    let user = current().process.ids.user().effective;
    let shift = if owners.iter().any(|owner| owner[0] == user) {
        6
    } else if owners.iter().any(|owner| in_group(owner[1])) {
        3
    } else {
        0
    };
    if mode >> shift & wanted == wanted { Ok(()) } else { Err(Errno::EACCES) }
}

/// Checks that the running process may change or remove a System V object with these owners.
///
/// # Errors
/// `EPERM`.
pub fn own_object(owners: [[u32; 2]; 2]) -> Result<()> {
    let user = current().process.ids.user().effective;
    let owns = is_root() || owners.iter().any(|owner| owner[0] == user);
    if owns { Ok(()) } else { Err(Errno::EPERM) }
}

/// Checks that the running process is privileged.
///
/// # Errors
/// `EPERM`.
pub fn privileged() -> Result<()> {
    if current().process.ids.is_privileged() { Ok(()) } else { Err(Errno::EPERM) }
}

/// Returns whether the running process may send signals to `process`.
pub fn may_signal(process: &Process) -> bool {
    let (own, its) = (current().process.ids.user(), process.ids.user());
    own.effective == ROOT
        || [own.effective, own.real].iter().any(|id| *id == its.real || *id == its.saved)
}

/// Returns whether the running process may change the scheduling of `process`.
pub fn may_schedule(process: &Process) -> bool {
    let (own, its) = (current().process.ids.user().effective, process.ids.user());
    own == ROOT || own == its.real || own == its.effective
}

/// Whether the running process may look into `process`.
pub fn may_inspect(process: &Process) -> bool {
    let is_own = current().process.pid == process.pid;
    may_limit(process) && (is_own || is_root() || process.ids.is_dumpable())
}

/// Whether the running process may change the limits of `process`.
pub fn may_limit(process: &Process) -> bool {
    if current().process.pid == process.pid {
        return true;
    }
    let own = *current().process.ids.sets.lock();
    let its = *process.ids.sets.lock();
    own[0].effective == ROOT
        || own
            .iter()
            .zip(its)
            .all(|(own, its)| [its.real, its.effective, its.saved].iter().all(|id| *id == own.real))
}
