//! The scheduling policy and the nice value of a thread. The scheduler is round-robin for all
//! policies and values.

use linux_raw_sys::general as nr;

/// The policy and the nice value of a thread, kept for programs that read these values back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Schedule {
    /// `SCHED_…`: a policy without priorities.
    pub policy: u32,
    /// The nice value, from -20 to 19.
    pub nice: i32,
    /// Set if a new thread or process does not inherit a negative nice value:
    /// `SCHED_RESET_ON_FORK`.
    pub resets: bool,
}

impl Schedule {
    /// Returns the schedule of a new thread made by a thread with this schedule.
    pub fn of_child(self) -> Self {
        let nice = if self.resets { self.nice.max(0) } else { self.nice };
        Self { nice, resets: false, ..self }
    }

    /// Returns the policy with its flag, as `sched_getscheduler` does.
    pub const fn word(self) -> u32 {
        if self.resets { self.policy | nr::SCHED_RESET_ON_FORK } else { self.policy }
    }
}
