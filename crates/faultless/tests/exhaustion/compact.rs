//! Compaction with an exhausted heap: a page that cannot move stays, and isolated frames are
//! returned.

use super::guest::{AT, P, PRIVATE, RW, Small, TestVm};
use super::new_world;
use super::shim::{self, Plan};
use faultless::{CpuId, audit::audit};

/// Frames of the machine: a few blocks of 2 MiB.
const FRAMES: u32 = 2560;
/// The number of touched pages, and the spacing of the remaining pages.
const PAGES: u64 = 1800;
const KEPT: u64 = 8;

#[test]
fn compaction_without_heap_memory() {
    for only in [false, true] {
        for step in 0.. {
            let vm = TestVm::new(Small::new(FRAMES)).unwrap();
            // SAFETY: the only CPU handle.
            let cpu = unsafe { vm.cpu(CpuId(0)) };
            let world = new_world(&cpu);
            world.map(&cpu, 0, PAGES, RW, PRIVATE);
            (0..PAGES).for_each(|page| world.store(&cpu, page, page));
            for page in (0..PAGES).filter(|page| !page.is_multiple_of(KEPT)) {
                world.spaces[0].munmap(&cpu, AT + page * P, P).unwrap();
            }
            cpu.drain();
            let (free, blocks) = (vm.free_frames(), cpu.free_huge_blocks());
            let plan = if only { Plan::Only(step) } else { Plan::From(step) };
            let (done, refused) = shim::with(plan, || cpu.compact(u64::MAX));
            cpu.drain();
            assert_eq!(vm.free_frames(), free, "step {step}: frames are lost or won");
            assert_eq!(cpu.free_huge_blocks(), blocks + done.blocks, "step {step}");
            world.audit(&cpu);
            for page in (0..PAGES).step_by(KEPT as usize) {
                let mut word = [0; 8];
                world.spaces[0].read_bytes(&cpu, AT + page * P, &mut word).unwrap();
                assert_eq!(u64::from_ne_bytes(word), page, "step {step}");
            }
            world.end(&cpu);
            cpu.drain();
            audit(&cpu, &[]).unwrap_or_else(|error| panic!("{error}"));
            if refused == 0 {
                assert!(step > 2 && done.blocks > 0, "{done:?} after {step} requests");
                break;
            }
        }
    }
}
