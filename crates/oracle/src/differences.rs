//! Where the subsystem differs from Linux on purpose, each with its reason. Whatever differs and is not
//! here is a fault of the subsystem.

use crate::op::Op;
use crate::seen::{Area, Seen};

/// A step in which the sides differ.
#[derive(Debug)]
pub struct Context<'a> {
    /// What was done.
    pub op: &'a Op,
    /// The VMAs before.
    pub before: &'a [Area],
    /// What Linux did.
    pub linux: &'a Seen,
    /// What the subsystem did.
    pub ours: &'a Seen,
}

/// What a known difference means for the rest of its case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    /// Both sides are as they would be without it.
    GoOn,
    /// They are not alike any more: nothing behind it is compared.
    Stop,
}

/// A difference that is there on purpose.
#[derive(Debug)]
pub struct Difference {
    /// What it is called.
    pub name: &'static str,
    /// Why it is.
    pub reason: &'static str,
    /// Whether it is what happened.
    pub applies: fn(&Context<'_>) -> bool,
    /// What then.
    pub then: Then,
}

/// All of them.
pub const DIFFERENCES: [Difference; 0] = [];
