//! Checks law 6 independently: every frame is accounted for, and every reference has its mapping.
//!
//! At a quiet moment the audit walks the tables of all spaces and the objects behind their shared
//! mappings, counts the references to each frame, and compares the result with the frames'
//! metadata, the spaces' counts and the allocators. The audit does not rely on the state under
//! test.

use crate::addr::{FrameNumber, PAGE_SHIFT, PAGE_SIZE, VirtRange};
use crate::file::Object;
use crate::frame::{Census, FrameUse, Imbalance, Kind, folio};
use crate::heap::Shared;
use crate::machine::Machine;
use crate::reclaim::swap::Swap;
use crate::rmap::visits::Visits;
use crate::rmap::walker::Walk;
use crate::space::Space;
use crate::space::area::{PageSource, Prot};
use crate::sync::grace::Section;
use crate::table::Entry;
use crate::table::node::{self, ENTRIES, HUGE, LAST, ROOT};
use crate::vm::Cpu;
use alloc::collections::{BTreeMap, BTreeSet};
use core::fmt;
use core::ops::ControlFlow;

/// A violation found by the audit.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Discrepancy {
    /// The allocators' counts are wrong.
    Frames(Imbalance),
    /// The reference count of a frame differs from its mappings and objects.
    References {
        /// The frame.
        frame: FrameNumber,
        /// References by its metadata.
        recorded: u32,
        /// References found.
        found: u32,
    },
    /// The leaf count of a frame differs from the number of huge leaves which map its folio.
    Leaves {
        /// The frame.
        frame: FrameNumber,
        /// Leaves by its metadata.
        recorded: u32,
        /// Leaves found.
        found: u32,
    },
    /// The reverse map of a frame does not find exactly the entries which map the frame.
    ReverseMap {
        /// The frame.
        frame: FrameNumber,
        /// Entries that map the frame.
        mapped: u32,
        /// Entries found through the reverse map.
        found: u32,
    },
    /// The number of frames of a kind differs from the number found in use. The kind is "pooled" or
    /// "retired" if a CPU has not [drained](Cpu::drain).
    Kind {
        /// The kind.
        kind: &'static str,
        /// Frames of this kind by the census.
        recorded: u64,
        /// Frames of this kind found.
        found: u64,
    },
    /// The resident count of a space differs from its mapped pages.
    Resident {
        /// Pages by the count.
        recorded: u64,
        /// Pages found.
        found: u64,
    },
    /// The swap count of a space differs from its swapped entries.
    Swapped {
        /// Pages by the count.
        recorded: u64,
        /// Pages found.
        found: u64,
    },
    /// The count of a swap slot differs from the number of entries naming the slot.
    Slot {
        /// The slot.
        slot: u64,
        /// Entries by its count.
        recorded: u32,
        /// Entries found.
        found: u32,
    },
    /// The count of free swap slots differs from the free slots.
    FreeSlots,
    /// An illegal entry: locked, outside every VMA, or with more permissions than its VMA.
    Entry {
        /// The page's address.
        addr: u64,
        /// The violation.
        what: &'static str,
    },
    /// A VMA that is write-locked although no writer is active.
    Stopped {
        /// The range of the VMA.
        range: VirtRange,
    },
}

impl fmt::Display for Discrepancy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Frames(imbalance) => write!(f, "{imbalance:?}"),
            Self::References { frame, recorded, found } => {
                write!(f, "{frame:?} has {recorded} references recorded, {found} found")
            }
            Self::Leaves { frame, recorded, found } => {
                write!(f, "{frame:?} has {recorded} huge leaves recorded, {found} found")
            }
            Self::ReverseMap { frame, mapped, found } => {
                write!(f, "{frame:?} is mapped by {mapped} entries, its reverse map finds {found}")
            }
            Self::Kind { kind, recorded, found } => {
                let frames = if *recorded == 1 { "frame" } else { "frames" };
                let remedy = remedy(kind, *recorded > *found);
                write!(f, "{recorded} {kind} {frames} recorded, {found} found{remedy}")
            }
            Self::Resident { recorded, found } => {
                write!(f, "{recorded} resident pages recorded, {found} found")
            }
            Self::Swapped { recorded, found } => {
                write!(f, "{recorded} swapped pages recorded, {found} found")
            }
            Self::Slot { slot, recorded, found } => {
                write!(f, "slot {slot} is named by {recorded} entries as recorded, {found} found")
            }
            Self::FreeSlots => {
                write!(f, "the counts of free slots differ from the states of the slots")
            }
            Self::Entry { addr, what } => write!(f, "entry of {addr:#x}: {what}"),
            Self::Stopped { range } => write!(f, "VMA {range:?} is write-locked"),
        }
    }
}

impl core::error::Error for Discrepancy {}

/// Returns the step which the caller may have omitted, for a discrepancy in frames of this kind.
/// `missing`: the audit found fewer frames than recorded.
fn remedy(kind: &str, missing: bool) -> &'static str {
    match kind {
        "page" | "table" if missing => {
            "; is a living space, or an object that no space maps, missing in the list of the audit?"
        }
        "pooled" => {
            "; a CPU's stock of free frames is of this kind: call `Cpu::drain` on every CPU before the audit"
        }
        "retired" => {
            "; frames wait for readers that may still use them: call `Cpu::drain` on every CPU before the audit"
        }
        _ => "",
    }
}

#[derive(Default)]
struct Found {
    references: BTreeMap<u32, u32>,
    /// Entries of base pages of spaces.
    mapped: BTreeMap<u32, u32>,
    /// Huge leaves by the first frame of their folio.
    leaves: BTreeMap<u32, u32>,
    /// Swapped entries by their slot.
    slots: BTreeMap<u64, u32>,
    tables: u64,
    objects: BTreeMap<u64, Shared<Object>>,
}

/// Checks all counts of the subsystem of `cpu`. `spaces` must be all of its spaces.
///
/// Call it only at a quiet moment, when no call or fault is in progress. Before, call
/// [`Cpu::drain`] on every CPU that made calls: this ends dropped spaces and objects, frees retired
/// objects, and returns the CPU's stock of free frames. A stock that was not returned is a
/// discrepancy, because the audit cannot distinguish it from lost frames.
///
/// ```
/// # use faultless::audit::{Discrepancy, audit};
/// # use faultless::{Cpu, Machine, Space};
/// # fn check<M: Machine>(cpus: &[Cpu<'_, M>], spaces: &[&Space<M>]) -> Result<(), Discrepancy> {
/// cpus.iter().for_each(Cpu::drain);
/// audit(&cpus[0], spaces)?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// The first discrepancy.
pub fn audit<M: Machine>(cpu: &Cpu<'_, M>, spaces: &[&Space<M>]) -> Result<Census, Discrepancy> {
    audit_with(cpu, spaces, &[])
}

/// As [`audit`], on the same conditions, for a kernel that has shares of `objects`, which may be
/// unmapped.
///
/// # Errors
/// The first discrepancy.
pub fn audit_with<M: Machine>(
    cpu: &Cpu<'_, M>,
    spaces: &[&Space<M>],
    objects: &[&Shared<Object>],
) -> Result<Census, Discrepancy> {
    let census = cpu.vm().census(cpu).map_err(Discrepancy::Frames)?;
    let mut found = Found::default();
    for &object in objects {
        object.check_vm(cpu);
        found.objects.insert(object.id(), object.clone());
    }
    let swap = cpu.vm().swap.get();
    if let Some(swap) = swap {
        found.objects.insert(swap.object().id(), swap.object().clone());
    }
    let section = cpu.section();
    for space in spaces {
        space.check_vm(cpu);
        let resident = audit_space(cpu, space, &section, &mut found)?;
        let recorded = space.resident_pages(cpu);
        if recorded != resident {
            return Err(Discrepancy::Resident { recorded, found: resident });
        }
    }
    drop(section);
    for object in core::mem::take(&mut found.objects).values() {
        let top = object.top();
        // SAFETY: the object is alive, and no call is in progress.
        unsafe {
            audit_tables(
                cpu,
                top.table,
                top.level,
                0,
                &mut found.tables,
                &mut |addr, entry, level| {
                    if entry.is_swapped() {
                        return Err(Discrepancy::Entry { addr, what: "swapped, of an object" });
                    }
                    if level > LAST {
                        return Err(Discrepancy::Entry { addr, what: "a huge leaf of an object" });
                    }
                    if addr >> PAGE_SHIFT >= object.pages() {
                        return Err(Discrepancy::Entry {
                            addr,
                            what: "beyond the end of its object",
                        });
                    }
                    *found.references.entry(entry.frame().0).or_default() += 1;
                    Ok(())
                },
            )?;
        }
    }
    if swap.is_some_and(|swap| !swap.agrees()) {
        return Err(Discrepancy::FreeSlots);
    }
    for slot in 0..swap.map_or(0, Swap::slots) {
        let recorded = swap.map_or(0, |swap| swap.count(slot));
        let found = found.slots.get(&slot).copied().unwrap_or(0);
        if recorded != found {
            return Err(Discrepancy::Slot { slot, recorded, found });
        }
    }
    let (walk, mut visits) = (cpu.walk(), Visits::default());
    for (&number, &mapped) in &found.mapped {
        audit_reverse_map(cpu, &walk, &mut visits, FrameNumber(number), mapped)?;
    }
    for &first in found.leaves.keys() {
        for frame in folio::frames_of(FrameNumber(first)) {
            *found.references.entry(frame.0).or_default() += 1;
        }
    }
    for (&number, &count) in &found.references {
        let frame = FrameNumber(number);
        let leaves = found.leaves.get(&number).copied().unwrap_or(0);
        let recorded = cpu.vm().frames.meta(frame).leaves();
        if recorded != leaves {
            return Err(Discrepancy::Leaves { frame, recorded, found: leaves });
        }
        let recorded = cpu.vm().frames.meta(frame).refs();
        if recorded != count {
            return Err(Discrepancy::References { frame, recorded, found: count });
        }
    }
    let pages = found.references.len() as u64;
    for (kind, recorded, found) in [
        ("page", census.anon + census.shared, pages + census.pinned),
        ("table", census.tables, found.tables),
        ("zero", census.zero, 1),
        ("retired", census.retired, 0),
        ("pooled", census.pooled, 0),
    ] {
        if recorded != found {
            return Err(Discrepancy::Kind { kind, recorded, found });
        }
    }
    Ok(census)
}

/// Returns the page-table entry of the page at `addr`, 0 if there is none, unless a CPU is changing
/// the entry or its VMA. Every translation of the page must agree with the result. A CPU that runs
/// the space and has not [served flushes](Cpu::serve_flushes) since it used a translation used one
/// with the same frame and no more permissions than the entry: a CPU that removes permissions or
/// pages waits for this CPU before it releases its claim on the page.
///
/// `None`: a CPU is changing the entry, or the page is not mapped; or the flush of pages of the
/// space is [deferred](crate::Setting::DeferredFlush), so CPUs may load from the old frames of
/// migrated pages.
pub fn stable_entry<M: Machine>(cpu: &Cpu<'_, M>, space: &Space<M>, addr: u64) -> Option<u64> {
    let section = space.section(cpu);
    let found = space.view(cpu, &section).at(addr)?;
    let vma = found.get();
    let seen = vma.sequence.read()?;
    let entry = space.entry_at(cpu, addr);
    // The claims are read last: a writer claims the page before changing the entry read above.
    let settled = !entry.is_locked()
        && !space.is_claimed(cpu, VirtRange::page(addr))
        && !cpu.is_pending(&space.core.pending)
        && !cpu.is_pending(&space.core.evicted);
    (settled && vma.sequence.unchanged(seen)).then_some(entry.0)
}

/// Checks one space; returns its resident pages.
fn audit_space<M: Machine>(
    cpu: &Cpu<'_, M>,
    space: &Space<M>,
    section: &Section<'_>,
    found: &mut Found,
) -> Result<u64, Discrepancy> {
    let view = space.view(cpu, section);
    for entry in view.iter_from(0) {
        let vma = entry.get();
        if vma.sequence.read().is_none() {
            return Err(Discrepancy::Stopped { range: vma.range() });
        }
        if let Some(object) = vma.memory().object() {
            found.objects.entry(object.id()).or_insert_with(|| object.clone());
        }
    }
    let (mut resident, mut swapped) = (0, 0);
    let slots = &mut found.slots;
    let area_slots = cpu.vm().swap.get().map_or(0, Swap::slots);
    let (references, mapped) = (&mut found.references, &mut found.mapped);
    let leaves = &mut found.leaves;
    let mut page = |addr, entry: Entry, huge: bool| {
        let wrong = |what| Err(Discrepancy::Entry { addr, what });
        let Some(vma) = view.at(addr).map(|found| found.get()) else {
            return wrong("outside every VMA");
        };
        let area = vma.area();
        if entry.is_swapped() {
            if entry != Entry::swapped(entry.slot()) || entry.slot() >= area_slots {
                return wrong("swapped, but without a valid slot");
            }
            if !area.is_private() || vma.anon_vma.get().is_none() {
                return wrong("swapped in a VMA without private pages");
            }
            swapped += 1;
            *slots.entry(entry.slot()).or_default() += 1;
            return Ok(());
        }
        if entry.is_writable() && !area.allows(Prot::WRITE) {
            return wrong("writable in a VMA that is not");
        }
        if entry.is_executable() && !area.allows(Prot::EXEC) {
            return wrong("executable in a VMA that is not");
        }
        if entry.is_hidden() != area.prot.is_empty() {
            return wrong("accessible though its VMA is not, or the reverse");
        }
        let device = match area.memory {
            PageSource::Device { cache, .. } => Some(*cache),
            _ => None,
        };
        if cpu.vm().device(entry) != device {
            return wrong("device memory in a VMA of another kind or cache mode, or the reverse");
        }
        if device.is_some() {
            if u64::from(entry.frame().0) != area.index_of(addr) {
                return wrong("a frame that does not belong to the device");
            }
            return Ok(());
        }
        if cpu.vm().maps_zeros(entry) {
            if entry.is_writable() {
                return wrong("the zero page is writable");
            }
            return Ok(());
        }
        let meta = cpu.vm().frames.meta(entry.frame());
        let kind = meta.kind();
        if kind == Kind::Used(FrameUse::Anon) && vma.anon_vma.get().is_none() {
            return wrong("an anonymous page in a VMA without an anon_vma");
        }
        if kind != Kind::Used(if area.is_private() { FrameUse::Anon } else { FrameUse::Shared }) {
            if kind != Kind::Used(FrameUse::Shared) || area.memory.object().is_none() {
                return wrong("maps a frame of another kind than the VMA");
            }
            if entry.is_writable() {
                return wrong("an object's page is writable in a private VMA");
            }
        }
        resident += 1;
        if huge {
            return if kind == Kind::Used(FrameUse::Shared) && !entry.is_writable() {
                Ok(())
            } else {
                wrong("a huge leaf that allows stores, or maps a frame outside the object")
            };
        }
        *references.entry(entry.frame().0).or_default() += 1;
        *mapped.entry(entry.frame().0).or_default() += 1;
        Ok(())
    };
    let mut leaf = |addr: u64, entry: Entry, level: u32| {
        if level == LAST {
            return page(addr, entry, false);
        }
        if level != HUGE || !folio::is_first(entry.frame()) {
            return Err(Discrepancy::Entry { addr, what: "a leaf of an unused size" });
        }
        *leaves.entry(entry.frame().0).or_default() += 1;
        (0..ENTRIES).try_for_each(|at| page(addr + at as u64 * PAGE_SIZE, entry.part(at), true))
    };
    // SAFETY: the space is alive, and no call is in progress.
    unsafe { audit_tables(cpu, space.root(), ROOT, 0, &mut found.tables, &mut leaf)? };
    let recorded = space.swapped_pages(cpu);
    if recorded != swapped {
        return Err(Discrepancy::Swapped { recorded, found: swapped });
    }
    Ok(resident)
}

/// Checks that the reverse map finds exactly the `mapped` entries of base pages which map `frame`.
/// The reverse map finds fewer if moves of shared pages were not recorded.
fn audit_reverse_map<'w, M: Machine>(
    cpu: &'w Cpu<'_, M>,
    walk: &'w Walk<'_>,
    visits: &mut Visits<'w>,
    frame: FrameNumber,
    mapped: u32,
) -> Result<(), Discrepancy> {
    let mut found = BTreeSet::new();
    cpu.each_mapping(walk, visits, frame, u32::MAX, |entry| {
        if !entry.seen.is_huge() {
            note(&mut found, (entry.space.id.0, entry.addr));
        }
        ControlFlow::Continue(())
    });
    let found = found.len() as u32;
    if found == mapped { Ok(()) } else { Err(Discrepancy::ReverseMap { frame, mapped, found }) }
}

/// Adds an entry by its space and address. Separate from the walk: this function may fail for lack
/// of memory, the walk must not.
#[inline(never)]
fn note(found: &mut BTreeSet<(u64, u64)>, entry: (u64, u64)) {
    found.insert(entry);
}

/// Calls `leaf` with the address, the entry and the level of each leaf below `table`, and counts
/// tables.
///
/// # Safety
/// `table` is a linked table of `level`, and no table below it is unlinked during the call.
unsafe fn audit_tables<M: Machine>(
    cpu: &Cpu<'_, M>,
    table: FrameNumber,
    level: u32,
    base: u64,
    tables: &mut u64,
    leaf: &mut impl FnMut(u64, Entry, u32) -> Result<(), Discrepancy>,
) -> Result<(), Discrepancy> {
    *tables += 1;
    // SAFETY: the caller's promise.
    let slots = unsafe { node::user_entries(cpu.vm().machine(), table, level) };
    for (at, slot) in slots.iter().enumerate() {
        let entry = node::load(slot);
        let addr = base + at as u64 * node::entry_span(level);
        if entry.is_locked() {
            return Err(Discrepancy::Entry { addr, what: "locked while no call runs" });
        }
        if level > LAST && entry.is_table() {
            // SAFETY: linked below a linked table.
            unsafe { audit_tables(cpu, entry.frame(), level - 1, addr, tables, leaf)? };
        } else if entry.is_mapped() || entry.is_swapped() {
            leaf(addr, entry, level)?;
        }
    }
    Ok(())
}
