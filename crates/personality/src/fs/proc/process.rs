//! The texts in `/proc/PID` and `/proc/PID/task/TID`.

use super::super::inode::path_of_tag;
use super::super::nodes::nodes;
use super::super::set::{list, mask};
use super::{ProcessText, Subject, Text, field, oom, smaps};
use crate::errno::{Errno, Result};
use crate::ipc::shm::segment_of_tag;
use crate::signal;
use crate::task::current;
use crate::task::ids::Set;
use crate::task::memory::Memory;
use core::cell::Cell;
use core::fmt::{self, Write};
use core::sync::atomic::Ordering::Relaxed;
use faultless::{Label, PAGE_SIZE, Prot, USER_END, VirtRange, VmaFlags};
use faultless_bare::percpu;
use faultless_collections::{Arc, String, Vec};

/// The texts about memory, which only the process's own user may read.
pub(super) const PRIVATE: &[&str] =
    &["maps", "smaps", "smaps_rollup", "environ", "io", "clear_refs", "personality"];

/// The texts, by name.
pub(super) const TEXTS: &[(&str, ProcessText)] = &[
    ("maps", maps),
    ("smaps", smaps::smaps),
    ("smaps_rollup", smaps::rollup),
    ("status", status),
    ("stat", stat),
    ("statm", statm),
    ("cmdline", cmdline),
    ("environ", environ),
    ("comm", comm),
    ("limits", limits),
    ("mounts", mounts),
    ("mountinfo", mountinfo),
    ("cgroup", cgroup),
    ("oom_score", oom::score),
    ("oom_score_adj", oom::score_adj),
    ("oom_adj", oom::adj),
    ("clear_refs", unreadable),
    ("io", nothing),
    ("sched", nothing),
    ("schedstat", schedstat),
    ("wchan", nought),
    ("personality", personality),
    ("fail-nth", fail_nth),
];

/// The maximum number of nodes on Linux: programs derive this number from the length of the mask.
const MOST_NODES: u32 = 1024;
/// Clock ticks per second.
const TICK: u64 = 1_000_000_000 / 100;

pub(super) fn memory(of: &Subject) -> Result<Arc<Memory>> {
    of.process.memory().ok_or(Errno::ESRCH)
}

/// The name of a mapping of the file with this tag.
fn label(tag: u64) -> Result<Option<Label<String>>> {
    if let Some((id, key)) = segment_of_tag(tag) {
        let path = String::try_format(format_args!("/SYSV{key:08x} (deleted)"))?;
        return Ok(Some(Label { device: (0, 1), inode: id as u64, path }));
    }
    let Some(path) = path_of_tag(tag)? else { return Ok(None) };
    let path = String::try_from_utf8_lossy(&path)?;
    Ok(Some(Label { device: (0, 1), inode: tag, path }))
}

pub(super) fn list_maps(memory: &Memory, text: &mut Text) -> Result<()> {
    let failed = Cell::new(Ok(()));
    let label = |tag| {
        label(tag).unwrap_or_else(|errno| {
            failed.set(Err(errno));
            None
        })
    };
    // `Text` records an error.
    let _ = write!(text, "{}", memory.space().maps_with(percpu::cpu(), label));
    failed.get()
}

fn maps(of: &Subject, text: &mut Text) -> Result<()> {
    // An ended process has no memory.
    memory(of).map_or(Ok(()), |memory| list_maps(&memory, text))
}

/// The parts of a space, in pages.
#[derive(Default)]
struct Sums {
    data: u64,
    stack: u64,
    text: u64,
    resident_anon: u64,
    resident_file: u64,
    resident_shared: u64,
}

fn sums(memory: &Memory) -> Sums {
    let mut sums = Sums::default();
    memory.space().areas(percpu::cpu(), |area| {
        let pages = area.range.pages();
        let shared = area.flags.contains(VmaFlags::SHARED);
        if area.flags.contains(VmaFlags::GROWSDOWN) {
            sums.stack += pages;
        } else if area.prot.contains(Prot::WRITE) && !shared {
            sums.data += pages;
        } else if area.prot.contains(Prot::EXEC) {
            sums.text += pages;
        }
        *match (area.tag, shared) {
            (0, false) => &mut sums.resident_anon,
            (0, true) => &mut sums.resident_shared,
            _ => &mut sums.resident_file,
        } += area.resident;
    });
    sums
}

/// Returns the letter and the name of the process state.
fn state(of: &Subject) -> (char, &'static str) {
    match &of.thread {
        None => ('Z', "zombie"),
        Some(thread) if thread.waits() => ('S', "sleeping"),
        Some(_) => ('R', "running"),
    }
}

fn parent(of: &Subject) -> u32 {
    of.process.parent()
}

fn tid(of: &Subject) -> u32 {
    of.thread.as_ref().filter(|_| of.of_thread).map_or(of.process.pid, |thread| thread.tid)
}

fn switches(of: &Subject) -> [u64; 2] {
    let of_thread = |at: usize| of.thread.as_ref().map_or(0, |t| t.switches[at].load(Relaxed));
    [of_thread(0), of_thread(1)]
}

fn status(of: &Subject, text: &mut Text) -> Result<()> {
    let process = &of.process;
    let (letter, word) = state(of);
    field(text, "Name", &*process.name.lock());
    field(text, "Umask", format_args!("{:04o}", process.files().umask()));
    field(text, "State", format_args!("{letter} ({word})"));
    field(text, "Tgid", process.pid);
    field(text, "Ngid", 0);
    field(text, "Pid", tid(of));
    field(text, "PPid", parent(of));
    field(text, "TracerPid", 0);
    for (name, set) in [("Uid", process.ids.user()), ("Gid", process.ids.group())] {
        let Set { real, effective, saved, file } = set;
        field(text, name, format_args!("{real}\t{effective}\t{saved}\t{file}"));
    }
    field(text, "FDSize", process.files().count().next_multiple_of(64));
    let _ = text.write_str("Groups:\t");
    for group in process.ids.groups()?.iter() {
        let _ = write!(text, "{group} ");
    }
    let _ = text.write_str("\n");
    if let Some(memory) = process.memory() {
        let space = memory.space();
        let sums = sums(&memory);
        let (size, resident) =
            (space.mapped_pages(percpu::cpu()), space.resident_pages(percpu::cpu()));
        let [most, most_resident] = memory.note_peaks();
        let mut pages = |name: &str, pages: u64| {
            field(text, name, format_args!("{:8} kB", pages * (PAGE_SIZE / 1024)));
        };
        pages("VmPeak", most.max(size));
        pages("VmSize", size);
        pages("VmLck", space.locked_pages(percpu::cpu()));
        pages("VmPin", 0);
        pages("VmHWM", most_resident.max(resident));
        pages("VmRSS", resident);
        pages("RssAnon", sums.resident_anon);
        pages("RssFile", sums.resident_file);
        pages("RssShmem", sums.resident_shared);
        pages("VmData", sums.data);
        pages("VmStk", sums.stack);
        pages("VmExe", sums.text);
        pages("VmLib", 0);
        pages("VmPTE", memory.table_pages());
        pages("VmSwap", space.swapped_pages(percpu::cpu()));
    }
    field(text, "CoreDumping", 0);
    field(text, "THP_enabled", 0);
    field(text, "Threads", process.threads.lock().len());
    let most = process.limits.signals.load(Relaxed);
    field(text, "SigQ", format_args!("{}/{most}", signal::queued(process)));
    for name in ["SigPnd", "ShdPnd", "SigBlk", "SigIgn", "SigCgt"] {
        field(text, name, format_args!("{:016x}", signals(of, name)));
    }
    for name in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        let all = if matches!(name, "CapInh" | "CapAmb") { 0u64 } else { (1 << 41) - 1 };
        field(text, name, format_args!("{all:016x}"));
    }
    field(text, "NoNewPrivs", 0);
    field(text, "Seccomp", 0);
    let cpus = percpu::cpus();
    let all = u64::MAX >> (64 - cpus.min(64));
    let may = of.thread.as_ref().map_or(all, |thread| thread.affinity.load(Relaxed)) & all;
    field(text, "Cpus_allowed", format_args!("{may:x}"));
    field(text, "Cpus_allowed_list", list(may));
    field(text, "Mems_allowed", mask(nodes(), MOST_NODES));
    field(text, "Mems_allowed_list", list(nodes()));
    let [given, taken] = switches(of);
    field(text, "voluntary_ctxt_switches", given);
    field(text, "nonvoluntary_ctxt_switches", taken);
    Ok(())
}

/// The set of signals of a status line.
fn signals(of: &Subject, name: &str) -> u64 {
    let (process, thread) = (&of.process.signals, of.thread.as_ref());
    let (ignored, caught) = process.ignored_and_caught();
    match name {
        "SigPnd" => thread.map_or(0, |thread| thread.signals.waiting()),
        "ShdPnd" => process.waiting(),
        "SigBlk" => thread.map_or(0, |thread| thread.signals.blocked()),
        "SigIgn" => ignored,
        _ => caught,
    }
}

fn stat(of: &Subject, text: &mut Text) -> Result<()> {
    let process = &of.process;
    let memory = process.memory();
    let (mut size, mut resident, mut image) = (0, 0, [0; 4]);
    if let Some(memory) = &memory {
        size = memory.space().mapped_pages(percpu::cpu()) * PAGE_SIZE;
        resident = memory.space().resident_pages(percpu::cpu());
        let known = memory.image.lock();
        let ends =
            |range: Option<VirtRange>| range.map_or([0; 2], |range| [range.start, range.end]);
        let (arguments, environment) = (ends(known.arguments), ends(known.environment));
        image = [arguments[0], arguments[1], environment[0], environment[1]];
    }
    let threads = process.threads.lock().len();
    let children = *process.used.by_children.lock();
    let own = match &of.thread {
        Some(thread) if of.of_thread => thread.usage(),
        _ => process.usage_now(),
    };
    let cpu = of.thread.as_ref().map_or(0, |thread| thread.last_cpu().0);
    let nice = of.thread.as_ref().map_or(0, |thread| thread.schedule.lock().nice);
    let group = process.relatives.group.load(Relaxed);
    let session = process.relatives.session.load(Relaxed);
    let _ = write!(
        text,
        "{} ({}) {} {} {group} {session} 0 -1 4194304 {} {} {} {} {} {} {} {} {} {nice} {threads} 0 {} \
         {size} {resident} 18446744073709551615 0 0 0 0 0 0 0 0 0 0 0 0 17 {cpu} 0 0 0 0 0 0 0 {} {} {} \
         {} {} {}",
        tid(of),
        *process.name.lock(),
        state(of).0,
        parent(of),
        own.minor_faults,
        children.minor_faults,
        own.major_faults,
        children.major_faults,
        own.times.user / TICK,
        own.times.system / TICK,
        children.times.user / TICK,
        children.times.system / TICK,
        20 + nice,
        process.started / TICK,
        memory.as_ref().map_or(0, |memory| memory.space().heap_range().start),
        image[0],
        image[1],
        image[2],
        image[3],
        process.end.status.lock().map_or(0, |ending| ending.0),
    );
    text.push_str("\n");
    Ok(())
}

fn statm(of: &Subject, text: &mut Text) -> Result<()> {
    let Ok(memory) = memory(of) else {
        text.push_str("0 0 0 0 0 0 0\n");
        return Ok(());
    };
    let sums = sums(&memory);
    let _ = writeln!(
        text,
        "{} {} {} {} 0 {} 0",
        memory.space().mapped_pages(percpu::cpu()),
        memory.space().resident_pages(percpu::cpu()),
        sums.resident_file + sums.resident_shared,
        sums.text,
        sums.data + sums.stack,
    );
    Ok(())
}

/// Appends the strings in a part of a process's memory.
fn strings(memory: &Memory, range: Option<VirtRange>, text: &mut Text) -> Result<()> {
    let Some(range) = range.filter(|range| range.end <= USER_END) else { return Ok(()) };
    let len = range.len().min(1 << 20) as usize;
    let mut bytes = Vec::try_filled(0, len)?;
    // Unmapped parts are left out.
    if memory.space().read_bytes(percpu::cpu(), range.start, &mut bytes).is_ok() {
        for chunk in bytes.utf8_chunks() {
            text.push_str(chunk.valid());
            if !chunk.invalid().is_empty() {
                text.push_str("\u{fffd}");
            }
        }
    }
    Ok(())
}

fn cmdline(of: &Subject, text: &mut Text) -> Result<()> {
    if let Ok(memory) = memory(of) {
        let range = memory.image.lock().arguments;
        strings(&memory, range, text)?;
    }
    Ok(())
}

fn environ(of: &Subject, text: &mut Text) -> Result<()> {
    if let Ok(memory) = memory(of) {
        let range = memory.image.lock().environment;
        strings(&memory, range, text)?;
    }
    Ok(())
}

fn comm(of: &Subject, text: &mut Text) -> Result<()> {
    let _ = writeln!(text, "{}", *of.process.name.lock());
    Ok(())
}

/// Returns a limit as text.
struct Limit(u64);

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            u64::MAX => f.pad("unlimited"),
            limit => limit.fmt(f),
        }
    }
}

fn limits(of: &Subject, text: &mut Text) -> Result<()> {
    const ROWS: [(&str, &str); 16] = [
        ("Max cpu time", "seconds"),
        ("Max file size", "bytes"),
        ("Max data size", "bytes"),
        ("Max stack size", "bytes"),
        ("Max core file size", "bytes"),
        ("Max resident set", "bytes"),
        ("Max processes", "processes"),
        ("Max open files", "files"),
        ("Max locked memory", "bytes"),
        ("Max address space", "bytes"),
        ("Max file locks", "locks"),
        ("Max pending signals", "signals"),
        ("Max msgqueue size", "bytes"),
        ("Max nice priority", ""),
        ("Max realtime priority", ""),
        ("Max realtime timeout", "us"),
    ];
    let limits = *of.process.limits.rows.lock();
    let _ =
        writeln!(text, "{:<25} {:<20} {:<20} {:<10}", "Limit", "Soft Limit", "Hard Limit", "Units");
    for ((name, unit), limit) in ROWS.iter().zip(limits) {
        let [soft, hard] = limit.map(Limit);
        let _ = writeln!(text, "{name:<25} {soft:<20} {hard:<20} {unit:<10}");
    }
    Ok(())
}

fn mounts(_: &Subject, text: &mut Text) -> Result<()> {
    text.push_str(
        "rootfs / rootfs rw 0 0\nproc /proc proc rw,nosuid,nodev,noexec,relatime 0 0\n\
         tmpfs /dev/shm tmpfs rw,nosuid,nodev 0 0\ntmpfs /tmp tmpfs rw 0 0\n",
    );
    Ok(())
}

fn mountinfo(_: &Subject, text: &mut Text) -> Result<()> {
    text.push_str(
        "1 1 0:1 / / rw - rootfs rootfs rw\n\
         2 1 0:2 / /proc rw,nosuid,nodev,noexec,relatime - proc proc rw\n",
    );
    Ok(())
}

fn cgroup(_: &Subject, text: &mut Text) -> Result<()> {
    text.push_str("0::/\n");
    Ok(())
}

fn nought(_: &Subject, text: &mut Text) -> Result<()> {
    text.push_str("0\n");
    Ok(())
}

fn nothing(_: &Subject, _: &mut Text) -> Result<()> {
    Ok(())
}

fn unreadable(_: &Subject, _: &mut Text) -> Result<()> {
    Err(Errno::EINVAL)
}

fn schedstat(of: &Subject, text: &mut Text) -> Result<()> {
    let ran = of.thread.as_ref().map_or(0, |thread| thread.run_time());
    let _ = writeln!(text, "{ran} 0 {}", switches(of).iter().sum::<u64>());
    Ok(())
}

/// Writes the remainder of the reading thread's previous `fail-nth` at the last change of this
/// setting.
fn fail_nth(_: &Subject, text: &mut Text) -> Result<()> {
    let _ = writeln!(text, "{}", current().fail_left.get());
    Ok(())
}

fn personality(_: &Subject, text: &mut Text) -> Result<()> {
    text.push_str("00000000\n");
    Ok(())
}
