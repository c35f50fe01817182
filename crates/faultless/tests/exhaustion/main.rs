//! Failure at every step: each call and each kind of fault runs with the Nth memory request
//! refused, for every N until no request is refused.
//!
//! Three kinds of memory can be short: the heap (one request is refused, or all requests from one
//! on), frames (a limited number remains), and VMAs (a limited number is allowed). After a failure
//! no state has changed: the map, each entry, each byte, the audit (law 6) and the bytes on the
//! heap are as before. With memory, the same call then has the same effect as without a failure.
#![cfg(not(any(loom, shuttle)))]

mod calls;
mod compact;
mod faults;
mod guest;
mod huge;
mod shim;
mod stores;
mod swap;

use faultless::{
    AccessError, AnonVmaCheck, CpuId, Errno, Error, FaultError, Locking, Object, Setting, Space,
};
use guest::{Sight, Small, TestCpu, TestVm, World};
use shim::Plan;

/// Frames of the machine.
const FRAMES: u32 = 256;

/// The traces which a failed call may leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Left {
    /// No traces.
    Nothing,
    /// Tables without pages, and an anon_vma without pages. A fault makes these one after the
    /// other, and the next fault finds them.
    Ways,
    /// The same, and a file page which the fault has read from its store.
    ReadIn,
    /// Pages, as if programs had read or written there: the already populated part of a range.
    Pages,
    /// The same, and a stack that has already grown.
    Grown,
    /// Pages that are read-only until their next store.
    ReadOnly,
}

/// A call: the initial state, the call itself, and its possible traces after a failure.
pub(crate) struct Case<'c> {
    pub(crate) name: &'c str,
    pub(crate) setup: &'c dyn Fn(&TestCpu<'_>, &mut World),
    pub(crate) call: &'c dyn Fn(&TestCpu<'_>, &mut World) -> Result<(), Refused>,
    pub(crate) left: Left,
    /// The relevant policies.
    pub(crate) checks: &'c [AnonVmaCheck],
    /// Whether the call may fail.
    pub(crate) may_fail: bool,
}

/// A refusal for want of memory. Any other is an error in the test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Refused;

impl From<Error> for Refused {
    fn from(error: Error) -> Self {
        error.errno.into()
    }
}

impl From<Errno> for Refused {
    fn from(errno: Errno) -> Self {
        assert_eq!(errno, Errno::ENOMEM);
        Self
    }
}

impl From<FaultError> for Refused {
    fn from(error: FaultError) -> Self {
        assert_eq!(error, FaultError::OutOfMemory);
        Self
    }
}

impl From<AccessError> for Refused {
    fn from(error: AccessError) -> Self {
        error.error.into()
    }
}

/// The short resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Short {
    Heap(Plan),
    Frames(u64),
    Both(u64),
    Vmas(u64),
}

fn new_world(cpu: &TestCpu<'_>) -> World {
    // Capacity for the objects created by a call, so that the test itself requests no memory.
    let mut world = World { spaces: Vec::with_capacity(4), objects: Vec::with_capacity(4) };
    world.spaces.push(Space::new(cpu).unwrap());
    world.objects.push(Object::try_new(cpu, 16, 7).unwrap());
    world
}

/// The locking policy, the time of the anon_vma check, and a flag. With the flag set, all free
/// memory is zeroed in a pool, and a space is edited in place.
type Policy = (Locking, AnonVmaCheck, bool);

/// Returns the bytes on the heap, without VMAs, whose memory the subsystem keeps.
fn heap_besides_vmas(vm: &TestVm) -> i64 {
    shim::live() - vm.vma_usage().bytes as i64
}

/// Returns the number of VMAs in use. The CPU was drained.
fn used_vmas(vm: &TestVm) -> u64 {
    let usage = vm.vma_usage();
    usage.allocated - usage.free
}

/// Runs the case once. Returns whether any request was refused, whether the call failed, and the
/// final state.
fn run(case: &Case<'_>, policy: Policy, short: Option<Short>) -> (bool, bool, Sight) {
    let origin = shim::live();
    let vm = TestVm::new(Small::new(FRAMES)).unwrap();
    let start = shim::live();
    vm.set(Setting::Locking(policy.0));
    vm.set(Setting::AnonVmaCheck(policy.1));
    vm.set(Setting::ZeroedPool(if policy.2 { u64::MAX } else { 0 }));
    vm.set(Setting::EditInPlace(policy.2));
    // SAFETY: the only CPU handle.
    let cpu = unsafe { vm.cpu(CpuId(0)) };
    cpu.zero_ahead(usize::MAX);
    let mut world = new_world(&cpu);
    (case.setup)(&cpu, &mut world);
    cpu.drain();
    cpu.zero_ahead(usize::MAX);
    world.audit(&cpu);
    let (heap, free, vmas) = (heap_besides_vmas(&vm), vm.free_frames(), used_vmas(&vm));
    let before = world.sight(&cpu);
    let mut mine = heap_besides_vmas(&vm) - heap;
    let taken = vm.total_frames() - free;
    let frames_left = |left| vm.set(Setting::FrameLimit(taken + left));
    let count = world.spaces.iter().map(|space| space.map_count(&cpu)).max().unwrap() as u64;
    let plan = match short {
        None => Plan::Grant,
        Some(Short::Heap(plan)) => plan,
        Some(Short::Frames(left)) => {
            frames_left(left);
            Plan::Grant
        }
        Some(Short::Both(left)) => {
            frames_left(left);
            Plan::From(left)
        }
        Some(Short::Vmas(more)) => {
            vm.set(Setting::MaxMapCount(count + more));
            Plan::Grant
        }
    };
    let (result, refused) = shim::with(plan, || (case.call)(&cpu, &mut world));
    let failed = result.is_err();
    if failed {
        assert!(case.may_fail, "an infallible operation failed");
        cpu.drain();
        world.audit(&cpu);
        assert_eq!(used_vmas(&vm), vmas, "VMAs");
        let heap_now = heap_besides_vmas(&vm) - mine;
        let now = world.sight(&cpu);
        match case.left {
            Left::Nothing => {
                assert_eq!(now, before);
                assert_eq!((heap_now, vm.free_frames()), (heap, free), "heap bytes, free frames");
            }
            Left::Ways => assert_eq!(now, before),
            Left::ReadIn => assert_eq!(now.but_read(&before), before),
            Left::Grown => assert_eq!(now.pages_of(&before), before.clone().pages_of(&before)),
            Left::Pages => assert_eq!(now.within(&before), before),
            Left::ReadOnly => {
                assert_eq!(now.read_only(), before.clone().read_only());
                assert_eq!((heap_now, vm.free_frames()), (heap, free), "heap bytes, free frames");
            }
        }
    }
    vm.set(Setting::FrameLimit(vm.total_frames()));
    vm.set(Setting::MaxMapCount(65530));
    if failed {
        (case.call)(&cpu, &mut world).expect("the same call with memory");
    }
    cpu.drain();
    world.audit(&cpu);
    let heap_now = shim::live();
    let end = world.sight(&cpu).anywhere();
    mine += shim::live() - heap_now;
    world.end(&cpu);
    cpu.drain();
    let (slots, used) = cpu.swap_usage();
    assert_eq!(used, 0, "slots of the swap area are lost");
    if slots != 0 {
        // Frees the unused pages of the swap cache.
        cpu.reclaim(u64::MAX);
        cpu.drain();
    }
    let census = faultless::audit::audit(&cpu, &[]).unwrap_or_else(|error| panic!("{error}"));
    // The swap area stays as long as the subsystem.
    let kept = 1 + if slots == 0 { 0 } else { census.tables };
    assert_eq!(census.taken(), kept, "all but the zero page are free");
    if slots == 0 {
        assert_eq!(heap_besides_vmas(&vm) - mine, start, "bytes of the heap in the end");
    }
    assert_eq!(used_vmas(&vm), 0, "VMAs in the end");
    drop(vm);
    assert_eq!(shim::live() - mine, origin, "bytes of the heap without the subsystem");
    (refused != 0 || failed, failed, end)
}

/// Every kind of want, at every step, under every policy. Says how often the call was refused.
pub(crate) fn exhaust(case: &Case<'_>) -> u64 {
    let mut failures = 0;
    let policies = Locking::ALL.map(|locking| (locking, false));
    for (locking, pools) in policies.into_iter().chain([(Locking::Speculative, true)]) {
        for &check in case.checks {
            let policy = (locking, check, pools);
            let (_, _, expected) = run(case, policy, None);
            let kinds: [&dyn Fn(u64) -> Short; 5] = [
                &|step| Short::Heap(Plan::Only(step)),
                &|step| Short::Heap(Plan::From(step)),
                &Short::Frames,
                &Short::Both,
                &Short::Vmas,
            ];
            for kind in kinds {
                // The run ends after several steps in a row without a refusal, because a retrying
                // call has more than one refused request.
                for step in 0.. {
                    let short = kind(step);
                    let told = Told { name: case.name, policy, short };
                    let (refused, failed, end) = run(case, policy, Some(short));
                    if case.left == Left::ReadIn {
                        // Pages may have been evicted for the call's own sake.
                        let there = expected.clone().but_read(&end);
                        assert_eq!(end.but_read(&expected), there, "in the end");
                    } else {
                        assert_eq!(end, expected, "in the end");
                    }
                    core::mem::forget(told);
                    failures += u64::from(failed);
                    let counted = matches!(short, Short::Heap(_) | Short::Both(_));
                    if !refused && (counted || step > 3) {
                        break;
                    }
                    assert!(step < 200, "{}: never done", case.name);
                }
            }
        }
    }
    if case.may_fail {
        assert!(failures != 0, "{} was never refused", case.name);
    }
    failures
}

/// Prints the current case when a check panics.
struct Told<'c> {
    name: &'c str,
    policy: Policy,
    short: Short,
}

impl Drop for Told<'_> {
    fn drop(&mut self) {
        eprintln!("in {}, {:?}, {:?}", self.name, self.policy, self.short);
    }
}
