//! The setting of the knobs that a run is made under.

use faultless::{AnonVmaCheck, KnobError, Locking, Machine, Setting, Vm};
use std::str::FromStr;

/// One `KNOB=VALUE` of the command line.
#[derive(Clone, Debug)]
pub struct Assignment {
    text: String,
    setting: Setting,
}

impl FromStr for Assignment {
    type Err = KnobError;

    fn from_str(text: &str) -> Result<Self, KnobError> {
        Ok(Self { text: text.to_owned(), setting: text.parse()? })
    }
}

impl Assignment {
    /// As it was given.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The policy that it chooses, if it is about that.
    pub fn locking(&self) -> Option<Locking> {
        match self.setting {
            Setting::Locking(locking) => Some(locking),
            _ => None,
        }
    }
}

/// The knobs of one run; those not named keep their defaults.
#[derive(Clone, Debug)]
pub struct Settings {
    /// What keeps faults and writers apart.
    pub locking: Locking,
    /// When a fault asks for the reverse-map root.
    pub anon_vma_check: AnonVmaCheck,
    others: Vec<Assignment>,
}

impl Settings {
    /// The defaults, changed by `given`; of several for one knob the last holds.
    pub fn new(given: &[Assignment]) -> Self {
        let mut settings = Self {
            locking: Locking::Speculative,
            anon_vma_check: AnonVmaCheck::Late,
            others: Vec::new(),
        };
        for assignment in given {
            match assignment.setting {
                Setting::Locking(locking) => settings.locking = locking,
                Setting::AnonVmaCheck(check) => settings.anon_vma_check = check,
                _ => settings.others.push(assignment.clone()),
            }
        }
        settings
    }

    /// The same under another policy.
    pub fn with_locking(&self, locking: Locking) -> Self {
        Self { locking, ..self.clone() }
    }

    /// The same with another check.
    pub fn with_check(&self, anon_vma_check: AnonVmaCheck) -> Self {
        Self { anon_vma_check, ..self.clone() }
    }

    /// Sets the knobs of `vm`.
    pub fn apply<M: Machine>(&self, vm: &Vm<M>) {
        vm.set(Setting::Locking(self.locking));
        vm.set(Setting::AnonVmaCheck(self.anon_vma_check));
        self.others.iter().for_each(|other| vm.set(other.setting));
    }

    /// As results name it: `locking=speculative,anon_vma_check=late`.
    pub fn label(&self) -> String {
        let mut label = format!(
            "locking={},anon_vma_check={}",
            self.locking.name(),
            self.anon_vma_check.name()
        );
        for other in &self.others {
            label.push(',');
            label.push_str(&other.text);
        }
        label
    }
}

/// The policies to compare: those that `given` names, or all.
pub fn policies(given: &[Assignment]) -> Vec<Locking> {
    let named: Vec<_> = given.iter().filter_map(Assignment::locking).collect();
    if named.is_empty() {
        return Locking::ALL.to_vec();
    }
    Locking::ALL.into_iter().filter(|locking| named.contains(locking)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given(texts: &[&str]) -> Vec<Assignment> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn the_last_of_a_knob_holds_and_others_are_named() {
        let given = given(&["locking=mmap_lock", "max_map_count=9", "locking=per_vma"]);
        assert_eq!(
            Settings::new(&given).label(),
            "locking=per_vma,anon_vma_check=late,max_map_count=9"
        );
        assert_eq!(policies(&given), [Locking::MmapLock, Locking::PerVma]);
        assert_eq!(policies(&[]), Locking::ALL);
    }
}
