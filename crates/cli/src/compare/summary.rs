//! The summary at the end: a bar chart and a table for each topic, one row for each subject.

use crate::error::CliError;
use crate::report::bars::{self, Bar};
use crate::report::columns::{ALIKE, ALIKE_MEANS, shown_gain};
use crate::report::effect::Share;
use crate::report::{Style, table};
use faultless::Locking;
use faultless_analysis::columns::{Column, Measure, Report, Topic};
use faultless_analysis::compare::Choice;
use faultless_analysis::number::{grouped, scaled};
use faultless_analysis::replay::Effect;
use faultless_analysis::settings::Regime;
use std::io::Write;

/// The selected column of a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Which {
    Policy(Locking),
    Regime(Regime),
    Linux,
}

impl Which {
    /// Returns the name in the head of the table; Linux by its version.
    fn name(self, linux: &str) -> String {
        match self {
            Self::Policy(locking) => locking.name().to_owned(),
            Self::Regime(regime) => regime.name(),
            Self::Linux => linux.to_owned(),
        }
    }

    /// Returns the column. Of several settings of a policy, the last is the default.
    fn of(self, report: &Report) -> Option<&Column> {
        let is = |column: &&Column| match (self, column.settings()) {
            (Self::Policy(locking), Some(settings)) => settings.locking == locking,
            (Self::Regime(regime), Some(settings)) => settings.regime == regime,
            (which, settings) => which == Self::Linux && settings.is_none(),
        };
        report.columns.iter().rev().find(is)
    }

    fn rate(self, report: &Report) -> Option<f64> {
        self.of(report)?.median().map(|sample| report.measure().rate(sample))
    }

    /// Returns the gain over `base`, and its text.
    fn gain(self, base: Self, report: &Report) -> Option<(f64, String)> {
        let (column, base) = (self.of(report)?, base.of(report)?);
        report.gain(column, base).zip(shown_gain(report, column, base))
    }
}

type Reports<'r> = [&'r (String, Report)];

/// Prints the summary of `all`.
pub fn print(
    out: &mut dyn Write,
    all: &[(String, Report)],
    choice: &Choice,
    style: Style,
) -> Result<(), CliError> {
    let about = |topic| all.iter().filter(move |(_, report)| report.topic == topic).collect();
    let (locking, prefault): (Vec<_>, Vec<_>) = (about(Topic::Locking), about(Topic::Prefault));
    if !locking.is_empty() {
        locking_summary(out, &locking, &choice.policies, style)?;
    }
    if !prefault.is_empty() {
        prefault_summary(out, &prefault, choice, style)?;
    }
    Ok(())
}

fn locking_summary(
    out: &mut dyn Write,
    reports: &Reports<'_>,
    policies: &[Locking],
    style: Style,
) -> Result<(), CliError> {
    let linux = reports.iter().flat_map(|(_, report)| &report.columns);
    let linux = linux.map(|column| &column.context.machine).find(|machine| *machine != "native");
    let policies: Vec<_> = policies.iter().map(|locking| Which::Policy(*locking)).collect();
    let Some((&last, earlier)) = policies.split_last() else { return Ok(()) };
    let pairs: Vec<_> = earlier.iter().map(|policy| (last, *policy)).collect();
    writeln!(out, "\nSummary: locking, prefault off (prefault_max_order=0)")?;
    gains(out, reports, pairs.first().copied(), style)?;
    rates(out, reports, &policies, &pairs, linux.map(String::as_str), style)?;
    if let Some(linux) = linux {
        writeln!(
            out,
            "{linux} is this host's kernel. Each of its faults includes a hardware exception, which the \
             native\nmachine does not have; each native load and store goes through a software MMU, \
             which the\nhost does not have. Compare policies within native; {linux} only shows the scale."
        )?;
    }
    Ok(())
}

fn prefault_summary(
    out: &mut dyn Write,
    reports: &Reports<'_>,
    choice: &Choice,
    style: Style,
) -> Result<(), CliError> {
    let regimes: Vec<_> = choice.regimes.iter().map(|regime| Which::Regime(*regime)).collect();
    let Some((&off, later)) = regimes.split_first() else { return Ok(()) };
    let pairs: Vec<_> = later.iter().map(|regime| (*regime, off)).collect();
    writeln!(out, "\nSummary: prefault (locking={})", choice.settings.locking.name())?;
    gains(out, reports, pairs.last().copied(), style)?;
    rates(out, reports, &regimes, &pairs, None, style)?;
    let pool = choice.regimes.last().map_or(0, |regime| regime.pool);
    if pool > 0 {
        writeln!(
            out,
            "Zeroed: {} MiB of frames were zeroed while idle before each run. No figure here \
             includes this cost\n(`bench zeroing` in the repository measures it). A run that \
             needs more frames zeroes them in faults.",
            pool.saturating_mul(faultless::PAGE_SIZE) >> 20
        )?;
    }
    effects(out, reports, &choice.regimes, style)
}

/// Prints the bar chart: the gain of the first of the pair over the second.
fn gains(
    out: &mut dyn Write,
    reports: &Reports<'_>,
    pair: Option<(Which, Which)>,
    style: Style,
) -> Result<(), CliError> {
    let Some((of, base)) = pair else { return Ok(()) };
    let bar = |(name, report): &&(String, Report)| {
        let (value, shown) = of.gain(base, report)?;
        Some(Bar { name: name.clone(), value, shown, note: String::new() })
    };
    let bars: Vec<_> = reports.iter().filter_map(bar).collect();
    if !bars.is_empty() {
        writeln!(out, "  {} against {}", of.name(""), base.name(""))?;
        writeln!(out, "{}", bars::draw(&bars, style))?;
    }
    Ok(())
}

/// Prints a row for each subject: its rate in each column, the ratio of each pair, and Linux's
/// rate.
fn rates(
    out: &mut dyn Write,
    reports: &Reports<'_>,
    columns: &[Which],
    pairs: &[(Which, Which)],
    linux: Option<&str>,
    style: Style,
) -> Result<(), CliError> {
    let mut head = vec!["per second".to_owned(), "of".to_owned()];
    head.extend(columns.iter().map(|which| which.name("").replace(", ", "\n")));
    head.extend(pairs.iter().map(|(of, base)| format!("{}\n/ {}", of.name(""), base.name(""))));
    head.extend(linux.map(|linux| Which::Linux.name(linux)));
    let mut table = table::numbers(&head, style);
    let mut alike = false;
    for (name, report) in reports {
        let of = match report.measure() {
            Measure::Faults => "faults",
            Measure::Operations => report.unit,
        };
        let rate = |which: &Which| {
            which.rate(report).map_or("-".to_owned(), |rate| scaled(rate).trim().to_owned())
        };
        let gains: Vec<_> = pairs
            .iter()
            .map(|(of, base)| of.gain(*base, report).map_or("-".to_owned(), |(_, shown)| shown))
            .collect();
        alike |= gains.iter().any(|gain| gain.starts_with(ALIKE));
        let mut cells = vec![name.clone(), of.to_owned()];
        cells.extend(columns.iter().map(rate));
        cells.extend(gains);
        cells.extend(linux.map(|_| rate(&Which::Linux)));
        table::row(&mut table, cells);
    }
    writeln!(out, "{table}")?;
    if alike {
        writeln!(out, "{ALIKE} {ALIKE_MEANS}")?;
    }
    Ok(())
}

/// Prints the effect of prefault on each recording, in counts without times, and their mean.
fn effects(
    out: &mut dyn Write,
    reports: &Reports<'_>,
    regimes: &[Regime],
    style: Style,
) -> Result<(), CliError> {
    // Pre-zeroed frames change no count.
    let orders: Vec<_> =
        regimes.iter().filter(|regime| regime.order > 0 && regime.pool == 0).collect();
    let effect = |report: &Report, regime: &Regime| Which::Regime(*regime).of(report)?.effect;
    let of = |(name, report): &&(String, Report)| -> Option<(String, Vec<Effect>)> {
        let effects: Option<Vec<_>> = orders.iter().map(|regime| effect(report, regime)).collect();
        effects.filter(|effects| !effects.is_empty()).map(|effects| (name.clone(), effects))
    };
    let rows: Vec<_> = reports.iter().filter_map(of).collect();
    if rows.is_empty() {
        return Ok(());
    }
    let mut head = vec!["of a recording".to_owned(), "first\ntouches".to_owned()];
    for share in Share::ALL {
        head.extend(orders.iter().map(|regime| format!("{},\n{}", share.head, regime.name())));
    }
    let mut table = table::numbers(&head, style);
    for (name, effects) in &rows {
        let mut cells = vec![name.clone(), grouped(effects[0].touches)];
        cells.extend(Share::ALL.iter().flat_map(|share| effects.iter().map(|it| share.show(it))));
        table::row(&mut table, cells);
    }
    let mut means = vec!["mean".to_owned(), String::new()];
    for share in Share::ALL {
        for at in 0..orders.len() {
            let effects: Vec<_> = rows.iter().map(|(_, effects)| &effects[at]).collect();
            means.push(share.mean(&effects));
        }
    }
    table::row(&mut table, means);
    writeln!(out, "\n{table}")?;
    writeln!(
        out,
        "Counted separately from times, on one CPU and in the order of the recording. First \
         touches: of private anonymous\nmemory. Upper bound: the saving of a perfect predictor \
         with windows of the same size. Unused: prefaulted pages that\nwere unmapped before \
         their first use. Resident growth: of the peak resident memory of each process."
    )?;
    Ok(())
}
