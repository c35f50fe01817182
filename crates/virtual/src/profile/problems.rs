//! Checks the text of a profile field by field. Each problem names the field, its value, and an
//! example of a valid line.

use super::{BUNDLED, Profile, Section};
use core::fmt;
use toml::{Table, Value};

/// Values in examples of the optional section, which the bundled profiles do not have.
const MEASURED: [(&str, f64); 13] = [
    ("access_ns", 1.1),
    ("allocate_ns", 20.0),
    ("fault_ipc", 1.2),
    ("map_ipc", 1.2),
    ("brk_ipc", 1.2),
    ("protect_ipc", 1.2),
    ("fork_ipc", 1.2),
    ("zero_own_ns", 80.0),
    ("zero_shared_ns", 160.0),
    ("copy_own_ns", 100.0),
    ("copy_shared_ns", 200.0),
    ("shared_ns", 14.0),
    ("shared_lines", 524_288.0),
];
/// Keys whose value divides a time.
const RATES: [&str; 3] = ["cpu.ghz", "cpu.instructions_per_cycle", "memory.gigabytes_per_second"];

/// A field of a profile that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The field: `section.key`, `[section]`, `name` or `summary`.
    pub field: String,
    /// The present value; `None` if the field is missing.
    pub value: Option<String>,
    /// The requirement, as the end of a sentence.
    pub must: String,
    /// A valid form of the field.
    pub example: Option<String>,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.field)?;
        if let Some(value) = &self.value {
            write!(f, " = {value}")?;
        }
        write!(f, ": {}", self.must)?;
        if let Some(example) = &self.example {
            write!(f, "; example: {example}")?;
        }
        Ok(())
    }
}

/// Returns the unit of a key's value.
pub fn unit(key: &str) -> &'static str {
    match key {
        "sockets" => "sockets",
        "complexes_per_socket" => "complexes",
        "cpus_per_complex" => "CPUs",
        "ghz" => "GHz",
        "gigabytes_per_second" => "10^9 bytes/s",
        "occupancy" => "share, 0 to 1",
        "instructions_per_cycle" => "per cycle",
        _ if key.ends_with("_ipc") => "per cycle",
        _ if key.ends_with("_lines") => "lines of 64 B",
        _ => "ns",
    }
}

/// Returns an example of the value of a key.
pub(super) fn example_value(section: &str, key: &str) -> f64 {
    let of_bundled = || {
        let (_, text) = BUNDLED[0];
        let table: Table = text.parse().ok()?;
        match table.get(section)?.get(key)?.get("value")? {
            Value::Integer(value) => Some(*value as f64),
            value => value.as_float(),
        }
    };
    let measured = MEASURED.iter().find(|(known, _)| *known == key).map(|(_, value)| *value);
    of_bundled().or(measured).unwrap_or(1.0)
}

fn example(section: &str, key: &str) -> String {
    let value = example_value(section, key);
    format!("[{section}] {key} = {{ value = {value}, source = \"measured on this machine\" }}")
}

/// Returns all problems of the profile in `text`.
///
/// # Errors
/// Returns the message of the parser if `text` is not TOML.
pub(super) fn problems(text: &str) -> Result<Vec<Problem>, String> {
    let table: Table = text.parse().map_err(|error: toml::de::Error| error.to_string())?;
    let mut found = Vec::new();
    for (field, example) in [("name", "mine"), ("summary", "2 × 32 cores, 3 GHz")] {
        let is_text = |value: &Value| value.as_str().is_some_and(|text| !text.trim().is_empty());
        if !table.get(field).is_some_and(is_text) {
            found.push(Problem {
                field: field.to_owned(),
                value: table.get(field).map(Value::to_string),
                must: "must be a text in quotes".to_owned(),
                example: Some(format!("{field} = \"{example}\"")),
            });
        }
    }
    let sections = Profile::format();
    for (field, value) in &table {
        let known = sections.iter().any(|section| section.name == field);
        if !known && field != "name" && field != "summary" {
            let names: Vec<_> = sections.iter().map(|section| section.name).collect();
            found.push(Problem {
                field: if value.is_table() { format!("[{field}]") } else { field.clone() },
                value: None,
                must: format!(
                    "unknown field; the fields are name, summary, and the sections {}",
                    names.join(", ")
                ),
                example: None,
            });
        }
    }
    for section in &sections {
        in_section(section, table.get(section.name), &mut found);
    }
    Ok(found)
}

fn in_section(section: &Section, value: Option<&Value>, found: &mut Vec<Problem>) {
    let Section { name, keys, .. } = section;
    let Some(table) = value.and_then(Value::as_table) else {
        if value.is_some() || !section.optional {
            found.push(Problem {
                field: format!("[{name}]"),
                value: value.map(Value::to_string),
                must: match value {
                    Some(_) => "must be a section".to_owned(),
                    None => "the section is missing".to_owned(),
                },
                example: Some(example(name, keys[0].0)),
            });
        }
        return;
    };
    for (key, value) in table {
        if !keys.iter().any(|(known, _)| known == key) {
            let names: Vec<_> = keys.iter().map(|(known, _)| *known).collect();
            found.push(Problem {
                field: format!("{name}.{key}"),
                value: Some(value.to_string()),
                must: format!("unknown key; the keys of [{name}] are {}", names.join(", ")),
                example: None,
            });
        }
    }
    for (key, _) in keys {
        let full = format!("{name}.{key}");
        if let Err((value, must)) = number(&full, table.get(*key)) {
            let example = Some(example(name, key));
            found.push(Problem { field: full, value, must: must.to_owned(), example });
        }
    }
}

/// Checks a number. Returns its present value, if any, and the requirement.
fn number(key: &str, value: Option<&Value>) -> Result<(), (Option<String>, &'static str)> {
    let Some(present) = value else { return Err((None, "the key is missing")) };
    let whole = || Some(present.to_string());
    let Some(table) = present.as_table() else {
        return Err((whole(), "must be a table with a value and a source"));
    };
    if table.keys().any(|key| key != "value" && key != "source") {
        return Err((whole(), "must have no other fields than value and source"));
    }
    let value = match table.get("value") {
        Some(Value::Integer(value)) => *value as f64,
        Some(Value::Float(value)) => *value,
        _ => return Err((whole(), "needs a value, which is a number without quotes")),
    };
    let shown = Some(value.to_string());
    if !value.is_finite() || !(0.0..=1e9).contains(&value) {
        return Err((shown, "must be between 0 and 1000000000"));
    }
    let counts = key.starts_with("topology.") || key.ends_with("_lines");
    if counts && (value.fract() != 0.0 || value < 1.0) {
        return Err((shown, "must be a whole number from 1 on"));
    }
    if (RATES.contains(&key) || key.ends_with("_ipc")) && value < 0.01 {
        return Err((shown, "must be at least 0.01"));
    }
    if key == "line.occupancy" && value > 1.0 {
        return Err((shown, "must be between 0 and 1"));
    }
    if key == "topology.sockets" && value > 64.0 {
        return Err((shown, "must be at most 64"));
    }
    match table.get("source").and_then(Value::as_str) {
        Some(source) if !source.trim().is_empty() => Ok(()),
        _ => Err((shown, "needs a source, which is a text in quotes")),
    }
}
