//! Out of memory: the choice of the process to kill.
//!
//! As on Linux, the victim is the process with the most [points](badness), which may differ from
//! the process that found no memory. If a process is already ending and its memory will become
//! free, no other process is killed; the threads wait for this process. [`lack`](super::lack)
//! contains the waiting.

use super::memory::Memory;
use super::process::{self, Process};
use crate::signal;
use core::ptr;
use core::sync::atomic::{AtomicU64, Ordering};
use faultless_bare::percpu;
use faultless_collections::Arc;
use linux_raw_sys::general as nr;

/// The maximum of `oom_score_adj`. A process with the negative of this value is never killed.
pub const MOST: i32 = 1000;

/// The number of chosen processes.
pub(super) static KILLS: AtomicU64 = AtomicU64::new(0);

/// Returns the number of processes killed for lack of memory; processes killed because they shared
/// this memory are not counted.
pub fn kills() -> u64 {
    KILLS.load(Ordering::Relaxed)
}

/// A process to be killed, or one that is already ending.
pub(super) struct Victim {
    pub process: Arc<Process>,
    pub memory: Arc<Memory>,
    /// See [`badness`].
    pub points: i64,
}

/// Chooses a victim by Linux's rule; or a process that is already ending, if its memory becomes
/// free without a second victim. `None`: all processes are protected.
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
            // As on Linux, the last process wins a tie.
            && best.as_ref().is_none_or(|best| best.points <= points)
        {
            best = Some(victim(points));
        }
    });
    ending.or(best)
}

/// Returns whether the process uses the memory.
pub(super) fn uses(process: &Process, memory: &Memory) -> bool {
    ptr::eq(process.memory.space(), memory.space())
}

/// Returns whether the process ends without a further signal.
pub(super) fn is_ending(process: &Process) -> bool {
    let killed = process.signals.waiting() & signal::bit(nr::SIGKILL) != 0;
    killed || process.end.status.lock().is_some()
}

/// Returns whether a process that is not ending uses the memory.
fn has_other_user(memory: &Memory) -> bool {
    let mut found = false;
    process::each(|process| found |= uses(process, memory) && !is_ending(process));
    found
}

/// The pages of memory and of the swap area.
pub fn total_pages() -> u64 {
    (percpu::vm().total_frames() + percpu::cpu().swap_usage().0).max(1)
}

/// Returns the points of a process, in pages, by Linux's rule: the pages its end would free
/// (resident, swapped, page tables), plus `oom_score_adj`, of which 1000 correspond to `total`
/// pages. `None`: the process is not killed, because it is protected, or uses its parent's memory
/// (`vfork`), which has points of its own.
pub fn badness(process: &Process, memory: &Memory, total: u64) -> Option<i64> {
    let adjustment = process.oom_score_adj.load(Ordering::Relaxed);
    if adjustment == -MOST || is_in_vfork(process) {
        return None;
    }
    let (space, cpu) = (memory.space(), percpu::cpu());
    let pages = space.resident_pages(cpu) + space.swapped_pages(cpu) + memory.table_pages();
    Some(pages as i64 + i64::from(adjustment) * (total / MOST as u64) as i64)
}

/// Returns whether the process was made by `vfork` and has not called `execve` yet.
pub fn is_in_vfork(process: &Process) -> bool {
    process.by_vfork.load(Ordering::Relaxed)
        && process::find(process.parent())
            .is_some_and(|parent| ptr::eq(parent.memory.space(), process.memory.space()))
}

/// Sets `oom_score_adj` of a process. As on Linux, also sets the value of processes sharing the
/// memory, except children of `vfork`.
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
