//! The cost of page faults under the host's kernel, measured by one thread.
//!
//! [`host_faults`] measures the parts of a fault, in sequence and in the quietest of several
//! rounds. [`life`] measures the cost of a page for a program that does other work between two
//! faults: the caches are cold for the kernel at the fault, and cold for the program after it. This
//! is two to three times the cost of the fault alone, and varies with other load of the host. It is
//! therefore measured as processor time of a thread, at the time of use.

use super::hardware::{Effort, nanoseconds};
use crate::error::Error;
use faultless::PAGE_SIZE;
use faultless_trace::anticipate::folio::thp;
use faultless_trace::resident::host_page_size;
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
pub(super) const PAGE: usize = PAGE_SIZE as usize;
/// Pages of the host whose first touch is measured.
const TOUCHED: usize = 4096;
/// Pages whose life is measured: 32 MiB. Their first byte is at a multiple of `ALIGNED`, so that
/// every folio of up to 32 MiB fits.
const LIVED: usize = 8192;
const ALIGNED: usize = LIVED * PAGE;
/// Bytes of other memory used by the program. `USED` is the number of its locations used between
/// two pages.
const BESIDE: usize = 4 << 20;
const USED: usize = 600;
/// Bytes whose first touch is measured in huge folios. The size exceeds the usual amount of
/// recently freed memory, so that the kernel has to provide memory that was not in use.
const FRESH: usize = 256 << 20;

/// Returns the bytes of THP on this host: 2, 32 or 512 MiB.
pub(super) fn huge_bytes() -> usize {
    PAGE << thp(small_pages() as u64)
}

/// Returns the pages of 4 KiB in a base page of this host.
pub(super) fn small_pages() -> usize {
    (host_page_size() / PAGE_SIZE).max(1) as usize
}

/// Costs of the host's kernel, in nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    /// The first touch of a page.
    pub touch: f64,
    /// A page populated together with other pages by one call.
    pub populate: f64,
    /// An empty system call.
    pub call: f64,
}

impl Faults {
    /// Returns the cost of an exception: the additional cost of a single page over a page of a
    /// populating call.
    pub fn exception(&self) -> f64 {
        (self.touch - self.populate).max(0.0)
    }

    /// Returns all figures in nanoseconds, with their names in results.
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
/// The host has no memory available.
pub fn host_faults(effort: Effort) -> Result<Faults, Error> {
    let round = |populate: bool| -> io::Result<f64> {
        let mut memory = MmapMut::map_anon(TOUCHED * PAGE)?;
        // A kernel without huge pages refuses the advice, and does not need it.
        let _ = memory.advise(Advice::NoHugePage);
        let begin = Instant::now();
        if populate {
            memory.advise(Advice::PopulateWrite)?;
        } else {
            memory.iter_mut().step_by(PAGE).for_each(|byte| *byte = 1);
        }
        Ok(nanoseconds(begin) / TOUCHED as f64)
    };
    // The two measurements alternate under the same load, because their difference is the cost of
    // an exception.
    let (mut touch, mut populate) = (f64::INFINITY, f64::INFINITY);
    for _ in 0..effort.rounds {
        touch = touch.min(round(false).map_err(failed)?);
        populate = populate.min(round(true).map_err(failed)?);
    }
    let call = effort.each(20_000, || _ = black_box(getppid()));
    Ok(Faults { touch, populate, call })
}

pub(super) fn failed(error: io::Error) -> Error {
    Error::host("memory of the host", error)
}

/// Ways in which a program gets pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Each page by its own fault.
    Single,
    /// All pages by one call, `MADV_POPULATE_WRITE`.
    Populated,
    /// One by one, all before the program uses the first.
    Pretouched,
    /// By a fault for each folio of this order, in pages of 4 KiB. `MADV_HUGEPAGE` requests folios,
    /// which has an effect if the setting of their size is `madvise` or `always`.
    Folios(u8),
    /// One by one, in shared memory.
    Shared,
    /// In shared memory, by a fault for each huge page, requested with `MADV_HUGEPAGE`.
    SharedHuge,
}

/// Memory whose pages are measured.
struct Measured {
    memory: MmapMut,
    /// Bytes before the first multiple of [`ALIGNED`].
    skip: usize,
    /// The file of shared memory. Its pages are freed with the file.
    file: Option<File>,
}

impl Measured {
    const BYTES: usize = LIVED * PAGE + ALIGNED;

    fn private() -> io::Result<Self> {
        let memory = MmapMut::map_anon(Self::BYTES)?;
        let skip = memory.as_ptr().align_offset(ALIGNED);
        Ok(Self { memory, skip, file: None })
    }

    /// Returns `None` if the address and the offset in the file differ in their position within a
    /// huge page.
    fn shared() -> io::Result<Option<Self>> {
        // SAFETY: the name is a valid string.
        let fd = unsafe { libc::memfd_create(c"faultless".as_ptr(), libc::MFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was opened above, and has no other owner.
        let file = unsafe { File::from_raw_fd(fd) };
        file.set_len((Self::BYTES + ALIGNED) as u64)?;
        let map = |offset: usize| {
            let mut options = MmapOptions::new();
            // SAFETY: no other process or thread has the file, which keeps its length.
            unsafe { options.offset(offset as u64).len(Self::BYTES).map_mut(&file) }
        };
        let place = |memory: &MmapMut| memory.as_ptr().addr() % ALIGNED;
        let first = map(0)?;
        let offset = place(&first);
        drop(first);
        // The kernel usually returns the same addresses again.
        let memory = map(offset)?;
        let alike = place(&memory) == offset;
        let skip = memory.as_ptr().align_offset(ALIGNED);
        Ok(alike.then_some(Self { memory, skip, file: Some(file) }))
    }
}

/// Measures the processor time in nanoseconds of a page from its mapping to its unmapping, beyond
/// the program's use of the page. One round. Returns `None` if the kernel did not map pages in this
/// way.
///
/// # Errors
/// The host has no memory available.
pub fn life(way: Way) -> Result<Option<f64>, Error> {
    let mut beside = MmapMut::map_anon(BESIDE).map_err(failed)?;
    let _ = beside.advise(Advice::NoHugePage);
    beside.fill(1);
    let measured = match way {
        Way::Shared | Way::SharedHuge => Measured::shared().map_err(failed)?,
        _ => Some(Measured::private().map_err(failed)?),
    };
    let Some(Measured { mut memory, skip, file }) = measured else { return Ok(None) };
    let order = match way {
        Way::Folios(order) => order,
        Way::SharedHuge => thp(small_pages() as u64),
        Way::Single | Way::Populated | Way::Pretouched | Way::Shared => 0,
    };
    if 1 << order > LIVED {
        // THP of 512 MiB.
        return Ok(None);
    }
    // The rest of a mapping larger than the folios would get larger folios. A separate advice
    // therefore excludes the last folio of each huge page, which splits the mapping.
    let huge = (huge_bytes() / PAGE).min(LIVED);
    let pages: Vec<usize> = match way {
        Way::Folios(order) if 1 << order < huge => {
            (0..LIVED).filter(|page| page % huge < huge - (1 << order)).collect()
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
    // The time of the pages beyond the time of their second use.
    let took = (populated - begin) + (first - populated) + (end - second);
    let beyond = took.as_secs_f64() - (second - first).as_secs_f64();
    let expected = match way {
        Way::Single | Way::Shared => pages.len() / small_pages(),
        Way::Populated | Way::Pretouched => 0,
        Way::Folios(_) | Way::SharedHuge => pages.len() >> order,
    };
    let as_expected = faults.abs_diff(expected as u64) <= expected as u64 / 20 + 16;
    Ok(as_expected.then_some(beyond * 1e9 / pages.len() as f64))
}

/// Measures the processor time in nanoseconds of the first touch of a page in huge pages. The
/// memory is large enough to include memory that was not in use recently. Returns `None` if the
/// kernel has no such folios.
///
/// # Errors
/// The host has no memory available.
pub fn fresh_huge() -> Result<Option<f64>, Error> {
    let huge = huge_bytes();
    if huge > FRESH {
        return Ok(None);
    }
    let mut memory = MmapMut::map_anon(FRESH + huge).map_err(failed)?;
    let skip = memory.as_ptr().align_offset(huge);
    if memory.advise_range(Advice::HugePage, skip, FRESH).is_err() {
        return Ok(None);
    }
    let (begin, faults) = (thread_time(), thread_faults());
    memory[skip..skip + FRESH].iter_mut().step_by(huge).for_each(|byte| *byte = 1);
    let folios = (FRESH / huge) as u64;
    let as_expected = thread_faults() - faults <= folios + folios / 20 + 16;
    drop(memory);
    let took = (thread_time() - begin).as_secs_f64();
    Ok(as_expected.then_some(took * 1e9 / (FRESH / PAGE) as f64))
}

/// Uses `bytes` in huge pages, if the kernel has such folios, and frees them.
///
/// # Errors
/// The host has no memory available.
pub fn use_huge(bytes: usize) -> Result<(), Error> {
    let mut memory = MmapMut::map_anon(bytes.saturating_add(huge_bytes())).map_err(failed)?;
    let _ = memory.advise(Advice::HugePage);
    memory.iter_mut().step_by(PAGE).for_each(|byte| *byte = 1);
    Ok(())
}

/// Returns the processor time of this thread.
pub(crate) fn thread_time() -> Duration {
    // The clock exists on every Linux.
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from)
}

/// Returns the faults of this thread without disk access.
pub(super) fn thread_faults() -> u64 {
    getrusage(UsageWho::RUSAGE_THREAD).map_or(0, |usage| usage.minor_page_faults() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUICK: Effort = Effort { rounds: 2 };

    /// Bounds that any current machine meets, also under load.
    #[test]
    fn figures_have_the_right_order_of_magnitude() {
        let between = |low: f64, value: f64, high: f64| {
            assert!((low..high).contains(&value), "{value} is not between {low} and {high}");
        };
        let faults = host_faults(QUICK).expect("memory");
        between(50.0, faults.touch, 1e6);
        between(20.0, faults.call, 1e6);
        assert!(faults.exception() <= faults.touch);
        // The median of at most nine positive costs: a busy host disturbs single measurements.
        let typical = |way| {
            let costs = (0..9).filter_map(|_| life(way).expect("memory"));
            let mut costs: Vec<f64> = costs.filter(|cost| *cost > 0.0).collect();
            costs.sort_by(f64::total_cmp);
            costs.get(costs.len() / 2).copied()
        };
        between(50.0, typical(Way::Single).expect("single touches measured"), 1e6);
        between(1.0, typical(Way::Populated).expect("populated pages measured"), 1e6);
        // Skipped if the kernel returned other addresses.
        if let Some(shared) = typical(Way::Shared) {
            between(50.0, shared, 1e6);
        }
    }

    /// The kernel has no folio of two pages of anonymous memory.
    #[test]
    fn folios_without_kernel_support_have_no_cost() {
        assert_eq!(life(Way::Folios(1)).expect("memory"), None);
    }
}
