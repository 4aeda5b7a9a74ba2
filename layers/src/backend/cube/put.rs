//! Parts of tensors, put into their places: several in one kernel.
use super::volume::{Volume, address, place, volume};
use super::{address_type, types, units, vector_size};
use burn_cubecl::cubecl::{self, ir::ElemType, prelude::*, std::tensor::layout::linear::LinearView};
use burn_cubecl::tensor::CubeTensor;

/// What is put where.
pub(crate) struct Put {
    /// With four axes; nobody else may hold it.
    pub whole: CubeTensor,
    /// Of the same dtype.
    pub part: CubeTensor,
    /// Where the part begins.
    pub start: [usize; 4],
}

/// Puts up to three parts into tensors, in place, and gives these.
pub(crate) fn put(puts: &[Put]) -> Vec<CubeTensor> {
    let wholes = puts.iter().map(|put| put.whole.clone()).collect();
    let tensors: Vec<&CubeTensor> = puts.iter().flat_map(|put| [&put.whole, &put.part]).collect();
    let size = match vector_size(&tensors, 4) {
        size if puts.iter().all(|put| put.start[3].is_multiple_of(size)) => size,
        _ => 1,
    };
    let vectors = |put: &Put| put.part.meta.num_elements() / size;
    let Some(most) = puts.iter().map(vectors).max().filter(|&most| most > 0) else { return wholes };
    let (client, dtypes) = (puts[0].whole.client.clone(), types(puts[0].whole.dtype));
    let (count, dim) = units(&client, most);
    let whole = |index: usize| puts.get(index).map(|put| put.whole.clone().into_buffer_arg());
    let part = |index: usize| puts.get(index).map(|put| put.part.clone().into_linear_view());
    let target = |index: usize| {
        let put = puts.get(index).unwrap_or(&puts[0]);
        let strides = put.whole.meta.strides();
        let first = put.start.iter().zip(strides.iter()).map(|(start, stride)| start * stride).sum();
        TargetLaunch::new(first, vectors(put), volume(&put.part), volume(&put.whole))
    };
    // SAFETY: the kernel compares every position with the parts, which lie within the tensors.
    unsafe {
        put_kernel::launch_unchecked(
            &client,
            count,
            dim,
            address_type(&tensors),
            size,
            puts[0].whole.clone().into_buffer_arg(),
            puts[0].part.clone().into_linear_view(),
            target(0),
            whole(1).into(),
            part(1).into(),
            target(1),
            whole(2).into(),
            part(2).into(),
            target(2),
            dtypes[0],
        );
    }
    wholes
}

/// Where the vectors of a part lie in a tensor.
#[derive(CubeType, CubeLaunch)]
struct Target {
    /// The first element.
    first: usize,
    vectors: usize,
    part: Volume,
    whole: Volume,
}

#[cube]
fn put_vector<T: Float, N: Size>(
    whole: &mut [Vector<T, N>],
    part: &LinearView<'_, Vector<T, N>>,
    target: &Target,
) {
    if ABSOLUTE_POS < target.vectors {
        let size = N::value().comptime();
        let place = place(&target.part, ABSOLUTE_POS * size, false);
        let at = target.first + address(&target.whole, &place);
        whole[at / size] = part.read(ABSOLUTE_POS);
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn put_kernel<T: Float, N: Size>(
    a: &mut [Vector<T, N>],
    of_a: LinearView<'_, Vector<T, N>>,
    in_a: Target,
    b: ComptimeOption<&mut [Vector<T, N>]>,
    of_b: ComptimeOption<LinearView<'_, Vector<T, N>>>,
    in_b: Target,
    c: ComptimeOption<&mut [Vector<T, N>]>,
    of_c: ComptimeOption<LinearView<'_, Vector<T, N>>>,
    in_c: Target,
    #[define(T)] _dtype: ElemType,
) {
    put_vector::<T, N>(a, &of_a, &in_a);
    #[comptime]
    if let (ComptimeOption::Some(b), ComptimeOption::Some(of_b)) = (b, of_b) {
        put_vector::<T, N>(b, &of_b, &in_b);
    }
    #[comptime]
    if let (ComptimeOption::Some(c), ComptimeOption::Some(of_c)) = (c, of_c) {
        put_vector::<T, N>(c, &of_c, &in_c);
    }
}
