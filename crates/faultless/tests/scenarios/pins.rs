//! Pages used by a device through their frames, while other CPUs fork, copy, discard and free the
//! pages.

use crate::support::machine::Board;
use crate::support::{AT, Guest, PAGE, World, page};
use faultless::{Advice, FrameNumber, Machine, Pins};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

/// Frames of a scenario's machine.
const FRAMES: u32 = 160;

fn pin<'a>(guest: &Guest<'a>, at: u64, write: bool) -> Pins<'a, Board> {
    guest.space.pin(guest.cpu, page(at), PAGE, write).unwrap()
}

/// A device reads the first word of the page in `frame`, which is pinned.
fn device_word(guest: &Guest<'_>, frame: FrameNumber) -> u64 {
    // SAFETY: a word of a pinned page; one thread runs at a time.
    unsafe { word(guest, frame).read() }
}

fn word(guest: &Guest<'_>, frame: FrameNumber) -> *mut u64 {
    guest.world.vm.machine().frame_bytes(frame).cast()
}

fn device_load(guest: &Guest<'_>, pins: &Pins<'_, Board>) -> u64 {
    device_word(guest, pins.frames()[0])
}

fn device_store(guest: &Guest<'_>, pins: &Pins<'_, Board>, value: u64) {
    // SAFETY: as above.
    unsafe { word(guest, pins.frames()[0]).write(value) }
}

/// The program and the device use the same page, whichever CPU forks.
fn pins_against_fork() {
    let world = World::unwatched(3, FRAMES);
    let space = world.numbered(2, 1);
    world.run(&[
        (&space, &|guest| {
            let pins = pin(guest, 0, true);
            device_store(guest, &pins, 5);
            assert_eq!(guest.load(page(0)), Ok(5), "the store of the device");
            guest.store(page(0), 6).unwrap();
            assert_eq!(device_load(guest, &pins), 6, "the store of the program");
        }),
        (&space, &|guest| {
            let child = guest.space.fork(guest.cpu).unwrap();
            guest.switch(&child, |guest| {
                let first = guest.load(page(0)).unwrap();
                assert!(matches!(first, 1 | 5 | 6), "{first}");
                guest.store(page(0), 30).unwrap();
                assert_eq!(guest.load(page(1)), Ok(2));
            });
            child.exit(guest.cpu);
        }),
        (&space, &|guest| {
            let pins = pin(guest, 1, false);
            assert_eq!(device_load(guest, &pins), 2);
            assert_eq!(guest.load(page(1)), Ok(2));
            assert_eq!(guest.space.page_at(guest.cpu, page(1)).unwrap().frame, pins.frames()[0]);
        }),
    ]);
    world.finish(vec![space]);
}

/// A child gets the content of one moment: of two stores, the first to a pinned page, the child
/// never gets only the second.
fn pins_and_stores_against_fork() {
    let world = World::unwatched(2, FRAMES);
    let space = world.numbered(2, 1);
    world.run(&[
        (&space, &|guest| {
            let _pins = pin(guest, 0, true);
            let child = guest.space.fork(guest.cpu).unwrap();
            guest.switch(&child, |guest| {
                let [first, second] = [0, 1].map(|at| guest.load(page(at)).unwrap());
                assert!(second < 10 || first >= second, "{first} before {second}");
            });
            child.exit(guest.cpu);
        }),
        (&space, &|guest| {
            for value in 10..14 {
                guest.store(page(0), value).unwrap();
                guest.store(page(1), value).unwrap();
            }
        }),
    ]);
    world.finish(vec![space]);
}

/// Stores copy formerly shared pages, while the last other user leaves and a device gets the pages.
fn pins_against_a_copy() {
    const PAGES: u64 = 4;
    let world = World::unwatched(2, FRAMES);
    let space = world.numbered(PAGES, 1);
    let child = world.within(&space, |guest| guest.space.fork(guest.cpu).unwrap());
    let child = Mutex::new(Some(child));
    world.run(&[
        (&space, &|guest| (0..PAGES).for_each(|at| guest.store(page(at) + 8, 10).unwrap())),
        (&space, &|guest| {
            let child = child.lock().unwrap().take().unwrap();
            guest.poll();
            child.exit(guest.cpu);
            let pins = guest.space.pin(guest.cpu, AT, PAGES * PAGE, false).unwrap();
            // The other CPU may continue.
            (0..10).for_each(|_| assert_eq!(guest.load(page(PAGES)), Ok(0)));
            for (at, &frame) in (0..).zip(pins.frames()) {
                guest.store(page(at), 20 + at).unwrap();
                assert_eq!(
                    device_word(guest, frame),
                    20 + at,
                    "the program uses another page than the device"
                );
            }
        }),
    ]);
    world.within(&space, |guest| {
        for at in 0..PAGES {
            assert_eq!([0, 8].map(|word| guest.load(page(at) + word).unwrap()), [20 + at, 10]);
        }
    });
    world.finish(vec![space]);
}

/// A CPU that runs another space pins a page during its unmapping, and the page's frame is reused
/// at once.
fn pins_against_reuse() {
    let world = World::unwatched(2, FRAMES);
    let (space, other) = (world.numbered(1, 1), world.numbered(0, 1));
    world.run(&[
        (&other, &|guest| {
            for round in 0..2 {
                let pins = space.pin(guest.cpu, page(0), PAGE, true).unwrap();
                device_store(guest, &pins, 5 + round);
            }
        }),
        (&space, &|guest| {
            guest.space.madvise(guest.cpu, page(0), PAGE, Advice::DontNeed).unwrap();
            guest.store(page(8), 9).unwrap();
            guest.space.madvise(guest.cpu, page(0), PAGE, Advice::DontNeed).unwrap();
            guest.store(page(9), 9).unwrap();
            for at in [8, 9] {
                assert_eq!(guest.load(page(at)), Ok(9), "a device stored to another page");
            }
        }),
    ]);
    world.finish(vec![space, other]);
}

/// Device stores after the page was lazily freed stay.
fn pins_against_advice() {
    let world = World::unwatched(2, FRAMES);
    let space = world.numbered(2, 1);
    let advised = AtomicBool::new(false);
    world.run(&[
        (&space, &|guest| {
            let pins = pin(guest, 0, true);
            while !advised.load(Ordering::Relaxed) {
                guest.poll();
                shuttle::thread::yield_now();
            }
            device_store(guest, &pins, 50);
        }),
        (&space, &|guest| {
            guest.space.madvise(guest.cpu, AT, 2 * PAGE, Advice::Free).unwrap();
            advised.store(true, Ordering::Relaxed);
        }),
    ]);
    world.leave_frames(1);
    world.within(&space, |guest| {
        let full = (4..16).find(|at| guest.store(page(*at), 1).is_err());
        assert!(full.is_some(), "memory is not short");
        assert_eq!(guest.load(page(0)), Ok(50), "a lost store");
    });
    world.finish(vec![space]);
}

/// The last of the mapping and the pin frees the frame.
fn unpinning_against_munmap() {
    let world = World::unwatched(2, FRAMES);
    let space = world.numbered(2, 1);
    world.run(&[
        (&space, &|guest| {
            if let Ok(pins) = guest.space.pin(guest.cpu, AT, 2 * PAGE, true) {
                device_store(guest, &pins, 5);
                guest.poll();
            }
        }),
        (&space, &|guest| {
            guest.space.munmap(guest.cpu, AT, 2 * PAGE).unwrap();
            (8..12).for_each(|at| guest.store(page(at), at).unwrap());
            (8..12).for_each(|at| assert_eq!(guest.load(page(at)), Ok(at)));
        }),
    ]);
    world.finish(vec![space]);
}

mod tests {
    holds!(
        pins_against_fork,
        pins_and_stores_against_fork,
        pins_against_a_copy,
        pins_against_reuse,
        pins_against_advice,
        unpinning_against_munmap,
    );
}

mod needs {
    use crate::support;
    use faultless::sync::mutant::Mutant;

    needs!(
        a_look_at_pins_by_a_fork: ForkLooksAtPins in [pins_against_fork],
        a_copy_by_fork_after_the_flush: ForkCopiesAfterFlush in [pins_and_stores_against_fork],
        a_look_at_pins_by_a_copy: CopyLooksAtPins in [pins_against_a_copy],
        a_second_look_by_a_pin: PinLooksAgain in [pins_against_reuse],
        a_look_at_pins_by_advice: FreeLooksAtPins in [pins_against_advice],
    );
}
