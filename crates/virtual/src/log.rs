//! What a simulation keeps of operations: the cache lines that they use, and how long they take.

use crate::lines::LineId;
use crate::profile::Time;
use crate::rates::Operation;
use core::cell::RefCell;
use core::panic::Location;
use faultless_observed::observe::Intent;

/// An access to a line in an operation of the subsystem.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LineUse {
    /// The CPU.
    pub cpu: u16,
    /// The line's number on this machine.
    pub line: u32,
    /// Whether it was written, or tried to.
    pub written: bool,
    /// Where in the subsystem's source.
    pub at: &'static Location<'static>,
}

/// What is kept.
#[derive(Debug, Default)]
pub(crate) struct Log {
    /// The accesses of operations, while they are collected.
    uses: RefCell<Option<Vec<LineUse>>>,
    /// What each operation took.
    latencies: RefCell<[Vec<Time>; Operation::ALL.len()]>,
}

impl Log {
    /// Collects a use of a line, where uses are collected.
    #[inline]
    pub(crate) fn used(
        &self,
        cpu: u16,
        line: LineId,
        intent: Intent,
        at: &'static Location<'static>,
    ) {
        if let Some(uses) = &mut *self.uses.borrow_mut() {
            let written = matches!(intent, Intent::Store | Intent::Modify);
            uses.push(LineUse { cpu, line: line.number(), written, at });
        }
    }

    /// The uses since the last call; the first begins to collect them.
    pub(crate) fn take_uses(&self) -> Vec<LineUse> {
        self.uses.replace(Some(Vec::new())).unwrap_or_default()
    }

    /// An operation took so long.
    pub(crate) fn took(&self, operation: Operation, time: Time) {
        self.latencies.borrow_mut()[operation as usize].push(time);
    }

    /// What each operation of this kind took.
    pub(crate) fn latencies(&self, operation: Operation) -> Vec<Time> {
        self.latencies.borrow()[operation as usize].clone()
    }
}
