//! The file of a case: an object with a store, which holds the first word of each page. All other
//! words are zeros.
//!
//! The store of a *slow* file keeps reads while two CPUs run. Each of these reads is
//! [completed](Words::complete) by a thread that waits for the read or for another read, or by a
//! device, which has a CPU of its own. A call that waits inside the subsystem completes no reads.

use super::op::{Besides, Hand, LEAF, Op, Ret, WINDOW};
use faultless::Cpu;
use faultless::{
    BackingStore, Errno, Machine, Object, PAGE_SIZE, ReadRun, Reading, Shared, Space, StoreError,
    WriteRun,
};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// The store of the file.
#[derive(Debug)]
pub struct Words {
    words: Mutex<Vec<u64>>,
    /// The number of pages below the window.
    pub below: i64,
    /// Whether reads are currently kept.
    slow: AtomicBool,
    /// The kept reads, with their number of bytes. No lock is held across a step of a scheduler.
    taken: Mutex<VecDeque<(Reading, usize)>>,
}

/// The choice among the kept reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    Oldest,
    Newest,
}

impl Words {
    /// Creates one word for each page of the window, and for the pages below. Each word has more
    /// than one byte, so that it changes if the file ends behind the first byte.
    pub fn new(below: i64) -> Arc<Self> {
        let word = |page: u64| 0x100 + 200 + page;
        Arc::new(Self {
            words: Mutex::new((0..(below + WINDOW) as u64).map(word).collect()),
            below,
            slow: AtomicBool::new(false),
            taken: Mutex::default(),
        })
    }

    /// Returns the contents.
    pub fn get(&self) -> Vec<u64> {
        self.words.lock().unwrap().clone()
    }

    pub fn set_slow(&self, slow: bool) {
        self.slow.store(slow, Ordering::Relaxed);
    }

    pub fn is_slow(&self) -> bool {
        self.slow.load(Ordering::Relaxed)
    }

    /// Completes a read, if any. Occasionally the read ends early, and waiters for the rest must
    /// retry.
    pub fn complete<H: Hand>(&self, hand: &H, which: Which) -> bool {
        hand.poll();
        let taken = {
            let mut taken = self.taken.lock().unwrap();
            match which {
                Which::Oldest => taken.pop_front(),
                Which::Newest => taken.pop_back(),
            }
        };
        let Some((reading, done)) = taken else { return false };
        let early = hand.random(4) == 0;
        let part = done.min(hand.random(2) * PAGE_SIZE as usize);
        let failed = StoreError { done: part, errno: Errno::EAGAIN };
        reading.complete(hand.cpu(), if early { Err(failed) } else { Ok(done) });
        true
    }

    /// The wait of a thread that needs a page during its read: the thread completes some read, its
    /// own or another, or sleeps until its own read ends.
    pub fn wait<H: Hand>(&self, hand: &H) {
        let completed = match hand.random(3) {
            0 => self.complete(hand, Which::Oldest),
            1 => self.complete(hand, Which::Newest),
            _ => false,
        };
        if !completed {
            hand.cpu().await_read().expect("no read fails");
        }
    }
}

impl BackingStore for Words {
    fn len(&self) -> u64 {
        self.words.lock().unwrap().len() as u64 * PAGE_SIZE
    }

    fn preferred_pages(&self) -> usize {
        2
    }

    fn read(&self, run: &mut ReadRun) -> Result<usize, StoreError> {
        // Shorter, if another CPU has just truncated the file.
        let words = self.get();
        let first = run.first() as usize;
        let mut done = 0;
        for (word, page) in words.iter().skip(first).zip(run.memory()) {
            page.fill(0);
            let len = page.len().min(8);
            page[..len].copy_from_slice(&word.to_le_bytes()[..len]);
            done += page.len();
        }
        if self.is_slow()
            && let Some(reading) = run.take_along()
        {
            self.taken.lock().unwrap().push_back((reading, done));
        }
        Ok(done)
    }

    fn write(&self, run: &WriteRun<'_>) -> Result<(), StoreError> {
        let mut words = self.words.lock().unwrap();
        for (index, (page, len)) in (run.first() as usize..).zip(run.memory()) {
            // SAFETY: a word of a page, valid for reads during the call.
            words[index] = low(unsafe { page.cast::<u64>().read_volatile() }, len as u64);
        }
        Ok(())
    }

    fn set_len(&self, bytes: u64) -> Result<(), Errno> {
        let mut words = self.words.lock().unwrap();
        words.resize(bytes.div_ceil(PAGE_SIZE) as usize, 0);
        if let (Some(last), len @ 1..) = (words.last_mut(), bytes % PAGE_SIZE) {
            *last = low(*last, len);
        }
        Ok(())
    }

    fn punch(&self, pages: Range<u64>) -> Result<(), Errno> {
        self.words.lock().unwrap()[pages.start as usize..pages.end as usize].fill(0);
        Ok(())
    }
}

/// Returns the part of a page's word in the first `bytes` bytes of the page.
fn low(word: u64, bytes: u64) -> u64 {
    if bytes < 8 { word & ((1 << (8 * bytes)) - 1) } else { word }
}

/// Writes back the pages to which `space` and the kernel have stored.
pub fn write_back<M: Machine>(
    cpu: &Cpu<'_, M>,
    space: &Space<M>,
    file: &Shared<Object>,
    pages: Range<u64>,
) -> Result<u64, Errno> {
    file.write_back(cpu, pages, |pages| space.write_protect(cpu, file, pages))
}

impl Op {
    /// The file of a case, of which some pages were read.
    pub fn make_file<H: Hand>(self, hand: &H, besides: &Besides<H::Child>) -> Shared<Object> {
        let below = if self == Self::Text { -LEAF.at } else { 0 };
        let words = besides.words.get_or_init(|| Words::new(below));
        let file = Object::of_store(hand.cpu(), words.clone(), 1).expect("memory for the file");
        // Some pages are read together with their neighbours.
        let read: &[u64] = match self {
            Self::File => &[0, 5],
            Self::SlowFile => &[0],
            // A folio is read at once.
            _ => &[],
        };
        for &index in read {
            file.read_page(hand.cpu(), index, |_| ()).expect("memory for a page");
        }
        file
    }

    /// An operation on the pages of a file.
    pub fn of_file<H: Hand>(
        self,
        hand: &H,
        besides: &Besides<H::Child>,
        file: &Shared<Object>,
    ) -> Ret {
        let (space, cpu) = (hand.space(), hand.cpu());
        let done = match self {
            Self::WriteBack(span) => write_back(cpu, space, file, besides.indices(span)).map(drop),
            Self::DropClean(span) => {
                file.drop_clean(cpu, besides.indices(span));
                Ok(())
            }
            Self::Evict(span) => {
                file.evict(cpu, besides.indices(span));
                Ok(())
            }
            Self::ReadPage(at) => {
                // SAFETY: a word of a lent page.
                let word = |at: *const u8| unsafe { AtomicU64::from_ptr(at.cast_mut().cast()) };
                let load = |at: Option<_>| at.map_or(0, |at| word(at).load(Ordering::Relaxed));
                let read = file.read_page(cpu, besides.index(at), load);
                return read.map_or_else(Ret::Refused, Ret::Word);
            }
            Self::WritePage(at, value) => {
                let write = |at: *mut u8| {
                    // SAFETY: as above.
                    unsafe { AtomicU64::from_ptr(at.cast()) }.swap(value, Ordering::Relaxed)
                };
                let before = file.write_page(cpu, besides.index(at), write);
                return before.map_or_else(Ret::Refused, Ret::Word);
            }
            Self::Overwrite(at, value) => {
                let whole = PAGE_SIZE as usize;
                let write = |at: *mut u8| {
                    // SAFETY: as above. The other bytes are zeros in every page, unlike the bytes
                    // of a new frame.
                    unsafe {
                        AtomicU64::from_ptr(at.cast()).store(value, Ordering::Relaxed);
                        at.add(8).write_bytes(0, whole - 8);
                    }
                    whole
                };
                let stored = file.overwrite_page(cpu, besides.index(at), write);
                stored.map(|stored| assert_eq!(stored, whole, "{self:?} stored part of the page"))
            }
            Self::Extend(pages) => file.set_len(cpu, besides.index(pages) * PAGE_SIZE),
            _ => unreachable!("{self:?} is not about a file"),
        };
        done.map_or_else(Ret::Refused, |()| Ret::Done)
    }
}
