//! The parent, group and session of a process, as numbers.

use core::sync::atomic::{AtomicBool, AtomicU32};

/// The number of [process 1](super::init).
pub const INIT: u32 = 1;
/// The number of the process that the machine was started for, the first child of process 1.
pub const PROGRAM: u32 = 2;

/// The relatives of a process.
#[derive(Debug)]
pub struct Relatives {
    /// The parent's number; 0 for process 1. Changes when the parent ends, with the table and the
    /// parent's family locked.
    pub parent: AtomicU32,
    /// The process group and session.
    pub group: AtomicU32,
    /// See `group`.
    pub session: AtomicU32,
    /// The signal to this process when its parent ends (0: no signal): `PR_SET_PDEATHSIG`.
    pub death_signal: AtomicU32,
    /// Set if the process adopts the orphans among its descendants: `PR_SET_CHILD_SUBREAPER`.
    pub adopts: AtomicBool,
    /// Set once the process has executed a program: its parent can no longer change its group.
    pub executed: AtomicBool,
}

impl Relatives {
    /// Returns the relatives of process `pid`, which has its own group and session.
    pub const fn new(pid: u32) -> Self {
        Self {
            parent: AtomicU32::new(0),
            group: AtomicU32::new(pid),
            session: AtomicU32::new(pid),
            death_signal: AtomicU32::new(0),
            adopts: AtomicBool::new(false),
            executed: AtomicBool::new(false),
        }
    }
}
