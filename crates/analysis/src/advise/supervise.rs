//! A process between this command and the program, which waits for all descendants of the program.
//!
//! Daemons and similar processes leave their parent, so the parent's resource usage lacks their
//! time. The supervisor is the subreaper of its descendants (`PR_SET_CHILD_SUBREAPER`), waits for
//! each of them, and reports their usage. It does not execute a program: it is forked before the
//! program's `exec`.
//!
//! Processes that keep running are killed [`LINGER`] after the end of the program's first process,
//! or after a request to stop. No run outlives this command, or makes the command wait for ever.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus};
use std::sync::LazyLock;
use std::thread;
use std::time::{Duration, Instant};

/// The time for which processes may keep running after the end of the program's first process, or
/// after a request to stop.
const LINGER: Duration = Duration::from_secs(2);
/// The time after which processes that were killed must have ended. A process may wait for a device
/// that does not respond.
const KILLED: Duration = Duration::from_secs(20);
/// The interval of checks for running processes.
const LOOK: Duration = Duration::from_millis(2);

/// The bytes of a block in a count of blocks that were read.
const BLOCK: u64 = 512;

/// The usage of all processes of a run.
#[derive(Clone, Copy, Debug)]
pub struct Usage {
    /// Seconds in the program.
    pub user: f64,
    /// Seconds in the kernel.
    pub system: f64,
    /// Faults without disk access, and populated pages.
    pub minor_faults: u64,
    /// Faults with disk access.
    pub major_faults: u64,
    /// Bytes read from disks.
    pub read: u64,
    /// The end of the first process.
    pub status: ExitStatus,
    /// Processes that were still running after the first process, and were killed.
    pub ended: u32,
}

/// A program under a supervisor.
#[derive(Debug)]
pub struct Supervised {
    supervisor: Child,
    report: File,
    pid: i32,
}

/// Words of a report: the process identifier, the wait status, seconds and microseconds of user and
/// system time, faults without and with disk access, and blocks read.
type Word = i64;

impl Supervised {
    /// Starts `command`.
    ///
    /// # Errors
    /// The program cannot be executed.
    pub fn spawn(command: &mut Command) -> io::Result<Self> {
        let (report, sender) = nix::unistd::pipe()?;
        let fd = sender.as_raw_fd();
        // SAFETY: `supervise` makes system calls only, which are all async-signal-safe.
        unsafe { command.pre_exec(move || supervise(fd)) };
        let supervisor = command.spawn()?;
        drop::<OwnedFd>(sender);
        let mut report = File::from(report);
        let pid = word(&mut report)?;
        let pid = i32::try_from(pid).map_err(io::Error::other)?;
        Ok(Self { supervisor, report, pid })
    }

    /// Returns the identifier of the program's first process.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Returns the identifier of the supervisor, the ancestor of all processes of the program.
    pub fn supervisor(&self) -> i32 {
        self.supervisor.id().cast_signed()
    }

    /// Waits until all processes have ended. Calls `look` repeatedly while the first process runs.
    /// Kills processes that keep running for longer than [`LINGER`] after the first process, or
    /// after `stopped` has returned true.
    ///
    /// # Errors
    /// The supervisor was killed, or a process cannot be killed.
    pub fn wait(mut self, stopped: impl Fn() -> bool, mut look: impl FnMut()) -> io::Result<Usage> {
        let mut deadline = Deadline { supervisor: self.supervisor(), begin: None, ended: 0 };
        let mut pause = LOOK / 2;
        while !self.is_ready(pause)? {
            look();
            pause = (pause * 2).min(10 * LOOK);
            if stopped() {
                self.enforce(&mut deadline)?;
            }
        }
        let status = word(&mut self.report)? as i32;
        while !self.is_ready(LOOK)? {
            self.enforce(&mut deadline)?;
        }
        let ended = deadline.ended;
        let mut next = || word(&mut self.report);
        let mut seconds = || Ok::<f64, io::Error>(next()? as f64 + next()? as f64 / 1e6);
        let (user, system) = (seconds()?, seconds()?);
        let mut count = || Ok::<u64, io::Error>(word(&mut self.report)?.cast_unsigned());
        let (minor_faults, major_faults) = (count()?, count()?);
        let read = count()? * BLOCK;
        self.supervisor.wait()?;
        let status = ExitStatus::from_raw(status);
        Ok(Usage { user, system, minor_faults, major_faults, read, status, ended })
    }

    /// Kills the processes of the program that still run at the deadline. If they do not end, kills
    /// the supervisor, so that the wait ends.
    fn enforce(&mut self, deadline: &mut Deadline) -> io::Result<()> {
        let enforced = deadline.enforce();
        if enforced.is_err() {
            self.supervisor.kill()?;
            self.supervisor.wait()?;
        }
        enforced
    }

    /// Waits for the next word of the report, for `time` at most.
    fn is_ready(&self, time: Duration) -> io::Result<bool> {
        let mut fd = libc::pollfd { fd: self.report.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        let time = i32::try_from(time.as_millis()).unwrap_or(i32::MAX);
        // SAFETY: `fd` is one valid structure.
        match unsafe { libc::poll(&raw mut fd, 1, time) } {
            0 => Ok(false),
            1.. => Ok(true),
            _ => match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::Interrupted => Ok(false),
                error => Err(error),
            },
        }
    }
}

/// The time at which the processes of a run are killed.
struct Deadline {
    supervisor: i32,
    /// The end of the first process, or the request to stop.
    begin: Option<Instant>,
    /// The processes that were killed.
    ended: u32,
}

impl Deadline {
    /// Kills the running processes, [`LINGER`] after the first call.
    fn enforce(&mut self) -> io::Result<()> {
        let passed = self.begin.get_or_insert_with(Instant::now).elapsed();
        if passed > LINGER + KILLED {
            let why = "a process of the program still runs after SIGKILL";
            return Err(io::Error::new(io::ErrorKind::TimedOut, why));
        }
        if passed > LINGER {
            self.ended = self.ended.max(kill_descendants(self.supervisor));
            thread::sleep(LOOK);
        }
        Ok(())
    }
}

/// Kills all running descendants of `pid`. Returns their number.
fn kill_descendants(pid: i32) -> u32 {
    let left = descendants(pid);
    for pid in &left {
        // A process that has ended by now is not affected: only the supervisor reaps it.
        _ = kill(Pid::from_raw(*pid), Signal::SIGKILL);
    }
    left.len() as u32
}

/// Kills all descendants of `pid`, and waits a short time for their end.
pub fn end_descendants(pid: i32) {
    let begin = Instant::now();
    while kill_descendants(pid) > 0 && begin.elapsed() < LINGER {
        thread::sleep(LOOK);
    }
}

fn word(report: &mut File) -> io::Result<Word> {
    let mut bytes = [0; size_of::<Word>()];
    report.read_exact(&mut bytes)?;
    Ok(Word::from_ne_bytes(bytes))
}

/// Whether the kernel lists the children of a thread (`CONFIG_PROC_CHILDREN`).
static LISTS_CHILDREN: LazyLock<bool> =
    LazyLock::new(|| Path::new("/proc/thread-self/children").exists());

/// Returns all running descendants of `pid`.
pub fn descendants(pid: i32) -> Vec<i32> {
    if *LISTS_CHILDREN {
        return tree(pid, listed_children);
    }
    let parents = parents();
    let children = |pid| {
        let of = parents.iter().filter(|(_, parent)| **parent == pid);
        of.map(|(child, _)| *child).collect()
    };
    tree(pid, children)
}

/// Returns all descendants of `pid`.
fn tree(pid: i32, children: impl Fn(i32) -> Vec<i32>) -> Vec<i32> {
    let mut found = Vec::new();
    let mut next = vec![pid];
    while let Some(pid) = next.pop() {
        let children = children(pid);
        found.extend(&children);
        next.extend(children);
    }
    found
}

/// Returns the children of `pid` from the lists of its threads.
fn listed_children(pid: i32) -> Vec<i32> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let lists = tasks.filter_map(|task| fs::read_to_string(task.path().join("children")).ok());
    let children = |list: String| -> Vec<i32> {
        list.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
    };
    lists.flat_map(children).collect()
}

/// Returns the words behind the name in the text of `/proc/PID/stat`: the state, the parent, and so
/// on, from word 3 of the line on.
pub fn stat_words(stat: &str) -> impl Iterator<Item = &str> {
    // The name, in parentheses, may contain any character.
    stat.rsplit_once(')').map_or("", |(_, after)| after).split_whitespace()
}

/// Returns the parent of each process.
fn parents() -> HashMap<i32, i32> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let parent = |entry: fs::DirEntry| {
        let pid = entry.file_name().to_str()?.parse().ok()?;
        let stat = fs::read_to_string(entry.path().join("stat")).ok()?;
        Some((pid, stat_words(&stat).nth(1)?.parse().ok()?))
    };
    processes.filter_map(parent).collect()
}

/// Forks. The child returns, to execute the program. The parent is the supervisor and never
/// returns.
fn supervise(report: RawFd) -> io::Result<()> {
    // SAFETY: the only memory of this process that these calls touch is their local argument
    // structures. After the fork the parent runs only the calls below, and ends with `_exit`.
    unsafe {
        libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
        // Not `fork`, which runs handlers that may allocate.
        let pid = libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0);
        match pid {
            0 => return Ok(()),
            ..0 => return Err(io::Error::last_os_error()),
            _ => {}
        }
        // `Command::spawn` waits until its own pipe is closed, as does a reader of the program's
        // output.
        libc::syscall(libc::SYS_close_range, 0, report - 1, 0);
        libc::syscall(libc::SYS_close_range, report + 1, u32::MAX, 0);
        let send = |value: Word| {
            let bytes = value.to_ne_bytes();
            libc::write(report, bytes.as_ptr().cast(), bytes.len());
        };
        send(pid);
        let mut all = Usages::default();
        loop {
            let (mut status, mut usage) = (0, std::mem::zeroed::<libc::rusage>());
            match libc::wait4(-1, &raw mut status, 0, &raw mut usage) {
                ended if ended > 0 => {
                    all.add(&usage);
                    if libc::c_long::from(ended) == pid {
                        send(status.into());
                    }
                }
                _ if *libc::__errno_location() == libc::EINTR => {}
                _ => break,
            }
        }
        all.words().into_iter().for_each(send);
        libc::_exit(0);
    }
}

/// The sums of a supervisor.
#[derive(Default)]
struct Usages {
    user: i64,
    system: i64,
    faults: i64,
    major: i64,
    blocks: i64,
}

impl Usages {
    fn add(&mut self, usage: &libc::rusage) {
        let micros = |time: libc::timeval| time.tv_sec * 1_000_000 + time.tv_usec;
        self.user += micros(usage.ru_utime);
        self.system += micros(usage.ru_stime);
        self.faults += usage.ru_minflt;
        self.major += usage.ru_majflt;
        self.blocks += usage.ru_inblock;
    }

    fn words(&self) -> [Word; 7] {
        const SECOND: i64 = 1_000_000;
        let Self { user, system, faults, major, blocks } = *self;
        let (whole, part) = (|time: i64| time / SECOND, |time: i64| time % SECOND);
        [whole(user), part(user), whole(system), part(system), faults, major, blocks]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usage(script: &str) -> Usage {
        let mut command = Command::new("sh");
        let run = Supervised::spawn(command.args(["-c", script])).expect("sh starts");
        run.wait(|| false, || ()).expect("the supervisor reports")
    }

    #[test]
    fn usage_includes_an_orphaned_grandchild() {
        // The intermediate shell ends at once, so its child has no waiting parent.
        let busy = "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done";
        let used = usage(&format!("sh -c '({busy}) & exit 0'; exit 3"));
        assert_eq!((used.status.code(), used.ended), (Some(3), 0));
        let alone = usage("sh -c 'exit 0'; exit 3");
        assert!(used.user + used.system > alone.user + alone.system + 0.01, "{used:?}, {alone:?}");
    }

    #[test]
    fn supervisor_kills_a_lingering_daemon() {
        let begin = Instant::now();
        let used = usage("(sleep 1000 &) ; exit 0");
        assert_eq!((used.status.code(), used.ended), (Some(0), 1));
        assert!(begin.elapsed() < 10 * LINGER);
    }

    /// The program and its child ignore the signal that requests their end.
    #[test]
    fn stop_kills_a_program_that_ignores_sigterm() {
        let begin = Instant::now();
        let mut command = Command::new("sh");
        let script = "trap '' TERM; sleep 1000 & wait; sleep 1000";
        let run = Supervised::spawn(command.args(["-c", script])).expect("sh starts");
        let pid = run.pid();
        let used = run.wait(|| true, || ()).expect("the supervisor reports");
        assert_eq!(used.status.signal(), Some(9));
        assert!(begin.elapsed() < 10 * LINGER, "after {:?}", begin.elapsed());
        assert!(!Path::new(&format!("/proc/{pid}")).exists());
    }

    #[test]
    fn descendants_are_found_with_and_without_lists_of_children() {
        let mut command = Command::new("sh");
        let script = "(sleep 1000 & sleep 1000; true) & sleep 1000; true";
        let run = Supervised::spawn(command.args(["-c", script])).expect("sh starts");
        let supervisor = run.supervisor();
        let listed = || {
            let mut found = tree(supervisor, listed_children);
            found.sort_unstable();
            found
        };
        let scanned = || {
            let parents = parents();
            let of = |pid| parents.iter().filter(|(_, of)| **of == pid).map(|it| *it.0).collect();
            let mut found = tree(supervisor, of);
            found.sort_unstable();
            found
        };
        // Two shells and three programs.
        let limit = Instant::now() + 5 * LINGER;
        while scanned().len() < 5 {
            assert!(Instant::now() < limit, "{:?}", scanned());
            thread::sleep(LOOK);
        }
        if *LISTS_CHILDREN {
            assert_eq!(scanned(), listed());
        }
        end_descendants(supervisor);
        run.wait(|| false, || ()).expect("the supervisor reports");
    }

    #[test]
    fn spawn_fails_if_the_program_cannot_be_executed() {
        let error =
            Supervised::spawn(&mut Command::new("/no/such/program")).expect_err("no such program");
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn signal_of_the_first_process_is_reported() {
        assert_eq!(usage("kill -9 $$").status.signal(), Some(9));
    }
}
