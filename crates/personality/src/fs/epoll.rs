//! Sets of files to wait for (`epoll`).
//!
//! A set does not keep its files open. Edges are detected by a stream's count of announced changes:
//! an edge-triggered file is reported once for each count.
//!
//! *Nested sets.* A query of a set also visits the nested sets. The visit uses a list of the sets
//! still to visit, not recursion, because a set that was empty at its insertion may have become as
//! deep as there are descriptors. Each set is visited once, because the number of paths through
//! nested sets can be exponential. No set contains itself, so the locks of two sets are always
//! taken in the same order: a thread that adds a set to another holds [`NESTING`] from the check to
//! the change. A visit needs no memory: the sets still to visit are linked through their files, and
//! visited sets are marked, by one visit at a time ([`LOOK`]).

use super::file::File;
use super::poll;
use super::stream::{Events, Stream};
use crate::errno::{Errno, Result};
use crate::task::wait::Changes;
use core::any::Any;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use faultless_bare::heap::try_push;
use faultless_bare::sync::Mutex;
use faultless_collections::{Arc, Chain, Link, Linked, Map, Vec, Weak};
use linux_raw_sys::general as linux;

/// The deepest nesting of sets, as on Linux.
const DEPTH: u32 = 5;

/// Held while a set is added to another. Taken before the locks of sets.
static NESTING: Mutex<()> = Mutex::new(());

/// The number of the last visit of nested sets; locked during a visit. Taken after [`NESTING`].
static LOOK: Mutex<u64> = Mutex::new(0);

/// The sets still to visit, as a kind of [chains](Chain).
#[derive(Debug)]
pub struct Nested;

// SAFETY: the field has no other use.
unsafe impl Linked<Nested> for File {
    fn link(&self) -> &Link<Self> {
        &self.nested
    }
}

/// A file by its descriptor and its address. A weak reference prevents the reuse of the address.
type Key = (i32, usize);

#[derive(Debug)]
struct Interest {
    file: Weak<File>,
    events: u32,
    data: u64,
    /// The count of changes at the last reported edge.
    told: Option<u64>,
    /// Set after a report of an `EPOLLONESHOT` file: the file is disabled.
    spent: bool,
}

/// A set of files.
#[derive(Debug)]
pub struct Epoll {
    interests: Mutex<Map<Key, Interest>>,
    /// The maximum nesting of sets that have contained this set. The value is not lowered when a
    /// containing set is dropped: a set has no links to the sets containing it. Changed under
    /// [`NESTING`].
    around: AtomicU32,
    /// The number of the last visit to this set, and the depth of this visit. Changed under
    /// [`LOOK`].
    seen: AtomicU64,
    depth: AtomicU32,
    /// Announces added and changed files.
    changes: Arc<Changes>,
}

/// The report about a file.
#[derive(Clone, Copy, Debug)]
pub struct Told {
    /// The ready events.
    pub events: u32,
    /// The program's data for the file.
    pub data: u64,
}

fn key(fd: i32, file: &Arc<File>) -> Key {
    (fd, Arc::as_ptr(file) as usize)
}

/// Returns the set of an open file.
///
/// # Errors
/// `EINVAL`: the file is not a set.
pub fn of(file: &File) -> Result<&Epoll> {
    let stream: &dyn Any = &**file.stream().ok_or(Errno::EINVAL)?;
    stream.downcast_ref().ok_or(Errno::EINVAL)
}

impl Epoll {
    /// An empty set.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn try_new() -> Result<Arc<Self>> {
        Ok(Arc::try_new(Self {
            interests: Mutex::default(),
            around: AtomicU32::new(0),
            seen: AtomicU64::new(0),
            depth: AtomicU32::new(0),
            changes: Arc::try_new(Changes::default())?,
        })?)
    }

    /// Adds a file, or with `again` changes its events.
    ///
    /// # Errors
    /// `EEXIST`, `ENOENT`, `EPERM`: the file is always ready; `EINVAL`, `ELOOP`: the set would
    /// contain itself; `ENOMEM`.
    pub fn set(&self, fd: i32, file: &Arc<File>, told: Told, again: bool) -> Result<()> {
        if file.stream().is_none() {
            return Err(Errno::EPERM);
        }
        if faultless_bare::heap::low() {
            return Err(Errno::ENOMEM);
        }
        let inner = of(file).ok();
        if inner.is_some_and(|inner| core::ptr::eq(inner, self)) {
            return Err(Errno::EINVAL);
        }
        let _nesting = inner.map(|_| NESTING.lock());
        if let Some(inner) = inner {
            let around = self.around.load(Ordering::Relaxed) + 1;
            if inner.holds(self) || around + 1 + inner.depth() > DEPTH {
                return Err(Errno::ELOOP);
            }
            inner.around.fetch_max(around, Ordering::Relaxed);
            inner.visit(false, |file, depth| {
                if let Ok(set) = of(file) {
                    set.around.fetch_max(around + depth + 1, Ordering::Relaxed);
                }
                false
            });
        }
        let interest = Interest {
            file: Arc::downgrade(file),
            events: told.events,
            data: told.data,
            told: None,
            spent: false,
        };
        {
            let mut interests = self.interests.lock();
            match (interests.get_mut(&key(fd, file)), again) {
                (Some(_), false) => return Err(Errno::EEXIST),
                (None, true) => return Err(Errno::ENOENT),
                (Some(old), true) => *old = interest,
                (None, false) => {
                    interests.try_insert(key(fd, file), interest)?;
                }
            }
        }
        self.changes.announce();
        Ok(())
    }

    /// Removes a file.
    ///
    /// # Errors
    /// `ENOENT`.
    pub fn remove(&self, fd: i32, file: &Arc<File>) -> Result<()> {
        let old = self.interests.lock().remove(&key(fd, file));
        old.map(drop).ok_or(Errno::ENOENT)
    }

    /// Waits until files are ready, and reports up to `most` files. Returns the number of reported
    /// files, 0 if the deadline passed.
    ///
    /// # Errors
    /// `Errno::RESTART_UNHANDLED`: a signal came first. `ENOMEM`. The error of `tell` for the first
    /// file.
    pub fn wait(
        &self,
        most: usize,
        deadline: Option<u64>,
        mut tell: impl FnMut(u64, Told) -> Result<()>,
    ) -> Result {
        loop {
            // Files added after this point are announced.
            let version = self.changes.count();
            let mut changes = Vec::new();
            self.watch(&mut changes)?;
            let ready = || match self.collect(most, &mut tell) {
                Ok(0) if self.changes.count() == version => None,
                told => Some(told),
            };
            let told = poll::wait_for_changes(&changes, deadline, || self.look_again(), ready)?;
            match told {
                None => return Ok(0),
                Some(Ok(0)) => {}
                Some(told) => return told,
            }
        }
    }

    /// Returns whether the set contains `other`, at any depth.
    fn holds(&self, other: &Self) -> bool {
        !self.visit(false, |file, _| of(file).is_ok_and(|inner| core::ptr::eq(inner, other)))
    }

    /// Returns the depth of the nested sets.
    fn depth(&self) -> u32 {
        let mut deepest = 0;
        self.visit(false, |file, depth| {
            deepest = deepest.max(depth + u32::from(of(file).is_ok()));
            false
        });
        deepest
    }

    /// Calls `found` for each file in the set and in its nested sets, with the depth. With
    /// `wanted`, calls `found` only for files, other than sets, that are ready for their events,
    /// and so make this set ready. Stops when `found` returns true, and returns whether `found`
    /// never did.
    fn visit(&self, wanted: bool, mut found: impl FnMut(&File, u32) -> bool) -> bool {
        // In this order: the links are dropped before the lock is released.
        let mut look = None;
        let mut inner = Chain::<File, Nested>::new();
        let mut next: Option<Arc<File>> = None;
        loop {
            let inside = next.as_ref().and_then(|file| of(file).ok());
            let depth = inside.map_or(0, |set| set.depth.load(Ordering::Relaxed));
            let set = inside.unwrap_or(self);
            let mut last = None;
            // Without the lock of the set: files may be closed concurrently, and are dropped here.
            while let Some((key, file, events)) = set.open_after(last, wanted) {
                last = Some(key);
                let inner_set = of(&file).ok();
                let shown = match inner_set {
                    _ if !wanted => found(&file, depth),
                    Some(_) => false,
                    None => !poll::ready(&file, events).is_empty() && found(&file, depth),
                };
                if shown {
                    return false;
                }
                let Some(inner_set) = inner_set else { continue };
                if wanted && !events.intersects(Events::READ) {
                    continue;
                }
                let look = look.get_or_insert_with(|| {
                    let mut look = LOOK.lock();
                    *look += 1;
                    look
                });
                if inner_set.seen.swap(**look, Ordering::Relaxed) != **look {
                    inner_set.depth.store(depth + 1, Ordering::Relaxed);
                    inner.push(file);
                }
            }
            next = inner.pop();
            if next.is_none() {
                return true;
            }
        }
    }

    /// Returns the first open file after `last`, and its events; with `wanted`, skips disabled
    /// files.
    fn open_after(&self, mut last: Option<Key>, wanted: bool) -> Option<(Key, Arc<File>, Events)> {
        let interests = self.interests.lock();
        loop {
            let (&key, interest) = interests.after(last.as_ref())?;
            last = Some(key);
            if let Some(file) = interest.file.upgrade().filter(|_| !(wanted && interest.spent)) {
                return Some((key, file, Events::from_bits_truncate(interest.events)));
            }
        }
    }

    /// Reports the ready files, with their index, and records the reports. Returns the number of
    /// reported files.
    fn collect(&self, most: usize, tell: &mut impl FnMut(u64, Told) -> Result<()>) -> Result {
        let mut count = 0;
        let mut last = None;
        while count < most as u64 {
            // The file may have been closed concurrently: drop it after the lock.
            let (told, file) = {
                let mut interests = self.interests.lock();
                let Some(key) = interests.after(last.as_ref()).map(|(&key, _)| key) else { break };
                last = Some(key);
                let Some(interest) = interests.get_mut(&key) else { continue };
                match interest.file.upgrade() {
                    Some(file) if interest.spent => (None, Some(file)),
                    Some(file) => (interest.tell(&file), Some(file)),
                    None => {
                        interests.remove(&key);
                        (None, None)
                    }
                }
            };
            drop(file);
            let Some(told) = told else { continue };
            match tell(count, told) {
                Ok(()) => count += 1,
                Err(errno) if count == 0 => return Err(errno),
                Err(_) => break,
            }
        }
        Ok(count)
    }
}

impl Interest {
    fn tell(&mut self, file: &File) -> Option<Told> {
        let count = file.stream()?.edges();
        let ready = poll::ready(file, Events::from_bits_truncate(self.events)).bits();
        if ready == 0 {
            return None;
        }
        if self.events & linux::EPOLLET != 0 {
            // A stream without announcements never changes: it has one edge, at the start.
            let count = count.or(Some(0));
            if self.told == count {
                return None;
            }
            self.told = count;
        }
        self.spent = self.events & linux::EPOLLONESHOT != 0;
        Some(Told { events: ready, data: self.data })
    }
}

impl Stream for Epoll {
    fn ready(&self) -> Events {
        if self.visit(true, |_, _| true) { Events::empty() } else { Events::READ }
    }

    fn changes(&self) -> Option<&Arc<Changes>> {
        Some(&self.changes)
    }

    fn watch(&self, all: &mut Vec<Arc<Changes>>) -> Result<()> {
        let mut result = try_push(all, self.changes.clone());
        self.visit(false, |file, _| {
            if let (Ok(()), Some(stream)) = (result, file.stream()) {
                result = stream.changes().cloned().map_or(Ok(()), |it| try_push(all, it));
            }
            result.is_err()
        });
        Ok(result?)
    }

    fn look_again(&self) -> Option<u64> {
        let mut soonest = None;
        self.visit(false, |file, _| {
            if of(file).is_err()
                && let Some(at) = file.stream().and_then(|stream| stream.look_again())
            {
                soonest = Some(soonest.map_or(at, |soonest: u64| soonest.min(at)));
            }
            false
        });
        soonest
    }
}
