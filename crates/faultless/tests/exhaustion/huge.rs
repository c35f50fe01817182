//! Huge leaves: if no frames for a folio, or for the table of a split, are available, base pages
//! are mapped, or no page until the next access. No contents are lost.

use super::guest::{P, Small, TestCpu, TestVm, World};
use super::shim::{self, Plan};
use faultless::{
    Access, Advice, Backing, BackingStore, CpuId, Errno, FaultError, FaultKind, MapFlags, Object,
    Prot, ReadRun, Setting, Space, StoreError, WriteRun,
};

/// Pages of a folio.
const F: u64 = 512;
const AT: u64 = 1 << 30;

/// A file of one folio. Page `n` starts with the word `n + 1`. The file needs no heap.
#[derive(Debug)]
struct Numbers;

impl BackingStore for Numbers {
    fn len(&self) -> u64 {
        F * P
    }

    fn preferred_pages(&self) -> usize {
        8
    }

    fn read(&self, run: &mut ReadRun) -> Result<usize, StoreError> {
        for (index, page) in (run.first() + 1..).zip(run.memory()) {
            page.fill(0);
            page[..8].copy_from_slice(&index.to_ne_bytes());
        }
        Ok(run.bytes())
    }

    fn write(&self, _: &WriteRun<'_>) -> Result<(), StoreError> {
        panic!("no store happened");
    }

    fn set_len(&self, _: u64) -> Result<(), Errno> {
        Err(Errno::EIO)
    }

    fn punch(&self, _: core::ops::Range<u64>) -> Result<(), Errno> {
        Err(Errno::EIO)
    }
}

/// Makes `call` with the text mapped, and with memory refused in each way at each step. `before`
/// runs with memory. The call may fail with out of memory.
fn exhaust_huge(
    before: &dyn Fn(&TestCpu<'_>, &World),
    call: &dyn Fn(&TestCpu<'_>, &World) -> Result<(), FaultError>,
) {
    let ways: [&dyn Fn(u64) -> (Plan, u64); 3] =
        [&|step| (Plan::Only(step), u64::MAX), &|step| (Plan::From(step), u64::MAX), &|step| {
            (Plan::Grant, step)
        }];
    for way in ways {
        for step in 0.. {
            let (plan, frames) = way(step);
            let vm = TestVm::new(Small::new(1800)).unwrap();
            // SAFETY: the only CPU handle.
            let cpu = unsafe { vm.cpu(CpuId(0)) };
            let mut world = World { spaces: Vec::new(), objects: Vec::new() };
            world.spaces.push(Space::new(&cpu).unwrap());
            world.objects.push(Object::of_store(&cpu, std::sync::Arc::new(Numbers), 7).unwrap());
            let backing = Backing { object: &world.objects[0], first: 0, may_write: false };
            let (prot, flags) = (Prot::READ | Prot::EXEC, MapFlags::PRIVATE | MapFlags::FIXED);
            world.spaces[0].mmap_object(&cpu, AT, F * P, prot, flags, backing).unwrap();
            before(&cpu, &world);
            cpu.drain();
            if frames != u64::MAX {
                let taken = vm.total_frames() - vm.free_frames();
                vm.set(Setting::FrameLimit(taken + frames));
            }
            let (done, refused) = shim::with(plan, || call(&cpu, &world));
            assert!(matches!(done, Ok(()) | Err(FaultError::OutOfMemory)), "{done:?}");
            vm.set(Setting::FrameLimit(u64::MAX));
            cpu.drain();
            world.audit(&cpu);
            for page in 0..F {
                let mut word = [0; 8];
                world.spaces[0].read_bytes(&cpu, AT + page * P, &mut word).unwrap();
                assert_eq!(u64::from_ne_bytes(word), page + 1, "page {page}, step {step}");
            }
            cpu.drain();
            world.audit(&cpu);
            world.end(&cpu);
            let enough = frames != u64::MAX && frames > F + 200 && done.is_ok();
            if enough || frames == u64::MAX && refused == 0 {
                break;
            }
        }
    }
}

fn fetch(cpu: &TestCpu<'_>, world: &World) -> Result<(), FaultError> {
    let kind = world.spaces[0].fault_remote(cpu, AT + 9 * P, Access::Execute)?;
    assert!(matches!(kind, FaultKind::Huge | FaultKind::Shared | FaultKind::Spurious), "{kind:?}");
    Ok(())
}

#[test]
fn first_fetches() {
    exhaust_huge(&|_, _| (), &fetch);
    let cached = |cpu: &TestCpu<'_>, world: &World| {
        assert_eq!(world.objects[0].read_page(cpu, 3, |_| ()), Ok(()));
    };
    exhaust_huge(&cached, &fetch);
}

#[test]
fn splits_and_collapses() {
    let mapped = |cpu: &TestCpu<'_>, world: &World| fetch(cpu, world).unwrap();
    let advise = |pages: u64, advice: Advice| {
        move |cpu: &TestCpu<'_>, world: &World| {
            let done = world.spaces[0].madvise(cpu, AT, pages * P, advice);
            let errno = done.map_err(|error| error.errno);
            assert!(matches!(errno, Ok(()) | Err(Errno::ENOMEM | Errno::EAGAIN)), "{errno:?}");
            Ok(())
        }
    };
    exhaust_huge(&mapped, &advise(3, Advice::DontNeed));
    let split = |cpu: &TestCpu<'_>, world: &World| {
        fetch(cpu, world).unwrap();
        world.spaces[0].madvise(cpu, AT, 3 * P, Advice::DontNeed).unwrap();
    };
    exhaust_huge(&split, &advise(F, Advice::Collapse));
    exhaust_huge(&|_, _| (), &advise(F, Advice::Collapse));
}
