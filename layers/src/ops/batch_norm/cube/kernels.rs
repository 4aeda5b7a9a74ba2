//! The kernels of batch normalization on devices.
use crate::backend::cube::channels::ChannelsShape;
use crate::backend::cube::columns::read_channels;
use burn_cubecl::cubecl::{
    self,
    ir::ElemType,
    prelude::*,
    std::tensor::layout::linear::{LinearView, LinearViewMut},
};

/// The channel of the vector at this position, or the first of its channels.
#[cube]
fn channel_here(shape: &ChannelsShape, #[comptime] size: usize) -> usize {
    ABSOLUTE_POS * size / shape.inner % shape.channels
}

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn normalize_kernel<T: Float, W: Float, S: Float, N: Size>(
    x: LinearView<'_, Vector<T, N>>,
    mut y: LinearViewMut<'_, Vector<T, N>>,
    mean: ComptimeOption<&[S]>,
    variance: ComptimeOption<&[S]>,
    gamma: ComptimeOption<&[T]>,
    beta: ComptimeOption<&[T]>,
    shape: ChannelsShape,
    epsilon: InputScalar,
    #[comptime] one: bool,
    #[define(T, W)] _dtypes: [ElemType; 2],
    #[define(S)] _of_statistics: ElemType,
) {
    if !y.is_in_bounds(ABSOLUTE_POS) {
        terminate!();
    }
    let channel = channel_here(&shape, N::value().comptime());
    let std = (read_channels::<S, W, N>(&variance, channel, one) + Vector::new(epsilon.get::<W>())).sqrt();
    let distance =
        Vector::<W, N>::cast_from(x.read(ABSOLUTE_POS)) - read_channels::<S, W, N>(&mean, channel, one);
    let scaled = distance * (read_channels::<T, W, N>(&gamma, channel, one) / std);
    y.write(ABSOLUTE_POS, Vector::cast_from(scaled + read_channels::<T, W, N>(&beta, channel, one)));
}

#[cfg(not(feature = "fusion"))]
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn scale_kernel<T: Float, W: Float, N: Size>(
    dy: LinearView<'_, Vector<T, N>>,
    mut dx: LinearViewMut<'_, Vector<T, N>>,
    variance: ComptimeOption<&[T]>,
    gamma: ComptimeOption<&[T]>,
    shape: ChannelsShape,
    epsilon: InputScalar,
    #[comptime] one: bool,
    #[define(T, W)] _dtypes: [ElemType; 2],
) {
    if !dx.is_in_bounds(ABSOLUTE_POS) {
        terminate!();
    }
    let channel = channel_here(&shape, N::value().comptime());
    let std = (read_channels::<T, W, N>(&variance, channel, one) + Vector::new(epsilon.get::<W>())).sqrt();
    let scale = read_channels::<T, W, N>(&gamma, channel, one) / std;
    dx.write(ABSOLUTE_POS, Vector::cast_from(Vector::<W, N>::cast_from(dy.read(ABSOLUTE_POS)) * scale));
}

/// `sums` are those of `dy` and of its products with the normalized `x`, `[2, channels]`.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn x_backward_kernel<T: Float, W: Float, S: Float, N: Size>(
    dy: LinearView<'_, Vector<T, N>>,
    x: LinearView<'_, Vector<T, N>>,
    mut dx: LinearViewMut<'_, Vector<T, N>>,
    mean: ComptimeOption<&[S]>,
    variance: ComptimeOption<&[S]>,
    gamma: ComptimeOption<&[T]>,
    sums: ComptimeOption<&[W]>,
    shape: ChannelsShape,
    epsilon: InputScalar,
    #[comptime] one: bool,
    #[define(T, W)] _dtypes: [ElemType; 2],
    #[define(S)] _of_statistics: ElemType,
) {
    if !dx.is_in_bounds(ABSOLUTE_POS) {
        terminate!();
    }
    let channel = channel_here(&shape, N::value().comptime());
    let variance = read_channels::<S, W, N>(&variance, channel, one);
    let inverse_std = Vector::new(W::new(1.0)) / (variance + Vector::new(epsilon.get::<W>())).sqrt();
    let distance =
        Vector::<W, N>::cast_from(x.read(ABSOLUTE_POS)) - read_channels::<S, W, N>(&mean, channel, one);
    let share = Vector::<W, N>::new(W::new(1.0) / W::cast_from(shape.repeats * shape.inner));
    let mean_of_dy = read_channels::<W, W, N>(&sums, channel, one) * share;
    let mean_of_products = read_channels::<W, W, N>(&sums, shape.channels + channel, one) * share;
    let normalized = distance * inverse_std;
    let centered =
        Vector::<W, N>::cast_from(dy.read(ABSOLUTE_POS)) - mean_of_dy - normalized * mean_of_products;
    let scale = read_channels::<T, W, N>(&gamma, channel, one) * inverse_std;
    dx.write(ABSOLUTE_POS, Vector::cast_from(centered * scale));
}
