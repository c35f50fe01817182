//! Ownership: the only CPU that uses a structure may change it in place.
//!
//! A structure that many CPUs read without a lock is changed by versions: copied, published, and
//! freed after a grace period. Its writers exclude each other by claims. While only one CPU uses
//! it, neither is needed. So it has an *owner* then:
//!
//! - The owner [holds](Owner::hold) it, changes it in place, and releases it. It needs no other
//!   lock.
//! - Every other CPU uses it in grace sections, and begins each section by making it
//!   [shared](Owner::share), if it is not: by one compare-and-swap if the owner does not hold it,
//!   else by waiting until the owner releases it. From then on all CPUs make versions, the previous
//!   owner too. What that CPU is reading at that moment is a version like any other.
//! - A CPU [becomes the owner](Owner::try_take) by a try: it writes *tried* into the word, and then
//!   checks whether any other CPU is in a section, or holds a lock of the structure. Only if none
//!   does, it becomes the owner.
//!
//! ```text
//! CPU that tries                          another CPU
//!   word: shared -> tried (SeqCst RMW)      section opens (SeqCst RMW of its mark)
//!   ---- full fence ----                    ---- full fence ----
//!   marks: any CPU in a section?            word: shared?
//! ```
//!
//! Each stores to one location and then loads the other. So either the try fails, or the other CPU
//! finds that the word is not *shared*, and makes it so, which ends the try, or the ownership that
//! resulted. The same holds for a CPU that takes a lock instead of a section: it opens a section
//! before it reads the word.
//!
//! A CPU may also try to take over from an owner. Then it checks only for that owner, since any
//! other CPU would have made the structure shared.

use super::atomic::{AtomicU32, Ordering, fence};
use super::grace::{Grace, Section};
use super::mutant::{Mutant, lost};
use super::order::{self, Mark, OwnedSpace};
use super::wait::{Wait, until};
use crate::machine::CpuId;

/// The owner word: which CPU, and in what state.
#[derive(Debug)]
pub struct Owner(AtomicU32);

/// All CPUs may use it, and make versions.
const SHARED: u32 = 0;
/// A CPU tries to become the owner.
const TRIED: u32 = 1;
/// It has an owner,
const OWNED: u32 = 2;
/// which is changing it,
const HELD: u32 = 3;
/// and which another CPU waits for.
const AWAITED: u32 = 4;

const STATE: u32 = 3;
const CPU_SHIFT: u32 = 3;

const fn word(cpu: CpuId, state: u32) -> u32 {
    (cpu.0 as u32) << CPU_SHIFT | state
}

const fn cpu_of(word: u32) -> CpuId {
    CpuId((word >> CPU_SHIFT) as u16)
}

impl Owner {
    /// The word of a new structure, which `cpu` owns.
    pub fn new(cpu: CpuId) -> Self {
        Self(AtomicU32::new(word(cpu, OWNED)))
    }

    /// Whether `cpu` owned it a moment ago, and did not hold it.
    #[inline(always)]
    pub fn was(&self, cpu: CpuId) -> bool {
        self.0.load(Ordering::Relaxed) == word(cpu, OWNED)
    }

    /// Whether it was shared a moment ago.
    #[inline(always)]
    pub fn was_shared(&self) -> bool {
        self.0.load(Ordering::Relaxed) == SHARED
    }

    /// Whether a CPU other than `cpu` owns it. One that only tries does not.
    #[inline]
    pub fn is_other(&self, cpu: CpuId) -> bool {
        let seen = self.0.load(Ordering::Relaxed);
        seen & OWNED != 0 && cpu_of(seen) != cpu
    }

    /// Whether another CPU waits until the owner releases it.
    #[cfg(all(test, not(loom)))]
    pub fn is_awaited(&self) -> bool {
        self.0.load(Ordering::Relaxed) & AWAITED != 0
    }

    /// Holds it, if `cpu`, which waits as `by` does, owns it: until the guard is dropped, no other
    /// CPU uses it.
    #[inline(always)]
    pub fn hold<'a>(&'a self, cpu: CpuId, by: &'a (impl Wait + ?Sized)) -> Option<Holding<'a>> {
        let (owned, held) = (word(cpu, OWNED), word(cpu, HELD));
        let (acquire, relaxed) = (Ordering::Acquire, Ordering::Relaxed);
        let holds = self.0.compare_exchange(owned, held, acquire, relaxed).is_ok();
        // Lazily: the drop of a guard that does not hold it would make it shared.
        holds.then(|| Holding { owner: self, held, _mark: order::hold::<OwnedSpace>(by) })
    }

    /// Makes it shared unless `cpu` owns it. No other CPU changes it in place as long as the
    /// section is open.
    #[inline(always)]
    pub fn share(&self, section: &Section<'_>, cpu: CpuId, wait: &(impl Wait + ?Sized)) {
        // Acquire meets the Release of the owner's release.
        let seen = self.0.load(Ordering::Acquire);
        if seen != SHARED && seen != word(cpu, OWNED) {
            self.share_slowly(section, cpu, wait);
        }
    }

    #[cold]
    #[inline(never)]
    fn share_slowly(&self, _section: &Section<'_>, cpu: CpuId, wait: &(impl Wait + ?Sized)) {
        order::before::<OwnedSpace>(wait);
        loop {
            let seen = self.0.load(Ordering::Acquire);
            let state = seen & STATE;
            if seen == SHARED || (cpu_of(seen) == cpu && state != TRIED) {
                return;
            }
            if state != HELD {
                // Acquire, as above. Release: the next CPU that tries sees the marks of the CPUs
                // that used it.
                self.change(seen, SHARED);
                continue;
            }
            let awaited = seen | AWAITED;
            if seen == awaited || self.change(seen, awaited) {
                if lost(Mutant::JoinAwaitsOwner) {
                    return;
                }
                until(wait, || self.0.load(Ordering::Acquire) != awaited);
            }
        }
    }

    /// Tries to make `cpu` the owner of a structure that is shared, or owned by another CPU that no
    /// CPU waits for. `free` says whether no CPU holds a lock of it, and `cpu` is likely to be its
    /// only user. Must not be called in a section, or with such a lock held. Returns whether `cpu`
    /// is the owner now.
    #[cold]
    pub fn try_take(&self, cpu: CpuId, grace: &Grace, free: impl FnOnce() -> bool) -> bool {
        let (seen, tried) = (self.0.load(Ordering::Relaxed), word(cpu, TRIED));
        if seen != SHARED && seen & (STATE | AWAITED) != OWNED || !self.change(seen, tried) {
            return false;
        }
        fence(Ordering::SeqCst);
        let inside =
            if seen == SHARED { grace.is_any_inside() } else { grace.is_inside(cpu_of(seen)) };
        let good = (!inside || lost(Mutant::TryLooks)) && free();
        self.change(tried, if good { word(cpu, OWNED) } else { SHARED }) && good
    }

    fn change(&self, seen: u32, to: u32) -> bool {
        self.0.compare_exchange(seen, to, Ordering::SeqCst, Ordering::Relaxed).is_ok()
    }
}

/// The guard of a held structure; the drop releases it.
#[derive(Debug)]
#[must_use = "the drop releases the structure"]
pub struct Holding<'a> {
    owner: &'a Owner,
    held: u32,
    /// In force until it is released.
    _mark: Mark<'a>,
}

impl Drop for Holding<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        let owned = self.held & !STATE | OWNED;
        let (release, relaxed) = (Ordering::Release, Ordering::Relaxed);
        if self.owner.0.compare_exchange(self.held, owned, release, relaxed).is_err() {
            // Another CPU waits.
            self.owner.0.store(SHARED, Ordering::Release);
        }
    }
}
