//! The time of page walks that huge pages save.
//!
//! Random loads are measured in memory of single pages, and in memory of huge pages. The difference
//! is the time of the additional and longer walks over single pages. A program overlaps some walks
//! with other work, and waits for others: the result is the average of loads that do not depend on
//! each other, and loads whose address depends on the previous load.

use super::faults::{PAGE, failed, huge_bytes, small_pages, thread_faults, thread_time};
use crate::error::Error;
use crate::rates::median;
use memmap2::{Advice, MmapMut};
use std::hint::black_box;

/// Loads of one round, of each kind.
const LOADS: usize = 300_000;
/// Rounds, of which the fastest counts: the first rounds find cold caches.
const ROUNDS: usize = 3;
/// Measurements, each with new memory, of which the median counts: a virtual machine's host decides
/// by chance which memory has huge pages of the host.
const SAMPLES: usize = 3;
/// Bytes of a cache line, and the number of lines in a page.
const LINE: usize = 64;
const LINES: usize = PAGE / LINE;

/// Measures the nanoseconds of processor time that huge pages save of a load from a random page of
/// `bytes` of memory. Returns `None` if the kernel has no huge pages for memory that requests them.
///
/// # Errors
/// The host has no memory available.
pub fn saved(bytes: usize) -> Result<Option<f64>, Error> {
    let mut samples = Vec::new();
    for _ in 0..SAMPLES {
        let Some(huge) = load(Advice::HugePage, bytes)? else { continue };
        let Some(single) = load(Advice::NoHugePage, bytes)? else { continue };
        samples.push(single.average() - huge.average());
    }
    // Huge pages do not lengthen walks. A negative difference is noise.
    Ok(median(&samples).map(|saved| saved.max(0.0)))
}

/// The nanoseconds of a load from a random page.
struct Load {
    /// If the processor knows the addresses of the next loads.
    independent: f64,
    /// If each address depends on the previous load.
    dependent: f64,
}

impl Load {
    fn average(&self) -> f64 {
        f64::midpoint(self.independent, self.dependent)
    }
}

/// Measures loads from random pages of `bytes` of memory with this `advice`. Returns `None` if the
/// memory did not get the pages of the advice.
fn load(advice: Advice, bytes: usize) -> Result<Option<Load>, Error> {
    let huge = huge_bytes();
    if huge > bytes {
        return Ok(None);
    }
    let pages = bytes / huge * huge / PAGE;
    let mut memory = MmapMut::map_anon(pages * PAGE + huge).map_err(failed)?;
    let skip = memory.as_ptr().align_offset(huge);
    // A kernel without huge pages refuses the advice, and has single pages anyway.
    _ = memory.advise(advice);
    let faults = thread_faults();
    let memory = &mut memory[skip..skip + pages * PAGE];
    memory.iter_mut().step_by(PAGE).for_each(|byte| *byte = 1);
    let each = if advice == Advice::HugePage { huge / PAGE } else { small_pages() };
    let expected = (pages / each) as u64;
    if (thread_faults() - faults).abs_diff(expected) > expected / 20 + 16 {
        return Ok(None);
    }
    Ok(Some(Load { independent: fastest::<false>(memory), dependent: fastest::<true>(memory) }))
}

/// Returns the nanoseconds of a load from a random page of `memory`, in the fastest round.
fn fastest<const DEPENDS: bool>(memory: &[u8]) -> f64 {
    let mut random = 88_172_645_463_325_252;
    (0..ROUNDS).map(|_| round::<DEPENDS>(memory, &mut random)).fold(f64::INFINITY, f64::min)
}

/// Returns the nanoseconds of a load from a random page of `memory`. With `DEPENDS`, the address
/// needs the previously loaded byte. A constant, not a variable: code for both cases would compute
/// with this byte in both.
fn round<const DEPENDS: bool>(memory: &[u8], random: &mut u64) -> f64 {
    let pages = memory.len() / PAGE;
    let (begin, mut last) = (thread_time(), 0);
    for _ in 0..LOADS {
        *random ^= *random << 13;
        *random ^= *random >> 7;
        *random ^= *random << 17;
        let salt = if DEPENDS { usize::from(last & 1) } else { 0 };
        let page = ((*random >> 20) as usize).wrapping_add(salt) % pages;
        last = black_box(memory)[page * PAGE + *random as usize % LINES * LINE];
    }
    black_box(last);
    (thread_time() - begin).as_secs_f64() * 1e9 / LOADS as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn load_from_more_pages_takes_longer() {
        let load = |bytes| load(Advice::NoHugePage, bytes).expect("memory").expect("single pages");
        let (few, many) = (load(2 << 20).average(), load(256 << 20).average());
        assert!(few > 0.1 && few < many && many < 1e5, "{few} and {many} ns");
    }

    /// Memory of this size is in no cache of the processor, whose other loads go on meanwhile.
    #[test]
    fn loads_that_depend_on_each_other_take_several_times_as_long() {
        let load = load(Advice::NoHugePage, 256 << 20).expect("memory").expect("single pages");
        let Load { independent, dependent } = load;
        assert!(dependent > 2.0 * independent, "{independent} and {dependent} ns");
    }

    /// Passes with any settings of this host.
    #[test]
    fn saved_time_is_a_part_of_a_load() {
        let load = load(Advice::NoHugePage, 64 << 20).expect("memory").expect("single pages");
        let single = load.average();
        if let Some(saved) = saved(64 << 20).expect("memory") {
            assert!((0.0..2.0 * single).contains(&saved), "{saved} of {single} ns");
        }
    }
}
