//! The conditions of a measurement.

use crate::settings::Settings;
use faultless_workload::{Kind, Workload};
use serde_json::{Map, Value};

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
        }
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
