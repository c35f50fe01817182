//! Tooltips of plots: the title of an invisible mark over each point, bar or area, which browsers
//! show while the pointer is over the mark.

use super::super::escaped;
use faultless_analysis::number::scaled;
use std::fmt::Write;

/// The radius of the mark of a point, in pixels.
const RADIUS: u32 = 8;

/// An invisible mark, in pixels.
#[derive(Clone, Copy, Debug)]
pub enum Mark {
    Point((i32, i32)),
    /// Two opposite corners.
    Area([(i32, i32); 2]),
}

/// A tooltip.
#[derive(Clone, Debug)]
pub struct Tip {
    pub mark: Mark,
    pub text: String,
}

/// Formats a value without an axis.
pub fn value(value: f64) -> String {
    scaled(value).trim().to_owned()
}

/// Returns the picture `svg` with the marks in front of everything else.
pub fn add(svg: &str, tips: &[Tip]) -> String {
    let end = svg.rfind("</svg>").unwrap_or(svg.len());
    let (mut out, rest) = (svg[..end].to_owned(), &svg[end..]);
    let style = "class=\"tip\" fill=\"none\" pointer-events=\"all\"";
    for Tip { mark, text } in tips {
        let text = escaped(text.trim());
        // Writing to a string cannot fail.
        let _ = match *mark {
            Mark::Point((x, y)) => writeln!(
                out,
                "<circle {style} cx=\"{x}\" cy=\"{y}\" r=\"{RADIUS}\"><title>{text}</title></circle>"
            ),
            Mark::Area([one, other]) => {
                let (x, y) = (one.0.min(other.0), one.1.min(other.1));
                let (width, height) = (one.0.abs_diff(other.0), one.1.abs_diff(other.1));
                writeln!(
                    out,
                    "<rect {style} x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\"><title>{text}</title></rect>"
                )
            }
        };
    }
    out + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_inside_the_picture_with_escaped_text() {
        let area = Mark::Area([(10, 40), (30, 20)]);
        let tips = [(Mark::Point((1, 2)), "a < b"), (area, "c")];
        let tips = tips.map(|(mark, text)| Tip { mark, text: text.to_owned() });
        let with = add("<svg>\n<g/>\n</svg>\n", &tips);
        assert!(with.starts_with("<svg>\n<g/>\n<circle ") && with.ends_with("</rect>\n</svg>\n"));
        assert!(with.contains("<title>a &lt; b</title>"), "{with}");
        assert!(with.contains("x=\"10\" y=\"20\" width=\"20\" height=\"20\""), "{with}");
    }
}
