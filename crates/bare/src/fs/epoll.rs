//! Sets of files to wait for (`epoll`).
//!
//! A set does not keep its files open. What an edge is, is told by the count of changes that a stream
//! announced: a file that is watched for edges is told of once for each count.

use super::file::File;
use super::poll;
use super::stream::{Changes, Events, Stream};
use crate::sync::Mutex;
use crate::syscall::{Errno, Result};
use alloc::collections::BTreeMap;
use alloc::sync::{Arc, Weak};
use alloc::vec::Vec;
use core::any::Any;
use linux_raw_sys::general as linux;

/// Sets in sets in sets: no deeper than this.
const DEPTH: u32 = 5;

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
        if let Ok(inner) = of(file) {
            if core::ptr::eq(inner, self) {
                return Err(Errno::EINVAL);
            }
            if inner.reaches(self, DEPTH) {
                return Err(Errno::ELOOP);
            }
        }
        if crate::heap::low() {
            return Err(Errno::ENOMEM);
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
            self.watch(&mut changes);
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
    fn reaches(&self, other: &Self, depth: u32) -> bool {
        self.files().iter().filter_map(|file| of(file).ok()).any(|inner| {
            core::ptr::eq(inner, other) || depth == 0 || inner.reaches(other, depth - 1)
        })
    }

    fn files(&self) -> Vec<Arc<File>> {
        let interests = self.interests.lock();
        interests.values().filter_map(|interest| interest.file.upgrade()).collect()
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
        let count = file.stream()?.changes().map(|changes| changes.count());
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
        let interests: Vec<_> = {
            let interests = self.interests.lock();
            let wanted = interests.values().filter(|interest| !interest.spent);
            wanted.map(|interest| (interest.file.clone(), interest.events)).collect()
        };
        let is_ready = |(file, events): &(Weak<File>, u32)| {
            let events = Events::from_bits_truncate(*events);
            file.upgrade().is_some_and(|file| !poll::ready(&file, events).is_empty())
        };
        if interests.iter().any(is_ready) { Events::READ } else { Events::empty() }
    }

    fn changes(&self) -> Option<&Arc<Changes>> {
        Some(&self.changes)
    }

    fn watch(&self, all: &mut Vec<Arc<Changes>>) {
        all.push(self.changes.clone());
        self.files().iter().filter_map(|file| file.stream()).for_each(|stream| stream.watch(all));
    }

    fn look_again(&self) -> Option<u64> {
        self.files().iter().filter_map(|file| file.stream()?.look_again()).min()
    }
}
