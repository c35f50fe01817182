//! Walks of a CPU through the tables of spaces run elsewhere. Such spaces do not end during the
//! walk.
//!
//! If each space counted the CPUs that read its tables, each search for a page would write a line
//! of the space twice, and all concurrent CPUs would write the same line. So spaces do not count
//! walks. Each CPU has a [number](RegionCounter) that is odd while it walks, and a space that ends
//! waits for all walking CPUs, in any space.
//!
//! 1. *Walk.* The CPU makes its number odd, and issues a full fence. Then the CPU finds spaces
//!    through their lists. Under the lock of a list the CPU checks whether a space is
//!    [closed](Core::close); if not, the space and its tables may be used until the number is even
//!    again.
//! 2. *End.* The space is closed, followed by a full fence. The ending CPU waits for each CPU with
//!    an odd number, until the number changes. Then it frees the tables, and finally the [`Core`].
//!
//! One of the two fences comes first: either the walk finds the space closed, or the end finds the
//! walk. Until any CPU has walked, an end reads only one flag, which is set before the first fence.
//!
//! A walk is short: some dozens of pages, whose objects' mappings are found [once](super::visits).
//! A walk waits for the owners of spaces, for the flushes of taken pages, and for leaf locks; not
//! for stores, nor for locks of a space. So the end of a space does not wait long, even for CPUs
//! that walk other spaces.

use crate::heap::Shared;
use crate::machine::Machine;
use crate::space::core::Core;
use crate::sync::grace::Section;
use crate::sync::mutant::{Mutant, lost};
use crate::sync::order::{self, Mark, Reclaim};
use crate::sync::percpu::Padded;
use crate::sync::region_counter::{Region, RegionCounter, await_all};
use crate::vm::Cpu;

/// The walks of a CPU. Ending spaces read it, so it has a separate cache line.
#[derive(Debug, Default)]
pub(crate) struct Walker(Padded<RegionCounter>);

/// A walk: this CPU reads tables, in a grace section, until the drop.
#[derive(Debug)]
pub(crate) struct Walk<'c> {
    section: Section<'c>,
    _region: Region<'c>,
    /// Ending spaces wait for this CPU.
    _order: Mark<'c>,
}

impl<'c> Walk<'c> {
    pub(crate) const fn section(&self) -> &Section<'c> {
        &self.section
    }

    /// Returns the space of `core`, unless it is ending.
    pub(super) fn space(&self, core: &Shared<Core>) -> Option<&Core> {
        let is_open = !core.is_closed() || lost(Mutant::WalkLooksAtClosed);
        // SAFETY: a core that is not closed is alive until its end has waited for this walk (step
        // 2).
        is_open.then(|| unsafe { Shared::peek_raw(core.as_raw()) })
    }
}

impl<M: Machine> Cpu<'_, M> {
    /// Step 1. The caller is in no other walk, and holds no lock that a walk waits for.
    pub(crate) fn walk(&self) -> Walk<'_> {
        order::before::<Reclaim>(self);
        let order = order::hold::<Reclaim>(self);
        let region = self.state().walker.0.begin_checked(&self.vm().walked);
        Walk { section: self.section(), _region: region, _order: order }
    }

    /// Step 2, after the space was closed.
    pub(crate) fn await_walks(&self) {
        let walkers = self.vm().cpus.iter().map(|of| &*of.walker.0);
        await_all(&self.vm().walked, walkers, self);
    }
}
