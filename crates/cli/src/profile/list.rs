//! `faultless profile list`: the bundled profiles, and the format of a profile.

use crate::error::CliError;
use crate::report::table;
use faultless_virtual::profile::{BUNDLED, ProfileError, Section, unit};
use faultless_virtual::{Number, Profile};
use std::io::{self, Write};

/// The rules of the format, beside the list of fields.
const FORMAT: &str = "\
A profile is a TOML file with a name, a summary, and sections of numbers:

    name = \"mine\"
    summary = \"the machine, in one line\"

    [line]
    own_ns = { value = 1.1, source = \"where the number is from\" }

Each number requires a value and a source. A file must have every key of every section; only
[measured] may be absent. Values are from 0 to 10^9. The simulation reads values only, so a source
may be any text that is not empty; a source that begins with \"assumed:\" marks a number without a
publication.
";

/// Commands that use a profile.
const USES: &str = "\
faultless profile show two-socket > mine.toml  print a bundled profile, to be changed
faultless profile new mine > mine.toml         write a commented file, to be filled in
faultless profile check mine.toml              check it
faultless scale pft --profile mine.toml        simulate with it
faultless calibrate --output mine.toml         measure the profile of this machine

A word without `/` and without an extension is a bundled name; any other text is a file.";

/// Prints the bundled profiles and the format.
///
/// # Errors
/// The output cannot be written.
pub fn run() -> Result<(), CliError> {
    let mut out = io::stdout().lock();
    let profiles: Result<Vec<Profile>, ProfileError> =
        BUNDLED.iter().map(|(name, text)| Profile::parse(name, text)).collect();
    let profiles = profiles.map_err(|error| CliError::Failed(error.to_string()))?;
    let mut table = table::plain();
    table.set_header(["profile", "CPUs", "numbers assumed", "machine"]);
    for profile in &profiles {
        let numbers = profile.numbers();
        let assumed = numbers.iter().filter(|(_, number)| is_assumed(number)).count();
        let (cpus, assumed) =
            (profile.cpus().to_string(), format!("{assumed} of {}", numbers.len()));
        table.add_row([
            profile.name.as_str(),
            cpus.as_str(),
            assumed.as_str(),
            profile.summary.as_str(),
        ]);
    }
    writeln!(out, "{}\n\n{FORMAT}", table.trim_fmt())?;
    write_keys(&mut out, &profiles[0])?;
    writeln!(out, "\n{USES}")?;
    Ok(())
}

/// Returns whether a number is marked as assumed.
pub fn is_assumed(number: &Number) -> bool {
    number.source.trim_start().starts_with("assumed:")
}

/// Prints each section of the format with its keys, and their values in `example`.
fn write_keys(out: &mut dyn Write, example: &Profile) -> Result<(), CliError> {
    let mut table = table::plain();
    table.set_header(["key", "unit", example.name.as_str(), "meaning"]);
    let numbers = example.numbers();
    for Section { name, meaning, optional, keys } in Profile::format() {
        let optional = if optional { " (optional)" } else { "" };
        let head = [format!("[{name}]"), String::new(), String::new()];
        table.add_row(head.into_iter().chain([format!("{meaning}{optional}")]));
        for (key, meaning) in keys {
            let full = format!("{name}.{key}");
            let found = numbers.iter().find(|(known, _)| *known == full);
            let value = found.map_or("-".to_owned(), |(_, number)| number.value.to_string());
            table.add_row([format!("  {key}"), unit(key).to_owned(), value, meaning.to_owned()]);
        }
    }
    writeln!(out, "{}", table.trim_fmt())?;
    Ok(())
}
