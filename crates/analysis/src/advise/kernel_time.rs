//! The most time that the faults of a program can have taken: the kernel's part of its processor
//! time.
//!
//! Many kernels divide the processor time by samples: the tick of the timer charges the program or
//! the kernel, depending on which of the two it interrupts. The kernel's part of one run of a
//! second is then uncertain by a tenth of it. The limit is therefore one standard error above the
//! measured part, and runs without a setting are pooled.

use super::once::Run;
use crate::rates::median;

/// Ticks of the timer in a second: the default of most distributions. A kernel with more ticks, or
/// with exact times (`CONFIG_VIRT_CPU_ACCOUNTING_GEN`), has a smaller error.
const TICKS: f64 = 250.0;
/// Seconds of processor time below which the kernel's part is not reliable at all.
pub const RELIABLE: f64 = 0.25;

/// Returns the most seconds that the faults of one run can have taken, from several runs with the
/// same settings. Returns infinity without runs.
pub fn fault_limit<'a>(runs: impl IntoIterator<Item = &'a Run>) -> f64 {
    let (times, system): (Vec<_>, Vec<_>) =
        runs.into_iter().map(|run| (run.processor, run.system)).unzip();
    let Some(typical) = median(&times) else { return f64::INFINITY };
    let all: f64 = times.iter().sum();
    if all < RELIABLE {
        return typical;
    }
    let share = (system.iter().sum::<f64>() / all).min(1.0);
    // The standard error of a share of independent samples.
    let error = (share * (1.0 - share) / (all * TICKS)).sqrt();
    typical * (share + error).min(1.0)
}

#[cfg(test)]
mod tests {
    use super::super::once::tests::run;
    use super::*;

    fn of(processor: f64, system: f64) -> Run {
        Run { processor, ..run(system, 1) }
    }

    #[test]
    fn short_run_can_be_all_faults() {
        assert_eq!(fault_limit(&[of(0.2, 0.0)]), 0.2);
        assert_eq!(fault_limit(&[]), f64::INFINITY);
    }

    #[test]
    fn limit_of_one_run_is_a_standard_error_above_its_kernel_time() {
        // 250 ticks, 25 of them in the kernel: the square root of 250 * 0.1 * 0.9 is 4.74.
        let limit = fault_limit(&[of(1.0, 0.1)]);
        assert!((limit - (0.1 + 4.743 / 250.0)).abs() < 1e-5, "{limit}");
        // All ticks are in the kernel.
        assert_eq!(fault_limit(&[of(1.0, 1.0)]), 1.0);
    }

    #[test]
    fn several_runs_are_more_certain() {
        let runs: Vec<Run> = (0..25).map(|at| of(1.0, 0.004 * f64::from(at % 5) + 0.092)).collect();
        let limit = fault_limit(&runs);
        // The mean is 0.1, and the error a fifth of the error of one run.
        assert!((limit - (0.1 + 4.743 / 250.0 / 5.0)).abs() < 1e-5, "{limit}");
        // Short runs are pooled, too.
        let short: Vec<Run> = (0..10).map(|_| of(0.1, 0.02)).collect();
        assert!((0.02..0.03).contains(&fault_limit(&short)));
    }
}
