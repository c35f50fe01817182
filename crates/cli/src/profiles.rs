//! `faultless profiles`: the bundled profiles of machines, and the format of a profile.

use crate::error::CliError;
use crate::interrupt;
use crate::report::say;
use crate::report::table;
use faultless_analysis::suggest;
use faultless_virtual::profile::{BUNDLED, ProfileError};
use faultless_virtual::{Profile, profile::Section};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

#[derive(Debug, clap::Args)]
pub struct ProfilesArgs {
    /// Print this bundled profile
    #[arg(value_name = "NAME")]
    pub name: Option<String>,
}

/// The rules of the format, beside the list of keys.
const FORMAT: &str = "\
A profile is a TOML file with a name, a summary, and sections of numbers:

    name = \"mine\"
    summary = \"the machine, in one line\"

    [line]
    own_ns = { value = 1.1, source = \"where the number is from\" }

Each number requires a value and a source. A file must have every key of every section; only
[measured] may be absent. The end of a key is its unit: _ns is nanoseconds. Values are from 0 to 10^9.
The simulation reads values only, so a source may be any text that is not empty.
";

/// Commands that use a profile.
const USES: &str = "\
faultless profiles two-socket > mine.toml     print a bundled profile, to be changed
faultless scale pft --profile ./mine.toml     simulate with a file
faultless calibrate --output mine.toml        measure the profile of this machine";

/// Returns the profile named by the user: a bundled profile, or a file.
///
/// A bundled name takes precedence over a file of the same name, and the user is informed of the
/// ignored file. A path with a directory, such as `./two-socket`, is always the file.
///
/// # Errors
/// No such profile exists, or the file is not a valid profile.
pub fn find(name: &str) -> Result<Profile, CliError> {
    let file = Path::new(name);
    let is_bundled = BUNDLED.iter().any(|(known, _)| *known == name);
    if is_bundled && file.exists() {
        say!("faultless: --profile {name} is the bundled profile; ./{name} names the file");
    }
    if is_bundled || !file.exists() {
        return bundled(name);
    }
    let text = {
        // Reading a pipe may block.
        let _guard = interrupt::ends_at_once();
        read(file)
    };
    let text = text.map_err(|why| CliError::Usage(format!("--profile {name}: {why}")))?;
    Profile::parse(name, &text).map_err(|error| CliError::Usage(format!("--profile {error}")))
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

fn hint(name: &str) -> String {
    suggest::hint(name, BUNDLED.iter().map(|(known, _)| *known))
}

/// Prints the bundled profile named by `args` as a file, or the list of profiles and the format.
///
/// # Errors
/// No bundled profile has this name.
pub fn run(args: &ProfilesArgs) -> Result<(), CliError> {
    let mut out = io::stdout().lock();
    if let Some(name) = args.name.as_deref() {
        let found = BUNDLED.iter().find(|(known, _)| *known == name);
        let Some((_, text)) = found else {
            let names = BUNDLED.map(|(name, _)| name).join(", ");
            let error = format!("{name}: no such bundled profile; there are {names}{}", hint(name));
            return Err(CliError::Usage(error));
        };
        out.write_all(text.as_bytes())?;
        return Ok(());
    }
    let profiles: Result<Vec<Profile>, ProfileError> =
        BUNDLED.iter().map(|(name, text)| Profile::parse(name, text)).collect();
    let profiles = profiles.map_err(|error| CliError::Failed(error.to_string()))?;
    let mut table = table::plain();
    table.set_header(["profile", "CPUs", "machine"]);
    for profile in &profiles {
        let cpus = profile.cpus().to_string();
        table.add_row([profile.name.as_str(), cpus.as_str(), profile.summary.as_str()]);
    }
    writeln!(out, "{}\n\n{FORMAT}", table.trim_fmt())?;
    write_keys(&mut out, &profiles)?;
    writeln!(out, "\n{USES}")?;
    Ok(())
}

/// Prints each section of the format with its keys, and the values of the bundled profiles.
fn write_keys(out: &mut dyn Write, profiles: &[Profile]) -> Result<(), CliError> {
    let mut table = table::plain();
    let names = profiles.iter().map(|profile| profile.name.as_str());
    table.set_header(["key", "meaning"].into_iter().chain(names));
    for Section { name, meaning, optional, keys } in Profile::format() {
        let optional = if optional { " (optional)" } else { "" };
        table.add_row([format!("[{name}]"), format!("{meaning}{optional}")]);
        for (key, meaning) in keys {
            let full = format!("{name}.{key}");
            let value = |profile: &Profile| {
                let numbers = profile.numbers();
                let found = numbers.into_iter().find(|(known, _)| *known == full);
                found.map_or("-".to_owned(), |(_, number)| number.value.to_string())
            };
            let cells = [format!("  {key}"), meaning.to_owned()];
            table.add_row(cells.into_iter().chain(profiles.iter().map(value)));
        }
    }
    writeln!(out, "{}", table.trim_fmt())?;
    Ok(())
}
