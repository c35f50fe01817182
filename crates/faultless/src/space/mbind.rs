//! `mbind`: the memory nodes for new pages of a VMA.
//!
//! Without a policy a new page comes from the node nearest to the faulting CPU, and from another
//! node if this one has no free frame. A VMA's [`MemPolicy`] names other nodes. It applies to
//! private pages made from then on, by stores and by swapping in. Existing pages stay in place
//! ([`Space::move_pages`] moves them), as do pages of objects, whose frames are common to all
//! mappings. Like any flag of a VMA the policy decides which VMAs merge, is copied by `fork`, and
//! moves with `mremap`. A fault in a VMA with a policy maps one page: the pages of
//! [prefault](crate::fault::prefault) come in runs from the CPU's own lists, which belong to one
//! node.
//!
//! A policy determines where a page is made. [`Cpu::balance`] moves pages by their use alone,
//! regardless of their VMA's policy.
//!
//! A policy is a preference: if its nodes have no free frame, other nodes are used. So Linux's
//! `MPOL_BIND`, which reclaims memory of its nodes instead, has no equivalent here.

use super::Space;
use super::area::{Area, VmaFlags};
use super::write::NOWHERE;
use crate::addr::{PAGE_SHIFT, PAGE_SIZE, VirtRange, is_page_aligned, page_up};
use crate::error::{Errno, Error};
use crate::machine::Machine;
use crate::vm::Cpu;

/// A set of the memory nodes 0 to 7.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct NodeSet(u8);

impl NodeSet {
    /// Returns the nodes whose bits are set, bit 0 for node 0.
    pub const fn of_bits(bits: u8) -> Self {
        Self(bits)
    }

    /// Returns the set with one bit for each node.
    pub const fn bits(self) -> u8 {
        self.0
    }

    /// Returns whether the set is empty.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Returns whether `node` is in the set.
    pub const fn contains(self, node: u8) -> bool {
        self.0 & Self::only(node).0 != 0
    }

    /// Returns the number of nodes.
    pub const fn len(self) -> u32 {
        self.0.count_ones()
    }

    /// Iterates over the nodes, from the lowest.
    pub fn iter(self) -> impl Iterator<Item = u8> {
        (0..u8::BITS as u8).filter(move |node| self.0 >> node & 1 != 0)
    }

    /// Returns the set without `node`.
    #[must_use]
    pub const fn without(self, node: u8) -> Self {
        Self(self.0 & !Self::only(node).0)
    }

    /// Returns the set of `node` alone, if a set can contain it; otherwise the empty set.
    #[must_use]
    pub const fn only(node: u8) -> Self {
        Self(if node < u8::BITS as u8 { 1 << node } else { 0 })
    }
}

/// The source of new pages of a VMA: Linux's `MPOL_*`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MemPolicy {
    /// No policy.
    #[default]
    Default,
    /// From the node nearest to the CPU. Pages come from the same nodes as with
    /// [`Default`](Self::Default), but VMAs with these two policies do not merge.
    Local,
    /// From the cheapest of these nodes with a free frame.
    Preferred(NodeSet),
    /// From these nodes in turn, page by page, by the page's number.
    Interleave(NodeSet),
}

impl MemPolicy {
    /// Returns the flags of a VMA with this policy.
    fn flags(self) -> VmaFlags {
        let (mode, nodes) = match self {
            Self::Default => (VmaFlags::empty(), NodeSet(0)),
            Self::Local => (VmaFlags::PREFERRED, NodeSet(0)),
            Self::Preferred(nodes) => (VmaFlags::PREFERRED, nodes),
            Self::Interleave(nodes) => (VmaFlags::INTERLEAVE, nodes),
        };
        mode | VmaFlags::from_bits_retain(u32::from(nodes.0) << VmaFlags::NODES_SHIFT)
    }

    /// Returns the nodes for a new page at the address `page`, if they have a free frame; the empty
    /// set means the CPU's nearest node.
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

    /// Returns the policy restricted to its nodes with `memory`; `None` if it names nodes, and none
    /// of them has memory.
    fn with(self, memory: NodeSet) -> Option<Self> {
        let both = |nodes: NodeSet| Some(NodeSet(nodes.0 & memory.0)).filter(|it| !it.is_empty());
        match self {
            Self::Default | Self::Local => Some(self),
            Self::Preferred(nodes) => both(nodes).map(Self::Preferred),
            Self::Interleave(nodes) => both(nodes).map(Self::Interleave),
        }
    }
}

impl Area<'_> {
    /// Returns the policy of the area.
    pub const fn mem_policy(self) -> MemPolicy {
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
    /// Returns the nodes with memory, as far as a set can contain them.
    pub fn memory_nodes(&self) -> NodeSet {
        let regions = self.vm().machine().regions().iter();
        let nodes = regions.filter(|region| region.frames != 0).map(|region| region.node);
        nodes.fold(NodeSet(0), |nodes, node| NodeSet(nodes.0 | NodeSet::only(node).0))
    }
}

impl<M: Machine> Space<M> {
    /// Sets the policy of the VMAs from `addr`, `len` bytes rounded up to pages, like Linux's
    /// `mbind` without moving pages.
    ///
    /// # Errors
    /// `EINVAL`: unaligned, the range wraps, or a policy whose nodes all lack memory (nodes without
    /// memory are ignored). `EFAULT`: a hole, or for [`Default`](MemPolicy::Default), which skips
    /// holes, no mapping at all; nothing has changed then. `ENOMEM`: a VMA cannot be split; the
    /// VMAs below are changed.
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
        // As on Linux, a length that rounds up beyond the largest number counts as 0.
        let end = addr.checked_add(page_up(len).unwrap_or(0)).ok_or(Errno::EINVAL)?;
        let mut left = VirtRange::new(addr, end);
        if left.is_empty() {
            return Ok(());
        }
        let policy = policy.with(cpu.memory_nodes()).ok_or(Errno::EINVAL)?;
        let writing = self.write(cpu, [left, NOWHERE], PAGE_SIZE);
        let mapped: u64 = writing.vmas(left).map(|vma| vma.range().intersect(left).pages()).sum();
        if mapped < if policy == MemPolicy::Default { 1 } else { left.pages() } {
            return Err(Errno::EFAULT);
        }
        while !left.is_empty()
            && let Some(vma) = writing.vmas(left).next()
        {
            let part = vma.range().intersect(left);
            left.start = part.end;
            writing.set_flags(vma, part, VmaFlags::POLICY, policy.flags())?;
        }
        Ok(())
    }
}
