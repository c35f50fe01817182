//! The figures that a measuring program prints, one a line: `row NAME VALUE UNIT`, or `count NAME UNIT VALUE`
//! where the unit is what was counted.

use crate::report::number::grouped;

/// A figure.
#[derive(Clone, Debug, PartialEq)]
pub struct Figure {
    /// What of: `anon_write_fault`.
    pub name: String,
    /// How much.
    pub value: f64,
    /// For how much: `per_page`; or what is counted.
    pub unit: String,
}

/// All figures in what a program printed; a console has other lines, too.
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

/// A figure of both kernels.
#[derive(Clone, Debug, PartialEq)]
pub struct Pair {
    /// What of.
    pub name: String,
    /// For how much, in words.
    pub unit: String,
    /// On the bare machine, if it came so far.
    pub ours: Option<f64>,
    /// On Linux.
    pub linux: Option<f64>,
}

impl Pair {
    /// Ours as a part of Linux's.
    pub fn ratio(&self) -> Option<f64> {
        Some(self.ours? / self.linux.filter(|linux| *linux > 0.0)?)
    }

    /// Whether ours is at most one `part`th of Linux's; `None` where one of them is missing.
    pub fn within(&self, part: f64) -> Option<bool> {
        self.ours.zip(self.linux).map(|(ours, linux)| ours * part <= linux)
    }
}

/// The figures side by side, in Linux's order; then what only we have.
pub fn pairs(ours: &[Figure], linux: &[Figure]) -> Vec<Pair> {
    let value = |figures: &[Figure], of: &Figure| {
        let same = |figure: &&Figure| figure.name == of.name && figure.unit == of.unit;
        figures.iter().find(same).map(|figure| figure.value)
    };
    let alone = ours.iter().filter(|figure| value(linux, figure).is_none());
    let pair = |figure: &Figure| Pair {
        name: title(&figure.name),
        unit: figure.unit.replace('_', " "),
        ours: value(ours, figure),
        linux: value(linux, figure),
    };
    linux.iter().chain(alone).map(pair).collect()
}

/// Whether a target is met, as tables tell it; `-` where that is not known.
pub fn verdict(met: Option<bool>) -> &'static str {
    match met {
        Some(true) => "yes",
        Some(false) => "NO",
        None => "-",
    }
}

/// The name of a row as tables show it.
fn title(name: &str) -> String {
    match name {
        // Linux splits and joins no node of its tree here.
        "mprotect_pair_roomy" => "mprotect pair, free slots in Linux's VMA tree".to_owned(),
        _ => name.replace('_', " "),
    }
}

/// A value as people read it: whole numbers whole, others with one place.
pub fn show(value: Option<f64>) -> String {
    let Some(value) = value else { return "-".to_owned() };
    let whole = grouped(value.abs().trunc() as u64);
    let sign = if value < 0.0 { "-" } else { "" };
    let tenths = (value.abs().fract() * 10.0).round() as u64;
    match tenths {
        0 => format!("{sign}{whole}"),
        // It rounds up to the next whole number.
        10 => format!("{sign}{}", grouped(value.abs().trunc() as u64 + 1)),
        tenths => format!("{sign}{whole}.{tenths}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_found_among_a_kernels_lines() {
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
    fn a_third_is_a_third_and_nothing_is_not_a_third() {
        let figure =
            |name: &str, value| Figure { name: name.into(), value, unit: "per_page".into() };
        let ours = [figure("a_b", 100.0), figure("c", 100.1), figure("mine", 1.0)];
        let linux = [figure("theirs", 9.0), figure("c", 300.0), figure("a_b", 300.0)];
        let pairs = pairs(&ours, &linux);
        let names: Vec<_> = pairs.iter().map(|pair| pair.name.as_str()).collect();
        assert_eq!(names, ["theirs", "c", "a b", "mine"]);
        let met: Vec<_> = pairs.iter().map(|pair| pair.within(3.0)).collect();
        assert_eq!(met, [None, Some(false), Some(true), None]);
        assert_eq!(pairs[2].ratio(), Some(1.0 / 3.0));
        assert_eq!((pairs[0].ratio(), pairs[3].ratio()), (None, None));
    }

    #[test]
    fn values_are_shown_with_a_place_where_they_have_one() {
        let shown = [Some(3627.24), Some(336.0), Some(1_860_593.04), Some(0.96), Some(-1.5), None]
            .map(show);
        assert_eq!(shown, ["3,627.2", "336", "1,860,593", "1", "-1.5", "-"]);
    }
}
