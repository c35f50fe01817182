//! Running QEMU: its arguments, its consoles, its end.
//!
//! A guest has up to three consoles for output, and each is a pipe that a thread here empties into
//! its [`Streams`]
//! as the bytes come. The run is over when QEMU has closed all of them.

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
/// How often somebody who waits is asked whether to go on.
const PATIENCE: Duration = Duration::from_millis(50);
/// How long a program runs on whose output nobody reads any more. One that is about to end does so with its own status.
const UNREAD: Duration = Duration::from_secs(1);
/// What the input begins with: it is thrown away when the kernel switches on the serial port's queues.
const FIRST: u8 = 0x16;
/// What the input ends with, as on a terminal; and what goes before a byte that is only itself.
const END_OF_INPUT: u8 = 0x04;
const LITERAL: u8 = 0x10;
/// The descriptors of the debug consoles in QEMU.
const ERRORS: i32 = 3;
const REPORT: i32 = 4;
const OUTPUT: i32 = 5;
/// The debug consoles: the port, QEMU's name, and the descriptor. QEMU blocks the guest at each
/// byte until the pipe has accepted it, so these lose nothing. QEMU's serial port drops bytes while
/// the pipe is full.
const CONSOLES: [(&str, &str, i32); 3] =
    [("0xea", "errors", ERRORS), ("0xe9", "report", REPORT), ("0xeb", "output", OUTPUT)];

/// What time is in a machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Clock {
    /// The host's; CPUs run side by side.
    #[default]
    Real,
    /// An instruction is a nanosecond and a tick of `rdtsc`; CPUs take turns. Runs of the same
    /// files repeat to the last instruction, as long as nobody types.
    Deterministic,
}

impl Clock {
    /// The accelerator's arguments. Instructions are counted where they are translated, whatever is asked for.
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

/// What a program reads.
#[derive(Clone, Debug, Default)]
pub enum Input {
    /// Nothing: the end, at once.
    #[default]
    None,
    /// What this process reads.
    Inherit,
    /// These bytes.
    Bytes(Vec<u8>),
}

impl Input {
    /// Whether it is known beforehand that there is none.
    pub(crate) fn is_none(&self) -> bool {
        match self {
            Self::None => true,
            Self::Bytes(bytes) => bytes.is_empty(),
            // A job in the background may not read its terminal.
            Self::Inherit => elsewhere(io::stdin()) || is_null(io::stdin()),
        }
    }
}

/// Where a program's input comes from and its output goes.
pub struct Streams<'a> {
    /// Standard input.
    pub input: Input,
    /// Standard output.
    pub output: Box<dyn Write + Send + 'a>,
    /// Standard error.
    pub errors: Box<dyn Write + Send + 'a>,
}

impl Streams<'_> {
    /// Those of this process.
    pub fn inherit() -> Self {
        let (output, errors) = (Box::new(io::stdout()), Box::new(io::stderr()));
        Self { input: Input::Inherit, output, errors }
    }
}

impl<'a> Streams<'a> {
    /// No input; both outputs are kept.
    pub fn keep(output: &'a mut Vec<u8>, errors: &'a mut Vec<u8>) -> Self {
        Self { input: Input::None, output: Box::new(output), errors: Box::new(errors) }
    }
}

impl fmt::Debug for Streams<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Streams").field("input", &self.input).finish_non_exhaustive()
    }
}

/// How long to wait for a machine.
#[derive(Default)]
pub struct Limits<'a> {
    /// At most this long, of the host's time.
    pub timeout: Option<Duration>,
    /// Until this says `true`; it is asked some twenty times a second.
    pub stop: Option<&'a (dyn Fn() -> bool + Sync)>,
}

impl fmt::Debug for Limits<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Limits").field("timeout", &self.timeout).finish_non_exhaustive()
    }
}

/// Why a run ended from outside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Cut {
    Timeout,
    Stop,
    /// Nobody reads the output any more.
    Closed,
    /// The output cannot be written: where to, and why.
    Unwritten(String),
}

/// What came of a run.
#[derive(Debug)]
pub(crate) struct Ended {
    pub cut: Option<Cut>,
    pub status: ExitStatus,
    /// What QEMU itself complained of.
    pub complaint: String,
    /// What came from the kernel's own console.
    pub report: Vec<u8>,
    /// The bytes that came from the output and the error output.
    pub received: [u64; 2],
    pub wall: Duration,
}

/// The version that QEMU tells, if it is installed.
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

/// A machine of QEMU's.
#[derive(Clone, Debug)]
pub(crate) struct Qemu<'a> {
    pub board: &'static str,
    pub cpu: &'a str,
    pub cpus: u16,
    /// Bytes, rounded down to MiB.
    pub memory: u64,
    /// What firmware tells of nodes, which a `microvm` has none of.
    pub nodes: &'a Nodes,
    pub clock: Clock,
    pub accel: Accel,
    pub kernel: &'a Path,
    pub initrd: &'a Path,
    pub line: String,
    /// Whether the machine has the debug consoles, and the device that ends it.
    pub debug: bool,
    /// The disk with files, which is only read, and the swap disk.
    pub disks: Vec<Drive<'a>>,
}

/// A virtio disk.
#[derive(Clone, Debug)]
pub(crate) struct Drive<'a> {
    pub usage: DriveUse,
    pub image: &'a Path,
    /// The most reads in a second.
    pub reads_per_second: Option<u32>,
    /// The sectors of 512 bytes that have errors, and at which operations.
    pub errors: Vec<(u64, Operation)>,
}

/// An operation of a disk, in QEMU's word.
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

/// What a disk is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DriveUse {
    /// Files; it is only read.
    Files,
    /// Pages that leave memory; it is written, too.
    Swap,
}

impl DriveUse {
    /// Where a `microvm` has the disk, in the words of the command line. Each has its own place for virtio devices, from the second on, and the place
    /// tells the kernel which is which. (QEMU confuses the interrupt line of the first place, which is line 0 of the second controller, with that of
    /// the old timer.) Linux knows the first word.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Files => "virtio_mmio.device=512@0xfeb00200:25",
            Self::Swap => "swap=512@0xfeb00400:26",
        }
    }

    /// Its name in QEMU.
    const fn name(self) -> &'static str {
        match self {
            Self::Files => "disk",
            Self::Swap => "swap",
        }
    }

    /// How QEMU opens the image. A swap disk's goes with the machine, so nothing of it has to reach the host's disk in time.
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
    /// One without limits or errors.
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
            |error: io::Error| BootError::Qemu(format!("no pipes for its consoles: {error}"));
        let (errors_end, errors) = io::pipe().map_err(pipes)?;
        let (report_end, report) = io::pipe().map_err(pipes)?;
        let (output_end, output) = io::pipe().map_err(pipes)?;
        let mut child = self.start(errors, report, output)?;

        let Streams { input, output, errors } = streams;
        feed(child.stdin.take(), input);
        let started = Instant::now();
        let (mut complaint, mut report) = (Vec::new(), Vec::new());
        let (sender, events) = mpsc::channel();
        // A machine without debug consoles has its output at the serial port.
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
        // The command holds our copies of the pipes' ends; they close as it goes at the end of this.
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
        // SAFETY: between fork and exec only one system call is made: nothing is allocated or locked.
        unsafe {
            // A machine that nobody watches any more would run for ever.
            command.pre_exec(|| Ok(prctl::set_pdeathsig(Signal::SIGKILL)?));
        }
        command.spawn().map_err(missing)
    }
}

/// A console, and where it goes.
type Source = Box<dyn Read + Send>;
type Sink<'a> = Box<dyn Write + Send + 'a>;

/// A pipe from QEMU; one that is not there has nothing to read.
fn readable(pipe: Option<impl Read + Send + 'static>) -> Source {
    pipe.map_or_else(|| Box::new(io::empty()) as Source, |pipe| Box::new(pipe))
}

/// What the threads that empty the consoles say.
enum Event {
    /// Nobody reads what comes.
    Closed,
    /// It cannot be written: where to, and why.
    Unwritten(String),
}

/// Waits until all consoles are closed; ends the machine where that takes too long.
fn watch(
    child: &mut Child,
    events: &mpsc::Receiver<Event>,
    started: Instant,
    limits: &Limits<'_>,
) -> Option<Cut> {
    let (mut cut, mut closed) = (None, None);
    loop {
        let due = match events.recv_timeout(PATIENCE) {
            // The last thread is done.
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
            // It may have ended already; then there is nothing to do.
            let _ = child.kill();
        }
    }
}

/// Passes on what comes `from` a console, as it comes, to its end; returns the number of bytes.
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
        // The rest is read all the same: QEMU must not wait for us.
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
            // Whoever hears it may have gone; then the machine has ended.
            let _ = say.send(event);
        }
    }
}

/// Passes input on. The thread is left alone: it may wait for a terminal when the machine has ended.
///
/// Where there is none nothing is sent, and the kernel is told: what comes in comes in the host's time, and a
/// deterministic run would differ by it.
fn feed(into: Option<impl Write + Send + 'static>, input: Input) {
    let Some(mut into) = into.filter(|_| !input.is_none()) else { return };
    let pass = move || -> io::Result<()> {
        into.write_all(&[FIRST])?;
        match input {
            Input::None => {}
            Input::Bytes(bytes) => into.write_all(&escaped(&bytes))?,
            Input::Inherit => {
                // As it comes: nothing may wait in a buffer.
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

/// Whether `input` is a terminal that another job has.
fn elsewhere(input: impl AsFd) -> bool {
    unistd::tcgetpgrp(input).is_ok_and(|group| group != unistd::getpgrp())
}

/// Whether `input` is the device that has nothing to read.
fn is_null(input: impl AsFd) -> bool {
    let null = stat::stat("/dev/null").map(|null| null.st_rdev);
    null.is_ok_and(|null| stat::fstat(input).is_ok_and(|stat| stat.st_rdev == null))
}

/// Bytes of input as they travel.
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
