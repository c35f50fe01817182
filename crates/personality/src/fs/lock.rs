//! Locks on files: those on ranges (`fcntl`) and those on whole files (`flock`), which know nothing of each
//! other. They are advice: only who asks for a lock is kept waiting.
//!
//! *Owners.* An open file owns what `flock`, and what `fcntl` for open files, locks with it, until nobody has it
//! open any more. What `fcntl` locks otherwise belongs to a table of descriptors, and so to a process, until it
//! closes any descriptor of that file. Both are known by their place in memory, which is theirs for as long as
//! they own anything; the file that is locked likewise.
//!
//! *Waiting.* All who wait for a lock wait in one queue, and look again whenever one is released. Nobody looks
//! for circles of them.

use super::file::File;
use crate::errno::{Errno, Result};
use crate::task::wait::{WaitQueue, wait_until};
use core::ops::RangeInclusive;
use core::sync::atomic::{AtomicUsize, Ordering};
use faultless_bare::sync::Mutex;
use faultless_collections::{Arc, Map, Vec};

/// Who owns a lock, and so which locks it can be in the way of.
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
    /// Whose it is.
    pub owner: Owner,
    /// The bytes that are locked.
    pub range: RangeInclusive<u64>,
    /// Whether it is in the way of readers too.
    pub writes: bool,
    /// The process that asked for it.
    pub pid: u32,
}

/// The locks of the files that have any, by the place of their inodes.
static LOCKS: Mutex<Map<usize, Vec<Lock>>> = Mutex::new(Map::new());
/// How many such files there are, for who closes files without locks.
static LOCKED: AtomicUsize = AtomicUsize::new(0);
/// Who waits for a lock.
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
    /// Whether one of the two is in the way of the other.
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

    /// What is left of it before and after `range`, which it overlaps.
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

/// Changes the locks of the file at `place`: those that it has, or with `begin` none yet.
///
/// # Errors
/// `ENOLCK`: there is no memory. Those of `change`.
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

/// The first lock of the file that is in the way of `wanted`.
pub fn obstacle(file: &File, wanted: &Lock) -> Option<Lock> {
    let all = LOCKS.lock();
    all.get(&place(file))?.iter().find(|lock| lock.conflicts(wanted)).cloned()
}

/// Takes a lock, in place of what its owner has locked there; waits for it unless `at_once`.
///
/// # Errors
/// `EAGAIN`: another is in the way; [`Errno::RESTART`]: a signal came first; `ENOLCK`: there is no memory.
pub fn lock(file: &File, wanted: &Lock, at_once: bool) -> Result<()> {
    if faultless_bare::heap::low() {
        return Err(Errno::ENOLCK);
    }
    // Whether it was taken.
    let take = || {
        change(place(file), true, |locks| {
            if locks.iter().any(|lock| lock.conflicts(wanted)) {
                return Ok(false);
            }
            // Its own, and one more where a lock is cut in two.
            locks.try_reserve(2).map_err(|_| Errno::ENOLCK)?;
            release(locks, wanted.owner, &wanted.range)?;
            locks.try_push(wanted.clone()).map_err(|_| Errno::ENOLCK)?;
            Ok(true)
        })
    };
    // What was exclusive may not be now.
    if take()? {
        RELEASED.wake_all();
        return Ok(());
    }
    if at_once {
        return Err(Errno::EAGAIN);
    }
    if let Owner::Whole(_) = wanted.owner {
        // Two who both want more than they have would wait for each other.
        unlock(file, wanted.owner, &WHOLE)?;
    }
    let taken = || match take() {
        Ok(false) => None,
        taken => Some(taken.map(|_| ())),
    };
    wait_until(&[&RELEASED], None, taken).map_err(|_| Errno::RESTART)?
}

/// Takes `range` from what `owner` has locked. Only a lock that is cut in two needs memory.
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
                // No other of this owner's overlaps the range, since none overlaps this one: nothing was changed yet.
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

/// Releases what `owner` has locked in `range`.
///
/// # Errors
/// `ENOLCK`: a lock is to be cut in two, and there is no memory for the other part; nothing has changed.
pub fn unlock(file: &File, owner: Owner, range: &RangeInclusive<u64>) -> Result<()> {
    change(place(file), false, |locks| release(locks, owner, range))?;
    RELEASED.wake_all();
    Ok(())
}

/// The table of descriptors at `table` has closed one of `file`.
pub fn closed(table: usize, file: &File) {
    if LOCKED.load(Ordering::SeqCst) != 0 {
        forget(place(file), Owner::Table(table));
    }
}

/// Nobody has `file` open any more.
pub fn file_ended(file: &File) {
    if LOCKED.load(Ordering::SeqCst) != 0 {
        let at = core::ptr::from_ref(file) as usize;
        forget(place(file), Owner::File(at));
        forget(place(file), Owner::Whole(at));
    }
}

/// Nobody has the table of descriptors at `table` any more.
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
