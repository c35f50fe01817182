use super::*;
use crate::event::{Header, ProcessInfo, ThreadInfo};
use crate::recordings;
use faultless::prefault::Streams;

const START: u64 = 1 << 40;

/// Returns a trace of two threads of one process, and a child process.
fn trace(events: &[(u32, Kind)]) -> Trace {
    let thread = |process| ThreadInfo { process, name: String::new() };
    Trace {
        header: Header { page_size: PAGE_SIZE as u32, ..Header::default() },
        processes: vec![
            ProcessInfo { parent: None, pid: None },
            ProcessInfo { parent: Some(0), pid: None },
        ],
        threads: vec![thread(0), thread(0), thread(1)],
        events: events
            .iter()
            .map(|(thread, kind)| Event { time_us: 0, thread: *thread, kind: *kind })
            .collect(),
        ..Trace::default()
    }
}

fn map(pages: u64) -> (u32, Kind) {
    let prot = Prot::READ | Prot::WRITE;
    let len = pages * PAGE_SIZE;
    (0, Kind::Map { start: START, len, prot, flags: 0x22, backing: Backing::Anon })
}

fn fault(thread: u32, page: u64, access: Access) -> (u32, Kind) {
    let page = START + page * PAGE_SIZE;
    (thread, Kind::first(page, access))
}

/// Maps a window of four pages upwards from the fault, within its reach.
struct Four;

impl Policy for Four {
    fn fault(&mut self, fault: &Fault<'_>) -> Vec<u64> {
        (fault.page..(fault.page + 4).min(fault.reach.end)).collect()
    }
}

fn four(events: &[(u32, Kind)]) -> Outcome {
    walk(&trace(events), &mut Four).unwrap()
}

#[test]
fn prefaulted_pages_save_faults_or_are_wasted() {
    let w = Access::Write;
    let out = four(&[map(600), fault(0, 0, w), fault(1, 1, w), fault(0, 3, w), fault(0, 8, w)]);
    let want =
        Outcome { faults: 4, left: 2, ahead: 6, wasted: 4, peak_untouched: 4, peak_resident: 4 };
    assert_eq!(out, want);
    assert_eq!((out.avoided(), out.waste()), (0.5, 4.0 / 6.0));
}

#[test]
fn store_to_the_zero_page_still_faults() {
    let (r, w) = (Access::Read, Access::Write);
    let out = four(&[map(600), fault(0, 0, r), fault(0, 1, w), fault(0, 2, r)]);
    // The second fault is a copy, and maps page 4 too.
    assert_eq!((out.faults, out.left, out.ahead, out.wasted), (3, 2, 4, 2));
}

#[test]
fn untouched_removed_pages_are_wasted_and_fault_again() {
    let w = Access::Write;
    let part = (0, Kind::Unmap { start: START, len: 2 * PAGE_SIZE });
    let advice = MADV_DONTNEED;
    let forget = (0, Kind::Advise { start: START + 3 * PAGE_SIZE, len: PAGE_SIZE, advice });
    let out = four(&[map(600), fault(0, 0, w), part, forget, fault(0, 2, w), fault(0, 3, w)]);
    assert_eq!((out.faults, out.left, out.ahead, out.wasted), (3, 2, 6, 5));
    assert_eq!(four(&[map(2), fault(0, 0, w)]).ahead, 1, "not beyond the mapping");
    assert_eq!(four(&[map(600), fault(0, 511, w)]).ahead, 0, "not beyond the table");
}

#[test]
fn moved_pages_stay_mapped() {
    let w = Access::Write;
    let (old, old_len) = (START, 600 * PAGE_SIZE);
    let moved = |new, new_len| (0, Kind::Remap { old, old_len, new, new_len, flags: 1 });
    let grown = moved(START, 700 * PAGE_SIZE);
    assert_eq!(four(&[map(600), fault(0, 0, w), grown, fault(0, 2, w)]).left, 1);
    let shrunk = moved(START + (1 << 30), 2 * PAGE_SIZE);
    let there = fault(0, (1 << 30) / PAGE_SIZE + 1, w);
    let out = four(&[map(600), fault(0, 0, w), shrunk, there]);
    assert_eq!((out.left, out.wasted), (1, 2));
}

#[test]
fn forked_child_has_touched_pages_and_faults_on_others() {
    let w = Access::Write;
    let fork = (0, Kind::Spawn { child: 2, birth: Birth::Fork });
    let out = four(&[map(600), fault(0, 0, w), fork, fault(2, 1, w), fault(0, 1, w)]);
    assert_eq!((out.faults, out.left), (3, 3));
    // Its first fault maps three more pages of the child.
    let exit = [(2, Kind::Exit), (0, Kind::Exit)];
    let out = four(&[&[map(600), fault(0, 0, w), fork, fault(2, 8, w)], &exit[..]].concat());
    assert_eq!((out.ahead, out.wasted), (6, 6));
}

#[test]
fn inconsistent_trace_is_rejected() {
    let error = predicted::<Streams>(&trace(&[(7, Kind::Exec)]), 5).unwrap_err();
    assert_eq!(error.to_string(), "event 0: the thread is not in the table");
}

#[test]
fn order_zero_avoids_no_fault() {
    let trace = recordings::find("redis").unwrap().trace().unwrap();
    let out = predicted::<Streams>(&trace, 0).unwrap();
    assert_eq!((out.left, out.ahead, out.wasted), (out.faults, 0, 0));
}

#[test]
fn recordings_keep_their_prefault_results() {
    let all: Vec<_> = recordings::all()
        .iter()
        .map(|recording| {
            (recording.name, predicted::<Streams>(&recording.trace().unwrap(), 5).unwrap())
        })
        .collect();
    for (name, out) in &all {
        assert!(out.avoided() >= 0.65, "{name}: {out:?}");
        assert!(out.waste() <= 0.09, "{name}: {out:?}");
    }
    let mean = all.iter().map(|(_, out)| out.avoided()).sum::<f64>() / all.len() as f64;
    assert!(mean >= 0.85, "{mean}");
    let sum = |of: fn(&Outcome) -> u64| all.iter().map(|(_, out)| of(out)).sum::<u64>() as f64;
    assert!(sum(|out| out.wasted) / sum(|out| out.ahead) <= 0.03);
}
