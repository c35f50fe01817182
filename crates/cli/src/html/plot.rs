//! Plots as SVG: lines, bars and cells. Text and axes are black, which a page shows in its own colour.

use crate::error::CliError;
use plotters::coord::Shift;
use plotters::coord::cartesian::Cartesian2d;
use plotters::coord::ranged1d::{AsRangedCoord, ValueFormatter};
use plotters::prelude::*;
pub use plotters::prelude::{IntoLogRange, SeriesLabelPosition};
use std::ops::Range;

/// Pixels.
const SIZE: (u32, u32) = (900, 480);
/// Told apart by people who do not see red and green as two, on light and on dark.
pub const COLOURS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(230, 159, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(213, 94, 0),
    RGBColor(150, 150, 150),
];
const GRID: RGBColor = RGBColor(128, 128, 128);

/// What surrounds the data.
#[derive(Clone, Copy, Debug)]
pub struct Frame<'a> {
    pub title: &'a str,
    pub x: &'a str,
    pub y: &'a str,
    /// How numbers of the axes are written.
    pub show_x: fn(f64) -> String,
    pub show_y: fn(f64) -> String,
    /// White behind it, for a picture that stands alone.
    pub white: bool,
}

/// Something that has a name and a colour.
#[derive(Clone, Debug)]
pub struct Series {
    pub name: String,
    pub points: Vec<(f64, f64)>,
}

/// A bar, or a part of one: its height, and the range in which it may lie.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bar {
    pub height: f64,
    pub range: Option<(f64, f64)>,
}

impl From<f64> for Bar {
    fn from(height: f64) -> Self {
        Self { height, range: None }
    }
}

/// What went wrong in the library.
type Failure = Box<dyn std::error::Error>;
type Drawn = Result<(), Failure>;
type Area<'b> = DrawingArea<SVGBackend<'b>, Shift>;
type Names<'a> = &'a dyn Fn(&f64) -> String;
type Chart<'a, 'b, X, Y> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<X, Y>>;

/// The picture that `draw` draws.
fn picture(frame: &Frame<'_>, draw: impl FnOnce(&Area<'_>) -> Drawn) -> Result<String, CliError> {
    let mut text = String::new();
    let drawn = || -> Drawn {
        let root = SVGBackend::with_string(&mut text, SIZE).into_drawing_area();
        if frame.white {
            root.fill(&WHITE)?;
        }
        draw(&root)?;
        root.present()?;
        Ok(())
    };
    drawn().map_err(|error| CliError::failed(format_args!("the plot {:?}", frame.title), error))?;
    Ok(text)
}

/// A chart with its axes and nothing in it. In place of numbers the horizontal axis has `names`, how many and what each place is called.
fn axes<'a, 'b, X, Y>(
    root: &'a Area<'b>,
    frame: &Frame<'_>,
    (x, y): (X, Y),
    names: Option<(usize, Names<'_>)>,
) -> Result<Chart<'a, 'b, X::CoordDescType, Y::CoordDescType>, Failure>
where
    X: AsRangedCoord<Value = f64>,
    Y: AsRangedCoord<Value = f64>,
    X::CoordDescType: ValueFormatter<f64>,
    Y::CoordDescType: ValueFormatter<f64>,
{
    let mut chart = ChartBuilder::on(root)
        .caption(frame.title, ("sans-serif", 20))
        .margin(16)
        .x_label_area_size(44)
        .y_label_area_size(76)
        .build_cartesian_2d(x, y)?;
    let number = |x: &f64| (frame.show_x)(*x);
    let (labels, show_x) = names.unwrap_or((8, &number));
    let mut mesh = chart.configure_mesh();
    if names.is_some() {
        mesh.disable_x_mesh();
    }
    mesh.bold_line_style(GRID.mix(0.25))
        .max_light_lines(1)
        .light_line_style(TRANSPARENT)
        .x_labels(labels)
        .x_desc(frame.x)
        .y_desc(frame.y)
        .x_label_formatter(show_x)
        .y_label_formatter(&|y| (frame.show_y)(*y))
        .draw()?;
    Ok(chart)
}

/// Lines over both axes.
///
/// # Errors
/// The library failed.
pub fn lines<X, Y>(
    frame: &Frame<'_>,
    (x, y): (X, Y),
    series: &[Series],
    (dots, legend): (u32, SeriesLabelPosition),
) -> Result<String, CliError>
where
    X: AsRangedCoord<Value = f64>,
    Y: AsRangedCoord<Value = f64>,
    X::CoordDescType: ValueFormatter<f64>,
    Y::CoordDescType: ValueFormatter<f64>,
{
    picture(frame, |root| {
        let mut chart = axes(root, frame, (x, y), None)?;
        for (series, colour) in series.iter().zip(COLOURS.into_iter().cycle()) {
            let line = LineSeries::new(series.points.iter().copied(), colour.stroke_width(2));
            let sample =
                move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2));
            chart.draw_series(line.point_size(dots))?.label(&series.name).legend(sample);
        }
        chart.configure_series_labels().position(legend).border_style(GRID).draw()?;
        Ok(())
    })
}

/// Bars in groups: of each group its name and a bar for each of `names`; side by side, or one upon the other.
///
/// # Errors
/// The library failed.
pub fn bars(
    frame: &Frame<'_>,
    names: &[&str],
    groups: &[(String, Vec<Bar>)],
    stacked: bool,
) -> Result<String, CliError> {
    let top = |bars: &Vec<Bar>| {
        let ends = bars.iter().map(|bar| bar.range.map_or(bar.height, |(_, high)| high));
        if stacked { ends.sum::<f64>() } else { ends.fold(0.0, f64::max) }
    };
    let top = groups.iter().map(|(_, bars)| top(bars)).fold(f64::MIN_POSITIVE, f64::max);
    picture(frame, |root| {
        let name = |x: &f64| {
            let whole = (x - x.round()).abs() < 1e-6;
            let group = groups.get(x.round().max(0.0) as usize).filter(|_| whole && *x > -0.25);
            group.map_or(String::new(), |(name, _)| name.clone())
        };
        // The legend lies above the data: it takes this share of the height.
        let legend = 0.02 + 0.05 * names.len() as f64;
        let ranges = (-0.5..groups.len() as f64 - 0.5, 0.0..top / (1.0 - legend));
        let mut chart = axes(root, frame, ranges, Some((2 * groups.len() + 1, &name)))?;
        for (at, (name, colour)) in names.iter().zip(COLOURS.into_iter().cycle()).enumerate() {
            let place = |group: usize, bars: &[Bar]| {
                let bar = bars.get(at).copied()?;
                if stacked {
                    let below: f64 = bars[..at].iter().map(|bar| bar.height).sum();
                    let x = group as f64;
                    return Some((x - 0.3, x + 0.3, below, bar));
                }
                let width = 0.8 / names.len() as f64;
                let left = group as f64 - 0.4 + width * at as f64;
                Some((left, left + width * 0.9, 0.0, bar))
            };
            let placed: Vec<_> =
                (0..).zip(groups).filter_map(|(group, (_, bars))| place(group, bars)).collect();
            let rectangles = placed.iter().map(|(left, right, below, bar)| {
                Rectangle::new([(*left, *below), (*right, below + bar.height)], colour.filled())
            });
            let legend =
                move |(x, y)| Rectangle::new([(x, y - 5), (x + 14, y + 5)], colour.filled());
            chart.draw_series(rectangles)?.label(*name).legend(legend);
            let ranges = placed.iter().filter_map(|(left, right, _, bar)| {
                let (low, high) = bar.range?;
                let middle = f64::midpoint(*left, *right);
                Some(PathElement::new([(middle, low), (middle, high)], BLACK.stroke_width(2)))
            });
            chart.draw_series(ranges)?;
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperRight)
            .border_style(GRID)
            .draw()?;
        Ok(())
    })
}

/// Points in a grid of cells: each cell that has some is filled with the colour of the kind that most of them are of.
///
/// # Errors
/// The library failed.
pub fn cells(
    frame: &Frame<'_>,
    (x, y): (Range<f64>, Range<f64>),
    kinds: &[Series],
) -> Result<String, CliError> {
    const GRID_SIZE: (usize, usize) = (200, 120);
    let step = |range: &Range<f64>, cells: usize| {
        ((range.end - range.start) / cells as f64).max(f64::MIN_POSITIVE)
    };
    let (width, height) = (step(&x, GRID_SIZE.0), step(&y, GRID_SIZE.1));
    let mut counts = vec![vec![0u32; kinds.len()]; GRID_SIZE.0 * GRID_SIZE.1];
    for (kind, series) in kinds.iter().enumerate() {
        for (at_x, at_y) in &series.points {
            let column = (((at_x - x.start) / width) as usize).min(GRID_SIZE.0 - 1);
            let row = (((at_y - y.start) / height) as usize).min(GRID_SIZE.1 - 1);
            counts[row * GRID_SIZE.0 + column][kind] += 1;
        }
    }
    picture(frame, |root| {
        // The legend lies above the data.
        let above = y.start..y.end + 0.3 * (y.end - y.start);
        let mut chart = axes(root, frame, (x.clone(), above), None)?;
        for (kind, (series, colour)) in kinds.iter().zip(COLOURS).enumerate() {
            let mine = counts.iter().enumerate().filter(|(_, counts)| {
                let most = counts.iter().copied().max().unwrap_or(0);
                most > 0 && counts.iter().position(|count| *count == most) == Some(kind)
            });
            let rectangles = mine.map(|(at, _)| {
                let left = x.start + (at % GRID_SIZE.0) as f64 * width;
                let low = y.start + (at / GRID_SIZE.0) as f64 * height;
                Rectangle::new([(left, low), (left + width, low + height)], colour.filled())
            });
            let legend =
                move |(x, y)| Rectangle::new([(x, y - 5), (x + 14, y + 5)], colour.filled());
            chart.draw_series(rectangles)?.label(&series.name).legend(legend);
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperLeft)
            .border_style(GRID)
            .draw()?;
        Ok(())
    })
}

/// The share of `values` that are at most so much, in percent: at each of some hundred of them.
pub fn distribution(mut values: Vec<f64>) -> Vec<(f64, f64)> {
    const POINTS: usize = 200;
    values.sort_by(f64::total_cmp);
    let last = values.len().saturating_sub(1);
    let at = |point: usize| {
        let index = last * point / POINTS;
        (values[index], 100.0 * (index + 1) as f64 / values.len() as f64)
    };
    let mut points: Vec<_> = (0..=POINTS).filter(|_| !values.is_empty()).map(at).collect();
    points.dedup();
    points
}

/// The range from the least to the most of `values`, and a little more.
pub fn extent(values: impl Iterator<Item = f64> + Clone) -> Range<f64> {
    let low = values.clone().fold(f64::INFINITY, f64::min);
    let high = values.fold(f64::MIN_POSITIVE, f64::max);
    if low.is_finite() { low.max(f64::MIN_POSITIVE) * 0.9..high * 1.1 } else { 0.1..1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(title: &str) -> Frame<'_> {
        let show = |value: f64| format!("{value:.1}");
        Frame { title, x: "x", y: "y", show_x: show, show_y: show, white: false }
    }

    #[test]
    fn each_kind_has_its_shapes() {
        let series = |name: &str, points: &[(f64, f64)]| Series {
            name: name.into(),
            points: points.to_vec(),
        };
        let two = [series("one", &[(1.0, 1.0), (2.0, 3.0)]), series("two", &[(1.0, 2.0)])];
        let drawn =
            lines(&frame("lines"), (1.0..3.0, 0.0..4.0), &two, (3, SeriesLabelPosition::UpperLeft))
                .expect("drawn");
        assert!(drawn.contains("<polyline") && drawn.contains("one") && drawn.contains("two"));
        let groups =
            vec![("g".to_owned(), vec![Bar { height: 2.0, range: Some((1.0, 3.0)) }, 1.0.into()])];
        let count =
            |drawn: &str, colour: &str| drawn.matches(&format!("fill=\"{colour}\"")).count();
        for stacked in [false, true] {
            let drawn = bars(&frame("bars"), &["a", "b"], &groups, stacked).expect("drawn");
            // The bar, and the one of the legend.
            assert_eq!((count(&drawn, "#0072B2"), count(&drawn, "#E69F00")), (2, 2), "{drawn}");
        }
        let drawn = cells(&frame("cells"), (0.0..10.0, 0.0..10.0), &two).expect("drawn");
        assert_eq!((count(&drawn, "#0072B2"), count(&drawn, "#E69F00")), (3, 2), "{drawn}");
    }

    #[test]
    fn a_distribution_ends_at_all_of_it() {
        let points = distribution((1..=1000).map(f64::from).collect());
        assert_eq!(points.first(), Some(&(1.0, 0.1)));
        assert_eq!(points.last(), Some(&(1000.0, 100.0)));
        assert!(points.is_sorted() && distribution(Vec::new()).is_empty());
    }
}
