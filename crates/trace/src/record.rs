//! Creates recordings, with the `perf record` options that this system permits.
//!
//! [`Setup::find`] examines perf, tracefs and permissions before any program runs, and reports
//! missing parts and remedies. Faults come from tracepoints on x86-64. Kernels of aarch64 lack
//! these tracepoints, and a software event reports faults without the kind of access.
//! [`Setup::record`] then runs the program under `perf record -c 1 -d`, so that every event is
//! written:
//!
//! - with huge pages off *for that program* (`PR_SET_THP_DISABLE`, inherited through fork and
//!   exec), because a huge page hides 511 first touches;
//! - with fault-around off (`fault_around_bytes` in debugfs), because it maps up to sixteen pages
//!   of a file in one fault. This setting affects the whole system, and is restored when perf ends,
//!   also if the recorder is killed. Recordings at the same time share the setting.
//!   If the setting cannot be written, a warning is printed, and the recording has too few first
//!   touches of file pages.

mod arguments;
mod around;
mod child;
mod error;
mod huge;
mod live;
mod probe;
mod program;
mod rate;
mod signals;
mod survivors;
mod usage;

pub use error::{RecordError, Shortfall};
pub use live::{Live, Progress, Subject};
pub use program::{find as find_program, has_capabilities};
pub use rate::Limits;
pub use signals::Signals;
pub use usage::Usage;

use crate::STOPPED;
use crate::error::Error;
use crate::event::Trace;
use crate::perf::{Architecture, is_cut, is_hidden, is_unended};
pub use around::AROUND_ON;
use around::FaultAround;
use huge::HugePages;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use survivors::Survivors;

/// The description of huge pages in a [`Header`](crate::Header), if huge pages were on for all
/// programs during the recording.
pub const HUGE_ON: &str = "on for all programs";

pub(crate) const TRACEFS: [&str; 2] = ["/sys/kernel/tracing", "/sys/kernel/debug/tracing"];
const PARANOID: &str = "/proc/sys/kernel/perf_event_paranoid";
/// Bytes written to check whether a file system accepts more data: about the size of one write of
/// perf.
const PROBE: usize = 256 << 10;
const CAP_SYS_ADMIN: u32 = 21;
const CAP_PERFMON: u32 = 38;

/// The contents of a recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// Faults with their kind of access, calls, threads and processes.
    Full,
    /// As `Full`, without the kind of access of a fault: the most that an aarch64 kernel reports.
    WithoutAccess,
    /// Addresses of faults in user and kernel mode, and mapping records, without calls and without
    /// the kind of access.
    FaultsOnly,
    /// As `FaultsOnly`, in user mode only.
    UserFaultsOnly,
}

/// The way in which call stacks are recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unwind {
    /// By frame pointers, in the kernel. A program or library that was compiled without frame
    /// pointers hides its callers.
    FramePointers,
    /// By unwind tables, after the recording: each fault stores [`STACK_BYTES`] of the stack.
    Dwarf,
}

/// Bytes of the stack that each fault stores with [`Unwind::Dwarf`], the default of perf.
pub const STACK_BYTES: u32 = 8192;

/// A working way to record on this system.
#[derive(Clone, Debug)]
pub struct Setup {
    perf: PathBuf,
    extent: Extent,
    /// The numbers of calls, if the kernel has tracepoints of all calls only.
    raw_syscalls: Option<Architecture>,
    privileged: bool,
    shortfalls: Vec<Shortfall>,
    stacks: Option<Unwind>,
}

/// A finished recording.
#[derive(Debug)]
pub struct Recorded {
    /// The recorded events, with the command and the conditions, which only the recorder knows.
    pub trace: Trace,
    /// The exit status of the program, passed on by perf.
    pub status: ExitStatus,
    /// Names of processes still running at the end of the recording: the program is a daemon.
    pub left: Vec<String>,
    /// Remarks for the user, beside earlier warnings.
    pub notes: Vec<String>,
}

impl Setup {
    /// Finds a way to record on this system. With `accept_lesser`, an incomplete recording is
    /// acceptable; [`extent`](Self::extent) and [`shortfalls`](Self::shortfalls) describe the
    /// missing parts.
    ///
    /// # Errors
    /// [`RecordError::Missing`], with all missing requirements.
    pub fn find(accept_lesser: bool) -> Result<Self, RecordError> {
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        // A kernel without user namespaces has no such file.
        let map = fs::read_to_string("/proc/self/uid_map");
        let system = System {
            perf: find_program("perf".as_ref()).ok(),
            tracefs: TRACEFS.iter().map(PathBuf::from).collect(),
            paranoid: fs::read_to_string(PARANOID).ok().and_then(|text| text.trim().parse().ok()),
            privileged: has_privilege(&status),
            contained: map.is_ok_and(|map| !probe::is_first_namespace(&map)),
            filtered: probe::is_filtered(&status),
            refusal: probe::user_faults().err(),
            architecture: Architecture::OWN,
        };
        Self::choose(&system, accept_lesser)
    }

    fn choose(system: &System, accept_lesser: bool) -> Result<Self, RecordError> {
        let mut shortfalls = Vec::new();
        let mut raw_syscalls = None;
        let mut extent = Extent::Full;
        let mut possible = true;
        let perf = system.perf.clone().unwrap_or_else(|| {
            possible = false;
            shortfalls.push(Shortfall::new(
                "perf is not installed (no `perf` in PATH)",
                "install it: `apt install linux-perf` (Debian), `apt install linux-tools-generic` \
                 (Ubuntu), `dnf install perf` (Fedora)",
            ));
            PathBuf::from("perf")
        });
        match system.tracepoints() {
            Ok(raw) => {
                raw_syscalls = raw.then_some(system.architecture);
                if system.architecture == Architecture::Arm {
                    extent = Extent::WithoutAccess;
                    shortfalls.push(Shortfall::new(
                        "this kernel does not report whether a fault was a read or a write, and \
                         whether the page was present: aarch64 lacks the page-fault tracepoints",
                        "none; advice assumes that a fault on anonymous memory is a write to an \
                         absent page",
                    ));
                }
            }
            Err(shortfall) => {
                extent = Extent::FaultsOnly;
                shortfalls.push(shortfall);
            }
        }
        let privileged = system.privileged && !system.contained;
        // A kernel without the file has perf events disabled.
        let paranoid = system.paranoid.unwrap_or(i32::MAX);
        if system.paranoid.is_none() {
            possible = false;
            shortfalls.push(Shortfall::new(
                format!("the kernel has no perf events ({PARANOID} is missing)"),
                "run a kernel built with CONFIG_PERF_EVENTS",
            ));
        } else if !privileged && paranoid > -1 {
            extent = if paranoid > 1 { Extent::UserFaultsOnly } else { Extent::FaultsOnly };
            // Vanilla kernels treat 3 as 2. Kernels of Debian, Ubuntu and Android refuse all events
            // at 3.
            let remedy = if system.contained {
                "record on the host, with --pid or --cgroup, or `sudo sysctl \
                 kernel.perf_event_paranoid=-1` on the host. Root of a user namespace, as in a \
                 rootless container, has no privilege"
            } else {
                "run as root, or `sudo sysctl kernel.perf_event_paranoid=-1`"
            };
            let what = format!(
                "kernel.perf_event_paranoid is {paranoid}; tracepoints need -1 or privilege"
            );
            shortfalls.push(Shortfall::new(what, remedy));
        }
        if let Some(error) = system.refusal() {
            possible = false;
            shortfalls.extend(refused(error, system.filtered, privileged, paranoid));
        }
        let complete = matches!(extent, Extent::Full | Extent::WithoutAccess);
        if !possible || (!complete && !accept_lesser) {
            return Err(RecordError::Missing(shortfalls));
        }
        Ok(Self { perf, extent, raw_syscalls, privileged, shortfalls, stacks: None })
    }

    /// Records the call stack of each fault and of each call that creates memory, too.
    pub fn with_stacks(self, stacks: Option<Unwind>) -> Self {
        Self { stacks, ..self }
    }

    /// Returns the contents of the recording.
    pub fn extent(&self) -> Extent {
        self.extent
    }

    /// Returns the requirements missing for a full recording; empty if a full recording is
    /// possible.
    pub fn shortfalls(&self) -> &[Shortfall] {
        &self.shortfalls
    }

    /// Runs `command`, records it into the new file `output` and reads the recording back. Before
    /// the program starts, `warn` receives the conditions that hide faults from the recording.
    /// Waits until the program has ended. SIGINT, SIGTERM, SIGHUP and SIGQUIT sent to this process
    /// in this time are forwarded to the program. An interrupt from the keyboard ends the program,
    /// not the recording. (This requires that other threads of the process have these signals
    /// blocked.) Then `read` receives the share of the recording that has been read back, and a
    /// further signal ends the reading.
    ///
    /// # Errors
    /// The program or perf cannot be run, or perf leaves no readable recording. After
    /// [`RecordError::Stopped`] the file is complete.
    pub fn record(
        &self,
        output: &Path,
        command: &[OsString],
        warn: impl Fn(&str),
        mut read: impl FnMut(f64),
    ) -> Result<Recorded, RecordError> {
        let program = command.first().map_or(OsStr::new(""), OsString::as_os_str);
        let file = find_program(program)
            .map_err(|error| RecordError::Run(program.display().to_string(), error))?;
        let around = FaultAround::turn_off();
        let hidden: Vec<_> = HugePages::find().note().into_iter().chain(around.note()).collect();
        hidden.iter().for_each(|note| warn(note));
        let mut perf = Command::new(&self.perf);
        // perf puts the directory of its own path in front of PATH, in which it then looks up the
        // program. A name without a directory leaves PATH as the user has set it.
        perf.arg0("perf").args(self.arguments(output, command));
        let signals = Signals::hold();
        let survivors = Survivors::watch();
        prepare(&mut perf);
        let run = |e| RecordError::Run(self.perf.display().to_string(), e);
        let mut perf = perf.spawn().map_err(run)?;
        let pid = perf.id();
        let forwarder = signals.forward(pid);
        signals::await_end(pid);
        // perf has waited for the program.
        let processor_us = usage::micros_of_children(pid);
        drop(forwarder);
        let status = perf.wait().map_err(run)?;
        let left = survivors.find(pid);
        drop(survivors);
        drop(around);
        let trace = crate::read_watched(output, &mut until_signal(&mut read));
        let mut trace = trace.map_err(|error| not_read(status, output, &error))?;
        let unended = trace.header.notes.iter().find(|note| is_unended(note)).cloned();
        let counts = trace.summary();
        if counts.user_faults + counts.kernel_faults == 0 {
            let killed = |note| RecordError::Perf(status, note);
            return Err(unended.map_or(RecordError::NoFaults(file), killed));
        }
        let ended = if unended.is_some() { "perf" } else { "the program" };
        let ended = (!status.success()).then(|| format!("{ended} ended with {status}"));
        let words: Vec<_> = command.iter().map(|word| word.to_string_lossy()).collect();
        let header = &mut trace.header;
        header.processor_us = processor_us;
        header.thp = "off for the program".to_owned();
        header.made = format!("faultless record -- {}; {}", words.join(" "), header.made);
        // The compact format's bound on a string.
        header.made.truncate(header.made.floor_char_boundary(4096));
        let mut notes: Vec<_> = ended.into_iter().chain(survivors::note(&left)).collect();
        let of_part = |note: &&String| is_hidden(note) || is_unended(note) || is_cut(note);
        let parts: Vec<_> = header.notes.iter().filter(of_part).cloned().collect();
        header.notes.extend(hidden.into_iter().chain(notes.clone()));
        notes.extend(parts);
        notes.extend(trace.header.loss());
        Ok(Recorded { trace, status, left, notes })
    }
}

/// Prepares `command` to start as a recorded program: with the held signals unblocked, and without
/// huge pages.
fn prepare(command: &mut Command) {
    // SAFETY: between fork and exec the closure makes only two calls, pthread_sigmask and prctl,
    // which are async-signal-safe.
    unsafe {
        command.pre_exec(|| {
            Signals::let_through();
            // A kernel without huge pages refuses the call, and has no huge pages that hide
            // touches.
            libc::prctl(libc::PR_SET_THP_DISABLE, 1, 0, 0, 0);
            Ok(())
        });
    }
}

/// Returns a watch of a reader that reports to `read`, and stops the reader at a signal.
fn until_signal(read: &mut impl FnMut(f64)) -> impl FnMut(f64) -> bool {
    |share| {
        read(share);
        !signals::arrived()
    }
}

/// Returns the `error` of a reader of the file `output`, which perf has written or not.
fn not_read(status: ExitStatus, output: &Path, error: &Error) -> RecordError {
    if error.reason == STOPPED {
        return RecordError::Stopped;
    }
    RecordError::Perf(status, why_not_written(output, error))
}

/// Returns the reason for which perf did not write the file `output`, since perf does not report
/// it: the error of a write to the file, or otherwise the error in its contents.
fn why_not_written(output: &Path, unreadable: &Error) -> String {
    no_space(output).unwrap_or_else(|| match more(output) {
        Err(error) => error.to_string(),
        Ok(()) => unreadable.reason.clone(),
    })
}

/// Returns the reason and the remedy if the file system of `output` is full.
fn no_space(output: &Path) -> Option<String> {
    let error = more(output).err()?;
    (error.raw_os_error() == Some(libc::ENOSPC)).then(|| {
        let dir = output.parent().filter(|dir| !dir.as_os_str().is_empty());
        let dir = dir.unwrap_or(Path::new("."));
        format!(
            "{error}: the file system of {} is full\n  remedy: free space there, or record to \
             another file system (-o FILE; TMPDIR for advise)",
            dir.display()
        )
    })
}

/// Writes some bytes behind the contents of `output`.
fn more(output: &Path) -> io::Result<()> {
    fs::File::options().append(true).open(output)?.write_all(&[0; PROBE])
}

/// The facts that determine the way to record.
struct System {
    perf: Option<PathBuf>,
    tracefs: Vec<PathBuf>,
    paranoid: Option<i32>,
    /// Whether this process has the capabilities.
    privileged: bool,
    /// Whether this process is in a user namespace other than the first.
    contained: bool,
    /// Whether this process has a seccomp filter.
    filtered: bool,
    /// The kernel's refusal to record faults in user mode of this process.
    refusal: Option<io::Error>,
    architecture: Architecture,
}

impl System {
    /// Returns the refusal that perf meets, too. An emulator of a program (QEMU) lacks the call,
    /// and starts the host's perf, which has the call.
    fn refusal(&self) -> Option<&io::Error> {
        let lacks = |error: &io::Error| error.raw_os_error() == Some(libc::ENOSYS);
        let is_perfs = |error: &&io::Error| self.filtered || !lacks(error);
        self.refusal.as_ref().filter(|_| self.paranoid.is_some()).filter(is_perfs)
    }

    /// Returns whether tracepoints can be used, and calls only through `raw_syscalls`.
    fn tracepoints(&self) -> Result<bool, Shortfall> {
        let probe = |event: &str| {
            let ids =
                self.tracefs.iter().map(|dir| fs::read(dir.join("events").join(event).join("id")));
            ids.reduce(|first, second| match (first, second) {
                (Ok(id), _) | (Err(_), Ok(id)) => Ok(id),
                (Err(first), Err(_)) => Err(first),
            })
        };
        // The event that shows whether tracefs can be read.
        let present = match self.architecture {
            Architecture::X86 => "exceptions/page_fault_user",
            Architecture::Arm => "task/task_newtask",
        };
        match probe(present) {
            Some(Ok(_)) => {}
            Some(Err(error)) if error.kind() == io::ErrorKind::PermissionDenied => {
                return Err(Shortfall::new(
                    "tracefs cannot be read: permission denied",
                    "run as root, or `sudo mount -o remount,mode=755 /sys/kernel/tracing`",
                ));
            }
            _ => {
                return Err(Shortfall::new(
                    "the kernel's tracepoints are missing: tracefs is not mounted, or the kernel \
                     was built without CONFIG_FTRACE",
                    "`sudo mount -t tracefs nodev /sys/kernel/tracing`",
                ));
            }
        }
        if matches!(probe("syscalls/sys_enter_mmap"), Some(Ok(_))) {
            Ok(false)
        } else if matches!(probe("raw_syscalls/sys_enter"), Some(Ok(_))) {
            Ok(true)
        } else {
            Err(Shortfall::new(
                "the kernel has no tracepoints for system calls",
                "run a kernel built with CONFIG_FTRACE_SYSCALLS",
            ))
        }
    }
}

/// Returns the reason for the kernel's refusal to record faults in user mode; `None` if the value
/// of `perf_event_paranoid`, which is reported, is the reason.
fn refused(
    error: &io::Error,
    filtered: bool,
    privileged: bool,
    paranoid: i32,
) -> Option<Shortfall> {
    if filtered {
        return Some(Shortfall::new(
            format!("a seccomp filter, as of a container, refuses perf_event_open ({error})"),
            "start the container with `--cap-add=PERFMON` (Docker and Podman then permit the \
             call), or record on the host, with --pid or --cgroup",
        ));
    }
    if !privileged && paranoid > 2 {
        return None;
    }
    Some(Shortfall::new(
        format!("the kernel refuses perf_event_open ({error}): a security module, such as SELinux"),
        "`sudo dmesg | grep -i -e denied -e lockdown` names the rule; permit the call there",
    ))
}

/// Returns whether the effective capabilities in the text of `/proc/self/status` permit
/// tracepoints.
fn has_privilege(status: &str) -> bool {
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let bits = line.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()).unwrap_or(0);
    bits & (1 << CAP_SYS_ADMIN | 1 << CAP_PERFMON) != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates a directory like tracefs with these events.
    fn tracefs(name: &str, events: &[&str]) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("faultless-{name}-{}", std::process::id()));
        for event in events {
            let event = dir.join("events").join(event);
            fs::create_dir_all(&event).unwrap();
            fs::write(event.join("id"), "1").unwrap();
        }
        dir
    }

    fn system(tracefs: PathBuf, paranoid: i32, privileged: bool) -> System {
        let perf = Some("/bin/perf".into());
        let paranoid = Some(paranoid);
        let tracefs = vec![tracefs];
        let architecture = Architecture::X86;
        System {
            perf,
            tracefs,
            paranoid,
            privileged,
            contained: false,
            filtered: false,
            refusal: None,
            architecture,
        }
    }

    const ALL: [&str; 3] =
        ["exceptions/page_fault_user", "syscalls/sys_enter_mmap", "raw_syscalls/sys_enter"];

    #[test]
    fn privileged_user_gets_a_full_recording() {
        let dir = tracefs("all", &ALL);
        let setup = Setup::choose(&system(dir.clone(), 2, true), false).unwrap();
        assert_eq!(setup.extent(), Extent::Full);
        assert!(setup.shortfalls().is_empty());
        let args = setup.arguments(Path::new("out"), &["a".into(), "-b".into()]);
        assert!(args.contains(&"syscalls:sys_exit_mremap".into()));
        assert!(args.contains(&"-N".into()), "no copies of programs are kept");
        assert!(args.contains(&"-B".into()), "perf does not read its file");
        let sampled: Vec<_> = setup.events(9).into_iter().flatten().collect();
        assert!(sampled.contains(&"page-faults/period=9/".into()));
        assert!(sampled.contains(&"syscalls:sys_exit_mremap".into()), "all calls are recorded");
        assert!(!sampled.contains(&"exceptions:page_fault_user".into()));
        assert!(args.windows(2).any(|pair| pair == ["-o", "out"]));
        assert_eq!(args[args.len() - 3..], ["--", "a", "-b"]);
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn call_stacks_are_recorded_for_faults_and_calls_that_change_memory() {
        let dir = tracefs("stacks", &ALL);
        let setup = Setup::choose(&system(dir.clone(), 2, true), false).unwrap();
        let of = |unwind, period| {
            let setup = setup.clone().with_stacks(unwind);
            let events: Vec<_> = setup.events(period).into_iter().flatten().collect();
            let common = setup.common(Path::new("out"));
            (events, common.contains(&"--user-callchains".into()))
        };
        let (events, user) = of(None, 1);
        assert!(events.contains(&"exceptions:page_fault_user".into()) && !user);
        let (events, user) = of(Some(Unwind::FramePointers), 1);
        assert!(events.contains(&"exceptions:page_fault_kernel/call-graph=fp/".into()) && user);
        for call in ["mmap", "munmap", "madvise", "brk", "mremap"] {
            let enter = format!("syscalls:sys_enter_{call}/call-graph=fp/");
            assert!(events.contains(&enter.into()), "{events:?}");
        }
        for event in ["sys_exit_mmap", "sys_exit_munmap", "sys_enter_mprotect"] {
            assert!(events.contains(&format!("syscalls:{event}").into()), "{events:?}");
        }
        let (events, _) = of(Some(Unwind::Dwarf), 8);
        let sampled = "page-faults/period=8,call-graph=dwarf,stack-size=8192/";
        assert!(events.contains(&sampled.into()), "{events:?}");
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn missing_requirements_are_reported_with_remedies() {
        let none = tracefs("none", &[]);
        let Err(RecordError::Missing(missing)) =
            Setup::choose(&system(none.clone(), 2, false), false)
        else {
            panic!("no shortfall");
        };
        assert!(missing[0].remedy.contains("mount -t tracefs"));
        assert!(missing[1].what.contains("perf_event_paranoid is 2"));
        let lesser = Setup::choose(&system(none.clone(), 2, false), true).unwrap();
        assert_eq!(lesser.extent(), Extent::UserFaultsOnly);
        // Vanilla kernels permit the same at 3 as at 2; Debian's kernels do not.
        let lesser = Setup::choose(&system(none.clone(), 3, false), true).unwrap();
        assert_eq!(lesser.extent(), Extent::UserFaultsOnly);
        let refusal = || Some(io::Error::from_raw_os_error(libc::EPERM));
        let refusing = System { refusal: refusal(), ..system(none.clone(), 3, false) };
        let error = Setup::choose(&refusing, true).unwrap_err().to_string();
        assert!(!error.contains("perf_event_open"), "{error}");
        let all = tracefs("refused", &ALL);
        for (filtered, cause) in [(true, "a seccomp filter"), (false, "a security module")] {
            let refusing = System { refusal: refusal(), filtered, ..system(all.clone(), 2, true) };
            let error = Setup::choose(&refusing, true).unwrap_err().to_string();
            assert!(error.contains(cause) && error.contains("not permitted"), "{error}");
        }
        // An emulator lacks the call, and a filter can pretend that the kernel does.
        for (filtered, possible) in [(false, true), (true, false)] {
            let refusal = Some(io::Error::from_raw_os_error(libc::ENOSYS));
            let lacking = System { refusal, filtered, ..system(all.clone(), 2, true) };
            assert_eq!(Setup::choose(&lacking, true).is_ok(), possible);
        }
        // Root of a user namespace.
        let contained = System { contained: true, ..system(all.clone(), 2, true) };
        let error = Setup::choose(&contained, false).unwrap_err().to_string();
        assert!(error.contains("Root of a user namespace"), "{error}");
        fs::remove_dir_all(all).unwrap();
        let no_perf = System { perf: None, ..system(none, -1, true) };
        let Err(error) = Setup::choose(&no_perf, true) else { panic!("recorded without perf") };
        assert!(error.to_string().contains("apt install linux-perf"));
    }

    #[test]
    fn raw_syscalls_replace_missing_tracepoints() {
        let dir = tracefs("raw", &[ALL[0], ALL[2]]);
        let setup = Setup::choose(&system(dir.clone(), -1, false), false).unwrap();
        let args = setup.arguments(Path::new("out"), &["a".into()]);
        let filter = "id==9||id==10||id==11||id==12||id==25||id==28";
        assert_eq!(args.iter().filter(|arg| *arg == filter).count(), 2);
        assert!(!args.contains(&"-m".into()));
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn aarch64_records_faults_without_access_and_its_own_calls() {
        let dir = tracefs("arm", &["task/task_newtask", ALL[2]]);
        let arm = |tracefs| System { architecture: Architecture::Arm, ..system(tracefs, 2, true) };
        let setup = Setup::choose(&arm(dir.clone()), false).unwrap();
        assert_eq!(setup.extent(), Extent::WithoutAccess);
        assert!(setup.shortfalls()[0].what.contains("a read or a write"));
        let args = setup.arguments(Path::new("out"), &["a".into()]);
        let filter = "id==222||id==226||id==215||id==214||id==216||id==233";
        assert_eq!(args.iter().filter(|arg| *arg == filter).count(), 2, "{args:?}");
        assert!(args.contains(&"page-faults".into()));
        assert!(!args.iter().any(|arg| arg.to_string_lossy().starts_with("exceptions:")));
        assert!(Setup::choose(&arm(dir.join("nowhere")), false).is_err());
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn missing_program_is_reported_before_perf_runs() {
        let dir = tracefs("program", &ALL);
        let setup = Setup::choose(&system(dir.clone(), 2, true), false).unwrap();
        for name in ["/no/such/program", "no-such-program-at-all", ""] {
            let error = setup
                .record(Path::new("never-written"), &[name.into()], |_| (), |_| ())
                .unwrap_err();
            assert!(matches!(error, RecordError::Run(ref what, _) if what == name), "{error}");
        }
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn full_file_system_is_named_with_a_remedy() {
        let why = no_space(Path::new("/dev/full")).unwrap();
        assert!(why.contains("of /dev is full") && why.contains("remedy: free space"), "{why}");
        let file = tempfile::NamedTempFile::new().unwrap();
        assert_eq!(no_space(file.path()), None);
    }

    #[test]
    fn recorded_program_starts_without_blocked_signals() {
        let _alone = survivors::alone();
        // Held twice, as if the caller held them too.
        let _held = [Signals::hold(), Signals::hold()];
        let mut command = Command::new("cat");
        command.arg("/proc/self/status");
        prepare(&mut command);
        let status = String::from_utf8(command.output().unwrap().stdout).unwrap();
        let blocked = status.lines().find_map(|line| line.strip_prefix("SigBlk:"));
        assert_eq!(blocked.map(str::trim), Some("0000000000000000"));
        assert!(status.contains("THP_enabled:\t0"), "{status}");
    }

    #[test]
    fn capabilities_are_parsed_from_the_status_file() {
        assert!(has_privilege("Name:\tx\nCapEff:\t0000004000000000\n"));
        assert!(!has_privilege("CapEff:\t0000000000000400\n"));
    }
}
