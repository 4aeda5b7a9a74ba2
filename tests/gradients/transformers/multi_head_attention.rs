//! Compares multi-head attention with stock, for a batch of 2 and keys of another length. Rows that are fully masked have equal weights.
use super::*;
use burn::tensor::Distribution;
use rayon::prelude::*;

fn run(config: &stock::MultiHeadAttentionConfig, pad: bool, attn: bool, reads_weights: bool) {
    macro_rules! forward {
        ($namespace:ident) => {
            |layer, x| {
                let mut input = $namespace::MhaInput::new(x[0].clone(), x[1].clone(), x[2].clone());
                let device = x[0].device();
                if pad {
                    let all = Tensor::<1>::from_floats([1.0, 0.0], &device).equal_elem(1.0);
                    let all = all.unsqueeze_dim::<2>(1).expand([2, 7]);
                    input = input.mask_pad(mask([2, 7], &device, 3).bool_or(all));
                }
                if attn {
                    input = input.mask_attn(mask([2, 5, 7], &device, 4));
                }
                let output = layer.forward(input);
                let mut outputs = vec![output.context];
                if reads_weights {
                    let [batch, heads, queries, keys] = output.weights.dims();
                    outputs.push(output.weights.reshape([batch * heads, queries, keys]));
                }
                outputs
            }
        };
    }
    compare::<_, MemSaveMultiHeadAttention>(
        &format!("{config}, pad {pad}, attn {attn}, weights {reads_weights}"),
        &[[2, 5, 6], [2, 7, 6], [2, 7, 6]],
        |device| config.init(device),
        forward!(stock),
        forward!(ours),
    );
}

#[test]
fn equals_stock() {
    let config = stock::MultiHeadAttentionConfig::new(6, 3);
    for (pad, attn) in [(false, false), (true, false), (false, true), (true, true)] {
        run(&config.clone().with_dropout(0.0), pad, attn, false);
        run(&config.clone().with_dropout(0.0).with_quiet_softmax(true), pad, attn, false);
    }
    let no_bias = config.with_key_bias(false).with_value_bias(false).with_query_bias(false);
    run(&no_bias.with_output_bias(false).with_dropout(0.0), false, false, false);
}

/// The queries and keys of the heads, which are merged, are untracked then, and the values are not. The second input has weights of
/// several chunks, which are kept all the same.
#[test]
fn equals_stock_where_only_values_and_output_are_trained() {
    let _generator = generator();
    for shape @ [batch, length, features] in [[2, 5, 6], [80, 60, 64]] {
        macro_rules! forward {
            ($namespace:ident) => {
                |layer, x: &[Tensor<3>]| {
                    let input = $namespace::MhaInput::self_attn(x[0].clone());
                    let hidden = mask([batch, length, length], &x[0].device(), 4);
                    vec![layer.forward(input.mask_attn(hidden)).context]
                }
            };
        }
        for (backend, dropout) in Backend::ALL.into_iter().flat_map(|b| [(b, 0.0), (b, 0.3)]) {
            for (device, output) in
                backend.autodiff_devices().into_iter().flat_map(|d| [(d.clone(), true), (d, false)])
            {
                let config = stock::MultiHeadAttentionConfig::new(features, 2).with_dropout(dropout);
                let mut layer = filled(config.init(&device), Trainable::All);
                [layer.query, layer.key] = [layer.query, layer.key].map(Module::no_grad);
                layer.output = if output { layer.output } else { layer.output.no_grad() };
                let converted = MemSaveMultiHeadAttention::from(layer.clone());
                let x = uniform(shape.iter().product(), 77, -1.0..1.0);
                let x = [tensor::<3>(x, &shape, &device, DType::F64)];
                device.seed(5);
                let expected = outcome(&layer, &x, forward!(stock));
                // The context, no gradient of x, and of the projections those of weight and bias.
                let there: Vec<bool> = expected.iter().map(Option::is_some).collect();
                assert_eq!(there, [true, false, false, false, false, false, true, true, output, output]);
                device.seed(5);
                let found = outcome(&converted, &x, forward!(ours));
                let case = format!("{shape:?}, {device:?}, dropout {dropout}, output trained: {output}");
                agree(&case, found, expected);
            }
        }
    }
}

#[test]
fn drops_what_stock_drops() {
    let config = stock::MultiHeadAttentionConfig::new(6, 2).with_dropout(0.3);
    run(&config, false, false, false);
    run(&config, true, true, true);
}

#[test]
fn has_the_weights_of_stock() {
    let config = stock::MultiHeadAttentionConfig::new(6, 1).with_dropout(0.0);
    run(&config, false, true, true);
    run(&config.with_quiet_softmax(true), true, true, true);
}

/// With a cache a dropped weight is one of all positions, read or not.
#[test]
fn drops_what_stock_drops_with_a_cache() {
    const LENGTH: usize = 40; // more than one block of random numbers
    for dropout in [0.0, 0.4] {
        let config = stock::MultiHeadAttentionConfig::new(6, 2).with_dropout(dropout);
        macro_rules! forward {
            ($namespace:ident) => {
                |layer, x| {
                    let mut cache = $namespace::MhaCache::autoregressive();
                    let step = |length| {
                        let input = $namespace::MhaInput::self_attn(x[0].clone().slice_dim(1, 0..length));
                        let output = layer.forward_cache(input, &mut cache);
                        let weights = output.weights.reshape([2 * 2, length, length]);
                        [output.context, weights]
                    };
                    (LENGTH - 2..=LENGTH).flat_map(step).collect()
                }
            };
        }
        compare::<_, MemSaveMultiHeadAttention>(
            &format!("cached, dropout {dropout}"),
            &[[2, LENGTH, 6]],
            |device| config.init(device),
            forward!(stock),
            forward!(ours),
        );
    }
}

/// What is written for a tensor compiles for the weights: methods that take them by value, operators, formatting.
#[test]
fn the_weights_do_what_a_tensor_does() {
    macro_rules! forward {
        ($namespace:ident) => {
            |layer, x| {
                let run = || layer.forward($namespace::MhaInput::self_attn(x[0].clone()));
                let _ = (run().weights.to_string(), format!("{:?}", run().weights));
                let [first, second] = [run(), run()];
                let copy = first.clone();
                let other: Tensor<4> = Tensor::from(copy.weights);
                let doubled: Tensor<4> = 2.0 * run().weights;
                let mut changed = run();
                changed.weights.inplace(|weights| weights * 3.0);
                vec![
                    first.weights.mean_dim(3).squeeze_dim::<3>(3),
                    second.weights.swap_dims(1, 2).flatten::<3>(2, 3),
                    (doubled - run().weights / other.clone()).sum_dims_squeeze(&[1]),
                    (other - run().weights + 1.0).select_dim::<3>(1, 0),
                    (-run().weights).max_dim(1).squeeze(),
                    run().weights.reshape([4, 5, 5]).matmul(changed.weights.reshape([4, 5, 5])),
                ]
            }
        };
    }
    let config = stock::MultiHeadAttentionConfig::new(6, 2).with_dropout(0.0);
    compare::<_, MemSaveMultiHeadAttention>(
        "weights",
        &[[2, 5, 6]],
        |device| config.init(device),
        forward!(stock),
        forward!(ours),
    );
    compare::<_, MemSaveMultiHeadAttention>(
        "weights of the output of stock",
        &[[2, 5, 6]],
        |device| config.init(device),
        |layer, x| vec![layer.forward(stock::MhaInput::self_attn(x[0].clone())).weights.select_dim(1, 0)],
        |layer, x| {
            let output: stock::MhaOutput = layer.forward(ours::MhaInput::self_attn(x[0].clone())).into();
            let weights: Tensor<4> = output.weights;
            vec![weights.select_dim(1, 0)]
        },
    );
}

#[test]
fn clones_share_their_weights() {
    let _generator = generator();
    let device = Device::flex();
    let layer = MemSaveMultiHeadAttention::from(stock::MultiHeadAttentionConfig::new(4, 2).init(&device));
    let output = layer.forward(ours::MhaInput::self_attn(Tensor::ones([2, 3, 4], &device)));
    let copy = output.clone();
    let weights: [&Tensor<4>; 2] = [&output.weights, &copy.weights];
    assert!(core::ptr::eq(weights[0], weights[1]));
}

#[test]
fn one_seen_or_none() {
    let config = stock::MultiHeadAttentionConfig::new(4, 4).with_dropout(0.0);
    for shapes in [[[1, 1, 4]; 3], [[3, 1, 4], [3, 9, 4], [3, 9, 4]]] {
        compare::<_, MemSaveMultiHeadAttention>(
            "one query",
            &shapes,
            |device| config.init(device),
            |layer, x| {
                let input = stock::MhaInput::new(x[0].clone(), x[1].clone(), x[2].clone());
                vec![layer.forward(input).context]
            },
            |layer, x| {
                let input = ours::MhaInput::new(x[0].clone(), x[1].clone(), x[2].clone());
                vec![layer.forward(input).context]
            },
        );
    }
    let _generator = generator();
    let device = Device::flex().autodiff();
    let layer = MemSaveMultiHeadAttention::from(config.init(&device));
    let x = Tensor::<3>::zeros([0, 3, 4], &device).require_grad();
    assert_eq!(layer.forward(ours::MhaInput::self_attn(x)).context.dims(), [0, 3, 4]);
}

/// Without keys the context is the bias of the output, whatever the queries are; also where their sum overflows.
#[test]
fn no_keys_have_no_weight() {
    let _generator = generator();
    for (backend, dtype) in
        [(Backend::Flex, DType::F16), (Backend::Flex, DType::F32), (Backend::NdArray, DType::F32)]
    {
        if !Backend::ALL.contains(&backend) {
            continue;
        }
        for device in backend.autodiff_devices() {
            let config = stock::MultiHeadAttentionConfig::new(4, 2).with_dropout(0.0);
            let layer = config.init(&device).map(&mut Cast(dtype));
            let layer = MemSaveMultiHeadAttention::from(layer);
            for large in [1e4, f64::INFINITY] {
                let query = Tensor::<3>::full([1, 9, 4], large, (&device, dtype)).require_grad();
                let keys = Tensor::<3>::zeros([1, 0, 4], (&device, dtype));
                let output = layer.forward(ours::MhaInput::new(query.clone(), keys.clone(), keys)).context;
                let bias = numbers(&layer.output.bias.as_ref().expect("a bias").val().into_data());
                for position in numbers(&output.to_data()).chunks(4) {
                    assert_eq!(position, bias, "{device:?}, {dtype:?}, {large}");
                }
                let gradients = output.sum().backward();
                let dquery = query.grad(&gradients).expect("tracked").into_data();
                assert!(
                    numbers(&dquery).iter().all(|dquery| *dquery == 0.0),
                    "{device:?}, {dtype:?}, {large}"
                );
            }
        }
    }
}

/// Every parameter in a dtype.
struct Cast(DType);

impl ModuleMapper for Cast {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|old| old.detach().set_require_grad(false).cast(self.0).require_grad())
    }
}

#[test]
#[should_panic(expected = "axis 1")]
fn a_mask_of_another_length_is_refused() {
    let _generator = generator();
    let device = Device::flex();
    let layer = MemSaveMultiHeadAttention::from(stock::MultiHeadAttentionConfig::new(4, 2).init(&device));
    let input = ours::MhaInput::self_attn(Tensor::zeros([2, 3, 4], &device));
    layer.forward(input.mask_pad(mask([2, 4], &device, 1)));
}

/// In a pool of threads, whoever waits for a part of the weights may begin with another task, which reads the same weights.
#[test]
fn a_pool_of_threads_reads_weights() {
    let _generator = generator();
    let device = Device::flex().autodiff();
    let attention = ours::MultiHeadAttentionConfig::new(32, 4).with_dropout(0.0).init(&device);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().expect("two threads");
    for _ in 0..10 {
        let x = Tensor::<3>::random([4, 64, 32], Distribution::Default, &device);
        let run = || attention.forward(ours::MhaInput::self_attn(x.clone())).weights;
        let (expected, weights) = (run().into_tensor().into_data(), run());
        let read = |_: usize| weights.clone().into_tensor().into_data();
        let found: Vec<TensorData> = pool.install(|| (0..32).into_par_iter().map(read).collect());
        assert!(found.iter().all(|found| *found == expected));
    }
}
