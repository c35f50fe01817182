//! A predictor without prediction: it maps an aligned block around every fault, as Linux maps
//! around a fault on a file.
//!
//! It serves as a baseline for the value of prediction, and as an example of a small [`Predictor`].
//! The window is the block of `2^prefault_max_order` pages that contains the faulting page, at most
//! [`MOST`] pages, without the pages whose entries are not empty.

use super::predictor::{Check, Kind, Look, MAX_ORDER, Miss, Predictor, Seen, Tally, Window};
use crate::machine::SpaceId;
use core::ops::Range;

/// The maximum number of pages of a block.
const MOST: u64 = 64;
/// The number of windows that wait for their check.
const WAITING: usize = 16;

/// The prefaulted pages of a window: bit n is page `first + n`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    kind: Kind,
    first: u64,
    prefaulted: u64,
}

/// Maps an aligned block of pages around each fault. Its checks only count.
#[derive(Clone, Debug)]
pub struct FixedWindow {
    space: SpaceId,
    waiting: [Option<Block>; WAITING],
    next: usize,
}

impl FixedWindow {
    fn check(&mut self, at: usize) -> Option<Check<Block>> {
        let record = self.waiting[at].take()?;
        Some(Check { space: self.space, record })
    }
}

impl Predictor for FixedWindow {
    const NEW: Self = Self { space: SpaceId(u64::MAX), waiting: [None; WAITING], next: 0 };

    type Defaults = ();
    type Record = Block;

    fn predict(&mut self, miss: &Miss, max_order: u8, (): &(), look: impl Look) -> Window<Block> {
        if self.space != miss.space {
            *self = Self { space: miss.space, ..Self::NEW };
        }
        let most = MOST.min(1 << max_order.min(MAX_ORDER));
        let first = miss.page & !(most - 1);
        let own = 1 << (miss.page - first);
        let empty = |n: &u64| {
            let page = first + n;
            miss.reach.contains(&page) && page != miss.page && look.at(page) == Seen::Empty
        };
        let prefaulted = (0..most).filter(empty).fold(0, |mask, n| mask | 1 << n);
        let record = (prefaulted != 0).then_some(Block { kind: miss.kind, first, prefaulted });
        Window::masked(first, prefaulted | own, record)
    }

    fn mapped(&mut self, window: &Window<Block>, mapped: Range<u64>) {
        let Some(mut block) = window.record().copied() else { return };
        let inside = |n: &u64| mapped.contains(&(block.first + n));
        block.prefaulted &= (0..MOST).filter(inside).fold(0, |mask, n| mask | 1 << n);
        if block.prefaulted != 0 {
            self.waiting[self.next] = Some(block);
            self.next = (self.next + 1) % WAITING;
        }
    }

    fn to_check(&mut self) -> Option<Check<Block>> {
        self.check(self.next)
    }

    fn to_check_in(&mut self, space: SpaceId, range: &Range<u64>) -> Option<Check<Block>> {
        let inside = |block: &Block| {
            let pages = block.first..block.first + MOST;
            pages.start < range.end && range.start < pages.end
        };
        let at = self.waiting.iter().position(|block| block.as_ref().is_some_and(inside))?;
        if space == self.space { self.check(at) } else { None }
    }

    fn extent(block: &Block) -> (Kind, Range<u64>) {
        let pages = u64::from(u64::BITS - block.prefaulted.leading_zeros());
        (block.kind, block.first..block.first + pages)
    }

    fn checked(&mut self, check: &Check<Block>, look: impl Look) -> Tally {
        let Block { first, prefaulted, .. } = check.record;
        let unused =
            (0..MOST).filter(|n| prefaulted >> n & 1 == 1 && look.at(first + n) == Seen::Unused);
        let unused = unused.count() as u32;
        Tally { used: prefaulted.count_ones() - unused, unused }
    }

    fn exit(&mut self, (): &()) {
        *self = Self::NEW;
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::addr::PAGE_SIZE;
    use crate::fault::Access;
    use crate::fault::prefault::ThreadStreams;
    use crate::knob::Setting;
    use crate::machine::CpuId;
    use crate::space::{MapFlags, Prot, Space};
    use crate::stat::Counter;
    use crate::sync::atomic::Ordering;
    use crate::table::Entry;
    use crate::table::node::{self, LAST};
    use crate::table::walk::{Reached, descend};
    use crate::testing::TestMachine;
    use crate::vm::{Cpu, Vm};

    type Fixed = TestMachine<FixedWindow>;

    fn set_accessed(cpu: &Cpu<'_, Fixed>, space: &Space<Fixed>, addr: u64) {
        let _section = cpu.section();
        // SAFETY: inside a grace section.
        let reached = unsafe { descend(cpu.vm().machine(), space.root(), addr) };
        let Reached::Last(table) = reached else { panic!("no table at {addr:#x}") };
        table[node::index(addr, LAST)].fetch_or(Entry::NONE.used().0, Ordering::Relaxed);
    }

    #[test]
    fn faults_map_aligned_blocks_and_checks_count_used_pages() {
        let vm = Vm::new(Fixed::predicting(1, 1000)).unwrap();
        vm.set(Setting::PrefaultMaxOrder(3));
        // SAFETY: the only `Cpu` of this number.
        let cpu = unsafe { vm.cpu(CpuId(0)) };
        let space = Space::new(&cpu).unwrap();
        let at = 1 << 30;
        let flags = MapFlags::PRIVATE | MapFlags::ANONYMOUS | MapFlags::FIXED;
        let pages = 21;
        space.mmap(&cpu, at, pages * PAGE_SIZE, Prot::READ | Prot::WRITE, flags).unwrap();
        let thread = ThreadStreams::new();
        let addr = |page: u64| at + page * PAGE_SIZE;
        // The second block is one page smaller, because that page is mapped, and the third block
        // ends at the end of the VMA.
        space.fault_remote(&cpu, addr(9), Access::Write).unwrap();
        for page in [5, 15, 16] {
            space.fault(&cpu, &thread, addr(page), Access::Write).unwrap();
        }
        assert!((0..pages).all(|page| space.entry_at(&cpu, addr(page)).is_mapped()));
        assert_eq!(vm.totals().get(Counter::PrefaultPage), 7 + 6 + 4);
        (0..4).for_each(|page| set_accessed(&cpu, &space, addr(page)));
        cpu.for_thread(&thread, || space.munmap(&cpu, at, pages * PAGE_SIZE)).unwrap();
        let total = |counter| vm.totals().get(counter);
        assert_eq!((total(Counter::PrefaultUsed), total(Counter::PrefaultUnused)), (4, 13));
        space.exit(&cpu);
    }
}
