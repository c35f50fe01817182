//! Populating: faulting pages in before a program touches them, for `MAP_POPULATE` and
//! `MADV_POPULATE_*`.
//!
//! A separate fault serves each page, so another CPU may unmap pages between two faults. Such a
//! fault never extends a stack: the page was mapped when the operation began, and the operation
//! skips a page that is no longer mapped.

use super::Space;
use super::area::Prot;
use super::vma::Vma;
use crate::addr::{PAGE_SIZE, VirtRange};
use crate::error::Errno;
use crate::fault::{Access, FaultError};
use crate::machine::Machine;
use crate::stat::Counter;
use crate::vm::Cpu;

impl<M: Machine> Space<M> {
    /// Faults every page of `range` in, for writing if a store makes the pages private.
    ///
    /// # Errors
    /// The error of the first fault that failed.
    pub(super) fn populate(&self, cpu: &Cpu<'_, M>, range: VirtRange) -> Result<(), FaultError> {
        self.fault_each(cpu, range, |vma| {
            Ok(match vma {
                Some(vma) if vma.is_private() && vma.area().allows(Prot::WRITE) => Access::Write,
                _ => Access::Read,
            })
        })
    }

    /// Faults every page of `range` in, for `access`, as `madvise` does.
    ///
    /// # Errors
    /// `ENOMEM` (a hole, or no memory), `EINVAL` (a VMA that forbids the access, or device memory),
    /// `EFAULT` (any other fault that failed). Pages before the failed page stay populated.
    pub(super) fn populate_advised(
        &self,
        cpu: &Cpu<'_, M>,
        range: VirtRange,
        access: Access,
    ) -> Result<(), Errno> {
        let needed = if access == Access::Write { Prot::WRITE } else { Prot::READ };
        self.fault_each(cpu, range, |vma| match vma {
            // A fault would also read a page that is only writable.
            Some(vma) if !vma.area().allows(needed) => Err(Errno::EINVAL),
            // As on Linux.
            Some(vma) if vma.memory().is_device() => Err(Errno::EINVAL),
            Some(_) => Ok(access),
            None => Err(Errno::ENOMEM),
        })
    }

    /// Faults every page of `range` in that is not yet present for `access`. `access` receives the
    /// VMA of the page just before.
    fn fault_each<E: From<FaultError>>(
        &self,
        cpu: &Cpu<'_, M>,
        range: VirtRange,
        access: impl Fn(Option<&Vma>) -> Result<Access, E>,
    ) -> Result<(), E> {
        let mut page = range.start;
        while page < range.end {
            let look = || {
                let section = self.section(cpu);
                let entry = self.view(cpu, &section).at(page);
                access(entry.map(|entry| entry.get()))
            };
            let access = look().or_else(|_| {
                // An unmapping under way may have published its tree and not flushed yet. Wait for
                // the unmapping.
                let page = VirtRange::page(page);
                let _guard = self.share_flushed(cpu, page, Counter::RangeLockFault);
                look()
            })?;
            // If the MMU already allows the access, nothing is to be done, except that a store
            // would make the page stay.
            let entry = match access {
                Access::Write => self.entry_kept(cpu, page),
                Access::Read | Access::Execute => self.entry_at(cpu, page),
            };
            if !entry.is_present() || (access == Access::Write && !entry.is_writable()) {
                self.fault_mapped(cpu, page, access)?;
            }
            page += PAGE_SIZE;
        }
        Ok(())
    }
}

/// The error of `madvise` for a fault that failed.
impl From<FaultError> for Errno {
    fn from(error: FaultError) -> Self {
        match error {
            FaultError::Segv { mapped: true } => Self::EINVAL,
            FaultError::Bus => Self::EFAULT,
            FaultError::Segv { mapped: false } | FaultError::OutOfMemory => Self::ENOMEM,
        }
    }
}
