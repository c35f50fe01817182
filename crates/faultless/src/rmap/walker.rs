//! A CPU that looks into the tables of spaces which it does not run: they do not end meanwhile.
//!
//! To count in each space the CPUs that look into it would write a line of the space twice for each page that is looked for, and all CPUs that look at the same time would write the same line.
//! So a space does not know. Each CPU has a [number](Stays) that is odd while it walks, and a space that ends waits for all that walk, wherever.
//!
//! 1. *Walk.* The CPU makes its number odd, and issues a full fence. Then it finds spaces in the lists that lead to them. Under the lock of the list it looks whether a
//!    space is [closed](Core::close), and if not, it may use it, and its tables, until it makes the number even.
//! 2. *End.* The space is closed. Full fence. The CPU that ends it waits for each CPU whose number is odd, until it has another. Then it frees the tables, and
//!    at last the [`Core`].
//!
//! Of the two fences one comes first: either the walk finds the space closed, or the end finds the walk. As long as no CPU has walked, an end looks at one flag, which is set
//! before the first fence.
//!
//! A walk is short: of some dozens of pages, whose objects' mappings are found [once](super::visits). It waits for the owners of spaces, for the flushes of what it takes,
//! and for leaf locks; not for stores, nor for locks of a space. So the end of a space does not wait long, though the CPUs that it waits for look at other spaces.

use crate::heap::Shared;
use crate::machine::Machine;
use crate::space::fixed::Core;
use crate::sync::grace::Section;
use crate::sync::mutant::{Mutant, lost};
use crate::sync::order::{self, Mark, Reclaim};
use crate::sync::percpu::Padded;
use crate::sync::stays::{Stay, Stays, await_all};
use crate::vm::Cpu;

/// The walks of a CPU. Spaces that end read it, so it is on a line that the CPU writes for nothing else.
#[derive(Debug, Default)]
pub(crate) struct Walker(Padded<Stays>);

/// A CPU looks into tables until this is dropped. It does so in a grace section.
#[derive(Debug)]
pub(crate) struct Walk<'c> {
    section: Section<'c>,
    _stay: Stay<'c>,
    /// Spaces wait for this CPU when they end.
    _order: Mark<'c>,
}

impl<'c> Walk<'c> {
    pub(crate) const fn section(&self) -> &Section<'c> {
        &self.section
    }

    /// The space of `core`, unless it is ending.
    pub(super) fn space(&self, core: &Shared<Core>) -> Option<&Core> {
        let is_open = !core.is_closed() || lost(Mutant::WalkLooksAtClosed);
        // SAFETY: a core that is not closed is there until its end has waited for this walk (step 2).
        is_open.then(|| unsafe { Shared::peek_raw(core.as_raw()) })
    }
}

impl<M: Machine> Cpu<'_, M> {
    /// Step 1. Not in another walk, nor holding what waits for one.
    pub(crate) fn walk(&self) -> Walk<'_> {
        order::before::<Reclaim>(self);
        let order = order::hold::<Reclaim>(self);
        let stay = self.state().walker.0.begin_looking(&self.vm().walked);
        Walk { section: self.section(), _stay: stay, _order: order }
    }

    /// Step 2, but for the closing.
    pub(crate) fn await_walks(&self) {
        let walkers = self.vm().cpus.iter().map(|of| &*of.walker.0);
        await_all(&self.vm().walked, walkers, self);
    }
}
