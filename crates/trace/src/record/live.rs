//! Recordings of processes that already run.
//!
//! perf starts with its events disabled, lists the mappings of the processes, and enables the
//! events on a command through a pipe. The resident pages are read after perf has acknowledged the
//! command, so every page is either in a [`Snapshot`] or has a recorded fault. A page with both
//! became resident in between, and belongs to the faults; the times of both, by the same clock,
//! distinguish this case.
//!
//! The processes run as before: huge pages and fault-around keep the settings of the system.

use super::child::Perf;
use super::huge::HugePages;
use super::rate::{MOST_OMITTED, next_period};
use super::signals;
use super::usage::{Usage, children_time};
use super::{
    HUGE_ON, Limits, RecordError, Recorded, STACK_BYTES, Setup, Unwind, no_space, not_read,
    until_signal,
};
use crate::event::{Kind, MAX_RESIDENT, Trace};
use crate::perf::{Running, is_cut, is_hidden, is_unended};
use crate::resident::{Snapshot, now_ns};
use procfs::process::{Process, all_processes};
use std::collections::{HashMap, HashSet};
use std::ffi::OsString;
use std::fmt;
use std::fs::{self, File};
use std::io;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// The time after which a descendant must still run to be recorded. perf fails if a process ends
/// while perf starts.
const SETTLE: Duration = Duration::from_millis(100);
/// Attempts to start perf, if a descendant has ended nevertheless.
const ATTEMPTS: usize = 5;
/// The directories below which control groups are.
const CGROUPS: [&str; 3] =
    ["/sys/fs/cgroup/perf_event", "/sys/fs/cgroup/unified", "/sys/fs/cgroup"];
/// The size of a recording, in bytes, at which the recording ends: 10 to 15 million events. A
/// [`Trace`] has at most 16 million.
const MAX_BYTES: u64 = 5 << 28;
/// The time over which the rate of events is measured.
const WINDOW: Duration = Duration::from_secs(2);
/// The bytes of a recorded fault without its call stack in the file of perf.
const BYTES_OF_EVENT: u32 = 112;
/// The usual bytes of a call stack by frame pointers: 15 frames.
const BYTES_OF_FRAMES: u32 = 120;
/// The bytes of the registers and the sizes that are stored with a copy of the stack.
const BYTES_OF_REGISTERS: u32 = 160;
/// Processes that already run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Subject {
    /// These processes, and their descendants.
    Processes(Vec<i32>),
    /// The processes of a control group: its path, absolute or below the root of the groups.
    Cgroup(PathBuf),
    /// All processes of the system.
    System,
}

impl Subject {
    /// Returns the named processes that have ended.
    fn ended(&self) -> Vec<i32> {
        let Self::Processes(pids) = self else { return Vec::new() };
        pids.iter().copied().filter(|pid| Usage::of(*pid).is_none()).collect()
    }
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Processes(pids) => {
                let pids: Vec<_> = pids.iter().map(i32::to_string).collect();
                write!(f, "--pid {}", pids.join(","))
            }
            Self::Cgroup(path) => write!(f, "--cgroup {}", path.display()),
            Self::System => f.write_str("--all"),
        }
    }
}

/// The progress of a recording.
#[derive(Clone, Copy, Debug)]
pub enum Progress {
    /// The recorded time so far, in seconds, and the recorded bytes.
    Records(f64, u64),
    /// The share of the recording that has been read back, from 0 to 1.
    Reads(f64),
}

/// A finished recording of running processes.
#[derive(Debug)]
pub struct Live {
    /// The recording. The exit status is the status of perf.
    pub recorded: Recorded,
    /// The recorded time, in seconds.
    pub seconds: f64,
    /// Processor time of perf, in seconds.
    pub recorder: f64,
    /// Processor time of the recorded processes, with their children that have ended; `None` if one
    /// of the processes has ended, whose time is unknown.
    pub usage: Option<Usage>,
    /// The named processes that have ended.
    pub ended: Vec<i32>,
}

impl Live {
    /// Returns whether the recording has a page fault.
    pub fn has_fault(&self) -> bool {
        let mut events = self.recorded.trace.events.iter();
        events.any(|event| matches!(event.kind, Kind::Fault { .. }))
    }

    /// Returns the events for each second, with the omitted faults.
    pub fn rate(&self) -> f64 {
        let Trace { header, events, .. } = &self.recorded.trace;
        let faults = events.iter().filter(|event| matches!(event.kind, Kind::Fault { .. })).count();
        let all = events.len() as u64 + faults as u64 * u64::from(header.omitted);
        all as f64 / self.seconds.max(1e-3)
    }
}

impl Setup {
    /// Records `subject` into the new file `output` within `limits`, or until the processes end or
    /// this process receives one of the held signals, and reads the recording back. If the
    /// processes have more events in a second than the limit, the recording begins again, with one
    /// in several faults. Calls `progress` repeatedly. (This requires that the caller holds the
    /// [`Signals`](super::Signals).)
    ///
    /// # Errors
    /// The processes do not exist or may not be recorded, perf cannot be run, or perf leaves no
    /// readable recording.
    pub fn record_live(
        &self,
        output: &Path,
        subject: &Subject,
        limits: Limits,
        mut progress: impl FnMut(Progress),
    ) -> Result<Live, RecordError> {
        let run = |error| RecordError::Run(self.perf.display().to_string(), error);
        let mut before = children_time();
        let (mut period, mut rate) = (1, None);
        let (session, full) = loop {
            let mut session = self.begin(output, subject, period)?;
            let most = (period < MOST_OMITTED).then(|| limits.rate());
            let bytes = event_bytes(self.stacks);
            match session.watch(output, limits.time, most, bytes, &mut progress).map_err(run)? {
                Ended::Fast(measured) => {
                    period = next_period(period, measured, limits.rate());
                    rate.get_or_insert(measured);
                    drop(session);
                    // perf would keep a file with contents.
                    File::create(output).map_err(run)?;
                    before = children_time();
                }
                ended => break (session, matches!(ended, Ended::Full)),
            }
        };
        let Session { mut perf, begun, start, enabled_ns, snapshots, unread, used } = session;
        let seconds = start.elapsed().as_secs_f64();
        let usage = Usage::since(&used);
        let ended = subject.ended();
        let status = perf.end().map_err(run)?;
        let stopped = [libc::SIGINT, libc::SIGTERM].map(Some).contains(&status.signal());
        if !begun || !(status.success() || stopped) {
            let why = no_space(output).unwrap_or_else(|| perf.message());
            return Err(RecordError::Perf(status, why));
        }
        let own = [std::process::id() as i32, perf.child.id() as i32];
        let running = Running { snapshots: &snapshots, enabled_ns, own: &own };
        let mut read = |share| progress(Progress::Reads(share));
        let trace = crate::perf::read_live(output, running, &mut until_signal(&mut read));
        let trace = trace.map_err(|error| not_read(status, output, &error))?;
        let mut live = Live {
            recorded: Recorded { trace, status, left: Vec::new(), notes: Vec::new() },
            seconds,
            recorder: children_time() - before,
            usage,
            ended,
        };
        if let Some(pid) = live.ended.first().filter(|_| !live.has_fault()) {
            let why = format!(
                "PID {pid} ended after {seconds:.1} s, without a page fault. Remedy: record the \
                 program from its start: faultless record -- PROGRAM"
            );
            return Err(RecordError::Subject(subject.to_string(), why));
        }
        let trace = &mut live.recorded.trace;
        let header = &mut trace.header;
        header.processor_us = usage.map_or(0, Usage::micros);
        header.made = format!("faultless record {subject}; {}", header.made);
        header.made.truncate(header.made.floor_char_boundary(4096));
        let huge = HugePages::find().live_note();
        header.thp = if huge.is_some() { HUGE_ON } else { "on by request" }.to_owned();
        let of_part = |note: &&String| is_hidden(note) || is_unended(note) || is_cut(note);
        let parts: Vec<_> = header.notes.iter().filter(of_part).cloned().collect();
        let mut notes = notes(&snapshots, unread);
        notes.extend(huge);
        notes.extend(rate.map(|rate| {
            format!(
                "the processes have {rate:.0} events a second, more than the limit of {:.0}: one \
                 in {period} faults was recorded, with all calls. Remedy: a shorter time by \
                 --seconds, or a higher limit by --max-rate",
                limits.rate()
            )
        }));
        if full {
            notes.push(format!(
                "the recording ends after {seconds:.1} s, with the largest size of a recording: \
                 the processes have {:.0} events a second, and the recording is a sample of this \
                 time. Remedy: a shorter time by --seconds",
                trace.events.len() as f64 / seconds
            ));
        }
        trace.header.notes.extend(notes.clone());
        notes.extend(parts);
        notes.extend(trace.header.loss());
        live.recorded.notes = notes;
        Ok(live)
    }
}

/// A running recording.
struct Session {
    perf: Perf,
    /// Whether perf has enabled its events.
    begun: bool,
    start: Instant,
    enabled_ns: u64,
    snapshots: Vec<Snapshot>,
    /// The number of processes whose resident pages may not be read.
    unread: usize,
    used: HashMap<i32, Usage>,
}

/// The reason for the end of a recording.
enum Ended {
    /// The end of the time or of the processes, or a signal.
    Over,
    /// The file has the largest size.
    Full,
    /// The processes have this number of events in a second, more than the limit.
    Fast(f64),
}

impl Setup {
    /// Begins the recording of `subject` with one in `period` faults.
    fn begin(&self, output: &Path, subject: &Subject, period: u32) -> Result<Session, RecordError> {
        let wrong = |why: String| RecordError::Subject(subject.to_string(), why);
        let run = |error| RecordError::Run(self.perf.display().to_string(), error);
        let (mut attempt, mut chosen, mut perf, mut begun);
        attempt = 1;
        loop {
            chosen = Chosen::find(subject).map_err(wrong)?;
            perf = self.start(output, &chosen, period).map_err(run)?;
            begun = perf.enable().map_err(run)?;
            if begun || attempt == ATTEMPTS || chosen.runs() {
                break;
            }
            attempt += 1;
        }
        let (start, enabled_ns) = (Instant::now(), now_ns());
        let (mut snapshots, mut unread) = (Vec::new(), 0);
        let used = Usage::of_each(chosen.pids());
        if begun {
            (snapshots, unread) = chosen.snapshots().map_err(wrong)?;
        }
        Ok(Session { perf, begun, start, enabled_ns, snapshots, unread, used })
    }

    /// Starts perf, with its events disabled.
    fn start(&self, output: &Path, chosen: &Chosen, period: u32) -> io::Result<Perf> {
        let mut command = Command::new(&self.perf);
        // Messages explain a failure.
        let common = self.common(output).into_iter().filter(|arg| arg != "-q");
        command.arg0("perf").args(common);
        Perf::start(command, chosen.arguments(self.events(period)))
    }
}

/// Returns the bytes of a recorded fault in the file of perf.
fn event_bytes(stacks: Option<Unwind>) -> f64 {
    let stack = match stacks {
        None => 0,
        Some(Unwind::FramePointers) => BYTES_OF_FRAMES,
        Some(Unwind::Dwarf) => STACK_BYTES + BYTES_OF_REGISTERS,
    };
    f64::from(BYTES_OF_EVENT + stack)
}

/// Returns the notes about pages that a recording does not contain.
fn notes(snapshots: &[Snapshot], unread: usize) -> Vec<String> {
    let mut notes = Vec::new();
    if unread > 0 {
        notes.push(format!(
            "resident pages cannot be read for {unread} of the processes (permission denied): later \
             faults on such pages are not distinguished from first touches"
        ));
    }
    let swapped: u64 = snapshots.iter().map(|it| it.swapped).sum();
    if swapped > 0 {
        notes.push(format!(
            "{swapped} pages were in swap when the recording began: their first use appears as a \
             first touch"
        ));
    }
    if snapshots.iter().any(|it| it.truncated) {
        notes.push(format!(
            "the processes have more resident pages than a recording can contain \
             ({MAX_RESIDENT}): the other pages are missing, and peaks of memory are too small"
        ));
    }
    notes
}

impl Session {
    /// Waits until perf has ended, `limit` is over, a held signal arrives, the file `output` is
    /// full, or more than `most` events in a second were recorded, if given. A fault has
    /// `event_bytes` bytes.
    fn watch(
        &mut self,
        output: &Path,
        limit: Option<Duration>,
        most: Option<f64>,
        event_bytes: f64,
        progress: &mut impl FnMut(Progress),
    ) -> io::Result<Ended> {
        if !self.begun {
            return Ok(Ended::Over);
        }
        // The time and the size at the start of the present window.
        let (mut since, mut size) = (Duration::ZERO, 0);
        loop {
            if self.perf.child.try_wait()?.is_some() || signals::next().is_some() {
                return Ok(Ended::Over);
            }
            let elapsed = self.start.elapsed();
            let bytes = fs::metadata(output).map_or(0, |data| data.len());
            progress(Progress::Records(elapsed.as_secs_f64(), bytes));
            if bytes >= MAX_BYTES {
                return Ok(Ended::Full);
            }
            if limit.is_some_and(|limit| elapsed >= limit) {
                return Ok(Ended::Over);
            }
            if elapsed - since >= WINDOW {
                let events = bytes.saturating_sub(size) as f64 / event_bytes;
                let rate = events / (elapsed - since).as_secs_f64();
                if most.is_some_and(|most| rate > most) {
                    return Ok(Ended::Fast(rate));
                }
                (since, size) = (elapsed, bytes);
            }
        }
    }
}

/// The chosen processes.
enum Chosen {
    Processes(Vec<i32>),
    /// The name of a control group, and its processes.
    Cgroup(String, Vec<i32>),
    System(Vec<i32>),
}

impl Chosen {
    fn find(subject: &Subject) -> Result<Self, String> {
        match subject {
            Subject::Processes(pids) => {
                for pid in pids {
                    let there = Process::new(*pid).and_then(|process| process.maps());
                    let empty = there.map_err(|error| refused(&error))?.0.is_empty();
                    if empty {
                        return Err(format!(
                            "process {pid} has no memory of its own: it has ended, or is a \
                             thread of the kernel"
                        ));
                    }
                }
                let mut chosen = with_descendants(pids);
                std::thread::sleep(SETTLE);
                let still: HashSet<_> = with_descendants(pids).into_iter().collect();
                chosen.retain(|pid| still.contains(pid));
                Ok(Self::Processes(chosen))
            }
            Subject::Cgroup(path) => {
                let (name, dir) = cgroup(path, &CGROUPS.map(Path::new))?;
                let procs = dir.join("cgroup.procs");
                let text = fs::read_to_string(&procs)
                    .map_err(|error| format!("{}: {error}", procs.display()))?;
                let pids = text.lines().filter_map(|line| line.parse().ok()).collect();
                Ok(Self::Cgroup(name, pids))
            }
            Subject::System => {
                let pids = all_processes().map_err(|error| error.to_string())?;
                Ok(Self::System(pids.flatten().map(|process| process.pid).collect()))
            }
        }
    }

    /// Returns whether all processes still run.
    fn runs(&self) -> bool {
        self.pids().iter().all(|pid| Usage::of(*pid).is_some())
    }

    fn pids(&self) -> &[i32] {
        match self {
            Self::Processes(pids) | Self::Cgroup(_, pids) | Self::System(pids) => pids,
        }
    }

    /// Returns perf's arguments for the processes and `events`.
    fn arguments(&self, events: Vec<Vec<OsString>>) -> Vec<OsString> {
        let count = events.len();
        let mut args: Vec<OsString> = events.into_iter().flatten().collect();
        match self {
            Self::Processes(pids) => {
                let pids: Vec<_> = pids.iter().map(i32::to_string).collect();
                args.extend(["-p".into(), pids.join(",").into()]);
            }
            Self::Cgroup(name, _) => {
                // A name for each event.
                let names = vec![name.as_str(); count].join(",");
                args.extend(["-a".into(), "-G".into(), names.into()]);
            }
            Self::System(_) => args.push("-a".into()),
        }
        args
    }

    /// Reads the resident pages. A process that has ended has none. Also returns the number of
    /// processes that may not be read, unless the user has named the processes.
    fn snapshots(&self) -> Result<(Vec<Snapshot>, usize), String> {
        let own = std::process::id() as i32;
        let (mut all, mut unread, mut left) = (Vec::new(), 0, MAX_RESIDENT);
        for pid in self.pids().iter().filter(|pid| **pid != own) {
            match Snapshot::take(*pid, left) {
                Ok(snapshot) => {
                    left -= snapshot.count();
                    all.push(snapshot);
                }
                Err(procfs::ProcError::NotFound(_)) => {}
                Err(error) if matches!(self, Self::Processes(_)) => return Err(refused(&error)),
                Err(_) => unread += 1,
            }
        }
        Ok((all, unread))
    }
}

/// Returns the reason for which a process cannot be recorded.
fn refused(error: &procfs::ProcError) -> String {
    match error {
        procfs::ProcError::NotFound(_) => {
            "no such process. `ps -e` lists the processes that run".to_owned()
        }
        procfs::ProcError::PermissionDenied(_) => {
            "the process belongs to another user, or protects its memory\n  remedy: record as root"
                .to_owned()
        }
        error => error.to_string(),
    }
}

/// Returns the name of the control group at `path` below one of `roots`, and its directory.
fn cgroup(path: &Path, roots: &[&Path]) -> Result<(String, PathBuf), String> {
    for root in roots {
        let name = path.strip_prefix(root).unwrap_or(path);
        let name = name.strip_prefix("/").unwrap_or(name);
        let dir = root.join(name);
        if dir.join("cgroup.procs").is_file() {
            let name = name.to_str().ok_or("the name of the group is not UTF-8")?;
            if name.is_empty() {
                return Err("this is the root of all groups; --all records all processes".into());
            }
            if name.contains(',') {
                return Err("perf cannot record a group with a comma in its name".into());
            }
            return Ok((name.to_owned(), dir));
        }
    }
    Err(format!(
        "no such control group below {}. `systemd-cgls` lists the groups",
        CGROUPS.join(" or ")
    ))
}

/// Returns `pids` and all their descendants.
fn with_descendants(pids: &[i32]) -> Vec<i32> {
    let mut parents: HashMap<i32, Vec<i32>> = HashMap::new();
    for process in all_processes().into_iter().flatten().flatten() {
        if let Ok(stat) = process.stat() {
            parents.entry(stat.ppid).or_default().push(stat.pid);
        }
    }
    let (mut all, mut seen) = (pids.to_vec(), HashSet::new());
    all.retain(|pid| seen.insert(*pid));
    let mut at = 0;
    while let Some(pid) = all.get(at) {
        let children = parents.remove(pid).unwrap_or_default();
        all.extend(children.into_iter().filter(|pid| seen.insert(*pid)));
        at += 1;
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Stdio;

    #[test]
    fn control_group_is_found_by_path_and_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let (first, second) = (dir.path().join("perf_event"), dir.path().join("unified"));
        let group = second.join("system.slice/web");
        fs::create_dir_all(&group).unwrap();
        fs::create_dir(&first).unwrap();
        for place in [&group, &second] {
            fs::write(place.join("cgroup.procs"), "").unwrap();
        }
        let roots = [first.as_path(), second.as_path()];
        let found = Ok(("system.slice/web".to_owned(), group.clone()));
        for path in [group.as_path(), Path::new("system.slice/web"), Path::new("/system.slice/web")]
        {
            assert_eq!(cgroup(path, &roots), found, "{path:?}");
        }
        let refused = |path: &Path| cgroup(path, &roots).unwrap_err();
        assert!(refused(Path::new("system.slice/db")).contains("no such control group"));
        assert!(refused(&second).contains("--all records all processes"));
        let comma = second.join("a,b");
        fs::create_dir(&comma).unwrap();
        fs::write(comma.join("cgroup.procs"), "").unwrap();
        assert!(refused(&comma).contains("a comma in its name"));
    }

    #[test]
    fn group_of_a_hybrid_host_has_a_name_below_the_unified_root() {
        let dir = tempfile::tempdir().unwrap();
        let below =
            |root: &str| dir.path().join(root.strip_prefix("/sys/fs/cgroup/").unwrap_or(""));
        let roots = CGROUPS.map(below);
        let group = dir.path().join("unified/system.slice/web");
        fs::create_dir_all(&group).unwrap();
        fs::write(group.join("cgroup.procs"), "").unwrap();
        let roots = roots.each_ref().map(PathBuf::as_path);
        let found = Ok(("system.slice/web".to_owned(), group.clone()));
        assert_eq!(cgroup(&group, &roots), found);
        assert_eq!(cgroup(Path::new("system.slice/web"), &roots), found);
    }

    #[test]
    fn fault_with_a_copy_of_the_stack_has_eight_kibibytes() {
        assert_eq!(event_bytes(None), 112.0);
        assert!(event_bytes(Some(Unwind::FramePointers)) < 300.0);
        assert!((8192.0..8600.0).contains(&event_bytes(Some(Unwind::Dwarf))));
    }

    /// Returns a shell with a command, and the processes of both.
    fn shell(script: &str) -> (std::process::Child, Vec<i32>) {
        // The shell reports killed commands.
        let mut child = Command::new("sh");
        let child = child.args(["-c", script]).stderr(Stdio::null()).spawn().unwrap();
        let pid = child.id().cast_signed();
        let limit = Instant::now() + Duration::from_secs(20);
        let mut all = with_descendants(&[pid]);
        while all.len() != 2 && Instant::now() < limit {
            all = with_descendants(&[pid]);
        }
        (child, all)
    }

    fn kill(pid: i32) {
        // SAFETY: the call touches no memory.
        unsafe { libc::kill(pid, libc::SIGKILL) };
    }

    #[test]
    fn named_process_is_chosen_with_its_descendants() {
        let _alone = super::super::survivors::alone();
        let (mut child, all) = shell("sleep 60; true");
        let chosen = Chosen::find(&Subject::Processes(vec![all[0]])).unwrap();
        for pid in &all {
            kill(*pid);
        }
        child.wait().unwrap();
        assert_eq!((all.len(), chosen.pids()), (2, &all[..]));
    }

    /// perf fails if a process ends while perf starts.
    #[test]
    fn descendant_that_ends_at_once_is_not_chosen() {
        let _alone = super::super::survivors::alone();
        let omits = || {
            let (mut child, all) = shell("sleep 60; sleep 60; true");
            let ended = all[1];
            let killer = std::thread::spawn(move || {
                std::thread::sleep(SETTLE / 2);
                kill(ended);
            });
            let chosen = Chosen::find(&Subject::Processes(vec![all[0]])).unwrap();
            killer.join().unwrap();
            for pid in with_descendants(&all[..1]) {
                kill(pid);
            }
            child.wait().unwrap();
            !chosen.pids().contains(&ended)
        };
        // On a busy host, the shell or this thread can be late.
        assert!((0..5).filter(|_| omits()).count() >= 3);
    }

    #[test]
    fn descendants_follow_their_ancestors() {
        let _alone = super::super::survivors::alone();
        let mut child = Command::new("sh").args(["-c", "sleep 60; true"]).spawn().unwrap();
        let own = std::process::id() as i32;
        let pid = child.id().cast_signed();
        let limit = Instant::now() + Duration::from_secs(20);
        let all = loop {
            let all = with_descendants(&[own, own]);
            // The shell and its command.
            let own_child = with_descendants(&[pid]);
            if own_child.len() == 2 && all.contains(&own_child[1]) || Instant::now() > limit {
                break all;
            }
        };
        assert!(all[0] == own && all.contains(&pid), "{all:?}");
        assert_eq!(all.iter().filter(|pid| **pid == own).count(), 1);
        for pid in with_descendants(&[pid]) {
            kill(pid);
        }
        child.wait().unwrap();
    }
}
