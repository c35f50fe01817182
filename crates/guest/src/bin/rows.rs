//! `rows [dir=DIR] [row=NAME] [passes=N] [settle=SECONDS] [rest=MILLISECONDS] [disk=FILE] [to=NODE]`: what faults and calls cost, in ticks of the
//! time stamp counter. Where an emulator counts instructions (`-icount shift=0`) those are instructions,
//! and every figure repeats to the last digit; elsewhere they are only ticks.
//!
//! A figure is the median of some passes, after one that warms up, without the cost of the loop and of
//! reading the counter. A pass of a fault row is 32 MiB of 4 KiB pages; of a call row, 1,000 rounds. Files
//! lie in DIR (`/tmp`), which should be a tmpfs. Words are not looked at: Linux gives its first process
//! those of its command line that it does not know. `row=` may name rows, with commas between. Before each pass of the anonymous
//! rows the machine may rest, and do what it does when it is idle.
//!
//! `disk=` names a file on a disk, or the disk itself, that nobody has read, of [`MAJOR`] 128 KiB for each pass; the row `major_fault` reads it
//! once, and the row `evict_page` pages them out (`MADV_PAGEOUT`).
//!
//! `to=` names a second memory node, to which pages move and back in the rows `move_page`, `move_read_only_page` and `move_file_page`.
//!
//! As the first process of a machine it makes its own surroundings: it mounts what it needs, lets the
//! kernel come to rest for `settle` seconds, and turns the machine off when it is done.
//!
//! `mprotect_pair_roomy` is `mprotect_pair` where Linux's tree of VMAs has room; see `calls`.
//!
//! It does without the runtime of Rust's `main`, which maps an alternate signal stack. With those two
//! VMAs more, Linux's tree of VMAs is one slot too full for one node, and every `mmap` that finds no
//! neighbour to join splits a node and every `munmap` joins it again: 11,000 instructions of chance.

#![no_main]

use faultless_guest::args::Args;
use faultless_guest::clock::{self, ticks};
use faultless_guest::init::Init;
use faultless_guest::mem::{PAGE, READ, Region, WRITE};
use faultless_guest::numa;
use faultless_guest::proc;
use faultless_guest::sys::{self, Errno, raw};
use std::arch::asm;
use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::mpsc;
use std::thread;

const MIB: u64 = 1 << 20;
/// What a pass of a fault row touches.
const SIZE: u64 = 32 * MIB;
const PAGES: u64 = SIZE / PAGE;
/// Rounds in a pass of a call row.
const ROUNDS: u64 = 1000;
/// Rounds in a pass of the fork row.
const FORKS: u64 = 20;
/// What the parent of the fork row has touched.
const PARENT: u64 = 16 * MIB;

/// The rows of pages that move, and how many do in a pass.
const MOVES: [&str; 3] = ["move_page", "move_read_only_page", "move_file_page"];
const MOVED: u64 = 512;

/// Faults in a pass of the row of major faults.
const MAJOR: u64 = 32;
/// Pages that each of them reads, as both kernels do by default; the next touches the first page behind them.
const READ_AHEAD: usize = 32;
const STRIDE: u64 = READ_AHEAD as u64 * PAGE;

/// How pages are touched.
#[derive(Clone, Copy)]
enum Touch {
    Read,
    Write,
}

/// Touches every page of `region` and returns the ticks it took.
fn touch(region: &Region, how: Touch) -> u64 {
    let (start, end) = (region.start(), region.start() + region.len());
    let begin = ticks();
    // One instruction that touches and three that loop, whatever the compiler thinks.
    // SAFETY: the addresses are the region's, which has nothing of Rust's in it.
    unsafe {
        match how {
            Touch::Read => asm!(
                "2: mov {scratch:r}, [{at}]", "add {at}, 4096", "cmp {at}, {end}", "jne 2b",
                at = inout(reg) start => _, end = in(reg) end, scratch = out(reg) _,
            ),
            Touch::Write => asm!(
                "2: mov [{at}], {at}", "add {at}, 4096", "cmp {at}, {end}", "jne 2b",
                at = inout(reg) start => _, end = in(reg) end,
            ),
        }
    }
    ticks() - begin
}

/// What touching pages costs that are there: the least of a few times, for another program's turn in
/// between would count against the figure.
fn touch_again(region: &Region, how: Touch) -> u64 {
    (0..4).map(|_| touch(region, how)).min().unwrap_or(0)
}

/// The ticks that `body` takes.
fn time<T>(body: impl FnOnce() -> sys::Result<T>) -> sys::Result<(u64, T)> {
    let begin = ticks();
    let value = body()?;
    Ok((ticks() - begin, value))
}

/// Ticks between two readings of the counter with nothing between them.
fn empty() -> u64 {
    let begin = ticks();
    ticks() - begin
}

/// The ticks of `rounds` rounds of `body`, without those of the loop.
fn rounds(rounds: u64, mut body: impl FnMut()) -> f64 {
    let around = |body: &mut dyn FnMut()| {
        let begin = ticks();
        for _ in 0..rounds {
            body();
        }
        ticks() - begin
    };
    let with = around(&mut body);
    let without = (0..3).map(|_| around(&mut || ())).min().unwrap_or(0);
    with.saturating_sub(without) as f64 / rounds as f64
}

/// A call whose failure would make the figure worthless.
fn must(call: &str, result: i64) {
    if let Err(errno) = sys::result(result) {
        eprintln!("rows: {call}: {errno}");
        std::process::exit(1);
    }
}

/// A mapping of the whole file `fd`.
fn map_file(fd: i32, prot: i32, sharing: i32) -> sys::Result<Region> {
    Region::map(SIZE, prot, sharing, fd, 0)
}

/// One measurement: `what` is asked of all that a pass can tell.
struct Rows<'a> {
    only: Option<&'a str>,
    passes: usize,
    /// Milliseconds before a pass of the anonymous rows.
    rest: u64,
}

impl Rows<'_> {
    /// Lets the machine be idle.
    fn rest(&self) {
        if self.rest > 0 {
            clock::sleep_ms(self.rest);
        }
    }

    fn wanted(&self, names: &[&str]) -> bool {
        self.only.is_none_or(|only| only.split(',').any(|only| names.contains(&only)))
    }

    /// Runs passes, each of which gives a figure for each of `names`, and prints their medians.
    fn row<const N: usize>(
        &self,
        names: [&str; N],
        unit: &str,
        mut pass: impl FnMut() -> sys::Result<[f64; N]>,
    ) -> Result<(), String> {
        if !self.wanted(&names) {
            return Ok(());
        }
        let mut figures = Vec::new();
        for pass_number in 0..=self.passes {
            let figure = pass().map_err(|errno| format!("{}: {errno}", names.join(", ")))?;
            if pass_number > 0 {
                figures.push(figure);
            }
        }
        for (at, name) in names.iter().enumerate() {
            let mut column: Vec<f64> = figures.iter().map(|figure| figure[at]).collect();
            column.sort_by(f64::total_cmp);
            println!("row {name} {:.1} {unit}", column[column.len() / 2]);
        }
        Ok(())
    }
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

/// A file of so many pages, all of which are cached.
fn cached_file(dir: &str, pages: u64) -> Result<File, String> {
    let path = format!("{dir}/rows.data");
    let explain = |what: &str, error: &dyn std::fmt::Display| format!("{what} {path}: {error}");
    let mut file = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(&path)
        .map_err(|error| explain("create", &error))?;
    // Whatever happens, nobody needs it by name.
    std::fs::remove_file(&path).map_err(|error| explain("remove", &error))?;
    for _ in 0..pages {
        file.write_all(&[1; PAGE as usize]).map_err(|error| explain("write", &error))?;
    }
    Ok(file)
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
    // The pass that warms up makes it huge pages, where the kernel has them for text.
    row(names[3], READ | libc::PROT_EXEC, libc::MAP_PRIVATE, Touch::Read)
}

/// A VMA that nothing is done with and no neighbour can join.
fn bystander() -> Option<Region> {
    let alone = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
    Region::map(PAGE, READ, alone, -1, 0).ok()
}

/// The calls. Linux's figures depend on how full its tree of VMAs is: with the one bystander `mprotect`
/// finds its node full, and splits and joins it in each pair; among three more it does not.
fn calls(rows: &Rows) -> Result<(), String> {
    let _bystander = bystander();
    let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as u64;
    let map = [0, SIZE, WRITE as u64, flags, u64::MAX, 0];
    rows.row(["mmap_munmap_pair"], "per_pair", || {
        Ok([rounds(ROUNDS, || {
            // SAFETY: a new mapping comes and goes.
            unsafe {
                let start = raw(libc::SYS_mmap, map);
                must("munmap", raw(libc::SYS_munmap, [start as u64, SIZE, 0, 0, 0, 0]));
            }
        })])
    })?;
    rows.row(["mmap_touch_munmap"], "per_round", || {
        Ok([rounds(ROUNDS, || {
            // SAFETY: as above; the store is to its first page.
            unsafe {
                let start = raw(libc::SYS_mmap, map);
                must("mmap", start);
                faultless_guest::mem::store(start as u64, 1);
                must("munmap", raw(libc::SYS_munmap, [start as u64, SIZE, 0, 0, 0, 0]));
            }
        })])
    })?;
    // SAFETY: asks only.
    let end = unsafe { raw(libc::SYS_brk, [0; 6]) } as u64;
    rows.row(["brk_pair"], "per_pair", || {
        Ok([rounds(ROUNDS, || {
            // SAFETY: what lies beyond the present break is nobody's, and is given back.
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
            // SAFETY: asks only.
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
            // SAFETY: the child does nothing but end.
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

/// Pages that move to node `to` and back, all of a region in one call, per page and move: written ones, the same while they may only be read, and
/// pages of a file that is mapped to be read.
fn moves(rows: &Rows, dir: &str, to: i32) -> Result<(), String> {
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

/// A fault for whose page a disk is read, without the time that the disk takes. Meanwhile another thread gives the CPU away again and again, so
/// that the CPU never rests; what its rounds take when it is alone is taken off. So a figure has what the fault, the driver and the interrupt
/// take, the two switches of threads, the part of a round that each switch cuts off, and of timer interrupts those that fall into a wait.
fn major_faults(rows: &Rows, path: &str) -> Result<(), String> {
    static ROUNDS_DONE: AtomicU64 = AtomicU64::new(0);
    static END: AtomicBool = AtomicBool::new(false);
    const PASS: u64 = MAJOR * STRIDE;
    let open = || File::open(path).map_err(|error| format!("open {path}: {error}"));
    let size = (rows.passes as u64 + 1) * PASS;
    // The end of a disk is its size, too.
    let has = open()?.seek(SeekFrom::End(0)).map_err(|error| format!("{path}: {error}"))?;
    if has < size {
        return Err(format!(
            "major_fault: {path} has {has} bytes; {} passes need {size}",
            rows.passes
        ));
    }
    let give_way = || {
        proc::yield_now();
        ROUNDS_DONE.fetch_add(1, Relaxed);
    };
    let (ready, begin) = mpsc::channel();
    let other = thread::spawn(move || {
        // The main thread waits: this one is alone.
        let alone = (0..8).map(|_| rounds(ROUNDS, give_way)).fold(f64::MAX, f64::min);
        let _ = ready.send(alone);
        while !END.load(Relaxed) {
            give_way();
        }
    });
    let alone = begin.recv().map_err(|error| format!("major_fault: {error}"))?;
    let mut passes = (0..size).step_by(PASS as usize);
    let mut read = Vec::new();
    let outcome = rows.row(["major_fault"], "per_fault", || {
        // A file for each pass: after 100 misses on one Linux reads single pages.
        let file = open().map_err(|_| Errno(libc::EIO))?;
        let at = passes.next().unwrap_or_default();
        let region = Region::map(PASS, READ, libc::MAP_PRIVATE, file.as_raw_fd(), at)?;
        let (mut cost, before) = (0, ROUNDS_DONE.load(Relaxed));
        for at in region.pages().step_by((STRIDE / PAGE) as usize) {
            let begin = ticks();
            region.load(at);
            cost += ticks() - begin - empty();
        }
        let others = (ROUNDS_DONE.load(Relaxed) - before) as f64 * alone;
        read.push(region.in_core()?.into_iter().filter(|read| *read).count());
        Ok([(cost as f64 - others) / MAJOR as f64])
    });
    END.store(true, Relaxed);
    let _ = other.join();
    // Linux reads half of a window before the page: the second half of the last is in the next pass.
    let all = (PASS / PAGE) as usize;
    let odd = read.iter().find(|read| !(all - READ_AHEAD / 2..=all).contains(*read));
    outcome.and_then(|()| match odd {
        Some(read) => Err(format!("major_fault: {MAJOR} faults read {read} pages and not {all}")),
        None => Ok(()),
    })
}

/// Clean pages of a file that are mapped, and are paged out all at once.
fn evictions(rows: &Rows, path: &str) -> Result<(), String> {
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

fn measure(args: &Args) -> Result<(), String> {
    let dir = args.text("dir").unwrap_or("/tmp");
    proc::pin(0).map_err(|errno| format!("sched_setaffinity: {errno}"))?;
    proc::no_huge_pages();
    let rows =
        Rows { only: args.text("row"), passes: args.get("passes", 5), rest: args.get("rest", 0) };
    if rows.passes == 0 {
        args.refuse("passes=0 would measure nothing");
    }
    if let Some(to) = args.text("to") {
        let to = to.parse().unwrap_or_else(|_| args.refuse(&format!("to={to} is not a node")));
        return moves(&rows, dir, to);
    }
    anonymous(&rows)?;
    files(&rows, dir)?;
    calls(&rows)?;
    forks(&rows)?;
    match args.text("disk") {
        Some(path) => {
            if rows.wanted(&["major_fault"]) {
                major_faults(&rows, path)?;
            }
            evictions(&rows, path)
        }
        None => Ok(()),
    }
}

#[unsafe(no_mangle)]
extern "C" fn main() -> i32 {
    let args = Args::read("rows", &["dir", "row", "passes", "settle", "rest", "disk", "to"]);
    let init = Init::begin(args.get("settle", 10));
    let outcome = init.as_ref().map_err(Clone::clone).and_then(|_| measure(&args));
    if let Err(why) = &outcome {
        eprintln!("rows: {why}");
    }
    i32::from(outcome.is_err())
}
