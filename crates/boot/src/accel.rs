//! The accelerator of a machine: the host's processor, or QEMU.
//!
//! An accessible KVM device does not guarantee that machines run: nested virtualisation may be off,
//! incomplete, or hang. So the [probe](kvm_works) boots the kernel and runs a program that faults,
//! on the requested number of CPUs, within one second.

use crate::embedded::guest;
use crate::machine::{End, Machine, Program};
use crate::qemu::{self, Clock, Input, Limits, Streams};
use std::fmt;
use std::fs::File;
use std::io;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// The device of KVM.
const DEVICE: &str = "/dev/kvm";
/// The time limit of the probe's machine, and of the wait for its end: a process may hang in the
/// kernel.
const LIMIT: Duration = Duration::from_millis(800);
const ANSWER: Duration = Duration::from_millis(950);
/// The program of the probe.
const PROGRAM: &str = "workload";
const ARGS: [&str; 2] = ["pft", "size=64K"];

/// The accelerator, which executes instructions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Accel {
    /// QEMU, which translates the instructions.
    #[default]
    Tcg,
    /// The host's processor, through KVM.
    Kvm,
}

impl Accel {
    /// Returns QEMU's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tcg => "tcg",
            Self::Kvm => "kvm",
        }
    }
}

/// Writes a description, with QEMU's name.
impl fmt::Display for Accel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcg => "emulated (tcg)",
            Self::Kvm => "on the processor (kvm)",
        })
    }
}

/// Checks whether this process may use KVM.
///
/// # Errors
/// The reason.
pub fn kvm_opens() -> Result<(), String> {
    let opened = File::options().read(true).write(true).open(DEVICE);
    opened.map(drop).map_err(|error| match error.kind() {
        io::ErrorKind::PermissionDenied => {
            format!("{DEVICE}: {error}; `sudo usermod -aG kvm $USER` and a new login may help")
        }
        _ => format!("{DEVICE}: {error}"),
    })
}

/// Checks whether machines of `cpus` CPUs and `memory` bytes run under KVM, by running a machine
/// for at most one second.
///
/// # Errors
/// The reason.
pub fn kvm_works(cpus: u16, memory: u64) -> Result<(), String> {
    kvm_opens()?;
    let guest = guest(PROGRAM).map_err(|error| error.to_string())?;
    let machine =
        Machine { cpus, memory, accel: Accel::Kvm, clock: Clock::Real, ..Machine::default() };
    let (say, hear) = mpsc::channel();
    // The machine is killed when the thread that started it ends, so this thread waits for the
    // machine's end.
    thread::spawn(move || {
        let streams = Streams {
            input: Input::None,
            output: Box::new(io::sink()),
            errors: Box::new(io::sink()),
        };
        let limits = Limits { timeout: Some(LIMIT), ..Limits::default() };
        let run = machine.run(&Program::guest(guest).args(ARGS), streams, &limits);
        // The receiver may have stopped waiting.
        let _ = say.send(run.map(|run| run.end));
    });
    match hear.recv_timeout(ANSWER) {
        Ok(Ok(End::Exited(0))) => Ok(()),
        Ok(Ok(End::TimedOut)) | Err(_) => Err("a test machine did not end within a second".into()),
        Ok(Ok(End::Silent(output))) if !output.is_empty() => {
            // The first error is the cause of the following errors.
            Err(format!("QEMU: {}", qemu::errors(&output).first().unwrap_or(&"no error")))
        }
        Ok(Ok(end)) => Err(format!("a test machine ended with an error: {end}")),
        Ok(Err(error)) => Err(error.to_string()),
    }
}
