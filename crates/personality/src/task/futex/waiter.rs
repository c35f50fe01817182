//! The key of a futex word, and the state of a waiting thread.

use crate::errno::{Errno, Result};
use core::cell::Cell;
use core::sync::atomic::{AtomicBool, AtomicUsize};
use faultless::{Prot, Space, VirtRange};
use faultless_bare::machine::Bare;
use faultless_bare::percpu;

/// The number of buckets.
pub(super) const BUCKETS: usize = 256;

/// The key of a futex word, the same for all threads that can access the word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Key {
    /// The number of the space, or the identity of the object.
    home: u64,
    /// The address in the space, or the offset in the object.
    place: u64,
    shared: bool,
}

impl Key {
    /// The key of the word at `addr` in the running space.
    pub(super) fn of(addr: u64, private: bool) -> Result<Self> {
        if !addr.is_multiple_of(4) {
            return Err(Errno::EINVAL);
        }
        if addr >= faultless::USER_END {
            return Err(Errno::EFAULT);
        }
        // SAFETY: a thread runs, so this CPU runs the space of its process. The space exists at
        // least until the end of the system call.
        let space = unsafe { &*percpu::this().space.get() };
        let shared = if private { None } else { space.shared_place(percpu::cpu(), addr) };
        if !private {
            check_access(space, addr)?;
        }
        Ok(match shared {
            Some((home, place)) => Self { home, place, shared: true },
            None => Self { home: space.id().0, place: addr, shared: false },
        })
    }

    pub(super) fn bucket(self) -> usize {
        // Multiplicative hashing: the upper bits are well mixed.
        let mixed = (self.home ^ self.place >> 2).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed >> (64 - BUCKETS.ilog2())) as usize
    }
}

/// Checks that a word without `FUTEX_PRIVATE_FLAG` can be accessed: Linux takes a reference to its
/// page. A private page must be writable, since a copy-on-write page does not identify the word.
fn check_access(space: &Space<Bare>, addr: u64) -> Result<()> {
    let mut allowed = false;
    space.each_area(percpu::cpu(), VirtRange::page(faultless::page_down(addr)), |area| {
        let is_own = area.is_private() && area.memory.object().is_none();
        allowed = area.allows(if is_own { Prot::WRITE } else { Prot::READ });
        false
    });
    if allowed { Ok(()) } else { Err(Errno::EFAULT) }
}

/// The state of a thread waiting for a futex.
#[derive(Debug, Default)]
pub struct Waiter {
    /// The number of the thread's bucket.
    pub(super) bucket: AtomicUsize,
    pub(super) woken: AtomicBool,
    /// The key of the word, and the bits for wake-ups: changed with the bucket locked.
    pub(super) key: Cell<Option<Key>>,
    pub(super) bits: Cell<u32>,
}
