//! Tests batches in parts, and the largest batches that fit.
use super::meter::alone;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, RunningState};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Distribution, FloatDType, Int, Tensor};
use burn_memsave::measure::{Scope, measure_step};
use burn_memsave::nn::loss::CrossEntropyLossConfig;
use burn_memsave::nn::{BatchNormConfig, Linear, LinearConfig, activation::Relu};
use burn_memsave::plan::{
    PartsError, PlanError, largest_batch, micro_batched, micro_batched_within, retry_with_smaller_batch,
};
use proptest::prelude::*;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

#[derive(Module, Debug)]
struct Net {
    first: Linear,
    second: Linear,
}

impl Net {
    fn new(width: usize, device: &Device) -> Self {
        let linear = || LinearConfig::new(width, width).init(device);
        Self { first: linear(), second: linear() }
    }

    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        let hidden = Relu::new().forward(self.first.forward(x));
        self.second.forward(hidden).powf_scalar(2.0).mean()
    }
}

struct Cast(FloatDType);

impl ModuleMapper for Cast {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|value| value.detach().set_require_grad(false).cast(self.0).require_grad())
    }
}

/// Every gradient beside that of the whole batch.
struct Compare<'a> {
    parts: &'a GradientsParams,
    whole: &'a GradientsParams,
    tolerance: f64,
    count: usize,
}

impl ModuleVisitor for Compare<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let [parts, whole] = [self.parts, self.whole].map(|of| of.get::<D>(param.id));
        assert_eq!(parts.is_some(), whole.is_some());
        let Some((parts, whole)) = parts.zip(whole) else { return };
        assert_eq!(parts.dtype(), whole.dtype());
        let [parts, whole] = [parts, whole].map(Tensor::into_data);
        let scale = whole.iter::<f64>().fold(0.0, |scale: f64, v| scale.max(v.abs()));
        for (a, b) in parts.iter::<f64>().zip(whole.iter::<f64>()) {
            assert!((a - b).abs() <= self.tolerance * scale, "{a}, whole {b}");
        }
        self.count += 1;
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    #[test]
    fn gradients_are_those_of_the_batch(sizes in prop::collection::vec(0..5usize, 1..6), dtype in 0..3usize, freezes: bool) {
        let _alone = alone();
        let items: usize = sizes.iter().sum();
        let (dtype, tolerance) = [(DType::F32, 1e-5), (DType::F64, 1e-12), (DType::BF16, 2e-2)][dtype];
        let device = Device::flex().autodiff();
        let net = Net::new(6, &device);
        drop(net.loss(Tensor::ones([1, 6], &device)));
        let net = net.map(&mut Cast(dtype.into()));
        let net = if freezes { Net { first: net.first.freeze(), ..net } } else { net };
        let x = Tensor::<2>::random([items.max(1), 6], Distribution::Normal(0.0, 1.0), &device).cast(FloatDType::from(dtype));
        let mut start = 0;
        let parts = sizes.iter().map(|&items| {
            start += items;
            (x.clone().slice(start - items..start), items)
        });
        let result = micro_batched(&net, parts, Net::loss);
        if items == 0 {
            prop_assert!(matches!(result, Err(PlanError::Parts(PartsError::NoItems))));
            return Ok(());
        }
        let (loss, parts) = result.unwrap();
        let whole = net.loss(x);
        let difference = loss.into_scalar::<f64>() - whole.clone().into_scalar::<f64>();
        prop_assert!(difference.abs() <= tolerance * whole.clone().into_scalar::<f64>());
        let whole = GradientsParams::from_grads(whole.backward(), &net);
        let mut compare = Compare { parts: &parts, whole: &whole, tolerance, count: 0 };
        net.visit(&mut compare);
        prop_assert_eq!(compare.count, if freezes { 2 } else { 4 });
    }
}

/// Gradients of a module beside exact ones: the sum of squares of the differences, over that of the exact ones.
struct Error<'a> {
    found: &'a GradientsParams,
    exact: &'a GradientsParams,
    squares: [f64; 2],
}

impl ModuleVisitor for Error<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let [found, exact] =
            [self.found, self.exact].map(|of| of.get::<D>(param.id).expect("it is tracked").into_data());
        for (a, b) in found.iter::<f64>().zip(exact.iter::<f64>()) {
            self.squares[0] += (a - b).powi(2);
            self.squares[1] += b.powi(2);
        }
    }
}

/// Sums of many parts are made in f32: no further from f64 than the whole batch in half precision.
#[test]
fn many_parts_in_half_precision_are_not_worse_than_the_batch() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    device.seed(5);
    for dtype in [FloatDType::BF16, FloatDType::F16] {
        let net = Net::new(16, &device);
        drop(net.loss(Tensor::ones([1, 16], &device)));
        let net = net.map(&mut Cast(dtype));
        let of_f64 = net.clone().map(&mut Cast(FloatDType::F64));
        let x = Tensor::<2>::random([512, 16], Distribution::Normal(0.0, 1.0), &device).cast(dtype);
        let gradients = |net: &Net, x| GradientsParams::from_grads(net.loss(x).backward(), net);
        let exact = gradients(&of_f64, x.clone().cast(FloatDType::F64));
        let error = |found: &GradientsParams| {
            let mut error = Error { found, exact: &exact, squares: [0.0; 2] };
            net.visit(&mut error);
            (error.squares[0] / error.squares[1]).sqrt()
        };
        let whole = error(&gradients(&net, x.clone()));
        for items in [1, 2, 8] {
            let parts = x.clone().split(items, 0).into_iter().map(|part| (part, items));
            let (_, parts) = micro_batched(&net, parts, Net::loss).unwrap();
            let parts = error(&parts);
            assert!(parts <= 1.1 * whole, "{dtype:?}, {items}: {parts}, of the whole batch {whole}");
        }
    }
}

#[test]
fn batch_norms_are_refused() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let norm: burn_memsave::nn::BatchNorm = BatchNormConfig::new(4).init(&device);
    let run = |norm: &burn_memsave::nn::BatchNorm| {
        let part = (Tensor::<2>::ones([3, 4], &device), 3);
        micro_batched(norm, [part], |norm, x| norm.forward(x).mean())
    };
    let error = run(&norm).expect_err("in training mode").to_string();
    assert!(error.contains("the module has running statistics and is in training mode"), "{error}");
    drop(norm.gamma.val()); // freezing what does not exist yet freezes its clones, too
    let gamma = norm.gamma.clone();
    let frozen = burn_memsave::nn::BatchNorm { gamma, ..norm.freeze() };
    assert!(run(&frozen).is_ok());
}

/// A norm of a user's own, with no flag that says whether it is in training.
#[derive(Module, Debug)]
struct Own {
    linear: Linear,
    mean: RunningState<Tensor<1>>,
}

#[test]
fn running_statistics_of_any_module_are_refused() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let linear = LinearConfig::new(4, 4).init(&device);
    let own = Own { linear, mean: RunningState::new(Tensor::zeros([4], &device)) };
    let nested = (LinearConfig::new(2, 2).init(&device), vec![own]);
    let part = (Tensor::<2>::ones([3, 4], &device), 3);
    let refused = micro_batched(&nested, [part], |(_, own), x| own[0].linear.forward(x).mean());
    assert!(
        matches!(&refused, Err(PlanError::Parts(PartsError::Running { path })) if path == "1.0"),
        "{refused:?}"
    );
}

/// A parameter in two places has the gradient of the batch, once.
#[test]
fn tied_parameters_have_the_gradient_of_the_batch() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let mut net = Net::new(8, &device);
    net.second.weight = net.first.weight.clone();
    let x = Tensor::<2>::random([6, 8], Distribution::Normal(0.0, 1.0), &device);
    let whole = GradientsParams::from_grads(net.loss(x.clone()).backward(), &net);
    for items in [1, 2, 3] {
        let parts = x.clone().split(items, 0).into_iter().map(|part| (part, items));
        let (_, parts) = micro_batched(&net, parts, Net::loss).unwrap();
        let mut compare = Compare { parts: &parts, whole: &whole, tolerance: 1e-5, count: 0 };
        net.visit(&mut compare);
        assert_eq!((compare.count, parts.len()), (4, 3));
    }
}

/// A teacher that is a frozen clone of what is trained has the same ids, and comes first.
#[test]
fn a_frozen_clone_does_not_hide_what_is_trained() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let student = Net::new(8, &device);
    drop(student.loss(Tensor::ones([1, 8], &device)));
    let both = (student.clone().freeze(), student.clone());
    let x = Tensor::<2>::random([6, 8], Distribution::Normal(0.0, 1.0), &device);
    let whole = GradientsParams::from_grads(student.loss(x.clone()).backward(), &student);
    let parts = x.split(2, 0).into_iter().map(|part| (part, 2));
    let (_, parts) = micro_batched(&both, parts, |(_, student), x| student.loss(x)).unwrap();
    let mut compare = Compare { parts: &parts, whole: &whole, tolerance: 1e-5, count: 0 };
    student.visit(&mut compare);
    assert_eq!(compare.count, 4);
}

/// Sequences of any length, filled up with padding: a loss is the mean over tokens, or weighted classes, and so is that of parts.
#[test]
fn padded_parts_count_by_their_tokens() {
    const PADDING: usize = 0;
    const CLASSES: usize = 5;
    let _alone = alone();
    let device = Device::flex().autodiff();
    let linear = LinearConfig::new(3, CLASSES).init(&device);
    let lengths = [7, 0, 1, 4, 2, 0];
    let tokens = lengths.map(|length| {
        core::array::from_fn::<i64, 7, _>(|at| {
            if at < length { (at % (CLASSES - 1) + 1) as i64 } else { PADDING as i64 }
        })
    });
    let x = Tensor::<3>::random([tokens.len(), 7, 3], Distribution::Normal(0.0, 1.0), &device);
    let targets = Tensor::<2, Int>::from_data(tokens, &device);
    for class_weights in [None, Some(vec![9.0, 1.0, 0.5, 2.0, 0.25])] {
        let loss = CrossEntropyLossConfig::new()
            .with_pad_tokens(Some(vec![PADDING]))
            .with_weights(class_weights.clone())
            .init(&device);
        let loss = |linear: &Linear, (x, targets): (Tensor<3>, Tensor<2, Int>)| {
            let tokens = targets.shape().num_elements();
            loss.forward(linear.forward(x).reshape([tokens, CLASSES]), targets.reshape([tokens]))
        };
        let mean = loss(&linear, (x.clone(), targets.clone()));
        let whole = GradientsParams::from_grads(mean.backward(), &linear);
        let of_token = |&token: &i64| match (token as usize, &class_weights) {
            (PADDING, _) => 0.0,
            (_, None) => 1.0,
            (token, Some(weights)) => f64::from(weights[token]),
        };
        let weights: Vec<f64> = tokens.iter().map(|tokens| tokens.iter().map(of_token).sum()).collect();
        let part =
            |range: std::ops::Range<usize>| (x.clone().slice(range.clone()), targets.clone().slice(range));
        let compare = |mean_of_parts: Tensor<1>, parts: GradientsParams| {
            let difference = mean_of_parts.into_scalar::<f32>() - mean.clone().into_scalar::<f32>();
            assert!(difference.abs() < 1e-5, "{difference}");
            let mut compare = Compare { parts: &parts, whole: &whole, tolerance: 1e-5, count: 0 };
            linear.visit(&mut compare);
            assert_eq!(compare.count, 2);
        };
        for items in [1, 2, 4] {
            let ranges = (0..tokens.len()).step_by(items).map(|start| start..tokens.len().min(start + items));
            let parts = ranges.map(|range| (part(range.clone()), weights[range].iter().sum::<f64>()));
            let (mean, parts) = micro_batched(&linear, parts, loss).unwrap();
            compare(mean, parts);
        }
        let (items, mean, parts) = micro_batched_within(&linear, part, &weights[..], 1 << 30, loss).unwrap();
        assert_eq!(items, tokens.len());
        compare(mean, parts);
        for weight in [-1.0, f64::NAN, f64::INFINITY] {
            let refused = micro_batched(&linear, [(part(0..1), weight)], loss);
            assert!(matches!(refused, Err(PlanError::Parts(PartsError::Weight { .. }))), "{weight}");
        }
        let nothing = micro_batched(&linear, [(part(1..2), weights[1])], loss);
        assert!(matches!(nothing, Err(PlanError::Parts(PartsError::NoItems))));
    }
}

/// The largest batch of a budget needs no more, and one more item would; as much memory is enough for any batch in parts.
#[test]
fn batches_fit_into_a_budget() {
    const WIDTH: usize = 64;
    let _alone = alone();
    let device = Device::flex().autodiff();
    let net = Net::new(WIDTH, &device);
    let measured = |items: usize| {
        let x = Tensor::<2>::ones([items, WIDTH], &device);
        measure_step(&net, x, Net::loss).peak.expect("the allocator counts")
    };
    let mut asked = vec![];
    let mut peak = |items: usize| {
        let peak = measured(items);
        asked.push((items, peak));
        peak
    };
    let budget = peak(30_000);
    let largest = largest_batch(budget, 100_000, &mut peak).expect("one item fits");
    assert!((28_000..=32_000).contains(&largest), "{largest}: {asked:?}");
    // A thread more that takes part needs a mebibyte to work in.
    assert!(asked.iter().all(|&(_, peak)| peak <= budget + budget / 20), "{budget}: {asked:?}");
    assert!(asked.len() < 30, "{asked:?}");
}

/// The step in parts that a budget allows needs no more, with the sums of gradients, and has the gradients of the batch.
#[test]
fn parts_fit_into_a_budget() {
    const WIDTH: usize = 64;
    const ITEMS: usize = 20_000;
    let _alone = alone();
    let device = Device::flex().autodiff();
    for dtype in [FloatDType::F32, FloatDType::BF16] {
        let tolerance = if dtype == FloatDType::F32 { 1e-5 } else { 2e-2 };
        let net = Net::new(WIDTH, &device);
        drop(net.loss(Tensor::ones([1, WIDTH], &device)));
        let net = net.map(&mut Cast(dtype));
        let x = Tensor::<2>::random([ITEMS, WIDTH], Distribution::Normal(0.0, 1.0), &device).cast(dtype);
        let whole = measure_step(&net, x.clone(), Net::loss).peak.expect("the allocator counts");
        let expected = GradientsParams::from_grads(net.loss(x.clone()).backward(), &net);
        // The last one is enough for the whole batch.
        for budget in [whole / 10, whole / 3, 2 * whole] {
            let largest = Cell::new(0);
            let part = |range: std::ops::Range<usize>| {
                assert!(range.end <= ITEMS, "{range:?}");
                largest.set(largest.get().max(range.len()));
                x.clone().slice(range)
            };
            let (items, _, found) = micro_batched_within(&net, part, ITEMS, budget, Net::loss).unwrap();
            let mut compare = Compare { parts: &found, whole: &expected, tolerance, count: 0 };
            net.visit(&mut compare);
            assert_eq!((compare.count, items == ITEMS), (4, budget > whole));
            assert!(largest.get() >= items);

            // Again without the search, as the function says to go on.
            let parts = x.clone().split(items, 0).into_iter().map(|part| (part.clone(), part.dims()[0]));
            let scope = Scope::start();
            let run = micro_batched(&net, parts, Net::loss).unwrap();
            let needed = scope.peak();
            drop((scope, run));
            assert!(needed <= budget, "{needed} of {budget}, {items} items of {dtype:?}");
            assert!(
                needed >= budget / 2 || items == ITEMS,
                "{needed} of {budget}, {items} items of {dtype:?}"
            );
        }
        let sums = 4 * 2 * (WIDTH * WIDTH + WIDTH) as u64;
        for budget in [0, sums] {
            let part = |range| x.clone().slice(range);
            let refused = micro_batched_within(&net, part, ITEMS, budget, Net::loss);
            assert!(
                matches!(refused, Err(PlanError::Budget { budget: found, least }) if found == budget && least > sums)
            );
        }
        let none = micro_batched_within(&net, |range| x.clone().slice(range), 0, whole, Net::loss);
        assert!(matches!(none, Err(PlanError::Parts(PartsError::NoItems))));
    }
    // Not even one step is run.
    let norm: burn_memsave::nn::BatchNorm = BatchNormConfig::new(4).init(&device);
    let part = |_| -> Tensor<2> { panic!("nothing is measured") };
    let refused = micro_batched_within(&norm, part, 10, 1 << 30, |norm, x| norm.forward(x).mean());
    assert!(matches!(refused, Err(PlanError::Parts(PartsError::Running { .. }))));
}

#[test]
fn largest_batches() {
    let _alone = alone();
    // Steps, bends and limits.
    for (budget, limit, peak) in [
        (10_000, 7, (|items| 100 * items as u64) as fn(usize) -> u64),
        (10_000, 1000, |items| 100 * items as u64),
        (10_000, 1000, |items| (items as u64).pow(2)),
        (10_000, 1000, |items| 4096 * (items as u64).div_ceil(16)),
        (10_000, 1000, |_| 10_000),
        (10_000, 1000, |items| if items < 50 { 10 } else { 20_000 }),
        (u64::MAX, usize::MAX, |items| items as u64),
        (5, 1000, |_| 10),
        (5, 0, |_| 1),
    ] {
        let found = largest_batch(budget, limit, peak);
        let fits = |items: usize| items <= limit && peak(items) <= budget;
        match found {
            Some(items) => assert!(fits(items), "{items} of {budget}"),
            None => assert!(!fits(1)),
        }
        // Within what the line through two sizes can tell.
        let best = (1..=1000).take_while(|&items| fits(items)).last();
        assert!(found >= best.map(|best| best.saturating_sub(15)), "{found:?}, {best:?}");
    }
}

/// Halves after panics and errors that say so; others go on.
#[test]
fn what_runs_out_of_memory_is_halved() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let model = LinearConfig::new(4, 2).init(&device);
    let run = |most: usize, items: usize, words: &'static str, panics: bool| {
        let step = |items: usize| {
            if items > most && panics {
                panic!("{words} {items}");
            }
            if items > most {
                return Err(PlanError::Device(format!("{words} {items}")));
            }
            let parts = [(Tensor::<2>::ones([items, 4], &device), items)];
            micro_batched(&model, parts, |model, x| model.forward(x).mean())
        };
        retry_with_smaller_batch(&model, items, step)
    };
    for panics in [false, true] {
        let (items, loss, gradients) = run(20, 100, "out of device memory allocating", panics).unwrap();
        assert_eq!((items, loss.dims(), gradients.len()), (12, [1], 2));
        assert_eq!(run(100, 100, "", panics).unwrap().0, 100);
        assert!(matches!(run(0, 3, "wgpu error: Out of Memory", panics), Err(PlanError::OutOfMemory)));
        assert!(matches!(run(9, 0, "", panics), Err(PlanError::Parts(PartsError::NoItems))));
    }
    assert!(matches!(
        run(20, 100, "The device is poisoned: out of memory", false),
        Err(PlanError::Device(_))
    ));
    let other = catch_unwind(AssertUnwindSafe(|| run(20, 100, "no patience for", true)));
    assert!(other.is_err());
}
