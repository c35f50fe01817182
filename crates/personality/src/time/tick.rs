//! The timer interrupt.

use super::deadline::{Due, Local, arm, end_of_turn, sample_is_due};
use super::{expire, now, usage};
use crate::task::{scheduler, thread};
use core::sync::atomic::Ordering;
use faultless_bare::arch::TrapFrame;
use faultless_collections::Weak;

/// The timer interrupt, in user mode, in idle, or in a long system call.
pub fn tick(frame: &TrapFrame) {
    let local = Local::this();
    local.armed.store(u64::MAX, Ordering::Relaxed);
    let now = now();
    while let Some(due) = local.pop(now) {
        match due {
            Due::Wake(thread) => scheduler::wake(&thread),
            Due::Timer(process, key) => {
                if let Some(process) = Weak::upgrade(&process) {
                    expire::expire(&process, key);
                }
            }
        }
    }
    let mut next = local.first().min(end_of_turn(now));
    if let Some(thread) = thread::try_current() {
        if sample_is_due(local, now) {
            scheduler::sample(&thread, usage::was_in_kernel(frame));
        }
        next = next.min(now.saturating_add(expire::check_run_time(&thread.process)));
    }
    arm(local, next);
}
