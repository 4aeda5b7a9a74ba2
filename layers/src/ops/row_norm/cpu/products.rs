//! Sums over a row of products with its gradient.
use crate::backend::cpu::{
    CpuElement,
    sums::{self, LANES, Parts},
};

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

/// The sums of [`RowSums`] of a row, in parts.
#[inline(always)]
pub(super) fn products_of_row<E: CpuElement>(
    x: &[E],
    dy: &[E],
    gamma: &[E::Acc],
    statistics: [E::Acc; 2],
) -> [f64; 2] {
    let (parts, mut sums) = (Parts::of(x.len()), [-0.0; 2]);
    for part in 0..parts.count() {
        let part = parts.range(part);
        sums = plus(sums, sums_of_row(&x[part.clone()], &dy[part.clone()], &gamma[part], statistics));
    }
    sums
}

pub(super) fn plus(a: [f64; 2], b: [f64; 2]) -> [f64; 2] {
    [a[0] + b[0], a[1] + b[1]]
}

/// The sums of [`RowSums`] of a part of a row.
#[inline(always)]
pub(super) fn sums_of_row<E: CpuElement>(
    x: &[E],
    dy: &[E],
    gamma: &[E::Acc],
    [mean, inv_std]: [E::Acc; 2],
) -> [f64; 2] {
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
pub(super) fn add_elements<E: CpuElement>(
    x: &[E],
    dy: &[E],
    gamma: &[E::Acc],
    [mean, inv_std]: [E::Acc; 2],
    [few_gamma, few_beta]: [&mut [E::Acc]; 2],
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
