//! The kernels on a CPU: fused loops that compute the statistics of a row while it is in the cache.
//!
//! If gradients of gamma or beta are wanted, a thread has sums for these in f64 besides the tensors, and sums of a few rows for both in the
//! type that sums are made in. All threads together hold as many elements as a quarter of `x`, or those of one thread if that is more.
use super::{NormGrads, RowNorm, RowNormKernels};
use crate::backend::cpu::{
    CpuBackend, CpuElement,
    parallel::{self, vectorized},
    sums::{self, LANES, Moments, Sum},
    with_element,
};
use burn::backend::{TensorMetadata, tensor::FloatTensor};
use burn::tensor::{DType, Shape, bf16, f16};
use num_traits::{One, Zero};

impl<B: CpuBackend> RowNormKernels for B {
    fn row_norm(
        x: FloatTensor<B>,
        gamma: Option<FloatTensor<B>>,
        beta: Option<FloatTensor<B>>,
        norm: &RowNorm,
    ) -> FloatTensor<B> {
        let (x, gamma, beta) = (B::contiguous(x), gamma.map(B::contiguous), beta.map(B::contiguous));
        with_element!(x.dtype(), "row_norm", E => {
            let [gamma, beta] = [&gamma, &beta].map(|tensor| tensor.as_ref().map(B::as_slice::<E>));
            let parameters = Parameters::new(norm, gamma, beta);
            B::from_vec(forward(B::as_slice::<E>(&x), norm, &parameters), x.shape())
        })
    }

    fn row_norm_backward(
        x: FloatTensor<B>,
        gamma: Option<FloatTensor<B>>,
        norm: &RowNorm,
        dy: FloatTensor<B>,
        wanted: [bool; 3],
    ) -> NormGrads<B> {
        let (x, gamma, mut dy) = (B::contiguous(x), gamma.map(B::contiguous), B::contiguous(dy));
        let [wants_x, of_parameters @ ..] = wanted;
        with_element!(x.dtype(), "row_norm", E => {
            let parameters = Parameters::new(norm, gamma.as_ref().map(B::as_slice::<E>), None);
            let x = B::as_slice::<E>(&x);
            let grads = match wants_x {
                true => backward(x, norm, &parameters, B::as_slice_mut(&mut dy), of_parameters),
                false => parameters_backward(x, norm, &parameters, B::as_slice(&dy), of_parameters),
            };
            let [gamma_grad, beta_grad] = grads.into_vecs::<E>();
            let parameter = |wanted: bool, grad| {
                wanted.then(|| B::from_vec(grad, Shape::new([norm.parameters()])))
            };
            NormGrads {
                gamma: parameter(wanted[1], gamma_grad),
                beta: parameter(wanted[2], beta_grad),
                x: wants_x.then_some(dy),
            }
        })
    }
}

/// The parameters of a normalization, in the type that it computes in.
struct Parameters<A> {
    gamma: Vec<A>,
    beta: Vec<A>,
}

impl<A: CpuElement<Acc = A>> Parameters<A> {
    /// A missing gamma counts as 1, a missing beta as 0.
    fn new<E: CpuElement<Acc = A>>(norm: &RowNorm, gamma: Option<&[E]>, beta: Option<&[E]>) -> Self {
        let widened = |values: Option<&[E]>, otherwise: A| match values {
            Some(values) => values.iter().map(|value| value.widen()).collect(),
            None => vec![otherwise; norm.parameters()],
        };
        Self { gamma: widened(gamma, <A as One>::one()), beta: widened(beta, <A as Zero>::zero()) }
    }
}

/// The mean of a row (0 where it is not subtracted) and the inverse of its standard deviation.
#[inline(always)]
pub(crate) fn statistics<E: CpuElement>(row: &[E], norm: &RowNorm) -> [E::Acc; 2] {
    let count = row.len() as f64;
    let mean = if norm.centered { vectorized(Sum { values: row, f: |x: E| x.widen() }) / count } else { 0.0 };
    let mean = <E::Acc as CpuElement>::from_f64(mean);
    let squares = vectorized(Sum { values: row, f: |x: E| (x.widen() - mean) * (x.widen() - mean) });
    [mean, <E::Acc as CpuElement>::from_f64((squares / count + norm.epsilon).sqrt().recip())]
}

/// The parameters of row number `at`.
fn of_row<'a, T>(values: &'a [T], norm: &RowNorm, at: usize) -> &'a [T] {
    let start = at % norm.groups * norm.channels;
    &values[start..start + norm.channels]
}

/// `(x - mean) / std * gamma + beta`
fn forward<E: CpuElement>(x: &[E], norm: &RowNorm, parameters: &Parameters<E::Acc>) -> Vec<E> {
    let size = norm.row();
    if x.is_empty() {
        return vec![];
    }
    let task = parallel::items_per_task(x.len() / size, size);
    parallel::filled(x.len(), E::zero(), task * size, x.len(), |index, y| {
        let rows = y.chunks_exact_mut(size).zip(x[index * task * size..].chunks_exact(size));
        for (at, (y, x)) in (index * task..).zip(rows) {
            let [mean, inv_std] = statistics(x, norm);
            let gamma = of_row(&parameters.gamma, norm, at).iter();
            let parameters = gamma.zip(of_row(&parameters.beta, norm, at));
            if norm.inner == 1 {
                for ((y, &x), (&gamma, &beta)) in y.iter_mut().zip(x).zip(parameters) {
                    *y = E::narrow((x.widen() - mean) * inv_std * gamma + beta);
                }
            } else {
                let channels = y.chunks_exact_mut(norm.inner).zip(x.chunks_exact(norm.inner));
                for ((y, x), (&gamma, &beta)) in channels.zip(parameters) {
                    let scale = inv_std * gamma;
                    let each = y.iter_mut().zip(x);
                    each.for_each(|(y, &x)| *y = E::narrow((x.widen() - mean) * scale + beta));
                }
            }
        }
    })
}

/// Sums over rows, one per parameter.
struct ParameterGrads {
    gamma: Vec<f64>,
    beta: Vec<f64>,
}

impl ParameterGrads {
    /// Zeros for the wanted ones of gamma and beta; nothing for the others.
    fn new(norm: &RowNorm, wanted: [bool; 2]) -> Self {
        let [gamma, beta] = wanted.map(|wanted| if wanted { vec![0.0; norm.parameters()] } else { vec![] });
        Self { gamma, beta }
    }

    fn add(mut self, other: Self) -> Self {
        let add = |to: &mut [f64], from: &[f64]| to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
        add(&mut self.gamma, &other.gamma);
        add(&mut self.beta, &other.beta);
        self
    }

    /// The gradients of gamma and of beta.
    fn into_vecs<E: CpuElement>(self) -> [Vec<E>; 2] {
        [self.gamma, self.beta].map(|sums| sums.into_iter().map(E::from_f64).collect())
    }
}

impl RowNorm {
    /// Whether every element of a row has parameters of its own, and every row the same.
    fn has_rows_of_parameters(&self) -> bool {
        self.inner == 1 && self.groups == 1
    }
}

/// The sums over the rows that a thread visits.
struct Visit<'a, E: CpuElement> {
    norm: &'a RowNorm,
    gamma: &'a [E::Acc],
    grads: ParameterGrads,
    /// If there are [rows of parameters](RowNorm::has_rows_of_parameters): the sums of a few rows, for gamma and beta, that are not yet in
    /// `grads`; empty if neither is wanted. To add in this type is faster, but loses precision over many rows.
    few: Option<[Vec<E::Acc>; 2]>,
    /// The number of rows in `few`.
    rows: usize,
}

/// `dx = inv_std * (gamma * dy - mean_dy - x_hat * mean_product)`, `x_hat = (x - mean) * inv_std`
struct Line<A> {
    mean: A,
    inv_std: A,
    mean_dy: A,
    mean_product: A,
}

impl<'a, E: CpuElement> Visit<'a, E> {
    /// Rows that are added up in the type of the elements.
    const FEW: usize = 32;

    fn new(norm: &'a RowNorm, gamma: &'a [E::Acc], wanted: [bool; 2]) -> Self {
        let channels = if wanted == [false; 2] { 0 } else { norm.channels };
        let few = || vec![<E::Acc as Zero>::zero(); channels];
        let few = norm.has_rows_of_parameters().then(|| [few(), few()]);
        Self { norm, gamma, grads: ParameterGrads::new(norm, wanted), few, rows: 0 }
    }

    /// Adds row number `at` to the gradients of the parameters, and returns what its `dx` is computed from.
    fn add(&mut self, at: usize, x: &[E], dy: &[E]) -> Line<E::Acc> {
        let [mean, inv_std] = statistics(x, self.norm);
        let start = at % self.norm.groups * self.norm.channels;
        let [sum, product] = match &mut self.few {
            Some([few, _]) if few.is_empty() => sums_of_row(x, dy, self.gamma, [mean, inv_std]),
            Some(few) => {
                if self.rows == Self::FEW {
                    flush(few, &mut self.grads);
                    self.rows = 0;
                }
                self.rows += 1;
                add_elements(x, dy, self.gamma, [mean, inv_std], few)
            }
            None => {
                let inv_std = inv_std.into_f64();
                let inner = self.norm.inner;
                let mut sums = [0.0; 2];
                for (channel, (x, dy)) in (start..).zip(x.chunks_exact(inner).zip(dy.chunks_exact(inner))) {
                    let [sum, product] = vectorized(Moments { x, dy, mean });
                    let gamma = self.gamma[channel].into_f64();
                    let parameters = [&mut self.grads.gamma, &mut self.grads.beta];
                    for (grads, value) in parameters.into_iter().zip([product * inv_std, sum]) {
                        grads.get_mut(channel).into_iter().for_each(|grad| *grad += value);
                    }
                    sums = [sums[0] + gamma * sum, sums[1] + gamma * product * inv_std];
                }
                sums
            }
        };
        let count = x.len() as f64;
        let average = |sum: f64| <E::Acc as CpuElement>::from_f64(sum / count);
        let mean_dy = if self.norm.centered { average(sum) } else { <E::Acc as Zero>::zero() };
        Line { mean, inv_std, mean_dy, mean_product: average(product) }
    }

    /// Replaces the `dy` of row number `at` by its `dx`.
    fn replace(&self, at: usize, line: &Line<E::Acc>, x: &[E], dy: &mut [E]) {
        let Line { mean, inv_std, mean_dy, mean_product } = *line;
        let dx = |x: E, dy: E, gamma: E::Acc| {
            let x_hat = (x.widen() - mean) * inv_std;
            E::narrow(inv_std * (gamma * dy.widen() - mean_dy - x_hat * mean_product))
        };
        let gamma = of_row(self.gamma, self.norm, at);
        if self.norm.inner == 1 {
            dy.iter_mut().zip(x).zip(gamma).for_each(|((dy, &x), &gamma)| *dy = dx(x, *dy, gamma));
        } else {
            let channels = dy.chunks_exact_mut(self.norm.inner).zip(x.chunks_exact(self.norm.inner));
            for ((dy, x), &gamma) in channels.zip(gamma) {
                dy.iter_mut().zip(x).for_each(|(dy, &x)| *dy = dx(x, *dy, gamma));
            }
        }
    }

    fn finish(mut self) -> ParameterGrads {
        if let Some(few) = &mut self.few {
            flush(few, &mut self.grads);
        }
        self.grads
    }
}

/// Moves the sums of a few rows to the others.
fn flush<A: CpuElement>(few: &mut [Vec<A>; 2], grads: &mut ParameterGrads) {
    for (few, sums) in few.iter_mut().zip([&mut grads.gamma, &mut grads.beta]) {
        for (few, sum) in few.iter_mut().zip(sums) {
            *sum += few.into_f64();
            *few = A::zero();
        }
    }
}

/// The sums over a row of `gamma * dy` and of `gamma * dy * x_hat`, in lanes.
struct RowSums<A> {
    sums: [A; LANES],
    products: [A; LANES],
}

impl<A: CpuElement<Acc = A>> RowSums<A> {
    fn new() -> Self {
        Self { sums: sums::zeros(), products: sums::zeros() }
    }

    #[inline(always)]
    fn add(&mut self, lane: usize, x_hat: A, dy: A, gamma: A) {
        self.sums[lane] = self.sums[lane] + gamma * dy;
        self.products[lane] = self.products[lane] + gamma * dy * x_hat;
    }

    /// Of the first lane alone, if the row has no more.
    fn total(self, lanes: bool) -> [f64; 2] {
        let total = |sums: [A; LANES]| if lanes { sums::total(sums) } else { sums[0].into_f64() };
        [total(self.sums), total(self.products)]
    }
}

/// The sums of [`RowSums`] of a row.
#[inline(always)]
fn sums_of_row<E: CpuElement>(x: &[E], dy: &[E], gamma: &[E::Acc], [mean, inv_std]: [E::Acc; 2]) -> [f64; 2] {
    let mut of_row = RowSums::new();
    let mut add = |lane: usize, x: E, dy: E, gamma: E::Acc| {
        of_row.add(lane, (x.widen() - mean) * inv_std, dy.widen(), gamma);
    };
    let (x, x_rest) = x.as_chunks::<LANES>();
    let (dy, dy_rest) = dy.as_chunks::<LANES>();
    let (gamma, gamma_rest) = gamma.as_chunks::<LANES>();
    let lanes = !x.is_empty();
    for ((x, dy), gamma) in x.iter().zip(dy).zip(gamma) {
        for lane in 0..LANES {
            add(lane, x[lane], dy[lane], gamma[lane]);
        }
    }
    for ((&x, &dy), &gamma) in x_rest.iter().zip(dy_rest).zip(gamma_rest) {
        add(0, x, dy, gamma);
    }
    of_row.total(lanes)
}

/// Adds `dy * x_hat` and `dy` of every element to the sums of its parameter; returns those of [`RowSums`].
#[inline(always)]
fn add_elements<E: CpuElement>(
    x: &[E],
    dy: &[E],
    gamma: &[E::Acc],
    [mean, inv_std]: [E::Acc; 2],
    [few_gamma, few_beta]: &mut [Vec<E::Acc>; 2],
) -> [f64; 2] {
    let mut of_row = RowSums::new();
    let mut add = |lane: usize, x: E, dy: E, gamma: E::Acc, to_gamma: &mut E::Acc, to_beta: &mut E::Acc| {
        let (x_hat, dy) = ((x.widen() - mean) * inv_std, dy.widen());
        *to_gamma = *to_gamma + dy * x_hat;
        *to_beta = *to_beta + dy;
        of_row.add(lane, x_hat, dy, gamma);
    };
    let (x, x_rest) = x.as_chunks::<LANES>();
    let (dy, dy_rest) = dy.as_chunks::<LANES>();
    let (gamma, gamma_rest) = gamma.as_chunks::<LANES>();
    let (few_gamma, few_gamma_rest) = few_gamma.as_chunks_mut::<LANES>();
    let (few_beta, few_beta_rest) = few_beta.as_chunks_mut::<LANES>();
    let lanes = !x.is_empty();
    let chunks = x.iter().zip(dy).zip(gamma).zip(few_gamma).zip(few_beta);
    for ((((x, dy), gamma), to_gamma), to_beta) in chunks {
        for lane in 0..LANES {
            add(lane, x[lane], dy[lane], gamma[lane], &mut to_gamma[lane], &mut to_beta[lane]);
        }
    }
    let rest = x_rest.iter().zip(dy_rest).zip(gamma_rest).zip(few_gamma_rest).zip(few_beta_rest);
    for ((((&x, &dy), &gamma), to_gamma), to_beta) in rest {
        add(0, x, dy, gamma, to_gamma, to_beta);
    }
    of_row.total(lanes)
}

/// The rows that a thread takes, of so many elements in all; see the head of this file.
fn rows_per_thread(norm: &RowNorm, elements: usize, wanted: [bool; 2]) -> usize {
    let size = norm.row().max(1);
    let even = parallel::items_per_thread(elements / size, elements);
    let few = if norm.has_rows_of_parameters() { 2 } else { 0 };
    match wanted.into_iter().filter(|&wanted| wanted).count() {
        0 => even,
        // Of which one in f64 is as much as two.
        sums => even.max(parallel::items_per_part(size, (few + 2 * sums) * norm.parameters())),
    }
}

/// The gradients of the parameters.
fn parameters_backward<E: CpuElement>(
    x: &[E],
    norm: &RowNorm,
    parameters: &Parameters<E::Acc>,
    dy: &[E],
    wanted: [bool; 2],
) -> ParameterGrads {
    let size = norm.row().max(1);
    let row = |at: usize| at * size..(at + 1) * size;
    let job = rows_per_thread(norm, x.len(), wanted);
    let parts = parallel::map_ranges(x.len() / size, job, |range| {
        let mut visit = Visit::<E>::new(norm, &parameters.gamma, wanted);
        range.for_each(|at| {
            visit.add(at, &x[row(at)], &dy[row(at)]);
        });
        visit.finish()
    });
    parts.into_iter().reduce(ParameterGrads::add).unwrap_or_else(|| ParameterGrads::new(norm, wanted))
}

/// The gradients of the parameters; `dy` becomes the gradient of `x`. One pass over both tensors.
fn backward<E: CpuElement>(
    x: &[E],
    norm: &RowNorm,
    parameters: &Parameters<E::Acc>,
    dy: &mut [E],
    wanted: [bool; 2],
) -> ParameterGrads {
    let size = norm.row().max(1);
    let job = rows_per_thread(norm, x.len(), wanted);
    let parts = parallel::map_chunks_mut(dy, job * size, |index, dy| {
        let mut visit = Visit::<E>::new(norm, &parameters.gamma, wanted);
        let rows = dy.chunks_exact_mut(size).zip(x[index * job * size..].chunks_exact(size));
        for (at, (dy, x)) in (index * job..).zip(rows) {
            let line = visit.add(at, x, dy);
            visit.replace(at, &line, x, dy);
        }
        visit.finish()
    });
    parts.into_iter().reduce(ParameterGrads::add).unwrap_or_else(|| ParameterGrads::new(norm, wanted))
}
