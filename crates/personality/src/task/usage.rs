//! The resource usage of threads and processes.

use crate::time::Times;
use faultless_bare::sync::Mutex;

/// Resource usage.
#[derive(Clone, Copy, Debug, Default)]
pub struct Usage {
    /// How long they ran.
    pub times: Times,
    /// Page faults that were served at once.
    pub minor_faults: u64,
    /// Page faults that waited for a page to be read.
    pub major_faults: u64,
    /// Voluntary and involuntary context switches.
    pub switches: [u64; 2],
    /// The most pages that were resident at a time.
    pub most_resident: u64,
}

impl core::ops::Add for Usage {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        let [own, others] = [self.switches, other.switches];
        Self {
            times: self.times + other.times,
            minor_faults: self.minor_faults + other.minor_faults,
            major_faults: self.major_faults + other.major_faults,
            switches: [own[0] + others[0], own[1] + others[1]],
            most_resident: self.most_resident.max(other.most_resident),
        }
    }
}

/// The usage of what has ended.
#[derive(Debug, Default)]
pub struct Used {
    /// The usage of its ended threads.
    pub by_ended: Mutex<Usage>,
    /// The usage of children that were waited for, and of those that these had waited for.
    pub by_children: Mutex<Usage>,
}
