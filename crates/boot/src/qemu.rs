//! Running QEMU: arguments, consoles, and the end.
//!
//! A guest has up to three consoles for output. Each is a pipe, and a thread copies its bytes to
//! the [`Streams`] as they arrive. The run is over when QEMU has closed all pipes.

use crate::accel::Accel;
use crate::error::BootError;
use crate::nodes::Nodes;
use command_fds::{CommandFdExt, FdMapping};
use nix::sys::prctl;
use nix::sys::signal::Signal;
use nix::sys::stat;
use nix::unistd;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

const QEMU: &str = "qemu-system-x86_64";
/// The interval between two checks of the limits by a waiter.
const PATIENCE: Duration = Duration::from_millis(50);
/// The time limit of a program after its output was closed. A program that is about to end exits
/// with its own status.
const UNREAD: Duration = Duration::from_secs(1);
/// The first byte of the input: it is discarded when the kernel enables the serial port's FIFOs.
const FIRST: u8 = 0x16;
/// The byte at the end of the input, as on a terminal; and the escape byte before a literal byte.
const END_OF_INPUT: u8 = 0x04;
const LITERAL: u8 = 0x10;
/// The descriptors of the debug consoles in QEMU.
const ERRORS: i32 = 3;
const REPORT: i32 = 4;
const OUTPUT: i32 = 5;
/// The debug consoles: the port, QEMU's name, and the descriptor. QEMU blocks the guest at each
/// byte until the pipe has accepted it, so these consoles lose no bytes. QEMU's serial port drops
/// bytes while the pipe is full.
const CONSOLES: [(&str, &str, i32); 3] =
    [("0xea", "errors", ERRORS), ("0xe9", "report", REPORT), ("0xeb", "output", OUTPUT)];

/// The clock of a machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Clock {
    /// The host's time; CPUs run in parallel.
    #[default]
    Real,
    /// An instruction takes one nanosecond and one tick of `rdtsc`; CPUs take turns. Runs of the
    /// same files repeat to the last instruction, unless the user types input.
    Deterministic,
}

impl Clock {
    /// Returns the accelerator's arguments. Counting instructions requires translation, independent
    /// of the requested accelerator.
    fn args(self, accel: Accel) -> &'static [&'static str] {
        match (self, accel) {
            (Self::Real, Accel::Kvm) => &["-accel", "kvm"],
            (Self::Real, Accel::Tcg) => &["-accel", "tcg,thread=multi"],
            (Self::Deterministic, _) => &[
                "-accel",
                "tcg,thread=single",
                "-icount",
                "shift=0,sleep=off",
                "-seed",
                "1",
                "-rtc",
                "base=2026-01-01T00:00:00,clock=vm",
            ],
        }
    }
}

/// The input of a program.
#[derive(Clone, Debug, Default)]
pub enum Input {
    /// No input: the end of file, at once.
    #[default]
    None,
    /// The input of this process.
    Inherit,
    /// These bytes.
    Bytes(Vec<u8>),
}

impl Input {
    /// Returns whether the input is known to be empty.
    pub(crate) fn is_none(&self) -> bool {
        match self {
            Self::None => true,
            Self::Bytes(bytes) => bytes.is_empty(),
            // A background job may not read its terminal.
            Self::Inherit => elsewhere(io::stdin()) || is_null(io::stdin()),
        }
    }
}

/// The input and outputs of a program.
pub struct Streams<'a> {
    /// Standard input.
    pub input: Input,
    /// Standard output.
    pub output: Box<dyn Write + Send + 'a>,
    /// Standard error.
    pub errors: Box<dyn Write + Send + 'a>,
}

impl Streams<'_> {
    /// Returns the streams of this process.
    pub fn inherit() -> Self {
        let (output, errors) = (Box::new(io::stdout()), Box::new(io::stderr()));
        Self { input: Input::Inherit, output, errors }
    }
}

impl<'a> Streams<'a> {
    /// Without input; both outputs are stored.
    pub fn keep(output: &'a mut Vec<u8>, errors: &'a mut Vec<u8>) -> Self {
        Self { input: Input::None, output: Box::new(output), errors: Box::new(errors) }
    }
}

impl fmt::Debug for Streams<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Streams").field("input", &self.input).finish_non_exhaustive()
    }
}

/// The limits of the wait for a machine.
#[derive(Default)]
pub struct Limits<'a> {
    /// The maximum run time, in the host's time.
    pub timeout: Option<Duration>,
    /// Stops the run once this function returns `true`; called about twenty times a second.
    pub stop: Option<&'a (dyn Fn() -> bool + Sync)>,
}

impl fmt::Debug for Limits<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Limits").field("timeout", &self.timeout).finish_non_exhaustive()
    }
}

/// The reason for ending a run from outside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Cut {
    Timeout,
    Stop,
    /// The reader closed the output.
    Closed,
    /// The output cannot be written: the destination, and the reason.
    Unwritten(String),
}

/// The result of a run.
#[derive(Debug)]
pub(crate) struct Ended {
    pub cut: Option<Cut>,
    pub status: ExitStatus,
    /// QEMU's own error message.
    pub complaint: String,
    /// The bytes from the kernel's own console.
    pub report: Vec<u8>,
    /// The numbers of bytes from the output and the error output.
    pub received: [u64; 2],
    pub wall: Duration,
}

/// Returns QEMU's version, if it is installed.
pub(crate) fn version() -> Result<String, BootError> {
    let output = Command::new(QEMU).arg("--version").output().map_err(missing)?;
    Ok(String::from_utf8_lossy(&output.stdout).lines().next().unwrap_or_default().to_owned())
}

/// Why QEMU did not start.
fn missing(error: io::Error) -> BootError {
    match error.kind() {
        io::ErrorKind::NotFound => BootError::NoQemu { program: QEMU },
        _ => BootError::Qemu(format!("{QEMU} does not start: {error}")),
    }
}

/// Returns the lines of QEMU's `output` with errors, without QEMU's name. If all lines are
/// warnings, returns the warnings.
pub(crate) fn errors(output: &str) -> Vec<&str> {
    let text = |line| {
        let line: &str = str::trim(line);
        let line = line.strip_prefix(QEMU).and_then(|line| line.strip_prefix(": ")).unwrap_or(line);
        line.strip_prefix("error: ").unwrap_or(line)
    };
    let lines: Vec<_> = output.lines().map(text).filter(|line| !line.is_empty()).collect();
    let errors: Vec<_> = lines.iter().filter(|line| !line.contains("warning: ")).copied().collect();
    if errors.is_empty() { lines } else { errors }
}

/// A machine in QEMU.
#[derive(Clone, Debug)]
pub(crate) struct Qemu<'a> {
    pub board: &'static str,
    pub cpu: &'a str,
    pub cpus: u16,
    /// Bytes, rounded down to MiB.
    pub memory: u64,
    /// The nodes described by firmware, which a `microvm` lacks.
    pub nodes: &'a Nodes,
    pub clock: Clock,
    pub accel: Accel,
    pub kernel: &'a Path,
    pub initrd: &'a Path,
    pub line: String,
    /// Set if the machine has the debug consoles, and the device that ends the machine.
    pub debug: bool,
    /// The read-only disk with files, and the swap disk.
    pub disks: Vec<Drive<'a>>,
}

/// A virtio disk.
#[derive(Clone, Debug)]
pub(crate) struct Drive<'a> {
    pub usage: DriveUse,
    pub image: &'a Path,
    /// The maximum number of reads per second.
    pub reads_per_second: Option<u32>,
    /// The bad sectors of 512 bytes, and the failing operations.
    pub errors: Vec<(u64, Operation)>,
}

/// An operation of a disk, by QEMU's word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    Read,
    Write,
}

impl Operation {
    const fn word(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
        }
    }
}

/// The use of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DriveUse {
    /// Files; read-only.
    Files,
    /// Swapped pages; also written.
    Swap,
}

impl DriveUse {
    /// Returns the place of the disk in a `microvm`, in the words of the command line. Each disk
    /// has its own place for virtio devices, from the second place on, and the place identifies the
    /// disk to the kernel. (QEMU confuses the interrupt line of the first place, which is line 0 of
    /// the second controller, with the line of the old timer.) Linux knows the first word.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Files => "virtio_mmio.device=512@0xfeb00200:25",
            Self::Swap => "swap=512@0xfeb00400:26",
        }
    }

    /// Returns the disk's name in QEMU.
    const fn name(self) -> &'static str {
        match self {
            Self::Files => "disk",
            Self::Swap => "swap",
        }
    }

    /// Returns QEMU's mode of opening the image. The image of a swap disk is deleted with the
    /// machine, so its data need not reach the host's disk in time.
    const fn mode(self) -> &'static str {
        match self {
            Self::Files => "readonly=on",
            Self::Swap => "cache=unsafe",
        }
    }

    /// The device on a `microvm`.
    const fn device(self) -> &'static str {
        match self {
            Self::Files => "virtio-blk-device,drive=disk,bus=virtio-mmio-bus.1,queue-size=256",
            Self::Swap => "virtio-blk-device,drive=swap,bus=virtio-mmio-bus.2,queue-size=256",
        }
    }
}

impl<'a> Drive<'a> {
    /// Returns a drive without limits or errors.
    pub const fn new(usage: DriveUse, image: &'a Path) -> Self {
        Self { usage, image, reads_per_second: None, errors: Vec::new() }
    }

    fn args(&self, board: &str) -> Vec<OsString> {
        let (name, mode) = (self.usage.name(), self.usage.mode());
        let mut drive = OsString::from(format!("if=none,id={name},format=raw,{mode},file.driver="));
        drive.push(if self.errors.is_empty() { "file,file." } else { "blkdebug,file.image." });
        drive.push("filename=");
        // A comma would end the name.
        for (at, part) in self.image.as_os_str().as_bytes().split(|&byte| byte == b',').enumerate()
        {
            drive.push(if at == 0 { "" } else { ",," });
            drive.push(OsStr::from_bytes(part));
        }
        for (at, (sector, operation)) in self.errors.iter().enumerate() {
            let rule =
                [("event", "none"), ("errno", "5"), ("once", "off"), ("iotype", operation.word())];
            for (name, value) in rule {
                drive.push(format!(",file.inject-error.{at}.{name}={value}"));
            }
            drive.push(format!(",file.inject-error.{at}.sector={sector}"));
        }
        if let Some(reads) = self.reads_per_second {
            drive.push(format!(",throttling.iops-total={reads}"));
        }
        let rest = match board {
            "microvm" => {
                ["-global", "virtio-mmio.force-legacy=off", "-device", self.usage.device()]
                    .map(str::to_owned)
                    .into()
            }
            _ => vec!["-device".to_owned(), format!("virtio-blk-pci,drive={name},queue-size=256")],
        };
        let drive = [OsString::from("-drive"), drive];
        drive.into_iter().chain(rest.into_iter().map(OsString::from)).collect()
    }
}

impl Qemu<'_> {
    fn command(&self) -> Command {
        let mut command = Command::new(QEMU);
        command.args(["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"]);
        command.args(["-M", self.board]).args(self.clock.args(self.accel)).args(["-cpu", self.cpu]);
        command.args(["-smp", &self.cpus.to_string(), "-m", &format!("{}M", self.memory >> 20)]);
        if self.nodes.are_several() {
            command.args(self.nodes.args(self.memory >> 20));
        }
        command.arg("-kernel").arg(self.kernel).arg("-initrd").arg(self.initrd);
        command.args(["-append", &self.line, "-chardev", "stdio,id=serial,signal=off"]);
        command.args(["-serial", "chardev:serial"]);
        command.args(self.disks.iter().flat_map(|disk| disk.args(self.board)));
        if self.debug {
            for (port, name, descriptor) in CONSOLES {
                command.args(["-chardev", &format!("file,id={name},path=/dev/fd/{descriptor}")]);
                command.args(["-device", &format!("isa-debugcon,iobase={port},chardev={name}")]);
            }
            command.args(["-device", "isa-debug-exit,iobase=0xf4,iosize=4"]);
        }
        command
    }

    /// Runs the machine until it ends or `limits` are reached.
    pub(crate) fn run(
        &self,
        streams: Streams<'_>,
        limits: &Limits<'_>,
    ) -> Result<Ended, BootError> {
        let pipes =
            |error: io::Error| BootError::Qemu(format!("no pipes for the consoles: {error}"));
        let (errors_end, errors) = io::pipe().map_err(pipes)?;
        let (report_end, report) = io::pipe().map_err(pipes)?;
        let (output_end, output) = io::pipe().map_err(pipes)?;
        let mut child = self.start(errors, report, output)?;

        let Streams { input, output, errors } = streams;
        feed(child.stdin.take(), input);
        let started = Instant::now();
        let (mut complaint, mut report) = (Vec::new(), Vec::new());
        let (sender, events) = mpsc::channel();
        // A machine without debug consoles writes its output to the serial port.
        let serial = child.stdout.take();
        let output_end: Source = if self.debug { Box::new(output_end) } else { readable(serial) };
        let consoles: [(&str, Source, Sink<'_>); 4] = [
            ("standard error", Box::new(errors_end), errors),
            ("the report", Box::new(report_end), Box::new(&mut report)),
            ("standard output", output_end, output),
            ("QEMU's messages", readable(child.stderr.take()), Box::new(&mut complaint)),
        ];
        let (cut, received) = thread::scope(|scope| {
            let drains = consoles.map(|(name, from, into)| {
                let sender = sender.clone();
                scope.spawn(move || drain(name, from, into, &sender))
            });
            drop(sender);
            let cut = watch(&mut child, &events, started, limits);
            (cut, drains.map(|drain| drain.join().expect("a drain does not panic")))
        });
        let [errors, _, output, _] = received;
        let received = [output, errors];
        let status = child.wait().map_err(|error| BootError::Qemu(error.to_string()))?;
        let complaint = String::from_utf8_lossy(&complaint).trim().to_owned();
        Ok(Ended { cut, status, complaint, report, received, wall: started.elapsed() })
    }

    fn start(
        &self,
        errors: io::PipeWriter,
        report: io::PipeWriter,
        output: io::PipeWriter,
    ) -> Result<Child, BootError> {
        // The command holds copies of the pipes' ends, which are closed when the command is dropped
        // at the end of this function.
        let mut command = self.command();
        command.stdin(Stdio::piped()).stderr(Stdio::piped());
        command.stdout(if self.debug { Stdio::null() } else { Stdio::piped() });
        let mapped = command.fd_mappings(vec![
            FdMapping { parent_fd: errors.into(), child_fd: ERRORS },
            FdMapping { parent_fd: report.into(), child_fd: REPORT },
            FdMapping { parent_fd: output.into(), child_fd: OUTPUT },
        ]);
        if let Err(collision) = mapped {
            return Err(BootError::Qemu(collision.to_string()));
        }
        // SAFETY: between fork and exec there is only one system call, without allocations or
        // locks.
        unsafe {
            // A machine without a parent would run indefinitely.
            command.pre_exec(|| Ok(prctl::set_pdeathsig(Signal::SIGKILL)?));
        }
        command.spawn().map_err(missing)
    }
}

/// A console, and its destination.
type Source = Box<dyn Read + Send>;
type Sink<'a> = Box<dyn Write + Send + 'a>;

/// Returns a pipe from QEMU as a source; a missing pipe has no bytes to read.
fn readable(pipe: Option<impl Read + Send + 'static>) -> Source {
    pipe.map_or_else(|| Box::new(io::empty()) as Source, |pipe| Box::new(pipe))
}

/// The messages of the threads that read the consoles.
enum Event {
    /// The reader closed the output.
    Closed,
    /// The output cannot be written: the destination, and the reason.
    Unwritten(String),
}

/// Waits until all consoles are closed; ends the machine at a limit.
fn watch(
    child: &mut Child,
    events: &mpsc::Receiver<Event>,
    started: Instant,
    limits: &Limits<'_>,
) -> Option<Cut> {
    let (mut cut, mut closed) = (None, None);
    loop {
        let due = match events.recv_timeout(PATIENCE) {
            // The last thread has ended.
            Err(RecvTimeoutError::Disconnected) => return cut,
            Ok(Event::Closed) => {
                closed.get_or_insert_with(Instant::now);
                None
            }
            Ok(Event::Unwritten(why)) => Some(Cut::Unwritten(why)),
            Err(RecvTimeoutError::Timeout) if limits.stop.is_some_and(|stop| stop()) => {
                Some(Cut::Stop)
            }
            Err(RecvTimeoutError::Timeout) => {
                let unread = closed.is_some_and(|at| at.elapsed() >= UNREAD);
                let over = limits.timeout.is_some_and(|limit| started.elapsed() >= limit);
                if unread { Some(Cut::Closed) } else { over.then_some(Cut::Timeout) }
            }
        };
        if due.is_some() && cut.is_none() {
            cut = due;
            // The machine may already have ended, so errors are ignored.
            let _ = child.kill();
        }
    }
}

/// Copies bytes `from` a console to its destination as they arrive, until the end; returns the
/// number of bytes.
fn drain(name: &str, mut from: Source, mut into: Sink<'_>, say: &Sender<Event>) -> u64 {
    let mut buffer = [0; 1 << 14];
    let mut taken = true;
    let mut received = 0;
    loop {
        let count = match from.read(&mut buffer) {
            Ok(0) => return received,
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(_) => return received,
        };
        received += count as u64;
        // Keep reading, so that QEMU does not wait for this thread.
        let written = if taken {
            into.write_all(&buffer[..count]).and_then(|()| into.flush())
        } else {
            Ok(())
        };
        if let Err(error) = written {
            taken = false;
            let event = match error.kind() {
                io::ErrorKind::BrokenPipe => Event::Closed,
                _ => Event::Unwritten(format!("{name}: {error}")),
            };
            // The receiver may be gone: then the machine has ended.
            let _ = say.send(event);
        }
    }
}

/// Passes input on. The thread is detached: it may still wait for a terminal at the end of the
/// machine.
///
/// If there is no input, no byte is sent, and the kernel is notified on the command line. Input
/// arrives in the host's time, which would make a deterministic run vary.
fn feed(into: Option<impl Write + Send + 'static>, input: Input) {
    let Some(mut into) = into.filter(|_| !input.is_none()) else { return };
    let pass = move || -> io::Result<()> {
        into.write_all(&[FIRST])?;
        match input {
            Input::None => {}
            Input::Bytes(bytes) => into.write_all(&escaped(&bytes))?,
            Input::Inherit => {
                // As it arrives: no input may wait in a buffer.
                let mut buffer = [0; 1 << 12];
                let mut stdin = io::stdin().lock();
                loop {
                    let count = stdin.read(&mut buffer)?;
                    if count == 0 {
                        break;
                    }
                    into.write_all(&escaped(&buffer[..count]))?;
                }
            }
        }
        into.write_all(&[END_OF_INPUT])
    };
    thread::spawn(|| {
        // The machine has ended, and needs no input.
        let _ = pass();
    });
}

/// Returns whether `input` is a terminal owned by another job.
fn elsewhere(input: impl AsFd) -> bool {
    unistd::tcgetpgrp(input).is_ok_and(|group| group != unistd::getpgrp())
}

/// Returns whether `input` is the null device.
fn is_null(input: impl AsFd) -> bool {
    let null = stat::stat("/dev/null").map(|null| null.st_rdev);
    null.is_ok_and(|null| stat::fstat(input).is_ok_and(|stat| stat.st_rdev == null))
}

/// Returns the encoded bytes of the input.
fn escaped(bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(bytes.len());
    for &byte in bytes {
        if byte == END_OF_INPUT || byte == LITERAL {
            out.push(LITERAL);
        }
        out.push(byte);
    }
    out
}

#[cfg(all(test, feature = "qemu"))]
mod tests;
