//! Which space each process-context identifier (PCID) of a CPU stands for.
//!
//! With PCIDs a CPU keeps the translations of several spaces apart. Each CPU has
//! a few *slots*: slot *n* is identifier *n* + 1. Identifier 0 is for the kernel's own tables. A slot
//! remembers the space that used it last.
//!
//! *Stale marks.* A CPU that leaves a space does not flush it, and gets no flush requests for it from then
//! on. So leaving marks the slot stale, as does every request to drop translations of a space that has
//! a slot but does not run. A stale slot is flushed when it is loaded next. Only a slot that is not stale
//! is loaded without a flush.

/// The slots of a CPU.
pub const SLOTS: usize = 6;

#[derive(Clone, Copy, Debug)]
struct Slot {
    /// The number of its space; 0: none.
    space: u64,
    stale: bool,
    /// When it was loaded last.
    used: u64,
}

/// How a space is to be loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// Its identifier, never 0.
    pub pcid: u16,
    /// Whether the translations of the identifier must be flushed.
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

    /// Gives `space`, which is not 0, a slot: its own, or else the least recently loaded one.
    /// The caller loads it as described by the result.
    pub fn load(&mut self, space: u64) -> Load {
        self.loads += 1;
        let own = self.slots.iter().position(|slot| slot.space == space);
        let oldest = || (0..SLOTS).min_by_key(|&at| self.slots[at].used);
        let at = own.or_else(oldest).unwrap_or(0);
        let flush = own.is_none() || self.slots[at].stale;
        self.slots[at] = Slot { space, stale: false, used: self.loads };
        Load { pcid: at as u16 + 1, flush }
    }

    /// The translations of `space`, which does not run, must not be used again.
    pub fn mark_stale(&mut self, space: u64) {
        if let Some(slot) = self.slots.iter_mut().find(|slot| slot.space == space) {
            slot.stale = true;
        }
    }

    /// The same for every space but `running` (0: none runs).
    pub fn mark_all_stale(&mut self, running: u64) {
        self.slots.iter_mut().for_each(|slot| slot.stale |= slot.space != running);
    }
}
