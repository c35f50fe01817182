//! What threads used, and processes.

use crate::time::Times;
use faultless_bare::sync::Mutex;

/// What threads used.
#[derive(Clone, Copy, Debug, Default)]
pub struct Usage {
    /// How long they ran.
    pub times: Times,
    /// Page faults of theirs that were served.
    pub faults: u64,
    /// How often they gave the CPU away of their own will, and against it.
    pub switches: [u64; 2],
}

impl core::ops::Add for Usage {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        let [own, others] = [self.switches, other.switches];
        Self {
            times: self.times + other.times,
            faults: self.faults + other.faults,
            switches: [own[0] + others[0], own[1] + others[1]],
        }
    }
}

/// What was used for a process by those who are gone.
#[derive(Debug, Default)]
pub struct Used {
    /// What its ended threads used.
    pub by_ended: Mutex<Usage>,
    /// What its children that were waited for used, and those that these had waited for.
    pub by_children: Mutex<Usage>,
}
