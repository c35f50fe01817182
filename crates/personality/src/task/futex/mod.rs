//! Futexes: waiting for a word of memory to change.
//!
//! A waiter is in the bucket of its word's [`Key`]. It reads the word with the bucket locked; a
//! thread that changes the word wakes waiters afterwards, with the bucket locked. So the waiter
//! sees the change, or the waker sees the waiter. The read may fault with the bucket locked: a
//! fault never blocks, and CPUs that wait for the bucket serve flush requests.
//!
//! The key of a word in shared memory is its object and offset, so that processes may map the
//! object at different addresses; any other key is the space and the address.
//!
//! A waiter that times out removes itself from its present bucket, whose number is stored in its
//! thread: the waiter may be moved only with this bucket locked.

mod waiter;

pub(super) use waiter::Waiter;

use super::scheduler;
use super::thread::{Thread, current};
use super::wait::{Stop, wait_until};
use crate::errno::{Errno, Result};
use core::sync::atomic::Ordering;
use faultless_bare::arch::user;
use faultless_bare::sync::Mutex;
use faultless_collections::{Arc, Chain, Link, Linked};
use linux_raw_sys::general as nr;
use waiter::{BUCKETS, Key};

/// The buckets, as a kind of chains.
#[derive(Debug)]
pub(super) struct Waits;

// SAFETY: the field has no other use.
unsafe impl Linked<Waits> for Thread {
    fn link(&self) -> &Link<Self> {
        &self.futex_link
    }
}

type Bucket = Chain<Thread, Waits>;

static TABLE: [Mutex<Bucket>; BUCKETS] = [const { Mutex::new(Chain::new()) }; BUCKETS];

/// Waits for a wake-up of the word at `addr` with one of `bits`, if the word is `expected`.
/// `deadline` is in nanoseconds since boot.
///
/// # Errors
/// `EAGAIN`: the word is not `expected`. `ETIMEDOUT`. `EFAULT`, `EINVAL`: the address is bad.
/// [`RESTART`](Errno::RESTART): a signal.
pub fn wait(
    addr: u64,
    private: bool,
    expected: u32,
    bits: u32,
    deadline: Option<u64>,
) -> Result<()> {
    let key = Key::of(addr, private)?;
    let thread = current().arc();
    {
        let mut bucket = TABLE[key.bucket()].lock();
        if user::load_u32(addr)? != expected {
            return Err(Errno::EAGAIN);
        }
        thread.futex.woken.store(false, Ordering::Relaxed);
        thread.futex.bucket.store(key.bucket(), Ordering::Relaxed);
        thread.futex.key.set(Some(key));
        thread.futex.bits.set(bits);
        bucket.push(thread.clone());
    }
    let woken = || thread.futex.woken.load(Ordering::SeqCst).then_some(());
    let waited = wait_until(&[], deadline, woken);
    let Err(stop) = waited else {
        return Ok(());
    };
    if !take_out(&thread) {
        // A wake-up came after the end of the wait.
        return Ok(());
    }
    Err(match stop {
        Stop::Timeout => Errno::ETIMEDOUT,
        Stop::Signal => Errno::RESTART,
    })
}

/// Removes `thread` from its bucket. False: the thread was woken.
fn take_out(thread: &Arc<Thread>) -> bool {
    loop {
        let at = thread.futex.bucket.load(Ordering::Relaxed);
        let mut bucket = TABLE[at].lock();
        if thread.futex.bucket.load(Ordering::Relaxed) != at {
            continue;
        }
        return bucket.take(|waiter| Arc::ptr_eq(waiter, thread)).is_some();
    }
}

/// Wakes up to `count` threads that wait for the word at `addr` with one of `bits`. Returns the
/// number of woken threads.
///
/// # Errors
/// `EFAULT`, `EINVAL`: the address is bad.
pub fn wake(addr: u64, private: bool, count: u32, bits: u32) -> Result {
    let key = Key::of(addr, private)?;
    Ok(wake_in(&mut TABLE[key.bucket()].lock(), key, count, bits))
}

fn wake_in(bucket: &mut Bucket, key: Key, count: u32, bits: u32) -> u64 {
    let wanted =
        |it: &Arc<Thread>| it.futex.key.get() == Some(key) && it.futex.bits.get() & bits != 0;
    let mut woken = 0;
    // First come, first served.
    while woken < u64::from(count)
        && let Some(waiter) = bucket.take(wanted)
    {
        waiter.futex.woken.store(true, Ordering::SeqCst);
        scheduler::wake(&waiter);
        woken += 1;
    }
    woken
}

/// If the word at `addr` is `expected`, wakes up to `count` threads waiting for the word, and moves
/// up to `more` other waiters to the word at `target`. Returns the numbers of threads woken and
/// moved.
///
/// # Errors
/// `EAGAIN`: the word is not `expected`. `EFAULT`, `EINVAL`: an address is bad.
pub fn requeue(
    addr: u64,
    target: u64,
    private: bool,
    count: u32,
    more: u32,
    expected: Option<u32>,
) -> Result<(u64, u64)> {
    let (from, to) = (Key::of(addr, private)?, Key::of(target, private)?);
    let waits = |it: &Arc<Thread>| it.futex.key.get() == Some(from);
    let move_all = |source: &mut Bucket, target: Option<&mut Bucket>| {
        if let Some(expected) = expected
            && user::load_u32(addr)? != expected
        {
            return Err(Errno::EAGAIN);
        }
        let woken = wake_in(source, from, count, u32::MAX);
        let mut moved = 0;
        let Some(target) = target else {
            for waiter in source.iter().filter(|it| waits(it)).take(more as usize) {
                waiter.futex.key.set(Some(to));
                moved += 1;
            }
            return Ok((woken, moved));
        };
        while moved < u64::from(more)
            && let Some(waiter) = source.take(waits)
        {
            waiter.futex.bucket.store(to.bucket(), Ordering::Relaxed);
            waiter.futex.key.set(Some(to));
            target.push(waiter);
            moved += 1;
        }
        Ok((woken, moved))
    };
    with_both(from.bucket(), to.bucket(), move_all)
}

/// Changes the word at `target` by `operation` and wakes up to `count` threads waiting for the word
/// at `addr`. If the old value at `target` meets the comparison in `operation`, also wakes up to
/// `more` threads waiting for the word at `target`. Returns the number of woken threads.
///
/// # Errors
/// `ENOSYS`: `operation` is unknown. `EFAULT`, `EINVAL`: an address is bad.
pub fn wake_op(
    addr: u64,
    target: u64,
    private: bool,
    count: u32,
    more: u32,
    operation: u32,
) -> Result {
    let (first, second) = (Key::of(addr, private)?, Key::of(target, private)?);
    with_both(first.bucket(), second.bucket(), |source, other| {
        let old = change(target, operation)?;
        let mut woken = wake_in(source, first, count, u32::MAX);
        if compares(old, operation)? {
            woken += wake_in(other.unwrap_or(source), second, more, u32::MAX);
        }
        Ok(woken)
    })
}

/// Twelve bits of `operation`, sign-extended.
const fn signed(bits: u32) -> u32 {
    ((bits << 20) as i32 >> 20) as u32
}

fn change(target: u64, operation: u32) -> Result<u32> {
    let argument = signed(operation >> 12);
    let kind = operation >> 28;
    let argument =
        if kind & nr::FUTEX_OP_OPARG_SHIFT != 0 { 1 << (argument & 31) } else { argument };
    let new = |old: u32| {
        Ok(match kind & 7 {
            nr::FUTEX_OP_SET => argument,
            nr::FUTEX_OP_ADD => old.wrapping_add(argument),
            nr::FUTEX_OP_OR => old | argument,
            nr::FUTEX_OP_ANDN => old & !argument,
            nr::FUTEX_OP_XOR => old ^ argument,
            _ => return Err(Errno::ENOSYS),
        })
    };
    compares(0, operation)?;
    loop {
        let old = user::load_u32(target)?;
        if user::compare_exchange_u32(target, old, new(old)?)?.is_ok() {
            return Ok(old);
        }
    }
}

fn compares(old: u32, operation: u32) -> Result<bool> {
    let (old, argument) = (old as i32, signed(operation) as i32);
    Ok(match operation >> 24 & 15 {
        nr::FUTEX_OP_CMP_EQ => old == argument,
        nr::FUTEX_OP_CMP_NE => old != argument,
        nr::FUTEX_OP_CMP_LT => old < argument,
        nr::FUTEX_OP_CMP_LE => old <= argument,
        nr::FUTEX_OP_CMP_GT => old > argument,
        nr::FUTEX_OP_CMP_GE => old >= argument,
        _ => return Err(Errno::ENOSYS),
    })
}

/// Locks two buckets, the lower first, and passes both to `act`; only the first if both are the
/// same.
fn with_both<R>(
    first: usize,
    second: usize,
    act: impl FnOnce(&mut Bucket, Option<&mut Bucket>) -> R,
) -> R {
    if first == second {
        return act(&mut TABLE[first].lock(), None);
    }
    let mut lower = TABLE[first.min(second)].lock();
    let mut higher = TABLE[first.max(second)].lock();
    if first < second {
        act(&mut lower, Some(&mut higher))
    } else {
        act(&mut higher, Some(&mut lower))
    }
}

/// Marks the futexes of a robust list, held by thread `tid` at its end, with `FUTEX_OWNER_DIED`,
/// and wakes a waiter of each. The list lies in user memory and may contain arbitrary data.
pub(super) fn release_robust(head: u64, tid: u32) {
    /// Linux's limit.
    const LIMIT: usize = 2048;
    let follow = || -> Result<()> {
        let next: u64 = user::read(head)?;
        let offset: u64 = user::read(head.wrapping_add(8))?;
        let pending: u64 = user::read(head.wrapping_add(16))?;
        // The lowest bit marks a priority-inheritance futex.
        let word = |entry: u64| (entry & !1).wrapping_add(offset);
        let mut entry = next;
        for _ in 0..LIMIT {
            if entry & !1 == head {
                break;
            }
            let next = user::read(entry & !1);
            if entry & !1 != pending & !1 {
                mark_dead(word(entry), tid, false)?;
            }
            entry = next?;
        }
        if pending & !1 != 0 {
            mark_dead(word(pending), tid, true)?;
        }
        Ok(())
    };
    // The list ends at a bad address.
    let _ = follow();
}

fn mark_dead(addr: u64, tid: u32, pending: bool) -> Result<()> {
    if !addr.is_multiple_of(4) {
        return Err(Errno::EINVAL);
    }
    loop {
        let old = user::load_u32(addr)?;
        if pending && old == 0 {
            // The owner released the futex, but possibly without waking a waiter.
            wake(addr, false, 1, u32::MAX)?;
            return Ok(());
        }
        if old & nr::FUTEX_TID_MASK != tid {
            return Ok(());
        }
        let new = old & nr::FUTEX_WAITERS | nr::FUTEX_OWNER_DIED;
        if user::compare_exchange_u32(addr, old, new)?.is_ok() {
            if old & nr::FUTEX_WAITERS != 0 {
                wake(addr, false, 1, u32::MAX)?;
            }
            return Ok(());
        }
    }
}
