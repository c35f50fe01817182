//! Every bundled recording, replayed on a simple model in orders permitted by its plan.

use faultless_trace::event::{Access, Prot, Trace};
use faultless_trace::plan::{At, Op, Plan};
use faultless_trace::{compact, recordings};
use std::collections::BTreeMap;
use std::path::Path;

/// A small deterministic generator, which makes failures reproducible.
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % end
    }
}

#[derive(Clone, Copy, PartialEq)]
struct Area {
    end: u64,
    prot: Prot,
    grows: bool,
}

/// An address space: areas by their start.
#[derive(Clone, Default)]
struct Space {
    areas: BTreeMap<u64, Area>,
    brk: Option<u64>,
}

impl Space {
    /// Makes `at` a boundary between areas.
    fn split(&mut self, at: u64) {
        if let Some((_, area)) = self.areas.range_mut(..at).next_back()
            && area.end > at
        {
            let upper = *area;
            area.end = at;
            self.areas.insert(at, upper);
        }
    }

    fn take(&mut self, start: u64, end: u64) -> Vec<(u64, Area)> {
        self.split(start);
        self.split(end);
        self.areas.extract_if(start..end, |_, _| true).collect()
    }

    fn is_full(&self, start: u64, end: u64) -> bool {
        let mut at = start;
        let before = self.areas.range(..=start).next_back();
        let inside = self.areas.range(start + 1..end);
        for (from, area) in before.into_iter().chain(inside) {
            if *from <= at && area.end > at {
                at = area.end;
            }
        }
        at >= end
    }

    fn put(&mut self, start: u64, end: u64, prot: Prot, grows: bool) {
        if end > start {
            self.take(start, end);
            self.areas.insert(start, Area { end, prot, grows });
        }
    }

    fn touch(&mut self, page: u64, access: Access) -> Result<(), String> {
        let below = self.areas.range(..=page).next_back();
        let area = match below.filter(|(_, area)| area.end > page) {
            Some((_, area)) => *area,
            None => match self.areas.range(page..).next() {
                Some((start, area)) if area.grows && start - page <= 8 << 20 => {
                    let (start, area) = (*start, *area);
                    self.put(page, start, area.prot, true);
                    area
                }
                _ => return Err(format!("no mapping at {page:#x}")),
            },
        };
        let permitted = match access {
            Access::Read => !area.prot.is_empty(),
            Access::Write => area.prot.contains(Prot::WRITE),
            Access::Exec => area.prot.contains(Prot::EXEC),
            Access::Unknown => false,
        };
        if permitted { Ok(()) } else { Err(format!("{access:?} at {page:#x} of {:?}", area.prot)) }
    }

    fn apply(&mut self, op: &Op) -> Result<(), String> {
        let want =
            |holds: bool, what: &str| if holds { Ok(()) } else { Err(format!("{op:?}: {what}")) };
        match *op {
            Op::Map { range, prot, grows_down, .. } => {
                want(!range.is_empty(), "empty")?;
                self.put(range.start, range.end, prot, grows_down);
            }
            Op::Unmap { range } => drop(self.take(range.start, range.end)),
            Op::Protect { range, prot } => {
                want(self.is_full(range.start, range.end), "a hole")?;
                for (start, area) in self.take(range.start, range.end) {
                    self.areas.insert(start, Area { prot, ..area });
                }
            }
            Op::Advise { range, .. } => {
                want(self.is_full(range.start, range.end), "a hole")?;
            }
            Op::Remap { old, new, keep_old } => {
                want(self.is_full(old.start, old.end), "a hole")?;
                want(old.start == new.start || !old.overlaps(new), "the ranges overlap")?;
                let area = self.take(old.start, old.end)[0].1;
                if old.start == new.start {
                    want(self.take(old.end, new.end.max(old.end)).is_empty(), "no room")?;
                }
                if keep_old {
                    self.put(old.start, old.end, area.prot, area.grows);
                }
                self.put(new.start, new.end, area.prot, area.grows);
            }
            Op::Brk { old, new } => {
                want(self.brk.is_none_or(|brk| brk == old), "another program break")?;
                self.brk = Some(new);
                let (old, new) = (old.next_multiple_of(4096), new.next_multiple_of(4096));
                want(new <= old || self.take(old, new).is_empty(), "no room")?;
                self.put(old, new, Prot::READ | Prot::WRITE, false);
                self.take(new.min(old), old);
            }
            Op::Touch { page, access, .. } => self.touch(page, access)?,
            Op::Populate { range, write } => {
                let access = if write { Access::Write } else { Access::Read };
                let mut pages = (range.start..range.end).step_by(4096);
                pages.try_for_each(|page| self.touch(page, access))?;
            }
            Op::Exec => *self = Self::default(),
            Op::Fork { .. } | Op::Launch { .. } | Op::SpawnThread { .. } | Op::Exit => {}
        }
        Ok(())
    }
}

/// Runs `plan` to its end in a random order permitted by its waits (or, without `obey`, in any
/// order of the threads).
fn replay(plan: &Plan, seed: u64, obey: bool) -> Result<(), String> {
    let threads = plan.threads();
    let steps: Vec<Vec<(Op, Vec<At>)>> = threads
        .iter()
        .map(|thread| thread.steps().map(|(op, waits)| (op, waits.collect())).collect())
        .collect();
    let mut spaces = vec![Space::default(); plan.processes().len()];
    let mut next = vec![0; threads.len()];
    let mut random = Random(seed);
    let mut live: Vec<usize> = (0..threads.len()).collect();
    while !live.is_empty() {
        let is_done = |next: &[usize], at: At| next[at.thread as usize] > at.op as usize;
        let ready = |next: &[usize], thread: usize| {
            threads[thread].start.is_none_or(|start| is_done(next, start))
                && (!obey || steps[thread][next[thread]].1.iter().all(|at| is_done(next, *at)))
        };
        let first = random.below(live.len());
        let chosen = (0..live.len())
            .map(|offset| (first + offset) % live.len())
            .find(|slot| ready(&next, live[*slot]))
            .ok_or("the waits form a cycle")?;
        let thread = live[chosen];
        // Occasional long runs let threads drift far apart.
        let burst = 1 << random.below(12);
        for _ in 0..burst {
            if next[thread] == steps[thread].len() || !ready(&next, thread) {
                break;
            }
            let op = &steps[thread][next[thread]].0;
            let process = threads[thread].process as usize;
            spaces[process].apply(op).map_err(|error| format!("thread {thread}: {error}"))?;
            match *op {
                Op::Fork { child } => spaces[child as usize] = spaces[process].clone(),
                Op::Launch { child } => assert!(spaces[child as usize].areas.is_empty()),
                _ => {}
            }
            next[thread] += 1;
        }
        if next[thread] == steps[thread].len() {
            live.swap_remove(chosen);
        }
    }
    Ok(())
}

fn fixture(name: &str) -> Trace {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name);
    faultless_trace::read(&path).unwrap()
}

#[test]
fn every_recording_replays_in_any_permitted_order() {
    for recording in recordings::all() {
        let trace = recording.trace().unwrap();
        let plan = Plan::new(&trace).unwrap();
        let summary = trace.summary();
        println!("{}: {summary}", recording.name);
        for assumption in plan.assumptions() {
            println!("  {assumption}");
        }
        let waits: usize = plan.threads().iter().map(|thread| thread.wait_count()).sum();
        println!("  {} operations, {waits} waits", plan.op_count());
        // Few faults are omitted.
        let faults = summary.user_faults + summary.kernel_faults;
        assert!(plan.touch_count() * 1000 >= faults * 995, "{} touches", plan.touch_count());
        for seed in 0..4 {
            replay(&plan, seed, true).unwrap_or_else(|error| {
                panic!("{} with seed {seed}: {error}", recording.name);
            });
        }
    }
}

#[test]
fn without_the_waits_the_model_is_violated() {
    for name in ["java", "javac", "cargo"] {
        let plan = Plan::new(&recordings::find(name).unwrap().trace().unwrap()).unwrap();
        assert!((0..4).any(|seed| replay(&plan, seed, false).is_err()), "{name}");
    }
}

#[test]
fn recordings_are_small_and_survive_a_round_trip() {
    assert!(recordings::all().len() >= 5);
    for recording in recordings::all() {
        assert!(recording.bytes.len() < 1 << 20);
        let trace = recording.trace().unwrap();
        assert!(!trace.header.program.is_empty() && !trace.header.made.contains('/'));
        let again = compact::encode(Path::new("again"), &trace).unwrap();
        assert_eq!(compact::parse(Path::new("again"), &again).unwrap(), trace);
    }
}

#[test]
fn fixture_contains_each_special_case() {
    use faultless_trace::event::{Birth, Kind, StackId};
    let trace = fixture("fixture.perf.data");
    assert_eq!(trace.header.program, "fixture");
    assert_eq!(trace.header.lost, 0);
    let births: Vec<_> = trace
        .events
        .iter()
        .filter_map(|event| match event.kind {
            Kind::Spawn { birth, .. } => Some(birth),
            _ => None,
        })
        .collect();
    assert_eq!(births, [Birth::Thread, Birth::Fork, Birth::Vfork]);
    let summary = trace.summary();
    assert_eq!((summary.execs, summary.remaps, summary.unmaps), (2, 1, 1));
    assert_eq!(trace.header.notes, ["1 calls that the kernel refused are omitted"]);
    // The kernel read into an untouched page of the mapping used by both threads.
    let area = trace.events.iter().find_map(|event| match event.kind {
        Kind::Map { start, len: 0x8000, .. } => Some(start),
        _ => None,
    });
    let read = Kind::Fault {
        page: area.unwrap() + 2 * 4096,
        access: Access::Write,
        kernel: true,
        present: false,
        instruction: None,
        stack: StackId::NONE,
    };
    let without_instruction = |mut kind| {
        if let Kind::Fault { instruction, .. } = &mut kind {
            *instruction = None;
        }
        kind
    };
    assert!(trace.events.iter().any(|event| without_instruction(event.kind) == read));
    let lacks = |kind| matches!(kind, Kind::Fault { instruction: None, .. });
    assert!(!trace.events.iter().any(|event| lacks(event.kind)));

    let plan = Plan::new(&trace).unwrap();
    // The program, its forked child, and the program executed by the vfork child.
    assert_eq!(plan.processes().len(), 3);
    assert_eq!(plan.processes()[0].threads.len(), 3);
    let ops = || plan.threads().iter().flat_map(|thread| &thread.ops);
    assert_eq!(ops().filter(|op| matches!(op, Op::Launch { .. })).count(), 1);
    assert_eq!(ops().filter(|op| matches!(op, Op::Fork { .. })).count(), 1);
    // One store to a page made read-only, which ended in a signal.
    assert_eq!(plan.touch_count(), summary.user_faults + summary.kernel_faults - 1);
    for seed in 0..100 {
        replay(&plan, seed, true).unwrap();
    }
}

#[test]
fn incomplete_recording_reports_its_assumptions() {
    let trace = fixture("fixture-faults-z.perf.data");
    let summary = trace.summary();
    assert!(summary.user_faults > 60 && summary.kernel_faults > 5, "{summary}");
    assert_eq!((summary.maps, summary.write_faults), (0, 0));
    let notes = &trace.header.notes;
    assert!(
        notes.iter().any(|note| note.contains("savings of prefault are too small")),
        "{notes:?}"
    );
    let notes = fixture("fixture.perf.data").header.notes;
    assert!(!notes.iter().any(|note| note.contains("munmap")), "{notes:?}");
    // Not 0, which would mean that there were none.
    let text = summary.to_string();
    assert!(text.contains(" - mmap, - munmap") && text.contains("- of present pages"), "{text}");
    assert!(text.ends_with("(-: not recorded)"), "{text}");
    let plan = Plan::new(&trace).unwrap();
    let text: Vec<_> = plan.assumptions().map(|assumed| assumed.to_string()).collect();
    assert!(text.contains(&"not recorded: munmap calls".to_owned()), "{text:?}");
    assert!(text.iter().any(|line| line.contains("their kind is not recorded")), "{text:?}");
    for seed in 0..100 {
        replay(&plan, seed, true).unwrap();
    }
}
