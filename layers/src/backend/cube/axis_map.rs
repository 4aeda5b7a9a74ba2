//! Adjoints of linear maps along spatial axes: for every element of the input a unit gathers its outputs, for several channels at once. If
//! few inputs have many outputs each, the units of a cube do.
use super::groups::{ChannelsOfUnit, Grouped, channels_of_group, write_channels, zeros};
use super::volume::{Place, Volume, address, channels_last, empty_in_order, place};
use super::{
    Grid, Pair, launch, planned_multiprocessors, row_of_unit, sum_over_units, unit_of_row, units_of_input,
};
use crate::backend::axis_map::{AxisMap, AxisMaps, Resized, Shift, Weights};
use crate::backend::wide;
use burn::backend::{
    Backend, Cube, TensorMetadata, backend_extension,
    ops::{FloatTensorOps, IntTensorOps},
    tensor::FloatTensor,
};
use burn::tensor::{Shape, TensorData};
use burn_cubecl::CubeBackend;
use burn_cubecl::cubecl::{self, ir::ElemType, prelude::*};

impl AxisMaps for Cube {
    fn nearest_input(output: usize, shift: Shift, Resized { size, out, .. }: Resized) -> usize {
        match shift {
            Shift::None => output * size / out,
            Shift::Half => (2 * output + 1) * size / (2 * out),
        }
    }

    fn axis_adjoint(x: Shape, dy: FloatTensor<Self>, axes: Vec<AxisMap>) -> FloatTensor<Self> {
        Self::cube_axis_adjoint(dy, x, axes)
    }
}

#[backend_extension(Cube, Fusion: cfg(feature = "fusion"))]
pub trait AxisMapsCube: Backend {
    /// See [`AxisMaps::axis_adjoint`].
    #[fusion(dtype = dy, shape = x.clone())]
    fn cube_axis_adjoint(dy: FloatTensor<Self>, x: Shape, axes: Vec<AxisMap>) -> FloatTensor<Self>;
}

impl AxisMapsCube for CubeBackend {
    fn cube_axis_adjoint(dy: FloatTensor<Self>, x: Shape, axes: Vec<AxisMap>) -> FloatTensor<Self> {
        let (last, elements) = (channels_last(&dy), x.num_elements());
        let dx = empty_in_order(&dy, x, dy.dtype, last);
        if elements == 0 {
            return dx;
        }
        let Grouped { of_dy, of_dx, channels, of_unit, units } = Grouped::of(&dy, &dx);
        let mut table = Table { places: vec![], weights: vec![], apart: true, outputs: 1 };
        let [columns, rows, depth] = {
            let mut axes = axes.iter().rev();
            [(); 3].map(|()| table.push(axes.next().unwrap_or(&AxisMap::identity())))
        };
        let (apart, multiprocessors) = (table.apart, planned_multiprocessors(&dy.client));
        let units_of_input = units_of_input(units, table.outputs, multiprocessors);
        let Some(grid) = Grid::of_rows(units, units_of_input, &[&dy, &dx]) else { return dx };
        let (places, weights) = table.upload(&dy);
        // SAFETY: the kernel compares every position with the shapes, and the ranges end with those of `dy`.
        unsafe {
            launch!(
                adjoint_kernel,
                grid,
                dy.into_buffer_arg(),
                dx.clone().into_buffer_arg(),
                places.into_buffer_arg(),
                weights.into_buffer_arg(),
                of_dy,
                of_dx,
                AxesLaunch::new(depth, rows, columns),
                channels,
                units,
                of_unit,
                units_of_input,
                axes.len() > 2,
                last,
                apart,
                grid.dtypes,
            );
        }
        dx
    }
}

/// The outputs of every input and their weights, for all axes.
struct Table {
    /// For every input of an axis, its first output and where its weights begin; at the end of the axis, where the weights end.
    places: Vec<i32>,
    weights: Vec<f64>,
    /// Whether no windows of an axis overlap, so that an input has one output at most.
    apart: bool,
    /// The most outputs of an input over all axes.
    outputs: usize,
}

impl Table {
    /// Adds an axis, and returns where it begins in the places.
    fn push(&mut self, axis: &AxisMap) -> usize {
        let begin = self.places.len();
        let mut outputs = vec![0..0; axis.size];
        for (output, window) in axis.windows.iter().enumerate() {
            for of_input in &mut outputs[window.start..window.start + window.len] {
                let first = if of_input.end == 0 { output } else { of_input.start };
                *of_input = first..output + 1;
            }
        }
        let most = outputs.iter().map(ExactSizeIterator::len).max().unwrap_or(0);
        self.apart &= most <= 1;
        self.outputs *= most.max(1);
        for (input, range) in outputs.into_iter().enumerate() {
            self.places.extend([range.start, self.weights.len()].map(|place| place as i32));
            self.weights.extend(range.map(|output| axis.weight(output, input)));
        }
        self.places.extend([0, self.weights.len() as i32]);
        begin
    }

    fn upload(self, like: &FloatTensor<CubeBackend>) -> (FloatTensor<CubeBackend>, FloatTensor<CubeBackend>) {
        let (device, lens) = (like.device(), [[self.places.len()], [self.weights.len()]]);
        let weights = TensorData::new(self.weights, lens[1]).convert_dtype(wide(like.dtype));
        let places = CubeBackend::int_from_data(TensorData::new(self.places, lens[0]), &device);
        (places, CubeBackend::float_from_data(weights, &device))
    }
}

impl AxisMap {
    /// The map of an axis that a tensor lacks.
    fn identity() -> Self {
        Self::equal(1, [(0, 1, 1.0)].into_iter())
    }

    /// The weight of an input in an output: 0 outside of its window.
    fn weight(&self, output: usize, input: usize) -> f64 {
        let window = self.windows[output];
        if !(window.start..window.start + window.len).contains(&input) {
            return 0.0;
        }
        match window.weights {
            Weights::Equal(weight) => weight,
            Weights::From(first) => self.weights[first + input - window.start],
        }
    }
}

/// Where the axes begin in the places of a [`Table`].
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Axes {
    depth: usize,
    rows: usize,
    columns: usize,
}

/// The outputs of an input along an axis, and where their weights are.
#[derive(CubeType, Clone, Copy)]
struct Outputs {
    first: usize,
    weights: usize,
    len: usize,
}

#[cube]
fn outputs(places: &[u32], axis: usize, input: usize) -> Outputs {
    let at = axis + 2 * input;
    let weights = places[at + 1];
    Outputs {
        first: usize::cast_from(places[at]),
        weights: usize::cast_from(weights),
        len: usize::cast_from(places[at + 3] - weights),
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn adjoint_kernel<T: Float, W: Float>(
    dy: &[T],
    dx: &mut [T],
    places: &[u32],
    weights: &[W],
    of_dy: Volume,
    of_dx: Volume,
    axes: Axes,
    channels: ChannelsOfUnit,
    units: usize,
    #[comptime] of_unit: usize,
    #[comptime] units_of_input: usize,
    #[comptime] has_depth: bool,
    #[comptime] channels_last: bool,
    #[comptime] apart: bool,
    #[define(T, W)] _dtypes: [ElemType; 2],
) {
    let number = row_of_unit(units_of_input);
    if number >= units {
        terminate!();
    }
    let to = place(&of_dx, number, channels_last);
    let rows = outputs(places, axes.rows, to.row);
    let slices = outputs(places, axes.depth, to.depth);
    let columns = outputs(places, axes.columns, to.column);
    let (batch, channel) = (to.batch, to.channel);
    let from = Place { batch, channel, depth: slices.first, row: rows.first, column: columns.first };
    let first = address(&of_dy, &from);
    let count = channels_of_group(&channels, channel, of_unit);
    let mut offsets = Array::<usize>::new(of_unit);
    #[unroll]
    for channel in 0..of_unit {
        // Beyond the last channel, it is read again.
        offsets[channel] = min(channel, count - 1) * channels.stride_of_dy;
    }
    let mut sums = zeros::<W>(of_unit);
    if comptime!(apart) {
        if slices.len * rows.len * columns.len > 0 {
            let weight = weights[slices.weights] * weights[rows.weights] * weights[columns.weights];
            #[unroll]
            for channel in 0..of_unit {
                sums[channel] = weight * W::cast_from(dy[first + offsets[channel]]);
            }
        }
    } else if comptime!(units_of_input > 1) {
        let lines = slices.len * rows.len;
        let mut at = UNIT_POS as usize;
        while at < lines * columns.len {
            let (line, k) = (at / columns.len, at % columns.len);
            let (i, j) = (line / rows.len, line % rows.len);
            let weight =
                weights[slices.weights + i] * weights[rows.weights + j] * weights[columns.weights + k];
            let from =
                first + i * of_dy.stride_of_depth + j * of_dy.stride_of_height + k * of_dy.stride_of_width;
            #[unroll]
            for channel in 0..of_unit {
                sums[channel] += weight * W::cast_from(dy[from + offsets[channel]]);
            }
            at += units_of_input;
        }
        #[unroll]
        for channel in 0..of_unit {
            let of_this = Pair::<W> { a: sums[channel], b: W::new(0.0) };
            sums[channel] = sum_over_units::<W>(of_this, units_of_input).a;
        }
    } else if comptime!(has_depth) {
        for i in 0..slices.len {
            let start = first + i * of_dy.stride_of_depth;
            let of_plane =
                sums_of_plane::<T, W>(dy, weights, &of_dy, start, &offsets, &rows, &columns, of_unit);
            #[unroll]
            for channel in 0..of_unit {
                sums[channel] += weights[slices.weights + i] * of_plane[channel];
            }
        }
    } else {
        sums = sums_of_plane::<T, W>(dy, weights, &of_dy, first, &offsets, &rows, &columns, of_unit);
    }
    if unit_of_row(units_of_input) == 0 {
        write_channels::<T, W>(dx, address(&of_dx, &to), &channels, count, &sums, of_unit);
    }
}

/// The sums over rows and columns, whose first element is at `start`.
#[cube]
fn sums_of_plane<T: Float, W: Float>(
    dy: &[T],
    weights: &[W],
    of_dy: &Volume,
    start: usize,
    offsets: &Array<usize>,
    rows: &Outputs,
    columns: &Outputs,
    #[comptime] of_unit: usize,
) -> Array<W> {
    let mut sums = zeros::<W>(of_unit);
    for j in 0..rows.len {
        let mut of_row = zeros::<W>(of_unit);
        let mut at = start + j * of_dy.stride_of_height;
        for k in 0..columns.len {
            let weight = weights[columns.weights + k];
            #[unroll]
            for channel in 0..of_unit {
                of_row[channel] += weight * W::cast_from(dy[at + offsets[channel]]);
            }
            at += of_dy.stride_of_width;
        }
        let weight = weights[rows.weights + j];
        #[unroll]
        for channel in 0..of_unit {
            sums[channel] += weight * of_row[channel];
        }
    }
    sums
}
