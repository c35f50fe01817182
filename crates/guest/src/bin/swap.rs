//! `swap [CHECK…]`: more private memory than the machine has. The program needs a machine with
//! less than 160 MiB of memory and a swap area of 256 MiB. The check `none` runs only by name, on a
//! machine without an area, and `errors`, also by name, on a machine whose area has some pages that
//! can be written but not read.

use faultless_guest::args::Args;
use faultless_guest::check::{self, Check, Verdict};
use faultless_guest::mem::{PAGE, Region};
use faultless_guest::proc::{self, Status, fork};
use faultless_guest::procfs::{fields, kilobytes, page_map, text, vmstat};
use faultless_guest::sys::{Errno, checked, doing};
use faultless_guest::{ensure, same};
use std::collections::BTreeSet;

/// The memory used by one process, in bytes.
const LARGE: u64 = 160 << 20;

/// Returns the value stored in a page in round `round`.
const fn word(at: u64, round: u64) -> u64 {
    (at / PAGE + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ round
}

fn put(region: &Region, round: u64) {
    region.pages().for_each(|at| region.store(at, word(at, round)));
}

/// Returns the offset of the first wrong page, of every `step`th.
fn wrong(region: &Region, step: usize, round: u64) -> Option<u64> {
    region.pages().step_by(step).find(|&at| region.load(at) != word(at, round))
}

/// Bytes of this process in the swap area.
fn swapped() -> Result<u64, String> {
    kilobytes(&fields("/proc/self/status")?, "VmSwap")
}

/// Returns the size of the area and its free part, in bytes.
fn area() -> Result<[u64; 2], String> {
    let info = fields("/proc/meminfo")?;
    Ok([kilobytes(&info, "SwapTotal")?, kilobytes(&info, "SwapFree")?])
}

/// Returns the size of the area and its free part from `sysinfo`, in bytes.
fn told() -> Result<[u64; 2], String> {
    // SAFETY: zeros are a value; the pointer is to a local.
    let info = unsafe {
        let mut info: libc::sysinfo = std::mem::zeroed();
        doing("sysinfo", checked(libc::sysinfo(&raw mut info)))?;
        info
    };
    Ok([info.totalswap, info.freeswap].map(|pages| pages * u64::from(info.mem_unit)))
}

/// Stored values are loaded again, also by a forked child; and each process has its own pages.
fn stored_values_are_read_back() -> Verdict {
    let region = doing("mmap", Region::anonymous(LARGE))?;
    put(&region, 1);
    same!(wrong(&region, 1, 1), None, "a page");
    let child = fork(|| {
        let before = wrong(&region, 7, 1).is_none();
        region.pages().step_by(64).for_each(|at| region.store(at, word(at, 2)));
        let own = wrong(&region, 64, 2).is_none();
        i32::from(!before) | i32::from(!own) << 1
    });
    same!(doing("wait4", doing("fork", child)?.wait())?, Status::Exited(0), "the child");
    same!(wrong(&region, 64, 1), None, "a page after the child has stored to its copy");
    Ok(())
}

/// `/proc` and `sysinfo` report the used part of the area. Discarded pages leave the area.
fn used_area_is_reported() -> Verdict {
    const LEAST: u64 = LARGE - (96 << 20);
    let before = area()?[1];
    let region = doing("mmap", Region::anonymous(LARGE))?;
    put(&region, 0);
    let (area_now, told) = (area()?, told()?);
    same!([area_now[0], told[0]], [256 << 20; 2], "the size of the area");
    for free in [area_now[1], told[1]] {
        ensure!(before.saturating_sub(free) >= LEAST, "{free} bytes of {before} are still free");
    }
    same!(text("/proc/swaps")?.lines().count(), 2, "lines of /proc/swaps");
    let rollup = kilobytes(&fields("/proc/self/smaps_rollup")?, "Swap")?;
    for (name, bytes) in [("VmSwap", swapped()?), ("smaps_rollup", rollup)] {
        ensure!(bytes >= LEAST, "{name} reports {bytes} bytes");
    }
    doing("madvise", region.advise(0, LARGE / 2, libc::MADV_DONTNEED))?;
    same!(region.load(0), 0, "a discarded page");
    drop(region);
    // A few pages of the program itself may have left memory.
    for still in [swapped()?, before.saturating_sub(area()?[1])] {
        ensure!(still <= 4 << 20, "{still} bytes of the area remain in use");
    }
    Ok(())
}

/// `/proc/self/pagemap` reports the pages in the area, and their slots.
fn pagemap_reports_slots() -> Verdict {
    const PRESENT: u64 = 1 << 63;
    const SWAPPED: u64 = 1 << 62;
    const PAGES: u64 = 64;
    let region = doing("mmap", Region::anonymous(PAGES * PAGE))?;
    put(&region, 4);
    doing("madvise", region.advise(0, PAGES * PAGE, libc::MADV_PAGEOUT))?;
    let map = page_map(&region)?;
    let out: Vec<_> = map.iter().filter(|told| **told & PRESENT == 0).collect();
    ensure!(out.len() as u64 >= PAGES / 2, "{} of {PAGES} pages are swapped", out.len());
    ensure!(out.iter().all(|told| **told & SWAPPED != 0), "neither present nor swapped: {map:x?}");
    let places: BTreeSet<_> = out.iter().map(|told| **told >> 5 & ((1 << 50) - 1)).collect();
    // Only privileged users see the slots.
    ensure!(places.len() == out.len() || places.len() == 1, "two pages in one slot: {map:x?}");
    same!(wrong(&region, 1, 4), None, "a page");
    let map = page_map(&region)?;
    ensure!(
        map.iter().all(|told| told & (PRESENT | SWAPPED) == PRESENT),
        "all pages are present: {map:x?}"
    );
    Ok(())
}

/// Pages of the area that are in memory are counted separately, and not as shared memory; reads and
/// writes of the disk are counted, too.
fn cached() -> Verdict {
    const PAGES: u64 = 64;
    let seen = || -> Result<[u64; 2], String> {
        let info = fields("/proc/meminfo")?;
        Ok([kilobytes(&info, "SwapCached")?, kilobytes(&info, "Shmem")?])
    };
    let region = doing("mmap", Region::anonymous(PAGES * PAGE))?;
    put(&region, 5);
    doing("madvise", region.advise(0, PAGES * PAGE, libc::MADV_PAGEOUT))?;
    let before = seen()?;
    // A page read by a child is copied for the child, and stays for the parent.
    let child = proc::outcome(|| i32::from(wrong(&region, 1, 5).is_some()))?;
    same!(child, Status::Exited(0), "a child that reads the pages");
    let after = seen()?;
    let more = after[0].saturating_sub(before[0]);
    ensure!(more >= PAGES / 2 * PAGE, "SwapCached rose by {more} bytes, from {}", before[0]);
    ensure!(after[1] < before[1] + 4 * PAGE, "Shmem rose from {} to {}", before[1], after[1]);
    same!(wrong(&region, 1, 5), None, "a page");
    let all = vmstat()?;
    for (swapped, moved) in [("pswpin", "pgpgin"), ("pswpout", "pgpgout")] {
        let [pages, kilobytes] = [swapped, moved].map(|name| all.get(name).copied());
        let least = pages.unwrap_or(0) * PAGE / 1024;
        ensure!(least > 0 && kilobytes >= Some(least), "{moved} {kilobytes:?} of {least} kB");
    }
    Ok(())
}

/// Several processes at a time.
fn several() -> Verdict {
    let mut children = Vec::new();
    for _ in 0..3 {
        let child = fork(|| {
            let Ok(region) = Region::anonymous(32 << 20) else { return 1 };
            put(&region, 3);
            if wrong(&region, 1, 3).is_some() { 2 } else { 0 }
        });
        children.push(doing("fork", child)?);
    }
    for child in children {
        same!(doing("wait4", child.wait())?, Status::Exited(0), "a child");
    }
    Ok(())
}

/// An unreadable page is a signal for its users, and an error of a call; all other pages are
/// intact. Unwritable pages stay in memory.
fn errors() -> Verdict {
    let region = doing("mmap", Region::anonymous(LARGE))?;
    put(&region, 4);
    let mut bad = Vec::new();
    for at in region.pages() {
        match region.load_outside(at) {
            Ok(found) => same!(found, word(at, 4), "the page at {at:#x}"),
            Err(errno) => {
                same!(errno, Errno(libc::EFAULT), "reading the page at {at:#x}");
                bad.push(at);
            }
        }
    }
    ensure!((1..=64).contains(&bad.len()), "{} pages cannot be read", bad.len());
    for &at in &bad {
        let child = proc::outcome(|| {
            // SAFETY: a plain call.
            unsafe { libc::signal(libc::SIGBUS, libc::SIG_DFL) };
            region.load(at);
            0
        })?;
        same!(child, Status::Killed(libc::SIGBUS), "a load from the page at {at:#x}");
        // The page may be discarded, and used again.
        doing("madvise", region.advise(at, PAGE, libc::MADV_DONTNEED))?;
        same!(region.load(at), 0, "the page at {at:#x} after the error");
        region.store(at, word(at, 4));
    }
    println!("# {} pages cannot be read", bad.len());
    Ok(())
}

/// Without an area, all sizes are 0.
fn none() -> Verdict {
    same!([area()?, told()?], [[0; 2]; 2], "the area");
    same!(text("/proc/swaps")?.lines().count(), 1, "lines of /proc/swaps");
    Ok(())
}

const CHECKS: &[Check] = &[
    ("stored_values_are_read_back", stored_values_are_read_back),
    ("used_area_is_reported", used_area_is_reported),
    ("pagemap_reports_slots", pagemap_reports_slots),
    ("cached", cached),
    ("several", several),
];
/// The checks for a machine without an area, or with a bad area.
const OTHERS: &[Check] = &[("none", none), ("errors", errors)];

fn main() {
    let args = Args::read("swap", &[]);
    proc::no_huge_pages();
    let is_other = |word: &String| OTHERS.iter().any(|(name, _)| name == word);
    let others = args.words().iter().any(is_other);
    std::process::exit(check::run(&args, if others { OTHERS } else { CHECKS }))
}
