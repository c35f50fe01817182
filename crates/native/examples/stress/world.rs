//! A round: the machine, its processes and files, phases of random operations, and the checks in
//! between.

use super::files;
use super::operations::Agent;
use super::plan::{FileKind, Plan, RegionKind, Swap};
use super::region::{Reached, Region};
use super::stores::{Device, Disk};
use super::tally::Tally;
use super::words::{Contents, Reader};
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use faultless::{Object, PAGE_SIZE, Shared};
use faultless_native::{Native, NativeCpu, Process, Signal, Stop};
use std::any::Any;
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A file mapped by processes.
pub struct File {
    pub object: Shared<Object>,
    pub contents: Arc<Contents>,
    /// The store of the file.
    pub disk: Option<Arc<Disk>>,
    /// The device of a store with random failures.
    pub device: Option<Arc<Device>>,
    /// Held by the thread that cuts the file.
    pub cutter: Mutex<()>,
}

/// A process and the model of its memory.
pub struct Program<'n> {
    pub process: Process<'n>,
    pub regions: Vec<Region>,
}

/// Keeps forks out of calls on files that visit all spaces, and such calls out of forks.
#[derive(Default)]
pub struct Gate(AtomicU64);

/// The right to be inside a [`Gate`].
pub struct Inside<'g>(&'g Gate, u64);

impl Gate {
    const FORK: u64 = 1;
    const VISIT: u64 = 1 << 32;

    /// Enters for a fork, or for the end of a child, unless a thread visits all spaces.
    pub fn fork(&self) -> Option<Inside<'_>> {
        self.enter(Self::FORK, |now| now < Self::VISIT)
    }

    /// Enters to visit all spaces, unless a fork is under way.
    pub fn visit(&self) -> Option<Inside<'_>> {
        self.enter(Self::VISIT, |now| now % Self::VISIT == 0)
    }

    fn enter(&self, step: u64, may: impl Fn(u64) -> bool) -> Option<Inside<'_>> {
        let next = |now| may(now).then_some(now + step);
        self.0.fetch_update(SeqCst, SeqCst, next).ok().map(|_| Inside(self, step))
    }
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.0.0.fetch_sub(self.1, SeqCst);
    }
}

/// The state shared by all threads of a round.
pub struct World<'n> {
    pub plan: &'n Plan,
    pub native: &'n Native,
    pub tally: &'n Tally,
    pub files: Vec<File>,
    /// The device of the swap area, if it fails at random.
    pub swap: Option<Arc<Device>>,
    pub programs: Vec<Arc<Program<'n>>>,
    /// Children without a permanent thread.
    pub children: Mutex<Vec<Arc<Program<'n>>>>,
    pub gate: Gate,
    /// The tag of the next process.
    tags: AtomicU64,
    control: &'n Control,
    /// Whether a thread has failed.
    over: AtomicBool,
}

pub fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// State shared by the threads of rounds and the caller.
#[derive(Debug, Default)]
pub struct Control {
    /// Ends the round early.
    stop: AtomicBool,
    /// The first failure of a thread. Other threads may wait endlessly for a failed thread.
    failure: Mutex<Option<String>>,
}

impl Control {
    /// No failure, and no end.
    pub const fn new() -> Self {
        Self { stop: AtomicBool::new(false), failure: Mutex::new(None) }
    }

    /// Ends the round early.
    pub fn stop(&self) {
        self.stop.store(true, SeqCst);
    }

    /// Returns whether the round should end early.
    pub fn is_stopped(&self) -> bool {
        self.stop.load(SeqCst)
    }

    /// The failure of a thread, if a thread has failed.
    pub fn failure(&self) -> Option<String> {
        locked(&self.failure).clone()
    }

    fn fail(&self, wrong: String) {
        locked(&self.failure).get_or_insert(wrong);
    }
}

/// The message of a panic.
fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    format!("panic: {}", text.unwrap_or("of another type"))
}

/// The end of a round without an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    Whole,
    /// The caller has stopped the round.
    Stopped,
}

/// Runs the round of `plan`.
///
/// # Errors
/// The mismatch. The machine then keeps its state.
pub fn run(plan: &Plan, tally: &Tally, control: &Control) -> Result<Ended, String> {
    let native = Native::new(plan.config).map_err(|error| format!("no machine: {error}"))?;
    let native = ManuallyDrop::new(native);
    let ended = catch_unwind(AssertUnwindSafe(|| run_on(&native, plan, tally, control)));
    let ended = ended.unwrap_or_else(|panic| Err(message(&*panic)))?;
    tally.add_counters(&native.vm().totals());
    drop(ManuallyDrop::into_inner(native));
    Ok(ended)
}

fn run_on(native: &Native, plan: &Plan, tally: &Tally, control: &Control) -> Result<Ended, String> {
    plan.settings.iter().for_each(|&setting| native.vm().set(setting));
    let mut world = ManuallyDrop::new(World::new(native, plan, tally, control));
    let alone = native.process().map_err(|error| error.to_string())?;
    alone.run(|cpu| Ok(world.add_swap(cpu))).map_err(|stop| stop.to_string())??;
    // From now on the swap area has its tables.
    alone.exit();
    let before = native.audit(&[]).map_err(|wrong| format!("audit of a new machine: {wrong}"))?;
    world.create_objects()?;
    let mut random = plan.random(1);
    let mut ended = Ended::Whole;
    for phase in 0..plan.phases {
        world.phase(phase as u64);
        if let Some(failure) = control.failure() {
            return Err(format!("{failure}, in phase {phase}"));
        }
        if control.is_stopped() {
            ended = Ended::Stopped;
            break;
        }
        let last = phase + 1 == plan.phases;
        world.quiet(&mut random, last).map_err(|wrong| format!("{wrong}, after phase {phase}"))?;
    }
    let world = ManuallyDrop::into_inner(world);
    world.end(before.taken()).map_err(|wrong| format!("{wrong}, at the end"))?;
    Ok(ended)
}

impl<'n> World<'n> {
    fn new(native: &'n Native, plan: &'n Plan, tally: &'n Tally, control: &'n Control) -> Self {
        Self {
            plan,
            native,
            tally,
            files: Vec::new(),
            swap: None,
            programs: Vec::new(),
            children: Mutex::default(),
            gate: Gate::default(),
            tags: AtomicU64::new(1),
            control,
            over: AtomicBool::new(false),
        }
    }

    fn add_swap(&mut self, cpu: &NativeCpu<'_, '_>) -> Result<(), String> {
        // Room for all children.
        let slots = 8 * (self.plan.config.memory_bytes / PAGE_SIZE) + 4096;
        let device = Device::new(self.plan.seed ^ self.plan.round);
        let area = match self.plan.swap {
            Swap::None => return Ok(()),
            Swap::File => Disk::host(slots, device.clone()),
            Swap::Memory | Swap::Failing => Disk::memory(slots, device.clone()),
        };
        self.swap = (self.plan.swap == Swap::Failing).then_some(device);
        cpu.cpu().swap_on(area).map_err(|errno| format!("no swap area: {errno:?}"))
    }

    /// Adds the files and the processes.
    fn create_objects(&mut self) -> Result<(), String> {
        let alone = self.native.process().map_err(|error| error.to_string())?;
        alone.run(|cpu| Ok(self.add_files(cpu))).map_err(|stop| stop.to_string())??;
        alone.exit();
        for number in 0..self.plan.threads.len() {
            let program = self.program(number)?;
            self.programs.push(Arc::new(program));
        }
        Ok(())
    }

    fn add_files(&mut self, cpu: &NativeCpu<'_, '_>) -> Result<(), String> {
        let Plan { pages, seed, .. } = *self.plan;
        for (number, kind) in self.plan.files.iter().enumerate() {
            let device = Device::new(seed ^ self.plan.round ^ (number as u64 + 1) << 32);
            let disk = match kind {
                FileKind::Memory => None,
                FileKind::Stored { host: true } => Some(Disk::host(pages as u64, device.clone())),
                FileKind::Stored { host: false } | FileKind::Failing => {
                    Some(Disk::memory(pages as u64, device.clone()))
                }
            };
            let object = match &disk {
                None => Object::try_new(cpu.cpu(), pages as u64, 1),
                Some(disk) => Object::of_store(cpu.cpu(), disk.clone(), 1),
            };
            let object = object.map_err(|errno| format!("no file: {errno:?}"))?;
            let contents = Arc::new(Contents::new(number as u64 + 1, 0, pages, None));
            let device = (*kind == FileKind::Failing).then_some(device);
            self.files.push(File { object, contents, disk, device, cutter: Mutex::new(()) });
        }
        Ok(())
    }

    /// Returns a tag of no earlier process.
    pub fn tag(&self) -> u64 {
        self.tags.fetch_add(1, SeqCst)
    }

    /// A process with all regions mapped.
    fn program(&self, number: usize) -> Result<Program<'n>, String> {
        let (tag, plan) = (self.tag(), self.plan);
        let region = |(at, &kind): (usize, &RegionKind)| {
            let id = 8 + number as u64 * 16 + at as u64;
            let below = |file: usize| self.files[file].contents.clone();
            let contents = match kind {
                RegionKind::Shared(file) => below(file),
                RegionKind::Anonymous => Arc::new(Contents::new(id, tag, plan.pages, None)),
                RegionKind::Private(file) => {
                    Arc::new(Contents::new(id, tag, plan.pages, Some(below(file))))
                }
            };
            Region::new(at, kind, contents, plan.near)
        };
        let regions = plan.regions.iter().enumerate().map(region).collect();
        let process = self.native.process().map_err(|error| error.to_string())?;
        let program = Program { process, regions };
        let map = |cpu: &mut NativeCpu<'_, '_>| {
            for region in &program.regions {
                let mover = region.mover().expect("the only thread");
                let pages = 0..region.len();
                mover.map(cpu.cpu(), cpu.running().space(), &self.files, 0, &pages)?;
                region.toggle_holes(pages);
            }
            Ok(())
        };
        program.process.run(map).map_err(|stop| stop.to_string())?;
        Ok(program)
    }

    /// Returns whether threads should end the phase.
    pub fn is_over(&self) -> bool {
        self.over.load(SeqCst) || self.control.is_stopped()
    }

    /// Notes the first failure and ends the phase.
    fn fail(&self, wrong: String) {
        self.control.fail(wrong);
        self.over.store(true, SeqCst);
    }

    /// Runs all threads of all processes.
    fn phase(&self, phase: u64) {
        for device in self.devices() {
            device.set([4, 16, 64, 200][(self.plan.round + phase) as usize % 4]);
        }
        std::thread::scope(|scope| {
            let mut first = 0;
            for (program, &threads) in self.programs.iter().zip(&self.plan.threads) {
                let writers = first..first + threads;
                first += threads;
                scope.spawn(move || {
                    let guest = |cpu: &mut NativeCpu<'_, 'n>, number: usize| {
                        let writer = writers.start + number;
                        let random = self.plan.random(phase << 16 | writer as u64 | 2 << 40);
                        let mut agent = Agent::new(self, program, writer, random);
                        let ran = catch_unwind(AssertUnwindSafe(|| agent.run(cpu)));
                        // A panic ends here: the process has other threads.
                        if let Err(wrong) = ran.unwrap_or_else(|panic| Err(message(&*panic))) {
                            self.fail(wrong);
                        }
                        Ok(())
                    };
                    if let Err(stop) = program.process.run_threads(threads, guest) {
                        self.fail(format!("threads: {stop}"));
                    }
                });
            }
        });
    }

    /// Returns the devices with random failures.
    fn devices(&self) -> impl Iterator<Item = &Arc<Device>> {
        self.files.iter().filter_map(|file| file.device.as_ref()).chain(&self.swap)
    }

    /// All processes and children.
    pub fn everyone(&self) -> Vec<Arc<Program<'n>>> {
        let children = locked(&self.children);
        self.programs.iter().chain(&*children).cloned().collect()
    }

    /// The checks while no thread runs. Children then take the places of processes, or end.
    fn quiet(&mut self, random: &mut fastrand::Rng, last: bool) -> Result<(), String> {
        self.devices().for_each(|device| device.set(0));
        self.audit()?;
        // A part of the pages, so that the other pages are unchanged.
        let step = if last { 1 } else { random.usize(1..12) };
        for program in self.everyone() {
            let sweep = |cpu: &mut NativeCpu<'_, 'n>| Ok(self.sweep(cpu, &program, step));
            program.process.run(sweep).map_err(|stop| format!("sweep: {stop}"))??;
        }
        self.audit()?;
        let mut children = std::mem::take(&mut *locked(&self.children));
        if !children.is_empty() && random.bool() {
            let child = children.swap_remove(random.usize(0..children.len()));
            let number = random.usize(0..self.programs.len());
            self.programs[number] = child;
        }
        children.retain(|_| random.u32(0..3) == 0);
        *locked(&self.children) = children;
        Ok(())
    }

    /// Checks one page in `step`, and the slots of all pages.
    fn sweep(
        &self,
        cpu: &NativeCpu<'_, 'n>,
        program: &Program<'n>,
        step: usize,
    ) -> Result<(), String> {
        for region in &program.regions {
            let mover = region.mover().ok_or("a thread did not unlock a region")?;
            for page in 0..region.len() {
                let located = mover.locate(cpu.cpu(), program.process.space(), page)?;
                let cuts = region.contents.cuts(page);
                if page % step != 0 || located.is_none() || cuts.is_none() {
                    continue;
                }
                for writer in 0..self.plan.config.cpus {
                    match region.load(cpu, page, writer, Reader::Owner)? {
                        Reached::Signal(signal) => self.permit(region, page, cuts, signal)?,
                        Reached::Done(_) | Reached::Missing | Reached::Forbidden => {}
                    }
                }
            }
        }
        Ok(())
    }

    /// Checks whether an access to `page` may end with `signal`; `cuts` are from before the access.
    ///
    /// # Errors
    /// It may not.
    pub fn permit(
        &self,
        region: &Region,
        page: usize,
        cuts: Option<u64>,
        signal: Signal,
    ) -> Result<(), String> {
        let fails = |device: &Option<Arc<Device>>| {
            device.as_ref().is_some_and(|device| device.failed() != 0)
        };
        let file = region.file().map(|file| &self.files[file]);
        let failing = fails(&self.swap) || file.is_some_and(|file| fails(&file.device));
        let cut = cuts.is_none() || region.contents.cuts(page) != cuts;
        match signal {
            Signal::Bus { .. } if failing || file.is_some() && cut => self.tally.bus(),
            Signal::OutOfMemory { .. } => self.tally.out_of_memory(),
            Signal::Bus { .. } | Signal::Segv { .. } => {
                return Err(format!("page {page} of {:?}: {signal}", region.kind));
            }
        }
        Ok(())
    }

    /// The audit of the library, and the machine's record of stale translations.
    fn audit(&self) -> Result<(), String> {
        let everyone = self.everyone();
        let processes: Vec<_> = everyone.iter().map(|program| &program.process).collect();
        let objects: Vec<_> = self.files.iter().map(|file| &file.object).collect();
        let audited = self.native.audit_with(&processes, &objects);
        audited.map_err(|wrong| format!("audit: {wrong}"))?;
        match self.native.machine().violations().first() {
            Some(violation) => Err(format!("stale translation: {violation}")),
            None => Ok(()),
        }
    }

    /// Compares the stores of all files with the words that processes see, and ends everything.
    fn end(mut self, before: u64) -> Result<(), String> {
        self.devices().for_each(|device| device.set(0));
        let alone = self.native.process().map_err(|error| error.to_string())?;
        for file in &self.files {
            let compare = |cpu: &mut NativeCpu<'_, '_>| Ok(self.compare(cpu, file));
            alone.run(compare).map_err(|stop| format!("comparison: {stop}"))??;
        }
        self.programs.clear();
        locked(&self.children).clear();
        let files = std::mem::take(&mut self.files);
        let cleared = alone.run(|cpu| {
            for file in files {
                Object::release(file.object, cpu.cpu());
            }
            // Unneeded pages of the swap area.
            cpu.cpu().reclaim(u64::MAX);
            Ok(cpu.cpu().swap_usage().1)
        });
        let slots = cleared.map_err(|stop: Stop| format!("end: {stop}"))?;
        alone.exit();
        if slots != 0 {
            return Err(format!("{slots} slots of the swap area are in use"));
        }
        let census = self.native.audit(&[]).map_err(|wrong| format!("audit: {wrong}"))?;
        if census.taken() != before {
            return Err(format!(
                "{} frames are allocated, {before} before: {census:?}",
                census.taken()
            ));
        }
        Ok(())
    }

    /// Writes a file back and compares its store with the words of the file.
    fn compare(&self, cpu: &NativeCpu<'_, '_>, file: &File) -> Result<(), String> {
        let Some(disk) = &file.disk else { return Ok(()) };
        let pages = file.contents.len() as u64;
        let spaces = self.everyone();
        let protect = |pages: core::ops::Range<u64>| {
            for program in &spaces {
                program.process.space().write_protect(cpu.cpu(), &file.object, pages.clone());
            }
        };
        let written = file.object.write_back(cpu.cpu(), 0..pages, protect);
        written.map_err(|errno| format!("write-back: {errno:?}"))?;
        for page in (0..pages).filter(|&page| page < file.object.pages()) {
            for writer in 0..self.plan.config.cpus {
                let look = file.contents.look(page as usize, writer);
                let stored = disk.word(page * PAGE_SIZE + 8 * writer as u64);
                file.contents
                    .judge(page as usize, writer, look, stored, Reader::Owner)
                    .map_err(|wrong| format!("in the store: {wrong}"))?;
                let found = files::word(cpu, file, page, writer);
                if found != Ok(stored) {
                    return Err(format!(
                        "word {writer} of page {page} of a file is {found:x?}, but {stored:x} in the store"
                    ));
                }
            }
        }
        Ok(())
    }
}
