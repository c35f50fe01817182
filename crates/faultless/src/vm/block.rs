//! Frames that a kernel allocates for its own use: kernel stacks, buffers, tables of devices.
//!
//! The frames come from the same pool as the pages of programs, so neither side needs reserved
//! memory. The census counts them separately ([`FrameUse::Kernel`]), and the limit on frames
//! includes them.

use super::{Cpu, Vm};
use crate::addr::FrameNumber;
use crate::error::OutOfMemory;
use crate::frame::{FrameUse, MAX_ORDER};
use crate::machine::Machine;
use crate::sync::order::GracePeriod;
use core::fmt;

/// A block of 2^[`order`](Self::order) frames, aligned to its size, which belongs to the kernel
/// until this value is dropped. The drop needs no CPU.
///
/// The bytes of each frame are at [`Machine::frame_bytes`]; the machine decides whether the bytes
/// of neighbouring frames are contiguous. The kernel may use the frames until the drop.
#[must_use = "the drop frees the frames"]
pub struct Block<'v, M: Machine> {
    vm: &'v Vm<M>,
    first: FrameNumber,
    order: u8,
}

impl<M: Machine> Block<'_, M> {
    /// The order of the largest block: 1 GiB.
    pub const MAX_ORDER: u8 = MAX_ORDER;

    /// Returns the number of the block's first frame.
    pub const fn first(&self) -> FrameNumber {
        self.first
    }

    /// Returns log2 of the number of frames.
    pub const fn order(&self) -> u8 {
        self.order
    }

    /// Iterates over the numbers of the frames.
    pub fn frames(&self) -> impl Iterator<Item = FrameNumber> {
        (self.first.0..self.first.0 + (1 << self.order)).map(FrameNumber)
    }
}

impl<M: Machine> fmt::Debug for Block<'_, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Block({:?}, order {})", self.first, self.order)
    }
}

impl<M: Machine> Drop for Block<'_, M> {
    fn drop(&mut self) {
        let frames = &self.vm.frames;
        if frames.meta(self.first).put_ref() != 0 {
            // Another CPU has a transient reference or pin, taken through an entry which named the
            // frame before the kernel allocated the frame. The other CPU will find the entry
            // changed, drop its reference, and free the block.
            return;
        }
        // SAFETY: the only reference was this block's. While the kernel owned the frames, no page
        // table of the subsystem contained them, so no CPU has a translation of them.
        unsafe { frames.free_unreferred(self.first) };
    }
}

impl<'v, M: Machine> Cpu<'v, M> {
    /// Allocates 2^`order` contiguous frames for the kernel, aligned to their size. Their contents
    /// are arbitrary. Before the call fails, it reclaims lazily freed pages and frees dropped
    /// spaces and objects. Not allowed inside the closure of a listing of areas.
    ///
    /// # Errors
    /// [`OutOfMemory`]: no block of this size is free, or the size exceeds
    /// [`Block::MAX_ORDER`].
    pub fn alloc_block(&self, order: u8) -> Result<Block<'v, M>, OutOfMemory> {
        self.local().order().before::<GracePeriod>();
        if order > MAX_ORDER {
            return Err(OutOfMemory);
        }
        let take = || self.vm().frames.alloc_order(self.local(), order, self);
        let frame = take().or_else(|| {
            self.wait_grace_all();
            self.flush_deferred_if_any();
            take()
        });
        let frame = frame.or_else(|| {
            self.reclaim_lazy(1 << order);
            take()
        });
        let first = self.vm().frames.publish(frame.ok_or(OutOfMemory)?, FrameUse::Kernel, 0, 0);
        Ok(Block { vm: self.vm(), first, order })
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;
    use crate::addr::PAGE_SIZE;
    use crate::audit::audit;
    use crate::knob::Setting;
    use crate::machine::CpuId;
    use crate::space::{Advice, MapFlags, Prot, Space};
    use crate::testing::TestMachine;
    use std::collections::BTreeSet;
    use std::thread;
    use std::vec::Vec;

    const AT: u64 = 1 << 30;
    const RW: Prot = Prot::READ.union(Prot::WRITE);
    const FIXED: MapFlags = MapFlags::PRIVATE.union(MapFlags::ANONYMOUS).union(MapFlags::FIXED);

    fn with_cpu(frames: u32, test: impl FnOnce(&Cpu<'_, TestMachine>)) {
        let vm = Vm::new(TestMachine::new(1, frames)).unwrap();
        // SAFETY: the only `Cpu`.
        let cpu = unsafe { vm.cpu(CpuId(0)) };
        test(&cpu);
        cpu.drain();
        let census = audit(&cpu, &[]).unwrap();
        assert_eq!((census.taken(), census.kernel), (1, 0));
    }

    #[test]
    fn blocks_are_aligned_and_exclusive() {
        with_cpu(512, |cpu| {
            let space = Space::new(cpu).unwrap();
            space.mmap(cpu, AT, 16 * PAGE_SIZE, RW, FIXED).unwrap();
            let (mut blocks, mut seen) = (Vec::new(), BTreeSet::new());
            for order in [0, 3, 0, 5, 1, 0] {
                space.write_bytes(cpu, AT + u64::from(order) * PAGE_SIZE, &[1]).unwrap();
                let block = cpu.alloc_block(order).unwrap();
                assert_eq!(block.order(), order);
                assert!(block.first().0.is_multiple_of(1 << order), "{block:?}");
                assert!(block.frames().all(|frame| seen.insert(frame)), "{block:?}");
                blocks.push(block);
            }
            let pages = (0..16).filter_map(|page| space.page_at(cpu, AT + page * PAGE_SIZE));
            assert!(pages.map(|page| page.frame).all(|frame| seen.insert(frame)));
            cpu.drain();
            let census = audit(cpu, &[&space]).unwrap();
            assert_eq!(census.kernel, 1 + 8 + 1 + 32 + 2 + 1);
            space.exit(cpu);
        });
    }

    /// Blocks can use all of the memory, lazily freed pages are reclaimed for them, and dropped
    /// blocks can be allocated again.
    #[test]
    fn blocks_can_use_all_memory() {
        with_cpu(256, |cpu| {
            let vm = cpu.vm();
            let space = Space::new(cpu).unwrap();
            space.mmap(cpu, AT, 64 * PAGE_SIZE, RW, FIXED).unwrap();
            for page in 0..64 {
                space.write_bytes(cpu, AT + page * PAGE_SIZE, &[1]).unwrap();
            }
            let all = || core::iter::from_fn(|| cpu.alloc_block(0).ok()).collect::<Vec<_>>();
            let first = all();
            assert!((170..190).contains(&first.len()), "{}", first.len());
            assert_eq!(cpu.alloc_block(0).err(), Some(OutOfMemory));
            assert!(space.write_bytes(cpu, AT, &[2]).is_ok());
            space.madvise(cpu, AT, 64 * PAGE_SIZE, Advice::Free).unwrap();
            let second = all();
            assert_eq!(second.len(), 64);
            thread::scope(|scope| {
                scope.spawn(move || drop((first, second)));
            });
            let large = cpu.alloc_block(6).unwrap();
            // `alloc_block` ends the dropped space.
            drop((large, space));
            vm.set(Setting::FrameLimit(4));
            assert_eq!(cpu.alloc_block(2).err(), Some(OutOfMemory), "the zero page is allocated");
            drop(cpu.alloc_block(1).unwrap());
            vm.set(Setting::FrameLimit(u64::MAX));
            for order in [Block::<TestMachine>::MAX_ORDER, 8, 30, 40, 255] {
                assert_eq!(cpu.alloc_block(order).err(), Some(OutOfMemory), "{order}");
            }
        });
    }

    /// A fault that copies (or an access from outside, or a pin) took a transient reference through
    /// an entry read before the frame became part of the block, and drops the reference after
    /// finding the entry changed. In the meantime the block is dropped.
    #[test]
    fn a_block_is_dropped_while_a_late_reader_has_a_reference() {
        for pin in [false, true] {
            with_cpu(256, |cpu| {
                let space = Space::new(cpu).unwrap();
                space.mmap(cpu, AT, PAGE_SIZE, RW, FIXED).unwrap();
                space.write_bytes(cpu, AT, &[1]).unwrap();
                // The other CPU has read the entry.
                let frame = space.page_at(cpu, AT).unwrap().frame;
                space.madvise(cpu, AT, PAGE_SIZE, Advice::DontNeed).unwrap();
                let block = cpu.alloc_block(0).unwrap();
                let mut blocks = std::vec![block];
                while blocks.last().unwrap().first() != frame {
                    blocks.push(cpu.alloc_block(0).unwrap());
                }
                let meta = cpu.vm().frames.meta(frame);
                assert!(if pin { meta.pin() } else { meta.get_ref_unless_zero() });
                drop(blocks);
                if pin {
                    // SAFETY: as `PinOf` does.
                    unsafe { cpu.vm().frames.unpin(frame) };
                } else {
                    // SAFETY: as `cow::copy` and `Lent` do.
                    unsafe { cpu.put_unmapped(frame) };
                }
                space.exit(cpu);
            });
        }
    }
}
