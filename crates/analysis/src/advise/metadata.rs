//! Huge pages for jemalloc's metadata (`metadata_thp`).
//!
//! A recording does not show which mappings hold metadata. With `metadata_thp:always` jemalloc
//! requests huge pages for exactly these mappings, so one more run of the program, with huge pages
//! off, shows their size and their resident pages in `/proc/PID/smaps`.

use super::costs::Costs;
use super::effect::Effect;
use super::findings::Findings;
use super::item::{Apply, Item, Open};
use super::linked::Linked;
use super::named;
use super::once::{silent, supervised};
use super::others::shown;
use super::supervise::descendants;
use super::sysfs::Mode;
use crate::error::Error;
use crate::number::grouped;
use faultless::PAGE_SIZE;
use procfs::FromBufRead;
use procfs::process::{MemoryMaps, VmFlags};
use std::collections::HashMap;
use std::ffi::OsString;
use std::fs;
use std::time::{Duration, Instant};

/// First touches of anonymous memory from which metadata is worth a run: 64 MiB. Metadata is 1 to
/// 2 % of a heap.
const FEW: u64 = 16 << 10;
/// The time between two readings, and the most processes to read.
const PAUSE: Duration = Duration::from_millis(50);
const MOST: usize = 16;

/// Mappings with metadata, in pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Metadata {
    /// Mapped pages.
    pub mapped: u64,
    /// Resident pages.
    pub resident: u64,
}

impl Metadata {
    /// Runs `command` once with huge pages requested for the metadata of the build `linked`, and
    /// with huge pages off. The program reads no input, and its output is dropped. Returns `None`
    /// after a request to stop.
    ///
    /// # Errors
    /// The program cannot be run.
    pub fn of_run(command: &[OsString], linked: &Linked) -> Result<Option<Self>, Error> {
        let Some(apply) = named::metadata(linked) else { return Ok(None) };
        let mut program = silent(command)?;
        Effect::of([("", &apply), ("", &Apply::WithoutThp)])?.put(&mut program, None);
        let mut last: Option<Instant> = None;
        let mut processes: HashMap<i32, Self> = HashMap::new();
        let done = supervised(&mut program, |pid| {
            if last.is_some_and(|last| last.elapsed() < PAUSE) {
                return;
            }
            last = Some(Instant::now());
            for pid in [pid].into_iter().chain(descendants(pid)).take(MOST) {
                let smaps = fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap_or_default();
                // An ending process has no mappings.
                let now = Self::of(&smaps);
                let known = processes.entry(pid).or_default();
                if now.resident >= known.resident {
                    *known = now;
                }
            }
        })?;
        let mut all = Self::default();
        for one in processes.into_values() {
            all.mapped += one.mapped;
            all.resident += one.resident;
        }
        Ok(done.map(|_| all))
    }

    /// Adds up the mappings with a request for huge pages in the text of `/proc/PID/smaps`.
    fn of(smaps: &str) -> Self {
        let mut all = Self::default();
        let Ok(mappings) = MemoryMaps::from_buf_read(smaps.as_bytes()) else { return all };
        let requested = |flags: VmFlags| flags.contains(VmFlags::HG);
        let extensions = mappings.into_iter().map(|mapping| mapping.extension);
        for of in extensions.filter(|of| requested(of.vm_flags)) {
            let pages = |name| of.map.get(name).map_or(0, |bytes| bytes / PAGE_SIZE);
            all.mapped += pages("Size");
            all.resident += pages("Rss");
        }
        all
    }

    /// Returns the huge pages, of `huge` pages, for this metadata.
    fn folios(&self, huge: u64) -> u64 {
        // Metadata fills each mapping from its start.
        (self.mapped / huge).min(self.resident)
    }
}

/// Returns the build of jemalloc whose metadata can get huge pages, if the host permits requests,
/// and if the heap is large enough.
pub fn candidate(findings: &Findings) -> Option<&Linked> {
    let asks = findings.sizes.thp_mode() == Mode::Madvise;
    let large = findings.now.outcome.faults >= FEW;
    let all = findings.program.others.iter();
    let of = |linked: &&Linked| matches!(linked, Linked::Jemalloc { huge: true, .. });
    all.filter(of).find(|_| asks && large)
}

/// Returns the predicted item.
pub fn predicted(findings: &Findings, costs: &Costs) -> Option<Item> {
    let apply = named::metadata(candidate(findings)?)?;
    let metadata = findings.metadata?;
    let huge = findings.sizes.thp_pages();
    let folios = metadata.folios(huge);
    // jemalloc reads most of its metadata before the first store, so a page takes two faults.
    let reads = findings.census.zero_page.min(metadata.resident) as f64;
    let resident = metadata.resident as f64;
    (folios > 0).then(|| Item {
        name: "jemalloc metadata on THP".into(),
        action: format!(
            "{}: {} pages of metadata become {} huge pages",
            shown(&apply),
            grouped(metadata.resident),
            grouped(folios)
        ),
        saving: resident * costs.page + reads * costs.unzeroed()
            - folios as f64 * costs.folio(findings.sizes.thp).0,
        spared: Some(findings.spared(resident + reads) - folios as f64),
        unused: (folios * huge).saturating_sub(metadata.resident) * PAGE_SIZE,
        apply,
        at_best: 0.0,
        remarks: vec!["fewer TLB misses are not counted: random accesses may save more"],
    })
}

/// Returns the advice for a recording, which does not show the metadata.
pub fn open(findings: &Findings) -> Option<Open> {
    let apply = named::metadata(candidate(findings).filter(|_| findings.metadata.is_none())?)?;
    let why = if findings.census.asks_for_huge {
        "the program itself requests huge pages, so its mappings do not show which of them hold \
         metadata, 1 to 2 % of a heap"
    } else {
        "a recording does not show which mappings hold metadata, 1 to 2 % of a heap: \
         `advise -- PROGRAM` predicts the saving from one more run"
    };
    Some(Open {
        name: "jemalloc metadata on THP".into(),
        action: shown(&apply),
        why: why.into(),
        apply,
    })
}

#[cfg(test)]
mod tests {
    use super::super::costs::tests::costs;
    use super::super::items::tests::{findings, sizes};
    use super::super::linked::tests::jemalloc;
    use super::*;

    const HUGE: u64 = 512;
    use memmap2::{Advice, MmapMut};
    use std::thread;

    #[test]
    fn mappings_with_a_request_are_added_up() {
        let smaps = "7f00-7f40 rw-p 00000000 00:00 0 \nSize:   4096 kB\nRss:     80 kB\n\
                     AnonHugePages:         0 kB\nVmFlags: rd wr mr mw me ac hg \n\
                     7f50-7f60 rw-p 00000000 00:00 0 \nSize:   64 kB\nRss:     64 kB\n\
                     VmFlags: rd wr mr mw me ac sd \n\
                     7f80-7fa0 rw-p 00000000 00:00 0 \nSize:   2048 kB\nRss:     8 kB\n\
                     VmFlags: rd wr hg\n";
        let got = Metadata::of(smaps);
        assert_eq!((got, got.folios(HUGE)), (Metadata { mapped: 1536, resident: 22 }, 3));
        assert_eq!(Metadata::of(""), Metadata::default());
    }

    /// This test is also the program of the run, in the place of a program with jemalloc.
    #[test]
    fn run_shows_the_resident_pages() {
        let own = "advise::metadata::tests::run_shows_the_resident_pages";
        let settings = std::env::var("MALLOC_CONF").unwrap_or_default();
        if settings.ends_with("metadata_thp:always") {
            let mut memory = MmapMut::map_anon(8 << 20).expect("memory");
            memory.advise(Advice::HugePage).expect("accepted");
            memory[..1 << 20].fill(1);
            thread::sleep(20 * PAUSE);
            return;
        }
        let program = std::env::current_exe().expect("the path of this test");
        let command = [program.into_os_string(), "--exact".into(), own.into()];
        let got = Metadata::of_run(&command, &jemalloc()).expect("it runs");
        let got = got.expect("not interrupted");
        assert!(got.mapped >= 2048 && got.resident >= 256 && got.resident < 512, "{got:?}");
    }

    #[test]
    fn metadata_is_predicted_after_a_run() {
        let mut findings = findings("python", sizes(Mode::Madvise));
        findings.program.others = vec![jemalloc()];
        assert!(candidate(&findings).is_some(), "{:?}", findings.now.outcome);
        assert!(predicted(&findings, &costs()).is_none());
        assert!(open(&findings).is_some_and(|open| open.why.contains("one more run")));
        findings.metadata = Some(Metadata { mapped: 4 * HUGE, resident: 700 });
        findings.census.zero_page = 300;
        let got = predicted(&findings, &costs()).expect("4 huge pages");
        let huge = 4.0 * costs().folio(9).0;
        let want = 700.0 * costs().page + 300.0 * costs().unzeroed() - huge;
        assert!((got.saving - want).abs() < 1.0, "{} is not {want}", got.saving);
        assert_eq!((got.spared, got.unused), (Some(996.0), (4 * HUGE - 700) * PAGE_SIZE));
        findings.census.zero_page = 9000;
        let got = predicted(&findings, &costs()).expect("4 huge pages");
        assert_eq!(got.spared, Some(1396.0), "other pages of the zero page");
        assert!(open(&findings).is_none());
        findings.sizes = sizes(Mode::Always);
        assert!(predicted(&findings, &costs()).is_none(), "all memory has huge pages");
        findings.sizes = sizes(Mode::Madvise);
        findings.now.outcome.faults = FEW - 1;
        assert!(candidate(&findings).is_none(), "a small heap");
    }
}
