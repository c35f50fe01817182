//! Horizontal bars with names of any length: each name is a line of text above its bars.

use super::tips::{self, Mark, Tip};
use super::{Bar, COLOURS, Frame, GRID, LAYOUTS, Layout, Picture, font, legend_of, picture};
use crate::error::CliError;
use crate::report::shortened;
use plotters::prelude::*;

/// The height of a bar, and of the space below a group of bars, in pixels.
const BAR: u32 = 14;
const GAP: u32 = 10;
/// The width of the area left of the bars, in pixels.
const LEFT: u32 = 12;

/// The heights of the parts of a plot, in pixels.
#[derive(Clone, Copy, Debug)]
struct Rows {
    /// The height of a line of text.
    line: u32,
    /// The space for the legend, above the bars.
    legend: u32,
    /// The height of a group: its name, its bars and the space below.
    group: u32,
    /// The number of groups.
    count: u32,
}

impl Rows {
    fn new(layout: Layout, bars: usize, groups: usize) -> Self {
        let line = layout.font + 4;
        // A single kind of bar needs no legend: the title names the kind.
        let legend = if bars > 1 { line * bars as u32 + 16 } else { 0 };
        let group = line + BAR * bars.max(1) as u32 + GAP;
        Self { line, legend, group, count: groups as u32 }
    }

    /// Returns the height of the area with the bars.
    fn height(self) -> u32 {
        self.legend + self.group * self.count
    }

    /// Returns the distance of the group `at` from the upper end.
    fn top(self, at: usize) -> u32 {
        self.legend + self.group * at as u32
    }
}

/// Draws horizontal bars in groups: each group has a name and a bar for each of `kinds`. The
/// lengths of the bars belong to the horizontal axis of `frame`.
///
/// # Errors
/// The library failed.
pub fn named_bars(
    frame: &Frame<'_>,
    kinds: &[&str],
    groups: &[(String, Vec<Bar>)],
) -> Result<Picture, CliError> {
    let ends = groups.iter().flat_map(|(_, bars)| bars);
    let ends = ends.map(|bar| bar.range.map_or(bar.height, |(_, high)| high.max(bar.height)));
    let most = ends.fold(f64::MIN_POSITIVE, f64::max);
    let layouts = LAYOUTS.map(|layout| {
        let rows = Rows::new(layout, kinds.len(), groups.len());
        let caption = layout.caption.map_or(0, |caption| caption + 10);
        let height = rows.height() + 2 * rows.line + 4 + caption + 2 * layout.margin;
        Layout { size: (layout.size.0, height), ..layout }
    });
    picture(frame, layouts, |root, layout| {
        let rows = Rows::new(layout, kinds.len(), groups.len());
        let mut builder = ChartBuilder::on(root);
        if let Some(caption) = layout.caption {
            builder.caption(frame.title, ("sans-serif", caption));
        }
        let height = f64::from(rows.height());
        let mut chart = builder
            .margin(layout.margin)
            .x_label_area_size(2 * rows.line + 4)
            .y_label_area_size(LEFT)
            .build_cartesian_2d(0.0..most * 1.05, 0.0..height)?;
        let mut mesh = chart.configure_mesh();
        mesh.disable_y_mesh()
            .bold_line_style(GRID.mix(0.25))
            .max_light_lines(1)
            .light_line_style(TRANSPARENT)
            .x_labels(layout.labels.0)
            .y_labels(0)
            .label_style(font(layout))
            .axis_desc_style(font(layout))
            .x_desc(frame.x)
            .x_label_formatter(&|x| (frame.show_x)(*x))
            .draw()?;
        let mut tips = Vec::new();
        for (kind, (name, colour)) in kinds.iter().zip(COLOURS.into_iter().cycle()).enumerate() {
            let placed: Vec<_> = groups
                .iter()
                .enumerate()
                .filter_map(|(at, (group, bars))| {
                    let top = rows.top(at) + rows.line + BAR * kind as u32;
                    Some((group, height - f64::from(top), *bars.get(kind)?))
                })
                .collect();
            let thick = f64::from(BAR - 2);
            let bars = placed.iter().map(|(_, top, bar)| {
                Rectangle::new([(0.0, *top), (bar.height, top - thick)], colour.filled())
            });
            let legend =
                move |(x, y)| Rectangle::new([(x, y - 5), (x + 14, y + 5)], colour.filled());
            chart.draw_series(bars)?.label(*name).legend(legend);
            let ranges = placed.iter().filter_map(|(_, top, bar)| {
                let ((low, high), middle) = (bar.range?, top - thick / 2.0);
                Some(PathElement::new([(low, middle), (high, middle)], BLACK.stroke_width(2)))
            });
            chart.draw_series(ranges)?;
            for (group, top, bar) in placed {
                let range = bar.range.map_or(String::new(), |(low, high)| {
                    format!(" ({} to {})", tips::value(low), tips::value(high))
                });
                let value = tips::value(bar.height);
                let text = format!("{group}, {name}: {value}{range} {}", frame.x);
                let corners = [(0.0, top), (most, top - thick)];
                let mark = Mark::Area(corners.map(|corner| chart.backend_coord(&corner)));
                tips.push(Tip { mark, text });
            }
        }
        let columns = layout.size.0.saturating_sub(LEFT + 2 * layout.margin) / layout.width(1);
        for (at, (name, _)) in groups.iter().enumerate() {
            let place = chart.backend_coord(&(0.0, height - f64::from(rows.top(at))));
            let name = shortened(name, columns as usize);
            root.draw(&Text::new(name, (place.0 + 2, place.1 + 2), font(layout)))?;
        }
        if rows.legend > 0 {
            legend_of(&mut chart, layout, SeriesLabelPosition::UpperRight)?;
        }
        Ok(tips)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::html::plot::Show;

    #[test]
    fn each_group_has_its_name_and_a_bar_to_scale() {
        let show: Show<'_> = &|value: f64| format!("{value:.0}");
        let (title, x) = ("times", "ms");
        let frame = Frame { title, x, y: "", show_x: show, show_y: show, y_chars: 0, white: false };
        let long = format!("begin{}end", "x".repeat(200));
        let groups = [("fill app.c:14", 8.0), (&*long, 2.0)];
        let groups = groups.map(|(name, length)| (name.to_owned(), vec![Bar::from(length)]));
        let picture = named_bars(&frame, &["predicted"], &groups).expect("drawn");
        for drawn in [&picture.wide, &picture.narrow] {
            assert!(drawn.contains("fill app.c:14\n</text>"), "{drawn}");
            assert!(drawn.contains("beginx") && drawn.contains("xend\n</text>"), "{drawn}");
            assert!(drawn.contains("<title>fill app.c:14, predicted: 8.00 ms</title>"), "{drawn}");
            let widths: Vec<f64> = drawn
                .lines()
                .filter(|line| line.starts_with("<rect") && line.contains("fill=\"#0072B2\""))
                .filter_map(|line| line.split_once(" width=\"")?.1.split('"').next()?.parse().ok())
                .collect();
            assert!(widths.len() == 2 && (widths[0] / widths[1] - 4.0).abs() < 0.1, "{widths:?}");
        }
        let two = named_bars(&frame, &["without", "with"], &groups).expect("drawn");
        assert!(two.wide.contains("without") && !picture.wide.contains("predicted\n"), "legend");
    }
}
