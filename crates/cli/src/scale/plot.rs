//! The picture of a scale: throughput over CPUs, a line for each policy, both axes logarithmic.

use super::Scaled;
use crate::error::CliError;
use crate::report::number::scaled as short;
use plotters::prelude::*;

/// Pixels.
const SIZE: (u32, u32) = (900, 560);
/// The lines' colours, told apart by people who do not see red and green as two.
const COLOURS: [RGBColor; 3] =
    [RGBColor(0, 114, 178), RGBColor(230, 159, 0), RGBColor(0, 158, 115)];

/// The picture, as SVG.
///
/// # Errors
/// There is nothing to draw, or the library failed.
pub fn svg(scaled: &Scaled) -> Result<String, CliError> {
    let mut text = String::new();
    draw(scaled, &mut text).map_err(|error| CliError::failed("--plot", error))?;
    Ok(text)
}

fn draw(scaled: &Scaled, text: &mut String) -> Result<(), Box<dyn std::error::Error>> {
    let rates = || scaled.points.iter().map(|point| point.ran.sample.operation_rate());
    let cpus = || scaled.points.iter().map(|point| point.cpus as f64);
    let most = |of: &mut dyn Iterator<Item = f64>| of.fold(f64::MIN_POSITIVE, f64::max);
    let (x, y) = (most(&mut cpus()), most(&mut rates()));
    let (left, low) = (cpus().fold(x, f64::min), rates().fold(y, f64::min));
    let root = SVGBackend::with_string(text, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let title = format!("{}, simulated ({})", scaled.name, scaled.machine);
    let mut chart = ChartBuilder::on(&root)
        .caption(title, ("sans-serif", 20))
        .margin(16)
        .x_label_area_size(44)
        .y_label_area_size(76)
        .build_cartesian_2d(
            (left..x * 1.1).log_scale().base(2.0),
            (low * 0.8..y * 1.25).log_scale(),
        )?;
    chart
        .configure_mesh()
        .x_desc("CPUs")
        .y_desc(format!("{} a second", scaled.unit))
        .x_label_formatter(&|cpus| format!("{cpus:.0}"))
        .y_label_formatter(&|rate| short(*rate))
        .draw()?;
    for (points, colour) in scaled.policies().zip(COLOURS) {
        let at = points.iter().map(|point| (point.cpus as f64, point.ran.sample.operation_rate()));
        let name = points.first().map_or("", |point| point.policy.name());
        chart
            .draw_series(LineSeries::new(at, colour.stroke_width(2)).point_size(3))?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2)));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK)
        .draw()?;
    root.present()?;
    Ok(())
}
