//! The file of a case: an object with a store, which has the first word of each page. The others are zeros.

use super::op::WINDOW;
use faultless::Cpu;
use faultless::{
    BackingStore, Errno, Machine, Object, PAGE_SIZE, ReadRun, Shared, Space, StoreError, WriteRun,
};
use std::ops::Range;
use std::sync::{Arc, Mutex};

/// What is behind the file.
#[derive(Debug)]
pub struct Words(Mutex<Vec<u64>>);

impl Words {
    /// One word for each page of the window.
    pub fn new() -> Arc<Self> {
        Arc::new(Self(Mutex::new((0..WINDOW as u64).map(|page| 200 + page).collect())))
    }

    /// What it has.
    pub fn get(&self) -> Vec<u64> {
        self.0.lock().unwrap().clone()
    }
}

impl BackingStore for Words {
    fn len(&self) -> u64 {
        self.0.lock().unwrap().len() as u64 * PAGE_SIZE
    }

    fn preferred_pages(&self) -> usize {
        2
    }

    fn read(&self, run: &mut ReadRun) -> Result<usize, StoreError> {
        // A shorter one, if another CPU has just made it so.
        let words = self.get();
        let first = run.first() as usize;
        let mut done = 0;
        for (word, page) in words.iter().skip(first).zip(run.memory()) {
            page.fill(0);
            page[..8].copy_from_slice(&word.to_ne_bytes());
            done += page.len();
        }
        Ok(done)
    }

    fn write(&self, run: &WriteRun<'_>) -> Result<(), StoreError> {
        let mut words = self.0.lock().unwrap();
        for (index, (page, _)) in (run.first() as usize..).zip(run.memory()) {
            // SAFETY: a word of a page, valid for reads during the call.
            words[index] = unsafe { page.cast::<u64>().read_volatile() };
        }
        Ok(())
    }

    fn set_len(&self, bytes: u64) -> Result<(), Errno> {
        self.0.lock().unwrap().resize(bytes.div_ceil(PAGE_SIZE) as usize, 0);
        Ok(())
    }

    fn punch(&self, pages: Range<u64>) -> Result<(), Errno> {
        self.0.lock().unwrap()[pages.start as usize..pages.end as usize].fill(0);
        Ok(())
    }
}

/// Writes the pages back that `space` and the kernel have stored to.
pub fn write_back<M: Machine>(
    cpu: &Cpu<'_, M>,
    space: &Space<M>,
    file: &Shared<Object>,
    pages: Range<u64>,
) -> Result<u64, Errno> {
    file.write_back(cpu, pages, |pages| space.write_protect(cpu, file, pages))
}
