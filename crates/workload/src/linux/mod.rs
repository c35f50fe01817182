//! The kernel of this process, as a system for programs.
//!
//! Each run has a new process, so that mappings of this process and remains of an earlier run do
//! not interfere:
//!
//! ```text
//! this process ── fork ── subject ─┬─ threads of it          (Mode::Threads)
//!                                  └─ fork: one process each (Mode::Processes)
//! ```
//!
//! The subject prepares, its workers gather, all start on one signal, and each stores its report in
//! memory shared with this process ([`shared`]). Files are created before, and their descriptors
//! inherited. Huge pages are off in all of these processes, so that each fault maps 4 KiB. Faults
//! and times are the kernel's own (`getrusage` of each thread, `wait4` of each forked child),
//! between the common start and each worker's end. They exclude preparation and the creation of
//! threads.
//!
//! A fork copies this process's page tables. Run programs before mapping much memory, or use
//! `MADV_DONTFORK`.

mod shared;
mod task;

use crate::file::FileSpec;
use crate::host::{now, thread_usage};
use crate::program::Program;
use crate::start::Start;
use crate::system::{Crew, Failure, Measured, Mode, Report, System, Worker};
use shared::{ChildFailure, Shared};
use std::ffi::CStr;
use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
pub use task::LinuxTask;
use task::{refused, try_wait, wait};

/// The exit status of a process that panicked.
const PANICKED: i32 = 101;

/// The host's Linux.
#[derive(Clone, Debug)]
pub struct Linux {
    machine: String,
}

impl Linux {
    /// Creates the system of the running kernel.
    pub fn new() -> Self {
        Self { machine: machine(&kernel_release()) }
    }
}

impl Default for Linux {
    fn default() -> Self {
        Self::new()
    }
}

/// Returns the running kernel's release, such as `6.12.9-amd64`.
fn kernel_release() -> String {
    // SAFETY: a `utsname` of zeros is valid, and the call fills it.
    let name = unsafe {
        let mut name: libc::utsname = std::mem::zeroed();
        libc::uname(&raw mut name);
        name
    };
    // SAFETY: `release` is an array of zeros, or ends with a zero according to uname(2).
    unsafe { CStr::from_ptr(name.release.as_ptr()) }.to_string_lossy().into_owned()
}

/// Returns the machine's name for a kernel release: its first two numbers, or `bare` for the bare
/// machine, whose kernel is not Linux.
fn machine(release: &str) -> String {
    if release.ends_with("-faultless") {
        return "bare".into();
    }
    let numbers: Vec<_> = release
        .split(|letter: char| !letter.is_ascii_digit())
        .take(2)
        .filter(|number| !number.is_empty())
        .collect();
    format!("linux-{}", if numbers.is_empty() { release.into() } else { numbers.join(".") })
}

impl System for Linux {
    fn machine(&self) -> String {
        self.machine.clone()
    }

    fn run<P: Program>(&self, program: &P, crew: &Crew) -> Result<Measured, Failure> {
        let shared = Shared::new(crew.workers)?;
        let files: Result<Vec<_>, _> = program.files(crew).iter().map(FileSpec::make).collect();
        let run = Run { program, crew, shared: &shared, files: &files? };
        let subject = spawn(|| {
            let result = match crew.mode {
                Mode::Threads => run.threads(),
                Mode::Processes => run.processes(),
            };
            shared.coordinator.put(result);
        })?;
        let (status, _) = wait(subject)?;
        if libc::WIFSIGNALED(status) {
            return Err(Failure::Killed { signal: libc::WTERMSIG(status) });
        }
        // SAFETY: the subject has ended, and it ends after the workers: they are its threads, or it
        // has waited for them, or they died with it.
        unsafe { shared.collect() }
    }
}

/// Runs `body` in a forked process, and returns the process's id.
///
/// This process may have threads. In the C library, fork ensures that the allocator works in the
/// child. The child uses no data of this crate that another thread could have locked.
fn spawn(body: impl FnOnce()) -> Result<libc::pid_t, Failure> {
    // SAFETY: the child runs only `body`, under the conditions above, and never returns from here.
    match unsafe { libc::fork() } {
        -1 => Err(refused("fork", 0, 0)),
        0 => {
            // SAFETY: plain calls, whose failures have no effect here.
            unsafe {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                libc::prctl(libc::PR_SET_THP_DISABLE, 1, 0, 0, 0);
                // An interrupt ends the run, regardless of this process's signal handlers.
                for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
                    libc::signal(signal, libc::SIG_DFL);
                }
            }
            let status = match catch_unwind(AssertUnwindSafe(body)) {
                Ok(()) => 0,
                Err(_) => PANICKED,
            };
            // SAFETY: ends the process, without the exit handlers of its parent.
            unsafe { libc::_exit(status) }
        }
        pid => Ok(pid),
    }
}

/// A run of a program, as seen by the processes.
struct Run<'a, P> {
    program: &'a P,
    crew: &'a Crew,
    shared: &'a Shared,
    files: &'a [File],
}

impl<P: Program> Run<'_, P> {
    fn start(&self) -> &Start {
        &self.shared.start
    }

    fn task<'s>(&'s self, failure: &'s dyn ChildFailure) -> LinuxTask<'s> {
        LinuxTask::new(self.start(), self.files, failure)
    }

    /// Runs the subject if the workers are its threads.
    fn threads(&self) -> Result<(), Failure> {
        let count = self.crew.workers;
        let mut task = self.task(&self.shared.coordinator);
        let state = self.program.prepare(&mut task)?;
        std::thread::scope(|scope| {
            for index in 0..count {
                let (worker, state) = (Worker { index, count }, &state);
                let builder = std::thread::Builder::new();
                if let Err(error) = builder.spawn_scoped(scope, move || {
                    self.work(state, worker);
                }) {
                    self.start().dismiss();
                    let errno = error.raw_os_error().unwrap_or(libc::EAGAIN);
                    return Err(Failure::Refused { call: "clone", addr: 0, len: 0, errno });
                }
            }
            self.start().conduct(self.crew.limit, || count, || ());
            Ok(())
        })?;
        self.program.finish(&mut task, &state, Worker { index: 0, count: 1 })
    }

    /// Runs the subject if each worker is a process.
    fn processes(&self) -> Result<(), Failure> {
        let count = self.crew.workers;
        let mut children = Vec::with_capacity(count);
        let mut failed = None;
        for index in 0..count {
            match spawn(|| self.process(Worker { index, count })) {
                Ok(child) => children.push(child),
                Err(failure) => {
                    self.start().dismiss();
                    failed = Some(failure);
                    break;
                }
            }
        }
        let started = children.len();
        let mut dead = 0;
        let mut reap = |block: bool| {
            children.retain(|&child| {
                let Some(status) = try_wait(child, block) else {
                    return true;
                };
                if libc::WIFSIGNALED(status) {
                    failed = Some(Failure::Killed { signal: libc::WTERMSIG(status) });
                }
                // A worker without a failure has counted itself as done.
                dead += usize::from(status != 0);
                false
            });
            started - dead
        };
        self.start().conduct(self.crew.limit, || reap(false), || ());
        reap(true);
        failed.map_or(Ok(()), Err)
    }

    /// Runs a worker that is a process.
    fn process(&self, worker: Worker) {
        let slot = &self.shared.workers()[worker.index];
        let mut task = self.task(slot);
        match self.program.prepare(&mut task) {
            Ok(state) => {
                // A failure of the work is more specific than an error of `finish`.
                if self.work(&state, worker)
                    && let Err(failure) = self.program.finish(&mut task, &state, worker)
                {
                    slot.put(Err(failure));
                }
            }
            Err(failure) => {
                slot.put(Err(failure));
                self.start().absent();
            }
        }
    }

    /// Runs a worker: waits for the others, works, and reports. Returns whether the work succeeded.
    fn work(&self, state: &P::State, worker: Worker) -> bool {
        let slot = &self.shared.workers()[worker.index];
        let mut task = self.task(slot);
        self.start().arrive(|| ());
        let _done = self.start().until_done();
        let before = thread_usage();
        let begin = now();
        let tally = self.program.work(&mut task, state, worker);
        let end = now();
        let usage = task.used_since(before);
        slot.put(tally.map(|tally| {
            let (user, system, span) = (usage.user, usage.system, (begin, end));
            (Report { tally, user, system, span, aside: task.aside_wall() }, usage.faults)
        }));
        tally.is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machine_names() {
        assert_eq!(machine("6.18.44-amd64"), "linux-6.18");
        assert_eq!(machine("7.0"), "linux-7.0");
        assert_eq!(machine("6"), "linux-6");
        assert_eq!(machine("odd"), "linux-odd");
        assert_eq!(machine("6.12.0-faultless"), "bare");
        assert!(Linux::new().machine().starts_with("linux-"));
    }
}
