//! A fault on a page that must be read from its object's store, or from the [swap area](crate::reclaim::swap), first: a major fault.
//!
//! The attempt gives up, holding nothing. The fault takes a share of the object, and [fetches](crate::Shared::fetch) the page. Then it looks at the
//! VMA again like any fault. So the read needs no validation: if the mapping went meanwhile, a page was read into the page cache
//! that nobody asked for any more, and a share of the object was held a little longer. That is all there is to see of it.
//!
//! Whether a page cannot be read is decided under a lock, like all that a program is told.

use super::prefault::ThreadPredictor;
use super::{Access, Attempt, FaultKind};
use crate::fault::ticket::Ticket;
use crate::file::{Fetched, Lack, Object, Reach};
use crate::machine::Machine;
use crate::space::Space;
use crate::space::vma::{Vma, VmaFlags};
use crate::stat::Counter;
use crate::vm::Cpu;

/// Who needs a page that must be read.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Reader {
    /// A fault without a lock.
    Attempt,
    /// The same fault under the lock, which does not read again what it could not read.
    UnderLock,
    /// A pin, which reads for itself.
    Pin,
}

/// What came of the read.
pub(super) enum ReadIn {
    /// The page is there, or the mapping is not.
    LookAgain,
    /// It is being read.
    Pending,
    /// The store failed.
    Failed,
    /// There is no frame, and none to be had, or the heap is exhausted.
    NoMemory,
}

/// The answer of a fault whose page is being read. As on Linux the fault is counted when it comes again.
#[cold]
#[inline(never)]
pub(super) fn pending<M: Machine>(cpu: &Cpu<'_, M>) -> FaultKind {
    cpu.state().counts.take(Counter::Faults, 1);
    // The next fault has the number of this one, and reads for itself.
    cpu.state().unread.set(None);
    FaultKind::Pending
}

impl<M: Machine> Space<M> {
    /// Returns the number of pages to read for a fault at `page`, from `page` on, in a mapping that is used in
    /// order. The file is read in blocks of 2^`order` pages; `least` pages of the block are read in any case. See
    /// [`Attempt::read_window`].
    #[cold]
    #[inline(never)]
    fn predicted(
        &self,
        cpu: &Cpu<'_, M>,
        page: u64,
        thread: &ThreadPredictor<M>,
        (order, least): (u8, u64),
    ) -> u64 {
        let window = self.with_vma(cpu, page, |vma| {
            // Nothing is installed, so nothing needs to be validated.
            let (ticket, access) = (Ticket::page_held(), Access::Read);
            let attempt = Attempt { cpu, space: self, vma, ticket, page, access, ahead: None };
            Some(attempt.read_window(thread, order, least))
        });
        window.unwrap_or(1)
    }

    /// Reads the page at `page` from the swap area, alone, if it is there; or the page of an object that is mapped at `page` from the object's
    /// store, with the block that the store prefers, and those after it that the thread of `ahead` is predicted to use; in a mapping that is used
    /// at random (`MADV_RANDOM`) it alone.
    #[cold]
    #[inline(never)]
    pub(super) fn read_in(
        &self,
        cpu: &Cpu<'_, M>,
        page: u64,
        ahead: Option<&ThreadPredictor<M>>,
        reader: Reader,
    ) -> ReadIn {
        let wanted = self.with_vma(cpu, page, |Vma { area, .. }| {
            let entry = self.entry_at(cpu, page);
            if entry.is_swapped() {
                let swap = cpu.vm().swap.get()?;
                return Some((swap.object().clone(), entry.slot(), true));
            }
            // Where a page is mapped by now, none is needed of the object: it may be a private one, which came back.
            let object = area.memory.object().filter(|it| entry.is_none() && it.is_stored())?;
            Some((object.clone(), area.index_of(page), area.flags.contains(VmaFlags::RANDOM)))
        });
        let Some((object, index, at_random)) = wanted else { return ReadIn::LookAgain };
        let state = cpu.state();
        let this = (state.counts.get(Counter::Faults), object.id(), index);
        if reader == Reader::UnderLock && state.unread.take() == Some(this) {
            Object::release(object, cpu);
            return ReadIn::Failed;
        }
        let reach = if at_random {
            Reach::Only(index + 1)
        } else {
            let block = (object.block_order(), object.block() - index % object.block());
            let more = ahead.map_or(1, |thread| self.predicted(cpu, page, thread, block));
            Reach::Block(index + more)
        };
        let mut fetched = object.fetch(cpu, index, reach);
        if reader != Reader::Attempt && matches!(fetched, Err(Lack::Heap)) {
            // What was retired may be what is missing. There is no more to wait for.
            cpu.settle_all();
            fetched = object.fetch(cpu, index, reach);
        }
        Object::release(object, cpu);
        match fetched {
            Ok(Fetched::There) => {
                cpu.count(Counter::MajorFault);
                ReadIn::LookAgain
            }
            Ok(Fetched::Pending(pending)) => {
                cpu.count(Counter::MajorFault);
                cpu.set_pending(pending);
                ReadIn::Pending
            }
            Err(Lack::Beyond) => ReadIn::LookAgain,
            Err(Lack::Memory | Lack::Heap) => ReadIn::NoMemory,
            Err(Lack::Store(_)) => {
                if reader == Reader::Attempt {
                    state.unread.set(Some(this));
                }
                ReadIn::Failed
            }
        }
    }
}
