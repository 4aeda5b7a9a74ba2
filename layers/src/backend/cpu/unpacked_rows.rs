//! Products of few rows with a matrix that is packed: every thread unpacks some outputs' rows of it at a time, so that the matrix is never there
//! as a whole. As in generation, where every token would otherwise write all weights to memory and read them from there again.
use super::gemm::{self, Matrix, ranges};
use super::parallel::{self, Job, vectorized};
use super::sums::dot;

/// For more rows than this, unpacking the matrix as a whole takes less than the product with it.
pub(crate) const FEW_ROWS: usize = 32;

/// Of at most this many rows, every element of the result is a scalar product by itself.
const DOTS: usize = 6;

/// Elements that a thread unpacks at a time, about, for a product of matrices: they stay in a second-level cache.
const PANEL: usize = 3 << 13;

/// The same for scalar products, which read them only once: they stay in the first-level cache.
const LINE: usize = 1 << 12;

/// The work of an element of the matrix, beside its products: it is read and unpacked.
const PER_ELEMENT: usize = 8;

/// `x rows^T`, in row-major order; x `[count, width]`, rows `[outputs, width]`. `unpack(row, out)` writes elements of consecutive rows, beginning
/// with the first of this row, until `out` is full.
pub(crate) fn product(
    x: &[f32],
    [count, width, outputs]: [usize; 3],
    unpack: impl Fn(usize, &mut [f32]) + Sync + Send,
) -> Vec<f32> {
    let Some(left) = Matrix::in_order(x, [count, width]).filter(|_| outputs > 0) else {
        return vec![0.0; count * outputs];
    };
    let of_job = outputs.div_ceil(4 * parallel::threads()).max(1);
    let work = outputs.saturating_mul(width).saturating_mul(count.saturating_add(PER_ELEMENT));
    // Outputs by themselves, one after the other: `[outputs, count]`.
    let sums = parallel::filled(outputs * count, 0.0, of_job * count, work, |index, sums| {
        let at_once = (if count <= DOTS { LINE } else { PANEL } / width).max(1);
        let mut panel = vec![0.0; at_once.min(of_job) * width];
        for some in ranges(sums.len() / count, at_once) {
            let panel = &mut panel[..some.len() * width];
            unpack(index * of_job + some.start, panel);
            let sums = &mut sums[some.start * count..some.end * count];
            if count <= DOTS {
                vectorized(Dots { panel, x, width, sums });
            } else if let Some(right) = Matrix::in_order(panel, [some.len(), width]) {
                sums.copy_from_slice(&gemm::product(right, left.transpose(), None));
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

/// The scalar products of unpacked rows with every row of `x`.
struct Dots<'a> {
    panel: &'a [f32],
    x: &'a [f32],
    width: usize,
    sums: &'a mut [f32],
}

impl Job for Dots<'_> {
    type Result = ();

    #[inline(always)]
    fn run(self) {
        let Self { panel, x, width, sums } = self;
        let count = x.len() / width;
        for (row, sums) in panel.chunks_exact(width).zip(sums.chunks_exact_mut(count)) {
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
            let found = product(&x, [count, width, outputs], |row, out| {
                let elements = out.iter_mut().enumerate();
                elements.for_each(|(at, out)| *out = integer(row + at / width, at % width));
            });
            let expected = (0..count * outputs).map(|at| {
                let (row, output) = (at / outputs, at % outputs);
                (0..width).map(|at| x[row * width + at] * integer(output, at)).sum::<f32>()
            });
            assert_eq!(found, expected.collect::<Vec<_>>(), "{count} {width} {outputs}");
        }
    }
}
