//! Finds the prefault order with the lowest cost, for the exception cost of this host and of the
//! bundled profiles.
//!
//! The cost of a page consists of its share of an exception, the instructions of its fault or of
//! its part of a window, and, for unused prefaulted pages, their share of instructions and of the
//! zeroing of a page. The zeroing of used pages is the same with every order, and is excluded. The
//! default of `prefault_max_order` follows from this (ARCHITECTURE, 'The default order').

use super::counted::SEQUENTIAL;
use faultless_virtual::Profile;

/// An order, and its effect on a page.
#[derive(Clone, Copy, Debug)]
pub struct Order {
    /// `prefault_max_order`.
    pub order: u32,
    /// Instructions of a page in sequence: [`SEQUENTIAL`], and between these orders the sum of a
    /// page and of its part of a window.
    pub instructions: f64,
    /// The share of first touches that no longer fault, as the mean of the seven recordings
    /// (`faultless replay`).
    pub saved: f64,
    /// Faults that map more than their own page, per first touch.
    pub windows: f64,
    /// Prefaulted pages per first touch.
    pub prefaulted: f64,
    /// The unused share of the prefaulted pages of all recordings.
    pub unused: f64,
    /// The relative growth of the peak of resident pages, mean.
    pub growth: f64,
}

/// The measured orders, from order 0 on.
#[rustfmt::skip]
pub const ORDERS: [Order; 7] = [
    Order { order: 0, instructions: ALONE, saved: 0.0, windows: 0.0, prefaulted: 0.0, unused: 0.0, growth: 0.0 },
    Order { order: 1, instructions: in_window(1), saved: 0.438, windows: 0.451, prefaulted: 0.451, unused: 0.012, growth: 0.004 },
    Order { order: 2, instructions: in_window(2), saved: 0.661, windows: 0.260, prefaulted: 0.684, unused: 0.017, growth: 0.008 },
    Order { order: 3, instructions: in_window(3), saved: 0.773, windows: 0.158, prefaulted: 0.802, unused: 0.020, growth: 0.012 },
    Order { order: 4, instructions: in_window(4), saved: 0.830, windows: 0.105, prefaulted: 0.863, unused: 0.024, growth: 0.016 },
    Order { order: 5, instructions: in_window(5), saved: 0.859, windows: 0.078, prefaulted: 0.890, unused: 0.028, growth: 0.018 },
    Order { order: 6, instructions: in_window(6), saved: 0.872, windows: 0.065, prefaulted: 0.906, unused: 0.032, growth: 0.022 },
];

/// Instructions of a fault that maps one page.
const ALONE: f64 = SEQUENTIAL[0].1;
/// Instructions of a window, and of each of its pages, derived from the instructions in sequence at
/// orders 3 and 5, whose windows have 8 and 32 pages.
const WINDOW: f64 = (SEQUENTIAL[1].1 - SEQUENTIAL[2].1) / (1.0 / 8.0 - 1.0 / 32.0);
const PAGE: f64 = SEQUENTIAL[2].1 - WINDOW / 32.0;

/// Returns the instructions of a page in a window of `order`.
const fn in_window(order: u32) -> f64 {
    WINDOW / (1u32 << order) as f64 + PAGE
}

/// Costs on a host, in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub struct Costs {
    /// An exception of a page fault.
    pub exception: f64,
    /// An instruction.
    pub instruction: f64,
    /// The zeroing of a page.
    pub zero: f64,
}

impl Order {
    /// Returns the pages of a window, all of which a program uses in sequence.
    pub fn window(self) -> f64 {
        f64::from(1u32 << self.order)
    }

    /// Returns the cost of a page in sequence, in nanoseconds.
    pub fn in_sequence(self, costs: Costs) -> f64 {
        costs.exception / self.window() + self.instructions * costs.instruction
    }

    /// Returns the cost of a page in the recorded programs, in nanoseconds. A remaining fault is an
    /// exception, and maps one page or a window. The cost of unused pages is included.
    pub fn recorded(self, costs: Costs) -> f64 {
        let faults = 1.0 - self.saved;
        let alone = (faults - self.windows).max(0.0) * ALONE;
        let windows = self.windows * WINDOW + (self.windows + self.prefaulted) * PAGE;
        let unused = self.prefaulted * self.unused * costs.zero;
        faults * costs.exception + (alone + windows) * costs.instruction + unused
    }
}

impl Costs {
    /// Creates the costs of the hardware of `profile`, with an exception of `exception`
    /// nanoseconds.
    pub fn of(profile: &Profile, exception: f64) -> Self {
        let instruction = 1.0 / (profile.cpu.ghz.value * profile.cpu.instructions_per_cycle.value);
        Self { exception, instruction, zero: profile.memory.zero_page_ns.value }
    }
}

/// Returns the order with the lowest cost of a page.
pub fn best(cost: impl Fn(Order) -> f64) -> Order {
    ORDERS.into_iter().min_by(|one, other| cost(*one).total_cmp(&cost(*other))).unwrap_or(ORDERS[0])
}

/// Returns the exception cost from which an order is cheaper than order 0, in sequence,
/// in nanoseconds.
pub fn pays_from(order: Order, instruction: f64) -> f64 {
    let more = (order.instructions - ORDERS[0].instructions) * instruction;
    (more / (1.0 - 1.0 / order.window())).max(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::Effect;

    #[test]
    fn best_order_follows_the_exception_cost() {
        let costs = |exception| Costs { exception, instruction: 0.5, zero: 300.0 };
        let [off, _, _, three, _, five, _] = ORDERS;
        let near = |value: f64, expected: f64| assert!((value - expected).abs() < 1e-9, "{value}");
        near(three.in_sequence(costs(80.0)), 10.0 + 126.785);
        near(off.recorded(costs(80.0)), 80.0 + 110.495);
        // 32.58 instructions more, and 7/8 of an exception less.
        let even = pays_from(three, 0.5);
        near(even, 16.29 / 0.875);
        assert!(three.in_sequence(costs(even + 1.0)) < off.in_sequence(costs(even + 1.0)));
        assert!(three.in_sequence(costs(even - 1.0)) > off.in_sequence(costs(even - 1.0)));
        assert_eq!(pays_from(five, 0.5), 0.0);
        let choice = |exception: f64| {
            [off, three].into_iter().min_by(|one, other| {
                one.recorded(costs(exception)).total_cmp(&other.recorded(costs(exception)))
            })
        };
        assert_eq!(choice(0.0).map(|it| it.order), Some(0), "unused pages cost, and save nothing");
        assert_eq!(choice(2000.0).map(|it| it.order), Some(3));
        assert_eq!(best(|order| order.recorded(costs(2000.0))).order, 6);
    }

    #[test]
    fn counted_orders_have_their_counts() {
        for (order, counted) in SEQUENTIAL {
            let instructions = ORDERS[order as usize].instructions;
            assert!((instructions - counted).abs() < 1e-9, "order {order}: {instructions}");
        }
        assert!((1_400.0..1_550.0).contains(&WINDOW) && (60.0..80.0).contains(&PAGE));
    }

    /// The default is the last order that saves at least a tenth of the time of the previous order,
    /// with the cheapest exception: see ARCHITECTURE.
    #[test]
    fn default_order_follows_from_the_table() {
        let profile = Profile::bundled("two-socket").expect("a bundled profile");
        let costs = Costs::of(&profile, profile.exception.fault_ns.value);
        let pays = |pair: &&[Order]| pair[1].recorded(costs) <= 0.9 * pair[0].recorded(costs);
        let last = ORDERS[1..].windows(2).take_while(pays).last().map(|pair| pair[1].order);
        assert_eq!(last, Some(u32::from(faultless::Knobs::default().prefault_max_order())));
    }

    /// Checks the figures above against the recordings.
    #[test]
    fn shares_match_the_recordings() {
        use crate::replay::{Source, prefault::effects};
        use crate::settings::{Regime, Settings};
        use faultless_trace::recordings;
        let orders = [ORDERS[3], ORDERS[5]];
        let regimes = orders.map(|it| Regime { order: it.order as u8, pool: 0 });
        let of = |recording| {
            let source = Source::shipped(recording).expect("a bundled recording");
            effects(&source, &Settings::new(&[]), &regimes)
                .expect("a replay that runs")
                .expect("not interrupted")
        };
        let all: Vec<_> = recordings::all().iter().map(of).collect();
        for (at, order) in orders.into_iter().enumerate() {
            let mean = |part: fn(&Effect) -> u64, whole: fn(&Effect) -> u64| {
                let share =
                    |effects: &Vec<Effect>| part(&effects[at]) as f64 / whole(&effects[at]) as f64;
                all.iter().map(share).sum::<f64>() / all.len() as f64
            };
            let sum =
                |of: fn(&Effect) -> u64| all.iter().map(|effects| of(&effects[at])).sum::<u64>();
            let unused = sum(Effect::unused) as f64 / sum(Effect::mapped) as f64;
            let windows = |effect: &Effect| effect.prefault[0];
            for (found, expected) in [
                (mean(|it| it.saved, |it| it.touches), order.saved),
                (mean(windows, |it| it.touches), order.windows),
                (mean(Effect::mapped, |it| it.touches), order.prefaulted),
                (unused, order.unused),
                (mean(|it| it.peak - it.peak_off, |it| it.peak_off), order.growth),
            ] {
                assert!(
                    (found - expected).abs() <= 0.001,
                    "order {}: {found}, not {expected}",
                    order.order
                );
            }
        }
    }
}
