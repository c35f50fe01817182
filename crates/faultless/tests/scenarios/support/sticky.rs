//! A scheduler for narrow windows: each thread runs for a while, of a random length for each run,
//! before another thread has its turn.
//!
//! A random walk gives no thread a long run. PCT does, but must guess its few switching steps among
//! all steps. Here, a switch in a window of three steps has a probability of a few percent in a run
//! whose thread switches often, and another thread may advance far in the meantime.

use shuttle::scheduler::{DataSource, RandomDataSource, Schedule, Scheduler, Task, TaskId};
use std::collections::BTreeMap;

/// See the module.
#[derive(Debug)]
pub struct StickyScheduler {
    left: usize,
    data: RandomDataSource,
    /// The state of a generator (SplitMix64).
    state: u64,
    /// The approximate number of consecutive steps of each thread.
    stays: BTreeMap<TaskId, u64>,
}

impl StickyScheduler {
    /// For `schedules` runs, the same for the same `seed`.
    pub fn new(seed: u64, schedules: usize) -> Self {
        let data = RandomDataSource::initialize(seed);
        Self { left: schedules, data, state: 0, stays: BTreeMap::new() }
    }

    fn random(&mut self, below: u64) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.state;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ mixed >> 31) % below
    }
}

impl Scheduler for StickyScheduler {
    fn new_execution(&mut self) -> Option<Schedule> {
        self.left = self.left.checked_sub(1)?;
        self.state = self.data.reinitialize();
        self.stays.clear();
        Some(Schedule::new(self.state))
    }

    fn next_task(
        &mut self,
        runnable: &[&Task],
        current: Option<TaskId>,
        is_yielding: bool,
    ) -> Option<TaskId> {
        let others: Vec<TaskId> =
            runnable.iter().map(|task| task.id()).filter(|&id| Some(id) != current).collect();
        let goes_on = current.filter(|_| others.len() < runnable.len());
        if let Some(current) = goes_on {
            if others.is_empty() {
                return Some(current);
            }
            let fresh = 8 << (2 * self.random(4));
            let stays = *self.stays.entry(current).or_insert(fresh);
            if !is_yielding && self.random(stays) != 0 {
                return Some(current);
            }
        }
        let next = self.random(others.len() as u64) as usize;
        Some(others[next])
    }

    fn next_u64(&mut self) -> u64 {
        self.data.next_u64()
    }
}
