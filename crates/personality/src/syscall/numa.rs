//! `move_pages`: the memory nodes of pages. New pages come from node 0, the node of the CPUs, while
//! it has free frames, unless a [policy](super::mempolicy) selects other nodes.

use super::memory::space;
use super::process::thread_or_own;
use super::{Args, Errno, Result};
use crate::syscall::args::{Entry, calls};
use crate::task::cond_resched_unless_killed;
use crate::task::ids::{may_inspect, privileged};
use faultless::{Errno as Why, Space};
use faultless_bare::arch::user;
use faultless_bare::machine::Bare;
use faultless_bare::percpu;
use linux_raw_sys::general as nr;

/// The system calls of this file, by number.
pub(super) const CALLS: &[Entry] = calls![(nr::__NR_move_pages, move_pages)];

/// `MPOL_MF_MOVE`: move pages mapped only by this space.
const MOVE: u64 = 2;
/// `MPOL_MF_MOVE_ALL`: also move shared pages. Only root may use this flag.
const MOVE_ALL: u64 = 4;
/// Pages for which the lists are read at a time.
pub(super) const PIECE: usize = 64;

/// `move_pages(pid, count, pages, nodes, status, flags)`: without `nodes`, stores the nodes of
/// the pages. Returns the number of pages that could not be moved, because they are in use or the
/// node is full. Unlike Linux, the call continues with the other pages after a failure, and stores
/// a status for each page.
pub fn move_pages(args: Args<'_>) -> Result {
    let (pid, count, pages, nodes, status) = (args.a(), args.b(), args.c(), args.d(), args.e());
    let flags = u64::from(args.f() as u32);
    if flags & !(MOVE | MOVE_ALL) != 0 {
        return Err(Errno::EINVAL);
    }
    if flags & MOVE_ALL != 0 {
        privileged()?;
    }
    let other = match pid as u32 {
        0 => None,
        _ => {
            let thread = thread_or_own(pid)?;
            if !may_inspect(&thread.process) {
                return Err(Errno::EPERM);
            }
            Some(thread.process.memory().ok_or(Errno::EINVAL)?)
        }
    };
    let space = other.as_ref().map_or_else(space, |memory| memory.space());
    let mut addrs = [0; PIECE];
    let (mut done, mut stayed) = (0, 0);
    loop {
        let len = (count - done).min(PIECE as u64) as usize;
        let addrs = &mut addrs[..len];
        read_list(addrs, pages.wrapping_add(8 * done), u64::from_le_bytes)?;
        let status = status.wrapping_add(4 * done);
        if nodes == 0 {
            let mut found = [Err(Why::EFAULT); PIECE];
            space.page_nodes(percpu::cpu(), addrs, &mut found);
            tell(&found[..len], status)?;
        } else {
            let mut to = [0; PIECE];
            read_list(&mut to[..len], nodes.wrapping_add(4 * done), i32::from_le_bytes)?;
            stayed += move_piece(space, addrs, &to[..len], flags & MOVE_ALL != 0, Some(status))?;
        }
        done += len as u64;
        if done == count {
            return Ok(stayed);
        }
        if !cond_resched_unless_killed() {
            return Err(Errno::RESTART);
        }
    }
}

/// Moves pages to the nodes `to`, with one call for consecutive pages with the same target, and
/// stores the status of each page at `status`. Returns the number of pages that were not moved.
pub(super) fn move_piece(
    space: &Space<Bare>,
    pages: &[u64],
    to: &[i32],
    all: bool,
    status: Option<u64>,
) -> Result {
    let (mut at, mut stayed) = (0, 0);
    for run in to.chunk_by(|one, next| one == next) {
        let node = u8::try_from(run[0]).map_err(|_| Errno::ENODEV)?;
        let mut moved = [Err(Why::EFAULT); PIECE];
        let moved = &mut moved[..run.len()];
        space.move_pages(percpu::cpu(), &pages[at..at + run.len()], node, all, moved)?;
        if let Some(status) = status {
            tell(moved, status.wrapping_add(4 * at as u64))?;
        }
        let stays = |result: &&_| matches!(result, Err(Why::EBUSY | Why::ENOMEM));
        stayed += moved.iter().filter(stays).count() as u64;
        at += run.len();
    }
    Ok(stayed)
}

/// Fills `list` with the numbers at `from`.
fn read_list<T, const N: usize>(list: &mut [T], from: u64, number: fn([u8; N]) -> T) -> Result<()> {
    let mut bytes = [[0; N]; PIECE];
    let bytes = &mut bytes[..list.len()];
    user::read_bytes(bytes.as_flattened_mut(), from)?;
    list.iter_mut().zip(bytes).for_each(|(to, bytes)| *to = number(*bytes));
    Ok(())
}

/// Stores the results for pages: a node, or an error.
fn tell(results: &[core::result::Result<u8, Why>], status: u64) -> Result<()> {
    let mut bytes = [[0; 4]; PIECE];
    for (to, result) in bytes.iter_mut().zip(results) {
        *to = result
            .map_or_else(|why| -i32::from(Errno::from(why).0 as i16), i32::from)
            .to_le_bytes();
    }
    Ok(user::write_bytes(status, bytes[..results.len()].as_flattened())?)
}
