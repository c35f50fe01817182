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

/// Returns the average nanoseconds of the first touch of a page, over single pages and folios.
pub fn touch_time(findings: &Findings, costs: &Costs) -> f64 {
    let touches = findings.now.outcome.faults;
    if touches == findings.now.mapped[0] {
        return costs.page;
    }
    folio_time(&findings.now, costs) / touches as f64
}
