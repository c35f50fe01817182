//! Major faults: faults on a page that must first be read from the store of its object, or from the
//! [swap area](crate::reclaim::swap).
//!
//! The attempt aborts and holds nothing. The fault takes a share of the object and
//! [fetches](crate::Shared::fetch) the page. Then it looks up the VMA again, like any fault, so the
//! read needs no validation. If the mapping was removed during the read, an unneeded page is in the
//! page cache, and the share of the object was held a little longer. There is no other effect.
//!
//! Only a fault under a lock decides that a page cannot be read, as for all errors reported to a
//! program.

use super::prefault::ThreadPredictor;
use super::{Access, Attempt, FaultKind};
use crate::fault::ticket::Ticket;
use crate::file::{Fetched, Lack, Object, Reach};
use crate::machine::Machine;
use crate::space::Space;
use crate::space::area::VmaFlags;
use crate::stat::Counter;
use crate::vm::Cpu;

/// The caller of a read.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Reader {
    /// A fault without a lock.
    Attempt,
    /// The same fault under the lock, which does not retry a failed read.
    UnderLock,
    /// A pin, which has no earlier attempt.
    Pin,
}

/// The result of a read.
pub(super) enum ReadIn {
    /// The page is present now, or the mapping is gone: retry.
    Retry,
    /// The read is in progress.
    Pending,
    /// The store failed.
    Failed,
    /// No frame is free and none can be reclaimed, or the heap is exhausted.
    NoMemory,
}

/// Returns the result of a fault whose page is being read. As on Linux, the fault is counted only
/// when it is repeated.
#[cold]
#[inline(never)]
pub(super) fn pending<M: Machine>(cpu: &Cpu<'_, M>) -> FaultKind {
    cpu.state().counts.take(Counter::Faults, 1);
    // The next fault gets the same number, and must try its own read.
    cpu.state().unread.set(None);
    FaultKind::Pending
}

impl<M: Machine> Space<M> {
    /// Returns the number of pages to read for a fault at `page`, from `page` upwards, in a mapping
    /// with sequential use. The file is read in blocks of 2^`order` pages; at least `least` pages
    /// of the block are always read. See [`Attempt::read_window`].
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
            // The attempt installs no entry, so there is no ticket to validate.
            let (ticket, access) = (Ticket::page_held(), Access::Read);
            let attempt = Attempt { cpu, space: self, vma, ticket, page, access, ahead: None };
            Some(attempt.read_window(thread, order, least))
        });
        window.unwrap_or(1)
    }

    /// Reads the page at `page`. If the page is in the swap area, the page is read alone. If an
    /// object is mapped at `page`, the read fetches the page from the object's store, the block
    /// preferred by the store, and the following pages which the thread of `ahead` is predicted to
    /// use. In a mapping with random access (`MADV_RANDOM`), only the page is read.
    #[cold]
    #[inline(never)]
    pub(super) fn read_in(
        &self,
        cpu: &Cpu<'_, M>,
        page: u64,
        ahead: Option<&ThreadPredictor<M>>,
        reader: Reader,
    ) -> ReadIn {
        let wanted = self.with_vma(cpu, page, |vma| {
            let entry = self.entry_at(cpu, page);
            if entry.is_swapped() {
                let swap = cpu.vm().swap.get()?;
                return Some((swap.object().clone(), entry.slot(), true));
            }
            // A page that is mapped by now needs no read: it may be a private page that was swapped
            // in.
            let object = vma.memory().object().filter(|it| entry.is_none() && it.is_stored())?;
            Some((object.clone(), vma.index_of(page), vma.flags().contains(VmaFlags::RANDOM)))
        });
        let Some((object, index, at_random)) = wanted else { return ReadIn::Retry };
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
            // Retired objects may hold the missing memory. There is no other memory to wait for.
            cpu.wait_grace_all();
            fetched = object.fetch(cpu, index, reach);
        }
        Object::release(object, cpu);
        match fetched {
            Ok(Fetched::There) => {
                cpu.count(Counter::MajorFault);
                ReadIn::Retry
            }
            Ok(Fetched::Pending(pending)) => {
                cpu.count(Counter::MajorFault);
                cpu.set_pending(pending);
                ReadIn::Pending
            }
            Err(Lack::Beyond) => ReadIn::Retry,
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
