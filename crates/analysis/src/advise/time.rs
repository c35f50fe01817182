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
