//! Plots as SVG: lines, bars and cells, each in two sizes. Text and axes are black, and a page
//! replaces black by its own colour.
//!
//! The wide size is for pages and files, the narrow size for screens of some 400 pixels. In both,
//! text is at least 12 pixels high. Points, bars and cells have tooltips ([`tips`]).

mod axes;
mod named;
mod tips;

use crate::error::CliError;
use axes::{Chart, Names, axes};
pub use axes::{linear, log_axis, ranks, values};
pub use named::named_bars;
use plotters::coord::Shift;
use plotters::coord::ranged1d::{AsRangedCoord, ValueFormatter};
pub use plotters::prelude::SeriesLabelPosition;
use plotters::prelude::*;
use std::ops::Range;
use tips::{Mark, Tip};

/// Colours that people with red-green colour blindness can distinguish, on light and on dark.
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
/// The largest number of points of a line that have tooltips.
const TIPS: usize = 64;

/// Formats a number of an axis.
pub type Show<'a> = &'a dyn Fn(f64) -> String;

/// The title and the axes of a plot.
#[derive(Clone, Copy)]
pub struct Frame<'a> {
    pub title: &'a str,
    pub x: &'a str,
    pub y: &'a str,
    /// Formats of the numbers of the axes.
    pub show_x: Show<'a>,
    pub show_y: Show<'a>,
    /// The most characters of a label of the vertical axis.
    pub y_chars: u32,
    /// Whether the background is white, for a picture outside a page.
    pub white: bool,
}

/// A plot in two sizes.
#[derive(Clone, Debug)]
pub struct Picture {
    pub title: String,
    /// The plot with its title.
    pub wide: String,
    /// The plot without a title, which the page shows as text.
    pub narrow: String,
}

/// A size of a plot, in pixels.
#[derive(Clone, Copy, Debug)]
struct Layout {
    size: (u32, u32),
    /// Height of the text. The library divides the height by 1.24 in SVG.
    font: u32,
    /// Height of the title, if the plot has a title.
    caption: Option<u32>,
    margin: u32,
    /// The most labels of an axis: horizontal, vertical.
    labels: (usize, usize),
}

const WIDE: Layout =
    Layout { size: (900, 480), font: 16, caption: Some(20), margin: 16, labels: (8, 10) };
const NARROW: Layout =
    Layout { size: (360, 400), font: 16, caption: None, margin: 6, labels: (4, 8) };

/// The layouts of the sizes of a picture.
const LAYOUTS: [Layout; 2] = [WIDE, NARROW];

impl Layout {
    /// Returns the height of `lines` lines of a legend, as a share of the height of the plot.
    fn legend(self, lines: usize) -> f64 {
        (0.03 + f64::from(self.font + 4) * lines as f64 / (f64::from(self.size.1) * 0.75)).min(0.6)
    }

    /// Returns the estimated width of `characters` of a label.
    fn width(self, characters: usize) -> u32 {
        (f64::from(self.font) * 0.5 * characters as f64) as u32
    }
}

/// A set of points with a name and a colour.
#[derive(Clone, Debug)]
pub struct Series {
    pub name: String,
    pub points: Vec<(f64, f64)>,
}

/// A bar, or a part of a bar: its height, and the range of its uncertainty.
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

/// An error of the library.
type Failure = Box<dyn std::error::Error>;
type Drawn = Result<(), Failure>;
type Area<'b> = DrawingArea<SVGBackend<'b>, Shift>;

/// Draws the plot in the sizes of the layouts `wide` and `narrow`. `draw` returns the tooltips.
fn picture(
    frame: &Frame<'_>,
    [wide, narrow]: [Layout; 2],
    draw: impl Fn(&Area<'_>, Layout) -> Result<Vec<Tip>, Failure>,
) -> Result<Picture, CliError> {
    let one = |layout: Layout| -> Result<String, Failure> {
        let mut text = String::new();
        let tips = {
            let root = SVGBackend::with_string(&mut text, layout.size).into_drawing_area();
            if frame.white {
                root.fill(&WHITE)?;
            }
            let tips = draw(&root, layout)?;
            root.present()?;
            tips
        };
        Ok(tips::add(&text, &tips))
    };
    let both = || Ok::<_, Failure>((one(wide)?, one(narrow)?));
    let (wide, narrow) = both()
        .map_err(|error| CliError::failed(format_args!("the plot {:?}", frame.title), error))?;
    Ok(Picture { title: frame.title.to_owned(), wide, narrow })
}

fn font(layout: Layout) -> TextStyle<'static> {
    ("sans-serif", layout.font).into_font().color(&BLACK)
}

/// Draws lines over the axes returned by `ranges`.
///
/// # Errors
/// The library failed.
pub fn lines<X, Y>(
    frame: &Frame<'_>,
    ranges: impl Fn() -> (X, Y),
    series: &[Series],
    (dots, legend): (u32, SeriesLabelPosition),
) -> Result<Picture, CliError>
where
    X: AsRangedCoord<Value = f64>,
    Y: AsRangedCoord<Value = f64>,
    X::CoordDescType: ValueFormatter<f64>,
    Y::CoordDescType: ValueFormatter<f64>,
{
    picture(frame, LAYOUTS, |root, layout| {
        let mut chart = axes(root, (frame, layout), ranges(), None)?;
        let mut tips = Vec::new();
        for (series, colour) in series.iter().zip(COLOURS.into_iter().cycle()) {
            let line = LineSeries::new(series.points.iter().copied(), colour.stroke_width(2));
            let sample =
                move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2));
            chart.draw_series(line.point_size(dots))?.label(&series.name).legend(sample);
            let last = series.points.len().saturating_sub(1);
            let step = series.points.len().div_ceil(TIPS).max(1);
            for (at, point) in series.points.iter().enumerate() {
                if at % step != 0 && at != last {
                    continue;
                }
                let (x, y) = ((frame.show_x)(point.0), (frame.show_y)(point.1));
                let text =
                    format!("{}: {} {}, {} {}", series.name, y.trim(), frame.y, x.trim(), frame.x);
                tips.push(Tip { mark: Mark::Point(chart.backend_coord(point)), text });
            }
        }
        legend_of(&mut chart, layout, legend.clone())?;
        Ok(tips)
    })
}

/// Draws the legend of the series.
fn legend_of<'a, 'b: 'a, X, Y>(
    chart: &mut Chart<'a, 'b, X, Y>,
    layout: Layout,
    position: SeriesLabelPosition,
) -> Drawn
where
    X: plotters::coord::ranged1d::Ranged<ValueType = f64>,
    Y: plotters::coord::ranged1d::Ranged<ValueType = f64>,
{
    let mut labels = chart.configure_series_labels();
    labels.position(position).border_style(GRID).label_font(font(layout)).draw()?;
    Ok(())
}

/// Draws bars in groups: each group has a name and a bar for each of `names`; side by side, or
/// stacked.
///
/// # Errors
/// The library failed.
pub fn bars(
    frame: &Frame<'_>,
    names: &[&str],
    groups: &[(String, Vec<Bar>)],
    stacked: bool,
) -> Result<Picture, CliError> {
    let top = |bars: &Vec<Bar>| {
        let ends = bars.iter().map(|bar| bar.range.map_or(bar.height, |(_, high)| high));
        if stacked { ends.sum::<f64>() } else { ends.fold(0.0, f64::max) }
    };
    let top = groups.iter().map(|(_, bars)| top(bars)).fold(f64::MIN_POSITIVE, f64::max);
    let places = Names(groups.iter().map(|(name, _)| name.as_str()).collect());
    picture(frame, LAYOUTS, |root, layout| {
        // The legend lies above the data.
        let ranges =
            (-0.5..groups.len() as f64 - 0.5, 0.0..top / (1.0 - layout.legend(names.len())));
        let mut chart = axes(root, (frame, layout), ranges, Some(&places))?;
        let mut tips = Vec::new();
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
            let placed: Vec<_> = groups
                .iter()
                .enumerate()
                .filter_map(|(at, (group, bars))| Some((group, place(at, bars)?)))
                .collect();
            let rectangles = placed.iter().map(|(_, (left, right, below, bar))| {
                Rectangle::new([(*left, *below), (*right, below + bar.height)], colour.filled())
            });
            let legend =
                move |(x, y)| Rectangle::new([(x, y - 5), (x + 14, y + 5)], colour.filled());
            chart.draw_series(rectangles)?.label(*name).legend(legend);
            let ranges = placed.iter().filter_map(|(_, (left, right, _, bar))| {
                let (low, high) = bar.range?;
                let middle = f64::midpoint(*left, *right);
                Some(PathElement::new([(middle, low), (middle, high)], BLACK.stroke_width(2)))
            });
            chart.draw_series(ranges)?;
            for (group, (left, right, below, bar)) in placed {
                let corners = [(left, below + bar.height), (right, below)];
                let range = bar.range.map_or(String::new(), |(low, high)| {
                    format!(" ({} to {})", tips::value(low), tips::value(high))
                });
                let text =
                    format!("{group}, {name}: {}{range} {}", tips::value(bar.height), frame.y);
                let mark = Mark::Area(corners.map(|corner| chart.backend_coord(&corner)));
                tips.push(Tip { mark, text });
            }
        }
        legend_of(&mut chart, layout, SeriesLabelPosition::UpperRight)?;
        Ok(tips)
    })
}

/// Columns and rows of the grid of [`cells`], and of the areas with tooltips. The numbers of cells
/// are multiples of the numbers of areas.
const CELLS: (usize, usize) = (200, 120);
const AREAS: (usize, usize) = (40, 24);

/// Draws points in a grid of cells. A cell with points has the colour of the kind of most of its
/// points. `y` is the range of the vertical axis.
///
/// # Errors
/// The library failed.
pub fn cells<Y>(
    frame: &Frame<'_>,
    (x, y): (Range<f64>, Range<f64>),
    vertical: impl Fn(Range<f64>) -> Y,
    kinds: &[Series],
) -> Result<Picture, CliError>
where
    Y: AsRangedCoord<Value = f64>,
    Y::CoordDescType: ValueFormatter<f64>,
{
    let fine = Grid::of((&x, &y), CELLS, kinds);
    let coarse = Grid::of((&x, &y), AREAS, kinds);
    picture(frame, LAYOUTS, |root, layout| {
        // The legend lies above the data.
        let legend = layout.legend(kinds.len());
        let above = y.start..y.end + legend / (1.0 - legend) * (y.end - y.start);
        let mut chart = axes(root, (frame, layout), (x.clone(), vertical(above)), None)?;
        for (kind, (series, colour)) in kinds.iter().zip(COLOURS).enumerate() {
            let mine = fine.counts.iter().enumerate().filter(|(_, counts)| {
                let most = counts.iter().copied().max().unwrap_or(0);
                most > 0 && counts.iter().position(|count| *count == most) == Some(kind)
            });
            let rectangles = mine.map(|(at, _)| Rectangle::new(fine.corners(at), colour.filled()));
            let legend =
                move |(x, y)| Rectangle::new([(x, y - 5), (x + 14, y + 5)], colour.filled());
            chart.draw_series(rectangles)?.label(&series.name).legend(legend);
        }
        let filled = coarse.counts.iter().enumerate();
        let tips = filled.filter(|(_, counts)| counts.iter().any(|count| *count > 0));
        let tips = tips.map(|(at, counts)| {
            let corners = coarse.corners(at);
            let [low, high] = corners;
            let [from, to] = [low.0, high.0].map(|x| (frame.show_x)(x).trim().to_owned());
            let [below, above] = [low.1, high.1].map(|y| (frame.show_y)(y).trim().to_owned());
            let of = kinds.iter().zip(counts).filter(|(_, count)| **count > 0);
            let of: Vec<_> = of.map(|(kind, count)| format!("{count} {}", kind.name)).collect();
            let (x, y) = (frame.x, frame.y);
            let text = format!("{from} to {to} {x}, {y} {below} to {above}: {}", of.join(", "));
            Tip { mark: Mark::Area(corners.map(|corner| chart.backend_coord(&corner))), text }
        });
        let tips = tips.collect();
        legend_of(&mut chart, layout, SeriesLabelPosition::UpperLeft)?;
        Ok(tips)
    })
}

/// Points counted in cells.
struct Grid {
    start: (f64, f64),
    step: (f64, f64),
    columns: usize,
    /// For each cell, row by row, the points of each kind.
    counts: Vec<Vec<u32>>,
}

impl Grid {
    fn of(
        (x, y): (&Range<f64>, &Range<f64>),
        (columns, rows): (usize, usize),
        kinds: &[Series],
    ) -> Self {
        let step = |range: &Range<f64>, cells: usize| {
            ((range.end - range.start) / cells as f64).max(f64::MIN_POSITIVE)
        };
        let (width, height) = (step(x, columns), step(y, rows));
        let mut counts = vec![vec![0u32; kinds.len()]; columns * rows];
        for (kind, series) in kinds.iter().enumerate() {
            for (at_x, at_y) in &series.points {
                let column = (((at_x - x.start) / width) as usize).min(columns - 1);
                let row = (((at_y - y.start) / height) as usize).min(rows - 1);
                counts[row * columns + column][kind] += 1;
            }
        }
        Self { start: (x.start, y.start), step: (width, height), columns, counts }
    }

    /// Returns the lower left corner and the upper right corner of cell `at`.
    fn corners(&self, at: usize) -> [(f64, f64); 2] {
        let left = self.start.0 + (at % self.columns) as f64 * self.step.0;
        let low = self.start.1 + (at / self.columns) as f64 * self.step.1;
        [(left, low), (left + self.step.0, low + self.step.1)]
    }
}

/// Returns the cumulative distribution of `values` at some hundred points: the share of values up
/// to the point, in percent.
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

/// Returns the range from the least to the most of `values`, slightly extended.
pub fn extent(values: impl Iterator<Item = f64> + Clone) -> Range<f64> {
    let low = values.clone().fold(f64::INFINITY, f64::min);
    let high = values.fold(f64::MIN_POSITIVE, f64::max);
    if low.is_finite() { low.max(f64::MIN_POSITIVE) * 0.9..high * 1.1 } else { 0.1..1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(title: &str) -> Frame<'_> {
        let show: Show<'_> = &|value: f64| format!("{value:.1}");
        Frame { title, x: "x", y: "y", show_x: show, show_y: show, y_chars: 6, white: false }
    }

    #[test]
    fn each_kind_of_plot_draws_its_shapes() {
        let series = |name: &str, points: &[(f64, f64)]| Series {
            name: name.into(),
            points: points.to_vec(),
        };
        let two = [series("one", &[(1.0, 1.0), (2.0, 3.0)]), series("two", &[(1.0, 2.0)])];
        let ranges = || (linear(1.0..3.0), linear(0.0..4.0));
        let legend = (3, SeriesLabelPosition::UpperLeft);
        let picture = lines(&frame("lines"), ranges, &two, legend).expect("drawn");
        for drawn in [&picture.wide, &picture.narrow] {
            assert!(drawn.contains("<polyline") && drawn.contains("one") && drawn.contains("two"));
            assert!(drawn.contains("<title>one: 3.0 y, 2.0 x</title>"), "{drawn}");
            assert_eq!(drawn.matches("<title>").count(), 3, "one for each point");
        }
        assert!(picture.wide.contains("lines") && !picture.narrow.contains("lines"), "its title");
        let groups =
            vec![("g".to_owned(), vec![Bar { height: 2.0, range: Some((1.0, 3.0)) }, 1.0.into()])];
        let count =
            |drawn: &str, colour: &str| drawn.matches(&format!("fill=\"{colour}\"")).count();
        for stacked in [false, true] {
            let picture = bars(&frame("bars"), &["a", "b"], &groups, stacked).expect("drawn");
            for drawn in [&picture.wide, &picture.narrow] {
                // The bar, and the sample of the legend.
                assert_eq!((count(drawn, "#0072B2"), count(drawn, "#E69F00")), (2, 2), "{drawn}");
                assert!(drawn.contains("<title>g, a: 2.00 (1.00 to 3.00) y</title>"), "{drawn}");
            }
        }
        let ranges = (0.0..10.0, 0.0..10.0);
        let drawn = cells(&frame("cells"), ranges, linear, &two).expect("drawn").wide;
        assert_eq!((count(&drawn, "#0072B2"), count(&drawn, "#E69F00")), (3, 2), "{drawn}");
        assert!(drawn.contains("<title>2.0 to 2.2 x, y 2.9 to 3.3: 1 one</title>"), "{drawn}");
    }

    #[test]
    fn distribution_ends_at_100_percent() {
        let points = distribution((1..=1000).map(f64::from).collect());
        assert_eq!(points.first(), Some(&(1.0, 0.1)));
        assert_eq!(points.last(), Some(&(1000.0, 100.0)));
        assert!(points.is_sorted() && distribution(Vec::new()).is_empty());
    }
}
