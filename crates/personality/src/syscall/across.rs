//! System calls on the memory of other processes.

use super::file::rw::{MOST_PIECES, pieces, remote_pieces};
use super::{Args, Errno, Result};
use crate::fs::{Piece, Transfer};
use crate::syscall::args::{Entry, calls};
use crate::task::cond_resched_unless_killed;
use crate::task::ids::may_inspect;
use crate::task::process::find_thread;
use faultless_collections::Vec;
use linux_raw_sys::general as nr;

/// The system calls of this file, by number.
pub(super) const CALLS: &[Entry] = calls![
    (nr::__NR_process_vm_readv, process_vm_readv),
    (nr::__NR_process_vm_writev, process_vm_writev),
];

/// The number of bytes copied through the kernel at a time.
const BOUNCE: usize = 16 << 10;

/// `process_vm_readv(pid, local, locals, remote, remotes, flags)`.
pub fn process_vm_readv(args: Args<'_>) -> Result {
    move_bytes(&args, |here, there, bytes| {
        let taken = there.take_bytes(bytes);
        here.put_bytes(&bytes[..taken as usize])
    })
}

/// `process_vm_writev(pid, local, locals, remote, remotes, flags)`.
pub fn process_vm_writev(args: Args<'_>) -> Result {
    move_bytes(&args, |here, there, bytes| {
        let taken = here.take_bytes(bytes);
        there.put_bytes(&bytes[..taken as usize])
    })
}

/// Copies bytes in pieces: `go` copies one buffer between the caller's memory and the other, and
/// returns the number of copied bytes. The bytes before an inaccessible page count. Signals do not
/// interrupt the copy.
fn move_bytes(
    args: &Args<'_>,
    go: impl Fn(&mut Transfer<'_>, &mut Transfer<'_>, &mut [u8]) -> u64,
) -> Result {
    if args.f() != 0 || args.c() > MOST_PIECES || args.e() > MOST_PIECES {
        return Err(Errno::EINVAL);
    }
    let (here, there) = (pieces(args.b(), args.c())?, remote_pieces(args.d(), args.e())?);
    let is_empty = |pieces: &[Piece]| pieces.iter().all(|piece| piece.len == 0);
    if is_empty(&here) || is_empty(&there) {
        return Ok(0);
    }
    let thread = find_thread(args.a() as u32).ok_or(Errno::ESRCH)?;
    let memory = thread.process.memory().ok_or(Errno::ESRCH)?;
    if !may_inspect(&thread.process) {
        return Err(Errno::EPERM);
    }
    let mut here = Transfer::of_user(&here);
    let mut there = Transfer::of_other(&there, memory.space());
    let moved = copy(&mut here, &mut there, go)?;
    if moved == 0 { Err(Errno::EFAULT) } else { Ok(moved) }
}

/// Copies between the caller's memory and another's, through the kernel, and returns the number of
/// bytes. `go` copies one buffer, and returns the number of copied bytes. Threads run in between,
/// so the caller holds no lock.
///
/// # Errors
/// `ENOMEM`.
pub fn copy<'a, 'b>(
    here: &mut Transfer<'a>,
    there: &mut Transfer<'b>,
    go: impl Fn(&mut Transfer<'a>, &mut Transfer<'b>, &mut [u8]) -> u64,
) -> Result {
    let mut bytes = Vec::try_filled(0, BOUNCE)?;
    let mut moved = 0;
    loop {
        let part = here.left().min(there.left()).min(BOUNCE as u64);
        let through = go(here, there, &mut bytes[..part as usize]);
        moved += through;
        let is_done = through < part || here.left() == 0 || there.left() == 0;
        if is_done || !cond_resched_unless_killed() {
            return Ok(moved);
        }
    }
}
