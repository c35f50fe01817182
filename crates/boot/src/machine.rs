//! The bare machine, and its programs.

use crate::accel::Accel;
use crate::elf;
use crate::embedded::{self, Guest};
use crate::error::BootError;
use crate::initrd::{DISK_PAGE, Initrd};
use crate::nodes::Nodes;
use crate::qemu::{self, Clock, Cut, Drive, DriveUse, Limits, Operation, Qemu, Streams};
use crate::report::Report;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::fs::{self, File};
use std::io::{BufWriter, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tempfile::NamedTempFile;

/// The file with the program and its arguments.
const ARGV: &str = ".boot/argv";
const ENVIRON: &str = ".boot/environ";
const CWD: &str = ".boot/cwd";

/// A Linux program and its inputs.
#[derive(Clone, Debug)]
pub struct Program {
    /// The path of the file: the name in messages.
    source: PathBuf,
    bytes: Cow<'static, [u8]>,
    /// The arguments, without the program's own name.
    pub args: Vec<OsString>,
    /// The environment, as strings `NAME=VALUE`.
    pub environ: Vec<OsString>,
    /// A directory of the host that becomes the root file system.
    pub files: Option<PathBuf>,
    /// The initial working directory in the program's file system; `None` for the root.
    pub cwd: Option<OsString>,
}

impl Program {
    /// Returns the program in a file of the host, after the checks. The program must be statically
    /// linked.
    pub fn file(path: impl Into<PathBuf>) -> Result<Self, BootError> {
        Self::unchecked(path)?.checked()
    }

    /// Returns the program in a file of the host with these files, after the checks. The files must
    /// contain the interpreter, if the program has one.
    pub fn file_among(
        files: impl Into<PathBuf>,
        path: impl Into<PathBuf>,
    ) -> Result<Self, BootError> {
        let files = files.into();
        // Report an unreadable directory itself, not only a file missing in it.
        fs::read_dir(&files).map_err(BootError::file(&files))?;
        Self::unchecked(path)?.files(files).checked()
    }

    fn checked(self) -> Result<Self, BootError> {
        let comes_along = |name: &str| {
            let inside = name.trim_start_matches('/');
            self.files.as_ref().is_some_and(|files| files.join(inside).exists())
        };
        elf::check(&self.bytes, comes_along)
            .map_err(|error| BootError::Elf { path: self.source.clone(), error })?;
        Ok(self)
    }

    /// Returns the program in a file of the host without checks, for tests of the kernel's own
    /// errors.
    pub fn unchecked(path: impl Into<PathBuf>) -> Result<Self, BootError> {
        let path = path.into();
        let bytes = contents(&path)?;
        Ok(Self::new(path, bytes.into()))
    }

    /// Returns an embedded program.
    pub fn guest(guest: Guest) -> Self {
        Self::new(guest.name.into(), guest.bytes.into())
    }

    fn new(source: PathBuf, bytes: Cow<'static, [u8]>) -> Self {
        let environ = ["PATH=/bin:/usr/bin:/sbin:/usr/sbin", "HOME=/"].map(OsString::from).into();
        Self { source, bytes, args: Vec::new(), environ, files: None, cwd: None }
    }

    /// Returns the file itself.
    pub(crate) fn contents(&self) -> &[u8] {
        &self.bytes
    }

    /// Returns the program with these arguments.
    pub fn args<A: Into<OsString>>(mut self, args: impl IntoIterator<Item = A>) -> Self {
        self.args = args.into_iter().map(Into::into).collect();
        self
    }

    /// Returns the program with this variable, which replaces an earlier variable of this name.
    pub fn env(mut self, variable: impl Into<OsString>) -> Self {
        let variable = variable.into();
        let name = |text: &OsString| {
            text.as_bytes().split(|byte| *byte == b'=').next().map(<[u8]>::to_vec)
        };
        self.environ.retain(|known| name(known) != name(&variable));
        self.environ.push(variable);
        self
    }

    /// Returns the program with these files.
    pub fn files(mut self, directory: impl Into<PathBuf>) -> Self {
        self.files = Some(directory.into());
        self
    }

    /// Returns the program with this working directory in its own file system.
    pub fn cwd(mut self, directory: impl Into<OsString>) -> Self {
        self.cwd = Some(directory.into());
        self
    }

    /// Returns the file system of the program (the files, the program, `.boot`), and the path of
    /// the program in this file system.
    ///
    /// A program among the files keeps its path; another program becomes `/bin/NAME`, or `/NAME` if
    /// `bin` is no directory.
    pub fn initrd(&self) -> Result<(Initrd, String), BootError> {
        let mut initrd = Initrd::new();
        if let Some(files) = &self.files {
            initrd.tree(files)?;
        }
        let inside = self.inside();
        let path = match inside.filter(|path| initrd.contains(path)) {
            Some(path) => path,
            None => {
                let name = self.source.file_name().and_then(|name| name.to_str());
                let name = name.ok_or_else(|| BootError::Unfit {
                    path: self.source.clone(),
                    why: "the name is not text (UTF-8)",
                })?;
                let below = !initrd.contains("bin") || initrd.is_directory("bin");
                let path = if below { format!("bin/{name}") } else { name.to_owned() };
                initrd.bytes(&path, 0o755, self.bytes.to_vec())?;
                path
            }
        };
        let path = format!("/{path}");
        let own = [OsString::from(&path)];
        let argv = strings("argument", own.iter().chain(&self.args))?;
        initrd.bytes(ARGV, 0o444, argv)?;
        initrd.bytes(ENVIRON, 0o444, strings("variable", self.environ.iter())?)?;
        if let Some(cwd) = &self.cwd {
            initrd.bytes(CWD, 0o444, cwd.as_bytes().to_vec())?;
        }
        for directory in ["dev", "proc", "tmp"] {
            if !initrd.contains(directory) {
                initrd.directory(directory);
            }
        }
        if let Some(cwd) = &self.cwd
            && cwd.to_str().is_some_and(|cwd| initrd.lacks_directory(cwd))
        {
            return Err(BootError::NoDirectory { directory: cwd.clone() });
        }
        Ok((initrd, path))
    }

    /// Returns the path of the program among its files, if any.
    fn inside(&self) -> Option<String> {
        let root = self.files.as_ref()?.canonicalize().ok()?;
        let own = self.source.canonicalize().ok()?;
        Some(own.strip_prefix(root).ok()?.to_str()?.to_owned())
    }
}

/// The largest program, in bytes. A file in an archive is smaller than 4 GiB.
const LARGEST: u64 = u32::MAX as u64;
/// Bytes that identify a program, or a script and its interpreter.
const START: u64 = 256;

/// Returns the bytes of the program in the file at `path`. Input from a pipe that does not begin as
/// a program is not read further, because a pipe may have no end.
fn contents(path: &Path) -> Result<Vec<u8>, BootError> {
    let unfit = |why| BootError::Unfit { path: path.to_owned(), why };
    // Examined before it is opened, because opening some devices has effects.
    let kind = fs::metadata(path).map_err(BootError::file(path))?.file_type();
    if kind.is_char_device() || kind.is_block_device() {
        return Err(unfit("a device, not a program: specify the file of a program"));
    }
    let file = File::open(path).map_err(BootError::file(path))?;
    let mut bytes = Vec::new();
    (&file).take(START).read_to_end(&mut bytes).map_err(BootError::file(path))?;
    if !kind.is_file() && !bytes.starts_with(&elf::MAGIC) {
        return Ok(bytes);
    }
    (&file).take(LARGEST + 1 - START).read_to_end(&mut bytes).map_err(BootError::file(path))?;
    match bytes.len() as u64 > LARGEST {
        true => Err(unfit("the file is 4 GiB or larger: the limit of a program")),
        false => Ok(bytes),
    }
}

/// NUL-terminated strings.
fn strings<'a>(
    what: &'static str,
    texts: impl Iterator<Item = &'a OsString>,
) -> Result<Vec<u8>, BootError> {
    let mut bytes = Vec::new();
    for text in texts {
        if text.as_bytes().contains(&0) {
            return Err(BootError::Nul { what, text: text.to_string_lossy().into_owned() });
        }
        bytes.extend_from_slice(text.as_bytes());
        bytes.push(0);
    }
    Ok(bytes)
}

/// A read-only disk with a program's files: data stored by programs stays in memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Disk {
    /// The maximum number of reads per second, for tests that need a slow disk.
    pub reads_per_second: Option<u32>,
    /// Unreadable pages, for tests: the path of a file in the program's file system, and the number
    /// of a page in this file.
    pub unreadable: Vec<(String, u64)>,
}

/// A machine of the bare kernel.
#[derive(Clone, Debug)]
pub struct Machine {
    /// CPUs.
    pub cpus: u16,
    /// Memory in bytes, in whole MiB.
    pub memory: u64,
    /// The nodes of memory for programs, by their shares of memory.
    pub nodes: Nodes,
    /// The clock.
    pub clock: Clock,
    /// The accelerator, unless instructions are counted.
    pub accel: Accel,
    /// QEMU's name for the CPU and its features: `max,-erms`.
    pub cpu: String,
    /// Enables the check of every frame after the end of the program; an unaccounted frame is a
    /// panic.
    pub check: bool,
    /// The disk with the program's files; without a disk, the files are in memory.
    pub disk: Option<Disk>,
    /// The size of a swap disk in bytes, in whole MiB: if memory is short, private pages of
    /// programs move to this disk.
    pub swap: Option<u64>,
    /// Unreadable and unwritable pages of the swap disk, for tests.
    pub bad_swap: [Vec<u64>; 2],
    /// Words of the kernel command line: `set=KNOB=VALUE`, `plant=NAME`.
    pub words: Vec<String>,
    /// Another kernel instead of the embedded one.
    pub kernel: Option<PathBuf>,
}

/// Returns a machine with one CPU and 1 GiB of memory, in the host's time.
impl Default for Machine {
    fn default() -> Self {
        Self {
            cpus: 1,
            memory: 1 << 30,
            nodes: Nodes::default(),
            clock: Clock::Real,
            accel: Accel::Tcg,
            cpu: "max,-erms".into(),
            check: false,
            disk: None,
            swap: None,
            bad_swap: [Vec::new(), Vec::new()],
            words: Vec::new(),
            kernel: None,
        }
    }
}

/// The first sector of a page of a disk.
const fn sector_of(page: u64) -> u64 {
    page * (DISK_PAGE / 512)
}

impl Disk {
    /// Returns the disk with this image, on which files begin at these pages.
    fn drive<'a>(
        &self,
        image: &'a Path,
        places: &BTreeMap<String, u64>,
    ) -> Result<Drive<'a>, BootError> {
        let sector = |(path, page): &(String, u64)| {
            let first = places.get(path.trim_start_matches('/')).ok_or_else(|| {
                BootError::Unfit { path: path.into(), why: "the file is not on the disk" }
            })?;
            Ok((sector_of(first + page), Operation::Read))
        };
        let errors = self.unreadable.iter().map(sector).collect::<Result<_, BootError>>()?;
        let drive = Drive::new(DriveUse::Files, image);
        Ok(Drive { reads_per_second: self.reads_per_second, errors, ..drive })
    }
}

/// The end of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// The program exited with this status, or a signal ended the program: then the status is 128
    /// plus the signal number.
    Exited(u8),
    /// The kernel panicked.
    Panicked(String),
    /// The machine ended without a report; the string contains QEMU's messages, if any.
    Silent(String),
    /// The time limit was reached.
    TimedOut,
    /// The caller stopped the run.
    Stopped,
    /// The reader closed the output, and the program did not end by itself soon afterwards.
    Closed,
    /// The output could not be written: the destination, and the reason.
    Unwritten(String),
    /// The program ended, but its outputs are incomplete: the bytes sent by the kernel to the
    /// output and the error output, and the received bytes.
    Lost {
        /// The numbers of bytes sent.
        sent: [u64; 2],
        /// The numbers of bytes received.
        received: [u64; 2],
    },
}

impl End {
    /// Returns the end of a run that was cut by `cut`, with `received` bytes of its outputs.
    /// `complaint` is QEMU's message.
    fn of(
        report: &Report,
        cut: Option<Cut>,
        received: [u64; 2],
        complaint: String,
        is_stopped: impl Fn() -> bool,
    ) -> Self {
        let lost = report.sent.filter(|sent| *sent != received);
        match (report.exit, &report.panic, cut) {
            (_, Some(why), _) => Self::Panicked(why.clone()),
            // A part of the output is lost, whatever the program's status.
            (_, None, Some(Cut::Unwritten(why))) => Self::Unwritten(why),
            (Some(status), None, _) => match lost {
                None => Self::Exited(status),
                Some(sent) => Self::Lost { sent, received },
            },
            (None, None, Some(Cut::Timeout)) => Self::TimedOut,
            (None, None, Some(Cut::Stop)) => Self::Stopped,
            (None, None, Some(Cut::Closed)) => Self::Closed,
            // Ctrl-C on a terminal also reaches QEMU, which may end before this process handles the
            // key.
            (None, None, None) if is_stopped() => Self::Stopped,
            (None, None, None) => Self::Silent(complaint),
        }
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exited(status) => write!(f, "exit status {status}"),
            Self::Panicked(why) => write!(f, "the kernel panicked: {why}"),
            Self::Silent(output) => {
                let errors = qemu::errors(output).join("\n");
                let gap = if errors.is_empty() { "" } else { ": QEMU: " };
                write!(f, "the machine stopped without an exit status of the program{gap}{errors}")
            }
            Self::TimedOut => f.write_str("the time limit was reached"),
            Self::Stopped => f.write_str("interrupted"),
            Self::Closed => f.write_str("the output was closed"),
            Self::Unwritten(why) => write!(f, "the output cannot be written to {why}"),
            Self::Lost { sent: [output, errors], received: [out, err] } => write!(
                f,
                "output was lost: {out} of {output} bytes of standard output and {err} of \
                 {errors} bytes of standard error arrived"
            ),
        }
    }
}

/// The result of a run.
#[derive(Clone, Debug)]
pub struct Run {
    /// The end of the run.
    pub end: End,
    /// The kernel's report.
    pub report: Report,
    /// The run time of QEMU.
    pub wall: Duration,
    /// Files of the host that are missing in the guest's file system, with the reasons.
    pub skipped: Vec<String>,
}

impl Machine {
    /// Checks whether machines can run here: QEMU is installed, and the kernel is embedded.
    pub fn ready() -> Result<(), BootError> {
        qemu::version()?;
        embedded::kernel().map(|_| ())
    }

    /// Runs a program to its end, or to the limits.
    pub fn run(
        &self,
        program: &Program,
        streams: Streams<'_>,
        limits: &Limits<'_>,
    ) -> Result<Run, BootError> {
        let embedded;
        let kernel = match &self.kernel {
            Some(file) => {
                fs::metadata(file).map_err(BootError::file(file))?;
                file.as_path()
            }
            None => {
                let image = embedded::kernel()?;
                let copy = |file: &mut dyn Write| {
                    file.write_all(image).map_err(BootError::file("the kernel's copy"))
                };
                embedded = temporary(copy)?;
                embedded.path()
            }
        };
        let (mut initrd, _) = program.initrd()?;
        let image;
        let disk = match &self.disk {
            Some(disk) => {
                let mut places = BTreeMap::new();
                image = temporary(|file| {
                    places = initrd.move_to_disk(file)?;
                    Ok(())
                })?;
                Some(disk.drive(image.path(), &places)?)
            }
            None => None,
        };
        // The file has no blocks before the kernel writes to the disk.
        let swap = self.swap.map(|bytes| temporary_of(bytes >> 20 << 20)).transpose()?;
        let [unreadable, unwritable] = &self.bad_swap;
        let bad = |pages: &[u64], operation| {
            pages.iter().map(|page| (sector_of(*page), operation)).collect::<Vec<_>>()
        };
        let errors = [bad(unreadable, Operation::Read), bad(unwritable, Operation::Write)].concat();
        let swap =
            swap.as_ref().map(|image| Drive { errors, ..Drive::new(DriveUse::Swap, image.path()) });
        let disks: Vec<_> = disk.into_iter().chain(swap).collect();
        self.holds(&initrd)?;
        let archive = archive(&initrd)?;
        let mut words = vec![format!("cpus={}", self.cpus)];
        words.extend(self.nodes.are_several().then(|| self.nodes.word()));
        words.extend(self.check.then(|| "check".to_owned()));
        words.extend(self.words.iter().cloned());
        words.extend(disks.iter().map(|disk| disk.usage.word().to_owned()));
        words.extend(streams.input.is_none().then(|| "noinput".to_owned()));
        let qemu = Qemu {
            board: "microvm",
            cpu: &self.cpu,
            cpus: self.cpus,
            memory: self.memory,
            // The kernel divides the memory that it does not need itself.
            nodes: &Nodes::default(),
            clock: self.clock,
            accel: self.accel,
            kernel,
            initrd: archive.path(),
            line: words.join(" "),
            debug: true,
            disks,
        };
        let ended = qemu.run(streams, limits)?;
        let report = Report::read(&String::from_utf8_lossy(&ended.report));
        let is_stopped = || limits.stop.is_some_and(|stop| stop());
        let end = End::of(&report, ended.cut, ended.received, ended.complaint, is_stopped);
        Ok(Run { end, report, wall: ended.wall, skipped: initrd.skipped().to_vec() })
    }

    /// Checks whether memory can hold the archive with its unpacked files, and the tables of the
    /// swap disk.
    fn holds(&self, initrd: &Initrd) -> Result<(), BootError> {
        let (files, memory) = (initrd.size() >> 20, self.memory >> 20);
        if 2 * files >= memory {
            return Err(BootError::Memory { files, memory });
        }
        let swap = self.swap.unwrap_or(0);
        let tables = (swap / DISK_PAGE * SWAP_TABLES).div_ceil(1 << 20);
        match 4 * tables > memory {
            true => Err(BootError::Swap { swap: swap >> 20, tables, memory }),
            false => Ok(()),
        }
    }
}

/// The kernel's memory for each page of a swap disk, in bytes: an entry of a table, and a count
/// (`Cpu::swap_on`).
const SWAP_TABLES: u64 = 8 + 4;

/// Returns a file system as a file for QEMU.
pub(crate) fn archive(initrd: &Initrd) -> Result<NamedTempFile, BootError> {
    temporary(|file| initrd.write(file))
}

/// Returns a sparse file of `bytes` bytes, which is deleted with its handle.
pub(crate) fn temporary_of(bytes: u64) -> Result<NamedTempFile, BootError> {
    let file = temporary(|_| Ok(()))?;
    file.as_file().set_len(bytes).map_err(BootError::file(file.path()))?;
    Ok(file)
}

/// Returns a file with the output of `fill`, which is deleted with its handle.
fn temporary(
    fill: impl FnOnce(&mut dyn Write) -> Result<(), BootError>,
) -> Result<NamedTempFile, BootError> {
    let at = |error| BootError::file(std::env::temp_dir())(error);
    let mut file = NamedTempFile::with_prefix("faultless-").map_err(at)?;
    let mut buffered = BufWriter::new(&mut file);
    fill(&mut buffered)?;
    buffered.flush().map_err(at)?;
    drop(buffered);
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    fn end(text: &str, received: [u64; 2]) -> End {
        End::of(&Report::read(text), None, received, String::new(), || false)
    }

    /// QEMU prints warnings before the error that ends the machine.
    #[test]
    fn error_of_qemu_is_reported_without_warnings() {
        let name = "qemu-system-x86_64: ";
        let output = format!("{name}-accel kvm: warning: too many\n{name}error: no MSR\nlast\n");
        assert_eq!(qemu::errors(&output), ["no MSR", "last"]);
        let end = End::Silent(output).to_string();
        assert!(end.ends_with("of the program: QEMU: no MSR\nlast"), "{end}");
        assert_eq!(qemu::errors(&format!("{name}warning: slow\n")), ["warning: slow"]);
    }

    #[test]
    fn devices_are_no_programs() {
        for device in ["/dev/zero", "/dev/null"] {
            let error = Program::unchecked(device).map(drop).expect_err("a device");
            let text = error.to_string();
            assert!(text.contains(device) && text.contains("a device, not a program"), "{text}");
        }
    }

    /// The end of the pipe that is written to stays open, so a read to the end would not return.
    #[test]
    fn pipe_without_a_program_is_not_read_to_its_end() {
        let (reader, mut writer) = std::io::pipe().expect("a pipe");
        writer.write_all(&[0; START as usize]).expect("written");
        let path = format!("/proc/self/fd/{}", reader.as_raw_fd());
        let error = Program::file(path).map(drop).expect_err("no program").to_string();
        assert!(error.contains("begins with the bytes [00, 00, 00, 00]"), "{error}");
    }

    #[test]
    fn incomplete_output_is_no_success() {
        assert_eq!(end("sent 12 3\nexit 0", [12, 3]), End::Exited(0));
        for received in [[11, 3], [12, 2], [12, 4], [0, 0]] {
            let lost = End::Lost { sent: [12, 3], received };
            assert_eq!(end("sent 12 3\nexit 0", received), lost);
            assert_eq!(end("sent 12 3\nexit 1", received), lost);
        }
        // A kernel without reported numbers.
        assert_eq!(end("exit 7", [5, 5]), End::Exited(7));
    }
}
