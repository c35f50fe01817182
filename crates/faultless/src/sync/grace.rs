//! Grace periods (RCU): an unlinked object is freed when no CPU can still be reading it.
//!
//! Readers run in *sections*, without locks or reference counts. The CPU that unlinks an object
//! *retires* it; the object is *due* after the end of every section that was open at the time.
//! Protocol:
//!
//! - There is one *epoch*, which only grows.
//! - Each CPU has a *mark*, on its own cache line: zero outside sections, otherwise the epoch read
//!   at entry. To enter, a CPU reads the epoch and swaps it into the mark, which is a full fence.
//! - To retire an unlinked object, a CPU issues a full fence, reads the epoch, and puts the object
//!   into its bag of this epoch.
//! - To advance the epoch from `e` to `e + 1`, a CPU reads `e`, issues a full fence, and reads
//!   every mark; if each is zero or `e`, it advances the epoch by compare-and-swap.
//! - An object retired in epoch `e` is due when the epoch is `e + 2`.
//!
//! *Two epochs are necessary and sufficient.* Let a section `S` with mark `s` still read an object
//! that was retired in epoch `e`. It did not see the unlinking, so its fence came before the
//! retirer's, and `s <= e`. Consider the advance from `e + 1` to `e + 2`. Its fence comes
//! after a read of `e + 1`. If this fence came before `S`'s fence, it would also come before the
//! retirer's fence, and the retirer would have read at least `e + 1`, a contradiction. So the
//! fence comes after `S`'s fence, and the advance reads `S`'s mark. Since `s` is not `e + 1`, the
//! epoch does not advance until `S` has left. A distance of one epoch would not be enough: the
//! advance from `e` to `e + 1` does not wait for a section marked `e`.
//!
//! *Two bags suffice.* An object that is not due was retired in the current epoch or the previous
//! one. So two alternating bags hold all such objects; when a bag is needed for a newer epoch, its
//! contents are due, and are moved to the list of due objects.
//!
//! Memory order: marks are stored with Release and read with Acquire, and the epoch is advanced
//! with Release and read with Acquire before objects are freed. So all accesses in a section happen
//! before the free.
//!
//! A CPU outside sections delays no grace period, for any idle time. Readers never collect; only
//! writers do.
//!
//! *Collection.* Normally each CPU collects the objects it retired. Its bags have their own lock,
//! which is then uncontended. A CPU that runs out of memory collects the retired objects of all
//! CPUs ([`Grace::collect_from`]), so an idle CPU withholds no memory. The proof above does not
//! depend on the collecting CPU, or on the time at which an object is put into its bag: the epoch
//! of its retirement was read after the unlinking.

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

/// The position of the epoch in a mark, above the number of sections of this CPU.
const NEST_BITS: u32 = 8;
/// The part of a mark that counts sections.
const NEST: u64 = (1 << NEST_BITS) - 1;

/// The link of a retired object: part of the object, so that retiring allocates no memory.
#[derive(Debug)]
#[repr(C)]
pub struct RetireLink {
    next: Cell<Option<NonNull<RetireLink>>>,
    kind: u8,
}

// SAFETY: `next` is used only by the holder of the chain that contains the object, and
// `Grace::retire`'s caller promises that the object is in one chain only; before the retirement
// `next` is not used.
unsafe impl Sync for RetireLink {}
// SAFETY: as above; the link owns no data.
unsafe impl Send for RetireLink {}

impl RetireLink {
    /// Returns a link for an object that is not retired. `kind` tells the collecting code later how
    /// to free the object.
    pub const fn new(kind: u8) -> Self {
        Self { next: Cell::new(None), kind }
    }

    /// Returns the kind of the object, as given.
    #[inline]
    pub const fn kind(&self) -> u8 {
        self.kind
    }
}

/// Objects linked through their [`RetireLink`]s, the latest first. Each object is in at most one
/// chain, so chains are joined by their ends.
#[derive(Clone, Copy, Debug, Default)]
pub struct RetireChain {
    ends: Option<(NonNull<RetireLink>, NonNull<RetireLink>)>,
    len: usize,
}

impl RetireChain {
    /// Adds an object.
    ///
    /// # Safety
    /// The object and the objects in the chain are alive while the chain is used, and no other code
    /// accesses their links.
    #[inline]
    pub unsafe fn push(&mut self, object: NonNull<RetireLink>) {
        // SAFETY: alive and owned by the chain, by the caller's promise.
        unsafe { object.as_ref() }.next.set(self.ends.map(|(first, _)| first));
        self.ends = Some((object, self.ends.map_or(object, |(_, last)| last)));
        self.len += 1;
    }

    /// Returns the number of objects.
    #[inline]
    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the chain is empty.
    #[inline]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Adds an object at the end.
    ///
    /// # Safety
    /// As [`push`](Self::push).
    pub(crate) unsafe fn append(&mut self, object: NonNull<RetireLink>) {
        // SAFETY: alive and owned by the chain, by the caller's promise.
        unsafe { object.as_ref() }.next.set(None);
        let first = self.ends.map_or(object, |(first, last)| {
            // SAFETY: as above.
            unsafe { last.as_ref() }.next.set(Some(object));
            first
        });
        self.ends = Some((first, object));
        self.len += 1;
    }

    /// Iterates over the objects, beginning with the first.
    ///
    /// # Safety
    /// As [`push`](Self::push), while the iterator is used.
    pub(crate) unsafe fn iter(&self) -> impl Iterator<Item = NonNull<RetireLink>> + use<> {
        let (mut next, mut left) = (self.ends.map(|(first, _)| first), self.len);
        core::iter::from_fn(move || {
            left = left.checked_sub(1)?;
            let object = next?;
            // SAFETY: alive and owned by the chain, by the caller's promise.
            next = unsafe { object.as_ref() }.next.get();
            Some(object)
        })
    }

    /// Adds all objects of `other`.
    ///
    /// # Safety
    /// As [`push`](Self::push), for the objects in both chains.
    #[inline]
    pub unsafe fn prepend(&mut self, other: Self) {
        let Some((first, last)) = other.ends else { return };
        let ends = self.ends.map_or((first, last), |(next, end)| {
            // SAFETY: alive and owned by the chain, by the caller's promise.
            unsafe { last.as_ref() }.next.set(Some(next));
            (first, end)
        });
        *self = Self { ends: Some(ends), len: self.len + other.len };
    }

    /// Removes and returns the first object.
    ///
    /// # Safety
    /// As [`push`](Self::push), for the objects in the chain.
    pub(crate) unsafe fn pop(&mut self) -> Option<NonNull<RetireLink>> {
        let (first, end) = self.ends?;
        self.len -= 1;
        // SAFETY: alive and owned by the chain, by the caller's promise.
        let next = unsafe { first.as_ref() }.next.get();
        self.ends = next.filter(|_| self.len != 0).map(|next| (next, end));
        Some(first)
    }
}

/// The retired objects of one CPU.
///
/// *Invariant (retired is ours):* every object in a chain was passed to [`Grace::retire`] on this
/// CPU and has not been returned since, so the object is alive and no other code accesses its link.
#[derive(Default)]
struct Bags {
    /// The objects retired in the latest even and the latest odd epoch, with these epochs.
    recent: [(u64, RetireChain); 2],
    due: RetireChain,
}

// SAFETY: the bags own the objects in them (retired is ours).
unsafe impl Send for Bags {}

impl Bags {
    fn put(&mut self, epoch: u64, more: RetireChain) {
        let (retired, chain) = &mut self.recent[(epoch & 1) as usize];
        if *retired != epoch {
            // At least two epochs old. SAFETY: retired is ours.
            unsafe { self.due.prepend(core::mem::take(chain)) };
            *retired = epoch;
        }
        // SAFETY: retired is ours, including the new objects from now on.
        unsafe { chain.prepend(more) };
    }

    /// Moves objects that were retired at least two epochs before `epoch` to the due objects.
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
    /// The number of objects in the bags; written under the lock.
    len: AtomicU64,
    bags: SpinLock<Bags, RetiredObjects>,
}

impl Retired {
    fn len(&self) -> usize {
        self.len.load(Ordering::Relaxed) as usize
    }

    /// Calls `with` on the bags, and adds the returned number (negative for removed objects) to the
    /// count.
    fn change<R>(&self, local: &Local, with: impl FnOnce(&mut Bags) -> (isize, R)) -> R {
        let wait = Briefly(local);
        let mut bags = self.bags.lock(&wait);
        let (more, result) = with(&mut bags);
        self.len
            .store(self.len.load(Ordering::Relaxed).wrapping_add(more as u64), Ordering::Relaxed);
        result
    }

    /// Takes the objects that are due in `epoch`.
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

/// Waits for a lock that is held for a few instructions, without serving flush requests.
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
    /// Returns grace periods for `cpus` CPUs, all outside of sections.
    ///
    /// # Errors
    /// [`OutOfMemory`] if the heap is exhausted.
    pub fn try_new(cpus: usize) -> Result<Self, OutOfMemory> {
        Ok(Self {
            epoch: Padded(AtomicU64::new(0)),
            marks: PerCpu::try_new(cpus, |_| AtomicU64::new(0))?,
            retired: PerCpu::try_new(cpus, |_| Retired::default())?,
        })
    }

    /// Opens a section: objects that are linked now or later stay alive until the section ends.
    ///
    /// Writes only this CPU's mark, and is a full fence, except inside another section. Sections
    /// nest, up to 255 deep.
    ///
    /// # Panics
    /// If sections nest deeper: the count would overflow into the epoch, and the sections would not
    /// protect any objects.
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
            // Release, so that a reader of this value still synchronises with the earlier sections.
            mark.store(now + 1, Ordering::Release);
        }
        Section { mark, on: PhantomData, noted: local.order().hold::<GraceSection>() }
    }

    /// Keeps unlinked objects until the end of their grace period; then [`Self::collect`] on this
    /// CPU, or [`Self::collect_from`] on another, returns them.
    ///
    /// # Safety
    /// - The objects are alive until the return, and unlinked: no section opened from now on finds
    ///   the objects.
    /// - The objects are not yet retired, and no other code accesses the links.
    #[inline]
    pub unsafe fn retire_all(&self, local: &Local, objects: RetireChain) {
        // After the unlinking, before the read of the epoch: see the module.
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
    /// As [`retire_all`](Self::retire_all).
    #[cfg(any(test, loom, shuttle))]
    pub unsafe fn retire(&self, local: &Local, object: NonNull<RetireLink>) {
        let mut one = RetireChain::default();
        // SAFETY: the caller's promise.
        unsafe {
            one.push(object);
            self.retire_all(local, one);
        }
    }

    /// Returns the due objects among those retired by this CPU. If there are none, tries to advance
    /// the epoch, and checks again. Objects not taken from the iterator stay due.
    ///
    /// So while several CPUs retire objects, the first CPU that needs an advance reads the marks of
    /// all CPUs, which also makes objects of the other CPUs due.
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

    /// Returns the due objects among those retired by CPU `of`, on any CPU. Objects not taken from
    /// the iterator stay due.
    pub fn collect_from<'a>(&'a self, local: &'a Local, of: CpuId) -> Due<'a> {
        self.due_of(local, self.retired.remote(of))
    }

    fn due_of<'a>(&'a self, local: &'a Local, retired: &'a Retired) -> Due<'a> {
        let due = retired.take_due(local, self.epoch.0.load(Ordering::Acquire));
        Due { local, retired, due }
    }

    /// Returns whether CPU `cpu` is in a section. If not, all its accesses in earlier sections
    /// happen before the return.
    #[inline]
    pub(crate) fn is_inside(&self, cpu: CpuId) -> bool {
        self.marks.remote(cpu).load(Ordering::Acquire) & NEST != 0
    }

    /// Returns whether any CPU is in a section, with the ordering of
    /// [`is_inside`](Self::is_inside).
    pub(super) fn is_any_inside(&self) -> bool {
        self.marks.iter().any(|mark| mark.load(Ordering::Acquire) & NEST != 0)
    }

    /// Returns how many objects this CPU has retired that have not been returned.
    #[inline]
    pub fn pending(&self, local: &Local) -> usize {
        self.retired.get(local).len()
    }

    /// Returns how many objects all CPUs have retired that have not been returned. Possibly out of
    /// date immediately.
    pub fn pending_anywhere(&self) -> usize {
        self.retired.iter().map(Retired::len).sum()
    }

    /// Waits, as `wait` does, until every section that is open now has ended. Must not be called in
    /// a section, which would wait for itself, nor under a lock.
    ///
    /// # Panics
    /// In a section; in builds with debug assertions, also under a lock.
    pub fn synchronize<W: Wait + ?Sized>(&self, local: &Local, wait: &W) {
        local.order().before::<GracePeriod>();
        self.await_sections(local, wait);
    }

    /// [`synchronize`](Self::synchronize) by a CPU that holds the locks of a space exclusively, and
    /// no other locks. No CPU waits for these locks in a section, so sections still end.
    ///
    /// # Panics
    /// In a section; in builds with debug assertions, also under another lock.
    pub fn synchronize_locked<W: Wait + ?Sized>(&self, local: &Local, wait: &W) {
        local.order().before::<GraceSection>();
        self.await_sections(local, wait);
    }

    fn await_sections<W: Wait + ?Sized>(&self, local: &Local, wait: &W) {
        assert!(
            self.marks.get(local).load(Ordering::Relaxed) & NEST == 0,
            "a CPU in a grace section must not wait for a grace period"
        );
        // The same steps as for an object retired now.
        fence(Ordering::SeqCst);
        let now = self.epoch.0.load(Ordering::Acquire);
        until(wait, || {
            self.try_advance();
            self.epoch.0.load(Ordering::Acquire) >= now + 2
        });
    }

    /// Returns all retired objects of all CPUs: with `&mut self` there are no sections.
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

    /// Advances the epoch by one, unless a section of an older epoch is open.
    fn try_advance(&self) {
        let epoch = self.epoch.0.load(Ordering::Relaxed);
        if !lost(Mutant::AdvanceFence) {
            fence(Ordering::SeqCst);
        }
        let old = |mark: u64| {
            mark & NEST != 0 && mark >> NEST_BITS != epoch && !lost(Mutant::LookAtMarks)
        };
        if !self.marks.iter().any(|mark| old(mark.load(Ordering::Acquire))) {
            // A failed swap means that another CPU has advanced the same epoch.
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

/// An open section, which ends on drop. The value cannot leave the CPU.
#[derive(Debug)]
#[must_use = "the drop ends the section"]
pub struct Section<'a> {
    mark: &'a AtomicU64,
    on: PhantomData<&'a Local>,
    #[expect(dead_code, reason = "the drop removes the mark")]
    noted: Mark<'a>,
}

impl Drop for Section<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        if lost(Mutant::SectionMark) {
            return;
        }
        let now = self.mark.load(Ordering::Relaxed);
        // The epoch may stay in the mark: without a section it is ignored.
        self.mark.store(now - 1, Ordering::Release);
    }
}

/// Iterates over objects whose grace period is over; each returned object belongs to the caller.
pub struct Due<'a> {
    local: &'a Local,
    /// The bags of the objects.
    retired: &'a Retired,
    /// Outside of the bags, because freeing one object may retire another.
    due: RetireChain,
}

impl Iterator for Due<'_> {
    type Item = NonNull<RetireLink>;

    fn next(&mut self) -> Option<Self::Item> {
        // SAFETY: taken from the bags, so only this value has them.
        unsafe { self.due.pop() }
    }
}

impl Drop for Due<'_> {
    fn drop(&mut self) {
        let left = core::mem::take(&mut self.due);
        if !left.is_empty() {
            self.retired.change(self.local, |bags| {
                // SAFETY: as in `next`; the objects belong to the bags from now on.
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
