//! A benchmark program.

use crate::file::FileSpec;
use crate::param::{Kind, Param, ParamError, Settings};
use crate::system::{Crew, Failure, Measured, Mode, Needs, Tally, Task, Worker};

/// The number of workers: a parameter of every program.
pub static THREADS: Param =
    Param { name: "threads", kind: Kind::Count(1, 1024), default: 1, help: "number of workers" };

/// The memory shared by the workers: a parameter of every program.
pub static MODE: Param = Param {
    name: "mode",
    kind: Kind::Choice(&[Mode::Threads.name(), Mode::Processes.name()]),
    default: 0,
    help: "workers are threads of one process, or processes",
};

/// A run time instead of a number of passes: a parameter of every program.
pub static SECONDS: Param = Param {
    name: "seconds",
    kind: Kind::Seconds,
    default: 0,
    help: "duration of the run; 0: run the number of passes instead",
};

/// A benchmark: its preparation, the work of each worker, and the final checks.
///
/// Only [`work`](Self::work) is measured. All workers start it together, after
/// [`prepare`](Self::prepare), which runs once in each process.
///
/// # Safety
/// On some systems a [`Task`]'s accesses are the processor's own, so through `task` the program
/// must
/// - load, store, copy, change or unmap only memory obtained by its own `mmap`, `mmap_file` and
///   `brk` calls and not returned since, and use `FIXED` only over such memory;
/// - call only functions of [`Contents::Code`](crate::Contents::Code) in a mapping of such a file
///   to which it never stored;
/// - map each file shared for writing in one worker only;
/// - never store, from one worker, to a word that another may access at the same time;
/// - restore the program break at the end of `work`.
pub unsafe trait Program: Sync + Sized {
    /// The established name.
    const NAME: &'static str;
    /// A summary of the work, in one line.
    const SUMMARY: &'static str;
    /// The counted unit, in the plural.
    const UNIT: &'static str;
    /// The specific parameters.
    const PARAMS: &'static [&'static Param];
    /// The supported modes; the first is the default.
    const MODES: &'static [Mode] = &[Mode::Threads, Mode::Processes];

    /// The data shared by its workers.
    type State: Sync;

    /// Creates the program with these settings.
    ///
    /// # Errors
    /// [`ParamError::BadValue`] for inconsistent values.
    fn new(settings: &Settings) -> Result<Self, ParamError>;

    /// Returns the memory that suffices for `crew`.
    fn needs(&self, crew: &Crew) -> Needs;

    /// Returns the files of a run of `crew`. [`Task::mmap_file`] refers to them by index.
    fn files(&self, _: &Crew) -> Vec<FileSpec> {
        Vec::new()
    }

    /// Prepares the process.
    ///
    /// # Errors
    /// The failed call of the system; the same applies to the following methods.
    fn prepare<T: Task>(&self, task: &mut T) -> Result<Self::State, Failure>;

    /// Does one worker's measured work. The repeated, measured part takes no lock and writes no
    /// shared line of the program itself.
    ///
    /// # Errors
    /// As above, and [`Failure::Wrong`].
    fn work<T: Task>(
        &self,
        task: &mut T,
        state: &Self::State,
        worker: Worker,
    ) -> Result<Tally, Failure>;

    /// Checks the results of the work of worker `of`, once in each process. In [`Mode::Threads`],
    /// `of` is the only worker of a crew of one, because the threads together did the work of this
    /// crew.
    ///
    /// # Errors
    /// As above.
    fn finish<T: Task>(&self, _: &mut T, _: &Self::State, _of: Worker) -> Result<(), Failure> {
        Ok(())
    }

    /// Returns further results, by name.
    fn extras(&self, _: &Measured) -> Vec<(&'static str, f64)> {
        Vec::new()
    }
}

/// The repetitions of a worker's pass: a fixed number, or until the time is up; at least one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Passes(u64);

impl Passes {
    /// Creates `passes` repetitions, or an unlimited number if a time is set.
    pub(crate) fn new(settings: &Settings, passes: &Param) -> Self {
        Self(settings.seconds(&SECONDS).map_or(settings.get(passes), |_| u64::MAX))
    }

    /// Returns whether to make another pass after `done`.
    #[inline]
    pub(crate) fn more<T: Task>(self, task: &T, done: u64) -> bool {
        done == 0 || (done < self.0 && !task.expired())
    }
}

/// Returns the crew of `settings`, with the modes `allowed`.
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
