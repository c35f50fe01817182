//! The step of a writer in a shared space: it builds the next version of the tree, or of one shard
//! of it, and publishes it.
//!
//! See [`step`](super::step) for the protocol.

use super::made::{Made, State, make_vma};
use super::merge::{
    Neighbour, join, merge_later, mergeable_anon_vma, roots_merge, seal_group, unseal_group,
};
use super::vma::{Piece, Vma};
use super::write::{Refused, UnderChange, Writing};
use crate::addr::VirtRange;
use crate::error::{Errno, OutOfMemory};
use crate::machine::Machine;
use crate::space::tree::{Edit, Entry, Found, Parting, View};
use crate::sync::grace::{RetireChain, RetireLink};
use crate::sync::mutant::{Mutant, lost};
use crate::sync::sequence::Sequence;
use crate::table::node::TABLE_ALIGN;
use core::ptr::NonNull;

/// The next version of the tree or of a shard, while one writer builds it.
pub(super) struct Versions<'w, 'a, 'v, M: Machine> {
    writing: &'w Writing<'a, 'v, M>,
    edit: Edit<'w, Vma>,
    made: Made<'a, 'v, M>,
    /// VMAs that the next version no longer has.
    old: RetireChain,
    /// Where the step write-locked VMAs: one hull for each range that was replaced.
    hulls: [VirtRange; 2],
    replaced: usize,
    /// The VMAs that the writer will have under change.
    changing: UnderChange,
    /// Between which neighbours, named by the start of the upper one, a deferred merge no longer
    /// takes place.
    separated: [Option<u64>; 4],
    /// The start of a VMA that must merge with a neighbour, with which its merge was deferred,
    /// before it is cut.
    unmerged: Option<u64>,
    /// How many VMAs a space may have.
    most: u64,
}

impl<'w, 'a, 'v, M: Machine> Versions<'w, 'a, 'v, M> {
    /// Begins a step in `place`. It holds the lock of the tree, or of the shard that has `place`.
    ///
    /// # Errors
    /// [`OutOfMemory`]: `place` is in several shards, which cannot be joined.
    #[inline(always)]
    pub(super) fn begin(
        writing: &'w Writing<'a, 'v, M>,
        place: VirtRange,
    ) -> Result<Self, OutOfMemory> {
        let (cpu, tree) = (writing.cpu, &writing.space.tree);
        let (local, grace, section) = (cpu.local(), &cpu.vm().grace, &writing.section);
        let knobs = &cpu.vm().knobs;
        let most = knobs.max_map_count();
        let parting = parting(if writing.may_part() { knobs.shard_after() } else { 0 }, most);
        // SAFETY: the subsystem has one grace period, in whose sections all trees are read.
        let edit = unsafe { tree.edit_in(place, &parting, section, local, grace, cpu) }?;
        let nowhere = VirtRange { start: 0, end: 0 };
        Ok(Self {
            writing,
            edit,
            made: Made::new(cpu),
            old: RetireChain::default(),
            hulls: [nowhere; 2],
            replaced: 0,
            changing: writing.changing.get(),
            separated: [None; 4],
            unmerged: None,
            most,
        })
    }

    /// The start of a VMA that must merge before the step can cut it. Then the step was refused.
    pub(super) const fn unmerged(&self) -> Option<u64> {
        self.unmerged
    }

    /// The tree, with the next version of what the step may change.
    pub(super) fn view(&self) -> View<'_, Vma> {
        self.edit.view()
    }

    /// Returns `range` as its VMA has it. From now on no fault sets another anon_vma. `range` must be
    /// claimed, and must be replaced next.
    ///
    /// # Errors
    /// `EFAULT`: nothing is mapped there.
    pub(super) fn take(&mut self, range: VirtRange) -> Result<Piece, Refused> {
        let entry = self.edit.own().at(range.start).ok_or(Errno::EFAULT)?;
        let vma = vma(entry);
        let hull = &mut self.hulls[self.replaced.min(1)];
        write_lock(self.writing, &self.made, hull, entry)?;
        Sequence::writer_fence();
        Ok(vma.part(range))
    }

    /// Returns `range` as its VMA has it. `range` must be claimed.
    ///
    /// # Errors
    /// `EFAULT`: nothing is mapped there.
    pub(super) fn look(&self, range: VirtRange) -> Result<Piece, Refused> {
        let entry = self.edit.own().at(range.start).ok_or(Errno::EFAULT)?;
        Ok(vma(entry).part(range))
    }

    /// See [`Step::replace`].
    ///
    /// # Errors
    /// `ENOMEM`; the step is over.
    pub(super) fn replace(
        &mut self,
        range: VirtRange,
        piece: Option<Piece>,
        state: State,
    ) -> Result<(), Refused> {
        self.check_claim(range);
        self.replace_anywhere(range, piece, state, None)
    }

    /// Checks the invariant of claimed pages, in builds with checks.
    #[inline(always)]
    fn check_claim(&self, range: VirtRange) {
        if cfg!(any(debug_assertions, loom, shuttle)) {
            assert!(self.writing.claims(range), "{range:?} is not claimed");
        }
    }

    /// Merges the VMA that has exactly `range`, if there is one and no other writer has it under
    /// change, with adjacent VMAs with which its merge was deferred. No page changes its area by
    /// that, so `range` need not be claimed.
    ///
    /// # Errors
    /// `ENOMEM`; the step is over.
    pub(super) fn merge(&mut self, range: VirtRange) -> Result<(), Refused> {
        let entry = self.edit.own().at(range.start).filter(|entry| entry.range() == range);
        let hull = &self.hulls[self.replaced.min(1)];
        if entry.is_none_or(|entry| is_busy(self.writing, &self.made, hull, entry)) {
            return Ok(());
        }
        let whole = entry.map(vma);
        let piece = self.take(range)?;
        self.replace_anywhere(range, Some(piece), State::Unlocked, whole)
    }

    /// [`replace`](Self::replace) of any range. If `range` is exactly the VMA `whole`, it merges
    /// where its merge was deferred.
    fn replace_anywhere(
        &mut self,
        range: VirtRange,
        mut piece: Option<Piece>,
        state: State,
        whole: Option<&Vma>,
    ) -> Result<(), Refused> {
        let state = if lost(Mutant::ChangesStopped) { State::Unlocked } else { state };
        let mut merges = state == State::Unlocked || !self.writing.has_company();
        // The VMAs that extend beyond either end, or are adjacent and can merge with `piece`; and
        // all that can merge with it.
        let (mut below, mut above) = (None, None);
        let (mut alike_below, mut alike_above) = (None, None);
        // Whether a merge with the VMA at either end was deferred.
        let mut deferred = [false; 2];
        let like =
            |vma: &Vma| piece.as_ref().is_some_and(|new| vma.attributes.agree(&new.attributes));
        let Self { writing, edit, made, hulls, .. } = self;
        let hull = &mut hulls[self.replaced.min(1)];
        let view = edit.view();
        let mut near = edit.own().iter_from(range.start.saturating_sub(1));
        while let Some(entry) = near.next()
            && entry.start <= range.end
        {
            let (vma, own) = (vma(entry), entry.range());
            let (low, high) = (own.start < range.start, own.end > range.end);
            let (mut like_low, mut like_high) = (low && like(vma), high && like(vma));
            if let Some(whole) = whole {
                like_low &= merge_later(vma, whole);
                like_high &= merge_later(whole, vma);
            }
            if !own.overlaps(range) {
                deferred[0] |= low && vma.merges.above();
                deferred[1] |= high && vma.merges.below();
                if !(like_low || like_high) {
                    continue;
                }
                if is_busy(writing, made, hull, entry) {
                    if whole.is_some() {
                        // They merge when that is finished.
                        continue;
                    }
                    let root = vma.anon_vma.get();
                    let own = piece.as_ref().and_then(|new| new.root);
                    let other = |low: &Vma| !roots_merge(low.anon_vma.get(), root);
                    if !roots_merge(root, own) || (high && alike_below.is_some_and(other)) {
                        // These never merge.
                        continue;
                    }
                    // The writer that finishes it merges all VMAs that can merge then, in address
                    // order.
                    merges = false;
                }
            }
            if like_low {
                alike_below = Some(vma);
            }
            if like_high {
                alike_above = Some(vma);
            }
            if !own.overlaps(range) && !merges {
                continue;
            }
            write_lock(writing, made, hull, entry)?;
            if own.overlaps(range) && is_unmerged(view, vma, low, high) {
                let ours = made.has(entry.value) || writing.is_changing(entry.value);
                if !ours && !lost(Mutant::CutsUnmerged) {
                    self.unmerged = Some(entry.start);
                    return Err(Refused::Busy(entry.start));
                }
            }
            if low {
                below = Some(vma);
            }
            if high {
                above = Some(vma);
            }
        }
        Sequence::writer_fence();
        let (mut lower, mut upper) = (None, None);
        let mut later = whole.map_or([false; 2], |whole| whole.merges.get());
        if let Some(piece) = &mut piece {
            // A VMA that merges later takes the anon_vma now: its neighbours may have been removed
            // by then.
            let adopt = merges || !lost(Mutant::RootAdopted);
            let alike = [alike_below, alike_above];
            let merge_later = |vma: &&Vma| !merges || vma.merges.get() != [false; 2];
            let groups = alike.map(|vma| vma.filter(merge_later));
            groups.into_iter().flatten().for_each(|vma| seal_group(view, vma));
            let joins = join(piece, alike_below, alike_above, adopt);
            let root = piece.root.filter(|_| adopt);
            for (vma, joins) in groups.into_iter().zip(joins) {
                if let Some(vma) = vma {
                    unseal_group(view, vma, root.filter(|_| joins));
                }
            }
            if merges {
                lower = below.take_if(|_| joins[0]);
                upper = above.take_if(|_| joins[1]);
            } else if state == State::WriteLocked || !lost(Mutant::MergesLater) {
                later = joins;
            }
        }
        if piece.is_some() && whole.is_none() {
            for ((at, deferred), later) in
                [range.start, range.end].into_iter().zip(deferred).zip(later)
            {
                self.separate(at, deferred && !later);
            }
        }
        let (first, mut taken) = (self.made.used, range);
        // Their anon_vma may have been set just now.
        let (below, above) = (below.map(Neighbour::new), above.map(Neighbour::new));
        if let Some(below) = below {
            taken = taken.hull(self.keep_rest(below, range, VirtRange::new(0, range.start))?);
        }
        if let Some(mut piece) = piece {
            if let Some(vma) = lower {
                piece.range.start = vma.start();
                later[0] = vma.merges.below();
            }
            if let Some(vma) = upper {
                piece.range.end = vma.end();
                later[1] = vma.merges.above();
            }
            taken = taken.hull(piece.range);
            self.make(piece, state, later)?;
        }
        if let Some(above) = above {
            let outside = VirtRange::new(range.end, u64::MAX);
            taken = taken.hull(self.keep_rest(above, range, outside)?);
        }
        self.put(taken, first)
    }

    /// Records whether a merge of the VMAs that meet at `at` was deferred, and does not take place:
    /// the two are alike no more. If they become alike later, they stay two, as after a split. Else
    /// the VMA that is under change would still record that they merge.
    #[inline(always)]
    fn separate(&mut self, at: u64, separates: bool) {
        let known = self.separated.iter_mut().find(|known| **known == Some(at));
        match (known, separates) {
            (Some(known), false) => *known = None,
            (None, true) => {
                let free = self.separated.iter_mut().find(|known| known.is_none());
                debug_assert!(free.is_some(), "a step replaces two ranges at most");
                if let Some(free) = free {
                    *free = Some(at);
                }
            }
            _ => {}
        }
    }

    /// Splits off the part of a VMA that lies `outside` of `range`, if the VMA overlaps `range`.
    /// Returns the range taken besides `range`.
    #[inline(always)]
    fn keep_rest(
        &mut self,
        beside: Neighbour<'_>,
        range: VirtRange,
        outside: VirtRange,
    ) -> Result<VirtRange, Refused> {
        let Neighbour { vma, root, .. } = beside;
        let own = vma.range();
        if own.overlaps(range) {
            let (state, part) = (self.state_of(vma), Piece { root, ..vma.part(outside) });
            // At the cut, the new neighbour records whether they merge.
            let merges = [
                vma.merges.below() && part.range.start == own.start,
                vma.merges.above() && part.range.end == own.end,
            ];
            self.make(part, state, merges)?;
            return Ok(own);
        }
        let vma_at = NonNull::from(vma);
        if !self.made.has(vma_at) && !self.writing.is_changing(vma_at) {
            // It need not have been write-locked: it has another anon_vma.
            self.writing.unlock(vma);
        }
        Ok(range)
    }

    /// Makes a VMA, which must be put into the tree next. `merges`: with which neighbours, below
    /// and above, it merges later. If it is write-locked it is under change.
    #[inline(always)]
    fn make(&mut self, piece: Piece, state: State, merges: [bool; 2]) -> Result<(), Refused> {
        let vma = make_vma(self.writing.cpu, piece, &self.writing.space.core, state, merges)?;
        self.made.add(vma);
        if state == State::WriteLocked {
            let changing = self.changing.get_or_insert_default();
            let free = changing.iter_mut().find(|change| change.is_none());
            debug_assert!(free.is_some(), "more changes than the limit of a writer");
            if let Some(free) = free {
                *free = Some(vma);
            }
        }
        Ok(())
    }

    /// Replaces the VMA at `stack` by one that extends down to `addr`; nothing may be mapped
    /// between. It merges with no VMA.
    ///
    /// # Errors
    /// `ENOMEM`; the step is over.
    pub(super) fn extend_down(&mut self, stack: u64, addr: u64) -> Result<(), Refused> {
        let own = self.edit.own().at(stack).map(vma);
        let sealed = self.take(VirtRange::page(stack))?.root;
        let Some(own) = own else { return Ok(()) };
        // As on Linux, a stack that has grown has an anon_vma, which decides with which VMAs it
        // merges later.
        let root = sealed.or_else(|| mergeable_anon_vma(&self.view(), own));
        let root = root.unwrap_or_else(|| self.writing.cpu.make_anon_vma(false));
        let range = VirtRange::new(addr, own.end());
        let more = Piece { range, root: Some(root), ..own.part(own.range()) };
        let first = self.made.used;
        self.make(more, State::Unlocked, [false, own.merges.above()])?;
        self.separate(addr, true);
        self.put(range, first)
    }

    /// Replaces the VMA that has exactly the range of `area` by one of `area`, which is
    /// write-locked, and merges only where its merge was deferred.
    ///
    /// # Errors
    /// `ENOMEM`; the step is over.
    pub(super) fn renew(&mut self, piece: Piece) -> Result<(), Refused> {
        let range = piece.range;
        self.check_claim(range);
        let first = self.made.used;
        let merges =
            self.edit.own().at(range.start).map_or([false; 2], |entry| vma(entry).merges.get());
        self.make(piece, State::WriteLocked, merges)?;
        self.put(range, first)
    }

    /// Replaces all VMAs that overlap `taken` by those made since there were `first`. The replaced
    /// VMAs must lie inside `taken`, and must be write-locked.
    #[inline(always)]
    fn put(&mut self, taken: VirtRange, first: usize) -> Result<(), Refused> {
        let no_entry = Entry { start: 0, end: 0, value: NonNull::dangling() };
        let (mut entries, mut count) = ([no_entry; 3], 0);
        let Self { writing, edit, made, old, changing, .. } = self;
        for value in made.vmas[first..made.used].iter().copied().flatten() {
            // SAFETY: made just now.
            let range = unsafe { value.as_ref() }.range();
            entries[count] = Entry { start: range.start, end: range.end, value };
            count += 1;
        }
        let busy = first != 0 || writing.changing.get().is_some();
        edit.replace(taken, &entries[..count], |entry| {
            if busy {
                for change in changing.iter_mut().flatten() {
                    *change = change.filter(|change| *change != entry.value);
                }
                if made.free(entry.value) {
                    // This step made it, so no other CPU has seen it.
                    return;
                }
            }
            // SAFETY: a link is the first field of a VMA. The VMA lives until it is retired, and
            // its link is used only by the holder of the lock of the tree, or of the shard that has
            // the VMA (whole entries).
            unsafe { old.append(entry.value.cast::<RetireLink>()) };
        })?;
        self.replaced += 1;
        Ok(())
    }
}

impl<M: Machine> Versions<'_, '_, '_, M> {
    /// Fails if the space would have more VMAs than it may.
    #[inline(always)]
    pub(super) fn check_count(&self) -> Result<(), Refused> {
        if self.replaced != 0 && !self.edit.fits(self.most) {
            return if self.edit.is_whole() { self.check_merged() } else { Err(Refused::Crowded) };
        }
        Ok(())
    }

    /// [`check_count`](Self::check_count) of the VMAs after all deferred merges: the count that
    /// either sequential order of the concurrent operations gives.
    #[cold]
    fn check_merged(&self) -> Result<(), Refused> {
        let merged = |view: View<'_, Vma>| {
            let pairs = view.iter().zip(view.iter().skip(1));
            let later = pairs.filter(|(low, high)| merge_later(vma(*low), vma(*high))).count();
            view.len() - if lost(Mutant::CountsMerged) { 0 } else { later }
        };
        let after = merged(self.edit.view());
        if after as u64 > self.most && after > merged(self.writing.view()) {
            return Err(self.writing.refuse_count());
        }
        Ok(())
    }

    /// The state of a part split off `vma`: write-locked if this writer has `vma` under change.
    fn state_of(&self, vma: &Vma) -> State {
        let vma = NonNull::from(vma);
        let mine = self.changing.into_iter().flatten().flatten().any(|change| change == vma);
        if mine { State::WriteLocked } else { State::Unlocked }
    }

    /// Makes the next version the current one.
    #[inline(always)]
    pub(super) fn publish(self) {
        let Self { writing, edit, made, old, changing, separated, .. } = self;
        if self.replaced == 0 {
            return;
        }
        for at in separated.into_iter().flatten().filter(|_| !lost(Mutant::PartsNeighbours)) {
            forget_merge(edit.view(), at);
        }
        if changing.is_some() {
            writing.changing.set(changing);
        }
        // The tree owns them now.
        core::mem::forget(made);
        // SAFETY: the published version does not have the old VMAs. This step removed them, under
        // the lock of the tree or of the shard that had them, so they are retired once.
        unsafe { edit.publish_retiring(old) };
    }

    /// Unlocks the VMAs that this step write-locked. The lock of the tree or shard is still held: a
    /// VMA in a hull with an odd sequence was write-locked here.
    pub(super) fn undo(self) {
        let Self { writing, hulls, .. } = &self;
        for hull in hulls {
            for vma in writing.vmas(*hull).filter(|vma| vma.sequence.read().is_none()) {
                if !writing.is_changing(NonNull::from(vma)) {
                    writing.unlock(vma);
                }
            }
        }
    }
}

/// When and where a tree is parted. VMAs whose merge is deferred stay in one shard, so that one
/// step can merge them. VMAs over one last-level table stay in one shard, too: of the steps that
/// unmap them, the last sees that nothing is left, and unlinks the table.
fn parting(after: u32, most: u64) -> Parting<'static, Vma> {
    let may = &|low: Found<'_, Vma>, high: Found<'_, Vma>| {
        !low.get().merges.above() && !high.get().merges.below()
    };
    Parting { after, align: TABLE_ALIGN, most, may }
}

/// For models, which are too short for CPUs to take turns.
#[cfg(any(test, loom, shuttle))]
impl<M: Machine> super::Space<M> {
    /// Parts the tree at `bound`, if it may be parted there.
    pub fn part_tree(&self, cpu: &crate::Cpu<'_, M>, bound: u64) {
        let section = self.section(cpu);
        // As if another CPU used the space: an owner has a tree in one piece.
        self.core.enter(crate::CpuId(u16::MAX), cpu, &section);
        let parting = parting(1, cpu.vm().knobs.max_map_count());
        let tools = (cpu.local(), &cpu.vm().grace, cpu);
        // SAFETY: the subsystem has one grace period, in whose sections all trees are read.
        let _ = unsafe { self.tree.part_here(bound, &parting, tools) };
    }

    /// How many shards the tree is in; 0 if it is in one piece.
    pub fn shards(&self, cpu: &crate::Cpu<'_, M>) -> usize {
        let section = self.section(cpu);
        self.view(cpu, &section).shards()
    }
}

/// Takes back that the VMAs of `view` that meet at `at` merge later. The caller holds the lock of
/// the tree, or of the shard with both.
#[cold]
fn forget_merge(view: View<'_, Vma>, at: u64) {
    let near = |addr| view.at(addr).map(vma);
    if let Some(upper) = near(at).filter(|upper| upper.start() == at) {
        upper.merges.set_below(false);
    }
    let below = at.checked_sub(1).and_then(near);
    if let Some(lower) = below.filter(|lower| lower.end() == at) {
        lower.merges.set_above(false);
    }
}

/// Whether a neighbour that is not under change merges later with what a cut leaves of `vma` at its
/// low or high end.
#[inline(always)]
fn is_unmerged(view: View<'_, Vma>, vma: &Vma, low: bool, high: bool) -> bool {
    let [below, above] = vma.merges.get();
    ((low && below) || (high && above)) && has_unmerged(view, vma, low && below, high && above)
}

#[cold]
fn has_unmerged(view: View<'_, Vma>, vma: &Vma, low: bool, high: bool) -> bool {
    let own = vma.range();
    let near = |addr| view.at(addr).map(self::vma);
    let below = own.start.checked_sub(1).filter(|_| low).and_then(near);
    let above = near(own.end).filter(|_| high);
    let is_free = |vma: &Vma| vma.sequence.read().is_some();
    below.is_some_and(|below| merge_later(below, vma) && is_free(below))
        || above.is_some_and(|above| merge_later(vma, above) && is_free(above))
}

/// The VMA of `entry` in the next version of a tree, which is built in `'w`.
fn vma<'w>(entry: Found<'_, Vma>) -> &'w Vma {
    // SAFETY: it is in the tree, so that it lives as long as the writer's section; or it was made
    // by the step, which frees it only once it is replaced, and uses no reference to it then.
    unsafe { entry.value.as_ref() }
}

/// Whether the VMA of `entry` is under change by another writer.
fn is_busy<M: Machine>(
    writing: &Writing<'_, '_, M>,
    made: &Made<'_, '_, M>,
    hull: &VirtRange,
    entry: Found<'_, Vma>,
) -> bool {
    vma(entry).sequence.read().is_none() && is_of_others(writing, made, hull, entry)
}

/// Whether another writer has write-locked the VMA of `entry`, which is write-locked: not this
/// writer, and not its step, which has write-locked those in `hull`.
fn is_of_others<M: Machine>(
    writing: &Writing<'_, '_, M>,
    made: &Made<'_, '_, M>,
    hull: &VirtRange,
    entry: Found<'_, Vma>,
) -> bool {
    !hull.covers(entry.range())
        && !made.has(entry.value)
        && !writing.is_changing(entry.value)
        && !lost(Mutant::BusyIsLeft)
}

/// Write-locks the VMA of `entry`, unless it is write-locked already. [`Sequence::writer_fence`]
/// must follow.
fn write_lock<M: Machine>(
    writing: &Writing<'_, '_, M>,
    made: &Made<'_, '_, M>,
    hull: &mut VirtRange,
    entry: Found<'_, Vma>,
) -> Result<(), Refused> {
    if vma(entry).sequence.read().is_none() {
        let busy = is_of_others(writing, made, hull, entry);
        return if busy { Err(Refused::Busy(entry.start)) } else { Ok(()) };
    }
    if made.used == 0 || !made.has(entry.value) {
        writing.write_lock(vma(entry));
        *hull = if hull.is_empty() { entry.range() } else { hull.hull(entry.range()) };
    }
    Ok(())
}
