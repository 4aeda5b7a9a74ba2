//! Figures with lines or bars, as SVG and PNG.
//!
//! Burn is drawn orange, dashed and hollow, and ours blue, solid and filled, so that they also differ without colors. Where both are equal,
//! the dashes lie on the line. Measurements of other frameworks are single hollow points in gray. All parts of a drawing share units and styles,
//! and so one file.
use plotters::backend::BitMapBackend;
use plotters::chart::{ChartBuilder, ChartContext};
use plotters::coord::ranged1d::{AsRangedCoord, Ranged, ValueFormatter};
use plotters::element::{Circle, Cross, PathElement, Rectangle, Text, TriangleMarker};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{FontStyle, register_font};
use std::error::Error;
use std::fs;
use std::io::BufWriter;
use std::path::Path;

/// A figure of one or more panels with one legend.
pub struct Figure {
    /// The name of its files.
    pub name: String,
    pub title: String,
    /// How many panels stand side by side.
    pub columns: usize,
    pub panels: Vec<Panel>,
}

/// A plot.
pub struct Panel {
    pub title: String,
    pub x: Axis,
    pub y: Axis,
    pub series: Vec<Series>,
    /// If there are any, points are drawn as bars: the names of the numbers 0, 1, ... on the x axis.
    pub bars: Vec<String>,
}

/// An axis and its label, with a unit.
#[derive(Clone)]
pub struct Axis {
    pub label: String,
    pub scale: Scale,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Scale {
    /// Linear, from zero.
    Linear,
    /// Logarithmic: each tick is this many times (2 or 10) the one before. A short axis of base 10 has more (see [`ticks`]).
    Log(u8),
}

impl Axis {
    pub fn linear(label: &str) -> Self {
        Self { label: label.into(), scale: Scale::Linear }
    }

    pub fn log(label: &str, base: u8) -> Self {
        Self { label: label.into(), scale: Scale::Log(base) }
    }
}

/// Points that belong together.
#[derive(Clone)]
pub struct Series {
    pub name: String,
    pub style: Style,
    pub points: Vec<(f64, f64)>,
}

/// How points are drawn.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Style {
    pub whose: Whose,
    pub marker: Marker,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Whose {
    Burn,
    Ours,
    /// A formula or a prediction: a wide pale line below the others, without points.
    Formula,
    /// What must not be exceeded: a thin line without points.
    Limit,
    /// Another framework: points without a line.
    Peer,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Marker {
    Circle,
    Square,
    Triangle,
    Cross,
}

impl Marker {
    pub const ALL: [Self; 4] = [Self::Circle, Self::Square, Self::Triangle, Self::Cross];
}

impl Whose {
    /// The order in which series are drawn, the lowest first.
    const FROM_BELOW: [Self; 5] = [Self::Formula, Self::Limit, Self::Peer, Self::Ours, Self::Burn];

    fn colour(self) -> RGBColor {
        match self {
            Self::Burn => RGBColor(230, 130, 0),
            Self::Ours => RGBColor(0, 60, 130),
            Self::Formula => RGBColor(170, 205, 245),
            Self::Limit | Self::Peer => RGBColor(110, 110, 110),
        }
    }

    fn has_points(self) -> bool {
        !matches!(self, Self::Formula | Self::Limit)
    }
}

const PANEL: (u32, u32) = (380, 290);
/// How many ticks fit on an axis.
const MOST_TICKS: usize = 9;
const LEGEND_ROW: u32 = 24;
const TITLE: u32 = 40;
const FONT: &str = "sans-serif";
/// Pixels of the PNG per pixel of the SVG.
const SCALE: u32 = 2;

/// Writes `NAME.svg` and `NAME.png`.
///
/// # Errors
///
/// If a file cannot be written.
pub fn write(figure: &Figure, directory: &Path) -> Result<(), Box<dyn Error>> {
    let font = epaint_default_fonts::UBUNTU_LIGHT;
    register_font(FONT, FontStyle::Normal, font).map_err(|_| "the font is none")?;
    let path = directory.join(format!("{}.svg", figure.name));
    let size = size(figure, 1);
    {
        let root = SVGBackend::new(&path, size).into_drawing_area();
        draw(figure, &root, 1).map_err(|error| format!("{}: {error}", path.display()))?;
        root.present().map_err(|error| format!("{}: {error}", path.display()))?;
    }
    let size = self::size(figure, SCALE);
    let mut pixels = vec![0; (size.0 * size.1 * 3) as usize];
    {
        let root = BitMapBackend::with_buffer(&mut pixels, size).into_drawing_area();
        draw(figure, &root, SCALE)?;
        root.present()?;
    }
    let path = directory.join(format!("{}.png", figure.name));
    let file = fs::File::create(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    let mut encoder = png::Encoder::new(BufWriter::new(file), size.0, size.1);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    encoder.write_header()?.write_image_data(&pixels)?;
    Ok(())
}

/// The series of all panels, each pair of name and style once.
fn legend(figure: &Figure) -> Vec<(String, Style)> {
    let mut entries: Vec<(String, Style)> = vec![];
    for series in figure.panels.iter().flat_map(|panel| &panel.series) {
        let entry = (series.name.clone(), series.style);
        if !entries.contains(&entry) {
            entries.push(entry);
        }
    }
    entries
}

fn rows(count: usize, columns: usize) -> u32 {
    count.div_ceil(columns.max(1)) as u32
}

/// How many entries of the legend stand side by side.
fn legend_columns(figure: &Figure) -> usize {
    (columns(figure) as usize * PANEL.0 as usize / 250).max(1)
}

fn columns(figure: &Figure) -> u32 {
    figure.columns.clamp(1, figure.panels.len().max(1)) as u32
}

fn size(figure: &Figure, scale: u32) -> (u32, u32) {
    let legend = rows(legend(figure).len(), legend_columns(figure)) * LEGEND_ROW + 10;
    let panels = rows(figure.panels.len(), columns(figure) as usize);
    (scale * (columns(figure) * PANEL.0), scale * (TITLE + panels * PANEL.1 + legend))
}

type Area<DB> = DrawingArea<DB, plotters::coord::Shift>;

fn draw<DB: DrawingBackend>(figure: &Figure, root: &Area<DB>, scale: u32) -> Result<(), Box<dyn Error>>
where
    DB::ErrorType: 'static,
{
    root.fill(&WHITE)?;
    let font = |size: u32| (FONT, scale * size).into_font();
    let centre = font(19).color(&BLACK).pos(Pos::new(HPos::Center, VPos::Center));
    let width = root.dim_in_pixel().0 as i32;
    root.draw(&Text::new(figure.title.clone(), (width / 2, (scale * TITLE / 2) as i32), centre))?;
    let (_, below) = root.split_vertically(scale * TITLE);
    let panels = rows(figure.panels.len(), columns(figure) as usize) * PANEL.1 * scale;
    let (above, below) = below.split_vertically(panels);
    let areas = above.split_evenly((
        rows(figure.panels.len(), columns(figure) as usize) as usize,
        columns(figure) as usize,
    ));
    for (panel, area) in figure.panels.iter().zip(&areas) {
        draw_panel(panel, area, scale)?;
    }
    let count = legend_columns(figure);
    let column = width / count as i32;
    for (number, (name, style)) in legend(figure).into_iter().enumerate() {
        let s = scale as i32;
        let x = column * (number % count) as i32 + 24 * s;
        let y = (LEGEND_ROW as i32 * (number / count) as i32 + 12) * s;
        let is_bar = figure.panels.iter().any(|panel| !panel.bars.is_empty());
        if is_bar && style.whose.has_points() {
            let colour = style.whose.colour();
            below.draw(&Rectangle::new([(x, y - 6 * s), (x + 30 * s, y + 6 * s)], colour.filled()))?;
        } else {
            for dash in dashes(style.whose, x, x + 34 * s, s) {
                below.draw(&PathElement::new(dash.map(|x| (x, y)), stroke(style.whose, scale)))?;
            }
            mark(&below, style, (x + 17 * s, y), scale)?;
        }
        let left = font(14).color(&BLACK).pos(Pos::new(HPos::Left, VPos::Center));
        below.draw(&Text::new(name, (x + 42 * s, y), left))?;
    }
    Ok(())
}

fn stroke(whose: Whose, scale: u32) -> ShapeStyle {
    let width = match whose {
        Whose::Formula => 9,
        Whose::Limit => 1,
        Whose::Burn | Whose::Ours | Whose::Peer => 2,
    };
    whose.colour().stroke_width(width * scale)
}

/// A horizontal line as one piece or as dashes; none for points without a line.
fn dashes(whose: Whose, from: i32, to: i32, scale: i32) -> Vec<[i32; 2]> {
    let (dash, gap) = (6 * scale, 4 * scale);
    match whose {
        Whose::Burn => {
            (from..to).step_by((dash + gap) as usize).map(|at| [at, (at + dash).min(to)]).collect()
        }
        Whose::Peer => vec![],
        Whose::Ours | Whose::Formula | Whose::Limit => vec![[from, to]],
    }
}

fn mark<DB: DrawingBackend>(
    area: &Area<DB>,
    style: Style,
    at: (i32, i32),
    scale: u32,
) -> Result<(), DrawingAreaErrorKind<DB::ErrorType>> {
    let (colour, size) = (style.whose.colour(), 4 * scale as i32);
    let [fill, line] = [colour.filled(), colour.stroke_width(scale)];
    // A hollow marker hides the line below it.
    let ours = style.whose == Whose::Ours;
    let inner = if ours { fill } else { WHITE.filled() };
    let square = |size: i32| [(at.0 - size, at.1 - size), (at.0 + size, at.1 + size)];
    match (style.whose, style.marker) {
        (whose, _) if !whose.has_points() => Ok(()),
        (_, Marker::Circle) => {
            area.draw(&Circle::new(at, size, inner))?;
            area.draw(&Circle::new(at, size, line))
        }
        (_, Marker::Square) => {
            area.draw(&Rectangle::new(square(size), inner))?;
            area.draw(&Rectangle::new(square(size), line))
        }
        (_, Marker::Triangle) => {
            area.draw(&TriangleMarker::new(at, size * 3 / 2, fill))?;
            if ours { Ok(()) } else { area.draw(&TriangleMarker::new(at, size * 3 / 4, inner)) }
        }
        (_, Marker::Cross) => area.draw(&Cross::new(at, size, colour.stroke_width(2 * scale))),
    }
}

/// The range of an axis that holds all values.
fn range(values: impl Iterator<Item = f64> + Clone, scale: Scale, room: f64) -> std::ops::Range<f64> {
    let most = values.clone().fold(f64::MIN, f64::max).max(f64::MIN_POSITIVE);
    match scale {
        Scale::Linear => 0.0..if most > 1e-9 { most * room } else { 1.0 },
        Scale::Log(base) => {
            let least = values.filter(|&value| value > 0.0).fold(most, f64::min);
            // Below two decades, half a decade would leave too much of the axis empty.
            let base = if most < 100.0 * least { 2.0 } else { f64::from(base) };
            let step = |value: f64, round: fn(f64) -> f64| base.powf(round(value.log(base) * 2.0) / 2.0);
            let (low, high) = (step(least, f64::floor), step(most, f64::ceil));
            if low < high { low..high } else { low / base..high * base }
        }
    }
}

/// The ticks of a logarithmic axis: powers of the base, and for less than two decades of base 10 also 2 and 5 times these.
fn ticks(range: &std::ops::Range<f64>, base: u8) -> Vec<f64> {
    let is_short = base == 10 && range.end < 100.0 * range.start;
    let of_power: &[f64] = if is_short { &[1.0, 2.0, 5.0] } else { &[1.0] };
    let base = f64::from(base);
    let powers = range.start.log(base).floor() as i32..=range.end.log(base).ceil() as i32;
    let within = range.start * (1.0 - 1e-9)..=range.end * (1.0 + 1e-9);
    let all = powers.flat_map(|power| of_power.iter().map(move |times| times * base.powi(power)));
    let ticks: Vec<f64> = all.filter(|tick| within.contains(tick)).collect();
    let step = ticks.len().div_ceil(MOST_TICKS).max(1);
    ticks.into_iter().step_by(step).collect()
}

fn draw_panel<DB: DrawingBackend>(panel: &Panel, area: &Area<DB>, scale: u32) -> Result<(), Box<dyn Error>>
where
    DB::ErrorType: 'static,
{
    let points = || panel.series.iter().flat_map(|series| &series.points);
    let y = range(points().map(|point| point.1), panel.y.scale, 1.08);
    if !panel.bars.is_empty() {
        let x = -0.5..panel.bars.len() as f64 - 0.5;
        return draw_chart(panel, area, scale, x, y);
    }
    let x = range(points().map(|point| point.0), panel.x.scale, 1.03);
    let log = |range: std::ops::Range<f64>, base| {
        let ticks = ticks(&range, base);
        range.log_scale().with_key_points(ticks)
    };
    match (panel.x.scale, panel.y.scale) {
        (Scale::Linear, Scale::Linear) => draw_chart(panel, area, scale, x, y),
        (Scale::Log(base), Scale::Linear) => draw_chart(panel, area, scale, log(x, base), y),
        (Scale::Linear, Scale::Log(base)) => draw_chart(panel, area, scale, x, log(y, base)),
        (Scale::Log(of_x), Scale::Log(of_y)) => draw_chart(panel, area, scale, log(x, of_x), log(y, of_y)),
    }
}

/// A number on an axis.
fn tick(value: f64) -> String {
    match value.abs() {
        0.0 => "0".into(),
        large if large >= 10.0 => format!("{value:.0}"),
        middle if middle >= 1.0 => format!("{:.1}", value).trim_end_matches(".0").into(),
        small if small >= 1e-3 => format!("{value:.4}").trim_end_matches('0').trim_end_matches('.').into(),
        _ => format!("{value:.0e}"),
    }
}

fn draw_chart<DB, X, Y>(panel: &Panel, area: &Area<DB>, scale: u32, x: X, y: Y) -> Result<(), Box<dyn Error>>
where
    DB: DrawingBackend,
    DB::ErrorType: 'static,
    X: AsRangedCoord<Value = f64>,
    X::CoordDescType: ValueFormatter<f64>,
    Y: AsRangedCoord<Value = f64>,
    Y::CoordDescType: ValueFormatter<f64>,
{
    let font = |size: u32| (FONT, scale * size).into_font();
    let is_bars = !panel.bars.is_empty();
    let mut chart = ChartBuilder::on(area)
        .margin(10 * scale)
        .margin_right(18 * scale)
        .caption(&panel.title, font(16))
        .x_label_area_size(if is_bars { 62 } else { 44 } * scale)
        .y_label_area_size(64 * scale)
        .build_cartesian_2d(x, y)?;
    let none = |_: &f64| String::new();
    let mut mesh = chart.configure_mesh();
    mesh.light_line_style(TRANSPARENT)
        .bold_line_style(RGBColor(215, 215, 215).stroke_width(scale))
        .axis_style(BLACK.stroke_width(scale))
        .label_style(font(13))
        .axis_desc_style(font(14))
        .x_desc(&panel.x.label)
        .y_desc(&panel.y.label)
        .y_label_formatter(&|value: &f64| tick(*value))
        .y_labels(7)
        .x_labels(7);
    if is_bars {
        mesh.disable_x_mesh().x_label_formatter(&none).draw()?;
    } else {
        mesh.x_label_formatter(&|value: &f64| tick(*value)).draw()?;
    }
    if is_bars { draw_bars(panel, area, &mut chart, scale) } else { draw_lines(panel, area, &chart, scale) }
}

fn draw_lines<DB, X, Y>(
    panel: &Panel,
    area: &Area<DB>,
    chart: &ChartContext<'_, DB, Cartesian2d<X, Y>>,
    scale: u32,
) -> Result<(), Box<dyn Error>>
where
    DB: DrawingBackend,
    DB::ErrorType: 'static,
    X: Ranged<ValueType = f64>,
    Y: Ranged<ValueType = f64>,
{
    let corner = area.get_pixel_range();
    let (left, top) = (corner.0.start, corner.1.start);
    let of = |whose| panel.series.iter().filter(move |series| series.style.whose == whose);
    for series in Whose::FROM_BELOW.into_iter().flat_map(of) {
        let at = |point: &(f64, f64)| {
            let (x, y) = chart.backend_coord(point);
            (x - left, y - top)
        };
        let points: Vec<(i32, i32)> = series.points.iter().map(at).collect();
        for dash in along(&points, series.style.whose, scale) {
            area.draw(&PathElement::new(dash, stroke(series.style.whose, scale)))?;
        }
        for &point in &points {
            mark(area, series.style, point, scale)?;
        }
    }
    Ok(())
}

/// The lines from point to point, or their dashes.
fn along(points: &[(i32, i32)], whose: Whose, scale: u32) -> Vec<[(i32, i32); 2]> {
    let mut lines = vec![];
    for pair in points.windows(2) {
        let (from, to) = (pair[0], pair[1]);
        let (dx, dy) = (f64::from(to.0 - from.0), f64::from(to.1 - from.1));
        let length = dx.hypot(dy);
        let place = |at: i32| {
            let part = f64::from(at) / length;
            (from.0 + (dx * part).round() as i32, from.1 + (dy * part).round() as i32)
        };
        if length >= 1.0 {
            let dashes = dashes(whose, 0, length as i32, scale as i32);
            lines.extend(dashes.into_iter().map(|dash| dash.map(place)));
        }
    }
    lines
}

fn draw_bars<DB, X, Y>(
    panel: &Panel,
    area: &Area<DB>,
    chart: &mut ChartContext<'_, DB, Cartesian2d<X, Y>>,
    scale: u32,
) -> Result<(), Box<dyn Error>>
where
    DB: DrawingBackend,
    DB::ErrorType: 'static,
    X: Ranged<ValueType = f64>,
    Y: Ranged<ValueType = f64>,
{
    let groups = panel.series.len().max(1) as f64;
    for (number, series) in panel.series.iter().enumerate() {
        let colour = series.style.whose.colour();
        for &(x, y) in &series.points {
            let width = 0.8 / groups;
            let from = x - 0.4 + number as f64 * width;
            let bar = [(from, 0.0), (from + width * 0.92, y)];
            chart.draw_series([Rectangle::new(bar, colour.filled())])?;
        }
    }
    // Names in up to three lines below the bars.
    let corner = area.get_pixel_range();
    let style = (FONT, scale * 12).into_font().color(&BLACK).pos(Pos::new(HPos::Center, VPos::Top));
    for (number, name) in panel.bars.iter().enumerate() {
        let (x, y) = chart.backend_coord(&(number as f64, 0.0));
        for (line, text) in name.split_whitespace().enumerate() {
            let y = y - corner.1.start + (8 + 13 * line as i32) * scale as i32;
            area.draw(&Text::new(text.to_string(), (x - corner.0.start, y), style.clone()))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_hold_their_values() {
        assert_eq!(range([1.0, 4.0].into_iter(), Scale::Linear, 1.25), 0.0..5.0);
        assert_eq!(range([3.0, 16.0].into_iter(), Scale::Log(2), 1.0), 2f64.powf(1.5)..16.0);
        assert_eq!(range([4.0].into_iter(), Scale::Log(2), 1.0), 2.0..8.0);
        assert_eq!(range([].into_iter(), Scale::Linear, 1.0), 0.0..1.0);
    }

    #[test]
    fn a_logarithmic_axis_has_more_than_one_tick() {
        assert_eq!(range([4.0, 30.0].into_iter(), Scale::Log(10), 1.0), 4.0..32.0);
        assert_eq!(ticks(&(4.0..32.0), 10), [5.0, 10.0, 20.0]);
        assert_eq!(ticks(&(1.0..1000.0), 10), [1.0, 10.0, 100.0, 1000.0]);
        assert_eq!(ticks(&(16.0..64.0), 2), [16.0, 32.0, 64.0]);
        assert_eq!(ticks(&(1.0..1024.0), 2).len(), 6); // every other one
    }

    #[test]
    fn numbers_on_axes_are_short() {
        let ticks = [0.0, 0.05, 1.5, 2.0, 64.0, 1e-6].map(tick);
        assert_eq!(ticks, ["0", "0.05", "1.5", "2", "64", "1e-6"]);
    }

    #[test]
    fn both_files_are_written() {
        let directory = tempfile::tempdir().unwrap();
        let style = Style { whose: Whose::Burn, marker: Marker::Circle };
        let series = Series { name: "Burn".into(), style, points: vec![(1.0, 2.0), (2.0, 4.0)] };
        let panel = |bars: Vec<String>| Panel {
            title: "of two points".into(),
            x: Axis::log("layers", 2),
            y: Axis::linear("MiB"),
            series: vec![series.clone()],
            bars,
        };
        let panels = vec![panel(vec![]), panel(vec!["a".into(), "b".into(), "c d".into()])];
        let figure = Figure { name: "small".into(), title: "Small".into(), columns: 2, panels };
        write(&figure, directory.path()).unwrap();
        let svg = fs::read_to_string(directory.path().join("small.svg")).unwrap();
        assert!(svg.contains("of two points") && svg.contains("MiB"));
        assert!(fs::read(directory.path().join("small.png")).unwrap().starts_with(b"\x89PNG"));
    }
}
