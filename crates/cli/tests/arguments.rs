//! Help, and messages about wrong arguments: the error, its place, and valid values.

mod common;

use common::{command, faultless};

#[test]
fn help_has_examples() {
    let help = faultless(&["--help"]).succeeds();
    for command in [
        "compare",
        "stat",
        "text",
        "replay",
        "record",
        "advise",
        "run",
        "boot",
        "versus",
        "scale",
        "calibrate",
        "profile",
        "workloads",
        "knobs",
        "counters",
    ] {
        assert!(help.contains(command), "{command}");
    }
    for command in [
        "compare",
        "stat",
        "text",
        "replay",
        "record",
        "advise",
        "run",
        "boot",
        "versus",
        "scale",
        "calibrate",
        "profile",
    ] {
        let help = faultless(&[command, "--help"]).succeeds();
        assert!(help.contains(&format!("Examples:\n  faultless {command}")), "{help}");
    }
    for command in ["compare", "stat", "text", "replay", "boot", "versus", "scale", "calibrate"] {
        let help = faultless(&[command, "--help"]).succeeds();
        assert!(help.contains("--set") && help.contains("--json"), "{help}");
    }
}

/// A wrapped example is unclear.
#[test]
fn examples_fit_a_terminal() {
    let all = [
        "",
        "compare",
        "stat",
        "text",
        "replay",
        "record",
        "advise",
        "run",
        "boot",
        "versus",
        "scale",
        "calibrate",
    ];
    for command in all {
        let args: Vec<_> = [command, "--help"].into_iter().filter(|arg| !arg.is_empty()).collect();
        let help = faultless(&args).succeeds();
        let (prose, examples) = help.split_once("Examples:").expect("examples");
        let longest = |text: &str| text.lines().map(|line| line.chars().count()).max();
        assert!(longest(examples) <= Some(80), "{examples}");
        assert!(longest(prose) <= Some(100), "{prose}");
    }
}

#[test]
fn lists_contain_every_workload_knob_and_counter() {
    let workloads = faultless(&["workloads"]).succeeds();
    for info in faultless_workload::all() {
        assert!(workloads.contains(info.name) && workloads.contains(info.summary));
    }
    let knobs = faultless(&["knobs"]).succeeds();
    let defaults = [
        ("locking", "speculative"),
        ("speculative_page_fault", ""),
        ("anon_vma_check", "late"),
        ("frame_limit", ""),
        ("max_map_count", "65530"),
        ("file_limit", "1099511627776"),
        ("stack_limit", "8388608"),
        ("fault_around_pages", "16"),
        ("prefault_max_order", "5"),
        ("zeroed_pool", "0"),
        ("zero_on_free", "0"),
        ("edit_in_place", "1"),
        ("huge_text", "always"),
        ("deferred_flush", "1"),
        ("map_apart", "256"),
        ("shard_after", "4"),
    ];
    assert_eq!(faultless::KNOBS.len(), defaults.len());
    for (name, values, meaning) in faultless::KNOBS {
        let row = knobs.lines().find(|line| line.split_whitespace().next() == Some(name));
        let (first, shown) =
            row.and_then(|row| row.trim_end().rsplit_once(meaning)).expect("a row");
        let default = first.split_once(values).map(|(_, default)| default.trim());
        let (_, expected) = defaults.iter().find(|(knob, _)| knob == name).expect("a default");
        assert_eq!((default, shown), (Some(*expected), ""), "{name} in {knobs}");
    }
    let counters = faultless(&["counters"]).succeeds();
    for counter in faultless::Counter::ALL {
        let names = |line: &&str| line.split_whitespace().next() == Some(counter.name());
        let line = counters.lines().find(names).expect("a line for each");
        assert!(line.trim_end().ends_with(counter.meaning()) && counter.meaning().len() > 10);
    }
}

#[test]
fn wrong_arguments_are_named_and_explained() {
    let order = ["prefault_max_order=10", "0 to 9"];
    let pool = ["zeroed_pool=18446744073709551615", "0 to 1099511627776 frames"];
    let wrong: [(&[&str], &[&str]); 62] = [
        (&["text", "--size", "1"], &["--size 1: expected", "from 4K to 64T"]),
        (&["text", "--passes", "0"], &["--passes 0: expected", "a number from 1"]),
        (&["text", "--processes", "1"], &["--processes", "a number from 2 to 64"]),
        (&["stat", "pft", "--set", order[0]], &order),
        (&["compare", "--set", order[0]], &order),
        (&["compare", "--set", "zeroed_pool=some"], &["zeroed_pool=some", "frames"]),
        (&["stat", "pft", "--set", pool[0]], &pool),
        (&["replay", "sort", "--set", "zeroed_pool=18446744073709551616"], &pool[1..]),
        (&["stat", "pft", "--set", "frame_limit=0"], &["frame_limit=0", "1 to 1099511627776"]),
        (&["stat", "pft", "--set", "max_map_count=2147483648"], &["1 to 2147483647 areas"]),
        (&["stat", "pft", "--set", "stack_limit=-1"], &["stack_limit=-1", "4096 to "]),
        (&["stat", "pft", "size=65T"], &["size=65T", "from 4K to 64T"]),
        (&["stat", "pft", "seconds=1e9"], &["seconds=1e9", "from 0 to 86400"]),
        (&["boot", "--timeout", "1e30", "x"], &["--timeout", "1000 days at most"]),
        (&["replay", "sort", "--set", order[0]], &order),
        (&["versus", "--set", order[0]], &order),
        (&["stat", "pfft"], &["'pfft'", "page_fault1", "similar value exists: 'pft'"]),
        (&["stat", "pft", "sice=1M"], &["\"sice\"", "did you mean size?"]),
        (&["stat", "pft", "size=1"], &["size=1", "multiple of 4096"]),
        (&["stat", "pft", "size"], &["\"size\"", "name=value"]),
        (&["stat", "pft", "--set", "colour=red"], &["--set", "colour=red", "anon_vma_check"]),
        (&["stat", "pft", "--set", "locking=none"], &["--set", "locking=none", "speculative"]),
        (&["stat", "pft", "--set", "locking"], &["--set", "KNOB=VALUE"]),
        (&["stat", "pft", "--machine", "vax"], &["--machine", "vax", "native"]),
        (&["stat", "pft", "--machine", "linux", "--set", "locking=per_vma"], &["--set", "linux"]),
        (
            &["compare", "--only", "pfft"],
            &["\"pfft\": no such", "small_allocs", "did you mean pft?"],
        ),
        (&["compare", "/no/such/file"], &["faultless: \"/no/such/file\": no such", "or file"]),
        (&["compare", "--threads", "0"], &["--threads", "a number from 1 to 256"]),
        (&["compare", "llm", "--cpus", "4", "--threads", "2"], &["--threads: with --cpus, llm"]),
        (&["replay", "no-such-recording"], &["no-such-recording", "python"]),
        (&["replay", "pyhton"], &["pyhton: no such file", "did you mean python?"]),
        (&["stat", "pft", "--set", "lockin=per_vma"], &["did you mean locking?"]),
        (&["record", "-o", "x"], &["CMD"]),
        (&["boot"], &["<PROGRAM>"]),
        (&["boot", "--cpus", "0", "x"], &["--cpus", "a number from 1 to 64"]),
        (&["boot", "--cpus", "many", "x"], &["--cpus", "a number from 1 to 64"]),
        (&["boot", "/dev/zero"], &["/dev/zero: a device, not a program"]),
        (&["replay", "/dev/zero"], &["/dev/zero", "neither a perf.data file", "[00, 00"]),
        (&["scale", "pft", "--profile", "/dev/zero"], &["--profile /dev/zero: a device"]),
        (&["scale", "pft", "--seed", "x"], &["--seed", "a number from 0 to 1844674407370955"]),
        (&["text", "--passes", "x"], &["--passes x: expected", "a number from 1"]),
        (&["text", "--set", "huge_text=never"], &["huge_text=never", "both settings"]),
        (
            &["replay", "sort", "--policies", "--set", "locking=mmap_lock"],
            &["--set locking=mmap_lock: --policies compares all policies"],
        ),
        (&["boot", "--memory", "1M", "x"], &["--memory", "1M", "32M"]),
        (&["boot", "--memory", "lots", "x"], &["--memory", "lots", "512M"]),
        (&["boot", "--swap", "512K", "x"], &["--swap", "512K", "from 1M"]),
        (&["boot", "--swap", "1537K", "x"], &["--swap", "1537K", "whole MiB"]),
        (&["boot", "--swap", "much", "x"], &["--swap", "much", "256M"]),
        (&["boot", "--nodes", "1:0", "x"], &["--nodes", "1:0", "from 1 to 65535"]),
        (&["boot", "--nodes", "2", "x"], &["--nodes", "1:1 for two nodes"]),
        (&["boot", "--env", "PATH", "x"], &["--env", "PATH", "NAME=VALUE"]),
        (&["boot", "--timeout=-1", "x"], &["--timeout", "above 0"]),
        (&["boot", "--timeout", "0", "x"], &["--timeout", "above 0"]),
        (&["boot", "--clock", "wall", "x"], &["--clock", "wall", "deterministic"]),
        (&["boot", "--set", "locking=none", "x"], &["--set", "locking=none", "speculative"]),
        (&["boot", "no-such-program"], &["no-such-program: No such file"]),
        (&["boot", "no-such-program", "--cpus", "0"], &["no-such-program: No such file"]),
        (&["boot", "/no/such/program"], &["/no/such/program: No such file"]),
        (&["boot", "--files", "/no/such", "workload"], &["--files /no/such: No such file"]),
        (
            &["boot", "--files", "/etc/passwd", "workload"],
            &["--files /etc/passwd: not a directory"],
        ),
        (&["versus", "--cpus", "2,1"], &["--cpus", "a number from 2 to 64"]),
        (&["versus", "--set", "colour=red"], &["--set", "colour=red"]),
    ];
    for (args, expected) in wrong {
        let error = faultless(args).fails(2);
        for expected in expected {
            assert!(error.contains(expected), "{args:?} does not print {expected:?}:\n{error}");
        }
    }
}

#[test]
fn knob_with_two_values_is_refused() {
    for (command, sets) in [
        (&["stat", "pft", "size=64K"][..], ["locking=per_vma", "locking=mmap_lock"]),
        (&["stat", "pft", "size=64K"], ["locking=per_vma", "speculative_page_fault=1"]),
        (&["replay", "sort"], ["prefault_max_order=0", "prefault_max_order=3"]),
        (&["text"], ["max_map_count=9", "max_map_count=9"]),
        (&["scale", "pft"], ["zeroed_pool=1", "zeroed_pool=2"]),
        (&["compare", "--only", "pft"], ["zeroed_pool=1", "zeroed_pool=2"]),
        (&["boot", "x"], ["locking=per_vma", "locking=mmap_lock"]),
        (&["versus"], ["locking=per_vma", "locking=mmap_lock"]),
        (&["calibrate", "--check"], ["map_apart=1", "map_apart=2"]),
    ] {
        let (first, rest) = command.split_at(1);
        let args = [first, &["--set", sets[0], "--set", sets[1]], rest].concat();
        let error = faultless(&args).fails(2);
        let expected = format!("--set {}: ", sets[1]);
        assert!(error.contains(&expected), "{command:?}: {error}");
        assert!(error.contains("has another value, too"), "{command:?}: {error}");
    }
}

#[test]
fn profile_from_an_endless_pipe_is_refused() {
    let (mut reader, writer) = std::io::pipe().expect("a pipe");
    let mut scale = command(&["scale", "pft", "--profile", "/dev/stdin"]);
    let mut endless = std::process::Command::new("yes").stdout(writer).spawn().expect("yes");
    let read = scale.stdin(reader.try_clone().expect("a pipe")).output().expect("it starts");
    endless.kill().expect("it runs");
    endless.wait().expect("it ended");
    std::io::copy(&mut reader, &mut std::io::sink()).expect("the rest is read");
    let error = String::from_utf8_lossy(&read.stderr);
    assert_eq!(read.status.code(), Some(2), "{error}");
    assert!(error.contains("--profile /dev/stdin: not a profile: larger than 1 MiB"), "{error}");
}

#[test]
fn unwritable_result_file_is_reported_before_the_run() {
    for args in [
        &["stat", "pft", "size=64K", "--json", "/nowhere/x.jsonl"][..],
        &["compare", "--quick", "--only", "pft", "--json", "/nowhere/x.jsonl"],
        &["compare", "--quick", "--only", "pft", "--html", "/nowhere/x.html"],
        &["replay", "python", "--json", "/nowhere/x.jsonl"],
        &["replay", "python", "--html", "/nowhere/x.html"],
    ] {
        let ran = faultless(args);
        assert_eq!(ran.out, "");
        let error = ran.fails(1);
        let [.., option, file] = args else { unreachable!("each has an option") };
        let expected = format!("{option} {file}: the directory /nowhere does not exist");
        assert!(error.contains(&expected), "{error}");
    }
}

#[test]
fn boot_rejects_files_that_are_no_programs() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("program");
    let path = file.to_str().expect("text");
    // This test is linked dynamically.
    let own = std::env::current_exe().expect("the path of this test");
    let own = std::fs::read(own).expect("a readable file");
    for (contents, expected) in [
        (&b"#!/bin/sh\n"[..], "ELF header: not an ELF file but a script"),
        (b"\x7fELF", "ELF header: the file ends at 0x4"),
        (&own[..0x60], "program headers at offset 0x40"),
        (&own, "dynamically linked: requires the interpreter"),
    ] {
        std::fs::write(&file, contents).expect("written");
        let ran = faultless(&["boot", path]);
        assert_eq!(ran.out, "");
        let error = ran.fails(2);
        assert!(
            error.starts_with(&format!("faultless: {path}: ")) && error.contains(expected),
            "{error}"
        );
    }
}

#[test]
fn missing_qemu_error_names_the_install_command() {
    let error = command(&["versus"]).env("PATH", "/nowhere").output().expect("the command starts");
    let printed = String::from_utf8_lossy(&error.stderr);
    assert_eq!(error.status.code(), Some(1), "{printed}");
    assert!(printed.contains("apt-get install qemu-system-x86"), "{printed}");
}

/// The commands that run a program of the user.
#[test]
fn missing_program_is_a_usage_error() {
    let dir = tempfile::tempdir().expect("a directory");
    let output = dir.path().join("perf.data");
    let output = output.to_str().expect("text");
    let plain = dir.path().join("plain");
    std::fs::write(&plain, "#!/bin/sh\n").expect("written");
    for program in ["/no/such/program", "./nosuch", plain.to_str().expect("text")] {
        // Independent of the presence of perf, and of the permission to use it.
        let error = faultless(&["record", "-o", output, "--", program]).fails(2);
        assert!(error.contains(&format!("cannot run {program}: ")), "{error}");
        let error = faultless(&["run", "--apply", "no-thp", "--", program]).fails(2);
        assert!(error.contains(&format!("cannot run {program}: ")), "{error}");
        let error = faultless(&["boot", program]).fails(2);
        assert!(error.contains(&format!("{program}: ")), "{error}");
    }
    assert!(!std::path::Path::new(output).exists());
    let error = faultless(&["record", "-o", "-", "--", "true"]).fails(2);
    assert!(error.contains("-o -: standard output belongs to the program"), "{error}");
}
