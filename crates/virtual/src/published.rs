//! Figures that others published, which simulated ones are printed beside.

use serde::Deserialize;

/// A published figure.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Published {
    /// The table that it belongs to.
    pub table: String,
    /// The machine that it was measured on.
    pub machine: String,
    /// What was measured.
    pub row: String,
    /// Threads or processes that ran, one for each CPU.
    pub cpus: usize,
    /// Of the value.
    pub unit: String,
    /// The figure.
    pub value: f64,
    /// Who published it, and where.
    pub source: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Rows {
    rows: Vec<Published>,
}

/// All figures of `profiles/published.toml`.
pub fn all() -> Vec<Published> {
    let rows: Rows = toml::from_str(include_str!("../profiles/published.toml"))
        .expect("published.toml is well-formed; a test reads it");
    rows.rows
}
