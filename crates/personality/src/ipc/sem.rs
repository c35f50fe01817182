//! Semaphores: sets of counters that are changed together, by processes that wait until the changes
//! are possible.
//!
//! A call makes all of its changes at once, or no change. If the changes are not possible, the call
//! waits in the set's queue, and retries after every change. The set also stores the changes to
//! undo at the end of a process.

use super::Ids;
use crate::errno::{Errno, Result};
use crate::task::wait::{Stop, WaitQueue, wait_until};
use core::sync::atomic::{AtomicU64, Ordering};
use faultless_bare::sync::Mutex;
use faultless_collections::{Arc, Map, Vec};

/// The maximum number of sets, and of semaphores in a set.
pub const MOST: usize = 32000;
/// The maximum number of changes in a call.
pub const MOST_CHANGES: u64 = 500;
/// The maximum value.
pub const LARGEST: i32 = 32767;

/// One change: `sembuf`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Change {
    /// The semaphore's index.
    pub at: u16,
    /// The number to add; 0: wait until the value is 0.
    pub by: i16,
    /// Flags.
    pub flags: i16,
}

impl Change {
    const NO_WAIT: i16 = 0o4000;
    const UNDO: i16 = 0x1000;
}

/// A semaphore.
#[derive(Clone, Copy, Debug, Default)]
pub struct Semaphore {
    /// Its value.
    pub value: u16,
    /// The process that made the last change.
    pub last_user: u32,
    /// The numbers of threads that wait for a larger value, and for 0.
    pub waiting: [u32; 2],
}

/// The state of a set.
#[derive(Debug, Default)]
pub struct State {
    /// Its semaphores.
    pub all: Vec<Semaphore>,
    /// The time of the last change by `semop`; 0: never.
    pub used: u64,
    /// Set if the set was removed.
    gone: bool,
    /// The changes to undo at the ends of processes.
    undo: Map<u32, Vec<i16>>,
}

/// A set.
#[derive(Debug, Default)]
pub struct Set {
    state: Mutex<State>,
    changed: WaitQueue,
}

/// All sets.
pub static SETS: Mutex<Ids<Arc<Set>>> = Mutex::new(Ids::new(MOST));
/// The number of changes to undo since boot: while it is 0, no process has changes to undo.
static UNDOES: AtomicU64 = AtomicU64::new(0);

/// The condition that changes must wait for.
enum Refused {
    /// Semaphore `at` must become larger, or 0.
    Wait {
        at: usize,
        zero: bool,
    },
    Error(Errno),
}

impl Set {
    /// A set of `count` semaphores.
    ///
    /// # Errors
    /// `EINVAL`: 0, or too many. `ENOMEM`.
    pub fn try_new(count: usize) -> Result<Arc<Self>> {
        if count == 0 || count > MOST {
            return Err(Errno::EINVAL);
        }
        let set = Self::default();
        set.state.lock().all = Vec::try_filled(Semaphore::default(), count)?;
        Ok(Arc::try_new(set)?)
    }

    /// Calls `look` with the state.
    pub fn look<R>(&self, look: impl FnOnce(&State) -> R) -> R {
        look(&self.state.lock())
    }

    /// Sets the value of the semaphore `at`, or of all, and drops the changes to undo of these
    /// semaphores.
    ///
    /// # Errors
    /// `ERANGE`, `EINVAL`: an unknown semaphore. `EIDRM`.
    pub fn set(&self, at: usize, values: &[u16], pid: u32) -> Result<()> {
        if values.iter().any(|&value| i32::from(value) > LARGEST) {
            return Err(Errno::ERANGE);
        }
        let mut state = self.state.lock();
        if state.gone {
            return Err(Errno::EIDRM);
        }
        let State { all, undo, .. } = &mut *state;
        let range = at..at + values.len();
        for (semaphore, &value) in
            all.get_mut(range.clone()).ok_or(Errno::EINVAL)?.iter_mut().zip(values)
        {
            semaphore.value = value;
            semaphore.last_user = pid;
        }
        undo.each_mut(|_, undo| undo[range.clone()].fill(0));
        drop(state);
        self.changed.wake_all();
        Ok(())
    }

    /// Makes `changes` together; waits until the changes are possible.
    ///
    /// # Errors
    /// As `semop`.
    pub fn change(&self, changes: &[Change], deadline: Option<u64>, pid: u32) -> Result<()> {
        let mut waits_for: Option<(usize, usize)> = None;
        let waited = wait_until(&[&self.changed], deadline, || {
            let mut state = self.state.lock();
            leave(&mut state, waits_for.take());
            if state.gone {
                return Some(Err(Errno::EIDRM));
            }
            match state.change(changes, pid) {
                Ok(()) => Some(Ok(())),
                Err(Refused::Error(errno)) => Some(Err(errno)),
                Err(Refused::Wait { at, zero }) => {
                    let kind = usize::from(zero);
                    state.all[at].waiting[kind] += 1;
                    waits_for = Some((at, kind));
                    None
                }
            }
        });
        leave(&mut self.state.lock(), waits_for);
        match waited {
            Ok(Ok(())) => {
                if changes.iter().any(|change| change.by != 0) {
                    self.changed.wake_all();
                }
                Ok(())
            }
            Ok(Err(errno)) => Err(errno),
            Err(Stop::Timeout) => Err(Errno::EAGAIN),
            Err(Stop::Signal) => Err(Errno::EINTR),
        }
    }

    /// Marks the set as removed, and wakes its waiters.
    fn end(&self) {
        self.state.lock().gone = true;
        self.changed.wake_all();
    }
}

fn leave(state: &mut State, waited_for: Option<(usize, usize)>) {
    if let Some((at, kind)) = waited_for {
        state.all[at].waiting[kind] -= 1;
    }
}

impl State {
    fn change(&mut self, changes: &[Change], pid: u32) -> core::result::Result<(), Refused> {
        if changes.iter().any(|change| usize::from(change.at) >= self.all.len()) {
            return Err(Refused::Error(Errno::EFBIG));
        }
        let undoes = changes.iter().any(|change| change.flags & Change::UNDO != 0);
        if undoes && !self.undo.contains_key(&pid) {
            if faultless_bare::heap::low() {
                return Err(Refused::Error(Errno::ENOMEM));
            }
            let none = Vec::try_filled(0, self.all.len());
            none.and_then(|none| self.undo.try_insert(pid, none))
                .map_err(|no_memory| Refused::Error(no_memory.into()))?;
            UNDOES.fetch_add(1, Ordering::Relaxed);
        }
        for (done, change) in changes.iter().enumerate() {
            if let Err(refused) = self.change_one(change, pid) {
                changes[..done].iter().rev().for_each(|change| self.change_back(change, pid));
                return Err(match refused {
                    Refused::Wait { .. } if change.flags & Change::NO_WAIT != 0 => {
                        Refused::Error(Errno::EAGAIN)
                    }
                    refused => refused,
                });
            }
        }
        for change in changes {
            self.all[usize::from(change.at)].last_user = pid;
        }
        self.used = super::seconds();
        Ok(())
    }

    fn change_one(&mut self, change: &Change, pid: u32) -> core::result::Result<(), Refused> {
        let at = usize::from(change.at);
        let value = i32::from(self.all[at].value);
        let new = value + i32::from(change.by);
        if change.by == 0 && value != 0 || new < 0 {
            return Err(Refused::Wait { at, zero: change.by == 0 });
        }
        if new > LARGEST {
            return Err(Refused::Error(Errno::ERANGE));
        }
        if change.flags & Change::UNDO != 0
            && let Some(undo) = self.undo.get_mut(&pid)
        {
            let less = undo[at].checked_sub(change.by).filter(|&undo| undo != i16::MIN);
            undo[at] = less.ok_or(Refused::Error(Errno::ERANGE))?;
        }
        self.all[at].value = new as u16;
        Ok(())
    }

    fn change_back(&mut self, change: &Change, pid: u32) {
        let at = usize::from(change.at);
        self.all[at].value = self.all[at].value.wrapping_add_signed(-change.by);
        if change.flags & Change::UNDO != 0
            && let Some(undo) = self.undo.get_mut(&pid)
        {
            undo[at] = undo[at].wrapping_add(change.by);
        }
    }
}

/// Returns the set with identifier `id`, for a caller that needs the permissions `wanted`.
///
/// # Errors
/// `EINVAL`: an unknown identifier. `EACCES`.
pub fn find(id: i32, wanted: u32) -> Result<Arc<Set>> {
    SETS.lock().find_for(id, wanted).map(|(_, set)| set.clone())
}

/// Removes a set.
///
/// # Errors
/// `EINVAL`: an unknown identifier. `EPERM`.
pub fn remove(id: i32) -> Result<()> {
    let set = {
        let mut sets = SETS.lock();
        sets.find_own(id)?;
        sets.remove(id)?
    };
    set.end();
    Ok(())
}

/// Undoes changes at the end of a process.
pub fn process_ends(pid: u32) {
    if UNDOES.load(Ordering::Relaxed) == 0 {
        return;
    }
    let mut place = 0;
    loop {
        let next = SETS.lock().from(place).map(|(place, set)| (place, set.clone()));
        let Some((at, set)) = next else { return };
        place = at + 1;
        let mut state = set.state.lock();
        let Some(undo) = state.undo.remove(&pid) else { continue };
        for (semaphore, by) in state.all.iter_mut().zip(undo).filter(|&(_, by)| by != 0) {
            let value = i32::from(semaphore.value) + i32::from(by);
            semaphore.value = value.clamp(0, LARGEST) as u16;
            semaphore.last_user = pid;
        }
        drop(state);
        set.changed.wake_all();
    }
}
