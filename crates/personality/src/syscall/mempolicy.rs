//! `mbind`, `set_mempolicy` and `get_mempolicy`: the memory nodes for a program's new pages.
//!
//! A VMA's policy belongs to the subsystem ([`MemPolicy`]). A thread's policy is implemented here:
//! new mappings and heap growth of the thread get this policy. Linux instead applies the thread's
//! policy at each fault, in all memory without its own policy. So here the thread's policy does not
//! affect older mappings, mappings made by `execve`, or pages of files. `EINVAL` is returned for
//! `MPOL_BIND`, which never takes memory of other nodes, for `MPOL_WEIGHTED_INTERLEAVE`, and for
//! the flags of a mode, which describe changes of the set of nodes: this set is constant here.

use super::memory::space;
use super::numa::{PIECE, move_piece};
use super::{Args, Errno, Result};
use crate::syscall::args::{Entry, calls};
use crate::task::ids::privileged;
use crate::task::{cond_resched_unless_killed, current};
use faultless::{Errno as Why, MemPolicy, NodeSet, PAGE_SIZE, VirtRange};
use faultless_bare::arch::user;
use faultless_bare::percpu;
use linux_raw_sys::general as nr;

/// The system calls of this file, by number.
pub(super) const CALLS: &[Entry] = calls![
    (nr::__NR_mbind, mbind),
    (nr::__NR_set_mempolicy, set_mempolicy),
    (nr::__NR_get_mempolicy, get_mempolicy),
];

/// Linux's `MPOL_*`.
mod mode {
    pub const DEFAULT: u64 = 0;
    pub const PREFERRED: u64 = 1;
    pub const INTERLEAVE: u64 = 3;
    pub const LOCAL: u64 = 4;
    pub const PREFERRED_MANY: u64 = 5;
}

/// Flag of `mbind`: pages on other nodes are an error.
const STRICT: u64 = 1;
/// Flag of `mbind`: pages on other nodes move; with [`MOVE_ALL`] also pages shared with other
/// processes.
const MOVE: u64 = 2;
const MOVE_ALL: u64 = 4;

/// Flag of `get_mempolicy`: return the node of a page, or the next node.
const OF_NODE: u64 = 1;
/// Flag of `get_mempolicy`: return the policy of an address.
const OF_ADDR: u64 = 2;
/// Flag of `get_mempolicy`: return the nodes allowed to the thread.
const ALLOWED: u64 = 4;

/// The maximum number of nodes on Linux, and so the bound of node numbers in a list; and the
/// maximum length of a list, in bits.
const NODES: u64 = 1024;
const MOST_BITS: u64 = PAGE_SIZE * 8;
/// Bits of a word of a list.
const WORD: u64 = u64::BITS as u64;

/// Reads a set of nodes from the `bits` bits at `list` (as on Linux, one bit less than the program
/// passes). Also returns whether the set names any node, including nodes that this machine lacks.
fn read_nodes(list: u64, bits: u64) -> Result<(NodeSet, bool)> {
    let bits = bits.wrapping_sub(1);
    let (mut nodes, mut last) = (0, None);
    if list != 0 && bits != u64::MAX {
        if bits > MOST_BITS {
            return Err(Errno::EINVAL);
        }
        for first in (0..bits).step_by(WORD as usize) {
            let word: u64 = user::read(list.wrapping_add(first / 8))?;
            let word = if bits - first < WORD { word & ((1 << (bits - first)) - 1) } else { word };
            if first == 0 {
                nodes = word as u8;
            }
            if word != 0 {
                last = Some(first + u64::from(word.ilog2()));
            }
        }
    }
    if last.is_some_and(|last| last >= NODES) {
        return Err(Errno::EINVAL);
    }
    Ok((NodeSet::of_bits(nodes), last.is_some()))
}

/// Returns the policy described by a program, limited to nodes with memory.
fn policy(mode: u64, list: u64, bits: u64) -> Result<MemPolicy> {
    let (named, any) = read_nodes(list, bits)?;
    let memory = percpu::cpu().memory_nodes();
    let nodes = NodeSet::of_bits(named.bits() & memory.bits());
    let some = |nodes: NodeSet| if nodes.is_empty() { Err(Errno::EINVAL) } else { Ok(nodes) };
    match mode & 0xffff_ffff {
        mode::DEFAULT if !any => Ok(MemPolicy::Default),
        mode::LOCAL | mode::PREFERRED if !any => Ok(MemPolicy::Local),
        mode::PREFERRED => {
            let first = some(nodes)?.iter().next().map_or(NodeSet::default(), NodeSet::only);
            Ok(MemPolicy::Preferred(first))
        }
        mode::PREFERRED_MANY => Ok(MemPolicy::Preferred(some(nodes)?)),
        mode::INTERLEAVE => Ok(MemPolicy::Interleave(some(nodes)?)),
        _ => Err(Errno::EINVAL),
    }
}

/// `mbind(addr, len, mode, nodes, bits, flags)`.
pub fn mbind(args: Args<'_>) -> Result {
    let (addr, len, flags) = (args.a(), args.b(), u64::from(args.f() as u32));
    let policy = policy(args.c(), args.d(), args.e())?;
    if flags & !(STRICT | MOVE | MOVE_ALL) != 0 {
        return Err(Errno::EINVAL);
    }
    if flags & MOVE_ALL != 0 {
        privileged()?;
    }
    let moves = flags & (MOVE | MOVE_ALL) != 0;
    // As on Linux, strictness has no effect without a policy.
    let strict = flags & STRICT != 0 && policy != MemPolicy::Default;
    let aligned = addr & (PAGE_SIZE - 1) == 0;
    let end = faultless::page_up(len).and_then(|len| addr.checked_add(len)).filter(|_| aligned);
    if strict
        && !moves
        && let Some(end) = end
    {
        let astray = each_astray(VirtRange::new(addr, end), policy, |_, _| Ok(1))?;
        if astray != 0 {
            return Err(Errno::EIO);
        }
    }
    space().mbind(percpu::cpu(), addr, len, policy)?;
    if !moves {
        return Ok(0);
    }
    let range = VirtRange::new(addr, end.unwrap_or(addr));
    let stayed = each_astray(range, policy, |pages, to| {
        move_piece(space(), pages, to, flags & MOVE_ALL != 0, None)
    })?;
    if strict && stayed != 0 { Err(Errno::EIO) } else { Ok(0) }
}

/// Calls `each` for batches of the pages of `range` on other nodes than `policy` selects, with the
/// selected node of each page. Returns the sum of the results.
fn each_astray(
    range: VirtRange,
    policy: MemPolicy,
    mut each: impl FnMut(&[u64], &[i32]) -> Result,
) -> Result {
    let mut sum = 0;
    let mut first = range.start;
    while first < range.end {
        let end = range.end.min(first + PIECE as u64 * PAGE_SIZE);
        let mut addrs = [0; PIECE];
        let mut found = [Err(Why::ENOENT); PIECE];
        let mut count = 0;
        for (to, page) in addrs.iter_mut().zip((first..end).step_by(PAGE_SIZE as usize)) {
            *to = page;
            count += 1;
        }
        space().page_nodes(percpu::cpu(), &addrs[..count], &mut found);
        let (mut astray, mut to, mut number) = ([0; PIECE], [0; PIECE], 0);
        for (page, node) in addrs[..count].iter().zip(found) {
            let Ok(node) = node else { continue };
            let wanted = match policy.nodes_for(*page) {
                // The node of the CPU: all CPUs are near node 0.
                nodes if nodes.is_empty() => NodeSet::only(0),
                nodes => nodes,
            };
            if !wanted.contains(node) {
                astray[number] = *page;
                to[number] = wanted.iter().next().map_or(0, i32::from);
                number += 1;
            }
        }
        if number != 0 {
            sum += each(&astray[..number], &to[..number])?;
        }
        first = end;
        if !cond_resched_unless_killed() {
            return Err(Errno::RESTART);
        }
    }
    Ok(sum)
}

/// `set_mempolicy(mode, nodes, bits)`.
pub fn set_mempolicy(args: Args<'_>) -> Result {
    current().mem_policy.set(policy(args.a(), args.b(), args.c())?);
    Ok(0)
}

/// Applies the caller's policy to a new mapping of the caller.
pub(super) fn bind_new(start: u64, len: u64) {
    let policy = current().mem_policy.get();
    if policy != MemPolicy::Default {
        // If the VMA cannot be split, its pages come from the nearest node.
        let _ = space().mbind(percpu::cpu(), start, len, policy);
    }
}

/// `get_mempolicy(mode, nodes, bits, addr, flags)`.
pub fn get_mempolicy(args: Args<'_>) -> Result {
    let (mode, list, bits, addr, flags) = (args.a(), args.b(), args.c(), args.d(), args.e());
    let memory = percpu::cpu().memory_nodes();
    let most = u64::from(u8::BITS - memory.bits().leading_zeros());
    if flags & !(OF_NODE | OF_ADDR | ALLOWED) != 0 || list != 0 && bits < most {
        return Err(Errno::EINVAL);
    }
    let (number, nodes) = match flags {
        ALLOWED => (mode::DEFAULT, memory),
        _ if flags & ALLOWED != 0 => return Err(Errno::EINVAL),
        _ if flags & OF_ADDR == 0 => {
            if addr != 0 || flags & OF_NODE != 0 {
                return Err(Errno::EINVAL);
            }
            described(current().mem_policy.get())
        }
        _ => {
            let mut policy = None;
            let page = VirtRange::page(faultless::page_down(addr));
            space().each_area(percpu::cpu(), page, |area| {
                policy = Some(area.mem_policy());
                false
            });
            let policy = policy.ok_or(Errno::EFAULT)?;
            match flags & OF_NODE {
                0 => described(policy),
                _ => (node_of(page.start)?, described(policy).1),
            }
        }
    };
    if mode != 0 {
        user::write(mode, &(number as u32))?;
    }
    if list != 0 {
        // Writes as many words as the program requests; all but the first are zero. As on Linux, a
        // length that wraps during rounding counts as 0.
        let words = bits.wrapping_sub(1).wrapping_add(WORD - 1) / WORD;
        if words > MOST_BITS / WORD {
            return Err(Errno::EINVAL);
        }
        for word in 0..words {
            let value = if word == 0 { u64::from(nodes.bits()) } else { 0 };
            user::write(list.wrapping_add(word * 8), &value)?;
        }
    }
    Ok(0)
}

/// A policy's mode and nodes.
fn described(policy: MemPolicy) -> (u64, NodeSet) {
    match policy {
        MemPolicy::Local => (mode::LOCAL, NodeSet::default()),
        MemPolicy::Preferred(nodes) if nodes.len() == 1 => (mode::PREFERRED, nodes),
        MemPolicy::Preferred(nodes) => (mode::PREFERRED_MANY, nodes),
        MemPolicy::Interleave(nodes) => (mode::INTERLEAVE, nodes),
        _ => (mode::DEFAULT, NodeSet::default()),
    }
}

/// Returns the node of the page at `page`, after faulting the page in if necessary.
fn node_of(page: u64) -> Result {
    let mut found = [Err(Why::EFAULT)];
    space().page_nodes(percpu::cpu(), &[page], &mut found);
    if found == [Err(Why::ENOENT)] {
        // Through the program's own mapping, because the page may have to be read.
        let _: u8 = user::read(page)?;
        space().page_nodes(percpu::cpu(), &[page], &mut found);
    }
    match found[0] {
        Ok(node) => Ok(u64::from(node)),
        // The zero page, which is of the first node.
        Err(Why::EFAULT | Why::ENOENT) => Ok(0),
        Err(why) => Err(why.into()),
    }
}
