//! Which address spaces a CPU's translations are tagged with.
//!
//! A CPU with process-context identifiers keeps the translations of several spaces apart. Each CPU has
//! a few *slots*; slot *n* is identifier *n* + 1, and identifier 0 is the kernel's own, in which no
//! space runs. A slot remembers the space that used it last.
//!
//! *Stale marks.* A CPU that leaves a space does not flush it, and nobody tells it of changes from then
//! on. So leaving marks the slot stale, as does any other order to drop translations of a space that is
//! in a slot and does not run; a stale slot is flushed as it is loaded next. Only a slot that is not stale
//! may be loaded with its translations kept.

/// How many spaces a CPU tells apart.
pub const SLOTS: usize = 6;

#[derive(Clone, Copy, Debug)]
struct Slot {
    /// 0: none.
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
    /// Whether what is cached under the identifier must go.
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
    /// Slots that no space was in yet.
    pub const fn new() -> Self {
        Self { slots: [Slot { space: 0, stale: true, used: 0 }; SLOTS], loads: 0 }
    }

    /// Gives `space`, which is not 0, a slot: its own, or else the one that was not loaded for longest.
    /// The caller loads it as told.
    pub fn load(&mut self, space: u64) -> Load {
        self.loads += 1;
        let own = self.slots.iter().position(|slot| slot.space == space);
        let oldest = || (0..SLOTS).min_by_key(|&at| self.slots[at].used);
        let at = own.or_else(oldest).unwrap_or(0);
        let flush = own.is_none() || self.slots[at].stale;
        self.slots[at] = Slot { space, stale: false, used: self.loads };
        Load { pcid: at as u16 + 1, flush }
    }

    /// What is cached of `space`, which does not run, must not be used again.
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
