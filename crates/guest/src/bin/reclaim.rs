//! `reclaim [disk=FILE] [swap=DISK] [to=NODE] [compact] [dir=DIR] [row=NAME] [passes=N] [settle=SECONDS]`:
//! the cost of reading pages from a disk, evicting and moving pages, in
//! [ticks](faultless_guest::measure), depending on the machine's equipment:
//!
//! - `disk=` names a file on a disk, or the disk itself, that has not been read before, with
//!   [`MAJOR`] 128 KiB for each pass. The row `major_fault` reads the file once; the row
//!   `evict_page` pages it out (`MADV_PAGEOUT`).
//! - `swap=` names a disk that becomes the swap area, or is `there` if the machine already has an
//!   area. Memory should be less than 256 MiB. The row `swap_out_page` stores to more pages than
//!   memory holds; `swap_in_page` stores to these pages again.
//! - `to=` names a second memory node, to which pages move and back in the rows `move_page`,
//!   `move_read_only_page` and `move_file_page`.
//! - `compact`: for the row `compact_page`, a process takes most of memory and frees three of four
//!   pages, and memory is compacted.
//!
//! A result is the median of several passes, after a warm-up pass. As the first process of a
//! machine, the program sets up its own environment, and turns the machine off at the end. Other
//! words are ignored: Linux passes unknown words of its command line to the first process.

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

/// The rows of moving pages, and the number of pages moved in a pass.
const MOVES: [&str; 3] = ["move_page", "move_read_only_page", "move_file_page"];
const MOVED: u64 = 512;

/// Faults in a pass of the row of major faults.
const MAJOR: u64 = 32;
/// The number of pages read by each major fault, by default in both kernels; the next fault touches
/// the first page after them.
const READ_AHEAD: usize = 32;
const STRIDE: u64 = READ_AHEAD as u64 * PAGE;

/// Bytes that the rows of swapped pages use beyond the free memory.
const BEYOND: u64 = 32 << 20;

/// The counter `name` of `/proc/vmstat`.
fn counter(name: &str) -> sys::Result<u64> {
    procfs::vmstat().ok().and_then(|all| all.get(name).copied()).ok_or(Errno(libc::ENOENT))
}

/// Returns the available memory in bytes.
fn available() -> Result<u64, String> {
    kilobytes(&procfs::fields("/proc/meminfo")?, "MemAvailable")
}

/// Pages that move to node `to` and back, all pages of a region in one call, with the cost per page
/// and move: written pages, read-only pages, and pages of a file that is mapped for reading.
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
        // Reused memory may be on any node.
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

/// Faults whose page is read from a disk, without the disk's time. A result contains the time of
/// the fault, the driver and the interrupt, and the cost of the [waits](beside).
fn major_faults(rows: &Rows<'_>, path: &str, beside: &Beside) -> Result<(), String> {
    const PASS: u64 = MAJOR * STRIDE;
    let open = || File::open(path).map_err(|error| format!("open {path}: {error}"));
    let size = rows.all_passes() * PASS;
    // The end of a disk is also its size.
    let has = open()?.seek(SeekFrom::End(0)).map_err(|error| format!("{path}: {error}"))?;
    if has < size {
        return Err(format!("{path} has {has} bytes; the passes need {size}"));
    }
    let mut passes = (0..size).step_by(PASS as usize);
    let mut read = Vec::new();
    rows.row(["major_fault"], "per_fault", || {
        // A separate file for each pass: after 100 misses on one file Linux reads single pages.
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
    // Linux reads half of a window before the page: the second half of the last window is in the
    // next pass.
    let all = (PASS / PAGE) as usize;
    match read.iter().find(|read| !(all - READ_AHEAD / 2..=all).contains(*read)) {
        Some(read) => Err(format!("{MAJOR} faults read {read} pages and not {all}")),
        None => Ok(()),
    }
}

/// Clean mapped pages of a file, paged out in one call.
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
    // Like mkswap: the first page describes the disk and contains the number of the last page.
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

/// Private pages that move to the swap area while other pages are stored to, and that are read back
/// by later stores. A page swapped out is counted without the fault of the page that takes its
/// frame. A page swapped in is counted with its fault, and with the eviction for its frame.
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

/// Pages that move to make free pages contiguous: a process has every fourth page of its memory
/// left.
fn compactions(rows: &Rows<'_>) -> Result<(), String> {
    const SYSCTL: &str = "/proc/sys/vm/compact_memory";
    // Most of memory: otherwise Linux finds contiguous memory at the upper end.
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
