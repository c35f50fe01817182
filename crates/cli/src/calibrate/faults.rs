//! What page faults cost under the host's own kernel, measured by one thread.
//!
//! [`host_faults`] measures the parts of a fault, in sequence and in the quietest of several rounds. [`life`] measures what a page
//! costs a program that does something else between two faults: its caches are cold for the kernel then, and those that the kernel
//! used are cold for the program. That is two to three times as much as the fault alone takes, and varies with other load of the host;
//! so it is a thread's processor time, and to be measured when it is needed.

use super::hardware::{Effort, nanoseconds};
use crate::error::CliError;
use faultless::PAGE_SIZE;
use memmap2::{Advice, MmapMut, MmapOptions};
use nix::sys::resource::{UsageWho, getrusage};
use nix::time::{ClockId, clock_gettime};
use nix::unistd::getppid;
use std::fs::File;
use std::hint::black_box;
use std::io;
use std::os::fd::FromRawFd;
use std::time::{Duration, Instant};

/// Bytes of a page, as a length.
const PAGE: usize = PAGE_SIZE as usize;
/// Pages of the host whose first touch is measured.
const TOUCHED: usize = 4096;
/// Pages whose life is measured: 32 MiB.
const LIVED: usize = 8192;
/// Bytes that the program uses beside them, and how many places of it between two pages.
const BESIDE: usize = 4 << 20;
const USED: usize = 600;
/// Bytes whose first touch is measured in huge folios, with memory that the kernel had not in use: more than is free at random.
const FRESH: usize = 256 << 20;
/// Pages of the largest folio, 2 MiB, and bytes.
const HUGE: usize = 512;
const HUGE_BYTES: usize = HUGE * PAGE;

/// What the host's own kernel takes, in nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    /// For the first touch of a page.
    pub touch: f64,
    /// For a page that is populated with others in one call.
    pub populate: f64,
    /// For a system call in which nothing is done.
    pub call: f64,
}

impl Faults {
    /// An exception: what a page takes more by itself than among others in one call.
    pub fn exception(&self) -> f64 {
        (self.touch - self.populate).max(0.0)
    }

    /// All figures in nanoseconds, by the names that results have for them.
    pub fn figures(&self) -> [(&'static str, f64); 4] {
        [
            ("host.first_touch_ns", self.touch),
            ("host.populate_ns", self.populate),
            ("host.exception_ns", self.exception()),
            ("host.call_ns", self.call),
        ]
    }
}

/// Measures page faults of the host, in memory without huge pages.
///
/// # Errors
/// The host gives no memory.
pub fn host_faults(effort: Effort) -> Result<Faults, CliError> {
    let round = |populate: bool| -> io::Result<f64> {
        let mut memory = MmapMut::map_anon(TOUCHED * PAGE)?;
        // A kernel without huge pages refuses the advice, and needs none.
        let _ = memory.advise(Advice::NoHugePage);
        let begin = Instant::now();
        if populate {
            memory.advise(Advice::PopulateWrite)?;
        } else {
            memory.iter_mut().step_by(PAGE).for_each(|byte| *byte = 1);
        }
        Ok(nanoseconds(begin) / TOUCHED as f64)
    };
    // In turns, so that both meet the same load: an exception is their difference.
    let (mut touch, mut populate) = (f64::INFINITY, f64::INFINITY);
    for _ in 0..effort.rounds {
        touch = touch.min(round(false).map_err(failed)?);
        populate = populate.min(round(true).map_err(failed)?);
    }
    let call = effort.each(20_000, || _ = black_box(getppid()));
    Ok(Faults { touch, populate, call })
}

fn failed(error: io::Error) -> CliError {
    CliError::failed("memory of the host", error)
}

/// How pages come to a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// One by one, each by a fault.
    Single,
    /// All by one call, `MADV_POPULATE_WRITE`.
    Populated,
    /// One by one, all of them before the program uses the first.
    Pretouched,
    /// By a fault for each folio of this order, 1 to 9. `MADV_HUGEPAGE` asks for it, which has an effect where the setting of its size is
    /// `madvise` or `always`.
    Folios(u8),
    /// One by one, in shared memory.
    Shared,
    /// In shared memory, by a fault for each 2 MiB. `MADV_HUGEPAGE` asks for it.
    SharedHuge,
}

/// Memory whose pages are measured.
struct Measured {
    memory: MmapMut,
    /// Bytes before the first boundary of a huge page.
    skip: usize,
    /// The file of shared memory: its pages are freed with the file.
    file: Option<File>,
}

impl Measured {
    const BYTES: usize = LIVED * PAGE + HUGE_BYTES;

    fn private() -> io::Result<Self> {
        let memory = MmapMut::map_anon(Self::BYTES)?;
        let skip = memory.as_ptr().align_offset(HUGE_BYTES);
        Ok(Self { memory, skip, file: None })
    }

    /// Returns `None` if addresses and offsets in the file have different places in a huge page.
    fn shared() -> io::Result<Option<Self>> {
        // SAFETY: the name is a valid string.
        let fd = unsafe { libc::memfd_create(c"faultless".as_ptr(), libc::MFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was opened just now, and belongs to nothing else.
        let file = unsafe { File::from_raw_fd(fd) };
        file.set_len((Self::BYTES + HUGE_BYTES) as u64)?;
        let map = |offset: usize| {
            let mut options = MmapOptions::new();
            // SAFETY: no other process or thread has the file, which keeps its length.
            unsafe { options.offset(offset as u64).len(Self::BYTES).map_mut(&file) }
        };
        let place = |memory: &MmapMut| memory.as_ptr().addr() % HUGE_BYTES;
        let first = map(0)?;
        let offset = place(&first);
        drop(first);
        // The kernel mostly gives the same addresses again.
        let memory = map(offset)?;
        let alike = place(&memory) == offset;
        let skip = memory.as_ptr().align_offset(HUGE_BYTES);
        Ok(alike.then_some(Self { memory, skip, file: Some(file) }))
    }
}

/// Nanoseconds of processor time that a page costs a program from its mapping to its unmapping, beyond the program's own use of it.
/// One round; `None` where the kernel did not map pages this way.
///
/// # Errors
/// The host gives no memory.
pub fn life(way: Way) -> Result<Option<f64>, CliError> {
    let mut beside = MmapMut::map_anon(BESIDE).map_err(failed)?;
    let _ = beside.advise(Advice::NoHugePage);
    beside.fill(1);
    let measured = match way {
        Way::Shared | Way::SharedHuge => Measured::shared().map_err(failed)?,
        _ => Some(Measured::private().map_err(failed)?),
    };
    let Some(Measured { mut memory, skip, file }) = measured else { return Ok(None) };
    // The rest of a mapping that is larger than the folios would be of a larger size; so the last folio of each 2 MiB is left out by an
    // advice of its own, which parts the mapping.
    let order = match way {
        Way::Folios(order) => order,
        Way::SharedHuge => HUGE.ilog2() as u8,
        Way::Single | Way::Populated | Way::Pretouched | Way::Shared => 0,
    };
    let pages: Vec<usize> = match way {
        Way::Folios(order) if usize::from(order) < HUGE.ilog2() as usize => {
            (0..LIVED).filter(|page| page % HUGE < HUGE - (1 << order)).collect()
        }
        _ => (0..LIVED).collect(),
    };
    let _ = memory.advise(Advice::NoHugePage);
    if order > 0 {
        for part in pages.chunk_by(|page, next| page + 1 == *next) {
            let (first, len) = (skip + part[0] * PAGE, part.len() * PAGE);
            if memory.advise_range(Advice::HugePage, first, len).is_err() {
                return Ok(None);
            }
        }
    }
    let begin = thread_time();
    match way {
        Way::Populated => {
            memory.advise_range(Advice::PopulateWrite, skip, LIVED * PAGE).map_err(failed)?;
        }
        Way::Pretouched => {
            memory[skip..skip + LIVED * PAGE].iter_mut().step_by(PAGE).for_each(|byte| *byte = 1);
        }
        Way::Single | Way::Folios(_) | Way::Shared | Way::SharedHuge => {}
    }
    let populated = thread_time();
    let faults = thread_faults();
    let mut random = 12_345u32;
    let mut pass = |value: u8| {
        for page in &pages {
            let at = skip + page * PAGE;
            black_box(&mut memory[at..at + PAGE]).fill(value);
            for _ in 0..USED {
                random = random.wrapping_mul(1_103_515_245).wrapping_add(12_345);
                beside[(random >> 4) as usize % BESIDE] += 1;
            }
        }
        thread_time()
    };
    let first = pass(1);
    let faults = thread_faults() - faults;
    let second = pass(2);
    drop(memory);
    drop(file);
    let end = thread_time();
    // What the pages took beyond a second use of them.
    let took = (populated - begin) + (first - populated) + (end - second);
    let beyond = took.as_secs_f64() - (second - first).as_secs_f64();
    let expected = match way {
        Way::Single | Way::Shared => pages.len(),
        Way::Populated | Way::Pretouched => 0,
        Way::Folios(_) | Way::SharedHuge => pages.len() >> order,
    };
    let as_expected = faults.abs_diff(expected as u64) <= expected as u64 / 20 + 16;
    Ok(as_expected.then_some(beyond * 1e9 / pages.len() as f64))
}

/// Nanoseconds of processor time of a page in folios of 2 MiB, each of which is touched for the first time; many of them, so that they come
/// from memory that was not in use lately. `None` where the kernel has no such folios.
///
/// # Errors
/// The host gives no memory.
pub fn fresh_huge() -> Result<Option<f64>, CliError> {
    let mut memory = MmapMut::map_anon(FRESH + HUGE_BYTES).map_err(failed)?;
    let skip = memory.as_ptr().align_offset(HUGE_BYTES);
    if memory.advise_range(Advice::HugePage, skip, FRESH).is_err() {
        return Ok(None);
    }
    let (begin, faults) = (thread_time(), thread_faults());
    memory[skip..skip + FRESH].iter_mut().step_by(HUGE_BYTES).for_each(|byte| *byte = 1);
    let folios = (FRESH / HUGE_BYTES) as u64;
    let as_expected = thread_faults() - faults <= folios + folios / 20 + 16;
    drop(memory);
    let took = (thread_time() - begin).as_secs_f64();
    Ok(as_expected.then_some(took * 1e9 / (FRESH / PAGE) as f64))
}

/// Uses `bytes` in folios of 2 MiB, where the kernel has them, and frees them.
///
/// # Errors
/// The host gives no memory.
pub fn use_huge(bytes: usize) -> Result<(), CliError> {
    let mut memory = MmapMut::map_anon(bytes.saturating_add(HUGE_BYTES)).map_err(failed)?;
    let _ = memory.advise(Advice::HugePage);
    memory.iter_mut().step_by(PAGE).for_each(|byte| *byte = 1);
    Ok(())
}

/// Processor time of this thread.
fn thread_time() -> Duration {
    // The clock is there on every Linux.
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from)
}

/// Faults of this thread that needed no disk.
fn thread_faults() -> u64 {
    getrusage(UsageWho::RUSAGE_THREAD).map_or(0, |usage| usage.minor_page_faults() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUICK: Effort = Effort { rounds: 2 };

    /// Bounds that any machine of today keeps, also a busy one.
    #[test]
    fn figures_are_of_the_right_order() {
        let between = |low: f64, value: f64, high: f64| {
            assert!((low..high).contains(&value), "{value} is not between {low} and {high}");
        };
        let faults = host_faults(QUICK).expect("memory");
        between(50.0, faults.touch, 1e6);
        between(20.0, faults.call, 1e6);
        assert!(faults.exception() <= faults.touch);
        let single = life(Way::Single).expect("memory").expect("each page faults");
        let populated = life(Way::Populated).expect("memory").expect("no page faults");
        between(50.0, single, 1e6);
        between(-1e4, populated, 1e6);
        // Unless the kernel gave other addresses.
        if let Some(shared) = life(Way::Shared).expect("memory") {
            between(50.0, shared, 1e6);
        }
    }

    /// The kernel has no folio of two pages of anonymous memory.
    #[test]
    fn folios_that_the_kernel_does_not_make_have_no_cost() {
        assert_eq!(life(Way::Folios(1)).expect("memory"), None);
    }
}
