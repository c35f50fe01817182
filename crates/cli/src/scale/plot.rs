//! The plot of a scale: throughput over CPUs, a line for each policy, both axes logarithmic.

use crate::error::CliError;
use crate::html::plot::{Frame, Picture, Series, SeriesLabelPosition, lines, log_axis, values};
use faultless_analysis::number::label;
use faultless_analysis::scale::{Point, Scaled};

/// Draws the plot: on white, or on the background of a page.
///
/// # Errors
/// There are no results to draw, or the library failed.
pub fn draw(scaled: &Scaled, white: bool) -> Result<Picture, CliError> {
    let rates = || scaled.points.iter().map(|point| point.ran.sample.operation_rate());
    let cpus = || scaled.points.iter().map(|point| point.cpus as f64);
    let most = |of: &mut dyn Iterator<Item = f64>| of.fold(f64::MIN_POSITIVE, f64::max);
    let (x, y) = (most(&mut cpus()), most(&mut rates()));
    let (left, low) = (cpus().fold(x, f64::min), rates().fold(y, f64::min));
    let frame = Frame {
        title: &format!("{}, simulated ({})", scaled.name, scaled.machine),
        x: "CPUs",
        y: &format!("{} a second", scaled.unit),
        show_x: &|cpus| format!("{cpus:.0}"),
        show_y: &label,
        y_chars: 6,
        white,
    };
    let series = |points: &[Point]| Series {
        name: points.first().map_or("", |point| point.policy.name()).to_owned(),
        points: points
            .iter()
            .map(|point| (point.cpus as f64, point.ran.sample.operation_rate()))
            .collect(),
    };
    let counts: Vec<f64> = cpus().collect();
    let axes = || (values(left..x * 1.1, &counts), log_axis(low * 0.8..y * 1.25));
    lines(
        &frame,
        axes,
        &scaled.policies().map(series).collect::<Vec<_>>(),
        (3, SeriesLabelPosition::UpperLeft),
    )
}
