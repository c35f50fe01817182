//! Frames that are set aside for copies from and to user memory.
//!
//! Such a copy may hold any lock, so where no frame is free it can neither wait for one nor kill a program. The reserve lends it what a fault needs, the
//! copy goes on, and the task [notes](Lack) that: on its return to user mode, where it holds nothing, the kernel ends a program or waits for
//! the end of one, and fills the reserve again. So a program that only makes system calls does not see that memory is out,
//! and a task that ends can still tell others of it.
//!
//! Where the reserve is used up, too, the copy fails.

use crate::heap;
use crate::machine::Bare;
use crate::percpu;
use crate::sync::Mutex;
use core::sync::atomic::{AtomicUsize, Ordering};
use faultless::Block;
use faultless_collections::Vec;

/// Whether a task found no free frame where it could not wait for one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Lack {
    /// It did not.
    #[default]
    None,
    /// The reserve lent what was missing.
    Lent,
    /// A copy failed.
    Failed,
    /// A copy failed, and not because memory is out: its page is mapped as often as can be counted.
    Hopeless,
}

/// Whether an operation of this CPU that just failed as out of memory did so because frames, or the heap, were exhausted.
pub fn is_lack() -> bool {
    percpu::cpu().take_starved() || heap::tight()
}

/// One part of memory in so many, in frames.
const PART: u64 = 512;
/// The fewest and the most frames.
const LEAST: u64 = 16;
const MOST: u64 = 1024;
/// The most frames that a fault takes: a page, and a table of each level below the root.
const NEEDED: usize = 4;

static FRAMES: Mutex<Vec<Block<'static, Bare>>> = Mutex::new(Vec::new());
/// How many frames are lent.
static LENT: AtomicUsize = AtomicUsize::new(0);

/// Sets the frames aside. Called once, when the subsystem works.
pub(crate) fn init() {
    let most = (percpu::vm().total_frames() / PART).clamp(LEAST, MOST) as usize;
    // Room for all of them, so that to take them back needs no memory.
    *FRAMES.lock() = Vec::try_with_capacity(most).expect("the heap is empty yet");
    LENT.store(most, Ordering::Relaxed);
    fill();
}

/// Lends frames for one fault: they are free now. False: there are none.
pub(crate) fn lend() -> bool {
    let lent: [_; NEEDED] = {
        let mut frames = FRAMES.lock();
        core::array::from_fn(|_| frames.pop())
    };
    let count = lent.iter().flatten().count();
    LENT.fetch_add(count, Ordering::Relaxed);
    count != 0
}

/// Takes back what is lent, as far as there are free frames, and returns whether that was all. The caller holds no lock.
#[inline]
pub fn fill() -> bool {
    LENT.load(Ordering::Relaxed) == 0 || take_back()
}

#[cold]
fn take_back() -> bool {
    let mut evicts = true;
    loop {
        let claimed =
            LENT.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |lent| lent.checked_sub(1));
        let Ok(missing) = claimed else { return true };
        let cpu = percpu::cpu();
        let taken = cpu.alloc_block(0);
        // Once: pages that can be evicted are no reason to say that memory is out.
        let taken = if taken.is_err() && core::mem::take(&mut evicts) {
            cpu.reclaim(missing as u64);
            cpu.alloc_block(0)
        } else {
            taken
        };
        let kept = taken.and_then(|frame| FRAMES.lock().try_push(frame));
        if kept.is_err() {
            LENT.fetch_add(1, Ordering::Relaxed);
            return false;
        }
    }
}
