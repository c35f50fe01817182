//! Grace periods (RCU): an unlinked object is freed when no CPU can still be reading it.
//!
//! Readers run in *sections*, and take neither lock nor reference count. The CPU that unlinks an object
//! *retires* it; the object is *due* once every section that was open when it was retired has ended.
//! Protocol:
//!
//! - there is one *epoch*, which only grows;
//! - each CPU has a *mark*, on a line of its own: zero outside sections, else the epoch it read when
//!   it entered. Entering is: read the epoch, swap it into the mark, full fence (the swap is it);
//! - retiring is: (unlinked already,) full fence, read the epoch, put the object into this CPU's bag
//!   of that epoch;
//! - advancing the epoch from `e` to `e + 1` is: read `e`, full fence, read every mark; if each is
//!   zero or says `e`, compare-and-swap;
//! - an object retired in epoch `e` is due when the epoch is `e + 2`.
//!
//! *Why two.* Let a section `S` with mark `s` still read an object that was retired in epoch `e`. It
//! did not see the unlinking, so its fence came before the retirer's, and `s <= e`. Take the advance
//! from `e + 1` to `e + 2`. Its fence comes after one read of `e + 1`; were it before `S`'s fence, it
//! would be before the retirer's too, which then would have read at least `e + 1`. So it comes after
//! `S`'s, the advance reads `S`'s mark, and `s` is not `e + 1`: the epoch stays until `S` has left. One
//! epoch's distance would not be enough: the advance from `e` to `e + 1` does not wait for a section marked `e`.
//!
//! *Why few bags.* An object that is not due was retired in the present epoch or the one before.
//! So two bags, taken in turn, hold all of them; when a bag is needed for a newer epoch, what is in
//! it is due, and joins the list of the due.
//!
//! Memory order: marks are stored with Release and read with Acquire, and the epoch is
//! advanced with Release and read with Acquire before anything is freed, so all that a section
//! did happens before the free.
//!
//! A CPU outside sections delays no grace period, however long it idles. Readers never collect: writers do.
//!
//! *Who collects.* Ordinarily each CPU collects what it retired itself. Its bags have a lock of
//! their own, which is uncontended then. A CPU that runs out of memory collects what all CPUs retired
//! ([`Grace::collect_from`]), so an idle CPU withholds no memory from the others. The argument above does not
//! depend on which CPU collects, or on when an object gets into its bag: the epoch that it was retired in was
//! read after it was unlinked.

use super::atomic::{AtomicU64, Ordering, fence, fence_after_rmw, spin_hint};
use super::mutant::{Mutant, lost};
use super::order::{GracePeriod, GraceSection, Mark, Record, RetiredObjects};
use super::percpu::{Local, Padded, PerCpu};
use super::spin::SpinLock;
use super::wait::{Wait, until};
use crate::error::OutOfMemory;
use crate::machine::CpuId;
use core::cell::Cell;
use core::fmt;
use core::marker::PhantomData;
use core::ptr::NonNull;

/// A mark is the epoch, shifted by this, and the number of sections this CPU is in.
const NEST_BITS: u32 = 8;
/// The part of a mark that counts sections.
const NEST: u64 = (1 << NEST_BITS) - 1;

/// The link by which a retired object waits: part of the object, so that retiring allocates nothing.
#[derive(Debug)]
#[repr(C)]
pub struct RetireLink {
    next: Cell<Option<NonNull<RetireLink>>>,
    kind: u8,
}

// SAFETY: `next` is used only by the holder of the chain that the object is in, and `Grace::retire`'s
// caller promises that it is in one chain only; before that it is not used.
unsafe impl Sync for RetireLink {}
// SAFETY: as above; the link owns nothing.
unsafe impl Send for RetireLink {}

impl RetireLink {
    /// A link of an object that is not retired. `kind` tells the caller later what to free.
    pub const fn new(kind: u8) -> Self {
        Self { next: Cell::new(None), kind }
    }

    /// What the object is, as given.
    #[inline]
    pub const fn kind(&self) -> u8 {
        self.kind
    }
}

/// Objects linked through their [`RetireLink`]s, the latest first. Each is in one chain at most, so
/// chains are joined by their ends.
#[derive(Clone, Copy, Debug, Default)]
pub struct RetireChain {
    ends: Option<(NonNull<RetireLink>, NonNull<RetireLink>)>,
    len: usize,
}

impl RetireChain {
    /// Adds an object.
    ///
    /// # Safety
    /// It and the objects in the chain are alive as long as the chain is used, and nothing else touches
    /// their links.
    #[inline]
    pub unsafe fn push(&mut self, object: NonNull<RetireLink>) {
        // SAFETY: alive and ours, by the caller's promise.
        unsafe { object.as_ref() }.next.set(self.ends.map(|(first, _)| first));
        self.ends = Some((object, self.ends.map_or(object, |(_, last)| last)));
        self.len += 1;
    }

    /// Whether there is none.
    #[inline]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Adds an object behind all others.
    ///
    /// # Safety
    /// As [`push`](Self::push).
    pub(crate) unsafe fn append(&mut self, object: NonNull<RetireLink>) {
        // SAFETY: alive and ours, by the caller's promise.
        unsafe { object.as_ref() }.next.set(None);
        let first = self.ends.map_or(object, |(first, last)| {
            // SAFETY: as above.
            unsafe { last.as_ref() }.next.set(Some(object));
            first
        });
        self.ends = Some((first, object));
        self.len += 1;
    }

    /// The objects, the first one first.
    ///
    /// # Safety
    /// As [`push`](Self::push), as long as the iterator is used.
    pub(crate) unsafe fn iter(&self) -> impl Iterator<Item = NonNull<RetireLink>> + use<> {
        let (mut next, mut left) = (self.ends.map(|(first, _)| first), self.len);
        core::iter::from_fn(move || {
            left = left.checked_sub(1)?;
            let object = next?;
            // SAFETY: alive and ours, by the caller's promise.
            next = unsafe { object.as_ref() }.next.get();
            Some(object)
        })
    }

    /// Adds all of `other`.
    ///
    /// # Safety
    /// As [`push`](Self::push), of the objects in both.
    #[inline]
    pub unsafe fn prepend(&mut self, other: Self) {
        let Some((first, last)) = other.ends else { return };
        let ends = self.ends.map_or((first, last), |(next, end)| {
            // SAFETY: alive and ours, by the caller's promise.
            unsafe { last.as_ref() }.next.set(Some(next));
            (first, end)
        });
        *self = Self { ends: Some(ends), len: self.len + other.len };
    }

    /// Takes the first object out.
    ///
    /// # Safety
    /// As [`push`](Self::push), of the objects in the chain.
    pub(crate) unsafe fn pop(&mut self) -> Option<NonNull<RetireLink>> {
        let (first, end) = self.ends?;
        self.len -= 1;
        // SAFETY: alive and ours, by the caller's promise.
        let next = unsafe { first.as_ref() }.next.get();
        self.ends = next.filter(|_| self.len != 0).map(|next| (next, end));
        Some(first)
    }
}

/// The retired objects of one CPU.
///
/// *Invariant (retired is ours):* every object in a chain was given to [`Grace::retire`] on this CPU
/// and has not been given out since, so it is alive and nothing else touches its link.
#[derive(Default)]
struct Bags {
    /// What was retired in the latest even and the latest odd epoch, and which epochs these are.
    recent: [(u64, RetireChain); 2],
    due: RetireChain,
}

// SAFETY: the bags own the objects in them (retired is ours).
unsafe impl Send for Bags {}

impl Bags {
    fn put(&mut self, epoch: u64, more: RetireChain) {
        let (retired, chain) = &mut self.recent[(epoch & 1) as usize];
        if *retired != epoch {
            // Two epochs old at least.
            // SAFETY: retired is ours.
            unsafe { self.due.prepend(core::mem::take(chain)) };
            *retired = epoch;
        }
        // SAFETY: retired is ours, the new ones from now on.
        unsafe { chain.prepend(more) };
    }

    /// Moves to the due what was retired two epochs before `epoch`, or earlier.
    fn ripen(&mut self, epoch: u64) {
        for (retired, chain) in &mut self.recent {
            let needed = if lost(Mutant::SecondEpoch) { 1 } else { 2 };
            if retired.saturating_add(needed) <= epoch {
                // SAFETY: retired is ours.
                unsafe { self.due.prepend(core::mem::take(chain)) };
            }
        }
    }
}

/// One CPU's bags.
#[derive(Default)]
struct Retired {
    /// How many objects are in them; written under the lock.
    len: AtomicU64,
    bags: SpinLock<Bags, RetiredObjects>,
}

impl Retired {
    fn len(&self) -> usize {
        self.len.load(Ordering::Relaxed) as usize
    }

    /// Does something with the bags, and counts the objects that `with` says were added or, if
    /// negative, taken.
    fn change<R>(&self, local: &Local, with: impl FnOnce(&mut Bags) -> (isize, R)) -> R {
        let wait = Briefly(local);
        let mut bags = self.bags.lock(&wait);
        let (more, result) = with(&mut bags);
        self.len
            .store(self.len.load(Ordering::Relaxed).wrapping_add(more as u64), Ordering::Relaxed);
        result
    }

    /// Takes what is due in `epoch`.
    fn take_due(&self, local: &Local, epoch: u64) -> RetireChain {
        if self.len() == 0 {
            return RetireChain::default();
        }
        self.change(local, |bags| {
            bags.ripen(epoch);
            let due = core::mem::take(&mut bags.due);
            (-(due.len as isize), due)
        })
    }
}

/// Waits for a lock that is held for a few instructions, and serves no flush requests meanwhile.
struct Briefly<'a>(&'a Local);

impl Wait for Briefly<'_> {
    fn wait(&self, _looks: u32) {
        spin_hint();
    }

    fn order(&self) -> Option<&Record> {
        Some(self.0.order())
    }
}

/// The grace periods of one subsystem.
pub struct Grace {
    epoch: Padded<AtomicU64>,
    marks: PerCpu<AtomicU64>,
    retired: PerCpu<Retired>,
}

impl Grace {
    /// Grace periods among `cpus` CPUs, none of them in a section.
    ///
    /// # Errors
    /// [`OutOfMemory`] when the heap is exhausted.
    pub fn try_new(cpus: usize) -> Result<Self, OutOfMemory> {
        Ok(Self {
            epoch: Padded(AtomicU64::new(0)),
            marks: PerCpu::try_new(cpus, |_| AtomicU64::new(0))?,
            retired: PerCpu::try_new(cpus, |_| Retired::default())?,
        })
    }

    /// Opens a section: what is linked now or later stays alive until the section ends.
    ///
    /// Writes this CPU's mark and nothing else, and is a full fence, but inside another section. Sections nest, up to
    /// 255 deep.
    ///
    /// # Panics
    /// When they nest deeper: the count would run into the epoch, and the sections would protect nothing.
    #[inline(always)]
    pub fn enter<'a>(&'a self, local: &'a Local) -> Section<'a> {
        let mark = self.marks.get(local);
        let now = mark.load(Ordering::Relaxed);
        if now & NEST == 0 {
            let epoch = self.epoch.0.load(Ordering::Relaxed);
            let opened = u64::from(!lost(Mutant::SectionMark));
            mark.swap(epoch << NEST_BITS | opened, Ordering::SeqCst);
            if !lost(Mutant::SectionFence) {
                fence_after_rmw();
            }
        } else {
            assert!(now & NEST < NEST, "grace sections nest at most 255 deep on a CPU");
            // Release, so that a look at this value still sees the sections before.
            mark.store(now + 1, Ordering::Release);
        }
        Section { mark, on: PhantomData, noted: local.order().hold::<GraceSection>() }
    }

    /// The epoch of `section`, if it is the present one. What was reachable in an earlier section of the
    /// same CPU with the same answer is alive in this one, too, even if it was unlinked since.
    ///
    /// Why: it was retired in that epoch or later, so it is given out two epochs later at the
    /// earliest. This epoch was the present one after the section was opened, and the section keeps
    /// it from advancing by more than one.
    #[inline(always)]
    pub fn steady_epoch(&self, section: &Section<'_>) -> Option<u64> {
        let marked = section.mark.load(Ordering::Relaxed) >> NEST_BITS;
        (self.epoch.0.load(Ordering::Acquire) == marked).then_some(marked)
    }

    /// Puts unlinked objects aside until their grace period is over; then [`Self::collect`] on this CPU,
    /// or [`Self::collect_from`] on another, gives them out.
    ///
    /// # Safety
    /// - The objects are alive until they are given out, and unlinked: no section that is opened from
    ///   now on finds them.
    /// - They are not retired already, and nothing else touches their links.
    #[inline]
    pub unsafe fn retire_all(&self, local: &Local, objects: RetireChain) {
        // After the unlinking, before the epoch is read: see the top.
        if !lost(Mutant::RetireFence) {
            fence(Ordering::SeqCst);
        }
        let epoch = self.epoch.0.load(Ordering::Acquire);
        self.retired.get(local).change(local, |bags| {
            bags.put(epoch, objects);
            (objects.len as isize, ())
        });
    }

    /// [`retire_all`](Self::retire_all) of one object.
    ///
    /// # Safety
    /// As there.
    #[cfg(any(test, loom, shuttle))]
    pub unsafe fn retire(&self, local: &Local, object: NonNull<RetireLink>) {
        let mut one = RetireChain::default();
        // SAFETY: the caller's promise.
        unsafe {
            one.push(object);
            self.retire_all(local, one);
        }
    }

    /// Gives out what is due of what this CPU retired. If nothing is, it advances the epoch if that can be, and looks again. What is
    /// not taken from the iterator stays due.
    ///
    /// So while CPUs retire side by side, the one that is first to need it looks at the marks of all, and what the others retired becomes
    /// due, too.
    pub fn collect<'a>(&'a self, local: &'a Local) -> Due<'a> {
        let own = self.retired.get(local);
        let due = self.due_of(local, own);
        if !due.due.is_empty() || self.pending(local) == 0 {
            return due;
        }
        drop(due);
        self.try_advance();
        self.due_of(local, own)
    }

    /// Gives out what is due of what CPU `of` retired, to whichever CPU asks for it. What is not taken from
    /// the iterator stays due.
    pub fn collect_from<'a>(&'a self, local: &'a Local, of: CpuId) -> Due<'a> {
        self.due_of(local, self.retired.remote(of))
    }

    fn due_of<'a>(&'a self, local: &'a Local, retired: &'a Retired) -> Due<'a> {
        let due = retired.take_due(local, self.epoch.0.load(Ordering::Acquire));
        Due { local, retired, due }
    }

    /// Whether CPU `cpu` is in a section. If it is not, all that it did in sections before is seen from here on.
    #[inline]
    pub(crate) fn is_inside(&self, cpu: CpuId) -> bool {
        self.marks.remote(cpu).load(Ordering::Acquire) & NEST != 0
    }

    /// Whether any CPU is in a section, as [`is_inside`](Self::is_inside) says it of one.
    pub(super) fn is_any_inside(&self) -> bool {
        self.marks.iter().any(|mark| mark.load(Ordering::Acquire) & NEST != 0)
    }

    /// How many objects this CPU has retired that have not been given out.
    #[inline]
    pub fn pending(&self, local: &Local) -> usize {
        self.retired.get(local).len()
    }

    /// How many objects any CPU has retired that have not been given out. May be out of date a moment
    /// later.
    pub fn pending_anywhere(&self) -> usize {
        self.retired.iter().map(Retired::len).sum()
    }

    /// Waits, as `wait` does, until every section that is open now has ended. Not to be called in a
    /// section, which would wait for itself, nor under a lock.
    ///
    /// # Panics
    /// In a section; in builds with debug assertions, under a lock too.
    pub fn synchronize<W: Wait + ?Sized>(&self, local: &Local, wait: &W) {
        local.order().before::<GracePeriod>();
        self.await_sections(local, wait);
    }

    /// [`synchronize`](Self::synchronize) by a CPU that holds the locks of a space exclusively, and
    /// nothing else: no CPU waits for these in a section, so sections end all the same.
    ///
    /// # Panics
    /// In a section; in builds with debug assertions, under another lock too.
    pub fn synchronize_locked<W: Wait + ?Sized>(&self, local: &Local, wait: &W) {
        local.order().before::<GraceSection>();
        self.await_sections(local, wait);
    }

    fn await_sections<W: Wait + ?Sized>(&self, local: &Local, wait: &W) {
        assert!(
            self.marks.get(local).load(Ordering::Relaxed) & NEST == 0,
            "a CPU in a grace section would wait for the end of its own section"
        );
        // As if something were retired now.
        fence(Ordering::SeqCst);
        let now = self.epoch.0.load(Ordering::Acquire);
        until(wait, || {
            self.try_advance();
            self.epoch.0.load(Ordering::Acquire) >= now + 2
        });
    }

    /// Gives out everything that any CPU has retired: with `&mut self` there are no sections.
    #[cfg(any(test, loom, shuttle))]
    pub fn drain(&mut self) -> impl Iterator<Item = NonNull<RetireLink>> {
        self.retired.iter_mut().flat_map(|retired| {
            let Retired { len, bags } = retired;
            let bags = bags.get_mut();
            bags.ripen(u64::MAX);
            core::iter::from_fn(move || {
                // SAFETY: retired is ours.
                let object = unsafe { bags.due.pop() }?;
                len.store(len.load(Ordering::Relaxed) - 1, Ordering::Relaxed);
                Some(object)
            })
        })
    }

    /// Makes the epoch one more, unless a section of an older epoch is open.
    fn try_advance(&self) {
        let epoch = self.epoch.0.load(Ordering::Relaxed);
        if !lost(Mutant::AdvanceFence) {
            fence(Ordering::SeqCst);
        }
        let old = |mark: u64| {
            mark & NEST != 0 && mark >> NEST_BITS != epoch && !lost(Mutant::LookAtMarks)
        };
        if !self.marks.iter().any(|mark| old(mark.load(Ordering::Acquire))) {
            // Lost: another CPU has advanced it from the same epoch.
            let _ = self.epoch.0.compare_exchange(
                epoch,
                epoch + 1,
                Ordering::AcqRel,
                Ordering::Relaxed,
            );
        }
    }
}

impl fmt::Debug for Grace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Grace(epoch {})", self.epoch.0.load(Ordering::Relaxed))
    }
}

/// An open section; dropping it ends it. It cannot leave its CPU.
#[derive(Debug)]
#[must_use = "the section ends when this is dropped"]
pub struct Section<'a> {
    mark: &'a AtomicU64,
    on: PhantomData<&'a Local>,
    #[expect(dead_code, reason = "struck out when it is dropped")]
    noted: Mark<'a>,
}

impl Drop for Section<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        if lost(Mutant::SectionMark) {
            return;
        }
        let now = self.mark.load(Ordering::Relaxed);
        // The epoch may stay in the mark: without a section it says nothing.
        self.mark.store(now - 1, Ordering::Release);
    }
}

/// Gives out the objects whose grace period is over, one by one; each is then the caller's.
pub struct Due<'a> {
    local: &'a Local,
    /// Where they came from.
    retired: &'a Retired,
    /// Out of the bags: freeing one object may retire another.
    due: RetireChain,
}

impl Iterator for Due<'_> {
    type Item = NonNull<RetireLink>;

    fn next(&mut self) -> Option<Self::Item> {
        // SAFETY: taken from the bags, so ours alone.
        unsafe { self.due.pop() }
    }
}

impl Drop for Due<'_> {
    fn drop(&mut self) {
        let left = core::mem::take(&mut self.due);
        if !left.is_empty() {
            self.retired.change(self.local, |bags| {
                // SAFETY: as in `next`; the bags', from now on.
                unsafe { bags.due.prepend(left) };
                (left.len as isize, ())
            });
        }
    }
}

impl fmt::Debug for Due<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Due({} objects)", self.due.len)
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
