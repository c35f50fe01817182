//! Each command that runs a workload or a recording, with small sizes: its text output and its
//! JSON.

mod common;

use common::{faultless, json_lines, send, value};
use faultless_trace::event::{
    Access, Backing, Event, Header, Kind, ProcessInfo, Prot, Recorded, ThreadInfo,
};
use faultless_trace::{Trace, compact, recordings};
use nix::sys::signal::Signal;
use serde_json::json;
use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};
use std::time::Duration;

/// Parameters for a short run of each workload.
const SMALL: [(&str, &[&str]); 20] = [
    ("pft", &["size=1M", "threads=2"]),
    ("page_fault1", &["size=256K", "passes=2"]),
    ("page_fault_read", &["size=1M", "threads=2"]),
    ("page_fault1_churn", &["size=1M", "threads=2"]),
    ("page_fault2", &["size=256K", "threads=2"]),
    ("page_fault3", &["size=256K", "threads=2"]),
    ("text", &["size=256K", "threads=2"]),
    ("discard", &["size=256K", "threads=2"]),
    ("vma_mmap", &["chunks=16", "threads=2"]),
    ("vma_mmap_touch", &["chunks=16", "order=shuffled", "threads=2"]),
    ("vma_fault", &["chunks=16", "threads=2"]),
    ("vma_unmap", &["chunks=16", "order=shuffled", "threads=2"]),
    ("vma_unmap_untouched", &["chunks=16", "threads=2"]),
    ("brk1", &["passes=50"]),
    ("mmap1", &["passes=50", "threads=2"]),
    ("small_allocs", &["size=400K", "threads=2"]),
    ("ebizzy", &["chunk=64K", "records=10"]),
    ("forks", &["image=256K", "dirty=8", "fresh=8", "processes=3"]),
    ("xsbench", &["fast=4M", "ratio=1:1", "lookups=200", "threads=2"]),
    ("llm", &["fast=2M", "ratio=1:1", "passes=1", "threads=2"]),
];

#[test]
fn every_workload_runs_on_both_machines() {
    assert!(faultless_workload::all().iter().all(|info| SMALL.iter().any(|s| s.0 == info.name)));
    for (name, params) in SMALL {
        for machine in ["native", "linux"] {
            let mut args = vec!["stat", name];
            args.extend_from_slice(params);
            args.extend_from_slice(&["--machine", machine]);
            let out = faultless(&args).succeeds();
            assert!(out.contains(&format!("Performance counter stats for '{name} ")), "{out}");
            assert!(out.contains(&format!("on {machine}")), "{out}");
            let counts =
                |name: &str| out.lines().any(|line| line.split_whitespace().nth(1) == Some(name));
            assert!(counts("faults"), "{out}");
            for line in ["seconds time elapsed", "seconds user", "seconds sys"] {
                assert!(out.contains(line), "{out}");
            }
            assert_eq!(out.contains("pages/cpu/s"), name == "pft", "{out}");
        }
    }
}

#[test]
fn knobs_change_the_counters() {
    let run = |setting: &str| {
        let alone = "prefault_max_order=0";
        let args = ["stat", "pft", "size=1M", "--set", setting, "--set", alone, "--json", "-"];
        let out = faultless(&args).succeeds();
        // The output of JSON contains only JSON.
        json_lines(&out)
    };
    let speculative = run("speculative_page_fault=1");
    assert_eq!(value(&speculative, "native", "locking=speculative", "spf"), Some(256.0));
    assert_eq!(value(&speculative, "native", "", "mmap_lock_read"), Some(0.0));
    let locked = run("locking=mmap_lock");
    assert_eq!(value(&locked, "native", "locking=mmap_lock", "spf"), Some(0.0));
    assert_eq!(value(&locked, "native", "", "mmap_lock_read"), Some(256.0));
    assert_eq!(value(&locked, "native", "", "faults"), Some(256.0));
}

/// A fault maps 16 pages around, or one page of 2 MiB. Walks for code larger than the TLBs are one
/// per call, or one per page of 2 MiB.
#[test]
fn code_in_large_pages_is_compared() {
    let args = ["text", "--size", "16M", "--passes", "3", "--json", "-"];
    let ran = faultless(&args);
    let table = ran.err.clone();
    let lines = json_lines(&ran.succeeds());
    let pages = f64::from(16 << 20 >> 12);
    for expected in
        ["page faults", "7,728", "1,219,514,499", "-95.74 %", "simulated", "frames that 2"]
    {
        assert!(table.contains(expected), "no {expected:?} in {table}");
    }
    let alone: Vec<_> = lines.iter().filter(|line| line["cpus"] == 1).cloned().collect();
    let together: Vec<_> = lines.iter().filter(|line| line["cpus"] == 2).cloned().collect();
    let (off, on) = ("huge_text=never", "huge_text=always");
    let count =
        |setting: &str, metric: &str| value(&alone, "native", setting, metric).expect(metric);
    assert_eq!(count(off, "operations"), 3.0 * pages);
    assert_eq!(count(off, "file_pages"), pages);
    assert_eq!(count(off, "faults"), pages / 16.0);
    assert_eq!(count(off, "iTLB-load-misses"), 3.0 * pages + pages / 16.0);
    assert_eq!(value(&together, "native", off, "shared_frames"), Some(pages));
    let folios = pages / 512.0;
    assert_eq!((count(on, "faults"), count(on, "thp_file_mapped")), (folios, folios));
    // Two walks each: of the fault, and of the access after the fault.
    assert_eq!(count(on, "iTLB-load-misses"), 2.0 * folios);
    assert_eq!(count(on, "file_pages"), pages);
    assert_eq!(value(&together, "native", on, "shared_frames"), Some(pages));
}

#[test]
fn results_contain_parameters_and_knobs_in_force() {
    let args = ["stat", "discard", "size=256K", "threads=2", "--json", "-"];
    let native = [&args[..], &["--set", "max_map_count=99", "--set", "zeroed_pool=64"]].concat();
    let lines = json_lines(&faultless(&native).succeeds());
    let params = json!({
        "threads": 2, "mode": "threads", "seconds": 0.0,
        "size": 256 << 10, "piece": 64 << 10, "passes": 4, "role": "both", "refill": "no",
    });
    for line in &lines {
        // Given parameters and defaults.
        assert_eq!(line["params"], params);
        let knobs = &line["knobs"];
        assert_eq!((&knobs["locking"], &knobs["zeroed_pool"]), (&json!("speculative"), &json!(64)));
        let stack = faultless::Knobs::default().stack_limit();
        assert_eq!((&knobs["max_map_count"], &knobs["stack_limit"]), (&json!(99), &json!(stack)));
    }
    let linux = [&args[..], &["--machine", "linux"]].concat();
    let lines = json_lines(&faultless(&linux).succeeds());
    assert!(lines.iter().all(|line| line["params"] == params && line["knobs"] == json!({})));
    let lines = json_lines(&faultless(&["replay", "sort", "--json", "-"]).succeeds());
    assert!(lines.iter().all(|line| line["params"]["recording"] == "sort"), "{lines:?}");
}

/// Sizes of chunks, numbers of chunks and of threads multiply.
#[test]
fn machine_has_the_memory_required_by_the_workload() {
    let many = ["chunk=64K", "chunks=512", "threads=8", "passes=1"];
    for workload in ["vma_mmap", "vma_mmap_touch", "vma_fault", "vma_unmap", "vma_unmap_untouched"]
    {
        for order in ["order=private", "order=shuffled"] {
            faultless(&[&["stat", workload, order], &many[..]].concat()).succeeds();
        }
    }
    faultless(&["stat", "discard", "size=32M", "piece=32M", "passes=1", "threads=8"]).succeeds();
    faultless(&["stat", "ebizzy", "chunks=64", "chunk=4M", "records=2", "threads=4"]).succeeds();
    faultless(&["stat", "forks", "image=4K", "dirty=0", "fresh=65536", "processes=1"]).succeeds();
}

/// The host would overcommit the memory, and kill the command in the middle.
#[test]
fn too_large_memory_is_rejected_before_the_run() {
    for machine in ["native", "linux"] {
        let error = faultless(&["stat", "pft", "size=30T", "--machine", machine]).fails(1);
        for expected in ["needs 3", "TiB of memory", "available", "reserved for other programs"] {
            assert!(error.contains(expected), "no {expected:?} in {error}");
        }
    }
}

#[test]
fn too_little_memory_is_a_readable_error() {
    let args = ["stat", "pft", "size=4M", "--set", "frame_limit=100"];
    let error = faultless(&args).fails(1);
    assert!(error.contains("pft on native") && error.contains("out of memory"), "{error}");
}

/// Linux has one error for both.
#[test]
fn error_mentions_the_limit_of_vmas() {
    let args = ["stat", "vma_mmap", "order=shuffled", "threads=2", "--set"];
    let error = faultless(&[&args[..], &["max_map_count=9"]].concat()).fails(1);
    assert!(error.contains("or out of VMAs, and --set max_map_count=N allows more"), "{error}");
    faultless(&[&args[..], &["max_map_count=2048"]].concat()).succeeds();
}

#[test]
fn comparison_of_one_workload() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("c.jsonl");
    let file = path.to_str().expect("text");
    let only = ["--only", "pft", "--only", "small_allocs"];
    let args = [&["compare", "--quick", "--details", "--json", file], &only[..]].concat();
    let out = faultless(&args).succeeds();
    for expected in [
        "faults per second, median of 6",
        "mmap_lock",
        "per_vma",
        "Summary: locking, prefault off",
        "linux-",
        "#",
        "pages per second, median of 6",
        "order 5, zeroed",
        "times fewer faults",
        "Summary: prefault",
    ] {
        assert!(out.contains(expected), "no {expected:?} in\n{out}");
    }
    assert!(!out.contains('\u{1b}'), "no control sequences without a terminal");
    let lines = json_lines(&std::fs::read_to_string(&path).expect("written"));
    for setting in ["mmap_lock,anon_vma_check=late", "per_vma", "speculative"] {
        let rate = value(&lines, "native", setting, "faults_per_second");
        assert!(rate.is_some_and(|rate| rate > 0.0), "{setting}");
    }
    assert!(value(&lines, "linux-", "default", "faults_per_second").is_some());
    let is_pft =
        |line: &serde_json::Value| line["workload"] == "pft" && line["machine"] == "native";
    let pft: Vec<_> = lines.into_iter().filter(is_pft).collect();
    let count = |setting: &str, metric: &str| value(&pft, "native", setting, metric).expect(metric);
    assert!(count("locking=speculative", "spf") > 0.9 * count("locking=speculative", "faults"));
    assert_eq!(count("locking=mmap_lock", "spf"), 0.0);
    assert_eq!(count("locking=mmap_lock", "repetitions"), 6.0);
    // Policies are compared with prefault off, for any default.
    for locking in ["mmap_lock", "per_vma", "speculative"] {
        assert_eq!(count(&format!("locking={locking}"), "prefault_page"), 0.0, "{locking}");
    }
    // Prefault: 128 MiB, each page once.
    let regime = |setting: &str, metric: &str| {
        let setting =
            format!("locking=speculative,anon_vma_check=late,prefault_max_order={setting}");
        let of = |line: &&serde_json::Value| line["setting"] == setting && line["metric"] == metric;
        pft.iter().rfind(of).expect(metric)["value"].as_f64().expect("a number")
    };
    let faults = ["0", "3", "5", "5,zeroed_pool=40960"].map(|setting| regime(setting, "faults"));
    assert_eq!(faults[0], 32768.0);
    assert!(faults[1] * 7.9 <= faults[0] && faults[2] * 31.0 <= faults[0], "{faults:?}");
    assert!(regime("5", "zeroed_in_fault") >= 32768.0);
    assert_eq!(regime("5,zeroed_pool=40960", "zeroed_in_fault"), 0.0);
    assert!(regime("5,zeroed_pool=40960", "zeroed_pool_hit") >= 32768.0);
}

/// A result on one screen: the compared subjects and the noise first, then four tables with their
/// verdicts, and every figure in JSON.
#[test]
fn comparison_fits_one_screen() {
    let ran = faultless(&["compare", "--quick", "--json", "-"]);
    let screen = ran.err.clone();
    let lines = json_lines(&ran.succeeds());
    let begin = screen.find("Compared: ").expect("a printed header");
    let (progress, screen) = screen.split_at(begin);
    assert!(progress.contains("pft, 16 simulated CPUs ..."), "{progress}");
    let rows: Vec<_> = screen.lines().collect();
    assert!(rows.len() <= 60, "{} lines:\n{screen}", rows.len());
    assert!(rows.iter().all(|row| row.chars().count() <= 120), "{screen}");
    let parts =
        ["Compared", "Machine", "Noise", "Faults", "Many CPUs", "Real programs", "Defaults"];
    let places: Vec<_> = parts
        .iter()
        .map(|part| rows.iter().position(|row| row.starts_with(&format!("{part}: "))).expect(part))
        .collect();
    assert!(places.is_sorted(), "{places:?}\n{screen}");
    for table in places[3..].windows(2).chain([&[places[6], rows.len()][..]]) {
        let verdict = |row: &&str| row.starts_with("Verdict");
        assert!(rows[table[0]..table[1]].iter().any(verdict), "{screen}");
    }
    for recording in recordings::all() {
        let row = |row: &&&str| row.starts_with(&format!("| {} ", recording.name));
        let row = rows.iter().find(row).expect(recording.name);
        let words = ["no difference within the noise", "less time", "more time"];
        assert!(words.iter().any(|words| row.contains(words)) && !row.contains('~'), "{row}");
    }
    let of = |machine, setting: &str, metric: &str| value(&lines, machine, setting, metric);
    let written = |policy: &str| of("simulated-two-socket", policy, "shared_lines_written");
    assert_eq!((written("speculative"), written("mmap_lock")), (Some(1.0), Some(2.0)));
    for metric in ["instructions_besides_filling", "faults_saved", "faults_per_second_low"] {
        assert!(of("native", "", metric).is_some_and(|value| value > 0.0), "{metric}");
    }
    for metric in ["host.exception_ns", "noise.repetitions", "noise.halves_median"] {
        assert!(of("linux-", "", metric).is_some_and(|value| value >= 0.0), "{metric}");
    }
    let simulated = |workload, setting: &str| {
        let of: Vec<_> =
            lines.iter().filter(|line| line["workload"] == workload).cloned().collect();
        value(&of, "simulated-", setting, "operations_per_second").expect(workload)
    };
    assert!(simulated("mmap1", "speculative") > simulated("mmap1", "locking=mmap_lock"));
    assert!(
        simulated("vma_unmap_untouched", "shard_after=4")
            > simulated("vma_unmap_untouched", "shard_after=0")
    );
}

#[test]
fn selected_orders_are_the_columns_of_prefault() {
    let chosen = ["--set", "prefault_max_order=2", "--set", "locking=per_vma"];
    let args = [&["compare", "--quick", "--details", "--only", "sort"], &chosen[..]].concat();
    let out = faultless(&args).succeeds();
    for expected in [
        "order 2, zeroed against off",
        "(locking=per_vma)",
        "upper bound of faults saved (perfect predictor)",
        "unused",
        "mean",
    ] {
        assert!(out.contains(expected), "no {expected:?} in\n{out}");
    }
    assert!(!out.contains("order 3") && !out.contains("order 5"), "{out}");
}

#[test]
fn replay_reports_the_effect_of_prefault() {
    let args = ["replay", "sort", "--set", "prefault_max_order=5", "--json", "-"];
    let ran = faultless(&args);
    let stderr = ran.err.clone();
    let lines = json_lines(&ran.succeeds());
    for what in ["faults saved", "a perfect predictor", "of prefaulted pages", "resident pages"] {
        assert!(stderr.contains(what), "no {what:?} in\n{stderr}");
    }
    let count =
        |metric: &str| value(&lines, "native", "prefault_max_order=5", metric).expect(metric);
    let (touches, saved) = (count("first_touches"), count("faults_saved"));
    assert!(saved > 0.8 * touches, "{saved} of {touches}");
    assert!(count("faults") < 0.2 * touches);
    let alone = faultless(&["replay", "sort", "--set", "prefault_max_order=0"]).succeeds();
    assert!(!alone.contains("faults saved"), "{alone}");
}

#[test]
fn replay_draws_its_faults() {
    let dir = tempfile::tempdir().expect("a directory");
    let plot = dir.path().join("gcc.svg");
    faultless(&["replay", "gcc", "--plot", plot.to_str().expect("text")]).succeeds();
    let drawn = std::fs::read_to_string(plot).expect("written");
    assert!(drawn.starts_with("<svg") && drawn.trim_end().ends_with("</svg>"));
    for words in ["prefault off", "prefault up to order 5", "faults", "#FFFFFF"] {
        assert!(drawn.contains(words), "{words}");
    }
}

#[test]
fn selected_policies_are_the_columns() {
    let args = [
        "compare",
        "--quick",
        "--details",
        "--only",
        "brk1",
        "--set",
        "locking=per_vma",
        "--set",
        "locking=speculative",
    ];
    let out = faultless(&args).succeeds();
    assert!(!out.contains("mmap_lock  "), "{out}");
    assert!(out.contains("speculative against per_vma"), "{out}");
}

#[test]
#[ignore = "takes half a minute; `.ci/long` runs it"]
fn every_bundled_recording_replays_without_a_signal() {
    for recording in recordings::all() {
        for setting in ["locking=mmap_lock", "locking=per_vma", "locking=speculative"] {
            let out = faultless(&["replay", recording.name, "--set", setting]).succeeds();
            assert!(out.contains("assumed"), "{out}");
            assert!(out.contains(&format!("'replay:{}' on native ({setting}", recording.name)));
            assert!(!out.contains("fault_sigsegv") && !out.contains("fault_oom"), "{out}");
        }
    }
}

#[test]
fn replay_takes_the_recorded_number_of_faults() {
    for recording in recordings::all() {
        let summary = recording.trace().expect("good").summary();
        let args = ["replay", recording.name, "--set", "prefault_max_order=0", "--json", "-"];
        let ran = faultless(&args);
        assert!(!ran.err.contains("warning"), "{}", ran.err);
        let lines = json_lines(&ran.succeeds());
        let name = format!("replay:{}", recording.name);
        assert!(lines.iter().all(|line| line["workload"] == name));
        let count = |metric: &str| value(&lines, "native", "speculative", metric).expect(metric);
        let all = summary.user_faults + summary.kernel_faults;
        let recorded = (all - summary.unserved_faults) as f64;
        let faults = count("faults");
        assert!((faults - recorded).abs() < 0.02 * recorded, "{faults} of {recorded}");
        assert_eq!((count("recorded_faults"), count("replayed_faults")), (recorded, faults));
        assert_eq!(count("fault_difference_allowed"), 2.0);
    }
}

/// Recorded faults that are missing in the replay cause a warning, with any options.
#[test]
fn replay_warns_if_its_faults_differ_from_the_recording() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("odd.fltrace");
    let (start, prot) = (1 << 40, Prot::READ | Prot::WRITE);
    let fault = |page: u64| Kind::first(start + page * 4096, Access::Write);
    // The last pages fault twice in user mode, without an unmapping in between.
    let map = Kind::Map { start, len: 100 * 4096, prot, flags: 0x22, backing: Backing::Anon };
    let kinds = std::iter::once(map).chain((0..100).map(fault)).chain((90..100).map(fault));
    let trace = Trace {
        header: Header { page_size: 4096, recorded: Recorded::all(), ..Header::default() },
        processes: vec![ProcessInfo { parent: None, pid: None }],
        threads: vec![ThreadInfo { process: 0, name: String::new() }],
        events: kinds.map(|kind| Event { time_us: 0, thread: 0, kind }).collect(),
        ..Trace::default()
    };
    compact::write(&path, &trace).expect("written");
    let file = path.to_str().expect("text");
    for more in [&["--set", "prefault_max_order=0"][..], &["--policies"], &[]] {
        let ran = faultless(&[&["replay", file, "--json", "-"], more].concat());
        assert!(ran.err.contains("warning: the replay of odd differs from"), "{}", ran.err);
        assert!(ran.err.contains("9.09 % fewer"), "{}", ran.err);
        let lines = json_lines(&ran.succeeds());
        let part = value(&lines, "native", "", "fault_difference").expect("a share");
        assert!((part + 100.0 / 11.0).abs() < 1e-9, "{part}");
    }
}

/// A count of a recording has one name and one value, in `replay` and in `compare`.
#[test]
fn replay_and_compare_report_the_same_counts() {
    let json =
        |args: &[&str]| json_lines(&faultless(&[args, &["--json", "-"]].concat()).succeeds());
    let compared = json(&["compare", "--quick", "--only", "sort"]);
    let policies = json(&["replay", "sort", "--policies"]);
    let prefaulted = json(&["replay", "sort"]);
    let at = |line: &serde_json::Value| {
        ["machine", "workload", "setting", "metric", "unit"].map(|field| line[field].clone())
    };
    // Both write the same figures of each policy.
    for line in &policies {
        assert!(compared.iter().any(|other| at(other) == at(line)), "{line}");
    }
    let counts = |lines: &[serde_json::Value], metrics: &[&str]| -> Vec<_> {
        let of = |metric: &&str| value(lines, "native", "", metric).expect(metric);
        metrics.iter().map(of).collect()
    };
    let recorded = ["recorded_faults", "replayed_faults", "faults", "fault_difference"];
    assert_eq!(counts(&compared, &recorded), counts(&policies, &recorded));
    let saved = [
        "first_touches",
        "faults_saved",
        "faults_saved_upper_bound",
        "peak_resident_pages_off",
        "peak_resident_pages",
    ];
    assert_eq!(counts(&compared, &saved), counts(&prefaulted, &saved));
}

/// The count is the same in the table, in JSON, of `replay` and of `compare`, each time.
#[test]
#[ignore = "takes half a minute; `.ci/long` runs it"]
fn unused_prefaulted_pages_are_counted_once() {
    let args = ["replay", "cargo", "--set", "prefault_max_order=3", "--json", "-"];
    let count = |lines: &[serde_json::Value]| {
        let of = |line: &&serde_json::Value| {
            line["metric"] == "prefault_wasted"
                && line["setting"].as_str().is_some_and(|it| it.ends_with("prefault_max_order=3"))
        };
        let mut counts: Vec<_> =
            lines.iter().filter(of).map(|line| line["value"].clone()).collect();
        assert_eq!(counts.len(), 1, "{counts:?}");
        counts.remove(0).as_u64().expect("a count")
    };
    let [first, again] = [(); 2].map(|()| {
        let ran = faultless(&args);
        let stderr = ran.err.clone();
        let wasted = count(&json_lines(&ran.succeeds()));
        let rows: Vec<_> = stderr.lines().filter(|line| line.contains("unused")).collect();
        let [row] = rows[..] else { panic!("{rows:?}") };
        let count = row.split_whitespace().next().expect("a count").replace(',', "");
        assert_eq!(count, wasted.to_string(), "{row}");
        wasted
    });
    assert_eq!(first, again);
    let only = ["compare", "--quick", "--only", "cargo", "--set", "prefault_max_order=3"];
    let lines = faultless(&[&only[..], &["--set", "zeroed_pool=0", "--json", "-"]].concat());
    let lines = json_lines(&lines.succeeds());
    assert_eq!(count(&lines), first);
}

#[test]
#[ignore = "takes half a minute; `.ci/long` runs it"]
fn policies_are_compared_with_the_prefault_that_is_set() {
    let run = |set: &[&str]| {
        let args = [&["replay", "sort", "--policies", "--json", "-"], set].concat();
        json_lines(&faultless(&args).succeeds())
    };
    for locking in ["mmap_lock", "per_vma", "speculative"] {
        let off = run(&[]);
        assert_eq!(value(&off, "native", locking, "prefault_page"), Some(0.0));
        let setting = "prefault_max_order=3,zeroed_pool=64";
        let set = ["--set", "prefault_max_order=3", "--set", "zeroed_pool=64"];
        let with = run(&set);
        let prefaulted = value(&with, "native", locking, "prefault_page");
        assert!(prefaulted.is_some_and(|pages| pages > 0.0), "{locking}");
        let counted = |line: &serde_json::Value| {
            line["setting"].as_str().is_some_and(|it| it.ends_with(setting))
        };
        assert!(with.iter().all(counted), "{with:?}");
    }
}

#[test]
fn replay_compares_policies_side_by_side() {
    let out = faultless(&["replay", "redis", "--policies"]).succeeds();
    for policy in ["mmap_lock", "per_vma", "speculative"] {
        assert!(out.contains(policy), "{out}");
    }
}

#[test]
fn damaged_recordings_are_rejected_with_their_offset() {
    let dir = tempfile::tempdir().expect("a directory");
    let good = recordings::find("sort").expect("shipped").bytes;
    let mut flipped = good.to_vec();
    // A flip in the checksum. A flip in the packed body may still unpack, depending on the
    // recording.
    flipped[12] ^= 0x55;
    let files: [(&str, &[u8], &str); 5] = [
        ("empty.fltrace", b"", "the file is empty"),
        ("other.txt", b"hello, world, hello", "the file begins with the text \"hello, world, he"),
        ("other.bin", b"\x01\x02", "the file begins with the bytes [01, 02]"),
        ("short.fltrace", &good[..good.len() / 2], "is truncated"),
        ("flipped.fltrace", &flipped, "the checksum does not match"),
    ];
    for (name, bytes, expected) in files {
        let path = dir.path().join(name);
        std::fs::write(&path, bytes).expect("written");
        let ran = faultless(&["replay", path.to_str().expect("text")]);
        assert_eq!(ran.out, "");
        let error = ran.fails(2);
        assert!(error.contains(name) && error.contains(expected), "{error}");
        assert_eq!(error.contains("trace of addresses"), name.starts_with("other"), "{error}");
    }
    let error = faultless(&["replay", "sorted"]).fails(2);
    assert!(error.contains("trace of addresses") && error.contains("cc1-addresses"), "{error}");
}

/// The output of valgrind, compressed, and through a pipe. The trace is read twice.
#[test]
fn addresses_are_replayed_through_tlbs() {
    let dir = tempfile::tempdir().expect("a directory");
    let trace: String = (0..2 * 4096u64)
        .map(|call| format!("I  {:08x},3\n L 1fff000100,8\n", 0x40_0000 + call % 4096 * 4096))
        .collect();
    let trace =
        format!("==7== Lackey, an example Valgrind tool\n{trace}==7== Exit code:       0\n");
    let path = dir.path().join("mine.lackey");
    std::fs::write(&path, &trace).expect("written");
    let file = path.to_str().expect("text");
    let pipe = dir.path().join("pipe.lackey");
    assert!(Command::new("mkfifo").arg(&pipe).status().expect("mkfifo runs").success());
    let writer = {
        let (pipe, trace) = (pipe.clone(), trace.clone());
        std::thread::spawn(move || std::fs::write(pipe, trace).expect("somebody reads"))
    };
    let piped = faultless(&["replay", pipe.to_str().expect("text"), "--json", "-"]).succeeds();
    writer.join().expect("a pipe that was read to the end");

    let out = faultless(&["replay", file]).succeeds();
    for expected in [
        "mine: a trace of addresses",
        "8,192 fetches, 8,192 loads, 0 stores",
        "1 extent of 16,384 KiB",
        "simulated",
    ] {
        assert!(out.contains(expected), "no {expected:?} in {out}");
    }
    let lines = json_lines(&faultless(&["replay", file, "--json", "-"]).succeeds());
    let of = |setting: &str, metric: &str| {
        value(&lines, "tlb-simulated", setting, metric).expect(metric)
    };
    // 16 MiB of code, starting at a multiple of 2 MiB: twice the second level's pages, or 8 of its
    // entries.
    assert_eq!((of("text=4K", "iTLB-load-misses"), of("text=4K", "text_folios")), (8192.0, 0.0));
    assert_eq!((of("2M_whole", "iTLB-load-misses"), of("2M_whole", "text_folios")), (8.0, 8.0));
    assert_eq!(of("2M_whole", "fetches_in_folios"), 8192.0);
    assert_eq!(of("2M_aligned", "iTLB-load-misses"), 8.0);
    let strip = |lines: &[serde_json::Value]| -> Vec<_> {
        lines.iter().map(|line| (line["metric"].clone(), line["value"].clone())).collect()
    };
    assert_eq!(strip(&json_lines(&piped)), strip(&lines));

    let drawn = ["replay", file, "--plot", "/nowhere/x.svg"];
    for args in
        [&drawn[..], &["replay", file, "--policies"], &["replay", file, "--set", "zeroed_pool=1"]]
    {
        let error = faultless(args).fails(2);
        assert!(error.contains("a trace of addresses") && error.contains(args[2]), "{error}");
    }
    let error = faultless(&["compare", "--only", file]).fails(2);
    assert!(error.contains("mine.lackey") && error.contains("no faults and calls"), "{error}");
    std::fs::write(&path, format!("{trace} L 12,x\n")).expect("written");
    let error = faultless(&["replay", file]).fails(2);
    assert!(error.contains("mine.lackey: line 16387: the size is not a number"), "{error}");
    std::fs::write(&path, "==7== Lackey, an example Valgrind tool\n").expect("written");
    let error = faultless(&["replay", file]).fails(2);
    assert!(error.contains("mine: the trace contains no accesses"), "{error}");
}

/// Each has more pages of code than the first level of the TLBs has entries.
#[test]
fn bundled_addresses_are_replayed() {
    for name in recordings::names().filter(|name| recordings::addresses(name).is_some()) {
        let lines = json_lines(&faultless(&["replay", name, "--json", "-"]).succeeds());
        let of = |setting: &str, metric: &str| value(&lines, "tlb", setting, metric).expect(metric);
        let walks = ["4K", "2M_whole", "2M_aligned"].map(|setting| of(setting, "iTLB-load-misses"));
        assert!(
            walks[0] > 128.0 && walks[0] >= walks[1] && walks[1] > walks[2],
            "{name} {walks:?}"
        );
        assert!(of("4K", "fetches") > 500_000.0, "{name}");
        assert_eq!(of("4K", "dTLB-load-misses"), of("2M_whole", "dTLB-load-misses"), "{name}");
    }
    assert_eq!(recordings::names().filter(|name| recordings::addresses(name).is_some()).count(), 2);
}

/// `text` reports its progress, and Ctrl-C ends it in the middle of a run, with partial results.
#[test]
fn interrupted_text_ends_soon() {
    // The second run of each setting takes minutes.
    let args = ["text", "--size", "64K", "--passes", "300000000", "--json", "-"];
    let mut child = common::command(&args)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the command starts");
    let mut printed = BufReader::new(child.stderr.take().expect("piped"));
    let mut line = String::new();
    printed.read_line(&mut line).expect("text");
    assert_eq!(line, "huge_text=never, 1 process ...\n");
    let asked = std::time::Instant::now();
    send(&child, Signal::SIGINT);
    assert_eq!(child.wait().expect("the command ends").code(), Some(130));
    assert!(asked.elapsed() < Duration::from_secs(20), "after {:?}", asked.elapsed());
    let mut rest = String::new();
    printed.read_to_string(&mut rest).expect("text");
    assert!(rest.contains("Interrupted: the results are not complete."), "{rest}");
}

#[test]
fn interrupted_comparison_prints_its_results_so_far() {
    let mut child = common::command(&["compare", "--details", "--only", "pft", "--only", "brk1"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the command starts");
    // The first of two workloads takes seconds from the line that announces it, and its first runs
    // take a fraction of a second.
    let mut progress = BufReader::new(child.stderr.take().expect("piped"));
    let mut line = String::new();
    while line != "pft ...\n" {
        line.clear();
        progress.read_line(&mut line).expect("text");
    }
    std::thread::sleep(Duration::from_millis(1200));
    send(&child, Signal::SIGINT);
    let mut out = String::new();
    child.stdout.take().expect("piped").read_to_string(&mut out).expect("text");
    assert_eq!(child.wait().expect("the command ends").code(), Some(130));
    for expected in ["pft", "Summary", "Interrupted"] {
        assert!(out.contains(expected), "no {expected:?} in\n{out}");
    }
    assert!(!out.contains("brk1"), "{out}");
}
