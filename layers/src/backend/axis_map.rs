//! Linear maps along spatial axes with fixed weights: average pools and interpolations.
//!
//! Along one axis `y[o] = sum_i weight[o, i] x[i]`, and over several axes the map is the product of those along each. A window of
//! non-zero weights per output describes a map. The adjoint, `dx[i] = sum_o weight[o, i] dy[o]`, does not read the input. The map itself
//! is computed by Burn, except in half precision on the CPU.
use burn::backend::{Backend, tensor::FloatTensor};
use burn::tensor::Shape;

/// The kernels.
pub trait AxisMaps: Backend {
    /// `floor((output + shift) * size / out)`, rounded as the backend rounds it.
    fn nearest_input(output: usize, shift: Shift, resized: Resized) -> usize;

    /// `y` of an `x` `[batch, channels, ...]` in half precision, with one map per spatial axis, summed in f32. `None` for other dtypes, and
    /// on devices.
    fn image_of_half(_: &FloatTensor<Self>, _: impl FnOnce() -> Vec<AxisMap>) -> Option<FloatTensor<Self>> {
        None
    }

    /// `dx` of shape `x`, `[batch, channels, ...]`, from `dy`, with one map per spatial axis.
    fn axis_adjoint(x: Shape, dy: FloatTensor<Self>, axes: Vec<AxisMap>) -> FloatTensor<Self>;

    /// The same for maps that follow a rule: devices compute windows where they need them, so that no table is made and sent.
    fn regular_adjoint(x: Shape, dy: FloatTensor<Self>, axes: Vec<Regular>) -> FloatTensor<Self> {
        Self::axis_adjoint(x, dy, axes.iter().map(Regular::map::<Self>).collect())
    }
}

/// A map of an axis whose windows and weights follow from a rule.
#[derive(Clone, Copy, Debug)]
pub struct Regular {
    pub axis: Resized,
    pub rule: Rule,
}

/// Which inputs an output has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rule {
    /// The mean of a window.
    Windows { kernel: usize, stride: usize, padding: (usize, usize), count_include_pad: bool },
    /// The mean of an equal share of the inputs.
    Adaptive,
    /// The nearest input, by [`AxisMaps::nearest_input`].
    Nearest(Shift),
}

impl Regular {
    pub(crate) fn map<B: AxisMaps>(&self) -> AxisMap {
        let Resized { size, out, .. } = self.axis;
        match self.rule {
            Rule::Windows { kernel, stride, padding, count_include_pad } => {
                AxisMap::mean_windows(size, out, kernel, stride, padding, count_include_pad)
            }
            Rule::Adaptive => AxisMap::adaptive_mean(size, out),
            Rule::Nearest(shift) => AxisMap::nearest::<B>(self.axis, shift),
        }
    }
}

/// What is added to the index of an output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Shift {
    /// 0
    None,
    /// 1/2
    Half,
}

/// An axis of `size` that is resized to `out`.
#[derive(Clone, Copy, Debug)]
pub struct Resized {
    /// Elements of the input.
    pub size: usize,
    /// Elements of the output.
    pub out: usize,
    /// Outputs per input, where that is not `out / size`.
    pub factor: Option<f64>,
    /// Whether the first and last elements of input and output coincide.
    pub align_corners: bool,
}

impl Resized {
    /// From one size to another one.
    pub(crate) fn between(size: usize, out: usize) -> Self {
        Self { size, out, factor: None, align_corners: false }
    }

    /// Where output `o` lies on the axis of the input.
    fn coordinate(self, o: usize) -> f64 {
        let (size, out) = (self.size as f64, self.out as f64);
        if self.align_corners {
            o as f64 * ((size - 1.0) / (self.out.max(2) - 1) as f64)
        } else {
            (o as f64 + 0.5) * self.factor.map_or(size / out, f64::recip) - 0.5
        }
    }
}

/// The weights of one axis.
#[derive(Clone, Debug)]
pub struct AxisMap {
    pub(super) size: usize,
    pub(super) windows: Vec<Window>,
    pub(super) weights: Vec<f64>,
}

/// The inputs of one output.
#[derive(Clone, Copy, Debug)]
pub(super) struct Window {
    /// The first input.
    pub start: usize,
    /// The number of inputs.
    pub len: usize,
    pub weights: Weights,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Weights {
    /// The same for every input.
    Equal(f64),
    /// One per input; the first of them has this index in [`AxisMap::weights`].
    From(usize),
}

impl AxisMap {
    /// Windows of equal weights, from `(first input, number of inputs, weight)` for every output.
    pub(super) fn equal(size: usize, outputs: impl Iterator<Item = (usize, usize, f64)>) -> Self {
        let window = |(start, len, weight)| Window { start, len, weights: Weights::Equal(weight) };
        Self { size, windows: outputs.map(window).collect(), weights: vec![] }
    }

    /// From the pairs `(input, weight)` of every output, in any order. The weights of an input that occurs more than once are added up.
    fn from_taps(size: usize, outputs: impl Iterator<Item = Vec<(usize, f64)>>) -> Self {
        let mut weights = vec![];
        let window = |taps: Vec<(usize, f64)>| {
            let start = taps.iter().map(|tap| tap.0).min().unwrap_or(0);
            let end = taps.iter().map(|tap| tap.0 + 1).max().unwrap_or(0);
            let first = weights.len();
            weights.resize(first + end - start, 0.0);
            taps.into_iter().for_each(|(input, weight)| weights[first + input - start] += weight);
            Window { start, len: end - start, weights: Weights::From(first) }
        };
        let windows = outputs.map(window).collect();
        Self { size, windows, weights }
    }

    /// Windows of an average pool.
    pub(crate) fn mean_windows(
        size: usize,
        out: usize,
        kernel: usize,
        stride: usize,
        (begin, end): (usize, usize),
        count_include_pad: bool,
    ) -> Self {
        Self::equal(
            size,
            (0..out).map(|window| {
                let padded = window * stride..(window * stride + kernel).min(size + begin + end);
                let valid = padded.start.max(begin)..padded.end.min(size + begin);
                let count = if count_include_pad { padded.len() } else { valid.len() };
                (valid.start.min(size + begin) - begin, valid.len(), 1.0 / count.max(1) as f64)
            }),
        )
    }

    /// Windows of an adaptive average pool.
    pub(crate) fn adaptive_mean(size: usize, out: usize) -> Self {
        Self::equal(
            size,
            (0..out).map(|window| {
                let start = window * size / out;
                let len = ((window + 1) * size).div_ceil(out) - start;
                (start, len, 1.0 / len as f64)
            }),
        )
    }

    /// The nearest input, by [`AxisMaps::nearest_input`].
    pub(crate) fn nearest<B: AxisMaps>(resized: Resized, shift: Shift) -> Self {
        let Resized { size, out, .. } = resized;
        let index = |o| B::nearest_input(o, shift, resized).min(size - 1);
        Self::equal(size, (0..out).map(|o| (index(o), 1, 1.0)))
    }

    /// Linear interpolation between the two nearest inputs.
    pub(crate) fn linear(resized: Resized) -> Self {
        let Resized { size, out, .. } = resized;
        Self::from_taps(
            size,
            (0..out).map(|o| {
                let at = resized.coordinate(o).clamp(0.0, size as f64 - 1.0);
                let low = at.floor() as usize;
                vec![(low, 1.0 - (at - low as f64)), ((low + 1).min(size - 1), at - low as f64)]
            }),
        )
    }

    /// Cubic convolution (Keys, a = -0.75) of the four nearest inputs; the border is repeated.
    pub(crate) fn cubic(resized: Resized) -> Self {
        const A: f64 = -0.75;
        let Resized { size, out, .. } = resized;
        let weight = |t: f64| match t.abs() {
            t if t < 1.0 => ((A + 2.0) * t - (A + 3.0)) * t * t + 1.0,
            t if t < 2.0 => ((A * t - 5.0 * A) * t + 8.0 * A) * t - 4.0 * A,
            _ => 0.0,
        };
        Self::from_taps(
            size,
            (0..out).map(|o| {
                let at = resized.coordinate(o);
                let base = at.floor();
                let tap = |offset: i64| {
                    let input = (base as i64 + offset).clamp(0, size as i64 - 1) as usize;
                    (input, weight(at - base - offset as f64))
                };
                (-1..=2).map(tap).collect()
            }),
        )
    }

    /// Windowed sinc of width 3 of the six nearest inputs, normalized; inputs beyond the border are left out.
    pub(crate) fn lanczos3(resized: Resized) -> Self {
        let Resized { size, out, .. } = resized;
        let weight = |t: f64| {
            let pi_t = core::f64::consts::PI * t;
            if t == 0.0 {
                1.0
            } else if t.abs() >= 3.0 {
                0.0
            } else {
                3.0 * pi_t.sin() * (pi_t / 3.0).sin() / (pi_t * pi_t)
            }
        };
        Self::from_taps(
            size,
            (0..out).map(|o| {
                let at = resized.coordinate(o);
                let base = at.floor();
                let inputs =
                    (-2..=3).map(|offset| base as i64 + offset).filter(|i| (0..size as i64).contains(i));
                let taps: Vec<_> = inputs.map(|input| (input as usize, weight(at - input as f64))).collect();
                let sum: f64 = taps.iter().map(|tap| tap.1).sum();
                let sum = if sum == 0.0 { 1.0 } else { sum };
                taps.into_iter().map(|(input, weight)| (input, weight / sum)).collect()
            }),
        )
    }
}
