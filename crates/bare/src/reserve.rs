//! Frames set aside for copies from and to user memory.
//!
//! Such a copy may hold any lock, so without a free frame the copy can neither wait for a frame nor
//! kill a program. The reserve lends the frames that a fault needs, the copy continues, and the
//! task [notes](Lack) the loan. On the task's return to user mode, where it holds no locks, the
//! kernel ends a program or waits for the end of a program, and refills the reserve. So a program
//! that only makes system calls does not notice the lack of memory, and an ending task can still
//! notify other tasks.
//!
//! If the reserve is used up, too, the copy fails.

use crate::heap;
use crate::machine::Bare;
use crate::percpu;
use crate::sync::Mutex;
use core::sync::atomic::{AtomicUsize, Ordering};
use faultless::Block;
use faultless_collections::Vec;

/// The lack of memory found by a task that could not wait for a frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Lack {
    /// No lack.
    #[default]
    None,
    /// The reserve lent the missing frames.
    Lent,
    /// A copy failed.
    Failed,
    /// A copy failed for another reason than lack of memory: the counter of its page's mappings is
    /// at its maximum.
    Hopeless,
}

/// Returns whether the last out-of-memory failure on this CPU was caused by a lack of frames or of
/// heap.
pub fn is_lack() -> bool {
    percpu::cpu().take_starved() || heap::tight()
}

/// The size of the reserve is 1/`PART` of memory, in frames.
const PART: u64 = 512;
/// The bounds of the size, in frames.
const LEAST: u64 = 16;
const MOST: u64 = 1024;
/// The maximum number of frames used by a fault: a page, and a table of each level below the root.
const NEEDED: usize = 4;

static FRAMES: Mutex<Vec<Block<'static, Bare>>> = Mutex::new(Vec::new());
/// The number of lent frames.
static LENT: AtomicUsize = AtomicUsize::new(0);

/// Sets the frames aside. Called once, when the subsystem works.
pub(crate) fn init() {
    let most = (percpu::vm().total_frames() / PART).clamp(LEAST, MOST) as usize;
    // Capacity for all frames, so that taking frames back needs no memory.
    *FRAMES.lock() = Vec::try_with_capacity(most).expect("the heap is empty yet");
    LENT.store(most, Ordering::Relaxed);
    fill();
}

/// Lends frames for one fault by freeing them. False: the reserve is empty.
pub(crate) fn lend() -> bool {
    let lent: [_; NEEDED] = {
        let mut frames = FRAMES.lock();
        core::array::from_fn(|_| frames.pop())
    };
    let count = lent.iter().flatten().count();
    LENT.fetch_add(count, Ordering::Relaxed);
    count != 0
}

/// Takes back lent frames, as far as frames are free, and returns whether the reserve is full. The
/// caller holds no lock.
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
        // Evict once, because memory is not out while pages can be evicted.
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
