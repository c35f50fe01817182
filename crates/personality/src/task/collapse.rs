//! The background collapse of text: what is in use, and mapped in base pages, is put on huge pages.
//!
//! Linux has a kernel thread for this, khugepaged. Here each process looks at its own text, in one of its threads on the return to user mode, as
//! Linux does for NUMA placement. So no other CPU joins the space, nobody looks at a process that ends, and a process that sleeps
//! is left alone. One that ran for another second (`text_scan=MILLISECONDS` on the command line) looks at a bounded part of its space, and collapses 2 MiB at most: as much as
//! khugepaged, which by default collapses up to 8 huge pages in 10 seconds.

use super::memory::Memory;
use core::sync::atomic::{AtomicU64, Ordering};
use faultless_bare::boot::words;
use faultless_bare::percpu;
use faultless_collections::Arc;

/// The CPU time between two looks, in nanoseconds, unless the command line says otherwise.
const PERIOD: u64 = 1_000_000_000;
/// How many of the 512 base pages must have been accessed. For fewer it is not worth reading, or copying, the rest.
const LEAST: usize = 64;

/// The CPU time between two looks, in nanoseconds.
fn period() -> u64 {
    static KNOWN: AtomicU64 = AtomicU64::new(0);
    let known = KNOWN.load(Ordering::Relaxed);
    if known != 0 {
        return known;
    }
    // Whoever comes first reads it; it is the same for all.
    let said = words("text_scan").last().and_then(|ms| ms.parse::<u64>().ok());
    let period = said.map_or(PERIOD, |ms| ms.max(1).saturating_mul(1_000_000));
    KNOWN.store(period, Ordering::Relaxed);
    period
}

/// When a process looks at its text again, and where.
#[derive(Debug, Default)]
pub struct TextScan {
    /// CPU time since the last look, of all threads.
    ran: AtomicU64,
    /// The address where it goes on.
    next: AtomicU64,
}

impl TextScan {
    /// A thread ran for so many nanoseconds.
    pub fn ran(&self, nanoseconds: u64) {
        self.ran.fetch_add(nanoseconds, Ordering::Relaxed);
    }

    /// Looks at the text in the `memory` of the process, of which a thread runs here, if that is due. The caller holds no lock.
    pub fn run(&self, memory: impl FnOnce() -> Option<Arc<Memory>>) {
        // One of the threads takes it.
        let due = || self.ran.load(Ordering::Relaxed) >= period();
        if !due() || self.ran.swap(0, Ordering::Relaxed) < period() {
            return;
        }
        let Some(memory) = memory() else { return };
        let from = self.next.load(Ordering::Relaxed);
        let next = memory.space().collapse_text(percpu::cpu(), from, LEAST);
        self.next.store(next.unwrap_or(0), Ordering::Relaxed);
    }
}
