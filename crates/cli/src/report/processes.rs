//! The faults of each process of a recording, and of all.
//!
//! A list with more processes than [`ROWS`] has a row for each program name, with the number of its
//! processes: a build or a script starts hundreds of processes of few programs.

use super::{Style, table};
use faultless_analysis::number::{fixed, grouped, percent, plural};
use faultless_trace::event::ProcessSummary;
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// The largest number of rows. If there are more processes, processes of one name share a row.
const ROWS: usize = 10;

/// One process, or the processes of one name.
#[derive(Clone, Debug)]
pub struct Group<'a> {
    /// The processes, the process with the most faults first.
    pub processes: Vec<&'a ProcessSummary>,
    /// The sum of their counts.
    pub sum: ProcessSummary,
}

impl<'a> Group<'a> {
    fn of(processes: Vec<&'a ProcessSummary>) -> Self {
        let mut sum = ProcessSummary::default();
        processes.iter().for_each(|process| sum.add(process));
        Self { processes, sum }
    }

    /// Returns the name of the program and the number of processes; for a single process `one` of
    /// this process.
    pub fn name(&self, one: impl Fn(&ProcessSummary) -> String) -> String {
        match &self.processes[..] {
            [process] => one(process),
            several => {
                let name = several.first().map_or("", |process| &process.name);
                let name = if name.is_empty() { "?" } else { name };
                format!("{name}, {} processes", grouped(several.len() as u64))
            }
        }
    }
}

/// Returns the rows of `processes`, the row with the most faults first: processes, or names if
/// there are many processes.
pub fn groups(processes: &[ProcessSummary]) -> Vec<Group<'_>> {
    let mut groups: Vec<_> = if processes.len() <= ROWS {
        processes.iter().map(|process| Group::of(vec![process])).collect()
    } else {
        let mut names: BTreeMap<&str, Vec<_>> = BTreeMap::new();
        for process in processes {
            names.entry(&process.name).or_default().push(process);
        }
        names.into_values().map(Group::of).collect()
    };
    groups.sort_by_key(|group| Reverse(group.sum.faults));
    groups
}

/// Returns the table of `processes`, the largest first, if there are several. `time`, if known, is
/// the time of all faults in nanoseconds, which is divided by the number of faults.
pub fn table(processes: &[ProcessSummary], time: Option<f64>, style: Style) -> Option<String> {
    if processes.len() < 2 {
        return None;
    }
    let all = Group::of(processes.iter().collect()).sum;
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
    let groups = groups(processes);
    let (shown, others) = groups.split_at(groups.len().min(ROWS));
    for group in shown {
        row(group.name(name), &group.sum);
    }
    if !others.is_empty() {
        let rest = Group::of(others.iter().flat_map(|group| group.processes.clone()).collect());
        row(plural(others.len() as u64, "other"), &rest.sum);
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
        let named =
            |at| ProcessSummary { name: format!("w{at}"), ..process(at, 100 - u64::from(at)) };
        let processes: Vec<_> = (0..12).map(named).collect();
        let text = table(&processes, Some(2e9), style).expect("several");
        let cells = |name: &str| -> Vec<String> {
            let row = text.lines().find(|line| line.contains(name)).expect("a row");
            row.split('|').map(|cell| cell.trim().to_owned()).collect()
        };
        assert_eq!(cells("3 w3 (of 2)")[2..5], ["97", "8.55 %", "97"]);
        assert_eq!(cells("2 others")[2..5], ["179", "15.78 %", "179"]);
        assert_eq!(cells("| all")[2..5], ["1,134", "100.00 %", "1,134"]);
        assert_eq!(cells("| all")[7], "2.000 s");
        assert!(!text.contains("10 w10") && text.contains("| 0 w0  "), "{text}");
    }
    #[test]
    fn many_processes_of_a_name_share_a_row() {
        let named = |at: u32, name: &str| ProcessSummary { name: name.into(), ..process(at, 3) };
        let cat = (1..=500).map(|at| named(at, "cat"));
        let script = ProcessSummary { faults: 400, ..named(0, "sh") };
        let processes: Vec<_> = [script].into_iter().chain(cat).collect();
        let text = table(&processes, None, Style::new(false)).expect("several");
        let rows: Vec<&str> = text
            .lines()
            .skip(2)
            .map(|line| line.split('|').nth(1).expect("a cell").trim())
            .collect();
        assert_eq!(rows, ["cat, 500 processes", "0 sh", "all"], "{text}");
        assert!(text.contains("  1,500 | ") && text.contains("  1,900 | "), "{text}");
        // Ten processes have a row each.
        let text = table(&processes[..10], None, Style::new(false)).expect("several");
        assert_eq!(text.matches(" cat (of ").count(), 9, "{text}");
    }
}
