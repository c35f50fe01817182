//! Counts of the operations and events of all rounds.

use super::operations::{Did, OPERATIONS};
use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use faultless::{Counter, Totals};

/// Counters of the subsystem that many rounds must increment.
pub const EXPECTED: [Counter; 14] = [
    Counter::SwapOut,
    Counter::SwapIn,
    Counter::SwapPage,
    Counter::WorkingsetRefaultAnon,
    Counter::PageStolen,
    Counter::PageWritten,
    Counter::CowCopy,
    Counter::SharedPage,
    Counter::AroundPage,
    Counter::Bus,
    Counter::Spf,
    Counter::SpfVmaChanged,
    Counter::VmaLockSuccess,
    Counter::MigrateFail,
];

/// Counts of all rounds.
#[derive(Debug)]
pub struct Tally {
    done: Vec<AtomicU64>,
    refused: Vec<AtomicU64>,
    bus: AtomicU64,
    out_of_memory: AtomicU64,
    counters: [AtomicU64; EXPECTED.len()],
}

impl Default for Tally {
    fn default() -> Self {
        let zeros = || OPERATIONS.iter().map(|_| AtomicU64::new(0)).collect();
        Self {
            done: zeros(),
            refused: zeros(),
            bus: 0.into(),
            out_of_memory: 0.into(),
            counters: core::array::from_fn(|_| AtomicU64::new(0)),
        }
    }
}

impl Tally {
    /// Counts an operation.
    pub fn operation(&self, number: usize, did: Did) {
        match did {
            Did::All => self.done[number].fetch_add(1, Relaxed),
            Did::Refused => self.refused[number].fetch_add(1, Relaxed),
            Did::Nothing => 0,
        };
    }

    /// Counts an access stopped by a store or a cut.
    pub fn bus(&self) {
        self.bus.fetch_add(1, Relaxed);
    }

    /// Counts an access for which no frame was left.
    pub fn out_of_memory(&self) {
        self.out_of_memory.fetch_add(1, Relaxed);
    }

    /// Adds the counters of a machine.
    pub fn add_counters(&self, totals: &Totals) {
        for (sum, counter) in self.counters.iter().zip(EXPECTED) {
            sum.fetch_add(totals.get(counter), Relaxed);
        }
    }

    /// Returns the names of expected operations and counters without a count.
    pub fn missing(&self) -> Vec<&'static str> {
        let operations = OPERATIONS.iter().zip(&self.done).map(|(it, done)| (it.name, done));
        let counters = EXPECTED.iter().map(|counter| counter.name()).zip(&self.counters);
        let all = operations.chain(counters);
        all.filter(|(_, count)| count.load(Relaxed) == 0).map(|(name, _)| name).collect()
    }

    /// Returns the number of all finished and refused operations.
    pub fn operations(&self) -> u64 {
        self.done.iter().chain(&self.refused).map(|count| count.load(Relaxed)).sum()
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:<16} {:>10} {:>10}", "operation", "done", "refused")?;
        for ((operation, done), refused) in OPERATIONS.iter().zip(&self.done).zip(&self.refused) {
            let (done, refused) = (done.load(Relaxed), refused.load(Relaxed));
            writeln!(f, "{:<16} {done:>10} {refused:>10}", operation.name)?;
        }
        for (counter, count) in EXPECTED.iter().zip(&self.counters) {
            writeln!(f, "{} {}", counter.name(), count.load(Relaxed))?;
        }
        write!(
            f,
            "accesses without a page: {} by a store or a cut, {} for lack of memory",
            self.bus.load(Relaxed),
            self.out_of_memory.load(Relaxed),
        )
    }
}
