//! Counts of faults and pages in a recording, as recorded and with other settings, before times are
//! assigned.

use super::cold_cost::ColdCost;
use super::collections::Collections;
use super::collector::Collector;
use super::commit::committed_at_once;
use super::forks::ForkCost;
use super::heap::{Padded, of_malloc, padded};
use super::linked::Linked;
use super::mapped_files::{FileCost, MOSTLY};
use super::metadata::Metadata;
use super::others::huge_arenas;
use super::program::Program;
use super::python::collector_copies;
use super::stalls::Stalls;
use super::sysfs::{Mode, Shmem, Sizes};
use crate::error::Error;
use crate::observer::Observer;
use crate::replay::{Effect, Source, prefault};
use crate::settings::{Regime, Settings};
use faultless::PAGE_SIZE;
use faultless_trace::anticipate;
use faultless_trace::anticipate::folio::{Folios, THP, folios, folios_of};
use faultless_trace::blocks::Blocks;
use faultless_trace::census::Census;
use faultless_trace::commit::Commits;
use faultless_trace::discard::Discards;
use faultless_trace::files::Files;
use faultless_trace::fork::Forks;
use faultless_trace::keep::{Kept, kept};
use faultless_trace::plan::PlanError;
use faultless_trace::record::HUGE_ON;
use faultless_trace::reserve::{Reserved, reserved};

/// The order up to which prefault by the kernel is predicted: the default of this subsystem.
const PREFAULT: Regime = Regime { order: 5, pool: 0 };

/// Counts of one recording.
#[derive(Clone, Debug)]
pub struct Findings {
    /// The recording's name.
    pub name: String,
    /// The pages of 4 KiB in a page of the recorded host. Counts of pages are in pages of 4 KiB;
    /// [`faults`](Self::faults) converts a count of single pages to faults.
    pub small_pages: u64,
    /// The kind of the recorded program.
    pub program: Program,
    /// The host's settings.
    pub sizes: Sizes,
    /// Whether huge pages were on for all programs during the recording.
    pub huge_recorded: bool,
    /// The host's setting of huge pages for shared memory.
    pub shmem: Shmem,
    /// The recorded faults by purpose.
    pub census: Census,
    /// The same with the host's huge pages for shared memory, and with huge pages for all shared
    /// memory.
    pub shared: [Census; 2],
    /// Folios with the host's settings. `with` has the folios with one more size enabled for all
    /// memory, and its order.
    pub now: Folios,
    /// See `now`.
    pub with: Vec<(u8, Folios)>,
    /// Without folios.
    pub without: Folios,
    /// Folios in the memory of glibc's `malloc`, with its requests for huge pages off and on.
    pub malloc_huge: [Folios; 2],
    /// The effect of larger growth steps of glibc's heap.
    pub padded: Padded,
    /// The same, with the host's settings of folios.
    pub padded_folios: Folios,
    /// Address ranges reserved by runtimes, and used in parts.
    pub reserved: Vec<Reserved>,
    /// The trace of Go's collector in a run; `None` for a recording, and for other programs.
    pub collector: Option<Collector>,
    /// Memory that was returned to the kernel and used again.
    pub discards: Discards,
    /// Copies of address spaces, and the time of a fork; `None` without a measurement.
    pub forks: Forks,
    /// See `forks`.
    pub fork_cost: Option<ForkCost>,
    /// Pages that children copied in Python's garbage collector; `None` without call stacks.
    pub collector_copies: Option<u64>,
    /// Full collections in Python's children; `None` without a run that shows them.
    pub collections: Option<Collections>,
    /// Faults on files with other sizes of fault-around, and their time; `None` without a
    /// measurement.
    pub files: Files,
    /// See `files`.
    pub file_cost: Option<FileCost>,
    /// The time of reads from a cold page cache; `None` without a measurement.
    pub cold_cost: Option<ColdCost>,
    /// The use of memory in blocks of the size of a huge page.
    pub blocks: Blocks,
    /// Estimated page walks (TLB misses) for private memory in the run without a recorder.
    pub walks: Option<f64>,
    /// Events of the whole system during the run without a recorder.
    pub stalls: Option<Stalls>,
    /// Folios if the allocator requests huge pages; `None` without an allocator beside the C
    /// library's.
    pub arenas_huge: Option<Folios>,
    /// Memory that the program makes writable in parts.
    pub commits: Commits,
    /// Folios if such memory is writable at once, without and with a request for huge pages; `None`
    /// if the program has no such memory.
    pub committed: Option<[Folios; 2]>,
    /// jemalloc's metadata; `None` without a run that shows it.
    pub metadata: Option<Metadata>,
    /// The recorded threads.
    pub threads: usize,
    /// The effect of keeping freed memory.
    pub kept: Kept,
    /// The effect of prefault by the kernel; `None` if the user interrupted the replay, if the
    /// recorded host has larger pages, or if this host has too little memory for the replay.
    pub prefault: Option<Effect>,
}

/// Steps of progress for the replays: each takes about as long as several walks.
const REPLAYS: u64 = 8;

impl Findings {
    /// The approximate number of steps of progress of [`of`](Self::of).
    pub const STEPS: u64 = THP as u64 + 7 + REPLAYS;

    /// Returns the expected faults of a run without a recorder, with the host's huge pages.
    pub fn expected_faults(&self) -> u64 {
        let Census { copies, file, shared, shared_folios, .. } = self.shared[0];
        let Folios { outcome, mapped } = &self.now;
        let folios = outcome.left - mapped[0] + shared_folios;
        self.faults(mapped[0] + copies + file + shared) + folios
    }

    /// Returns the faults of the recorded host for `touches` of pages of 4 KiB.
    pub fn faults(&self, touches: u64) -> u64 {
        touches / self.small_pages
    }

    /// Returns the faults of the recorded host for a number of touches of pages of 4 KiB.
    pub fn spared(&self, touches: f64) -> f64 {
        touches / self.small_pages as f64
    }

    /// Returns the reduction in faults from `now` to `with`.
    pub fn fewer(&self, now: &Folios, with: &Folios) -> f64 {
        let folios = |it: &Folios| it.outcome.left as f64 - it.mapped[0] as f64;
        let single = now.mapped[0] as f64 - with.mapped[0] as f64;
        self.spared(single) + folios(now) - folios(with)
    }

    /// Returns the name of the recorded program, without its directory.
    pub fn program_name(&self) -> &str {
        self.name.rsplit('/').next().unwrap_or_default()
    }

    /// Returns the share of the recorded first touches that cause a fault for a single page, from 0
    /// to 1. A setting that maps pages in another way has no effect on touches in larger folios.
    pub fn single(&self) -> f64 {
        match self.now.outcome.faults {
            0 => 1.0,
            faults => self.now.mapped[0] as f64 / faults as f64,
        }
    }

    /// Adds allocators that a run of the program had.
    pub fn add_allocators(&mut self, seen: Vec<Linked>) {
        let others = &mut self.program.others;
        let new: Vec<_> = seen.into_iter().filter(|linked| !others.contains(linked)).collect();
        others.extend(new);
    }

    /// Corrects the counts for a program that switches huge pages off for itself.
    pub fn switch_huge_off(&mut self) {
        self.sizes = Sizes::none(self.sizes.thp);
        self.shmem = Shmem::NONE;
        self.shared = [self.census.clone(), self.census.clone()];
        self.with.clear();
        self.now = self.without;
        self.padded_folios = self.without;
        self.malloc_huge = [self.without; 2];
        self.arenas_huge = None;
        self.committed = self.committed.map(|_| [self.without; 2]);
    }

    /// Returns the peak size of anonymous memory in bytes, with any of the settings.
    pub fn most_bytes(&self) -> u64 {
        let with = self.with.iter().map(|(_, folios)| folios);
        let all = with.chain([&self.now, &self.padded_folios]).chain(&self.malloc_huge);
        let pages = all.map(|folios| folios.outcome.peak_resident + folios.outcome.peak_untouched);
        pages.max().unwrap_or(0) * PAGE_SIZE
    }

    /// Computes the counts of the recording `source`.
    ///
    /// # Errors
    /// The recording is inconsistent, or an operation of its replay failed.
    pub fn of(
        source: &Source,
        program: Program,
        sizes: Sizes,
        shmem: Shmem,
        observer: &dyn Observer,
    ) -> Result<Self, Error> {
        let trace = &source.trace;
        let wrong = |error: PlanError| Error::input(&source.name, error);
        let (always, asked) = (sizes.always(), sizes.asked());
        let counted = |counts: Result<Folios, PlanError>| {
            observer.advance(1);
            counts.map_err(wrong)
        };
        let folios = |orders: &[u8]| counted(folios(trace, orders, &asked));
        observer.begin("counts faults with larger folios");
        let mut with = Vec::new();
        let (thp, huge) = (sizes.thp, sizes.thp_pages());
        for order in 1..=thp {
            let there = sizes.sizes.iter().any(|(size, _)| *size == order)
                || order == thp && sizes.all.is_some();
            if there && !always.contains(&order) {
                let orders = [&always[..], &[order]].concat();
                with.push((order, folios(&orders)?));
            }
        }
        let now = folios(&always)?;
        let without = counted(anticipate::folio::folios(trace, &[], &[]))?;
        observer.begin("counts faults with other settings of malloc");
        let malloc =
            |orders: &[u8]| counted(folios_of(trace, of_malloc(trace, huge), orders, &asked));
        let malloc_huge = [malloc(&always)?, malloc(&[&always[..], &[thp]].concat())?];
        let arenas_huge = Some(counted(huge_arenas(trace, huge, &always, &asked))?);
        let commits = Commits::of(trace).map_err(wrong)?;
        let at_once = |requests: bool| {
            let requests = requests.then_some(huge);
            counted(committed_at_once(trace, requests, &always, &asked))
        };
        let committed = match commits.calls {
            0 => None,
            _ => Some([at_once(false)?, at_once(true)?]),
        };
        let mut pad = Padded::default();
        let padded_folios = counted(folios_of(trace, padded(trace, &mut pad), &always, &asked))?;
        observer.begin("replays the program with prefault");
        let settings = Settings::new(&[]);
        // The windows of prefault are defined for pages of 4 KiB.
        let effects = match source.small_pages {
            1 => prefault::effects(source, &settings, &[PREFAULT]),
            _ => Ok(None),
        };
        let effects = match effects {
            // The other predictions need no replay.
            Err(error @ Error::Memory { .. }) => {
                observer.note(&format!("no prediction of prefault by the kernel: {error}"));
                None
            }
            effects => effects?,
        };
        observer.advance(REPLAYS);
        observer.begin("counts faults by their cause");
        let census = Census::with_huge(trace, huge).map_err(wrong)?;
        let forks = Forks::with_huge(trace, huge).map_err(wrong)?;
        let all = census.with_huge_shared(census.huge_shared);
        let with_shmem = match shmem.mode {
            Mode::Always => all.clone(),
            Mode::Madvise => census.with_huge_shared(census.huge_asked),
            Mode::Never => census.clone(),
        };
        Ok(Self {
            name: source.name.clone(),
            small_pages: source.small_pages,
            huge_recorded: trace.header.thp == HUGE_ON,
            program,
            census,
            shared: [with_shmem, all],
            shmem,
            now,
            with,
            without,
            malloc_huge,
            padded: pad,
            padded_folios,
            reserved: reserved(trace).map_err(wrong)?,
            collector: None,
            discards: Discards::of(trace).map_err(wrong)?,
            arenas_huge,
            commits,
            committed,
            metadata: None,
            collector_copies: collector_copies(&forks, &trace.stacks),
            collections: None,
            forks,
            fork_cost: None,
            files: Files::of(trace, MOSTLY).map_err(wrong)?,
            file_cost: None,
            cold_cost: None,
            blocks: Blocks::with_huge(trace, huge).map_err(wrong)?,
            stalls: None,
            walks: None,
            threads: trace.threads.len(),
            kept: kept(trace).map_err(wrong)?,
            prefault: effects.and_then(|effects| effects.into_iter().next()),
            sizes,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::advise::program::Program;
    use faultless_trace::Trace;
    use faultless_trace::event::{
        Access, Backing, Event, Header, Kind, ProcessInfo, Prot, Recorded, ThreadInfo,
    };
    use std::ffi::OsStr;
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
    fn program_larger_than_the_host_is_counted_without_a_replay() {
        let (start, len) = (1 << 40, 1 << 45);
        let (prot, backing) = (Prot::READ | Prot::WRITE, Backing::Anon);
        // MAP_POPULATE.
        let map = Kind::Map { start, len, prot, flags: 0x8022, backing };
        let touch = Kind::first(start, Access::Write);
        let event = |kind| Event { time_us: 0, thread: 0, kind };
        let header = Header { page_size: 4096, recorded: Recorded::all(), ..Header::default() };
        let trace = Trace {
            header,
            processes: vec![ProcessInfo { parent: None, pid: None }],
            threads: vec![ThreadInfo { process: 0, name: String::new() }],
            events: [map, touch].into_iter().map(event).collect(),
            ..Trace::default()
        };
        let source = Source::new("large".into(), trace).expect("consistent");
        let program = Program::of(OsStr::new("large"), &source.trace);
        let notes = Notes::default();
        let found = Findings::of(&source, program, Sizes::read(), Shmem::NONE, &notes);
        let found = found.expect("counted");
        assert_eq!((found.census.zeroed, found.prefault), (1, None));
        let notes = notes.0.into_inner().expect("no panic");
        assert!(notes[0].contains("needs 66.0 TiB of memory"), "{notes:?}");
    }
}
