//! The setting of the knobs of a run.

use crate::suggest;
use faultless::Knobs;
use faultless::{AnonVmaCheck, KNOBS, KnobError, Locking, Setting};
use faultless_native::Native;
use faultless_virtual::Virtual;
use serde_json::{Map, Value};
use std::mem;
use std::str::FromStr;

/// One `KNOB=VALUE` of the command line.
#[derive(Clone, Debug)]
pub struct Assignment {
    text: String,
    setting: Setting,
}

impl FromStr for Assignment {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let explained = |error| match error {
            KnobError::Unknown => {
                let knob = text.split('=').next().unwrap_or(text);
                format!("{error}{}", suggest::hint(knob, KNOBS.iter().map(|(name, ..)| *name)))
            }
            _ => error.to_string(),
        };
        Ok(Self { text: text.to_owned(), setting: text.parse().map_err(explained)? })
    }
}

impl Assignment {
    /// Returns the text given by the user.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Returns the name of the knob, as given by the user.
    pub fn knob(&self) -> &str {
        self.text.split('=').next().unwrap_or(&self.text)
    }

    /// Returns whether `other` sets the same knob, which may have two names.
    pub fn is_same(&self, other: &Self) -> bool {
        mem::discriminant(&self.setting) == mem::discriminant(&other.setting)
    }

    /// Returns the locking policy if this assignment sets the policy.
    pub fn locking(&self) -> Option<Locking> {
        match self.setting {
            Setting::Locking(locking) => Some(locking),
            _ => None,
        }
    }

    /// Returns the prefault order if this assignment sets the order.
    fn order(&self) -> Option<u8> {
        match self.setting {
            Setting::PrefaultMaxOrder(order) => Some(order),
            _ => None,
        }
    }

    /// Returns whether the assignment sets `deferred_flush`.
    pub fn is_deferred_flush(&self) -> bool {
        matches!(self.setting, Setting::DeferredFlush(_))
    }

    /// Returns the frames of a pool if this assignment sets `zeroed_pool`.
    fn pool(&self) -> Option<u64> {
        match self.setting {
            Setting::ZeroedPool(frames) => Some(frames),
            _ => None,
        }
    }
}

/// The prefault order, and the use of pre-zeroed frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Regime {
    /// `prefault_max_order`.
    pub order: u8,
    /// `zeroed_pool`: frames zeroed before the run.
    pub pool: u64,
}

impl Regime {
    /// Prefault off; each fault zeroes its frame.
    pub const OFF: Self = Self { order: 0, pool: 0 };

    /// Returns the name used in tables.
    pub fn name(self) -> String {
        let order = if self.order == 0 { "off".into() } else { format!("order {}", self.order) };
        if self.pool == 0 { order } else { format!("{order}, zeroed") }
    }
}

/// The knobs of one run. Unset knobs keep their defaults.
#[derive(Clone, Debug)]
pub struct Settings {
    /// How faults and writers are synchronised.
    pub locking: Locking,
    /// The time at which a fault requests the anon_vma.
    pub anon_vma_check: AnonVmaCheck,
    /// The prefault settings.
    pub regime: Regime,
    others: Vec<Assignment>,
}

impl Settings {
    /// Creates the default settings, changed by `given`. The last value of a knob takes effect.
    pub fn new(given: &[Assignment]) -> Self {
        let mut settings = Self {
            locking: Locking::Speculative,
            anon_vma_check: AnonVmaCheck::Late,
            regime: Regime { order: Knobs::default().prefault_max_order(), pool: 0 },
            others: Vec::new(),
        };
        given.iter().for_each(|assignment| settings.set(assignment));
        settings
    }

    /// Sets a knob.
    pub fn set(&mut self, assignment: &Assignment) {
        match assignment.setting {
            Setting::Locking(locking) => self.locking = locking,
            Setting::AnonVmaCheck(check) => self.anon_vma_check = check,
            Setting::PrefaultMaxOrder(order) => self.regime.order = order,
            Setting::ZeroedPool(frames) => self.regime.pool = frames,
            _ => self.others.push(assignment.clone()),
        }
    }

    /// Returns the same settings with another policy.
    pub fn with_locking(&self, locking: Locking) -> Self {
        Self { locking, ..self.clone() }
    }

    /// Returns the same settings with another check.
    pub fn with_check(&self, anon_vma_check: AnonVmaCheck) -> Self {
        Self { anon_vma_check, ..self.clone() }
    }

    /// Returns the same settings with other prefault settings.
    pub fn with_regime(&self, regime: Regime) -> Self {
        Self { regime, ..self.clone() }
    }

    /// Sets the knobs of the idle machine `native`, and lets its CPUs idle until the pools of
    /// zeroed frames are full.
    pub fn apply(&self, native: &Native) {
        let vm = native.vm();
        vm.set(Setting::Locking(self.locking));
        vm.set(Setting::AnonVmaCheck(self.anon_vma_check));
        vm.set(Setting::PrefaultMaxOrder(self.regime.order));
        vm.set(Setting::ZeroedPool(self.regime.pool));
        self.others.iter().for_each(|other| vm.set(other.setting));
        while native.zero_ahead(usize::MAX) != 0 {}
    }

    /// Sets the knobs of the simulated machine in the same way.
    ///
    /// # Errors
    /// Describes an invalid setting.
    pub fn apply_to_simulated(&self, system: &Virtual) -> Result<(), String> {
        let own = [
            format!("locking={}", self.locking.name()),
            format!("anon_vma_check={}", self.anon_vma_check.name()),
            format!("prefault_max_order={}", self.regime.order),
            format!("zeroed_pool={}", self.regime.pool),
        ];
        let others = self.others.iter().map(Assignment::text);
        own.iter().map(String::as_str).chain(others).try_for_each(|text| system.set(text))?;
        system.zero_ahead();
        Ok(())
    }

    /// Returns all knobs with the values in force. Without an explicit `frame_limit` the memory of
    /// the machine is the only limit, and the key is absent.
    pub fn knobs(&self) -> Map<String, Value> {
        let defaults = Knobs::default();
        let all: [(&str, Value); 14] = [
            ("locking", self.locking.name().into()),
            ("anon_vma_check", self.anon_vma_check.name().into()),
            ("max_map_count", defaults.max_map_count().into()),
            ("file_limit", defaults.file_limit().into()),
            ("stack_limit", defaults.stack_limit().into()),
            ("fault_around_pages", defaults.fault_around_pages().into()),
            ("prefault_max_order", self.regime.order.into()),
            ("zeroed_pool", self.regime.pool.into()),
            ("zero_on_free", u64::from(defaults.zero_on_free()).into()),
            ("edit_in_place", u64::from(defaults.edit_in_place()).into()),
            ("deferred_flush", u64::from(defaults.deferred_flush()).into()),
            ("huge_text", defaults.huge_text().name().into()),
            ("map_apart", defaults.map_apart().into()),
            ("shard_after", defaults.shard_after().into()),
        ];
        let others = self.others.iter().filter_map(|other| other.text.split_once('='));
        let number = |value: &str| value.parse::<u64>().map_or(value.into(), Value::from);
        let others = others.map(|(knob, value)| (knob, number(value)));
        all.into_iter().chain(others).map(|(knob, value)| (knob.to_owned(), value)).collect()
    }

    /// Returns the name used in results:
    /// `locking=speculative,anon_vma_check=late,prefault_max_order=0`.
    pub fn label(&self) -> String {
        let mut label = format!(
            "locking={},anon_vma_check={},prefault_max_order={}",
            self.locking.name(),
            self.anon_vma_check.name(),
            self.regime.order
        );
        if self.regime.pool != 0 {
            label.push_str(&format!(",zeroed_pool={}", self.regime.pool));
        }
        for other in &self.others {
            label.push(',');
            label.push_str(&other.text);
        }
        label
    }
}

/// Returns the prefault settings for a comparison of policies: off, unless `given` contains an
/// order.
pub fn regime_of_policies(given: &[Assignment]) -> Regime {
    Regime {
        order: given.iter().rev().find_map(Assignment::order).unwrap_or(0),
        pool: given.iter().rev().find_map(Assignment::pool).unwrap_or(0),
    }
}

/// Returns the policies to compare: the policies in `given`, or all.
pub fn policies(given: &[Assignment]) -> Vec<Locking> {
    let named: Vec<_> = given.iter().filter_map(Assignment::locking).collect();
    if named.is_empty() {
        return Locking::ALL.to_vec();
    }
    Locking::ALL.into_iter().filter(|locking| named.contains(locking)).collect()
}

/// Returns the prefault orders to compare with prefault off: the orders in `given`, or the default.
pub fn orders(given: &[Assignment]) -> Vec<u8> {
    let mut orders: Vec<_> = given.iter().filter_map(Assignment::order).collect();
    orders.retain(|order| *order > 0);
    if orders.is_empty() {
        orders.push(Knobs::default().prefault_max_order());
    }
    orders.sort_unstable();
    orders.dedup();
    orders
}

/// Returns the prefault settings to compare: off, the orders in `given` (or 3 and 5), and the last
/// order on pre-zeroed frames. The number of pre-zeroed frames is the value in `given`, or
/// `frames`.
pub fn regimes(given: &[Assignment], frames: u64) -> Vec<Regime> {
    let pool = given.iter().rev().find_map(Assignment::pool).unwrap_or(frames);
    let mut orders: Vec<_> = given.iter().filter_map(Assignment::order).collect();
    if orders.is_empty() {
        orders = vec![3, 5];
    }
    orders.push(0);
    orders.sort_unstable();
    orders.dedup();
    let last = orders.last().filter(|_| pool > 0).map(|&order| Regime { order, pool });
    orders.into_iter().map(|order| Regime { order, pool: 0 }).chain(last).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given(texts: &[&str]) -> Vec<Assignment> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn last_value_of_a_knob_applies() {
        let given = given(&["locking=mmap_lock", "max_map_count=9", "locking=per_vma"]);
        let default = Knobs::default().prefault_max_order();
        assert_eq!(
            Settings::new(&given).label(),
            format!(
                "locking=per_vma,anon_vma_check=late,prefault_max_order={default},max_map_count=9"
            )
        );
        assert_eq!(policies(&given), [Locking::MmapLock, Locking::PerVma]);
        assert_eq!(policies(&[]), Locking::ALL);
    }
    #[test]
    fn regimes_contain_each_order_once_and_off() {
        let names = |texts: &[&str]| {
            let regimes = regimes(&given(texts), 7);
            regimes.into_iter().map(Regime::name).collect::<Vec<_>>()
        };
        assert_eq!(names(&[]), ["off", "order 3", "order 5", "order 5, zeroed"]);
        let twice = ["prefault_max_order=9", "prefault_max_order=2", "prefault_max_order=9"];
        assert_eq!(names(&twice), ["off", "order 2", "order 9", "order 9, zeroed"]);
        assert_eq!(names(&["prefault_max_order=0"]), ["off", "off, zeroed"]);
        assert_eq!(names(&["zeroed_pool=0"]), ["off", "order 3", "order 5"]);
        let pool = |texts: &[&str]| regimes(&given(texts), 7).last().map(|regime| regime.pool);
        assert_eq!((pool(&[]), pool(&["zeroed_pool=8", "zeroed_pool=9"])), (Some(7), Some(9)));
        let settings = Settings::new(&[]).with_regime(Regime { order: 5, pool: 7 });
        assert!(settings.label().ends_with("prefault_max_order=5,zeroed_pool=7"));
    }
}
