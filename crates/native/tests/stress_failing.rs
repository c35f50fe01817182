//! Threads that load and store in private memory, more than there are frames, and in a mapped file, while the disks of both fail as they like: an access
//! that needs a page which cannot be read is a signal, and so is one for which no page can leave; a store that was refused has stored nothing, and
//! all others see what they stored. When the disks work again, all is there.

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
/// Private pages; the pages of the file come behind them.
const OWN: u64 = 2 * MEMORY / PAGE;
const FILE: u64 = 64;
const PAGES: u64 = OWN + FILE;
/// Slots of the swap area: for the children, too.
const SLOTS: u64 = 3 * OWN;
const AT: u64 = 0x4000_0000;
const FILE_AT: u64 = AT + OWN * PAGE;
/// Threads that load and store; one more disturbs them.
const USERS: u64 = 2;

/// How many of 8 operations fail, for both disks, and how many have failed.
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

/// A file of the host on a disk that fails.
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
        // It has written all the same, or a part, and does not know.
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

/// What all threads share.
struct World {
    device: Arc<Device>,
    object: Shared<Object>,
    host: File,
    /// What each thread has stored to its word of each page.
    stored: Vec<[AtomicU64; USERS as usize]>,
    refused: AtomicU64,
}

impl World {
    /// Whether an access was refused as one is that a disk hinders.
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

    /// A load of one's own word, and a store of the next number.
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

    /// A child has what was stored before the fork, or later, and keeps it.
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
        // Whatever hinders it.
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

    /// Something that comes in the way of those who use the pages.
    fn disturb(&self, cpu: &NativeCpu<'_, '_>, random: &mut fastrand::Rng) {
        let space = cpu.running().space();
        let first = random.u64(0..PAGES);
        let count = random.u64(1..=(PAGES - first).min(200));
        let (at, len) = (AT + first * PAGE, count * PAGE);
        // Whether the disks let them or not.
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
fn disks_that_fail_hurt_those_alone_that_need_them() {
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
                // A few pages, and those of the file, are used more than the others.
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
            // Pages of the area that nobody needs.
            cpu.cpu().reclaim(u64::MAX);
            Ok(())
        };
        alone.run(end).unwrap();
        alone.exit();
    });
    assert!(refused > 0 && device.failed.load(Ordering::Relaxed) > 0);
}
