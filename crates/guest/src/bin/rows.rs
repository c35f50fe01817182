//! `rows [dir=DIR] [row=NAME] [passes=N] [settle=SECONDS] [rest=MILLISECONDS] [facts]`: the
//! cost of faults and calls, in [ticks](faultless_guest::measure).
//!
//! A result is the median of several passes, after a warm-up pass, without the cost of the loop and
//! of reading the counter. A pass of a fault row is 32 MiB of 4 KiB pages; a pass of a call row is
//! 1,000 rounds. Files lie in DIR (`/tmp`), which should be a tmpfs. Other words are ignored: Linux
//! passes unknown words of its command line to the first process. `row=` may list rows, separated
//! by commas. Before each pass of the anonymous rows the machine may rest, and do its idle work.
//!
//! As the first process of a machine, the program sets up its own environment: it mounts file
//! systems, waits `settle` seconds for the kernel to become idle, and turns the machine off at the
//! end.
//!
//! With the word `facts`, the first process also prints the [`faultless_guest::facts`] of the
//! kernel after the rows.
//!
//! `mprotect_pair_roomy` is `mprotect_pair` with free slots in Linux's tree of VMAs; see `calls`.
//!
//! The program does not use the runtime of Rust's `main`, which maps an alternate signal stack.
//! With these two additional VMAs, Linux's tree of VMAs has one entry too many for one node. Every
//! `mmap` without a neighbour to join would split a node, and every `munmap` would join it again:
//! 11,000 instructions that depend on chance.

#![no_main]

use faultless_guest::args::Args;
use faultless_guest::facts;
use faultless_guest::init::Init;
use faultless_guest::measure::{
    Rows, Touch, cached_file, empty, must, rounds, time, touch, touch_again,
};
use faultless_guest::mem::{PAGE, READ, Region, WRITE};
use faultless_guest::sys::{self, raw};
use std::os::fd::AsRawFd;

const MIB: u64 = 1 << 20;
/// The size touched by a pass of a fault row.
const SIZE: u64 = 32 * MIB;
const PAGES: u64 = SIZE / PAGE;
/// Rounds in a pass of a call row.
const ROUNDS: u64 = 1000;
/// Rounds in a pass of the fork row.
const FORKS: u64 = 20;
/// The size touched by the parent of the fork row.
const PARENT: u64 = 16 * MIB;

/// A mapping of the whole file `fd`.
fn map_file(fd: i32, prot: i32, sharing: i32) -> sys::Result<Region> {
    Region::map(SIZE, prot, sharing, fd, 0)
}

fn per_page(ticks: u64, without: u64) -> f64 {
    ticks.saturating_sub(without) as f64 / PAGES as f64
}

fn anonymous(rows: &Rows) -> Result<(), String> {
    let names = ["anon_write_fault", "anon_munmap_page", "anon_mmap_touch_munmap_page"];
    rows.row(names, "per_page", || {
        rows.rest();
        let (map, region) = time(|| Region::anonymous(SIZE))?;
        let write = touch(&region, Touch::Write);
        let again = touch_again(&region, Touch::Write);
        let (unmap, ()) = time(|| region.end())?;
        let [write, map, unmap] = [(write, again), (map, empty()), (unmap, empty())]
            .map(|(with, own)| per_page(with, own));
        Ok([write, unmap, map + write + unmap])
    })?;
    rows.row(["anon_read_fault"], "per_page", || {
        rows.rest();
        let region = Region::anonymous(SIZE)?;
        let read = touch(&region, Touch::Read);
        Ok([per_page(read, touch_again(&region, Touch::Read))])
    })
}

fn files(rows: &Rows, dir: &str) -> Result<(), String> {
    let names = ["file_shared_write", "file_private_write", "file_shared_read_around", "text_read"];
    if !names.iter().any(|name| rows.wanted(&[name])) {
        return Ok(());
    }
    let file = cached_file(dir, PAGES)?;
    let fd = file.as_raw_fd();
    let row = |name, prot, sharing, how| {
        rows.row([name], "per_page", || {
            let region = map_file(fd, prot, sharing)?;
            let faults = touch(&region, how);
            Ok([per_page(faults, touch_again(&region, how))])
        })
    };
    row(names[0], WRITE, libc::MAP_SHARED, Touch::Write)?;
    row(names[1], WRITE, libc::MAP_PRIVATE, Touch::Write)?;
    row(names[2], READ, libc::MAP_SHARED, Touch::Read)?;
    // The warm-up pass turns the pages into huge pages, if the kernel supports huge pages for text.
    row(names[3], READ | libc::PROT_EXEC, libc::MAP_PRIVATE, Touch::Read)
}

/// Returns an unused VMA that cannot join a neighbour.
fn bystander() -> Option<Region> {
    let alone = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
    Region::map(PAGE, READ, alone, -1, 0).ok()
}

/// The calls. Linux's results depend on the number of entries in its tree of VMAs: with one
/// bystander, `mprotect` finds a full node, and splits and joins it in each pair; with three more
/// bystanders it does not.
fn calls(rows: &Rows) -> Result<(), String> {
    let _bystander = bystander();
    let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as u64;
    let map = [0, SIZE, WRITE as u64, flags, u64::MAX, 0];
    rows.row(["mmap_munmap_pair"], "per_pair", || {
        Ok([rounds(ROUNDS, || {
            // SAFETY: a new mapping is made and removed.
            unsafe {
                let start = raw(libc::SYS_mmap, map);
                must("munmap", raw(libc::SYS_munmap, [start as u64, SIZE, 0, 0, 0, 0]));
            }
        })])
    })?;
    rows.row(["mmap_touch_munmap"], "per_round", || {
        Ok([rounds(ROUNDS, || {
            // SAFETY: as above; the store is to the first page.
            unsafe {
                let start = raw(libc::SYS_mmap, map);
                must("mmap", start);
                faultless_guest::mem::store(start as u64, 1);
                must("munmap", raw(libc::SYS_munmap, [start as u64, SIZE, 0, 0, 0, 0]));
            }
        })])
    })?;
    // SAFETY: a query.
    let end = unsafe { raw(libc::SYS_brk, [0; 6]) } as u64;
    rows.row(["brk_pair"], "per_pair", || {
        Ok([rounds(ROUNDS, || {
            // SAFETY: the memory beyond the present break has no owner, and is freed again.
            unsafe {
                raw(libc::SYS_brk, [end + PAGE, 0, 0, 0, 0, 0]);
                raw(libc::SYS_brk, [end, 0, 0, 0, 0, 0]);
            }
        })])
    })?;
    let region = Region::anonymous(16 * PAGE).map_err(|errno| format!("mprotect_pair: {errno}"))?;
    region.fill(1);
    let page = region.start() + 8 * PAGE;
    let protect = |name| {
        rows.row([name], "per_pair", || {
            Ok([rounds(ROUNDS, || {
                // SAFETY: the page is the region's.
                unsafe {
                    must("mprotect", raw(libc::SYS_mprotect, [page, PAGE, READ as u64, 0, 0, 0]));
                    must("mprotect", raw(libc::SYS_mprotect, [page, PAGE, WRITE as u64, 0, 0, 0]));
                }
            })])
        })
    };
    protect("mprotect_pair")?;
    let _more = (bystander(), bystander(), bystander());
    protect("mprotect_pair_roomy")?;
    rows.row(["getppid"], "per_call", || {
        Ok([rounds(ROUNDS, || {
            // SAFETY: a query.
            let _ = unsafe { raw(libc::SYS_getppid, [0; 6]) };
        })])
    })
}

fn forks(rows: &Rows) -> Result<(), String> {
    if !rows.wanted(&["fork_exit_wait"]) {
        return Ok(());
    }
    let region = Region::anonymous(PARENT).map_err(|errno| format!("fork_exit_wait: {errno}"))?;
    region.fill(1);
    rows.row(["fork_exit_wait"], "per_round", || {
        Ok([rounds(FORKS, || {
            // SAFETY: the child only ends.
            unsafe {
                let child = libc::fork();
                if child == 0 {
                    libc::_exit(0);
                }
                must("wait4", raw(libc::SYS_wait4, [child as u64, 0, 0, 0, 0, 0]));
            }
        })])
    })
}

fn measure(args: &Args) -> Result<(), String> {
    let rows = Rows::begin(args)?;
    anonymous(&rows)?;
    files(&rows, args.text("dir").unwrap_or("/tmp"))?;
    calls(&rows)?;
    forks(&rows)
}

#[unsafe(no_mangle)]
extern "C" fn main() -> i32 {
    let args = Args::read("rows", &["dir", "row", "passes", "settle", "rest"]);
    let init = Init::begin(args.get("settle", 10));
    let outcome = init.as_ref().map_err(Clone::clone).and_then(|_| measure(&args));
    if matches!(init, Ok(Some(_))) && args.words().iter().any(|word| word == "facts") {
        facts::print();
    }
    if let Err(why) = &outcome {
        eprintln!("rows: {why}");
    }
    i32::from(outcome.is_err())
}
