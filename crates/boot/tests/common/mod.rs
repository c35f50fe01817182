//! Booting programs in tests.

#![allow(dead_code, reason = "each test program uses a part")]

use faultless_boot::report::Report;
use faultless_boot::{BootError, Clock, End, Limits, Machine, Program, Streams, guest};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// The time limit of the slowest test, if other tests share the CPUs.
const PATIENCE: Duration = Duration::from_secs(600);

/// Returns one CPU that counts instructions.
pub fn deterministic() -> Machine {
    Machine { clock: Clock::Deterministic, ..small(1) }
}

/// Returns four parallel CPUs, in the host's time.
pub fn parallel() -> Machine {
    small(4)
}

/// Returns whether `FAULTLESS_LONG` is set, as `.ci/long` does.
pub fn is_long() -> bool {
    std::env::var_os("FAULTLESS_LONG").is_some()
}

/// Returns the machines of most tests: four parallel CPUs, and in a [long](is_long) run also one
/// CPU that counts instructions.
pub fn machines() -> Vec<Machine> {
    if is_long() { vec![deterministic(), parallel()] } else { vec![parallel()] }
}

fn small(cpus: u16) -> Machine {
    // Every run accounts for every frame at its end.
    Machine { cpus, memory: 512 << 20, check: true, ..Machine::default() }
}

/// Adds a small second node of memory, in which pages stay unless a program moves them, with
/// deferred flushes or without.
pub fn tiered(machine: Machine, deferred: bool) -> Machine {
    let nodes = "15:1".parse().expect("shares");
    let stay = "numa_balancing=disable".to_owned();
    let words = vec![format!("set=deferred_flush={}", u8::from(deferred)), stay];
    Machine { memory: 96 << 20, nodes, words, ..machine }
}

/// The result of a program.
pub struct Ran {
    pub end: End,
    pub output: String,
    pub errors: String,
    pub report: Report,
}

impl Ran {
    /// Checks that the program exited with `status`.
    #[track_caller]
    pub fn exited(self, status: u8) -> Self {
        assert!(self.end == End::Exited(status), "expected exit status {status}; {self}");
        self
    }
}

impl std::fmt::Display for Ran {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "the program ended with: {}", self.end)?;
        writeln!(f, "--- output\n{}--- errors\n{}", self.output, self.errors)?;
        writeln!(f, "--- messages\n{}", self.report.messages.join("\n"))
    }
}

/// Runs `program` on `machine`.
pub fn boot(machine: &Machine, program: &Program) -> Ran {
    try_boot(machine, program).expect("the machine starts")
}

/// Runs like [`boot`], if the machine may be rejected before its start.
pub fn try_boot(machine: &Machine, program: &Program) -> Result<Ran, BootError> {
    Machine::ready().expect("QEMU is installed and the kernel is built");
    let (mut output, mut errors) = (Vec::new(), Vec::new());
    let limits = Limits { timeout: Some(PATIENCE), ..Limits::default() };
    let run = machine.run(program, Streams::keep(&mut output, &mut errors), &limits)?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Ok(Ran { end: run.end, output: text(&output), errors: text(&errors), report: run.report })
}

/// Runs the guest program `name`.
pub fn run(machine: &Machine, name: &str, args: &[&str]) -> Ran {
    let program = Program::guest(guest(name).expect("embedded guest programs")).args(args);
    boot(machine, &program)
}

/// Runs a guest program of checks; at least `least` checks must run, and all checks must pass.
#[track_caller]
pub fn passes(machine: &Machine, name: &str, args: &[&str], least: usize) -> Ran {
    let ran = run(machine, name, args).exited(0);
    let passed = ran.output.lines().filter(|line| line.starts_with("ok ")).count();
    assert!(passed >= least && !ran.output.contains("FAIL"), "{passed} of {least}; {ran}");
    ran
}

/// Runs a command of the host, which must succeed; returns its output.
#[track_caller]
pub fn host(command: &mut Command, hint: &str) -> String {
    let output = match command.output() {
        Ok(output) => output,
        Err(error) => panic!("{command:?}: {error}; {hint}"),
    };
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}: {errors}; {hint}", output.status);
    String::from_utf8(output.stdout).expect("output in UTF-8")
}

/// Returns the path of Debian's static busybox.
pub fn busybox() -> &'static Path {
    let path = Path::new("/bin/busybox");
    assert!(path.exists(), "{} is missing: apt-get install busybox-static", path.display());
    path
}
