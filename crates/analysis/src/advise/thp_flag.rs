//! Detects programs that switch huge pages off for themselves (`PR_SET_THP_DISABLE`), as Debian's
//! ruby does.

use super::supervise::{descendants, stat_words};
use std::collections::HashMap;
use std::fs;

/// The largest number of processes to read for a run: a build has thousands.
const MOST: usize = 64;

/// The flag of each process of a run, as last read.
#[derive(Debug, Default)]
pub struct ThpFlags {
    /// By process: whether huge pages are off, and the processor time so far, in ticks.
    processes: HashMap<i32, (bool, u64)>,
}

impl ThpFlags {
    /// Reads the flags of `pid` and of all its descendants. The last reading counts, because a
    /// program sets its flag some time after its start.
    pub fn look(&mut self, pid: i32) {
        for pid in [pid].into_iter().chain(descendants(pid)).take(MOST) {
            let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            if let Some(off) = is_off(&status) {
                self.processes.insert(pid, (off, ticks(&stat)));
            }
        }
    }

    /// Returns whether huge pages were off for most of the time of the run.
    pub fn mostly_off(&self) -> bool {
        // Without any processor time, each process counts the same.
        let time = |want: bool| -> u64 {
            self.processes
                .values()
                .filter(|(off, _)| *off == want)
                .map(|(_, ticks)| ticks + 1)
                .sum()
        };
        time(true) > time(false)
    }
}

/// Parses the flag in the text of `/proc/PID/status`. Returns `None` for a process that has ended,
/// and on a kernel that does not report the flag.
fn is_off(status: &str) -> Option<bool> {
    let line = status.lines().find_map(|line| line.strip_prefix("THP_enabled:"))?;
    Some(line.trim() == "0")
}

/// Returns the processor time in the text of `/proc/PID/stat`.
fn ticks(stat: &str) -> u64 {
    // User and system time are words 14 and 15 of the line.
    stat_words(stat).skip(11).take(2).filter_map(|word| word.parse::<u64>().ok()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flag_and_time_are_parsed_from_proc() {
        assert_eq!(is_off("Name:\tx\nTHP_enabled:\t0\n"), Some(true));
        assert_eq!(is_off("THP_enabled:\t1\n"), Some(false));
        assert_eq!(is_off("Name:\tx\n"), None);
        assert_eq!(ticks("7 (a b) c) S 1 7 7 0 -1 4194304 90 0 0 0 12 30 0 0 20"), 42);
    }

    #[test]
    fn process_with_most_time_decides() {
        let flags = |processes: &[(bool, u64)]| ThpFlags {
            processes: (0..).zip(processes.iter().copied()).collect(),
        };
        assert!(!flags(&[]).mostly_off());
        assert!(flags(&[(false, 2), (true, 90)]).mostly_off(), "a shell that starts ruby");
        assert!(!flags(&[(true, 2), (false, 90)]).mostly_off());
    }
}
