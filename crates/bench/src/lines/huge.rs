//! Shared cache lines written by a fault that maps a huge leaf.
//!
//! Two CPUs run one space and fault in turn, each in separate mappings of the same two folios of a
//! file. The entries of their leaves are in one table, each on a separate cache line. Other leaves
//! of the folios exist, as when another process runs the same text. The count of a folio's leaves
//! is in the metadata of its first frame. The first leaf of a folio adds a reference to each of its
//! frames, counted in [`first`].

use super::{FAULTS, STRIDE, Seen, Written, listening, sort};
use crate::idle::Idle;
use crate::machine::BareMachine;
use crate::report::Report;
use faultless::{
    Access, Backing, Cpu, CpuId, FaultKind, Locking, MapFlags, Object, PAGE_SIZE, Prot, Setting,
    Shared, Space, Vm,
};
use std::sync::Arc;

/// Pages mapped by a huge leaf, and its bytes.
const PAGES: u64 = 512;
const BYTES: u64 = PAGES * PAGE_SIZE;
/// Bytes mapped by a table of leaves. The counted faults are in the second table.
const TABLE: u64 = 512 * BYTES;
/// Folios of the file. Faults alternate between the folios, to distinguish the metadata of their
/// frames from other lines.
const FOLIOS: u64 = 2;

/// The largest number of shared lines written by a speculative fault for a huge leaf: the line of
/// the entry, and the line of the folio's first frame, which counts the leaves.
pub const PROMISED: usize = 2;

/// The number of lines for the first leaf of its folio, which adds a reference to each frame.
pub const FIRST: usize = 1 + PAGES as usize;

/// The lines written by faults that map huge leaves.
#[derive(Debug)]
pub struct Leaves {
    /// The first leaf of a folio.
    pub first: Written,
    /// Further leaves.
    pub more: Vec<Written>,
}

/// Maps a folio of `file`, as text, at `at`.
fn map(
    cpu: &Cpu<'_, BareMachine>,
    space: &Space<BareMachine>,
    file: &Shared<Object>,
    folio: u64,
    at: u64,
) -> Result<(), String> {
    let backing = Backing { object: file, first: folio * PAGES, may_write: false };
    let (prot, flags) = (Prot::READ | Prot::EXEC, MapFlags::PRIVATE | MapFlags::FIXED);
    let mapped = space.mmap_object(cpu, at, BYTES, prot, flags, backing);
    mapped.map(drop).map_err(|error| error.to_string())
}

/// Fetches, which creates a huge leaf at `at`.
fn fetch(cpu: &Cpu<'_, BareMachine>, space: &Space<BareMachine>, at: u64) -> Result<(), String> {
    match space.fault_remote(cpu, at + 5 * PAGE_SIZE, Access::Execute) {
        Ok(FaultKind::Huge) => Ok(()),
        other => Err(format!("a fetch was served as {other:?}")),
    }
}

/// Makes faults that map huge leaves under `locking`, and returns the lines written by each.
///
/// # Errors
/// A call or fault that failed, or was served in another way.
pub fn count(locking: Locking) -> Result<Leaves, String> {
    // In the table of the counted leaves, between their lines.
    let warm = |cpu: u64, folio: u64| TABLE + (1 + cpu * FOLIOS + folio) * BYTES;
    let place = |cpu: u64, at: u64| TABLE + (2 * at + cpu) * STRIDE * BYTES;
    let vm = Vm::new(BareMachine::new(2, 2048 + (FOLIOS * PAGES) as u32));
    let vm = vm.map_err(|errno| format!("{errno:?}"))?;
    vm.set(Setting::Locking(locking));
    // SAFETY: one `Cpu` of each of the two numbers, on one thread.
    let cpus = unsafe { [vm.cpu(CpuId(0)), vm.cpu(CpuId(1))] };
    let new_space = || Space::new(&cpus[0]).map_err(|error| error.to_string());
    let store = Arc::new(Idle { pages: FOLIOS * PAGES, preferred: PAGES as usize });
    let file = Object::of_store(&cpus[0], store, 1).map_err(|errno| format!("{errno:?}"))?;
    // The folios are read, and have no leaf.
    let reader = new_space()?;
    for folio in 0..FOLIOS {
        map(&cpus[0], &reader, &file, folio, warm(0, folio))?;
        fetch(&cpus[0], &reader, warm(0, folio))?;
    }
    reader.exit(&cpus[0]);
    cpus[0].drain();

    let space = new_space()?;
    for cpu in 0..2 {
        for folio in 0..FOLIOS {
            map(&cpus[0], &space, &file, folio, warm(cpu, folio))?;
        }
        for at in 0..FAULTS {
            map(&cpus[0], &space, &file, at % FOLIOS, place(cpu, at))?;
        }
    }
    let mut seen = Vec::new();
    for (cpu, this) in cpus.iter().enumerate() {
        let number = cpu as u64;
        space.activate(this);
        // The first leaf of a folio adds a reference to each of its frames.
        let warm = (0..FOLIOS).map(|folio| (warm(number, folio), PAGES));
        let places = (0..FAULTS).map(|at| (place(number, at), 1));
        for (at, frames) in warm.chain(places) {
            let (served, lines) = listening(|| fetch(this, &space, at));
            served?;
            let frame = vm.machine().huge_leaf(space.root(), at).ok_or("no huge leaf")?;
            let pages = (frame..frame + frames).map(|frame| (frame, frame)).collect();
            seen.push(Seen { cpu, lines: lines.into_keys().collect(), pages });
        }
        // SAFETY: the CPU's accesses are done.
        unsafe { space.deactivate(this) };
    }
    let written = sort(vm.machine(), &seen);
    space.exit(&cpus[0]);
    Object::release(file, &cpus[0]);
    let warm = FOLIOS as usize;
    let each_cpu = written.chunks(warm + FAULTS as usize);
    let more = each_cpu.flat_map(|of_cpu| of_cpu.iter().skip(warm)).cloned().collect();
    // The leaf of the first folio has also created tables.
    Ok(Leaves { first: written[warm - 1].clone(), more })
}

/// Counts under all policies.
///
/// # Errors
/// The errors of [`count`].
pub fn run() -> Result<Report, String> {
    let mut report = Report::default();
    for locking in [Locking::Speculative, Locking::PerVma, Locking::MmapLock] {
        let Leaves { first, more } = count(locking)?;
        let (name, setting) = ("huge_text_fault", format!("locking={}", locking.name()));
        let at = (name, 2, &setting[..]);
        let shared = || more.iter().map(Written::shared);
        let (least, most) = (shared().min().unwrap_or(0), shared().max().unwrap_or(0));
        report.row(at, ("shared_lines_written_most", "lines"), most as f64);
        report.row(at, ("shared_lines_written_least", "lines"), least as f64);
        report.row(at, ("shared_lines_written_by_the_first", "lines"), first.shared() as f64);
        if locking == Locking::Speculative {
            let promise =
                format!("{name}: {PROMISED} shared cache lines written, {FIRST} by the first");
            let found = format!("{least} to {most}, {}", first.shared());
            report.gate(
                promise,
                found,
                (least, most, first.shared()) == (PROMISED, PROMISED, FIRST),
            );
        } else {
            let promise = format!("{name}: more than {PROMISED} under {}", locking.name());
            report.gate(promise, format!("{least} to {most}"), least > PROMISED);
        }
    }
    Ok(report)
}
