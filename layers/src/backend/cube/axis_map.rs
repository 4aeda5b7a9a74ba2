//! Adjoints of linear maps along spatial axes: for every element of the input a unit gathers its outputs, for several channels at once. If
//! few inputs have many outputs each, the units of a cube do.
use super::groups::{ChannelsOfUnit, Grouped, channels_of_group, write_channels, zeros};
use super::volume::{Place, Volume, address, channels_last, empty_in_order, place};
use super::{
    Grid, Pair, launch, planned_multiprocessors, row_of_unit, sum_over_units, unit_of_row, units_of_input,
};
use crate::backend::axis_map::{AxisMap, AxisMaps, Regular, Resized, Rule, Shift, Weights};
use crate::backend::wide;
use burn::backend::{
    Backend, Cube, TensorMetadata, backend_extension,
    ops::{FloatTensorOps, IntTensorOps},
    tensor::FloatTensor,
};
use burn::tensor::{Shape, TensorData};
use burn_cubecl::CubeBackend;
use burn_cubecl::cubecl::{self, ir::ElemType, prelude::*};
use burn_cubecl::tensor::CubeTensor;

impl AxisMaps for Cube {
    fn nearest_input(output: usize, shift: Shift, Resized { size, out, .. }: Resized) -> usize {
        match shift {
            Shift::None => output * size / out,
            Shift::Half => (2 * output + 1) * size / (2 * out),
        }
    }

    fn axis_adjoint(x: Shape, dy: FloatTensor<Self>, axes: Vec<AxisMap>) -> FloatTensor<Self> {
        Self::cube_axis_adjoint(dy, x, Axes::Maps(axes))
    }

    fn regular_adjoint(x: Shape, dy: FloatTensor<Self>, axes: Vec<Regular>) -> FloatTensor<Self> {
        // Except for windows, kernels multiply both sizes, in 32 bits.
        let fits = |Regular { axis, rule }: &Regular| {
            let product = 2 * (axis.size as u64 + 1) * (axis.out as u64 + 1);
            matches!(rule, Rule::Windows { .. }) || product <= u64::from(u32::MAX)
        };
        match axes.iter().all(fits) {
            true => Self::cube_axis_adjoint(dy, x, Axes::Regular(axes)),
            false => Self::axis_adjoint(x, dy, axes.iter().map(Regular::map::<Self>).collect()),
        }
    }
}

/// The maps of all axes.
#[derive(Clone, Debug)]
pub enum Axes {
    Maps(Vec<AxisMap>),
    Regular(Vec<Regular>),
}

#[backend_extension(Cube, Fusion: cfg(feature = "fusion"))]
pub trait AxisMapsCube: Backend {
    /// See [`AxisMaps::axis_adjoint`].
    #[fusion(dtype = dy, shape = x.clone())]
    fn cube_axis_adjoint(dy: FloatTensor<Self>, x: Shape, axes: Axes) -> FloatTensor<Self>;
}

impl AxisMapsCube for CubeBackend {
    fn cube_axis_adjoint(dy: FloatTensor<Self>, x: Shape, axes: Axes) -> FloatTensor<Self> {
        let (last, elements, has_depth) = (channels_last(&dy), x.num_elements(), x.num_dims() > 4);
        let dx = empty_in_order(&dy, x, dy.dtype, last);
        if elements == 0 {
            return dx;
        }
        let Grouped { of_dy, of_dx, channels, of_unit, units } = Grouped::of(&dy, &dx);
        let Read { axes, table, rules, most } = Read::of(axes, &dy);
        let multiprocessors = planned_multiprocessors(&dy.client);
        let units_of_input = units_of_input(units, most.iter().product(), multiprocessors);
        let Some(grid) = Grid::of_rows(units, units_of_input, &[&dy, &dx]) else { return dx };
        let [columns, rows, depth] =
            axes.map(|Axis { begin, size, out }| AxisShapeLaunch::new(begin, size, out));
        let apart = most.iter().all(|&outputs| outputs <= 1);
        let (places, weights) = table.map(|[places, weights]| (places, weights)).unzip();
        // SAFETY: the kernel compares every position with the shapes, and the ranges end with those of `dy`.
        unsafe {
            launch!(
                adjoint_kernel,
                grid,
                dy.into_buffer_arg(),
                dx.clone().into_buffer_arg(),
                places.map(CubeTensor::into_buffer_arg).into(),
                weights.map(CubeTensor::into_buffer_arg).into(),
                of_dy,
                of_dx,
                depth,
                rows,
                columns,
                channels,
                units,
                AdjointVariant { of_unit, units_of_input, has_depth, channels_last: last, apart, rules },
                grid.dtypes,
            );
        }
        dx
    }
}

/// What a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct AdjointVariant {
    /// Channels of a unit.
    of_unit: usize,
    units_of_input: usize,
    has_depth: bool,
    channels_last: bool,
    /// Whether no windows of an axis overlap, so that an input has one output at most.
    apart: bool,
    rules: Rules,
}

/// The rules of axes; without them, there is a table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Rules {
    of_columns: Option<Rule>,
    of_rows: Option<Rule>,
    of_depth: Option<Rule>,
}

/// An axis: where it begins in the places of a [`Table`], if there is one, and its sizes otherwise.
#[derive(Clone, Copy, Default)]
struct Axis {
    begin: usize,
    size: usize,
    out: usize,
}

/// What kernels read of maps: of columns, rows and depth.
struct Read {
    axes: [Axis; 3],
    table: Option<[CubeTensor; 2]>,
    rules: Rules,
    /// The most outputs of an input along each axis.
    most: [usize; 3],
}

impl Read {
    fn of(axes: Axes, dy: &CubeTensor) -> Self {
        match axes {
            Axes::Maps(axes) => {
                let mut table = Table { places: vec![], weights: vec![] };
                let (missing, mut axes) = (AxisMap::identity(), axes.iter().rev());
                let pushed = [(); 3].map(|()| table.push(axes.next().unwrap_or(&missing)));
                Self {
                    axes: pushed.map(|(begin, _)| Axis { begin, ..Axis::default() }),
                    table: Some(table.upload(dy)),
                    rules: Rules::default(),
                    most: pushed.map(|(_, most)| most),
                }
            }
            Axes::Regular(axes) => {
                let missing = Regular { axis: Resized::between(1, 1), rule: Rule::Nearest(Shift::None) };
                let mut axes = axes.into_iter().rev();
                let axes = [(); 3].map(|()| axes.next().unwrap_or(missing));
                let [of_columns, of_rows, of_depth] = axes.map(|axis| Some(axis.rule));
                Self {
                    axes: axes.map(|Regular { axis, .. }| Axis { begin: 0, size: axis.size, out: axis.out }),
                    table: None,
                    rules: Rules { of_columns, of_rows, of_depth },
                    most: axes.map(|axis| axis.most_outputs()),
                }
            }
        }
    }
}

impl Regular {
    /// At least as many outputs as an input has.
    fn most_outputs(&self) -> usize {
        let Resized { size, out, .. } = self.axis;
        match self.rule {
            Rule::Windows { kernel, stride, .. } => kernel.div_ceil(stride).min(out),
            Rule::Adaptive if size.is_multiple_of(out) => 1,
            Rule::Adaptive => (out.div_ceil(size) + 1).min(out),
            Rule::Nearest(_) => out.div_ceil(size),
        }
    }
}

/// The outputs of every input and their weights, for all axes.
struct Table {
    /// For every input of an axis, its first output and where its weights begin; at the end of the axis, where the weights end.
    places: Vec<i32>,
    weights: Vec<f64>,
}

impl Table {
    /// Adds an axis, and returns where it begins in the places, and the most outputs of an input.
    fn push(&mut self, axis: &AxisMap) -> (usize, usize) {
        let begin = self.places.len();
        let mut outputs = vec![0..0; axis.size];
        for (output, window) in axis.windows.iter().enumerate() {
            for of_input in &mut outputs[window.start..window.start + window.len] {
                let first = if of_input.end == 0 { output } else { of_input.start };
                *of_input = first..output + 1;
            }
        }
        let most = outputs.iter().map(ExactSizeIterator::len).max().unwrap_or(0);
        for (input, range) in outputs.into_iter().enumerate() {
            self.places.extend([range.start, self.weights.len()].map(|place| place as i32));
            self.weights.extend(range.map(|output| axis.weight(output, input)));
        }
        self.places.extend([0, self.weights.len() as i32]);
        (begin, most)
    }

    fn upload(self, like: &CubeTensor) -> [CubeTensor; 2] {
        let (device, lens) = (like.device(), [[self.places.len()], [self.weights.len()]]);
        let weights = TensorData::new(self.weights, lens[1]).convert_dtype(wide(like.dtype));
        let places = CubeBackend::int_from_data(TensorData::new(self.places, lens[0]), &device);
        [places, CubeBackend::float_from_data(weights, &device)]
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

/// See [`Axis`].
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct AxisShape {
    begin: usize,
    size: usize,
    out: usize,
}

/// The outputs of an input along an axis, and where their weights are in a table.
#[derive(CubeType, Clone, Copy)]
struct Outputs {
    first: usize,
    weights: usize,
    len: usize,
}

/// The windows of a pool, and elements of padding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Window {
    kernel: usize,
    stride: usize,
    begin: usize,
    end: usize,
}

impl Rule {
    fn shift(self) -> Option<Shift> {
        if let Self::Nearest(shift) = self { Some(shift) } else { None }
    }

    fn window(self) -> Window {
        match self {
            Self::Windows { kernel, stride, padding: (begin, end), .. } => {
                Window { kernel, stride, begin, end }
            }
            _ => Window { kernel: 1, stride: 1, begin: 0, end: 0 },
        }
    }

    fn counts_padding(self) -> bool {
        matches!(self, Self::Windows { count_include_pad: true, .. })
    }
}

#[cube]
fn outputs(
    places: &ComptimeOption<&[u32]>,
    axis: &AxisShape,
    input: usize,
    #[comptime] rule: Option<Rule>,
) -> Outputs {
    if comptime!(rule.is_some()) {
        outputs_by_rule(axis, input, comptime!(rule.unwrap_or(Rule::Adaptive)))
    } else {
        let at = axis.begin + 2 * input;
        let weights = read_place(places, at + 1);
        Outputs { first: read_place(places, at), weights, len: read_place(places, at + 3) - weights }
    }
}

#[cube]
fn read_place(places: &ComptimeOption<&[u32]>, at: usize) -> usize {
    let place: ComptimeOption<u32> = places.as_ref().map(|places| places[at]);
    usize::cast_from(place.unwrap_or(u32::new(0)))
}

#[cube]
fn outputs_by_rule(axis: &AxisShape, input: usize, #[comptime] rule: Rule) -> Outputs {
    let mut first = input * axis.out;
    let mut end = first + axis.out;
    // Rounded down or up.
    if comptime!(rule == Rule::Adaptive) {
        first /= axis.size;
        end = end.div_ceil(axis.size);
    } else if comptime!(rule.shift() == Some(Shift::None)) {
        first = first.div_ceil(axis.size);
        end = end.div_ceil(axis.size);
    } else if comptime!(rule.shift().is_some()) {
        first = (2 * first + axis.size - 1) / (2 * axis.size);
        end = (2 * end + axis.size - 1) / (2 * axis.size);
    } else {
        let Window { kernel, stride, begin, .. } = comptime!(rule.window());
        let at = input + begin;
        first = (max(at + 1, kernel.runtime()) - kernel + comptime!(stride - 1)) / stride;
        end = max(min(at / stride + 1, axis.out), first);
    }
    Outputs { first, weights: 0usize.runtime(), len: end - first }
}

/// The weight of the input in the output with this number among its outputs.
#[cube]
fn weight<W: Float>(
    weights: &ComptimeOption<&[W]>,
    axis: &AxisShape,
    outputs: &Outputs,
    number: usize,
    #[comptime] rule: Option<Rule>,
) -> W {
    if comptime!(rule.is_some()) {
        weight_by_rule::<W>(axis, outputs.first + number, comptime!(rule.unwrap_or(Rule::Adaptive)))
    } else {
        let weight: ComptimeOption<W> = weights.as_ref().map(|weights| weights[outputs.weights + number]);
        weight.unwrap_or(W::new(1.0))
    }
}

#[cube]
fn weight_by_rule<W: Float>(axis: &AxisShape, output: usize, #[comptime] rule: Rule) -> W {
    if comptime!(rule.shift().is_some()) {
        W::new(1.0)
    } else {
        let Window { kernel, stride, begin, end } = comptime!(rule.window());
        let mut first = output * stride;
        let mut last = min(first + kernel, axis.size + comptime!(begin + end));
        if comptime!(rule == Rule::Adaptive) {
            first = output * axis.size / axis.out;
            last = ((output + 1) * axis.size).div_ceil(axis.out);
        } else if comptime!(!rule.counts_padding()) {
            first = max(first, begin.runtime());
            last = min(last, axis.size + begin);
        }
        W::new(1.0) / W::cast_from(last - first)
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn adjoint_kernel<T: Float, W: Float>(
    dy: &[T],
    dx: &mut [T],
    places: ComptimeOption<&[u32]>,
    weights: ComptimeOption<&[W]>,
    of_dy: Volume,
    of_dx: Volume,
    along_depth: AxisShape,
    along_rows: AxisShape,
    along_columns: AxisShape,
    channels: ChannelsOfUnit,
    units: usize,
    #[comptime] variant: AdjointVariant,
    #[define(T, W)] _dtypes: [ElemType; 2],
) {
    let AdjointVariant { of_unit, units_of_input, has_depth, channels_last, apart, rules } = variant;
    let Rules { of_columns, of_rows, of_depth } = rules;
    let number = row_of_unit(units_of_input);
    if number >= units {
        terminate!();
    }
    let to = place(&of_dx, number, channels_last);
    let rows = outputs(&places, &along_rows, to.row, of_rows);
    let slices = outputs(&places, &along_depth, to.depth, of_depth);
    let columns = outputs(&places, &along_columns, to.column, of_columns);
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
            let weight = weight::<W>(&weights, &along_depth, &slices, 0usize, of_depth)
                * weight::<W>(&weights, &along_rows, &rows, 0usize, of_rows)
                * weight::<W>(&weights, &along_columns, &columns, 0usize, of_columns);
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
            let weight = weight::<W>(&weights, &along_depth, &slices, i, of_depth)
                * weight::<W>(&weights, &along_rows, &rows, j, of_rows)
                * weight::<W>(&weights, &along_columns, &columns, k, of_columns);
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
            let of_channel = Pair::<W> { a: sums[channel], b: W::new(0.0) };
            sums[channel] = sum_over_units::<W>(of_channel, units_of_input).a;
        }
    } else {
        for i in 0..slices.len {
            let mut of_plane = zeros::<W>(of_unit);
            for j in 0..rows.len {
                let mut of_row = zeros::<W>(of_unit);
                let mut at = first + i * of_dy.stride_of_depth + j * of_dy.stride_of_height;
                for k in 0..columns.len {
                    let weight = weight::<W>(&weights, &along_columns, &columns, k, of_columns);
                    #[unroll]
                    for channel in 0..of_unit {
                        of_row[channel] += weight * W::cast_from(dy[at + offsets[channel]]);
                    }
                    at += of_dy.stride_of_width;
                }
                let weight = weight::<W>(&weights, &along_rows, &rows, j, of_rows);
                #[unroll]
                for channel in 0..of_unit {
                    of_plane[channel] += weight * of_row[channel];
                }
            }
            let mut weight_of_plane = W::new(1.0);
            if comptime!(has_depth) {
                weight_of_plane = weight::<W>(&weights, &along_depth, &slices, i, of_depth);
            }
            #[unroll]
            for channel in 0..of_unit {
                sums[channel] += weight_of_plane * of_plane[channel];
            }
        }
    }
    if unit_of_row(units_of_input) == 0 {
        write_channels::<T, W>(dx, address(&of_dx, &to), &channels, count, &sums, of_unit);
    }
}
