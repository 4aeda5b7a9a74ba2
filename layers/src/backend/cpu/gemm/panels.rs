//! Products with panels of a right factor in column-major order, which are transposed block by block.
use super::{add_summands, ranges, summands_at_once};
use crate::backend::cpu::matrix::Matrix;
use crate::backend::cpu::parallel::{Job, vectorized};
use crate::backend::cpu::{CpuElement, transpose::transpose};
use core::{mem::MaybeUninit, slice};

/// The summands of a panel, at most.
pub(in crate::backend::cpu) const PANEL_DEPTH: usize = 384;

/// Some summands of 64 columns in f32 of a right factor, or of 32 in f64, on the stack: as many columns as the inner loops of the crate compute
/// at once on a machine with AVX-512.
pub(in crate::backend::cpu) type Panel = [u64; 64 * PANEL_DEPTH * size_of::<f32>() / size_of::<u64>()];

/// The elements of a panel.
pub(in crate::backend::cpu) fn panel_elements<E: CpuElement>(
    panel: &mut MaybeUninit<Panel>,
) -> &mut [MaybeUninit<E>] {
    const { assert!(align_of::<E>() <= align_of::<Panel>()) };
    let elements = size_of::<Panel>() / size_of::<E>();
    // SAFETY: as many as there is room for, which need not be initialized; a panel is aligned for them.
    unsafe { slice::from_raw_parts_mut(panel.as_mut_ptr().cast(), elements) }
}

/// The columns of a panel of [`PANEL_DEPTH`] summands.
pub(in crate::backend::cpu) const fn panel_columns<E>() -> usize {
    size_of::<Panel>() / size_of::<E>() / PANEL_DEPTH
}

/// `a b`, or the sum of it and `result`, where `b` is in column-major order: panels of it are transposed one after the other. Rows of the
/// result are `stride` elements apart.
///
/// # Safety
///
/// `result` has room for these rows, nobody else reads or writes them meanwhile, and they are initialized if the product is added.
#[inline(never)] // its panel is on the stack
pub(super) unsafe fn multiply_by_panels<E: CpuElement>(
    a: Matrix<'_, E>,
    b: Matrix<'_, E>,
    result: *mut E,
    stride: usize,
    adds: bool,
) {
    let [depth, columns] = b.size;
    let mut panel = MaybeUninit::<Panel>::uninit();
    let (panel, width) = (panel_elements::<E>(&mut panel), panel_columns::<E>());
    let at_once = summands_at_once(depth, PANEL_DEPTH);
    for of_panel in ranges(columns, width) {
        for summands in ranges(depth, at_once) {
            let (start, size) = (summands.start, [summands.len(), of_panel.len()]);
            let values = &b.values[of_panel.start * b.strides[1] + start..];
            vectorized(TransposePanel { values, pitch: b.strides[1], size: [size[1], size[0]], panel });
            // SAFETY: the transposed panel has been written to these elements.
            let values = unsafe { slice::from_raw_parts(panel.as_ptr().cast::<E>(), size[0] * size[1]) };
            let right = Matrix { values, size, strides: [size[1], 1] };
            let left = Matrix { values: &a.values[start * a.strides[1]..], size: [a.rows(), size[0]], ..a };
            // SAFETY: these columns of the result.
            unsafe {
                add_summands(left, right, 0..size[0], result.add(of_panel.start), stride, adds || start > 0)
            };
        }
    }
}

/// Transposes a panel: `size` are its columns and summands.
struct TransposePanel<'a, E> {
    values: &'a [E],
    /// From a column to the next one.
    pitch: usize,
    size: [usize; 2],
    panel: &'a mut [MaybeUninit<E>],
}

impl<E: CpuElement> Job for TransposePanel<'_, E> {
    type Result = ();

    #[inline(always)]
    fn run(self) {
        let Self { values, pitch, size, panel } = self;
        transpose(values, pitch, size, panel, size[0], MaybeUninit::new);
    }
}
