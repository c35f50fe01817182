//! Linux as the oracle: the same random calls, accesses and forks against the subsystem and against
//! the host's kernel, compared step by step.
//!
//! A [`Case`] is a sequence of [operations](op) on a window of pages, done by a few processes that
//! fork from one another and share a few objects. [`linux`] runs it in processes of its own,
//! [`ours`] on the native machine. What is seen of each step — the value or the error, the signal
//! of an access, what was loaded, which pages are there, and all VMAs near the window — must be the
//! [same](compare), but for what [`differences`] lists. Cases come from a [generator](generate);
//! one that fails is [shrunk](mod@shrink) and [written](case) to a file.

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
