//! Assigns values to slices of tensors: several assignments in one kernel.
use super::volume::{Volume, address, place, volume};
use super::{Grid, launch, vector_size};
use burn_cubecl::cubecl::{self, ir::ElemType, prelude::*, std::tensor::layout::linear::LinearView};
use burn_cubecl::tensor::CubeTensor;

/// An assignment of values to a slice of a tensor.
pub(crate) struct SliceAssign {
    /// With four axes; nobody else may hold it.
    pub tensor: CubeTensor,
    /// Of the same dtype.
    pub value: CubeTensor,
    /// Where the slice begins.
    pub start: [usize; 4],
}

/// Makes up to three assignments, in place, and returns their tensors.
pub(crate) fn assign_slices(assigns: &[SliceAssign]) -> Vec<CubeTensor> {
    let assigned = assigns.iter().map(|assign| assign.tensor.clone()).collect();
    let tensors: Vec<&CubeTensor> =
        assigns.iter().flat_map(|assign| [&assign.tensor, &assign.value]).collect();
    let size = match vector_size(&tensors, 4) {
        size if assigns.iter().all(|assign| assign.start[3].is_multiple_of(size)) => size,
        _ => 1,
    };
    let vectors = |assign: &SliceAssign| assign.value.meta.num_elements() / size;
    let most = assigns.iter().map(vectors).max().unwrap_or(0);
    let Some(grid) = Grid::of_units(most, &tensors) else { return assigned };
    let tensor = |index: usize| assigns.get(index).map(|assign| assign.tensor.clone().into_buffer_arg());
    let value = |index: usize| assigns.get(index).map(|assign| assign.value.clone().into_linear_view());
    let slice = |index: usize| {
        let assign = assigns.get(index).unwrap_or(&assigns[0]);
        let strides = assign.tensor.meta.strides();
        let first = assign.start.iter().zip(strides.iter()).map(|(start, stride)| start * stride).sum();
        SliceLaunch::new(first, vectors(assign), volume(&assign.value), volume(&assign.tensor))
    };
    // SAFETY: the kernel compares every position with the values, whose slices lie within the tensors.
    unsafe {
        launch!(
            assign_kernel,
            grid,
            size,
            assigns[0].tensor.clone().into_buffer_arg(),
            assigns[0].value.clone().into_linear_view(),
            slice(0),
            tensor(1).into(),
            value(1).into(),
            slice(1),
            tensor(2).into(),
            value(2).into(),
            slice(2),
            grid.dtypes[0],
        );
    }
    assigned
}

/// Where vectors of values belong in a tensor.
#[derive(CubeType, CubeLaunch)]
struct Slice {
    /// The first element.
    first: usize,
    vectors: usize,
    value: Volume,
    tensor: Volume,
}

#[cube]
fn assign_vector<T: Float, N: Size>(
    tensor: &mut [Vector<T, N>],
    value: &LinearView<'_, Vector<T, N>>,
    slice: &Slice,
) {
    if ABSOLUTE_POS < slice.vectors {
        let size = N::value().comptime();
        let place = place(&slice.value, ABSOLUTE_POS * size, false);
        let at = slice.first + address(&slice.tensor, &place);
        tensor[at / size] = value.read(ABSOLUTE_POS);
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn assign_kernel<T: Float, N: Size>(
    a: &mut [Vector<T, N>],
    of_a: LinearView<'_, Vector<T, N>>,
    in_a: Slice,
    b: ComptimeOption<&mut [Vector<T, N>]>,
    of_b: ComptimeOption<LinearView<'_, Vector<T, N>>>,
    in_b: Slice,
    c: ComptimeOption<&mut [Vector<T, N>]>,
    of_c: ComptimeOption<LinearView<'_, Vector<T, N>>>,
    in_c: Slice,
    #[define(T)] _dtype: ElemType,
) {
    assign_vector::<T, N>(a, &of_a, &in_a);
    #[comptime]
    if let (ComptimeOption::Some(b), ComptimeOption::Some(of_b)) = (b, of_b) {
        assign_vector::<T, N>(b, &of_b, &in_b);
    }
    #[comptime]
    if let (ComptimeOption::Some(c), ComptimeOption::Some(of_c)) = (c, of_c) {
        assign_vector::<T, N>(c, &of_c, &in_c);
    }
}
