//! A benchmark program.

use crate::file::FileSpec;
use crate::param::{Kind, Param, ParamError, Settings};
use crate::system::{Crew, Failure, Measured, Mode, Needs, Tally, Task, Worker};

/// How many workers: a parameter of every program.
pub static THREADS: Param = Param {
    name: "threads",
    kind: Kind::Count(1, 1024),
    default: 1,
    help: "workers that run side by side",
};

/// What the workers share: a parameter of every program.
pub static MODE: Param = Param {
    name: "mode",
    kind: Kind::Choice(&[Mode::Threads.name(), Mode::Processes.name()]),
    default: 0,
    help: "workers are threads of one process, or processes",
};

/// A time to run for in place of a number of passes: a parameter of every program.
pub static SECONDS: Param = Param {
    name: "seconds",
    kind: Kind::Seconds,
    default: 0,
    help: "run for this long instead of a number of passes; 0 for the passes",
};

/// A benchmark: what it prepares, what each worker does, what must hold at the end.
///
/// Only [`work`](Self::work) is measured. All workers begin it together, after
/// [`prepare`](Self::prepare), which runs once in each process.
///
/// # Safety
/// On some systems a [`Task`]'s accesses are the processor's own, so through `task` the program
/// must
/// - load, store, copy, change or unmap only memory that its own `mmap`, `mmap_file` and `brk` calls gave it and
///   that it has not given back, and use `FIXED` only over such memory;
/// - call only functions of [`Contents::Code`](crate::Contents::Code) in a mapping of such a file that it never stored to;
/// - have each file mapped shared for writing by one worker only;
/// - never store, from one worker, to a word that another may access at the same time;
/// - leave the program break, at the end of `work`, where it found it.
pub unsafe trait Program: Sync + Sized {
    /// Its name, as the field knows it.
    const NAME: &'static str;
    /// What it does, in one line.
    const SUMMARY: &'static str;
    /// What it counts: a plural.
    const UNIT: &'static str;
    /// Its own parameters.
    const PARAMS: &'static [&'static Param];
    /// What its workers may share; the first is the default.
    const MODES: &'static [Mode] = &[Mode::Threads, Mode::Processes];

    /// What its workers know in common.
    type State: Sync;

    /// The program with these settings.
    ///
    /// # Errors
    /// [`ParamError::BadValue`] for values that do not go together.
    fn new(settings: &Settings) -> Result<Self, ParamError>;

    /// Memory that suffices for `crew`.
    fn needs(&self, crew: &Crew) -> Needs;

    /// The files that a run of `crew` has, which its [`Task::mmap_file`] names by their index.
    fn files(&self, _: &Crew) -> Vec<FileSpec> {
        Vec::new()
    }

    /// Prepares the process.
    ///
    /// # Errors
    /// What the system refused; so in all that follows.
    fn prepare<T: Task>(&self, task: &mut T) -> Result<Self::State, Failure>;

    /// One worker's measured work. It takes no lock and writes no shared line of its own while it
    /// repeats what is measured.
    ///
    /// # Errors
    /// As above, and [`Failure::Wrong`].
    fn work<T: Task>(
        &self,
        task: &mut T,
        state: &Self::State,
        worker: Worker,
    ) -> Result<Tally, Failure>;

    /// Checks what the work has left, once in each process: what the worker `of` has, or in
    /// [`Mode::Threads`] what the only worker of a crew of one would have, since together the
    /// threads did that.
    ///
    /// # Errors
    /// As above.
    fn finish<T: Task>(&self, _: &mut T, _: &Self::State, _of: Worker) -> Result<(), Failure> {
        Ok(())
    }

    /// Further results, by name.
    fn extras(&self, _: &Measured) -> Vec<(&'static str, f64)> {
        Vec::new()
    }
}

/// How often a worker repeats its pass: a fixed number, or until the time is up; once in any case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Passes(u64);

impl Passes {
    /// `passes` of them, or any number where a time is set.
    pub(crate) fn new(settings: &Settings, passes: &Param) -> Self {
        Self(settings.seconds(&SECONDS).map_or(settings.get(passes), |_| u64::MAX))
    }

    /// Whether to make another pass after `done`.
    #[inline]
    pub(crate) fn more<T: Task>(self, task: &T, done: u64) -> bool {
        done == 0 || (done < self.0 && !task.expired())
    }
}

/// The crew that `settings` ask for, with the modes `allowed`.
pub(crate) fn crew(settings: &Settings, allowed: &[Mode]) -> Result<Crew, ParamError> {
    let mode = match settings.given(&MODE) {
        Some(1) => Mode::Processes,
        Some(_) => Mode::Threads,
        None => allowed.first().copied().unwrap_or(Mode::Threads),
    };
    if !allowed.contains(&mode) {
        let names: Vec<_> = allowed.iter().map(|mode| mode.name()).collect();
        return Err(settings.bad(&MODE, format_args!("{} for this workload", names.join(" or "))));
    }
    // At most 1,024 by the parameter's kind.
    let workers = settings.get(&THREADS) as usize;
    Ok(Crew { workers, mode, limit: settings.seconds(&SECONDS) })
}
