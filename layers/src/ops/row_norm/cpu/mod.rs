//! The kernels on a CPU: fused loops that compute the statistics of a row while it is in the cache.
//!
//! If gradients of gamma or beta are wanted, a thread has sums for these in f64 besides the tensors, and sums of a few rows for both in the
//! type that sums are made in. All threads together hold as many elements as a quarter of `x`, or those of one thread if that is more.
//!
//! Where that leaves threads idle, and where rows are few and long, a kernel runs in several passes: over parts of rows for their
//! statistics and sums, over columns or planes for the parameters, and over parts of rows for the result. Then there are sums for every
//! parameter once, and two numbers per plane of a group.
use super::{NormGrads, RowNorm, RowNormKernels};
use crate::backend::cpu::{
    CpuBackend, CpuElement,
    long_rows::{self, LongRows},
    parallel::{self, Work, vectorized},
    pieces,
    plan::{Division, Items},
    sums::{Moments, Parts, Sum, SumOfNear, add_each, move_each},
    with_element,
};
use burn::backend::{TensorMetadata, tensor::FloatTensor};
use burn::tensor::{DType, Shape, bf16, f16};
use num_traits::{One, Zero};
use products::{add_elements, plus, products_of_row};

mod passes;
mod products;

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
    let mean = if norm.centered { vectorized(SumOfNear(row)) / count } else { 0.0 };
    let mean = <E::Acc as CpuElement>::from_f64(mean);
    let squares = vectorized(Sum { values: row, f: |x: E| (x.widen() - mean) * (x.widen() - mean) });
    [mean, <E::Acc as CpuElement>::from_f64((squares / count + norm.epsilon).sqrt().recip())]
}

/// [`statistics`] of few long rows.
fn statistics_in_parts<E: CpuElement>(x: &[E], norm: &RowNorm, rows: &LongRows) -> Vec<[E::Acc; 2]> {
    let (size, number) = (norm.row(), <E::Acc as CpuElement>::from_f64);
    let count = size as f64;
    let mut statistics = vec![[<E::Acc as Zero>::zero(); 2]; x.len() / size];
    if norm.centered {
        let sums = rows.sums(statistics.len(), |_, part| vectorized(SumOfNear(&x[part])));
        statistics.iter_mut().zip(sums).for_each(|([mean, _], sum)| *mean = number(sum / count));
    }
    let squares = rows.sums(statistics.len(), |row, part| {
        let [mean, _] = statistics[row];
        vectorized(Sum { values: &x[part], f: |x: E| (x.widen() - mean) * (x.widen() - mean) })
    });
    for ([_, inv_std], squares) in statistics.iter_mut().zip(squares) {
        *inv_std = number((squares / count + norm.epsilon).sqrt().recip());
    }
    statistics
}

/// The parameters of row number `at`.
fn of_row<'a, T>(values: &'a [T], norm: &RowNorm, at: usize) -> &'a [T] {
    let start = at % norm.groups * norm.channels;
    &values[start..start + norm.channels]
}

/// The loop over rows, which are cut where they are long.
fn rows_of(norm: &RowNorm, elements: usize) -> Items {
    let size = norm.row().max(1);
    long_rows::items([elements / size, size], elements)
}

/// `(x - mean) / std * gamma + beta`
fn forward<E: CpuElement>(x: &[E], norm: &RowNorm, parameters: &Parameters<E::Acc>) -> Vec<E> {
    let size = norm.row();
    if x.is_empty() {
        return vec![];
    }
    match rows_of(norm, x.len()).division(parallel::threads()) {
        Division::Whole(task) => parallel::filled(x.len(), E::zero(), task * size, x.len(), |index, y| {
            let rows = y.chunks_exact_mut(size).zip(x[index * task * size..].chunks_exact(size));
            for (at, (y, x)) in (index * task..).zip(rows) {
                normalize(x, y, [at, 0], norm, parameters, statistics(x, norm));
            }
        }),
        division @ Division::Cut(steps) => {
            let statistics = statistics_in_parts(x, norm, &LongRows::new(size, steps, x.len()));
            let chunks = division.chunks(size, Parts::of(size).size);
            pieces::filled_in_pieces(x.len(), E::zero(), chunks, x.len(), |start, y| {
                let (at, x) = (start / size, &x[start..][..y.len()]);
                normalize(x, y, [at, start % size], norm, parameters, statistics[at]);
            })
        }
    }
}

/// Normalizes elements of row number `at`, from number `first` on.
#[inline(always)]
fn normalize<E: CpuElement>(
    x: &[E],
    y: &mut [E],
    [at, first]: [usize; 2],
    norm: &RowNorm,
    parameters: &Parameters<E::Acc>,
    [mean, inv_std]: [E::Acc; 2],
) {
    let (gamma, beta) = (of_row(&parameters.gamma, norm, at), of_row(&parameters.beta, norm, at));
    if norm.inner == 1 {
        let parameters = gamma[first..].iter().zip(&beta[first..]);
        for ((y, &x), (&gamma, &beta)) in y.iter_mut().zip(x).zip(parameters) {
            *y = E::narrow((x.widen() - mean) * inv_std * gamma + beta);
        }
        return;
    }
    each_channel(x, y, first, norm.inner, |channel, x, y| {
        let (scale, beta) = (inv_std * gamma[channel], beta[channel]);
        let each = y.iter_mut().zip(x);
        each.for_each(|(y, &x)| *y = E::narrow((x.widen() - mean) * scale + beta));
    });
}

/// Calls `f` for the elements of every channel, of `inner` elements, of those of a row from number `first` on.
#[inline(always)]
fn each_channel<E>(
    x: &[E],
    y: &mut [E],
    first: usize,
    inner: usize,
    mut f: impl FnMut(usize, &[E], &mut [E]),
) {
    let (mut x, mut y, mut channel, mut next) = (x, y, first / inner, inner - first % inner);
    while !y.is_empty() {
        let (of_x, rest_of_x) = x.split_at(next.min(x.len()));
        let (of_y, rest_of_y) = y.split_at_mut(of_x.len());
        f(channel, of_x, of_y);
        (x, y, channel, next) = (rest_of_x, rest_of_y, channel + 1, inner);
    }
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

    /// Adds what the planes of a row contribute, given their [`Moments`], to the parameters from the `first` on. Returns the sums over the
    /// row of `gamma * dy` and of `gamma * dy * x_hat`.
    #[inline(always)]
    fn add_planes<A: CpuElement>(
        &mut self,
        first: usize,
        moments: impl Iterator<Item = [f64; 2]>,
        gamma: &[A],
        inv_std: A,
    ) -> [f64; 2] {
        let (inv_std, mut sums) = (inv_std.into_f64(), [0.0; 2]);
        for (channel, [sum, product]) in (first..).zip(moments) {
            let gamma = gamma[channel].into_f64();
            let parameters = [&mut self.gamma, &mut self.beta];
            for (grads, value) in parameters.into_iter().zip([product * inv_std, sum]) {
                grads.get_mut(channel).into_iter().for_each(|grad| *grad += value);
            }
            sums = [sums[0] + gamma * sum, sums[1] + gamma * product * inv_std];
        }
        sums
    }

    fn add(mut self, other: Self) -> Self {
        add_each(&mut self.gamma, &other.gamma);
        add_each(&mut self.beta, &other.beta);
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

impl<A: CpuElement<Acc = A>> Line<A> {
    /// From the statistics of a row, and its sums of `gamma * dy` and of `gamma * dy * x_hat`.
    fn new(norm: &RowNorm, [mean, inv_std]: [A; 2], [sum, product]: [f64; 2]) -> Self {
        let average = |sum: f64| A::from_f64(sum / norm.row() as f64);
        let mean_dy = if norm.centered { average(sum) } else { <A as Zero>::zero() };
        Self { mean, inv_std, mean_dy, mean_product: average(product) }
    }

    /// Replaces the `dy` of elements of row number `at`, from number `first` on, by their `dx`.
    #[inline(always)]
    fn replace<E: CpuElement<Acc = A>>(
        &self,
        [at, first]: [usize; 2],
        norm: &RowNorm,
        gamma: &[A],
        x: &[E],
        dy: &mut [E],
    ) {
        let Self { mean, inv_std, mean_dy, mean_product } = *self;
        let dx = |x: E, dy: E, gamma: A| {
            let x_hat = (x.widen() - mean) * inv_std;
            E::narrow(inv_std * (gamma * dy.widen() - mean_dy - x_hat * mean_product))
        };
        let gamma = of_row(gamma, norm, at);
        if norm.inner == 1 {
            let gamma = &gamma[first..];
            dy.iter_mut().zip(x).zip(gamma).for_each(|((dy, &x), &gamma)| *dy = dx(x, *dy, gamma));
            return;
        }
        each_channel(x, dy, first, norm.inner, |channel, x, dy| {
            let gamma = gamma[channel];
            dy.iter_mut().zip(x).for_each(|(dy, &x)| *dy = dx(x, *dy, gamma));
        });
    }
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
            Some([few, _]) if few.is_empty() => products_of_row(x, dy, self.gamma, [mean, inv_std]),
            Some(few) => {
                if self.rows == Self::FEW {
                    flush(few, &mut self.grads);
                    self.rows = 0;
                }
                self.rows += 1;
                let (parts, mut sums) = (Parts::of(x.len()), [-0.0; 2]);
                for part in 0..parts.count() {
                    let part = parts.range(part);
                    let few = few.each_mut().map(|few| &mut few[part.clone()]);
                    let (x, dy, gamma) = (&x[part.clone()], &dy[part.clone()], &self.gamma[part]);
                    sums = plus(sums, add_elements(x, dy, gamma, [mean, inv_std], few));
                }
                sums
            }
            None => {
                let planes = x.chunks_exact(self.norm.inner).zip(dy.chunks_exact(self.norm.inner));
                let moments = planes.map(|(x, dy)| vectorized(Moments { x, dy, mean }));
                self.grads.add_planes(start, moments, self.gamma, inv_std)
            }
        };
        Line::new(self.norm, [mean, inv_std], [sum, product])
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
        move_each(few, sums);
    }
}

/// The rows that a thread takes, of so many elements in all; see the head of this file.
fn rows_per_thread(norm: &RowNorm, elements: usize, wanted: [bool; 2], threads: usize) -> usize {
    let size = norm.row().max(1);
    let threads = if Work::from(elements).is_worth_it() { threads } else { 1 };
    let even = (elements / size).div_ceil(threads).max(1);
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
    if let Some(steps) = passes::parts_per_task(norm, x.len(), wanted, parallel::threads()) {
        let of_rows = LongRows::new(size, steps, x.len());
        return passes::gradients(x, norm, &parameters.gamma, dy, (false, wanted), &of_rows).1;
    }
    let row = |at: usize| at * size..(at + 1) * size;
    let job = rows_per_thread(norm, x.len(), wanted, parallel::threads());
    let parts = parallel::map_ranges(x.len() / size, job, |range| {
        let mut visit = Visit::<E>::new(norm, &parameters.gamma, wanted);
        range.for_each(|at| {
            visit.add(at, &x[row(at)], &dy[row(at)]);
        });
        visit.finish()
    });
    parts.into_iter().reduce(ParameterGrads::add).unwrap_or_else(|| ParameterGrads::new(norm, wanted))
}

/// The gradients of the parameters; `dy` becomes the gradient of `x`. One pass over both tensors, unless that leaves threads idle.
fn backward<E: CpuElement>(
    x: &[E],
    norm: &RowNorm,
    parameters: &Parameters<E::Acc>,
    dy: &mut [E],
    wanted: [bool; 2],
) -> ParameterGrads {
    let size = norm.row().max(1);
    if let Some(steps) = passes::parts_per_task(norm, x.len(), wanted, parallel::threads()) {
        let of_rows = LongRows::new(size, steps, x.len());
        let gamma = &parameters.gamma;
        let (lines, grads) = passes::gradients(x, norm, gamma, dy, (true, wanted), &of_rows);
        of_rows.map_mut(dy, |row, part, dy| {
            lines[row].replace([row, part.start - row * size], norm, gamma, &x[part], dy);
        });
        return grads;
    }
    let job = rows_per_thread(norm, x.len(), wanted, parallel::threads());
    let parts = parallel::map_chunks_mut(dy, job * size, |index, dy| {
        let mut visit = Visit::<E>::new(norm, &parameters.gamma, wanted);
        let rows = dy.chunks_exact_mut(size).zip(x[index * job * size..].chunks_exact(size));
        for (at, (dy, x)) in (index * job..).zip(rows) {
            visit.add(at, x, dy).replace([at, 0], norm, &parameters.gamma, x, dy);
        }
        visit.finish()
    });
    parts.into_iter().reduce(ParameterGrads::add).unwrap_or_else(|| ParameterGrads::new(norm, wanted))
}

#[cfg(test)]
pub(crate) mod counting {
    use super::*;

    fn norm([groups, channels, inner]: [usize; 3]) -> RowNorm {
        RowNorm { centered: true, epsilon: 1e-5, groups, channels, inner }
    }

    /// The loop over so many rows of channels.
    pub(crate) fn forward(rows: usize, sizes: [usize; 3]) -> Items {
        let norm = norm(sizes);
        rows_of(&norm, rows * norm.row())
    }

    /// The loop of the backward pass, or of one of its passes.
    pub(crate) fn backward(
        rows: usize,
        sizes: [usize; 3],
        wanted: [bool; 2],
        threads: usize,
    ) -> Vec<(Items, Division)> {
        let norm = norm(sizes);
        let elements = rows * norm.row();
        vec![match passes::parts_per_task(&norm, elements, wanted, threads) {
            Some(steps) => (passes::in_passes(&norm, elements), Division::Cut(steps)),
            None => {
                let rows_of_task = rows_per_thread(&norm, elements, wanted, threads);
                (Items::of([rows, norm.row()], elements.into()), Division::Whole(rows_of_task))
            }
        }]
    }
}
