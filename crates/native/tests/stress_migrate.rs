//! Threads load and store, while another thread moves the pages to the other node, forks, forbids
//! stores temporarily, and writes to the file as the kernel. No store is lost, and no CPU uses a
//! frame of another owner. The test runs with and without deferred flushes.

use crate::common::stress::{storm, weather};
use crate::common::{PAGE, RW};
use faultless::{Backing, Counter, Errno, MapFlags, Object, Prot, Setting, Shared};
use faultless_native::{Checked, Config, Native, NativeCpu, Signal, Stop};
use std::sync::atomic::{AtomicU64, Ordering};

/// Private pages: each page belongs to the thread of its number, modulo the threads.
const PRIVATE: u64 = 96;
/// Pages of the file, which are mapped read-only, and which the kernel writes.
const FILE: u64 = 96;
const AT: u64 = 0x4000_0000;
const FILE_AT: u64 = 0x5000_0000;
/// The number of threads that load and store; one more thread moves pages.
const USERS: u64 = 2;

/// The last certain kernel write to each page of the file, a lower bound.
type Floors = Vec<AtomicU64>;

/// Checks that a load of a file page returns an earlier completed write or a later write.
fn read_file(cpu: &NativeCpu<'_, '_>, floors: &Floors, page: u64) {
    let floor = floors[page as usize].load(Ordering::SeqCst);
    let found = cpu.load::<u64>(FILE_AT + page * PAGE).expect("the file is mapped");
    assert!(found >= floor, "page {page} is {found}, and was {floor} before");
}

/// Stores to an own page, and loads it: no other thread stores there.
fn use_own(cpu: &NativeCpu<'_, '_>, own: &mut [u64], page: u64, value: u64) {
    let at = AT + page * PAGE;
    let last = &mut own[page as usize];
    assert_eq!(cpu.load::<u64>(at), Ok(*last), "private page {page}");
    match cpu.store::<u64>(at, value) {
        Ok(()) => *last = value,
        // Stores are forbidden at the moment.
        Err(Signal::Segv { .. }) => {}
        Err(signal) => panic!("{signal}"),
    }
    assert_eq!(cpu.load::<u64>(at), Ok(*last), "private page {page}");
}

/// Runs one move, or an operation that may interfere.
fn disturb<'n>(
    cpu: &NativeCpu<'_, 'n>,
    object: &Shared<Object>,
    floors: &Floors,
    random: &mut fastrand::Rng,
) -> Result<(), Stop> {
    let space = cpu.running().space();
    let (base, pages) = if random.bool() { (AT, PRIVATE) } else { (FILE_AT, FILE) };
    let first = random.u64(0..pages);
    let count = random.u64(1..=(pages - first).min(40));
    let (at, len) = (base + first * PAGE, count * PAGE);
    match random.u32(0..12) {
        0..7 => {
            let addrs: Vec<_> = (0..count).map(|page| at + page * PAGE).collect();
            let mut status = vec![Err(Errno::EIO); addrs.len()];
            let node = random.u8(0..2);
            space.move_pages(cpu.cpu(), &addrs, node, true, &mut status)?;
            assert!(!status.contains(&Err(Errno::EIO)));
        }
        7 => {
            let child = cpu.fork()?;
            cpu.exit(child);
        }
        8 if base == AT => {
            space.mprotect(cpu.cpu(), at, len, Prot::READ)?;
            space.mprotect(cpu.cpu(), at, len, RW)?;
        }
        9 => {
            cpu.cpu().flush_deferred();
        }
        10 => {
            cpu.cpu().balance(count);
        }
        _ => {
            let page = random.u64(0..FILE);
            let next = floors[page as usize].load(Ordering::SeqCst) + 1;
            // SAFETY: an aligned word of the page; programs load it concurrently, as from any file.
            let write = |to: *mut u8| unsafe {
                AtomicU64::from_ptr(to.cast()).store(next, Ordering::SeqCst);
            };
            object.write_page(cpu.cpu(), page, write).expect("a resident page");
            floors[page as usize].store(next, Ordering::SeqCst);
        }
    }
    Ok(())
}

#[test]
fn moved_pages_are_neither_lost_nor_stale() {
    let config = Config {
        memory_bytes: 16 << 20,
        cpus: USERS as usize + 1,
        nodes: 2,
        checked: Checked::Panic,
        jitter: 3,
        ..Config::default()
    };
    let native = Native::new(config).unwrap();
    let must = [
        Counter::MigrateSuccess,
        Counter::MigrateFail,
        Counter::FlushDeferred,
        Counter::FrameOwed,
        Counter::DeferredSettled,
    ];
    let mut round = 0;
    weather(&native, &must, |mode, length| {
        round += 1;
        native.vm().set(Setting::DeferredFlush(round % 3 != 0));
        let floors: Floors = (0..FILE).map(|_| AtomicU64::new(0)).collect();
        let process = native.process().unwrap();
        let object = process
            .run(|cpu| {
                let object = Object::try_new(cpu.cpu(), FILE, 1).unwrap();
                let flags = MapFlags::PRIVATE | MapFlags::FIXED;
                cpu.mmap(AT, PRIVATE * PAGE, RW, flags | MapFlags::ANONYMOUS)?;
                let backing = Backing { object: &object, first: 0, may_write: false };
                let shared = MapFlags::SHARED | MapFlags::FIXED;
                let len = FILE * PAGE;
                process.space().mmap_object(
                    cpu.cpu(),
                    FILE_AT,
                    len,
                    Prot::READ,
                    shared,
                    backing,
                )?;
                Ok(object)
            })
            .unwrap();
        storm(&process, USERS as usize + 1, mode, length, |cpu, number, clock| {
            let mut random = fastrand::Rng::with_seed(round << 8 | number as u64);
            let mut own = [0; PRIVATE as usize];
            while clock.goes_on() {
                if number as u64 == USERS {
                    disturb(cpu, &object, &floors, &mut random)?;
                    continue;
                }
                read_file(cpu, &floors, random.u64(0..FILE));
                let page = random.u64(0..PRIVATE / USERS) * USERS + number as u64;
                use_own(cpu, &mut own, page, random.u64(1..));
            }
            Ok(())
        });
        process
            .run(|cpu| {
                (0..FILE).for_each(|page| read_file(cpu, &floors, page));
                Object::release(object, cpu.cpu());
                Ok(())
            })
            .unwrap();
        process.exit();
    });
}
