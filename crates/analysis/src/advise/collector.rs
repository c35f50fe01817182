//! Go's garbage collector: its cost in a run, and the cost of less frequent collections.
//!
//! A larger `GOGC` lets the heap grow further before each collection, so collections are fewer and
//! the program touches more pages. For each collection the runtime reports the heap size before the
//! collection, the size of the live part, and the processor time (`GODEBUG=gctrace=1`). The live
//! size and the cost of a collection are functions of the memory allocated so far, and do not
//! depend on `GOGC`. Between the observed collections both are interpolated. This allows a
//! simulation of the collections with another `GOGC`.

use super::effect::joined;
use super::once::{silent, supervised};
use crate::error::Error;
use std::ffi::OsString;
use std::fs;
use std::process::Stdio;
use tempfile::NamedTempFile;

/// The advised value, in percent; Go's default is 100.
pub const GOGC: u32 = 400;
/// MiB of a heap at which Go collects first, at a `GOGC` of 100.
const FIRST: f64 = 4.0;
const MIB: f64 = 1024.0 * 1024.0;

/// One collection.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Collection {
    /// The heap size at the start of the collection, in MiB.
    heap: f64,
    /// The live part of the heap, in MiB.
    live: f64,
    /// Milliseconds of processor time.
    cpu: f64,
}

/// The collections of one run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Collector {
    /// The collections in order. Empty unless the trace has one process whose collections are all
    /// automatic.
    collections: Vec<Collection>,
}

/// The effect of fewer collections.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Saved {
    /// Milliseconds of processor time saved.
    pub cpu_ms: f64,
    /// The number of collections avoided.
    pub collections: u64,
    /// Bytes by which the heap would be larger, at most.
    pub bytes: u64,
}

impl Collector {
    /// Runs `command` once and reads the trace of its runtime. The program reads no input, and its
    /// output is dropped. Returns `None` after a request to stop.
    ///
    /// # Errors
    /// The program cannot be run, or the trace cannot be written.
    pub fn of_run(command: &[OsString]) -> Result<Option<Self>, Error> {
        let failed = |error| Error::host("the trace of Go's collector", error);
        let file = NamedTempFile::new().map_err(failed)?;
        let mut program = silent(command)?;
        program.env("GODEBUG", joined("GODEBUG", "gctrace=1", std::env::var_os("GODEBUG")));
        program.stderr(Stdio::from(file.reopen().map_err(failed)?));
        let Some((usage, elapsed)) = supervised(&mut program, |_| ())? else { return Ok(None) };
        // The program itself may print any text there.
        let said = fs::read(file.path()).map_err(failed)?;
        let share = (usage.user + usage.system) / elapsed.max(1e-9);
        Ok(Some(Self::of(&String::from_utf8_lossy(&said)).with_share(share)))
    }

    /// Scales the collections for a run that had this share of one processor, or more of several.
    /// The runtime reads clocks, so its processor time includes the time of other programs. A
    /// program that is always busy had at least its share of each interval.
    fn with_share(mut self, share: f64) -> Self {
        self.collections.iter_mut().for_each(|one| one.cpu *= share.min(1.0));
        self
    }

    /// Parses the lines printed by a run.
    pub fn of(said: &str) -> Self {
        let mut collections = Vec::new();
        for line in said.lines() {
            let Some((number, collection)) = line.strip_prefix("gc ").and_then(parsed) else {
                continue;
            };
            // Another process starts its numbers again. Forced collections do not depend on GOGC.
            if number != collections.len() + 1 || line.ends_with("(forced)") {
                return Self::default();
            }
            collections.push(collection);
        }
        Self { collections }
    }

    /// Returns the saving with a `GOGC` of [`GOGC`]; `None` without collections.
    pub fn saved(&self) -> Option<Saved> {
        let mut allocated = 0.0;
        let mut lived = 0.0;
        let points = self.collections.iter().map(|one| {
            allocated += (one.heap - lived).max(0.0);
            lived = one.live;
            (allocated, *one)
        });
        let points: Vec<(f64, Collection)> = points.collect();
        let &(end, last) = points.last()?;
        let (mut at, mut heap, mut peak) = (0.0, 0.0, 0.0_f64);
        let (mut cpu, mut count) = (0.0, 0);
        let mut goal = FIRST * f64::from(GOGC) / 100.0;
        while at + goal - heap <= end {
            at += goal - heap;
            let Collection { live, cpu: took, .. } = between(&points, at);
            (cpu, count, peak) = (cpu + took, count + 1, peak.max(goal));
            heap = live;
            goal = (live * (1.0 + f64::from(GOGC) / 100.0)).max(FIRST * f64::from(GOGC) / 100.0);
        }
        peak = peak.max(heap + end - at);
        let most = |most: f64, one: &Collection| most.max(one.heap);
        let before = self.collections.iter().fold(last.heap, most);
        Some(Saved {
            cpu_ms: self.collections.iter().map(|one| one.cpu).sum::<f64>() - cpu,
            collections: (points.len() as u64).saturating_sub(count),
            bytes: ((peak - before).max(0.0) * MIB) as u64,
        })
    }
}

/// Returns a collection, interpolated at `at` MiB of allocated memory.
fn between(points: &[(f64, Collection)], at: f64) -> Collection {
    let next = points.iter().position(|(allocated, _)| *allocated >= at);
    let Some(next) = next else {
        return points.last().map_or_else(Collection::default, |last| last.1);
    };
    let (from, before) = next.checked_sub(1).map_or_else(Default::default, |before| points[before]);
    let (to, after) = points[next];
    let share = if to > from { (at - from) / (to - from) } else { 1.0 };
    let mixed = |one: f64, other: f64| one + share * (other - one);
    Collection {
        heap: mixed(before.heap, after.heap),
        live: mixed(before.live, after.live),
        cpu: mixed(before.cpu, after.cpu),
    }
}

/// Parses the number of a collection, and the collection, from a line without its first word.
fn parsed(line: &str) -> Option<(usize, Collection)> {
    let number = line.split(' ').next()?.parse().ok()?;
    let (mut cpu, mut sizes) = (None, None);
    for part in line.split([',', ':']).map(str::trim) {
        if let Some(times) = part.strip_suffix(" ms cpu") {
            let times: Result<Vec<f64>, _> = times.split(['+', '/']).map(str::parse).collect();
            cpu = Some(times.ok()?.iter().sum());
        } else if let Some(heap) = part.strip_suffix(" MB").filter(|part| part.contains("->")) {
            let heap: Result<Vec<f64>, _> = heap.split("->").map(str::parse).collect();
            sizes = Some(heap.ok()?);
        }
    }
    let [heap, _, live] = sizes?[..] else { return None };
    Some((number, Collection { heap, live, cpu: cpu? }))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &str = "gc 1 @0.012s 2%: 0.026+0.39+0.10 ms clock, 0.5+0.25/0.5/1.25+1.5 ms cpu, 4->5->3 MB, 5 MB goal, 0 MB stacks, \
                        0 MB globals, 2 P";

    #[test]
    fn collector_parses_the_trace_of_the_runtime() {
        let got = Collector::of(&format!("the program's own\n{LINE}\ngc of mine\n"));
        assert_eq!(got.collections, [Collection { heap: 4.0, live: 3.0, cpu: 4.0 }]);
        let twice = format!("{LINE}\n{LINE}\n");
        assert_eq!(Collector::of(&twice), Collector::default(), "two processes");
        assert_eq!(Collector::of(&format!("{LINE} (forced)\n")), Collector::default());
        assert_eq!(Collector::of("gc 1 @0s: 1+x ms cpu, 4->4->1 MB\n"), Collector::default());
        assert_eq!(Collector::default().saved(), None);
    }

    #[test]
    fn time_of_other_programs_is_excluded() {
        let cpu = |share: f64| Collector::of(LINE).with_share(share).collections[0].cpu;
        assert_eq!((cpu(0.5), cpu(1.0), cpu(1.7)), (2.0, 4.0, 4.0));
    }

    /// A heap that only grows doubles at each collection. With five times as much memory between
    /// collections, fewer remain.
    #[test]
    fn growing_heap_is_collected_less_often() {
        let collections: Vec<_> = (2..=9)
            .map(|power| f64::from(1 << power))
            .map(|heap| Collection { heap, live: heap, cpu: heap })
            .collect();
        let saved = Collector { collections }.saved().expect("a trace with collections");
        // Collections at 4, 8, .. 512 MiB become collections at 16, 80, 400 MiB.
        assert_eq!((saved.collections, saved.bytes), (5, 0));
        assert!((saved.cpu_ms - (1020.0 - 496.0)).abs() < 1e-9, "{saved:?}");
    }

    /// If most of the heap is garbage, the heap grows by the uncollected garbage.
    #[test]
    fn heap_grows_by_uncollected_garbage() {
        let one = Collection { heap: 20.0, live: 10.0, cpu: 1.0 };
        let saved =
            Collector { collections: vec![one; 100] }.saved().expect("a trace with collections");
        // A collection follows after 40 MiB instead of 10, and the heap reaches 50 MiB.
        assert!((74..=76).contains(&saved.collections), "{saved:?}");
        assert_eq!(saved.bytes, 30 << 20);
        assert!((saved.cpu_ms - 75.0).abs() < 1.5, "{saved:?}");
    }
}
