//! The time of faults: counts of a recording, multiplied by costs of this host.

use super::costs::Costs;
use super::findings::Findings;
use faultless_trace::anticipate::folio::Folios;
use faultless_trace::census::Census;

/// Returns the nanoseconds of the faults of a run with the current settings of the host.
pub fn spent(findings: &Findings, costs: &Costs) -> f64 {
    let Census { zero_page, copies, .. } = findings.census;
    let single = zero_page.min(findings.now.mapped[0]) as f64;
    let anonymous = folio_time(&findings.now, costs) - single * (costs.page - costs.unzeroed());
    anonymous + shared_time(&findings.shared[0], costs) + copies as f64 * costs.copied()
}

/// Returns the nanoseconds of all faults on files and shared memory.
pub fn shared_time(census: &Census, costs: &Costs) -> f64 {
    census.file as f64 * costs.unzeroed()
        + census.shared as f64 * costs.shared()
        + census.shared_folios as f64 * costs.shared_huge().0
}

/// Returns the nanoseconds of all faults on anonymous memory, each on a page or a folio.
pub fn folio_time(folios: &Folios, costs: &Costs) -> f64 {
    let time = |(order, count): (u8, &u64)| match order {
        0 => *count as f64 * costs.page,
        order => *count as f64 * costs.folio(order).0,
    };
    (0..).zip(&folios.mapped).map(time).sum()
}

/// Returns the nanoseconds saved by the folios `with` instead of `now`: fewer faults, and shorter
/// page walks where these were measured.
pub fn folio_saving(findings: &Findings, now: &Folios, with: &Folios, costs: &Costs) -> f64 {
    folio_time(now, costs) - folio_time(with, costs) + walk_saving(findings, now, with, costs)
}

/// Returns the nanoseconds of page walks saved by the folios `with` instead of `now`. All pages are
/// assumed to have the same number of walks.
fn walk_saving(findings: &Findings, now: &Folios, with: &Folios, costs: &Costs) -> f64 {
    let in_folios = |folios: &Folios| {
        let pages = (0..).zip(&folios.mapped).map(|(order, count)| *count << order).sum::<u64>();
        (pages - folios.mapped[0]) as f64 / pages.max(1) as f64
    };
    most_walks(findings, costs) * (in_folios(with) - in_folios(now))
}

/// Returns the nanoseconds of page walks that are saved if all pages are in folios.
pub fn most_walks(findings: &Findings, costs: &Costs) -> f64 {
    findings.walks.unwrap_or(0.0) * costs.walk.unwrap_or(0.0)
}

/// Returns the remark of an item with larger folios.
pub fn remark(costs: &Costs) -> &'static str {
    if costs.walk.is_some() {
        "fewer TLB misses are included: their number is an estimate from accessed bits, and may be half or twice as large"
    } else {
        "fewer TLB misses are not counted: random accesses may save more"
    }
}

/// Returns the average nanoseconds of the first touch of a page, over single pages and folios.
pub fn touch_time(findings: &Findings, costs: &Costs) -> f64 {
    let touches = findings.now.outcome.faults;
    if touches == findings.now.mapped[0] {
        return costs.page;
    }
    folio_time(&findings.now, costs) / touches as f64
}

#[cfg(test)]
mod tests {
    use super::super::costs::tests::costs;
    use super::super::items::tests::{find, findings, sizes};
    use super::super::items::{self};
    use super::super::sysfs::Mode;
    use super::*;

    #[test]
    fn folios_save_the_walks_of_their_pages() {
        let mut findings = findings("python", sizes(Mode::Never));
        let with = |mapped: &[(usize, u64)]| {
            let mut folios = Folios::default();
            mapped.iter().for_each(|(order, count)| folios.mapped[*order] = *count);
            folios
        };
        let costs = Costs { walk: Some(10.0), ..costs() };
        let (none, half) = (with(&[(0, 64)]), with(&[(0, 32), (4, 2)]));
        let walks = |findings: &Findings, now: &Folios, with: &Folios| {
            folio_saving(findings, now, with, &costs) - folio_time(now, &costs)
                + folio_time(with, &costs)
        };
        assert_eq!(walks(&findings, &none, &half), 0.0, "no estimate");
        findings.walks = Some(1e6);
        let saved = walks(&findings, &none, &half);
        assert!((saved - 5e6).abs() < 1.0, "{saved}");
        // Fewer folios cost walks, and no pages have none.
        assert!((walks(&findings, &half, &none) + 5e6).abs() < 1.0);
        assert_eq!(walks(&findings, &none, &with(&[])), 0.0);
        assert_eq!(most_walks(&findings, &costs), 1e7);
    }

    #[test]
    fn predictions_contain_walks_and_say_so() {
        let mut findings = findings("python", sizes(Mode::Never));
        let row = |findings: &Findings, costs: &Costs| {
            let items = items::predict(findings, costs);
            let item = find(&items, "mTHP 64 kB");
            (item.saving, item.remarks[0])
        };
        let costs = costs();
        let (without, remark) = row(&findings, &costs);
        assert!(remark.contains("are not counted"), "{remark}");
        findings.walks = Some(1e6);
        let (with, remark) = row(&findings, &Costs { walk: Some(20.0), ..costs });
        assert!(remark.contains("are included"), "{remark}");
        assert!(with > without + 1e7 && with < without + 2e7, "{with} and {without}");
    }
}
