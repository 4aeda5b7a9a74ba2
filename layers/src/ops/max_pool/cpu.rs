//! The kernels on a CPU: fused loops over the taps of the windows.
use super::{MaxPoolKernels, output_shape};
use crate::backend::{
    Saved,
    cpu::{
        CpuBackend, CpuElement, accumulators,
        parallel::{self, Job, Work},
        pieces,
        plan::Items,
        with_element,
    },
};
use burn::backend::{TensorMetadata, tensor::FloatTensor};
use burn::tensor::{DType, Shape, bf16, f16, ops::MaxPoolOptions};
use core::ops::Range;
use num_traits::Zero;
use std::sync::Arc;

impl<B: CpuBackend> MaxPoolKernels for B {
    type Offsets = WindowOffsets;

    fn max_pool2d_with_offsets(
        x: FloatTensor<B>,
        options: &MaxPoolOptions<2>,
    ) -> (FloatTensor<B>, WindowOffsets) {
        let x = B::contiguous(x);
        let shape = output_shape(&x.shape(), options);
        let geometry = PoolGeometry::new(&x.shape(), &shape, options);
        with_element!(x.dtype(), "max_pool2d", E => {
            let (y, offsets) = geometry.forward(B::as_slice::<E>(&x), B::NAN_WINS_MAX_POOL);
            (B::from_vec(y, shape), offsets)
        })
    }

    fn max_pool2d_with_offsets_backward(
        x: Shape,
        offsets: &WindowOffsets,
        dy: FloatTensor<B>,
        options: &MaxPoolOptions<2>,
    ) -> FloatTensor<B> {
        let dy = B::contiguous(dy);
        let geometry = PoolGeometry::new(&x, &dy.shape(), options);
        with_element!(dy.dtype(), "max_pool2d", E => {
            B::from_vec(geometry.backward(offsets, B::as_slice::<E>(&dy)), x)
        })
    }
}

/// For every output, the position of the winner in its window, counted row by row.
#[derive(Clone)]
pub enum WindowOffsets {
    /// For windows of up to 255 elements.
    U8(Arc<Vec<u8>>),
    /// For windows of up to 65535 elements.
    U16(Arc<Vec<u16>>),
    /// For larger windows.
    U32(Arc<Vec<u32>>),
}

impl Saved for WindowOffsets {
    fn bytes(&self) -> usize {
        match self {
            Self::U8(offsets) => offsets.len(),
            Self::U16(offsets) => 2 * offsets.len(),
            Self::U32(offsets) => 4 * offsets.len(),
        }
    }
}

impl core::fmt::Debug for WindowOffsets {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "WindowOffsets({} bytes)", self.bytes())
    }
}

/// An unsigned integer that holds a position in a window. Its largest number means that the window is empty.
trait Offset: Copy + Send + Sync + Eq {
    const EMPTY: Self;
    /// The offset of a position; [`EMPTY`](Self::EMPTY) for `u32::MAX`.
    fn new(position: u32) -> Self;
    fn position(self) -> usize;
}

macro_rules! offset {
    ($($int:ty),+) => {$(
        impl Offset for $int {
            const EMPTY: Self = <$int>::MAX;
            #[inline(always)]
            fn new(position: u32) -> Self {
                position as $int
            }
            #[inline(always)]
            fn position(self) -> usize {
                self as usize
            }
        }
    )+};
}
offset!(u8, u16, u32);

/// One axis of a pool.
#[derive(Clone, Copy, Debug)]
struct PoolAxis {
    size: usize,
    out: usize,
    kernel: usize,
    stride: usize,
    padding: usize,
    dilation: usize,
}

impl PoolAxis {
    /// The windows whose tap number `tap` is inside the input.
    fn windows(&self, tap: usize) -> Range<usize> {
        let tap = tap * self.dilation;
        // inside: padding <= window * stride + tap < padding + size
        let first = self.padding.saturating_sub(tap).div_ceil(self.stride);
        let end = (self.padding + self.size).saturating_sub(tap).div_ceil(self.stride);
        first.min(self.out)..end.min(self.out).max(first.min(self.out))
    }

    /// Inputs from the first tap of a window to the last.
    fn reach(&self) -> usize {
        (self.kernel - 1) * self.dilation + 1
    }

    /// The windows that may have taps in a range of the input.
    fn windows_of(&self, inputs: &Range<usize>) -> Range<usize> {
        // not below: window * stride + reach > padding + start; not above: window * stride < padding + end
        let first = (self.padding + inputs.start + 1).saturating_sub(self.reach()).div_ceil(self.stride);
        let end = (self.padding + inputs.end).div_ceil(self.stride);
        first.min(self.out)..end.min(self.out)
    }

    /// The taps of window number `window` that are inside the input.
    fn taps(&self, window: usize) -> Range<usize> {
        let first = self.padding.saturating_sub(window * self.stride).div_ceil(self.dilation);
        let end = (self.padding + self.size).saturating_sub(window * self.stride).div_ceil(self.dilation);
        first.min(self.kernel)..end.min(self.kernel).max(first.min(self.kernel))
    }
}

/// The windows of a pool.
#[derive(Debug)]
struct PoolGeometry {
    planes: usize,
    rows: PoolAxis,
    columns: PoolAxis,
}

impl PoolGeometry {
    /// The pool from shape `x` to shape `y`.
    fn new(x: &Shape, y: &Shape, options: &MaxPoolOptions<2>) -> Self {
        let axis = |axis: usize| PoolAxis {
            size: x[axis + 2],
            out: y[axis + 2],
            kernel: options.kernel_size[axis],
            stride: options.stride[axis],
            padding: options.padding[axis].0,
            dilation: options.dilation[axis],
        };
        Self { planes: x[0] * x[1], rows: axis(0), columns: axis(1) }
    }

    /// The maxima and their positions. If `nan_wins`, the last NaN of a window is its maximum; otherwise a NaN never is.
    fn forward<E: CpuElement>(&self, x: &[E], nan_wins: bool) -> (Vec<E>, WindowOffsets) {
        match self.rows.kernel * self.columns.kernel {
            0..=0xff => {
                let (y, offsets) = self.forward_as::<E, u8>(x, nan_wins);
                (y, WindowOffsets::U8(Arc::new(offsets)))
            }
            0x100..=0xffff => {
                let (y, offsets) = self.forward_as::<E, u16>(x, nan_wins);
                (y, WindowOffsets::U16(Arc::new(offsets)))
            }
            _ => {
                let (y, offsets) = self.forward_as::<E, u32>(x, nan_wins);
                (y, WindowOffsets::U32(Arc::new(offsets)))
            }
        }
    }

    /// Gradient of the input.
    fn backward<E: CpuElement>(&self, offsets: &WindowOffsets, dy: &[E]) -> Vec<E> {
        match offsets {
            WindowOffsets::U8(offsets) => self.backward_as(offsets, dy),
            WindowOffsets::U16(offsets) => self.backward_as(offsets, dy),
            WindowOffsets::U32(offsets) => self.backward_as(offsets, dy),
        }
    }

    /// The loop over planes, which are cut between rows of windows, or a single row between some windows.
    fn items(&self) -> Items {
        let (planes, [plane_in, plane_out]) = (self.planes, self.plane_sizes());
        let work = Work::of([8, planes, plane_out, self.rows.kernel, self.columns.kernel]); // rows of windows are short
        Items { steps: plane_out.div_ceil(self.step_out()).max(1), ..Items::of([planes, plane_in], work) }
    }

    /// The loop of the backward pass, whose planes are cut between rows of the input, or a single row between some elements.
    fn items_backward(&self) -> Items {
        let (planes, [plane_in, plane_out]) = (self.planes, self.plane_sizes());
        let work = Work::of([planes, plane_in + 4 * plane_out]); // reads through a table
        let steps = plane_in.div_ceil(self.step_in()).max(1);
        // Windows that reach into two pieces are visited by both.
        let again = match self.rows.size {
            1 => (self.columns.reach() - 1).div_ceil(self.step_in().max(1)),
            rows => (self.rows.reach() - 1).div_ceil(self.rows.stride) * rows / self.rows.out.max(1),
        };
        Items { steps, again, ..Items::of([planes, plane_in], work) }
    }

    /// Windows of a step: a row, or if there is one, some of it.
    fn step_out(&self) -> usize {
        if self.rows.out == 1 { self.columns.out.min(STEP_OUT) } else { self.columns.out }.max(1)
    }

    /// Elements of a step of the backward pass.
    fn step_in(&self) -> usize {
        if self.rows.size == 1 { self.columns.size.min(STEP_IN) } else { self.columns.size }.max(1)
    }

    fn plane_sizes(&self) -> [usize; 2] {
        [self.rows.size * self.columns.size, self.rows.out * self.columns.out]
    }

    fn forward_as<E: CpuElement, O: Offset>(&self, x: &[E], nan_wins: bool) -> (Vec<E>, Vec<O>) {
        let [plane_in, plane_out] = self.plane_sizes();
        let planes = self.planes;
        let len = planes * plane_out;
        let mut offsets = vec![O::EMPTY; len];
        if plane_out == 0 {
            return (vec![], offsets);
        }
        let items = self.items();
        let chunks = items.division(parallel::threads()).chunks(plane_out, self.step_out());
        let y = pieces::zip_filled_in_pieces(
            E::neg_infinity(),
            &mut offsets,
            chunks,
            items.work,
            |start, y, offsets| {
                let x = &x[start / plane_out * plane_in..];
                let first = start % plane_out;
                match nan_wins {
                    true => parallel::vectorized(Forward::<_, _, true>(self, x, first, y, offsets)),
                    false => parallel::vectorized(Forward::<_, _, false>(self, x, first, y, offsets)),
                }
            },
        );
        (y, offsets)
    }

    fn backward_as<E: CpuElement, O: Offset>(&self, offsets: &[O], dy: &[E]) -> Vec<E> {
        let (rows, columns) = (&self.rows, &self.columns);
        let [plane_in, plane_out] = self.plane_sizes();
        let planes = self.planes;
        if planes * plane_in == 0 {
            return vec![];
        }
        // How far the taps of a window lie from its first: from a table, if that is small.
        let tap = |position: usize| {
            let (kh, kw) = (position / columns.kernel, position % columns.kernel);
            kh * rows.dilation * columns.size + kw * columns.dilation
        };
        let taps: Vec<usize> = (0..(rows.kernel * columns.kernel).min(1 << 8)).map(tap).collect();
        let tap = |position: usize| taps.get(position).copied().unwrap_or_else(|| tap(position));
        let padding = rows.padding * columns.size + columns.padding;
        // Windows that overlap add up in one element: in f32 at least, narrowed once. `dx` are whole rows of a plane, or a part of one,
        // from `start` on.
        let add = |dx: &mut [E::Acc], start: usize, offsets: &[O], dy: &[E]| {
            let (first_row, first_column) = (start / columns.size, start % columns.size);
            let windows = match dx.len() < columns.size {
                true => columns.windows_of(&(first_column..first_column + dx.len())),
                false => 0..columns.out,
            };
            for oh in rows.windows_of(&(first_row..first_row + dx.len().div_ceil(columns.size))) {
                let row = oh * columns.out + windows.start..oh * columns.out + windows.end;
                let mut first = oh * rows.stride * columns.size + windows.start * columns.stride;
                for (&offset, &dy) in offsets[row.clone()].iter().zip(&dy[row]) {
                    if offset != O::EMPTY {
                        // Of a window that reaches into other rows, too, the winner may be in those.
                        let at = (first + tap(offset.position()) - padding).wrapping_sub(start);
                        if let Some(dx) = dx.get_mut(at) {
                            *dx = *dx + dy.widen();
                        }
                    }
                    first += columns.stride;
                }
            }
        };
        let items = self.items_backward();
        let chunks = items.division(parallel::threads()).chunks(plane_in, self.step_in());
        pieces::filled_in_pieces(planes * plane_in, E::zero(), chunks, items.work, |start, dx| {
            let (mut sums, first) = (vec![], start % plane_in);
            for (plane, dx) in (start / plane_in..).zip(dx.chunks_mut(plane_in)) {
                let range = plane * plane_out..(plane + 1) * plane_out;
                let (offsets, dy) = (&offsets[range.clone()], &dy[range]);
                match accumulators(dx) {
                    Some(dx) => add(dx, first, offsets, dy),
                    None => {
                        sums.clear();
                        sums.resize(dx.len(), <E::Acc as Zero>::zero());
                        add(&mut sums, first, offsets, dy);
                        dx.iter_mut().zip(&sums).for_each(|(dx, &sum)| *dx = E::narrow(sum));
                    }
                }
            }
        })
    }
}

/// Windows, and elements of the input, between which a single row can be cut.
const STEP_OUT: usize = 8;
const STEP_IN: usize = 64;

/// The most entries of a table along an axis: of taps with their windows, or of windows with their taps.
const TABLE: usize = 64;

/// Finds the maxima of planes, and their positions.
///
/// The fields: the input from the first plane on, the first window, and the results of whole planes, of some rows of one, or of a part of a
/// single row.
struct Forward<'a, E, O, const NAN_WINS: bool>(&'a PoolGeometry, &'a [E], usize, &'a mut [E], &'a mut [O]);

impl<E: CpuElement, O: Offset, const NAN_WINS: bool> Job for Forward<'_, E, O, NAN_WINS> {
    type Result = ();

    /// Takes one row of windows after the other, and in it one tap after the other, so that the inner loop has no bounds to check. Rows of
    /// few windows are taken window by window.
    #[inline(always)]
    fn run(self) {
        let Self(geometry, x, first, y, offsets) = self;
        let PoolGeometry { rows, columns, .. } = geometry;
        let (first_row, before) = (first / columns.out, first % columns.out);
        if columns.out < FEW_WINDOWS {
            return window_by_window::<_, _, NAN_WINS>(geometry, x, first_row, y, offsets);
        }
        let [plane_in, plane_out] = geometry.plane_sizes();
        // Looked up in tables, if these are small.
        let table = |axis: &PoolAxis| -> Vec<Range<usize>> {
            (0..axis.kernel.min(TABLE)).map(|tap| axis.windows(tap)).collect()
        };
        let (of_rows, of_columns) = (table(rows), table(columns));
        let of_row = |tap: usize| of_rows.get(tap).cloned().unwrap_or_else(|| rows.windows(tap));
        let of_column = |tap: usize| of_columns.get(tap).cloned().unwrap_or_else(|| columns.windows(tap));
        // As wide as f32, so that vectors of both have the same number of elements.
        let mut winners = vec![u32::MAX; columns.out.min(y.len())];
        let planes = y.chunks_mut(plane_out).zip(offsets.chunks_mut(plane_out)).zip(x.chunks(plane_in));
        for ((y, offsets), x) in planes {
            let windows = y.chunks_mut(columns.out).zip(offsets.chunks_mut(columns.out));
            for (oh, (y, offsets)) in (first_row..).zip(windows) {
                winners.fill(u32::MAX);
                for kh in (0..rows.kernel).filter(|&kh| of_row(kh).contains(&oh)) {
                    let ih = oh * rows.stride + kh * rows.dilation - rows.padding;
                    let x = &x[ih * columns.size..][..columns.size];
                    for kw in 0..columns.kernel {
                        let windows = of_column(kw);
                        let windows = windows.start.max(before)..windows.end.min(before + y.len());
                        if windows.is_empty() {
                            continue;
                        }
                        let first = windows.start * columns.stride + kw * columns.dilation - columns.padding;
                        let tap = (kh * columns.kernel + kw) as u32;
                        let windows = windows.start - before..windows.end - before;
                        let (y, winners) = (&mut y[windows.clone()], &mut winners[windows]);
                        match (&x[first..], columns.stride) {
                            (x, 1) => update::<_, NAN_WINS>(y, winners, x, tap),
                            (x, 2) => {
                                // Pairs are read in vectors. The last pair may lack its second element.
                                let (pairs, half) = x.as_chunks::<2>();
                                let whole = pairs.len().min(y.len());
                                update::<_, NAN_WINS>(y, winners, pairs.iter().map(|[x, _]| x), tap);
                                update::<_, NAN_WINS>(&mut y[whole..], &mut winners[whole..], half, tap);
                            }
                            (x, stride) => update::<_, NAN_WINS>(y, winners, x.iter().step_by(stride), tap),
                        }
                    }
                }
                for (offset, &winner) in offsets.iter_mut().zip(&winners) {
                    *offset = O::new(winner);
                }
            }
        }
    }
}

/// Rows of fewer windows are too short for a vectorized loop.
const FEW_WINDOWS: usize = 8;

/// [`Forward`] for rows of few windows.
#[inline(always)]
fn window_by_window<E: CpuElement, O: Offset, const NAN_WINS: bool>(
    geometry: &PoolGeometry,
    x: &[E],
    first_row: usize,
    y: &mut [E],
    offsets: &mut [O],
) {
    let PoolGeometry { rows, columns, .. } = geometry;
    let [plane_in, plane_out] = geometry.plane_sizes();
    // Looked up in tables, if these are small.
    let table = |axis: &PoolAxis| -> Vec<Range<usize>> {
        (0..axis.out.min(TABLE)).map(|window| axis.taps(window)).collect()
    };
    let (of_rows, of_columns) = (table(rows), table(columns));
    let planes = y.chunks_mut(plane_out).zip(offsets.chunks_mut(plane_out)).zip(x.chunks(plane_in));
    for ((y, offsets), x) in planes {
        let rows_of_windows = y.chunks_mut(columns.out).zip(offsets.chunks_mut(columns.out));
        for (oh, (y, offsets)) in (first_row..).zip(rows_of_windows) {
            let of_row = of_rows.get(oh).cloned().unwrap_or_else(|| rows.taps(oh));
            for (ow, ((y, offset), of_column)) in y.iter_mut().zip(offsets).zip(&of_columns).enumerate() {
                let mut winner = u32::MAX;
                for kh in of_row.clone() {
                    let ih = oh * rows.stride + kh * rows.dilation - rows.padding;
                    let x = &x[ih * columns.size..][..columns.size];
                    for kw in of_column.clone() {
                        let iw = ow * columns.stride + kw * columns.dilation - columns.padding;
                        let tap = (kh * columns.kernel + kw) as u32;
                        compete::<_, NAN_WINS>(y, &mut winner, x[iw], tap);
                    }
                }
                *offset = O::new(winner);
            }
        }
    }
}

/// Lets one element of each window compete with those before it.
#[inline(always)]
fn update<'a, E: CpuElement, const NAN_WINS: bool>(
    y: &mut [E],
    winners: &mut [u32],
    x: impl IntoIterator<Item = &'a E>,
    tap: u32,
) {
    for ((y, winner), &x) in y.iter_mut().zip(winners).zip(x) {
        compete::<_, NAN_WINS>(y, winner, x, tap);
    }
}

/// Lets one element of a window compete with those before it.
#[inline(always)]
fn compete<E: CpuElement, const NAN_WINS: bool>(y: &mut E, winner: &mut u32, x: E, tap: u32) {
    // Without a branch, because a processor cannot predict which element wins.
    let first = (*winner == u32::MAX) & (NAN_WINS | !x.is_nan());
    let wins = (x > *y) | first | (NAN_WINS & x.is_nan());
    *y = if wins { x } else { *y };
    *winner = if wins { tap } else { *winner };
}

#[cfg(test)]
pub(crate) mod counting {
    use super::*;

    /// The loops over square planes, forward and backward.
    pub(crate) fn items([batch, channels, side]: [usize; 3], kernel: usize, stride: usize) -> [Items; 2] {
        let options = MaxPoolOptions::new([kernel; 2]).with_stride([stride; 2]);
        let x = Shape::new([batch, channels, side, side]);
        let geometry = PoolGeometry::new(&x, &output_shape(&x, &options), &options);
        [geometry.items(), geometry.items_backward()]
    }

    /// The same over signals.
    pub(crate) fn items_of_signals(planes: usize, size: usize, kernel: usize, stride: usize) -> [Items; 2] {
        let options = MaxPoolOptions::new([1, kernel]).with_stride([1, stride]);
        let x = Shape::new([1, planes, 1, size]);
        let geometry = PoolGeometry::new(&x, &output_shape(&x, &options), &options);
        [geometry.items(), geometry.items_backward()]
    }
}
