//! The cost of a program's page faults on this host, and the settings of today's Linux that reduce
//! it.
//!
//! The program is recorded once, and runs once without a recorder. A Go program runs once more, for
//! the trace of its garbage collector ([`collector`]), a Python program whose children copy pages
//! for the time of their collections ([`collections`]), and a large program with jemalloc for the
//! size of the metadata ([`metadata`]). The number of faults that a setting saves is counted in the
//! recording ([`findings`]). The cost of a fault is measured on this host ([`costs`]). The
//! predicted saving of the setting is the product of both ([`items`], [`answer`]). Each setting
//! that can be applied to one run is applied to pairs of runs ([`trial`]), which gives the measured
//! saving.

pub mod ahead;
mod allocator;
pub mod answer;
mod blocks;
pub mod cold;
pub mod cold_cost;
pub mod collections;
pub mod collector;
pub mod commit;
pub mod costs;
mod counter;
pub mod creators;
pub mod effect;
pub mod file;
pub mod findings;
mod fold;
pub mod forks;
pub mod heap;
pub mod interval;
pub mod item;
pub mod items;
pub mod kernel_time;
pub mod library;
pub mod linked;
pub mod mapped_files;
pub mod metadata;
pub mod named;
pub mod once;
pub mod others;
pub mod page_walks;
pub mod preload;
pub mod program;
pub mod python;
pub mod report;
pub mod retain;
mod runtime;
pub mod sampled;
pub mod sites;
pub mod stalls;
mod supervise;
pub mod sysfs;
mod thp_flag;
pub mod time;
pub mod trial;
pub mod variables;

use crate::error::Error;
use crate::observer::Observer;
use crate::replay::Source;
use crate::stop;
use cold::DataFiles;
use cold_cost::ColdCost;
use collections::Collections;
use collector::Collector;
use costs::Meter;
use faultless::PAGE_SIZE;
use faultless_trace::anticipate::folio;
use faultless_trace::resident::host_page_size;
use findings::Findings;
use forks::ForkCost;
use item::Apply;
use linked::Seen;
use mapped_files::FileCost;
use metadata::Metadata;
use once::{Run, watched};
use page_walks::PageWalks;
use program::Program;
use stalls::Stalls;
use std::ffi::OsString;
use sysfs::{Shmem, Sizes};
use variables::Variables;

/// Rounds in which costs are measured before anything is predicted.
const ROUNDS: usize = 7;

/// Nanoseconds that a page walk may take at most, for the decision whether to measure the time.
const WALK: f64 = 50.0;
/// The share of a run below which the time of page walks is not measured.
const LEAST_WALKS: f64 = 0.01;

/// The steps of progress of [`count`] and [`measure`].
pub const STEPS: u64 = Findings::STEPS + ROUNDS as u64;

/// The measurements for the advice to one program.
#[derive(Debug)]
pub struct Measured {
    /// The counts of the recording.
    pub findings: Findings,
    /// The costs of a page on this host.
    pub meter: Meter,
    /// The run without the recorder; `None` if there is only a recording.
    pub plain: Option<Run>,
    /// The data files that the program maps in this run.
    pub data: DataFiles,
}

/// Counts the recording `source` of `program`.
///
/// # Errors
/// The recording is inconsistent.
pub fn count(
    source: &Source,
    program: Program,
    observer: &dyn Observer,
) -> Result<Findings, Error> {
    let (mut sizes, mut shmem) = (Sizes::read(), Shmem::read());
    let (recorded, host) = (source.small_pages * PAGE_SIZE, host_page_size());
    if recorded != host {
        observer.note(&format!(
            "the recording is of a host with pages of {} KiB, and this host has pages of {} KiB: \
             {}, and advice about huge pages is omitted",
            recorded >> 10,
            host >> 10,
            if host == PAGE_SIZE {
                "costs are computed from those of this host"
            } else {
                "costs are those of this host's pages, and times are too small"
            }
        ));
        (sizes, shmem) = (Sizes::none(folio::thp(source.small_pages)), Shmem::NONE);
    }
    Findings::of(source, program, sizes, shmem, observer)
}

/// Measures the costs of a page on this host for the `findings` of [`count`]. Runs `command`, if
/// given, without a recorder. With `consent`, system-wide settings are changed for a measurement.
/// With `cold`, reads are measured on the largest data file of the program, which is dropped from
/// the page cache.
///
/// # Errors
/// The host has too little memory, or the program cannot be started.
pub fn measure(
    mut findings: Findings,
    command: Option<&[OsString]>,
    consent: bool,
    cold: bool,
    observer: &dyn Observer,
) -> Result<Measured, Error> {
    let go = findings.program.go;
    if findings.forks.forks > 0 {
        findings.fork_cost = Some(ForkCost::measure()?);
    }
    if findings.files.loads[0] > 0 {
        findings.file_cost = Some(FileCost::measure(&findings.files)?);
    }
    if cold::is_worth(&findings.files) && !cold {
        findings.cold_cost = ColdCost::measure()?;
    }
    let mut meter = Meter::new(consent, findings.census.shared > 0)?;
    let mut plain = None;
    let (mut seen, mut data) = (Seen::default(), DataFiles::default());
    let mut walks = PageWalks::default();
    for round in 0..ROUNDS {
        // One round suffices for a result. Without a plain run, the result uses the time of the
        // recording.
        if round > 0 && stop::requested() {
            break;
        }
        observer.begin("measures the cost of a page");
        meter.round(observer)?;
        observer.advance(1);
        // The plain run is in the middle of the rounds, so that both run under the same load.
        if let Some(command) = command.filter(|_| plain.is_none()) {
            observer.note(
                "the program runs again without the recorder; its input is empty, its output is discarded, and Ctrl-C ends this run",
            );
            observer.begin("runs the program without the recorder");
            let before = Stalls::read();
            plain = watched(command, &Apply::Nothing, observer, |pid| {
                seen.look(pid);
                walks.look(pid);
                data.look(pid);
            })?;
            findings.stalls = plain.map(|_| Stalls::read().since(&before));
            if go && !runtime::chosen() && !stop::requested() {
                findings.collector = trace_collector(command, observer)?;
            }
            if python::is_worth_a_trace(&findings) && !stop::requested() {
                findings.collections = trace_collections(command, observer)?;
            }
        }
    }
    findings.walks = walks.estimate();
    if let (Some(plain), Some(walks)) = (plain, findings.walks)
        && walks * WALK > LEAST_WALKS * plain.processor * 1e9
        && !stop::requested()
    {
        observer.begin("measures the time of a page walk");
        meter.measure_walks(observer)?;
    }
    findings.program.purges |= seen.purges();
    findings.program.unretains |= seen.unretains();
    findings.program.variables.add(seen.variables());
    if command.is_some() {
        findings.program.variables.add(&Variables::own());
    }
    findings.add_allocators(seen.allocators());
    if plain.is_some_and(|run| run.thp_off) {
        findings.switch_huge_off();
    }
    if let Some(file) = data.largest().filter(|_| findings.file_cost.is_some()) {
        observer.begin("maps a file of the program");
        findings.file_cost = FileCost::measure_file(file).or(findings.file_cost);
    }
    if cold {
        data.add_arguments(command.unwrap_or_default());
    }
    if let Some(file) = data.largest().filter(|_| cold) {
        observer.begin("reads a file of the program from the disk");
        findings.cold_cost = ColdCost::measure_file(file)?;
    }
    if let Some(command) = command.filter(|_| !findings.census.asks_for_huge && !stop::requested())
        && let Some(linked) = metadata::candidate(&findings)
    {
        observer.note(
            "the program runs once more, for the size of jemalloc's metadata; its input is empty, its output is discarded, and Ctrl-C ends this run",
        );
        observer.begin("runs the program with huge pages requested for metadata");
        findings.metadata = Metadata::of_run(command, linked)?;
    }
    Ok(Measured { findings, meter, plain, data })
}

/// Runs a Go program for the trace of its garbage collector. Returns `None` after a request to
/// stop.
fn trace_collector(
    command: &[OsString],
    observer: &dyn Observer,
) -> Result<Option<Collector>, Error> {
    observer.note(
        "the Go program runs a third time, with a trace of its garbage collector; its input is empty, its output is discarded, and Ctrl-C ends this run",
    );
    observer.begin("runs the program with a trace of its garbage collector");
    Collector::of_run(command)
}

/// Runs a Python program for the time of collections in its children. Returns `None` after a
/// request to stop, and without such a collection.
fn trace_collections(
    command: &[OsString],
    observer: &dyn Observer,
) -> Result<Option<Collections>, Error> {
    observer.note(
        "the Python program runs a third time, with a trace of the garbage collector in its children; its input is empty, its output is discarded, and Ctrl-C ends this run",
    );
    observer.begin("runs the program with a trace of collections in its children");
    Collections::of_run(command)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    /// Keeps the remarks for the user.
    #[derive(Default)]
    struct Notes(Mutex<Vec<String>>);

    impl Observer for Notes {
        fn note(&self, note: &str) {
            self.0.lock().expect("no panic").push(note.to_owned());
        }
    }

    #[test]
    fn run_for_the_trace_of_the_collector_is_announced() {
        let notes = Notes::default();
        let trace = "gc 1 @0.012s 2%: 0.026+0.39+0.10 ms clock, 0.5+0.25/0.5/1.25+1.5 ms cpu, 4->5->3 MB, 5 MB goal";
        let script =
            format!("echo '{trace}' >&2; case $GODEBUG in *gctrace=1) exit 0;; esac; kill $$");
        let command = ["sh", "-c", &script].map(OsString::from);
        let collector = trace_collector(&command, &notes).expect("it runs");
        assert!(collector.is_some_and(|it| it.saved().is_some()));
        let notes = notes.0.into_inner().expect("no panic");
        assert!(matches!(&notes[..], [note] if note.contains("a third time")), "{notes:?}");
    }
}
