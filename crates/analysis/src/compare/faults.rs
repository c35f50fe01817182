//! The cost of one fault under each locking policy: instructions, and shared cache lines written.
//!
//! Instructions come from `faults.toml`, which CI compares with the counts of
//! `bench instructions`. Lines are counted here: two CPUs of a virtual machine run one process and
//! fault in turn, on adjacent pages of one mapping. The machine observes every access of the
//! subsystem to shared memory.

use crate::context::Context;
use crate::error::Error;
use crate::figures::{Figures, Number};
use crate::scale::subject;
use crate::settings::{Regime, Settings};
use crate::stop;
use faultless::{Access, Locking, MapFlags, PAGE_SIZE, Prot};
use faultless_virtual::{File, LineUse, Meeting, Process, Profile, Stop, Virtual, VirtualCpu};
use faultless_workload::System;
use serde_json::Map;
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::LazyLock;

/// Instructions by kind of fault and policy.
type Counted = BTreeMap<String, BTreeMap<String, f64>>;

static COUNTED: LazyLock<Counted> = LazyLock::new(|| {
    toml::from_str(include_str!("../../faults.toml"))
        .expect("faults.toml is well-formed; a test reads it")
});

/// The number of CPUs that fault.
const CPUS: usize = 2;
/// The number of observed faults of each CPU. The same number of earlier faults performs all
/// one-time allocations.
const FAULTS: u64 = 64;
const PAGES: u64 = 2 * FAULTS * CPUS as u64;
/// Memory of the program, in bytes.
const MEMORY: u64 = 32 << 20;

/// A kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The first write to a page.
    Write,
    /// The first read of a page.
    Read,
    /// A write after a fork, which copies the page and flushes the TLB.
    Copy,
    /// The first write to a page of a file.
    File,
}

impl Kind {
    const ALL: [Self; 4] = [Self::Write, Self::Read, Self::Copy, Self::File];

    /// Returns the name used by `bench`.
    const fn name(self) -> &'static str {
        match self {
            Self::Write => "anonymous_write_fault",
            Self::Read => "anonymous_read_fault",
            Self::Copy => "cow_copy_fault",
            Self::File => "file_shared_write_fault",
        }
    }

    const fn access(self) -> Access {
        match self {
            Self::Read => Access::Read,
            Self::Write | Self::Copy | Self::File => Access::Write,
        }
    }
}

/// The cost of a fault.
#[derive(Clone, Debug, PartialEq)]
pub struct Cost {
    /// Instructions, without filling the page.
    pub instructions: f64,
    /// Shared lines written by most of the faults.
    pub lines: u64,
    /// Accesses to shared memory, by module of the subsystem.
    pub accesses: BTreeMap<String, u64>,
}

/// The counts of one kind of fault.
#[derive(Debug)]
struct Counts {
    lines: u64,
    accesses: BTreeMap<String, u64>,
}

/// A kind of fault under each policy.
#[derive(Debug)]
pub struct Row {
    /// The kind.
    pub kind: Kind,
    /// The cost under each policy.
    pub costs: Vec<(Locking, Cost)>,
}

/// The costs of faults.
#[derive(Debug, Default)]
pub struct Faults(pub Vec<Row>);

impl Faults {
    /// Steps of [`Self::measure`].
    pub const STEPS: usize = Kind::ALL.len();

    /// Measures each kind under each of `policies`. Calls `done` after each kind.
    ///
    /// # Errors
    /// A run failed.
    pub fn measure(
        profile: &Profile,
        policies: &[Locking],
        settings: &Settings,
        figures: &mut dyn Figures,
        done: impl Fn(),
    ) -> Result<Self, Error> {
        let mut rows = Vec::new();
        for kind in Kind::ALL {
            if stop::requested() {
                break;
            }
            let mut costs = Vec::new();
            for &policy in policies {
                let settings = settings.with_locking(policy).with_regime(Regime::OFF);
                costs.push((policy, measured(profile, kind, &settings, figures)?));
            }
            rows.push(Row { kind, costs });
            done();
        }
        Ok(Self(rows))
    }

    /// Returns the distribution over modules of the instructions of the first kind, under each
    /// policy, in proportion to the accesses of each module. Lists the largest modules, and the
    /// rest.
    pub fn places(&self) -> (Vec<String>, Vec<(String, Vec<f64>)>) {
        const MODULES: usize = 6;
        let costs = self.0.first().map_or(&[][..], |row| &row.costs);
        let mut all: BTreeMap<&str, u64> = BTreeMap::new();
        for (module, count) in costs.iter().flat_map(|(_, cost)| &cost.accesses) {
            *all.entry(module).or_default() += count;
        }
        let mut modules: Vec<_> = all.into_iter().map(|(module, count)| (count, module)).collect();
        modules.sort_unstable_by(|a, b| b.cmp(a));
        modules.truncate(MODULES);
        let of = |(policy, cost): &(Locking, Cost)| {
            let whole = cost.accesses.values().sum::<u64>().max(1) as f64;
            let part = |module: &str| {
                let count = cost.accesses.get(module).copied().unwrap_or(0);
                cost.instructions * count as f64 / whole
            };
            let mut parts: Vec<_> = modules.iter().map(|(_, module)| part(module)).collect();
            parts.push((cost.instructions - parts.iter().sum::<f64>()).max(0.0));
            (policy.name().to_owned(), parts)
        };
        let groups = costs.iter().map(of).collect();
        let names = modules.iter().map(|(_, module)| (*module).to_owned());
        (names.chain(["the rest".to_owned()]).collect(), groups)
    }
}

/// Measures a kind of fault under `settings`.
fn measured(
    profile: &Profile,
    kind: Kind,
    settings: &Settings,
    figures: &mut dyn Figures,
) -> Result<Cost, Error> {
    let failed =
        |error: String| Error::run(format_args!("{} ({})", kind.name(), settings.label()), error);
    let system = subject::machine(profile, CPUS, MEMORY, 0)?;
    settings.apply_to_simulated(&system).map_err(failed)?;
    // A fault maps only its own page.
    for own in ["fault_around_pages=1", "huge_text=never"] {
        system.set(own).map_err(failed)?;
    }
    let Counts { lines, accesses } = run(&system, kind).map_err(|stop| failed(stop.to_string()))?;
    let instructions = COUNTED[kind.name()][settings.locking.name()];
    let simulated = Context {
        machine: system.machine(),
        workload: kind.name().into(),
        cpus: CPUS,
        setting: settings.label(),
        params: Map::new(),
        knobs: settings.knobs(),
        basis: None,
    };
    figures.figure(&simulated, "shared_lines_written", "lines", Number::Whole(lines))?;
    // In the form written by `bench instructions`.
    let setting = format!("locking={}", settings.locking.name());
    let counted =
        Context { machine: "native".into(), cpus: 1, setting, knobs: Map::new(), ..simulated };
    let metric = "instructions_besides_filling";
    figures.figure(&counted, metric, "instructions", Number::Real(instructions))?;
    Ok(Cost { instructions, lines, accesses })
}

/// The accesses of one fault.
struct Fault {
    cpu: usize,
    uses: Vec<LineUse>,
}

impl Fault {
    fn written(&self) -> HashSet<u32> {
        self.uses.iter().filter(|it| it.written).map(|it| it.line).collect()
    }
}

/// Runs the faults, and counts.
fn run(system: &Virtual, kind: Kind) -> Result<Counts, Stop> {
    let process = system.process()?;
    let file = system.file(PAGES * PAGE_SIZE)?;
    system.take_line_uses();
    let (area, child) = system.alone(&process, |cpu| prepare(cpu, kind, &file))?;
    let before = system.take_line_uses();
    let meeting = Meeting::of(CPUS);
    let faults = RefCell::new(Vec::new());
    let body = |cpu: &mut VirtualCpu<'_>, number: usize| -> Result<(), Stop> {
        let mut result = Ok(());
        for page in 0..PAGES {
            // Both CPUs take part in each meeting, even after an error.
            cpu.meet(&meeting);
            if page % CPUS as u64 != number as u64 || result.is_err() {
                continue;
            }
            system.take_line_uses();
            result = cpu.touch(area + page * PAGE_SIZE, kind.access());
            let uses = system.take_line_uses();
            if page >= PAGES / 2 {
                faults.borrow_mut().push(Fault { cpu: number, uses });
            }
        }
        cpu.meet(&meeting);
        result
    };
    let ends = system.run(CPUS, |_| &process, body);
    child.into_iter().for_each(|child| system.exit(child));
    system.exit(process);
    system.delete(file);
    ends.into_iter().collect::<Result<(), Stop>>()?;
    let faults = faults.into_inner();
    Ok(Counts { lines: lines(&faults, &before), accesses: accesses(&faults) })
}

/// Returns the mapping for the faults, and the child that shares its pages.
fn prepare(
    cpu: &mut VirtualCpu<'_>,
    kind: Kind,
    file: &File,
) -> Result<(u64, Option<Process>), Stop> {
    let (len, prot) = (PAGES * PAGE_SIZE, Prot::READ | Prot::WRITE);
    let map = |cpu: &VirtualCpu<'_>| match kind {
        Kind::File => cpu.mmap_file(file, (None, len), prot, MapFlags::SHARED, 0),
        _ => cpu.mmap(None, len, prot, MapFlags::PRIVATE | MapFlags::ANONYMOUS),
    };
    let populate = |cpu: &VirtualCpu<'_>, area: u64| {
        (0..PAGES).try_for_each(|page| cpu.touch(area + page * PAGE_SIZE, kind.access()))
    };
    let area = map(cpu)?;
    let child = match kind {
        Kind::Write | Kind::Read => None,
        Kind::Copy => {
            populate(cpu, area)?;
            Some(cpu.fork()?)
        }
        // Reads the pages of the file into memory.
        Kind::File => {
            let other = map(cpu)?;
            populate(cpu, other)?;
            cpu.munmap(other, len)?;
            None
        }
    };
    Ok((area, child))
}

/// Returns the accesses of `faults` by module.
fn accesses(faults: &[Fault]) -> BTreeMap<String, u64> {
    let mut accesses = BTreeMap::new();
    for it in faults.iter().flat_map(|fault| &fault.uses) {
        let inside = it.at.file().rsplit_once("faultless/src/").map_or("", |(_, file)| file);
        let module = inside.split(['/', '.']).next().unwrap_or_default();
        *accesses.entry(module.to_owned()).or_default() += 1;
    }
    accesses
}

/// Returns the shared lines that most faults write: lines used by faults of the other CPU, and
/// lines of pages that existed `before` and are not private to the CPU. A private line of the CPU
/// is written by several of its faults.
fn lines(faults: &[Fault], before: &[LineUse]) -> u64 {
    let before: HashSet<_> = before.iter().map(|it| it.line).collect();
    let mut used: [HashSet<u32>; CPUS] = Default::default();
    let mut writers: HashMap<u32, u32> = HashMap::new();
    for fault in faults {
        used[fault.cpu].extend(fault.uses.iter().map(|it| it.line));
        fault.written().into_iter().for_each(|line| *writers.entry(line).or_default() += 1);
    }
    let shared = |fault: &Fault| {
        let others = &used[(fault.cpu + 1) % CPUS];
        let is_shared =
            |line: &u32| others.contains(line) || before.contains(line) && writers[line] == 1;
        fault.written().iter().filter(|line| is_shared(line)).count() as u64
    };
    let mut lines: Vec<_> = faults.iter().map(shared).collect();
    lines.sort_unstable();
    lines.get(lines.len() / 2).copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_is_counted_under_each_policy() {
        for kind in Kind::ALL {
            for policy in Locking::ALL {
                assert!(COUNTED[kind.name()][policy.name()] > 0.0, "{kind:?} {policy:?}");
            }
        }
        assert_eq!(COUNTED.len(), Kind::ALL.len());
    }

    /// The figures of F4 in the specification. A copy also flushes the TLB of the other CPU.
    #[test]
    fn speculative_fault_writes_the_specified_lines() {
        let profile = Profile::bundled("two-socket").expect("a bundled profile");
        let lines = |kind, policy| {
            let system = subject::machine(&profile, CPUS, MEMORY, 0).expect("memory");
            let settings = Settings::new(&[]).with_locking(policy).with_regime(Regime::OFF);
            settings.apply_to_simulated(&system).expect("valid");
            system.set("fault_around_pages=1").expect("valid");
            run(&system, kind).expect("a simulated run").lines
        };
        let all = |policy| Kind::ALL.map(|kind| lines(kind, policy));
        let speculative = all(Locking::Speculative);
        assert_eq!((speculative[0], speculative[1], speculative[3]), (1, 1, 2));
        let locked = all(Locking::MmapLock);
        assert!(speculative.iter().zip(locked).all(|(ours, theirs)| *ours < theirs), "{locked:?}");
    }
}
