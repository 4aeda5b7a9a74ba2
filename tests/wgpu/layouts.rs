//! The kernels for devices on tensors of any shape and layout: sizes around those that the kernels divide their work by, channels
//! last in memory, slices, broadcasts. (Not for empty tensors: Burn 0.22.1 does not take them on this backend.) What is tracked varies, too.
use crate::draws::for_all;
use crate::table::activations::smooth;
use crate::{EXACT, alone, among_others, assert_close, assert_within, gpu, of_products, tensor, values};
use burn::nn::loss::Reduction;
use burn::tensor::ops::{
    AttentionModuleOptions, AvgPoolOptions, InterpolateMode, InterpolateOptions, MaxPoolOptions,
};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_memsave::functional as F;
use burn_memsave::nn::loss::{BinaryCrossEntropyLossConfig, HuberLossConfig, KLDivLossConfig, MseLoss};
use proptest::prelude::*;

/// How a tensor lies in memory.
#[derive(Clone, Copy, Debug)]
enum Layout {
    Contiguous,
    /// The second axis is the nearest: what convolutions return.
    ChannelsLast,
    /// The axes from the last to the first.
    Reversed,
    /// Without its first column and row.
    Sliced,
    /// One row for all.
    Expanded,
    /// The second axis after the third: heads of a projection. Of three axes, the same as `ChannelsLast`.
    SplitHeads,
}

const LAYOUTS: [Layout; 5] =
    [Layout::Contiguous, Layout::ChannelsLast, Layout::Reversed, Layout::Sliced, Layout::Expanded];

impl Layout {
    /// The axes in the order in which they lie in memory.
    fn axes<const D: usize>(self) -> [usize; D] {
        let mut axes = core::array::from_fn(|axis| axis);
        match self {
            Self::ChannelsLast => axes[1..].rotate_left(1),
            Self::Reversed => axes.reverse(),
            Self::SplitHeads => axes.swap(1, 2),
            Self::Contiguous | Self::Sliced | Self::Expanded => {}
        }
        axes
    }

    /// A leaf, of which [`view`](Self::view) makes the tensor.
    fn leaf<const D: usize>(self, shape: [usize; D], seed: usize, device: &Device) -> Tensor<D> {
        let mut shape = self.axes::<D>().map(|axis| shape[axis]);
        match self {
            Self::Sliced => [0, D - 1].into_iter().for_each(|axis| shape[axis] += 1),
            Self::Expanded => shape[0] = 1,
            _ => {}
        }
        tensor(values(shape, seed), device)
    }

    /// A number whose gradient of `y` lies so, and has the values of a leaf.
    fn weighed<const D: usize>(self, y: Tensor<D>, seed: usize) -> Tensor<1> {
        let (shape, device) = (y.dims(), y.device());
        let y = match self {
            Self::Sliced => [0, D - 1].into_iter().fold(y, |y, axis| {
                let mut before = y.dims();
                before[axis] = 1;
                Tensor::cat(vec![Tensor::zeros(before, &device), y], axis)
            }),
            Self::Expanded => y.sum_dim(0),
            _ => y.permute(self.axes::<D>().map(|axis| axis as isize)),
        };
        (y * self.leaf(shape, seed, &device)).sum()
    }

    fn view<const D: usize>(self, leaf: Tensor<D>, shape: [usize; D]) -> Tensor<D> {
        match self {
            Self::Sliced => {
                let starts = |axis| usize::from(axis == 0 || axis == D - 1);
                leaf.slice(core::array::from_fn::<_, D, _>(|axis| starts(axis)..starts(axis) + shape[axis]))
            }
            Self::Expanded => leaf.expand(shape),
            _ => {
                let axes = self.axes::<D>();
                let place = |axis| axes.iter().position(|&at| at == axis).expect("all are there");
                leaf.permute(core::array::from_fn::<_, D, _>(|axis| place(axis) as isize))
            }
        }
    }
}

#[derive(Clone, Debug)]
struct Case {
    shape: [usize; 3],
    x: Layout,
    dy: Layout,
    /// Whether the parameters are.
    tracked: bool,
}

fn cases() -> impl Strategy<Value = Case> {
    // Rows of one vector, of some, of more than all units of a cube take at once, and of odd lengths.
    let row = prop_oneof![Just(1usize), 2usize..9, Just(12), Just(31), Just(64), Just(257), Just(1030)];
    let layout = prop::sample::select(&LAYOUTS[..]);
    let shape = (1usize..4, 1usize..7, row, any::<bool>());
    (shape, layout.clone(), layout, any::<bool>()).prop_map(
        |((batch, channels, row, wide), x, dy, tracked)| {
            let (channels, row) = if wide { (row.min(260), channels) } else { (channels, row) };
            Case { shape: [batch, channels, row], x, dy, tracked }
        },
    )
}

/// An operation of a tensor and of parameters, one per channel: outputs, and whatever else is compared.
type Op = fn(Tensor<3>, &[Tensor<1>]) -> Tensor<3>;

/// Output and gradients, of `x` and of the parameters.
fn run(
    op: &impl Fn(Tensor<3>, &[Tensor<1>]) -> Tensor<3>,
    case: &Case,
    parameters: usize,
    device: &Device,
) -> Vec<TensorData> {
    let Case { shape, x, dy, tracked } = *case;
    let leaf = x.leaf(shape, 1, device).require_grad();
    let vectors: Vec<Tensor<1>> = (0..2)
        // Positive: some are variances.
        .map(|seed| tensor::<1>(values([parameters], 5 + seed), device).abs() + 0.5)
        .map(|vector| if tracked { vector.require_grad() } else { vector })
        .collect();
    let y = op(x.view(leaf.clone(), shape), &vectors);
    let gradients = dy.weighed(y.clone(), 2).backward();
    let mut results = vec![y.into_data(), leaf.grad(&gradients).expect("tracked").into_data()];
    results.extend(vectors.iter().filter_map(|vector| vector.grad(&gradients)).map(Tensor::into_data));
    results
}

fn compare(
    tolerance: f32,
    name: &str,
    op: impl Fn(Tensor<3>, &[Tensor<1>]) -> Tensor<3>,
    case: &Case,
    parameters: usize,
) {
    let _shared = among_others();
    let [wgpu, flex] = [gpu(), Device::flex()].map(|device| run(&op, case, parameters, &device.autodiff()));
    assert_eq!(wgpu.len(), flex.len(), "{name}, {case:?}");
    for (which, (wgpu, flex)) in wgpu.iter().zip(&flex).enumerate() {
        // Gradients of norms of few elements nearly cancel: their terms are of the order of one.
        assert_within(tolerance, 0.1, &format!("{name}, {case:?}: result {which}"), wgpu, flex);
    }
}

/// Where Burn's own elementwise operations are fused they may read a gradient of another layout wrongly if an axis but the last has
/// one element (0.22.1, `docs/burn-0.22.1.md`): also those of `burn::tensor::activation::tanh` for `[1, 1, 6]`.
fn burn_computes_it(case: &Case) -> bool {
    !cfg!(feature = "fusion") || !case.shape[..2].contains(&1)
}

/// Runs every operation on some cases; `parameters` says how many each takes for a shape.
fn check(number: u32, ops: &[(&str, Op)], parameters: fn([usize; 3]) -> usize, fits: fn(&Case) -> bool) {
    check_within(EXACT, number, ops, parameters, fits);
}

fn check_within(
    tolerance: f32,
    number: u32,
    ops: &[(&str, Op)],
    parameters: fn([usize; 3]) -> usize,
    fits: fn(&Case) -> bool,
) {
    for (name, op) in ops {
        let cases = cases().prop_filter("fits", |case| fits(case) && burn_computes_it(case));
        for_all(number, cases, |case| compare(tolerance, name, *op, &case, parameters(case.shape)));
    }
}

#[test]
fn activations_of_any_layout_equal_flex() {
    let ops: [(&str, Op); 7] = [
        ("relu", |x, _| F::relu(x)),
        ("leaky_relu", |x, _| F::leaky_relu(x, 0.1)),
        ("hardtanh", |x, _| F::hardtanh(x, -0.5, 0.25)),
        ("hard_sigmoid", |x, _| F::hard_sigmoid(x, 0.9, 0.4)),
        ("shrink", |x, _| F::shrink(x, 0.25, 0.125)),
        ("threshold", |x, _| F::threshold(x, 0.25, -2.0)),
        ("silu_gate", |x, _| F::silu_gate(x.clone() * 0.5, x)),
    ];
    check(8, &ops, |_| 1, |_| true);
    // Of the views themselves: a product with a number would lie in memory in its own order.
    for activation in smooth() {
        for_all(8, cases().prop_filter("fits", burn_computes_it), |case| {
            compare(EXACT, activation.name, |x, _| (activation.ours)(x), &case, 1);
        });
    }
}

#[test]
fn channels_of_any_layout_equal_flex() {
    let ops: [(&str, Op); 3] = [
        ("prelu", |x, p| F::prelu(x, p[0].clone())),
        ("batch_norm_train", |x, p| F::batch_norm_train(x, p[0].clone(), p[1].clone(), 1e-3).output),
        ("batch_norm", |x, p| {
            let [gamma, beta] = [p[0].clone(), p[1].clone()];
            let [mean, variance] = [&gamma, &beta].map(|p| p.clone().detach());
            F::batch_norm(x, gamma, beta, mean, variance, 1e-3)
        }),
    ];
    // Of one or two elements the variance may be so small that f32 has few digits of the gradient.
    check(12, &ops, |shape| shape[1], |case| case.shape[2] > 2);
    for case in LAYOUTS.map(|dy| Case { shape: [3, 5, 12], x: Layout::Contiguous, dy, tracked: true }) {
        let _shared = among_others();
        let [wgpu, flex] = [gpu(), Device::flex()].map(|device| {
            let device = device.autodiff();
            let beta = tensor::<1>(values([5], 6), &device).require_grad();
            let fixed = tensor::<1>(values([5], 5), &device).abs() + 0.5;
            let x = case.x.leaf(case.shape, 1, &device);
            let y = F::batch_norm(x, fixed.clone(), beta.clone(), fixed.clone(), fixed, 1e-3);
            beta.grad(&case.dy.weighed(y, 2).backward()).expect("tracked").into_data()
        });
        assert_close(&format!("beta alone, {case:?}"), &wgpu, &flex);
    }
}

#[test]
fn rows_of_any_layout_equal_flex() {
    let over_last: [(&str, Op); 2] = [
        ("layer_norm", |x, p| F::layer_norm(x, p[0].clone(), Some(p[1].clone()), 1e-3)),
        ("rms_norm", |x, p| F::rms_norm(x, p[0].clone(), 1e-3)),
    ];
    // Of rows of one or two elements the variance may be so small that f32 has few digits of the gradient.
    check(12, &over_last, |shape| shape[2], |case| case.shape[2] > 2);
    fn pairs(channels: usize) -> usize {
        if channels.is_multiple_of(2) { channels / 2 } else { channels }
    }
    let over_groups: [(&str, Op); 3] = [
        ("instance_norm", |x, p| {
            let channels = x.dims()[1];
            F::group_norm(x, Some(p[0].clone()), Some(p[1].clone()), channels, 1e-3)
        }),
        ("group_norm of one group", |x, p| F::group_norm(x, Some(p[0].clone()), None, 1, 1e-3)),
        ("group_norm of two groups", |x, p| {
            let groups = if x.dims()[1].is_multiple_of(2) { 2 } else { 1 };
            F::group_norm(x, Some(p[0].clone()), Some(p[1].clone()), groups, 1e-3)
        }),
    ];
    check(24, &over_groups, |shape| shape[1], |case| case.shape[2] > 2);
    let of_images: [(&str, Op); 1] = [("group_norm of images", |x, p| {
        let [batch, channels, row] = x.dims();
        let x = x.unsqueeze_dim::<4>(2).expand([batch, channels, 2, row]);
        let y = F::group_norm(x, Some(p[0].clone()), Some(p[1].clone()), pairs(channels), 1e-3);
        y.flatten(2, 3)
    })];
    // Burn sums a reversed gradient of four axes, here for `expand`, wrongly: `docs/burn-0.22.1.md`.
    check(24, &of_images, |shape| shape[1], |case| case.shape[2] > 2 && !matches!(case.dy, Layout::Reversed));
}

/// Planes and rows of which several cubes take a part each, in vectors and not: more elements than a device in software takes turns in a
/// loop, 65,535.
#[test]
fn norms_of_large_planes_equal_flex() {
    let ops: [(&str, Op); 4] = [
        ("group_norm", |x, p| F::group_norm(x, Some(p[0].clone()), Some(p[1].clone()), 2, 1e-3)),
        ("group_norm of one group", |x, p| F::group_norm(x, Some(p[0].clone()), Some(p[1].clone()), 1, 1e-3)),
        ("instance_norm", |x, p| F::group_norm(x, Some(p[0].clone()), Some(p[1].clone()), 4, 1e-3)),
        ("batch_norm", |x, p| F::batch_norm_train(x, p[0].clone(), p[1].clone(), 1e-3).output),
    ];
    for (layout, shape) in [
        (Layout::Contiguous, [2, 4, 66_001]),
        (Layout::ChannelsLast, [2, 4, 66_001]),
        (Layout::Contiguous, [1, 4, 140_000]),
        (Layout::Sliced, [1, 4, 70_000]),
        (Layout::ChannelsLast, [3, 12, 30_000]),
    ] {
        let case = Case { shape, x: layout, dy: layout, tracked: true };
        for (name, op) in ops {
            compare(EXACT, name, op, &case, shape[1]);
        }
    }
    let ops: [(&str, Op); 2] = [
        ("layer_norm", |x, p| F::layer_norm(x, p[0].clone(), Some(p[1].clone()), 1e-3)),
        ("rms_norm", |x, p| F::rms_norm(x + 0.5, p[0].clone(), 1e-3)),
    ];
    for (layout, row) in
        [(Layout::Contiguous, 270_001), (Layout::Contiguous, 540_000), (Layout::Reversed, 140_002)]
    {
        let case = Case { shape: [1, 2, row], x: layout, dy: layout, tracked: true };
        for (name, op) in ops {
            compare(EXACT, name, op, &case, row);
        }
    }
}

/// Beta gradients of batch norm: the sums of `dy` by channels.
fn sums_by_channels(shape: [usize; 4], dy: TensorData, channels_last: bool) -> Vec<f32> {
    let device = gpu().autodiff();
    let vector = |of: f32| Tensor::<1>::full([shape[1]], of, (&device, DType::F32));
    let beta = vector(0.0).require_grad();
    let y = F::batch_norm(
        Tensor::<4>::zeros(shape, (&device, DType::F32)),
        vector(1.0),
        beta.clone(),
        vector(0.0),
        vector(1.0),
        1e-3,
    );
    let y = if channels_last { y.permute([0, 2, 3, 1]) } else { y };
    let dy = tensor::<1>(dy, &device).reshape(y.dims());
    let gradients = (y * dy).sum().backward();
    beta.grad(&gradients).expect("tracked").into_data().iter::<f32>().collect()
}

/// A sum of sums is as exact as sums of few terms, however many there are. A device in software would cut a loop over them off.
#[test]
fn sums_of_many_equal_numbers_are_exact() {
    let _shared = among_others();
    for shape in [[1, 1, 1024, 1024], [2, 3, 513, 1023], [1, 16, 512, 512], [3000, 5, 7, 9]] {
        let elements = shape.iter().product::<usize>();
        let exact = f64::from(0.1f32) * (elements / shape[1]) as f64;
        for channels_last in [false, true] {
            let dy = TensorData::new(vec![0.1f32; elements], [elements]);
            for sum in sums_by_channels(shape, dy, channels_last) {
                let error = (f64::from(sum) - exact).abs() / exact;
                assert!(error < 1e-5, "{shape:?}, channels last: {channels_last}: {sum} for {exact}");
            }
        }
    }
}

/// An infinity or NaN shows in the sum of its channel, and in no other one.
#[test]
fn sums_by_channels_keep_infinities_apart() {
    let _shared = among_others();
    let shape = [3, 6, 35, 34];
    let plane = shape[2] * shape[3];
    for channels_last in [false, true] {
        // Of channels 1 and 4.
        let place = |channel: usize, at: usize| match channels_last {
            true => at * shape[1] + channel,
            false => channel * plane + at,
        };
        let mut dy = vec![0.5f32; shape.iter().product()];
        dy[place(1, 900)] = f32::INFINITY;
        dy[place(4, 7)] = f32::NEG_INFINITY;
        dy[place(4, 1000)] = f32::INFINITY;
        let elements = dy.len();
        let sums = sums_by_channels(shape, TensorData::new(dy, [elements]), channels_last);
        let finite = 0.5 * (shape[0] * plane) as f32;
        assert_eq!([sums[0], sums[2], sums[3], sums[5]], [finite; 4], "channels last: {channels_last}");
        assert_eq!(sums[1], f32::INFINITY, "channels last: {channels_last}");
        assert!(sums[4].is_nan(), "channels last: {channels_last}");
    }
}

/// Channels last, as convolutions return them, of any number of channels in a group: vectors of a row go on from one element to the next,
/// those of the parameters do not.
#[test]
fn groups_of_any_number_of_channels_last_equal_flex() {
    let _shared = among_others();
    for (channels, groups) in [(2, 1), (3, 1), (6, 1), (10, 1), (12, 1), (12, 2), (6, 2), (20, 2)] {
        let results = [gpu(), Device::flex()].map(|device| {
            let device = device.autodiff();
            let leaf = tensor::<4>(values([2, 6, 8, channels], 1), &device).require_grad();
            let vector = |seed| tensor::<1>(values([channels], seed), &device).require_grad();
            let (gamma, beta) = (vector(2), vector(3));
            let x = leaf.clone().permute([0, 3, 1, 2]);
            let y = F::group_norm(x, Some(gamma.clone()), Some(beta.clone()), groups, 1e-3);
            let gradients = Layout::ChannelsLast.weighed(y.clone(), 4).backward();
            let of_vectors =
                [&gamma, &beta].map(|vector| vector.grad(&gradients).expect("tracked").into_data());
            let of_x = leaf.grad(&gradients).expect("tracked").into_data();
            [[y.into_data(), of_x], of_vectors]
        });
        let [wgpu, flex] = results.map(|results| results.concat());
        for (which, (wgpu, flex)) in wgpu.iter().zip(&flex).enumerate() {
            assert_close(&format!("{channels} channels in {groups} groups: result {which}"), wgpu, flex);
        }
    }
}

/// Attention of the rows of a case, with the batch as heads; the bias is not tracked.
#[test]
fn attention_of_any_layout_equals_flex() {
    fn attend(x: Tensor<3>, hides: bool, options: AttentionModuleOptions) -> Tensor<3> {
        let [_, rows, _] = x.dims();
        let numbers = |seed| tensor::<4>(values([1, 1, rows, rows], seed), &x.device());
        // The first key is never hidden: of nothing there is no softmax.
        let hidden = || numbers(21).greater_elem(0.4).slice_fill([0..1, 0..1, 0..rows, 0..1], false);
        let (mask, bias) = if hides { (Some(hidden()), Some(numbers(22))) } else { (None, None) };
        let x = x.unsqueeze_dim::<4>(0);
        let (query, key) = (x.clone(), x.clone() * 0.5);
        F::attention(query, key, x + 1.0, mask, bias, options).squeeze_dim(0)
    }
    /// The keys and values of the first row of the batch, for all.
    fn attend_in_a_group(x: Tensor<3>) -> Tensor<3> {
        let x = x.unsqueeze_dim::<4>(0);
        let first = x.clone().slice_dim(1, 0..1);
        F::attention(x, first.clone() * 0.5, first + 1.0, None, None, Default::default()).squeeze_dim(0)
    }
    fn causal() -> AttentionModuleOptions {
        AttentionModuleOptions { is_causal: true, ..Default::default() }
    }
    let ops: [(&str, Op); 4] = [
        ("attention, grouped", |x, _| attend_in_a_group(x)),
        ("attention", |x, _| attend(x, false, AttentionModuleOptions::default())),
        ("attention, causal", |x, _| attend(x, false, causal())),
        ("attention, masked", |x, _| {
            attend(x, true, AttentionModuleOptions { scale: Some(0.7), softcap: Some(2.0), ..causal() })
        }),
    ];
    check_within(of_products(), 8, &ops, |_| 1, |_| true);
}

/// Queries, keys and values that are views, of any sizes; sizes around those that decide which kernel makes a product.
#[test]
fn attention_to_views_equals_flex() {
    #[derive(Clone, Debug)]
    struct Views {
        /// Batch, groups, heads of a group.
        heads: [usize; 3],
        /// Queries, keys.
        tokens: [usize; 2],
        /// Of keys, of values.
        widths: [usize; 2],
        layouts: [Layout; 4],
        /// Whether one tensor is all three.
        one: bool,
    }

    fn run(views: &Views, device: &Device) -> Vec<TensorData> {
        let &Views { heads: [batch, groups, of_group], tokens, widths, layouts, one } = views;
        let ([queries, keys], [width, value_width]) = (tokens, widths);
        let (heads, of_key) = (groups * of_group, [batch, groups, keys, width]);
        let shapes = match one {
            true => [of_key; 4],
            false => [
                [batch, heads, queries, width],
                of_key,
                [batch, groups, keys, value_width],
                [batch, heads, queries, value_width],
            ],
        };
        let leaf = |which: usize| layouts[which].leaf(shapes[which], which, device);
        let view = |which: usize, leaf: &Tensor<4>| layouts[which].view(leaf.clone(), shapes[which]);
        let leaves: Vec<_> = (0..if one { 1 } else { 3 }).map(|which| leaf(which).require_grad()).collect();
        let inputs: Vec<_> = leaves.iter().enumerate().map(|(which, leaf)| view(which, leaf)).collect();
        let [query, key, value] = [0, 1, 2].map(|which| inputs[which.min(inputs.len() - 1)].clone());
        let y = F::attention(query, key, value, None, None, AttentionModuleOptions::default());
        let gradients = layouts[3].weighed(y.clone(), 3).backward();
        let of_leaves = leaves.iter().map(|leaf| leaf.grad(&gradients).expect("tracked").into_data());
        [y.into_data()].into_iter().chain(of_leaves).collect()
    }

    let tokens = prop::sample::select(vec![1usize, 2, 3, 4, 5, 15, 16, 17, 31, 47, 48, 49, 66]);
    let width = prop::sample::select(vec![1usize, 3, 4, 6, 16, 17, 64, 255, 256, 257]);
    let layout = prop::sample::select([&LAYOUTS[..], &[Layout::SplitHeads]].concat());
    let views = (
        [1usize..4, 1..4, 1..3],
        [tokens.clone(), tokens],
        [width.clone(), width],
        [layout.clone(), layout.clone(), layout.clone(), layout],
        prop::bool::weighted(0.2),
    );
    let views =
        views.prop_map(|(heads, tokens, widths, layouts, one)| Views { heads, tokens, widths, layouts, one });
    let burn_computes_it = |views: &Views| {
        let Views { heads: [batch, groups, _], tokens: [queries, keys], .. } = views;
        !cfg!(feature = "fusion") || ![batch, groups, queries, keys].contains(&&1)
    };
    for_all(48, views.prop_filter("computed by Burn", burn_computes_it), |views| {
        let _shared = among_others();
        let [wgpu, flex] = [gpu(), Device::flex()].map(|device| run(&views, &device.autodiff()));
        for (which, (wgpu, flex)) in wgpu.iter().zip(&flex).enumerate() {
            assert_within(of_products(), 0.1, &format!("{views:?}: result {which}"), wgpu, flex);
        }
    });
}

/// The cross entropy of rows, which are those of a case, with what it is made of.
#[test]
fn cross_entropies_of_any_layout_equal_flex() {
    fn loss(x: Tensor<3>, weights: Option<Tensor<1>>, smoothing: Option<f32>) -> Tensor<3> {
        let [batch, rows, classes] = x.dims();
        let target = |row: usize| (row * 7 + 3) as i64 % classes as i64;
        let targets: Vec<i64> = (0..batch * rows).map(target).collect();
        let logits = x.clone().reshape([batch * rows, classes]) * 5.0;
        let targets = Tensor::from_data(TensorData::new(targets, [batch * rows]), &x.device());
        F::cross_entropy(logits, targets, weights, smoothing).reshape([batch, rows, 1])
    }
    let ops: [(&str, Op); 4] = [
        ("cross_entropy", |x, _| loss(x, None, None)),
        ("cross_entropy, smoothed", |x, _| loss(x, None, Some(0.1))),
        ("cross_entropy, weighted", |x, p| loss(x, Some(p[0].clone().detach()), None)),
        ("cross_entropy, both", |x, p| loss(x, Some(p[0].clone().detach()), Some(0.2))),
    ];
    // With one class every gradient is 0.
    check(8, &ops, |shape| shape[2], |case| !case.tracked && case.shape[2] > 1);
}

/// Pools and interpolations of planes: the channels and the row of a case.
#[test]
fn planes_of_any_layout_equal_flex() {
    fn of_planes(x: Tensor<3>, f: impl FnOnce(Tensor<4>) -> Tensor<4>) -> Tensor<3> {
        f(x.unsqueeze_dim(0)).squeeze_dim(0)
    }
    fn resized(x: Tensor<3>, mode: InterpolateMode) -> Tensor<3> {
        let [_, height, width] = x.dims();
        let options = InterpolateOptions::new(mode).with_align_corners(false);
        let options = options.with_output_size([height + 2, width.div_ceil(2)]);
        of_planes(x, |x| F::interpolate(x, options))
    }
    let ops: [(&str, Op); 8] = [
        ("max_pool2d", |x, _| {
            let mut options = MaxPoolOptions::new([3, 2]);
            (options.stride, options.padding) = ([1, 2], [(1, 2), (1, 0)]);
            of_planes(x, |x| F::max_pool2d(x, options))
        }),
        ("max_pool2d, dilated", |x, _| {
            let mut options = MaxPoolOptions::new([2, 2]);
            (options.stride, options.padding, options.dilation) = ([1, 1], [(1, 1), (1, 1)], [2, 2]);
            options.ceil_mode = true;
            of_planes(x, |x| F::max_pool2d(x, options))
        }),
        ("max_pool2d of large windows", |x, _| {
            let mut options = MaxPoolOptions::new([16, 17]);
            (options.stride, options.padding) = ([3, 1], [(8, 8), (8, 8)]);
            of_planes(x, |x| F::max_pool2d(x, options))
        }),
        ("avg_pool2d", |x, _| {
            let mut options = AvgPoolOptions::new([3, 2]);
            (options.stride, options.padding) = ([2, 1], [(1, 1), (1, 1)]);
            options.count_include_pad = false;
            of_planes(x, |x| F::avg_pool2d(x, options))
        }),
        ("adaptive_avg_pool2d", |x, _| of_planes(x, |x| F::adaptive_avg_pool2d(x, [2, 3]))),
        ("interpolate, nearest", |x, _| resized(x, InterpolateMode::Nearest)),
        ("interpolate, linear", |x, _| resized(x, InterpolateMode::Bilinear)),
        ("interpolate, cubic", |x, _| resized(x, InterpolateMode::Bicubic)),
    ];
    check(8, &ops, |_| 1, |_| true);
}

#[test]
fn losses_of_any_layout_equal_flex() {
    fn number(loss: Tensor<1>) -> Tensor<3> {
        loss.reshape([1, 1, 1])
    }
    fn labels(x: &Tensor<3>) -> Tensor<3, Int> {
        x.clone().detach().mul_scalar(1.7).greater_elem(0.1).int()
    }
    let ops: [(&str, Op); 9] = [
        ("mse", |x, _| number(MseLoss::new().forward(x.clone() * 0.5, x + 1.0, Reduction::Mean))),
        ("mse of every element", |x, _| MseLoss::new().forward_no_reduction(x.clone() * 0.5, x + 1.0)),
        ("huber", |x, _| {
            let targets = x.clone() * 3.0;
            number(HuberLossConfig::new(0.5).init().forward(x, targets, Reduction::Sum))
        }),
        ("huber of every element", |x, _| {
            let targets = x.clone() * 3.0;
            HuberLossConfig::new(0.5).init().forward_no_reduction(x, targets)
        }),
        ("binary cross entropy of logits", |x, _| {
            let (targets, loss) = (labels(&x), BinaryCrossEntropyLossConfig::new().with_logits(true));
            number(loss.init(&x.device()).forward(x, targets))
        }),
        ("binary cross entropy", |x, _| {
            let (targets, loss) = (labels(&x), BinaryCrossEntropyLossConfig::new());
            number(loss.init(&x.device()).forward(F::sigmoid(x), targets))
        }),
        ("divergence", |x, _| {
            let targets = F::sigmoid(x.clone() * 2.0);
            number(KLDivLossConfig::new().init().forward(x, targets, Reduction::Sum))
        }),
        ("divergence of every element", |x, _| {
            let targets = F::sigmoid(x.clone() * 2.0);
            KLDivLossConfig::new().init().forward_no_reduction(x, targets)
        }),
        ("divergence of logarithms", |x, _| {
            let targets = x.clone() * 0.25;
            KLDivLossConfig::new().with_log_target(true).init().forward_no_reduction(x, targets)
        }),
    ];
    check(8, &ops, |_| 1, |_| true);
}

/// Which elements are dropped depends on the seed and their place alone: not on the layout of the input, nor on that of the
/// gradient, nor on when they are drawn.
#[test]
fn dropout_draws_by_place() {
    let _alone = alone();
    let device = gpu().autodiff();
    for shape in [[1, 1, 1], [3, 5, 7], [2, 64, 33], [4, 16, 256]] {
        for x in LAYOUTS {
            let run = |x: Layout, dy: Layout| {
                device.seed(11);
                let leaf = x.leaf(shape, 1, &device).require_grad();
                let y = F::dropout(x.view(leaf, shape).mul_scalar(0.0).add_scalar(1.0), 0.25);
                let ones = Tensor::ones(shape, (&device, DType::F32)).require_grad();
                device.seed(11);
                let of_ones = F::dropout(ones.clone(), 0.25);
                let dy = dy.view(dy.leaf(shape, 2, &device), shape).mul_scalar(0.0).add_scalar(1.0);
                let gradient = ones.grad(&(of_ones * dy).sum().backward()).expect("tracked");
                [y, gradient].map(|tensor| tensor.into_data().try_to_vec::<f32>().expect("floats"))
            };
            let [contiguous, _] = run(Layout::Contiguous, Layout::Contiguous);
            assert_eq!(run(x, x), [contiguous.clone(), contiguous], "{shape:?}, {x:?}");
        }
    }
}

/// About as many as the rate says, and no pattern in the low bits of the position.
#[test]
fn dropout_is_fair() {
    let _alone = alone();
    const LEN: usize = 1 << 18;
    let device = gpu();
    for rate in [0.1, 0.5, 0.9] {
        device.seed(5);
        let x = Tensor::<1>::ones([LEN], (&device.clone().autodiff(), DType::F32)).require_grad();
        let y = F::dropout(x, rate).into_data().try_to_vec::<f32>().expect("floats");
        let share = |step: usize, first: usize| {
            let some: Vec<f32> = y.iter().copied().skip(first).step_by(step).collect();
            some.iter().filter(|&&y| y == 0.0).count() as f64 / some.len() as f64
        };
        // Five standard deviations.
        let within =
            |share: f64, of: usize| (share - rate).abs() < 5.0 * (rate * (1.0 - rate) / of as f64).sqrt();
        assert!(within(share(1, 0), LEN), "{rate}: {}", share(1, 0));
        for (step, first) in [(4, 0), (4, 3), (32, 7), (128, 127), (1024, 5)] {
            assert!(
                within(share(step, first), LEN / step),
                "{rate}, {first} of {step}: {}",
                share(step, first)
            );
        }
        // Neighbours are independent: both are dropped with the product of the rates.
        let pairs = y.windows(2).filter(|pair| pair == &[0.0, 0.0]).count() as f64 / (LEN - 1) as f64;
        assert!((pairs - rate * rate).abs() < 0.01, "{rate}: {pairs}");
    }
}

/// A second pass draws other numbers, the same seed the same ones.
#[test]
fn dropout_follows_the_seed() {
    let _alone = alone();
    let device = gpu();
    let drawn = || {
        let x = Tensor::<1>::ones([4096], (&device.clone().autodiff(), DType::F32)).require_grad();
        F::dropout(x, 0.5).into_data().try_to_vec::<f32>().expect("floats")
    };
    device.seed(3);
    let (first, second) = (drawn(), drawn());
    device.seed(3);
    assert_eq!(first, drawn());
    assert_ne!(first, second);
}

/// A slope depends on the seed and the place of its element alone. The gradient has the slopes of the output.
#[test]
fn random_slopes_are_drawn_by_place() {
    let _alone = alone();
    let device = gpu().autodiff();
    let [lower, upper] = [-0.5, 0.25];
    let floats = |tensor: Tensor<3>| tensor.into_data().try_to_vec::<f32>().expect("floats");
    // The output and the factors that the gradient is multiplied by.
    let run = |x: &Tensor<3>, dy: Tensor<3>| {
        device.seed(11);
        let x = x.clone().detach().require_grad();
        let y = F::rrelu(x.clone(), lower, upper);
        let factors = x.grad(&(y.clone() * dy).sum().backward()).expect("tracked");
        [y, factors].map(floats)
    };
    for shape in [[1, 1, 1], [3, 5, 7], [2, 64, 33], [4, 16, 256]] {
        let ones = Tensor::<3>::ones(shape, (&device, DType::F32));
        let [of_ones, slopes] = run(&-ones.clone(), ones.clone());
        let of_ones: Vec<f32> = of_ones.iter().map(|y| -y).collect();
        assert_eq!(of_ones, slopes, "{shape:?}");
        assert!(slopes.iter().all(|&slope| (lower..upper).contains(&f64::from(slope))), "{shape:?}");
        let mean = slopes.iter().map(|&slope| f64::from(slope)).sum::<f64>() / slopes.len() as f64;
        let deviation = (upper - lower) / 12f64.sqrt() / (slopes.len() as f64).sqrt();
        assert!((mean - (lower + upper) / 2.0).abs() < 5.0 * deviation, "{shape:?}: {mean}");
        for layout in LAYOUTS {
            let x = layout.view(layout.leaf(shape, 1, &device), shape);
            let dy = layout.view(layout.leaf(shape, 2, &device), shape).mul_scalar(0.0).add_scalar(1.0);
            let factor = |(&x, &slope): (&f32, &f32)| if x < 0.0 { slope } else { 1.0 };
            let values = floats(x.clone());
            let expected: Vec<f32> = values.iter().zip(&slopes).map(factor).collect();
            let [y, factors] = run(&x, dy);
            assert_eq!(factors, expected, "{shape:?}, {layout:?}");
            let expected: Vec<f32> = values.iter().zip(expected).map(|(x, factor)| x * factor).collect();
            assert_eq!(y, expected, "{shape:?}, {layout:?}");
        }
    }
}
