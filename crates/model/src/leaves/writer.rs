//! The steps of a writer.

use super::state::{leaf_of, leaves_of, part};
use super::*;

impl Leaves {
    /// The next step of `writer`.
    pub(super) fn writer(&self, state: &mut State, writer: usize) -> Option<()> {
        let Writer { done, at } = state.writers[writer];
        let call = *self.calls(state, writer).get(usize::from(done))?;
        let (first, second) = self.locks(writer, call);
        let next = match at {
            At::Between => Some(At::First),
            At::First => {
                state.lock(first, writer)?;
                match (self.find_conflict(state, writer, call, first), second) {
                    (Some(other), _) => Some(self.wait_for(state, writer, first, other)),
                    (None, None) => Some(self.begin(state, writer, call)),
                    (None, Some(_)) if self.edits_each_alone(state, call) => {
                        self.edit_alone(state, call, first);
                        Some(At::Second(true))
                    }
                    (None, Some(_)) => {
                        Self::reserve(state, writer, call, first);
                        Some(At::Second(true))
                    }
                }
            }
            At::Second(_) => {
                let second = second.expect("the call has two leaves");
                state.lock(second, writer)?;
                match self.find_conflict(state, writer, call, second) {
                    Some(other) => Some(self.wait_for(state, writer, second, other)),
                    None if self.edits_each_alone(state, call) => {
                        self.edit_alone(state, call, second);
                        state.joined = state.is_alike_at_bound();
                        state.unlock(writer);
                        None
                    }
                    None => Some(self.begin(state, writer, call)),
                }
            }
            At::Edits(joined) => self.edit_all(state, writer, call, joined),
            At::Registers(leaf) => {
                Self::register(state, usize::from(leaf), 1 - writer, writer);
                Some(At::Parked(false))
            }
            At::Parked(_) => return None,
            At::Visits(page, changed) => Some(self.visit(state, writer, call, page, changed)?),
            At::Posts(changed) => Some(self.post(state, writer, call, changed)),
            At::Awaits => {
                if state.is_posted(writer) {
                    return None;
                }
                for owner in &mut state.frames {
                    if matches!(owner, Owner::Owed(by, _) if usize::from(*by) == writer) {
                        *owner = Owner::Free;
                    }
                }
                if self.lost(Rule::FlushWithoutLeaf) {
                    state.unlock(writer);
                }
                (!self.lost(Rule::MarkOutlastsFlush)).then(|| At::Locks(leaf_of(call.1) as u8))
            }
            At::Locks(leaf) => {
                state.lock(usize::from(leaf), writer)?;
                let mut after = state.clone();
                self.finish(&mut after, writer, call, usize::from(leaf));
                state.make_odd(self, &after);
                Some(At::Finishes(leaf))
            }
            At::Finishes(leaf) => {
                self.finish(state, writer, call, usize::from(leaf));
                state.unlock(writer);
                if leaves_of(call).next_back() != Some(usize::from(leaf)) {
                    Some(At::Locks(leaf + 1))
                } else {
                    self.lost(Rule::MarkOutlastsFlush).then_some(At::Awaits)
                }
            }
        };
        state.writers[writer] = match next {
            Some(at) => Writer { done, at },
            None => {
                // A call that removed marks may meet the marks of a later call. A call without
                // marks still holds the leaves.
                let later = !matches!(at, At::Edits(_));
                state.hasty |= (call.1..call.2).any(|page| state.has_old_translation(page, later));
                Writer { done: done + 1, at: At::Between }
            }
        };
        Some(())
    }

    /// Returns the leaves that `call` locks, in this order.
    fn locks(&self, writer: usize, call: Call) -> (usize, Option<usize>) {
        let spans = leaves_of(call).count() == 2;
        let touches = touches_bound(call) && !self.lost(Rule::JoinedUnderBothLocks);
        if !spans && !touches {
            (leaf_of(call.1), None)
        } else if self.lost(Rule::LocksAscend) && writer == 1 {
            (1, Some(0))
        } else {
            (0, Some(1))
        }
    }

    /// Returns the writer whose mark overlaps the range of `call` in `leaf`, which is locked.
    fn find_conflict(
        &self,
        state: &State,
        writer: usize,
        call: Call,
        leaf: usize,
    ) -> Option<usize> {
        if self.lost(Rule::GrowthSeesMarks) && !changes_entries(state, call) {
            return None;
        }
        let (start, end) = part(call, leaf);
        let other = 1 - writer;
        let overlaps = |mark: &Mark| start < end && mark.start < end && start < mark.end;
        state.leaves[leaf].marks[other].as_ref().is_some_and(overlaps).then_some(other)
    }

    /// Releases all locks, and waits for the mark of `other` in `leaf`.
    fn wait_for(&self, state: &mut State, writer: usize, leaf: usize, other: usize) -> At {
        let call = self.calls(state, writer)[usize::from(state.writers[writer].done)];
        state.unlock(writer);
        if self.lost(Rule::WaiterHoldsLock) {
            return At::Registers(leaf as u8);
        }
        Self::register(state, leaf, other, writer);
        let is_second = self.locks(writer, call).1 == Some(leaf);
        At::Parked(is_second && self.edits_each_alone(state, call))
    }

    /// Adds `cpu` to the waiters of the mark of `other` in `leaf`, if there is one.
    pub(super) fn register(state: &mut State, leaf: usize, other: usize, cpu: usize) {
        if let Some(mark) = &mut state.leaves[leaf].marks[other] {
            mark.waiters |= 1 << cpu;
        }
    }

    /// Marks the pages of `call` in `leaf` while the writer locks the next leaf.
    fn reserve(state: &mut State, writer: usize, call: Call, leaf: usize) {
        let (start, end) = part(call, leaf);
        if start < end && leaves_of(call).count() == 2 {
            let mark = &mut state.leaves[leaf].marks[writer];
            mark.get_or_insert(Mark { start, end, armed: false, waiters: 0 });
        }
    }

    /// The first part of the edit, with all leaves locked: marks, and odd counts and sequences.
    fn begin(&self, state: &mut State, writer: usize, call: Call) -> At {
        let changes = changes_entries(state, call);
        for leaf in leaves_of(call) {
            let (start, end) = part(call, leaf);
            let waiters = state.leaves[leaf].marks[writer].map_or(0, |mark| mark.waiters);
            state.leaves[leaf].sequence += 1;
            if changes {
                let mark = Mark { start, end, armed: true, waiters };
                state.leaves[leaf].marks[writer] = Some(mark);
            } else {
                state.leaves[leaf].marks[writer] = None;
                state.wake(waiters);
            }
        }
        let mut after = state.clone();
        after.edit_all(self, call, changes);
        state.make_odd(self, &after);
        if changes && call.replaces() {
            (call.1..call.2).for_each(|page| state.index[usize::from(page)] = None);
        }
        At::Edits(touches_bound(call).then(|| after.is_alike_at_bound()))
    }

    /// The second part of the edit: ranges, index, joined bit and even counts. `None`: the call
    /// returns.
    fn edit_all(
        &self,
        state: &mut State,
        writer: usize,
        call: Call,
        joined: Option<bool>,
    ) -> Option<At> {
        let marked = state.leaves[leaf_of(call.1)].marks[writer].is_some();
        state.edit_all(self, call, marked);
        for leaf in leaves_of(call) {
            state.reindex(leaf);
            state.set_counts(leaf);
            state.leaves[leaf].sequence += 1;
        }
        state.joined = joined.unwrap_or(state.joined);
        let keeps = self.lost(Rule::BusyWithoutLeaf) || self.lost(Rule::FlushWithoutLeaf);
        if !marked || !keeps {
            state.unlock(writer);
        }
        marked.then_some(At::Visits(call.1, false))
    }

    /// Returns whether `call` edits one leaf after the other, and marks none, because it lacks
    /// [`Rule::SpanMarksFirst`].
    fn edits_each_alone(&self, state: &State, call: Call) -> bool {
        self.lost(Rule::SpanMarksFirst)
            && leaves_of(call).count() == 2
            && !changes_entries(state, call)
    }

    /// The whole edit in one leaf.
    fn edit_alone(&self, state: &mut State, call: Call, leaf: usize) {
        let mut after = state.clone();
        after.edit(self, call, leaf, false);
        state.make_odd(self, &after);
        state.edit(self, call, leaf, false);
        state.reindex(leaf);
        state.set_counts(leaf);
    }

    /// Changes the entry of `page`. A move first empties the target.
    fn visit(
        &self,
        state: &mut State,
        writer: usize,
        call: Call,
        page: u8,
        mut changed: bool,
    ) -> Option<At> {
        if let Some((source, target)) = call.moves()
            && page + 1 == call.2
        {
            // The target is empty by now, but for the busy entry of a late fault.
            let [source, target] = [usize::from(source), usize::from(target)];
            if state.entries[source] == Slot::Busy || state.entries[target] == Slot::Busy {
                return None;
            }
            changed |= state.entries[source] != Slot::Empty;
            state.entries.swap(source, target);
            return Some(At::Posts(changed));
        }
        let at = call.moves().map_or(page, |(_, target)| target);
        let entry = &mut state.entries[usize::from(at)];
        match (*entry, call.0) {
            (Slot::Busy, _) => return None,
            (Slot::Page(frame, _), _) if call.replaces() => {
                *entry = Slot::Empty;
                let owner = &mut state.frames[usize::from(frame)];
                if let Owner::Page(object) = *owner {
                    *owner = Owner::Owed(writer as u8, object);
                }
                changed = true;
            }
            (Slot::Page(frame, true), Change::Revoke) => {
                *entry = Slot::Page(frame, false);
                changed = true;
            }
            (Slot::Out, _) if call.replaces() => *entry = Slot::Empty,
            (Slot::Empty | Slot::Out | Slot::Page(..), _) => {}
        }
        if page + 1 < call.2 {
            return Some(At::Visits(page + 1, changed));
        }
        Some(At::Posts(changed))
    }

    /// Posts the flush, if an entry was `changed`, or a flush is deferred.
    fn post(&self, state: &mut State, writer: usize, call: Call, changed: bool) -> At {
        if self.lost(Rule::BusyWithoutLeaf) {
            state.unlock(writer);
        }
        let flushes = changed || state.deferred && !self.lost(Rule::FlushCoversEvicted);
        if flushes {
            state.post(writer);
        }
        if flushes && !self.lost(Rule::MarkOutlastsFlush) {
            At::Awaits
        } else {
            // Without an entry to flush, the leaf is released by now in any case.
            state.unlock(writer);
            At::Locks(leaf_of(call.1) as u8)
        }
    }

    /// Removes the mark of `writer` in `leaf`, which is locked.
    fn finish(&self, state: &mut State, writer: usize, call: Call, leaf: usize) {
        let (start, end) = part(call, leaf);
        let mark = state.leaves[leaf].marks[writer].take();
        state.merge(leaf, start, end);
        state.reindex(leaf);
        state.set_counts(leaf);
        state.prune(self, start, end);
        state.wake(mark.map_or(0, |mark| mark.waiters));
    }
}

/// Returns whether the range of `call` has a page beside the bound.
fn touches_bound(Call(_, start, end): Call) -> bool {
    start <= BOUND && end >= BOUND
}

/// Returns whether `call` may change entries.
fn changes_entries(state: &State, call: Call) -> bool {
    let attributes = (call.1..call.2).map(|page| state.attributes_at(page));
    let mut mapped = attributes.flatten();
    match call.0 {
        Change::Unmap | Change::Map(_) => mapped.next().is_some(),
        Change::Revoke => mapped.any(|attributes| attributes.write),
        Change::Grant => false,
        Change::MoveUp | Change::MoveDown => {
            call.moves().is_some_and(|(source, _)| state.vma_at(source).is_some())
        }
    }
}
