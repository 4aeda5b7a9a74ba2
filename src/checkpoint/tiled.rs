//! [`checkpoint_tiled`]: runs a module over one part of its input after the other.
use super::compared::Samples;
use super::parents::{Finish, Parameters, Parents, from_probe, put, take};
use super::remembered::Remembered;
use super::segment::{Again, FirstRun, first_run};
use super::tensors::{EarlyStop, Tensors};
use crate::strategy::{token, with_strategy};
use burn::module::Module;
use burn::tensor::{Device, Slice, Tensor};
use burn_memsave_layers::graph::tape::Tape;
use burn_memsave_layers::graph::{ReplayOnce, Slots};
use std::ops::Range;

/// Runs `forward(module, x)` in tiles of `tile` elements of an axis, such as the tokens of a long sequence for a feed-forward block. Each
/// tile is recomputed in the backward pass, so what the module keeps and needs exists for one tile at a time.
///
/// Keeps `x`. The output is that of the whole input if the module computes each element of the axis independently, as a dense layer or a
/// norm of features does, and attention over the axis does not. `forward` may return an [`EarlyStop`].
///
/// # Shapes
///
/// - x: any, with an axis `axis`
/// - output: any, with as many elements along `axis` as `x`
///
/// # Panics
///
/// Panics if `tile` is 0, if the axis does not exist or is empty, or if an output has another number of elements along it than its tile.
/// Also panics as [`checkpoint`](super::checkpoint) does.
///
/// ```
/// use burn::tensor::{Device, Tensor, Tolerance};
/// use burn_memsave::checkpoint::checkpoint_tiled;
/// use burn_memsave::nn::transformer::PositionWiseFeedForwardConfig;
///
/// let device = Device::flex().autodiff();
/// let block = PositionWiseFeedForwardConfig::new(8, 32).with_dropout(0.0).init(&device);
/// let x = Tensor::<3>::ones([2, 50, 8], &device).require_grad();
/// let y = checkpoint_tiled(&block, x.clone(), 1, 16, |block, x| block.forward(x));
/// y.to_data().assert_approx_eq::<f32>(&block.forward(x).into_data(), Tolerance::default());
/// ```
pub fn checkpoint_tiled<M, F, O, const D: usize, const E: usize>(
    module: &M,
    x: Tensor<D>,
    axis: usize,
    tile: usize,
    forward: F,
) -> Tensor<E>
where
    M: Module + 'static,
    F: Fn(&M, Tensor<D>) -> O + Copy + Send + Sync + 'static,
    O: Tile<E>,
{
    assert!(
        axis < D && axis < E,
        "checkpoint_tiled: axis {axis} of an input of rank {D} and an output of rank {E}"
    );
    assert!(tile > 0 && x.dims()[axis] > 0, "checkpoint_tiled: {tile} of {} elements", x.dims()[axis]);
    let tiles = Tiles { axis, len: x.dims()[axis], tile };
    let mut parents = Parents::default();
    module.visit(&mut parents);
    let x = x.map_tensors(&mut parents);
    let Some(device) = parents.device.clone() else {
        let mut whole = Whole::new(tiles);
        for range in tiles.ranges() {
            let output = forward(module, part(&x, axis, &range));
            whole.put(&range, output.into_tensor());
        }
        return whole.tensor();
    };
    let of_replay = Remembered::of(module);
    let tracks_x = x.is_tracked();
    let plain = if x.is_autodiff() { x.clone().inner() } else { x };
    let (mut whole, mut runs, mut is_tracked) = (Whole::new(tiles), vec![], false);
    for range in tiles.ranges() {
        let x = with_strategy(part(&plain, axis, &range), &device);
        let x = if tracks_x { from_probe(x, &token(&device).require_grad(), Slots::default(), 0) } else { x };
        let FirstRun { output, tracked, samples, tape } = first_run(module, &of_replay, x, &device, forward);
        is_tracked |= tracked.contains(&true);
        let output = output.into_tensor();
        whole.put(&range, if output.is_autodiff() { output.inner() } else { output });
        runs.push((range, tape, samples));
    }
    let y = with_strategy(whole.tensor(), &device);
    if !is_tracked {
        return y;
    }
    let [gradients, inputs, of_outputs] = [(); 3].map(|()| Slots::default());
    let segment = Tiled {
        module: of_replay,
        x: (!tracks_x).then_some(plain),
        tiles,
        forward,
        runs,
        device: device.clone(),
        parameters: std::mem::take(&mut parents.parameters),
        finish: std::mem::take(&mut parents.zeros)
            .into_iter()
            .chain(std::mem::take(&mut parents.narrow))
            .collect(),
        of_x: parents.first_input,
        gradients: gradients.clone(),
        inputs: inputs.clone(),
        of_outputs: of_outputs.clone(),
    };
    let token = parents.chain(&device, gradients, inputs, ReplayOnce::new(move || segment.replay::<O, E>()));
    from_probe(y, &token, of_outputs, 0)
}

/// What the function of [`checkpoint_tiled`] returns for a tile.
pub trait Tile<const D: usize>: Tensors {
    /// The tensor.
    fn into_tensor(self) -> Tensor<D>;
}

impl<const D: usize> Tile<D> for Tensor<D> {
    fn into_tensor(self) -> Tensor<D> {
        self
    }
}

impl<const D: usize> Tile<D> for EarlyStop<D> {
    fn into_tensor(self) -> Tensor<D> {
        self.0
    }
}

/// The tiles of an axis.
#[derive(Clone, Copy, Debug)]
struct Tiles {
    axis: usize,
    len: usize,
    tile: usize,
}

impl Tiles {
    fn ranges(self) -> impl Iterator<Item = Range<usize>> {
        (0..self.len).step_by(self.tile).map(move |start| start..(start + self.tile).min(self.len))
    }
}

fn part<const D: usize>(x: &Tensor<D>, axis: usize, range: &Range<usize>) -> Tensor<D> {
    x.clone().slice_dim(axis, Slice::from(range.clone()))
}

/// A tensor that is written tile by tile.
struct Whole<const D: usize> {
    tiles: Tiles,
    tensor: Option<Tensor<D>>,
}

impl<const D: usize> Whole<D> {
    fn new(tiles: Tiles) -> Self {
        Self { tiles, tensor: None }
    }

    fn put(&mut self, range: &Range<usize>, part: Tensor<D>) {
        let Tiles { axis, len, .. } = self.tiles;
        let found = part.dims()[axis];
        assert!(
            found == range.len(),
            "checkpoint_tiled: a tile of {} gives {found} along axis {axis}",
            range.len()
        );
        let whole = self.tensor.take().unwrap_or_else(|| {
            let mut shape = part.dims();
            shape[axis] = len;
            Tensor::full(shape, 0.0, (&part.device(), part.dtype()))
        });
        let mut slices = part.dims().map(|len| Slice::from(0..len));
        slices[axis] = Slice::from(range.clone());
        self.tensor = Some(whole.slice_assign(slices, part));
    }

    fn tensor(self) -> Tensor<D> {
        self.tensor.expect("at least one tile")
    }
}

/// What is needed to recompute the tiles.
struct Tiled<M, F, const D: usize> {
    module: Remembered<M>,
    /// The input, if it is not tracked.
    x: Option<Tensor<D>>,
    tiles: Tiles,
    forward: F,
    runs: Vec<(Range<usize>, Tape, Samples)>,
    device: Device,
    parameters: Parameters,
    finish: Vec<Finish>,
    /// The slot of the gradient of `x`.
    of_x: usize,
    gradients: Slots,
    inputs: Slots,
    of_outputs: Slots,
}

impl<M, F, const D: usize> Tiled<M, F, D> {
    fn replay<O: Tile<E>, const E: usize>(self)
    where
        M: Module + 'static,
        F: Fn(&M, Tensor<D>) -> O + Copy + 'static,
    {
        let Self {
            module,
            x,
            tiles,
            forward,
            runs,
            device,
            parameters,
            finish,
            of_x,
            gradients,
            inputs,
            of_outputs,
        } = self;
        let device = &device;
        let like = Tensor::<1>::zeros([1], &device.clone().without_autodiff());
        let (tracks_x, x) = (x.is_none(), x.unwrap_or_else(|| take(&like, &inputs, 0)));
        let dy: Tensor<E> = take(&like, &of_outputs, 0);
        let mut dx = Whole::<D>::new(tiles);
        for (range, tape, samples) in runs {
            let [of_tile, of_output] = [(); 2].map(|()| Slots::default());
            put(part(&dy, tiles.axis, &range), &of_output, 0);
            let part = part(&x, tiles.axis, &range);
            let (shape, dtype) = (part.shape(), part.dtype());
            let part = with_strategy(part, device);
            let part = match tracks_x {
                true => from_probe(part, &token(device).require_grad(), of_tile.clone(), 0),
                false => part,
            };
            let again = Again {
                device,
                parameters: &parameters,
                gradients: &gradients,
                of_outputs: &of_output,
                is_part: true,
            };
            again.run(module.clone(), part, forward, tape, samples);
            if tracks_x {
                dx.put(
                    &range,
                    match of_tile.has(0) {
                        true => take(&like, &of_tile, 0),
                        false => Tensor::zeros(shape, (&x.device(), dtype)),
                    },
                );
            }
        }
        if tracks_x {
            put(dx.tensor(), &gradients, of_x);
        }
        finish.into_iter().for_each(|finish| finish(&like, &gradients));
    }
}
