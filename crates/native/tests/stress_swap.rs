//! Threads load and store in private memory larger than the number of frames. Another thread swaps
//! their pages out, forks, moves and protects them, discards some, and pins others. No store is
//! lost, no program sees another program's page, and no CPU uses a frame of another owner.

use crate::common::stress::{machine, storm, weather};
use crate::common::{PAGE, RW};
use faultless::{Advice, Counter, MapFlags, Prot, RemapFlags, Setting};
use faultless_native::{HostFile, NativeCpu, Process, Signal, Stop};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Frames of memory, in bytes.
const MEMORY: u64 = 4 << 20;
/// The pages used by the threads, each with its own words. The last pages are discarded and moved,
/// and their contents are unknown.
const PAGES: u64 = 2 * MEMORY / PAGE;
const KEPT: u64 = PAGES - 256;
/// Slots of the swap area: for the children, too.
const SLOTS: u64 = 3 * PAGES;
const AT: u64 = 0x4000_0000;
/// The temporary target of moves.
const ASIDE: u64 = 0x8000_0000;
/// The number of threads that load and store; one more thread interferes.
const USERS: u64 = 2;

/// The last certain store of each thread to its word of each page, a lower bound.
type Floors = Vec<[AtomicU64; USERS as usize]>;

/// Loads an own word, and stores the next number.
fn use_own(cpu: &NativeCpu<'_, '_>, floors: &Floors, page: u64, thread: usize) {
    let at = AT + page * PAGE + 8 * thread as u64;
    let floor = &floors[page as usize][thread];
    let last = floor.load(Ordering::SeqCst);
    assert_eq!(cpu.load::<u64>(at), Ok(last), "page {page}");
    match cpu.store::<u64>(at, last + 1) {
        Ok(()) => floor.store(last + 1, Ordering::SeqCst),
        // Stores are forbidden at the moment.
        Err(Signal::Segv { .. }) => {}
        Err(signal) => panic!("{signal}"),
    }
}

/// A child has the values stored before the fork, or later values, and keeps them.
fn fork(cpu: &NativeCpu<'_, '_>, floors: &Floors, random: &mut fastrand::Rng) -> Result<(), Stop> {
    let page = random.u64(0..KEPT);
    let before = [0, 1].map(|thread| floors[page as usize][thread].load(Ordering::SeqCst));
    let child: Process<'_> = cpu.fork()?;
    let words = || {
        [0, 1].map(|thread| {
            let mut word = [0; 8];
            let at = AT + page * PAGE + 8 * thread;
            child.space().read_bytes(cpu.cpu(), at, &mut word).expect("the child maps the page");
            u64::from_ne_bytes(word)
        })
    };
    let first = words();
    assert!((0..2).all(|at| first[at] >= before[at]), "page {page}: {first:?}, not {before:?}");
    child.space().evict(cpu.cpu(), AT + page * PAGE, PAGE)?;
    assert_eq!(words(), first, "page {page} of a child");
    cpu.exit(child);
    Ok(())
}

/// Runs an operation that interferes with the users of the pages.
fn disturb(
    cpu: &NativeCpu<'_, '_>,
    floors: &Floors,
    random: &mut fastrand::Rng,
) -> Result<(), Stop> {
    let space = cpu.running().space();
    let first = random.u64(0..PAGES);
    let count = random.u64(1..=(PAGES - first).min(200));
    let (at, len) = (AT + first * PAGE, count * PAGE);
    let loose = AT + random.u64(KEPT..PAGES) * PAGE;
    match random.u32(0..13) {
        0..4 => space.evict(cpu.cpu(), at, len)?,
        4 => {
            cpu.cpu().reclaim(count);
        }
        5 => space.madvise(cpu.cpu(), at, len, Advice::PageOut)?,
        6 => space.madvise(cpu.cpu(), at, len, Advice::Cold)?,
        7 => fork(cpu, floors, random)?,
        8 => {
            space.mprotect(cpu.cpu(), at, len, Prot::READ)?;
            space.mprotect(cpu.cpu(), at, len, RW)?;
        }
        9 => {
            cpu.cpu().flush_deferred();
        }
        10 => {
            let advice = if random.bool() { Advice::DontNeed } else { Advice::Free };
            space.madvise(cpu.cpu(), loose, PAGE, advice)?;
        }
        11 => {
            let flags = RemapFlags::MAYMOVE | RemapFlags::FIXED;
            space.mremap(cpu.cpu(), loose, PAGE, PAGE, flags, ASIDE)?;
            space.evict(cpu.cpu(), ASIDE, PAGE)?;
            space.mremap(cpu.cpu(), ASIDE, PAGE, PAGE, flags, loose)?;
        }
        _ => {
            let page = random.u64(0..KEPT);
            let pins = space.pin(cpu.cpu(), AT + page * PAGE, PAGE, false)?;
            space.evict(cpu.cpu(), AT + page * PAGE, PAGE)?;
            let there = space.page_at(cpu.cpu(), AT + page * PAGE).map(|found| found.frame);
            assert_eq!(there, Some(pins.frames()[0]), "page {page} is pinned");
        }
    }
    Ok(())
}

#[test]
fn swapped_pages_are_neither_lost_nor_mixed_up() {
    let native = machine(USERS as usize + 1, MEMORY);
    let host = tempfile::tempfile().unwrap();
    host.set_len(SLOTS * PAGE).unwrap();
    let area = Arc::new(HostFile::new(host).unwrap());
    let alone = native.process().unwrap();
    let added = alone.run(|cpu| Ok(cpu.cpu().swap_on(area.clone()))).unwrap();
    assert_eq!(added, Ok(()));
    alone.exit();
    let must = [
        Counter::SwapOut,
        Counter::SwapIn,
        Counter::SwapPage,
        Counter::WorkingsetRefaultAnon,
        Counter::PageStolen,
    ];
    let mut round = 0;
    weather(&native, &must, |mode, length| {
        round += 1;
        native.vm().set(Setting::DeferredFlush(round % 3 != 0));
        let floors: Floors = (0..KEPT).map(|_| [0; 2].map(AtomicU64::new)).collect();
        let process = native.process().unwrap();
        process
            .run(|cpu| {
                let flags = MapFlags::PRIVATE | MapFlags::ANONYMOUS | MapFlags::FIXED;
                process.space().mmap(cpu.cpu(), AT, PAGES * PAGE, RW, flags)?;
                Ok(())
            })
            .unwrap();
        storm(&process, USERS as usize + 1, mode, length, |cpu, number, clock| {
            let mut random = fastrand::Rng::with_seed(round << 8 | number as u64);
            while clock.goes_on() {
                if number as u64 == USERS {
                    disturb(cpu, &floors, &mut random)?;
                    continue;
                }
                // A few pages are used more than the others.
                let hot = random.bool();
                let page = random.u64(0..if hot { KEPT / 16 } else { KEPT });
                use_own(cpu, &floors, page, number);
                if random.u32(0..8) == 0 {
                    let loose = AT + random.u64(KEPT..PAGES) * PAGE;
                    // The page may have moved away at the moment.
                    let _ = cpu.store::<u64>(loose, 1);
                }
            }
            Ok(())
        });
        process
            .run(|cpu| {
                for page in 0..KEPT {
                    for (thread, floor) in (0..).zip(&floors[page as usize]) {
                        let found = cpu.load::<u64>(AT + page * PAGE + 8 * thread);
                        assert_eq!(found, Ok(floor.load(Ordering::SeqCst)), "page {page}");
                    }
                }
                Ok(())
            })
            .unwrap();
        process.exit();
        let alone = native.process().unwrap();
        alone
            .run(|cpu| {
                assert_eq!(cpu.cpu().swap_usage(), (SLOTS, 0), "slots in use");
                // Unneeded pages of the swap area.
                cpu.cpu().reclaim(u64::MAX);
                Ok(())
            })
            .unwrap();
        alone.exit();
    });
}
