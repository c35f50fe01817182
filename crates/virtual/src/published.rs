//! Published figures, which are printed beside simulated figures.

use serde::Deserialize;

/// A published figure.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Published {
    /// The table of the figure.
    pub table: String,
    /// The measured machine.
    pub machine: String,
    /// The measured quantity.
    pub row: String,
    /// Threads or processes, one for each CPU.
    pub cpus: usize,
    /// The unit of the value.
    pub unit: String,
    /// The figure.
    pub value: f64,
    /// The publication.
    pub source: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Rows {
    rows: Vec<Published>,
}

/// Returns all figures of `profiles/published.toml`.
pub fn all() -> Vec<Published> {
    let rows: Rows = toml::from_str(include_str!("../profiles/published.toml"))
        .expect("published.toml is well-formed; a test reads it");
    rows.rows
}
