//! Memory that mimalloc commits on demand: each part that becomes writable takes a call, and splits
//! the mapping, so that no huge page fits.

use super::costs::Costs;
use super::findings::Findings;
use super::item::Item;
use super::linked::Linked;
use super::named;
use super::others::shown;
use super::time::folio_saving;
use crate::number::plural;
use faultless::PAGE_SIZE;
use faultless_trace::Trace;
use faultless_trace::anticipate::folio::{Folios, folios_of};
use faultless_trace::event::{Backing, Event, Kind, Prot};
use faultless_trace::plan::PlanError;

const MAP_STACK: u32 = 0x2_0000;
const MADV_HUGEPAGE: u32 = 14;

/// Returns the folios if reserved memory is writable at once, with the orders `all` for all memory
/// and `asked` for memory with a request. With `requests`, the allocator also requests huge pages,
/// of this number of pages, for each mapping of at least a huge page.
///
/// # Errors
/// The trace does not pass [`Trace::check`].
pub fn committed_at_once(
    trace: &Trace,
    requests: Option<u64>,
    all: &[u8],
    asked: &[u8],
) -> Result<Folios, PlanError> {
    folios_of(trace, committing(trace, requests), all, asked)
}

/// Returns the events of a program that makes all private anonymous memory writable at its mapping.
fn committing(trace: &Trace, requests: Option<u64>) -> impl Iterator<Item = Event> {
    let writable = Prot::READ | Prot::WRITE;
    trace.events.iter().flat_map(move |event| {
        let with = |kind| Some(Event { kind, ..event });
        match event.kind {
            Kind::Map { start, len, prot, flags, backing: Backing::Anon }
                if prot.is_empty() && flags & MAP_STACK == 0 =>
            {
                let map = Kind::Map { start, len, prot: writable, flags, backing: Backing::Anon };
                let advise = Kind::Advise { start, len, advice: MADV_HUGEPAGE };
                let large = requests.is_some_and(|huge| len >= huge * PAGE_SIZE);
                [with(map), with(advise).filter(|_| large)]
            }
            // The memory is writable already.
            Kind::Protect { prot, .. } if prot == writable => [None, None],
            kind => [with(kind), None],
        }
        .into_iter()
        .flatten()
    })
}

/// Returns the predicted item: mimalloc makes its memory writable at once.
pub fn predicted(linked: &Linked, findings: &Findings, costs: &Costs) -> Option<Item> {
    let apply = named::eager(linked)?;
    let commits = findings.commits;
    let requests = matches!(linked, Linked::Mimalloc { requests: true, .. });
    let (now, with) = (&findings.now, &findings.committed.as_ref()?[usize::from(requests)]);
    (commits.calls > 0).then(|| Item {
        name: "mimalloc commits at once".into(),
        action: format!(
            "{} spares {} of mprotect",
            shown(&apply),
            plural(commits.calls, "call")
        ),
        saving: commits.calls as f64 * costs.mapping + folio_saving(findings, now, with, costs),
        spared: Some(findings.fewer(now, with)),
        unused: with.outcome.peak_untouched.saturating_sub(now.outcome.peak_untouched) * PAGE_SIZE,
        apply,
        at_best: 0.0,
        remarks: vec![
            "with vm.overcommit_memory=2 the whole reservation counts against the limit of the system",
        ],
    })
}

#[cfg(test)]
mod tests {
    use super::super::costs::tests::costs;
    use super::super::item::Apply;
    use super::super::items::tests::{findings, sizes};
    use super::super::linked::EAGER;
    use super::super::sysfs::Mode;
    use super::*;
    use faultless_trace::anticipate::folio::THP;
    use faultless_trace::commit::Commits;
    use faultless_trace::event::{Access, Header, ProcessInfo, Recorded, ThreadInfo};

    const START: u64 = 1 << 40;

    /// Returns a program that reserves 4 MiB, and commits and uses 64 KiB at a time.
    fn on_demand() -> Trace {
        let (len, part) = (4 << 20, 64 << 10);
        let prot = Prot::empty();
        let mut kinds =
            vec![Kind::Map { start: START, len, prot, flags: 0x22, backing: Backing::Anon }];
        for start in (START..START + len).step_by(part as usize) {
            kinds.push(Kind::Protect { start, len: part, prot: Prot::READ | Prot::WRITE });
            let pages = (start..start + part).step_by(PAGE_SIZE as usize);
            kinds.extend(pages.map(|page| Kind::first(page, Access::Write)));
        }
        Trace {
            header: Header { page_size: 4096, recorded: Recorded::all(), ..Header::default() },
            processes: vec![ProcessInfo { parent: None, pid: None }],
            threads: vec![ThreadInfo { process: 0, name: String::new() }],
            events: kinds.into_iter().map(|kind| Event { time_us: 0, thread: 0, kind }).collect(),
            ..Trace::default()
        }
    }

    #[test]
    fn memory_committed_at_once_gets_huge_pages() {
        let trace = on_demand();
        let of = |requests: bool, all: &[u8]| {
            let requests = requests.then_some(1 << THP);
            let mapped = committed_at_once(&trace, requests, all, &[THP]).expect("valid").mapped;
            (mapped[0], mapped[usize::from(THP)])
        };
        let huge = (0, 2);
        assert_eq!((of(true, &[]), of(false, &[]), of(false, &[THP])), (huge, (1024, 0), huge));
        let large = committed_at_once(&trace, Some(8192), &[], &[THP]).expect("valid");
        assert_eq!(large.mapped[0], 1024, "no mapping has 32 MiB");
        let now = faultless_trace::anticipate::folio::folios(&trace, &[THP], &[]);
        assert_eq!(now.expect("valid").mapped[0], 1024);
    }

    #[test]
    fn eager_commit_saves_calls_and_faults() {
        let mut findings = findings("python", sizes(Mode::Madvise));
        let eager = EAGER[..2].to_vec();
        let delay = None;
        let mimalloc = |requests| Linked::Mimalloc {
            purges: true,
            decommits: false,
            allows: true,
            requests,
            delay,
            eager: eager.clone(),
        };
        let linked = mimalloc(false);
        findings.committed = Some([findings.now; 2]);
        findings.commits = Commits::default();
        assert!(predicted(&linked, &findings, &costs()).is_none(), "already eager");
        findings.commits = Commits { calls: 64, pages: 1024 };
        let got = predicted(&linked, &findings, &costs()).expect("64 calls");
        assert_eq!((got.saving, got.spared), (64.0 * 500.0, Some(0.0)));
        let trace = on_demand();
        let folios = |requests: bool| {
            let requests = requests.then_some(1 << THP);
            committed_at_once(&trace, requests, &[], &[THP]).expect("valid")
        };
        findings.now = folios(false);
        findings.committed = Some([folios(false), folios(true)]);
        let small = predicted(&linked, &findings, &costs()).expect("64 calls");
        assert_eq!(small.saving, got.saving);
        let huge = predicted(&mimalloc(true), &findings, &costs()).expect("64 calls");
        let want = 1024.0 * costs().page - 2.0 * costs().folio(THP).0 + got.saving;
        assert!((huge.saving - want).abs() < 1.0, "{} is not {want}", huge.saving);
        assert_eq!(huge.spared, Some(1022.0));
        let set = EAGER[..2].iter().map(|(name, value)| ((*name).into(), (*value).into()));
        assert_eq!(huge.apply, Apply::Environment(set.collect()));
        let none = Linked::Gperftools;
        assert!(predicted(&none, &findings, &costs()).is_none());
    }
}
