//! Products of matrices, by the `gemm` crate, with which Flex multiplies, too. Unlike Flex's, the result is written once, without zeros
//! before and without a copy after, and no thread packs while the others wait. Every thread computes one part of the result by itself, for
//! which it packs its part of a factor that is not in row-major order. Up to four threads pack what they like. More threads pack
//! [`MOST_PACKED`] summands at a time, of each factor once, and again as far as that takes an eighth of the other factor and the result.
//!
//! If the right factor is in column-major order (a transposed weight, as in the gradient of an input, or the weight of PyTorch), the crate
//! packs it element by element, from as many cache lines as it packs columns. If columns are 4 KiB apart, or a multiple of that, these lines
//! evict each other before their other elements are read, which takes as long as the product of a hundred rows. So a result of
//! [`FEW_ROWS`] is computed some columns at a time, in column-major order, for which nothing of that factor is packed (on x86-64), and one
//! of up to [`SOME_ROWS`] with panels of that factor that are transposed block by block.
//!
//! Of small results of many summands, many threads compute [partial sums](depth).
mod depth;
mod panels;

use super::{CpuElement, is_wide, matrix::Matrix, parallel, sums::add_each};
use core::{mem::MaybeUninit, ops::Range, slice};
use depth::Depth;
use gemm::Parallelism;
use panels::multiply_by_panels;
pub(super) use panels::{PANEL_DEPTH, Panel, panel_columns, panel_elements};

/// With fewer multiplications than this, one thread is faster than several.
const WORTH_IT: usize = 192 * 192 * 192;

/// The time to write an element of the result, in multiplications.
const PER_ELEMENT: usize = 16;

/// The time to read an element of a factor, in multiplications. A product of one row, as in generation, is little else.
const PER_READ: usize = 8;

/// `a b + bias`, in row-major order.
pub(crate) fn product<E: CpuElement>(a: Matrix<'_, E>, b: Matrix<'_, E>, bias: Option<&[E]>) -> Vec<E> {
    let len = elements(a, b);
    let mut result = Vec::with_capacity(len);
    let start = bias.map_or(Start::Nothing, Start::Row);
    // SAFETY: there is room for all of the product, no element of which is read first.
    unsafe { multiply(a, b, result.as_mut_ptr(), start) };
    // SAFETY: all of it has been written.
    unsafe { result.set_len(len) };
    result
}

/// Adds `a b` to `y`, which is in row-major order.
pub(crate) fn add_product<E: CpuElement>(a: Matrix<'_, E>, b: Matrix<'_, E>, y: &mut [E]) {
    assert_eq!(y.len(), elements(a, b), "a sum for every element of the product");
    // SAFETY: `y` has as many elements as the product, all of them initialized.
    unsafe { multiply(a, b, y.as_mut_ptr(), Start::Result) };
}

/// The elements of a product. Factors whose elements lie in the same place may be small where it would be larger than all memory.
pub(super) fn elements<E>(a: Matrix<'_, E>, b: Matrix<'_, E>) -> usize {
    a.rows().checked_mul(b.columns()).expect("a product that fits into memory")
}

/// Lets the calling thread and every thread of its pool make the buffer that each makes for its first product and never frees, as large as a
/// second-level cache: a measurement that begins now does not count the buffers of threads that happen to have multiplied nothing before.
pub fn make_buffers() {
    let make = || {
        // A multiple of every width of vectors: `gemm` packs nothing beforehand, which would need no buffer of a thread.
        const SIDE: usize = 64;
        let values = [1.0f32; SIDE * SIDE];
        if let Some(square) = Matrix::in_order(&values, [SIDE; 2]) {
            product(square, square, None);
        }
    };
    make();
    #[cfg(feature = "rayon")]
    rayon::broadcast(|_| make());
}

/// What a product is added to.
#[derive(Clone, Copy)]
enum Start<'a, E> {
    Nothing,
    /// This row, in every row of the result.
    Row(&'a [E]),
    /// What the result holds already.
    Result,
}

/// A result of which several threads write one part each.
pub(super) struct Parts<E>(pub *mut E);

// SAFETY: products give no two threads the same element.
unsafe impl<E: Send> Send for Parts<E> {}
// SAFETY: as above.
unsafe impl<E: Send> Sync for Parts<E> {}

/// `start + a b`, in row-major order.
///
/// # Safety
///
/// `result` has room for the whole product, and is initialized if the product is added to what it holds.
unsafe fn multiply<E: CpuElement>(a: Matrix<'_, E>, b: Matrix<'_, E>, result: *mut E, start: Start<'_, E>) {
    assert!(is_wide::<E>(), "sums in half precision would be rounded several times");
    let ([rows, depth], columns) = (a.size, b.columns());
    assert_eq!(depth, b.rows(), "as many columns as rows");
    if let Start::Row(bias) = start {
        assert_eq!(bias.len(), columns, "an element per column");
    }
    let written = rows.saturating_mul(columns).saturating_mul(depth + PER_ELEMENT);
    let read = depth.saturating_mul(rows.saturating_add(columns)).saturating_mul(PER_READ);
    let work = written.saturating_add(read);
    // Of other ways, parts of the summands are read with a stride, or have to be packed.
    if matches!(Way::of(a, b), Way::Whole)
        && let Some(depths) = Depth::of([rows, depth, columns], parallel::threads())
    {
        // SAFETY: as the caller promises.
        return unsafe { depths.multiply(a, b, result, start) };
    }
    // Packing pays only for parts that are not small.
    let threads = if work < WORTH_IT { 1 } else { parallel::threads().min(work / (WORTH_IT / 4)) };
    // Of one row, nothing is packed.
    let packed = if threads <= FEW || rows == 1 { depth } else { summands_at_once(depth, MOST_PACKED) };
    let (result, adds) = (Parts(result), matches!(start, Start::Result));
    let part = |(of_rows, of_columns): (Range<usize>, Range<usize>)| {
        let all = &result;
        // SAFETY: within the result.
        let target = unsafe { all.0.add(of_rows.start * columns + of_columns.start) };
        let left = &a.values[of_rows.start * a.strides[0]..];
        let right = &b.values[of_columns.start * b.strides[1]..];
        let left = Matrix { values: left, size: [of_rows.len(), depth], ..a };
        let right = Matrix { values: right, size: [depth, of_columns.len()], ..b };
        match Way::of(left, right) {
            // SAFETY: as below.
            Way::Columns => unsafe { multiply_by_columns(left, right, target, columns, adds) },
            // SAFETY: as below.
            Way::Panels => unsafe { multiply_by_panels(left, right, target, columns, adds) },
            Way::Whole => {
                for summands in ranges(depth, packed) {
                    let adds = adds || summands.start > 0;
                    // SAFETY: what is written is this part of the result, which no other thread writes, and which is initialized if it is
                    // read.
                    unsafe { add_summands(left, right, summands, target, columns, adds) };
                }
            }
        }
        // The bias is added last, as Burn does, so that the same sums are rounded in the same order.
        if let Start::Row(bias) = start {
            let bias = &bias[of_columns];
            for row in 0..of_rows.len() {
                // SAFETY: a row of this part, which has just been written, and which no other thread reads or writes.
                let row = unsafe { slice::from_raw_parts_mut(target.add(row * columns), bias.len()) };
                add_each(row, bias);
            }
        }
    };
    parallel::each(parts(a, b, threads), work, part);
}

/// How a part of a result is computed.
enum Way {
    /// By one product.
    Whole,
    /// By [`multiply_by_columns`].
    Columns,
    /// By [`multiply_by_panels`].
    Panels,
}

/// Results of at most this many rows are computed by columns, if that saves packing.
const FEW_ROWS: usize = 32;

/// Results of at most this many rows are computed with panels of a right factor in column-major order. For more, the time of packing does not
/// matter, and it does that some rows of the left factor and of the result are read once per panel.
pub(super) const SOME_ROWS: usize = 1024;

impl Way {
    /// That of a part with these factors.
    fn of<E>(a: Matrix<'_, E>, b: Matrix<'_, E>) -> Self {
        let in_columns = b.strides[0] == 1 && b.strides[1] > 1;
        match a.rows() {
            2..=FEW_ROWS if in_columns => Self::Columns,
            // The crate may pack a left factor that is not in row-major order for every panel.
            2..=SOME_ROWS if in_columns && a.strides[1] == 1 => Self::Panels,
            _ => Self::Whole,
        }
    }
}

/// Adds the products of these summands to the result, or writes them there, by one product. Rows of the result are `stride` elements apart.
///
/// # Safety
///
/// `result` has room for these rows, nobody else reads or writes them meanwhile, and they are initialized if the product is added. The
/// factors have these summands.
pub(super) unsafe fn add_summands<E: CpuElement>(
    a: Matrix<'_, E>,
    b: Matrix<'_, E>,
    summands: Range<usize>,
    result: *mut E,
    stride: usize,
    adds: bool,
) {
    let (left, right) =
        (&a.values[summands.start * a.strides[1]..], &b.values[summands.start * b.strides[0]..]);
    // SAFETY: `Matrix` holds its last element, so that these parts of both lie within their slices; the caller promises the rest.
    unsafe {
        gemm::gemm(
            a.rows(),
            b.columns(),
            summands.len(),
            result,
            1,
            stride as isize,
            adds,
            left.as_ptr(),
            a.strides[1] as isize,
            a.strides[0] as isize,
            right.as_ptr(),
            b.strides[1] as isize,
            b.strides[0] as isize,
            E::one(),
            E::one(),
            false,
            false,
            false,
            Parallelism::None,
        );
    }
}

/// What some columns of a result are computed in, on the stack.
type Columns = [u64; 1 << 12];

/// `a b`, or the sum of it and `result`, some columns at a time. Rows of the result are `stride` elements apart.
///
/// # Safety
///
/// `result` has room for these rows, nobody else reads or writes them meanwhile, and they are initialized if the product is added.
#[inline(never)] // its columns are on the stack
unsafe fn multiply_by_columns<E: CpuElement>(
    a: Matrix<'_, E>,
    b: Matrix<'_, E>,
    result: *mut E,
    stride: usize,
    adds: bool,
) {
    let ([rows, depth], columns) = (a.size, b.columns());
    let mut sums = MaybeUninit::<Columns>::uninit();
    let sums = sums.as_mut_ptr().cast::<E>();
    let width = size_of::<Columns>() / size_of::<E>() / rows;
    for first in (0..columns).step_by(width) {
        let count = width.min(columns - first);
        // The columns of the product are the rows of its transpose, `b^T a^T`.
        let some = Matrix { values: &b.values[first * b.strides[1]..], size: [depth, count], ..b };
        // SAFETY: there is room for this many columns, nothing of which is read first.
        unsafe { add_summands(some.transpose(), a.transpose(), 0..depth, sums, rows, false) };
        // SAFETY: all of these have just been written.
        let sums = unsafe { slice::from_raw_parts(sums, rows * count) };
        for row in 0..rows {
            for (column, sums) in sums.chunks_exact(rows).enumerate() {
                // SAFETY: within this part of the result, which is initialized if it is read.
                unsafe {
                    let at = result.add(row * stride + first + column);
                    at.write(if adds { at.read() + sums[row] } else { sums[row] });
                }
            }
        }
    }
}

/// So many threads may pack a factor each.
const FEW: usize = 4;

/// The number of summands that each of many threads packs at once, at most. `gemm` packs up to twice as many, of a large factor.
const MOST_PACKED: usize = 256;

/// The number of summands that are taken at once, at most `most`: in equal parts, since `gemm` is slow for very few.
pub(super) fn summands_at_once(depth: usize, most: usize) -> usize {
    depth.div_ceil(depth.div_ceil(most).max(1))
}

/// Consecutive ranges of `size` that cover `0..len`.
pub(crate) fn ranges(len: usize, size: usize) -> impl Iterator<Item = Range<usize>> + Clone {
    (0..len).step_by(size).map(move |start| start..len.min(start + size))
}

/// The parts of a result, about one per thread: of all grids of rows and columns, the one with the least work per thread, counted in
/// multiplications per summand.
fn parts<E>(a: Matrix<'_, E>, b: Matrix<'_, E>, threads: usize) -> Vec<(Range<usize>, Range<usize>)> {
    let ([rows, depth], columns) = (a.size, b.columns());
    // A part packs all of its columns of `b`, and all of its rows of `a` unless these are in row-major order. The parts in the same column
    // or row of the grid pack the same again.
    let packing = [if a.strides[1] == 1 { 4 } else { 128 }, 32];
    // In multiples of the blocks that the inner loops of the crate compute.
    let height = |down: usize| rows.div_ceil(down).next_multiple_of(6);
    let width = |across: usize| columns.div_ceil(across).next_multiple_of(16);
    let cost = |&[down, across]: &[usize; 2]| {
        let (height, width) = (height(down), width(across));
        let rounds = (rows.div_ceil(height) * columns.div_ceil(width)).div_ceil(threads) as u64;
        let (height, width) = (height as u64, width as u64);
        let ends = 512 * height / depth as u64;
        rounds * (height * width + packing[0] * height + packing[1] * width + ends)
    };
    let [most_down, most_across] = most_parts(a, b, threads);
    let grids = (1..=threads.min(most_across)).flat_map(|across| {
        [threads / across, threads.div_ceil(across)].map(|down| [down.min(most_down), across])
    });
    let [down, across] = grids.min_by_key(cost).unwrap_or([1, 1]);
    ranges(rows, height(down))
        .flat_map(|rows| ranges(columns, width(across)).map(move |columns| (rows.clone(), columns)))
        .collect()
}

/// The most parts of rows, and of columns. All parts in a column of the grid make copies of the same columns of `b`, if these are not in
/// row-major order (what else `gemm` packs of `b` is in buffers that every thread has anyway), and all in a row of the same rows of `a`.
/// Without this limit, 64 threads would pack more than all operands.
fn most_parts<E>(a: Matrix<'_, E>, b: Matrix<'_, E>, threads: usize) -> [usize; 2] {
    let ([rows, depth], columns) = (a.size, b.columns());
    let packed = summands_at_once(depth, MOST_PACKED);
    let most = |factor: Matrix<'_, E>, len: usize, rest: usize| match factor.strides[1] {
        1 => threads,
        _ if threads <= FEW => threads,
        _ => 1 + rest / (8 * packed * len).max(1),
    };
    [most(b, columns, rows * (depth + columns)), most(a, rows, columns * (depth + rows))]
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::Shape;

    #[test]
    fn products_are_sums_of_products() {
        compare_with_sums();
    }

    /// Many threads pack some summands at a time.
    #[cfg(feature = "rayon")]
    #[test]
    fn products_by_many_threads_are_sums_of_products() {
        parallel::pool(3 * FEW).install(compare_with_sums);
    }

    /// `a b + y` in several parts, with rows or columns in order, against sums in f64.
    fn compare_with_sums() {
        let number = |at: usize| ((at * 7919) % 2003) as f64 / 1001.0 - 1.0;
        for [rows, depth, columns] in [
            [1, 1, 1],
            [5, 3, 2],
            [7, 200, 1],
            [1, 200, 300],
            [97, 131, 391],
            [260, 200, 500],
            [500, 260, 70],
            [70, 2 * MOST_PACKED + 9, 300],
            [33, 70, 300],
            [FEW_ROWS, 2 * MOST_PACKED + 9, 300],
            [FEW_ROWS + 1, 2 * PANEL_DEPTH + 9, 131],
            [SOME_ROWS, 33, 50],
        ] {
            for transposed in 0..4 {
                let matrix = |numbers: &[f64], [rows, columns]: [usize; 2], transposed: bool| {
                    // A gap of one element after every row or column, as in a view of a larger matrix.
                    let strides = if transposed { [1, rows + 1] } else { [columns + 1, 1] };
                    let mut values = vec![f64::NAN; (rows + 1) * (columns + 1)];
                    for (at, number) in numbers.iter().enumerate() {
                        values[at / columns * strides[0] + at % columns * strides[1]] = *number;
                    }
                    (values, strides)
                };
                let a: Vec<f64> = (0..rows * depth).map(number).collect();
                let b: Vec<f64> = (0..depth * columns).map(|at| number(at + 5)).collect();
                let bias: Vec<f64> = (0..columns).map(number).collect();
                let sum = |row: usize, column: usize| -> f64 {
                    (0..depth).map(|k| a[row * depth + k] * b[k * columns + column]).sum()
                };
                let (left, left_strides) = matrix(&a, [rows, depth], transposed & 1 == 1);
                let (right, right_strides) = matrix(&b, [depth, columns], transposed & 2 == 2);
                let left =
                    Matrix::of_rows(&left, &Shape::new([rows, depth]), &left_strides).expect("a matrix");
                let right =
                    Matrix::of_rows(&right, &Shape::new([depth, columns]), &right_strides).expect("a matrix");
                let plain = product(left, right, None);
                let biased = product(left, right, Some(&bias));
                let mut added: Vec<f64> = (0..rows * columns).map(number).collect();
                add_product(left, right, &mut added);
                for at in 0..rows * columns {
                    let exact = sum(at / columns, at % columns);
                    for (found, exact) in [
                        (plain[at], exact),
                        (biased[at], exact + bias[at % columns]),
                        (added[at], exact + number(at)),
                    ] {
                        assert!(
                            (found - exact).abs() < 1e-10,
                            "{rows} {depth} {columns}, {at}: {found}, not {exact}"
                        );
                    }
                }
            }
        }
    }

    /// By columns and by panels, in f32, also with few summands.
    #[test]
    fn few_rows_are_sums_of_products() {
        for (rows, depth, columns) in [
            (2, 1, 300),
            (FEW_ROWS, 2, 140),
            (7, 33, 1),
            (FEW_ROWS, 700, 129),
            (FEW_ROWS + 1, 1, 140),
            (FEW_ROWS + 1, PANEL_DEPTH + 1, 97),
        ] {
            let number = |at: usize| ((at * 7919) % 201) as f32 / 100.0 - 1.0;
            let a: Vec<f32> = (0..rows * depth).map(number).collect();
            let b: Vec<f32> = (0..columns * depth).map(number).collect();
            let left = Matrix::in_order(&a, [rows, depth]).expect("a matrix");
            let right = Matrix::in_order(&b, [columns, depth]).expect("a matrix").transpose();
            for (at, found) in product(left, right, None).into_iter().enumerate() {
                let factors = a[at / columns * depth..][..depth].iter().zip(&b[at % columns * depth..]);
                let exact: f64 = factors.map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
                assert!(
                    (f64::from(found) - exact).abs() < 1e-5 * (1.0 + exact.abs()),
                    "{rows} {depth} {columns}, {at}: {found}, not {exact}"
                );
            }
        }
    }

    #[test]
    fn what_is_no_matrix_is_none() {
        let values = [0f32; 24];
        let matrix =
            |shape: [usize; 3], strides: [usize; 3]| Matrix::of_rows(&values, &Shape::new(shape), &strides);
        assert!(matrix([2, 3, 4], [12, 4, 1]).is_some_and(|m| m.size == [6, 4] && m.strides == [4, 1]));
        assert!(matrix([2, 1, 4], [12, 99, 1]).is_some_and(|m| m.size == [2, 4] && m.strides == [12, 1]));
        assert!(matrix([1, 1, 4], [0, 0, 1]).is_some_and(|m| m.size == [1, 4]));
        assert!(matrix([2, 3, 4], [4, 8, 1]).is_none(), "rows in another order");
        assert!(matrix([2, 0, 4], [12, 4, 1]).is_none(), "empty");
        assert!(matrix([2, 3, 4], [12, 4, 4]).is_none(), "beyond the end");
    }

    /// Every element of a result is in exactly one part, and no thread has much more work than the others.
    #[test]
    fn parts_are_even() {
        let number = [0f32];
        for threads in [1, 2, 3, 4, 6, 8, 12, 16, 32] {
            for [rows, columns] in
                [[64, 256], [2048, 400], [2048, 600], [2048, 1024], [16, 1024], [2048, 16], [1, 1], [7, 5000]]
            {
                for [transposed_a, transposed_b] in [[false, false], [true, false], [false, true]] {
                    let matrix = |size: [usize; 2], transposed: bool| {
                        let strides = if transposed { [1, size[0]] } else { [size[1], 1] };
                        Matrix { values: &number[..], size, strides }
                    };
                    let a = matrix([rows, 256], transposed_a);
                    let parts = parts(a, matrix([256, columns], transposed_b), threads);
                    let sizes = parts.iter().map(|(rows, columns)| rows.len() * columns.len());
                    assert_eq!(sizes.clone().sum::<usize>(), rows * columns);
                    let disjoint = |a: &Range<usize>, b: &Range<usize>| a.end <= b.start || b.end <= a.start;
                    for (at, (r, c)) in parts.iter().enumerate() {
                        assert!(
                            parts[..at]
                                .iter()
                                .all(|(rows, columns)| disjoint(rows, r) || disjoint(columns, c))
                        );
                    }
                    if rows * columns >= 1 << 18 {
                        let most = sizes.max().unwrap_or(0) * parts.len().div_ceil(threads);
                        let share = rows * columns / threads;
                        assert!(
                            10 * share >= 6 * most,
                            "{rows} x {columns}, {threads} threads: {share} of {most}"
                        );
                    }
                }
            }
        }
    }
}
