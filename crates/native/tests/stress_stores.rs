//! Threads store to words of the same file pages, through mappings, by kernel calls and by a
//! device. One thread continuously writes the pages back and drops them. No store is lost, and in
//! the end the file of the host has the last stores.

use crate::common::stress::{Clock, machine, storm, weather};
use crate::common::{PAGE, RW, word};
use core::sync::atomic::{AtomicU64, Ordering};
use faultless::{Advice, Backing, Counter, Errno, Machine, MapFlags, Object, Setting, Shared};
use faultless_native::{HostFile, NativeCpu, Process, Stop};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

/// The number of threads that store; one more thread writes back.
const STORERS: usize = 3;
/// More than the store prefers to write at once. The last page is not whole.
const PAGES: u64 = 40;
const LEN: u64 = PAGES * PAGE - 1000;
const VIEW: u64 = PAGES * PAGE;
/// The words of each thread in a page: one in each half, to detect a page with halves of different
/// times.
const WORDS: usize = 2;

/// The state shared by all threads.
struct Disk<'n> {
    object: Shared<Object>,
    file: File,
    /// Another process with a mapping of the file at the same address.
    other: Process<'n>,
    /// The generation of the last store to each word, published by its thread after the store.
    stored: Vec<AtomicU64>,
    dropped: AtomicU64,
}

/// A word of the file, and its thread.
#[derive(Clone, Copy, Debug)]
struct Spot {
    thread: usize,
    page: u64,
    half: usize,
}

impl Spot {
    fn random(random: &mut fastrand::Rng, thread: usize) -> Self {
        Self { thread, page: random.u64(0..PAGES), half: random.usize(0..WORDS) }
    }

    fn all() -> impl Iterator<Item = Self> {
        let of = |thread, page| (0..WORDS).map(move |half| Self { thread, page, half });
        (0..STORERS).flat_map(move |thread| (0..PAGES).flat_map(move |page| of(thread, page)))
    }

    fn number(self) -> usize {
        (self.thread * PAGES as usize + self.page as usize) * WORDS + self.half
    }

    /// Returns the word's offset in its page.
    fn within(self) -> u64 {
        (self.half as u64 * 256 + self.thread as u64) * 8
    }

    fn offset(self) -> u64 {
        self.page * PAGE + self.within()
    }

    /// Returns the value of generation `generation`; 0 is the initial content.
    fn value(self, generation: u64) -> u64 {
        if generation == 0 { 0 } else { (self.number() as u64 + 1) << 40 | generation }
    }

    /// Returns the generation of a loaded value.
    fn generation(self, found: u64) -> u64 {
        let generation = found & ((1 << 40) - 1);
        assert_eq!(found, self.value(generation), "{self:?} holds {found:#x}");
        generation
    }
}

impl Disk<'_> {
    fn stored(&self, spot: Spot) -> u64 {
        self.stored[spot.number()].load(Ordering::SeqCst)
    }

    /// The word of each spot in the file of the host.
    fn in_file(&self) -> Vec<u64> {
        let mut bytes = vec![0; LEN as usize];
        self.file.read_exact_at(&mut bytes, 0).unwrap();
        let word = |at: usize| u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap());
        Spot::all().map(|spot| word(spot.offset() as usize)).collect()
    }

    fn map(&self, cpu: &NativeCpu<'_, '_>, process: &Process<'_>, at: u64) {
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        let backing = Backing { object: &self.object, first: 0, may_write: true };
        let mapped = process.space().mmap_object(cpu.cpu(), at, VIEW, RW, flags, backing);
        assert_eq!(mapped, Ok(at));
    }

    fn write_back(&self, cpu: &NativeCpu<'_, '_>, process: &Process<'_>) -> u64 {
        let written = self.object.write_back(cpu.cpu(), 0..PAGES, |pages| {
            for process in [process, &self.other] {
                process.space().write_protect(cpu.cpu(), &self.object, pages.clone());
            }
        });
        written.unwrap()
    }
}

/// Returns the address of a thread's mapping of the file.
fn view(thread: usize) -> u64 {
    0x4000_0000 - 20 * PAGE + thread as u64 * 0x100_0000
}

/// A thread that stores to its own words, and reads all words.
struct Storer<'d, 'n> {
    number: usize,
    disk: &'d Disk<'n>,
    random: fastrand::Rng,
    generation: u64,
}

impl<'n> Storer<'_, 'n> {
    fn step(&mut self, cpu: &mut NativeCpu<'_, 'n>) -> Result<(), Stop> {
        let disk = self.disk;
        let own = Spot::random(&mut self.random, self.number);
        let addr = view(self.number) + own.offset();
        self.generation += 1;
        let value = own.value(self.generation);
        match self.random.u32(0..32) {
            0..8 => {
                cpu.store(addr, value)?;
                self.stored(own);
            }
            8..10 => {
                let spaces = [cpu.running().space(), disk.other.space()];
                let space = spaces[self.random.usize(0..2)];
                space.write_bytes(cpu.cpu(), addr, &value.to_ne_bytes()).unwrap();
                self.stored(own);
            }
            10 => {
                self.store_by_device(cpu, own, value);
                self.stored(own);
            }
            11..13 => {
                cpu.switch(&disk.other, |cpu| Ok(cpu.store(addr, value)?))?;
                self.stored(own);
            }
            13..19 => {
                let write = |at: *mut u8| {
                    word(at.wrapping_add(own.within() as usize)).store(value, Ordering::Release);
                };
                waiting(cpu, || disk.object.write_page(cpu.cpu(), own.page, write));
                self.stored(own);
            }
            19..25 => {
                let spot = Spot { thread: self.random.usize(0..STORERS), ..own };
                self.check(spot, || Ok(cpu.load(view(self.number) + spot.offset())?))?;
            }
            25..30 => {
                let spot = Spot { thread: self.random.usize(0..STORERS), ..own };
                let read = |at: Option<*const u8>| {
                    let at = at.expect("a page that was read").wrapping_add(spot.within() as usize);
                    word(at).load(Ordering::Acquire)
                };
                let read = || disk.object.read_page(cpu.cpu(), spot.page, read);
                let load = || Ok(waiting(cpu, read));
                self.check(spot, load)?;
            }
            30 => cpu.madvise(view(self.number), VIEW, Advice::DontNeed)?,
            _ => {
                let around = Setting::FaultAroundPages(1 << self.random.u32(0..5));
                cpu.native().vm().set(around);
            }
        }
        Ok(())
    }

    /// Stores as a device, and publishes the store before the page is unpinned.
    fn store_by_device(&mut self, cpu: &NativeCpu<'_, '_>, spot: Spot, value: u64) {
        let (space, addr) = (cpu.running().space(), view(self.number) + spot.offset());
        let pins = space.pin(cpu.cpu(), addr, 8, true).unwrap();
        if self.random.bool() {
            // The device is slow: the page dirtied by the pin's fault is clean again.
            self.disk.write_back(cpu, cpu.running());
        }
        let page = cpu.native().machine().frame_bytes(pins.frames()[0]);
        word(page.wrapping_add(spot.within() as usize)).store(value, Ordering::Release);
        self.disk.object.note_stored(cpu.cpu(), spot.page..spot.page + 1);
        drop(pins);
    }

    fn stored(&self, spot: Spot) {
        self.disk.stored[spot.number()].store(self.generation, Ordering::SeqCst);
    }

    /// Checks that the loaded value is no older than the last store before the load.
    fn check(&self, spot: Spot, load: impl FnOnce() -> Result<u64, Stop>) -> Result<(), Stop> {
        let least = self.disk.stored(spot);
        let found = spot.generation(load()?);
        assert!(found >= least, "{spot:?} has generation {found}, {least} was stored");
        assert!(spot.thread != self.number || found == least, "{spot:?}: {found}, not {least}");
        Ok(())
    }
}

/// Makes a call of the kernel that may need a page which another thread is reading.
fn waiting<R>(cpu: &NativeCpu<'_, '_>, call: impl Fn() -> Result<R, Errno>) -> R {
    loop {
        match call() {
            Err(Errno::EAGAIN) => cpu.cpu().await_read().unwrap(),
            result => return result.unwrap(),
        }
    }
}

/// Writes back and drops pages until the clock ends the test.
fn write_back(cpu: &NativeCpu<'_, '_>, clock: &Clock, disk: &Disk<'_>, seed: u64) {
    let mut random = fastrand::Rng::with_seed(seed);
    while clock.goes_on() {
        let least: Vec<_> = Spot::all().map(|spot| disk.stored(spot)).collect();
        disk.write_back(cpu, cpu.running());
        for ((spot, least), found) in Spot::all().zip(least).zip(disk.in_file()) {
            let found = spot.generation(found);
            assert!(found >= least, "the file has {found} of {spot:?}, {least} was stored before");
        }
        if random.u32(0..16) == 0 {
            disk.object.sync().unwrap();
        }
        let first = random.u64(0..PAGES);
        let pages = random.u64(1..=PAGES - first);
        for process in [cpu.running(), &disk.other] {
            for at in (0..STORERS).map(view) {
                let (at, len) = (at + first * PAGE, pages * PAGE);
                process.space().madvise(cpu.cpu(), at, len, Advice::DontNeed).unwrap();
            }
        }
        let dropped = disk.object.drop_clean(cpu.cpu(), first..first + pages);
        disk.dropped.fetch_add(dropped, Ordering::Relaxed);
        cpu.poll();
    }
}

#[test]
fn no_store_is_lost_during_writeback() {
    let native = machine(STORERS + 1, 8 << 20);
    let must = [
        Counter::Spf,
        Counter::VmaLockSuccess,
        Counter::SharedPage,
        Counter::MajorFault,
        Counter::StoreRead,
        Counter::PageWritten,
    ];
    let (mut seed, mut dropped) = (0, 0);
    weather(&native, &must, |mode, length| {
        seed += 0x1_0000;
        let file = tempfile::tempfile().unwrap();
        file.set_len(LEN).unwrap();
        let store = Arc::new(HostFile::new(file.try_clone().unwrap()).unwrap());
        let (process, other) = (native.process().unwrap(), native.process().unwrap());
        let object = process.run(|cpu| Ok(Object::of_store(cpu.cpu(), store, 1).unwrap())).unwrap();
        let stored = Spot::all().map(|_| AtomicU64::new(0)).collect();
        let disk = Disk { object, file, other, stored, dropped: AtomicU64::new(0) };
        let map = |cpu: &mut NativeCpu<'_, '_>| {
            for at in (0..STORERS).map(view) {
                disk.map(cpu, cpu.running(), at);
                disk.map(cpu, &disk.other, at);
            }
            Ok(())
        };
        process.run(map).unwrap();
        storm(&process, STORERS + 1, mode, length, |cpu, number, clock| {
            let seed = seed ^ number as u64;
            if number == STORERS {
                write_back(cpu, clock, &disk, seed);
                return Ok(());
            }
            let random = fastrand::Rng::with_seed(seed);
            let mut storer = Storer { number, disk: &disk, random, generation: 0 };
            while clock.goes_on() {
                storer.step(cpu)?;
            }
            Ok(())
        });
        process.run(|cpu| Ok(disk.write_back(cpu, &process))).unwrap();
        for (spot, found) in Spot::all().zip(disk.in_file()) {
            assert_eq!(found, spot.value(disk.stored(spot)), "{spot:?} at last");
        }
        assert_eq!(disk.file.metadata().unwrap().len(), LEN);
        dropped += disk.dropped.load(Ordering::Relaxed);
        let Disk { object, other, .. } = disk;
        process
            .run(|cpu| {
                cpu.exit(other);
                Object::release(object, cpu.cpu());
                Ok(())
            })
            .unwrap();
        process.exit();
    });
    assert!(dropped > 0, "no page was ever dropped");
}
