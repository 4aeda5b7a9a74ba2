//! [`Chart`]: plots of bytes over a sequence of points, as SVG.
use super::bytes::human_bytes;
use std::fmt::Write;

const WIDTH: f64 = 960.0;
const HEIGHT: f64 = 480.0;
const LEFT: f64 = 90.0;
const RIGHT: f64 = WIDTH - 20.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = HEIGHT - 50.0;
/// The room that a label below needs to either side.
const HALF_LABEL: f64 = 70.0;
/// The distance between the entries of the legend.
const ENTRY: f64 = 130.0;

/// A plot to which elements are added.
pub(super) struct Chart {
    svg: String,
    /// The index at the right.
    last: f64,
    /// The bytes at the top.
    most: f64,
}

impl Chart {
    /// A plot with the axis of bytes. `points` is the number of points, and `most` the bytes of the highest.
    pub(super) fn new(points: usize, most: u64) -> Self {
        let svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" font-size=\"12\">\n\
             <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"white\"/>\n"
        );
        let last = points.saturating_sub(1).max(1) as f64;
        let mut chart = Self { svg, last, most: most.max(1) as f64 };
        for tick in 0..=4 {
            let bytes = (chart.most * f64::from(tick) / 4.0) as u64;
            let (at, text) = (chart.y(bytes), human_bytes(bytes));
            chart.push(&format!(
                "<line x1=\"{}\" y1=\"{at:.1}\" x2=\"{LEFT}\" y2=\"{at:.1}\" stroke=\"black\"/>",
                LEFT - 5.0
            ));
            let [x, y] = [LEFT - 8.0, at + 4.0];
            chart.push(&format!("<text x=\"{x}\" y=\"{y:.1}\" text-anchor=\"end\">{text}</text>"));
        }
        chart
    }

    fn push(&mut self, element: &str) {
        self.svg.push_str(element);
        self.svg.push('\n');
    }

    fn x(&self, index: f64) -> f64 {
        LEFT + (RIGHT - LEFT) * index / self.last
    }

    fn y(&self, bytes: u64) -> f64 {
        TOP + (BOTTOM - TOP) * (1.0 - bytes as f64 / self.most)
    }

    fn points(&self, points: impl Iterator<Item = (f64, u64)>) -> String {
        let mut text = String::new();
        for (index, bytes) in points {
            let _ = write!(text, "{:.1},{:.1} ", self.x(index), self.y(bytes)); // a string takes it
        }
        text.trim_end().into()
    }

    /// The area between two lines.
    pub(super) fn area(&mut self, above: &[u64], below: &[u64], color: &str, name: &str) {
        let line = |bytes: &[u64]| -> Vec<_> {
            bytes.iter().enumerate().map(|(index, &bytes)| (index as f64, bytes)).collect()
        };
        let points = self.points(line(above).into_iter().chain(line(below).into_iter().rev()));
        self.push(&format!("<polygon points=\"{points}\" fill=\"{color}\"><title>{name}</title></polygon>"));
    }

    /// A line through points. Of a single point, it goes to the right end; without points, there is none.
    pub(super) fn line(&mut self, points: impl Iterator<Item = (f64, u64)>, color: &str, name: &str) {
        let mut points: Vec<_> = points.collect();
        if let [(_, bytes)] = points[..] {
            points.push((self.last, bytes));
        }
        let points = self.points(points.into_iter());
        if !points.is_empty() {
            self.push(&format!(
                "<polyline points=\"{points}\" fill=\"none\" stroke=\"{color}\"><title>{name}</title></polyline>"
            ));
        }
    }

    /// Names a color, at a place of the legend.
    pub(super) fn legend(&mut self, place: usize, color: &str, name: &str) {
        let x = LEFT + ENTRY * place as f64;
        self.push(&format!("<rect x=\"{x}\" y=\"12\" width=\"12\" height=\"12\" fill=\"{color}\"/>"));
        self.push(&format!("<text x=\"{}\" y=\"22\">{name}</text>", x + 17.0));
    }

    /// A vertical line at a point, with a label below.
    pub(super) fn mark(&mut self, index: usize, text: &str) {
        let x = self.x(index as f64);
        let [low, below] = [BOTTOM + 5.0, BOTTOM + 20.0];
        let anchor = if x > RIGHT - HALF_LABEL { "end" } else { "middle" };
        self.push(&format!("<line x1=\"{x:.1}\" y1=\"{TOP}\" x2=\"{x:.1}\" y2=\"{low}\" stroke=\"black\"/>"));
        self.push(&format!("<text x=\"{x:.1}\" y=\"{below}\" text-anchor=\"{anchor}\">{text}</text>"));
    }

    /// The whole plot.
    pub(super) fn finish(mut self) -> String {
        self.push("</svg>");
        self.svg
    }
}
