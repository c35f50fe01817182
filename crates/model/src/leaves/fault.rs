//! The steps of the fault.

use super::state::leaf_of;
use super::*;

impl Fault {
    /// No fault.
    pub(super) const NONE: Self = Self {
        stage: Stage::Program,
        page: 0,
        sequence: 0,
        vma: 0,
        count: 0,
        hinted: false,
        attributes: Attributes { object: 0, write: false },
        table: 0,
    };

    /// This fault in another stage, without the fields of the search.
    const fn at(self, stage: Stage) -> Self {
        Self { stage, page: self.page, ..Self::NONE }
    }
}

impl Leaves {
    /// The program of the faulting CPU accesses `page`, which has no entry.
    pub(super) fn touch(&self, state: &mut State, page: u8) -> Option<()> {
        let is_empty = state.entries[usize::from(page)] == Slot::Empty;
        if state.fault.stage != Stage::Program || !is_empty {
            return None;
        }
        let fault = Fault { page, ..Fault::NONE };
        let holds = |hint: &(u8, u8)| state.vmas[usize::from(hint.0)].count == hint.1;
        state.fault = if let Some((vma, count)) = state.hint.filter(holds) {
            Fault { stage: Stage::Counted, vma, count, hinted: true, ..fault }
        } else {
            let sequence = state.leaves[leaf_of(page)].sequence;
            if sequence & 1 == 1 && !self.lost(Rule::MissingChecksSequence) {
                // The fault reads again.
                return None;
            }
            Fault { stage: Stage::Search, sequence, ..fault }
        };
        Some(())
    }

    /// The next step of the fault.
    pub(super) fn fault(&self, state: &mut State) -> Option<()> {
        let fault = state.fault;
        let page = usize::from(fault.page);
        let leaf = leaf_of(fault.page);
        let vma = state.vmas[usize::from(fault.vma)];
        let to = |stage| Fault { stage, ..fault };
        let stands = vma.count == fault.count;
        let table = state.tables[usize::from(self.tables[page])];
        state.fault = match fault.stage {
            Stage::Program | Stage::Parked => return None,
            Stage::Search => match state.index[page] {
                Some(vma) => Fault { vma, ..fault.at(Stage::Found) },
                None => to(Stage::Missing),
            },
            Stage::Found if vma.count & 1 == 0 => Fault { count: vma.count, ..to(Stage::Counted) },
            Stage::Found if self.lost(Rule::WaitsForChange) => to(Stage::AwaitsEven),
            Stage::Found if self.lost(Rule::WaitsAtMark) => {
                Fault { count: vma.count, ..to(Stage::AwaitsChange) }
            }
            Stage::Found => fault.at(Stage::Spins),
            Stage::Counted if self.lost(Rule::BoundsPrecedeWalk) => {
                Fault { table, ..to(Stage::WalkedEarly) }
            }
            Stage::Counted | Stage::WalkedEarly => {
                let is_ours = vma.space == 0 || self.lost(Rule::SpaceIsChecked);
                let walked = fault.stage == Stage::WalkedEarly;
                let stage = if walked { Stage::Walked } else { Stage::Proved };
                if is_ours && (vma.start..vma.end).contains(&fault.page) {
                    state.hint = Some((fault.vma, fault.count));
                    Fault { attributes: vma.attributes, hinted: false, ..to(stage) }
                } else {
                    if fault.hinted {
                        state.hint = None;
                    }
                    Fault::NONE
                }
            }
            Stage::Proved => Fault { table, ..to(Stage::Walked) },
            Stage::Walked if self.lost(Rule::CheckFollowsBusy) && stands => to(Stage::CheckedEarly),
            Stage::Walked | Stage::CheckedEarly => {
                if table == fault.table {
                    match state.entries[page] {
                        Slot::Busy => return None,
                        Slot::Empty => state.entries[page] = Slot::Busy,
                        Slot::Page(..) | Slot::Out => {
                            state.fault = Fault::NONE;
                            return Some(());
                        }
                    }
                }
                let was_checked = fault.stage == Stage::CheckedEarly;
                to(if was_checked { Stage::Checked(true) } else { Stage::Held })
            }
            Stage::Held => {
                let is_ours = state.vma_at(fault.page) == Some(fault.vma);
                state.strange |= stands && !is_ours;
                to(Stage::Checked(stands))
            }
            Stage::Checked(stands) => {
                self.release(state, fault, stands)?;
                Fault::NONE
            }
            Stage::Missing => {
                let same = state.leaves[leaf].sequence == fault.sequence
                    || self.lost(Rule::MissingChecksSequence);
                let marked =
                    state.changer(fault.page).is_some() && !self.lost(Rule::MissingSeesMarks);
                match (same, marked) {
                    (true, true) => fault.at(Stage::Spins),
                    (true, false) => {
                        state.denied |= self.is_always_mapped(state, fault.page);
                        state.shown |= state.tlbs.iter().any(|tlb| tlb[page].is_some());
                        Fault::NONE
                    }
                    (false, _) => Fault::NONE,
                }
            }
            // The lock, the search, and the registration, which no CPU reads without the lock.
            Stage::Spins if state.leaves[leaf].lock.is_some() => return None,
            Stage::Spins => match state.changer(fault.page) {
                None => Fault::NONE,
                Some(writer) if self.lost(Rule::WaiterHoldsLock) => {
                    to(Stage::Registers(writer as u8))
                }
                Some(writer) => {
                    Self::register(state, leaf, writer, FAULTING);
                    to(Stage::Parked)
                }
            },
            Stage::Registers(writer) => {
                Self::register(state, leaf, usize::from(writer), FAULTING);
                to(Stage::Parked)
            }
            Stage::AwaitsEven if vma.count & 1 == 1 => return None,
            Stage::AwaitsChange if stands => return None,
            Stage::AwaitsEven | Stage::AwaitsChange => Fault::NONE,
        };
        Some(())
    }

    /// Installs a page in the busy entry, or restores the empty entry.
    fn release(&self, state: &mut State, fault: Fault, installs: bool) -> Option<()> {
        let page = usize::from(fault.page);
        let is_linked = state.tables[usize::from(self.tables[page])] == fault.table;
        if installs && !is_linked {
            state.lost = true;
        } else if installs {
            let frame = state.free_frame()?;
            let Attributes { object, write } = fault.attributes;
            state.frames[usize::from(frame)] = Owner::Page(object);
            state.entries[page] = Slot::Page(frame, write);
        } else if is_linked {
            state.entries[page] = Slot::Empty;
        }
        Some(())
    }

    /// Returns whether no call of the scenario unmaps `page`.
    fn is_always_mapped(&self, state: &State, page: u8) -> bool {
        let unmaps = |call: &Call| {
            let unmaps = call.0 == Change::Unmap || call.moves().is_some();
            unmaps && (call.1..call.2).contains(&page)
        };
        !(0..WRITERS).any(|writer| self.calls(state, writer).iter().any(unmaps))
    }
}
