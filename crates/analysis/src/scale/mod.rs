//! Workloads and recordings on increasing numbers of simulated CPUs.
//!
//! Each run has a new virtual machine (`faultless-virtual`), so runs are independent, and the
//! figures of a run do not depend on its position in the list. A request to stop aborts the current
//! run, and ends the list. [`published`] has tables of published figures. With a warm-up the
//! figures are those of the [steady state](steady).

pub mod published;
pub mod sizes;
pub mod steady;
pub mod subject;

pub use steady::{SteadyState, WarmUp};
pub use subject::{PROFILE, Ran, Subject};

use crate::context::Context;
use crate::error::Error;
use crate::figures::{Figures, Number};
use crate::number::plural;
use crate::observer::Observer;
use crate::settings::Settings;
use crate::stop;
use faultless::Locking;
use faultless_virtual::Profile;
use std::sync::Arc;

/// The run of one policy on one number of CPUs.
#[derive(Debug)]
pub struct Point {
    /// The locking policy.
    pub policy: Locking,
    /// The number of CPUs.
    pub cpus: usize,
    /// The results.
    pub ran: Ran,
    /// The rate relative to a linear increase from the rate of the same policy on the fewest CPUs;
    /// 1 is linear.
    pub linear: f64,
    /// The conditions of the run.
    pub context: Context,
}

/// All runs.
#[derive(Debug)]
pub struct Scaled {
    /// The name of the subject.
    pub name: String,
    /// The unit of the operations, in the plural.
    pub unit: &'static str,
    /// The name of the profile.
    pub machine: String,
    /// The description of the profile.
    pub profile: String,
    /// The workload's parameters with the most CPUs.
    pub parameters: String,
    /// The number of the schedule.
    pub seed: u64,
    /// Calls and faults of each CPU that the figures exclude.
    pub warm_up: Option<u64>,
    /// The runs, policy by policy.
    pub points: Vec<Point>,
}

impl Scaled {
    /// Returns whether each run had faults. Transfers are then counted per fault.
    pub fn by_faults(&self) -> bool {
        self.points.iter().all(|point| point.ran.sample.faults > 0)
    }

    /// Returns whether there are several numbers of CPUs, which allow a comparison with linear
    /// scaling.
    pub fn scales(&self) -> bool {
        self.policies().any(|points| points.len() > 1)
    }

    /// Returns the points of each policy.
    pub fn policies(&self) -> impl Iterator<Item = &[Point]> {
        self.points.chunk_by(|one, next| one.policy == next.policy)
    }
}

/// The runs of a scale.
#[derive(Clone, Copy, Debug)]
pub struct Plan<'a> {
    /// The hardware costs.
    pub profile: &'a Profile,
    /// The numbers of CPUs, in order.
    pub counts: &'a [usize],
    /// The locking policies.
    pub policies: &'a [Locking],
    /// The number of the schedule; 0 delays no CPU.
    pub seed: u64,
    /// Calls and faults of each CPU that the figures exclude; `None` for the figures of the whole
    /// run.
    pub warm_up: Option<u64>,
    /// The knobs, except the policy.
    pub settings: &'a Settings,
}

/// Runs `subject` on each number of CPUs under each policy. Failed runs are added to `failures`.
///
/// # Errors
/// The parameters of the workload are invalid, or a figure cannot be written.
pub fn run(
    subject: &Arc<Subject>,
    plan: Plan<'_>,
    figures: &mut dyn Figures,
    observer: &dyn Observer,
    failures: &mut Vec<String>,
) -> Result<Scaled, Error> {
    let Plan { profile, counts, policies, seed, warm_up, settings } = plan;
    let mut scaled = Scaled {
        name: subject.name(),
        unit: subject.unit(),
        machine: profile.name.clone(),
        profile: profile.to_string(),
        parameters: subject.parameters(counts.last().copied().unwrap_or(1))?,
        seed,
        warm_up,
        points: Vec::new(),
    };
    for &policy in policies {
        let settings = settings.with_locking(policy);
        let warm_up = warm_up.map(|calls| WarmUp { calls, optional: false });
        let mut first = None;
        for &cpus in counts {
            if stop::requested() {
                return Ok(scaled);
            }
            let what = plural(cpus as u64, "CPU");
            observer.begin(&format!("{}, {}, {what}", scaled.name, policy.name()));
            match subject.run_after(warm_up, profile, cpus, seed, &settings) {
                Ok(None) => return Ok(scaled),
                Ok(Some((ran, context))) => {
                    let each = ran.sample.operation_rate() / cpus as f64;
                    let linear = each / *first.get_or_insert(each);
                    let point = Point { policy, cpus, ran, linear, context };
                    point.ran.figures(figures, &point.context)?;
                    let of_linear = Number::Real(100.0 * linear);
                    figures.figure(&point.context, "of_linear", "%", of_linear)?;
                    scaled.points.push(point);
                }
                Err(error) => failures.push(error.to_string()),
            }
            observer.advance(1);
        }
    }
    Ok(scaled)
}
