//! Products of matrices in half precision. Every sum is made in f32 and rounded once, after the bias was added.
//!
//! Burn's products of bf16 on a CPU copy both factors in f32 on one thread, and the right one once more if it is not in row-major order (the
//! weight of PyTorch). Here the left factor, which has few elements beside a weight, is copied in f32. Of the right one, a thread has a [`Panel`] in f32 at a time, or for [`FEW_ROWS`] a part of one line. So a product of few rows, as in generation, is read at
//! the speed of memory, and a weight in half precision in half the time of one in f32.
use super::gemm::{
    Matrix, PANEL_DEPTH, Panel, Parts, SOME_ROWS, add_summands, panel_columns, panel_elements,
};
use super::parallel::{self, Job, vectorized};
use super::transpose::transpose;
use super::{CpuElement, widen_into};
use core::{mem::MaybeUninit, ops::Range, slice};

/// Results of at most this many rows are computed line by line of the right factor.
const FEW_ROWS: usize = 8;

/// The most elements of a line that are in f32 at a time: they stay in the first-level cache.
const LINE: usize = 512;

/// The most columns whose sums are made at a time from rows of the right factor: long enough that a row is read in order.
const STRIP: usize = 1024;

/// Rows of the right factor that are added to a sum at once, so that it is written less often.
const AT_ONCE: usize = 4;

/// Lines that are transposed at a time: the blocks of [`transpose`] are as high.
const LINES: usize = 8;

/// The work of an element of the right factor, beside its products: it is read from memory and widened.
const PER_ELEMENT: usize = 4;

/// [`product`], if it has few rows.
pub(crate) fn product_of_few_rows<E: CpuElement<Acc = f32>>(
    a: Matrix<'_, E>,
    b: Matrix<'_, E>,
    bias: Option<&[E]>,
) -> Option<Vec<E>> {
    (a.rows() <= FEW_ROWS).then(|| product(a, b, bias))
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
    let wide = widened(a);
    let len = rows * columns;
    let mut result = Vec::with_capacity(len);
    let target = Parts(result.as_mut_ptr());
    let work = columns.saturating_mul(depth).saturating_mul(rows + PER_ELEMENT);
    if rows <= FEW_ROWS {
        // Columns are as good as alone; of rows, long parts are read.
        let [per_thread, multiple] = if b.strides[0] == 1 { [4, LINES] } else { [1, LINE] };
        let size = columns.div_ceil(per_thread * parallel::threads()).next_multiple_of(multiple);
        let parts = ranges(columns, size);
        parallel::each(parts.collect(), work, |columns| {
            let job = Lines { a: &wide, rows, b, bias, columns, result: &target };
            vectorized(job);
        });
    } else {
        let down = rows.div_ceil(rows.div_ceil(SOME_ROWS));
        let parts = ranges(rows, down).flat_map(|rows| {
            ranges(columns, panel_columns::<f32>()).map(move |columns| (rows.clone(), columns))
        });
        parallel::each(parts.collect(), work, |(rows, columns)| {
            // SAFETY: no other part has these elements of the result, for which there is room.
            unsafe { write_part(&wide, b, bias, rows, columns, &target) };
        });
    }
    // SAFETY: the parts cover the result, and each has been written.
    unsafe { result.set_len(len) };
    result
}

/// Consecutive ranges of `size` that cover `0..len`.
fn ranges(len: usize, size: usize) -> impl Iterator<Item = Range<usize>> + Clone {
    (0..len).step_by(size).map(move |start| start..len.min(start + size))
}

/// A matrix in f32, in row-major order.
fn widened<E: CpuElement<Acc = f32>>(matrix: Matrix<'_, E>) -> Vec<f32> {
    let [rows, columns] = matrix.size;
    let len = rows * columns;
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
    let at_once = depth.div_ceil(depth.div_ceil(PANEL_DEPTH));
    for summands in ranges(depth, at_once) {
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

/// Sums, with the bias, in the dtype of the result.
#[inline(always)]
fn round<E: CpuElement<Acc = f32>>(sums: &[f32], bias: Option<&[E]>, result: &mut [MaybeUninit<E>]) {
    match bias {
        Some(bias) => {
            for ((result, &sum), bias) in result.iter_mut().zip(sums).zip(bias) {
                result.write(E::narrow(sum + bias.widen()));
            }
        }
        None => result.iter_mut().zip(sums).for_each(|(result, &sum)| _ = result.write(E::narrow(sum))),
    }
}

/// Some columns of a result of at most [`FEW_ROWS`], from lines of the right factor.
struct Lines<'a, E> {
    /// The left factor, in row-major order.
    a: &'a [f32],
    rows: usize,
    b: Matrix<'a, E>,
    bias: Option<&'a [E]>,
    columns: Range<usize>,
    result: &'a Parts<E>,
}

impl<E: CpuElement<Acc = f32>> Job for Lines<'_, E> {
    type Result = ();

    #[inline(always)]
    fn run(self) {
        if self.b.strides[0] == 1 {
            self.by_columns();
        } else {
            self.by_rows();
        }
    }
}

impl<E: CpuElement<Acc = f32>> Lines<'_, E> {
    /// A column of the right factor lies in order: every sum is a scalar product.
    #[inline(always)]
    fn by_columns(self) {
        let [depth, pitch] = self.b.size;
        let mut line = [const { MaybeUninit::<f32>::uninit() }; LINE];
        for column in self.columns.clone() {
            let values = &self.b.values[column * self.b.strides[1]..][..depth];
            let mut sums = [0.0; FEW_ROWS];
            for (index, values) in values.chunks(LINE).enumerate() {
                let wide = widen_into(values, &mut line[..values.len()]);
                for (row, sum) in sums[..self.rows].iter_mut().enumerate() {
                    *sum += dot(&self.a[row * depth + index * LINE..][..wide.len()], wide);
                }
            }
            let bias = self.bias.map_or(0.0, |bias| bias[column].widen());
            for (row, sum) in sums[..self.rows].iter().enumerate() {
                // SAFETY: a column of the result that is this job's.
                unsafe { self.result.0.add(row * pitch + column).write(E::narrow(sum + bias)) };
            }
        }
    }

    /// Rows of the right factor are added, each times an element of the left one, some of them at once.
    #[inline(always)]
    fn by_rows(self) {
        let [depth, pitch] = self.b.size;
        let mut lines = [const { [const { MaybeUninit::<f32>::uninit() }; STRIP] }; AT_ONCE];
        let mut sums = [[0.0f32; STRIP]; FEW_ROWS];
        for columns in ranges(self.columns.len(), STRIP) {
            let columns = self.columns.start + columns.start..self.columns.start + columns.end;
            let len = columns.len();
            sums[..self.rows].iter_mut().for_each(|sums| sums[..len].fill(0.0));
            for summands in ranges(depth, AT_ONCE) {
                let (first, count) = (summands.start, summands.len());
                for (k, line) in summands.zip(&mut lines) {
                    self.widen_row(k, columns.start, &mut line[..len]);
                }
                // SAFETY: this many of them have just been written.
                let wide = |line: usize| unsafe { lines[line][..len].assume_init_ref() };
                for (row, sums) in sums[..self.rows].iter_mut().enumerate() {
                    let factors = &self.a[row * depth + first..][..count];
                    let sums = &mut sums[..len];
                    match factors.as_array::<AT_ONCE>() {
                        Some(&[a, b, c, d]) => {
                            let lines = wide(0).iter().zip(wide(1)).zip(wide(2).iter().zip(wide(3)));
                            for (sum, ((w, x), (y, z))) in sums.iter_mut().zip(lines) {
                                *sum += (a * w + b * x) + (c * y + d * z);
                            }
                        }
                        None => {
                            for (line, factor) in factors.iter().enumerate() {
                                sums.iter_mut()
                                    .zip(wide(line))
                                    .for_each(|(sum, value)| *sum += factor * value);
                            }
                        }
                    }
                }
            }
            let bias = self.bias.map(|bias| &bias[columns.clone()]);
            for (row, sums) in sums[..self.rows].iter().enumerate() {
                // SAFETY: columns of a row of the result that are this job's.
                let result = unsafe {
                    slice::from_raw_parts_mut(self.result.0.add(row * pitch + columns.start).cast(), len)
                };
                round(&sums[..len], bias, result);
            }
        }
    }

    /// A part of row `k` of the right factor.
    #[inline(always)]
    fn widen_row(&self, k: usize, column: usize, line: &mut [MaybeUninit<f32>]) {
        let [below, across] = self.b.strides;
        let values = &self.b.values[k * below + column * across..];
        match across {
            1 => _ = widen_into(&values[..line.len()], line),
            _ => line
                .iter_mut()
                .enumerate()
                .for_each(|(at, place)| _ = place.write(values[at * across].widen())),
        }
    }
}

/// The scalar product, in as many partial sums as fill vectors.
#[inline(always)]
fn dot(a: &[f32], b: &[f32]) -> f32 {
    const SUMS: usize = 32;
    let mut sums = [0.0; SUMS];
    let ((a, rest_of_a), (b, rest_of_b)) = (a.as_chunks::<SUMS>(), b.as_chunks::<SUMS>());
    for (a, b) in a.iter().zip(b) {
        for at in 0..SUMS {
            sums[at] += a[at] * b[at];
        }
    }
    let rest: f32 = rest_of_a.iter().zip(rest_of_b).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f32>() + rest
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::{bf16, f16};

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
