//! The texts in `/proc` about the whole system.

use super::super::usage::{Usage, rows, total_on};
use super::{SystemText, Text};
use crate::task::process::{TABLE, Table, each};
use crate::task::{oom, scheduler};
use crate::time::Times;
use crate::wall;
use core::arch::x86_64::{__cpuid, __cpuid_count};
use core::fmt::{self, Write};
use core::sync::atomic::Ordering::Relaxed;
use faultless::{Counter, CpuId, PAGE_SIZE, USER_END};
use faultless_bare::arch::clock;
use faultless_bare::percpu::{self, MAX_CPUS};
use faultless_bare::task::stack::STACK_BYTES;
use faultless_collections::String;

/// The texts, by name.
pub(super) const TEXTS: &[(&str, SystemText)] = &[
    ("vmstat", vmstat),
    ("meminfo", meminfo),
    ("interrupts", interrupts),
    ("stat", stat),
    ("uptime", uptime),
    ("loadavg", loadavg),
    ("cpuinfo", cpuinfo),
    ("version", version),
    ("filesystems", filesystems),
    ("mounts", mounts),
    ("cmdline", cmdline),
    ("zoneinfo", zoneinfo),
    ("buddyinfo", nothing),
    ("swaps", swaps),
    ("devices", devices),
    ("modules", nothing),
    ("partitions", nothing),
];

/// The Linux version reported to programs.
pub(super) const RELEASE: &str = "6.12.0-faultless";

fn nothing(_: &mut Text) -> fmt::Result {
    Ok(())
}

/// Linux's counters, as far as they apply here, and all of the subsystem's under their own names.
fn vmstat(text: &mut Text) -> fmt::Result {
    let vm = percpu::vm();
    let totals = vm.totals();
    let usage = Usage::of(None);
    let freed = vm.frames_freed();
    let [read, written] = faultless_disk::pages_moved().map(|pages| pages * (PAGE_SIZE / 1024));
    let known = [
        ("nr_free_pages", usage.free),
        ("nr_zone_inactive_anon", 0),
        ("nr_anon_pages", usage.census.anon),
        ("nr_mapped", usage.census.mapped),
        // As on Linux, this count includes the pages of the swap area.
        ("nr_file_pages", usage.census.shared),
        ("nr_dirty", usage.dirty),
        ("nr_writeback", 0),
        ("nr_shmem", usage.in_memory()),
        ("nr_swapcached", usage.swap_cached),
        // In kB.
        ("pgpgin", read),
        ("pgpgout", written),
        ("pgalloc_normal", freed + usage.in_use()),
        ("pgfree", freed),
        ("pgfault", totals.get(Counter::Faults)),
        ("nr_tlb_remote_flush", totals.get(Counter::TlbShootdownSent)),
        ("nr_tlb_remote_flush_received", totals.get(Counter::TlbShootdownReceived)),
        ("oom_kill", oom::kills()),
        // The allocated bytes of the kernel's heap.
        ("heap_bytes", faultless_bare::heap::allocated()),
        // The time that CPUs (not threads) have waited for a disk, in nanoseconds.
        ("disk_wait_ns", faultless_disk::waited()),
    ];
    known.iter().try_for_each(|(name, value)| writeln!(text, "{name} {value}"))?;
    write!(text, "{totals}")
}

fn meminfo(text: &mut Text) -> fmt::Result {
    let vm = percpu::vm();
    let (heap, heap_free) = faultless_bare::heap::usage();
    let usage = Usage::of(None);
    let Usage { total, free, .. } = usage;
    let slab = (heap - heap_free) / PAGE_SIZE;
    let mut tables = 0;
    each(|process| tables += process.memory().map_or(0, |memory| memory.table_pages()));
    let stacks = (TABLE.lock().threads.len() * STACK_BYTES) as u64 / PAGE_SIZE;
    let (swap, swap_used) = percpu::cpu().swap_usage();
    let leaves = vm.totals().get(Counter::FilePmdMapped);
    let first = [
        ("MemTotal", total),
        ("MemFree", free),
        ("MemAvailable", usage.available()),
        ("Buffers", 0),
        ("Cached", usage.cached()),
    ];
    let of_swap = [("SwapTotal", swap), ("SwapFree", swap - swap_used)];
    let of_kernel = [
        ("KReclaimable", 0),
        ("Slab", slab),
        ("SReclaimable", 0),
        ("SUnreclaim", slab),
        ("KernelStack", stacks),
        ("PageTables", tables),
        ("CommitLimit", total + swap),
        ("Committed_AS", total - free),
        ("VmallocTotal", USER_END / PAGE_SIZE),
        ("VmallocUsed", 0),
        ("FilePmdMapped", leaves * ((2 << 20) / PAGE_SIZE)),
    ];
    for part in [&first[..], &usage.lists(), &of_swap, &usage.pages(), &of_kernel] {
        rows(text, "", part)?;
    }
    writeln!(text, "HugePages_Total:       0\nHugePages_Free:        0\nHugePages_Rsvd:        0")?;
    writeln!(text, "HugePages_Surp:        0\nHugepagesize:       2048 kB")
}

fn cpus() -> impl Iterator<Item = CpuId> {
    (0..percpu::cpus() as u16).map(CpuId)
}

fn interrupts(text: &mut Text) -> fmt::Result {
    write!(text, "           ")?;
    for cpu in cpus() {
        write!(text, "CPU{:<8}", cpu.0)?;
    }
    writeln!(text)?;
    let rows = [
        ("LOC", "Local timer interrupts"),
        ("RES", "Rescheduling interrupts"),
        ("TLB", "TLB shootdowns"),
        ("DEV", "Device interrupts"),
    ];
    for (at, (label, what)) in rows.into_iter().enumerate() {
        write!(text, "{label}: ")?;
        for cpu in cpus() {
            let count = if label == "TLB" {
                // As on Linux, each request counts, although one interrupt may serve several
                // requests.
                percpu::vm().totals_of(cpu).get(Counter::TlbShootdownReceived)
            } else {
                percpu::interrupts(cpu)[at]
            };
            write!(text, "{count:10} ")?;
        }
        writeln!(text, "  {what}")?;
    }
    writeln!(text, "ERR:          0\nMIS:          0")
}

fn stat(text: &mut Text) -> fmt::Result {
    const TICK: u64 = 10_000_000;
    let now = clock::now();
    let mut row = |name: fmt::Arguments<'_>, times: Times, since: u64| {
        let idle = since.saturating_sub(times.total()) / TICK;
        let (user, system) = (times.user / TICK, times.system / TICK);
        writeln!(text, "{name} {user} 0 {system} {idle} 0 0 0 0 0 0")
    };
    let mut each = [Times::default(); MAX_CPUS];
    let each = &mut each[..percpu::cpus()];
    each.iter_mut().zip(cpus()).for_each(|(times, cpu)| *times = scheduler::busy(cpu));
    // Two blanks after the first name.
    row(format_args!("cpu "), each.iter().copied().sum(), now * each.len() as u64)?;
    for (id, &times) in each.iter().enumerate() {
        row(format_args!("cpu{id}"), times, now)?;
    }
    let interrupts: u64 = cpus().map(|cpu| percpu::interrupts(cpu).iter().sum::<u64>()).sum();
    writeln!(text, "intr {interrupts}")?;
    writeln!(text, "ctxt {}", scheduler::SWITCHES.load(Relaxed))?;
    writeln!(text, "btime {}", (wall::now() - now) / 1_000_000_000)?;
    writeln!(text, "processes {}", last_process(&TABLE.lock()))?;
    writeln!(text, "procs_running {}", scheduler::runnable())?;
    writeln!(text, "procs_blocked 0")
}

fn last_process(table: &Table) -> u32 {
    table.processes.last().map_or(0, |(&pid, _)| pid)
}

fn uptime(text: &mut Text) -> fmt::Result {
    let now = clock::now();
    let busy: Times = cpus().map(scheduler::busy).sum();
    let idle = (now * percpu::cpus() as u64).saturating_sub(busy.total());
    let hundredths = |ns: u64| (ns / 1_000_000_000, ns / 10_000_000 % 100);
    let ((up, up_rest), (idle, idle_rest)) = (hundredths(now), hundredths(idle));
    writeln!(text, "{up}.{up_rest:02} {idle}.{idle_rest:02}")
}

fn loadavg(text: &mut Text) -> fmt::Result {
    let (threads, last) = {
        let table = TABLE.lock();
        (table.threads.len(), last_process(&table))
    };
    let runnable = scheduler::runnable();
    writeln!(text, "{runnable}.00 {runnable}.00 {runnable}.00 {runnable}/{threads} {last}")
}

/// Appends the text in registers.
fn spelled(registers: &[u32], text: &mut String) -> fmt::Result {
    let spelled = registers.iter().flat_map(|register| register.to_le_bytes());
    let mut letters = spelled.take_while(|&byte| byte != 0).filter(u8::is_ascii).map(char::from);
    letters.try_for_each(|letter| text.write_char(letter))
}

fn cpuinfo(text: &mut Text) -> fmt::Result {
    let first = __cpuid(0);
    let version = __cpuid(1);
    let extended = if first.eax >= 7 { __cpuid_count(7, 0).ebx } else { 0 };
    let high = __cpuid(0x8000_0001);
    let (mut vendor, mut model) = (String::new(), String::new());
    spelled(&[first.ebx, first.edx, first.ecx], &mut vendor)?;
    if __cpuid(0x8000_0000).eax >= 0x8000_0004 {
        for leaf in 0x8000_0002..=0x8000_0004 {
            let part = __cpuid(leaf);
            spelled(&[part.eax, part.ebx, part.ecx, part.edx], &mut model)?;
        }
    }
    let mut flags = String::new();
    let words: [(u32, &[(u32, &str)]); 6] = [
        (version.edx, BASIC),
        (high.edx, HIGH),
        (version.ecx, MORE),
        (high.ecx, HIGH_MORE),
        (extended, EXTENDED),
        (if first.eax >= 7 { __cpuid_count(7, 0).ecx } else { 0 }, EXTENDED_MORE),
    ];
    for (word, names) in words {
        for (bit, name) in names {
            if word & 1 << bit != 0 {
                write!(flags, "{}{name}", if flags.is_empty() { "" } else { " " })?;
            }
        }
    }
    let base_family = version.eax >> 8 & 15;
    let family = if base_family == 15 { 15 + (version.eax >> 20 & 255) } else { base_family };
    let base_model = version.eax >> 4 & 15;
    let is_wide = base_family == 6 || base_family == 15;
    let number = if is_wide { base_model | (version.eax >> 16 & 15) << 4 } else { base_model };
    let count = percpu::cpus();
    for cpu in 0..count {
        writeln!(text, "processor\t: {cpu}\nvendor_id\t: {vendor}\ncpu family\t: {family}")?;
        writeln!(text, "model\t\t: {number}\nmodel name\t: {}", model.trim())?;
        writeln!(text, "stepping\t: {}\ncpu MHz\t\t: 1000.000", version.eax & 15)?;
        writeln!(text, "cache size\t: 0 KB\nphysical id\t: 0\nsiblings\t: {count}")?;
        writeln!(text, "core id\t\t: {cpu}\ncpu cores\t: {count}\napicid\t\t: {cpu}")?;
        writeln!(text, "fpu\t\t: yes\nfpu_exception\t: yes\ncpuid level\t: {}", first.eax)?;
        writeln!(text, "wp\t\t: yes\nflags\t\t: {flags}\nbugs\t\t:")?;
        writeln!(text, "bogomips\t: 2000.00\nclflush size\t: 64\ncache_alignment\t: 64")?;
        writeln!(text, "address sizes\t: 40 bits physical, 48 bits virtual\n")?;
    }
    Ok(())
}

/// Linux's names for the CPUID bits that programs check, of leaf 1 `edx`.
const BASIC: &[(u32, &str)] = &[
    (0, "fpu"),
    (3, "pse"),
    (4, "tsc"),
    (5, "msr"),
    (6, "pae"),
    (8, "cx8"),
    (9, "apic"),
    (11, "sep"),
    (13, "pge"),
    (15, "cmov"),
    (16, "pat"),
    (19, "clflush"),
    (23, "mmx"),
    (24, "fxsr"),
    (25, "sse"),
    (26, "sse2"),
    (28, "ht"),
];
/// Of leaf 8000_0001 `edx`.
const HIGH: &[(u32, &str)] =
    &[(11, "syscall"), (20, "nx"), (26, "pdpe1gb"), (27, "rdtscp"), (29, "lm")];
/// Of leaf 1 `ecx`.
const MORE: &[(u32, &str)] = &[
    (0, "pni"),
    (1, "pclmulqdq"),
    (9, "ssse3"),
    (12, "fma"),
    (13, "cx16"),
    (17, "pcid"),
    (19, "sse4_1"),
    (20, "sse4_2"),
    (22, "movbe"),
    (23, "popcnt"),
    (25, "aes"),
    (26, "xsave"),
    (28, "avx"),
    (29, "f16c"),
    (30, "rdrand"),
    (31, "hypervisor"),
];
/// Of leaf 8000_0001 `ecx`.
const HIGH_MORE: &[(u32, &str)] = &[(0, "lahf_lm"), (5, "abm"), (6, "sse4a"), (8, "3dnowprefetch")];
/// Of leaf 7 `ebx`.
const EXTENDED: &[(u32, &str)] = &[
    (0, "fsgsbase"),
    (3, "bmi1"),
    (5, "avx2"),
    (7, "smep"),
    (8, "bmi2"),
    (9, "erms"),
    (10, "invpcid"),
    (16, "avx512f"),
    (18, "rdseed"),
    (19, "adx"),
    (20, "smap"),
    (23, "clflushopt"),
    (24, "clwb"),
    (29, "sha_ni"),
];
/// Of leaf 7 `ecx`.
const EXTENDED_MORE: &[(u32, &str)] = &[(2, "umip"), (3, "pku"), (16, "la57"), (22, "rdpid")];

fn version(text: &mut Text) -> fmt::Result {
    writeln!(text, "Linux version {RELEASE} (faultless) #1 SMP")
}

fn filesystems(text: &mut Text) -> fmt::Result {
    text.write_str("nodev\trootfs\nnodev\ttmpfs\nnodev\tproc\nnodev\tsysfs\nnodev\tdevtmpfs\n")
}

fn mounts(text: &mut Text) -> fmt::Result {
    text.write_str(
        "rootfs / rootfs rw 0 0\nproc /proc proc rw,nosuid,nodev,noexec,relatime 0 0\n\
         tmpfs /dev/shm tmpfs rw,nosuid,nodev 0 0\ntmpfs /tmp tmpfs rw 0 0\n",
    )
}

fn cmdline(text: &mut Text) -> fmt::Result {
    writeln!(text, "{}", faultless_bare::boot::command_line())
}

/// A zone for each memory node.
fn zoneinfo(text: &mut Text) -> fmt::Result {
    for node in percpu::cpu().memory_nodes().iter() {
        let (free, total) = (percpu::vm().free_frames_on(node), total_on(node));
        writeln!(text, "Node {node}, zone   Normal\n  pages free     {free}")?;
        writeln!(text, "        present  {total}\n        managed  {total}")?;
    }
    Ok(())
}

fn swaps(text: &mut Text) -> fmt::Result {
    text.write_str("Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n")?;
    let (size, used) = percpu::cpu().swap_usage();
    if size == 0 {
        return Ok(());
    }
    let [size, used] = [size, used].map(|pages| pages * (PAGE_SIZE / 1024));
    writeln!(text, "{:40}partition\t{size}\t\t{used}\t\t-2", "/dev/swap")
}

fn devices(text: &mut Text) -> fmt::Result {
    text.write_str("Character devices:\n  1 mem\n  5 /dev/tty\n\nBlock devices:\n")
}
