//! Settings of today's Linux, and the saving of each: counts of a recording, multiplied by costs of
//! this host.

use super::costs::Costs;
use super::findings::Findings;
use super::item::{Apply, Item, Open, size};
use super::sysfs::{THP, kib, size_file};
use super::time::{folio_saving, remark, shared_time};
use super::{ahead, allocator, blocks, forks, mapped_files, others, python, runtime};
use crate::number::plural;
use faultless::PAGE_SIZE;
use faultless_trace::anticipate::folio::{Folios, THP as SMALL_THP};
use faultless_trace::census::Census;
use std::path::Path;

/// The share of a mapping's pages that must be used to advise its population.
pub(super) const MOSTLY: f64 = 0.9;
/// The value of a setting of huge pages for all memory.
const ALWAYS: &str = "always";
/// Pages of a mapping below which its population is not worth a line.
const FEW: u64 = 256;

/// Returns the advice without a prediction that applies to the program.
pub fn open(findings: &Findings) -> Vec<Open> {
    let all = allocator::open(findings).into_iter().chain(ahead::open(findings));
    let all = all.chain(others::open(findings)).chain(forks::open(findings));
    let all = all.chain(python::open(findings)).chain(mapped_files::open(findings));
    let all = all.chain(small_text(findings));
    all.chain(blocks::open(findings)).chain(runtime::open(findings)).collect()
}

/// Returns all items that apply to the program, the largest saving first.
pub fn predict(findings: &Findings, costs: &Costs) -> Vec<Item> {
    predict_both(findings, costs, &costs.in_used_memory())
}

/// Returns the same as [`predict`], with the costs `used` of memory that was not taken back.
pub fn predict_both(findings: &Findings, costs: &Costs, used: &Costs) -> Vec<Item> {
    let at_best = all(findings, used);
    let mut items = all(findings, costs);
    for (item, best) in items.iter_mut().zip(at_best) {
        item.at_best = best.saving;
    }
    items.sort_by(|one, other| other.saving.total_cmp(&one.saving));
    items
}

fn all(findings: &Findings, costs: &Costs) -> Vec<Item> {
    let mut items = Vec::new();
    items.extend(sizes(findings, costs));
    items.extend(without_thp(findings, costs));
    items.extend(shared_memory(findings, costs));
    items.extend(allocator::predicted(findings, costs));
    items.extend(others::predicted(findings, costs));
    items.extend(mapped_files::predicted(findings, costs));
    items.extend(forks::predicted(findings, costs));
    items.extend(python::predicted(findings, costs));
    items.extend(populate(findings, costs));
    items.extend(runtime::predicted(findings, costs));
    items.extend(text(findings, costs));
    items
}

/// Returns the saving of prefault by the kernel, which no setting of Linux provides.
pub fn prefault(findings: &Findings, costs: &Costs) -> Option<Item> {
    let effect = findings.prefault.as_ref()?;
    let single = findings.single();
    let (saved, unused) = (effect.saved as f64 * single, effect.unused() as f64 * single);
    let saving = saved * (costs.page - costs.populated) - unused * costs.populated;
    Some(Item {
        name: "prefault by the kernel".into(),
        action: format!(
            "no setting provides this: windows of up to 32 pages would save {saved:.0} faults"
        ),
        saving,
        at_best: saving,
        spared: Some(saved),
        unused: effect.unused() * PAGE_SIZE,
        apply: Apply::Nothing,
        remarks: Vec::new(),
    })
}

/// Returns an item for each additional folio size for all memory.
fn sizes(findings: &Findings, costs: &Costs) -> Vec<Item> {
    let item = |(order, with): &(u8, Folios)| {
        let known = findings.sizes.sizes.iter().any(|(size, _)| size == order);
        let file = if known { size_file(*order) } else { Path::new(THP).join("enabled") };
        let mut remarks = vec![remark(costs)];
        if !costs.folio(*order).1 {
            remarks.push("the cost of a folio is computed: --sysfs allows the measurement");
        }
        let is_thp = *order == findings.sizes.thp;
        if is_thp {
            remarks.push("THP can cost small heaps 40 % memory, and compaction stalls");
            if costs.reporting() {
                remarks.push("the host takes back free memory in units of 2 MiB or more: the next use of such a page is expensive");
            }
        }
        // Smaller folios have an entry for each page.
        let longer = if is_thp { forks::longer_with_huge(findings) } else { 0.0 };
        Item {
            name: if is_thp { "THP always".into() } else { size_name(*order) },
            action: format!("echo always > {}", file.display()),
            saving: folio_saving(findings, &findings.now, with, costs) - longer,
            spared: Some(findings.fewer(&findings.now, with)),
            unused: with.outcome.peak_untouched.saturating_sub(findings.now.outcome.peak_untouched)
                * PAGE_SIZE,
            apply: Apply::Sysfs(file, ALWAYS.into()),
            at_best: 0.0,
            remarks,
        }
    };
    findings.with.iter().map(item).collect()
}

/// Returns the name of the item that enables folios of `order`, below THP, for all memory.
fn size_name(order: u8) -> String {
    format!("mTHP {} kB", kib(order))
}

/// Disables huge pages for this program if the program has them.
fn without_thp(findings: &Findings, costs: &Costs) -> Option<Item> {
    let now = &findings.now;
    let has = !findings.sizes.always().is_empty() || now.outcome.left > now.mapped[0];
    // A recording that has huge pages on does not contain the touches that would be faults.
    (has && !findings.huge_recorded).then(|| Item {
        name: "no THP".into(),
        action: "prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) before exec".into(),
        saving: folio_saving(findings, now, &findings.without, costs)
            + forks::longer_than_single(findings),
        spared: Some(findings.fewer(&findings.now, &findings.without)),
        unused: 0,
        apply: Apply::WithoutThp,
        at_best: 0.0,
        remarks: Vec::new(),
    })
}

/// Huge pages for all shared memory.
fn shared_memory(findings: &Findings, costs: &Costs) -> Option<Item> {
    let file = findings.shmem.file.clone()?;
    let [now, all] = &findings.shared;
    let mut remarks = vec![
        "applies to shared anonymous memory, System V segments and memfd; files on tmpfs have the mount option huge=",
    ];
    if !costs.shared_huge().1 {
        remarks.push("the cost of a huge page is computed: --sysfs allows the measurement");
    }
    let single = |census: &Census| (census.faults() - census.shared_folios) as f64;
    let spared = findings.spared(single(now) - single(all)) + now.shared_folios as f64
        - all.shared_folios as f64;
    (spared > 0.0).then(|| Item {
        name: "shared memory on THP".into(),
        action: format!("echo always > {}", file.display()),
        saving: shared_time(now, costs) - shared_time(all, costs),
        spared: Some(spared),
        unused: findings.census.huge_shared.unused(findings.sizes.thp_pages()),
        apply: Apply::Sysfs(file, ALWAYS.into()),
        at_best: 0.0,
        remarks,
    })
}

/// Populates large, mostly used mappings at their creation.
fn populate(findings: &Findings, costs: &Costs) -> Option<Item> {
    let mut groups = findings.census.mappings.clone();
    groups.sort_by_key(|group| std::cmp::Reverse(group.len));
    let (mut touched, mut pages, mut count, mut unused) = (0, 0, 0, 0);
    let mut best: Option<Item> = None;
    for group in groups {
        touched += group.touched;
        pages += group.count * group.len / PAGE_SIZE;
        count += group.count;
        unused += group.unused;
        let vain = pages.saturating_sub(touched) as f64;
        let single = findings.single();
        let spared = touched as f64 * single;
        let saving = spared * (costs.page - costs.populated) - vain * single * costs.populated;
        let mostly = touched as f64 >= MOSTLY * pages as f64 && touched >= FEW;
        if mostly && best.as_ref().is_none_or(|best| saving > best.saving) {
            best = Some(Item {
                name: "populate mappings".into(),
                action: format!(
                    "MAP_POPULATE or MADV_POPULATE_WRITE for {} of {} and more",
                    plural(count, "mapping"),
                    size(group.len)
                ),
                saving,
                spared: Some(findings.spared(spared)),
                unused: unused * PAGE_SIZE,
                // A block of malloc lies in a slightly larger mapping.
                apply: if findings.program.populates() {
                    Apply::Populate(group.len - findings.small_pages * PAGE_SIZE)
                } else {
                    Apply::Nothing
                },
                at_best: 0.0,
                remarks: Vec::new(),
            });
        }
    }
    best
}

/// Returns whether the executed code can fill a huge page. Most code is smaller than huge pages of
/// 32 and 512 MiB.
fn text_fits(findings: &Findings) -> bool {
    let pages = findings.sizes.thp_pages();
    findings.sizes.thp == SMALL_THP || findings.census.text_pages >= pages
}

/// The reason for which code stays in base pages of 16 or 64 KiB.
fn small_text(findings: &Findings) -> Option<Open> {
    let text = findings.census.text_pages;
    (!text_fits(findings) && text >= FEW).then(|| Open {
        name: "text on huge pages".into(),
        action: "no setting helps".into(),
        why: format!(
            "the program executes {} of code, and a huge page has {} with base pages of {} KiB",
            size(text * PAGE_SIZE),
            size(findings.sizes.thp_pages() * PAGE_SIZE),
            // A huge page has as many base pages as a base page has entries of 8 bytes.
            (findings.sizes.thp_pages() * PAGE_SIZE * 8).isqrt() >> 10
        ),
        apply: Apply::Nothing,
    })
}

/// The program's code in huge pages.
fn text(findings: &Findings, costs: &Costs) -> Option<Item> {
    let Census { text, text_pages, .. } = findings.census;
    let left = text_pages.div_ceil(findings.sizes.thp_pages());
    (text_fits(findings) && text > left).then(|| Item {
        name: "text on huge pages".into(),
        action: "`faultless run --apply huge-text`; the move takes time at each start".into(),
        saving: text.saturating_sub(left) as f64 * costs.unzeroed(),
        spared: Some(findings.spared(text.saturating_sub(left) as f64)),
        unused: 0,
        apply: Apply::Nothing,
        at_best: 0.0,
        remarks: vec!["fewer iTLB misses are not counted; Go stopped using MADV_COLLAPSE after stalls; most kernels are built without READ_ONLY_THP_FOR_FS"],
    })
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::costs::tests::{TAKEN, costs, taken};
    use super::super::program::Program;
    use super::super::sysfs::{Mode, Shmem, Sizes};
    use super::super::time::spent;
    use super::*;
    use crate::replay::Source;
    use faultless_trace::Trace;
    use faultless_trace::anticipate::folio::{smallest, thp};
    use faultless_trace::census::{HugeShared, Mappings};
    use faultless_trace::event::{
        Access, Backing, Event, Header, Kind, ProcessInfo, Prot, Recorded, ThreadInfo,
    };
    use faultless_trace::recordings;

    /// Returns the findings of a bundled recording, treated as a program with glibc's malloc.
    pub fn findings(name: &str, sizes: Sizes) -> Findings {
        let recording = recordings::find(name).expect("a bundled recording");
        let source = Source::shipped(recording).expect("a valid recording");
        let program = Program { glibc: true, ..Program::default() };
        Findings::of(&source, program, sizes, Shmem::NONE, &()).expect("a valid recording")
    }

    /// Returns [`findings`] with `first` pages of shared memory in `folios` huge pages, and the
    /// word of `shmem_enabled`.
    pub fn sharing(first: u64, folios: u64, mode: Mode) -> Findings {
        let mut findings = findings("python", sizes(Mode::Madvise));
        findings.shmem =
            Shmem { mode, word: "never".into(), file: Some("/sys/shmem_enabled".into()) };
        let census = &mut findings.census;
        census.shared += first;
        census.huge_shared = HugeShared { first, mapped: 0, folios, maps: 0 };
        let all = census.with_huge_shared(census.huge_shared);
        let now = if mode == Mode::Always { all.clone() } else { census.clone() };
        findings.shared = [now, all];
        findings
    }

    /// Returns a host with two folio sizes.
    pub fn sizes(mode: Mode) -> Sizes {
        Sizes { all: Some(mode), sizes: vec![(4, Mode::Never), (SMALL_THP, mode)], thp: SMALL_THP }
    }

    /// Returns the item of this name.
    pub fn find<'a>(items: &'a [Item], name: &str) -> &'a Item {
        items
            .iter()
            .find(|item| item.name == name)
            .unwrap_or_else(|| panic!("no {name} in {items:?}"))
    }

    #[test]
    fn folios_save_the_cost_of_avoided_faults() {
        let findings = findings("python", sizes(Mode::Madvise));
        let costs = costs();
        let items = predict(&findings, &costs);
        let got = find(&items, "mTHP 64 kB");
        let (_, with) = &findings.with[0];
        let spared = (findings.now.outcome.faults - with.mapped[0]) as f64;
        let want = spared * 2300.0 - with.mapped[4] as f64 * 8000.0;
        assert!((got.saving - want).abs() < 1.0 && want > 0.0, "{} is not {want}", got.saving);
        assert_eq!(got.unused, with.outcome.peak_untouched * PAGE_SIZE);
        assert!(got.saving < spent(&findings, &costs));
        assert_eq!(got.apply, Apply::Sysfs(size_file(4), ALWAYS.into()));
        assert!(items.is_sorted_by(|one, other| one.saving >= other.saving));
        assert!(items.iter().all(|item| item.name != "no THP"));
        assert!(items.iter().all(|item| item.saving == item.at_best && !item.depends()));
    }

    #[test]
    fn memory_taken_back_makes_huge_folios_expensive() {
        let findings = findings("gcc", sizes(Mode::Madvise));
        let costs = taken(&costs());
        let items = predict(&findings, &costs);
        let got = find(&items, "THP always");
        let folios = findings.with[1].1.mapped[usize::from(SMALL_THP)] as f64;
        let more = folios * 512.0 * (TAKEN - 300.0);
        assert!(folios > 0.0 && (got.at_best - got.saving - more).abs() < 1.0, "{got:?}");
        assert!(got.saving < 0.0 && got.at_best > 0.0 && got.depends(), "{got:?}");
        let small = find(&items, "mTHP 64 kB");
        assert!(small.saving == small.at_best && !small.depends(), "{small:?}");
    }

    #[test]
    fn disabling_thp_saves_if_folios_are_expensive() {
        let findings = findings("redis", sizes(Mode::Always));
        let items = predict(&findings, &costs());
        let got = find(&items, "no THP");
        let huge = findings.now.mapped[usize::from(SMALL_THP)] as f64;
        assert!(huge > 0.0);
        let more = (findings.without.mapped[0] - findings.now.mapped[0]) as f64;
        let want = huge * 300.0 * 512.0 - more * 2300.0;
        assert!((got.saving - want).abs() < 1.0, "{} is not {want}", got.saving);
    }

    #[test]
    fn huge_pages_save_the_faults_of_shared_memory() {
        let without = findings("python", sizes(Mode::Madvise));
        let costs = costs();
        assert!(predict(&without, &costs).iter().all(|item| item.name != "shared memory on THP"));
        let findings = sharing(10_000, 20, Mode::Never);
        let items = predict(&findings, &costs);
        let got = find(&items, "shared memory on THP");
        // A shared page costs 3,000 ns, a huge page of shared memory 154,650 ns.
        let want = 10_000.0 * 3000.0 - 20.0 * 154_650.0;
        assert!((got.saving - want).abs() < 1.0, "{} is not {want}", got.saving);
        assert_eq!((got.spared, got.unused), (Some(9980.0), 240 * PAGE_SIZE));
        assert_eq!(got.apply, Apply::Sysfs("/sys/shmem_enabled".into(), ALWAYS.into()));
        let more = spent(&findings, &costs) - spent(&without, &costs);
        assert!((more - 10_000.0 * 3000.0).abs() < 1.0, "{more}");
        assert_eq!(findings.expected_faults(), without.expected_faults() + 10_000);
        // All shared memory has huge pages already.
        let findings = sharing(10_000, 20, Mode::Always);
        assert!(predict(&findings, &costs).iter().all(|item| item.name != "shared memory on THP"));
        let more = spent(&findings, &costs) - spent(&without, &costs);
        assert!((more - 20.0 * 154_650.0).abs() < 1.0, "{more}");
        assert_eq!(findings.expected_faults(), without.expected_faults() + 20);
    }

    #[test]
    fn setting_that_saves_faults_is_confirmed_only_by_fewer_faults() {
        let findings = findings("python", sizes(Mode::Madvise));
        let items = predict(&findings, &costs());
        let item = find(&items, "mTHP 64 kB");
        let spared = item.spared.expect("an item with saved faults");
        assert!(spared > 10_000.0);
        assert!(!item.moved(13.0) && !item.moved(-spared) && item.moved(0.8 * spared));
        assert!(find(&items, "malloc grows by more").moved(0.0), "saves calls, no faults");
    }

    /// The recording lacks the first touches that huge pages hide.
    #[test]
    fn disabling_thp_is_not_predicted_from_a_recording_with_huge_pages() {
        let mut findings = findings("redis", sizes(Mode::Always));
        findings.huge_recorded = true;
        let items = predict(&findings, &costs());
        assert!(items.iter().all(|item| item.name != "no THP"), "{items:?}");
    }

    #[test]
    fn no_thp_advice_for_a_program_without_huge_pages() {
        let mut findings = findings("python", sizes(Mode::Madvise));
        let names = |findings: &Findings| {
            let items = predict(findings, &costs());
            items.into_iter().filter(|item| item.name.contains("THP")).count()
        };
        assert!(names(&findings) > 0);
        findings.switch_huge_off();
        assert_eq!(names(&findings), 0);
    }

    #[test]
    fn only_applicable_items_are_predicted() {
        let mut findings = findings("python", sizes(Mode::Madvise));
        findings.program = Program { go: true, ..Program::default() };
        findings.census.discarded = 1000;
        let items = predict(&findings, &costs());
        assert_eq!(find(&items, "Go frees lazily").saving, 2.3e6);
        let others = ["malloc on THP", "malloc keeps memory", "Java heap on THP"];
        assert!(items.iter().all(|item| !others.contains(&&*item.name)), "{items:?}");
        findings.sizes = sizes(Mode::Never);
        findings.program = Program { glibc: true, java: true, ..Program::default() };
        let items = predict(&findings, &costs());
        assert!(items.iter().all(|item| item.name != "malloc on THP"), "requires mode madvise");
        assert!(items.iter().all(|item| item.name != "Java heap on THP"), "requires mode madvise");
    }

    #[test]
    fn populate_selects_sizes_of_mostly_used_mappings() {
        let mut findings = findings("python", sizes(Mode::Madvise));
        let mappings =
            |mib: u64, count, touched, unused| Mappings { len: mib << 20, count, touched, unused };
        findings.census.mappings =
            vec![mappings(1, 10, 100, 2460), mappings(8, 2, 4000, 96), mappings(4, 1, 1000, 24)];
        let got = populate(&findings, &costs()).expect("two sizes are used");
        // 5000 pages are populated and used, 120 populated and never used.
        assert_eq!(got.saving, 5000.0 * 1000.0 - 120.0 * 1300.0);
        assert_eq!((got.apply, got.unused), (Apply::Populate((4 << 20) - 4096), 120 * PAGE_SIZE));
        findings.census.mappings = vec![mappings(1, 10, 100, 2460)];
        assert!(populate(&findings, &costs()).is_none());
    }

    #[test]
    fn prefault_saves_the_difference_to_a_populated_page() {
        let findings = findings("gcc", sizes(Mode::Madvise));
        let got = prefault(&findings, &costs()).expect("a replayed recording");
        let effect = findings.prefault.expect("a replayed recording");
        let want = effect.saved as f64 * 1000.0 - effect.unused() as f64 * 1300.0;
        assert_eq!(got.saving, want);
        assert!(want > 0.0 && got.apply == Apply::Nothing);
    }

    /// Returns a recording of a host with pages of `size` bytes: stores to the first `touched` of
    /// 200 pages or more.
    fn recording(size: u64, touched: u64) -> Source {
        let start = 1 << 32;
        let (prot, len) = (Prot::READ | Prot::WRITE, touched.max(200) * size);
        let map = Kind::Map { start, len, prot, flags: 0x22, backing: Backing::Anon };
        let fault = |page: u64| Kind::first(start + page * size, Access::Write);
        let kinds = [map].into_iter().chain((0..touched).map(fault));
        let recorded = Recorded::all() - Recorded::INSTRUCTIONS;
        let trace = Trace {
            header: Header { page_size: size as u32, recorded, ..Header::default() },
            processes: vec![ProcessInfo { parent: None, pid: None }],
            threads: vec![ThreadInfo { process: 0, name: String::new() }],
            events: kinds.map(|kind| Event { time_us: 0, thread: 0, kind }).collect(),
            ..Trace::default()
        };
        Source::new("large".to_owned(), trace).expect("a valid recording")
    }

    #[test]
    fn faults_of_large_pages_are_counted_as_recorded() {
        let program = Program { glibc: true, ..Program::default() };
        for (size, small) in [(4 << 10, 1), (16 << 10, 4), (64 << 10, 16)] {
            let source = recording(size, 198);
            let none = Sizes::none(thp(small));
            let findings = Findings::of(&source, program.clone(), none, Shmem::NONE, &())
                .expect("a valid recording");
            assert_eq!((findings.expected_faults(), findings.census.zeroed), (198, 198 * small));
            assert_eq!(findings.now.outcome.peak_resident * PAGE_SIZE, 198 * size);
            let items = predict(&findings, &costs());
            if small > 1 {
                let got = find(&items, "populate mappings");
                assert_eq!((got.spared, got.unused), (Some(198.0), 2 * size));
                assert_eq!(got.apply, Apply::Populate(199 * size));
                assert!(findings.prefault.is_none());
                let error = source.replayable().expect_err("large pages").to_string();
                let expected = format!("pages of {} KiB", size >> 10);
                assert!(error.contains(&expected) && error.contains("advise"), "{error}");
            } else {
                source.replayable().expect("pages of the subsystem");
            }
        }
        // A huge page is one fault for any size of a page.
        let findings = |sizes| {
            Findings::of(&recording(64 << 10, 200), program.clone(), sizes, Shmem::NONE, &())
                .expect("valid")
        };
        let (all, sizes) = (Some(Mode::Never), vec![(SMALL_THP, Mode::Always)]);
        let huge = findings(Sizes { all, sizes, thp: thp(16) });
        // 12.5 MiB: six folios of 2 MiB, a size of mTHP here, and eight pages of 64 KiB.
        assert_eq!(huge.expected_faults(), 14);
        assert_eq!(huge.fewer(&huge.without, &huge.now), 186.0);
    }

    #[test]
    fn thp_has_the_size_of_the_recorded_host() {
        let program = Program { glibc: true, ..Program::default() };
        for (size, small, pages) in
            [(4 << 10, 1, 512), (16 << 10, 4, 2048), (64 << 10, 16, 8192_u64)]
        {
            // A huge page, and 8 base pages.
            let source = recording(size, pages + 8);
            let sizes = Sizes {
                all: Some(Mode::Madvise),
                sizes: vec![(smallest(small), Mode::Never), (thp(small), Mode::Madvise)],
                thp: thp(small),
            };
            let findings =
                Findings::of(&source, program.clone(), sizes, Shmem::NONE, &()).expect("valid");
            let costs = Costs { thp: thp(small), ..costs() };
            let items = predict(&findings, &costs);
            let got = find(&items, "THP always");
            assert_eq!(got.spared, Some((pages - 1) as f64), "base pages of {size} bytes");
            let huge = size_file(thp(small));
            assert_eq!(got.apply, Apply::Sysfs(huge, ALWAYS.into()));
            // Four base pages are the smallest folio.
            let name = format!("mTHP {} kB", (4 * size) >> 10);
            let saved = (pages + 8) / 4 * 3;
            assert_eq!(find(&items, &name).spared, Some(saved as f64));
            assert_eq!(findings.blocks.collapsed(0).blocks, 1);
        }
    }

    #[test]
    fn text_below_the_size_of_huge_pages_stays_in_base_pages() {
        let mut findings = findings("python", sizes(Mode::Madvise));
        assert!(text(&findings, &costs()).is_some() && small_text(&findings).is_none());
        findings.sizes.thp = thp(16);
        assert!(findings.census.text_pages < findings.sizes.thp_pages());
        assert!(text(&findings, &costs()).is_none());
        findings.census.text_pages = 2560;
        let why = small_text(&findings).expect("10 MiB of text").why;
        let expected = "10 MiB of code, and a huge page has 512 MiB with base pages of 64 KiB";
        assert!(why.ends_with(expected), "{why}");
        findings.census.text_pages = findings.sizes.thp_pages();
        assert!(text(&findings, &costs()).is_some() && small_text(&findings).is_none());
    }
}
