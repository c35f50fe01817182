//! The steady state of a run, and the start-up before it.
//!
//! With a warm-up, the figures of a run are those of its *steady window*: the time in which all
//! CPUs work, each after a number of calls and faults (`faultless_virtual::window` describes the
//! window and its clocks). The operations of the window are its calls and faults, divided by the
//! calls and faults of an operation in the whole run. The warm-up itself gives one figure, the
//! length of the start-up.
//!
//! # Start-up
//!
//! The start-up is the number of calls and faults of each CPU until the CPUs run at 90 % of the
//! steady rate. Let `t(k)` be the time of the first `k` calls of a CPU, and `s` the time of a call
//! in the window, both as means over all CPUs. The lag `t(k) - k * s / 0.9` grows while the CPUs
//! run below 90 % of the steady rate, and shrinks afterwards. The start-up ends at the call with
//! the largest lag. From there on each stretch of the warm-up runs at 90 % or more, and each
//! stretch that ends there runs below.
//!
//! No interval of smoothing is required: a single slow call (a CPU fetches a batch of frames, or
//! unmaps an area at the end of a pass) moves the result by no more than the distance to the next
//! such call. If the lag is largest in the last quarter of the warm-up, the start-up may not be
//! over, and its length is unknown.

use crate::error::Error;
use crate::sample::Sample;
use faultless::Counter;
use faultless_virtual::{Spent, Steady};

/// The part of the steady rate at which the start-up ends.
const REACHED: f64 = 0.9;
/// The fewest calls and faults in the window, for each CPU on average.
const LEAST: u64 = 2;
/// Picoseconds in a second.
const SECOND: f64 = 1e12;

/// The start of a run that the figures exclude.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WarmUp {
    /// Calls and faults of each CPU.
    pub calls: u64,
    /// Whether a run without a steady window has figures of the whole run, and does not fail.
    pub optional: bool,
}

/// The steady window of a run, besides its [`Sample`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SteadyState {
    /// Calls and faults of each CPU before the window.
    pub warm_up: u64,
    /// Calls and faults of all CPUs in the window.
    pub calls: u64,
    /// The length of the [start-up](self), in calls and faults of each CPU; `None` if the warm-up
    /// is too short to include the whole start-up.
    pub start_up: Option<u64>,
}

/// Returns the results of a window, in a run of `operations`.
///
/// # Errors
/// The window is too short; the error names the remedy.
pub fn results(
    doing: String,
    steady: &Steady,
    operations: u64,
) -> Result<(Sample, SteadyState), Error> {
    let Steady { cpus, warm_up, length, calls, all_calls, fewest, .. } = *steady;
    if length == 0 || calls < LEAST * cpus as u64 {
        let found = if fewest <= warm_up {
            format!("a CPU makes only {fewest} calls and faults, all of them in its warm-up")
        } else {
            format!(
                "after the warm-up, all CPUs work together for only {calls} calls and faults, \
                 and the figures need {LEAST} of each CPU"
            )
        };
        return Err(Error::run(
            doing,
            format_args!(
                "--warm-up {warm_up}: {found}: use a smaller --warm-up, or more work for each \
                 CPU (`faultless workloads` lists the parameters, such as passes=)"
            ),
        ));
    }
    let spent = steady.accounts.spent;
    let user = spent[Spent::Program as usize];
    let system = spent.iter().sum::<u64>() - user;
    let faults = steady.counters.iter().find(|(name, _)| *name == Counter::Faults.name());
    let each = operations as f64 / all_calls as f64;
    let sample = Sample {
        operations: (calls as f64 * each).round() as u64,
        faults: faults.map_or(0, |(_, count)| *count),
        wall: length as f64 / SECOND,
        user: user as f64 / SECOND,
        system: system as f64 / SECOND,
        counters: steady.counters.clone(),
    };
    // The time of a call of each CPU, as the sum over all CPUs.
    let call = cpus as f64 * cpus as f64 * length as f64 / calls as f64;
    Ok((sample, SteadyState { warm_up, calls, start_up: start_up(&steady.starts, call) }))
}

/// Returns the length of the [start-up](self). `starts` are the times of the calls of the warm-up,
/// and `call` is the time of a call in the steady state.
fn start_up(starts: &[u64], call: f64) -> Option<u64> {
    let (mut lag, mut largest, mut end) = (0.0, 0.0, 0);
    for (number, took) in starts.iter().enumerate() {
        lag += *took as f64 - call / REACHED;
        if lag > largest {
            (largest, end) = (lag, number + 1);
        }
    }
    (end <= starts.len() - starts.len() / 4).then_some(end as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use faultless_virtual::Accounts;

    /// Returns the window of two CPUs with `calls` in 1 µs, after calls that took `starts`.
    fn window(calls: u64, starts: Vec<u64>) -> Steady {
        let mut accounts = Accounts::default();
        accounts.spent[Spent::Program as usize] = 500_000;
        accounts.spent[Spent::Lines as usize] = 1_500_000;
        Steady {
            cpus: 2,
            warm_up: starts.len() as u64,
            length: 1_000_000,
            calls,
            all_calls: 4 * calls,
            fewest: 2 * calls,
            accounts,
            counters: vec![("spf", 3), (Counter::Faults.name(), calls / 4)],
            starts,
        }
    }

    #[test]
    fn operations_of_the_window_follow_from_its_calls() {
        // Five calls for each operation.
        let (sample, steady) =
            results("w".into(), &window(100, vec![20_000; 8]), 80).expect("long enough");
        assert_eq!((sample.operations, sample.faults), (20, 25));
        let times = [sample.wall, sample.user, sample.system].map(|it| (it * 1e9).round());
        assert_eq!(times, [1000.0, 500.0, 1500.0]);
        assert_eq!(steady, SteadyState { warm_up: 8, calls: 100, start_up: Some(0) });
        // A call takes 20 ns on each CPU: a tenth more is fast enough, more is not.
        let start_up = |each| {
            let starts = [vec![each; 4], vec![40_000; 12]].concat();
            results("w".into(), &window(100, starts), 80).expect("long enough").1.start_up
        };
        assert_eq!([start_up(44_000), start_up(45_000)], [Some(0), Some(4)]);
    }

    #[test]
    fn start_up_ends_with_the_largest_lag() {
        let steady = 100.0;
        let slow = |calls: usize, took| vec![took; calls];
        let fast = slow(60, 100);
        assert_eq!(start_up(&fast, steady), Some(0));
        assert_eq!(start_up(&[slow(20, 150), fast.clone()].concat(), steady), Some(20));
        // Calls are fast before all CPUs have begun to conflict.
        let early = [slow(5, 90), slow(20, 400), fast.clone()].concat();
        assert_eq!(start_up(&early, steady), Some(25));
        // One slow call in ten belongs to the steady state.
        let pass: Vec<u64> = [slow(9, 60), slow(1, 460)].concat();
        let passes = |count| (0..count).flat_map(|_| pass.clone()).collect::<Vec<_>>();
        assert!(start_up(&passes(8), steady).is_some_and(|calls| calls <= 10));
        let later = [slow(30, 300), passes(8)].concat();
        assert!(start_up(&later, steady).is_some_and(|calls| (30..=40).contains(&calls)));
        // Not over within the warm-up.
        assert_eq!(start_up(&slow(60, 150), steady), None);
        assert_eq!(start_up(&[fast, slow(4, 900)].concat(), steady), None);
    }

    #[test]
    fn too_short_window_names_the_remedy() {
        let error = |steady: &Steady| {
            results("brk1 on 2 CPUs".into(), steady, 80).expect_err("too short").to_string()
        };
        let none = Steady { fewest: 6, length: 0, calls: 0, ..window(100, vec![1; 8]) };
        let said = error(&none);
        let start = "brk1 on 2 CPUs: --warm-up 8: a CPU makes only 6 calls";
        assert!(said.starts_with(start), "{said}");
        assert!(said.contains("smaller --warm-up, or more work"), "{said}");
        let said = error(&Steady { fewest: 20, ..window(3, vec![1; 8]) });
        assert!(said.contains("only 3 calls and faults, and the figures need 2"), "{said}");
        assert!(results("w".into(), &window(4, vec![1; 8]), 80).is_ok());
    }
}
