//! The parts of a fault used only by the baseline `per_vma`; the locks are in
//! [`space::baseline`](crate::space::baseline).
//!
//! Under `mmap_lock` a fault calls [`Space::under_space_lock`] at once, which takes the lock of the
//! space for reading.

use super::ticket::{Abort, Ticket};
use super::{Access, Attempt, FaultError, FaultKind, Grow, Request, mem_policy};
use crate::fault::prefault::ThreadPredictor;
use crate::fault::prepared::Prepared;
use crate::knob::Locking;
use crate::machine::Machine;
use crate::space::Space;
use crate::stat::Counter;
use crate::sync::order::{self, Mark, MmapLock};
use crate::sync::rwlock::ReadGuard;
use crate::vm::Cpu;

impl<M: Machine> Space<M> {
    /// Serves [`Space::fault`] under `per_vma`. A separate function, so that each policy has no
    /// cost for the other.
    #[inline(never)]
    pub(super) fn handle_per_vma(
        &self,
        cpu: &Cpu<'_, M>,
        page: u64,
        access: Access,
        ahead: Option<&ThreadPredictor<M>>,
        grow: Grow,
    ) -> Result<FaultKind, FaultError> {
        let request = Request { page, access, ahead };
        let mut prepared = Prepared::Nothing;
        let served = self.under_vma_lock(cpu, request, &mut prepared);
        self.finish_fault(cpu, request, grow, served, prepared)
    }

    /// Tries the fault as Linux 6.4 to 6.14 do first: under the lock of the VMA.
    #[inline(always)]
    fn under_vma_lock(
        &self,
        cpu: &Cpu<'_, M>,
        Request { page, access, ahead }: Request<'_, M>,
        prepared: &mut Prepared,
    ) -> Option<FaultKind> {
        let section = cpu.section();
        // A switch away from this policy waits for the grace sections that saw the policy in force.
        if self.locking_in_force() != Locking::PerVma {
            return None;
        }
        let Some(entry) = self.view(cpu, &section).at(page) else {
            cpu.count(Counter::VmaLockAbort);
            return None;
        };
        let vma = entry.get();
        let read = self.check(cpu, vma, access).ok().and_then(|_| vma.lock.try_read());
        let Some(read) = read else {
            cpu.count(Counter::VmaLockAbort);
            return None;
        };
        let held = order::hold::<order::VmaLock>(cpu);
        let tried = if vma.sequence.read().is_some() {
            let ticket = Ticket::vma_lock();
            let attempt = Attempt { cpu, space: self, vma, ticket, page, access, ahead };
            mem_policy::place(cpu, vma, page, access, prepared);
            attempt.serve(prepared).map_err(|_| Counter::VmaLockRetry)
        } else {
            // The VMA was replaced between the look-up and the lock.
            Err(Counter::VmaLockMiss)
        };
        drop(read);
        drop(held);
        match tried {
            Ok(kind) => {
                cpu.count(Counter::VmaLockSuccess);
                Some(kind)
            }
            Err(counter) => {
                cpu.count(counter);
                None
            }
        }
    }
}

impl<'a, M: Machine> Attempt<'a, '_, M> {
    /// Under a VMA lock, tries to take the space's lock for reading before an anon_vma is made, as
    /// Linux does; otherwise takes no lock.
    #[inline(always)]
    pub(super) fn lock_for_anon_vma(self) -> Result<Option<(ReadGuard<'a>, Mark<'a>)>, Abort> {
        if !self.ticket.is_vma_lock() {
            return Ok(None);
        }
        let guard = self.space.core.mmap_lock.try_read().ok_or(Abort::NoAnon)?;
        self.cpu.count(Counter::MmapLockRead);
        Ok(Some((guard, order::hold::<MmapLock>(self.cpu))))
    }
}
