//! The background collapse of text: what is in use, and mapped in base pages, is put on huge pages.
//!
//! Linux has a kernel thread for this, khugepaged. Here each process looks at its own text, in one of its threads on the return to user mode, as
//! Linux does for NUMA placement. So no other CPU joins the space, nobody looks at a process that ends, and a process that sleeps
//! is left alone. One that ran for another [`PERIOD`] looks at a bounded part of its space, and collapses 2 MiB at most: as much as
//! khugepaged, which by default collapses up to 8 huge pages in 10 seconds.

use super::process::Process;
use crate::time::TURN;
use core::sync::atomic::{AtomicU64, Ordering};
use faultless_bare::percpu;

/// The CPU time between two looks, in time slices: one second.
const PERIOD: u64 = 1_000_000_000 / TURN;
/// How many of the 512 base pages must have been accessed. For fewer it is not worth reading, or copying, the rest.
const LEAST: usize = 64;

/// When a process looks at its text again, and where.
#[derive(Debug, Default)]
pub struct TextScan {
    /// Time slices since the last look, of all threads.
    slices: AtomicU64,
    /// The address where it goes on.
    next: AtomicU64,
}

impl TextScan {
    /// A thread ran for a time slice, or was seen at its end. Returns whether a look is due.
    pub fn slice(&self) -> bool {
        self.slices.fetch_add(1, Ordering::Relaxed) + 1 >= PERIOD
    }

    /// Looks at the text of `process`, whose scan this is and of which a thread runs here, if that is due. The caller holds no lock.
    pub fn run(&self, process: &Process) {
        // One of the threads takes it.
        let due = || self.slices.load(Ordering::Relaxed) >= PERIOD;
        if !due() || self.slices.swap(0, Ordering::Relaxed) < PERIOD {
            return;
        }
        let Some(memory) = process.memory() else { return };
        let from = self.next.load(Ordering::Relaxed);
        let next = memory.space().collapse_text(percpu::cpu(), from, LEAST);
        self.next.store(next.unwrap_or(0), Ordering::Relaxed);
    }
}
