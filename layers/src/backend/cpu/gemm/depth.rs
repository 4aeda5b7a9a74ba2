//! Small products of long factors, as the gradients of weights over many rows: threads take parts of the summands.
//!
//! A part has its own sums, which are added up from the first part to the last. Parts follow from the sizes only, so that with more than
//! [`FEW`] threads, the result does not depend on their number.
use super::{FEW, MOST_PACKED, Start, add_summands, ranges, summands_at_once};
use crate::backend::cpu::{CpuElement, matrix::Matrix, parallel, sums::add_each};
use core::slice;

/// Elements of a result that is computed so, at most. A larger one is divided well enough.
const SMALL: usize = 1 << 14;

/// Its longest side, at most. The sides of a result of few long rows, as when texts are generated, are divided: its time goes into reading.
const LONGEST_SIDE: usize = 1 << 10;

/// Multiplications, and summands, of a part at least.
const LEAST_WORK: usize = 1 << 20;
const LEAST_SUMMANDS: usize = 1 << 7;

/// The most parts: many more than there are threads, so that these end at about the same time.
const MOST_PARTS: usize = 1 << 10;

/// The sums of all parts that are computed at the same time take at most one part in this many of both factors, which must have room for so
/// many sums.
const PART: usize = 16;
const ROOM: usize = 64;

/// The parts of the summands.
#[derive(Clone, Copy, Debug)]
pub(super) struct Depth {
    /// Summands of a part; the last may have fewer.
    part: usize,
    count: usize,
    /// Parts whose sums exist at the same time.
    at_once: usize,
}

impl Depth {
    /// Of a product of these sizes, by so many threads; `None` if its rows and columns are to be divided.
    pub(super) fn of([rows, depth, columns]: [usize; 3], threads: usize) -> Option<Self> {
        let len = rows.saturating_mul(columns);
        if threads <= FEW || !(1..=SMALL).contains(&len) || rows.max(columns) > LONGEST_SIDE {
            return None;
        }
        let room = (rows + columns).saturating_mul(depth) / (PART * len);
        let count = (depth / (LEAST_WORK / len).max(LEAST_SUMMANDS)).min(MOST_PARTS);
        if room < ROOM || count < ROOM {
            return None;
        }
        let part = depth.div_ceil(count);
        let count = depth.div_ceil(part);
        let at_once = match room / threads {
            0 => room,
            turns => turns * threads,
        };
        Some(Self { part, count, at_once: at_once.min(count) })
    }

    /// `start + a b`, in row-major order.
    ///
    /// # Safety
    ///
    /// `result` has room for the whole product, and is initialized if the product is added to what it holds.
    pub(super) unsafe fn multiply<E: CpuElement>(
        self,
        a: Matrix<'_, E>,
        b: Matrix<'_, E>,
        result: *mut E,
        start: Start<'_, E>,
    ) {
        let (depth, columns) = (a.columns(), b.columns());
        let len = a.rows() * columns;
        if !matches!(start, Start::Result) {
            // SAFETY: the caller promises the room.
            unsafe { slice::from_raw_parts_mut(result.cast::<core::mem::MaybeUninit<E>>(), len) }
                .fill(core::mem::MaybeUninit::new(E::zero()));
        }
        // SAFETY: all of it is initialized.
        let result = unsafe { slice::from_raw_parts_mut(result, len) };
        let mut sums = vec![E::zero(); self.at_once * len];
        let work = parallel::Work::of([len, self.at_once, self.part]);
        for first in (0..self.count).step_by(self.at_once) {
            let sums = &mut sums[..(self.count - first).min(self.at_once) * len];
            parallel::chunks_mut(sums, len, work, |index, sums| {
                let start = (first + index) * self.part;
                let summands = start..depth.min(start + self.part);
                let packed = summands_at_once(summands.len(), MOST_PACKED);
                for (index, some) in ranges(summands.len(), packed).enumerate() {
                    let some = start + some.start..start + some.end;
                    // SAFETY: these sums are this part's, and there are as many as elements of the result.
                    unsafe { add_summands(a, b, some, sums.as_mut_ptr(), columns, index > 0) };
                }
            });
            // Some elements of all parts, whichever thread made them.
            let (sums, size) = (&*sums, parallel::items_per_job(len, sums.len()));
            parallel::chunks_mut(result, size, sums.len(), |index, result| {
                for sums in sums.chunks_exact(len) {
                    add_each(result, &sums[index * size..]);
                }
            });
        }
        if let Start::Row(bias) = start {
            for row in result.chunks_exact_mut(columns) {
                add_each(row, bias);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Before, 64 threads took at most 44 parts of a result of 64 x 64, each of which read a tenth of both factors.
    #[test]
    fn small_results_of_many_summands_keep_threads_busy() {
        for side in [1, 16, 48, 64, 128] {
            for depth in [1 << 16, 1 << 18, 1_000_003, 1 << 20, 1 << 22] {
                let sizes = [side, depth, side];
                let of_64 = Depth::of(sizes, 64);
                for threads in [5, 6, 8, 12, 16, 24, 32, 48, 60, 64, 96, 128, 200, 256] {
                    let depths = Depth::of(sizes, threads);
                    assert_eq!(depths.map(|of| of.part), of_64.map(|of| of.part), "not by the sizes alone");
                    let Some(of @ Depth { part, count, at_once }) = depths else { continue };
                    assert!((count - 1) * part < depth && count * part >= depth && at_once <= count);
                    assert!(at_once * side * side <= 2 * side * depth / PART, "{sizes:?}: {of:?}");
                    let turns =
                        count / at_once * at_once.div_ceil(threads) + (count % at_once).div_ceil(threads);
                    let imbalance = (turns * part * threads) as f64 / depth as f64;
                    // The shortest parts take 50 microseconds; of large results, few sums fit into memory.
                    let is_short = 9 * part * side * side <= 10 * LEAST_WORK || at_once < threads.min(count);
                    assert!(
                        imbalance <= 1.25 || is_short,
                        "{sizes:?}, {threads} threads: {of:?}, {imbalance}"
                    );
                }
            }
        }
        assert!(Depth::of([64, 1 << 20, 64], 64).is_some_and(|of| of.count >= 512));
        assert!(Depth::of([64, 1 << 20, 64], 2).is_none() && Depth::of([256, 1 << 20, 256], 64).is_none());
        for columns in [4096, 14_336] {
            assert!(Depth::of([1, columns, columns], 64).is_none(), "columns of one row are divided");
        }
    }

    /// The same sums whatever the number of threads, if these are many; with a bias and added to what is there.
    #[cfg(feature = "rayon")]
    #[test]
    fn partial_sums_are_the_product() {
        const SIZES: [usize; 3] = [100, 1 << 16, 90];
        let [rows, depth, columns] = SIZES;
        assert!(Depth::of(SIZES, 12).is_some_and(|of| of.at_once < of.count));
        let number = |at: usize| ((at * 7919) % 2003) as f32 / 1001.0 - 1.0;
        let [a, b] = [rows, columns].map(|side| (0..side * depth).map(number).collect::<Vec<_>>());
        let bias: Vec<f32> = (0..columns).map(|at| number(at) * 100.0).collect();
        let compute = |threads: usize| {
            parallel::pool(threads).install(|| {
                let left = Matrix::in_order(&a, [depth, rows]).expect("a matrix").transpose();
                let right = Matrix::in_order(&b, [depth, columns]).expect("a matrix");
                let mut added: Vec<f32> = (0..rows * columns).map(number).collect();
                super::super::add_product(left, right, &mut added);
                [super::super::product(left, right, Some(&bias)), added]
            })
        };
        let [one, of_12, of_40] = [1, 12, 40].map(compute);
        assert!(of_12 == of_40);
        for (one, other) in one.iter().flatten().zip(of_12.iter().flatten()) {
            assert!((one - other).abs() <= 1e-4 * one.abs() + 2e-2, "{one}, {other}");
        }
    }
}
