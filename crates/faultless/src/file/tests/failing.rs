//! Failing devices, at every operation: the disk of a file and the disk of the swap area, behind
//! one counter.
//!
//! One run uses both disks completely: shared and private mappings of the file, private memory of
//! more pages than memory has frames, forks, writeback, eviction, and kernel calls. The run is
//! repeated with the first operation failing, then the second, and so on; with a single failure,
//! with all later operations failing, and with every third. After each run:
//!
//! - a call fails only if the device failed during the call, with `SIGBUS`, `EIO` or, if no page
//!   could be evicted, out of memory;
//! - each load of a program returns the value of the model, and every frame is accounted for;
//! - when the device works again, all contents are present, and all stored bytes reach the file.

use crate::audit::audit_with;
use crate::error::Errno;
use crate::fault::{Access, FaultError};
use crate::file::{BackingStore, Object, ReadRun, StoreError, WriteRun};
use crate::heap::Shared;
use crate::knob::{Locking, Setting};
use crate::space::{Advice, Prot, Space};
use crate::testing::guest::{
    self, AT, P, PRIVATE, RW, SHARED, TestCpu, TestSpace, TestVm, cpu, load, map, map_object, store,
};
use crate::testing::store::{Memory, PAGE, Plan, write_back};
use core::fmt;
use std::boxed::Box;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::vec::Vec;

/// Pages of the file; all are mapped, shared, from page 0 of a program on.
const FILE: u64 = 20;
/// From this page on, the pages also have a private mapping.
const COPIES: u64 = 32;
const COPIED: u64 = 8;
/// Private memory, more than frames.
const OWN: u64 = 64;
const OWNED: u64 = 48;
const FRAMES: u32 = 64;

/// Which operations fail.
#[derive(Clone, Copy, Debug)]
enum Fails {
    Never,
    Only(u64),
    From(u64),
    /// This operation, and every third operation after it.
    Third(u64),
}

/// The common state of both disks.
#[derive(Debug)]
struct Device {
    fails: std::sync::Mutex<Fails>,
    operations: AtomicU64,
    failed: AtomicU64,
}

impl Device {
    /// Begins an operation. Returns whether the operation fails.
    fn operate(&self) -> bool {
        let number = self.operations.fetch_add(1, Ordering::Relaxed);
        let fails = match *self.fails.lock().unwrap() {
            Fails::Never => false,
            Fails::Only(only) => number == only,
            Fails::From(first) => number >= first,
            Fails::Third(first) => number >= first && (number - first).is_multiple_of(3),
        };
        self.failed.fetch_add(fails.into(), Ordering::Relaxed);
        fails
    }

    fn failed(&self) -> u64 {
        self.failed.load(Ordering::Relaxed)
    }
}

/// A disk in memory.
#[derive(Debug)]
struct Disk {
    memory: Arc<Memory>,
    device: Arc<Device>,
}

impl Disk {
    /// Counts an operation. A failing operation has done a varying part of its work.
    fn operate(&self) {
        if self.device.operate() {
            let number = self.device.operations.load(Ordering::Relaxed);
            let done = [0, PAGE + 7, 100][number as usize % 3];
            self.memory.plan([Plan::Fail(done)]);
        }
    }
}

impl BackingStore for Disk {
    fn len(&self) -> u64 {
        self.memory.len()
    }

    fn preferred_pages(&self) -> usize {
        self.memory.preferred_pages()
    }

    fn read(&self, run: &mut ReadRun) -> Result<usize, StoreError> {
        self.operate();
        self.memory.read(run)
    }

    fn write(&self, run: &WriteRun<'_>) -> Result<(), StoreError> {
        self.operate();
        self.memory.write(run)
    }

    fn sync(&self) -> Result<(), Errno> {
        if self.device.operate() { Err(Errno::EIO) } else { Ok(()) }
    }

    fn set_len(&self, bytes: u64) -> Result<(), Errno> {
        self.memory.set_len(bytes)
    }
}

/// A program, and the private words of its pages.
struct Program {
    space: TestSpace,
    words: BTreeMap<u64, u64>,
}

struct World<'c, 'v> {
    cpu: &'c TestCpu<'v>,
    device: Arc<Device>,
    disk: Arc<Memory>,
    file: Shared<Object>,
    /// The words of the file's pages.
    words: [u64; FILE as usize],
    programs: Vec<Program>,
    /// The number of failed calls.
    errors: u64,
}

impl World<'_, '_> {
    /// Returns the expected word of `page` in `program`.
    fn expected(&self, program: usize, page: u64) -> u64 {
        let words = &self.programs[program].words;
        let own = words.get(&page).copied();
        match page {
            0..FILE => self.words[page as usize],
            COPIES..OWN => own.unwrap_or_else(|| self.words[(page - COPIES) as usize]),
            _ => own.unwrap_or(0),
        }
    }

    /// Makes a call, which may fail only if the device failed during the call. Returns `None` after
    /// such a failure.
    fn call<R, E: core::fmt::Debug>(
        &mut self,
        call: impl FnOnce(&Self) -> Result<R, E>,
        proper: impl FnOnce(&E) -> bool,
    ) -> Option<R> {
        let before = self.device.failed();
        match call(self) {
            Ok(result) => Some(result),
            Err(error) => {
                assert!(proper(&error), "{error:?}");
                assert!(self.device.failed() > before, "{error:?}, and the device works");
                self.errors += 1;
                None
            }
        }
    }

    fn load(&mut self, program: usize, page: u64) {
        let expected = self.expected(program, page);
        let loads = |world: &Self| load(world.cpu, &world.programs[program].space, AT + page * P);
        if let Some(found) = self.call(loads, is_proper) {
            assert_eq!(found, expected, "page {page} of program {program}");
        }
    }

    fn store(&mut self, program: usize, page: u64, word: u64) {
        let at = AT + page * P;
        let stores = |world: &Self| store(world.cpu, &world.programs[program].space, at, word);
        if self.call(stores, is_proper).is_none() {
            return;
        }
        if page < FILE {
            self.words[page as usize] = word;
        } else {
            self.programs[program].words.insert(page, word);
        }
    }

    fn fork(&mut self) {
        let fork = |world: &Self| world.programs[0].space.fork(world.cpu);
        let child = self.call(fork, |error| error.errno == Errno::ENOMEM);
        if let Some(space) = child {
            let words = self.programs[0].words.clone();
            self.programs.push(Program { space, words });
        }
    }

    fn write_back(&mut self) {
        let write = |world: &Self| {
            let spaces = world.programs.iter().map(|program| &program.space).collect::<Vec<_>>();
            write_back(world.cpu, &spaces, &world.file)
        };
        // The store's own error.
        let proper = |errno: &Errno| matches!(errno, Errno::ENOSPC | Errno::EIO | Errno::ENOMEM);
        if self.call(write, proper).is_some() {
            for page in 0..FILE {
                let word = self.words[page as usize];
                assert_eq!(self.disk.word(page), word, "page {page} was written");
            }
        }
    }

    /// A call of the kernel stores to the file.
    fn write(&mut self, page: u64, word: u64) {
        let write = |world: &Self| guest::write_object(world.cpu, &world.file, page, word);
        let proper = |errno: &Errno| matches!(errno, Errno::EIO | Errno::ENOMEM);
        if self.call(write, proper).is_some() {
            self.words[page as usize] = word;
        }
    }

    fn check(&self) {
        self.cpu.drain();
        let spaces = self.programs.iter().map(|program| &program.space).collect::<Vec<_>>();
        audit_with(self.cpu, &spaces, &[&self.file]).unwrap();
    }

    /// Uses the disks in every way.
    fn run(&mut self) {
        let mut word = 1000;
        let mut next = || {
            word += 1;
            word
        };
        for page in 0..FILE {
            self.load(0, page);
        }
        for page in (0..FILE).step_by(3) {
            self.store(0, page, next());
        }
        for page in COPIES..COPIES + COPIED {
            if page.is_multiple_of(2) {
                self.store(0, page, next());
            }
            self.load(0, page);
        }
        // From here on, stores require evictions.
        for page in OWN..OWN + OWNED {
            self.store(0, page, next());
        }
        self.check();
        self.fork();
        for program in 0..self.programs.len() {
            for page in (OWN..OWN + OWNED).step_by(5).chain(COPIES..COPIES + COPIED) {
                self.store(program, page, next());
            }
            for page in (0..FILE).rev() {
                self.load(program, page);
            }
        }
        self.write(4, next());
        self.write_back();
        self.call(|world| world.file.sync(), |errno| *errno == Errno::EIO);
        self.check();
        for program in 0..self.programs.len() {
            let Program { space, .. } = &self.programs[program];
            // Advice that cannot be followed is no error.
            space.madvise(self.cpu, AT + OWN * P, OWNED / 2 * P, Advice::PageOut).unwrap();
            space.madvise(self.cpu, AT, FILE * P, Advice::PageOut).unwrap();
            for page in (OWN..OWN + OWNED).chain(0..FILE).chain(COPIES..COPIES + COPIED) {
                self.load(program, page);
            }
        }
        if self.programs.len() > 1
            && let Some(Program { space, .. }) = self.programs.pop()
        {
            space.exit(self.cpu);
        }
        self.cpu.reclaim(u64::MAX);
        self.check();
        for page in (OWN..OWN + OWNED).step_by(2).chain((0..FILE).step_by(2)) {
            self.store(0, page, next());
        }
    }

    /// Lets the device work again, and checks that no contents are lost.
    fn recover(&mut self) {
        *self.device.fails.lock().unwrap() = Fails::Never;
        let before = self.errors;
        for program in 0..self.programs.len() {
            for page in (0..FILE).chain(COPIES..COPIES + COPIED).chain(OWN..OWN + OWNED) {
                self.load(program, page);
            }
        }
        self.write_back();
        self.check();
        assert_eq!(self.errors, before);
    }
}

/// Checks for the signals of a program that needs an unreadable page, or a frame while no page can
/// be evicted.
fn is_proper(error: &FaultError) -> bool {
    matches!(error, FaultError::Bus | FaultError::OutOfMemory)
}

/// Runs with the failures `fails`. Returns the number of operations and of failed calls.
fn run(locking: Locking, fails: Fails) -> (u64, u64) {
    let vm = guest::vm(1, FRAMES);
    vm.set(Setting::Locking(locking));
    vm.set(Setting::DeferredFlush(locking == Locking::Speculative));
    let cpu = cpu(&vm, 0);
    let device = Arc::new(Device {
        fails: std::sync::Mutex::new(fails),
        operations: AtomicU64::new(0),
        failed: AtomicU64::new(0),
    });
    let disk = |memory| Arc::new(Disk { memory, device: device.clone() });
    let memory = Memory::new(FILE, 0);
    cpu.swap_on(disk(Memory::new(4 * OWNED, 0))).unwrap();
    let file = Object::of_store(&cpu, disk(memory.clone()), 77).unwrap();
    let space = Space::new(&cpu).unwrap();
    map_object(&cpu, &space, (0, FILE), RW, SHARED, (&file, 0));
    map_object(&cpu, &space, (COPIES, COPIED), RW, PRIVATE, (&file, 0));
    map(&cpu, &space, OWN, OWNED, RW);
    let programs = Vec::from([Program { space, words: BTreeMap::new() }]);
    let words = core::array::from_fn(|page| page as u64 + 1);
    let (cpu, disk) = (&cpu, memory);
    let mut world = World { cpu, device, disk, file, words, programs, errors: 0 };
    world.run();
    let operations = world.device.operations.load(Ordering::Relaxed);
    world.recover();
    let World { programs, file, errors, .. } = world;
    programs.into_iter().for_each(|program| program.space.exit(cpu));
    cpu.drain();
    assert_eq!(cpu.swap_usage().1, 0, "a slot is lost");
    Object::release(file, cpu);
    cpu.reclaim(u64::MAX);
    cpu.drain();
    let census = audit_with(cpu, &[], &[]).unwrap();
    assert_eq!((census.anon, census.shared), (0, 0), "pages remain");
    (operations, errors)
}

#[test]
fn a_device_failure_affects_only_calls_that_need_the_device() {
    let kinds: [fn(u64) -> Fails; 3] = [Fails::Only, Fails::From, Fails::Third];
    for locking in Locking::ALL {
        let (operations, errors) = run(locking, Fails::Never);
        assert!(operations > 60, "{operations} operations");
        assert_eq!(errors, 0);
        for kind in kinds {
            let every = if cfg!(miri) { 37 } else { 1 };
            let mut errors = 0;
            for number in (0..operations).step_by(every) {
                errors += run(locking, kind(number)).1;
            }
            assert!(errors > operations / 8, "{errors} errors of {operations} operations");
        }
    }
}

/// A store that runs a closure in its first read, which fails.
struct FirstFails {
    memory: Arc<Memory>,
    first: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl fmt::Debug for FirstFails {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.memory.fmt(f)
    }
}

impl BackingStore for FirstFails {
    fn len(&self) -> u64 {
        self.memory.len()
    }

    fn read(&self, run: &mut ReadRun) -> Result<usize, StoreError> {
        let Some(first) = self.first.lock().unwrap().take() else { return self.memory.read(run) };
        first();
        Err(StoreError { done: 0, errno: Errno::EIO })
    }

    fn write(&self, run: &WriteRun<'_>) -> Result<(), StoreError> {
        self.memory.write(run)
    }

    fn set_len(&self, bytes: u64) -> Result<(), Errno> {
        self.memory.set_len(bytes)
    }
}

/// A fault cannot read its page, and then finds another mapping under the lock. Later, the file is
/// mapped there again, and a pin needs the same page. By then the device works.
#[test]
fn a_failed_read_does_not_affect_later_calls() {
    let vm: &'static TestVm = Box::leak(Box::new(guest::vm(2, 256)));
    let (cpu0, cpu1) = (cpu(vm, 0), cpu(vm, 1));
    let first = FirstFails { memory: Memory::new(8, 0), first: Mutex::default() };
    let store = Arc::new(first);
    let file = Object::of_store(&cpu0, store.clone(), 5).unwrap();
    let space: &'static TestSpace = Box::leak(Box::new(Space::new(&cpu0).unwrap()));
    let map_file = || map_object(&cpu0, space, (0, 4), Prot::READ, PRIVATE, (&file, 0));
    map_file();
    *store.first.lock().unwrap() = Some(Box::new(move || {
        space.munmap(&cpu1, AT, 4 * P).unwrap();
        map(&cpu1, space, 0, 4, RW);
    }));
    space.fault_remote(&cpu0, AT, Access::Read).unwrap();
    map_file();
    let pin = space.pin(&cpu0, AT, P, false).unwrap();
    assert_eq!(load(&cpu0, space, AT), Ok(1));
    drop(pin);
}
