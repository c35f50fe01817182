//! `faultless profile check`: checks a profile file.

use super::find::{is_bundled, parse_file};
use super::list::is_assumed;
use crate::error::CliError;
use faultless::MAX_CPUS;
use faultless_virtual::Profile;
use std::io::{self, Write};
use std::path::PathBuf;

#[derive(Debug, clap::Args)]
pub struct CheckArgs {
    /// Check this file
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
}

/// Checks the file, and prints its machine.
///
/// # Errors
/// The file cannot be read, or is not a valid profile.
pub fn run(args: &CheckArgs) -> Result<(), CliError> {
    let file = args.file.display().to_string();
    let profile = parse_file(&args.file).map_err(CliError::Usage)?;
    let numbers = profile.numbers();
    let assumed = numbers.iter().filter(|(_, number)| is_assumed(number));
    let assumed: Vec<_> = assumed.map(|(name, _)| name.as_str()).collect();
    let mut out = io::stdout().lock();
    writeln!(out, "{file}: valid: {profile}")?;
    let of = &profile.topology;
    writeln!(
        out,
        "CPUs: {} ({} sockets × {} complexes × {} CPUs)",
        profile.cpus(),
        of.sockets.value,
        of.complexes_per_socket.value,
        of.cpus_per_complex.value,
    )?;
    let listed =
        if assumed.is_empty() { String::new() } else { format!(": {}", assumed.join(", ")) };
    writeln!(out, "Numbers: {}, of them assumed: {}{listed}", numbers.len(), assumed.len())?;
    for remark in remarks(&profile) {
        writeln!(out, "Remark: {remark}")?;
    }
    Ok(())
}

/// Returns remarks about numbers that are valid, and may be mistakes.
fn remarks(profile: &Profile) -> Vec<String> {
    let mut found = Vec::new();
    let line = &profile.line;
    let costs = [
        ("own_ns", &line.own_ns),
        ("far_ns", &line.far_ns),
        ("complex_ns", &line.complex_ns),
        ("socket_ns", &line.socket_ns),
        ("remote_ns", &line.remote_ns),
    ];
    for pair in costs.windows(2) {
        let [(near, near_cost), (far, far_cost)] = [pair[0], pair[1]];
        if near_cost.value > far_cost.value {
            found.push(format!(
                "line.{near} = {} is above line.{far} = {}, although the line is nearer",
                near_cost.value, far_cost.value
            ));
        }
    }
    if line.memory_ns.value > line.remote_memory_ns.value {
        found.push(format!(
            "line.memory_ns = {} is above line.remote_memory_ns = {}, although the memory is nearer",
            line.memory_ns.value, line.remote_memory_ns.value
        ));
    }
    if profile.cpus() > MAX_CPUS {
        found.push(format!(
            "topology: {} CPUs, of which the simulator runs at most {MAX_CPUS}",
            profile.cpus()
        ));
    }
    if is_bundled(&profile.name) {
        found.push(format!(
            "name = \"{}\" is the name of a bundled profile: results of both have the same name",
            profile.name
        ));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use faultless_virtual::profile::BUNDLED;

    #[test]
    fn bundled_profiles_have_no_remark_but_their_name() {
        for (name, text) in BUNDLED {
            let profile = Profile::parse(name, text).expect("a bundled profile");
            let remarks = remarks(&profile);
            assert!(remarks.len() == 1 && remarks[0].starts_with("name = "), "{remarks:?}");
        }
    }

    #[test]
    fn a_near_line_above_a_far_line_has_a_remark() {
        let (_, text) = BUNDLED[0];
        let mut profile = Profile::parse("mine", text).expect("a bundled profile");
        profile.name = "mine".to_owned();
        assert!(remarks(&profile).is_empty());
        profile.line.complex_ns.value = 1000.0;
        profile.topology.cpus_per_complex.value = 100.0;
        let remarks = remarks(&profile).join("\n");
        assert!(remarks.contains("line.complex_ns = 1000 is above line.socket_ns"), "{remarks}");
        assert!(remarks.contains("2400 CPUs"), "{remarks}");
    }
}
