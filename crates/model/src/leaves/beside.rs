//! The steps beside writers and the fault: of TLBs, of the migration, and of the other space.

use super::*;

impl Leaves {
    /// The CPU of a TLB serves all requests.
    pub(super) fn serve(&self, state: &mut State, tlb: usize) -> Option<()> {
        let cpu = FAULTING + tlb;
        if state.posted[cpu] == 0 || cpu == FAULTING && state.fault.stage == Stage::Spins {
            return None;
        }
        for writer in (0..WRITERS).filter(|writer| state.posted[cpu] >> writer & 1 == 1) {
            let done = usize::from(state.writers[writer].done);
            let Call(_, start, end) = self.calls(state, writer)[done];
            (start..end).for_each(|page| state.tlbs[tlb][usize::from(page)] = None);
        }
        if state.posted[cpu] >> MIGRATING & 1 == 1 {
            match state.migration {
                Migration::Awaits(_, _, true) if !self.lost(Rule::MigrationFlushesSpace) => {
                    state.tlbs[tlb] = [None; PAGES];
                }
                _ => state.tlbs[tlb][self.moved.map_or(0, usize::from)] = None,
            }
        }
        state.posted[cpu] = 0;
        Some(())
    }

    /// CPUs without a TLB acknowledge flushes as soon as they serve requests: an acknowledgement
    /// changes no other location, so the earliest moment allows all orders.
    pub(super) fn acknowledge(&self, state: &mut State) {
        for writer in 0..WRITERS {
            let at = state.writers[writer].at;
            match at {
                At::Between | At::Parked(_) | At::Visits(..) | At::Posts(_) | At::Awaits => {
                    state.posted[writer] = 0;
                }
                _ => {}
            }
        }
        if !self.both_tlbs && state.fault.stage != Stage::Spins {
            state.posted[FAULTING] = 0;
        }
    }

    /// Another space takes the free VMA with number `vma`, and uses it for the same pages.
    pub(super) fn give_away(&self, state: &mut State, vma: u8) -> Option<()> {
        let vma = &mut state.vmas[usize::from(vma)];
        if vma.used || vma.start == vma.end {
            return None;
        }
        let base = if self.lost(Rule::CountNeverRepeats) { 1 } else { vma.count };
        let attributes = Attributes { object: STRANGE, write: true };
        // An even count of a free VMA has not moved, which only a removed rule allows.
        *vma = Vma { used: true, space: 1, attributes, count: base + (base & 1), ..*vma };
        state.strangers = state.strangers.checked_sub(1)?;
        Some(())
    }

    /// The next step of the migration.
    pub(super) fn migrate(&self, state: &mut State) -> Option<()> {
        let page = self.moved?;
        state.migration = match state.migration {
            Migration::Idle => {
                let entry = &mut state.entries[usize::from(page)];
                let Slot::Page(frame, write) = *entry else { return None };
                *entry = Slot::Busy;
                Migration::Took(frame, write)
            }
            Migration::Took(frame, write) => {
                let marked = state.changer(page).is_some() && !self.lost(Rule::MigrationSeesMarks);
                if marked || write {
                    state.post(MIGRATING);
                    Migration::Awaits(frame, write, marked)
                } else {
                    state.deferred = self.evicts;
                    Migration::Defers(frame)
                }
            }
            Migration::Awaits(..) if state.is_posted(MIGRATING) => return None,
            Migration::Awaits(frame, write, _) => {
                self.move_page(state, page, frame, write, None)?;
                Migration::Done
            }
            Migration::Defers(frame) => {
                let kept = object_of(state.frames[usize::from(frame)]).map(Owner::Kept);
                self.move_page(state, page, frame, false, kept)?;
                Migration::Done
            }
            Migration::Done => return None,
        };
        Some(())
    }

    /// Copies the page to another frame, or to a store, and releases the entry. The old frame is
    /// free, or `kept`.
    fn move_page(
        &self,
        state: &mut State,
        page: u8,
        from: Frame,
        write: bool,
        kept: Option<Owner>,
    ) -> Option<()> {
        let owner = state.frames[usize::from(from)];
        state.entries[usize::from(page)] = if self.evicts {
            Slot::Out
        } else {
            let to = state.free_frame()?;
            state.frames[usize::from(to)] = owner;
            Slot::Page(to, write)
        };
        state.frames[usize::from(from)] = kept.unwrap_or(Owner::Free);
        Some(())
    }
}

impl State {
    /// The MMU of a CPU walks to `page`, and fills the TLB. No flush is served between the walk and
    /// the fill, so the two are one step.
    pub(super) fn fill(&mut self, tlb: usize, page: u8) -> Option<()> {
        let page = usize::from(page);
        if tlb == 0 && self.fault.stage != Stage::Program || self.tlbs[tlb][page].is_some() {
            return None;
        }
        let Slot::Page(frame, write) = self.entries[page] else { return None };
        self.tlbs[tlb][page] = Some((frame, write));
        Some(())
    }
}

/// Returns the object of a frame's page.
pub(super) fn object_of(owner: Owner) -> Option<u8> {
    match owner {
        Owner::Free => None,
        Owner::Page(object) | Owner::Owed(_, object) | Owner::Kept(object) => Some(object),
    }
}
