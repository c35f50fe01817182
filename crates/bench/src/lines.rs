//! Counts the shared cache lines written by a successful fault. See [`huge`] for faults that map a
//! huge leaf, and [`calls`] for calls.
//!
//! The subsystem is built with atomics that report every write (feature `observe`); other data is
//! never written by two CPUs. Two CPUs run one space and fault, in turn, on pages of *the same*
//! area and *the same* leaf table, with each page's entry on a separate cache line. Each line
//! written by a fault is classified by address and by other writers, not by the writing code:
//!
//! - [`Line::Entry`]: in the machine's memory, thus in a page table, of the space or of a memory
//!   object;
//! - [`Line::Installed`]: the metadata of the frame in the entry after the fault. The metadata
//!   belongs to the CPU that allocated the frame until the entry is stored;
//! - [`Line::Source`]: the metadata of the frame in the entry before the fault (copy-on-write), or
//!   of the file's frame that is mapped or copied;
//! - [`Line::Own`]: private to the CPU: written by several of its faults, and by no fault of the
//!   other CPU, although these faults are on the same area and table;
//! - [`Line::Other`]: all remaining lines, which can only be shared.
//!
//! Entries, sources and remaining lines are shared. Metadata are an array of lines. A line is
//! recognised as the metadata of a frame by its distance from the first line, which equals the
//! frame number, with one base for all faults on both CPUs.

pub mod calls;
pub mod huge;

use crate::idle::Idle;
use crate::machine::{BareMachine, FRAME};
use crate::report::Report;
use faultless::observe;
use faultless::{
    Access, AnonVmaCheck, Backing, Counter, Cpu, CpuId, Error, FaultKind, Locking, MapFlags,
    Object, PAGE_SIZE, Prot, Setting, Shared, Space, ThreadStreams, Vm,
};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::panic::Location;
use std::sync::Arc;
use std::sync::atomic::Ordering;

const LINE: usize = 64;
/// Entries on a cache line: the distance of pages with entries on separate lines.
const STRIDE: u64 = 8;
/// Faults of each CPU; both CPUs' entries are one leaf table.
const FAULTS: u64 = 32;
/// Pages of a fault with prefault.
pub const WINDOW: usize = 8;
/// The number of such faults per refill of a CPU's list of frames: the lists are filled 64 frames
/// at a time.
pub const FETCH: usize = 64 / WINDOW;
const TABLE_BYTES: u64 = 512 * PAGE_SIZE;

/// The class of a written line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Line {
    /// An entry of a page table.
    Entry,
    /// Metadata of the frame installed.
    Installed,
    /// Metadata of the frame mapped before, or of the file's frame.
    Source,
    /// A line private to the faulting CPU.
    Own,
    /// Any other line.
    Other,
}

impl Line {
    const ALL: [Self; 5] = [Self::Entry, Self::Installed, Self::Source, Self::Own, Self::Other];

    const fn name(self) -> &'static str {
        match self {
            Self::Entry => "lines_of_entries",
            Self::Installed => "lines_of_frame_installed",
            Self::Source => "lines_of_frame_copied",
            Self::Own => "lines_of_own_cpu",
            Self::Other => "other_lines",
        }
    }

    const fn is_shared(self) -> bool {
        matches!(self, Self::Entry | Self::Source | Self::Other)
    }
}

/// A kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The first write to a page.
    Write,
    /// The first write to a page, for which a pool has a zeroed frame.
    PooledWrite,
    /// The first read of a page.
    Read,
    /// A write to a page shared with a child.
    Copy,
    /// A write to a page that was shared with a child, which has exited.
    Reuse,
    /// The first read of a page of a file, without fault-around.
    FileRead,
    /// The first write to a page of a file, shared.
    FileWrite,
    /// The first write to a page of a file, private.
    FileCopy,
    /// The first write to a page of a file with a store, shared: it marks the page dirty.
    StoredWrite,
}

impl Kind {
    /// Every kind.
    pub const ALL: [Self; 9] = [
        Self::Write,
        Self::PooledWrite,
        Self::Read,
        Self::Copy,
        Self::Reuse,
        Self::FileRead,
        Self::FileWrite,
        Self::FileCopy,
        Self::StoredWrite,
    ];

    const fn is_of_file(self) -> bool {
        matches!(self, Self::FileRead | Self::FileWrite | Self::FileCopy | Self::StoredWrite)
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Write => "anonymous_write_fault",
            Self::PooledWrite => "pooled_write_fault",
            Self::Read => "anonymous_read_fault",
            Self::Copy => "cow_copy_fault",
            Self::Reuse => "cow_reuse_fault",
            Self::FileRead => "file_read_fault",
            Self::FileWrite => "file_shared_write_fault",
            Self::FileCopy => "file_private_write_fault",
            Self::StoredWrite => "stored_shared_write_fault",
        }
    }

    const fn served_as(self) -> FaultKind {
        match self {
            Self::Write | Self::PooledWrite => FaultKind::Anon,
            Self::Read => FaultKind::ZeroPage,
            Self::Copy | Self::FileCopy => FaultKind::Copy,
            Self::Reuse => FaultKind::Reuse,
            Self::FileRead | Self::FileWrite | Self::StoredWrite => FaultKind::Shared,
        }
    }
}

/// The number of lines of each class written by a fault.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Written(BTreeMap<Line, usize>);

impl Written {
    /// Returns the number of lines of one class.
    pub fn of(&self, line: Line) -> usize {
        self.0.get(&line).copied().unwrap_or(0)
    }

    /// Returns the number of lines possibly used by other CPUs.
    pub fn shared(&self) -> usize {
        Line::ALL.into_iter().filter(|line| line.is_shared()).map(|line| self.of(line)).sum()
    }
}

/// The accesses of one fault.
struct Seen {
    cpu: usize,
    lines: BTreeSet<usize>,
    /// The frames of the page's entry before and after, and of the pages mapped with it.
    pages: Vec<(u64, u64)>,
}

impl Seen {
    /// Returns the frame of the page that faulted, if the frame has changed.
    fn fresh(&self) -> Option<u64> {
        self.pages.first().filter(|(before, after)| after != before).map(|(_, after)| *after)
    }

    fn after(&self) -> u64 {
        self.pages.first().map_or(0, |(_, after)| *after)
    }
}

thread_local! {
    /// The written lines, while this thread listens.
    static HEARD: RefCell<Option<Heard>> = const { RefCell::new(None) };
}

/// Lines by number, and the writing source files.
type Heard = BTreeMap<usize, BTreeSet<&'static str>>;

/// The hook, which belongs to the process. Each thread receives its own writes.
fn hear(address: usize, bytes: usize, _: observe::Write, at: &'static Location<'static>) {
    HEARD.with_borrow_mut(|heard| {
        if let Some(heard) = heard {
            for line in address / LINE..=(address + bytes - 1) / LINE {
                heard.entry(line).or_default().insert(at.file());
            }
        }
    });
}

/// Returns the result of `act`, and the lines written by `act`.
fn listening<R>(act: impl FnOnce() -> R) -> (R, Heard) {
    // SAFETY: the hook only records the writes.
    unsafe { observe::install(Some(hear)) };
    HEARD.set(Some(Heard::new()));
    let result = act();
    (result, HEARD.take().unwrap_or_default())
}

/// Makes faults of `kind` under `locking`, and returns the lines written by each, in steady state:
/// the table exists, and the CPUs have free frames in their lists.
///
/// # Errors
/// A fault that failed, or was served in another way.
pub fn count(kind: Kind, locking: Locking) -> Result<Vec<Written>, String> {
    let vm = Vm::new(BareMachine::new(2, 1024)).map_err(|errno| format!("{errno:?}"))?;
    vm.set(Setting::Locking(locking));
    vm.set(Setting::AnonVmaCheck(AnonVmaCheck::Late));
    // SAFETY: one `Cpu` of each of the two numbers, on one thread.
    let cpus = unsafe { [vm.cpu(CpuId(0)), vm.cpu(CpuId(1))] };
    if kind == Kind::PooledWrite {
        vm.set(Setting::ZeroedPool(512));
        cpus[0].zero_ahead(512);
    }
    let space = Space::new(&cpus[0]).map_err(|error| error.to_string())?;
    // An area of three tables contains one whole table, and pages for the warm-up below it.
    let mapped = if kind.is_of_file() {
        vm.set(Setting::FaultAroundPages(1));
        map_file(&cpus[0], &space, kind)
    } else {
        let (rw, private) = (Prot::READ | Prot::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
        space.mmap(&cpus[0], None, 3 * TABLE_BYTES, rw, private).map(|area| (area, area, None))
    };
    let (area, mirror, file) = mapped.map_err(|error| error.to_string())?;
    let table = (area + TABLE_BYTES).next_multiple_of(TABLE_BYTES);
    let page = |cpu: usize, at: u64| table + (2 * at + cpu as u64) * STRIDE * PAGE_SIZE;
    let touch = |cpu: usize, addr: u64, access: Access| {
        space.fault_remote(&cpus[cpu], addr, access).map_err(|error| format!("{error:?}"))
    };
    // Tables, the anon_vma, and the CPUs' lists of frames.
    for (number, cpu) in cpus.iter().enumerate() {
        space.activate(cpu);
        touch(number, table + PAGE_SIZE * (1 + number as u64), Access::Write)?;
        // SAFETY: the CPU's accesses are done.
        unsafe { space.deactivate(cpu) };
    }
    let both = |at: u64| [page(0, at), page(1, at)];
    let mut child = None;
    if matches!(kind, Kind::Copy | Kind::Reuse) {
        for addr in (0..FAULTS).flat_map(both) {
            touch(0, addr, Access::Write)?;
        }
        child = Some(space.fork(&cpus[0]).map_err(|error| error.to_string())?);
        if kind == Kind::Reuse
            && let Some(child) = child.take()
        {
            child.exit(&cpus[0]);
        }
    }
    if kind.is_of_file() {
        // A page that is read is in the page cache, and clean.
        let mirrored = if kind == Kind::StoredWrite { Access::Read } else { Access::Write };
        for addr in (0..FAULTS).flat_map(both) {
            touch(0, mirror + (addr - area), mirrored)?;
        }
    }
    let access =
        if matches!(kind, Kind::Read | Kind::FileRead) { Access::Read } else { Access::Write };
    let mut seen = Vec::new();
    for (number, cpu) in cpus.iter().enumerate() {
        // One CPU after the other: a copy requests a flush from all CPUs running the space, and an
        // idle CPU would not respond.
        space.activate(cpu);
        // The CPU now has half a batch of frames, which suffices for all counted faults.
        touch(number, table + PAGE_SIZE * (3 + number as u64), Access::Write)?;
        for at in 0..FAULTS {
            let addr = page(number, at);
            let before = frame_at(&vm, &space, mirror + (addr - area));
            let (served, lines) = listening(|| touch(number, addr, access));
            let served = served?;
            if served != kind.served_as() {
                return Err(format!("{kind:?}: served as {served:?}"));
            }
            let pages = vec![(before, frame_at(&vm, &space, addr))];
            seen.push(Seen { cpu: number, lines: lines.into_keys().collect(), pages });
        }
        // SAFETY: the CPU's accesses are done.
        unsafe { space.deactivate(cpu) };
    }
    if kind == Kind::PooledWrite && vm.totals().get(Counter::ZeroedInFault) != 0 {
        return Err(format!("{kind:?}: the pool was empty"));
    }
    let sorted = sort(vm.machine(), &seen);
    if let Some(child) = child {
        child.exit(&cpus[0]);
    }
    space.exit(&cpus[0]);
    if let Some(file) = file {
        Object::release(file, &cpus[0]);
    }
    Ok(sorted)
}

/// Lets both CPUs write consecutive pages, each in its half of the same table, and returns the
/// lines written by each fault that mapped [`WINDOW`] pages, whose entries are on one line. With
/// `pooled`, all pages have pre-zeroed frames.
///
/// # Errors
/// The operation's error as text.
pub fn count_ahead(pooled: bool) -> Result<Vec<Written>, String> {
    let vm = Vm::new(BareMachine::new(2, 2048)).map_err(|errno| format!("{errno:?}"))?;
    vm.set(Setting::PrefaultMaxOrder(WINDOW.ilog2() as u8));
    // SAFETY: one `Cpu` of each of the two numbers, on one thread.
    let cpus = unsafe { [vm.cpu(CpuId(0)), vm.cpu(CpuId(1))] };
    if pooled {
        vm.set(Setting::ZeroedPool(1024));
        cpus[0].zero_ahead(1024);
    }
    let space = Space::new(&cpus[0]).map_err(|error| error.to_string())?;
    let (rw, private) = (Prot::READ | Prot::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
    let area = space.mmap(&cpus[0], None, 3 * TABLE_BYTES, rw, private);
    let area = area.map_err(|error| error.to_string())?;
    let table = (area + TABLE_BYTES).next_multiple_of(TABLE_BYTES);
    let mut seen = Vec::new();
    for (number, cpu) in cpus.iter().enumerate() {
        let (half, thread) = (TABLE_BYTES / 2, ThreadStreams::new());
        let start = table + number as u64 * half;
        let pages_from = |addr: u64| (addr..start + half).step_by(PAGE_SIZE as usize);
        space.activate(cpu);
        for addr in pages_from(start) {
            if !vm.machine().access(space.root(), addr) {
                let fault = || space.fault(cpu, &thread, addr, Access::Write);
                let (served, lines) = listening(fault);
                served.map_err(|error| format!("{error:?}"))?;
                let frames = pages_from(addr).map(|addr| frame_at(&vm, &space, addr));
                let pages: Vec<_> =
                    frames.take_while(|frame| *frame != 0).map(|frame| (0, frame)).collect();
                if pages.len() == WINDOW {
                    seen.push(Seen { cpu: number, lines: lines.into_keys().collect(), pages });
                }
                vm.machine().access(space.root(), addr);
            }
        }
        // SAFETY: the CPU's accesses are done.
        unsafe { space.deactivate(cpu) };
    }
    if pooled && vm.totals().get(Counter::ZeroedInFault) != 0 {
        return Err("the pool was empty".into());
    }
    let sorted = sort(vm.machine(), &seen);
    space.exit(&cpus[0]);
    Ok(sorted)
}

/// Maps a file for `kind`, and a second time as shared: the second mapping shows the frames of the
/// file.
fn map_file(
    cpu: &Cpu<'_, BareMachine>,
    space: &Space<BareMachine>,
    kind: Kind,
) -> Result<(u64, u64, Option<Shared<Object>>), Error> {
    let none = Error::NO_RANGE;
    let refused = |errno| Error { operation: "new object", range: none, errno };
    let pages = 3 * TABLE_BYTES / PAGE_SIZE;
    let object = match kind {
        Kind::StoredWrite => Object::of_store(cpu, Arc::new(Idle { pages, preferred: 1 }), 1),
        _ => Object::try_new(cpu, pages, 1),
    };
    let object = object.map_err(refused)?;
    let flags = if kind == Kind::FileCopy { MapFlags::PRIVATE } else { MapFlags::SHARED };
    let map = |flags| {
        let backing = Backing { object: &object, first: 0, may_write: true };
        let rw = Prot::READ | Prot::WRITE;
        space.mmap_object(cpu, None, 3 * TABLE_BYTES, rw, flags | MapFlags::NORESERVE, backing)
    };
    let (area, mirror) = (map(flags)?, map(MapFlags::SHARED)?);
    Ok((area, mirror, Some(object)))
}

/// Returns the number of the frame in the leaf entry of `addr`; 0 if the entry is empty. Walks like
/// the hardware.
fn frame_at(vm: &Vm<BareMachine>, space: &Space<BareMachine>, addr: u64) -> u64 {
    let leaf = vm.machine().leaf(space.root(), addr);
    leaf.map_or(0, |leaf| leaf.load(Ordering::Acquire) & FRAME) / PAGE_SIZE
}

fn sort(machine: &BareMachine, seen: &[Seen]) -> Vec<Written> {
    let is_entry = |line: usize| machine.phys_of(line * LINE).is_some();
    let faults_that_wrote = |line: usize, cpu: usize| {
        seen.iter().filter(|fault| fault.cpu == cpu && fault.lines.contains(&line)).count()
    };
    let base = metadata_base(seen, is_entry);
    let sort_one = |fault: &Seen, line: usize| {
        let metadata_of = |frame: u64| frame != 0 && base == line.checked_sub(frame as usize);
        if is_entry(line) {
            Line::Entry
        } else if fault.pages.iter().any(|(before, after)| after != before && metadata_of(*after)) {
            Line::Installed
        } else if fault.pages.iter().any(|(before, _)| metadata_of(*before)) {
            Line::Source
        } else if faults_that_wrote(line, fault.cpu) > 1
            && faults_that_wrote(line, 1 - fault.cpu) == 0
        {
            Line::Own
        } else {
            Line::Other
        }
    };
    seen.iter()
        .map(|fault| {
            let mut written = Written::default();
            for &line in &fault.lines {
                *written.0.entry(sort_one(fault, line)).or_default() += 1;
            }
            written
        })
        .collect()
}

/// Returns the position of the metadata of frame 0, in lines: the only base for which every fault
/// that installed a frame wrote the line of this frame.
fn metadata_base(seen: &[Seen], is_entry: impl Fn(usize) -> bool) -> Option<usize> {
    let fresh: Vec<_> = seen.iter().filter(|fault| fault.fresh().is_some()).collect();
    // Mapped frames of a file are not fresh, but all faults are counted.
    let installing = if fresh.is_empty() { seen.iter().collect() } else { fresh };
    // All faults install the zero page, and no fault writes it.
    let [first, second, ..] = &installing[..] else { return None };
    if first.after() == second.after() {
        return None;
    }
    let base = |fault: &Seen, line: usize| line.checked_sub(fault.after() as usize);
    first.lines.iter().filter(|&&line| !is_entry(line)).find_map(|&line| {
        let base = base(first, line)?;
        installing
            .iter()
            .all(|fault| fault.lines.contains(&(base + fault.after() as usize)))
            .then_some(base)
    })
}

/// Returns the largest number of shared lines written by a speculative fault of a kind: the
/// entry's; for a copy the count of the copied frame; for a file the count of the mapped or copied
/// frame; and the object's entry if the fault makes a page of a store dirty.
pub const fn promised(kind: Kind) -> usize {
    match kind {
        Kind::StoredWrite => 3,
        Kind::Copy | Kind::FileRead | Kind::FileWrite | Kind::FileCopy => 2,
        Kind::Write | Kind::PooledWrite | Kind::Read | Kind::Reuse => 1,
    }
}

/// Counts all kinds under all policies.
///
/// # Errors
/// The errors of [`count`].
pub fn run() -> Result<Report, String> {
    let mut report = Report::default();
    for kind in Kind::ALL {
        for locking in [Locking::Speculative, Locking::PerVma, Locking::MmapLock] {
            let faults = count(kind, locking)?;
            let setting = format!("locking={}", locking.name());
            let at = (kind.name(), 2, &setting[..]);
            let most = faults.iter().map(Written::shared).max().unwrap_or(0);
            let least = faults.iter().map(Written::shared).min().unwrap_or(0);
            report.row(at, ("shared_lines_written_most", "lines"), most as f64);
            report.row(at, ("shared_lines_written_least", "lines"), least as f64);
            for line in Line::ALL {
                let most = faults.iter().map(|fault| fault.of(line)).max().unwrap_or(0);
                report.row(at, (line.name(), "lines"), most as f64);
            }
            let (promise, promised) = (kind.name(), promised(kind));
            if locking == Locking::Speculative {
                let promise = format!("{promise}: {promised} shared cache lines written");
                report.gate(
                    promise,
                    format!("{least} to {most}"),
                    (least, most) == (promised, promised),
                );
            } else {
                let promise = format!("{promise}: more than {promised} under {}", locking.name());
                report.gate(promise, format!("{least} to {most}"), least > promised);
            }
        }
    }
    for (name, pooled) in [("write_fault_ahead", false), ("pooled_write_fault_ahead", true)] {
        let faults = count_ahead(pooled)?;
        let setting = format!("prefault_max_order={}", WINDOW.ilog2());
        let at = (name, 2, &setting[..]);
        let least = faults.iter().map(Written::shared).min().unwrap_or(0);
        let more = faults.iter().filter(|written| written.shared() > 1).count();
        report.row(at, ("shared_lines_written_least", "lines"), least as f64);
        report.row(at, ("faults", "faults"), faults.len() as f64);
        report.row(at, ("faults_that_write_more", "faults"), more as f64);
        let promise =
            format!("{name}: 1 shared cache line for {WINDOW} pages, but in 1 fault of {FETCH}");
        let met = least == 1 && more <= faults.len().div_ceil(FETCH);
        report.gate(promise, format!("{least}, but in {more} of {}", faults.len()), met);
    }
    report.absorb(huge::run()?);
    report.absorb(calls::run()?);
    Ok(report)
}
