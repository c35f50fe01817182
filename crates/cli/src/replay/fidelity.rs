//! The agreement of a replay's faults with the recorded faults, as printed.

use crate::error::CliError;
use crate::report::json::Json;
use crate::report::say;
use faultless_analysis::Context;
use faultless_analysis::columns::Report;
use faultless_analysis::replay::{Fidelity, Source};

/// Returns the fidelity and the context of the first configuration of `report`, a replay of
/// `source`, if its prefault is off.
pub fn fidelity<'r>(source: &Source, report: &'r Report) -> Option<(Fidelity, &'r Context)> {
    let first = report.columns.first()?;
    first.settings().filter(|settings| settings.regime.order == 0)?;
    Some((Fidelity::new(&source.trace, first.median()?.faults), &first.context))
}

/// Reports whether the faults of `report`, a replay of `source`, match the recorded faults, with a
/// warning if they do not.
pub fn print_report(source: &Source, report: &Report, json: &mut Json) -> Result<(), CliError> {
    let found = fidelity(source, report);
    found.map_or(Ok(()), |(fidelity, context)| print(fidelity, &source.name, json, context))
}

/// Reports whether the faults match the recorded faults, with a warning if they do not.
pub fn print(
    fidelity: Fidelity,
    name: &str,
    json: &mut Json,
    context: &Context,
) -> Result<(), CliError> {
    if let Some(warning) = fidelity.warning(name) {
        say!("faultless: {warning}");
    }
    Ok(fidelity.figures(json, context)?)
}
