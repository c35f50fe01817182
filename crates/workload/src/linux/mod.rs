//! The kernel beneath this process, as a system to run programs on.
//!
//! Each run has a process of its own, so that neither what this process has mapped nor what an
//! earlier run left is in the way:
//!
//! ```text
//! this process ── fork ── subject ─┬─ threads of it          (Mode::Threads)
//!                                  └─ fork: one process each (Mode::Processes)
//! ```
//!
//! The subject prepares, its workers gather, all begin on one signal, and each leaves its report in
//! memory that it shares with this process ([`shared`]). Files are made before, and their descriptors inherited. Huge pages are off in all of them, so that a
//! fault is a fault of 4 KiB. Faults and times are the kernel's own (`getrusage` of each thread,
//! `wait4` of each forked child), between the common start and each worker's end: neither
//! preparation nor the making of threads is in them.
//!
//! A fork copies this process's page tables: run programs before mapping much, or map it with
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
    /// The kernel that runs now.
    pub fn new() -> Self {
        Self { machine: machine(&kernel_release()) }
    }
}

impl Default for Linux {
    fn default() -> Self {
        Self::new()
    }
}

/// The running kernel's release, such as `6.12.9-amd64`.
fn kernel_release() -> String {
    // SAFETY: a `utsname` of zeros is valid, and the call fills it.
    let name = unsafe {
        let mut name: libc::utsname = std::mem::zeroed();
        libc::uname(&raw mut name);
        name
    };
    // SAFETY: `release` is an array of zeros, or ends in one as uname(2) says.
    unsafe { CStr::from_ptr(name.release.as_ptr()) }.to_string_lossy().into_owned()
}

/// The machine's name for a kernel release: its first two numbers, or that of the bare machine, whose kernel is of no Linux.
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
/// This process may have threads. Of the C library, fork makes sure that the allocator works in the
/// child; of ours, nothing that another thread could have locked is used there.
fn spawn(body: impl FnOnce()) -> Result<libc::pid_t, Failure> {
    // SAFETY: the child runs `body` alone, as said above, and never returns from here.
    match unsafe { libc::fork() } {
        -1 => Err(refused("fork", 0, 0)),
        0 => {
            // SAFETY: plain calls; they cannot fail in a way that matters here.
            unsafe {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                libc::prctl(libc::PR_SET_THP_DISABLE, 1, 0, 0, 0);
                // An interrupt ends the run, whatever this process had arranged for itself.
                for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
                    libc::signal(signal, libc::SIG_DFL);
                }
            }
            let status = match catch_unwind(AssertUnwindSafe(body)) {
                Ok(()) => 0,
                Err(_) => PANICKED,
            };
            // SAFETY: ends the process, without the exit handlers of the one it was forked from.
            unsafe { libc::_exit(status) }
        }
        pid => Ok(pid),
    }
}

/// One run of one program, as its processes see it.
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

    /// The subject's part where the workers are its threads.
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

    /// The subject's part where each worker is a process.
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
                // Who ended in good order has counted itself done.
                dead += usize::from(status != 0);
                false
            });
            started - dead
        };
        self.start().conduct(self.crew.limit, || reap(false), || ());
        reap(true);
        failed.map_or(Ok(()), Err)
    }

    /// A worker that is a process.
    fn process(&self, worker: Worker) {
        let slot = &self.shared.workers()[worker.index];
        let mut task = self.task(slot);
        match self.program.prepare(&mut task) {
            Ok(state) => {
                // A failure of the work says more than what `finish` would make of it.
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

    /// A worker: waits for the others, works, and reports. Whether all went well.
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
