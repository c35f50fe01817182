//! The virtual machine: reproducible runs, the subsystem's laws on many CPUs, and the effect of
//! costs on results.

use faultless::{Advice, MapFlags, PAGE_SIZE, Prot};
use faultless_virtual::profile::BUNDLED;
use faultless_virtual::published;
use faultless_virtual::rates::{Operation, Paths};
use faultless_virtual::{
    Accounts, Config, HotPlace, Meeting, Profile, Spent, Stop, Virtual, VirtualCpu,
};

const RW: Prot = Prot::READ.union(Prot::WRITE);
const PRIVATE: MapFlags = MapFlags::PRIVATE.union(MapFlags::ANONYMOUS);

fn system(cpus: usize, seed: u64, settings: &[&str]) -> Virtual {
    let profile = Profile::bundled("two-socket").unwrap();
    let system =
        Virtual::new(&profile, Config { cpus, memory_bytes: 256 << 20, slow_bytes: 0, seed })
            .unwrap();
    settings.iter().for_each(|setting| system.set(setting).unwrap());
    system
}

/// Maps, touches, discards, touches, protects and unmaps in each thread, and checks the loaded
/// values.
fn churn(cpu: &mut VirtualCpu<'_>, number: usize) -> Result<u64, Stop> {
    let begin = cpu.now();
    for round in 0..3u64 {
        let area = cpu.mmap(None, 16 * PAGE_SIZE, RW, PRIVATE)?;
        for page in 0..16 {
            let mark = round << 32 | (number as u64) << 16 | page;
            cpu.store(area + page * PAGE_SIZE + 8 * (page % 3), mark)?;
        }
        for page in 0..16 {
            let mark = round << 32 | (number as u64) << 16 | page;
            assert_eq!(cpu.load(area + page * PAGE_SIZE + 8 * (page % 3))?, mark);
        }
        cpu.madvise(area + 4 * PAGE_SIZE, 4 * PAGE_SIZE, Advice::DontNeed)?;
        assert_eq!(cpu.load(area + 5 * PAGE_SIZE + 16)?, 0, "a discarded page");
        cpu.mprotect(area, 8 * PAGE_SIZE, Prot::READ)?;
        assert!(
            matches!(cpu.store(area, 1), Err(Stop::Signal { .. })),
            "a store to protected memory"
        );
        cpu.munmap(area, 16 * PAGE_SIZE)?;
    }
    Ok(cpu.now() - begin)
}

/// A CPU takes an interrupt pending at its arrival at a meeting. The other CPU waits for the
/// arrival.
#[test]
fn interrupt_is_taken_at_a_meeting() {
    let (system, meeting) = (system(2, 0, &[]), Meeting::of(2));
    let process = system.process().unwrap();
    let at = 1 << 40;
    system.run(
        2,
        |_| &process,
        |cpu, number| {
            for later in 0..200 {
                if number == 0 {
                    cpu.mmap(at, PAGE_SIZE, RW, PRIVATE | MapFlags::FIXED).unwrap();
                }
                cpu.meet(&meeting);
                cpu.store(at, 1).unwrap();
                cpu.meet(&meeting);
                match number {
                    0 => cpu.munmap(at, PAGE_SIZE).unwrap(),
                    _ => (0..later).for_each(|_| cpu.rest(0)),
                }
                cpu.meet(&meeting);
            }
        },
    );
}

type Run = (Vec<u64>, Accounts, Vec<(&'static str, u64)>, Vec<HotPlace>);

fn run(cpus: usize, seed: u64, settings: &[&str]) -> Run {
    let system = system(cpus, seed, settings);
    let process = system.process().unwrap();
    let took = system.run(cpus, |_| &process, |cpu, number| churn(cpu, number).unwrap());
    let result = (took, system.accounts(), system.counters(), system.hottest(10));
    system.audit(&[&process]).unwrap();
    system.exit(process);
    result
}

/// A steady window changes neither the course of a run nor its figures. The calls, times and waits
/// of the window are a part of those of the run.
#[test]
fn steady_window_does_not_disturb_the_run() {
    const CPUS: usize = 4;
    let run = |warm_up: Option<u64>| {
        let system = system(CPUS, 0, &["prefault_max_order=0"]);
        let process = system.process().unwrap();
        if let Some(warm_up) = warm_up {
            system.measure_steady(CPUS, warm_up);
        }
        let body = |cpu: &mut VirtualCpu<'_>, number| {
            cpu.begin_work();
            let took = churn(cpu, number).unwrap();
            cpu.end_work();
            took
        };
        let took = system.run(CPUS, |_| &process, body);
        let waited: u64 = system.hottest(usize::MAX).iter().map(|place| place.waited).sum();
        let times = Operation::ALL.map(|operation| system.latencies(operation).len() as u64);
        let all = (took, system.accounts(), system.counters());
        (all, waited, times.iter().sum::<u64>(), system.steady())
    };
    let (plain, waited, calls, none) = run(None);
    assert_eq!(none, None);
    // Each CPU makes more than 60 calls and faults.
    let (all, steady_waited, steady_calls, steady) = run(Some(20));
    assert_eq!(all, plain);
    let steady = steady.unwrap();
    assert_eq!((steady.all_calls, steady.calls), (calls, steady_calls));
    assert!(steady_calls > calls / 4 && steady_calls < calls * 3 / 4, "{steady:?} of {calls}");
    assert!(steady_waited > 0 && steady_waited < waited, "{steady_waited} of {waited}");
    let spent: u64 = steady.accounts.spent.iter().sum();
    let of_cpus = spent as f64 / (CPUS as u64 * steady.length) as f64;
    assert!((0.8..1.2).contains(&of_cpus), "{of_cpus} of {steady:?}");
    let faults =
        |counters: &[(&str, u64)]| counters.iter().find(|(name, _)| *name == "faults").unwrap().1;
    assert!(faults(&steady.counters) > 0 && faults(&steady.counters) < faults(&plain.2));
    assert_eq!(steady.starts.len(), 20);
    let started: u64 = steady.starts.iter().sum();
    assert!(started + spent <= plain.1.spent.iter().sum(), "both are parts of the run");
    // More than the run has.
    let (all, .., steady) = run(Some(10_000));
    assert_eq!(all, plain);
    let steady = steady.unwrap();
    assert_eq!((steady.length, steady.calls), (0, 0));
    assert_eq!(steady.fewest, calls / CPUS as u64);
}

#[test]
fn bundled_profiles_are_valid_and_have_sources() {
    for (name, _) in BUNDLED {
        let profile = Profile::bundled(name).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(profile.name, name);
        assert!(profile.numbers().iter().all(|(_, number)| number.source.len() > 10));
    }
}

#[test]
fn published_figures_have_sources() {
    let rows = published::all();
    assert!(rows.len() > 50);
    for row in rows {
        for text in [&row.table, &row.machine, &row.row, &row.unit, &row.source] {
            assert!(!text.trim().is_empty(), "{row:?}");
        }
        assert!(row.cpus >= 1 && row.value.is_finite(), "{row:?}");
    }
}

/// Returns `two-socket` with a section of measured numbers.
fn measured(zero_own: f64, map_ipc: f64) -> Profile {
    let more = format!(
        "[measured]\n{}",
        [
            ("access_ns", 2.0),
            ("allocate_ns", 20.0),
            ("fault_ipc", 1.2),
            ("map_ipc", map_ipc),
            ("brk_ipc", 1.2),
            ("protect_ipc", 1.2),
            ("fork_ipc", 1.2),
            ("zero_own_ns", zero_own),
            ("zero_shared_ns", 200.0),
            ("copy_own_ns", 100.0),
            ("copy_shared_ns", 250.0),
            ("shared_ns", 15.0),
            ("shared_lines", 262_144.0),
        ]
        .map(|(key, value)| format!("{key} = {{ value = {value}, source = \"a test\" }}\n"))
        .concat()
    );
    Profile::parse("measured", &format!("{}\n{more}", BUNDLED[0].1)).unwrap()
}

#[test]
fn profile_round_trips() {
    let mut profile = measured(80.0, 1.5);
    profile.summary = "said \"so\" \\ and so".into();
    profile.number_mut("line.own_ns").unwrap().value = 0.125;
    profile.number_mut("measured.access_ns").unwrap().source = "a \"quoted\" one".into();
    assert!(profile.number_mut("line.nothing").is_none());
    let text = profile.to_toml(&["one", "two"]);
    assert!(text.starts_with("# one\n# two\n"), "{text}");
    let again = Profile::parse("again", &text).unwrap();
    assert_eq!((&again.name, &again.summary), (&profile.name, &profile.summary));
    let all = |profile: &Profile| {
        let numbers = profile.numbers().into_iter();
        numbers.map(|(name, it)| (name, it.value, it.source.clone())).collect::<Vec<_>>()
    };
    assert_eq!(all(&again), all(&profile));
    assert!(all(&again).iter().any(|(name, ..)| name == "measured.shared_lines"));
}

/// Returns the time of one CPU for repeated writes to pages discarded in between, and for pairs of
/// calls, in picoseconds.
fn alone(profile: &Profile) -> [u64; 2] {
    let config = Config { cpus: 1, memory_bytes: 64 << 20, slow_bytes: 0, seed: 0 };
    let system = Virtual::new(profile, config).unwrap();
    system.set("prefault_max_order=0").unwrap();
    let process = system.process().unwrap();
    let took = system.run(
        1,
        |_| &process,
        |cpu, _| {
            let begin = cpu.now();
            let area = cpu.mmap(None, 16 * PAGE_SIZE, RW, PRIVATE).unwrap();
            for _ in 0..8 {
                for page in 0..16 {
                    cpu.store(area + page * PAGE_SIZE, 1).unwrap();
                }
                cpu.madvise(area, 16 * PAGE_SIZE, Advice::DontNeed).unwrap();
            }
            let faulted = cpu.now();
            for _ in 0..8 {
                let area = cpu.mmap(None, 16 * PAGE_SIZE, RW, PRIVATE).unwrap();
                cpu.munmap(area, 16 * PAGE_SIZE).unwrap();
            }
            [faulted - begin, cpu.now() - faulted]
        },
    )[0];
    system.exit(process);
    took
}

#[test]
fn measured_costs_are_charged() {
    let [cold, slow] = alone(&Profile::bundled("two-socket").unwrap());
    let [hot, _] = alone(&measured(80.0, 1.2));
    let [hotter, fast] = alone(&measured(40.0, 2.4));
    // Most of the 128 pages are zeroed in caches: 268 ns less each, and 40 ns less again.
    assert!(cold > hot + 60 * 268_000, "{cold} {hot}");
    assert!(hot > hotter + 60 * 40_000, "{hot} {hotter}");
    assert!(slow > fast, "{slow} {fast}");
}

/// A copy translates each page once, and takes the time of its bytes.
#[test]
fn copy_is_charged_by_its_bytes() {
    let system = system(1, 0, &[]);
    let process = system.process().unwrap();
    let (half, whole) = system.run(
        1,
        |_| &process,
        |cpu, _| {
            let area = cpu.mmap(None, 8 * PAGE_SIZE, RW, PRIVATE).unwrap();
            for word in 0..4 * 512 {
                cpu.store(area + word * 8, word).unwrap();
            }
            let to = area + 5 * PAGE_SIZE;
            let copies = |len| {
                cpu.copy(to, area + 8, len).unwrap();
                let begin = cpu.now();
                cpu.copy(to, area + 8, len).unwrap();
                (0..len / 8).for_each(|word| assert_eq!(cpu.load(to + word * 8), Ok(word + 1)));
                cpu.now() - begin - len / 8 * 1_100
            };
            (copies(PAGE_SIZE), copies(2 * PAGE_SIZE))
        },
    )[0];
    assert!(
        half > 430_000 && whole > 2 * half - 20_000 && whole < 2 * half + 20_000,
        "{half} {whole}"
    );
    system.exit(process);
}

#[test]
fn bad_profiles_are_rejected_with_the_key() {
    let (_, good) = BUNDLED[0];
    let line = good.lines().find(|line| line.starts_with("occupancy")).unwrap();
    for (bad, says) in [
        ("occupancy = { value = 1.5, source = \"x\" }", "line.occupancy = 1.5"),
        ("occupancy = { value = 0.5, source = \" \" }", "needs a source"),
        ("occupancy = { value = 0.5 }", "needs a source"),
        ("occupancy = { value = \"0.5\", source = \"x\" }", "needs a value"),
        ("occupancy = { value = 0.5, source = \"x\", unit = \"\" }", "no other fields"),
        ("occupancy = 0.5", "line.occupancy = 0.5: must be a table"),
        ("", "line.occupancy: the key is missing"),
        ("occupied = 0.5", "line.occupied = 0.5: unknown key; the keys of [line] are own_ns, far"),
        ("[lines]", "[lines]: unknown field; the fields are name, summary, and the sections top"),
    ] {
        let error = Profile::parse("mine", &good.replace(line, bad)).unwrap_err().to_string();
        assert!(error.contains(says) && error.starts_with("mine"), "{error}");
        assert!(error.contains("example: [line] "), "{error}");
    }
    let error = Profile::parse("mine", "name = 3").unwrap_err().to_string();
    assert!(
        error.contains("mine: name = 3: must be a text in quotes; example: name = "),
        "{error}"
    );
    assert!(
        error.contains("mine: [tlb]: the section is missing; example: [tlb] walk_ns"),
        "{error}"
    );
    assert!(!error.contains("[measured]"), "an optional section: {error}");
    let error = Profile::parse("mine", "name = \n").unwrap_err().to_string();
    assert!(error.starts_with("mine: ") && error.contains("line 1"), "{error}");
    let error = Profile::bundled("abacus").unwrap_err().to_string();
    assert!(error.contains("abacus") && error.contains("two-socket"), "{error}");
}

/// With the commented section, too.
#[test]
fn template_is_a_valid_profile_and_explains_every_field() {
    let text = Profile::template("a \"name\"");
    let profile = Profile::parse("template", &text).unwrap();
    assert!(profile.name == "a \"name\"" && profile.measured.is_none());
    assert!(profile.numbers().iter().all(|(_, number)| number.source.starts_with("assumed:")));
    assert!(text.lines().all(|line| !line.starts_with('#') || line.chars().count() <= 110));
    let (before, optional) = text.split_once("# [measured]\n").unwrap();
    let is_field = |line: &&str| line.contains(" = {");
    let optional: Vec<_> = optional.lines().filter(is_field).map(|line| &line[2..]).collect();
    let all = format!("{before}[measured]\n{}", optional.join("\n"));
    let profile = Profile::parse("template", &all).unwrap();
    assert!(profile.measured.is_some());
    for (name, _) in profile.numbers() {
        let (_, key) = name.split_once('.').unwrap();
        let lines: Vec<_> = text.lines().collect();
        let starts =
            |line: &&str| line.trim_start_matches("# ").starts_with(&format!("{key} = {{"));
        let at = lines.iter().position(starts).unwrap_or_else(|| panic!("{name}"));
        assert!(lines[at - 1].starts_with("# ") && lines[at - 1].ends_with('.'), "{name}");
    }
}

#[test]
fn same_seed_gives_the_same_figures() {
    for seed in [0, 7] {
        assert_eq!(run(8, seed, &[]), run(8, seed, &[]), "seed {seed}");
    }
    assert_ne!(run(8, 7, &[]).0, run(8, 8, &[]).0, "another seed is another schedule");
}

#[test]
fn laws_hold_under_each_policy_and_schedule() {
    for policy in ["locking=speculative", "locking=per_vma", "locking=mmap_lock"] {
        for seed in 0..4 {
            run(16, seed, &[policy]);
        }
    }
}

/// Returns the time of 32 CPUs to write 64 pages each of a shared mapping, in picoseconds.
fn faults_side_by_side(policy: &str) -> u64 {
    const CPUS: u64 = 32;
    const PAGES: u64 = 64;
    let system = system(CPUS as usize, 0, &[policy, "prefault_max_order=0"]);
    let process = system.process().unwrap();
    let area = system.run(
        1,
        |_| &process,
        |cpu, _| cpu.mmap(None, CPUS * PAGES * PAGE_SIZE, RW, PRIVATE).unwrap(),
    )[0];
    let took = system.run(
        CPUS as usize,
        |_| &process,
        |cpu, number| {
            let begin = cpu.now();
            for page in 0..PAGES {
                cpu.store(area + (number as u64 * PAGES + page) * PAGE_SIZE, 1).unwrap();
            }
            cpu.now() - begin
        },
    );
    system.audit(&[&process]).unwrap();
    system.exit(process);
    took.into_iter().max().unwrap()
}

#[test]
fn global_lock_for_faults_costs_more_than_no_lock() {
    let [free, per_vma, locked] = ["speculative", "per_vma", "mmap_lock"]
        .map(|policy| faults_side_by_side(&format!("locking={policy}")));
    assert!(2 * free < per_vma && 2 * free < locked, "{free}, {per_vma}, {locked} ps");
}

#[test]
fn thousand_cpus_fault_in_one_space() {
    let system = system(1024, 0, &[]);
    let process = system.process().unwrap();
    let area =
        system.run(1, |_| &process, |cpu, _| cpu.mmap(None, 1024 * 4 * PAGE_SIZE, RW, PRIVATE));
    let area = *area[0].as_ref().unwrap();
    system.run(
        1024,
        |_| &process,
        |cpu, number| {
            for page in 0..4 {
                cpu.store(area + (number as u64 * 4 + page) * PAGE_SIZE, number as u64).unwrap();
            }
        },
    );
    let accounts = system.accounts();
    assert!(accounts.transfers > 0 && accounts.spent[Spent::Pages as usize] > 0);
    system.audit(&[&process]).unwrap();
    system.exit(process);
}

#[test]
fn child_has_its_parents_pages_and_stores_stay_private() {
    let system = system(2, 0, &[]);
    let process = system.process().unwrap();
    system.run(
        1,
        |_| &process,
        |cpu, _| {
            let area = cpu.mmap(None, PAGE_SIZE, RW, PRIVATE).unwrap();
            cpu.store(area, 1).unwrap();
            let child = cpu.fork().unwrap();
            cpu.switch(&child, |child| {
                assert_eq!(child.load(area), Ok(1));
                child.store(area, 2).unwrap();
            });
            cpu.exit(child);
            assert_eq!(cpu.load(area), Ok(1));
        },
    );
    system.audit(&[&process]).unwrap();
    system.exit(process);
}

/// Returns the accesses of `what`, after enough calls for all one-time allocations.
fn accesses(system: &Virtual, mut what: impl FnMut()) -> f64 {
    const TIMES: u32 = 64;
    (0..TIMES).for_each(|_| what());
    let before = system.accounts().accesses;
    (0..TIMES).for_each(|_| what());
    (system.accounts().accesses - before) as f64 / f64::from(TIMES)
}

// Assertions of debug builds access shared memory, too.
#[cfg_attr(debug_assertions, ignore = "of builds without debug assertions")]
#[test]
fn instructions_are_charged_by_observed_accesses() {
    let system = system(2, 0, &["prefault_max_order=0"]);
    let process = system.process().unwrap();
    let pair = |cpu: &VirtualCpu<'_>| {
        accesses(&system, || {
            let area = cpu.mmap(None, 16 * PAGE_SIZE, RW, PRIVATE).unwrap();
            cpu.munmap(area, 16 * PAGE_SIZE).unwrap();
        })
    };
    let brk = |cpu: &VirtualCpu<'_>| {
        let start = cpu.brk(0);
        accesses(&system, || {
            assert_eq!(cpu.brk(start + PAGE_SIZE), start + PAGE_SIZE);
            assert_eq!(cpu.brk(start), start);
        })
    };
    let measured = system.run(
        1,
        |_| &process,
        |cpu, _| {
            const PAGES: u64 = 256;
            let area = cpu.mmap(None, PAGES * PAGE_SIZE, RW, PRIVATE).unwrap();
            let mut page = area;
            let fault = accesses(&system, || {
                cpu.store(page, 1).unwrap();
                page += PAGE_SIZE;
            });
            let (pair, brk) = (pair(cpu), brk(cpu));
            let protect = accesses(&system, || {
                cpu.mprotect(area + 32 * PAGE_SIZE, PAGE_SIZE, Prot::READ).unwrap();
                cpu.mprotect(area + 32 * PAGE_SIZE, PAGE_SIZE, RW).unwrap();
            });
            let forks = |cpu: &mut VirtualCpu<'_>| {
                let before = system.accounts().accesses;
                let child = cpu.fork().unwrap();
                cpu.switch(&child, |_| ());
                cpu.exit(child);
                (system.accounts().accesses - before) as f64
            };
            (0..PAGES).for_each(|page| cpu.store(area + page * PAGE_SIZE, 2).unwrap());
            let fork = forks(cpu) / PAGES as f64;
            [fault, pair, brk, protect, fork]
        },
    );
    // The other CPU runs the space, and is idle.
    let meeting = Meeting::of(2);
    let shared = system.run(
        2,
        |_| &process,
        |cpu, number| {
            cpu.meet(&meeting);
            let done = if number == 0 { [pair(cpu), brk(cpu)] } else { [0.0; 2] };
            cpu.meet(&meeting);
            done
        },
    );
    let paths = Paths::measured();
    let owned = Operation::ALL.map(|operation| paths.of(operation, false).accesses);
    let with_others = [Operation::Map, Operation::Break].map(|it| paths.of(it, true).accesses);
    let recorded = owned.into_iter().chain(with_others);
    let off = |(measured, recorded): (f64, f64)| (measured - recorded).abs() / recorded < 0.02;
    assert!(
        measured[0].into_iter().chain(shared[0]).zip(recorded.clone()).all(off),
        "{measured:?} accesses of {:?}, {:?} with other CPUs; {:?} in instructions.toml",
        Operation::ALL,
        shared[0],
        recorded.collect::<Vec<_>>()
    );
}
