//! The conditions of a measurement.

use crate::settings::Settings;
use faultless_workload::{Kind, Workload};
use serde::Serialize;
use serde_json::{Map, Value};

/// The origin of a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Basis {
    /// Timed or counted, in a run or in a recording.
    Measured,
    /// Computed from measured figures.
    Predicted,
    /// Timed or counted on a simulated machine.
    Simulated,
    /// Published by other authors.
    Published,
}

impl Basis {
    /// Returns the name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Measured => "measured",
            Self::Predicted => "predicted",
            Self::Simulated => "simulated",
            Self::Published => "published",
        }
    }
}

/// The conditions of a measurement.
#[derive(Clone, Debug)]
pub struct Context {
    /// The name of the machine: `native`, `linux-VERSION`, `simulated-PROFILE`, `bare`,
    /// `tlb-simulated`.
    pub machine: String,
    /// A workload, or `replay:` and the name of a recording.
    pub workload: String,
    /// The CPUs used.
    pub cpus: usize,
    /// The knobs that distinguish this run from others, or `default`.
    pub setting: String,
    /// The inputs of the run: the parameters of a workload, the description of a recording, the
    /// machine of a boot.
    pub params: Map<String, Value>,
    /// All knobs, set or not; empty on Linux.
    pub knobs: Map<String, Value>,
    /// The origin of the figures, if the machine does not determine the origin.
    pub basis: Option<Basis>,
}

impl Context {
    /// Creates the context of a measurement with no inputs and no knobs.
    pub fn new(machine: impl Into<String>, workload: impl Into<String>, cpus: usize) -> Self {
        Self {
            machine: machine.into(),
            workload: workload.into(),
            cpus,
            setting: "default".into(),
            params: Map::new(),
            knobs: Map::new(),
            basis: None,
        }
    }

    /// Returns the context of figures with the origin `basis` under the same conditions.
    #[must_use]
    pub fn with_basis(&self, basis: Basis) -> Self {
        Self { basis: Some(basis), ..self.clone() }
    }

    /// Returns the origin of the figures. Figures of a simulated machine are simulated, and figures
    /// of each other machine are measured, unless `basis` differs.
    pub fn basis(&self) -> Basis {
        let simulated = self.machine.starts_with("simulated-") || self.machine == "tlb-simulated";
        self.basis.unwrap_or(if simulated { Basis::Simulated } else { Basis::Measured })
    }

    /// Creates the context of a run of `workload` under `settings`, or on Linux, which has no
    /// settings.
    pub fn of(workload: &Workload, machine: String, settings: Option<&Settings>) -> Self {
        Self {
            machine,
            workload: workload.info().name.into(),
            cpus: workload.crew().workers,
            setting: settings.map_or("default".into(), Settings::label),
            params: params(workload),
            knobs: settings.map(Settings::knobs).unwrap_or_default(),
            basis: None,
        }
    }
}

/// Returns the parameters of `workload` in force: sizes in bytes, times in seconds.
fn params(workload: &Workload) -> Map<String, Value> {
    let value = |kind: Kind, value: u64| match kind {
        Kind::Count(..) | Kind::Size => value.into(),
        Kind::Seconds => (value as f64 / 1e6).into(),
        Kind::Choice(_) => kind.show(value).into(),
    };
    let params = workload.params();
    params.map(|(param, is)| (param.name.to_owned(), value(param.kind, is))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn basis_follows_from_the_machine_unless_a_figure_has_its_own() {
        for (machine, want) in [
            ("native", Basis::Measured),
            ("linux-6.12", Basis::Measured),
            ("simulated-two-socket", Basis::Simulated),
            ("tlb-simulated", Basis::Simulated),
        ] {
            let context = Context::new(machine, "pft", 1);
            assert_eq!(context.basis(), want, "{machine}");
            let predicted = context.with_basis(Basis::Predicted);
            assert_eq!((predicted.basis(), &*predicted.machine), (Basis::Predicted, machine));
        }
    }
}
