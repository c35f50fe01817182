//! Random traces: the compact form round-trips, and in any order permitted by a plan, each touch
//! meets the page left by the same change of the address space.

use faultless_trace::event::{
    Access, Backing, Birth, Event, Events, Frame, Function, Header, Kind, ProcessInfo, Prot,
    Recorded, StackId, Stacks, ThreadInfo, Trace,
};
use faultless_trace::plan::{At, Op, Plan};
use faultless_trace::{compact, parse};
use proptest::option;
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::path::Path;

const BASE: u64 = 0x5000_0000;
const PAGES: u64 = 64;
const THREADS: u32 = 3;
/// Recorded call stacks.
const STACKS: u32 = 5;

fn range() -> impl Strategy<Value = (u64, u64)> {
    (0..PAGES, 1..9u64).prop_map(|(page, len)| (BASE + page * 4096, len.min(PAGES - page) * 4096))
}

fn prot() -> impl Strategy<Value = Prot> {
    (0..8u8).prop_map(Prot::from_bits_truncate)
}

fn access() -> impl Strategy<Value = Access> {
    proptest::sample::select(vec![Access::Unknown, Access::Read, Access::Write, Access::Exec])
}

fn backing() -> impl Strategy<Value = Backing> {
    proptest::sample::select(vec![
        Backing::Anon,
        Backing::SharedFile,
        Backing::File,
        Backing::Stack,
    ])
}

fn fault() -> impl Strategy<Value = Kind> {
    let flags = (any::<bool>(), any::<bool>());
    (0..PAGES, access(), flags, option::of(0..4096u16), 0..=STACKS).prop_map(
        |(page, access, (kernel, present), instruction, stack)| {
            let (page, stack) = (BASE + page * 4096, StackId::new(stack));
            Kind::Fault { page, access, kernel, present, instruction, stack }
        },
    )
}

/// Returns a chain of calls of two functions.
fn stacks() -> Stacks {
    let function =
        |name: &str| Function { name: name.into(), module: "random".into(), file: String::new() };
    let frame = |at| Frame { caller: StackId::new(at), function: at % 2, line: 7 * at };
    Stacks {
        functions: ["main", "touch"].map(function).to_vec(),
        frames: (0..STACKS).map(frame).collect(),
    }
}

fn kind() -> impl Strategy<Value = Kind> {
    prop_oneof![
        8 => fault(),
        3 => (range(), prot(), any::<u32>(), backing()).prop_map(
            |((start, len), prot, flags, backing)| Kind::Map { start, len, prot, flags, backing }
        ),
        1 => (range(), prot(), backing()).prop_map(
            |((start, len), prot, backing)| Kind::Area { start, len, prot, backing }
        ),
        1 => (range(), any::<bool>()).prop_map(
            |((start, len), written)| Kind::Resident { start, len, written }
        ),
        2 => range().prop_map(|(start, len)| Kind::Unmap { start, len }),
        2 => (range(), prot()).prop_map(|((start, len), prot)| Kind::Protect { start, len, prot }),
        1 => (range(), 0..30u32)
            .prop_map(|((start, len), advice)| Kind::Advise { start, len, advice }),
        1 => (range(), range(), any::<bool>(), 0..8u32).prop_map(
            |((old, old_len), (new, new_len), copies, flags)| Kind::Remap {
                old, old_len: if copies { 0 } else { old_len }, new, new_len, flags,
            }
        ),
        1 => (0..PAGES * 4096).prop_map(|offset| Kind::Brk { end: BASE + offset }),
        1 => (0..=STACKS).prop_map(|stack| Kind::Caller { stack: StackId::new(stack) }),
    ]
}

/// Returns traces of three threads, the first of which starts the others (and a forked process,
/// whose thread is 3).
fn trace() -> impl Strategy<Value = Trace> {
    let event = (0..THREADS, 0..3u64, kind());
    (proptest::collection::vec(event, 0..120), any::<bool>()).prop_map(|(list, recorded)| {
        let mut now = 0;
        let mut events: Vec<Event> = [(1, Birth::Thread), (2, Birth::Thread)]
            .map(|(child, birth)| Event {
                time_us: 0,
                thread: 0,
                kind: Kind::Spawn { child, birth },
            })
            .to_vec();
        let fork_at = list.len() / 2;
        for (number, (thread, step, mut kind)) in list.into_iter().enumerate() {
            now += step;
            if let Kind::Fault { instruction, stack, .. } = &mut kind
                && !recorded
            {
                (*instruction, *stack) = (None, StackId::NONE);
            }
            if let Kind::Caller { stack } = &mut kind
                && !recorded
            {
                *stack = StackId::NONE;
            }
            events.push(Event { time_us: now, thread, kind });
            if number == fork_at {
                let kind = Kind::Spawn { child: 3, birth: Birth::Fork };
                events.push(Event { time_us: now, thread, kind });
            } else if number > fork_at && step == 0 {
                events.push(Event { time_us: now, thread: 3, kind });
            }
        }
        let thread = |process| ThreadInfo { process, name: format!("of {process}") };
        Trace {
            header: Header {
                program: "random".into(),
                page_size: 4096,
                recorded: if recorded { Recorded::all() } else { Recorded::USER_FAULTS },
                notes: vec!["made up".into()],
                ..Header::default()
            },
            processes: vec![
                ProcessInfo { parent: None, pid: Some(7) },
                ProcessInfo { parent: Some(0), pid: None },
            ],
            threads: vec![thread(0), thread(0), thread(0), thread(1)],
            events: events.into_iter().collect(),
            stacks: if recorded { stacks() } else { Stacks::default() },
        }
    })
}

/// Returns, for each touch, the operation that last changed its page, and for each move of the
/// program break, the previous move. The threads run in an order that `pick` chooses among the
/// permitted ones.
fn outcome(plan: &Plan, mut pick: impl FnMut(usize) -> usize) -> BTreeMap<At, Option<At>> {
    type Pages = BTreeMap<u64, At>;
    let threads = plan.threads();
    let steps: Vec<Vec<(Op, Vec<At>)>> = threads
        .iter()
        .map(|thread| thread.steps().map(|(op, waits)| (op, waits.collect())).collect())
        .collect();
    let mut pages: Vec<Pages> = vec![Pages::new(); plan.processes().len()];
    let mut breaks = vec![None; plan.processes().len()];
    let mut next = vec![0usize; threads.len()];
    let mut met = BTreeMap::new();
    loop {
        let done = |at: &At| next[at.thread as usize] > at.op as usize;
        let ready: Vec<usize> = (0..threads.len())
            .filter(|t| next[*t] < steps[*t].len())
            .filter(|t| {
                threads[*t].start.iter().all(done) && steps[*t][next[*t]].1.iter().all(done)
            })
            .collect();
        if ready.is_empty() {
            break;
        }
        let thread = ready[pick(ready.len())];
        let at = At { thread: thread as u32, op: next[thread] as u32 };
        let process = threads[thread].process as usize;
        let mut change = |start: u64, end: u64| {
            for page in (start..end).step_by(4096).take(4 * PAGES as usize) {
                pages[process].insert(page, at);
            }
        };
        match steps[thread][next[thread]].0 {
            Op::Map { range, .. }
            | Op::Unmap { range }
            | Op::Protect { range, .. }
            | Op::Advise { range, .. }
            | Op::Populate { range, .. } => change(range.start, range.end),
            Op::Remap { old, new, .. } => {
                change(old.start, old.end);
                change(new.start, new.end);
            }
            Op::Brk { old, new } => {
                met.insert(at, breaks[process].replace(at));
                change(old.min(new).next_multiple_of(4096), old.max(new).next_multiple_of(4096));
            }
            Op::Touch { page, .. } => {
                met.insert(at, pages[process].get(&page).copied());
            }
            Op::Fork { child } => pages[child as usize] = pages[process].clone(),
            _ => {}
        }
        next[thread] += 1;
    }
    assert!(next.iter().zip(&steps).all(|(next, steps)| *next == steps.len()), "a cycle of waits");
    met
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..Default::default() })]

    #[test]
    fn compact_form_round_trips(trace in trace()) {
        let path = Path::new("random.fltrace");
        let bytes = compact::encode(path, &trace).unwrap();
        prop_assert_eq!(parse(path, &bytes).unwrap(), trace);
    }

    #[test]
    fn every_permitted_order_has_the_same_outcome(trace in trace(), seed in any::<u64>()) {
        let plan = Plan::new(&trace).unwrap();
        let first = outcome(&plan, |_| 0);
        prop_assert_eq!(&outcome(&plan, |ready| ready - 1), &first);
        let mut state = seed | 1;
        let random = |ready: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) as usize % ready
        };
        prop_assert_eq!(&outcome(&plan, random), &first);
    }

    #[test]
    fn in_turn_gives_one_permitted_order(trace in trace()) {
        let only = |ready| {
            assert_eq!(ready, 1, "threads that may continue");
            0
        };
        let in_turn = outcome(&Plan::in_turn(&trace).unwrap(), only);
        prop_assert_eq!(in_turn, outcome(&Plan::new(&trace).unwrap(), |_| 0));
    }
}

#[test]
fn independent_threads_do_not_wait() {
    let mut events: Events = (1..THREADS)
        .map(|child| Event {
            time_us: 0,
            thread: 0,
            kind: Kind::Spawn { child, birth: Birth::Thread },
        })
        .collect();
    for thread in 0..THREADS {
        // Further apart than the range assumed around a touch.
        let start = BASE + u64::from(thread) * (1 << 20);
        let prot = Prot::READ | Prot::WRITE;
        let map = Kind::Map { start, len: 1 << 20, prot, flags: 0x22, backing: Backing::Anon };
        let touch = Kind::first(start, Access::Write);
        events.extend([map, touch].map(|kind| Event { time_us: 0, thread, kind }));
    }
    let threads = (0..THREADS).map(|_| ThreadInfo { process: 0, name: String::new() }).collect();
    let header = Header { page_size: 4096, recorded: Recorded::all(), ..Header::default() };
    let processes = vec![ProcessInfo { parent: None, pid: None }];
    let trace = Trace { header, processes, threads, events, ..Trace::default() };
    let plan = Plan::new(&trace).unwrap();
    assert!(plan.threads().iter().all(|thread| thread.wait_count() == 0));
    assert_eq!(plan.assumptions().count(), 0);
    assert_eq!(plan.threads()[1].start, Some(At { thread: 0, op: 0 }));
}
