//! Products of few rows with a matrix that is packed: every thread unpacks some outputs' rows of it at a time, so that the matrix is never there
//! as a whole. As in generation, where every token would otherwise write all weights to memory and read them from there again.
use super::gemm::{self, ranges};
use super::matrix::Matrix;
use super::parallel::{self, Job, vectorized};
use super::sums::dot;
use core::ops::Range;

/// For more rows than this, unpacking the matrix as a whole takes less than the product with it.
pub(crate) const FEW_ROWS: usize = 32;

/// Of at most this many rows, every element of the result is a scalar product by itself.
const DOTS: usize = 6;

/// Elements that a thread reads at a time, about: many for a call of the system, and packed, they stay in a second-level cache.
const READ: usize = 1 << 16;

/// Elements that a thread unpacks at a time, about, for a product of matrices: they stay in a second-level cache.
const PANEL: usize = 3 << 13;

/// The same for scalar products, which read them only once: they stay in the first-level cache.
const LINE: usize = 1 << 12;

/// The work of an element of the matrix, beside its products: it is read and unpacked.
const PER_ELEMENT: usize = 8;

/// `x rows^T`, in row-major order; x `[count, width]`, rows `[outputs, width]`. `read(rows)` reads consecutive rows and returns what unpacks them:
/// a function that writes elements, from one of those that were read on, until its target is full.
pub(crate) fn product<U: Fn(usize, &mut [f32])>(
    x: &[f32],
    [count, width, outputs]: [usize; 3],
    read: impl Fn(Range<usize>) -> U + Sync + Send,
) -> Vec<f32> {
    if x.is_empty() || outputs == 0 {
        return vec![0.0; count * outputs];
    }
    let of_job = outputs.div_ceil(4 * parallel::threads()).max(1);
    let work = outputs.saturating_mul(width).saturating_mul(count.saturating_add(PER_ELEMENT));
    // Outputs by themselves, one after the other: `[outputs, count]`.
    let sums = parallel::filled(outputs * count, 0.0, of_job * count, work, |index, sums| {
        let at_once = (if count <= DOTS { LINE } else { PANEL } / width).max(1);
        let mut panel = vec![0.0; at_once.min(of_job) * width];
        for rows in ranges(sums.len() / count, (READ / width).next_multiple_of(at_once)) {
            let unpack = read(index * of_job + rows.start..index * of_job + rows.end);
            let sums = &mut sums[rows.start * count..rows.end * count];
            for some in ranges(rows.len(), at_once) {
                let panel = &mut panel[..some.len() * width];
                unpack(some.start * width, panel);
                multiply(panel, x, width, &mut sums[some.start * count..some.end * count]);
            }
        }
    });
    if count == 1 {
        return sums;
    }
    let mut product = Vec::with_capacity(sums.len());
    (0..count).for_each(|row| product.extend(sums[row..].iter().step_by(count)));
    product
}

/// `rows x^T`.
fn multiply(rows: &[f32], x: &[f32], width: usize, sums: &mut [f32]) {
    let count = x.len() / width;
    if count <= DOTS {
        vectorized(Dots { rows, x, width, sums });
    } else if let (Some(rows), Some(x)) =
        (Matrix::in_order(rows, [rows.len() / width, width]), Matrix::in_order(x, [count, width]))
    {
        sums.copy_from_slice(&gemm::product(rows, x.transpose(), None));
    }
}

/// The scalar products of rows with every row of `x`.
struct Dots<'a> {
    rows: &'a [f32],
    x: &'a [f32],
    width: usize,
    sums: &'a mut [f32],
}

impl Job for Dots<'_> {
    type Result = ();

    #[inline(always)]
    fn run(self) {
        let Self { rows, x, width, sums } = self;
        let count = x.len() / width;
        for (row, sums) in rows.chunks_exact(width).zip(sums.chunks_exact_mut(count)) {
            for (x, sum) in x.chunks_exact(width).zip(sums) {
                *sum = dot(x, row);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Element `at` of row `row`.
    fn integer(row: usize, at: usize) -> f32 {
        ((row * 7 + at * 3) % 11) as f32 - 5.0
    }

    /// Integers, so that sums are exact.
    #[test]
    fn products_are_those_of_the_unpacked_matrix() {
        for [count, width, outputs] in [
            [1, 1, 1],
            [1, 100, 1000],
            [3, 33, 70],
            [6, PANEL + 5, 3],
            [7, 40, 5000],
            [FEW_ROWS, 129, 300],
            [2, 5, 0],
        ] {
            let x: Vec<f32> = (0..count * width).map(|at| ((at * 5) % 7) as f32 - 3.0).collect();
            let found = product(&x, [count, width, outputs], |rows| {
                move |first, out: &mut [f32]| {
                    let elements = (first..).zip(out);
                    elements.for_each(|(at, out)| *out = integer(rows.start + at / width, at % width));
                }
            });
            let expected = (0..count * outputs).map(|at| {
                let (row, output) = (at / outputs, at % outputs);
                (0..width).map(|at| x[row * width + at] * integer(output, at)).sum::<f32>()
            });
            assert_eq!(found, expected.collect::<Vec<_>>(), "{count} {width} {outputs}");
        }
    }
}
