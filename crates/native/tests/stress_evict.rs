//! Threads load and store in a file larger than memory. Another thread evicts the file's pages,
//! writes them back, forbids stores temporarily, forks, and writes as the kernel. No store is lost,
//! and no CPU uses a frame of another owner. The test runs with and without deferred flushes.

use crate::common::stress::{machine, storm, weather};
use crate::common::{PAGE, RW};
use faultless::{Advice, Backing, Counter, Errno, MapFlags, Object, Prot, Setting, Shared};
use faultless_native::{HostFile, NativeCpu, Signal, Stop};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Frames of memory, in bytes.
const MEMORY: u64 = 4 << 20;
/// The pages of the file. Threads store to the first half, each to its own words, and the kernel
/// writes the second half.
const FILE: u64 = 2 * MEMORY / PAGE;
const STORED: u64 = FILE / 2;
/// The address of the mapping for loads and stores, and of the mapping for loads only.
const AT: u64 = 0x4000_0000;
const READ_AT: u64 = 0x8000_0000;
/// The number of threads that load and store; one more thread evicts.
const USERS: u64 = 2;

/// The last certain kernel write to each page of the second half, a lower bound.
type Floors = Vec<AtomicU64>;

/// Checks that a load of a page written by the kernel returns an earlier completed write or a later
/// write.
fn read(cpu: &NativeCpu<'_, '_>, floors: &Floors, page: u64) {
    let floor = floors[(page - STORED) as usize].load(Ordering::SeqCst);
    let found = cpu.load::<u64>(READ_AT + page * PAGE).expect("the file is mapped");
    assert!(found >= floor, "page {page} is {found}, and was {floor} before");
}

/// Stores to an own word, and loads it through the other mapping.
fn use_own(cpu: &NativeCpu<'_, '_>, own: &mut [u64], page: u64, word: u64, value: u64) {
    let at = page * PAGE + 8 * word;
    let last = &mut own[page as usize];
    assert_eq!(cpu.load::<u64>(AT + at), Ok(*last), "page {page}");
    match cpu.store::<u64>(AT + at, value) {
        Ok(()) => *last = value,
        // Stores are forbidden at the moment.
        Err(Signal::Segv { .. }) => {}
        Err(signal) => panic!("{signal}"),
    }
    assert_eq!(cpu.load::<u64>(READ_AT + at), Ok(*last), "page {page}, by the other mapping");
}

/// Runs one eviction, or an operation that may interfere.
fn disturb<'n>(
    cpu: &NativeCpu<'_, 'n>,
    object: &Shared<Object>,
    floors: &Floors,
    random: &mut fastrand::Rng,
) -> Result<(), Stop> {
    let space = cpu.running().space();
    let first = random.u64(0..FILE);
    let count = random.u64(1..=(FILE - first).min(200));
    let (at, len) = (AT + first * PAGE, count * PAGE);
    match random.u32(0..14) {
        0..4 => {
            object.evict(cpu.cpu(), first..first + count);
        }
        4 => {
            cpu.cpu().reclaim(count);
        }
        5 => space.madvise(cpu.cpu(), at, len, Advice::PageOut)?,
        6 => space.madvise(cpu.cpu(), at, len, Advice::Cold)?,
        7 => {
            let child = cpu.fork()?;
            cpu.exit(child);
        }
        8 => {
            space.mprotect(cpu.cpu(), at, len, Prot::READ)?;
            space.mprotect(cpu.cpu(), at, len, RW)?;
        }
        9 => {
            cpu.cpu().flush_deferred();
        }
        10 => {
            let protect = |pages| space.write_protect(cpu.cpu(), object, pages);
            object
                .write_back(cpu.cpu(), first..first + count, protect)
                .expect("a file of the host");
        }
        _ => {
            let page = random.u64(STORED..FILE);
            let floor = &floors[(page - STORED) as usize];
            let next = floor.load(Ordering::SeqCst) + 1;
            // SAFETY: an aligned word of the page; programs load it concurrently, as from any file.
            let write = |to: *mut u8| unsafe {
                AtomicU64::from_ptr(to.cast()).store(next, Ordering::SeqCst);
            };
            // Another CPU may be reading the page.
            while let Err(errno) = object.write_page(cpu.cpu(), page, write) {
                assert_eq!(errno, Errno::EAGAIN);
                cpu.cpu().await_read().expect("a file of the host");
            }
            floor.store(next, Ordering::SeqCst);
        }
    }
    Ok(())
}

#[test]
fn evicted_pages_are_neither_lost_nor_stale() {
    let native = machine(USERS as usize + 1, MEMORY);
    let must = [
        Counter::PageScanned,
        Counter::PageStolen,
        Counter::PageLaundered,
        Counter::WorkingsetRefault,
        Counter::FlushDeferred,
        Counter::DeferredSettled,
    ];
    let mut round = 0;
    weather(&native, &must, |mode, length| {
        round += 1;
        native.vm().set(Setting::DeferredFlush(round % 3 != 0));
        let floors: Floors = (STORED..FILE).map(|_| AtomicU64::new(0)).collect();
        let host = tempfile::tempfile().unwrap();
        host.set_len(FILE * PAGE).unwrap();
        let store = Arc::new(HostFile::new(host.try_clone().unwrap()).unwrap());
        let process = native.process().unwrap();
        let object = process
            .run(|cpu| {
                let object = Object::of_store(cpu.cpu(), store, 1).unwrap();
                let flags = MapFlags::SHARED | MapFlags::FIXED;
                for (at, prot) in [(AT, RW), (READ_AT, Prot::READ)] {
                    let backing = Backing { object: &object, first: 0, may_write: true };
                    process.space().mmap_object(
                        cpu.cpu(),
                        at,
                        FILE * PAGE,
                        prot,
                        flags,
                        backing,
                    )?;
                }
                Ok(object)
            })
            .unwrap();
        let all: Vec<_> = (0..USERS).map(|_| std::sync::Mutex::new(Vec::new())).collect();
        storm(&process, USERS as usize + 1, mode, length, |cpu, number, clock| {
            let mut random = fastrand::Rng::with_seed(round << 8 | number as u64);
            let mut own = vec![0; STORED as usize];
            while clock.goes_on() {
                if number as u64 == USERS {
                    disturb(cpu, &object, &floors, &mut random)?;
                    continue;
                }
                // A few pages are used more than the others.
                let hot = random.bool();
                let pages = if hot { STORED / 16 } else { STORED };
                read(cpu, &floors, STORED + random.u64(0..pages));
                let value = random.u64(1..);
                use_own(cpu, &mut own, random.u64(0..pages), number as u64, value);
            }
            if (number as u64) < USERS {
                *all[number].lock().unwrap() = own;
            }
            Ok(())
        });
        process
            .run(|cpu| {
                (STORED..FILE).for_each(|page| read(cpu, &floors, page));
                let protect = |pages| process.space().write_protect(cpu.cpu(), &object, pages);
                object.write_back(cpu.cpu(), 0..FILE, protect).expect("a file of the host");
                Object::release(object, cpu.cpu());
                Ok(())
            })
            .unwrap();
        process.exit();
        for (word, own) in (0u64..).zip(&all) {
            for (page, expected) in (0..).zip(own.lock().unwrap().iter()) {
                let mut bytes = [0; 8];
                host.read_exact_at(&mut bytes, page * PAGE + 8 * word).unwrap();
                assert_eq!(u64::from_ne_bytes(bytes), *expected, "page {page} in the file");
            }
        }
    });
}
