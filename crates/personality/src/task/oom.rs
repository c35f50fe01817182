//! Out of memory: which process is killed.
//!
//! As on Linux the process with the most [points](badness), which need not be the one that found no memory. Where one ends already whose memory will
//! be free, that is awaited instead. [`lack`](super::lack) has the rest: who waits, and for what.

use super::memory::Memory;
use super::process::{self, Process};
use crate::signal;
use core::ptr;
use core::sync::atomic::{AtomicU64, Ordering};
use faultless_bare::percpu;
use faultless_collections::Arc;
use linux_raw_sys::general as nr;

/// The largest `oom_score_adj`. A process with the negative of it is never killed.
pub const MOST: i32 = 1000;

/// How many processes were chosen.
pub(super) static KILLS: AtomicU64 = AtomicU64::new(0);

/// How many processes were killed for want of memory; those that shared their memory are not counted.
pub fn kills() -> u64 {
    KILLS.load(Ordering::Relaxed)
}

/// A process that is to be killed, or that ends already.
pub(super) struct Victim {
    pub process: Arc<Process>,
    pub memory: Arc<Memory>,
    /// See [`badness`].
    pub points: i64,
}

/// The process that Linux's rule chooses; or one that ends already, whose memory will be free without a second victim. `None`: all
/// processes are protected.
pub(super) fn choose() -> Option<Victim> {
    let total = total_pages();
    let (mut best, mut ending): (Option<Victim>, Option<Victim>) = (None, None);
    process::each(|process| {
        let Some(memory) = process.memory().filter(|_| ending.is_none()) else { return };
        let points = badness(process, &memory, total);
        let victim = |points| Victim { process: process.clone(), memory: memory.clone(), points };
        if is_ending(process) && !has_other_user(&memory) {
            ending = Some(victim(points.unwrap_or_default()));
        } else if let Some(points) = points
            // Of equals the last one, as on Linux.
            && best.as_ref().is_none_or(|best| best.points <= points)
        {
            best = Some(victim(points));
        }
    });
    ending.or(best)
}

/// Whether the memory is that of the process.
pub(super) fn uses(process: &Process, memory: &Memory) -> bool {
    ptr::eq(process.memory.space(), memory.space())
}

/// Whether the process ends without a further signal.
pub(super) fn is_ending(process: &Process) -> bool {
    let killed = process.signals.waiting() & signal::bit(nr::SIGKILL) != 0;
    killed || process.end.status.lock().is_some()
}

/// Whether a process that does not end uses the memory.
fn has_other_user(memory: &Memory) -> bool {
    let mut found = false;
    process::each(|process| found |= uses(process, memory) && !is_ending(process));
    found
}

/// The pages of memory and of the swap area.
pub fn total_pages() -> u64 {
    (percpu::vm().total_frames() + percpu::cpu().swap_usage().0).max(1)
}

/// The points of a process, in pages, by Linux's rule: what its end would free, resident, in the swap area and in page tables; and its `oom_score_adj`, of
/// which 1000 are all `total` pages. `None`: it is not killed, for it is protected, or uses its parent's memory (`vfork`), which has points of its own.
pub fn badness(process: &Process, memory: &Memory, total: u64) -> Option<i64> {
    let adjustment = process.oom_score_adj.load(Ordering::Relaxed);
    if adjustment == -MOST || is_in_vfork(process) {
        return None;
    }
    let (space, cpu) = (memory.space(), percpu::cpu());
    let pages = space.resident_pages(cpu) + space.swapped_pages(cpu) + memory.table_pages();
    Some(pages as i64 + i64::from(adjustment) * (total / MOST as u64) as i64)
}

/// Whether the process was made by `vfork` and has not called `execve` yet.
pub fn is_in_vfork(process: &Process) -> bool {
    process.by_vfork.load(Ordering::Relaxed)
        && process::find(process.parent())
            .is_some_and(|parent| ptr::eq(parent.memory.space(), process.memory.space()))
}

/// Sets `oom_score_adj` of a process, and as on Linux of those that share its memory, but not by `vfork`.
pub fn adjust(process: &Process, adjustment: i32) {
    process.oom_score_adj.store(adjustment, Ordering::Relaxed);
    let by_vfork = |of: &Process| of.by_vfork.load(Ordering::Relaxed);
    let Some(memory) = process.memory().filter(|_| !by_vfork(process)) else { return };
    process::each(|other| {
        if uses(other, &memory) && !by_vfork(other) {
            other.oom_score_adj.store(adjustment, Ordering::Relaxed);
        }
    });
}
