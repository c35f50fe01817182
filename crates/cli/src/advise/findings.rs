//! What a recording tells, before any time is put to it: counts of faults and pages, as recorded and as other settings would have it.

use super::program::Program;
use super::sysfs::{SMALLEST, Sizes};
use crate::error::CliError;
use crate::replay::ahead;
use crate::replay::source::Source;
use crate::report::effect::Effect;
use crate::settings::{Ahead, Settings};
use faultless::PAGE_SIZE;
use faultless_trace::Trace;
use faultless_trace::anticipate::folio::{Folios, LARGEST, folios};
use faultless_trace::census::Census;
use faultless_trace::event::{Backing, Event, Kind};
use faultless_trace::keep::{Kept, kept};
use faultless_trace::plan::PlanError;
use std::collections::HashMap;

/// The order up to which prefault by the kernel is asked for: the default of this subsystem.
const PREFAULT: Ahead = Ahead { order: 5, pool: 0 };
/// To what glibc's heap grows where its `malloc` asks for huge pages, and the smallest block that is then mapped so, in bytes.
const HUGE: u64 = PAGE_SIZE << LARGEST;
/// Bytes in which memory of allocators other than glibc's comes.
const ARENA: u64 = 256 << 10;

/// Counts of one recording.
#[derive(Clone, Debug)]
pub struct Findings {
    /// The recording's name.
    pub name: String,
    /// What kind of program it is of.
    pub program: Program,
    /// The host's settings.
    pub sizes: Sizes,
    /// The faults by what they were for.
    pub census: Census,
    /// Folios with the host's settings, and if one more size were enabled for all memory: its order.
    pub now: Folios,
    /// See `now`.
    pub with: Vec<(u8, Folios)>,
    /// Without folios.
    pub without: Folios,
    /// Folios if glibc's `malloc` asked for huge pages: in memory that comes from it, off and on.
    pub malloc_huge: [Folios; 2],
    /// If freed memory were kept.
    pub kept: Kept,
    /// If the kernel prefaulted; none where the user interrupted the replay.
    pub prefault: Option<Effect>,
}

impl Findings {
    /// Of the recording `source`.
    ///
    /// # Errors
    /// The recording does not hold together, or there is no memory to replay it in.
    pub fn of(source: &Source, program: Program, sizes: Sizes) -> Result<Self, CliError> {
        let trace = &source.trace;
        let wrong = |error: PlanError| CliError::Usage(format!("{}: {error}", source.name));
        let always = sizes.always();
        let mut with = Vec::new();
        for order in SMALLEST..=LARGEST {
            let there = sizes.sizes.iter().any(|(size, _)| *size == order)
                || order == LARGEST && sizes.all.is_some();
            if there && !always.contains(&order) {
                let orders = [&always[..], &[order]].concat();
                with.push((order, folios(trace, &orders).map_err(wrong)?));
            }
        }
        let heap = of_malloc(trace);
        let settings = Settings::new(&[]);
        let effects = ahead::effects(source, &settings, &[PREFAULT])?;
        Ok(Self {
            name: source.name.clone(),
            program,
            census: Census::of(trace).map_err(wrong)?,
            now: folios(trace, &always).map_err(wrong)?,
            with,
            without: folios(trace, &[]).map_err(wrong)?,
            malloc_huge: [
                folios(&heap, &always).map_err(wrong)?,
                folios(&heap, &[&always[..], &[LARGEST]].concat()).map_err(wrong)?,
            ],
            kept: kept(trace).map_err(wrong)?,
            prefault: effects.and_then(|effects| effects.into_iter().next()),
            sizes,
        })
    }
}

/// The recording with the memory of glibc's `malloc` alone as private memory, as it would be with `glibc.malloc.hugetlb=1`: the heap
/// ends at a multiple of 2 MiB. Other memory becomes shared, in which folios have no part.
fn of_malloc(trace: &Trace) -> Trace {
    let mut bases: HashMap<u32, u64> = HashMap::new();
    let others = |len: u64, backing: Backing| match backing {
        Backing::Anon if len < HUGE || len.is_multiple_of(ARENA) => Backing::SharedAnon,
        Backing::Stack => Backing::Special,
        backing => backing,
    };
    let changed = |event: &Event| {
        let process = trace.threads.get(event.thread as usize).map_or(0, |thread| thread.process);
        let kind = match event.kind {
            // glibc moves the break to a multiple of 2 MiB; the first call tells where it is.
            Kind::Brk { end } => {
                let base = *bases.entry(process).or_insert(end);
                Kind::Brk { end: if end > base { end.next_multiple_of(HUGE) } else { end } }
            }
            Kind::Map { start, len, prot, flags, backing } => {
                Kind::Map { start, len, prot, flags, backing: others(len, backing) }
            }
            Kind::Area { start, len, prot, backing } => {
                Kind::Area { start, len, prot, backing: others(len, backing) }
            }
            Kind::Exec => {
                bases.remove(&process);
                Kind::Exec
            }
            kind => kind,
        };
        Event { kind, ..*event }
    };
    let events = trace.events.iter().map(changed).collect();
    Trace { events, ..trace.clone() }
}
