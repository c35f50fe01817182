//! Parsers for Linux's formats in `/proc`.

use crate::mem::{PAGE, Region};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;

/// Returns the text of `path`, or a message.
///
/// # Errors
/// The error, with the path.
pub fn text(path: &str) -> Result<String, String> {
    fs::read_to_string(path).map_err(|error| format!("{path}: {error}"))
}

/// Returns the lines `name value` of `/proc/vmstat`.
///
/// # Errors
/// A missing or malformed line.
pub fn vmstat() -> Result<BTreeMap<String, u64>, String> {
    text("/proc/vmstat")?
        .lines()
        .map(|line| {
            let (name, value) =
                line.split_once(' ').ok_or_else(|| format!("/proc/vmstat: the line {line:?}"))?;
            let value =
                value.parse().map_err(|_| format!("/proc/vmstat: the value of {line:?}"))?;
            Ok((name.to_owned(), value))
        })
        .collect()
}

/// Returns the fields `Name: value kB` of `/proc/meminfo` or a status file, in bytes if the unit
/// is `kB`.
///
/// # Errors
/// A missing or malformed line.
pub fn fields(path: &str) -> Result<BTreeMap<String, String>, String> {
    text(path)?
        .lines()
        .map(|line| {
            let (name, value) =
                line.split_once(':').ok_or_else(|| format!("{path}: the line {line:?}"))?;
            Ok((name.to_owned(), value.trim().to_owned()))
        })
        .collect()
}

/// Returns the field `name` of `fields`, a number of `kB`, in bytes.
///
/// # Errors
/// A missing or malformed field.
pub fn kilobytes(fields: &BTreeMap<String, String>, name: &str) -> Result<u64, String> {
    let value = fields.get(name).ok_or_else(|| format!("no field {name}"))?;
    value
        .strip_suffix(" kB")
        .and_then(|number| number.trim().parse::<u64>().ok())
        .map(|number| number << 10)
        .ok_or_else(|| format!("the field {name} is {value:?}"))
}

/// Returns the rows of `/proc/interrupts`: label and counts by CPU, with the words after the
/// counts.
///
/// # Errors
/// A missing or malformed line.
pub fn interrupts() -> Result<BTreeMap<String, (Vec<u64>, String)>, String> {
    let text = text("/proc/interrupts")?;
    let mut lines = text.lines();
    let head = lines.next().unwrap_or_default();
    let cpus: Vec<_> = head.split_whitespace().collect();
    if cpus.is_empty() || !cpus.iter().all(|cpu| cpu.starts_with("CPU")) {
        return Err(format!("/proc/interrupts: the head {head:?}"));
    }
    lines
        .map(|line| {
            let (label, rest) =
                line.split_once(':').ok_or_else(|| format!("/proc/interrupts: {line:?}"))?;
            let words: Vec<_> = rest.split_whitespace().collect();
            // A few rows describe the whole machine and have one count.
            let counts: Vec<u64> =
                words.iter().take(cpus.len()).map_while(|word| word.parse().ok()).collect();
            let what = words[counts.len()..].join(" ");
            Ok((label.trim().to_owned(), (counts, what)))
        })
        .collect()
}

/// Returns the TLB shootdowns for which CPUs were interrupted, by CPU: the row `TLB` of
/// `/proc/interrupts`.
///
/// # Errors
/// A missing or malformed line.
pub fn shootdowns() -> Result<Vec<u64>, String> {
    let (counts, _) = interrupts()?.remove("TLB").ok_or("/proc/interrupts: no row TLB")?;
    Ok(counts)
}

/// Returns the entries of `/proc/self/pagemap` for the pages of a region.
///
/// # Errors
/// A failed read.
pub fn page_map(region: &Region) -> Result<Vec<u64>, String> {
    let file = File::open("/proc/self/pagemap").map_err(|error| format!("pagemap: {error}"))?;
    let mut bytes = vec![0; (region.len() / PAGE * 8) as usize];
    let read = file.read_exact_at(&mut bytes, region.start() / PAGE * 8);
    read.map_err(|error| format!("reading pagemap: {error}"))?;
    let words = bytes.chunks_exact(8);
    Ok(words.filter_map(|word| word.try_into().ok().map(u64::from_le_bytes)).collect())
}
