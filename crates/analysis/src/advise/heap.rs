//! Rewrites a recording as with other settings of glibc's heap.

use faultless::PAGE_SIZE;
use faultless_trace::Trace;
use faultless_trace::event::{Backing, Event, Kind};
use std::collections::HashMap;

/// The unit of memory of allocators other than glibc's, in bytes.
const ARENA: u64 = 256 << 10;
/// The additional growth of the heap beyond the requested size, in bytes: glibc's default
/// (`M_TOP_PAD`). `LARGER_PAD` is the advised value.
const PAD: u64 = 128 << 10;
/// See [`PAD`].
pub const LARGER_PAD: u64 = 4 << 20;

/// Returns the events of a recording with only the memory of glibc's `malloc` as private memory, as
/// with `glibc.malloc.hugetlb=1`: the heap ends at a multiple of a huge page of `huge` pages. Other
/// memory becomes shared, which excludes it from folios.
pub fn of_malloc(trace: &Trace, huge: u64) -> impl Iterator<Item = Event> {
    // Also the smallest block that then has a separate mapping.
    let huge = huge * PAGE_SIZE;
    let mut bases: HashMap<u32, u64> = HashMap::new();
    let others = move |len: u64, backing: Backing| match backing {
        Backing::Anon if len < huge || len.is_multiple_of(ARENA) => Backing::SharedAnon,
        Backing::Stack => Backing::Special,
        backing => backing,
    };
    trace.events.iter().map(move |event| {
        let process = trace.threads.get(event.thread as usize).map_or(0, |thread| thread.process);
        let kind = match event.kind {
            // glibc moves the break to a multiple of a huge page. The first call reports its
            // current position.
            Kind::Brk { end } => {
                let base = *bases.entry(process).or_insert(end);
                Kind::Brk { end: if end > base { end.next_multiple_of(huge) } else { end } }
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
        Event { kind, ..event }
    })
}

/// The effect of a larger pad.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Padded {
    /// The number of `brk` calls avoided.
    pub calls: u64,
    /// The largest additional size of a heap at its end, in bytes. These bytes are touched only if
    /// folios reach into them.
    pub bytes: u64,
}

/// Returns the events of a recording with a heap that grows by [`LARGER_PAD`] at a time
/// (`MALLOC_TOP_PAD_`). A falling break stays as recorded. The differences are added up in `out`
/// while the events are read.
pub fn padded<'a>(trace: &'a Trace, out: &'a mut Padded) -> impl Iterator<Item = Event> + 'a {
    // By process: the recorded break, and the break with the larger pad.
    let mut heaps: HashMap<u32, (u64, u64)> = HashMap::new();
    trace.events.iter().filter_map(move |mut event| {
        let process = trace.threads.get(event.thread as usize).map_or(0, |thread| thread.process);
        match &mut event.kind {
            Kind::Brk { end } => {
                // The first call reports the start of the heap.
                let (recorded, padded) = heaps.entry(process).or_insert((*end, *end));
                let grows = *end > *recorded;
                *recorded = *end;
                if grows && *end <= *padded {
                    out.calls += 1;
                    return None;
                }
                if grows {
                    *end += LARGER_PAD - PAD;
                    out.bytes = out.bytes.max(*end - *recorded);
                }
                *padded = *end;
            }
            Kind::Exec => _ = heaps.remove(&process),
            _ => {}
        }
        Some(event)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use faultless_trace::event::{Header, ProcessInfo, ThreadInfo};

    /// Returns a program whose break moves to these positions, in KiB above the first.
    fn breaks(at: &[u64]) -> Trace {
        let kind = |kib: &u64| Kind::Brk { end: (1 << 40) + (kib << 10) };
        let event = |kib| Event { time_us: 0, thread: 0, kind: kind(kib) };
        Trace {
            header: Header { page_size: PAGE_SIZE as u32, ..Header::default() },
            processes: vec![ProcessInfo { parent: None, pid: None }],
            threads: vec![ThreadInfo { process: 0, name: String::new() }],
            events: at.iter().map(event).collect(),
            ..Trace::default()
        }
    }

    #[test]
    fn larger_pad_saves_brk_calls() {
        let grown: Vec<u64> = (0..64).map(|time| time * 132).collect();
        let with = |trace: &Trace| {
            let mut out = Padded::default();
            let events = padded(trace, &mut out).count();
            (out, events)
        };
        let (padded, events) = with(&breaks(&grown));
        // The first call reports the start. Each remaining call grows the heap by 132 and 3,968
        // KiB, which suffices for 30 more.
        assert_eq!((padded.calls, events), (60, 4));
        assert_eq!(padded.bytes, LARGER_PAD - PAD);
        // The break falls as recorded.
        let (padded, events) = with(&breaks(&[0, 132, 0, 132]));
        assert_eq!((padded.calls, events), (0, 4));
    }

    #[test]
    fn heap_ends_at_a_multiple_of_a_huge_page() {
        let trace = breaks(&[0, 132, 2047, 2049]);
        let ends = |huge| -> Vec<u64> {
            let end = |event: Event| match event.kind {
                Kind::Brk { end } => Some((end - (1 << 40)) >> 10),
                _ => None,
            };
            of_malloc(&trace, huge).filter_map(end).collect()
        };
        assert_eq!(ends(512), [0, 2048, 2048, 4096]);
        assert_eq!(ends(8192), [0, 32 << 10, 32 << 10, 32 << 10], "base pages of 16 KiB");
    }
}
