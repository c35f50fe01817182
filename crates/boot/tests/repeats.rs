//! With the deterministic clock a run repeats byte for byte: output, report and counters.

mod common;

use common::{deterministic, run};
use faultless_boot::Machine;

#[track_caller]
fn repeats(machine: &Machine, name: &str, args: &[&str]) {
    let [one, two] = [(); 2].map(|()| run(machine, name, args));
    assert_eq!(one.end, two.end, "{name}: {one}");
    assert_eq!(one.output, two.output, "{name}");
    assert_eq!(one.errors, two.errors, "{name}");
    assert_eq!(one.report.counters, two.report.counters, "{name}");
    assert!(!one.output.is_empty(), "{name}: {one}");
}

#[test]
fn on_one_cpu() {
    repeats(&deterministic(), "rows", &["passes=1"]);
    repeats(&deterministic(), "workload", &["page_fault1", "size=1M", "passes=3", "threads=3"]);
}

#[test]
fn on_four_cpus() {
    let four = Machine { cpus: 4, ..deterministic() };
    repeats(&four, "counts", &["rounds=50"]);
    repeats(&four, "tlb", &["rounds=30"]);
}
