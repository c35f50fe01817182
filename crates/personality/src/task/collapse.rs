//! The background collapse of text: moves frequently used text from base pages to huge pages.
//!
//! Linux has a kernel thread for this, khugepaged. Here each process scans its own text, in one of
//! its threads on the return to user mode, like NUMA placement on Linux. So no other CPU joins the
//! space, an ending process is not scanned, and a sleeping process is not disturbed. A process is
//! scanned after each second of CPU time (`text_scan=MILLISECONDS` on the command line). A scan
//! covers a bounded part of the space and collapses at most 2 MiB. This rate is comparable to
//! khugepaged, which by default collapses up to 8 huge pages in 10 seconds.

use super::memory::Memory;
use core::sync::atomic::{AtomicU64, Ordering};
use faultless_bare::boot::words;
use faultless_bare::percpu;
use faultless_collections::Arc;

/// The default CPU time between two scans, in nanoseconds.
const PERIOD: u64 = 1_000_000_000;
/// The minimum number of accessed base pages among the 512 of a huge page. With fewer, reading or
/// copying the rest does not pay off.
const LEAST: usize = 64;

/// The CPU time between two scans, in nanoseconds.
fn period() -> u64 {
    static KNOWN: AtomicU64 = AtomicU64::new(0);
    let known = KNOWN.load(Ordering::Relaxed);
    if known != 0 {
        return known;
    }
    // The first caller parses the word; the result is the same for all callers.
    let said = words("text_scan").last().and_then(|ms| ms.parse::<u64>().ok());
    let period = said.map_or(PERIOD, |ms| ms.max(1).saturating_mul(1_000_000));
    KNOWN.store(period, Ordering::Relaxed);
    period
}

/// The state of the text scan of a process: when the next scan is due, and its start address.
#[derive(Debug, Default)]
pub struct TextScan {
    /// CPU time of all threads since the last scan.
    ran: AtomicU64,
    /// The address at which the next scan continues.
    next: AtomicU64,
}

impl TextScan {
    /// Adds `nanoseconds` of a thread's CPU time.
    pub fn ran(&self, nanoseconds: u64) {
        self.ran.fetch_add(nanoseconds, Ordering::Relaxed);
    }

    /// Scans the text in the `memory` of the running thread's process, if a scan is due. The caller
    /// holds no lock.
    pub fn run(&self, memory: impl FnOnce() -> Option<Arc<Memory>>) {
        // The swap lets exactly one thread run the scan.
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
