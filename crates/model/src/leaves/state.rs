//! Queries of a state, and the changes that a writer makes under the locks of leaves.

use super::*;

/// Returns the number of the leaf that has `page`.
pub(super) fn leaf_of(page: u8) -> usize {
    usize::from(page >= BOUND)
}

/// Returns the first page and the end of the part of `call`'s range in `leaf`.
pub(super) fn part(Call(_, start, end): Call, leaf: usize) -> (u8, u8) {
    let (low, high) = if leaf == 0 { (0, BOUND) } else { (BOUND, PAGES as u8) };
    (start.max(low), end.min(high))
}

/// Returns the leaves in which `call` has pages, in ascending order.
pub(super) fn leaves_of(call: Call) -> impl DoubleEndedIterator<Item = usize> {
    (0..2).filter(move |leaf| {
        let (start, end) = part(call, *leaf);
        start < end
    })
}

impl Call {
    /// Returns the source and the target of a move.
    pub(super) fn moves(self) -> Option<(u8, u8)> {
        match self.0 {
            Change::MoveUp => Some((self.1, self.1 + 1)),
            Change::MoveDown => Some((self.1 + 1, self.1)),
            Change::Unmap | Change::Map(_) | Change::Revoke | Change::Grant => None,
        }
    }

    /// Returns whether the call removes or replaces mappings.
    pub(super) fn replaces(self) -> bool {
        self.moves().is_some() || matches!(self.0, Change::Unmap | Change::Map(_))
    }
}

impl State {
    /// The first state of the pair of calls with number `pair`.
    pub(super) fn new(model: &Leaves, pair: u8) -> Self {
        let attributes = Attributes { object: 0, write: true };
        let piece = |start, end| Vma { used: true, space: 0, start, end, attributes, count: 2 };
        let free = Vma { used: false, count: 1, ..piece(0, 0) };
        let mut vmas = [free; VMAS];
        (vmas[0], vmas[1]) = (piece(0, BOUND), piece(BOUND, PAGES as u8));
        let mut entries = [Slot::Empty; PAGES];
        let mut frames = [Owner::Free; FRAMES];
        for page in &model.present {
            entries[usize::from(*page)] = Slot::Page(*page, true);
            frames[usize::from(*page)] = Owner::Page(0);
        }
        let mut state = Self {
            pair,
            leaves: [Leaf { lock: None, sequence: 0, marks: [None; WRITERS] }; 2],
            index: [None; PAGES],
            joined: true,
            vmas,
            entries,
            tables: [0; PAGES],
            frames,
            tlbs: [[None; PAGES]; 2],
            posted: [0; CPUS],
            writers: [Writer { done: 0, at: At::Between }; WRITERS],
            fault: Fault::NONE,
            hint: None,
            migration: Migration::Idle,
            deferred: false,
            strangers: model.strangers,
            lost: false,
            strange: false,
            denied: false,
            shown: false,
            hasty: false,
        };
        (0..2).for_each(|leaf| state.reindex(leaf));
        state
    }

    /// Returns a free frame.
    pub(super) fn free_frame(&self) -> Option<Frame> {
        self.frames.iter().position(|owner| *owner == Owner::Free).map(|at| at as Frame)
    }

    /// Returns the writer whose armed mark covers `page`.
    pub(super) fn changer(&self, page: u8) -> Option<usize> {
        self.leaves[leaf_of(page)].marks.iter().position(|mark| {
            mark.is_some_and(|mark| mark.armed && (mark.start..mark.end).contains(&page))
        })
    }

    /// Returns the VMA that has `page` in the space of the writers.
    pub(super) fn vma_at(&self, page: u8) -> Option<u8> {
        let has = |vma: &Vma| vma.used && vma.space == 0 && (vma.start..vma.end).contains(&page);
        self.vmas.iter().position(has).map(|at| at as u8)
    }

    pub(super) fn attributes_at(&self, page: u8) -> Option<Attributes> {
        self.vma_at(page).map(|vma| self.vmas[usize::from(vma)].attributes)
    }

    /// Returns whether the VMAs on both sides of the bound are one VMA.
    pub(super) fn is_alike_at_bound(&self) -> bool {
        self.attributes_at(BOUND - 1).is_some_and(|below| Some(below) == self.attributes_at(BOUND))
    }

    /// Returns the VMAs in use that have pages between `start` and `end`.
    fn overlapping(&self, start: u8, end: u8) -> Vec<usize> {
        let overlaps = |vma: &Vma| vma.used && vma.space == 0 && vma.start < end && start < vma.end;
        (0..VMAS).filter(|at| overlaps(&self.vmas[*at])).collect()
    }

    /// Takes a VMA from the pool. Its count stays odd.
    fn allocate(&mut self, repeats: bool, start: u8, end: u8, attributes: Attributes) {
        let free = self.vmas.iter_mut().find(|vma| !vma.used).expect("a free VMA");
        let count = if repeats { 1 } else { free.count };
        *free = Vma { used: true, space: 0, start, end, attributes, count };
    }

    /// Makes the edit of `call` in its leaves.
    pub(super) fn edit_all(&mut self, model: &Leaves, call: Call, marked: bool) {
        let source = call.moves().and_then(|(source, _)| self.attributes_at(source));
        if call.moves().is_some() && source.is_none() {
            // The call fails.
            return;
        }
        for leaf in leaves_of(call) {
            self.edit(model, call, leaf, marked);
            if let Some((_, target)) = call.moves()
                && let Some(attributes) = source
                && leaf_of(target) == leaf
            {
                let repeats = model.lost(Rule::CountNeverRepeats);
                self.allocate(repeats, target, target + 1, attributes);
            }
        }
    }

    /// Replaces the VMAs in the part of `call`'s range in `leaf`, and splits off head and tail. If
    /// the range is not `marked`, equal neighbours merge.
    pub(super) fn edit(&mut self, model: &Leaves, call: Call, leaf: usize, marked: bool) {
        let repeats = model.lost(Rule::CountNeverRepeats);
        let (start, end) = part(call, leaf);
        for at in self.overlapping(start, end) {
            let old = self.vmas[at];
            let (head, tail) = (old.start < start, old.end > end);
            if head && tail {
                self.allocate(repeats, end, old.end, old.attributes);
            }
            if head {
                self.vmas[at].end = start;
            } else if tail {
                self.vmas[at].start = end;
            }
            match call.0 {
                _ if call.replaces() => self.vmas[at].used = head || tail,
                Change::Unmap | Change::Map(_) | Change::MoveUp | Change::MoveDown => {}
                Change::Revoke | Change::Grant => {
                    let attributes =
                        Attributes { write: call.0 == Change::Grant, ..old.attributes };
                    if head || tail {
                        let (start, end) = (old.start.max(start), old.end.min(end));
                        self.allocate(repeats, start, end, attributes);
                    } else {
                        self.vmas[at].attributes = attributes;
                    }
                }
            }
        }
        if let Change::Map(object) = call.0 {
            self.allocate(repeats, start, end, Attributes { object, write: true });
        }
        if !marked {
            self.merge(leaf, start, end);
        }
    }

    /// Merges equal neighbours in `leaf` below no armed mark. A VMA outside the range from `start`
    /// to `end` absorbs its neighbour: it grows, and keeps its count.
    pub(super) fn merge(&mut self, leaf: usize, start: u8, end: u8) {
        let merges = |state: &Self, lower: usize, upper: usize| {
            let (low, high) = (state.vmas[lower], state.vmas[upper]);
            let is_here = |vma: &Vma| vma.used && vma.space == 0 && leaf_of(vma.start) == leaf;
            is_here(&low)
                && is_here(&high)
                && low.end == high.start
                && low.attributes == high.attributes
                && state.changer(low.start).is_none()
                && state.changer(high.start).is_none()
        };
        let pairs = || (0..VMAS).flat_map(|lower| (0..VMAS).map(move |upper| (lower, upper)));
        while let Some((lower, upper)) = pairs().find(|pair| merges(self, pair.0, pair.1)) {
            let (low, high) = (self.vmas[lower], self.vmas[upper]);
            let is_inside = |vma: Vma| start <= vma.start && vma.end <= end;
            if is_inside(low) && !is_inside(high) {
                self.vmas[upper].start = low.start;
                self.vmas[lower].used = false;
            } else {
                self.vmas[lower].end = high.end;
                self.vmas[upper].used = false;
            }
        }
    }

    /// Makes the counts odd of VMAs that are removed, cut or changed by the edit that leads to
    /// `after`, and of VMAs below armed marks.
    pub(super) fn make_odd(&mut self, model: &Leaves, after: &Self) {
        for at in 0..VMAS {
            let (old, new) = (self.vmas[at], after.vmas[at]);
            if !old.used || old.space != 0 {
                continue;
            }
            let moves = if new.used {
                old.start < new.start
                    || new.end < old.end
                    || old.attributes != new.attributes
                    || self.changer(new.start).is_some()
            } else {
                !model.lost(Rule::RemovalMovesCount)
            };
            if moves {
                self.vmas[at].count |= 1;
            }
        }
    }

    /// Makes the counts in `leaf` even, or odd below armed marks.
    pub(super) fn set_counts(&mut self, leaf: usize) {
        for at in 0..VMAS {
            let vma = self.vmas[at];
            if vma.used && vma.space == 0 && leaf_of(vma.start) == leaf {
                let changes = self.changer(vma.start).is_some();
                self.vmas[at].count += u8::from((vma.count & 1 == 1) != changes);
            }
        }
    }

    /// Stores the VMAs of `leaf` in the index.
    pub(super) fn reindex(&mut self, leaf: usize) {
        for page in (0..PAGES as u8).filter(|page| leaf_of(*page) == leaf) {
            self.index[usize::from(page)] = self.vma_at(page);
        }
    }

    /// Unlinks the page tables of the pages from `start` to `end` whose span has neither a VMA nor
    /// a mark.
    pub(super) fn prune(&mut self, model: &Leaves, start: u8, end: u8) {
        for table in 0..PAGES as u8 {
            let span = || (0..PAGES as u8).filter(|page| model.tables[usize::from(*page)] == table);
            let is_used = |page| {
                self.vma_at(page).is_some()
                    || self.is_marked(page) && !model.lost(Rule::PruneSeesMarks)
            };
            if !span().any(|page| (start..end).contains(&page)) || span().any(is_used) {
                continue;
            }
            for page in span() {
                // The holder of a busy entry restores the entry in the unlinked table.
                self.lost |= matches!(self.entries[usize::from(page)], Slot::Page(..) | Slot::Out);
                self.entries[usize::from(page)] = Slot::Empty;
            }
            self.tables[usize::from(table)] += 1;
        }
    }

    /// Returns whether a mark covers `page`, armed or not.
    fn is_marked(&self, page: u8) -> bool {
        let covers = |mark: &Mark| (mark.start..mark.end).contains(&page);
        self.leaves[leaf_of(page)].marks.iter().flatten().any(covers)
    }

    /// Locks `leaf` for CPU `cpu`, if the lock is free.
    pub(super) fn lock(&mut self, leaf: usize, cpu: usize) -> Option<()> {
        let lock = &mut self.leaves[leaf].lock;
        lock.is_none().then(|| *lock = Some(cpu as u8))
    }

    /// Releases all leaves that CPU `cpu` holds.
    pub(super) fn unlock(&mut self, cpu: usize) {
        for leaf in &mut self.leaves {
            leaf.lock = leaf.lock.filter(|holder| usize::from(*holder) != cpu);
        }
    }

    /// Wakes the CPUs of `waiters` that wait.
    pub(super) fn wake(&mut self, waiters: u8) {
        for cpu in (0..CPUS).filter(|cpu| waiters >> cpu & 1 == 1) {
            if cpu == FAULTING {
                if self.fault.stage == Stage::Parked {
                    self.fault = Fault::NONE;
                }
            } else if let At::Parked(only_second) = self.writers[cpu].at {
                self.writers[cpu].at = if only_second { At::Second(false) } else { At::First };
            }
        }
    }

    /// Requests a flush by all CPUs but `initiator`, a writer or [`MIGRATING`].
    pub(super) fn post(&mut self, initiator: usize) {
        for cpu in (0..CPUS).filter(|cpu| *cpu != initiator || initiator == MIGRATING) {
            self.posted[cpu] |= 1 << initiator;
        }
    }

    /// Returns whether a CPU has yet to serve the request of `initiator`.
    pub(super) fn is_posted(&self, initiator: usize) -> bool {
        self.posted.iter().any(|posted| posted >> initiator & 1 == 1)
    }
}
