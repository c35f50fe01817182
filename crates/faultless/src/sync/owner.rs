//! Who may change something in place, while nobody else looks at it.
//!
//! What many CPUs read without a lock is changed by versions: copied, published, and freed after a grace period; and its
//! writers exclude each other by claims. While one CPU alone uses it, all that is for nobody. So it has an *owner* then:
//!
//! - The owner [holds](Owner::hold) it, changes it in place, and lets go. It needs no other lock.
//! - Anybody else, who uses it in grace sections, begins each by making it [shared](Owner::share), if it is not:
//!   by one compare-and-swap where the owner does not hold it, else by waiting until it lets go. From then on all make
//!   versions, the CPU that was the owner too. What it is reading at that moment is a version like any other.
//! - A CPU [becomes the owner](Owner::try_take) by a try: it says that it tries, and then looks whether anybody
//!   else is in a section, or holds a lock of what is to be owned. Only then is the try made good.
//!
//! ```text
//! who tries                               another CPU
//!   word: shared -> tried (SeqCst RMW)      section opens (SeqCst RMW of its mark)
//!   ---- full fence ----                    ---- full fence ----
//!   marks: anybody in a section?            word: shared?
//! ```
//!
//! Each stores to one place and then loads the other. So either the try fails, or the other CPU finds that the word does not
//! say *shared*, and makes it so, which ends the try, or the ownership that came of it. The same holds for who has taken a
//! lock in place of a section, and opens one before it looks at the word.
//!
//! A CPU may also try to take over from an owner: then only that one is looked for, since anybody else would
//! have made it shared.

use super::atomic::{AtomicU32, Ordering, fence};
use super::grace::{Grace, Section};
use super::mutant::{Mutant, lost};
use super::order::{self, TreeWriter};
use super::wait::{Wait, until};
use crate::machine::CpuId;

/// The owner word: which CPU, and in what state.
#[derive(Debug)]
pub struct Owner(AtomicU32);

/// All may use it, and make versions.
const SHARED: u32 = 0;
/// A CPU tries to become the owner.
const TRIED: u32 = 1;
/// It has an owner,
const OWNED: u32 = 2;
/// who is changing it,
const HELD: u32 = 3;
/// and whom somebody waits for.
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
    /// Of what `cpu` has made.
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

    /// Whether somebody waits until the owner lets it go.
    #[cfg(all(test, not(loom)))]
    pub fn is_awaited(&self) -> bool {
        self.0.load(Ordering::Relaxed) & AWAITED != 0
    }

    /// Holds it, if `cpu` owns it: until the guard is dropped, no other CPU uses it.
    #[inline(always)]
    pub fn hold(&self, cpu: CpuId) -> Option<Holding<'_>> {
        let (owned, held) = (word(cpu, OWNED), word(cpu, HELD));
        let (acquire, relaxed) = (Ordering::Acquire, Ordering::Relaxed);
        let holds = self.0.compare_exchange(owned, held, acquire, relaxed).is_ok();
        // Lazily: dropping a guard that does not hold it would make it shared.
        holds.then(|| Holding { owner: self, held })
    }

    /// Makes it shared unless `cpu` owns it. No other CPU changes it in place as long as the section is open.
    #[inline(always)]
    pub fn share(&self, section: &Section<'_>, cpu: CpuId, wait: &(impl Wait + ?Sized)) {
        // Acquire meets the Release of who has let go.
        let seen = self.0.load(Ordering::Acquire);
        if seen != SHARED && seen != word(cpu, OWNED) {
            self.share_slowly(section, cpu, wait);
        }
    }

    #[cold]
    #[inline(never)]
    fn share_slowly(&self, _section: &Section<'_>, cpu: CpuId, wait: &(impl Wait + ?Sized)) {
        // Who holds it waits for what comes later in the order, and not for sections and claims.
        order::before::<TreeWriter>(wait);
        loop {
            let seen = self.0.load(Ordering::Acquire);
            let state = seen & STATE;
            if seen == SHARED || (cpu_of(seen) == cpu && state != TRIED) {
                return;
            }
            if state != HELD {
                // Acquire, as above. Release: who tries next sees the marks of those who were here.
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

    /// Tries to make `cpu` the owner of what is shared or owned by another, for whom nobody waits. `free` says whether nobody holds a
    /// lock of it, and `cpu` will be the only one to use it for a while. Not in a section, and holding no such lock.
    /// Returns whether `cpu` is the owner now.
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

/// What is owned is held; dropping this lets it go.
#[derive(Debug)]
#[must_use = "it is held until this is dropped"]
pub struct Holding<'a> {
    owner: &'a Owner,
    held: u32,
}

impl Drop for Holding<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        let owned = self.held & !STATE | OWNED;
        let (release, relaxed) = (Ordering::Release, Ordering::Relaxed);
        if self.owner.0.compare_exchange(self.held, owned, release, relaxed).is_err() {
            // Somebody waits.
            self.owner.0.store(SHARED, Ordering::Release);
        }
    }
}
