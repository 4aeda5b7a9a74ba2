//! The low-rank adapter with a magnitude (DoRA), and the norms of columns that it needs.
use burn::module::{LoraAdapter, Module, Param, Reparameterization};
use burn::tensor::{DType, FloatDType, Tensor};

/// The adapter that [`Dora`](crate::lora::Dora) attaches.
#[derive(Module, Debug)]
pub struct DoraAdapter {
    /// The factors `a` `[d_input, rank]` and `b` `[rank, d_output]`.
    pub lora: LoraAdapter,
    /// The norm of each column of the effective weight, `[d_output]` (trainable). If it has no elements, `[0]`, the effective weight is
    /// `v` with its own norms: see [`without_adapters`](crate::lora::without_adapters).
    pub magnitude: Param<Tensor<1>>,
}

impl DoraAdapter {
    /// The adapter of a weight `[d_input, d_output]` with these factors. The magnitude is that of the weight with the factors applied.
    pub fn new(weight: Tensor<2>, lora: LoraAdapter) -> Self {
        let dtype = FloatDType::from(lora.a.val().dtype());
        let norms = column_norms(weight, &lora);
        let magnitude = Param::from_tensor(norms.cast(dtype));
        Self { lora, magnitude }
    }

    /// Whether there is a magnitude. In a model [without its adapters](crate::lora::without_adapters) there is none.
    pub(crate) fn has_magnitude(&self) -> bool {
        self.magnitude.val().dims() != [0]
    }
}

impl Reparameterization for DoraAdapter {
    const NAME: &'static str = "dora";

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        if !self.has_magnitude() {
            return self.lora.apply(base);
        }
        let [rows, columns] = [self.lora.a.dims()[0], self.lora.b.dims()[1]];
        let norms = column_norms(dense(base.clone()).reshape([rows, columns]), &self.lora);
        let v = self.lora.apply(base);
        let (dtype, mut row) = (v.dtype(), [1; D]);
        row[D - 1] = columns;
        let factor = self.magnitude.val().cast(FloatDType::from(norms.dtype())) / norms;
        v * factor.cast(dtype).reshape(row)
    }
}

/// A weight, dequantized if it is quantized.
pub(crate) fn dense<const D: usize>(weight: Tensor<D>) -> Tensor<D> {
    if matches!(weight.dtype(), DType::QFloat(_)) { weight.dequantize() } else { weight }
}

/// A block of rows whose squares are summed at once has at least this many elements.
const BLOCK: usize = 1 << 18;

/// The number of blocks, at most.
const STEPS: usize = 16;

/// The norms of the columns of `base + scale a b`, in f32 at least. They are not tracked, and not zero.
pub(crate) fn column_norms(base: Tensor<2>, lora: &LoraAdapter) -> Tensor<1> {
    let untracked = |x: Tensor<2>| x.detach().set_require_grad(false);
    let (base, a, b) = (untracked(base), untracked(lora.a.val()), untracked(lora.b.val()));
    let base = dense(base);
    let is_double = [&base, &a, &b].into_iter().any(|x| x.dtype() == DType::F64);
    let dtype = if is_double { DType::F64 } else { DType::F32 };
    let ([rows, columns], b) = (base.dims(), b.cast(dtype) * lora.scale);
    let step = BLOCK.max((rows * columns).div_ceil(STEPS)).div_ceil(columns.max(1));
    let mut squares = Tensor::<2>::zeros([1, columns], (&b.device(), dtype));
    for start in (0..rows).step_by(step) {
        let end = (start + step).min(rows);
        let part = |x: &Tensor<2>| x.clone().slice_dim(0, start..end).cast(dtype);
        let v = part(&a).matmul(b.clone()) + part(&base);
        squares = squares + v.square().sum_dim(0);
    }
    const LEAST: f64 = 1e-12;
    squares.sqrt().clamp_min(LEAST).reshape([columns])
}
