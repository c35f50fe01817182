//! The agreement of a replay's faults with the recorded faults.

use crate::context::Context;
use crate::error::Error;
use crate::figures::{Figures, Number};
use crate::number::grouped;
use faultless_trace::Trace;

/// The largest accepted difference, in percent of the recorded faults.
const ALLOWANCE: f64 = 2.0;

/// The faults of a recording, and of its replay with prefault off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fidelity {
    /// Served faults in user and in kernel mode.
    pub recorded: u64,
    /// Faults that were not served. A replay does not repeat them.
    pub unserved: u64,
    /// Faults of the replay.
    pub replayed: u64,
    /// Events lost during the recording, some of which may be faults.
    pub lost: u64,
}

impl Fidelity {
    /// Compares `trace` with a replay with prefault off, which took `replayed` faults.
    pub fn new(trace: &Trace, replayed: u64) -> Self {
        let summary = trace.summary();
        let (all, unserved) =
            (summary.user_faults + summary.kernel_faults, summary.unserved_faults as u64);
        Self { recorded: all as u64 - unserved, unserved, replayed, lost: trace.header.lost }
    }

    /// Returns the excess of the replay's faults, in percent of the recorded faults; negative for
    /// fewer faults.
    pub fn difference(self) -> f64 {
        let more = self.replayed as f64 - self.recorded as f64;
        100.0 * more / self.recorded.max(1) as f64
    }

    /// Returns a remark on the number of recorded faults.
    pub fn remark(self) -> String {
        let way = if self.replayed < self.recorded { "fewer" } else { "more" };
        let (replayed, part) = (grouped(self.replayed), self.difference().abs());
        let unserved = match self.unserved {
            0 => String::new(),
            count => format!("; {} more that failed on Linux", grouped(count)),
        };
        let lost = match self.lost {
            0 => String::new(),
            count => format!("; {} events were lost while recording", grouped(count)),
        };
        format!("{replayed} in the replay with prefault off, {part:.2} % {way}{unserved}{lost}")
    }

    /// Returns a warning about the replay of `name` if the difference exceeds the allowance.
    pub fn warning(self, name: &str) -> Option<String> {
        (self.difference().abs() > ALLOWANCE).then(|| {
            format!(
                "warning: the replay of {name} differs from the recorded faults: {} recorded, \
                 {}; at most {ALLOWANCE} % are expected. `faultless replay` lists the \
                 assumptions of the replay.",
                grouped(self.recorded),
                self.remark()
            )
        })
    }

    /// Passes the counts to `figures`.
    ///
    /// # Errors
    /// A figure cannot be written.
    pub fn figures(self, figures: &mut dyn Figures, context: &Context) -> Result<(), Error> {
        for (metric, unit, count) in [
            ("recorded_faults", "faults", self.recorded),
            ("recorded_faults_unserved", "faults", self.unserved),
            ("replayed_faults", "faults", self.replayed),
            ("lost_events", "events", self.lost),
        ] {
            figures.figure(context, metric, unit, Number::Whole(count))?;
        }
        figures.figure(context, "fault_difference", "%", Number::Real(self.difference()))?;
        figures.figure(context, "fault_difference_allowed", "%", Number::Real(ALLOWANCE))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figures::Kept;

    #[test]
    fn difference_beyond_the_allowance_causes_a_warning() {
        let of = |replayed| Fidelity { recorded: 1000, unserved: 0, replayed, lost: 0 };
        for (replayed, warned) in
            [(1000, false), (980, false), (979, true), (1020, false), (1021, true)]
        {
            assert_eq!(of(replayed).warning("x").is_some(), warned, "{replayed}");
        }
        assert!(of(966).warning("pg").is_some_and(|text| text.contains("3.40 % fewer")));
        assert!(!of(1000).remark().contains("lost"));
        assert!(Fidelity { lost: 7, ..of(1000) }.remark().contains("; 7 events were lost"));
        assert_eq!(Fidelity { recorded: 0, ..of(0) }.difference(), 0.0);
    }

    #[test]
    fn unit_of_lost_events_is_events() {
        let mut kept = Kept::default();
        let fidelity = Fidelity { recorded: 9, unserved: 0, replayed: 9, lost: 7 };
        fidelity.figures(&mut kept, &Context::new("native", "w", 1)).expect("no output fails");
        let unit = |metric: &str| kept.0.iter().find(|(name, ..)| name == metric).map(|it| &*it.1);
        assert_eq!(unit("lost_events"), Some("events"));
        assert_eq!(unit("recorded_faults"), Some("faults"));
    }
}
