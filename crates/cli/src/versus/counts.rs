//! Page faults and shootdowns of several CPUs, phase by phase, on both kernels.

use super::figures::{Figure, show, verdict};
use crate::report::{Style, table};

/// A phase of `counts`.
#[derive(Clone, Debug, PartialEq)]
pub struct Phase {
    name: String,
    /// Whether another CPU than the one that changes a mapping can hold a translation of the
    /// mapping.
    may_shoot: bool,
    /// The counts on the bare machine and on Linux.
    operations: Sides,
    faults: Sides,
    shootdowns: Sides,
}

type Sides = [Option<f64>; 2];

impl Phase {
    /// Returns whether the phase meets its target: no more faults than on Linux, and no shootdown
    /// if none is necessary, otherwise no more than on Linux. `None` if a count is missing.
    fn met(&self) -> Option<bool> {
        let within = |[ours, linux]: Sides| Some(ours? <= linux?);
        let shootdowns = if self.may_shoot {
            within(self.shootdowns)
        } else {
            self.shootdowns[0].map(|ours| ours == 0.0)
        };
        Some(shootdowns? & within(self.faults)?)
    }
}

/// Returns the phases reached by at least one of the kernels.
pub fn phases(ours: &[Figure], linux: &[Figure]) -> Vec<Phase> {
    let sides = [ours, linux];
    let mut names: Vec<&str> = Vec::new();
    for figure in linux.iter().chain(ours) {
        if !names.contains(&&*figure.name) {
            names.push(&figure.name);
        }
    }
    let phase = |name: &str| {
        let of = |what: &str| {
            sides.map(|figures| {
                let same = |figure: &&Figure| figure.name == name && figure.unit == what;
                figures.iter().find(same).map(|figure| figure.value)
            })
        };
        Phase {
            name: name.replace('_', " "),
            may_shoot: of("may_shoot").contains(&Some(1.0)),
            operations: of("operations"),
            faults: of("pgfault"),
            shootdowns: of("shootdowns"),
        }
    };
    names.into_iter().map(phase).collect()
}

/// Returns the phases side by side, and the number that miss their target.
pub fn render(phases: &[Phase], linux: &str, style: Style) -> (String, usize) {
    let head = [
        "phase",
        "operations",
        "faults: faultless",
        linux,
        "shootdowns: faultless",
        linux,
        "at most",
        "met",
    ];
    let mut table = table::numbers(&head.map(str::to_owned), style);
    for phase in phases {
        let [operations, faults, shootdowns] =
            [phase.operations, phase.faults, phase.shootdowns].map(|sides| sides.map(show));
        let [done, done_there] = operations;
        let [faults, faults_there] = faults;
        let [shootdowns, shootdowns_there] = shootdowns;
        let done = if phase.operations[0].is_some() { done } else { done_there };
        let bar = if phase.may_shoot { "Linux's" } else { "none" };
        let cells = [
            &phase.name,
            &done,
            &faults,
            &faults_there,
            &shootdowns,
            &shootdowns_there,
            bar,
            verdict(phase.met()),
        ];
        table::row(&mut table, cells.map(|cell: &str| cell.to_owned()));
    }
    (table.to_string(), phases.iter().filter(|phase| phase.met() != Some(true)).count())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::versus::figures::figures;

    #[test]
    fn phases_are_checked_against_their_targets() {
        let counts = |faults: u32, shot: u32, may: u32| {
            figures(&format!(
                "count a operations 5\ncount a pgfault {faults}\ncount a shootdowns {shot}\n\
                 count a may_shoot {may}\nok a"
            ))
        };
        let met = |ours: &[Figure], linux: &[Figure]| {
            let phases = phases(ours, linux);
            assert_eq!(phases.len(), 1);
            phases[0].met()
        };
        assert_eq!(met(&counts(9, 3, 1), &counts(9, 3, 1)), Some(true));
        assert_eq!(met(&counts(9, 4, 1), &counts(9, 3, 1)), Some(false), "more shootdowns");
        assert_eq!(met(&counts(10, 0, 1), &counts(9, 3, 1)), Some(false), "more faults");
        assert_eq!(met(&counts(9, 0, 0), &counts(9, 3, 0)), Some(true));
        assert_eq!(met(&counts(9, 1, 0), &counts(9, 3, 0)), Some(false), "a needless shootdown");
        assert_eq!(met(&[], &counts(9, 3, 0)), None, "nothing to compare");
        assert_eq!(met(&counts(9, 0, 0), &[]), None, "nothing to compare with");
    }
}
