//! Bars of text: the chart before the table.

use super::Style;
use std::fmt::Write;

/// One bar.
#[derive(Clone, Debug)]
pub struct Bar {
    /// The name of the measured thing.
    pub name: String,
    /// The length.
    pub value: f64,
    /// The value as text.
    pub shown: String,
    /// The text behind the value.
    pub note: String,
}

const EIGHTHS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
/// The length of the longest bar, in columns.
const LONGEST: usize = 48;
/// Columns of a value.
const VALUE: usize = 9;

/// Returns the bars, one per line, to the scale of the longest.
pub fn draw(bars: &[Bar], style: Style) -> String {
    let names = bars.iter().map(|bar| bar.name.chars().count()).max().unwrap_or(0);
    let notes = bars.iter().map(|bar| bar.note.chars().count()).max().unwrap_or(0);
    let most = bars.iter().map(|bar| bar.value).fold(f64::MIN_POSITIVE, f64::max);
    // Name, bar, value, note, and the space between them.
    let room = style.width.saturating_sub(names + notes + VALUE + 8).clamp(8, LONGEST);
    let mut out = String::new();
    for Bar { name, value, shown, note } in bars {
        let length = value / most * room as f64;
        let (bar, columns) = if style.terminal { blocks(length) } else { hashes(length) };
        let pad = " ".repeat(room.saturating_sub(columns));
        let text = format!("  {name:<names$}  {bar}{pad} {shown:>VALUE$}  {note}");
        // Writing to a string cannot fail.
        let _ = writeln!(out, "{}", text.trim_end());
    }
    out
}

fn blocks(length: f64) -> (String, usize) {
    let eighths = (length * 8.0).round() as usize;
    let part = EIGHTHS[eighths % 8];
    (format!("{}{part}", "█".repeat(eighths / 8)), eighths.div_ceil(8))
}

fn hashes(length: f64) -> (String, usize) {
    let columns = length.round() as usize;
    ("#".repeat(columns), columns)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_to_scale() {
        let bar = |name: &str, value: f64| Bar {
            name: name.into(),
            value,
            shown: value.to_string(),
            note: String::new(),
        };
        let bars = [bar("a", 100.0), bar("bb", 50.0), bar("c", 0.0)];
        let plain = draw(&bars, Style { terminal: false, width: 100 });
        let hashes: Vec<_> = plain.lines().map(|line| line.matches('#').count()).collect();
        assert_eq!(hashes, [LONGEST, LONGEST / 2, 0]);
        let drawn = draw(&bars, Style { terminal: true, width: 100 });
        assert_eq!(drawn.lines().next().map(|line| line.matches('█').count()), Some(LONGEST));
        let ends: Vec<_> = drawn.lines().map(|line| line.chars().count()).collect();
        assert!(ends.iter().all(|end| *end == ends[0]), "{drawn}");
    }

    #[test]
    fn bars_draw_fractions_of_a_column() {
        assert_eq!(blocks(2.5), ("██▌".to_owned(), 3));
        assert_eq!(blocks(0.0), (String::new(), 0));
    }
}
