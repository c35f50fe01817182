//! Predictors that return nonsense.

use crate::addr::{FrameNumber, PAGE_SHIFT};
use crate::audit::{audit, audit_with};
use crate::fault::Access;
use crate::fault::prefault::predictor::Tally;
use crate::fault::prefault::{Check, Kind, Look, Miss, Predictor, Seen, ThreadStreams, Window};
use crate::file::Object;
use crate::knob::{Locking, Setting};
use crate::machine::{CpuId, Machine, SpaceId};
use crate::space::{Prot, Space};
use crate::table::Entry;
use crate::table::format::USER_END;
use crate::testing::TestMachine;
use crate::testing::guest::{AT, FIXED, P, RW};
use crate::testing::store::Memory;
use crate::vm::{Cpu, Vm};
use core::cell::{Cell, RefCell};
use core::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::vec::Vec;

/// The behaviour of the predictor of [`Odd`].
#[derive(Clone, Copy, Debug, PartialEq)]
enum Whim {
    /// The given function panics.
    Panics(Panics),
    /// The windows consist of these pages, relative to the faulting page, at the given distance.
    Strided(i64, i64, u8),
    /// The windows consist of the pages before and after the faulting page.
    Around,
    /// The predictor requests a check of pages in the kernel's half.
    Kernel,
    /// The predictor requests a check of pages of another space.
    Elsewhere,
    None,
}

/// A function that panics.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Panics {
    Predict,
    Mapped,
    ToCheck,
    Checked,
    ToCheckIn,
    Leave,
}

/// Panics if a panic is planted for this function.
fn panics(here: Panics) {
    assert_ne!(WHIM.get(), Whim::Panics(here), "a predictor panics");
}

std::thread_local! {
    static WHIM: Cell<Whim> = const { Cell::new(Whim::None) };
    /// The number of checks made.
    static CHECKS: Cell<u32> = const { Cell::new(0) };
    /// The page of each fault, and the bounds for its window.
    static MISSES: RefCell<Vec<(u64, Range<u64>)>> = const { RefCell::new(Vec::new()) };
    /// Another thread, which acts at the first query of the predictor, and signals its end.
    static OTHER: RefCell<Option<(Sender<()>, Receiver<()>)>> = const { RefCell::new(None) };
}

#[derive(Debug)]
struct Silly(bool);

impl Predictor for Silly {
    const NEW: Self = Self(false);
    type Defaults = ();
    type Record = ();

    fn predict(&mut self, miss: &Miss, _: u8, (): &(), _: impl Look) -> Window<()> {
        panics(Panics::Predict);
        MISSES.with_borrow_mut(|misses| misses.push((miss.page, miss.reach.clone())));
        match WHIM.get() {
            Whim::Strided(from, to, stride) => {
                let page = |offset| miss.page.wrapping_add_signed(offset);
                Window::strided(page(from)..page(to), stride, ())
            }
            Whim::Around => Window::masked(miss.page - 1, 0b101, None),
            Whim::Panics(_) => Window::strided(miss.page..miss.page + 1, 1, ()),
            Whim::Kernel | Whim::Elsewhere | Whim::None => Window::single(miss.page),
        }
    }
    fn mapped(&mut self, _: &Window<()>, _: Range<u64>) {
        panics(Panics::Mapped);
    }
    fn to_check(&mut self) -> Option<Check<()>> {
        panics(Panics::ToCheck);
        if let Some((ask, done)) = OTHER.take() {
            ask.send(()).unwrap();
            done.recv().unwrap();
        }
        let space = match WHIM.get() {
            Whim::Kernel | Whim::Panics(Panics::Checked) => SpaceId(1),
            Whim::Elsewhere => SpaceId(2),
            _ => return None,
        };
        (!core::mem::replace(&mut self.0, true)).then_some(Check { space, record: () })
    }
    fn to_check_in(&mut self, _: SpaceId, _: &Range<u64>) -> Option<Check<()>> {
        panics(Panics::ToCheckIn);
        None
    }
    fn extent((): &()) -> (Kind, Range<u64>) {
        let first = USER_END.next_power_of_two() >> PAGE_SHIFT;
        (Kind::Read, first..first + 1)
    }
    fn checked(&mut self, _: &Check<()>, look: impl Look) -> Tally {
        panics(Panics::Checked);
        assert_eq!(WHIM.get(), Whim::Kernel, "a check of another space");
        CHECKS.set(CHECKS.get() + 1);
        assert_eq!(look.at(Self::extent(&()).1.start), Seen::Empty, "an entry of the kernel's");
        Tally::default()
    }
    fn exit(&mut self, (): &()) {
        panics(Panics::Leave);
    }
}

/// A machine with this predictor.
type Odd = TestMachine<Silly>;

fn odd(locking: Locking, test: impl Fn(&Cpu<'_, Odd>, &Space<Odd>, &ThreadStreams<Silly>)) {
    let mut machine = Odd::predicting(1, 1100);
    machine.most_looks = 100_000;
    let vm = Vm::new(machine).unwrap();
    vm.set(Setting::Locking(locking));
    // An owner write-locks no VMA.
    vm.set(Setting::EditInPlace(false));
    // SAFETY: the only CPU, once.
    let cpu = unsafe { vm.cpu(CpuId(0)) };
    let space = Space::new(&cpu).unwrap();
    space.mmap(&cpu, AT + 4 * P, 8 * P, RW, FIXED).unwrap();
    test(&cpu, &space, &ThreadStreams::new());
    space.munmap(&cpu, AT + 4 * P, 8 * P).unwrap();
    space.exit(&cpu);
    cpu.drain();
    audit(&cpu, &[]).unwrap();
}

/// A window that leaves the VMA and its table, or excludes the faulting page, is ignored.
#[test]
fn an_unsuitable_window_is_ignored() {
    let cases = [
        (Whim::Strided(-1, 2, 1), 3),
        (Whim::Strided(-4, 4, 1), 8),
        (Whim::Strided(-5, 1, 1), 1),
        (Whim::Strided(0, 5, 1), 1),
        (Whim::Strided(-4, 508, 1), 1),
        (Whim::Strided(-2, 0, 1), 1),
        (Whim::Strided(1, 3, 1), 1),
        (Whim::Strided(-1, 2, 2), 1),
        (Whim::Around, 1),
    ];
    for (locking, (whim, pages)) in
        Locking::ALL.into_iter().flat_map(|it| cases.map(|case| (it, case)))
    {
        WHIM.set(whim);
        odd(locking, |cpu, space, thread| {
            // Other VMAs on both sides.
            for page in [0, 12] {
                space.mmap(cpu, AT + page * P, 4 * P, Prot::READ, FIXED).unwrap();
            }
            space.fault(cpu, thread, AT + 8 * P, Access::Write).unwrap();
            let mapped = |page: &u64| space.page_at(cpu, AT + page * P).is_some();
            assert!(mapped(&8), "{whim:?}");
            assert_eq!((0..512).filter(mapped).count(), pages, "{whim:?}, {locking:?}");
            space.munmap(cpu, AT, 16 * P).unwrap();
        });
    }
}

/// Each function of a predictor panics once. Then nothing is locked, and the same call succeeds.
#[test]
fn a_panicking_predictor_leaves_no_lock_held() {
    type Call<'c> = &'c dyn Fn(&Cpu<'_, Odd>, &Space<Odd>, &ThreadStreams<Silly>);
    let fault: Call<'_> = &|cpu, space, thread| {
        space.fault(cpu, thread, AT + 8 * P, Access::Write).unwrap();
    };
    let munmap: Call<'_> = &|cpu, space, thread| {
        cpu.for_thread(thread, || space.munmap(cpu, AT + 8 * P, P)).unwrap();
    };
    let leave: Call<'_> = &|cpu, space, thread| space.exit_thread(cpu, thread);
    let calls = [
        (Panics::Predict, fault),
        (Panics::Mapped, fault),
        (Panics::ToCheck, fault),
        (Panics::Checked, fault),
        (Panics::ToCheckIn, munmap),
        (Panics::ToCheckIn, leave),
        (Panics::Leave, leave),
    ];
    for (locking, (here, call)) in
        Locking::ALL.into_iter().flat_map(|it| calls.map(|case| (it, case)))
    {
        odd(locking, |cpu, space, thread| {
            WHIM.set(Whim::Panics(here));
            let panics = catch_unwind(AssertUnwindSafe(|| call(cpu, space, thread)));
            assert!(panics.is_err(), "{here:?}, {locking:?}");
            assert!(cpu.thread().is_none(), "{here:?}, {locking:?}");
            WHIM.set(Whim::None);
            call(cpu, space, thread);
            space.fault(cpu, thread, AT + 8 * P, Access::Read).ok();
            space.fault(cpu, thread, AT + 9 * P, Access::Write).unwrap();
        });
    }
}

/// The predictor of an open file panics once. The next read reads the page.
#[test]
fn a_panicking_predictor_of_an_open_file_leaves_no_state() {
    for here in [Panics::Predict, Panics::Mapped, Panics::ToCheck] {
        let vm = Vm::new(Odd::predicting(1, 100)).unwrap();
        // SAFETY: the only CPU, once.
        let cpu = unsafe { vm.cpu(CpuId(0)) };
        let file = Object::of_store(&cpu, Memory::new(16, 0), 77).unwrap();
        let reader = ThreadStreams::new();
        let read = || file.read_in_sequence(&cpu, &reader, 5..6);
        WHIM.set(Whim::Panics(here));
        assert!(catch_unwind(AssertUnwindSafe(read)).is_err(), "{here:?}");
        WHIM.set(Whim::None);
        read().unwrap();
        assert!(file.has_page(&cpu, 5));
        cpu.drain();
        audit_with(&cpu, &[], &[&file]).unwrap();
        Object::release(file, &cpu);
    }
}

/// The upper half of the root table belongs to the kernel. The subsystem neither reads nor changes
/// this half.
#[test]
fn a_check_does_not_read_the_kernel_half() {
    WHIM.set(Whim::Kernel);
    odd(Locking::Speculative, |cpu, space, thread| {
        let root = cpu.vm().machine().frame_bytes(space.root()).cast::<u64>();
        // SAFETY: the kernel's half of the root table; no CPU runs the space.
        unsafe { root.add(256).write(Entry::table(FrameNumber(77_777)).0) };
        space.fault(cpu, thread, AT + 8 * P, Access::Write).unwrap();
        // SAFETY: as above.
        unsafe { root.add(256).write(0) };
        assert_eq!(CHECKS.get(), 1);
    });
}

/// The thread has left the other space, and its record does not apply to this space.
#[test]
fn a_check_of_another_space_is_ignored() {
    WHIM.set(Whim::Elsewhere);
    odd(Locking::Speculative, |cpu, space, thread| {
        space.fault(cpu, thread, AT + 8 * P, Access::Write).unwrap();
        assert_eq!(CHECKS.get(), 0);
    });
}

/// The windows of an open file must stay in the file, and in the range of one table. The window
/// includes the missing page, even if another CPU has just truncated the file.
#[test]
fn a_file_window_ends_with_the_file_or_the_table() {
    let vm = Vm::new(Odd::predicting(2, 1100)).unwrap();
    // SAFETY: the first CPU, once.
    let cpu = unsafe { vm.cpu(CpuId(0)) };
    let file = Object::of_store(&cpu, Memory::new(600, 0), 77).unwrap();
    let reader = ThreadStreams::new();
    let reach = |page| {
        file.read_in_sequence(&cpu, &reader, page..page + 1).unwrap();
        let (missed, reach) = MISSES.take().pop().unwrap();
        assert_eq!(missed, page);
        reach
    };
    assert_eq!((reach(300), reach(550)), (0..512, 512..600));
    let (ask, asked) = channel();
    let (tell, told) = channel();
    OTHER.set(Some((ask, told)));
    std::thread::scope(|scope| {
        let (vm, file) = (&vm, &file);
        scope.spawn(move || {
            // SAFETY: the second CPU, once.
            let other = unsafe { vm.cpu(CpuId(1)) };
            asked.recv().unwrap();
            file.set_len(&other, 2 * P).unwrap();
            tell.send(()).unwrap();
        });
        assert_eq!(reach(30), 0..31);
    });
    assert_eq!(file.resident_pages(&cpu), 0);
    Object::release(file, &cpu);
}
