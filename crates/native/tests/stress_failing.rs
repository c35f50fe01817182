//! Threads load and store in private memory larger than the number of frames, and in a mapped file,
//! while the disks of both fail at random. An access that needs an unreadable page gets a signal,
//! as does an access without an evictable page. A refused store has stored no bytes, and all other
//! accesses see their stores. When the disks work again, all contents are present.

use crate::common::stress::{machine, storm, weather};
use crate::common::{PAGE, RW};
use faultless::{
    Advice, Backing, BackingStore, Counter, Errno, MapFlags, Object, ReadRun, Shared, StoreError,
    WriteRun,
};
use faultless_native::{HostFile, NativeCpu, Process, Signal, Stop};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Frames of memory, in bytes.
const MEMORY: u64 = 2 << 20;
/// The number of private pages; the pages of the file follow.
const OWN: u64 = 2 * MEMORY / PAGE;
const FILE: u64 = 64;
const PAGES: u64 = OWN + FILE;
/// Slots of the swap area: for the children, too.
const SLOTS: u64 = 3 * OWN;
const AT: u64 = 0x4000_0000;
const FILE_AT: u64 = AT + OWN * PAGE;
/// The number of threads that load and store; one more thread interferes.
const USERS: u64 = 2;

/// The number of failures per 8 operations, for both disks, and the number of failed operations.
#[derive(Debug, Default)]
struct Device {
    fails: AtomicU64,
    operations: AtomicU64,
    failed: AtomicU64,
}

impl Device {
    fn operate(&self) -> Result<(), StoreError> {
        // Odd: takes all values.
        let number = self.operations.fetch_add(1, Ordering::Relaxed).wrapping_mul(5) % 8;
        if number < self.fails.load(Ordering::Relaxed) {
            self.failed.fetch_add(1, Ordering::Relaxed);
            return Err(StoreError { done: 0, errno: Errno::EIO });
        }
        Ok(())
    }
}

/// A file of the host on a failing disk.
#[derive(Debug)]
struct Failing {
    file: HostFile,
    device: Arc<Device>,
}

impl BackingStore for Failing {
    fn len(&self) -> u64 {
        self.file.len()
    }

    fn preferred_pages(&self) -> usize {
        8
    }

    fn read(&self, run: &mut ReadRun) -> Result<usize, StoreError> {
        self.device.operate()?;
        self.file.read(run)
    }

    fn write(&self, run: &WriteRun<'_>) -> Result<(), StoreError> {
        let operated = self.device.operate();
        // The write may have happened completely or partly, although it reports an error.
        let written = self.file.write(run);
        operated.and(written)
    }

    fn sync(&self) -> Result<(), Errno> {
        self.device.operate().map_err(|error| error.errno)
    }

    fn set_len(&self, bytes: u64) -> Result<(), Errno> {
        self.file.set_len(bytes)
    }
}

/// The state shared by all threads.
struct World {
    device: Arc<Device>,
    object: Shared<Object>,
    host: File,
    /// The last stored value of each thread in its word of each page.
    stored: Vec<[AtomicU64; USERS as usize]>,
    refused: AtomicU64,
}

impl World {
    /// Returns whether an access was refused because of a disk.
    fn is_refused<R>(&self, result: &Result<R, Signal>) -> bool {
        match result {
            Ok(_) => false,
            Err(Signal::Bus { .. } | Signal::OutOfMemory { .. }) => {
                assert!(self.device.failed.load(Ordering::Relaxed) > 0, "the disks work");
                self.refused.fetch_add(1, Ordering::Relaxed);
                true
            }
            Err(signal) => panic!("{signal}"),
        }
    }

    /// Loads an own word, and stores the next number.
    fn use_own(&self, cpu: &NativeCpu<'_, '_>, page: u64, thread: usize) {
        let at = AT + page * PAGE + 8 * thread as u64;
        let stored = &self.stored[page as usize][thread];
        let last = stored.load(Ordering::SeqCst);
        let found = cpu.load::<u64>(at);
        if !self.is_refused(&found) {
            assert_eq!(found, Ok(last), "page {page}");
        }
        if !self.is_refused(&cpu.store::<u64>(at, last + 1)) {
            stored.store(last + 1, Ordering::SeqCst);
        }
    }

    /// A child has the values stored before the fork, or later values, and keeps them.
    fn fork(&self, cpu: &NativeCpu<'_, '_>, random: &mut fastrand::Rng) {
        let page = random.u64(0..OWN);
        let stored = &self.stored[page as usize];
        let before = [0, 1].map(|thread| stored[thread].load(Ordering::SeqCst));
        let Ok(child) = cpu.fork() else { return };
        let words = || {
            [0, 1].map(|thread| {
                let mut word = [0; 8];
                let at = AT + page * PAGE + 8 * thread;
                let read = child.space().read_bytes(cpu.cpu(), at, &mut word);
                read.is_ok().then(|| u64::from_ne_bytes(word))
            })
        };
        let first = words();
        for at in 0..2 {
            assert!(first[at].is_none_or(|word| word >= before[at]), "page {page}: {first:?}");
        }
        // The eviction may fail.
        let _ = child.space().evict(cpu.cpu(), AT + page * PAGE, PAGE);
        for (first, second) in first.into_iter().zip(words()) {
            assert!(first.is_none() || second.is_none() || first == second, "page {page}");
        }
        cpu.exit(child);
    }

    fn write_back(&self, cpu: &NativeCpu<'_, '_>, process: &Process<'_>) -> Result<u64, Errno> {
        self.object.write_back(cpu.cpu(), 0..FILE, |pages| {
            process.space().write_protect(cpu.cpu(), &self.object, pages.clone());
        })
    }

    /// Runs an operation that interferes with the users of the pages.
    fn disturb(&self, cpu: &NativeCpu<'_, '_>, random: &mut fastrand::Rng) {
        let space = cpu.running().space();
        let first = random.u64(0..PAGES);
        let count = random.u64(1..=(PAGES - first).min(200));
        let (at, len) = (AT + first * PAGE, count * PAGE);
        // The disks may fail.
        match random.u32(0..12) {
            0..3 => drop(space.evict(cpu.cpu(), at, len)),
            3 => drop(cpu.cpu().reclaim(count)),
            4 => drop(space.madvise(cpu.cpu(), at, len, Advice::PageOut)),
            5 => self.fork(cpu, random),
            6 | 7 => drop(self.write_back(cpu, cpu.running())),
            8 => drop(self.object.sync()),
            9 => {
                self.object.drop_clean(cpu.cpu(), 0..FILE);
            }
            _ => {
                let fails = [0, 0, 1, 4, 8][random.usize(0..5)];
                self.device.fails.store(fails, Ordering::Relaxed);
            }
        }
        cpu.poll();
    }

    /// With disks that work again all is there, in memory and at last in the file.
    fn recovers(&self, process: &Process<'_>) {
        self.device.fails.store(0, Ordering::Relaxed);
        let all = |cpu: &mut NativeCpu<'_, '_>| {
            for (page, words) in (0..).zip(&self.stored) {
                for (thread, word) in (0..).zip(words) {
                    let found = cpu.load::<u64>(AT + page * PAGE + 8 * thread);
                    assert_eq!(found, Ok(word.load(Ordering::SeqCst)), "page {page}");
                }
            }
            assert!(self.write_back(cpu, process).is_ok());
            Ok(())
        };
        process.run(all).unwrap();
        for (page, words) in (0..).zip(&self.stored[OWN as usize..]) {
            let mut found = [0; 16];
            self.host.read_exact_at(&mut found, page * PAGE).unwrap();
            let stored = words.each_ref().map(|word| word.load(Ordering::SeqCst).to_ne_bytes());
            assert_eq!(found[..], stored.concat()[..], "page {page} of the file");
        }
    }
}

#[test]
fn failing_disks_affect_only_accesses_that_need_them() {
    let native = machine(USERS as usize + 1, MEMORY);
    let device = Arc::new(Device::default());
    let disk = |file: &File| {
        let file = HostFile::new(file.try_clone().unwrap()).unwrap();
        Arc::new(Failing { file, device: device.clone() })
    };
    let area = tempfile::tempfile().unwrap();
    area.set_len(SLOTS * PAGE).unwrap();
    let alone = native.process().unwrap();
    let added = alone.run(|cpu| Ok(cpu.cpu().swap_on(disk(&area)))).unwrap();
    assert_eq!(added, Ok(()));
    alone.exit();
    let must = [Counter::SwapOut, Counter::SwapIn, Counter::PageWritten, Counter::Bus];
    let (mut round, mut refused) = (0, 0);
    weather(&native, &must, |mode, length| {
        round += 1;
        let host = tempfile::tempfile().unwrap();
        host.set_len(FILE * PAGE).unwrap();
        let process = native.process().unwrap();
        let map = |cpu: &mut NativeCpu<'_, '_>| -> Result<Shared<Object>, Stop> {
            let object = Object::of_store(cpu.cpu(), disk(&host), 1).unwrap();
            let flags = MapFlags::PRIVATE | MapFlags::ANONYMOUS | MapFlags::FIXED;
            let space = process.space();
            space.mmap(cpu.cpu(), AT, OWN * PAGE, RW, flags | MapFlags::NORESERVE)?;
            let flags = MapFlags::SHARED | MapFlags::FIXED;
            let backing = Backing { object: &object, first: 0, may_write: true };
            space.mmap_object(cpu.cpu(), FILE_AT, FILE * PAGE, RW, flags, backing)?;
            Ok(object)
        };
        let object = process.run(map).unwrap();
        let stored = (0..PAGES).map(|_| [0; 2].map(AtomicU64::new)).collect();
        let refusals = AtomicU64::new(0);
        let world = World { device: device.clone(), object, host, stored, refused: refusals };
        storm(&process, USERS as usize + 1, mode, length, |cpu, number, clock| {
            let mut random = fastrand::Rng::with_seed(round << 8 | number as u64);
            while clock.goes_on() {
                if number as u64 == USERS {
                    world.disturb(cpu, &mut random);
                    continue;
                }
                // A few pages, and the file's pages, are used more than the others.
                let page = match random.u32(0..4) {
                    0 => random.u64(0..OWN / 16),
                    1 => random.u64(OWN..PAGES),
                    _ => random.u64(0..PAGES),
                };
                world.use_own(cpu, page, number);
            }
            Ok(())
        });
        world.recovers(&process);
        process.exit();
        refused += world.refused.load(Ordering::Relaxed);
        let World { object, .. } = world;
        let alone = native.process().unwrap();
        let end = |cpu: &mut NativeCpu<'_, '_>| {
            Object::release(object, cpu.cpu());
            assert_eq!(cpu.cpu().swap_usage(), (SLOTS, 0), "slots in use");
            // Unneeded pages of the swap area.
            cpu.cpu().reclaim(u64::MAX);
            Ok(())
        };
        alone.run(end).unwrap();
        alone.exit();
    });
    assert!(refused > 0 && device.failed.load(Ordering::Relaxed) > 0);
}
