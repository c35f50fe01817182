//! Shared cache lines written by calls, with each CPU in its own part of one space.
//!
//! Two CPUs make the same call in turn, on separate pages, tables and mappings: in the halves of
//! one VMA, or in separate VMAs among no or many others. Lines written by both are written only
//! because the CPUs share the space, and prevent such calls from running in parallel. A line is
//! *shared* if calls of both CPUs write it. The file of the subsystem that writes a line identifies
//! the line: the queue of the range lock, the root of the tree, a VMA.
//!
//! Memory allocated by a call belongs to its CPU, and counts as shared only if the other CPU writes
//! it later. Here each allocation has separate lines ([`heap`](crate::heap)), and no memory is
//! reused. As with faults, only atomics are observed: writes into a node or a VMA before its
//! publication are not counted, nor is data protected by a lock, except the lock's own line. One
//! CPU runs the space at a time, so no call waits for the other CPU or interrupts it. Such a CPU
//! would own the space and change the tree in place (`edit_in_place`); this is off here, since CPUs
//! that run the space at the same time create versions. A third, idle CPU runs the space all the
//! time, because the tree is parted into shards only if several CPUs run the space. It does not run
//! with calls that flush, since they would wait for it.

use super::{Heard, listening};
use crate::heap::Keep;
use crate::machine::BareMachine;
use crate::report::{Report, Spread};
use comfy_table::{CellAlignment, Table, presets};
use faultless::{
    Access, Advice, Cpu, CpuId, Error, Locking, MapFlags, PAGE_SIZE, Prot, Setting, Space, Vm,
};
use std::collections::{BTreeMap, BTreeSet};

/// Counted calls of each CPU, and calls before them.
const CALLS: usize = 32;
const WARM: usize = 8;
/// Bytes of a VMA, the distance of VMAs, and the size of a call's range.
const AREA: u64 = 2 << 20;
const STRIDE: u64 = 4 << 20;
const PART: u64 = 64 << 10;
/// The address of the first VMA, at which tables of all levels begin.
const BASE: u64 = 1 << 40;

/// The source file with the release of spin locks. A lock is identified by the file that takes the
/// lock.
const SPIN: &str = "sync/spin.rs";

const RW: Prot = Prot::READ.union(Prot::WRITE);
const FIXED: MapFlags =
    MapFlags::PRIVATE.union(MapFlags::ANONYMOUS).union(MapFlags::FIXED_NOREPLACE);

/// The numbers of VMAs: with 1 both CPUs work in it, and with 2 or more each CPU works in a
/// separate VMA.
pub const VMAS: [u64; 3] = [1, 2, 64];

/// A call, and its effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// `mmap` away from any VMA.
    Mmap,
    /// `munmap` of an untouched VMA.
    Munmap,
    /// `munmap` of a VMA with its pages.
    MunmapTouched,
    /// `mmap` that closes a hole in a VMA, and merges the parts.
    MmapMerging,
    /// `munmap` that splits a VMA.
    MunmapSplitting,
    /// `mprotect` that splits a VMA.
    MprotectSplitting,
    /// `mprotect` that merges the parts of a VMA.
    MprotectMerging,
    /// `MADV_DONTNEED` of untouched pages.
    Dontneed,
    /// `MADV_DONTNEED` of resident pages.
    DontneedTouched,
}

impl Call {
    /// Every call.
    pub const ALL: [Self; 9] = [
        Self::Mmap,
        Self::Munmap,
        Self::MunmapTouched,
        Self::MmapMerging,
        Self::MunmapSplitting,
        Self::MprotectSplitting,
        Self::MprotectMerging,
        Self::Dontneed,
        Self::DontneedTouched,
    ];

    /// Returns whether the call removes pages, which requires a flush on CPUs that run the space.
    const fn flushes(self) -> bool {
        matches!(self, Self::MunmapTouched | Self::DontneedTouched)
    }

    /// Returns the name in results.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Mmap => "mmap",
            Self::Munmap => "munmap",
            Self::MunmapTouched => "munmap_touched",
            Self::MmapMerging => "mmap_merging",
            Self::MunmapSplitting => "munmap_splitting",
            Self::MprotectSplitting => "mprotect_splitting",
            Self::MprotectMerging => "mprotect_merging",
            Self::Dontneed => "dontneed",
            Self::DontneedTouched => "dontneed_touched",
        }
    }
}

/// The lines written by one call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Written {
    /// All lines.
    pub lines: usize,
    /// Lines also written by calls of the other CPU, by writing file.
    pub shared: BTreeMap<String, usize>,
}

impl Written {
    /// Returns the number of lines also written by calls of the other CPU.
    pub fn shared(&self) -> usize {
        self.shared.values().sum()
    }
}

/// Two CPUs and their parts of a space.
struct Parts<'v> {
    cpus: [Cpu<'v, BareMachine>; 2],
    space: Space<BareMachine>,
    vmas: u64,
}

impl Parts<'_> {
    /// Returns the number of the VMA in or near which a CPU works.
    fn area(&self, cpu: u64) -> u64 {
        self.vmas / 4 + cpu * (self.vmas / 2)
    }

    /// Returns the address of pages in a CPU's VMA, or in its half of the only VMA.
    fn inside(&self, cpu: u64) -> u64 {
        let half = if self.vmas == 1 { cpu * AREA / 2 } else { 0 };
        BASE + self.area(cpu) * STRIDE + half + AREA / 4
    }

    /// Returns the address of pages beyond a CPU's VMA, in an otherwise empty table.
    fn outside(&self, cpu: u64) -> u64 {
        let next = if self.vmas == 1 { cpu * STRIDE } else { 0 };
        BASE + self.area(cpu) * STRIDE + next + AREA + AREA / 2
    }

    fn map(&self, cpu: &Cpu<'_, BareMachine>, at: u64) -> Result<(), Error> {
        self.space.mmap(cpu, at, PART, RW, FIXED).map(drop)
    }

    fn unmap(&self, cpu: &Cpu<'_, BareMachine>, at: u64) -> Result<(), Error> {
        self.space.munmap(cpu, at, PART)
    }

    fn touch(&self, cpu: &Cpu<'_, BareMachine>, at: u64) -> Result<(), String> {
        (at..at + PART).step_by(PAGE_SIZE as usize).try_for_each(|page| {
            let served = self.space.fault_remote(cpu, page, Access::Write);
            served.map(drop).map_err(|error| format!("{error:?}"))
        })
    }

    /// Returns the lines written by `call` on CPU `number`. The state before the call is restored
    /// after it.
    fn call(&self, call: Call, number: usize) -> Result<Heard, String> {
        let cpu = &self.cpus[number];
        let (inside, outside) = (self.inside(number as u64), self.outside(number as u64));
        let said = |error: Error| error.to_string();
        let protect = |prot| self.space.mprotect(cpu, inside, PART, prot);
        match call {
            Call::Munmap | Call::MunmapTouched => self.map(cpu, outside).map_err(said)?,
            Call::MmapMerging => self.unmap(cpu, inside).map_err(said)?,
            Call::MprotectMerging => protect(Prot::READ).map_err(said)?,
            _ => {}
        }
        match call {
            Call::MunmapTouched => self.touch(cpu, outside)?,
            Call::DontneedTouched => self.touch(cpu, inside)?,
            _ => {}
        }
        let (made, heard) = listening(|| match call {
            Call::Mmap => self.map(cpu, outside),
            Call::Munmap | Call::MunmapTouched => self.unmap(cpu, outside),
            Call::MmapMerging => self.map(cpu, inside),
            Call::MunmapSplitting => self.unmap(cpu, inside),
            Call::MprotectSplitting => protect(Prot::READ),
            Call::MprotectMerging => protect(RW),
            Call::Dontneed | Call::DontneedTouched => {
                self.space.madvise(cpu, inside, PART, Advice::DontNeed)
            }
        });
        made.map_err(said)?;
        match call {
            Call::Mmap => self.unmap(cpu, outside).map_err(said)?,
            Call::MunmapSplitting => self.map(cpu, inside).map_err(said)?,
            Call::MprotectSplitting => protect(RW).map_err(said)?,
            _ => {}
        }
        Ok(heard)
    }
}

/// Makes calls of a kind under `locking`, in a space of `vmas` VMAs, and returns the lines written
/// by each, in steady state.
///
/// # Errors
/// The refused call.
pub fn count(call: Call, locking: Locking, vmas: u64) -> Result<Vec<Written>, String> {
    let _keep = Keep::all();
    let vm = Vm::new(BareMachine::new(3, 2048)).map_err(|errno| format!("{errno:?}"))?;
    vm.set(Setting::PrefaultMaxOrder(0));
    vm.set(Setting::Locking(locking));
    vm.set(Setting::EditInPlace(false));
    // SAFETY: one `Cpu` of each of the three numbers, on one thread.
    let (cpus, idle) = unsafe { ([vm.cpu(CpuId(0)), vm.cpu(CpuId(1))], vm.cpu(CpuId(2))) };
    let space = Space::new(&cpus[0]).map_err(|error| error.to_string())?;
    for number in 0..vmas {
        space
            .mmap(&cpus[0], BASE + number * STRIDE, AREA, RW, FIXED)
            .map_err(|error| error.to_string())?;
    }
    let parts = Parts { cpus, space, vmas };
    if !call.flushes() {
        parts.space.activate(&idle);
    }
    let mut seen = Vec::new();
    for turn in 0..WARM + CALLS {
        for (number, cpu) in parts.cpus.iter().enumerate() {
            parts.space.activate(cpu);
            let heard = parts.call(call, number)?;
            // SAFETY: the CPU's accesses are done.
            unsafe { parts.space.deactivate(cpu) };
            if turn >= WARM {
                seen.push((number, heard));
            }
        }
    }
    let written = sort(&seen);
    if !call.flushes() {
        // SAFETY: the CPU has made no access.
        unsafe { parts.space.deactivate(&idle) };
    }
    parts.space.exit(&parts.cpus[0]);
    Ok(written)
}

fn sort(seen: &[(usize, Heard)]) -> Vec<Written> {
    // Per line, the CPUs and the files that write it in any of the calls.
    let mut lines: BTreeMap<usize, (BTreeSet<usize>, BTreeSet<&str>)> = BTreeMap::new();
    for (cpu, heard) in seen {
        for (line, files) in heard {
            let (cpus, all) = lines.entry(*line).or_default();
            cpus.insert(*cpu);
            all.extend(files);
        }
    }
    let shared = |line: &usize| lines.get(line).filter(|(cpus, _)| cpus.len() > 1);
    let written = |heard: &Heard| {
        let mut written = Written { lines: heard.len(), ..Written::default() };
        for (_, files) in heard.keys().filter_map(shared) {
            *written.shared.entry(name(files)).or_default() += 1;
        }
        written
    };
    seen.iter().map(|(_, heard)| written(heard)).collect()
}

/// Returns the name of a line, according to the writing files: the lock's own code frees a lock,
/// and the using code takes the lock.
fn name(files: &BTreeSet<&str>) -> String {
    let short = |file: &&str| file.rsplit_once("src/").map_or(*file, |(_, file)| file).to_owned();
    let (locks, rest): (Vec<_>, Vec<_>) = files.iter().map(short).partition(|file| file == SPIN);
    let lock = if locks.is_empty() { "" } else { " (lock)" };
    format!("{}{lock}", rest.join(" and "))
}

/// Counts all calls in all spaces.
///
/// # Errors
/// The errors of [`count`].
pub fn run() -> Result<Report, String> {
    let mut report = Report::default();
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(["call", "VMAs", "lines", "shared", "shared lines by writer"]);
    for call in Call::ALL {
        for vmas in VMAS {
            let calls = count(call, Locking::Speculative, vmas)?;
            let setting = format!("locking={} vmas={vmas}", Locking::Speculative.name());
            let at = (call.name(), 2, &setting[..]);
            let spread = |of: fn(&Written) -> usize| {
                Spread::of(&calls.iter().map(|call| of(call) as f64).collect::<Vec<_>>())
            };
            let (lines, shared) = (spread(|call| call.lines), spread(Written::shared));
            report.median(at, ("lines_written", "lines"), lines);
            report.median(at, ("shared_lines_written", "lines"), shared);
            table.add_row([
                call.name().to_owned(),
                vmas.to_string(),
                lines.median.to_string(),
                shared.median.to_string(),
                by_file(&calls),
            ]);
        }
    }
    for right in [1, 2, 3] {
        if let Some(column) = table.column_mut(right) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    report.note(format!(
        "Lines that a call writes, and the part of these lines that calls of the other CPU also \
         write (medians of {} calls each):\n{table}",
        2 * CALLS
    ));
    Ok(report)
}

/// Returns the shared lines of all calls, by writing file, with the number per call if different
/// from 1.
fn by_file(calls: &[Written]) -> String {
    let mut all: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for file in calls.iter().flat_map(|call| call.shared.keys()) {
        all.entry(file).or_default();
    }
    for (file, counts) in &mut all {
        counts.extend(calls.iter().map(|call| call.shared.get(*file).copied().unwrap_or(0) as f64));
    }
    let show = |(file, counts): (&str, Vec<f64>)| {
        let mean = counts.iter().sum::<f64>() / counts.len() as f64;
        if mean == 1.0 { file.to_owned() } else { format!("{file} {mean:.2}") }
    };
    all.into_iter().map(show).collect::<Vec<_>>().join(", ")
}
