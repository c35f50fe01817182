//! Predictors that answer nonsense.

use crate::addr::{FrameNumber, PAGE_SHIFT, PAGE_SIZE};
use crate::audit::audit;
use crate::fault::Access;
use crate::fault::prefault::predictor::Tally;
use crate::fault::prefault::{Check, Kind, Miss, Predictor, Seen, ThreadStreams, Window};
use crate::knob::{Locking, Setting};
use crate::machine::{CpuId, Invalidate, Machine, MemoryRegion, SpaceId};
use crate::space::{MapFlags, Prot, Space};
use crate::table::Entry;
use crate::table::format::USER_END;
use crate::testing::TestMachine;
use crate::vm::{Cpu, Vm};
use core::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

const AT: u64 = 1 << 30;
const P: u64 = PAGE_SIZE;
const RW: Prot = Prot::READ.union(Prot::WRITE);
const FIXED: MapFlags = MapFlags::PRIVATE.union(MapFlags::ANONYMOUS).union(MapFlags::FIXED);

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
