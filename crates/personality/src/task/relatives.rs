//! The numbers of those that a process belongs to.

use core::sync::atomic::{AtomicBool, AtomicU32};

/// The number of [process 1](super::init).
pub const INIT: u32 = 1;
/// The number of the process of the program that the machine was started for, the first child of process 1.
pub const PROGRAM: u32 = 2;

/// Whom a process belongs to.
#[derive(Debug)]
pub struct Relatives {
    /// The parent's number; 0 for process 1. It changes, with the table and the parent's family locked, when the
    /// parent ends.
    pub parent: AtomicU32,
    /// Its process group and session.
    pub group: AtomicU32,
    /// See `group`.
    pub session: AtomicU32,
    /// The signal that it gets when the parent ends (0: none): `PR_SET_PDEATHSIG`.
    pub death_signal: AtomicU32,
    /// Whether it adopts the orphans among its descendants: `PR_SET_CHILD_SUBREAPER`.
    pub adopts: AtomicBool,
}

impl Relatives {
    /// Those of process `pid`, which has a group and a session of its own.
    pub const fn new(pid: u32) -> Self {
        Self {
            parent: AtomicU32::new(0),
            group: AtomicU32::new(pid),
            session: AtomicU32::new(pid),
            death_signal: AtomicU32::new(0),
            adopts: AtomicBool::new(false),
        }
    }
}
