//! Compares attention and transformer modules with the stock modules that they are converted from: outputs, and the gradients of inputs
//! and of all parameters, for several choices of trainable ones. They compute in f64, so that differences are meaningful.
use crate::common::*;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::nn::{activation::ActivationConfig, attention as stock, transformer as stock_transformer};
use burn::tensor::{Bool, DType, Device, Gradients, Tensor, TensorData, Tolerance};
use burn_memsave::layers::*;
use burn_memsave::nn::{attention as ours, transformer as ours_transformer};

mod half;
mod multi_head_attention;

/// Which parameters are trainable.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Trainable {
    All,
    None,
    Even,
    Odd,
    Last,
}

const TRAINABLE: [Trainable; 5] =
    [Trainable::All, Trainable::None, Trainable::Even, Trainable::Odd, Trainable::Last];

/// Gives every parameter values that depend on its place.
struct Fill {
    trainable: Trainable,
    all: usize,
    next: usize,
}

impl ModuleMapper for Fill {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let index = self.next;
        self.next += 1;
        let trainable = match self.trainable {
            Trainable::All => true,
            Trainable::None => false,
            Trainable::Even => index.is_multiple_of(2),
            Trainable::Odd => !index.is_multiple_of(2),
            Trainable::Last => index + 1 == self.all,
        };
        let filled = param.map(|old| {
            let shape = old.dims();
            let values = uniform(shape.iter().product(), 1000 + index as u64, -0.5..0.7);
            tensor(values, &shape, &old.device(), DType::F64)
        });
        filled.set_require_grad(trainable)
    }
}

#[derive(Default)]
struct Count(usize);

impl ModuleVisitor for Count {
    fn visit_float<const D: usize>(&mut self, _: &Param<Tensor<D>>) {
        self.0 += 1;
    }
}

fn filled<M: Module>(module: M, trainable: Trainable) -> M {
    let mut count = Count::default();
    module.visit(&mut count);
    module.map(&mut Fill { trainable, all: count.0, next: 0 })
}

/// Collects gradients.
struct Collect<'a> {
    gradients: &'a Gradients,
    found: Vec<Option<TensorData>>,
}

impl ModuleVisitor for Collect<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.found.push(param.val().grad(self.gradients).map(Tensor::into_data));
    }
}

/// The outputs, and the gradients of the inputs and the parameters of a weighted sum of the outputs.
fn outcome<M: Module>(
    module: &M,
    inputs: &[Tensor<3>],
    forward: impl Fn(&M, &[Tensor<3>]) -> Vec<Tensor<3>>,
) -> Vec<Option<TensorData>> {
    let outputs = forward(module, inputs);
    let mut found: Vec<_> = outputs.iter().map(|y| Some(y.clone().into_data())).collect();
    let losses = outputs.into_iter().enumerate().map(|(index, y)| {
        let weights = uniform(y.shape().num_elements(), index as u64, -1.0..1.0);
        (tensor::<3>(weights, &y.dims(), &y.device(), DType::F64) * y).sum()
    });
    let loss = losses.reduce(|a, b| a + b).expect("there are outputs");
    if !loss.is_tracked() {
        return found;
    }
    let gradients = loss.backward();
    found.extend(inputs.iter().map(|x| x.grad(&gradients).map(Tensor::into_data)));
    let mut collect = Collect { gradients: &gradients, found };
    module.visit(&mut collect);
    collect.found
}

fn agree(what: &str, ours: Vec<Option<TensorData>>, stock: Vec<Option<TensorData>>) {
    assert_eq!(ours.len(), stock.len(), "{what}");
    for (index, pair) in ours.into_iter().zip(stock).enumerate() {
        match pair {
            (None, None) => {}
            (Some(ours), Some(stock)) => {
                let tolerance = Tolerance::<f64>::rel_abs(1e-6, 1e-8);
                let compare = || ours.assert_approx_eq::<f64>(&stock, tolerance);
                let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(compare));
                assert!(result.is_ok(), "{what}: tensor {index} differs");
            }
            (ours, stock) => panic!("{what}: tensor {index}: {} and {}", ours.is_some(), stock.is_some()),
        }
    }
}

/// Compares a stock module and ours made from it, for every backend, strategy, choice of trainable parameters and tracked
/// inputs; the same seed before both.
fn compare<S: Module, M: Module + From<S>>(
    what: &str,
    shapes: &[[usize; 3]],
    make: impl Fn(&Device) -> S,
    stock: impl Fn(&S, &[Tensor<3>]) -> Vec<Tensor<3>>,
    ours: impl Fn(&M, &[Tensor<3>]) -> Vec<Tensor<3>>,
) {
    let _generator = generator();
    for backend in Backend::ALL {
        let devices = backend.autodiff_devices().into_iter().chain([backend.device()]);
        for (device, trainable, tracked) in devices.flat_map(|device| {
            TRAINABLE.into_iter().flat_map(move |t| [(device.clone(), t, true), (device.clone(), t, false)])
        }) {
            let module = filled(make(&device), trainable);
            let converted = M::from(module.clone());
            let inputs: Vec<Tensor<3>> = shapes
                .iter()
                .enumerate()
                .map(|(index, shape)| {
                    let values = uniform(shape.iter().product(), 77 + index as u64, -1.0..1.0);
                    let input = tensor(values, shape, &device, DType::F64);
                    if tracked && device.is_autodiff() { input.require_grad() } else { input }
                })
                .collect();
            device.seed(5);
            let expected = outcome(&module, &inputs, &stock);
            device.seed(5);
            let found = outcome(&converted, &inputs, &ours);
            agree(&format!("{what}, {device:?}, {trainable:?}, input tracked: {tracked}"), found, expected);
        }
    }
}

fn mask<const D: usize>(shape: [usize; D], device: &Device, seed: u64) -> Tensor<D, Bool> {
    let hidden = uniform(shape.iter().product(), seed, 0.0..3.0).into_iter().map(|v| v < 1.0);
    Tensor::from_data(TensorData::new(hidden.collect::<Vec<_>>(), shape), device)
}

mod cross_attention {
    use super::*;

    #[test]
    fn equals_stock() {
        for (heads, shared) in [(4, 4), (4, 2), (4, 1), (1, 1)] {
            for (dropout, quiet, masked) in [(0.0, false, true), (0.0, true, false), (0.3, false, true)] {
                let config = stock::CrossAttentionConfig::new(6, 5, heads, shared, 3);
                let config = config.with_dropout(dropout).with_quiet_softmax(quiet);
                let hide = |x: &[Tensor<3>]| masked.then(|| mask([2, 7], &x[0].device(), 3));
                compare::<_, MemSaveCrossAttention>(
                    &config.to_string(),
                    &[[2, 5, 6], [2, 7, 5]],
                    |device| config.init(device),
                    |layer, x| vec![layer.forward(x[0].clone(), x[1].clone(), hide(x))],
                    |layer, x| vec![layer.forward(x[0].clone(), x[1].clone(), hide(x))],
                );
            }
        }
    }

    /// Chunks of some heads of a group, then of all; the weights are dropped in the order of stock's.
    #[test]
    fn drops_what_stock_drops_in_chunks() {
        for heads in [12, 6] {
            let config = stock::CrossAttentionConfig::new(6, 5, heads, 2, 3).with_dropout(0.3);
            compare::<_, MemSaveCrossAttention>(
                &config.to_string(),
                &[[1, 100, 6], [1, 700, 5]],
                |device| config.init(device),
                |layer, x| vec![layer.forward(x[0].clone(), x[1].clone(), None)],
                |layer, x| vec![layer.forward(x[0].clone(), x[1].clone(), None)],
            );
        }
    }

    #[test]
    fn caches_the_context() {
        let config = stock::CrossAttentionConfig::new(6, 5, 4, 2, 3).with_dropout(0.0);
        macro_rules! forward {
            ($namespace:ident) => {
                |layer, x| {
                    let mut cache = $namespace::CrossAttentionCache::new();
                    let first = layer.forward_cache(x[0].clone(), x[1].clone(), None, &mut cache);
                    let second =
                        layer.forward_cache(x[0].clone() * 2.0, x[1].clone() * 3.0, None, &mut cache);
                    vec![first, second]
                }
            };
        }
        compare::<_, MemSaveCrossAttention>(
            "cached",
            &[[2, 5, 6], [2, 7, 5]],
            |device| config.init(device),
            forward!(stock),
            forward!(ours),
        );
    }
}

mod encoder {
    use super::*;

    fn run(config: &stock_transformer::TransformerEncoderConfig, masked: bool) {
        macro_rules! forward {
            ($namespace:ident) => {
                |encoder, x| {
                    let mut input = $namespace::TransformerEncoderInput::new(x[0].clone());
                    if masked {
                        let device = x[0].device();
                        input =
                            input.mask_pad(mask([2, 5], &device, 1)).mask_attn(mask([2, 5, 5], &device, 2));
                    }
                    vec![encoder.forward(input)]
                }
            };
        }
        compare::<_, MemSaveTransformerEncoder>(
            &config.to_string(),
            &[[2, 5, 6]],
            |device| config.init(device),
            forward!(stock_transformer),
            forward!(ours_transformer),
        );
    }

    #[test]
    fn equals_stock() {
        // (NdArray approximates the error function of Gelu.)
        let config = stock_transformer::TransformerEncoderConfig::new(6, 8, 2, 2);
        let config = config.with_activation(ActivationConfig::Relu);
        for norm_first in [false, true] {
            run(&config.clone().with_norm_first(norm_first).with_dropout(0.0), true);
            run(&config.clone().with_norm_first(norm_first).with_dropout(0.2), false);
        }
        run(&config.with_activation(ActivationConfig::Tanh).with_dropout(0.0), false);
    }

    #[test]
    fn generates_as_stock() {
        for norm_first in [false, true] {
            let config = stock_transformer::TransformerEncoderConfig::new(6, 8, 2, 2)
                .with_activation(ActivationConfig::Relu)
                .with_norm_first(norm_first)
                .with_dropout(0.0);
            macro_rules! forward {
                ($namespace:ident) => {
                    |encoder, x| {
                        let mut cache = encoder.new_autoregressive_cache();
                        let step = |length| {
                            let input = x[0].clone().slice_dim(1, 0..length);
                            let hidden = Tensor::<2, Bool>::tril_mask([length, length], 0, &x[0].device());
                            let input = $namespace::TransformerEncoderInput::new(input)
                                .mask_attn(hidden.expand([2, length, length]));
                            encoder.forward_autoregressive_inference(input, &mut cache)
                        };
                        (2..=5).map(step).collect()
                    }
                };
            }
            compare::<_, MemSaveTransformerEncoder>(
                "generating",
                &[[2, 5, 6]],
                |device| config.init(device),
                forward!(stock_transformer),
                forward!(ours_transformer),
            );
        }
    }
}

mod decoder {
    use super::*;

    #[test]
    fn equals_stock() {
        for (norm_first, dropout, masked) in [(false, 0.0, true), (true, 0.0, true), (true, 0.2, false)] {
            let config = stock_transformer::TransformerDecoderConfig::new(6, 8, 2, 2)
                .with_activation(ActivationConfig::Relu)
                .with_norm_first(norm_first)
                .with_dropout(dropout);
            macro_rules! forward {
                ($namespace:ident) => {
                    |decoder, x| {
                        let device = x[0].device();
                        let mut input = $namespace::TransformerDecoderInput::new(x[0].clone(), x[1].clone());
                        if masked {
                            input = input
                                .target_mask_pad(mask([2, 5], &device, 1))
                                .target_mask_attn(mask([2, 5, 5], &device, 2))
                                .memory_mask_pad(mask([2, 7], &device, 3))
                                .memory_mask_attn(mask([2, 5, 7], &device, 4));
                        }
                        vec![decoder.forward(input)]
                    }
                };
            }
            compare::<_, MemSaveTransformerDecoder>(
                &config.to_string(),
                &[[2, 5, 6], [2, 7, 6]],
                |device| config.init(device),
                forward!(stock_transformer),
                forward!(ours_transformer),
            );
        }
    }

    #[test]
    fn generates_as_stock() {
        for norm_first in [false, true] {
            let config = stock_transformer::TransformerDecoderConfig::new(6, 8, 2, 2)
                .with_activation(ActivationConfig::Relu)
                .with_norm_first(norm_first)
                .with_dropout(0.0);
            macro_rules! forward {
                ($namespace:ident) => {
                    |decoder, x| {
                        let mut cache = decoder.new_autoregressive_cache();
                        let step = |length| {
                            let target = x[0].clone().slice_dim(1, 0..length);
                            let hidden = Tensor::<2, Bool>::tril_mask([length, length], 0, &x[0].device());
                            let input = $namespace::TransformerDecoderInput::new(target, x[1].clone())
                                .target_mask_attn(hidden.expand([2, length, length]));
                            decoder.forward_autoregressive_inference(input, &mut cache)
                        };
                        (1..=4).map(step).collect()
                    }
                };
            }
            compare::<_, MemSaveTransformerDecoder>(
                "generating",
                &[[2, 4, 6], [2, 7, 6]],
                |device| config.init(device),
                forward!(stock_transformer),
                forward!(ours_transformer),
            );
        }
    }
}

mod rotary_encoding {
    use super::*;
    use burn::nn::RotaryEncodingConfig;

    fn layers(
        device: &Device,
        positions: usize,
        features: usize,
    ) -> (burn::nn::RotaryEncoding, MemSaveRotaryEncoding) {
        let stock = RotaryEncodingConfig::new(positions, features).with_theta(100.0).init(device);
        (stock.clone(), stock.into())
    }

    #[test]
    fn equals_stock() {
        let sizes = [1..3usize, 1..4, 1..9, 1..5];
        for_all(64, (sizes, 0..3usize, settings()), |([batch, heads, positions, pairs], start, setting)| {
            // The factors of stock are in f32.
            let setting = Setting { dtype: DType::F32, ..setting };
            let inputs = [Input::random([batch, heads, positions, 2 * pairs])];
            Check::new(inputs, setting)
                .compare::<4>(&|t| layers(t.device(), 12, 2 * pairs).1.apply(t.get::<4>(0), start), &|t| {
                    layers(t.device(), 12, 2 * pairs).0.apply(t.get::<4>(0), start)
                });
            let inputs = [Input::random([positions, 2 * pairs])];
            Check::new(inputs, setting)
                .compare::<2>(&|t| layers(t.device(), positions, 2 * pairs).1.forward(t.get::<2>(0)), &|t| {
                    layers(t.device(), positions, 2 * pairs).0.forward(t.get::<2>(0))
                });
        });
    }

    /// Any factors, not only those of rotations.
    #[test]
    fn is_differentiated() {
        let factors =
            |t: &Operands| tensor::<3>(uniform(5 * 6 * 2, 9, -1.0..1.0), &[5, 6, 2], t.device(), DType::F64);
        let check = Check::new([Input::random([2, 3, 5, 6])], Setting::default());
        check.differentiate::<4>(&|t| burn_memsave::functional::rotary_encoding(t.get(0), factors(t)));
        check.differentiate::<4>(&|t| burn_memsave::functional::rotary_encoding_halves(t.get(0), factors(t)));
    }

    /// Features `i` and `i + pairs` are a pair: that is Burn's encoding of features in another order.
    #[test]
    fn of_halves_equals_stock_of_other_features() {
        let sizes = [1..3usize, 1..4, 1..9, 1..5];
        for_all(64, (sizes, 0..3usize, settings()), |([batch, heads, positions, pairs], start, setting)| {
            let setting = Setting { dtype: DType::F32, ..setting };
            let shape = [batch, heads, positions, 2 * pairs];
            let ordered = |x: Tensor<4>, [from, to]: [usize; 2]| {
                x.reshape([batch, heads, positions, from, to]).swap_dims(3, 4).reshape(shape)
            };
            Check::new([Input::random(shape)], setting).compare::<4>(
                &|t| layers(t.device(), 12, 2 * pairs).1.apply_halves(t.get::<4>(0), start),
                &|t| {
                    let adjacent = ordered(t.get::<4>(0), [2, pairs]);
                    ordered(layers(t.device(), 12, 2 * pairs).0.apply(adjacent, start), [pairs, 2])
                },
            );
        });
    }

    /// A table in f32 is read as it is: the only rounding to half precision is that of the results.
    #[test]
    fn of_half_precision_takes_the_table_as_it_is() {
        let device = Device::flex().autodiff();
        let encoding = layers(&device, 5, 6).1;
        for (dtype, half_a_unit) in [(DType::F16, 2f64.powi(-11)), (DType::BF16, 2f64.powi(-8))] {
            for halves in [false, true] {
                let [x, dy] = [3, 4]
                    .map(|seed| tensor::<4>(uniform(180, seed, -1.0..1.0), &[2, 3, 5, 6], &device, dtype));
                let [rounded, exact] = [dtype, DType::F64].map(|dtype| {
                    let x = x.clone().cast(dtype).require_grad();
                    let y =
                        if halves { encoding.forward_halves(x.clone()) } else { encoding.forward(x.clone()) };
                    let gradients = (y.clone() * dy.clone().cast(dtype)).sum().backward();
                    [y.into_data(), x.grad(&gradients).unwrap().into_data()]
                });
                for (name, rounded, exact) in [("y", &rounded[0], &exact[0]), ("dx", &rounded[1], &exact[1])]
                {
                    for (rounded, exact) in rounded.iter::<f64>().zip(exact.iter::<f64>()) {
                        let bound = half_a_unit * exact.abs() + 1e-6;
                        assert!(
                            (rounded - exact).abs() <= bound,
                            "{dtype:?} {name}: {rounded}, exactly {exact}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn moves_its_window_as_stock() {
        let device = Device::flex();
        let (mut stock, mut ours) = layers(&device, 4, 6);
        let x = Tensor::<3>::ones([2, 4, 6], &device);
        for start in [3, 4, 20] {
            stock.shift(start);
            ours.shift(start);
            let back = MemSaveRotaryEncoding::from(ours.clone().into_nn_rotary_encoding());
            for ours in [&ours, &back] {
                let (ours, stock) = (ours.forward(x.clone()), stock.forward(x.clone()));
                ours.into_data().assert_approx_eq::<f32>(&stock.into_data(), Tolerance::default());
            }
            ours = back;
        }
        ours.reset();
        let first = layers(&device, 4, 6).0.forward(x.clone()).into_data();
        ours.forward(x).into_data().assert_approx_eq::<f32>(&first, Tolerance::default());
    }

    #[test]
    #[should_panic(expected = "the longest sequence has 4")]
    fn a_sequence_that_is_too_long_is_refused() {
        let device = Device::flex();
        layers(&device, 4, 6).1.forward(Tensor::<2>::ones([5, 6], &device));
    }
}
