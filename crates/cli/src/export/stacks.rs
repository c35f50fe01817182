//! Collapsed stacks, and the flame graph.

use super::Profile;
use crate::error::CliError;
use faultless_trace::event::{Function, StackId};
use inferno::flamegraph::color::BasicPalette;
use inferno::flamegraph::{self, Options, Palette};

/// Returns a line for each stack: its frames from the outermost on, separated by semicolons, and
/// the number of its faults.
pub fn collapsed(profile: &Profile<'_>) -> String {
    lines(profile, |cost| cost.faults).join("\n") + "\n"
}

/// Colours of the background and of the text around the frames for a reader's dark mode. Frames are
/// bright green, and their text stays black. The link `Search` is almost transparent by default.
const DARK: &str = "\
@media (prefers-color-scheme: dark) {
  :root { background: #16181c; }
  #background stop { stop-color: #16181c; }
  #title, #subtitle, #details, #matched, #search, #unzoom { fill: #e6e6e6; }
}
#search { opacity: 0.6; }
";

/// Returns the flame graph by predicted time, in nanoseconds.
pub fn flame_graph(profile: &Profile<'_>) -> Result<Vec<u8>, CliError> {
    let mut options = Options::default();
    options.title = format!("Page faults of {}: predicted time", profile.name);
    options.count_name = "ns".into();
    // The colour of memory in flame graphs. Black text is readable on each of its shades.
    options.colors = Palette::Basic(BasicPalette::Mem);
    let lines = lines(profile, |cost| cost.nanoseconds.round() as u64);
    let mut svg = Vec::new();
    flamegraph::from_lines(&mut options, lines.iter().map(String::as_str), &mut svg)
        .map_err(|error| CliError::failed("--export flamegraph", error))?;
    Ok(with_style(svg, DARK))
}

/// Returns the picture `svg` with `style` at the end of its style.
fn with_style(mut svg: Vec<u8>, style: &str) -> Vec<u8> {
    const END: &[u8] = b"</style>";
    if let Some(end) = svg.windows(END.len()).position(|part| part == END) {
        svg.splice(end..end, style.bytes());
    }
    svg
}

/// Returns the line of each stack with a `weight` above 0.
fn lines(
    profile: &Profile<'_>,
    weight: impl Fn(&faultless_analysis::advise::sites::StackCost) -> u64,
) -> Vec<String> {
    let weighed = profile.costs.iter().map(|cost| (cost, weight(cost)));
    weighed
        .filter(|(_, weight)| *weight > 0)
        .map(|(cost, weight)| format!("{} {weight}", path(profile, cost.stack)))
        .collect()
}

/// Returns the program and the frames of `stack`, the outermost first.
fn path(profile: &Profile<'_>, stack: StackId) -> String {
    let mut frames: Vec<_> =
        profile.trace.stacks.of(stack).map(|(_, function)| label(function)).collect();
    frames.push(clean(&profile.trace.header.program));
    frames.reverse();
    frames.join(";")
}

fn label(function: &Function) -> String {
    clean(function.label())
}

/// Replaces the separators of the format.
fn clean(name: &str) -> String {
    name.replace(';', ":").replace('\n', " ")
}

#[cfg(test)]
mod tests {
    use super::super::tests::{profile, trace};
    use super::*;

    #[test]
    fn name_has_no_separators_of_the_format() {
        assert_eq!(clean("a;b\nc"), "a:b c");
    }

    #[test]
    fn stacks_are_collapsed_from_the_outermost_frame() {
        let trace = trace();
        let profile = profile(&trace);
        assert_eq!(collapsed(&profile), "app;main: loop 3\napp;main: loop;load 1\n");
        let svg = String::from_utf8(flame_graph(&profile).expect("drawn")).expect("text");
        assert!(svg.contains("<title>load (1,000 ns, 25.00%)</title>"), "{svg}");
        let (style, _) = svg.split_once("</style>").expect("a style");
        assert!(style.ends_with(DARK), "{style}");
    }
}
