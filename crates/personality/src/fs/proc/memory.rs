//! `/proc/PID/mem`: the memory of a process, by address.
//!
//! An open file refers to the memory that the process had at the time of the open: after `execve`
//! and after the end of the process, the file reads as empty. The kernel copies with the rights of
//! the process itself. (On Linux, a debugger may also read pages that the process cannot read, and
//! store to private pages that the process cannot store to.)

use super::super::transfer::{Piece, Transfer};
use crate::errno::{Errno, Result};
use crate::syscall::across::copy;
use crate::task::memory::Memory;
use crate::task::process::find;
use faultless::SpaceId;
use faultless_collections::Arc;

/// The memory of a process.
#[derive(Clone, Copy, Debug)]
pub struct Opened {
    pid: u32,
    space: SpaceId,
}

impl Opened {
    /// Returns the present memory of process `pid`.
    ///
    /// # Errors
    /// `ESRCH`: the process has no memory.
    pub fn try_new(pid: u32) -> Result<Self> {
        let memory = find(pid).and_then(|process| process.memory()).ok_or(Errno::ESRCH)?;
        Ok(Self { pid, space: memory.space().id() })
    }

    fn memory(&self) -> Option<Arc<Memory>> {
        let memory = find(self.pid)?.memory()?;
        (memory.space().id() == self.space).then_some(memory)
    }

    /// Reads from address `at` on. Holds no lock.
    ///
    /// # Errors
    /// `EIO`: there is no readable memory at `at`. `EOVERFLOW`: the range wraps. `EFAULT`,
    /// `ENOMEM`.
    pub fn read(&self, to: &mut Transfer<'_>, at: u64) -> Result {
        self.copy(to, at, |to, there, bytes| {
            let taken = there.take_bytes(bytes);
            to.put_bytes(&bytes[..taken as usize])
        })
    }

    /// Writes from address `at` on. Holds no lock.
    ///
    /// # Errors
    /// `EIO`: there is no writable memory at `at`. `EOVERFLOW`: the range wraps. `EFAULT`,
    /// `ENOMEM`.
    pub fn write(&self, from: &mut Transfer<'_>, at: u64) -> Result {
        self.copy(from, at, |from, there, bytes| {
            let before = from.progress();
            let taken = from.take_bytes(bytes);
            let stored = there.put_bytes(&bytes[..taken as usize]);
            if stored < taken {
                from.uncount(&before);
                from.skip(stored);
            }
            stored
        })
    }

    fn copy<'a>(
        &self,
        here: &mut Transfer<'a>,
        at: u64,
        go: impl Fn(&mut Transfer<'a>, &mut Transfer<'_>, &mut [u8]) -> u64,
    ) -> Result {
        let wanted = here.left();
        if at.checked_add(wanted).is_none() {
            return Err(Errno::EOVERFLOW);
        }
        let Some(memory) = self.memory() else { return Ok(0) };
        let pieces = [Piece { base: at, len: wanted }];
        let mut there = Transfer::of_other(&pieces, memory.space());
        let moved = copy(here, &mut there, go)?;
        if moved != 0 || wanted == 0 {
            return Ok(moved);
        }
        // The caller's memory has its own error.
        here.result().and(Err(Errno::EIO))
    }
}
