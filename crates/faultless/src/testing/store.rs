//! A file in memory as a backing store with scripted behaviour.

use crate::addr::PAGE_SIZE;
use crate::audit::{audit, audit_with};
use crate::error::Errno;
use crate::file::{BackingStore, Object, ReadRun, Reading, StoreError, WriteRun};
use crate::heap::Shared;
use crate::testing::guest::{TestCpu, TestSpace, cpu};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::vec::Vec;

pub(crate) const PAGE: usize = PAGE_SIZE as usize;

/// The behaviour of a store at its next call, instead of the regular behaviour.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Plan {
    /// Transfers the given number of bytes, and then fails.
    Fail(usize),
    /// Returns after the given number of bytes.
    Short(usize),
    /// Takes the run along.
    Later,
    /// Keeps the run, and drops it.
    Drop,
}

/// A file in memory.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    pub(crate) bytes: Mutex<Vec<u8>>,
    pub(crate) plans: Mutex<VecDeque<Plan>>,
    /// The kept reads.
    pub(crate) later: Mutex<Vec<Reading>>,
    /// The runs of the read and write calls: first page and bytes.
    pub(crate) reads: Mutex<Vec<(u64, usize)>>,
    pub(crate) writes: Mutex<Vec<(u64, usize)>>,
    /// The preferred number of pages for a read, 4 by default.
    pub(crate) preferred: AtomicUsize,
}

impl Memory {
    /// A file whose page `n` starts with the word `n + 1`, with `more` bytes of 7 behind the last.
    pub(crate) fn new(pages: u64, more: usize) -> Arc<Self> {
        let mut bytes = Vec::new();
        for page in 0..pages {
            bytes.extend((page + 1).to_ne_bytes());
            bytes.resize((page + 1) as usize * PAGE, 0);
        }
        bytes.resize(bytes.len() + more, 7);
        Arc::new(Self { bytes: Mutex::new(bytes), ..Self::default() })
    }

    pub(crate) fn plan(&self, plans: impl IntoIterator<Item = Plan>) {
        self.plans.lock().unwrap().extend(plans);
    }

    pub(crate) fn word(&self, page: u64) -> u64 {
        let at = page as usize * PAGE;
        u64::from_ne_bytes(self.bytes.lock().unwrap()[at..at + 8].try_into().unwrap())
    }

    pub(crate) fn read_at<'m>(
        &self,
        offset: u64,
        memory: impl Iterator<Item = &'m mut [u8]>,
    ) -> usize {
        let (bytes, mut at) = (self.bytes.lock().unwrap(), offset as usize);
        for to in memory {
            let from = &bytes[at.min(bytes.len())..(at + to.len()).min(bytes.len())];
            to[..from.len()].copy_from_slice(from);
            at += from.len();
        }
        at - offset as usize
    }

    /// Completes the first kept read.
    pub(crate) fn complete(&self, cpu: &TestCpu<'_>, error: Option<StoreError>) {
        let mut reading = self.later.lock().unwrap().remove(0);
        let done = self.read_at(reading.first() * PAGE_SIZE, reading.memory(cpu));
        reading.complete(cpu, error.map_or(Ok(done), Err));
    }
}

impl BackingStore for Memory {
    fn len(&self) -> u64 {
        self.bytes.lock().unwrap().len() as u64
    }

    fn preferred_pages(&self) -> usize {
        match self.preferred.load(Ordering::Relaxed) {
            0 => 4,
            pages => pages,
        }
    }

    fn read(&self, run: &mut ReadRun) -> Result<usize, StoreError> {
        self.reads.lock().unwrap().push((run.first(), run.bytes()));
        let plan = self.plans.lock().unwrap().pop_front();
        if matches!(plan, Some(Plan::Later)) {
            self.later.lock().unwrap().push(run.take_along().unwrap());
            assert!(run.take_along().is_none() && run.memory().count() == 0);
            return Ok(0);
        }
        if matches!(plan, Some(Plan::Drop)) {
            drop(run.take_along());
            return Ok(0);
        }
        let done = self.read_at(run.offset(), run.memory());
        match plan {
            Some(Plan::Fail(done)) => Err(StoreError { done, errno: Errno::EIO }),
            Some(Plan::Short(done)) => Ok(done),
            _ => Ok(done),
        }
    }

    fn write(&self, run: &WriteRun<'_>) -> Result<(), StoreError> {
        self.writes.lock().unwrap().push((run.first(), run.bytes()));
        let plan = self.plans.lock().unwrap().pop_front();
        let (mut bytes, mut at) = (self.bytes.lock().unwrap(), run.offset() as usize);
        let mut left = if let Some(Plan::Fail(done)) = plan { done } else { usize::MAX };
        for (from, len) in run.memory() {
            let len = len.min(left);
            left -= len;
            let end = bytes.len().max(at + len);
            bytes.resize(end, 0);
            // SAFETY: valid for reads during the call, without concurrent stores.
            let from = unsafe { std::slice::from_raw_parts(from, len) };
            bytes[at..at + len].copy_from_slice(from);
            at += len;
        }
        match plan {
            Some(Plan::Fail(done)) => Err(StoreError { done, errno: Errno::ENOSPC }),
            _ => Ok(()),
        }
    }

    fn set_len(&self, bytes: u64) -> Result<(), Errno> {
        if matches!(self.plans.lock().unwrap().front(), Some(Plan::Fail(_))) {
            self.plans.lock().unwrap().pop_front();
            return Err(Errno::EIO);
        }
        self.bytes.lock().unwrap().resize(bytes as usize, 0);
        Ok(())
    }

    fn punch(&self, pages: Range<u64>) -> Result<(), Errno> {
        let mut bytes = self.bytes.lock().unwrap();
        let end = (pages.end as usize * PAGE).min(bytes.len());
        bytes[pages.start as usize * PAGE..end].fill(0);
        Ok(())
    }
}

pub(crate) type File = Shared<Object>;

pub(crate) fn file(cpu: &TestCpu<'_>, memory: &Arc<Memory>) -> File {
    Object::of_store(cpu, memory.clone(), 77).unwrap()
}

pub(crate) fn write_back(
    cpu: &TestCpu<'_>,
    spaces: &[&TestSpace],
    file: &File,
) -> Result<u64, Errno> {
    let protect = |pages: Range<u64>| {
        spaces.iter().for_each(|space| space.write_protect(cpu, file, pages.clone()));
    };
    file.write_back(cpu, 0..u64::MAX, protect)
}

pub(crate) fn finish(cpu0: &TestCpu<'_>, space: TestSpace, files: Vec<File>) {
    if cpu0.vm().machine().cpus > 1 {
        cpu(cpu0.vm(), 1).drain();
    }
    cpu0.drain();
    audit_with(cpu0, &[&space], &files.iter().collect::<Vec<_>>()).unwrap();
    space.exit(cpu0);
    files.into_iter().for_each(|file| Object::release(file, cpu0));
    cpu0.drain();
    assert_eq!(audit(cpu0, &[]).unwrap().taken(), 1, "only the zero page remains");
}
