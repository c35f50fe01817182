//! Prints the prefault order with the lowest cost, and the calculation behind it.

use crate::error::CliError;
use crate::report::{Style, filled, table};
use faultless_analysis::calibrate::faults::Faults;
use faultless_analysis::calibrate::prefault::{Costs, ORDERS, best, pays_from};
use faultless_virtual::Profile;
use std::io::Write;

/// The bundled profiles with a column.
const MACHINES: [&str; 3] = ["two-socket", "384-core", "eight-socket"];

/// Returns the cost of a page of the recorded programs with each order, `here` and on the hardware
/// of some bundled profiles.
fn recorded_on(here: Costs, style: Style) -> Result<String, CliError> {
    let mut head = ["prefault_max_order", "faults\nsaved", "unused", "growth of\nresident pages"]
        .map(str::to_owned)
        .to_vec();
    let mut machines = vec![("here", here)];
    for name in MACHINES {
        let profile = Profile::bundled(name)
            .map_err(|error| CliError::failed(format_args!("the profile {name}"), error))?;
        machines.push((name, Costs::of(&profile, profile.exception.fault_ns.value)));
    }
    head.extend(
        machines
            .iter()
            .map(|(name, costs)| format!("{name}: exception\n{:.0} ns", costs.exception)),
    );
    let mut table = table::numbers(&head, style);
    for order in ORDERS {
        let share = |part: f64| format!("{:.1} %", 100.0 * part);
        let costs = machines.iter().map(|(_, costs)| format!("{:.1}", order.recorded(*costs)));
        let row =
            [order.order.to_string(), share(order.saved), share(order.unused), share(order.growth)];
        table::row(&mut table, row.into_iter().chain(costs));
    }
    Ok(table.to_string())
}

/// Returns the cost of a page in sequence with each order.
fn in_sequence(costs: Costs, style: Style) -> comfy_table::Table {
    let head = [
        "prefault_max_order",
        "exceptions\na page",
        "instructions\na page",
        "in sequence,\nns a page",
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
                format!("{:.1}", order.in_sequence(free)),
            ],
        );
    }
    table
}

/// Prints the orders with the lowest costs.
fn print_choice(out: &mut dyn Write, costs: Costs) -> Result<(), CliError> {
    let instruction = costs.instruction;
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
    let [_, _, _, three, _, five, _] = ORDERS;
    writeln!(
        out,
        "Against order 0, order 3 pays from {:.1} ns an exception on: ({:.1} - {:.1}) × {instruction:.3} / (1 - 1/8). Order 5 {}.",
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

/// Prints the best order on this host, and the calculation behind it.
pub fn print(
    out: &mut dyn Write,
    faults: &Faults,
    (profile, fits): (&Profile, bool),
    style: Style,
) -> Result<(), CliError> {
    let costs = Costs::of(profile, faults.exception());
    let instruction = costs.instruction;
    writeln!(
        out,
        "\nPrefault: a page of the host costs {:.0} ns at its first touch, and {:.0} ns if one \
         call populates many pages (MADV_POPULATE_WRITE). The difference,\n{:.0} ns, is taken as \
         an exception; an empty system call takes {:.0} ns. An instruction takes {:.3} ns here \
         ({} a cycle, {} GHz).\n",
        faults.touch,
        faults.populate,
        costs.exception,
        faults.call,
        instruction,
        profile.cpu.instructions_per_cycle.value,
        profile.cpu.ghz.value,
    )?;
    writeln!(
        out,
        "{}\n\nThe recorded programs, ns a page, here and on the hardware of bundled profiles:\n\n{}\n",
        in_sequence(costs, style),
        recorded_on(costs, style)?
    )?;
    if fits {
        return print_choice(out, costs);
    }
    let rests = "No order is recommended: these figures depend on the fitted time of an instruction, and some paths could not be fitted (*). Repeat the calibration while no other programs run.";
    writeln!(out, "{}", filled(rests, style.width))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calculation_is_printed() {
        let profile =
            faultless_analysis::calibrate::profile::base().expect("a valid bundled profile");
        let mut out = Vec::new();
        let faults = Faults { touch: 900.0, populate: 500.0, call: 100.0 };
        let style = Style { terminal: false, width: 100 };
        print(&mut out, &faults, (&profile, true), style).expect("writes to a vector");
        let out = String::from_utf8(out).expect("text");
        let mut disturbed = Vec::new();
        print(&mut disturbed, &faults, (&profile, false), style).expect("writes to a vector");
        let disturbed = String::from_utf8(disturbed).expect("text");
        assert!(disturbed.contains("No order is recommended"), "{disturbed}");
        assert!(!disturbed.contains("pays"), "a conclusion from disturbed values: {disturbed}");
        for says in ["400 ns, is taken as an exception", "order 6 pays: 400 / 64 + 93.0 ×", "1/8"]
        {
            assert!(out.contains(says), "{says}: {out}");
        }
    }
}
