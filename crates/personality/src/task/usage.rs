//! The resource usage of threads and processes.

use crate::time::Times;
use faultless_bare::sync::Mutex;

/// Resource usage.
#[derive(Clone, Copy, Debug, Default)]
pub struct Usage {
    /// CPU times.
    pub times: Times,
    /// Page faults served at once.
    pub minor_faults: u64,
    /// Page faults that waited for a page to be read.
    pub major_faults: u64,
    /// Voluntary and involuntary context switches.
    pub switches: [u64; 2],
    /// The peak number of resident pages.
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

/// The usage of ended threads and processes.
#[derive(Debug, Default)]
pub struct Used {
    /// The usage of ended threads.
    pub by_ended: Mutex<Usage>,
    /// The usage of reaped children, including the children which these had reaped.
    pub by_children: Mutex<Usage>,
}
