//! The faults of each process of a recording, and of all.

use super::{Style, table};
use faultless_analysis::number::{fixed, grouped, percent, plural};
use faultless_trace::event::ProcessSummary;

/// Processes with a row each.
const ROWS: usize = 10;

/// Returns the table of `processes`, the largest first, if there are several. `time`, if known, is
/// the time of all faults in nanoseconds, which is divided by the number of faults.
pub fn table(processes: &[ProcessSummary], time: Option<f64>, style: Style) -> Option<String> {
    if processes.len() < 2 {
        return None;
    }
    let mut all = ProcessSummary::default();
    processes.iter().for_each(|process| all.add(process));
    let mut head =
        vec!["process", "faults", "of all", "pages touched", "first touches", "of present pages"];
    head.extend(time.map(|_| "time"));
    let head: Vec<_> = head.into_iter().map(str::to_owned).collect();
    let mut table = table::numbers(&head, style);
    let mut row = |name: String, process: &ProcessSummary| {
        let mut cells = vec![
            name,
            grouped(process.faults),
            percent(process.faults, all.faults),
            grouped(process.pages),
            grouped(process.first_touches),
            grouped(process.present),
        ];
        let share = process.faults as f64 / all.faults.max(1) as f64;
        cells.extend(time.map(|time| format!("{} s", fixed(time * share / 1e9, 3))));
        table::row(&mut table, cells);
    };
    let (shown, others) = processes.split_at(processes.len().min(ROWS));
    for process in shown {
        row(name(process), process);
    }
    if !others.is_empty() {
        let mut rest = ProcessSummary::default();
        others.iter().for_each(|process| rest.add(process));
        row(plural(others.len() as u64, "other"), &rest);
    }
    row("all".to_owned(), &all);
    Some(table.to_string())
}

/// Returns the label of a process, and the number of its parent.
fn name(process: &ProcessSummary) -> String {
    let parent = process.parent.map_or(String::new(), |parent| format!(" (of {parent})"));
    process.label() + &parent
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(process: u32, faults: u64) -> ProcessSummary {
        let (name, pages) = ("worker".to_owned(), faults);
        let parent = process.checked_sub(1);
        ProcessSummary { process, parent, name, faults, pages, ..ProcessSummary::default() }
    }

    #[test]
    fn workers_of_one_name_are_distinguished_by_their_pids() {
        let with = |at, pid| ProcessSummary { pid: Some(pid), ..process(at, 9) };
        let text = table(&[with(1, 41), with(2, 42)], None, Style::new(false)).expect("two");
        for row in ["| 1 worker, PID 41 (of 0) ", "| 2 worker, PID 42 (of 1) "] {
            assert!(text.contains(row), "{text}");
        }
    }

    #[test]
    fn small_processes_share_a_row_and_all_add_up() {
        let style = Style::new(false);
        assert_eq!(table(&[process(0, 9)], None, style), None);
        let processes: Vec<_> = (0..12).map(|at| process(at, 100 - u64::from(at))).collect();
        let text = table(&processes, Some(2e9), style).expect("several");
        let cells = |name: &str| -> Vec<String> {
            let row = text.lines().find(|line| line.contains(name)).expect("a row");
            row.split('|').map(|cell| cell.trim().to_owned()).collect()
        };
        assert_eq!(cells("3 worker (of 2)")[2..5], ["97", "8.55 %", "97"]);
        assert_eq!(cells("2 others")[2..5], ["179", "15.78 %", "179"]);
        assert_eq!(cells("| all")[2..5], ["1,134", "100.00 %", "1,134"]);
        assert_eq!(cells("| all")[7], "2.000 s");
        assert!(!text.contains("10 worker") && text.contains("| 0 worker  "), "{text}");
    }
}
