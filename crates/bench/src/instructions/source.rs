//! The functions of source lines.
//!
//! Callgrind names the function that contains an instruction in the program, and the line of its
//! source. The compiler inlines most functions of a short call, so the names of the program hide
//! how a call divides its work. The line still belongs to the inlined function. Sources are
//! formatted, so the function of a line is the closest `fn` above that is indented less.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

/// A function, or a whole file without readable source.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Function {
    /// The name; empty for the whole file.
    pub name: String,
    /// The path of the file, as in the profile.
    pub file: String,
}

/// Returns the functions with their cost by themselves, the highest first. `lines` has the cost of
/// each line of each file.
pub fn functions(lines: &HashMap<(String, u64), u64>) -> Vec<(Function, u64)> {
    let mut sources = HashMap::new();
    let mut costs = BTreeMap::<Function, u64>::new();
    for ((file, line), cost) in lines {
        let source: &Option<String> = sources.entry(file).or_insert_with(|| source(file));
        let name = source.as_deref().and_then(|source| function_of(source, *line));
        let name = name.unwrap_or_default().to_owned();
        *costs.entry(Function { name, file: file.clone() }).or_default() += cost;
    }
    let mut costs: Vec<_> = costs.into_iter().collect();
    // Functions of equal cost stay in the order of their names.
    costs.sort_by_key(|(_, cost)| Reverse(*cost));
    costs
}

/// Reads a source file of this repository. Paths of the profile may be relative to its root.
fn source(file: &str) -> Option<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2)?;
    std::fs::read_to_string(root.join(file)).ok()
}

/// Returns the name of the function that contains line `number`, counted from 1.
fn function_of(source: &str, number: u64) -> Option<&str> {
    let lines: Vec<_> = source.lines().take(usize::try_from(number).ok()?).collect();
    let indent = |line: &str| line.len() - line.trim_start().len();
    let (last, above) = lines.split_last()?;
    if let Some(name) = declared(last) {
        return Some(name);
    }
    // The end of a function is indented like its beginning.
    let ends = last.trim_start().starts_with(['}', ')']);
    let within = indent(last) + usize::from(ends);
    above.iter().rev().filter(|line| indent(line) < within).find_map(|line| declared(line))
}

/// Returns the name of the function declared in `line`.
fn declared(line: &str) -> Option<&str> {
    let (before, after) = line.trim_start().split_once("fn ")?;
    let modifier = |word: &str| {
        word.starts_with("pub")
            || matches!(word, "const" | "unsafe" | "extern" | "\"C\"" | "super)")
    };
    if !before.split_whitespace().all(modifier) {
        return None;
    }
    let end = after.find(|letter: char| !letter.is_alphanumeric() && letter != '_')?;
    (end > 0).then(|| &after[..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = "\
impl Tree {
    /// The fn of a comment.
    pub(crate) const fn find(
        &self,
    ) -> u64 {
        let all = |at: u64| {
            at
        };
        all(1)
    }

    fn next<T>() -> T {
        match 1 {
            _ => call(fn_of),
        }
    }
}
";

    #[test]
    fn lines_belong_to_the_enclosing_function() {
        let of = |line| function_of(SOURCE, line);
        assert_eq!([1, 2].map(of), [None; 2]);
        for line in 3..=10 {
            assert_eq!(of(line), Some("find"), "line {line}");
        }
        for line in 12..=16 {
            assert_eq!(of(line), Some("next"), "line {line}");
        }
        assert_eq!(of(17), None);
    }

    #[test]
    fn costs_of_lines_add_up_to_functions() {
        let here = "crates/bench/src/instructions/source.rs";
        let line = |text: &str| {
            let source = source(here).expect("this file");
            1 + source.lines().position(|line| line.contains(text)).expect("a line") as u64
        };
        let at = |file: &str, line, cost| ((file.to_owned(), line), cost);
        let (first, second) = (line("let within = indent"), line("let ends = last"));
        let elsewhere = "/rustc/library/core/src/ptr.rs";
        let lines = HashMap::from([
            at(here, first, 10),
            at(here, second, 5),
            at(here, line("let root = Path"), 12),
            at(elsewhere, 7, 3),
            at(elsewhere, 9, 1),
        ]);
        let found = functions(&lines);
        let found: Vec<_> =
            found.iter().map(|(of, cost)| (&of.name[..], &of.file[..], *cost)).collect();
        let expected = [("function_of", here, 15), ("source", here, 12), ("", elsewhere, 4)];
        assert_eq!(found, expected);
    }
}
