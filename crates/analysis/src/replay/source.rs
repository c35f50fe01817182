//! A recording that is ready for replay, and its requirements.

use super::native::ReplayError;
use crate::context::Context;
use crate::error::Error;
use crate::number::grouped;
use crate::settings::Settings;
use faultless::{MAX_CPUS, PAGE_SIZE};
use faultless_trace::plan::Plan;
use faultless_trace::{Kind, Trace, recordings};
use serde_json::Map;

const MAP_POPULATE: u32 = 0x8000;

/// A recording, ready for replay.
#[derive(Debug)]
pub struct Source {
    /// The name in results: the name of a bundled recording, or of the file without extension, or
    /// of the program for `perf.data`.
    pub name: String,
    /// The recorded events, in pages of 4 KiB.
    pub trace: Trace,
    /// The pages of 4 KiB in a page of the recorded host. Above 1, `trace` has this number of
    /// faults for each recorded fault.
    pub small_pages: u64,
    /// The planned operations.
    pub plan: Plan,
}

impl Source {
    /// Reads a bundled recording.
    ///
    /// # Errors
    /// The recording is damaged.
    pub fn shipped(recording: &recordings::Recording) -> Result<Self, Error> {
        let trace = recording.trace().map_err(Error::Bundled)?;
        Self::new(recording.name.to_owned(), trace)
    }

    /// Creates a source from `trace`, with a name.
    ///
    /// # Errors
    /// The trace is inconsistent.
    pub fn new(name: String, trace: Trace) -> Result<Self, Error> {
        let small_pages = trace.small_pages();
        let trace = trace.in_small_pages().map_err(|error| Error::input(&name, error))?;
        let plan = Plan::new(&trace).map_err(|error| Error::input(&name, error))?;
        Ok(Self { name, trace, small_pages, plan })
    }

    /// Returns this source for a replay on the subsystem, which has pages of 4 KiB.
    ///
    /// # Errors
    /// The recorded host has larger pages.
    pub fn replayable(self) -> Result<Self, Error> {
        if self.small_pages == 1 {
            return Ok(self);
        }
        let size = (self.small_pages * PAGE_SIZE) >> 10;
        let why = format!(
            "recorded on a host with pages of {size} KiB, and the subsystem has pages of 4 KiB: a \
             replay would take {} faults for each recorded fault. `faultless advise` reads such \
             recordings; to replay the program, record it on a host with pages of 4 KiB",
            self.small_pages
        );
        Err(Error::input(&self.name, why))
    }

    /// Returns the CPUs of the machine for the replay: one for each thread, up to the limit.
    pub fn cpus(&self) -> usize {
        self.plan.threads().len().clamp(1, MAX_CPUS)
    }

    /// Returns the CPUs of the simulated machine for the replay: one for each thread.
    ///
    /// # Errors
    /// The recording has more threads than a simulated machine can have CPUs.
    pub fn simulated_cpus(&self) -> Result<usize, Error> {
        let threads = self.plan.threads().len();
        if threads <= MAX_CPUS {
            return Ok(threads.max(1));
        }
        Err(Error::input(
            &self.name,
            format_args!(
                "the recording has {} threads, and at most {} CPUs can be simulated, one for each thread: record a run with \
                 fewer threads, or use `faultless replay` without --html, which runs all threads on this machine",
                grouped(threads as u64),
                grouped(MAX_CPUS as u64)
            ),
        ))
    }

    /// Returns the bytes of memory for the replay: each page once that is touched, populated or
    /// resident at the start, doubled for tables and deferred frees.
    pub fn memory(&self) -> u64 {
        let mut pages = self.trace.summary().distinct_pages as u64;
        for event in &self.trace.events {
            match event.kind {
                Kind::Map { len, flags, .. } if flags & MAP_POPULATE != 0 => {
                    pages += len / PAGE_SIZE;
                }
                Kind::Resident { len, .. } => pages += len / PAGE_SIZE,
                _ => {}
            }
        }
        pages * 2 * PAGE_SIZE + (64 << 20)
    }

    /// Returns the context of a replay under `settings`.
    pub fn context(&self, settings: &Settings) -> Context {
        Context {
            machine: "native".into(),
            workload: format!("replay:{}", self.name),
            cpus: self.cpus(),
            setting: settings.label(),
            params: Map::from_iter([
                ("recording".to_owned(), self.name.as_str().into()),
                ("program".to_owned(), self.trace.header.program.as_str().into()),
                ("threads".to_owned(), self.trace.threads.len().into()),
                ("processes".to_owned(), self.trace.processes.len().into()),
            ]),
            knobs: settings.knobs(),
            basis: None,
        }
    }

    /// Returns the error of a replay under `settings`.
    pub(super) fn failed(&self, settings: &Settings, source: ReplayError) -> Error {
        Error::Replay { recording: self.name.clone(), settings: settings.label(), source }
    }
}
