//! The kernels on a CPU: fused loops, with a window of channels in the cache.
use super::{LocalResponse, LocalResponseKernels};
use crate::backend::cpu::{
    CpuBackend, CpuElement,
    parallel::{self, Work},
    pieces,
    plan::Items,
    strips,
    sums::add_each,
    with_element,
};
use burn::backend::{TensorMetadata, tensor::FloatTensor};
use burn::tensor::{DType, Shape, bf16, f16};
use core::ops::Range;
use num_traits::Zero;

impl<B: CpuBackend> LocalResponseKernels for B {
    fn local_response_norm(x: FloatTensor<B>, norm: &LocalResponse) -> FloatTensor<B> {
        let x = B::contiguous(x);
        let planes = ChannelPlanes::of(&x.shape());
        with_element!(x.dtype(), "local_response_norm", E => {
            B::from_vec(forward(B::as_slice::<E>(&x), planes, norm), x.shape())
        })
    }

    fn local_response_norm_backward(
        x: FloatTensor<B>,
        norm: &LocalResponse,
        dy: FloatTensor<B>,
    ) -> FloatTensor<B> {
        let (x, mut dy) = (B::contiguous(x), B::contiguous(dy));
        let planes = ChannelPlanes::of(&x.shape());
        with_element!(x.dtype(), "local_response_norm", E => {
            backward(B::as_slice::<E>(&x), planes, norm, B::as_slice_mut(&mut dy));
        });
        dy
    }
}

/// Elements of a channel per step: few enough that a window of channels stays in the cache.
const TILE: usize = 256;

/// The same where strips are narrow, because threads are many.
const NARROW: usize = 32;

/// A tensor as channels, each of `inner` consecutive elements.
#[derive(Clone, Copy)]
struct ChannelPlanes {
    channels: usize,
    inner: usize,
}

impl ChannelPlanes {
    /// Of `[batch, channels, ...]`.
    fn of(shape: &Shape) -> Self {
        Self { channels: shape[1], inner: shape[2..].iter().product() }
    }

    /// The loop over planes, which are cut between tiles.
    fn items(self, elements: usize, norm: &LocalResponse) -> Items {
        let work = Work::of([elements, norm.size.min(self.channels) + 1]);
        let planes = [elements / self.inner.max(1), self.inner];
        Items { steps: self.inner.div_ceil(TILE).max(1), ..Items::of(planes, work) }
    }
}

/// What to do with the function `s^beta`, whose type is known only inside.
trait Visitor<A, R> {
    fn visit(self, power: impl Fn(A) -> A + Copy + Send + Sync) -> R;
}

/// Calls the visitor with `s^beta`. For the usual exponents roots compute it, which are as exact as a power and many times faster.
fn with_power<A: CpuElement<Acc = A>, R>(beta: f64, visitor: impl Visitor<A, R>) -> R {
    match beta {
        1.0 => visitor.visit(|s: A| s),
        0.75 => visitor.visit(|s: A| {
            let root = s.sqrt();
            root * root.sqrt()
        }),
        0.5 => visitor.visit(|s: A| s.sqrt()),
        _ => {
            let beta = A::from_f64(beta);
            visitor.visit(move |s: A| s.powf(beta))
        }
    }
}

/// The existing channels of the window around `channel`.
fn window(channel: usize, [before, after]: [usize; 2], channels: usize) -> Range<usize> {
    channel.saturating_sub(before)..channels.min(channel + after + 1)
}

/// Writes `s` of the elements `tile` of a channel; `x` is one item of the batch.
#[inline(always)]
fn scales<E: CpuElement>(
    x: &[E],
    planes: ChannelPlanes,
    norm: &LocalResponse,
    channel: usize,
    tile: Range<usize>,
    s: &mut [E::Acc],
) {
    s.fill(<E::Acc as Zero>::zero());
    for other in window(channel, norm.reach(), planes.channels) {
        let x = &x[other * planes.inner..][tile.clone()];
        s.iter_mut().zip(x).for_each(|(s, x)| *s = *s + x.widen() * x.widen());
    }
    let (k, scale) = (
        <E::Acc as CpuElement>::from_f64(norm.k),
        <E::Acc as CpuElement>::from_f64(norm.alpha / norm.size as f64),
    );
    s.iter_mut().for_each(|s| *s = k + scale * *s);
}

/// `x / s^beta`
fn forward<E: CpuElement>(x: &[E], planes: ChannelPlanes, norm: &LocalResponse) -> Vec<E> {
    with_power(norm.beta, Forward { x, planes, norm })
}

struct Forward<'a, E> {
    x: &'a [E],
    planes: ChannelPlanes,
    norm: &'a LocalResponse,
}

impl<E: CpuElement> Visitor<E::Acc, Vec<E>> for Forward<'_, E> {
    fn visit(self, power: impl Fn(E::Acc) -> E::Acc + Copy + Send + Sync) -> Vec<E> {
        let Self { x, planes, norm } = self;
        let ChannelPlanes { channels, inner } = planes;
        let items = planes.items(x.len(), norm);
        let chunks = items.division(parallel::threads()).chunks(inner, TILE);
        pieces::filled_in_pieces(x.len(), E::zero(), chunks, items.work, |start, y| {
            let mut scale = [<E::Acc as Zero>::zero(); TILE];
            let first = start % inner;
            for (plane, y) in (start / inner..).zip(y.chunks_mut(inner)) {
                let (item, channel) = (plane / channels, plane % channels);
                let item = &x[item * channels * inner..][..channels * inner];
                for (at, y) in (first..).step_by(TILE).zip(y.chunks_mut(TILE)) {
                    let (tile, s) = (at..at + y.len(), &mut scale[..y.len()]);
                    scales(item, planes, norm, channel, tile.clone(), s);
                    let x = &item[channel * inner..][tile];
                    for ((y, x), s) in y.iter_mut().zip(x).zip(s) {
                        *y = E::narrow(x.widen() / power(*s));
                    }
                }
            }
        })
    }
}

/// Replaces `dy` by `dx`.
fn backward<E: CpuElement>(x: &[E], planes: ChannelPlanes, norm: &LocalResponse, dy: &mut [E]) {
    with_power(norm.beta, Backward { x, planes, norm, dy });
}

struct Backward<'a, E> {
    x: &'a [E],
    planes: ChannelPlanes,
    norm: &'a LocalResponse,
    dy: &'a mut [E],
}

impl<E: CpuElement> Visitor<E::Acc, ()> for Backward<'_, E> {
    fn visit(self, power: impl Fn(E::Acc) -> E::Acc + Copy + Send + Sync) {
        let Self { x, planes, norm, dy } = self;
        let ChannelPlanes { channels, inner } = planes;
        let work = parallel::Work::of([dy.len(), 2 * norm.size.min(channels) + 2]);
        let [before, after] = norm.reach();
        let factor = <E::Acc as CpuElement>::from_f64(-2.0 * norm.alpha * norm.beta / norm.size as f64);
        // The products of all strips that are computed at the same time are a quarter of `x` at most, or of narrow strips.
        let points = dy.len() / channels.max(1);
        let width = (points / (4 * parallel::threads())).next_multiple_of(NARROW).clamp(NARROW, TILE);
        strips::strips_mut(dy, [channels, inner], width, work, |start, mut strip| {
            let item = &x[start / (channels * inner) * channels * inner..][..channels * inner];
            let first = start % inner;
            let tile = first..inner.min(first + width);
            let x_of = |channel: usize| &item[channel * inner..][tile.clone()];
            let (zero, width) = (<E::Acc as Zero>::zero(), tile.len());
            let mut scale = [zero; TILE];
            let scale = &mut scale[..width];
            // `dy x / s^(beta + 1)` of every channel.
            let mut products = vec![zero; channels * width];
            let channels_of_dy = strip.rows().zip(products.chunks_exact_mut(width)).enumerate();
            for (channel, (dy, products)) in channels_of_dy {
                scales(item, planes, norm, channel, tile.clone(), scale);
                let elements = dy.iter_mut().zip(x_of(channel));
                for (((dy, x), s), product) in elements.zip(&*scale).zip(products) {
                    let scaled = dy.widen() / power(*s);
                    *product = scaled * x.widen() / *s;
                    *dy = E::narrow(scaled);
                }
            }
            for (channel, dy) in strip.rows().enumerate() {
                let sums = &mut *scale;
                sums.fill(zero);
                // The windows with a channel are those of the channels in its mirrored window.
                for other in window(channel, [after, before], channels) {
                    add_each(sums, &products[other * width..][..width]);
                }
                for ((dx, x), sum) in dy.iter_mut().zip(x_of(channel)).zip(&*sums) {
                    *dx = E::narrow(dx.widen() + factor * x.widen() * *sum);
                }
            }
        });
    }
}

#[cfg(test)]
pub(crate) mod counting {
    use super::*;

    /// The loop over square planes.
    pub(crate) fn items([batch, channels, side]: [usize; 3]) -> Items {
        let norm = LocalResponse { size: 5, alpha: 1.0, beta: 1.0, k: 1.0 };
        ChannelPlanes { channels, inner: side * side }.items(batch * channels * side * side, &norm)
    }
}
