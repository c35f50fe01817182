//! Linux as the oracle: the same random calls, accesses and forks run on the subsystem and on the
//! host's kernel, and are compared step by step.
//!
//! A [`Case`] is a sequence of [operations](op) on a window of pages. A few processes, which fork
//! from one another and share a few objects, run the operations. [`linux`] runs the case in
//! separate processes, [`ours`] on the native machine. The observations of each step — the value or
//! the error, the signal of an access, the loaded value, the present pages, and all VMAs near the
//! window — must be [equal](compare), except for the list in [`differences`]. Cases come from a
//! [generator](generate). A failed case is [shrunk](mod@shrink) and [written](case) to a file.

pub mod case;
pub mod compare;
pub mod differences;
pub mod generate;
pub mod linux;
pub mod op;
pub mod ours;
pub mod seen;
pub mod shrink;

pub use case::Case;
pub use compare::{Agreement, Failure, Oracle};
pub use generate::Generator;
