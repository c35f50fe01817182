//! The step of a writer that owns the space: in place.
//!
//! No other CPU reads the space meanwhile ([`owner`](crate::sync::owner)). So the step write-locks
//! no VMA, and publishes no version. A VMA that loses its head or tail, or merges with the new
//! range, stays in the tree, and its bounds move. Only a split in two, or a new range that merges
//! with no neighbour, needs a new VMA. Allocations come first, since they can fail. The tree then
//! takes the complete change or nothing; and bounds move last.

use super::made::{Made, State, make_vma};
use super::merge::{join, mergeable_anon_vma};
use super::vma::{Piece, Vma};
use super::write::{NOWHERE, Refused, Writing};
use crate::addr::VirtRange;
use crate::error::{Errno, OutOfMemory};
use crate::machine::Machine;
use crate::rmap::AnonVma;
use crate::space::tree::{Entry, Found, Spot, Version, View};
use crate::sync::grace::{RetireChain, RetireLink};
use core::ptr::NonNull;

/// The step of an owner.
pub(super) struct Alone<'w, 'a, 'v, M: Machine> {
    writing: &'w Writing<'a, 'v, M>,
}

/// The VMAs in a range, and beside it.
#[derive(Default)]
struct Near<'w> {
    /// The VMA that starts below the range, and the one that ends above it: each overlaps or
    /// touches it. Both may be the same.
    below: Option<&'w Vma>,
    above: Option<&'w Vma>,
    /// How many VMAs are inside.
    inside: usize,
}

/// A change of the tree. Of the entries of a spot, `removed` go, which follow the one below the
/// range if there is one.
#[derive(Clone, Copy)]
struct Change<'w> {
    /// All entries that change are in here, but for the VMAs that stay.
    range: VirtRange,
    below: bool,
    removed: usize,
    /// The VMA that stays below, and where it ends from now on; the one that stays above, and where
    /// it starts.
    low: Option<(&'w Vma, u64)>,
    high: Option<(&'w Vma, u64)>,
    /// New VMAs between these.
    new: [Option<NonNull<Vma>>; 2],
}

impl<'w, 'a, 'v, M: Machine> Alone<'w, 'a, 'v, M> {
    #[inline(always)]
    pub(super) fn new(writing: &'w Writing<'a, 'v, M>) -> Self {
        debug_assert!(writing.owns());
        Self { writing }
    }

    #[inline(always)]
    pub(super) fn view(&self) -> View<'w, Vma> {
        View::whole(self.version())
    }

    #[inline(always)]
    fn version(&self) -> Version<'w, Vma> {
        // SAFETY: this CPU owns the space until the writer is done.
        unsafe { self.writing.space.tree.version(&self.writing.section) }
    }

    #[inline(always)]
    fn lead(&self, spot: &mut Spot<'w, Vma>, addr: u64) {
        // SAFETY: this CPU owns the space until the writer is done.
        unsafe { self.writing.space.tree.lead(spot, &self.writing.section, addr) };
    }

    /// See [`Step::take`](super::step::Step::take).
    ///
    /// # Errors
    /// `EFAULT`.
    pub(super) fn take(&self, range: VirtRange) -> Result<Piece, Refused> {
        let vma = vma(self.version().at(range.start).ok_or(Errno::EFAULT)?);
        Ok(vma.part(range))
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
        let mut spot = Spot::nowhere();
        self.lead(&mut spot, range.start.saturating_sub(1));
        let Near { below, above, inside } = find(&spot, range);
        let low_cut = below.filter(|vma| vma.end() > range.start);
        let high_cut = above.filter(|vma| vma.start() < range.end);
        if low_cut.is_some() || high_cut.is_some() {
            self.writing.cut.set([low_cut, high_cut].map(|vma| private_part(vma, range)));
        }
        let [mut joins_low, mut joins_high] = [false; 2];
        if let Some(piece) = &mut piece {
            let low = below.filter(|vma| vma.attributes.agree(&piece.attributes));
            let high = above.filter(|vma| vma.attributes.agree(&piece.attributes));
            if low.is_some() || high.is_some() {
                [joins_low, joins_high] = join(piece, low, high, true);
            }
        }
        // A VMA on both sides is split in two, or merges with `piece`.
        let split = low_cut.filter(|vma| vma.end() > range.end);
        if split.is_some() && joins_low {
            return Ok(());
        }
        let both = joins_low && joins_high;
        let low = if joins_low { below } else { low_cut };
        let high = if joins_high { above } else { high_cut };
        let high = if both || split.is_some() { None } else { high };
        let comes = piece.is_some() && !joins_low && !joins_high;
        let removed = inside + usize::from(both);
        self.check_count(usize::from(comes) + usize::from(split.is_some()), removed)?;

        let cpu = self.writing.cpu;
        let mut made = None;
        let core = &self.writing.space.core;
        let mut make = |piece, merges| -> Result<NonNull<Vma>, OutOfMemory> {
            let vma = make_vma(cpu, piece, core, State::Unlocked, merges)?;
            made.get_or_insert_with(|| Made::new(cpu)).add(vma);
            Ok(vma)
        };
        let rest = match split {
            Some(vma) => {
                let piece = vma.part(VirtRange::new(range.end, u64::MAX));
                Some(make(piece, [false, vma.merges.above()])?)
            }
            None => None,
        };
        let (mut new, mut root) = (None, None);
        if let Some(piece) = piece {
            if comes {
                new = Some(make(piece, [false; 2])?);
            } else {
                root = piece.root;
            }
        }

        let (mut low_end, mut low_merges) = (range.start, false);
        if joins_low {
            low_end = range.end;
        }
        if let Some(above) = above
            && both
        {
            (low_end, low_merges) = (above.end(), above.merges.above());
        }
        let high_start = if joins_high { range.start } else { range.end };
        let low = low.map(|vma| (vma, low_end));
        let high = high.map(|vma| (vma, high_start));
        let below = below.is_some();
        self.edit(&spot, Change { range, below, removed, low, high, new: [new, rest] })?;
        // The tree owns them now.
        core::mem::forget(made);

        if let Some((vma, end)) = low {
            vma.set_end(end);
            vma.merges.set_above(low_merges);
            adopt(vma, root.filter(|_| joins_low));
        }
        if let Some((vma, start)) = high {
            vma.set_start(start);
            vma.merges.set_below(false);
            adopt(vma, root.filter(|_| joins_high));
        }
        Ok(())
    }

    /// See [`Step::extend_down`](super::step::Step::extend_down).
    ///
    /// # Errors
    /// `ENOMEM`.
    pub(super) fn extend_down(&self, stack: u64, addr: u64) -> Result<(), Refused> {
        let mut spot = Spot::nowhere();
        self.lead(&mut spot, stack);
        let found = spot.iter().next().filter(|entry| entry.start <= stack);
        let Some(vma) = found.map(vma) else { return Ok(()) };
        // As on Linux, a stack that has grown has an anon_vma.
        let root = vma.anon_vma.get().or_else(|| mergeable_anon_vma(&self.view(), vma));
        let root = root.unwrap_or_else(|| self.writing.cpu.make_anon_vma(false));
        let range = VirtRange::new(addr, vma.start());
        let (below, removed, low, high) = (false, 0, None, Some((vma, addr)));
        self.edit(&spot, Change { range, below, removed, low, high, new: [None; 2] })?;
        vma.set_start(addr);
        vma.merges.set_below(false);
        adopt(vma, Some(root));
        Ok(())
    }

    /// Fails if the space would have more VMAs than it may: `made` are added, and `gone` removed.
    #[inline(always)]
    fn check_count(&self, made: usize, gone: usize) -> Result<(), Refused> {
        let most = self.writing.cpu.vm().knobs.max_map_count();
        if made > gone && (self.version().len() + made - gone) as u64 > most {
            return Err(self.writing.refuse_count());
        }
        Ok(())
    }

    /// Changes the tree. What it removes is freed at the end of the call.
    #[inline(always)]
    fn edit(&self, spot: &Spot<'_, Vma>, change: Change<'_>) -> Result<(), OutOfMemory> {
        let Change { below, removed, low, high, new, .. } = change;
        let mut old = RetireChain::default();
        let mut at = usize::from(below);
        let needed = at + removed + usize::from(high.is_some());
        let added = new.iter().flatten().count();
        // SAFETY: this CPU owns the space, so no other CPU has a view of the tree, and it no longer
        // uses its own ones.
        if let Some(mut leaf) = unsafe { spot.amend(needed, removed, added) } {
            leaf.remove(at, removed, |entry| {
                end(entry.value);
                goes(entry, &mut old);
            });
            if let Some((vma, end)) = low {
                leaf.bound(0, vma.start(), end);
            }
            for vma in new.into_iter().flatten() {
                leaf.insert(at, entry(vma));
                at += 1;
            }
            if let Some((vma, start)) = high {
                leaf.bound(at, start, vma.end());
            }
            leaf.finish();
        } else {
            old = self.rebuild(change)?;
        }
        if !old.is_empty() {
            // SAFETY: removed just now, and freed when the writer is done.
            unsafe { old.prepend(self.writing.gone.take()) };
            self.writing.gone.set(old);
        }
        Ok(())
    }

    /// Makes the next version of the tree, where the change needs nodes. Returns the VMAs that it
    /// removes.
    #[inline(never)]
    fn rebuild(&self, change: Change<'_>) -> Result<RetireChain, OutOfMemory> {
        let cpu = self.writing.cpu;
        let mut old = RetireChain::default();
        let Change { range, low, high, new: [new, rest], .. } = change;
        let mut taken = range;
        let stay = [low, high].map(|stays| stays.map(|(vma, _)| NonNull::from(vma)));
        let low = low.map(|(vma, end)| {
            taken = taken.hull(vma.range());
            taken.end = taken.end.max(end);
            Entry { end, ..entry(NonNull::from(vma)) }
        });
        let high = high.map(|(vma, start)| {
            taken = taken.hull(vma.range());
            Entry { start, ..entry(NonNull::from(vma)) }
        });
        let mut entries = [Entry { start: 0, end: 0, value: NonNull::dangling() }; 3];
        let mut count = 0;
        for entry in [low, new.map(entry), rest.map(entry), high].into_iter().flatten() {
            entries[count] = entry;
            count += 1;
        }
        // SAFETY: the subsystem has one grace period, in whose sections all trees are read.
        let mut edit = unsafe { self.writing.space.tree.edit(cpu.local(), &cpu.vm().grace, cpu) }?;
        edit.replace(taken, &entries[..count], |entry| {
            if !stay.contains(&Some(entry.value)) {
                goes(entry, &mut old);
            }
        })?;
        edit.publish();
        // Only now: without memory, the VMAs stay.
        // SAFETY: only this CPU has the chain.
        unsafe { old.iter() }.for_each(|link| end(link.cast()));
        Ok(old)
    }
}

/// Adds the VMA of `entry` to `old`.
#[inline(always)]
fn goes(entry: Entry<Vma>, old: &mut RetireChain) {
    // SAFETY: a link is the first field of a VMA. It lives until it is freed, and only the owner
    // uses it.
    unsafe { old.append(entry.value.cast::<RetireLink>()) };
}

/// Ends `vma`, which is no longer in the tree: this CPU's next fault must not use it.
#[inline(always)]
fn end(vma: NonNull<Vma>) {
    // SAFETY: removed from the tree just now, and freed when the writer is done.
    unsafe { vma.as_ref() }.sequence.detach();
}

/// What is in `range`, and beside it. `spot` begins with the first entry that ends at its start, or
/// above.
#[inline(always)]
fn find<'w>(spot: &Spot<'w, Vma>, range: VirtRange) -> Near<'w> {
    let mut found = Near::default();
    let mut near = spot.iter();
    while let Some(entry) = near.next()
        && entry.start <= range.end
    {
        let (low, high) = (entry.start < range.start, entry.end > range.end);
        if low {
            found.below = Some(vma(entry));
        }
        if high {
            found.above = Some(vma(entry));
        }
        found.inside += usize::from(!low && !high);
    }
    found
}

/// The part of `range` in which `vma` has private anonymous memory.
fn private_part(vma: Option<&Vma>, range: VirtRange) -> VirtRange {
    let vma = vma.filter(|vma| vma.memory().is_anonymous());
    vma.map_or(NOWHERE, |vma| vma.range().intersect(range))
}

/// Sets the anon_vma of a VMA that has none.
#[inline(always)]
fn adopt(vma: &Vma, root: Option<AnonVma>) {
    if let Some(root) = root
        && vma.anon_vma.get().is_none()
    {
        vma.anon_vma.give(root);
    }
}

/// The entry of `vma`.
fn entry(vma: NonNull<Vma>) -> Entry<Vma> {
    // SAFETY: the caller has made it, or found it in the tree that this CPU owns.
    let VirtRange { start, end } = unsafe { vma.as_ref() }.range();
    Entry { start, end, value: vma }
}

/// The VMA of `entry`, of the tree that this CPU owns.
fn vma<'w>(entry: Found<'_, Vma>) -> &'w Vma {
    // SAFETY: in the tree, so that it lives until the writer that removes it is done.
    unsafe { entry.value.as_ref() }
}
