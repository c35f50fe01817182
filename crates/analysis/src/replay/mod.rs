//! Replays of recorded programs on the subsystem, and of traces of addresses on simulated TLBs.
//!
//! - [`source`]: a recording with its plan; [`native`]: its replay on the native machine;
//!   [`simulated`]: its replay on the virtual machine;
//! - [`prefault`]: the effect of prefault on a recording;
//! - [`fidelity`]: the agreement of a replay with the recorded faults;
//! - [`addresses`]: a trace of addresses.

mod act;
pub mod addresses;
pub mod fidelity;
mod gate;
pub mod native;
pub mod prefault;
pub mod simulated;
pub mod source;

pub use fidelity::Fidelity;
pub use native::{Gauged, ReplayError, Replayed};
pub use prefault::Effect;
pub use source::Source;

use crate::error::Error;
use crate::settings::Settings;
use crate::stop;
use faultless_native::Native;

/// Replays `source` once on `native` under `settings`.
///
/// # Errors
/// The first operation that failed.
pub fn once(native: &Native, source: &Source, settings: &Settings) -> Result<Replayed, Error> {
    settings.apply(native);
    native::replay(native, &source.plan, stop::requested)
        .map_err(|error| source.failed(settings, error))
}
