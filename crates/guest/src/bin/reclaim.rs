//! `reclaim [disk=FILE] [swap=DISK] [to=NODE] [compact] [dir=DIR] [row=NAME] [passes=N] [settle=SECONDS]`: what it costs that pages come from a disk, leave
//! memory and move, in [ticks](faultless_guest::measure), by what the machine has:
//!
//! - `disk=` names a file on a disk, or the disk itself, that nobody has read, of [`MAJOR`] 128 KiB for each pass. The row `major_fault` reads it once;
//!   the row `evict_page` pages it out (`MADV_PAGEOUT`).
//! - `swap=` names a disk that becomes the swap area, or is `there` where the machine has one. Memory should be less than 256 MiB. The row
//!   `swap_out_page` stores to more pages than memory holds; `swap_in_page` does so again.
//! - `to=` names a second memory node, to which pages move and back in the rows `move_page`, `move_read_only_page` and `move_file_page`.
//! - `compact`: the row `compact_page` has a process take most of memory and give back three pages of four, and memory compacted.
//!
//! A figure is the median of some passes, after one that warms up. As the first process of a machine it makes its own surroundings, and turns the machine off
//! when it is done. Other words are not looked at: Linux gives its first process those of its command line that it does not know.

use faultless_guest::args::Args;
use faultless_guest::init::Init;
use faultless_guest::measure::{
    Beside, Rows, Touch, beside, cached_file, time, touch, touch_again,
};
use faultless_guest::mem::{PAGE, READ, Region};
use faultless_guest::numa;
use faultless_guest::procfs::{self, kilobytes};
use faultless_guest::sys::{self, Errno, checked};
use std::ffi::CString;
use std::fs::{self, File};
use std::io::{Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

/// The rows of pages that move, and how many do in a pass.
const MOVES: [&str; 3] = ["move_page", "move_read_only_page", "move_file_page"];
const MOVED: u64 = 512;

/// Faults in a pass of the row of major faults.
const MAJOR: u64 = 32;
/// Pages that each of them reads, as both kernels do by default; the next touches the first page behind them.
const READ_AHEAD: usize = 32;
const STRIDE: u64 = READ_AHEAD as u64 * PAGE;

/// Bytes that the rows of swapped pages use beyond what is free.
const BEYOND: u64 = 32 << 20;

/// The counter `name` of `/proc/vmstat`.
fn counter(name: &str) -> sys::Result<u64> {
    procfs::vmstat().ok().and_then(|all| all.get(name).copied()).ok_or(Errno(libc::ENOENT))
}

/// Bytes of memory that can be had.
fn available() -> Result<u64, String> {
    kilobytes(&procfs::fields("/proc/meminfo")?, "MemAvailable")
}

/// Pages that move to node `to` and back, all of a region in one call, per page and move: written ones, the same while they may only be read, and
/// pages of a file that is mapped to be read.
fn moves(rows: &Rows<'_>, dir: &str, to: i32) -> Result<(), String> {
    let file = cached_file(dir, MOVED)?;
    let go = |pages: &[u64], node| {
        let nodes = vec![node; pages.len()];
        let mut status = vec![-1; pages.len()];
        let (cost, _) = time(|| numa::move_pages(pages, Some(&nodes), &mut status, numa::MOVE))?;
        if status == nodes { Ok(cost) } else { Err(Errno(libc::EBUSY)) }
    };
    let pass = |region: &Region, how| {
        touch(region, how);
        let pages = region.addresses();
        // Memory that was used before may be of any node.
        go(&pages, 0)?;
        let (there, back) = (go(&pages, to)?, go(&pages, 0)?);
        Ok([(there + back) as f64 / (2 * MOVED) as f64])
    };
    rows.row([MOVES[0]], "per_page", || pass(&Region::anonymous(MOVED * PAGE)?, Touch::Write))?;
    rows.row([MOVES[1]], "per_page", || {
        let region = Region::anonymous(MOVED * PAGE)?;
        touch(&region, Touch::Write);
        region.protect(0, MOVED * PAGE, READ)?;
        pass(&region, Touch::Read)
    })?;
    rows.row([MOVES[2]], "per_page", || {
        let fd = file.as_raw_fd();
        pass(&Region::map(MOVED * PAGE, READ, libc::MAP_SHARED, fd, 0)?, Touch::Read)
    })
}

/// A fault for whose page a disk is read, without the time that the disk takes. A figure has what the fault, the driver and the interrupt take, and what
/// [waits](beside) do.
fn major_faults(rows: &Rows<'_>, path: &str, beside: &Beside) -> Result<(), String> {
    const PASS: u64 = MAJOR * STRIDE;
    let open = || File::open(path).map_err(|error| format!("open {path}: {error}"));
    let size = rows.all_passes() * PASS;
    // The end of a disk is its size, too.
    let has = open()?.seek(SeekFrom::End(0)).map_err(|error| format!("{path}: {error}"))?;
    if has < size {
        return Err(format!("{path} has {has} bytes; the passes need {size}"));
    }
    let mut passes = (0..size).step_by(PASS as usize);
    let mut read = Vec::new();
    rows.row(["major_fault"], "per_fault", || {
        // A file for each pass: after 100 misses on one Linux reads single pages.
        let file = open().map_err(|_| Errno(libc::EIO))?;
        let at = passes.next().unwrap_or_default();
        let region = Region::map(PASS, READ, libc::MAP_PRIVATE, file.as_raw_fd(), at)?;
        let mut places = region.pages().step_by((STRIDE / PAGE) as usize);
        let (cost, ()) = beside.time(|| {
            for at in places.by_ref() {
                region.load(at);
            }
            Ok(())
        })?;
        read.push(region.in_core()?.into_iter().filter(|read| *read).count());
        Ok([cost / MAJOR as f64])
    })?;
    // Linux reads half of a window before the page: the second half of the last is in the next pass.
    let all = (PASS / PAGE) as usize;
    match read.iter().find(|read| !(all - READ_AHEAD / 2..=all).contains(*read)) {
        Some(read) => Err(format!("{MAJOR} faults read {read} pages and not {all}")),
        None => Ok(()),
    }
}

/// Clean pages of a file that are mapped, and are paged out all at once.
fn evictions(rows: &Rows<'_>, path: &str) -> Result<(), String> {
    const PAGES: u64 = MAJOR * READ_AHEAD as u64;
    rows.row(["evict_page"], "per_page", || {
        let file = File::open(path).map_err(|_| Errno(libc::EIO))?;
        let region = Region::map(PAGES * PAGE, READ, libc::MAP_PRIVATE, file.as_raw_fd(), 0)?;
        touch(&region, Touch::Read);
        let (cost, ()) = time(|| region.advise(0, PAGES * PAGE, libc::MADV_PAGEOUT))?;
        let all_gone = !region.in_core()?.contains(&true);
        if all_gone { Ok([cost as f64 / PAGES as f64]) } else { Err(Errno(libc::EBUSY)) }
    })
}

/// Makes the disk at `path` the swap area.
fn swap_on(path: &str) -> Result<(), String> {
    let explain = |error: &dyn std::fmt::Display| format!("{path}: {error}");
    let mut disk = File::options().read(true).write(true).open(path).map_err(|e| explain(&e))?;
    let bytes = disk.seek(SeekFrom::End(0)).map_err(|error| explain(&error))?;
    // As mkswap does: the first page says what the disk is, and which is its last page.
    let mut head = [0; PAGE as usize];
    head[1024..1028].copy_from_slice(&1_u32.to_le_bytes());
    head[1028..1032].copy_from_slice(&((bytes / PAGE - 1) as u32).to_le_bytes());
    head[PAGE as usize - 10..].copy_from_slice(b"SWAPSPACE2");
    disk.write_all_at(&head, 0).and_then(|()| disk.sync_all()).map_err(|error| explain(&error))?;
    let name = CString::new(path).map_err(|error| explain(&error))?;
    // SAFETY: the string lives as long as the call.
    let done = checked(unsafe { libc::swapon(name.as_ptr(), 0) });
    done.map(drop).map_err(|errno| explain(&format!("swapon: {errno}")))
}

/// Private pages that leave memory for the swap area as others are stored to, and come back as they are stored to again. A page that leaves is
/// counted without the fault of the page that takes its frame; one that comes back with its fault, and with what leaves for it.
fn swaps(rows: &Rows<'_>, beside: &Beside) -> Result<(), String> {
    let plain = {
        let small = Region::anonymous(BEYOND / 2).map_err(|errno| format!("mmap: {errno}"))?;
        let first = touch(&small, Touch::Write);
        (first - touch_again(&small, Touch::Write)) as f64 / (BEYOND / 2 / PAGE) as f64
    };
    let size = (available()? + BEYOND) & !(PAGE - 1);
    rows.row(["swap_out_page", "swap_in_page"], "per_page", || {
        let region = Region::anonymous(size)?;
        let pass = |name| {
            let before = counter(name)?;
            let (cost, _) = beside.time(|| Ok(touch(&region, Touch::Write)))?;
            Ok((cost, (counter(name)? - before) as f64))
        };
        let (first, out) = pass("pswpout")?;
        let (again, back) = pass("pswpin")?;
        if out * (PAGE as f64) < BEYOND as f64 / 2.0 || back * (PAGE as f64) < BEYOND as f64 / 2.0 {
            return Err(Errno(libc::ENODATA));
        }
        let faults = plain * (size / PAGE) as f64;
        Ok([(first - faults) / out, again / back])
    })
}

/// Pages that move so that free ones come together: a process has every fourth page of its memory left.
fn compactions(rows: &Rows<'_>) -> Result<(), String> {
    const SYSCTL: &str = "/proc/sys/vm/compact_memory";
    // Most of memory: else Linux finds all of it together at the upper end.
    let size = available()? / 4 * 3 / (4 * PAGE) * (4 * PAGE);
    rows.row(["compact_page"], "per_page", || {
        let region = Region::anonymous(size)?;
        touch(&region, Touch::Write);
        for at in region.pages().step_by(4) {
            region.advise(at + PAGE, 3 * PAGE, libc::MADV_DONTNEED)?;
        }
        let before = counter("pgmigrate_success")?;
        let (cost, ()) = time(|| fs::write(SYSCTL, "1").map_err(|_| Errno(libc::EIO)))?;
        let moved = counter("pgmigrate_success")? - before;
        if moved < size / PAGE / 16 {
            return Err(Errno(libc::ENODATA));
        }
        Ok([cost as f64 / moved as f64])
    })
}

fn measure(args: &Args) -> Result<(), String> {
    let rows = Rows::begin(args)?;
    if let Some(path) = args.text("disk") {
        if rows.wanted(&["major_fault"]) {
            beside(|beside| major_faults(&rows, path, beside))?;
        }
        evictions(&rows, path)?;
    }
    if let Some(area) = args.text("swap") {
        if area != "there" {
            swap_on(area)?;
        }
        beside(|beside| swaps(&rows, beside))?;
    }
    if let Some(to) = args.text("to") {
        let to = to.parse().unwrap_or_else(|_| args.refuse(&format!("to={to} is not a node")));
        moves(&rows, args.text("dir").unwrap_or("/tmp"), to)?;
    }
    if args.words().iter().any(|word| word == "compact") {
        compactions(&rows)?;
    }
    Ok(())
}

fn main() {
    let args = Args::read("reclaim", &["disk", "swap", "to", "dir", "row", "passes", "settle"]);
    let init = Init::begin(args.get("settle", 10));
    let outcome = init.as_ref().map_err(Clone::clone).and_then(|_| measure(&args));
    if let Err(why) = &outcome {
        eprintln!("reclaim: {why}");
    }
    drop(init);
    std::process::exit(i32::from(outcome.is_err()))
}
