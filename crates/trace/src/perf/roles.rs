//! The meaning of each perf event, and the fields of its samples.

use super::format::{Field, Fields};
use crate::event::Recorded;
use linux_perf_data::AttributeDescription;
use linux_perf_data::linux_perf_event_reader::{
    AttrFlags, PerfEventType, RawData, SampleFormat, SamplingPolicy, SoftwareCounterType,
};
use std::collections::{HashMap, HashSet};

/// The supported calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Call {
    Mmap,
    Mprotect,
    Munmap,
    Brk,
    Mremap,
    Madvise,
}

impl Call {
    /// Returns the number of arguments, which a tracepoint of this call has.
    fn arguments(self) -> usize {
        match self {
            Self::Brk => 1,
            Self::Munmap => 2,
            Self::Mprotect | Self::Madvise => 3,
            Self::Mremap => 5,
            Self::Mmap => ARGUMENTS,
        }
    }
}

/// The most arguments of a call.
const ARGUMENTS: usize = 6;

/// Commands that record every fault, and the use of their recordings.
pub(super) const COMPLETE: &str = "record with `faultless record -- PROGRAM`; only recordings of \
     this command have figures of prefault. A recording of `perf record -c 1 -d -e page-faults \
     -- PROGRAM` is sufficient to replay the faults, and to compare the locking policies";

/// The note of a recording with faults and without munmap calls.
pub(super) const NO_MUNMAP: &str = "munmap calls were not recorded: a page that the program \
     unmapped and touched again looks like a page that was never unmapped, so the reported \
     savings of prefault are too small. Remedy: record with `faultless record -- PROGRAM` \
     (without --lesser)";

pub(super) const CALLS: [(Call, &str, Recorded); 6] = [
    (Call::Mmap, "mmap", Recorded::MMAP),
    (Call::Mprotect, "mprotect", Recorded::MPROTECT),
    (Call::Munmap, "munmap", Recorded::MUNMAP),
    (Call::Brk, "brk", Recorded::BRK),
    (Call::Mremap, "mremap", Recorded::MREMAP),
    (Call::Madvise, "madvise", Recorded::MADVISE),
];

/// The meaning of the samples of one perf event, and the location of their fields.
pub(super) enum Role {
    Fault { kernel: bool, address: Field, ip: Field, error_code: Field },
    SoftwareFault,
    Enter { number: Field, args: Vec<Field> },
    Exit { number: Field, result: Field },
    NewTask { pid: Field, flags: Field },
    Other,
}

impl Role {
    /// Returns whether the samples are faults.
    pub fn is_fault(&self) -> bool {
        matches!(self, Self::Fault { .. } | Self::SoftwareFault)
    }
}

/// Returns the meaning of the samples of `attr`. Adds the recorded kinds to `recorded`, and the
/// calls with exits to `exits`.
///
/// # Errors
/// The samples lack a required field, or the file holds only a part of the events.
pub(super) fn role(
    attr: &AttributeDescription,
    all: &[AttributeDescription],
    layouts: &HashMap<String, Fields>,
    recorded: &mut Recorded,
    exits: &mut HashSet<Call>,
) -> Result<Role, String> {
    let role = meaning(attr, all, layouts, recorded, exits)?;
    match role {
        Role::Other => {}
        // A part of the faults is a sample. Without every call, the mappings are wrong.
        Role::SoftwareFault if period(attr) > 1 => {}
        _ => every_event(attr)?,
    }
    Ok(role)
}

/// Returns the number of events for each recorded event; 0 if this number varies.
pub(super) fn period(attr: &AttributeDescription) -> u64 {
    match attr.attr.sampling_policy {
        SamplingPolicy::Period(period) => period.get(),
        SamplingPolicy::Frequency(_) | SamplingPolicy::NoSampling => 0,
    }
}

/// Rejects an event of which perf wrote only some occurrences.
fn every_event(attr: &AttributeDescription) -> Result<(), String> {
    let name = attr.name().unwrap_or("an event");
    let part = match attr.attr.sampling_policy {
        SamplingPolicy::Period(period) if period.get() == 1 => return Ok(()),
        SamplingPolicy::Period(period) => format!("one in {period} of its events"),
        SamplingPolicy::Frequency(rate) => format!("some {rate} of its events in a second"),
        SamplingPolicy::NoSampling => "none of its events".to_owned(),
    };
    Err(format!("{name} was recorded with {part}; every event is needed: {COMPLETE}"))
}

fn meaning(
    attr: &AttributeDescription,
    all: &[AttributeDescription],
    layouts: &HashMap<String, Fields>,
    recorded: &mut Recorded,
    exits: &mut HashSet<Call>,
) -> Result<Role, String> {
    let flags = attr.attr.flags;
    if flags.contains(AttrFlags::MMAP | AttrFlags::MMAP_DATA) {
        *recorded |= Recorded::AREAS;
    }
    // perf prints an event as on its command line: `system:name`, perhaps with `/modifiers/` or
    // `:u`.
    let full = attr.name().unwrap_or("");
    let mut parts = full.split([':', '/']);
    let name = format!("{}:{}", parts.next().unwrap_or(""), parts.next().unwrap_or(""));
    let layout = layouts.get(&name);
    let known = |field: &str, offset: usize| {
        let found = layout.and_then(|fields| fields.iter().find(|(name, _)| name == field));
        found.map_or(Field { offset, size: 8 }, |(_, field)| *field)
    };
    let number = |name: &str| Field { size: 4, ..known(name, 8) };
    let pid = |name: &str| Field { size: 4, ..known(name, 8) };
    let args = |count| match layout {
        Some(fields) if fields.len() > 1 && fields[1].0 != "args" => {
            fields[1..].iter().map(|(_, field)| *field).collect()
        }
        _ => (0..count).map(|n| Field { offset: 16 + 8 * n, size: 8 }).collect(),
    };
    let is = |prefix: &str| name.strip_prefix(prefix).map(str::to_owned);
    let the_call = |name: &str| CALLS.iter().find(|entry| entry.1 == name);
    Ok(match name.as_str() {
        "exceptions:page_fault_user" | "exceptions:page_fault_kernel" => {
            let kernel = name.ends_with("kernel");
            *recorded |= Recorded::ACCESS | Recorded::INSTRUCTIONS;
            *recorded |= if kernel { Recorded::KERNEL_FAULTS } else { Recorded::USER_FAULTS };
            Role::Fault {
                kernel,
                address: known("address", 8),
                ip: known("ip", 16),
                error_code: known("error_code", 24),
            }
        }
        "task:task_newtask" => {
            *recorded |= Recorded::CLONE_FLAGS;
            Role::NewTask { pid: pid("pid"), flags: known("clone_flags", 32) }
        }
        "raw_syscalls:sys_enter" => {
            CALLS.iter().for_each(|(.., bit)| *recorded |= *bit);
            Role::Enter { number: number("id"), args: args(ARGUMENTS) }
        }
        "raw_syscalls:sys_exit" => {
            exits.extend(CALLS.iter().map(|(call, ..)| *call));
            Role::Exit { number: number("id"), result: known("ret", 16) }
        }
        _ => {
            if let Some(call) = is("syscalls:sys_enter_") {
                let known = the_call(&call);
                if let Some((.., bit)) = known {
                    *recorded |= *bit;
                }
                // The samples of other calls are skipped.
                let args = args(known.map_or(0, |(call, ..)| call.arguments()));
                return Ok(Role::Enter { number: number("__syscall_nr"), args });
            }
            if let Some(call) = is("syscalls:sys_exit_") {
                exits.extend(the_call(&call).map(|(call, ..)| *call));
                return Ok(Role::Exit { number: number("__syscall_nr"), result: known("ret", 16) });
            }
            software(attr, all, recorded)?
        }
    })
}

/// Returns the role of a software event: page faults, unless the file has a better source.
fn software(
    attr: &AttributeDescription,
    all: &[AttributeDescription],
    recorded: &mut Recorded,
) -> Result<Role, String> {
    use SoftwareCounterType::{PageFaults, PageFaultsMaj, PageFaultsMin};
    let every = |attr: &AttributeDescription| {
        matches!(attr.attr.type_, PerfEventType::Software(PageFaults))
    };
    let part = matches!(attr.attr.type_, PerfEventType::Software(PageFaultsMin | PageFaultsMaj));
    let traced = |other: &AttributeDescription| {
        other.name().is_some_and(|name| name.starts_with("exceptions:page_fault"))
    };
    if !(every(attr) || part && !all.iter().any(every)) || all.iter().any(traced) {
        return Ok(Role::Other);
    }
    if !attr.attr.sample_format.contains(SampleFormat::ADDR) {
        return Err(format!("page faults were recorded without their addresses: {COMPLETE}"));
    }
    if attr.attr.sample_format.contains(SampleFormat::IP) {
        *recorded |= Recorded::INSTRUCTIONS;
    }
    let flags = attr.attr.flags;
    if !flags.contains(AttrFlags::EXCLUDE_USER) {
        *recorded |= Recorded::USER_FAULTS;
    }
    if !flags.contains(AttrFlags::EXCLUDE_KERNEL) {
        *recorded |= Recorded::KERNEL_FAULTS;
    }
    Ok(Role::SoftwareFault)
}

pub(super) fn raw_u64(raw: RawData<'_>, offset: usize) -> Option<u64> {
    raw_field(raw, Field { offset, size: 8 })
}

pub(super) fn raw_field(raw: RawData<'_>, field: Field) -> Option<u64> {
    let mut value = [0; 8];
    let size = field.size.min(8);
    let mut bytes = raw.get(field.offset..field.offset.checked_add(size)?)?;
    bytes.read_exact(&mut value[..size]).ok()?;
    Some(u64::from_le_bytes(value))
}
