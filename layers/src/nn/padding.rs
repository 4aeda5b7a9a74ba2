//! The padding that a config asks for, computed as Burn does.
use crate::burn_next::refusal_of_asymmetric;
use burn::nn::{PaddingConfig1d, PaddingConfig2d, PaddingConfig3d};

/// The padding before and after an axis that gives `ceil(size / stride)` outputs. If the total is odd, the extra element goes
/// to the end, as in ONNX.
fn same(size: usize, kernel: usize, stride: usize) -> (usize, usize) {
    let out = size.div_ceil(stride);
    let total = if out == 0 { 0 } else { ((out - 1) * stride + kernel).saturating_sub(size) };
    (total / 2, total - total / 2)
}

/// (left, right)
pub(crate) fn pair_1d(
    padding: &PaddingConfig1d,
    size: usize,
    kernel: usize,
    stride: usize,
) -> (usize, usize) {
    match *padding {
        PaddingConfig1d::Valid => (0, 0),
        PaddingConfig1d::Same => same(size, kernel, stride),
        PaddingConfig1d::Explicit(left, right) => (left, right),
    }
}

/// [(top, bottom), (left, right)]
pub(crate) fn pairs_2d(
    padding: &PaddingConfig2d,
    size: [usize; 2],
    kernel: [usize; 2],
    stride: [usize; 2],
) -> [(usize, usize); 2] {
    match *padding {
        PaddingConfig2d::Valid => [(0, 0); 2],
        PaddingConfig2d::Same => [0, 1].map(|axis| same(size[axis], kernel[axis], stride[axis])),
        PaddingConfig2d::Explicit(top, left, bottom, right) => [(top, bottom), (left, right)],
    }
}

/// [height, width], the same on both sides.
///
/// # Panics
///
/// Panics if the two sides differ.
pub(crate) fn symmetric_2d(
    padding: &PaddingConfig2d,
    size: [usize; 2],
    kernel: [usize; 2],
    stride: [usize; 2],
) -> [usize; 2] {
    let pairs = pairs_2d(padding, size, kernel, stride);
    let is_symmetric = pairs.iter().all(|(begin, end)| begin == end);
    assert!(is_symmetric, "{}", refusal_of_asymmetric(pairs, size, kernel, stride));
    pairs.map(|(begin, _)| begin)
}

/// [depth, height, width], the same on both sides.
///
/// # Panics
///
/// Panics if the two sides differ.
pub(crate) fn symmetric_3d(
    padding: &PaddingConfig3d,
    size: [usize; 3],
    kernel: [usize; 3],
    stride: [usize; 3],
) -> [usize; 3] {
    match *padding {
        PaddingConfig3d::Valid => [0; 3],
        PaddingConfig3d::Same => [0, 1, 2].map(|axis| {
            let (begin, end) = same(size[axis], kernel[axis], stride[axis]);
            assert!(
                begin == end,
                "Asymmetric 3D 'Same' padding is not supported. Use odd kernel sizes for symmetric padding."
            );
            begin
        }),
        PaddingConfig3d::Explicit(depth, height, width) => [depth, height, width],
    }
}
