//! The log of operations in a simulation: their cache lines, and their times.

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
    /// Whether it was written, or a write was attempted.
    pub written: bool,
    /// The location in the subsystem's source.
    pub at: &'static Location<'static>,
}

/// The log.
#[derive(Debug, Default)]
pub(crate) struct Log {
    /// The accesses of operations, while they are collected.
    uses: RefCell<Option<Vec<LineUse>>>,
    /// The times of operations, by kind.
    latencies: RefCell<[Vec<Time>; Operation::ALL.len()]>,
}

impl Log {
    /// Records a use of a line, if uses are collected.
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

    /// Returns the uses since the last call. The first call starts the collection.
    pub(crate) fn take_uses(&self) -> Vec<LineUse> {
        self.uses.replace(Some(Vec::new())).unwrap_or_default()
    }

    /// Records the time of an operation.
    pub(crate) fn took(&self, operation: Operation, time: Time) {
        self.latencies.borrow_mut()[operation as usize].push(time);
    }

    /// Returns the times of the operations of this kind.
    pub(crate) fn latencies(&self, operation: Operation) -> Vec<Time> {
        self.latencies.borrow()[operation as usize].clone()
    }
}
