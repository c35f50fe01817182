//! `mbind`: from which memory nodes the new pages of a VMA come.
//!
//! Without a policy a new page comes from the node that is nearest to the CPU that faults, and from another when that has no free frame. A VMA's
//! [`MemPolicy`] names other nodes. It holds for private pages that are made from then on, by stores and by reads of what was swapped out; pages
//! that are there stay where they are ([`Space::move_pages`] moves them), and so do those of objects, whose frames all their mappings share. Like any flag of a
//! VMA it decides which VMAs merge, is in `fork`'s copy, and goes with `mremap`. A fault in a VMA with a policy maps one page: the pages of
//! [prefault](crate::fault::prefault) come in runs from the CPU's own lists, which are of one node.
//!
//! A policy says where a page is made. [`Cpu::balance`] moves pages by their use alone, whatever their VMA's policy.
//!
//! A policy asks, and does not forbid: where the nodes that it names have no free frame, others serve. So Linux's `MPOL_BIND`, which
//! reclaims memory of its nodes instead, has no counterpart here.

use super::Space;
use super::vma::{Area, VmaFlags};
use super::write::NOWHERE;
use crate::addr::{PAGE_SHIFT, PAGE_SIZE, VirtRange, is_page_aligned, page_up};
use crate::error::{Errno, Error};
use crate::machine::Machine;
use crate::vm::Cpu;

/// Some of the memory nodes 0 to 7.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct NodeSet(u8);

impl NodeSet {
    /// Those whose bits are set, bit 0 for node 0.
    pub const fn of_bits(bits: u8) -> Self {
        Self(bits)
    }

    /// One bit for each node.
    pub const fn bits(self) -> u8 {
        self.0
    }

    /// Whether there is none.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Whether `node` is one of them.
    pub const fn contains(self, node: u8) -> bool {
        self.0 & Self::only(node).0 != 0
    }

    /// How many there are.
    pub const fn len(self) -> u32 {
        self.0.count_ones()
    }

    /// Them, from the lowest.
    pub fn iter(self) -> impl Iterator<Item = u8> {
        (0..u8::BITS as u8).filter(move |node| self.0 >> node & 1 != 0)
    }

    /// All but `node`.
    #[must_use]
    pub const fn without(self, node: u8) -> Self {
        Self(self.0 & !Self::only(node).0)
    }

    /// `node` alone, if it is one of those that a set can have; else none.
    #[must_use]
    pub const fn only(node: u8) -> Self {
        Self(if node < u8::BITS as u8 { 1 << node } else { 0 })
    }
}

/// Where the new pages of a VMA come from: Linux's `MPOL_*`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MemPolicy {
    /// It has no policy.
    #[default]
    Default,
    /// From the node that is nearest to the CPU. Pages come from the same nodes as by [`Default`](Self::Default), but VMAs with one and with the other do not merge.
    Local,
    /// From the cheapest of these nodes that has a free frame.
    Preferred(NodeSet),
    /// From these nodes in turns, page by page, by the page's number.
    Interleave(NodeSet),
}

impl MemPolicy {
    /// The flags of a VMA that has it.
    fn flags(self) -> VmaFlags {
        let (mode, nodes) = match self {
            Self::Default => (VmaFlags::empty(), NodeSet(0)),
            Self::Local => (VmaFlags::PREFERRED, NodeSet(0)),
            Self::Preferred(nodes) => (VmaFlags::PREFERRED, nodes),
            Self::Interleave(nodes) => (VmaFlags::INTERLEAVE, nodes),
        };
        mode | VmaFlags::from_bits_retain(u32::from(nodes.0) << VmaFlags::NODES_SHIFT)
    }

    /// The nodes that the new page at the address `page` comes from by it, if they have a free frame; none where the CPU's is meant.
    pub fn nodes_for(self, page: u64) -> NodeSet {
        match self {
            Self::Default | Self::Local => NodeSet(0),
            Self::Preferred(nodes) => nodes,
            Self::Interleave(nodes) => {
                let turn = (page >> PAGE_SHIFT) % u64::from(nodes.len().max(1));
                nodes.iter().nth(turn as usize).map_or(NodeSet(0), NodeSet::only)
            }
        }
    }

    /// The same, of those of its nodes that have `memory`; none if it names nodes, and none of these has.
    fn with(self, memory: NodeSet) -> Option<Self> {
        let both = |nodes: NodeSet| Some(NodeSet(nodes.0 & memory.0)).filter(|it| !it.is_empty());
        match self {
            Self::Default | Self::Local => Some(self),
            Self::Preferred(nodes) => both(nodes).map(Self::Preferred),
            Self::Interleave(nodes) => both(nodes).map(Self::Interleave),
        }
    }
}

impl Area {
    /// Its policy.
    pub fn mem_policy(&self) -> MemPolicy {
        let nodes = NodeSet((self.flags.bits() >> VmaFlags::NODES_SHIFT) as u8);
        if self.flags.contains(VmaFlags::INTERLEAVE) {
            MemPolicy::Interleave(nodes)
        } else if !self.flags.contains(VmaFlags::PREFERRED) {
            MemPolicy::Default
        } else if nodes.is_empty() {
            MemPolicy::Local
        } else {
            MemPolicy::Preferred(nodes)
        }
    }
}

impl<M: Machine> Cpu<'_, M> {
    /// The nodes that have memory, of those that a set can have.
    pub fn memory_nodes(&self) -> NodeSet {
        let regions = self.vm().machine().regions().iter();
        let nodes = regions.filter(|region| region.frames != 0).map(|region| region.node);
        nodes.fold(NodeSet(0), |nodes, node| NodeSet(nodes.0 | NodeSet::only(node).0))
    }
}

impl<M: Machine> Space<M> {
    /// Gives the VMAs from `addr` on, `len` bytes rounded up to pages, a policy, as `mbind` of Linux does that moves no pages.
    ///
    /// # Errors
    /// `EINVAL`: unaligned, the range wraps, or a policy that names nodes, none of which has memory (those that have none are left out). `EFAULT`: a hole, or for
    /// [`Default`](MemPolicy::Default), which skips holes, nothing mapped at all; nothing has changed then. `ENOMEM`: a VMA
    /// cannot be split; those below are changed.
    pub fn mbind(
        &self,
        cpu: &Cpu<'_, M>,
        addr: u64,
        len: u64,
        policy: MemPolicy,
    ) -> Result<(), Error> {
        self.check_vm(cpu);
        let done = self.bind(cpu, addr, len, policy);
        cpu.collect();
        let range = VirtRange::new(addr, addr.saturating_add(len));
        done.map_err(|errno| Error { operation: "mbind", range, errno })
    }

    fn bind(&self, cpu: &Cpu<'_, M>, addr: u64, len: u64, policy: MemPolicy) -> Result<(), Errno> {
        if !is_page_aligned(addr) {
            return Err(Errno::EINVAL);
        }
        // As on Linux, a length that rounds up beyond the largest number is none.
        let end = addr.checked_add(page_up(len).unwrap_or(0)).ok_or(Errno::EINVAL)?;
        let mut left = VirtRange::new(addr, end);
        if left.is_empty() {
            return Ok(());
        }
        let policy = policy.with(cpu.memory_nodes()).ok_or(Errno::EINVAL)?;
        let writing = self.write(cpu, [left, NOWHERE], PAGE_SIZE);
        let mapped: u64 =
            writing.vmas(left).map(|vma| vma.area.range.intersect(left).pages()).sum();
        if mapped < if policy == MemPolicy::Default { 1 } else { left.pages() } {
            return Err(Errno::EFAULT);
        }
        while !left.is_empty()
            && let Some(vma) = writing.vmas(left).next()
        {
            let part = vma.area.range.intersect(left);
            left.start = part.end;
            writing.set_flags(vma, part, VmaFlags::POLICY, policy.flags())?;
        }
        Ok(())
    }
}
