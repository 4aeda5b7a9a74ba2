//! Linear maps along spatial axes with fixed weights: average pools and interpolations.
//!
//! `y[o] = sum_i weight[o, i] x[i]` per axis, and the product of that over the axes. A window of non-zero weights per
//! output is all there is to know; the adjoint `dx[i] = sum_o weight[o, i] dy[o]` needs no input. The map itself is Burn's, but for
//! half precision on the CPU.
use burn::backend::{Backend, tensor::FloatTensor};
use burn::tensor::Shape;

/// Backends with kernels for them.
pub trait AxisMaps: Backend {
    /// `floor((output + shift) * size / out)`, as the backend computes it.
    fn nearest_input(output: usize, shift: Shift, resized: Resized) -> usize;

    /// `y` of `x` in half precision, `[batch, channels, ...]`, one map per spatial axis, summed in f32; on CPU backends only.
    fn image_of_half(_: &FloatTensor<Self>, _: impl FnOnce() -> Vec<AxisMap>) -> Option<FloatTensor<Self>> {
        None
    }

    /// `dx` of shape `x`, `[batch, channels, ...]`, from `dy`, one map per spatial axis.
    fn axis_adjoint(x: Shape, dy: FloatTensor<Self>, axes: Vec<AxisMap>) -> FloatTensor<Self>;
}

/// What is added to the number of an output.
#[derive(Clone, Copy, Debug)]
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
    /// How many outputs there are for an input, where that is not the quotient of the sizes.
    pub factor: Option<f64>,
    /// Whether the corners of input and output lie on each other.
    pub align_corners: bool,
}

impl Resized {
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
    /// How many they are.
    pub len: usize,
    pub weights: Weights,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Weights {
    /// The same for every input.
    Equal(f64),
    /// One per input, from here on in the weights of the axis.
    From(usize),
}

impl AxisMap {
    /// Windows of equal weights, from `(first input, how many, weight)` for every output.
    pub(super) fn equal(size: usize, outputs: impl Iterator<Item = (usize, usize, f64)>) -> Self {
        let window = |(start, len, weight)| Window { start, len, weights: Weights::Equal(weight) };
        Self { size, windows: outputs.map(window).collect(), weights: vec![] }
    }

    /// From `(input, weight)` for every output, in any order, inputs repeated or not.
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

    /// [`AxisMaps::nearest_input`].
    pub(crate) fn nearest<B: AxisMaps>(resized: Resized, shift: Shift) -> Self {
        let Resized { size, out, .. } = resized;
        let index = |o| B::nearest_input(o, shift, resized).min(size - 1);
        Self::equal(size, (0..out).map(|o| (index(o), 1, 1.0)))
    }

    /// Linear interpolation between the two inputs around.
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

    /// Cubic convolution (Keys, a = -0.75) of the four inputs around; the border is repeated.
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

    /// Sinc of width 3 of the six inputs around, normalized; inputs outside are left out.
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
