//! Transposes parts of matrices.

/// The side of the blocks in which matrices are transposed.
const BLOCK: usize = 8;

/// `result[c][r] = f(values[r][c])`, for rows that begin `pitch_of_values` and `pitch` elements apart.
#[inline(always)]
pub(crate) fn transpose<T: Copy, U>(
    values: &[T],
    pitch_of_values: usize,
    [rows, columns]: [usize; 2],
    result: &mut [U],
    pitch: usize,
    f: impl Fn(T) -> U,
) {
    for first in (0..rows).step_by(BLOCK) {
        let count = (rows - first).min(BLOCK);
        let mut done = 0;
        // Whole blocks go through registers.
        while count == BLOCK && done + BLOCK <= columns {
            let row = |row: usize| {
                let values = &values[(first + row) * pitch_of_values + done..][..BLOCK];
                core::array::from_fn::<T, BLOCK, _>(|column| values[column])
            };
            let block: [[T; BLOCK]; BLOCK] = core::array::from_fn(row);
            for column in 0..BLOCK {
                let result = &mut result[(done + column) * pitch + first..][..BLOCK];
                for row in 0..BLOCK {
                    result[row] = f(block[row][column]);
                }
            }
            done += BLOCK;
        }
        for (column, result) in result.chunks_mut(pitch).take(columns).enumerate().skip(done) {
            for (result, row) in result[first..first + count].iter_mut().zip(first..) {
                *result = f(values[row * pitch_of_values + column]);
            }
        }
    }
}
