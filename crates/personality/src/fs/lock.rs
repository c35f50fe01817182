//! Locks on files: on ranges (`fcntl`) and on whole files (`flock`), which are independent of each
//! other. The locks are advisory: only a thread that takes a lock waits.
//!
//! *Owners.* An open file owns the locks of `flock`, and the locks of `fcntl` for open file
//! descriptions, until all its descriptors are closed. All other locks of `fcntl` belong to a
//! descriptor table, and so to a process, until this process closes any descriptor of the file.
//! Owners and locked files are identified by their address in memory, which cannot be reused while
//! a lock exists.
//!
//! *Waiting.* All waiters are in one queue, and retry whenever a lock is released. Deadlocks are
//! not detected.

use super::file::File;
use crate::errno::{Errno, Result};
use crate::task::wait::{WaitQueue, wait_until};
use core::ops::RangeInclusive;
use core::sync::atomic::{AtomicUsize, Ordering};
use faultless_bare::sync::Mutex;
use faultless_collections::{Arc, Map, Vec};

/// The owner of a lock, and the kind of the lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// A table of descriptors, through `fcntl`.
    Table(usize),
    /// An open file, through `fcntl`.
    File(usize),
    /// An open file, through `flock`.
    Whole(usize),
}

/// A lock.
#[derive(Clone, Debug)]
pub struct Lock {
    /// Its owner.
    pub owner: Owner,
    /// The locked bytes.
    pub range: RangeInclusive<u64>,
    /// Set for an exclusive lock.
    pub writes: bool,
    /// The process that took the lock.
    pub pid: u32,
}

/// The locks of all locked files, by the address of the inode.
static LOCKS: Mutex<Map<usize, Vec<Lock>>> = Mutex::new(Map::new());
/// The number of locked files, so that closing a file is fast if no locks exist.
static LOCKED: AtomicUsize = AtomicUsize::new(0);
/// The threads waiting for a lock.
static RELEASED: WaitQueue = WaitQueue::new();

/// Every byte.
pub const WHOLE: RangeInclusive<u64> = 0..=u64::MAX;

impl Owner {
    /// An open file, through `fcntl`.
    pub fn file(file: &Arc<File>) -> Self {
        Self::File(Arc::as_ptr(file) as usize)
    }

    /// An open file, through `flock`.
    pub fn whole(file: &Arc<File>) -> Self {
        Self::Whole(Arc::as_ptr(file) as usize)
    }
}

impl Lock {
    /// Returns whether two locks conflict.
    fn conflicts(&self, other: &Self) -> bool {
        let whole = |lock: &Self| matches!(lock.owner, Owner::Whole(_));
        self.owner != other.owner
            && whole(self) == whole(other)
            && (self.writes || other.writes)
            && self.overlaps(&other.range)
    }

    fn overlaps(&self, range: &RangeInclusive<u64>) -> bool {
        self.range.start() <= range.end() && range.start() <= self.range.end()
    }

    /// Returns the parts of this lock before and after `range`, which overlaps the lock.
    fn around(&self, range: &RangeInclusive<u64>) -> [Option<RangeInclusive<u64>>; 2] {
        let (start, end) = (*self.range.start(), *self.range.end());
        let before = range.start().checked_sub(1).map(|last| start..=last);
        let after = range.end().checked_add(1).map(|first| first..=end);
        [before, after].map(|part| part.filter(|part| !part.is_empty()))
    }
}

fn place(file: &File) -> usize {
    Arc::as_ptr(&file.inode) as usize
}

/// Changes the locks of the file at `place`; without `begin`, only if the file has locks.
///
/// # Errors
/// `ENOLCK`: out of memory. The errors of `change`.
fn change<R: Default>(
    place: usize,
    begin: bool,
    change: impl FnOnce(&mut Vec<Lock>) -> Result<R>,
) -> Result<R> {
    let mut all = LOCKS.lock();
    if begin && !all.contains_key(&place) {
        all.try_insert(place, Vec::new()).map_err(|_| Errno::ENOLCK)?;
    }
    let Some(locks) = all.get_mut(&place) else { return Ok(R::default()) };
    let result = change(locks);
    if locks.is_empty() {
        all.remove(&place);
    }
    LOCKED.store(all.len(), Ordering::SeqCst);
    result
}

/// Returns the first lock of the file that conflicts with `wanted`.
pub fn obstacle(file: &File, wanted: &Lock) -> Option<Lock> {
    let all = LOCKS.lock();
    all.get(&place(file))?.iter().find(|lock| lock.conflicts(wanted)).cloned()
}

/// Takes a lock, which replaces other locks of the owner in the range; waits unless `at_once`.
///
/// # Errors
/// `EAGAIN`: another lock conflicts; [`Errno::RESTART`]: a signal came first; `ENOLCK`: out of
/// memory.
pub fn lock(file: &File, wanted: &Lock, at_once: bool) -> Result<()> {
    if faultless_bare::heap::low() {
        return Err(Errno::ENOLCK);
    }
    // Returns whether the lock was taken.
    let take = || {
        change(place(file), true, |locks| {
            if locks.iter().any(|lock| lock.conflicts(wanted)) {
                return Ok(false);
            }
            // Memory for the new lock, and for splitting a lock.
            locks.try_reserve(2).map_err(|_| Errno::ENOLCK)?;
            release(locks, wanted.owner, &wanted.range)?;
            locks.try_push(wanted.clone()).map_err(|_| Errno::ENOLCK)?;
            Ok(true)
        })
    };
    // An exclusive lock may have become a shared one.
    if take()? {
        RELEASED.wake_all();
        return Ok(());
    }
    if at_once {
        return Err(Errno::EAGAIN);
    }
    if let Owner::Whole(_) = wanted.owner {
        // Two owners that both upgrade their locks would deadlock.
        unlock(file, wanted.owner, &WHOLE)?;
    }
    let taken = || match take() {
        Ok(false) => None,
        taken => Some(taken.map(|_| ())),
    };
    wait_until(&[&RELEASED], None, taken).map_err(|_| Errno::RESTART)?
}

/// Removes `range` from the locks of `owner`. Only splitting a lock needs memory.
fn release(locks: &mut Vec<Lock>, owner: Owner, range: &RangeInclusive<u64>) -> Result<()> {
    let mut at = 0;
    while at < locks.len() {
        let lock = &locks[at];
        if lock.owner != owner || !lock.overlaps(range) {
            at += 1;
            continue;
        }
        match lock.around(range) {
            [Some(before), Some(after)] => {
                let after = Lock { range: after, ..lock.clone() };
                // No other lock of the owner overlaps the range, because locks of one owner do not
                // overlap. So on an error the list is unchanged.
                locks.try_insert(at + 1, after).map_err(|_| Errno::ENOLCK)?;
                locks[at].range = before;
                return Ok(());
            }
            [Some(rest), None] | [None, Some(rest)] => {
                locks[at].range = rest;
                at += 1;
            }
            [None, None] => {
                locks.remove(at);
            }
        }
    }
    Ok(())
}

/// Releases the locks of `owner` in `range`.
///
/// # Errors
/// `ENOLCK`: no memory to split a lock; the locks are unchanged.
pub fn unlock(file: &File, owner: Owner, range: &RangeInclusive<u64>) -> Result<()> {
    change(place(file), false, |locks| release(locks, owner, range))?;
    RELEASED.wake_all();
    Ok(())
}

/// Releases locks on `file` after the descriptor table at `table` has closed a descriptor of the
/// file.
pub fn closed(table: usize, file: &File) {
    if LOCKED.load(Ordering::SeqCst) != 0 {
        forget(place(file), Owner::Table(table));
    }
}

/// Releases the locks owned by `file`, which is being dropped.
pub fn file_ended(file: &File) {
    if LOCKED.load(Ordering::SeqCst) != 0 {
        let at = core::ptr::from_ref(file) as usize;
        forget(place(file), Owner::File(at));
        forget(place(file), Owner::Whole(at));
    }
}

/// Releases the locks of the descriptor table at `table`, which is being dropped.
pub fn table_ended(table: usize) {
    if LOCKED.load(Ordering::SeqCst) != 0 {
        let mut last = None;
        loop {
            let next = LOCKS.lock().after(last.as_ref()).map(|(&place, _)| place);
            let Some(place) = next else { return };
            forget(place, Owner::Table(table));
            last = next;
        }
    }
}

fn forget(place: usize, owner: Owner) {
    let fewer = change(place, false, |locks| {
        let before = locks.len();
        locks.retain(|lock| lock.owner != owner);
        Ok(locks.len() != before)
    });
    if fewer == Ok(true) {
        RELEASED.wake_all();
    }
}
