//! What `/proc` says, in Linux's formats.

use crate::mem::{PAGE, Region};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;

/// The text of `path`, or a message.
///
/// # Errors
/// What went wrong, with the path.
pub fn text(path: &str) -> Result<String, String> {
    fs::read_to_string(path).map_err(|error| format!("{path}: {error}"))
}

/// The lines `name value` of `/proc/vmstat`.
///
/// # Errors
/// What is missing or odd.
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

/// The fields `Name: value kB` of `/proc/meminfo` or a status file, in bytes where they are in `kB`.
///
/// # Errors
/// What is missing or odd.
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

/// The field `name` of `fields`, a number of `kB`, in bytes.
///
/// # Errors
/// What is missing or odd.
pub fn kilobytes(fields: &BTreeMap<String, String>, name: &str) -> Result<u64, String> {
    let value = fields.get(name).ok_or_else(|| format!("there is no field {name}"))?;
    value
        .strip_suffix(" kB")
        .and_then(|number| number.trim().parse::<u64>().ok())
        .map(|number| number << 10)
        .ok_or_else(|| format!("the field {name} is {value:?}"))
}

/// The rows of `/proc/interrupts`: label and counts by CPU, with the words behind them.
///
/// # Errors
/// What is missing or odd.
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
            // A few rows are of the machine as a whole and have one count.
            let counts: Vec<u64> =
                words.iter().take(cpus.len()).map_while(|word| word.parse().ok()).collect();
            let what = words[counts.len()..].join(" ");
            Ok((label.trim().to_owned(), (counts, what)))
        })
        .collect()
}

/// TLB shootdowns that CPUs were interrupted for, by CPU: the row `TLB` of `/proc/interrupts`.
///
/// # Errors
/// What is missing or odd.
pub fn shootdowns() -> Result<Vec<u64>, String> {
    let (counts, _) = interrupts()?.remove("TLB").ok_or("/proc/interrupts: there is no row TLB")?;
    Ok(counts)
}

/// What `/proc/self/pagemap` says of the pages of a region.
///
/// # Errors
/// What could not be read.
pub fn page_map(region: &Region) -> Result<Vec<u64>, String> {
    let file = File::open("/proc/self/pagemap").map_err(|error| format!("pagemap: {error}"))?;
    let mut bytes = vec![0; (region.len() / PAGE * 8) as usize];
    let read = file.read_exact_at(&mut bytes, region.start() / PAGE * 8);
    read.map_err(|error| format!("reading pagemap: {error}"))?;
    let words = bytes.chunks_exact(8);
    Ok(words.filter_map(|word| word.try_into().ok().map(u64::from_le_bytes)).collect())
}
