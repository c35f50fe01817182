//! Finds the profile named by the user.

use crate::error::CliError;
use crate::interrupt;
use crate::report::say;
use faultless_analysis::suggest;
use faultless_virtual::Profile;
use faultless_virtual::profile::BUNDLED;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

/// Returns the profile named by the user: a bundled profile, or a file.
///
/// A word without `/` and without an extension is the name of a bundled profile, never a file. If a
/// file has the same name, the user is informed of the ignored file. Any other text is a file. The
/// user is informed of a file with the name of a bundled profile and other numbers, because results
/// of both have the same name.
///
/// # Errors
/// No such profile exists, or the file is not a valid profile.
pub fn find(name: &str) -> Result<Profile, CliError> {
    let file = Path::new(name);
    if !name.contains('/') && file.extension().is_none() {
        if file.exists() && is_bundled(name) {
            say!("faultless: --profile {name} is the bundled profile; ./{name} names the file");
        } else if file.exists() {
            return Err(CliError::Usage(format!(
                "--profile {name}: no bundled profile of that name; ./{name} names the file"
            )));
        }
        return bundled(name);
    }
    let profile = parse_file(file).map_err(|why| CliError::Usage(format!("--profile {why}")))?;
    if let Ok(other) = Profile::bundled(&profile.name)
        && other.to_toml(&[]) != profile.to_toml(&[])
    {
        say!(
            "faultless: --profile {name} is a file with the name of the bundled profile {0} and \
             other numbers; results have the name {0}: change `name` in the file",
            profile.name
        );
    }
    Ok(profile)
}

/// Returns the profile in `file`.
///
/// # Errors
/// Returns the file and the reason why it is no profile: a line for each problem.
pub fn parse_file(file: &Path) -> Result<Profile, String> {
    let name = file.display().to_string();
    let text = {
        // Reading a pipe may block.
        let _guard = interrupt::ends_at_once();
        read(file)
    };
    let text = text.map_err(|why| format!("{name}: {why}{}", of_bundled(&name)))?;
    Profile::parse(&name, &text).map_err(|error| error.to_string())
}

/// Returns whether a bundled profile has this name.
pub fn is_bundled(name: &str) -> bool {
    BUNDLED.iter().any(|(known, _)| *known == name)
}

/// Returns a remark if the name of an unreadable file is the name of a bundled profile.
fn of_bundled(name: &str) -> &'static str {
    if is_bundled(name) {
        "; the bundled profile of this name is valid: see `profile show`"
    } else {
        ""
    }
}

/// The largest profile, in bytes. The bundled profiles have some 10 KiB.
const LARGEST: u64 = 1 << 20;

/// Returns the text in `file`, or the reason why it is no profile. A device is not read, and a pipe
/// not further than the limit, because both may have no end.
fn read(file: &Path) -> Result<String, String> {
    let kind = fs::metadata(file).map_err(|error| error.to_string())?.file_type();
    if kind.is_char_device() || kind.is_block_device() {
        return Err("a device, not a profile: specify a file".to_owned());
    }
    let opened = File::open(file).map_err(|error| error.to_string())?;
    let mut bytes = Vec::new();
    opened.take(LARGEST + 1).read_to_end(&mut bytes).map_err(|error| error.to_string())?;
    if bytes.len() as u64 > LARGEST {
        return Err("not a profile: larger than 1 MiB".to_owned());
    }
    String::from_utf8(bytes).map_err(|_| "not a profile: not text (UTF-8)".to_owned())
}

/// Returns the bundled profile of this name.
///
/// # Errors
/// No bundled profile has this name.
pub fn bundled(name: &str) -> Result<Profile, CliError> {
    Profile::bundled(name)
        .map_err(|error| CliError::Usage(format!("--profile {error}{}", hint(name))))
}

/// Returns the most similar bundled name, as the end of a sentence.
pub fn hint(name: &str) -> String {
    suggest::hint(name, BUNDLED.iter().map(|(known, _)| *known))
}
