//! The arithmetic of the fit: the cost of a path is chosen so that a simulated run takes as long as
//! the native run.
//!
//! On one CPU a simulated run is nearly linear in each cost, because it never waits for a line of
//! another CPU. Two runs therefore define a straight line, from which the cost follows. A fitted
//! cost depends slightly on the other costs, so all costs are fitted several times.

use super::probe::Probe;
use crate::error::Error;
use crate::stop;
use faultless_virtual::Profile;

/// The largest accepted relative difference of a simulated run from the native run, and the number
/// of attempts.
const NEAR: f64 = 0.005;
const STEPS_TO_FIND: usize = 4;
/// The number of times that all costs are fitted.
const SWEEPS: usize = 3;

/// The kind of a cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Nanoseconds.
    Time,
    /// Instructions per cycle. Time is linear in the inverse.
    PerCycle,
}

impl Kind {
    /// Returns two values to simulate, below and above the current value, in the quantity in which
    /// time is linear.
    fn ends(self, now: f64) -> [f64; 2] {
        match self {
            Self::Time if now < 1.0 => [0.0, 10.0],
            Self::Time => [0.5 * now, 1.5 * now],
            Self::PerCycle => [0.5 / now, 1.5 / now],
        }
    }

    /// Returns the bounds of the cost. A time is not negative, and shorter than the longest path.
    /// The instructions per cycle have the corresponding limits.
    const fn bounds(self) -> (f64, f64) {
        match self {
            Self::Time => (0.0, 20_000.0),
            Self::PerCycle => (0.1, 100.0),
        }
    }

    fn value(self, linear: f64) -> f64 {
        match self {
            Self::Time => linear,
            Self::PerCycle => 1.0 / linear,
        }
    }
}

/// A number of the profile to fit, and the probe for its fit.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    /// The name of the number.
    pub key: &'static str,
    /// The kind of the number.
    pub kind: Kind,
    /// The probe that determines the number.
    pub probe: Probe,
}

const fn step(key: &'static str, kind: Kind, probe: Probe) -> Step {
    Step { key, kind, probe }
}

/// All fitted numbers, each after the numbers on which it depends most.
pub const STEPS: [Step; 12] = [
    step("measured.access_ns", Kind::Time, Probe::Access),
    step("tlb.walk_ns", Kind::Time, Probe::Walk),
    step("exception.call_ns", Kind::Time, Probe::Call),
    step("measured.fault_ipc", Kind::PerCycle, Probe::Fault),
    step("measured.shared_ns", Kind::Time, Probe::SharedFault),
    step("memory.zero_page_ns", Kind::Time, Probe::ColdFault),
    step("measured.map_ipc", Kind::PerCycle, Probe::Map),
    step("measured.allocate_ns", Kind::Time, Probe::FirstMap),
    step("measured.brk_ipc", Kind::PerCycle, Probe::Break),
    step("measured.protect_ipc", Kind::PerCycle, Probe::Protect),
    step("measured.fork_ipc", Kind::PerCycle, Probe::Fork),
    step("interrupt.deliver_ns", Kind::Time, Probe::Flush),
];

/// The result of a step.
#[derive(Clone, Copy, Debug)]
pub struct Fitted {
    /// The step.
    pub step: Step,
    /// Nanoseconds of the probe on the native machine, and with the fitted profile.
    pub native: f64,
    /// See `native`.
    pub simulated: f64,
}

/// The largest accepted relative difference of a simulated time from the native time.
const FAR: f64 = 0.1;

impl Fitted {
    /// Returns whether the fitted profile reproduces the measurement. It does not if no number
    /// within the bounds fits, for example if other programs ran during the measurement.
    pub fn fits(&self) -> bool {
        (self.simulated - self.native).abs() <= FAR * self.native
    }
}

/// Returns the position at which the line through two points reaches `target`, within bounds.
/// Returns the lower bound if the line does not rise.
fn solve([(x0, t0), (x1, t1)]: [(f64, f64); 2], target: f64, (least, most): (f64, f64)) -> f64 {
    let slope = (t1 - t0) / (x1 - x0);
    if slope > 0.0 { (x0 + (target - t0) / slope).clamp(least, most) } else { least }
}

/// Fits all steps to `native`, the nanoseconds of each step. Returns `None` if the user requested a
/// stop.
///
/// # Errors
/// A simulated run failed.
pub fn fit(
    profile: &mut Profile,
    native: &[f64; STEPS.len()],
    done: impl Fn(&Step),
) -> Result<Option<Vec<Fitted>>, Error> {
    for sweep in 0..SWEEPS {
        for (step, &target) in STEPS.iter().zip(native) {
            if stop::requested() {
                return Ok(None);
            }
            let value = fitted(profile, step, target)?;
            set(profile, step.key, value);
            if sweep == 0 {
                done(step);
            }
        }
    }
    STEPS
        .iter()
        .zip(native)
        .map(|(step, &native)| {
            Ok(Fitted { step: *step, native, simulated: step.probe.simulated(profile)? })
        })
        .collect::<Result<_, _>>()
        .map(Some)
}

/// Returns the value with which the probe takes `target` nanoseconds.
fn fitted(profile: &mut Profile, step: &Step, target: f64) -> Result<f64, Error> {
    let now = profile.number_mut(step.key).map_or(1.0, |number| number.value);
    let [low, high] = step.kind.ends(now);
    let mut point = |linear: f64| {
        set(profile, step.key, step.kind.value(linear));
        Ok::<_, Error>((linear, step.probe.simulated(profile)?))
    };
    let line = [point(low)?, point(high)?];
    Ok(step.kind.value(search(line, target, step.kind.bounds(), point)?))
}

/// Searches for the value at which `point` returns the `target`, starting from a first line. The
/// line bends if another cost hides this cost; then the found point replaces the end of the line on
/// its side.
fn search(
    mut line: [(f64, f64); 2],
    target: f64,
    bounds: (f64, f64),
    mut point: impl FnMut(f64) -> Result<(f64, f64), Error>,
) -> Result<f64, Error> {
    let mut found = solve(line, target, bounds);
    for _ in 0..STEPS_TO_FIND {
        let (at, took) = point(found)?;
        if (took - target).abs() <= NEAR * target || at <= bounds.0 || at >= bounds.1 {
            break;
        }
        let side = usize::from(took > target);
        line[side] = (at, took);
        found = solve(line, target, bounds);
    }
    Ok(found)
}

/// Changes the value of an existing number in the profile.
fn set(profile: &mut Profile, key: &str, value: f64) {
    if let Some(number) = profile.number_mut(key) {
        number.value = value;
    }
    // An empty call enters the subsystem in the same way as a fault: by a function call.
    if key == "exception.call_ns" {
        profile.exception.fault_ns.value = value;
    }
    if key == "measured.fault_ipc" {
        profile.cpu.instructions_per_cycle.value = value;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn solve_finds_the_cost_on_the_line() {
        let line = [(0.0, 40.0), (100.0, 240.0)];
        assert_eq!(solve(line, 90.0, (0.0, 999.0)), 25.0);
        assert_eq!(solve(line, 340.0, (0.0, 999.0)), 150.0, "beyond the simulated range");
        assert_eq!(solve(line, 30.0, (0.0, 999.0)), 0.0, "below the cost of the rest");
        assert_eq!(
            solve([(0.2, 50.0), (2.0, 50.0)], 60.0, (0.1, 9.0)),
            0.1,
            "a cost without effect"
        );
        assert_eq!(Kind::PerCycle.value(solve([(0.2, 20.0), (2.0, 200.0)], 50.0, (0.1, 9.0))), 2.0);
        assert_eq!(solve(line, 9e9, (0.0, 999.0)), 999.0, "a disturbed host");
    }

    #[test]
    fn search_finds_a_hidden_cost() {
        // The result is constant below 130, as for zeroing that waits for memory.
        let point = |x: f64| Ok((x, 70.0 + x.max(130.0)));
        let line = [(64.0, 200.0), (192.0, 262.0)];
        let found = search(line, 230.0, (0.0, 999.0), point).expect("nothing fails");
        assert!((found - 160.0).abs() < 2.0, "{found}");
        let hidden = search(line, 190.0, (0.0, 999.0), point).expect("nothing fails");
        assert!(hidden < 130.0, "{hidden}");
    }

    #[test]
    fn fitted_keys_are_in_the_profile() {
        let mut profile = super::super::profile::base().expect("a valid bundled profile");
        for step in STEPS {
            let before = profile.numbers().len();
            assert!(profile.number_mut(step.key).is_some(), "{}", step.key);
            set(&mut profile, step.key, 1.25);
            assert_eq!(profile.number_mut(step.key).map(|it| it.value), Some(1.25));
            assert_eq!(profile.numbers().len(), before);
        }
        assert_eq!(profile.exception.fault_ns.value, 1.25);
    }

    /// Fits the times of a machine with known costs, and expects these costs.
    #[test]
    fn fit_recovers_the_costs_of_a_known_machine() {
        let mut known = super::super::profile::base().expect("a valid bundled profile");
        for (key, value) in [
            ("line.own_ns", 0.0),
            ("exception.call_ns", 3.0),
            ("measured.allocate_ns", 50.0),
            ("measured.zero_own_ns", 43.0),
            ("measured.zero_shared_ns", 50.0),
            ("measured.shared_lines", 262_144.0),
        ] {
            set(&mut known, key, value);
        }
        let native = STEPS.map(|step| step.probe.simulated(&known).expect("a simulated run"));
        let mut profile = known.clone();
        for step in STEPS {
            let was = profile.number_mut(step.key).map_or(1.0, |number| number.value);
            set(&mut profile, step.key, was / 2.0);
        }
        let fitted =
            fit(&mut profile, &native, |_| ()).expect("a simulated run").expect("not interrupted");
        for (fitted, step) in fitted.iter().zip(STEPS) {
            let off = (fitted.simulated - fitted.native).abs() / fitted.native;
            assert!(off < 0.02, "{}: {fitted:?}", step.key);
        }
        let value = |profile: &mut Profile, key| profile.number_mut(key).map(|it| it.value);
        for key in ["tlb.walk_ns", "measured.fault_ipc", "measured.map_ipc"] {
            let (was, is) = (value(&mut known.clone(), key), value(&mut profile, key));
            let off = (is.unwrap_or(0.0) / was.unwrap_or(1.0) - 1.0).abs();
            assert!(off < 0.1, "{key}: {was:?} {is:?}");
        }
    }
}
