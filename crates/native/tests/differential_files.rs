//! Files against the host's kernel: the same random operations on a file of Linux, and on an object
//! of the subsystem whose store is another file of the host. The results of each operation must be
//! equal, as must the bytes of both files after `msync` and `fsync`.
//!
//! `FAULTLESS_FILES_OPERATIONS` sets the total number of operations, `FAULTLESS_FILES_SEED` the
//! first seed. A failure prints its seed, and the operations up to the failure.
//!
//! Some rounds have a file longer than a folio, with executable mappings: our side maps the file
//! with huge leaves, which are split.
//!
//! Two results are not compared, because Linux guarantees neither:
//! - whether a page is resident without a very recent load (the read-ahead and the drops of Linux
//!   vary);
//! - the content of a shared mapping behind the end of the file after a program has stored there
//!   (`mmap(2)`: the bytes are not written to the file). The file grows right after such a store,
//!   and then has zeros there.

use crate::differential::host::Host;
use crate::differential::ours::Ours;
use crate::differential::{Generator, Known, Op, Outcome, PAGE, Place, Shape, Side, Signal, View};
use core::fmt::Write;
use core::ops::Range;
use faultless::{Counter, HugeText, Locking, Object, Setting};
use faultless_native::{HostFile, Native, Stop};
use std::sync::Arc;

/// The number of operations on one pair of files.
const ROUND: u64 = 1000;
/// The number of operations, which take 5 to 50 seconds, mainly the host's disk time for synced
/// data.
const OPERATIONS: u64 = 30_000;
/// One of this many rounds has a file with huge text, which costs as much as several others.
const TEXT_SELDOM: u64 = 16;
/// The number of operations printed for a failure.
const SHOWN: usize = 40;

fn from_env(name: &str, otherwise: u64) -> u64 {
    let text = std::env::var(name).ok();
    text.map_or(otherwise, |text| text.parse().unwrap_or_else(|_| panic!("{name}=NUMBER")))
}

/// The counts of observed events.
#[derive(Debug, Default)]
struct Seen {
    bus: u64,
    segv: u64,
    behind_end: u64,
    files: u64,
    dropped: u64,
    /// The created huge leaves, the leaves created by collapses, and the split leaves.
    leaves: u64,
    collapsed: u64,
    splits: u64,
}

impl Seen {
    fn note(&mut self, outcome: &Outcome) {
        match outcome {
            Outcome::Loaded(Err(signal)) | Outcome::Stored(Err(signal)) => match signal {
                Signal::Bus => self.bus += 1,
                Signal::Segv => self.segv += 1,
            },
            _ => {}
        }
    }
}

/// Which bytes of the files must be the same after `op`.
fn synced(known: &Known, op: &Op) -> Option<Range<u64>> {
    match op {
        Op::Fsync => Some(0..known.len),
        Op::Msync { slot, pages } => {
            let first = known.parent[*slot]?.first;
            let at = |page: u64| ((first + page) * PAGE).min(known.len);
            Some(at(pages.start)..at(pages.end))
        }
        _ => None,
    }
}

/// Does `op` on both sides, and compares.
fn step(known: &mut Known, op: &Op, host: &mut Host, ours: &mut Ours<'_, '_, '_>, seen: &mut Seen) {
    let (theirs, own) = (host.step(known, op), ours.step(known, op));
    assert!(theirs == own, "{op:?}\nLinux: {theirs:x?}\nours:  {own:x?}");
    seen.note(&own);
    known.after(op);
    if let Some(range) = synced(known, op) {
        let (theirs, own) = (host.stored(), ours.stored());
        let lengths = (theirs.len() as u64, own.len() as u64);
        assert_eq!(lengths, (known.len, known.len), "the lengths of the files");
        let differ = |at: &u64| theirs[*at as usize] != own[*at as usize];
        if let Some(at) = range.clone().find(differ) {
            let (theirs, own) = (theirs[at as usize], own[at as usize]);
            panic!("byte {at:#x} of the files: Linux {theirs:#x}, ours {own:#x}");
        }
        seen.files += 1;
    }
}

/// Prints the past operations if a step panics.
struct Story {
    seed: u64,
    done: Vec<(Op, u64)>,
}

impl Drop for Story {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        let mut text = format!("seed {}, operation {}:\n", self.seed, self.done.len());
        for (op, len) in &self.done[self.done.len().saturating_sub(SHOWN)..] {
            let _ = writeln!(text, "  length {len:#x}: {op:x?}");
        }
        eprintln!("{text}");
    }
}

/// Does `operations` operations.
fn round(native: &Native, seed: u64, operations: u64, clears: bool, seen: &mut Seen) {
    let locking = Locking::ALL[seed as usize % Locking::ALL.len()];
    native.vm().set(Setting::Locking(locking));
    native.vm().set(Setting::FaultAroundPages(1 << (seed % 7)));
    native.vm().set(Setting::PrefaultMaxOrder((seed % 5) as u8));
    native.vm().set(Setting::HugeText(HugeText::Always));
    let shape = if seed.is_multiple_of(TEXT_SELDOM) { Shape::TEXT } else { Shape::DATA };
    let process = native.process().unwrap();
    let run = process.run(|cpu| {
        let (mut host, mut ours) = sides(cpu, shape);
        let mut generator = Generator::new(seed, shape, clears);
        let mut known = Known::default();
        let mut story = Story { seed, done: Vec::new() };
        for _ in 0..operations {
            let op = generator.next(&known);
            story.done.push((op.clone(), known.len));
            if let Op::Load(place) = op {
                let behind = known.is_in_file(place) && known.offset(place) >= known.len;
                seen.behind_end += u64::from(behind);
            }
            step(&mut known, &op, &mut host, &mut ours, seen);
        }
        story.done.push((Op::Fsync, known.len));
        step(&mut known, &Op::Fsync, &mut host, &mut ours, seen);
        seen.dropped += ours.dropped;
        ours.end();
        Ok(())
    });
    run.unwrap_or_else(|stop: Stop| panic!("seed {seed}: {stop}"));
    process.exit();
    native.audit(&[]).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
}

fn sides<'c, 'a, 'n>(
    cpu: &'c mut faultless_native::NativeCpu<'a, 'n>,
    shape: Shape,
) -> (Host, Ours<'c, 'a, 'n>) {
    let host = Host::new(tempfile::tempfile().unwrap(), shape);
    let file = tempfile::tempfile().unwrap();
    let store = Arc::new(HostFile::new(file.try_clone().unwrap()).unwrap());
    let object = Object::of_store(cpu.cpu(), store, 1).unwrap();
    (host, Ours::new(cpu, object, file, shape))
}

/// Checks whether the host clears a program's stores behind the end of a file when the file grows.
fn host_clears() -> bool {
    let mut host = Host::new(tempfile::tempfile().unwrap(), Shape::DATA);
    let mut known = Known::default();
    let view = View { first: 0, pages: 1, shared: true, writable: true };
    let place = Place { who: 0, slot: 0, at: 64, outside: false };
    let grow = [Op::SetLen(PAGE), Op::Write { offset: PAGE, len: 1, seed: 1 }];
    grow.into_iter().all(|grow| {
        let mut outcome = Outcome::Done;
        let map = Op::Map { slot: 0, view };
        for op in [Op::SetLen(10), map, Op::Store(place, 7), grow, Op::Load(place)] {
            outcome = host.step(&known, &op);
            known.after(&op);
        }
        outcome == Outcome::Loaded(Ok(0))
    })
}

#[test]
fn files_match_linux() {
    let operations = from_env("FAULTLESS_FILES_OPERATIONS", OPERATIONS);
    let first = from_env("FAULTLESS_FILES_SEED", 1);
    let native = crate::common::machine(1);
    let (mut seen, clears) = (Seen::default(), host_clears());
    let mut left = operations;
    for seed in first.. {
        let now = left.min(ROUND);
        round(&native, seed, now, clears, &mut seen);
        left -= now;
        if left == 0 {
            break;
        }
    }
    let totals = native.vm().totals();
    seen.leaves = totals.get(Counter::ThpFileMapped);
    seen.collapsed = totals.get(Counter::ThpCollapsed);
    seen.splits = totals.get(Counter::ThpSplitPmd);
    println!("{operations} operations: {seen:?}; the host clears behind the end: {clears}");
    if operations < OPERATIONS {
        return;
    }
    let must = [
        Counter::MajorFault,
        Counter::StoreRead,
        Counter::PageWritten,
        Counter::CowCopy,
        Counter::SharedPage,
        Counter::AroundPage,
    ];
    let missing: Vec<_> = must.iter().filter(|counter| totals.get(**counter) == 0).collect();
    assert!(missing.is_empty(), "never seen: {missing:?}");
    let Seen { bus, segv, behind_end, files, dropped, leaves, splits, collapsed } = seen;
    assert!(collapsed > 0, "{seen:?}");
    let common = [bus, segv, behind_end, files, dropped];
    assert!(common.iter().all(|count| *count > operations / 600), "{seen:?}");
    // One round of sixteen has a file with huge text.
    assert!([leaves, splits].iter().all(|count| *count > operations / 6000), "{seen:?}");
    assert_eq!(totals.get(Counter::WriteBackLost), 0);
}
