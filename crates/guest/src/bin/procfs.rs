//! `procfs [CHECK…]`: texts in `/proc` and calls about the machine: Linux's formats, and correct
//! values.

use faultless_guest::args::Args;
use faultless_guest::check::{Check, Verdict};
use faultless_guest::mem::{PAGE, READ, Region, Shared, WRITE, find_mapping};
use faultless_guest::proc::{self, Status, pid};
use faultless_guest::procfs::{fields, interrupts, kilobytes, text, vmstat};
use faultless_guest::sys::{Errno, checked, doing};
use faultless_guest::{check, clock, dir, ensure, same};
use std::fs;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// Converts an error of `std::io` to a message that contains the operation.
fn io<T>(what: &str, result: std::io::Result<T>) -> Result<T, String> {
    result.map_err(|error| format!("{what}: {error}"))
}

/// `/proc/self/maps` in Linux's format, with correct values.
fn proc_maps() -> Verdict {
    let region = doing("mmap", Region::anonymous(16 * PAGE))?;
    doing("mprotect", region.protect(4 * PAGE, 4 * PAGE, READ))?;
    doing("munmap", region.unmap(12 * PAGE, 2 * PAGE))?;
    let maps = text("/proc/self/maps")?;
    let mut last = 0;
    for line in maps.lines() {
        let words: Vec<_> = line.split_whitespace().collect();
        ensure!(words.len() >= 5, "/proc/self/maps: {line:?}");
        let (range, _) = words[0]
            .split_once('-')
            .and_then(|(start, _)| u64::from_str_radix(start, 16).ok())
            .and_then(|start| find_mapping(line, start))
            .ok_or_else(|| format!("/proc/self/maps: the range of {line:?}"))?;
        ensure!(
            range.start >= last && range.end > range.start,
            "/proc/self/maps: {line:?} overlaps"
        );
        last = range.end;
        let flags = words[1].as_bytes();
        let allowed = [b"r-", b"w-", b"x-", b"ps"];
        let proper =
            flags.len() == 4 && flags.iter().zip(allowed).all(|(flag, of)| of.contains(flag));
        ensure!(proper, "/proc/self/maps: the permissions of {line:?}");
        ensure!(words[3].contains(':'), "/proc/self/maps: the device of {line:?}");
        // The name begins in the same column as on Linux.
        if let Some(name) = words.get(5) {
            same!(
                line.find(name).map(|at| at >= 73),
                Some(true),
                "the column of the name of {line:?}"
            );
        }
    }
    let at = |page: u64| find_mapping(&maps, region.start() + page * PAGE).map(|(_, flags)| flags);
    same!(at(0), Some("rw-p"), "the first part");
    same!(at(5), Some("r--p"), "the protected part");
    same!(at(9), Some("rw-p"), "the next part");
    same!(at(12), None, "the hole");
    same!(at(15), Some("rw-p"), "the last part");
    let here = (&raw const last) as u64;
    same!(find_mapping(&maps, here).is_some(), true, "the stack");
    ensure!(maps.lines().any(|line| line.ends_with("[stack]")), "no [stack]");
    ensure!(maps.lines().any(|line| line.ends_with("[heap]")), "no [heap]");
    let code = proc_maps as *const () as u64;
    let text = find_mapping(&maps, code).map(|(_, flags)| flags);
    same!(text, Some("r-xp"), "this program's text");
    let file = maps.lines().find(|line| line.contains("r-xp") && line.contains('/'));
    ensure!(file.is_some(), "no executable mapping has a file's name");
    Ok(())
}

/// `/proc/self/smaps` of a program with thousands of areas: each area is listed with its resident
/// pages.
fn proc_smaps() -> Verdict {
    const AREAS: u64 = 4096;
    let region = doing("mmap", Region::anonymous(AREAS * PAGE))?;
    for page in (0..AREAS).step_by(2) {
        doing("mprotect", region.protect(page * PAGE, PAGE, READ))?;
    }
    for page in (1..AREAS).step_by(2) {
        region.store(page * PAGE, 1);
    }
    let smaps = text("/proc/self/smaps")?;
    let mut area = None;
    let mut seen = 0;
    for line in smaps.lines() {
        if let Some((start, _)) = line.split_once('-')
            && let Ok(start) = u64::from_str_radix(start, 16)
        {
            area = start.checked_sub(region.start()).map(|at| at / PAGE).filter(|&at| at < AREAS);
        } else if let (Some(page), Some((name, value))) = (area, line.split_once(':')) {
            let expected = match name {
                "Size" => "4 kB",
                "Rss" | "Anonymous" | "Private_Dirty" if page % 2 == 1 => "4 kB",
                "Rss" | "Anonymous" | "Private_Dirty" | "Shared_Dirty" | "Swap" => "0 kB",
                _ => continue,
            };
            same!(value.trim(), expected, "{name} of page {page}");
            seen += 1;
        }
    }
    same!(seen, 6 * AREAS, "values of the areas, six of each");
    Ok(())
}

/// The rows of `/proc/self/smaps` for shared, locked, used and lazily freed pages.
fn proc_smaps_kinds() -> Verdict {
    const PAGES: u64 = 16;
    doing("sched_setaffinity", proc::pin(proc::current_cpu()))?;
    // Pages around the region prevent a merge with other areas.
    let region = doing("mmap", Region::anonymous((PAGES + 2) * PAGE))?;
    for around in [0, (PAGES + 1) * PAGE] {
        doing("mprotect", region.protect(around, PAGE, 0))?;
    }
    let (start, end) = (region.start() + PAGE, PAGES * PAGE);
    (PAGE..=end).step_by(PAGE as usize).for_each(|at| region.store(at, 1));
    let kinds = |names: &[&str]| -> Result<Vec<u64>, String> {
        let text = text("/proc/self/smaps")?;
        let head = format!("{start:x}-");
        let of = text.lines().skip_while(|line| !line.starts_with(&head)).skip(1);
        let fields: Vec<_> = of
            .map_while(|line| line.split_once(':'))
            .take_while(|(name, _)| *name != "VmFlags")
            .collect();
        let value = |name: &&str| {
            let (_, value) = fields.iter().find(|(known, _)| known == name)?;
            value.trim().strip_suffix(" kB")?.parse().ok()
        };
        names.iter().map(|name| value(name).ok_or(format!("no {name}"))).collect()
    };
    let page = PAGE / 1024;
    let shares = ["Rss", "Pss", "Private_Dirty", "Private_Clean", "Shared_Dirty"];
    same!(kinds(&shares)?, [16 * page, 16 * page, 16 * page, 0, 0], "private pages");
    same!(kinds(&["Referenced", "LazyFree", "Locked"])?, [16 * page, 0, 0], "used pages");
    // A child that has stored to half of the pages shares the others.
    let step = doing("mmap", Shared::new(AtomicU32::new(0)))?;
    let reached = |count| proc::wait_until(|| step.load(Ordering::Acquire) == count);
    let child = doing(
        "fork",
        proc::fork(|| {
            (1..9).for_each(|at| region.store(at * PAGE, 2));
            step.store(1, Ordering::Release);
            reached(2);
            0
        }),
    )?;
    reached(1);
    let shared = kinds(&shares);
    step.store(2, Ordering::Release);
    same!(doing("wait4", child.wait())?, Status::Exited(0), "the child");
    same!(shared?, [16 * page, 12 * page, 8 * page, 0, 8 * page], "pages shared with a child");
    doing("madvise", region.advise(PAGE, 4 * PAGE, libc::MADV_FREE))?;
    // Linux processes lazily freed pages later, in batches.
    let more = doing("mmap", Region::anonymous(64 * PAGE))?;
    more.fill(1);
    doing("madvise", more.advise(0, 64 * PAGE, libc::MADV_FREE))?;
    same!(
        kinds(&["LazyFree", "Private_Clean", "Private_Dirty"])?,
        [4 * page, 4 * page, 12 * page],
        "after MADV_FREE"
    );
    region.store(PAGE, 1);
    same!(kinds(&["LazyFree", "Private_Dirty"])?, [3 * page, 13 * page], "after a store");
    // SAFETY: memory of this check alone.
    doing("mlock", checked(unsafe { libc::syscall(libc::SYS_mlock, start, end) }))?;
    same!(kinds(&["Locked"])?, [16 * page], "locked pages");
    Ok(())
}

/// `/proc/self/smaps_rollup` has the sums of `/proc/self/smaps`.
fn proc_smaps_rollup() -> Verdict {
    const NAMES: [&str; 8] = [
        "Rss",
        "Shared_Clean",
        "Shared_Dirty",
        "Private_Clean",
        "Private_Dirty",
        "Anonymous",
        "Swap",
        "Locked",
    ];
    let [private, shared] = [libc::MAP_PRIVATE, libc::MAP_SHARED].map(|flags| {
        let region = Region::map(64 * PAGE, READ | WRITE, flags | libc::MAP_ANONYMOUS, -1, 0);
        region.inspect(|region| region.fill(1))
    });
    let _regions = [doing("mmap", private)?, doing("mmap", shared)?];
    let sums = |path: &str| -> Result<[u64; NAMES.len()], String> {
        let mut sums = [0; NAMES.len()];
        for line in text(path)?.lines() {
            let Some((name, value)) = line.split_once(':') else { continue };
            let Some(at) = NAMES.iter().position(|known| *known == name) else { continue };
            let number = value.trim().strip_suffix(" kB").and_then(|number| number.parse().ok());
            sums[at] += number.unwrap_or(0);
        }
        Ok(sums)
    };
    let (mut whole, mut parts) = ([0; NAMES.len()], [1; NAMES.len()]);
    // Reading the texts takes memory, until enough memory is allocated.
    for _ in 0..20 {
        (parts, whole) = (sums("/proc/self/smaps")?, sums("/proc/self/smaps_rollup")?);
        if whole == parts {
            break;
        }
    }
    same!(whole, parts, "{NAMES:?}, and the sums");
    ensure!(whole[3] + whole[1] > 0 && whole[2] + whole[4] >= 512, "too little: {whole:?}");
    Ok(())
}

/// `/proc/self/status`, `stat`, `exe`, `cmdline` and `fd`.
fn proc_self() -> Verdict {
    let status = fields("/proc/self/status")?;
    let number = |name: &str| status.get(name).and_then(|value| value.parse::<i32>().ok());
    same!(number("Pid"), Some(pid()), "Pid");
    same!(number("Tgid"), Some(pid()), "Tgid");
    same!(number("Threads"), Some(1), "Threads");
    same!(status.get("Name").map(String::as_str), Some("procfs"), "Name");
    let before = kilobytes(&status, "VmRSS")?;
    let region = doing("mmap", Region::anonymous(8 << 20))?;
    region.fill(1);
    let status = fields("/proc/self/status")?;
    let grown = kilobytes(&status, "VmRSS")?.saturating_sub(before);
    ensure!((7 << 20..=10 << 20).contains(&grown), "VmRSS grew by {grown} bytes for 8 MiB");
    ensure!(kilobytes(&status, "VmSize")? >= 8 << 20, "VmSize is less than 8 MiB");
    for name in ["VmPeak", "VmHWM", "VmData", "VmStk", "VmExe", "VmPTE"] {
        kilobytes(&status, name)?;
    }
    for name in ["State", "PPid", "Uid", "Gid", "SigBlk", "SigCgt", "Cpus_allowed"] {
        ensure!(status.contains_key(name), "/proc/self/status has no {name}");
    }
    let line = text("/proc/self/stat")?;
    let (head, tail) = line.rsplit_once(')').ok_or("/proc/self/stat has no name")?;
    same!(head, format!("{} (procfs", pid()), "the beginning of /proc/self/stat");
    let words: Vec<_> = tail.split_whitespace().collect();
    same!(words.len(), 50, "the fields of /proc/self/stat after the name");
    same!(words[0], "R", "the state");
    let resident: u64 = words[21].parse().map_err(|_| "/proc/self/stat: the resident pages")?;
    ensure!(resident >= 2048, "/proc/self/stat reports {resident} resident pages");
    let statm = text("/proc/self/statm")?;
    same!(statm.split_whitespace().count(), 7, "the fields of /proc/self/statm");
    let exe = io("/proc/self/exe", fs::read_link("/proc/self/exe"))?;
    ensure!(exe.is_absolute() && exe.ends_with("procfs"), "/proc/self/exe leads to {exe:?}");
    let command = io("/proc/self/cmdline", fs::read("/proc/self/cmdline"))?;
    ensure!(command.ends_with(b"\0"), "/proc/self/cmdline does not end in 0");
    let words = command.split(|&byte| byte == 0).count() - 1;
    same!(words, std::env::args().count(), "the words of /proc/self/cmdline");
    same!(number_of(&text("/proc/self/status")?, "Threads:"), Some(1), "Threads");
    let threads = std::thread::scope(|scope| {
        scope
            .spawn(|| text("/proc/self/status").map(|text| number_of(&text, "Threads:")))
            .join()
            .unwrap_or_else(|_| Err("a thread panicked".into()))
    })?;
    same!(threads, Some(2), "Threads, read by a second thread");
    Ok(())
}

/// `oom_score_adj` and `oom_adj` are kept, and inherited; `oom_score` follows.
fn proc_oom() -> Verdict {
    const SCORE: &str = "/proc/self/oom_score";
    const NEW: &str = "/proc/self/oom_score_adj";
    const OLD: &str = "/proc/self/oom_adj";
    let write = |path: &str, text: &str| dir::number(fs::write(path, text));
    let read = |path: &str| text(path)?.trim().parse::<i32>().map_err(|error| error.to_string());
    // Includes values allowed for processes that may not lower the adjustment below its earlier
    // value.
    for (path, given, kept, old) in [
        (NEW, "990", 990, 15),
        (NEW, "1000\n", 1000, 15),
        (NEW, " 0x3de ", 990, 15),
        (NEW, "01740", 992, 15),
        (OLD, "15", 1000, 15),
    ] {
        same!(write(path, given), 0, "writing {given:?}");
        same!((read(NEW)?, read(OLD)?), (kept, old), "the value after a write of {given:?}");
    }
    for (path, wrong, errno) in [
        (NEW, "1001", libc::EINVAL),
        (NEW, "-1001", libc::EINVAL),
        (NEW, "", libc::EINVAL),
        (NEW, "7 7", libc::EINVAL),
        (NEW, "08", libc::EINVAL),
        (NEW, "0x", libc::EINVAL),
        (NEW, "99999999999", libc::ERANGE),
        (OLD, "16", libc::EINVAL),
        (OLD, "-18", libc::EINVAL),
    ] {
        // An empty text is not written at all by the library.
        let file = io("open", fs::OpenOptions::new().write(true).open(path))?;
        // SAFETY: the text lives as long as the call.
        let wrote = unsafe { libc::write(file.as_raw_fd(), wrong.as_ptr().cast(), wrong.len()) };
        same!(checked(wrote), Err(Errno(errno)), "writing {wrong:?} to {path}");
    }
    same!(read(NEW)?, 1000, "the value after refused writes");
    ensure!(read(SCORE)? > 1000, "oom_score is {} at most", read(SCORE)?);
    let child = || (read(NEW) == Ok(1000) && write(NEW, "990") == 0).into();
    same!(proc::outcome(child)?, Status::Exited(1), "a child that inherits and changes it");
    same!(read(NEW)?, 1000, "the value after a child changed the child's value");
    let refused = write(NEW, "-1000");
    if refused == 0 {
        same!(
            (read(NEW)?, read(OLD)?, read(SCORE)?),
            (-1000, -17, 0),
            "a process that must not be killed"
        );
    } else {
        same!(refused, libc::EACCES, "lowering the value");
    }
    Ok(())
}

fn number_of(text: &str, label: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(label)).and_then(|rest| rest.trim().parse().ok())
}

/// `/proc/vmstat` and `/proc/meminfo` change when memory is touched and freed.
fn proc_memory() -> Verdict {
    let used = || fields("/proc/meminfo").and_then(|fields| kilobytes(&fields, "AnonPages"));
    let faults = || vmstat()?.get("pgfault").copied().ok_or("no pgfault".to_owned());
    let mut seen = (0, 0, 0);
    // Other programs on the machine allocate and free memory, too: a single quiet moment is enough.
    for _ in 0..20 {
        let (before, used_before) = (faults()?, used()?);
        let region = doing("mmap", Region::anonymous(32 << 20))?;
        region.fill(1);
        let (after, used_after) = (faults()?, used()?);
        drop(region);
        let taken = used_after.saturating_sub(used_before);
        seen = (after - before, taken, used_after.saturating_sub(used()?));
        if seen.0 >= 1 && seen.1 > 24 << 20 && seen.2 > 24 << 20 {
            break;
        }
    }
    ensure!(seen.0 >= 1, "pgfault grew by {} for 32 MiB", seen.0);
    ensure!(seen.1 > 24 << 20, "AnonPages rose by {} bytes for 32 MiB", seen.1);
    ensure!(seen.2 > 24 << 20, "AnonPages fell by {} bytes when 32 MiB were unmapped", seen.2);
    let info = fields("/proc/meminfo")?;
    let [total, left, available] =
        ["MemTotal", "MemFree", "MemAvailable"].map(|name| kilobytes(&info, name));
    ensure!(left? <= total.clone()?, "MemFree is more than MemTotal");
    ensure!(available? <= total?, "MemAvailable is more than MemTotal");
    for name in
        ["Buffers", "Cached", "SwapTotal", "SwapFree", "AnonPages", "Mapped", "Shmem", "PageTables"]
    {
        kilobytes(&info, name)?;
    }
    let all = vmstat()?;
    for name in ["nr_free_pages", "pgfree", "pgmajfault", "pgpgin", "pgpgout"] {
        ensure!(all.contains_key(name), "/proc/vmstat has no {name}");
    }
    Ok(())
}

/// The allocated and freed pages in `/proc/vmstat` include pages of files.
fn proc_counters() -> Verdict {
    const PAGES: u64 = 1024;
    let read = || {
        let all = vmstat()?;
        let made = all.iter().filter(|(name, _)| name.starts_with("pgalloc_"));
        let freed = all.get("pgfree").copied().ok_or("/proc/vmstat has no pgfree")?;
        Ok::<_, String>([made.map(|(_, pages)| pages).sum(), freed])
    };
    // Pages freed by other CPUs between two numbers of a reading are in both numbers, or in
    // neither: retry until two readings agree. On a busy Linux no two readings agree.
    let seen = || {
        let mut last: [u64; 2] = read()?;
        for _ in 0..100 {
            let now = read()?;
            if now == last {
                break;
            }
            last = now;
        }
        Ok::<_, String>(last)
    };
    let name = format!("counters.{}", pid());
    let before = seen()?;
    let file = dir::create(&name)?;
    io("write", file.write_all_at(&[1; (PAGES * PAGE) as usize], 0))?;
    let written = seen()?;
    drop(file);
    io("remove", fs::remove_file(dir::path(&name)))?;
    let after = seen()?;
    let made = written[0].saturating_sub(before[0]);
    ensure!(made >= PAGES, "{made} pages were allocated for {PAGES}");
    let freed = after[1].saturating_sub(written[1]);
    ensure!(freed >= PAGES, "{freed} pages were freed of {PAGES}");
    Ok(())
}

/// `Cached` and `Mapped` of `/proc/meminfo` change when files are written, mapped, unmapped and
/// removed.
fn proc_files() -> Verdict {
    const BYTES: u64 = 32 << 20;
    /// Linux counts for each CPU, and sums the counts periodically.
    const MOST: u64 = 24 << 20;
    let seen = || {
        let info = fields("/proc/meminfo")?;
        Ok::<_, String>([kilobytes(&info, "Cached")?, kilobytes(&info, "Mapped")?])
    };
    let (name, mut steps) = (format!("meminfo.{}", pid()), Vec::new());
    for _ in 0..20 {
        let mut now = vec![seen()?];
        let file = dir::create(&name)?;
        for at in (0..BYTES).step_by(1 << 20) {
            io("write", file.write_all_at(&[1; 1 << 20], at))?;
        }
        now.push(seen()?);
        let region =
            doing("mmap", Region::map(BYTES, READ, libc::MAP_SHARED, file.as_raw_fd(), 0))?;
        region.pages().for_each(|at| {
            region.load(at);
        });
        now.push(seen()?);
        doing("munmap", region.end())?;
        now.push(seen()?);
        drop(file);
        io("remove", fs::remove_file(dir::path(&name)))?;
        now.push(seen()?);
        let rises = |from: usize, to: usize, what: usize| {
            now[to][what].saturating_sub(now[from][what]) > MOST
        };
        // Written, mapped, unmapped, removed.
        steps = vec![rises(0, 1, 0), rises(1, 2, 1), rises(3, 2, 1), rises(4, 3, 0)];
        if steps.iter().all(|step| *step) {
            break;
        }
    }
    same!(steps, [true; 4], "whether Cached rose, Mapped rose, Mapped fell, Cached fell");
    Ok(())
}

/// `/proc/interrupts`, `/proc/stat`, `/proc/cpuinfo`, `/proc/uptime`, `/proc/loadavg`,
/// `/proc/version`.
fn proc_machine() -> Verdict {
    let cpus = doing("sched_getaffinity", proc::cpus())?.len();
    let rows = interrupts()?;
    for label in ["TLB", "LOC", "RES"] {
        let (counts, what) = rows.get(label).ok_or(format!("/proc/interrupts has no {label}"))?;
        same!(counts.len() >= cpus, true, "/proc/interrupts: the counts of {label}");
        ensure!(!what.is_empty(), "/proc/interrupts: {label} has no name");
    }
    same!(rows["TLB"].1, "TLB shootdowns", "the name of the row TLB");
    let timer: u64 = rows["LOC"].0.iter().sum();
    clock::sleep_ms(100);
    let later: u64 = interrupts()?["LOC"].0.iter().sum();
    ensure!(later >= timer, "the count of timer interrupts fell from {timer} to {later}");
    let stat = text("/proc/stat")?;
    let first = stat.lines().next().unwrap_or_default();
    same!(first.split_whitespace().count(), 11, "the words of {first:?}");
    let listed =
        stat.lines().filter(|line| line.starts_with("cpu") && !line.starts_with("cpu ")).count();
    ensure!(listed >= cpus, "/proc/stat lists {listed} CPUs of {cpus}");
    for name in ["intr ", "ctxt ", "btime ", "processes ", "procs_running "] {
        ensure!(stat.lines().any(|line| line.starts_with(name)), "/proc/stat has no {name}");
    }
    let info = text("/proc/cpuinfo")?;
    let processors = info.lines().filter(|line| line.starts_with("processor")).count();
    ensure!(processors >= cpus, "/proc/cpuinfo lists {processors} CPUs of {cpus}");
    ensure!(info.lines().any(|line| line.starts_with("flags\t")), "/proc/cpuinfo has no flags");
    let uptime = text("/proc/uptime")?;
    let seconds = uptime.split_whitespace().next().and_then(|word| word.parse::<f64>().ok());
    ensure!(seconds.is_some_and(|seconds| seconds > 0.0), "/proc/uptime: {uptime:?}");
    same!(text("/proc/loadavg")?.split_whitespace().count(), 5, "the words of /proc/loadavg");
    ensure!(text("/proc/version")?.starts_with("Linux version "), "/proc/version is not Linux's");
    Ok(())
}

/// The calls that describe the machine.
fn system_information() -> Verdict {
    // SAFETY: zeros are valid for both, and the calls fill them.
    let (info, name) = unsafe {
        let (mut info, mut name): (libc::sysinfo, libc::utsname) = std::mem::zeroed();
        doing("sysinfo", checked(libc::sysinfo(&raw mut info)))?;
        doing("uname", checked(libc::uname(&raw mut name)))?;
        (info, name)
    };
    let total = info.totalram * u64::from(info.mem_unit);
    same!(total, kilobytes(&fields("/proc/meminfo")?, "MemTotal")?, "totalram");
    ensure!(info.procs > 0, "sysinfo reports no processes");
    // SAFETY: the fields are arrays that contain a zero.
    let system = unsafe { std::ffi::CStr::from_ptr(name.sysname.as_ptr()) };
    same!(system, c"Linux", "uname");
    // SAFETY: the pointer is to a local.
    let stack = unsafe {
        let mut limit: libc::rlimit = std::mem::zeroed();
        doing("getrlimit", checked(libc::getrlimit(libc::RLIMIT_STACK, &raw mut limit)))?;
        limit
    };
    ensure!(stack.rlim_cur >= 1 << 20, "the limit of the stack is {} bytes", stack.rlim_cur);
    // SAFETY: a plain call.
    same!(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }, PAGE as i64, "the page size");
    Ok(())
}

/// The switch and the counters of the subsystem, at the paths published by the original proposals.
fn published_paths() -> Verdict {
    const SWITCH: &str = "/proc/sys/vm/speculative_page_fault";
    const COUNTER: &str = "speculative_pgfault";
    let Some(before) = vmstat()?.get(COUNTER).copied() else {
        // A Linux without the proposal has neither path.
        same!(fs::exists(SWITCH).ok(), Some(false), "the switch without its counter");
        return Ok(());
    };
    let touch = || -> Result<u64, String> {
        let region = doing("mmap", Region::anonymous(64 * PAGE))?;
        (0..64).for_each(|page| region.store(page * PAGE, 1));
        Ok(vmstat()?[COUNTER])
    };
    same!(text(SWITCH)?, "1\n", "the switch at first");
    let with = touch()?;
    ensure!(with > before, "{COUNTER} remains {before} while pages are touched");
    io("switching off", fs::write(SWITCH, "0\n"))?;
    same!(text(SWITCH)?, "0\n", "the switch after turning it off");
    let off = vmstat()?[COUNTER];
    same!(touch()?, off, "speculative faults while the switch is off");
    for wrong in ["2", "-1", "on", ""] {
        let refused = fs::File::options()
            .write(true)
            .open(SWITCH)
            .and_then(|mut file| file.write(wrong.as_bytes()));
        let refused = refused.map_err(|error| error.raw_os_error());
        ensure!(wrong.is_empty() || refused == Err(Some(22)), "writing {wrong:?}: {refused:?}");
    }
    same!(text(SWITCH)?, "0\n", "the switch after an invalid setting");
    io("switching on", fs::write(SWITCH, "1"))?;
    ensure!(touch()? > off, "{COUNTER} remains {off} after the switch is on again");
    for name in
        ["spf_vma_changed", "spf_vma_noanon", "spf_vma_notsup", "spf_vma_access", "spf_pmd_changed"]
    {
        ensure!(vmstat()?.contains_key(name), "/proc/vmstat has no {name}");
    }
    Ok(())
}

/// Scattered pages are moved together on request, and keep their contents.
fn compaction() -> Verdict {
    const PATH: &str = "/proc/sys/vm/compact_memory";
    const PAGES: u64 = 8192;
    const KEPT: usize = 8;
    let Ok(mut file) = fs::File::options().write(true).open(PATH) else {
        // The write may require privileges.
        return Ok(());
    };
    let region = doing("mmap", Region::anonymous(PAGES * PAGE))?;
    (0..PAGES).for_each(|page| region.store(page * PAGE, page));
    for page in (0..PAGES).step_by(KEPT) {
        let at = region.start() + (page + 1) * PAGE;
        // SAFETY: pages of the region, without references.
        let done =
            unsafe { libc::madvise(at as *mut _, (KEPT - 1) * PAGE as usize, libc::MADV_DONTNEED) };
        doing("madvise", checked(done))?;
    }
    let count = |name: &str| Ok::<_, String>(vmstat()?.get(name).copied().unwrap_or_default());
    let before = count("compact_migrate_scanned")?;
    let wrong = file.write(b"2").map_err(|error| error.raw_os_error());
    same!(wrong, Err(Some(libc::EINVAL)), "writing 2");
    io("writing 1", fs::write(PATH, "1"))?;
    let after = count("compact_migrate_scanned")?;
    ensure!(after > before, "compact_migrate_scanned remains {before}");
    for page in (0..PAGES).step_by(KEPT) {
        same!(region.load(page * PAGE), page, "a page that may have moved");
    }
    Ok(())
}

/// The first read may start at any part of a text.
fn parts() -> Verdict {
    for path in ["/proc/version", "/sys/devices/system/cpu/online"] {
        let whole = io(path, fs::read(path))?;
        let mut rest = [0; 200];
        let file = io(path, fs::File::open(path))?;
        let read = io(path, file.read_at(&mut rest, 1))?;
        same!(&rest[..read], &whole[1..], "{path} from the second letter on");
    }
    Ok(())
}

/// The modes of files that not every user may read, and of the links of descriptors.
fn modes() -> Verdict {
    let mode = |path: &str| io(path, fs::symlink_metadata(path)).map(|meta| meta.mode());
    let task = format!("/proc/self/task/{}", proc::tid());
    for (name, expected) in [
        ("environ", 0o100_400),
        ("io", 0o100_400),
        ("personality", 0o100_400),
        ("mem", 0o100_600),
        ("comm", 0o100_644),
        ("sched", 0o100_644),
        ("clear_refs", 0o100_200),
        ("maps", 0o100_444),
        ("status", 0o100_444),
    ] {
        same!(mode(&format!("/proc/self/{name}"))?, expected, "the mode of {name}");
        if name != "mem" {
            same!(mode(&format!("{task}/{name}"))?, expected, "the mode of a thread's {name}");
        }
    }
    same!(mode("/proc/self/pagemap")?, 0o100_400, "the mode of pagemap");
    same!(mode("/proc/self/fd")?, 0o40_500, "the mode of fd");
    // SAFETY: a plain call.
    let is_root = unsafe { libc::geteuid() } == 0;
    let read = fs::read("/proc/self/clear_refs").err().and_then(|error| error.raw_os_error());
    let expected = if is_root { libc::EINVAL } else { libc::EACCES };
    same!(read, Some(expected), "a read of clear_refs");
    for (flags, expected) in [
        (libc::O_RDONLY, 0o120_500),
        (libc::O_WRONLY, 0o120_300),
        (libc::O_RDWR, 0o120_700),
        (libc::O_PATH, 0o120_000),
    ] {
        // SAFETY: the path is text.
        let fd = checked(unsafe { libc::open(c"/dev/null".as_ptr(), flags) });
        let path = format!("/proc/self/fd/{}", doing("open", fd)?);
        same!(mode(&path)?, expected, "the mode of a link of a descriptor with flags {flags:o}");
    }
    Ok(())
}

/// The files below `path`.
fn below(path: &Path) -> Result<Vec<PathBuf>, String> {
    let mut all = Vec::new();
    for entry in io("read_dir", fs::read_dir(path))? {
        let path = io("read_dir", entry)?.path();
        if path.is_dir() { all.extend(below(&path)?) } else { all.push(path) }
    }
    Ok(all)
}

/// A read-only setting cannot be written; an invalid value of a writable setting is rejected.
fn settings() -> Verdict {
    const CHANGED: [&str; 3] = ["speculative_page_fault", "compact_memory", "drop_caches"];
    let write = |path: &Path, text: &str| {
        let file = fs::File::options().write(true).open(path);
        dir::number(file.and_then(|mut file| file.write_all(text.as_bytes())))
    };
    if !vmstat()?.contains_key("speculative_pgfault") {
        // Linux has more settings, which this program must not change.
        return Ok(());
    }
    let drop_caches = Path::new("/proc/sys/vm/drop_caches");
    for (given, expected) in [("0", libc::EINVAL), ("5", libc::EINVAL), ("2\n", 0)] {
        same!(write(drop_caches, given), expected, "writing {given:?} to {drop_caches:?}");
    }
    same!(dir::number(fs::File::open(drop_caches)), libc::EACCES, "reading {drop_caches:?}");
    let all = ["vm", "kernel", "fs"].map(|name| below(&Path::new("/proc/sys").join(name)));
    let mut refused = 0;
    for path in all.into_iter().collect::<Result<Vec<_>, _>>()?.concat() {
        if CHANGED.iter().any(|name| path.ends_with(name)) {
            continue;
        }
        ensure!(!text(&path.to_string_lossy())?.is_empty(), "{path:?} is empty");
        same!(write(&path, "1"), libc::EACCES, "writing to {path:?}");
        refused += 1;
    }
    ensure!(refused > 20, "only {refused} settings");
    same!(write(Path::new("/proc/meminfo"), "1"), libc::EIO, "writing to /proc/meminfo");
    same!(write(Path::new("/proc/self/smaps"), "1"), libc::EINVAL, "writing to /proc/self/smaps");
    Ok(())
}

const CHECKS: &[Check] = &[
    ("proc_maps", proc_maps),
    ("proc_smaps", proc_smaps),
    ("proc_smaps_kinds", proc_smaps_kinds),
    ("proc_smaps_rollup", proc_smaps_rollup),
    ("proc_self", proc_self),
    ("proc_oom", proc_oom),
    ("proc_memory", proc_memory),
    ("proc_counters", proc_counters),
    ("proc_files", proc_files),
    ("proc_machine", proc_machine),
    ("system_information", system_information),
    ("published_paths", published_paths),
    ("compaction", compaction),
    ("settings", settings),
    ("parts", parts),
    ("modes", modes),
];

fn main() {
    let args = Args::read("procfs", &[]);
    proc::no_huge_pages();
    std::process::exit(check::run(&args, CHECKS))
}
