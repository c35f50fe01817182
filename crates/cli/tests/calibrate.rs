//! `faultless calibrate`: a profile accepted by `scale`, predictions beside measurements, and
//! messages about wrong arguments.

mod common;

use common::{Ran, faultless, interrupted, json_lines, value};
use faultless_virtual::Profile;
use nix::sys::signal::Signal;
use std::fs;
use std::time::Duration;

#[test]
fn calibrate_writes_a_profile_that_scale_accepts() {
    let dir = tempfile::tempdir().expect("a directory");
    let [json, profile] = ["x.jsonl", "mine.toml"].map(|name| dir.path().join(name));
    let [json, profile] = [&json, &profile].map(|path| path.to_str().expect("text"));
    let args = ["calibrate", "--quick", "--check", "--output", profile, "--json", json];
    let out = faultless(&args).succeeds();
    for says in ["this-machine", "measured: ", "write fault", "is taken as an exception"] {
        assert!(out.contains(says), "{says}: {out}");
    }
    // Other programs can disturb the measurement, which then permits no conclusion.
    let is_disturbed = out.contains("could not be fitted (*)");
    assert_eq!(out.contains("No order is recommended"), is_disturbed, "{out}");
    assert_eq!(out.contains(" pays: "), !is_disturbed, "{out}");
    let (_, predicted) = out.split_once("the worst row first").expect("a prediction");
    let errors: Vec<f64> = predicted
        .lines()
        .filter_map(|line| {
            line.trim_end().strip_suffix("% |")?.rsplit('|').next()?.trim().parse().ok()
        })
        .collect();
    assert_eq!(errors.len(), 4, "two workloads with one thread and two: {out}");
    assert!(errors.windows(2).all(|pair| pair[0].abs() >= pair[1].abs()), "{errors:?}");
    assert!(predicted.contains(" of 4 rows are within 15 %"), "{out}");

    let text = fs::read_to_string(profile).expect("written");
    let read = Profile::parse("mine.toml", &text).expect("a profile");
    assert_eq!(read.name, "this-machine");
    assert!(text.starts_with("# Written by `faultless calibrate`"), "{text}");
    assert!(read.numbers().iter().all(|(_, number)| number.source != "not measured yet"));

    let lines = json_lines(&fs::read_to_string(json).expect("written"));
    for (name, number) in read.numbers() {
        let written = value(&lines, "native", "default", &name);
        assert_eq!(written, Some(number.value), "{name}");
    }
    for metric in ["host.exception_ns", "host.call_ns"] {
        assert!(value(&lines, "native", "default", metric).is_some_and(|it| it >= 0.0), "{metric}");
    }
    let predicted = lines.iter().filter(|line| line["metric"] == "predicted_operations_per_second");
    assert_eq!(predicted.count(), 4);

    let out = faultless(&["scale", "pft", "--cpus", "2", "--profile", profile]).succeeds();
    assert!(out.contains("simulated: this-machine"), "{out}");
}

#[test]
fn interrupted_calibration_leaves_the_existing_profile() {
    let dir = tempfile::tempdir().expect("a directory");
    let profile = dir.path().join("mine.toml");
    fs::write(&profile, "is unchanged").expect("written");
    for (quick, at, signal, code) in [
        (&[][..], "cache lines ...", Signal::SIGINT, 130),
        (&["--quick"], "the fit ...", Signal::SIGTERM, 143),
    ] {
        let args = ["calibrate", "--output", profile.to_str().expect("text")];
        let (status, out) = interrupted(&[&args[..], quick].concat(), at, Duration::ZERO, signal);
        assert_eq!(status, Some(code), "{out}");
        assert!(out.contains("the results are not complete"), "{out}");
        assert_eq!(fs::read_to_string(&profile).expect("there"), "is unchanged");
    }
}

#[test]
fn wrong_arguments_are_explained() {
    let dir = tempfile::tempdir().expect("a directory");
    let profile = dir.path().join("mine.toml");
    fs::write(&profile, "name = 3").expect("written");
    let profile = profile.to_str().expect("text");
    for (args, says) in [
        (&["--profile", "two-sockets"][..], "did you mean two-socket?"),
        (&["--profile", profile], "mine.toml"),
        (&["--profile", profile, "--output", "x.toml"], "cannot be used with"),
        (&["--set", "lockin=per_vma"], "did you mean locking?"),
        (&["--set", "locking=per_vma"], "--set locking=per_vma: knobs apply"),
        (&["pft"], "unexpected argument"),
    ] {
        let error = faultless(&[&["calibrate"], args].concat()).fails(2);
        assert!(error.contains(says), "{args:?}: {error}");
    }
    let Ran { out, err, code } = faultless(&["calibrate", "--output", "/nowhere/mine.toml"]);
    assert!(code == Some(1) && out.is_empty(), "{out}{err}");
    assert!(
        err.contains("--output /nowhere/mine.toml: the directory /nowhere does not exist"),
        "{err}"
    );
}
