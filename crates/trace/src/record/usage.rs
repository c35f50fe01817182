//! The processor time of recorded processes.

use procfs::process::Process;
use std::collections::HashMap;

/// The processor time of the recorded processes during the recording, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Usage {
    /// In the program.
    pub user: f64,
    /// In the kernel, with the cost of recording.
    pub system: f64,
}

impl Usage {
    /// Returns the processor time of the process `pid` so far, with the children that it has waited
    /// for. Returns `None` for a process that has ended.
    pub(super) fn of(pid: i32) -> Option<Self> {
        let stat = Process::new(pid).ok()?.stat().ok()?;
        let ticks = procfs::ticks_per_second() as f64;
        let seconds = |own: u64, children: i64| (own as f64 + children as f64) / ticks;
        let (user, system) = (seconds(stat.utime, stat.cutime), seconds(stat.stime, stat.cstime));
        (!matches!(stat.state, 'Z' | 'X')).then_some(Self { user, system })
    }

    /// Returns the processor time of each process so far.
    pub(super) fn of_each(pids: &[i32]) -> HashMap<i32, Self> {
        pids.iter().filter_map(|pid| Some((*pid, Self::of(*pid)?))).collect()
    }

    /// Returns the processor time since `before`; `None` if one of the processes has ended.
    pub(super) fn since(before: &HashMap<i32, Self>) -> Option<Self> {
        let mut sum = Self::default();
        for (pid, before) in before {
            let now = Self::of(*pid)?;
            sum.user += (now.user - before.user).max(0.0);
            sum.system += (now.system - before.system).max(0.0);
        }
        Some(sum)
    }

    /// Returns the processor time in microseconds.
    pub(super) fn micros(self) -> u64 {
        ((self.user + self.system) * 1e6) as u64
    }
}

/// Returns the processor time in microseconds of the children that the ended process `pid` has
/// waited for; 0 if unknown.
pub(super) fn micros_of_children(pid: u32) -> u64 {
    let stat = Process::new(pid.cast_signed()).and_then(|process| process.stat());
    let ticks = stat.map_or(0, |stat| (stat.cutime + stat.cstime).max(0).cast_unsigned());
    ticks * 1_000_000 / procfs::ticks_per_second()
}

/// Returns the processor time of all children that have ended, in seconds.
pub(super) fn children_time() -> f64 {
    // SAFETY: all zeros are a valid value, which the call overwrites.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_CHILDREN, &raw mut usage);
        usage
    };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}

#[cfg(test)]
mod tests {
    use super::super::signals;
    use super::*;
    use std::process::Command;

    /// A shell command that uses some hundredths of a second.
    const BUSY: &str = "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done";

    /// A child that uses a tenth of a second, and a process that ends.
    #[test]
    fn usage_has_the_children_and_is_unknown_after_the_end() {
        let own = std::process::id() as i32;
        let before = HashMap::from([(own, Usage::of(own).unwrap())]);
        let children = children_time();
        assert!(Command::new("sh").args(["-c", BUSY]).status().unwrap().success());
        let child = children_time() - children;
        let used = Usage::since(&before).unwrap();
        assert!(used.micros() as f64 / 1e6 > 0.5 * child && child > 0.04, "{used:?} {child}");
        let mut ended = Command::new("true").spawn().unwrap();
        let pid = ended.id();
        let before = HashMap::from([(pid.cast_signed(), Usage::default())]);
        signals::await_end(pid);
        assert_eq!(Usage::since(&before), None, "a zombie");
        ended.wait().unwrap();
        assert_eq!(Usage::since(&before), None);
    }

    #[test]
    fn program_below_perf_has_its_time() {
        let mut perf =
            Command::new("sh").args(["-c", &format!("sh -c '{BUSY}'; :")]).spawn().unwrap();
        signals::await_end(perf.id());
        let micros = micros_of_children(perf.id());
        perf.wait().unwrap();
        assert!(micros > 40_000, "{micros}");
    }
}
