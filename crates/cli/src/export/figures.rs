//! The figures of a result, as CSV and as OpenMetrics text.

use crate::error::CliError;
use faultless_analysis::{Basis, Context, Error, Figures, Number};
use prometheus_client::encoding::text;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;

/// The figures of a result.
#[derive(Debug, Default)]
pub struct Kept(Vec<Row>);

#[derive(Debug)]
struct Row {
    machine: String,
    workload: String,
    cpus: usize,
    setting: String,
    metric: String,
    unit: String,
    value: Number,
    basis: Basis,
}

impl Figures for Kept {
    fn figure(
        &mut self,
        context: &Context,
        metric: &str,
        unit: &str,
        value: Number,
    ) -> Result<(), Error> {
        let Context { machine, workload, cpus, setting, .. } = context;
        self.0.push(Row {
            machine: machine.clone(),
            workload: workload.clone(),
            cpus: *cpus,
            setting: setting.clone(),
            metric: metric.to_owned(),
            unit: unit.to_owned(),
            value,
            basis: context.basis(),
        });
        Ok(())
    }
}

impl Kept {
    /// Returns the figures as CSV, with a head.
    pub fn csv(&self) -> Result<Vec<u8>, CliError> {
        let failed = |error: csv::Error| CliError::failed("--export csv", error);
        let mut writer = csv::Writer::from_writer(Vec::new());
        let head = ["machine", "workload", "cpus", "setting", "metric", "unit", "value", "basis"];
        writer.write_record(head).map_err(failed)?;
        for Row { machine, workload, cpus, setting, metric, unit, value, basis } in &self.0 {
            let (cpus, value) = (cpus.to_string(), shown(*value));
            let name = basis.name();
            let row: [&str; 8] = [machine, workload, &cpus, setting, metric, unit, &value, name];
            writer.write_record(row).map_err(failed)?;
        }
        writer.into_inner().map_err(|error| CliError::failed("--export csv", error))
    }

    /// Returns the figures as gauges of OpenMetrics. The machine, the workload, the CPUs, the
    /// setting and the origin (`basis`) are labels.
    pub fn openmetrics(&self) -> Result<String, CliError> {
        type Gauges = Family<Vec<(String, String)>, Gauge<f64, AtomicU64>>;
        let mut families: BTreeMap<(String, &str), Gauges> = BTreeMap::new();
        for row in &self.0 {
            let labels = [
                ("machine", row.machine.clone()),
                ("workload", row.workload.clone()),
                ("cpus", row.cpus.to_string()),
                ("setting", row.setting.clone()),
                ("basis", row.basis.name().to_owned()),
            ];
            let labels = labels.map(|(name, value)| (name.to_owned(), value)).to_vec();
            let family = families.entry((name(&row.metric), &row.unit)).or_default();
            family.get_or_create(&labels).set(match row.value {
                Number::Whole(value) => value as f64,
                Number::Real(value) => value,
            });
        }
        let mut registry = Registry::with_prefix("faultless");
        for ((name, unit), family) in families {
            registry.register(name, format!("In {unit}"), family);
        }
        let mut out = String::new();
        text::encode(&mut out, &registry)
            .map_err(|error| CliError::failed("--export openmetrics", error))?;
        Ok(out)
    }
}

fn shown(value: Number) -> String {
    match value {
        Number::Whole(value) => value.to_string(),
        Number::Real(value) => value.to_string(),
    }
}

/// Returns the name of a metric with the characters that OpenMetrics permits.
fn name(metric: &str) -> String {
    metric.replace(|c: char| !c.is_ascii_alphanumeric() && c != '_', "_")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept() -> Kept {
        let mut kept = Kept::default();
        let mut context = Context::new("linux", "advise:a \"b\", c", 2);
        for (metric, unit, value) in
            [("faults", "count", Number::Whole(1 << 53)), ("p99.9", "ns", Number::Real(1.5))]
        {
            kept.figure(&context, metric, unit, value).expect("kept");
        }
        context.setting = "THP".into();
        let predicted = context.with_basis(Basis::Predicted);
        kept.figure(&predicted, "faults", "count", Number::Whole(7)).expect("kept");
        kept
    }

    #[test]
    fn csv_is_read_back() {
        let bytes = kept().csv().expect("encoded");
        let mut reader = csv::Reader::from_reader(&*bytes);
        let rows: Vec<_> = reader.records().map(|row| row.expect("a row")).collect();
        assert_eq!(rows.len(), 3);
        assert_eq!(&rows[0][1], "advise:a \"b\", c");
        assert_eq!((&rows[0][4], &rows[0][6]), ("faults", "9007199254740992"));
        assert_eq!((&rows[1][5], &rows[1][6]), ("ns", "1.5"));
        assert_eq!((&rows[0][7], &rows[2][7]), ("measured", "predicted"));
    }

    #[test]
    fn openmetrics_is_read_by_its_parser() {
        let text = kept().openmetrics().expect("encoded");
        let parsed = openmetrics_parser::openmetrics::parse_openmetrics(&text).expect("valid");
        let faults = parsed.families.get("faultless_faults").expect("a family");
        let bases: Vec<_> = faults
            .iter_samples()
            .map(|sample| {
                let labels = sample.get_labelset().expect("labels");
                labels.get_label_value("basis").expect("a basis").to_owned()
            })
            .collect();
        assert_eq!(bases.len(), 2, "{text}");
        assert!(["measured", "predicted"].iter().all(|it| bases.contains(&(*it).into())), "{text}");
        assert!(parsed.families.contains_key("faultless_p99_9"), "{text}");
    }
}
