//! The assignment of process-context identifiers (PCIDs) of a CPU to spaces.
//!
//! With PCIDs a CPU separates the translations of several spaces. Each CPU has a few *slots*: slot
//! *n* is identifier *n* + 1. Identifier 0 is for the kernel's own tables. A slot stores the space
//! that used it last.
//!
//! *Stale marks.* A CPU that leaves a space does not flush the space, and receives no further flush
//! requests for it. So leaving marks the slot stale, as does every request to drop translations of
//! a space that has a slot but does not run. A stale slot is flushed when it is loaded next. Only a
//! slot that is not stale is loaded without a flush.

/// The slots of a CPU.
pub const SLOTS: usize = 6;

#[derive(Clone, Copy, Debug)]
struct Slot {
    /// The number of the slot's space; 0 for an unused slot.
    space: u64,
    stale: bool,
    /// The time of the last load.
    used: u64,
}

/// The instructions for loading a space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// The identifier, never 0.
    pub pcid: u16,
    /// Set if the translations of the identifier must be flushed.
    pub flush: bool,
}

/// One CPU's slots.
#[derive(Clone, Debug)]
pub struct Slots {
    slots: [Slot; SLOTS],
    loads: u64,
}

impl Default for Slots {
    fn default() -> Self {
        Self::new()
    }
}

impl Slots {
    /// Unused slots.
    pub const fn new() -> Self {
        Self { slots: [Slot { space: 0, stale: true, used: 0 }; SLOTS], loads: 0 }
    }

    /// Assigns a slot to `space`, which is not 0: the space's own slot, or else the least recently
    /// loaded one. The caller loads the space as described by the result.
    pub fn load(&mut self, space: u64) -> Load {
        self.loads += 1;
        let own = self.slots.iter().position(|slot| slot.space == space);
        let oldest = || (0..SLOTS).min_by_key(|&at| self.slots[at].used);
        let at = own.or_else(oldest).unwrap_or(0);
        let flush = own.is_none() || self.slots[at].stale;
        self.slots[at] = Slot { space, stale: false, used: self.loads };
        Load { pcid: at as u16 + 1, flush }
    }

    /// Marks the translations of `space`, which does not run, as stale.
    pub fn mark_stale(&mut self, space: u64) {
        if let Some(slot) = self.slots.iter_mut().find(|slot| slot.space == space) {
            slot.stale = true;
        }
    }

    /// Marks the translations of every space except `running` as stale (0: no space runs).
    pub fn mark_all_stale(&mut self, running: u64) {
        self.slots.iter_mut().for_each(|slot| slot.stale |= slot.space != running);
    }
}
