//! The lowest address for mappings of programs, and other properties of the machine.

use crate::addr::{FrameNumber, PAGE_SIZE};
use crate::error::Errno::{EINVAL, ENOMEM};
use crate::machine::{MAX_CPUS, MAX_NODES};
use crate::space::{MapFlags, Prot, RemapFlags, Space};
use crate::table::format::USER_END;
use crate::testing::TestMachine;
use crate::testing::guest::cpu;
use crate::vm::Vm;

const P: u64 = PAGE_SIZE;
const MIB: u64 = 1 << 20;
const PRIVATE: MapFlags = MapFlags::PRIVATE.union(MapFlags::ANONYMOUS);

/// Runs `check` on a machine with little room above its lowest address, `lowest`.
fn with_lowest(lowest: u64, check: impl FnOnce(&crate::vm::Cpu<'_, TestMachine>)) {
    let mut machine = TestMachine::new(1, 1024);
    machine.lowest = lowest;
    let vm = Vm::new(machine).unwrap();
    check(&cpu(&vm, 0));
}

#[test]
fn mmap_chooses_no_address_below_the_lowest() {
    // Above and below the base of the top-down search, and at the start of both searches.
    for lowest in [0x7fff_f800_0000, 0x7fff_f000_0000, USER_END - 16 * MIB, USER_END - P] {
        with_lowest(lowest, |cpu| {
            let space = Space::new(cpu).unwrap();
            let room = (USER_END - lowest) / MIB + 1;
            let mut last = 0;
            let refused =
                (0..=room).find_map(|_| match space.mmap(cpu, None, MIB, Prot::RW, PRIVATE) {
                    Ok(at) => {
                        assert!(at >= lowest, "{at:#x} is below {lowest:#x}");
                        last = at;
                        None
                    }
                    Err(error) => Some(error.errno),
                });
            assert_eq!(refused, Some(ENOMEM));
            if last != 0 {
                // A mapping that has to move finds no other address either.
                let grown = space.mremap(cpu, last, MIB, 2 * MIB, RemapFlags::MAYMOVE, 0);
                assert!(grown.is_err() || grown.unwrap() >= lowest);
            }
            space.exit(cpu);
        });
    }
}

#[test]
fn a_heap_does_not_start_below_the_lowest_address() {
    /// Above the usual start of a heap on other machines.
    const LOWEST: u64 = 0x7000_0000_0000;
    with_lowest(LOWEST, |cpu| {
        let space = Space::new(cpu).unwrap();
        let start = space.brk(cpu, 0);
        assert!(start >= LOWEST);
        for bad in [0, P, LOWEST - 1, USER_END + 1, u64::MAX] {
            let refused = space.set_heap_start(cpu, bad).unwrap_err();
            assert_eq!((refused.errno, refused.range.start), (EINVAL, bad));
            assert_eq!(space.brk(cpu, 0), start, "moved by a start at {bad:#x}");
        }
        space.set_heap_start(cpu, LOWEST + 12345).unwrap();
        assert_eq!(space.brk(cpu, LOWEST + 2 * MIB), LOWEST + 2 * MIB);
        assert_eq!(space.set_heap_start(cpu, LOWEST).unwrap_err().errno, EINVAL, "not empty");
        space.exit(cpu);
    });
}

#[test]
fn a_machine_beyond_the_limits_is_refused() {
    let refused = |change: fn(&mut TestMachine)| {
        let mut machine = TestMachine::new(1, 64);
        change(&mut machine);
        Vm::new(machine).err()
    };
    assert_eq!(refused(|_| {}), None);
    assert_eq!(refused(|machine| machine.cpus = 0), Some(EINVAL));
    assert_eq!(refused(|machine| machine.cpus = MAX_CPUS + 1), Some(EINVAL));
    assert_eq!(refused(|machine| machine.lowest = 1), Some(EINVAL));
    assert_eq!(refused(|machine| machine.lowest = USER_END), Some(EINVAL));
    assert_eq!(refused(|machine| machine.regions[0].node = MAX_NODES as u8), Some(EINVAL));
    assert_eq!(
        refused(|machine| machine.regions[0].first = FrameNumber(u32::MAX - 8)),
        Some(EINVAL)
    );
}

#[test]
fn a_physical_address_without_a_frame_number_has_none() {
    assert_eq!(FrameNumber::from_phys(0x1234_5678), Some(FrameNumber(0x12345)));
    assert_eq!(FrameNumber::from_phys((16 << 40) - 1), Some(FrameNumber(u32::MAX)));
    for beyond in [16 << 40, 0x3800_0000_0000, 1 << 60] {
        assert_eq!(FrameNumber::from_phys(beyond), None, "{beyond:#x}");
    }
}

/// A loader sets the start while a program moves the end within the same page.
#[test]
fn the_end_of_a_heap_is_not_below_its_start() {
    const AT: u64 = 1 << 30;
    const ROUNDS: u64 = if cfg!(miri) { 20 } else { 400_000 };
    let vm = Vm::new(TestMachine::new(2, 256)).unwrap();
    let (loader, program) = (cpu(&vm, 0), cpu(&vm, 1));
    let space = Space::new(&loader).unwrap();
    space.set_heap_start(&loader, AT + 0x100).unwrap();
    std::thread::scope(|scope| {
        let (space, program) = (&space, program);
        let moves = scope.spawn(move || {
            for _ in 0..ROUNDS {
                for end in [0x200, 0x100, 0x800] {
                    space.brk(&program, AT + end);
                }
            }
        });
        while !moves.is_finished() {
            for start in [AT + 0x100, AT + 0x800] {
                // Refused while the heap is not empty.
                let _ = space.set_heap_start(&loader, start);
            }
            let heap = space.heap.get();
            // Read twice, because the two bounds are read one after the other.
            let stays = space.heap.get() == heap && space.heap.get() == heap;
            assert!(!stays || heap.start <= heap.end, "{heap:x?}");
        }
    });
    let heap = space.heap.get();
    assert!(heap.start <= heap.end, "{heap:x?}");
    space.exit(&loader);
}
