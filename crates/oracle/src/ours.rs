//! The subsystem on its native machine, with the surrounding parts of a kernel: descriptors (here:
//! the mapped object, and whether it is writable), `ftruncate` with its revocation of mappings, and
//! the conversion of numbers to the subsystem's types.
//!
//! A process keeps its CPU, and thus its TLB, while it runs. The machine checks every access
//! against law 1, and the audit runs at the end of each case.

use crate::op::{FETCH, OBJECT_PAGES, OBJECTS, Op, PAGE, READ_ONLY, Roster, SEEN_PAGES, Window};
use crate::seen::{self, Area, ELSEWHERE, NAMELESS, Outcome, Seen, digest, near};
use faultless::{
    Access, Advice, Backing, Errno, Error, MapFlags, Object, PrivateCopies, Prot, RemapFlags,
    Setting, Shared, VmaFlags,
};
use faultless_native::{Checked, Config, ConfigError, Native, NativeCpu, Process, Signal, Stop};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The subsystem as a side of the comparison.
#[derive(Debug)]
pub struct Ours {
    native: Native,
    settings: Vec<Setting>,
}

/// The reason for a case without a comparison.
#[derive(Debug, thiserror::Error)]
pub enum OursError {
    /// The machine could not be made.
    #[error("no machine: {0}")]
    Machine(ConfigError),
    /// The subsystem panicked: a check of its own failed, or one of the machine's.
    #[error("the subsystem panicked: {0}")]
    Panicked(String),
    /// The books do not balance.
    #[error("the audit failed: {0}")]
    Books(String),
    /// A process could not be made or run.
    #[error("stopped: {0}")]
    Stopped(String),
}

impl Ours {
    /// Creates a new machine with `settings`.
    ///
    /// # Errors
    /// Out of memory.
    pub fn new(settings: &[Setting]) -> Result<Self, OursError> {
        let config = Config {
            memory_bytes: 16 << 20,
            cpus: 1,
            checked: Checked::Panic,
            ..Config::default()
        };
        let native = Native::new(config).map_err(OursError::Machine)?;
        settings.iter().for_each(|&setting| native.vm().set(setting));
        Ok(Self { native, settings: settings.to_vec() })
    }

    /// Returns whether faults may map more pages than their own.
    pub fn maps_ahead(&self) -> bool {
        self.native.vm().knobs().prefault_max_order() != 0
    }

    /// Returns the observations of each of `steps`, which concern `window`.
    ///
    /// # Errors
    /// [`OursError`]: each error is a fault of the subsystem.
    pub fn run(&mut self, steps: &[Op], window: Window) -> Result<Vec<Seen>, OursError> {
        let ran = catch_unwind(AssertUnwindSafe(|| run(&self.native, steps, window)));
        ran.unwrap_or_else(|panic| {
            // A machine with a panic in the middle is unusable.
            let fresh = Self::new(&self.settings)?;
            std::mem::forget(std::mem::replace(&mut self.native, fresh.native));
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or(panic.downcast_ref::<&str>().copied());
            Err(OursError::Panicked(text.unwrap_or("with an unknown payload").into()))
        })
    }
}

/// Linux's `EINVAL` for numbers outside the subsystem's types.
const EINVAL: i32 = Errno::EINVAL.number();

fn run(native: &Native, steps: &[Op], window: Window) -> Result<Vec<Seen>, OursError> {
    let stopped = |error: Error| OursError::Stopped(error.to_string());
    let mut case = Case { window, objects: Vec::new(), processes: Vec::new() };
    case.processes.push(Some(native.process().map_err(stopped)?));
    let mut roster = Roster::default();
    let mut seen = Vec::with_capacity(steps.len());
    while seen.len() < steps.len() {
        let me = roster.current();
        let Some(process) = case.processes[me].take() else {
            return Err(OursError::Stopped(format!("process {me} does not exist")));
        };
        let ran = process.run(|cpu| {
            case.open(cpu)?;
            while let Some(op) = steps.get(seen.len())
                && roster.current() == me
            {
                let ends = roster.ended_by(op);
                let outcome = case.step(cpu, op, &roster)?;
                let areas = case.areas(cpu, ends);
                seen.push(Seen { outcome, areas });
                if let Some(ended) = ends
                    && let Some(process) = case.processes[ended].take()
                {
                    cpu.exit(process);
                }
                roster.after(op);
            }
            Ok(())
        });
        ran.map_err(|stop| OursError::Stopped(stop.to_string()))?;
        if roster.live().contains(&me) {
            case.processes[me] = Some(process);
        }
    }
    // Ends everything, and balances the books.
    let Case { objects, processes, .. } = case;
    let last = native.process().map_err(stopped)?;
    drop(processes);
    let closed = last.run(|cpu| {
        objects.into_iter().for_each(|object| Object::release(object, cpu.cpu()));
        Ok(())
    });
    closed.map_err(|stop| OursError::Stopped(stop.to_string()))?;
    native.audit(&[&last]).map_err(|wrong| OursError::Books(format!("{wrong:?}")))?;
    Ok(seen)
}

/// A case under way.
struct Case<'n> {
    window: Window,
    objects: Vec<Shared<Object>>,
    /// All processes except the running process and the ended processes.
    processes: Vec<Option<Process<'n>>>,
}

impl<'n> Case<'n> {
    /// Creates the objects, which requires a CPU.
    fn open(&mut self, cpu: &NativeCpu<'_, 'n>) -> Result<(), Stop> {
        for number in self.objects.len()..OBJECTS {
            let made = Object::try_new(cpu.cpu(), OBJECT_PAGES, number as u64 + 1);
            let range = Error::NO_RANGE;
            self.objects.push(made.map_err(|errno| Error { operation: "open", range, errno })?);
        }
        Ok(())
    }

    fn step(&mut self, cpu: &NativeCpu<'_, 'n>, op: &Op, roster: &Roster) -> Result<Outcome, Stop> {
        Ok(match *op {
            Op::Map { addr, len, prot, flags, object } => {
                let flags = MapFlags::from_bits_truncate(flags as u32);
                let prot = Prot::from_bits_truncate(prot as u32);
                // As on Linux, a hint in page 0 is no hint.
                let fixed = flags.intersects(MapFlags::FIXED | MapFlags::FIXED_NOREPLACE);
                let at = (fixed || addr >= PAGE).then_some(addr);
                let mapped = match object.filter(|_| !flags.contains(MapFlags::ANONYMOUS)) {
                    None => cpu.mmap(at, len, prot, flags),
                    Some((number, first)) => {
                        let object = &self.objects[number];
                        let may_write = number != READ_ONLY;
                        let backing = Backing { object, first, may_write };
                        let space = cpu.running().space();
                        space.mmap_object(cpu.cpu(), at, len, prot, flags, backing)
                    }
                };
                self.placed(cpu, mapped, len)
            }
            Op::Unmap { addr, len } => done(cpu.munmap(addr, len)),
            Op::Protect { addr, len, prot } => match bits(prot).map(Prot::from_bits_retain) {
                Some(prot) => done(cpu.mprotect(addr, len, prot)),
                None => Outcome::Refused(EINVAL),
            },
            Op::Remap { addr, len, new_len, flags, target } => {
                match bits(flags).and_then(RemapFlags::from_bits) {
                    Some(flags) => {
                        let moved = cpu.mremap(addr, len, new_len, flags, target);
                        self.placed(cpu, moved, new_len)
                    }
                    None => Outcome::Refused(EINVAL),
                }
            }
            Op::Advise { addr, len, advice } => match bits(advice).and_then(Advice::from_number) {
                Some(advice) => done(cpu.madvise(addr, len, advice)),
                None => Outcome::Refused(EINVAL),
            },
            Op::Resident { addr, len } => {
                let mut vector = vec![u8::MAX; (len.div_ceil(PAGE)).min(4096) as usize];
                let errno = resident(cpu, addr, len, &mut vector);
                Outcome::Resident(errno, vector)
            }
            Op::Census => {
                let mut vector = vec![u8::MAX; SEEN_PAGES as usize];
                for (slot, number) in vector.iter_mut().zip(0..) {
                    let page = self.window.page(number);
                    resident(cpu, page, PAGE, std::slice::from_mut(slot));
                }
                Outcome::Resident(0, vector)
            }
            Op::Load { addr } => accessed(cpu.load::<u64>(addr)),
            Op::Store { addr, value } => accessed(cpu.store(addr, value).map(|()| 0)),
            Op::Fetch { addr } => {
                // As Linux on x86-64, which maps the page first: see `differences`.
                let fetched = cpu.touch(addr, Access::Read);
                accessed(fetched.and_then(|()| cpu.touch(addr, Access::Execute)).map(|()| 0))
            }
            Op::Look => {
                let look = |number| look(cpu, self.window.page(number));
                Outcome::Pages((0..SEEN_PAGES).map(look).collect())
            }
            Op::Touch => {
                let at = |number| self.window.page(number) + FETCH;
                let touch = |number| cpu.touch(at(number), Access::Write).map(|()| 0);
                Outcome::Pages(
                    (0..SEEN_PAGES).map(|number| touch(number).map_err(signal)).collect(),
                )
            }
            Op::Write { object, offset, value } => self.write(cpu, object, offset, value),
            Op::Truncate { object, pages } => {
                let before = self.objects[object].pages();
                let set = self.objects[object].set_pages(cpu.cpu(), pages);
                if pages < before {
                    self.revoke(cpu, object, pages);
                }
                set.map_or_else(|errno| Outcome::Refused(errno.number()), |()| Outcome::Done(0))
            }
            Op::Fork => match roster.made_by(op) {
                Some(made) => {
                    self.processes.resize_with(made + 1, || None);
                    self.processes[made] = Some(cpu.fork()?);
                    Outcome::Done(made as u64)
                }
                None => Outcome::Done(0),
            },
            Op::Switch { .. } | Op::Exit { .. } => Outcome::Done(0),
        })
    }

    /// Returns the outcome of a call that chooses an address; a mapping elsewhere is unmapped
    /// again.
    fn placed(&self, cpu: &NativeCpu<'_, '_>, result: Result<u64, Error>, len: u64) -> Outcome {
        match result {
            Err(error) => Outcome::Refused(error.errno.number()),
            Ok(addr) if near(addr, self.window) == ELSEWHERE => match cpu.munmap(addr, len) {
                Ok(()) => Outcome::Done(ELSEWHERE),
                Err(error) => Outcome::Refused(error.errno.number()),
            },
            Ok(addr) => Outcome::Done(addr),
        }
    }

    fn write(&self, cpu: &NativeCpu<'_, 'n>, object: usize, offset: u64, value: u64) -> Outcome {
        let object = &self.objects[object];
        let (index, at) = (offset / PAGE, (offset % PAGE) as usize);
        let bytes = value.to_le_bytes();
        let write = |page: *mut u8| {
            // SAFETY: a slot lies within the lent page, and no other thread runs.
            unsafe { page.add(at).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) }
        };
        let grown =
            if index >= object.pages() { object.set_pages(cpu.cpu(), index + 1) } else { Ok(()) };
        match grown.and_then(|()| object.write_page(cpu.cpu(), index, write)) {
            Ok(()) => Outcome::Done(bytes.len() as u64),
            Err(errno) => Outcome::Refused(errno.number()),
        }
    }

    /// Does a kernel's work after the truncation of an object.
    fn revoke(&self, cpu: &NativeCpu<'_, 'n>, object: usize, first: u64) {
        let object = &self.objects[object];
        let gone = first..u64::MAX;
        cpu.running().space().revoke(cpu.cpu(), object, gone.clone(), PrivateCopies::Drop);
        for process in self.processes.iter().flatten() {
            process.space().revoke(cpu.cpu(), object, gone.clone(), PrivateCopies::Drop);
        }
    }

    /// Returns the VMAs of the running process, or of `other`.
    fn areas(&self, cpu: &NativeCpu<'_, 'n>, other: Option<usize>) -> Vec<Area> {
        let other = other.and_then(|other| self.processes[other].as_ref());
        let mut areas = Vec::new();
        other.unwrap_or(cpu.running()).space().areas(cpu.cpu(), |area| {
            let shared = area.flags.contains(VmaFlags::SHARED);
            let object = match area.tag {
                0 if shared => NAMELESS,
                tag => tag,
            };
            let offset = area.offset;
            let (start, end) = (area.range.start, area.range.end);
            let prot = area.prot.bits().into();
            areas.push(Area { start, end, prot, shared, offset, object });
        });
        areas
    }
}

/// Returns the low bits of a number, if the high bits are zero.
fn bits(number: u64) -> Option<u32> {
    u32::try_from(number).ok()
}

/// Calls `mincore`. Returns the error, or 0.
fn resident(cpu: &NativeCpu<'_, '_>, addr: u64, len: u64, vector: &mut [u8]) -> i32 {
    let mut slots = vector.iter_mut();
    let told = cpu.mincore(addr, len, |there| {
        if let Some(slot) = slots.next() {
            *slot = there.into();
        }
    });
    told.map_or_else(|error| error.errno.number(), |()| 0)
}

fn done(result: Result<(), Error>) -> Outcome {
    result.map_or_else(|error| Outcome::Refused(error.errno.number()), |()| Outcome::Done(0))
}

fn signal(signal: Signal) -> seen::Signal {
    // Linux's numbers: SEGV_MAPERR and SEGV_ACCERR, BUS_ADRERR; SIGKILL has no code of interest.
    let (number, code) = match signal {
        Signal::Segv { mapped: false, .. } => (libc::SIGSEGV, 1),
        Signal::Segv { mapped: true, .. } => (libc::SIGSEGV, 2),
        Signal::Bus { .. } => (libc::SIGBUS, 2),
        Signal::OutOfMemory { .. } => (libc::SIGKILL, 0),
    };
    seen::Signal { number, code }
}

fn accessed(result: Result<u64, Signal>) -> Outcome {
    result.map_or_else(|got| Outcome::Signal(signal(got)), Outcome::Done)
}

/// A digest of a page.
fn look(cpu: &NativeCpu<'_, '_>, addr: u64) -> Result<u64, seen::Signal> {
    let mut bytes = [0; PAGE as usize];
    // A single access first, as on the other side.
    cpu.load::<u64>(addr).map_err(signal)?;
    cpu.read_bytes(addr, &mut bytes).map_err(signal)?;
    let (words, _) = bytes.as_chunks::<8>();
    Ok(digest(words.iter().map(|&word| u64::from_le_bytes(word))))
}
