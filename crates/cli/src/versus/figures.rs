//! The figures printed by a measuring program, one per line: `row NAME VALUE UNIT`, or
//! `count NAME UNIT VALUE` with the counted thing as unit.

use faultless_analysis::number::grouped;
use faultless_analysis::rates::median;

/// A figure.
#[derive(Clone, Debug, PartialEq)]
pub struct Figure {
    /// The name, such as `anon_write_fault`.
    pub name: String,
    /// The value.
    pub value: f64,
    /// The unit, such as `per_page`, or the counted thing.
    pub unit: String,
}

/// Returns all figures in the output of a program. A console has other lines, too.
pub fn figures(text: &str) -> Vec<Figure> {
    text.lines().filter_map(figure).collect()
}

fn figure(line: &str) -> Option<Figure> {
    let mut words = line.split_whitespace();
    let mut next = || words.next();
    let (kind, name, third, fourth) = (next()?, next()?, next()?, next()?);
    let (value, unit) = match kind {
        "row" => (third, fourth),
        "count" => (fourth, third),
        _ => return None,
    };
    let value = value.parse().ok().filter(|value: &f64| value.is_finite())?;
    next().is_none().then(|| Figure { name: name.to_owned(), value, unit: unit.to_owned() })
}

/// A figure over all runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Value {
    /// The median.
    pub median: f64,
    /// The least and the most.
    pub range: (f64, f64),
}

impl Value {
    /// Returns the value of one figure of each run, or `None` without runs.
    fn of(values: &[f64]) -> Option<Self> {
        let least = values.iter().copied().reduce(f64::min)?;
        let most = values.iter().copied().reduce(f64::max)?;
        Some(Self { median: median(values)?, range: (least, most) })
    }

    /// Formats a value for a table: with the range, if the runs differ.
    pub fn cell(value: Option<Self>) -> String {
        let Some(Self { median, range: (low, high) }) = value else { return show(None) };
        let median = show(Some(median));
        if low == high {
            return median;
        }
        format!("{median}\n{} to {}", show(Some(low)), show(Some(high)))
    }
}

/// A figure of both kernels.
#[derive(Clone, Debug, PartialEq)]
pub struct Pair {
    /// The name of the figure.
    pub name: String,
    /// The unit, in words.
    pub unit: String,
    /// The value on the bare machine, if measured.
    pub ours: Option<Value>,
    /// The value on Linux.
    pub linux: Option<Value>,
    /// The value on Linux without mitigations and memory cgroups.
    pub reduced: Option<Value>,
}

impl Pair {
    /// Returns the ratio of the bare machine's median to the median of `other`.
    pub fn ratio(&self, other: Option<Value>) -> Option<f64> {
        Some(self.ours?.median / other.filter(|other| other.median > 0.0)?.median)
    }

    /// Returns whether the bare machine's median is at most one `part`th of Linux's, or `None` if a
    /// value is missing.
    pub fn within(&self, part: f64) -> Option<bool> {
        self.ours.zip(self.linux).map(|(ours, linux)| ours.median * part <= linux.median)
    }
}

/// Returns the figures side by side, in Linux's order, followed by figures of the bare machine
/// only. `sides` contains the figures of all runs of the bare machine, of Linux and of the reduced
/// Linux.
pub fn pairs(sides: &[Vec<&[Figure]>; 3]) -> Vec<Pair> {
    let value = |runs: &[&[Figure]], of: &Figure| {
        let same = |figure: &&Figure| figure.name == of.name && figure.unit == of.unit;
        let values = runs.iter().filter_map(|figures| figures.iter().find(same));
        Value::of(&values.map(|figure| figure.value).collect::<Vec<_>>())
    };
    let [ours, linux, reduced] = sides;
    let mut all: Vec<&Figure> = Vec::new();
    for figure in linux.iter().chain(reduced).chain(ours).flat_map(|figures| figures.iter()) {
        if !all.iter().any(|known| known.name == figure.name && known.unit == figure.unit) {
            all.push(figure);
        }
    }
    let pair = |figure: &Figure| Pair {
        name: title(&figure.name),
        unit: figure.unit.replace('_', " "),
        ours: value(ours, figure),
        linux: value(linux, figure),
        reduced: value(reduced, figure),
    };
    all.into_iter().map(pair).collect()
}

/// Returns the text of a verdict on a target; `-` if the result is unknown.
pub fn verdict(met: Option<bool>) -> &'static str {
    match met {
        Some(true) => "yes",
        Some(false) => "NO",
        None => "-",
    }
}

/// Returns the name of a row in tables.
fn title(name: &str) -> String {
    match name {
        // Linux splits and joins no node of its tree in this row.
        "mprotect_pair_roomy" => "mprotect pair, free slots in Linux's VMA tree".to_owned(),
        "text_read" => "text read (huge pages here, base pages on Linux)".to_owned(),
        _ => name.replace('_', " "),
    }
}

/// Formats a value for people: whole numbers without decimals, others with one decimal.
pub fn show(value: Option<f64>) -> String {
    let Some(value) = value else { return "-".to_owned() };
    let whole = grouped(value.abs().trunc() as u64);
    let sign = if value < 0.0 { "-" } else { "" };
    let tenths = (value.abs().fract() * 10.0).round() as u64;
    match tenths {
        0 => format!("{sign}{whole}"),
        // Rounds up to the next whole number.
        10 => format!("{sign}{}", grouped(value.abs().trunc() as u64 + 1)),
        tenths => format!("{sign}{whole}.{tenths}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_parsed_among_kernel_messages() {
        let found = figures(
            "[    1.436543] /dev/root: row of disks\r\nrow anon_write_fault 3627.2 per_page\r\n\
             row x NaN per_page\nrow x 1\nrow x 1 per_page more\nrows x 1 per_page\nrow getppid 336 per_call",
        );
        let shown: Vec<_> =
            found.iter().map(|f| (f.name.as_str(), f.value, f.unit.as_str())).collect();
        assert_eq!(
            shown,
            [("anon_write_fault", 3627.2, "per_page"), ("getppid", 336.0, "per_call")]
        );
    }

    #[test]
    fn within_compares_with_a_part_of_linux() {
        let figure =
            |name: &str, value| Figure { name: name.into(), value, unit: "per_page".into() };
        let ours = [figure("a_b", 100.0), figure("c", 100.1), figure("mine", 1.0)];
        let linux = [figure("theirs", 9.0), figure("c", 300.0), figure("a_b", 300.0)];
        let reduced = [figure("a_b", 200.0)];
        let pairs = pairs(&[vec![&ours], vec![&linux], vec![&reduced]]);
        let names: Vec<_> = pairs.iter().map(|pair| pair.name.as_str()).collect();
        assert_eq!(names, ["theirs", "c", "a b", "mine"]);
        let met: Vec<_> = pairs.iter().map(|pair| pair.within(3.0)).collect();
        assert_eq!(met, [None, Some(false), Some(true), None]);
        let ratio = |pair: &Pair| pair.ratio(pair.linux);
        assert_eq!(ratio(&pairs[2]), Some(1.0 / 3.0));
        assert_eq!(pairs[2].ratio(pairs[2].reduced), Some(0.5));
        assert_eq!((ratio(&pairs[0]), ratio(&pairs[3])), (None, None));
        assert_eq!(pairs[0].reduced, None);
    }

    /// This row was published as 0.29, with the top of Linux's range, and printed as 0.369, with
    /// the bottom.
    #[test]
    fn varying_row_has_a_median_and_a_range() {
        let run = |value| [Figure { name: "swap_in_page".into(), value, unit: "per_page".into() }];
        let ours = [9000.0, 9288.4, 9300.0].map(run);
        let linux = [31850.1, 25486.7, 29000.0, 28000.0].map(run);
        let runs = |runs: &'static [[Figure; 1]]| runs.iter().map(|run| &run[..]).collect();
        let [ours, linux] = [Vec::from(ours).leak(), Vec::from(linux).leak()];
        let pairs = pairs(&[runs(ours), runs(linux), Vec::new()]);
        assert_eq!(pairs.len(), 1);
        let pair = &pairs[0];
        assert_eq!(pair.ratio(pair.linux), Some(9288.4 / 28500.0));
        assert_eq!(pair.within(3.0), Some(true));
        assert_eq!(Value::cell(pair.ours), "9,288.4\n9,000 to 9,300");
        assert_eq!(Value::cell(pair.linux), "28,500\n25,486.7 to 31,850.1");
        assert_eq!(Value::cell(Value::of(&[7.0, 7.0])), "7", "no range if all runs agree");
        assert_eq!(Value::cell(None), "-");
    }

    #[test]
    fn title_of_text_row_names_the_page_sizes() {
        let text = [Figure { name: "text_read".into(), value: 63.3, unit: "per_page".into() }];
        let pairs = pairs(&[vec![&text], Vec::new(), Vec::new()]);
        assert!(pairs[0].name.contains("huge pages here, base pages on Linux"), "{pairs:?}");
    }

    #[test]
    fn values_are_shown_with_at_most_one_decimal() {
        let shown = [Some(3627.24), Some(336.0), Some(1_860_593.04), Some(0.96), Some(-1.5), None]
            .map(show);
        assert_eq!(shown, ["3,627.2", "336", "1,860,593", "1", "-1.5", "-"]);
    }
}
