//! Products of many small matrices. There, a product by tiles leaves most units of a cube idle, and takes several times as long.
use super::{Grid, empty, launch, vector_size};
use crate::backend::Capacity;
use burn::backend::{
    Backend, Cube, TensorMetadata, backend_extension, ops::FloatTensorOps, tensor::FloatTensor,
};
use burn::tensor::Shape;
use burn_cubecl::CubeBackend;
use burn_cubecl::cubecl::{self, ir::ElemType, prelude::*};
use burn_cubecl::tensor::CubeTensor;

/// Two of the three sizes of a small product are at most this: on a GPU, half of a tile would be empty.
const FEW: usize = 8;
/// The same on a device in software. There, a step of attention takes 0.5x Burn's time with 32 tokens, 0.9x with 48, and 1.3x with 64,
/// where products by tiles take 0.9x.
const FEW_IN_SOFTWARE: usize = 48;
/// A unit sums up to so many terms, about the width of a head.
const MOST_TERMS: usize = 256;
/// A unit computes so many rows of a vector of columns.
const BLOCK: usize = 4;

/// The product of matrices `[batch, heads, rows, terms]` and `[batch, heads, terms, columns]`.
pub(crate) fn product(lhs: FloatTensor<Cube>, rhs: FloatTensor<Cube>) -> FloatTensor<Cube> {
    let ([.., rows, terms], [.., columns]) = (lhs.shape().dims::<4>(), rhs.shape().dims::<4>());
    let mut sizes = [rows, terms, columns];
    sizes.sort_unstable();
    let second = sizes[1];
    let are_few = || second <= FEW || Cube::multiprocessors(&lhs.device()).is_none();
    match terms <= MOST_TERMS && second <= FEW_IN_SOFTWARE && are_few() {
        true => Cube::cube_small_product(lhs, rhs),
        false => Cube::float_matmul(lhs, rhs),
    }
}

fn shape_of_product(lhs: &Shape, rhs: &Shape) -> Shape {
    Shape::new([lhs[0], lhs[1], lhs[2], rhs[3]])
}

#[backend_extension(Cube, Fusion: cfg(feature = "fusion"))]
pub trait ProductCube: Backend {
    /// The product of small matrices.
    #[fusion(dtype = lhs, shape = shape_of_product(lhs, rhs))]
    fn cube_small_product(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self>;
}

impl ProductCube for CubeBackend {
    fn cube_small_product(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> {
        let fit = |axis: usize, of_rhs: usize| lhs.meta.shape()[axis] == rhs.meta.shape()[of_rhs];
        debug_assert!(fit(0, 0) && fit(1, 1) && fit(3, 2) && lhs.dtype == rhs.dtype);
        let product = empty(&lhs, shape_of_product(lhs.meta.shape(), rhs.meta.shape()), lhs.dtype);
        let ([batch, heads, rows, columns], terms) = (product.meta.shape().dims(), lhs.meta.shape()[3]);
        let size = vector_size(&[&product], 4);
        let block = rows.next_power_of_two().min(BLOCK);
        let (blocks, vectors) = (rows.div_ceil(block), columns / size);
        let grid = Grid::of_units(batch * heads * blocks * vectors, &[&lhs, &rhs, &product]);
        if let Some(grid) = grid {
            let (of_lhs, of_rhs) = (strides(&lhs), strides(&rhs));
            // SAFETY: the kernel compares every position with the sizes, which are those of the matrices.
            unsafe {
                launch!(
                    product_kernel,
                    grid,
                    size,
                    lhs.into_buffer_arg(),
                    rhs.into_buffer_arg(),
                    product.clone().into_buffer_arg(),
                    of_lhs,
                    of_rhs,
                    ProductSizesLaunch::new(batch, heads, rows, terms, vectors, blocks),
                    block,
                    grid.dtypes,
                );
            }
        }
        product
    }
}

/// The strides of matrices `[batch, heads, rows, columns]`.
#[derive(CubeType, CubeLaunch)]
struct Strides {
    batch: usize,
    head: usize,
    row: usize,
    column: usize,
}

fn strides(x: &CubeTensor) -> StridesLaunch {
    let strides = x.meta.strides();
    StridesLaunch::new(strides[0], strides[1], strides[2], strides[3])
}

/// The sizes of matrices. The product has `blocks` of rows and `vectors` of columns.
#[derive(CubeType, CubeLaunch)]
struct ProductSizes {
    batch: usize,
    heads: usize,
    rows: usize,
    terms: usize,
    vectors: usize,
    blocks: usize,
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn product_kernel<T: Float, W: Float, N: Size>(
    lhs: &[T],
    rhs: &[T],
    product: &mut [Vector<T, N>],
    of_lhs: Strides,
    of_rhs: Strides,
    sizes: ProductSizes,
    #[comptime] block: usize,
    #[define(T, W)] _dtypes: [ElemType; 2],
) {
    let size = N::value().comptime();
    let (line, vector) = (ABSOLUTE_POS / sizes.vectors, ABSOLUTE_POS % sizes.vectors);
    let (matrix, first) = (line / sizes.blocks, line % sizes.blocks * block);
    let (batch, head) = (matrix / sizes.heads, matrix % sizes.heads);
    if batch >= sizes.batch {
        terminate!();
    }
    let start = batch * of_lhs.batch + head * of_lhs.head;
    let mut at_rhs = batch * of_rhs.batch + head * of_rhs.head + vector * size * of_rhs.column;
    let mut at_lhs = Array::<usize>::new(block);
    let mut sums = Array::<Vector<W, N>>::new(block);
    #[unroll]
    for row in 0..block {
        // Beyond the last row, it is read again.
        at_lhs[row] = start + min(first + row, sizes.rows - 1) * of_lhs.row;
        sums[row] = Vector::new(W::new(0.0));
    }
    for _ in 0..sizes.terms {
        let mut of_columns = Vector::<W, N>::new(W::new(0.0));
        #[unroll]
        for lane in 0..size {
            of_columns.insert(lane, W::cast_from(rhs[at_rhs + lane * of_rhs.column]));
        }
        #[unroll]
        for row in 0..block {
            sums[row] += Vector::new(W::cast_from(lhs[at_lhs[row]])) * of_columns;
            at_lhs[row] += of_lhs.column;
        }
        at_rhs += of_rhs.row;
    }
    #[unroll]
    for row in 0..block {
        if first + row < sizes.rows {
            let of_row = matrix * sizes.rows + first + row;
            product[of_row * sizes.vectors + vector] = Vector::cast_from(sums[row]);
        }
    }
}
