//! Common code of the measuring programs: time in ticks of the time stamp counter, and the median
//! of several passes.
//!
//! Under an emulator that counts instructions (`-icount shift=0`), ticks are instructions, and
//! every result repeats to the last digit; elsewhere ticks are only time.

use crate::args::Args;
use crate::clock::{self, ticks};
use crate::mem::{PAGE, Region};
use crate::sys;
use crate::{proc, procfs};

use std::arch::asm;
use std::fs::File;
use std::io::Write;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::mpsc;
use std::thread;
use std::time::Instant;

/// How pages are touched.
#[derive(Clone, Copy, Debug)]
pub enum Touch {
    /// Read.
    Read,
    /// Stored to.
    Write,
}

/// Touches every page of `region` and returns the ticks used.
pub fn touch(region: &Region, how: Touch) -> u64 {
    let (start, end) = (region.start(), region.start() + region.len());
    let begin = ticks();
    // One instruction that touches and three that loop, independent of the compiler. SAFETY: the
    // addresses belong to the region, which contains no Rust objects.
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

/// Returns the cost of touching present pages: the minimum of several runs, because another
/// program's turn would be counted.
pub fn touch_again(region: &Region, how: Touch) -> u64 {
    (0..4).map(|_| touch(region, how)).min().unwrap_or(0)
}

/// Returns the ticks used by `body`.
///
/// # Errors
/// The errors of `body`.
pub fn time<T>(body: impl FnOnce() -> sys::Result<T>) -> sys::Result<(u64, T)> {
    let begin = ticks();
    let value = body()?;
    Ok((ticks() - begin, value))
}

/// Returns the ticks between two consecutive readings of the counter.
pub fn empty() -> u64 {
    let begin = ticks();
    ticks() - begin
}

/// Returns the ticks of `rounds` rounds of `body`, without the ticks of the loop.
pub fn rounds(rounds: u64, mut body: impl FnMut()) -> f64 {
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

/// Ends the process after a failed call, which would make the result invalid.
pub fn must(call: &str, result: i64) {
    if let Err(errno) = sys::result(result) {
        eprintln!("{call}: {errno}");
        std::process::exit(1);
    }
}

/// The rows of a program: `row=` selects rows, and `passes=` sets the number of passes for the
/// median.
#[derive(Debug)]
pub struct Rows<'a> {
    only: Option<&'a str>,
    passes: usize,
    /// Milliseconds before a pass of the anonymous rows.
    rest: u64,
}

impl<'a> Rows<'a> {
    /// Reads the program's arguments, and sets up one CPU and no huge pages for the program's own
    /// memory.
    ///
    /// # Errors
    /// The process cannot be pinned to one CPU.
    pub fn begin(args: &'a Args) -> Result<Self, String> {
        proc::pin(0).map_err(|errno| format!("sched_setaffinity: {errno}"))?;
        proc::no_huge_pages();
        let (passes, rest) = (args.get("passes", 5), args.get("rest", 0));
        if passes == 0 {
            args.refuse("passes=0 has no measurement");
        }
        Ok(Self { only: args.text("row"), passes, rest })
    }

    /// Returns the number of passes, including the warm-up pass.
    pub fn all_passes(&self) -> u64 {
        self.passes as u64 + 1
    }

    /// Lets the machine be idle.
    pub fn rest(&self) {
        if self.rest > 0 {
            clock::sleep_ms(self.rest);
        }
    }

    /// Returns whether one of `names` is selected.
    pub fn wanted(&self, names: &[&str]) -> bool {
        self.only.is_none_or(|only| only.split(',').any(|only| names.contains(&only)))
    }

    /// Runs passes, each with a result for each of `names`, and prints the medians.
    ///
    /// # Errors
    /// The error of a pass, with the names.
    pub fn row<const N: usize>(
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

/// Makes a file of `pages` pages, all of them cached; the file has no name.
///
/// # Errors
/// A failure to make or write the file.
pub fn cached_file(dir: &str, pages: u64) -> Result<File, String> {
    let path = format!("{dir}/rows.data");
    let explain = |what: &str, error: &dyn std::fmt::Display| format!("{what} {path}: {error}");
    let mut file = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(&path)
        .map_err(|error| explain("create", &error))?;
    // The name is not needed.
    std::fs::remove_file(&path).map_err(|error| explain("remove", &error))?;
    for _ in 0..pages {
        file.write_all(&[1; PAGE as usize]).map_err(|error| explain("write", &error))?;
    }
    Ok(file)
}

/// The turns of the thread [beside](beside), and the flag to end it.
static TURNS: AtomicU64 = AtomicU64::new(0);
static END: AtomicBool = AtomicBool::new(false);

/// Measurements beside a thread that yields its CPU repeatedly.
#[derive(Debug)]
pub struct Beside {
    /// Ticks of a turn when this thread runs alone.
    alone: f64,
}

impl Beside {
    /// Returns the ticks used by `body`, without the ticks of the other thread, and without the
    /// time for which the CPU itself waited for a disk, if the kernel reports this time
    /// (`disk_wait_ns` of `/proc/vmstat`).
    ///
    /// # Errors
    /// The errors of `body`.
    pub fn time<T>(&self, body: impl FnOnce() -> sys::Result<T>) -> sys::Result<(f64, T)> {
        let waited = || procfs::vmstat().ok().and_then(|all| all.get("disk_wait_ns").copied());
        let (turns, wait, start) = (TURNS.load(Relaxed), waited(), Instant::now());
        let (cost, value) = time(body)?;
        let elapsed = start.elapsed().as_nanos().max(1) as f64;
        let wait = waited().zip(wait).map_or(0, |(now, before)| now - before) as f64;
        let others = (TURNS.load(Relaxed) - turns) as f64 * self.alone;
        let waits = wait * cost as f64 / elapsed;
        Ok((cost as f64 - others - waits, value))
    }
}

/// Runs `body` beside a thread that yields its CPU repeatedly, so that the CPU never idles during a
/// wait for a disk. So the time of `body` does not contain the disk's time. It does contain the
/// cost of its waits: thread switches, the part of a turn cut off by each switch, and timer
/// interrupts.
///
/// # Errors
/// The errors of `body`.
///
/// # Panics
/// If no thread can be made.
pub fn beside(body: impl FnOnce(&Beside) -> Result<(), String>) -> Result<(), String> {
    const ROUNDS: u64 = 1000;
    let give_way = || {
        proc::yield_now();
        TURNS.fetch_add(1, Relaxed);
    };
    let (ready, begin) = mpsc::channel();
    END.store(false, Relaxed);
    let other = thread::spawn(move || {
        // The main thread waits, so this thread runs alone.
        let alone = (0..8).map(|_| rounds(ROUNDS, give_way)).fold(f64::MAX, f64::min);
        let _ = ready.send(alone);
        while !END.load(Relaxed) {
            give_way();
        }
    });
    let alone = begin.recv().map_err(|error| format!("the second thread: {error}"))?;
    let outcome = body(&Beside { alone });
    END.store(true, Relaxed);
    let _ = other.join();
    outcome
}
