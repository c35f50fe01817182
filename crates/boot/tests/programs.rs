//! Programs that were not written for this kernel: busybox, C against musl and glibc, and files
//! that are no programs. Their output here equals their output on the host.

mod common;

use common::{boot, busybox, deterministic, host, machines, try_boot};
use faultless_boot::{BootError, End, Input, Limits, Machine, Program, Streams};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a temporary directory")
}

/// Copies a program, in a separate process. A child started concurrently by another test could keep
/// a file open that this process writes, and a file open for writing cannot be executed.
fn copy(from: &Path, to: &Path) {
    host(Command::new("cp").arg(from).arg(to), "a copied file");
}

/// A shell script that forks, pipes and sorts a megabyte.
#[test]
fn busybox_runs_a_script() {
    let files = folder();
    let (shell, script) = (files.path().join("busybox"), files.path().join("script.sh"));
    copy(busybox(), &shell);
    fs::copy(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/script.sh"), &script)
        .expect("a copied file");
    let scratch = folder();
    let there = host(
        Command::new(&shell).arg("sh").arg(&script).arg(&shell).arg(scratch.path()),
        "the script runs on the host",
    );
    assert!(there.ends_with("done\n"), "{there}");
    let program = Program::file(&shell).expect("a valid program").files(files.path()).args([
        "sh",
        "/script.sh",
        "/busybox",
        "/tmp",
    ]);
    for machine in machines() {
        let ran = boot(&machine, &program).exited(0);
        assert_eq!(ran.output, there, "{ran}");
    }
}

/// Compiles the C program with `compiler`, and runs it on the host and here.
#[track_caller]
fn c_program(compiler: &str, hint: &str) {
    let files = folder();
    let program: PathBuf = files.path().join("program");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/program.c");
    let mut compile = Command::new(compiler);
    compile.args(["-O1", "-static", "-pthread", "-o"]).arg(&program).arg(source).arg("-lm");
    host(&mut compile, hint);
    let arguments = ["one", "two words", ""];
    let there = host(
        Command::new(&program).args(arguments).env_clear().env("VARIABLE", "value"),
        "a program that runs on the host",
    );
    assert!(there.ends_with("done\n"), "{there}");
    let program = Program::file(&program).expect("a valid program").args(arguments);
    let program = program.env("VARIABLE=value");
    for machine in machines() {
        let ran = boot(&machine, &program).exited(0);
        assert_eq!(ran.output, there, "{ran}");
        assert_eq!(ran.errors, "to standard error\n", "{ran}");
    }
}

#[test]
fn c_with_musl() {
    c_program("musl-gcc", "apt-get install musl-tools");
}

#[test]
fn c_with_glibc() {
    c_program("cc", "apt-get install gcc libc6-dev");
}

/// The exit status is the program's, or identifies the signal that ended the program.
#[test]
fn statuses() {
    let files = folder();
    let shell = files.path().join("busybox");
    copy(busybox(), &shell);
    let run = |command: &str| {
        let program = Program::file(&shell).expect("a valid program").files(files.path());
        boot(&deterministic(), &program.args(["sh", "-c", command]))
    };
    run("exit 0").exited(0);
    run("exit 77").exited(77);
    let killed = run("kill -TERM $$").exited(128 + 15);
    assert_eq!(killed.report.signal, Some(15), "{killed}");
    run("no_such_command").exited(127);
}

/// The program is the child of an init, which reaps the program's orphans, and which no signal
/// ends; the end of the program is the end of the machine, even with other processes left.
#[test]
fn an_init() {
    let files = folder();
    let shell = files.path().join("busybox");
    copy(busybox(), &shell);
    let script = "echo $$ $PPID; (/busybox sleep 0.01 &); /busybox sleep 0.2; echo /proc/[0-9]*;
        kill -KILL 1; echo $?; /busybox sleep 1000 & (/busybox sleep 1000 &); exit 5";
    let program = Program::file(&shell).expect("a valid program").files(files.path());
    let program = program.args(["sh", "-c", script]);
    for machine in machines() {
        let ran = boot(&machine, &program).exited(5);
        assert_eq!(ran.output, "2 1\n/proc/1 /proc/2\n0\n", "{ran}");
    }
}

/// Input of any bytes arrives completely and quickly: one FIFO of the port at a time.
#[test]
fn input_arrives_completely() {
    let input: Vec<u8> = (0..20_000u32).map(|at| (at ^ at >> 8) as u8).collect();
    let program = Program::file(busybox()).expect("a valid program").args(["cat"]);
    let mut output = Vec::new();
    let streams = Streams {
        input: Input::Bytes(input.clone()),
        output: Box::new(&mut output),
        errors: Box::new(io::sink()),
    };
    let limits = Limits { timeout: Some(Duration::from_secs(60)), stop: None };
    let run = Machine::default().run(&program, streams, &limits).expect("the machine starts");
    assert_eq!(run.end, End::Exited(0));
    assert!(
        output == input,
        "{} of {} bytes arrived, or the bytes differ",
        output.len(),
        input.len()
    );
}

/// A program starts in the root of its files, or in the requested directory.
#[test]
fn directories_to_start_in() {
    let files = folder();
    let shell = files.path().join("busybox");
    copy(busybox(), &shell);
    fs::create_dir_all(files.path().join("some/where")).expect("a created file");
    let program = || {
        let program = Program::file(&shell).expect("a valid program").files(files.path());
        program.args(["pwd"])
    };
    assert_eq!(boot(&deterministic(), &program()).exited(0).output, "/\n");
    for directory in ["/some/where", "some/where", "some/../some/where/"] {
        let ran = boot(&deterministic(), &program().cwd(directory)).exited(0);
        assert_eq!(ran.output, "/some/where\n", "{directory}");
    }
    for directory in ["/no/where", "/busybox"] {
        let refused = try_boot(&deterministic(), &program().cwd(directory)).err();
        assert!(
            matches!(&refused, Some(BootError::NoDirectory { directory: named }) if named == directory),
            "{refused:?}"
        );
    }
    // Only the kernel knows the files it makes.
    let ran = boot(&deterministic(), &program().cwd("/proc/none")).exited(126);
    assert!(ran.report.messages.join("\n").contains("/proc/none: ENOENT"), "{ran}");
}

/// Files that are no programs are reported, and neither run nor harm the kernel.
#[test]
fn files_that_are_no_programs() {
    let files = folder();
    let whole = fs::read(busybox()).expect("a readable file");
    let mut wrong_entry = whole.clone();
    wrong_entry[24..32].copy_from_slice(&0xffff_8000_0000_0000u64.to_le_bytes());
    let mut wrong_table = whole.clone();
    wrong_table[32..40].copy_from_slice(&u64::MAX.to_le_bytes());
    let broken: [(&str, &[u8]); 6] = [
        ("empty", b""),
        ("text", b"This is no program.\n"),
        ("header", &whole[..64]),
        ("table", &wrong_table),
        ("entry", &wrong_entry),
        ("part", &whole[..4096]),
    ];
    for (name, bytes) in broken {
        let file = files.path().join(name);
        fs::write(&file, bytes).expect("a written file");
        let ran = boot(&Machine::default(), &Program::unchecked(&file).expect("a readable file"));
        assert!(matches!(ran.end, End::Exited(1..)), "{name}: {ran}");
    }
}
