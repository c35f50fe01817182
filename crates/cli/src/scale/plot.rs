//! The picture of a scale: throughput over CPUs, a line for each policy, both axes logarithmic.

use super::Scaled;
use crate::error::CliError;
use crate::html::plot::{Frame, IntoLogRange, Series, SeriesLabelPosition, lines};
use crate::report::number::scaled as short;

/// The picture as SVG: on white, or on the ground of a page.
///
/// # Errors
/// There is nothing to draw, or the library failed.
pub fn svg(scaled: &Scaled, white: bool) -> Result<String, CliError> {
    let rates = || scaled.points.iter().map(|point| point.ran.sample.operation_rate());
    let cpus = || scaled.points.iter().map(|point| point.cpus as f64);
    let most = |of: &mut dyn Iterator<Item = f64>| of.fold(f64::MIN_POSITIVE, f64::max);
    let (x, y) = (most(&mut cpus()), most(&mut rates()));
    let (left, low) = (cpus().fold(x, f64::min), rates().fold(y, f64::min));
    let frame = Frame {
        title: &format!("{}, simulated ({})", scaled.name, scaled.machine),
        x: "CPUs",
        y: &format!("{} a second", scaled.unit),
        show_x: |cpus| format!("{cpus:.0}"),
        show_y: short,
        white,
    };
    let series = |points: &[super::Point]| Series {
        name: points.first().map_or("", |point| point.policy.name()).to_owned(),
        points: points
            .iter()
            .map(|point| (point.cpus as f64, point.ran.sample.operation_rate()))
            .collect(),
    };
    let axes = ((left..x * 1.1).log_scale().base(2.0), (low * 0.8..y * 1.25).log_scale());
    lines(
        &frame,
        axes,
        &scaled.policies().map(series).collect::<Vec<_>>(),
        (3, SeriesLabelPosition::UpperLeft),
    )
}
