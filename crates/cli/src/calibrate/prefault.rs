//! Which order of prefault pays, if an exception takes what it takes on this host.
//!
//! A page costs its share of an exception, the instructions of its fault or of its part of a window, and, where prefaulted pages
//! stay unused, their share of the zeroing of a page and of instructions. Zeroing of pages that are used is the same with every order, and left out.

use super::hardware::Faults;
use crate::error::CliError;
use crate::report::{Style, table};
use faultless_virtual::Profile;
use std::io::Write;

/// An order, and what it does to a page.
#[derive(Clone, Copy, Debug)]
struct Order {
    order: u32,
    /// Instructions of a page in sequence: `bench instructions`, sequential_write_per_page; SPECIFICATION, 'Prefault'.
    instructions: f64,
    /// Of the first touches of the seven recordings: the share that is no fault any more (SPECIFICATION, 'Prefault').
    saved: f64,
    /// Of the prefaulted pages of the recordings: the share that stays unused.
    unused: f64,
}

const ORDERS: [Order; 3] = [
    Order { order: 0, instructions: 237.9, saved: 0.0, unused: 0.0 },
    Order { order: 3, instructions: 250.3, saved: 0.765, unused: 0.021 },
    Order { order: 5, instructions: 112.7, saved: 0.851, unused: 0.027 },
];

/// What the host makes of it, in nanoseconds.
#[derive(Clone, Copy, Debug)]
struct Costs {
    exception: f64,
    instruction: f64,
    zero: f64,
}

impl Order {
    /// Pages of a window, all of which a program uses in sequence.
    fn window(self) -> f64 {
        f64::from(1u32 << self.order)
    }

    /// A page in sequence.
    fn in_sequence(self, costs: Costs) -> f64 {
        costs.exception / self.window() + self.instructions * costs.instruction
    }

    /// A page of the recorded programs: those that are not saved are faults of order 0, and unused ones are paid for, too.
    fn recorded(self, costs: Costs) -> f64 {
        let prefaulted = self.saved / (1.0 - self.unused);
        let alone = costs.exception + ORDERS[0].instructions * costs.instruction;
        let ahead = self.instructions * costs.instruction;
        let unused = prefaulted * self.unused * costs.zero;
        (1.0 - self.saved) * alone + prefaulted * ahead + unused
    }
}

/// The order with which a page costs least.
fn best(cost: impl Fn(Order) -> f64) -> Order {
    ORDERS.into_iter().min_by(|one, other| cost(*one).total_cmp(&cost(*other))).unwrap_or(ORDERS[0])
}

/// From which cost of an exception on an order pays, against order 0, in sequence.
fn pays_from(order: Order, instruction: f64) -> f64 {
    let more = (order.instructions - ORDERS[0].instructions) * instruction;
    (more / (1.0 - 1.0 / order.window())).max(0.0)
}

/// Prints which order pays on this host, and the sum that tells it.
pub fn print(
    out: &mut dyn Write,
    faults: &Faults,
    profile: &Profile,
    style: Style,
) -> Result<(), CliError> {
    let instruction = 1.0 / (profile.cpu.ghz.value * profile.cpu.instructions_per_cycle.value);
    let costs = Costs {
        exception: faults.exception(),
        instruction,
        zero: profile.memory.zero_page_ns.value,
    };
    writeln!(
        out,
        "\nPrefault: a page of the host costs {:.0} ns at its first touch, and {:.0} ns if one call populates it with others (MADV_POPULATE_WRITE). The difference,\n\
         {:.0} ns, is taken as an exception; a system call in which nothing is done takes {:.0} ns. An instruction takes {:.3} ns here ({} a cycle, {} GHz).\n",
        faults.touch,
        faults.populate,
        costs.exception,
        faults.call,
        instruction,
        profile.cpu.instructions_per_cycle.value,
        profile.cpu.ghz.value,
    )?;
    let head = [
        "prefault_max_order",
        "exceptions\na page",
        "instructions\na page",
        "in sequence,\nns a page",
        "recorded programs,\nns a page",
        "without exceptions,\nns a page",
    ];
    let mut table = table::numbers(&head.map(str::to_owned), style);
    let free = Costs { exception: 0.0, ..costs };
    for order in ORDERS {
        table::row(
            &mut table,
            [
                order.order.to_string(),
                format!("1/{}", order.window()),
                format!("{:.1}", order.instructions),
                format!("{:.1}", order.in_sequence(costs)),
                format!("{:.1}", order.recorded(costs)),
                format!("{:.1}", order.in_sequence(free)),
            ],
        );
    }
    writeln!(out, "{table}\n")?;
    let (sequence, recorded) =
        (best(|order| order.in_sequence(costs)), best(|order| order.recorded(costs)));
    writeln!(
        out,
        "In sequence order {} pays: {:.0} / {} + {:.1} × {:.3} = {:.1} ns a page. For the recorded programs (order {} saves {:.1} % of the faults, {:.1} % of its \
         pages\nstay unused) order {} pays: {:.1} ns a page, {:.1} ns with prefault off.",
        sequence.order,
        costs.exception,
        sequence.window(),
        sequence.instructions,
        instruction,
        sequence.in_sequence(costs),
        recorded.order,
        100.0 * recorded.saved,
        100.0 * recorded.unused,
        recorded.order,
        recorded.recorded(costs),
        ORDERS[0].recorded(costs),
    )?;
    let [_, three, five] = ORDERS;
    writeln!(
        out,
        "Against order 0, order 3 pays from {:.1} ns an exception on: ({} - {}) × {instruction:.3} / (1 - 1/8). Order 5 {}.",
        pays_from(three, instruction),
        three.instructions,
        ORDERS[0].instructions,
        if pays_from(five, instruction) == 0.0 {
            "pays without any".to_owned()
        } else {
            format!("pays from {:.1} ns on", pays_from(five, instruction))
        },
    )?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_follows_the_exception() {
        let costs = |exception| Costs { exception, instruction: 0.5, zero: 300.0 };
        let [off, three, five] = ORDERS;
        let near = |value: f64, expected: f64| assert!((value - expected).abs() < 1e-9, "{value}");
        near(three.in_sequence(costs(80.0)), 10.0 + 125.15);
        near(off.recorded(costs(80.0)), 80.0 + 118.95);
        // 12.4 instructions more, and 7/8 of an exception less.
        let even = pays_from(three, 0.5);
        near(even, 6.2 / 0.875);
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
        assert_eq!(best(|order| order.recorded(costs(2000.0))).order, 5);
    }

    #[test]
    fn the_sum_is_shown() {
        let profile = super::super::profile::base().expect("the bundled profile is good");
        let mut out = Vec::new();
        let faults = Faults { touch: 900.0, populate: 500.0, call: 100.0 };
        let style = Style { terminal: false, width: 100 };
        print(&mut out, &faults, &profile, style).expect("it is a vector");
        let out = String::from_utf8(out).expect("text");
        for says in ["400 ns, is taken as an exception", "order 5 pays: 400 / 32 + 112.7 ×", "1/8"]
        {
            assert!(out.contains(says), "{says}: {out}");
        }
    }
}
