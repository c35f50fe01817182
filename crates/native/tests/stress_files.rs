//! Threads map, read, write, copy and truncate the same files. No thread sees the bytes of another
//! page or of a frame with a new owner, and only truncation loses stores.

use crate::common::stress::{Clock, machine, storm, weather};
use crate::common::{PAGE, RW, word};
use core::sync::atomic::{AtomicU64, Ordering};
use faultless::{Advice, Backing, Counter, MapFlags, Object, PrivateCopies, Prot, Setting, Shared};
use faultless_native::{NativeCpu, Signal, Stop};
use std::sync::RwLock;

const THREADS: usize = 3;
const PAGES: u64 = 48;
const FILES: usize = 2;
const SHARED: MapFlags = MapFlags::SHARED.union(MapFlags::FIXED);
const PRIVATE: MapFlags = MapFlags::PRIVATE.union(MapFlags::FIXED);

struct File {
    object: Shared<Object>,
    /// Odd while the file is truncated; a different number afterwards.
    cuts: AtomicU64,
}

/// The state shared by all threads.
struct Disk {
    files: [File; FILES],
    /// Truncation keeps children out, which the truncating thread does not know.
    children: RwLock<()>,
}

/// A thread's mappings of a file, and the thread's knowledge of its own pages.
struct Views {
    shared: u64,
    private: u64,
    /// The thread's last store to each of its pages, and the number of cuts at that time.
    stored: [(u64, u64); PAGES as usize],
    /// The same for its private copies.
    copied: [(u64, u64); PAGES as usize],
}

struct Thread<'d> {
    number: usize,
    disk: &'d Disk,
    views: [Views; FILES],
    generation: u64,
    random: fastrand::Rng,
}

/// Returns the possible content of page `index` of file `file`, besides zeros: this number, with a
/// generation in the low bits.
fn stamp(file: usize, index: u64) -> u64 {
    (0xf11e << 16 | (file as u64) << 8 | index) << 32
}

impl Thread<'_> {
    fn map(&self, cpu: &NativeCpu<'_, '_>, file: usize, shared: bool, prot: Prot) {
        let view = &self.views[file];
        let (at, flags) = if shared { (view.shared, SHARED) } else { (view.private, PRIVATE) };
        let object = &self.disk.files[file].object;
        let backing = Backing { object, first: 0, may_write: true };
        let space = cpu.running().space();
        assert_eq!(space.mmap_object(cpu.cpu(), at, PAGES * PAGE, prot, flags, backing), Ok(at));
    }

    /// Returns a page of the thread.
    fn own(&mut self) -> u64 {
        self.random.u64(0..PAGES / THREADS as u64) * THREADS as u64 + self.number as u64
    }

    /// Checks that a load returned the last store, unless the file was cut since.
    fn check(&self, file: usize, index: u64, known: (u64, u64), found: u64) {
        let (value, cuts) = known;
        if self.disk.files[file].cuts.load(Ordering::SeqCst) == cuts && cuts % 2 == 0 {
            assert_eq!(found, value, "page {index} of file {file}");
        } else {
            self.belongs(file, index, found);
        }
    }

    fn belongs(&self, file: usize, index: u64, found: u64) {
        let stamp = stamp(file, index);
        assert!(found == 0 || found & !0xffff_ffff == stamp, "page {index}: {found:#x}");
    }

    fn next(&mut self, file: usize, index: u64) -> u64 {
        self.generation += 1;
        stamp(file, index) | self.generation
    }

    /// Stores to an own page by `store`, and records the store.
    fn store(
        &mut self,
        file: usize,
        index: u64,
        private: bool,
        store: impl FnOnce(u64) -> Result<(), Signal>,
    ) {
        let disk = self.disk;
        let cuts = || disk.files[file].cuts.load(Ordering::SeqCst);
        let (before, value) = (cuts(), self.next(file, index));
        let done = store(value);
        assert!(matches!(done, Ok(()) | Err(Signal::Bus { .. })), "{done:?}");
        // Odd counts are never compared.
        let known = if done.is_ok() && cuts() == before { (value, before) } else { (0, 1) };
        let view = &mut self.views[file];
        let notes = if private { &mut view.copied } else { &mut view.stored };
        notes[index as usize] = known;
    }

    fn step(&mut self, cpu: &mut NativeCpu<'_, '_>) -> Result<(), Stop> {
        let disk = self.disk;
        let file = self.random.usize(0..FILES);
        let object = &disk.files[file].object;
        let index = self.own();
        let Views { shared, private, stored, copied } = &self.views[file];
        let (in_shared, in_private) = (shared + index * PAGE, private + index * PAGE);
        let (stored, copied) = (stored[index as usize], copied[index as usize]);
        match self.random.u32(0..32) {
            0..4 => self.store(file, index, false, |value| cpu.store(in_shared, value)),
            4 | 5 => self.store(file, index, false, |value| {
                let write = |at: *mut u8| word(at).store(value, Ordering::Release);
                let written = object.write_page(cpu.cpu(), index, write);
                written.map_err(|_| Signal::Bus { addr: index })
            }),
            6..9 => self.store(file, index, true, |value| cpu.store(in_private, value)),
            9..14 => match cpu.load::<u64>(in_shared) {
                Ok(found) => self.check(file, index, stored, found),
                Err(signal) => assert!(matches!(signal, Signal::Bus { .. }), "{signal}"),
            },
            14 | 15 => {
                let found = object.read_page(cpu.cpu(), index, |at| {
                    at.map_or(0, |at| word(at).load(Ordering::Acquire))
                });
                self.check(file, index, stored, found.expect("a file without a store never fails"));
            }
            16..19 => match cpu.load::<u64>(in_private) {
                Ok(found) if copied.0 != 0 => self.check(file, index, copied, found),
                Ok(found) => self.belongs(file, index, found),
                Err(signal) => assert!(matches!(signal, Signal::Bus { .. }), "{signal}"),
            },
            19..24 => {
                let index = self.random.u64(0..PAGES);
                match cpu.load::<u64>(self.views[file].shared + index * PAGE) {
                    Ok(found) => self.belongs(file, index, found),
                    Err(signal) => assert!(matches!(signal, Signal::Bus { .. }), "{signal}"),
                }
            }
            24 => {
                let whole = self.random.bool();
                let (at, len) = if whole { (*shared, PAGES) } else { (in_shared, PAGES - index) };
                cpu.madvise(at, len * PAGE, Advice::DontNeed)?;
            }
            25 => {
                cpu.mprotect(in_shared, PAGE, Prot::READ)?;
                cpu.mprotect(in_shared, PAGE, RW)?;
            }
            26 => self.map(cpu, file, true, RW),
            27 => {
                self.map(cpu, file, false, RW);
                self.views[file].copied = [(0, 1); PAGES as usize];
            }
            28 => self.fork(cpu)?,
            29 => {
                let around = Setting::FaultAroundPages(1 << self.random.u32(0..7));
                cpu.native().vm().set(around);
            }
            _ => self.cut(cpu, file),
        }
        Ok(())
    }

    /// A child sees the thread's copies and the file, and its own stores to private copies stay
    /// private.
    fn fork(&mut self, cpu: &mut NativeCpu<'_, '_>) -> Result<(), Stop> {
        let Ok(_child) = self.disk.children.try_read() else { return Ok(()) };
        let child = cpu.fork()?;
        cpu.switch(&child, |cpu| {
            for (file, view) in self.views.iter().enumerate() {
                for index in (self.number as u64..PAGES).step_by(THREADS) {
                    let (at, known) = (index * PAGE, index as usize);
                    let found = cpu.load::<u64>(view.shared + at)?;
                    self.check(file, index, view.stored[known], found);
                    if view.copied[known].0 != 0 {
                        let found = cpu.load::<u64>(view.private + at)?;
                        self.check(file, index, view.copied[known], found);
                    }
                    cpu.store(view.private + at, stamp(file, index))?;
                }
            }
            Ok(())
        })?;
        cpu.exit(child);
        Ok(())
    }

    /// Truncates the file, checks that no page remains beyond, and extends the file again.
    fn cut(&mut self, cpu: &NativeCpu<'_, '_>, file: usize) {
        let Ok(_alone) = self.disk.children.try_write() else { return };
        let File { object, cuts } = &self.disk.files[file];
        let end = self.random.u64(0..PAGES);
        cuts.fetch_add(1, Ordering::SeqCst);
        object.set_pages(cpu.cpu(), end).unwrap();
        cpu.running().space().revoke(cpu.cpu(), object, end..PAGES, PrivateCopies::Drop);
        let beyond = self.random.u64(end..PAGES);
        // The mappings of other threads are in this space as well.
        for at in (0..THREADS).flat_map(|number| places(number, file)) {
            let addr = at + beyond * PAGE;
            let found = cpu.load::<u64>(addr);
            // A starting thread has not mapped the file yet.
            let mapped = found != Err(Signal::Segv { addr, mapped: false });
            assert!(!mapped || found == Err(Signal::Bus { addr }), "cut at {end}: {found:?}");
        }
        object.set_pages(cpu.cpu(), PAGES).unwrap();
        cuts.fetch_add(1, Ordering::SeqCst);
    }
}

/// Returns the addresses of a thread's shared and private mappings of a file, at different offsets
/// in their tables.
fn places(number: usize, file: usize) -> [u64; 2] {
    let base = (0x4000_0000 - 20 * PAGE) + (number * FILES + file) as u64 * 0x1000_0000;
    [base, base + 0x800_0000 + number as u64 * PAGE]
}

fn guest(
    cpu: &mut NativeCpu<'_, '_>,
    number: usize,
    clock: &Clock,
    disk: &Disk,
    seed: u64,
) -> Result<(), Stop> {
    let views = core::array::from_fn(|file| {
        let unknown = [(0, 1); PAGES as usize];
        let [shared, private] = places(number, file);
        Views { shared, private, stored: unknown, copied: unknown }
    });
    let random = fastrand::Rng::with_seed(seed ^ number as u64);
    let mut thread = Thread { number, disk, views, generation: 0, random };
    for file in 0..FILES {
        [true, false].into_iter().for_each(|shared| thread.map(cpu, file, shared, RW));
    }
    while clock.goes_on() {
        thread.step(cpu)?;
    }
    Ok(())
}

#[test]
fn files_mapped_and_cut_by_all_threads_stay_consistent() {
    let native = machine(THREADS, 8 << 20);
    let must = [
        Counter::Spf,
        Counter::SpfVmaChanged,
        Counter::SharedPage,
        Counter::AroundPage,
        Counter::CowCopy,
        Counter::Bus,
        Counter::VmaLockSuccess,
    ];
    let mut seed = 0;
    weather(&native, &must, |mode, length| {
        seed += 0x1_0000;
        let process = native.process().unwrap();
        let file = |cpu: &NativeCpu<'_, '_>| File {
            object: Object::try_new(cpu.cpu(), PAGES, 1).unwrap(),
            cuts: AtomicU64::new(0),
        };
        let files = process.run(|cpu| Ok([file(cpu), file(cpu)])).unwrap();
        let disk = Disk { files, children: RwLock::new(()) };
        storm(&process, THREADS, mode, length, |cpu, number, clock| {
            guest(cpu, number, clock, &disk, seed)
        });
        process
            .run(|cpu| {
                disk.files.into_iter().for_each(|file| Object::release(file.object, cpu.cpu()));
                Ok(())
            })
            .unwrap();
        process.exit();
    });
}
