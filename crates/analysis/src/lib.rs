//! Measurements and predictions of memory mechanisms, as plain values.
//!
//! The command `faultless` prints the results of this library. The library itself prints nothing
//! and reads no arguments.
//!
//! - [`run`]: one workload on one machine under one setting ([`settings`]) of the knobs;
//! - [`replay`]: recordings on the native and on the virtual machine;
//! - [`scale`]: workloads and recordings on simulated CPUs;
//! - [`calibrate`]: the costs of the host, and a profile with these costs;
//! - [`advise`]: settings of Linux, and the predicted and the measured saving of each;
//! - [`compare`]: locking policies, prefault and the other mechanisms, side by side.
//!
//! A measurement reports its progress to an [`Observer`], and its results to [`Figures`]: each
//! figure has a [`Context`], a name, a unit, a value and an origin ([`Basis`]). A measurement ends
//! early after a [request](stop::request) to stop; its results then lack the remaining runs.

pub mod advise;
pub mod calibrate;
pub mod columns;
pub mod compare;
mod context;
mod error;
mod figures;
pub mod host;
pub mod number;
mod observer;
mod processor;
pub mod profile;
pub mod rates;
pub mod replay;
pub mod run;
mod sample;
pub mod scale;
pub mod settings;
pub mod stop;
pub mod suggest;
pub mod turns;

pub use context::{Basis, Context};
pub use error::Error;
pub use figures::{Figures, Number};
pub use observer::Observer;
pub use sample::Sample;
