//! One possible setting, its predicted saving, and the way to apply the setting to a run.

use super::preload::HugeText;
use crate::number;
use std::path::PathBuf;

/// Faults below which a change cannot be distinguished from chance.
const FEW_FAULTS: f64 = 200.0;
/// The smallest share of the predicted change in faults that shows an effect.
const LEAST_MOVED: f64 = 0.1;

/// The way to put an item into force for one run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Apply {
    /// Environment variables.
    Environment(Vec<(String, String)>),
    /// A setting of the whole system: a file, and the value to write.
    Sysfs(PathBuf, String),
    /// `prctl(PR_SET_THP_DISABLE)`.
    WithoutThp,
    /// The preloaded library populates blocks and mappings of at least this number of bytes.
    Populate(u64),
    /// The preloaded library populates large blocks ahead of their use, by at most this number of
    /// bytes.
    PrefaultAhead(u64),
    /// The preloaded library populates mappings of files of at least this number of bytes.
    PopulateFiles(u64),
    /// The preloaded library moves the program's text to huge pages at the start.
    HugeText(HugeText),
    /// The item cannot be applied to a run.
    Nothing,
}

impl Apply {
    /// Returns the way that sets these environment variables.
    pub fn environment<const N: usize>(variables: [(&str, String); N]) -> Self {
        Self::Environment(variables.map(|(name, value)| (name.to_owned(), value)).to_vec())
    }
}

impl Apply {
    /// Returns whether the way needs the preloaded library.
    pub fn needs_library(&self) -> bool {
        matches!(
            self,
            Self::Populate(_) | Self::PrefaultAhead(_) | Self::PopulateFiles(_) | Self::HugeText(_)
        )
    }
}

/// One possible setting.
#[derive(Clone, Debug)]
pub struct Item {
    /// The name of the row.
    pub name: String,
    /// The instruction, in words or as a command.
    pub action: String,
    /// Nanoseconds of processor time saved; negative for a cost. If the host takes free memory
    /// back, this is the value for memory taken back.
    pub saving: f64,
    /// The saving for memory that was not taken back, in which folios of the largest size are
    /// cheaper. [`predict`](super::items::predict) sets this value.
    pub at_best: f64,
    /// Resident bytes that would be unused, at the peak.
    pub unused: u64,
    /// The number of faults saved, negative for additional faults; `None` if the item saves in
    /// another way.
    pub spared: Option<f64>,
    /// The way to apply the item.
    pub apply: Apply,
    /// Effects missing from the prediction, and experiences of other users.
    pub remarks: Vec<&'static str>,
}

/// One possible setting whose saving does not follow from a recording of faults.
#[derive(Clone, Debug)]
pub struct Open {
    /// The name of the row.
    pub name: String,
    /// The instruction, in words or as a command.
    pub action: String,
    /// The known facts, and the reason for the missing prediction.
    pub why: String,
    /// The way to apply the item.
    pub apply: Apply,
}

impl Item {
    /// Returns whether a run with `spared` fewer faults shows the effect of the item. A run with an
    /// unchanged number of faults shows no effect of a setting that saves faults.
    pub fn moved(&self, spared: f64) -> bool {
        self.spared.is_none_or(|predicted| {
            predicted.abs() < FEW_FAULTS || spared / predicted >= LEAST_MOVED
        })
    }

    /// Returns whether the sign of the saving depends on the host having taken memory back.
    pub fn depends(&self) -> bool {
        (self.saving < 0.0) != (self.at_best < 0.0)
    }
}

/// Formats bytes for people, also small numbers.
pub fn size(bytes: u64) -> String {
    if bytes < 1 << 20 { format!("{} KiB", bytes >> 10) } else { number::size(bytes) }
}
