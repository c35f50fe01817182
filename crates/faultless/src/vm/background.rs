//! All background work of a CPU in one call.

use super::Cpu;
use crate::machine::Machine;
use crate::reclaim::compact::Compacted;
use crate::reclaim::tiers::Balanced;

/// The work done by a call of [`Cpu::background`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Background {
    /// Frames released by [`Cpu::reclaim_ahead`].
    pub released: u64,
    /// Pages moved between fast and slow memory by [`Cpu::balance`].
    pub balanced: Balanced,
    /// Frames zeroed by [`Cpu::zero_ahead`].
    pub zeroed: u64,
    /// Free blocks of 2 MiB made by [`Cpu::compact_ahead`].
    pub compacted: Compacted,
}

impl Background {
    /// Returns whether the call released, moved and zeroed nothing. A scan of the next call may
    /// still find pages to move, so a CPU that halts makes a call from time to time.
    pub fn is_idle(&self) -> bool {
        *self == Self::default()
    }
}

impl<M: Machine> Cpu<'_, M> {
    /// Does the background work of the subsystem, the most urgent work first: serves flush
    /// requests, [evicts pages](Self::reclaim_ahead) if few frames are available,
    /// [balances](Self::balance) fast and slow memory, [zeroes](Self::zero_ahead) free frames, and
    /// [makes free blocks](Self::compact_ahead) of 2 MiB.
    ///
    /// `budget` bounds the pages promoted, the pages zeroed, and the pages moved for free blocks,
    /// together. The number of evicted pages depends on the missing frames alone, because programs
    /// wait for these frames.
    ///
    /// A kernel calls this function regularly in a kernel thread or before the return to user mode,
    /// and in the idle loop until the result [is idle](Background::is_idle). An interrupt handler
    /// must not call it, because it may interrupt a call of the same CPU (see
    /// [`Vm::cpu`](crate::Vm::cpu)). A kernel with different rates for different work makes the
    /// single calls.
    ///
    /// Not allowed inside a closure that lists areas, nor in a store's call.
    ///
    /// ```
    /// # use faultless::{Cpu, Machine};
    /// /// The idle loop of a CPU. Returns before the CPU halts.
    /// fn idle<M: Machine>(cpu: &Cpu<'_, M>, has_work: impl Fn() -> bool) {
    ///     while !has_work() && !cpu.background(256).is_idle() {}
    ///     cpu.flush_local(); // no other CPU interrupts this CPU for these translations
    /// }
    /// ```
    pub fn background(&self, budget: u64) -> Background {
        self.serve_flushes();
        let mut done = Background { released: self.reclaim_ahead(), ..Background::default() };
        let mut left = budget;
        done.balanced = self.balance(left);
        left = left.saturating_sub(done.balanced.promoted);
        done.zeroed = self.zero_ahead(usize::try_from(left).unwrap_or(usize::MAX)) as u64;
        left = left.saturating_sub(done.zeroed);
        if left != 0 {
            done.compacted = self.compact_ahead(left);
        }
        done
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::Background;
    use crate::knob::Setting;
    use crate::reclaim::compact::Compacted;
    use crate::reclaim::tests::swap::swap_on;
    use crate::reclaim::tiers::Balanced;
    use crate::space::tests::migration_flushes::read_only_pages;
    use crate::space::tests::migrations::moved;
    use crate::space::{Advice, Space};
    use crate::testing::guest::{self, AT, FIXED, P, RW, cpu, store};

    const IDLE: Background = Background {
        released: 0,
        balanced: Balanced { demoted: 0, promoted: 0, evicted: 0 },
        zeroed: 0,
        compacted: Compacted { blocks: 0, moved: 0 },
    };

    #[test]
    fn background_zeroes_within_its_budget_and_then_is_idle() {
        let vm = guest::vm(1, 4096);
        let cpu = cpu(&vm, 0);
        assert!(cpu.background(64).is_idle(), "the pool is off");
        vm.set(Setting::ZeroedPool(100));
        assert_eq!(cpu.background(64).zeroed, 64);
        assert_eq!(cpu.background(64).zeroed, 36);
        assert!(cpu.background(64).is_idle());
        assert_eq!(vm.zeroed_frames(), 100);
    }

    #[test]
    fn background_evicts_before_memory_is_short() {
        let vm = guest::vm(1, 1024);
        let cpu = cpu(&vm, 0);
        let _swap = swap_on(&cpu, 4096);
        let space = Space::new(&cpu).unwrap();
        space.mmap(&cpu, AT, 2000 * P, RW, FIXED).unwrap();
        let mut released = 0;
        for page in 0..2000 {
            store(&cpu, &space, AT + page * P, page).unwrap();
            if page % 16 == 0 {
                released += cpu.background(16).released;
            }
            assert!(vm.free_frames() > 16, "page {page}");
        }
        assert!(released >= 2000 - 1024, "{released}");
        space.exit(&cpu);
    }

    /// Memory is scattered, and too short for a compaction: frames that wait for a flush keep
    /// waiting.
    #[test]
    fn background_defers_flushes_while_memory_is_scattered() {
        let vm = guest::two_nodes(8192);
        let cpu = cpu(&vm, 0);
        let other = Space::new(&cpu).unwrap();
        guest::map(&cpu, &other, 0, 16384, RW);
        let mut pages = 0;
        while vm.free_frames() > 100 {
            store(&cpu, &other, AT + pages * P, pages).unwrap();
            pages += 1;
        }
        for page in (0..pages).step_by(9) {
            other.madvise(&cpu, AT + page * P, P, Advice::DontNeed).unwrap();
        }
        cpu.drain();
        let free = vm.free_frames();
        assert!((1600..2000).contains(&free) && cpu.free_huge_blocks() == 0, "{free}");
        let space = read_only_pages(&cpu, 8);
        space.activate(&cpu);
        assert_eq!(moved(&cpu, &space, (0, 8), 1), [Ok(1); 8]);
        let pending = vm.usage().flush_pending;
        assert_eq!((pending, cpu.background(64), vm.usage().flush_pending), (8, IDLE, 8));
        // SAFETY: the CPU uses no translations.
        unsafe { space.deactivate(&cpu) };
        [space, other].into_iter().for_each(|space| space.exit(&cpu));
    }

    #[test]
    fn background_promotes_used_pages_within_its_budget() {
        let vm = guest::two_nodes(512);
        let cpu = cpu(&vm, 0);
        let space = Space::new(&cpu).unwrap();
        space.mmap(&cpu, AT, 700 * P, RW, FIXED).unwrap();
        (0..700).for_each(|page| store(&cpu, &space, AT + page * P, page).unwrap());
        space.munmap(&cpu, AT, 300 * P).unwrap();
        cpu.drain();
        let mut promoted = 0;
        for _ in 0..64 {
            (300..700).for_each(|page| store(&cpu, &space, AT + page * P, page).unwrap());
            let done = cpu.background(16).balanced.promoted;
            assert!(done <= 16, "{done}");
            promoted += done;
        }
        assert!(promoted > 100, "{promoted}");
        space.exit(&cpu);
    }
}
