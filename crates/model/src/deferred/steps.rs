//! The steps of CPUs, of the kernel and of settlements.

use super::*;

impl Deferral {
    pub(super) fn lost(&self, mutant: Mutant) -> bool {
        self.lost == Some(mutant)
    }

    /// The next step of CPU `cpu`, but for stores.
    pub(super) fn cpu(&self, state: &mut State, cpu: usize) -> Option<()> {
        state.cpus[cpu] = match state.cpus[cpu] {
            At::Away => {
                state.in_set[cpu] = true;
                At::Program
            }
            At::Program => match (state.tlb[cpu], state.entry) {
                (Some((frame, _)), _) => {
                    state.load(frame);
                    At::Program
                }
                (None, Slot::Leaf(frame, stores)) => {
                    state.accessed = self.ages != 0;
                    At::Walked(frame, stores)
                }
                (None, Slot::Busy) => return None,
                (None, Slot::Out) => {
                    let frame = state.free()?;
                    state.frames[frame as usize] = Owner::Page;
                    state.bytes[frame as usize] = state.stored;
                    state.entry = Slot::Leaf(frame, false);
                    state.accessed = self.ages != 0;
                    At::Program
                }
            },
            At::Walked(frame, stores) => {
                state.tlb[cpu] = Some((frame, stores));
                state.load(frame);
                At::Program
            }
            At::Fault(_) if state.is_pending() && !self.lost(Mutant::WriteFlushesPending) => {
                return None;
            }
            At::Fault(frame) if state.entry == Slot::Leaf(frame, false) => {
                state.entry = Slot::Busy;
                At::Held(frame)
            }
            At::Fault(_) => At::Program,
            At::Held(frame) => {
                state.entry = Slot::Leaf(frame, true);
                state.accessed = self.ages != 0;
                state.tlb[cpu] = None;
                At::Program
            }
            At::Serving(before) => {
                state.note_flush(cpu, before);
                state.posted[cpu] = false;
                At::Program
            }
            At::Flushing(before) => {
                state.note_flush(cpu, before);
                At::Program
            }
            At::Leaving => {
                state.note_flush(cpu, state.clock);
                state.posted[cpu] = false;
                At::Away
            }
        };
        Some(())
    }

    /// CPU `cpu` stores, or takes the next step of a fault for the store.
    pub(super) fn store(&self, state: &mut State, cpu: usize) -> Option<()> {
        if state.cpus[cpu] != At::Program || state.stores == 0 {
            return None;
        }
        match (state.tlb[cpu], state.entry) {
            (Some((frame, true)), _) => {
                state.stores -= 1;
                state.shows += 1;
                state.stale |= !state.is_pages(frame);
                state.bytes[frame as usize] = state.shows;
            }
            (_, Slot::Leaf(frame, false)) => state.cpus[cpu] = At::Fault(frame),
            _ => return None,
        }
        Some(())
    }

    /// CPU `cpu` is interrupted, or serves a request during a wait.
    pub(super) fn serve(state: &mut State, cpu: usize) -> Option<()> {
        if !state.posted[cpu] || !matches!(state.cpus[cpu], At::Program | At::Fault(_)) {
            return None;
        }
        state.tlb[cpu] = None;
        // A waiting fault restarts.
        state.cpus[cpu] = At::Serving(state.clock);
        Some(())
    }

    /// CPU `cpu` drops all translations. It may hold translations for a waiting frame, or of an
    /// aged page.
    pub(super) fn flush(state: &mut State, cpu: usize) -> Option<()> {
        let owes = state.flushed[cpu] < state.owes[cpu] && state.owes();
        let is_aged = state.aged.is_some_and(|stamp| state.flushed[cpu] < stamp);
        if state.cpus[cpu] != At::Program || !(owes || is_aged) {
            return None;
        }
        // Without an aged page the number is not read, and would only multiply the states.
        if state.aged.is_some() {
            state.clock = state.clock.checked_add(1)?;
        }
        (state.tlb[cpu], state.cpus[cpu]) = (None, At::Flushing(state.clock));
        Some(())
    }

    pub(super) fn leave(state: &mut State, cpu: usize) -> Option<()> {
        if state.cpus[cpu] != At::Program {
            return None;
        }
        (state.tlb[cpu], state.in_set[cpu], state.cpus[cpu]) = (None, false, At::Leaving);
        Some(())
    }

    pub(super) fn age(state: &mut State) -> Option<()> {
        let (Kernel::Idle, Slot::Leaf(..), true) = (state.kernel, state.entry, state.accessed)
        else {
            return None;
        };
        state.ages = state.ages.checked_sub(1)?;
        (state.accessed, state.kernel) = (false, Kernel::Ages);
        Some(())
    }

    /// Returns whether no CPU can have a translation of the page, whose entry is busy.
    pub(super) fn is_flush_free(&self, state: &State) -> bool {
        let since = |stamp| {
            let has_flushed = |cpu: usize| state.flushed[cpu] >= stamp || !state.in_set[cpu];
            (0..RUNNING).all(has_flushed) || self.lost(Mutant::FlushFreeChecksStamps)
        };
        !state.accessed && state.aged.is_some_and(since)
    }

    /// The kernel begins an operation.
    pub(super) fn begin(
        state: &mut State,
        then: impl FnOnce(&mut State) -> Option<Then>,
    ) -> Option<()> {
        let (Kernel::Idle, Slot::Leaf(frame, stores)) = (state.kernel, state.entry) else {
            return None;
        };
        state.rounds = state.rounds.checked_sub(1)?;
        let then = then(state)?;
        state.entry = Slot::Busy;
        state.kernel = Kernel::Has(then, frame, stores);
        Some(())
    }

    /// The kernel writes to the page, as `write` to a file does.
    pub(super) fn write(&self, state: &mut State) -> Option<()> {
        let there = match (state.kernel, state.entry) {
            (Kernel::Idle, Slot::Leaf(frame, _)) => Some(frame),
            (Kernel::Idle, Slot::Out) => None,
            _ => return None,
        };
        let line =
            if there.is_some() { Mutant::WriteFlushesPending } else { Mutant::OverwriteSettles };
        if state.is_pending() && !self.lost(line) {
            return None;
        }
        state.rounds = state.rounds.checked_sub(1)?;
        state.shows += 1;
        match there {
            Some(frame) => state.bytes[frame as usize] = state.shows,
            None => state.stored = state.shows,
        }
        Some(())
    }

    /// The kernel's next step.
    pub(super) fn kernel(&self, state: &mut State) -> Option<()> {
        state.kernel = match state.kernel {
            Kernel::Idle => return None,
            Kernel::Ages => {
                state.aged = state.aged.max(Some(state.clock.checked_add(1)?));
                Kernel::Idle
            }
            Kernel::Has(then, frame, stores)
                if then != Then::Protect && self.is_flush_free(state) =>
            {
                Kernel::Flushed(then, frame, stores, None)
            }
            Kernel::Has(then, frame, stores) => {
                let flushes = match then {
                    Then::Move(_) => !self.lost(Mutant::MigrateFlush),
                    Then::Evict => !self.lost(Mutant::EvictFlush),
                    Then::Protect => true,
                };
                let defers =
                    (!stores || self.lost(Mutant::DeferLooksAtStores)) && then != Then::Protect;
                if !flushes {
                    Kernel::Flushed(then, frame, stores, None)
                } else if !defers {
                    for cpu in 0..RUNNING {
                        state.posted[cpu] |= state.in_set[cpu];
                    }
                    Kernel::Awaits(then, frame, stores)
                } else if matches!(
                    state.settlement,
                    Settlement::Looks(..) | Settlement::Collects(..)
                ) {
                    // The lock of the stamps.
                    return None;
                } else {
                    state.clock = state.clock.checked_add(1)?;
                    Kernel::Defers(then, frame, state.clock, 0)
                }
            }
            Kernel::Awaits(then, frame, stores) => {
                let awaited = |cpu| state.posted[cpu] && state.in_set[cpu];
                if (0..RUNNING).any(awaited) {
                    return None;
                }
                Kernel::Flushed(then, frame, stores, None)
            }
            Kernel::Defers(then, frame, stamp, looked) if usize::from(looked) < RUNNING => {
                let cpu = usize::from(looked);
                if state.in_set[cpu] {
                    state.owes[cpu] = stamp;
                }
                Kernel::Defers(then, frame, stamp, looked + 1)
            }
            Kernel::Defers(then, frame, stamp, _) => {
                state.pending = stamp;
                Kernel::Flushed(then, frame, false, Some(stamp))
            }
            Kernel::Flushed(then, frame, stores, stamp) => {
                let left = stamp.map_or(Owner::Free, Owner::Owed);
                match then {
                    Then::Move(to) => {
                        state.bytes[to as usize] = state.bytes[frame as usize];
                        state.frames[to as usize] = Owner::Page;
                        state.frames[frame as usize] = left;
                        state.entry = Slot::Leaf(to, stores);
                        // The new frame has any stamp.
                        state.aged = state.aged.map(|_| 0);
                    }
                    Then::Evict => {
                        state.stored = state.bytes[frame as usize];
                        state.frames[frame as usize] = left;
                        state.entry = Slot::Out;
                        state.aged = None;
                    }
                    Then::Protect => state.entry = Slot::Leaf(frame, false),
                }
                Kernel::Idle
            }
        };
        Some(())
    }

    /// The next step of a settlement.
    pub(super) fn settle(&self, state: &mut State) -> Option<()> {
        state.settlement = match state.settlement {
            // The lock of the stamps.
            _ if matches!(state.kernel, Kernel::Defers(..))
                && !matches!(state.settlement, Settlement::Awaits(..)) =>
            {
                return None;
            }
            Settlement::None if state.paid == state.clock => return None,
            Settlement::None => Settlement::Looks(0, [false; RUNNING]),
            Settlement::Looks(looked, mut owing) if usize::from(looked) < RUNNING => {
                let cpu = usize::from(looked);
                owing[cpu] = state.flushed[cpu] < state.owes[cpu] && state.in_set[cpu];
                state.posted[cpu] |= owing[cpu];
                Settlement::Looks(looked + 1, owing)
            }
            Settlement::Looks(_, owing) => Settlement::Awaits(owing, state.clock),
            Settlement::Awaits(owing, stamp) => {
                let awaited = |cpu: usize| {
                    let due = state.owes[cpu].min(stamp);
                    owing[cpu] && state.flushed[cpu] < due && state.in_set[cpu]
                };
                if (0..RUNNING).any(awaited) && !self.lost(Mutant::FlushAwaitsCpus) {
                    return None;
                }
                self.pay(state, stamp);
                Settlement::None
            }
            Settlement::Collects(looked, floor) if usize::from(looked) < RUNNING => {
                let cpu = usize::from(looked);
                let may_hold = state.flushed[cpu] < state.owes[cpu] && state.in_set[cpu];
                let counts = may_hold && !self.lost(Mutant::CollectLooks);
                let floor = if counts { floor.min(state.flushed[cpu]) } else { floor };
                Settlement::Collects(looked + 1, floor)
            }
            Settlement::Collects(_, floor) => {
                self.pay(state, floor);
                Settlement::None
            }
        };
        Some(())
    }

    /// A collection begins.
    pub(super) fn collect(state: &mut State) -> Option<()> {
        let may = state.settlement == Settlement::None
            && state.owes()
            && !matches!(state.kernel, Kernel::Defers(..));
        state.settlement = may.then_some(Settlement::Collects(0, state.clock))?;
        Some(())
    }

    /// Marks stamps up to `stamp` as paid, and frees the frames that wait for them.
    pub(super) fn pay(&self, state: &mut State, stamp: Stamp) {
        state.paid = state.paid.max(stamp);
        for owner in &mut state.frames {
            if let Owner::Owed(stamp) = *owner
                && (stamp <= state.paid || self.lost(Mutant::ReleaseLooksAtStamps))
            {
                *owner = Owner::Free;
            }
        }
    }
}
