//! Axes of plots, and the values that have labels.

use super::{Area, Failure, Frame, GRID, Layout, font};
use plotters::coord::cartesian::Cartesian2d;
use plotters::coord::combinators::{BindKeyPointMethod, WithKeyPointMethod};
use plotters::coord::ranged1d::{
    AsRangedCoord, DefaultFormatting, KeyPointHint, Ranged, ValueFormatter,
};
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use std::ops::Range;

pub type Chart<'a, 'b, X, Y> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<X, Y>>;
type LogAxis = WithKeyPointMethod<LogCoord<f64>>;

/// The names of the places 0, 1, 2 and so on of a horizontal axis, in place of numbers.
pub struct Names<'a>(pub Vec<&'a str>);

/// Returns a logarithmic axis, with labels at 1, 2 and 5 of each power of ten or, on a long axis,
/// at powers only.
pub fn log_axis(range: Range<f64>) -> LogAxis {
    let (low, high) = (range.start, range.end);
    range.log_scale().with_key_point_func(move |most| log_labels(low, high, most))
}

/// Returns a logarithmic axis with labels at some of `values`, in order.
pub fn values(range: Range<f64>, values: &[f64]) -> LogAxis {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values.dedup();
    range.log_scale().with_key_point_func(move |most| {
        let step = values.len().div_ceil(most.max(1)).max(1);
        values.iter().copied().step_by(step).collect()
    })
}

/// Returns a linear axis.
pub fn linear(range: Range<f64>) -> RangedCoordf64 {
    range.into()
}

/// Returns a linear axis of places in a sorted list, with labels at the begins of the longest runs
/// without a gap. `begins` are the places at which a run begins.
pub fn ranks(range: Range<f64>, begins: Vec<usize>, count: usize) -> RankAxis {
    RankAxis { inner: range.into(), begins, count }
}

/// See [`ranks`].
pub struct RankAxis {
    inner: RangedCoordf64,
    begins: Vec<usize>,
    count: usize,
}

impl Ranged for RankAxis {
    type FormatOption = DefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        self.inner.map(value, limit)
    }

    fn range(&self) -> Range<f64> {
        self.inner.range()
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        if hint.weight().allow_light_points() {
            return Vec::new();
        }
        let labels = rank_labels(&self.begins, self.count, hint.max_num_points());
        labels.into_iter().map(|rank| rank as f64).collect()
    }
}

/// Returns at most `most` round values of a logarithmic axis, and at least five if `most` allows.
fn log_labels(low: f64, high: f64, most: usize) -> Vec<f64> {
    const ENOUGH: usize = 5;
    const STEPS: [&[f64]; 5] = [
        &[1.0],
        &[1.0, 3.0],
        &[1.0, 2.0, 5.0],
        &[1.0, 2.0, 3.0, 5.0, 7.0],
        &[1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0],
    ];
    let decades = low.log10().floor() as i32..=high.log10().ceil() as i32;
    let of = |steps: &[f64]| -> Vec<f64> {
        let all = decades.clone().flat_map(|ten| steps.iter().map(move |it| it * 10f64.powi(ten)));
        all.filter(|value| (low..=high).contains(value)).collect()
    };
    let thinned = |values: Vec<f64>| -> Vec<f64> {
        let step = values.len().div_ceil(most.max(1)).max(1);
        values.into_iter().step_by(step).collect()
    };
    let fits = STEPS.map(of).into_iter().filter(|it| (1..=most).contains(&it.len()));
    let mut best: Vec<f64> = Vec::new();
    for values in fits {
        if best.len() < ENOUGH && values.len() > best.len() {
            best = values;
        }
    }
    if !best.is_empty() {
        return best;
    }
    let powers = of(STEPS[0]);
    if !powers.is_empty() {
        return thinned(powers);
    }
    // The range is less than a step of the finest list: the labels are regular.
    let step = 10f64.powf(((high - low) / 2.0).log10().floor());
    let first = (low / step).ceil() as u64;
    thinned((first..=(high / step) as u64).map(|at| at as f64 * step).collect())
}

/// Returns at most `most` ranks below `count`, at a distance from each other: the begins of the
/// longest runs first, then ranks at regular distances.
fn rank_labels(begins: &[usize], count: usize, most: usize) -> Vec<usize> {
    let apart = count.div_ceil(most.max(1)).max(1);
    let ends = begins.iter().skip(1).copied().chain([count]);
    let mut runs: Vec<_> = begins.iter().copied().zip(ends).collect();
    runs.sort_by_key(|(begin, end)| std::cmp::Reverse(end - begin));
    let regular = (0..most).map(|at| at * apart).filter(|rank| *rank < count);
    let mut labels: Vec<usize> = Vec::new();
    for rank in runs.iter().map(|(begin, _)| *begin).chain(regular) {
        if labels.iter().all(|other| other.abs_diff(rank) >= apart) {
            labels.push(rank);
        }
    }
    labels.sort_unstable();
    labels
}

/// Draws the axes of a chart without data. With `names`, the horizontal axis has names instead of
/// numbers.
pub fn axes<'a, 'b, X, Y>(
    root: &'a Area<'b>,
    (frame, layout): (&Frame<'_>, Layout),
    (x, y): (X, Y),
    names: Option<&Names<'_>>,
) -> Result<Chart<'a, 'b, X::CoordDescType, Y::CoordDescType>, Failure>
where
    X: AsRangedCoord<Value = f64>,
    Y: AsRangedCoord<Value = f64>,
    X::CoordDescType: ValueFormatter<f64>,
    Y::CoordDescType: ValueFormatter<f64>,
{
    let line = layout.font + 4;
    let left = layout.width(frame.y_chars as usize) + line + 16;
    let lengths = names.iter().flat_map(|names| &names.0).map(|name| name.chars().count());
    let longest = lengths.max().unwrap_or(0);
    let place = layout.size.0.saturating_sub(left + 2 * layout.margin)
        / names.map_or(1, |names| names.0.len().max(1)) as u32;
    // Names wider than their places are drawn upright.
    let upright = layout.width(longest) > place;
    let below = if upright { layout.width(longest) + 16 } else { 2 * line + 4 };
    let mut builder = ChartBuilder::on(root);
    if let Some(caption) = layout.caption {
        builder.caption(frame.title, ("sans-serif", caption));
    }
    let mut chart = builder
        .margin(layout.margin)
        .x_label_area_size(below)
        .y_label_area_size(left)
        .build_cartesian_2d(x, y)?;
    let text = font(layout);
    let mut mesh = chart.configure_mesh();
    if names.is_some() {
        mesh.disable_x_mesh();
    }
    mesh.bold_line_style(GRID.mix(0.25))
        .max_light_lines(1)
        .light_line_style(TRANSPARENT)
        .x_labels(if names.is_some() { 0 } else { layout.labels.0 })
        .y_labels(layout.labels.1)
        .label_style(text.clone())
        .axis_desc_style(text.clone())
        .x_desc(frame.x)
        .y_desc(frame.y)
        .x_label_formatter(&|x| (frame.show_x)(*x))
        .y_label_formatter(&|y| (frame.show_y)(*y))
        .draw()?;
    let bottom = chart.plotting_area().get_pixel_range().1.end;
    for (at, name) in names.iter().flat_map(|names| names.0.iter().enumerate()) {
        let low = chart.y_range().start;
        let middle = chart.backend_coord(&(at as f64, low)).0;
        let style = if upright {
            text.clone().transform(FontTransform::Rotate90).pos(Pos::new(HPos::Left, VPos::Center))
        } else {
            text.clone().pos(Pos::new(HPos::Center, VPos::Top))
        };
        root.draw(&Text::new((*name).to_owned(), (middle, bottom + 8), style))?;
    }
    Ok(chart)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_of_a_logarithmic_axis_are_round_and_few() {
        assert_eq!(log_labels(8e5, 3e7, 10), [1e6, 2e6, 5e6, 1e7, 2e7]);
        assert_eq!(log_labels(8e5, 3e7, 4), [1e6, 3e6, 1e7, 3e7]);
        assert_eq!(log_labels(0.9, 1e9, 4), [1.0, 1e3, 1e6, 1e9]);
        assert_eq!(log_labels(2.1, 4.9, 10), [3.0, 4.0]);
        assert_eq!(log_labels(2.8e6, 2.4e7, 10), [3e6, 5e6, 7e6, 1e7, 2e7]);
        assert_eq!(log_labels(610.0, 640.0, 10), [610.0, 620.0, 630.0, 640.0]);
        for most in 1..12 {
            for high in [20.0, 9e3, 1e12] {
                let labels = log_labels(7.0, high, most);
                assert!(!labels.is_empty() && labels.len() <= most, "{most} {high}: {labels:?}");
            }
        }
    }

    #[test]
    fn rank_labels_are_spaced_starts_of_long_runs() {
        // Runs of 10, 2, 50 and 38 pages.
        let labels = rank_labels(&[0, 10, 12, 62], 100, 5);
        assert!(labels.contains(&12) && labels.contains(&62), "{labels:?}");
        assert!(labels.len() <= 5 && labels.windows(2).all(|it| it[1] - it[0] >= 20));
        assert_eq!(rank_labels(&[0], 0, 5), [0]);
    }
}
