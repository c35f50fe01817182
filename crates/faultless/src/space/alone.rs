//! The step of a writer that owns the space: in place.
//!
//! Nobody else sees the space meanwhile ([`owner`](crate::sync::owner)). So nothing is stopped, and nothing published: a VMA
//! that loses its head or its tail, or takes in what comes beside it, stays, and its bounds move. Only what is cut in two,
//! or like no neighbour, takes a new VMA. What can fail comes first: the VMAs are made before the tree changes, which then takes
//! all of the change or nothing; and bounds move last.

use super::merge::{Piece, agree, join};
use super::step::{Refused, State};
use super::vma::{Area, Vma};
use super::write::{Writing, make_vma};
use crate::addr::{PAGE_SHIFT, VirtRange};
use crate::error::{Errno, OutOfMemory};
use crate::fault::anon::root_of_neighbour;
use crate::machine::Machine;
use crate::rmap::{AnonVma, Root, RootRef, RootSlot};
use crate::space::tree::{Entry, View};
use crate::sync::atomic::Ordering;
use crate::sync::grace::{RetireChain, RetireLink};
use alloc::boxed::Box;
use core::ptr::NonNull;

/// The step of an owner.
pub(super) struct Alone<'w, 'a, 'v, M: Machine> {
    writing: &'w Writing<'a, 'v, M>,
}

/// What there is of a range, and beside it.
#[derive(Default)]
struct Found {
    /// What starts below the range, and what ends above it: they touch it, or stick out. Both may be one.
    below: Option<Entry<Vma>>,
    above: Option<Entry<Vma>>,
    /// How many VMAs are inside.
    inside: usize,
    /// How many pages of the range are mapped.
    mapped: u64,
}

/// What is to become of the tree.
struct Change {
    /// All that changes.
    taken: VirtRange,
    entries: [Entry<Vma>; 3],
    count: usize,
}

impl<'w, 'a, 'v, M: Machine> Alone<'w, 'a, 'v, M> {
    #[inline(always)]
    pub(super) fn new(writing: &'w Writing<'a, 'v, M>) -> Self {
        debug_assert!(writing.owns());
        Self { writing }
    }

    #[inline(always)]
    pub(super) fn view(&self) -> View<'w, Vma> {
        self.writing.view()
    }

    /// See [`Step::take`](super::step::Step::take).
    ///
    /// # Errors
    /// `EFAULT`.
    pub(super) fn take(&self, range: VirtRange) -> Result<(Area, Option<Root>), Refused> {
        let vma = vma(self.view().at(range.start).ok_or(Errno::EFAULT)?);
        Ok((vma.area.part(range), vma.root.get()))
    }

    /// See [`Step::replace`](super::step::Step::replace).
    ///
    /// # Errors
    /// `ENOMEM`.
    #[inline(always)]
    pub(super) fn replace(
        &self,
        range: VirtRange,
        mut piece: Option<Piece>,
    ) -> Result<(), Refused> {
        let found = self.find(range);
        let (below, above) = (found.below, found.above);
        let mut joins = [false; 2];
        let mut pages = 0;
        if let Some(piece) = &mut piece {
            pages = range.pages();
            let like = |beside: Option<Entry<Vma>>, at| {
                beside.map(vma).filter(|vma| agree(&vma.area, &piece.area, at))
            };
            let (low, high) = (like(below, range.start), like(above, range.end));
            joins = join(piece, low, high, true);
        }
        let overlaps = |beside: Option<Entry<Vma>>| beside.filter(|e| e.range().overlaps(range));
        let cut = [overlaps(below), overlaps(above)];
        self.note_cut(cut, range);
        // One that is on both sides is cut in two, unless it is like what comes between.
        let split = cut[0].is_some_and(|entry| entry.end > range.end);
        if split && joins[0] {
            return Ok(());
        }
        let both = joins[0] && joins[1];
        let low = below.filter(|_| joins[0] || cut[0].is_some());
        let high = above.filter(|_| (joins[1] || cut[1].is_some()) && !both && !split);
        let root = piece.as_ref().and_then(|piece| piece.root.clone());
        let new = piece.filter(|_| joins == [false; 2]);

        let gone = found.inside + usize::from(both);
        self.check_count(usize::from(new.is_some()) + usize::from(split), gone)?;
        let rest = cut[0].filter(|_| split).map(vma).map(|vma| {
            let merges = [false, vma.merges[1]];
            let area = vma.area.part(VirtRange::new(range.end, u64::MAX));
            make_vma(area, vma.root.get(), State::Running, merges)
        });
        let rest = rest.transpose()?;
        let make = |piece: Piece| make_vma(piece.area, piece.root, State::Running, [false; 2]);
        let new = new.map(make).transpose()?;

        let mut change = Change::of(range);
        let mut low_end = range.start;
        if let Some(low) = low {
            let taken_in = above.filter(|_| both);
            low_end = match taken_in {
                Some(above) => above.end,
                None if joins[0] => range.end,
                None => range.start,
            };
            change.taken = change.taken.hull(low.range());
            change.taken.end = change.taken.end.max(low_end);
            change.add(low.start, low_end, low.value);
        }
        if let Some(new) = &new {
            change.add(range.start, range.end, NonNull::from(&**new));
        }
        let high_start = if joins[1] { range.start } else { range.end };
        if let Some(high) = high {
            change.taken.end = high.end;
            change.add(high_start, high.end, high.value);
        } else if let Some(rest) = &rest {
            change.add(range.end, rest.area.range.end, NonNull::from(&**rest));
        }
        self.edit(&change, [low, high])?;
        // The tree has them now.
        let _ = [new, rest].map(|made| made.map(Box::leak));

        if let Some(low) = low.map(vma) {
            let merges = above.filter(|_| both).is_some_and(|above| vma(above).merges[1]);
            // SAFETY: the space is this CPU's own, and no reference to the bounds is in use.
            unsafe {
                low.area.change(|area| area.range.end = low_end);
                low.merges.change(|all| all[1] = merges);
            }
            if joins[0] {
                adopt(&low.root, root.as_ref());
            }
        }
        if let Some(high) = high.map(vma) {
            // SAFETY: as above.
            unsafe {
                high.area.change(|area| area.move_start(high_start));
                high.merges.change(|all| all[0] = false);
            }
            if joins[1] {
                adopt(&high.root, root.as_ref());
            }
        }
        let mapped = pages.wrapping_sub(found.mapped);
        self.writing.space.mapped.fetch_add(mapped, Ordering::Relaxed);
        Ok(())
    }

    /// See [`Step::extend_down`](super::step::Step::extend_down).
    ///
    /// # Errors
    /// `ENOMEM`.
    pub(super) fn extend_down(&self, stack: u64, addr: u64) -> Result<(), Refused> {
        let Some(entry) = self.view().at(stack) else { return Ok(()) };
        let own = vma(entry);
        // As on Linux, one that has grown has an anon_vma.
        let root = own.root.get().or_else(|| root_of_neighbour(&self.view(), &own.area));
        let root = root.map_or_else(|| AnonVma::try_new(None), Ok)?;
        let mut change = Change::of(VirtRange::new(addr, entry.end));
        change.add(addr, entry.end, entry.value);
        self.edit(&change, [Some(entry), None])?;
        // SAFETY: the space is this CPU's own, and no reference to the bounds is in use.
        unsafe {
            own.area.change(|area| area.move_start(addr));
            own.merges.change(|all| all[0] = false);
        }
        adopt(&own.root, Some(&root));
        let pages = (stack - addr) >> PAGE_SHIFT;
        self.writing.space.mapped.fetch_add(pages, Ordering::Relaxed);
        Ok(())
    }

    #[inline(always)]
    fn find(&self, range: VirtRange) -> Found {
        let mut found = Found::default();
        let mut near = self.view().iter_from(range.start.saturating_sub(1));
        while let Some(entry) = near.next()
            && entry.start <= range.end
        {
            found.mapped += entry.range().intersect(range).pages();
            let (low, high) = (entry.start < range.start, entry.end > range.end);
            if low {
                found.below = Some(entry);
            }
            if high {
                found.above = Some(entry);
            }
            found.inside += usize::from(!low && !high);
        }
        found
    }

    /// Refuses more VMAs than a space may have: `made` come, and `gone` go.
    #[inline(always)]
    fn check_count(&self, made: usize, gone: usize) -> Result<(), Refused> {
        let most = self.writing.cpu.vm().knobs.max_map_count();
        if made > gone && (self.view().len() + made - gone) as u64 > most {
            return Err(Errno::ENOMEM.into());
        }
        Ok(())
    }

    /// Notes which parts of private anonymous memory the VMAs in `cut` lose, or hand on to what comes over `range`.
    #[inline(always)]
    fn note_cut(&self, cut: [Option<Entry<Vma>>; 2], range: VirtRange) {
        if cut[0].is_none() && cut[1].is_none() {
            return;
        }
        let part = |entry: Option<Entry<Vma>>| {
            let entry = entry.filter(|entry| vma(*entry).area.object.is_none());
            entry.map_or(VirtRange::new(0, 0), |entry| entry.range().intersect(range))
        };
        self.writing.cut.set(cut.map(part));
    }

    /// Changes the tree. What is in it no more is freed at the end, but for the VMAs in `stay`.
    #[inline(always)]
    fn edit(&self, change: &Change, stay: [Option<Entry<Vma>>; 2]) -> Result<(), OutOfMemory> {
        let Self { writing, .. } = self;
        let (cpu, tree) = (writing.cpu, &writing.space.tree);
        // SAFETY: the subsystem has one grace period, in whose sections all trees are read. This CPU owns the space, so that
        // nobody else has a view of the tree, and it uses its own ones no more.
        let mut edit = unsafe { tree.edit_in_place(cpu.local(), &cpu.vm().grace, cpu) };
        let mut old = RetireChain::default();
        let stays = |value| stay.into_iter().flatten().any(|entry| entry.value == value);
        edit.replace(change.taken, &change.entries[..change.count], |entry| {
            if !stays(entry.value) {
                // SAFETY: a link is the first field of a VMA. It lives until it is freed, and only the owner touches it.
                unsafe { old.append(entry.value.cast::<RetireLink>()) };
            }
        })?;
        edit.publish();
        if !old.is_empty() {
            // SAFETY: removed just now, and freed when the writer is done.
            for link in unsafe { old.iter() } {
                cpu.state().hint.forget_vma(link.cast::<Vma>().as_ptr());
            }
            // SAFETY: as above.
            unsafe { old.prepend(writing.gone.take()) };
            writing.gone.set(old);
        }
        Ok(())
    }
}

impl Change {
    #[inline(always)]
    fn of(taken: VirtRange) -> Self {
        let none = Entry { start: 0, end: 0, value: NonNull::dangling() };
        Self { taken, entries: [none; 3], count: 0 }
    }

    #[inline(always)]
    fn add(&mut self, start: u64, end: u64, value: NonNull<Vma>) {
        self.entries[self.count] = Entry { start, end, value };
        self.count += 1;
    }
}

/// Gives `root` to a VMA that has none.
#[inline(always)]
fn adopt(slot: &RootSlot, root: Option<&Root>) {
    if let Some(root) = root
        && slot.peek().is_none()
    {
        slot.give(RootRef::of(root));
    }
}

/// The VMA of `entry`, of the tree that this CPU owns.
fn vma<'w>(entry: Entry<Vma>) -> &'w Vma {
    // SAFETY: in the tree, so that it lives until the writer that removes it is done.
    unsafe { entry.value.as_ref() }
}
