//! Sets of files to wait for (`epoll`).
//!
//! A set does not keep its files open. What an edge is, is told by the count of changes that a stream
//! announced: a file that is watched for edges is told of once for each count.
//!
//! *Sets in sets.* Who asks a set looks into the sets in it too: with a list of those still to be looked
//! into, not by recursion, since a set that was empty when it was added may have grown as deep as there are
//! descriptors; and into each once, since there are more ways through sets of sets than anybody can walk.
//! No set is in itself, so the locks of two sets are always taken in the same order: who puts a set into
//! another holds [`NESTING`] from the look to the change.

use super::file::File;
use super::poll;
use super::stream::{Changes, Events, Stream};
use crate::heap::try_push;
use crate::sync::Mutex;
use crate::syscall::{Errno, Result};
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::sync::{Arc, Weak};
use alloc::vec::Vec;
use core::any::Any;
use linux_raw_sys::general as linux;

/// Sets in sets in sets: what is added is no deeper than this.
const DEPTH: u32 = 5;

/// Held while a set is put into another. Taken before the locks of sets.
static NESTING: Mutex<()> = Mutex::new(());

/// A file by its descriptor and its place in memory: a weak share of it keeps the place.
type Key = (i32, usize);

#[derive(Debug)]
struct Interest {
    file: Weak<File>,
    events: u32,
    data: u64,
    /// The count of changes at the edge that was told last.
    told: Option<u64>,
    /// Told once, and to be told no more.
    spent: bool,
}

/// A set of files.
#[derive(Debug, Default)]
pub struct Epoll {
    interests: Mutex<BTreeMap<Key, Interest>>,
    /// Announces what is added and changed.
    changes: Arc<Changes>,
}

/// What a set tells of a file.
#[derive(Clone, Copy, Debug)]
pub struct Told {
    /// What it is ready for.
    pub events: u32,
    /// What the program knows it by.
    pub data: u64,
}

fn key(fd: i32, file: &Arc<File>) -> Key {
    (fd, Arc::as_ptr(file) as usize)
}

/// The set that a file is.
///
/// # Errors
/// `EINVAL`: it is none.
pub fn of(file: &File) -> Result<&Epoll> {
    let stream: &dyn Any = &**file.stream().ok_or(Errno::EINVAL)?;
    stream.downcast_ref().ok_or(Errno::EINVAL)
}

impl Epoll {
    /// Adds a file, or with `again` changes what is wanted of it.
    ///
    /// # Errors
    /// `EEXIST`, `ENOENT`, `EPERM`: it is always ready; `EINVAL`, `ELOOP`: a set cannot be in itself;
    /// `ENOMEM`.
    pub fn set(&self, fd: i32, file: &Arc<File>, told: Told, again: bool) -> Result<()> {
        if file.stream().is_none() {
            return Err(Errno::EPERM);
        }
        if crate::heap::low() {
            return Err(Errno::ENOMEM);
        }
        let inner = of(file).ok();
        if inner.is_some_and(|inner| core::ptr::eq(inner, self)) {
            return Err(Errno::EINVAL);
        }
        let _nesting = inner.map(|_| NESTING.lock());
        if inner.is_some_and(|inner| inner.holds(self) || inner.depth() > DEPTH) {
            return Err(Errno::ELOOP);
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
            match (interests.contains_key(&key(fd, file)), again) {
                (true, false) => return Err(Errno::EEXIST),
                (false, true) => return Err(Errno::ENOENT),
                _ => interests.insert(key(fd, file), interest),
            };
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

    /// Waits until files are ready, and tells of up to `most`.
    ///
    /// # Errors
    /// `Errno::RESTART_UNHANDLED`: a signal came first.
    pub fn wait(&self, most: usize, deadline: Option<u64>) -> Result<Vec<Told>> {
        loop {
            // Whatever is added from here on is announced.
            let version = self.changes.count();
            let mut changes = Vec::new();
            self.watch(&mut changes)?;
            let ready = || {
                let told = self.collect(most);
                (!told.is_empty() || self.changes.count() != version).then_some(told)
            };
            let told = poll::wait_for_changes(&changes, deadline, || self.look_again(), ready)?;
            match told {
                None => return Ok(Vec::new()),
                Some(told) if !told.is_empty() => return Ok(told),
                Some(_) => {}
            }
        }
    }

    /// Whether `other` is in it, however deep.
    fn holds(&self, other: &Self) -> bool {
        !self.visit(false, |file, _| of(file).is_ok_and(|inner| core::ptr::eq(inner, other)))
    }

    /// How many sets are in one another in it, on the shortest ways.
    fn depth(&self) -> u32 {
        let mut deepest = 0;
        self.visit(false, |file, depth| {
            deepest = deepest.max(depth + u32::from(of(file).is_ok()));
            false
        });
        deepest
    }

    /// Shows every file in it, and in the sets in it, with the number of sets around it; or only those
    /// whose being ready, by what is `wanted` of them, makes this set ready, which are no sets then. Stops
    /// once `found` says so, and returns whether it never did.
    fn visit(&self, wanted: bool, mut found: impl FnMut(&File, u32) -> bool) -> bool {
        let mut seen: BTreeSet<usize> = BTreeSet::new();
        let mut inner = VecDeque::new();
        let mut next: Option<(Arc<File>, u32)> = None;
        loop {
            let depth = next.as_ref().map_or(0, |(_, depth)| *depth);
            let set = next.as_ref().and_then(|(file, _)| of(file).ok()).unwrap_or(self);
            // After the lock: files may be closed meanwhile, and end here.
            for (file, events) in set.files(wanted) {
                let is_set = of(&file).is_ok();
                let shown = if !wanted {
                    found(&file, depth)
                } else {
                    !is_set && !poll::ready(&file, events).is_empty() && found(&file, depth)
                };
                if shown {
                    return false;
                }
                let leads = is_set && (!wanted || events.intersects(Events::READ));
                if leads && seen.insert(Arc::as_ptr(&file) as usize) {
                    inner.push_back((file, depth + 1));
                }
            }
            next = inner.pop_front();
            if next.is_none() {
                return true;
            }
        }
    }

    /// Its files that are open, and what is wanted of them; without those that are to be told no more if
    /// that is what is asked.
    fn files(&self, wanted: bool) -> Vec<(Arc<File>, Events)> {
        let interests = self.interests.lock();
        let open = interests.values().filter(|interest| !(wanted && interest.spent));
        open.filter_map(|interest| {
            Some((interest.file.upgrade()?, Events::from_bits_truncate(interest.events)))
        })
        .collect()
    }

    /// Which files are ready; with them, what has been told is noted.
    fn collect(&self, most: usize) -> Vec<Told> {
        let mut told = Vec::new();
        let mut closed = Vec::new();
        let mut kept = Vec::new();
        {
            let mut interests = self.interests.lock();
            for (&key, interest) in interests.iter_mut() {
                let Some(file) = interest.file.upgrade() else {
                    closed.push(key);
                    continue;
                };
                if told.len() < most && !interest.spent {
                    told.extend(interest.tell(&file));
                }
                // It may have been closed meanwhile, and end here: after the lock.
                kept.push(file);
            }
            for key in closed {
                interests.remove(&key);
            }
        }
        told
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
            // What announces nothing never changes: one edge, at the beginning.
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
        result
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
