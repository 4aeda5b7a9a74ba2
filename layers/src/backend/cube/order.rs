//! Elementwise kernels walk their tensors in the order in which these lie in memory. The result of a convolution, for example, has its
//! channels last in memory.
use burn::backend::TensorMetadata;
use burn::tensor::{DType, Shape};
use burn_cubecl::ops::permute;
use burn_cubecl::tensor::CubeTensor;

/// Runs an elementwise kernel on tensors of one shape, with their axes in the order in which the first tensor lies in memory, and
/// restores the axes of the results.
pub(crate) fn in_memory_order<const N: usize, const M: usize>(
    tensors: [CubeTensor; N],
    launch: impl FnOnce([CubeTensor; N]) -> [CubeTensor; M],
) -> [CubeTensor; M] {
    let Some(axes) = memory_order(&tensors[0]) else { return launch(tensors) };
    let back = back(&axes);
    launch(tensors.map(|tensor| permute(tensor, &axes))).map(|tensor| permute(tensor, &back))
}

/// A tensor of the shape and dtype of `x` whose elements lie in memory in the same order, without gaps. They are not written yet.
pub(super) fn empty_like(x: &CubeTensor) -> CubeTensor {
    match memory_order(x) {
        Some(axes) => empty_along(x, x.shape(), x.dtype, &axes),
        None => super::empty(x, x.shape(), x.dtype),
    }
}

/// A tensor whose axes are in this order in memory. It is not written yet.
pub(super) fn empty_along(like: &CubeTensor, shape: Shape, dtype: DType, axes: &[usize]) -> CubeTensor {
    let in_memory: Vec<usize> = axes.iter().map(|&axis| shape[axis]).collect();
    permute(super::empty(like, Shape::from(in_memory), dtype), &back(axes))
}

/// The permutation that undoes another.
fn back(axes: &[usize]) -> Vec<usize> {
    let mut back = vec![0; axes.len()];
    for (position, &axis) in axes.iter().enumerate() {
        back[axis] = position;
    }
    back
}

/// The axes, from the one whose elements are farthest apart in memory to the one whose elements are nearest. `None` if they are in that
/// order already, or if elements share memory.
fn memory_order(tensor: &CubeTensor) -> Option<Vec<usize>> {
    let (shape, strides) = (tensor.meta.shape(), tensor.meta.strides());
    let mut axes: Vec<usize> = (0..shape.num_dims()).collect();
    if axes.iter().any(|&axis| strides[axis] == 0 && shape[axis] > 1) {
        return None;
    }
    // Axes of one element may be anywhere: first, so that vectors can be read along the last axis.
    axes.sort_by_key(|&axis| if shape[axis] == 1 { (0, 0) } else { (1, usize::MAX - strides[axis]) });
    let moves = axes
        .iter()
        .filter(|&&axis| shape[axis] > 1)
        .zip(axes.iter().filter(|&&axis| shape[axis] > 1).skip(1));
    moves.into_iter().any(|(before, after)| before > after).then_some(axes)
}
