//! Products of few rows with a matrix in half precision, as in generation: the matrix is read once, at the speed of memory, in
//! half the time of one in f32.
use super::gemm::{Parts, ranges};
use super::matrix::Matrix;
use super::parallel::{self, Job, vectorized};
use super::sums::{add_each, dot};
use super::{CpuElement, widen_into};
use core::{mem::MaybeUninit, ops::Range, slice};

/// Results of at most this many rows are computed line by line of the right factor.
pub(super) const FEW_ROWS: usize = 8;

/// The most elements of a line that are in f32 at a time: they stay in the first-level cache.
pub(super) const LINE: usize = 512;

/// The most columns whose sums a job makes from rows of the right factor: it reads several pages of memory in order.
const STRIP: usize = 4096;

/// The least columns of such a job, if it adds all rows.
const SHORT: usize = 1024;

/// The same if it adds some of them: two cache lines.
const SHORTEST: usize = 64;

/// Parts of the rows of the right factor that are added by themselves, whatever the number of threads, so that sums do not depend on it.
const DEPTH_PARTS: usize = 8;

/// Columns of a job, if they lie in order, are a multiple of it.
const MULTIPLE: usize = 8;

/// Rows of the right factor that are added to a sum at once, so that it is written less often.
const AT_ONCE: usize = 4;

/// `a b + bias`, in row-major order, for a left factor `[rows, depth]` in row-major order, and so many elements of the result.
pub(super) fn product<E: CpuElement<Acc = f32>>(
    a: &[f32],
    [rows, len]: [usize; 2],
    b: Matrix<'_, E>,
    bias: Option<&[E]>,
    work: usize,
) -> Vec<E> {
    let mut result = Vec::with_capacity(len);
    if len == 0 {
        return result;
    }
    let (product, target) = (Product { a, rows, b, bias }, Parts(result.as_mut_ptr()));
    if b.strides[0] == 1 {
        product.by_columns(work, &target);
    } else {
        product.by_rows(work, &target);
    }
    // SAFETY: both write all columns of all rows.
    unsafe { result.set_len(len) };
    result
}

/// `a b + bias`
#[derive(Clone, Copy)]
struct Product<'a, E> {
    /// The left factor, in row-major order.
    a: &'a [f32],
    rows: usize,
    b: Matrix<'a, E>,
    bias: Option<&'a [E]>,
}

impl<E: CpuElement<Acc = f32>> Product<'_, E> {
    /// The product if columns of the right factor lie in order.
    fn by_columns(self, work: usize, result: &Parts<E>) {
        let columns = self.b.columns();
        let size = columns.div_ceil(4 * parallel::threads()).next_multiple_of(MULTIPLE);
        parallel::each(ranges(columns, size).collect(), work, |columns| {
            vectorized(Lines { of: self, columns, result });
        });
    }

    /// The product if rows of the right factor lie in order. A job adds rows of some columns, few enough that all threads have work, and
    /// enough that what it reads of a row is long. Where no number is both, a job adds only a part of the rows; its sums are added to those
    /// of other jobs at the end.
    fn by_rows(self, work: usize, result: &Parts<E>) {
        let (columns, parts) = (self.b.columns(), self.parts().collect::<Vec<_>>());
        let strips = |across: usize, least: usize| {
            let size = columns.div_ceil(across).next_multiple_of(SHORTEST).clamp(least, STRIP);
            ranges(columns, size).collect::<Vec<_>>()
        };
        let jobs = 2 * parallel::threads();
        let of_all = strips(jobs, if parts.len() > 1 { SHORT } else { SHORTEST });
        if of_all.len() >= jobs || parts.len() <= 1 {
            return parallel::each(of_all, work, |columns| {
                vectorized(Strip { of: self, columns, result });
            });
        }
        let strips = strips(jobs.div_ceil(parts.len()), SHORTEST);
        // `[parts, rows, columns]`
        let mut sums = vec![0.0f32; parts.len() * self.rows * columns];
        let target = Parts(sums.as_mut_ptr());
        let jobs = strips.iter().flat_map(|strip| (0..parts.len()).map(move |part| (part, strip.clone())));
        parallel::each(jobs.collect(), work, |(part, strip)| {
            let (summands, target) = (parts[part].clone(), &target);
            let sums = vectorized(AddRows { of: self, summands, columns: strip.clone() });
            for (row, sums) in sums.chunks_exact(strip.len()).enumerate() {
                // SAFETY: these columns of a row of this part are this job's.
                let target = unsafe { target.0.add((part * self.rows + row) * columns + strip.start) };
                // SAFETY: as before.
                unsafe { slice::from_raw_parts_mut(target, sums.len()) }.copy_from_slice(sums);
            }
        });
        parallel::each(strips, sums.len(), |columns| {
            vectorized(AddParts { of: self, sums: &sums, columns, result });
        });
    }

    /// The parts of rows of the right factor.
    fn parts(&self) -> impl Iterator<Item = Range<usize>> {
        let depth = self.b.rows();
        ranges(depth, depth.div_ceil(DEPTH_PARTS).next_multiple_of(LINE).max(LINE))
    }

    /// Writes some columns of a result: sums `[rows, columns]`, and the bias.
    #[inline(always)]
    fn write(&self, sums: &[f32], columns: Range<usize>, result: &Parts<E>) {
        let bias = self.bias.map(|bias| &bias[columns.clone()]);
        for (row, sums) in sums.chunks_exact(columns.len()).enumerate() {
            // SAFETY: these columns of a row are those of one job, and there is room for them.
            let result = unsafe { result.0.add(row * self.b.columns() + columns.start).cast() };
            // SAFETY: as before; elements that may be uninitialized.
            round(sums, bias, unsafe { slice::from_raw_parts_mut(result, columns.len()) });
        }
    }
}

/// Sums, with the bias, in the dtype of the result.
#[inline(always)]
pub(super) fn round<E: CpuElement<Acc = f32>>(
    sums: &[f32],
    bias: Option<&[E]>,
    result: &mut [MaybeUninit<E>],
) {
    match bias {
        Some(bias) => {
            for ((result, &sum), bias) in result.iter_mut().zip(sums).zip(bias) {
                result.write(E::narrow(sum + bias.widen()));
            }
        }
        None => result.iter_mut().zip(sums).for_each(|(result, &sum)| _ = result.write(E::narrow(sum))),
    }
}

/// Has a processor load values that are read soon. By itself, it looks ahead only to the end of a page of memory, and reading takes 1.6 times as long.
#[inline(always)]
fn prefetch<E>(values: &[E], first: usize, count: usize) {
    #[cfg(all(target_arch = "x86_64", not(memsave_portable)))]
    for values in
        values.get(first..).unwrap_or_default().chunks(64 / size_of::<E>()).take(count * size_of::<E>() / 64)
    {
        use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: SSE is part of x86-64, and nothing is read: it is only a hint.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(values.as_ptr().cast()) };
    }
    #[cfg(any(memsave_portable, not(target_arch = "x86_64")))]
    let _ = (values, first, count);
}

/// Some columns of a result. A column of the right factor lies in order: every sum is a scalar product.
struct Lines<'a, E> {
    of: Product<'a, E>,
    columns: Range<usize>,
    result: &'a Parts<E>,
}

impl<E: CpuElement<Acc = f32>> Job for Lines<'_, E> {
    type Result = ();

    #[inline(always)]
    fn run(self) {
        let Self { of: Product { a, rows, b, bias }, columns, result } = self;
        let [depth, pitch] = b.size;
        let mut line = [const { MaybeUninit::<f32>::uninit() }; LINE];
        for column in columns {
            let values = &b.values[column * b.strides[1]..][..depth];
            let mut sums = [0.0; FEW_ROWS];
            let next = b.values.get((column + 1) * b.strides[1]..).unwrap_or_default();
            for (index, values) in values.chunks(LINE).enumerate() {
                prefetch(next, index * LINE, values.len());
                let wide = widen_into(values, &mut line[..values.len()]);
                for (row, sum) in sums[..rows].iter_mut().enumerate() {
                    *sum += dot(&a[row * depth + index * LINE..][..wide.len()], wide);
                }
            }
            let bias = bias.map_or(0.0, |bias| bias[column].widen());
            for (row, sum) in sums[..rows].iter().enumerate() {
                // SAFETY: a column of the result that is this job's.
                unsafe { result.0.add(row * pitch + column).write(E::narrow(sum + bias)) };
            }
        }
    }
}

/// Some columns of a result, from all rows of the right factor.
struct Strip<'a, E> {
    of: Product<'a, E>,
    columns: Range<usize>,
    result: &'a Parts<E>,
}

impl<E: CpuElement<Acc = f32>> Job for Strip<'_, E> {
    type Result = ();

    #[inline(always)]
    fn run(self) {
        let Self { of, columns, result } = self;
        let mut total = vec![0.0; of.rows * columns.len()];
        for summands in of.parts() {
            let sums = AddRows { of, summands, columns: columns.clone() }.run();
            add_each(&mut total, &sums);
        }
        of.write(&total, columns, result);
    }
}

/// Adds rows of the right factor, each times an element of the left one: `[rows, columns]`.
struct AddRows<'a, E> {
    of: Product<'a, E>,
    summands: Range<usize>,
    columns: Range<usize>,
}

impl<E: CpuElement<Acc = f32>> Job for AddRows<'_, E> {
    type Result = Vec<f32>;

    #[inline(always)]
    fn run(self) -> Vec<f32> {
        let Self { of: Product { a, rows, b, .. }, summands, columns } = self;
        let depth = b.rows();
        let mut lines = [const { [const { MaybeUninit::<f32>::uninit() }; LINE] }; AT_ONCE];
        let mut sums = vec![0.0f32; rows * columns.len()];
        let mut partial = sums.clone();
        // Sums of parts of these summands, so that few are added to a large one.
        for summands in
            ranges(summands.len(), LINE).map(|few| summands.start + few.start..summands.start + few.end)
        {
            for first in summands.clone().step_by(AT_ONCE) {
                let count = AT_ONCE.min(summands.end - first);
                for few in ranges(columns.len(), LINE) {
                    for (k, line) in (first..first + count).zip(&mut lines) {
                        prefetch(b.values, k * b.strides[0] + columns.start + few.end, LINE);
                        widen_row(b, k, columns.start + few.start, &mut line[..few.len()]);
                    }
                    for row in 0..rows {
                        let factors = &a[row * depth + first..][..count];
                        // SAFETY: this many have just been written.
                        let wide = |line: usize| unsafe { lines[line][..few.len()].assume_init_ref() };
                        add_lines(factors, wide, &mut partial[row * columns.len()..][few.clone()]);
                    }
                }
            }
            add_each(&mut sums, &partial);
            partial.fill(0.0);
        }
        sums
    }
}

/// Adds up to [`AT_ONCE`] lines to sums, each times its factor.
#[inline(always)]
fn add_lines<'a>(factors: &[f32], wide: impl Fn(usize) -> &'a [f32], sums: &mut [f32]) {
    match factors.as_array::<AT_ONCE>() {
        Some(&[a, b, c, d]) => {
            let lines = wide(0).iter().zip(wide(1)).zip(wide(2).iter().zip(wide(3)));
            for (sum, ((w, x), (y, z))) in sums.iter_mut().zip(lines) {
                *sum += (a * w + b * x) + (c * y + d * z);
            }
        }
        None => {
            for (line, factor) in factors.iter().enumerate() {
                for (sum, value) in sums.iter_mut().zip(wide(line)) {
                    *sum += factor * value;
                }
            }
        }
    }
}

/// A part of row `k` of a matrix.
#[inline(always)]
fn widen_row<E: CpuElement<Acc = f32>>(
    b: Matrix<'_, E>,
    k: usize,
    column: usize,
    line: &mut [MaybeUninit<f32>],
) {
    let [below, across] = b.strides;
    let values = &b.values[k * below + column * across..];
    if across == 1 {
        widen_into(&values[..line.len()], line);
    } else {
        for (at, place) in line.iter_mut().enumerate() {
            place.write(values[at * across].widen());
        }
    }
}

/// Some columns of a result, from the sums of all parts.
struct AddParts<'a, E> {
    of: Product<'a, E>,
    /// `[parts, rows, columns]`
    sums: &'a [f32],
    columns: Range<usize>,
    result: &'a Parts<E>,
}

impl<E: CpuElement<Acc = f32>> Job for AddParts<'_, E> {
    type Result = ();

    #[inline(always)]
    fn run(self) {
        let Self { of, sums, columns, result } = self;
        let pitch = of.b.columns();
        let mut total = vec![0.0; of.rows * columns.len()];
        for part in sums.chunks_exact(of.rows * pitch) {
            for (total, sums) in total.chunks_exact_mut(columns.len()).zip(part.chunks_exact(pitch)) {
                add_each(total, &sums[columns.clone()]);
            }
        }
        of.write(&total, columns, result);
    }
}
