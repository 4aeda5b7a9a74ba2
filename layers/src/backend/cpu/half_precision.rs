//! Products of matrices in half precision. Every sum is made in f32, and in bf16 rounded once, after the bias was added.
//!
//! Burn's products of bf16 on a CPU copy both factors in f32 on one thread, and the right one once more if it is not in row-major order (the
//! weight of PyTorch). Here the left factor is copied in f32. Of the right one, a thread has a [`Panel`] in f32 at a time, or for
//! [few rows](few_rows) some parts of lines.
//!
//! Burn's products of f16 pack parts of both factors in f32, and round after each part. They take less memory than the copy of a left factor,
//! so here only those of few rows are made, without a gradient of a weight among them.
use super::few_rows::{self, FEW_ROWS, LINE, round};
use super::gemm::{
    PANEL_DEPTH, Panel, Parts, SOME_ROWS, add_summands, elements, panel_columns, panel_elements, ranges,
    summands_at_once,
};
use super::matrix::Matrix;
use super::parallel::{self, Job, vectorized};
use super::transpose::transpose;
use super::{CpuElement, widen_into};
use core::{mem::MaybeUninit, ops::Range, slice};

/// Lines that are transposed at a time: the blocks of [`transpose`] are as high.
const LINES: usize = 8;

/// The work of an element of the right factor, beside its products: it is read from memory and widened.
const PER_ELEMENT: usize = 4;

/// The product plus the bias, if it has few rows, and the left factor is in row-major order, as in generation. It is rounded before the bias is
/// added, and again after it, as Burn rounds: losses whose logits are computed again with more rows would otherwise see others.
pub(crate) fn product_of_few_rows<E: CpuElement<Acc = f32>>(
    a: Matrix<'_, E>,
    b: Matrix<'_, E>,
    bias: Option<&[E]>,
) -> Option<Vec<E>> {
    if a.rows() > FEW_ROWS || a.strides[1] != 1 {
        return None;
    }
    let mut result = product(a, b, None);
    if let Some(bias) = bias {
        for row in result.chunks_exact_mut(bias.len()) {
            row.iter_mut().zip(bias).for_each(|(y, bias)| *y = E::narrow(y.widen() + bias.widen()));
        }
    }
    Some(result)
}

/// `a b + bias`, in row-major order.
pub(crate) fn product<E: CpuElement<Acc = f32>>(
    a: Matrix<'_, E>,
    b: Matrix<'_, E>,
    bias: Option<&[E]>,
) -> Vec<E> {
    let ([rows, depth], columns) = (a.size, b.columns());
    assert_eq!(depth, b.rows(), "as many columns as rows");
    assert!(bias.is_none_or(|bias| bias.len() == columns), "an element per column");
    let len = elements(a, b);
    let wide = widened(a);
    let work = columns.saturating_mul(depth).saturating_mul(rows.saturating_add(PER_ELEMENT));
    if rows <= FEW_ROWS {
        return few_rows::product(&wide, [rows, len], b, bias, work);
    }
    let mut result = Vec::with_capacity(len);
    let target = Parts(result.as_mut_ptr());
    let threads = parallel::threads();
    let across = columns.div_ceil(panel_columns::<f32>());
    let down = rows.div_ceil(SOME_ROWS).max(threads.div_ceil(across)).min(rows.div_ceil(FEW_ROWS));
    let parts = ranges(rows, rows.div_ceil(down))
        .flat_map(|rows| ranges(columns, panel_columns::<f32>()).map(move |columns| (rows.clone(), columns)));
    parallel::each(parts.collect(), work, |(rows, columns)| {
        // SAFETY: no other part has these elements of the result, for which there is room.
        unsafe { write_part(&wide, b, bias, rows, columns, &target) };
    });
    // SAFETY: the parts cover the result, and each has been written.
    unsafe { result.set_len(len) };
    result
}

/// A matrix in f32, in row-major order.
fn widened<E: CpuElement<Acc = f32>>(matrix: Matrix<'_, E>) -> Vec<f32> {
    let [rows, columns] = matrix.size;
    let len = rows.checked_mul(columns).expect("a matrix that fits into memory");
    let at_once = parallel::items_per_task(rows, columns).next_multiple_of(LINES);
    // SAFETY: `Widen` writes all of its rows.
    unsafe {
        parallel::written(len, at_once * columns, len, |index, result| {
            vectorized(Widen {
                matrix,
                first: [index * at_once, 0],
                size: [result.len() / columns, columns],
                result,
            });
        })
    }
}

/// Copies a part of a matrix in f32, in row-major order.
struct Widen<'a, E> {
    matrix: Matrix<'a, E>,
    /// The first row and column of the part.
    first: [usize; 2],
    /// Rows and columns of the part.
    size: [usize; 2],
    result: &'a mut [MaybeUninit<f32>],
}

impl<E: CpuElement<Acc = f32>> Job for Widen<'_, E> {
    type Result = ();

    #[inline(always)]
    fn run(self) {
        let Self { matrix: Matrix { values, strides, .. }, first, size: [rows, columns], result } = self;
        let values = &values[first[0] * strides[0] + first[1] * strides[1]..];
        match strides {
            [pitch, 1] => {
                for (row, result) in result.chunks_exact_mut(columns).enumerate() {
                    widen_into(&values[row * pitch..][..columns], result);
                }
            }
            [1, pitch] => {
                // Lines of the part in memory are its columns.
                let mut lines = [const { MaybeUninit::new(0.0f32) }; LINES * LINE];
                for start in (0..columns).step_by(LINES) {
                    let count = LINES.min(columns - start);
                    for row in (0..rows).step_by(LINE) {
                        let len = LINE.min(rows - row);
                        for (line, wide) in lines.chunks_exact_mut(LINE).take(count).enumerate() {
                            widen_into(&values[(start + line) * pitch + row..][..len], &mut wide[..len]);
                        }
                        let result = &mut result[row * columns + start..];
                        transpose(&lines, LINE, [count, len], result, columns, |value| value);
                    }
                }
            }
            _ => {
                for (row, result) in result.chunks_exact_mut(columns).enumerate() {
                    for (column, wide) in result.iter_mut().enumerate() {
                        wide.write(values[row * strides[0] + column * strides[1]].widen());
                    }
                }
            }
        }
    }
}

/// Writes a part of the result: its sums are made by panels of the right factor.
///
/// # Safety
///
/// `result` has room for these rows and columns, and nobody else writes or reads them meanwhile.
unsafe fn write_part<E: CpuElement<Acc = f32>>(
    a: &[f32],
    b: Matrix<'_, E>,
    bias: Option<&[E]>,
    rows: Range<usize>,
    columns: Range<usize>,
    result: &Parts<E>,
) {
    let [depth, pitch] = b.size;
    let mut panel = MaybeUninit::<Panel>::uninit();
    let panel = panel_elements::<f32>(&mut panel);
    let mut sums = Vec::<f32>::with_capacity(rows.len() * columns.len());
    for summands in ranges(depth, summands_at_once(depth, PANEL_DEPTH)) {
        let size = [summands.len(), columns.len()];
        let panel = &mut panel[..size[0] * size[1]];
        vectorized(Widen { matrix: b, first: [summands.start, columns.start], size, result: panel });
        // SAFETY: all of it has just been written.
        let values = unsafe { panel.assume_init_ref() };
        let right = Matrix { values, size, strides: [columns.len(), 1] };
        let left = Matrix {
            values: &a[rows.start * depth + summands.start..],
            size: [rows.len(), summands.len()],
            strides: [depth, 1],
        };
        // SAFETY: there is room for the sums, which the first panel initializes.
        unsafe {
            add_summands(left, right, 0..size[0], sums.as_mut_ptr(), columns.len(), summands.start > 0);
        }
    }
    // SAFETY: all of them have been written.
    unsafe { sums.set_len(rows.len() * columns.len()) };
    let bias = bias.map(|bias| &bias[columns.clone()]);
    for (row, sums) in rows.zip(sums.chunks_exact(columns.len())) {
        // SAFETY: these columns of a row of the result.
        let result = unsafe {
            slice::from_raw_parts_mut(result.0.add(row * pitch + columns.start).cast(), sums.len())
        };
        round(sums, bias, result);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::{bf16, f16};

    /// Many equal terms: the sum of all of them in one variable is off by thousandths.
    #[test]
    fn long_sums_are_made_in_parts() {
        const DEPTH: usize = 1 << 17;
        let [one, tenth] = [1.0f32, 0.1].map(bf16::from_f32);
        let (a, b) = (vec![one; 3 * DEPTH], vec![tenth; 2 * DEPTH]);
        let exact = tenth.to_f64() * DEPTH as f64;
        let left = Matrix::in_order(&a, [3, DEPTH]).expect("a matrix");
        let rows = Matrix::in_order(&b, [DEPTH, 2]).expect("a matrix");
        let columns = Matrix::in_order(&b, [2, DEPTH]).expect("a matrix").transpose();
        for right in [rows, columns] {
            for found in product(left, right, None) {
                assert_eq!(found, bf16::from_f64(exact));
            }
        }
    }

    /// In every layout and with every number of rows, against sums in f64 of the same numbers: no sum is off by more than one rounding to half
    /// precision, and those of f32.
    fn compare_with_sums<E: CpuElement<Acc = f32>>(epsilon: f64) {
        let number = |at: usize| E::from_f64(((at * 7919) % 2003) as f64 / 1001.0 - 1.0);
        for [rows, depth, columns] in [
            [1, 1, 1],
            [1, 2 * LINE + 40, 70],
            [3, 45, 2 * LINE + 3],
            [FEW_ROWS, 33, 31],
            [FEW_ROWS + 1, 1, 9],
            [40, 2 * PANEL_DEPTH + 7, 131],
            [LINE + 9, 100, 50],
            [SOME_ROWS + 1, 9, 3],
        ] {
            for layout in 0..9 {
                // Rows, columns, or neither in order, and a gap after each.
                let strides = |[rows, columns]: [usize; 2], layout: usize| match layout {
                    0 => [columns + 1, 1],
                    1 => [1, rows + 1],
                    _ => [2 * columns + 1, 2],
                };
                let matrix = |size: [usize; 2], layout: usize, seed: usize| {
                    let strides = strides(size, layout);
                    let len = (size[0] - 1) * strides[0] + (size[1] - 1) * strides[1] + 1;
                    ((0..len).map(|at| number(at + seed)).collect::<Vec<_>>(), strides)
                };
                let (a, of_a) = matrix([rows, depth], layout % 3, 0);
                let (b, of_b) = matrix([depth, columns], layout / 3, 5);
                let bias: Vec<E> = (0..columns).map(|at| number(at + 3)).collect();
                let left = Matrix { values: &a[..], size: [rows, depth], strides: of_a };
                let right = Matrix { values: &b[..], size: [depth, columns], strides: of_b };
                for bias in [None, Some(&bias[..])] {
                    for (at, found) in product(left, right, bias).into_iter().enumerate() {
                        let (row, column) = (at / columns, at % columns);
                        let (mut exact, mut size) = (bias.map_or(0.0, |bias| bias[column].into_f64()), 0.0);
                        for k in 0..depth {
                            let term = a[row * of_a[0] + k * of_a[1]].into_f64()
                                * b[k * of_b[0] + column * of_b[1]].into_f64();
                            (exact, size) = (exact + term, size + term.abs());
                        }
                        let off = (found.into_f64() - exact).abs();
                        assert!(
                            off <= epsilon / 2.0 * exact.abs() + 1e-6 * (1.0 + size),
                            "{rows} {depth} {columns}, layout {layout}, {at}: {found:?}, not {exact}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn products_in_half_precision_are_rounded_once() {
        compare_with_sums::<bf16>(2f64.powi(-7));
        compare_with_sums::<f16>(2f64.powi(-10));
    }

    #[cfg(feature = "rayon")]
    #[test]
    fn products_in_half_precision_by_many_threads_are_rounded_once() {
        parallel::pool(12).install(|| compare_with_sums::<bf16>(2f64.powi(-7)));
    }
}
