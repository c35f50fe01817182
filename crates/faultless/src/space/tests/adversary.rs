//! What a CPU is told of a hole before the unmapping that made it is flushed; and predictors that answer nonsense.

use super::guest::{self, cpu, store};
use crate::addr::{FrameNumber, PAGE_SHIFT, PAGE_SIZE, VirtRange};
use crate::audit::audit;
use crate::error::Errno;
use crate::fault::prefault::predictor::Tally;
use crate::fault::prefault::{Check, Kind, Miss, Predictor, Seen, ThreadStreams, Window};
use crate::fault::{Access, FaultError};
use crate::knob::{Locking, Setting};
use crate::machine::{CpuId, Invalidate, Machine, MemoryRegion, SpaceId};
use crate::space::{MapFlags, Prot, Space};
use crate::table::Entry;
use crate::table::format::USER_END;
use crate::testing::TestMachine;
use crate::vm::{Cpu, Vm};
use core::ops::Range;
use core::sync::atomic::{AtomicBool, Ordering};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;

const AT: u64 = 1 << 30;
const P: u64 = PAGE_SIZE;
const RW: Prot = Prot::READ.union(Prot::WRITE);
const FIXED: MapFlags = MapFlags::PRIVATE.union(MapFlags::ANONYMOUS).union(MapFlags::FIXED);

/// CPU 0 unmaps a page that CPU 1, which runs the space and answers no request meanwhile, may still use. `ask` is what CPU 1
/// does as soon as the tree has the hole. It must not return before CPU 1 has flushed.
fn flushed_before_told(
    locking: Locking,
    above: bool,
    ask: impl Fn(&Cpu<'_, TestMachine>, &Space<TestMachine>) + Sync,
) {
    let vm = guest::vm(2, 128);
    vm.set(Setting::Locking(locking));
    let cpus = [cpu(&vm, 0), cpu(&vm, 1)];
    let space = Space::new(&cpus[0]).unwrap();
    space.mmap(&cpus[0], AT, P, RW, FIXED).unwrap();
    if above {
        space.mmap(&cpus[0], AT + 64 * P, P, RW, FIXED).unwrap();
    }
    store(&cpus[0], &space, AT, 1).unwrap();
    space.activate(&cpus[0]);
    space.activate(&cpus[1]);
    // The space is shared from now on.
    assert!(space.is_mapped(&cpus[1], VirtRange::page(AT)));
    vm.machine().invalidated.lock().unwrap().clear();
    let [first, second] = cpus;
    let done = AtomicBool::new(false);
    let mut flushed = false;
    thread::scope(|scope| {
        let (space, done) = (&space, &done);
        scope.spawn(move || {
            space.munmap(&first, AT, P).unwrap();
            done.store(true, Ordering::Release);
        });
        while space.is_mapped(&second, VirtRange::page(AT)) {
            thread::yield_now();
        }
        // The other thread waits for this CPU whatever it was told.
        let told = catch_unwind(AssertUnwindSafe(|| ask(&second, space)));
        let all = vm.machine().invalidated.lock().unwrap();
        flushed = all.iter().any(|(cpu, ..)| *cpu == CpuId(1));
        drop(all);
        while !done.load(Ordering::Acquire) {
            second.serve_flushes();
            thread::yield_now();
        }
        told.unwrap();
    });
    assert!(flushed, "CPU 1 was told of the hole, and has not flushed yet ({locking:?}, {above})");
}

const NOTHING: FaultError = FaultError::Segv { mapped: false };

#[test]
fn a_fault_in_a_hole_below_a_mapping_is_told_after_the_flush() {
    for locking in Locking::ALL {
        flushed_before_told(locking, true, |cpu, space| {
            assert_eq!(space.fault(cpu, AT, Access::Read), Err(NOTHING));
        });
    }
}

/// No stack is looked for where nothing is mapped above, and so no lock is waited for.
#[test]
fn a_fault_in_a_hole_above_everything_is_told_after_the_flush() {
    for locking in Locking::ALL {
        flushed_before_told(locking, false, |cpu, space| {
            assert_eq!(space.fault(cpu, AT, Access::Read), Err(NOTHING));
        });
    }
}

#[test]
fn an_access_from_outside_is_told_of_a_hole_after_the_flush() {
    for locking in Locking::ALL {
        flushed_before_told(locking, false, |cpu, space| {
            // Under a baseline's lock the page is there until its entry is empty.
            let error = loop {
                if let Err(error) = space.read_bytes(cpu, AT, &mut [0]) {
                    break error;
                }
            };
            assert_eq!(error.error, NOTHING);
        });
    }
}

#[test]
fn mincore_is_told_of_a_hole_after_the_flush() {
    for locking in Locking::ALL {
        flushed_before_told(locking, false, |cpu, space| {
            let told = space.mincore(cpu, AT, P, |_| {});
            assert_eq!(told.map_err(|error| error.errno), Err(Errno::ENOMEM));
        });
    }
}

/// What the predictor of [`Odd`] does.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Whim {
    /// It panics when it is asked for a window.
    Panics,
    /// Its windows are the whole table.
    Outside,
    /// It wants pages of the kernel's half checked.
    Kernel,
    None,
}

std::thread_local! {
    static WHIM: core::cell::Cell<Whim> = const { core::cell::Cell::new(Whim::None) };
}

#[derive(Debug)]
struct Silly(bool);

impl Predictor for Silly {
    const NEW: Self = Self(false);
    type Defaults = ();
    type Record = ();

    fn predict(&mut self, miss: &Miss, _: u8, (): &(), _: impl FnMut(u64) -> Seen) -> Window<()> {
        match WHIM.get() {
            Whim::Panics => panic!("a predictor panics"),
            Whim::Outside => {
                let first = miss.page & !511;
                Window::strided(first..first + 512, 1, ())
            }
            Whim::Kernel | Whim::None => Window::single(miss.page),
        }
    }
    fn mapped(&mut self, _: &Window<()>, _: Range<u64>) {}
    fn to_check(&mut self) -> Option<Check<()>> {
        let kernel = WHIM.get() == Whim::Kernel && !core::mem::replace(&mut self.0, true);
        kernel.then_some(Check { space: SpaceId(1), record: () })
    }
    fn to_check_in(&mut self, _: SpaceId, _: &Range<u64>) -> Option<Check<()>> {
        None
    }
    fn extent((): &()) -> (Kind, Range<u64>) {
        let first = USER_END.next_power_of_two() >> PAGE_SHIFT;
        (Kind::Read, first..first + 1)
    }
    fn checked(&mut self, _: &Check<()>, mut look: impl FnMut(u64) -> Seen) -> Tally {
        assert_eq!(look(Self::extent(&()).1.start), Seen::Empty, "an entry of the kernel's");
        Tally::default()
    }
    fn leave(&mut self, (): &()) {}
}

/// A machine with that predictor. A wait without an end panics.
struct Odd(TestMachine);

// SAFETY: as of the machine within.
unsafe impl Machine for Odd {
    type Predictor = Silly;

    fn cpus(&self) -> usize {
        self.0.cpus()
    }
    fn regions(&self) -> &[MemoryRegion] {
        self.0.regions()
    }
    fn frame_bytes(&self, frame: FrameNumber) -> *mut u8 {
        assert_ne!(frame, FrameNumber(77_777), "the subsystem follows an entry of the kernel's");
        self.0.frame_bytes(frame)
    }
    fn invalidate(&self, cpu: CpuId, space: SpaceId, what: Invalidate) {
        self.0.invalidate(cpu, space, what);
    }
    fn invalidate_all(&self, cpu: CpuId) {
        self.0.invalidate_all(cpu);
    }
    fn interrupt(&self, cpu: CpuId) {
        self.0.interrupt(cpu);
    }
    fn relax(&self, looks: u32) {
        assert!(looks < 100_000, "a wait without an end");
    }
}

fn odd(locking: Locking, test: impl Fn(&Cpu<'_, Odd>, &Space<Odd>, &ThreadStreams<Silly>)) {
    let vm = Vm::new(Odd(TestMachine::new(1, 1100))).unwrap();
    vm.set(Setting::Locking(locking));
    // An owner write-locks no VMA.
    vm.set(Setting::EditInPlace(false));
    // SAFETY: the only CPU, once.
    let cpu = unsafe { vm.cpu(CpuId(0)) };
    let space = Space::new(&cpu).unwrap();
    space.mmap(&cpu, AT, 8 * P, RW, FIXED).unwrap();
    test(&cpu, &space, &ThreadStreams::new());
    space.munmap(&cpu, AT, 8 * P).unwrap();
    space.exit(&cpu);
    cpu.drain();
    audit(&cpu, &[]).unwrap();
}

/// Reproduces only where debug assertions are off that pages are mapped outside of the VMA; where they are on, the fault panics.
#[test]
fn a_window_outside_of_its_reach_maps_nothing_there() {
    WHIM.set(Whim::Outside);
    for locking in Locking::ALL {
        odd(locking, |cpu, space, thread| {
            space.fault_of(cpu, thread, AT + P, Access::Write).unwrap();
            assert!(space.translate(cpu, AT + P).is_some());
            assert_eq!(space.translate(cpu, AT + 8 * P), None, "a page where nothing is mapped");
        });
    }
}

#[test]
fn a_predictor_that_panics_leaves_nothing_locked() {
    WHIM.set(Whim::Panics);
    for locking in Locking::ALL {
        odd(locking, |cpu, space, thread| {
            let fault = || space.fault_of(cpu, thread, AT + P, Access::Write);
            assert!(catch_unwind(AssertUnwindSafe(fault)).is_err());
        });
    }
}

/// The upper half of the root table is the kernel's, and the subsystem neither reads nor changes it.
#[test]
fn a_check_of_the_kernels_half_reads_nothing_there() {
    WHIM.set(Whim::Kernel);
    odd(Locking::Speculative, |cpu, space, thread| {
        let root = cpu.vm().machine().frame_bytes(space.root()).cast::<u64>();
        // SAFETY: the kernel's half of the root table; no CPU runs the space.
        unsafe { root.add(256).write(Entry::table(FrameNumber(77_777)).0) };
        space.fault_of(cpu, thread, AT + P, Access::Write).unwrap();
        // SAFETY: as above.
        unsafe { root.add(256).write(0) };
    });
}
