//! The bundled profiles of machines.

use crate::error::Error;
use faultless_virtual::Profile;

/// Returns the bundled profile of this name.
///
/// # Errors
/// No bundled profile has this name.
pub fn bundled(name: &str) -> Result<Profile, Error> {
    Profile::bundled(name).map_err(Error::Profile)
}
