//! The measuring machine, and its disturbance of measurements.

use crate::calibrate::faults::{Faults, host_faults};
use crate::calibrate::hardware::Effort;
use crate::columns::Report;
use crate::context::Context;
use crate::error::Error;
use crate::figures::{Figures, Number};
use crate::processor;
use crate::rates::median;
use faultless_virtual::Profile;
use faultless_virtual::profile::BUNDLED;
use faultless_workload::{Linux, System};
use serde_json::Map;
use std::fs;

/// The multiple of the slowest exception of the bundled profiles from which an exception must
/// contain other work.
const SHADOWED: f64 = 3.0;

/// The host.
#[derive(Debug)]
pub struct Host {
    /// The model of the processor.
    pub cpu: String,
    /// The CPUs of this process.
    pub cpus: usize,
    /// Whether the host is a virtual machine.
    pub is_virtual: bool,
    /// The kernel: `linux-VERSION`.
    pub kernel: String,
    /// The runnable threads, averaged over the last minute.
    pub load: Option<f64>,
    /// The cost of page faults.
    pub faults: Faults,
}

impl Host {
    /// Examines the host, and measures its page faults.
    ///
    /// # Errors
    /// The host has no memory available.
    pub fn look(effort: Effort) -> Result<Self, Error> {
        Ok(Self {
            cpu: processor::model(),
            cpus: std::thread::available_parallelism().map_or(1, usize::from),
            is_virtual: processor::is_virtual(),
            kernel: Linux::new().machine(),
            load: load_average(),
            faults: host_faults(effort)?,
        })
    }

    /// Returns whether an exception is so slow that the hypervisor must be involved.
    pub fn is_shadowed(&self) -> bool {
        self.is_virtual && self.faults.exception() > SHADOWED * exceptions().fold(0.0, f64::max)
    }

    /// Passes the host and the noise to `figures`.
    ///
    /// # Errors
    /// A figure cannot be written.
    pub fn figures(&self, noise: Option<Noise>, figures: &mut dyn Figures) -> Result<(), Error> {
        let context = Context {
            params: Map::from_iter([
                ("cpu".to_owned(), self.cpu.as_str().into()),
                ("virtual".to_owned(), self.is_virtual.into()),
            ]),
            ..Context::new(&self.kernel, "host", self.cpus)
        };
        for (metric, value) in self.faults.figures() {
            figures.figure(&context, metric, "ns", Number::Real(value))?;
        }
        if let Some(load) = self.load {
            figures.figure(&context, "host.load_average", "count", Number::Real(load))?;
        }
        for (metric, part) in noise.iter().flat_map(Noise::parts) {
            figures.figure(&context, metric, "%", Number::Real(100.0 * part))?;
        }
        Ok(())
    }
}

/// Returns the nanoseconds of an exception on the hardware of each bundled profile.
pub fn exceptions() -> impl Iterator<Item = f64> {
    let profiles = BUNDLED.iter().filter_map(|(name, _)| Profile::bundled(name).ok());
    profiles.map(|profile| profile.exception.fault_ns.value)
}

/// Returns the runnable threads of the host, averaged over the last minute.
fn load_average() -> Option<f64> {
    fs::read_to_string("/proc/loadavg").ok()?.split_whitespace().next()?.parse().ok()
}

/// The variation of repetitions of the same run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Noise {
    /// Half the interquartile range of a configuration's repetitions, relative to their median; the
    /// median over configurations.
    pub single: f64,
    /// The difference between the medians of the even and the odd repetitions; the median over
    /// configurations.
    pub typical: f64,
    /// The largest of these differences.
    pub largest: f64,
}

impl Noise {
    /// Computes the noise of all configurations of `reports`.
    pub fn of<'r>(reports: impl Iterator<Item = &'r Report>) -> Option<Self> {
        let columns: Vec<_> = reports.flat_map(Report::repeated).collect();
        let singles: Vec<_> = columns.iter().map(|rates| rates.spread()).collect();
        let halves: Vec<_> = columns.iter().filter_map(|rates| rates.halves()).collect();
        Some(Self {
            single: median(&singles)?,
            typical: median(&halves)?,
            largest: halves.into_iter().reduce(f64::max)?,
        })
    }

    /// Returns the parts of the noise with their names in results.
    fn parts(&self) -> [(&'static str, f64); 3] {
        [
            ("noise.repetitions", self.single),
            ("noise.halves_median", self.typical),
            ("noise.halves_largest", self.largest),
        ]
    }
}
