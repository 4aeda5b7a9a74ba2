//! Faults of comparable libraries, which these layers must not have.
use crate::refusals::refusal;
use burn::module::Module;
use burn::nn;
use burn::tensor::{
    Device, Distribution, Int, Tensor, TensorData, Tolerance, activation, module,
    ops::{ConvOptions, MaxPoolOptions},
};
use burn_memsave::functional as F;
use burn_memsave::layers::*;

fn autodiff() -> Device {
    Device::flex().autodiff()
}

/// Output and gradient of the input, of a loss that reads every element differently.
pub(crate) fn outcome<const D: usize>(
    x: &Tensor<D>,
    forward: impl Fn(Tensor<D>) -> Tensor<D>,
) -> [TensorData; 2] {
    let x = x.clone().require_grad();
    let y = forward(x.clone());
    let gradients = (y.clone() * y.clone()).sum().backward();
    [y.into_data(), x.grad(&gradients).expect("tracked").into_data()]
}

/// A ReLU that multiplies by its mask turns an infinity into NaN, of the input or of the gradient that comes in.
#[test]
fn relu_passes_infinities() {
    let infinity = f32::INFINITY;
    let x = Tensor::<1>::from_floats([infinity, -infinity, 1.0, -1.0, 2.0], &autodiff()).require_grad();
    let y = MemSaveRelu::new().forward(x.clone());
    y.to_data().assert_eq(&TensorData::from([infinity, 0.0, 1.0, 0.0, 2.0]), true);
    let dy = Tensor::<1>::from_floats([2.0, infinity, 3.0, infinity, infinity], &autodiff());
    let gradients = (y * dy).sum().backward();
    let dx = x.grad(&gradients).expect("tracked").into_data();
    dx.assert_eq(&TensorData::from([2.0, 0.0, 3.0, 0.0, infinity]), true);
}

/// Padding "same" with even kernels and strides.
#[test]
fn same_padding_of_even_kernels() {
    for (kernel, stride) in [([2, 4], [1, 1]), ([3, 2], [2, 3])] {
        let config = nn::conv::Conv2dConfig::new([2, 3], kernel)
            .with_stride(stride)
            .with_padding(nn::PaddingConfig2d::Same);
        let stock = config.init(&autodiff());
        let ours = MemSaveConv2d::from_nn_conv2d(stock.clone());
        let x = Tensor::<4>::random([2, 2, 7, 8], Distribution::Normal(0.0, 1.0), &autodiff());
        let [y, dx] = outcome(&x, |x| ours.forward(x));
        let [y_stock, dx_stock] = outcome(&x, |x| stock.forward(x));
        assert_eq!(y.shape().dims(), [2, 3, 7usize.div_ceil(stride[0]), 8usize.div_ceil(stride[1])]);
        for (ours, stock) in [(y, y_stock), (dx, dx_stock)] {
            ours.assert_approx_eq::<f32>(&stock, Tolerance::rel_abs(1e-5, 1e-5));
        }
    }
}

/// Conversion of a pool must not swap its arguments.
#[test]
fn pool_arguments_stay_in_place() {
    let stock = nn::pool::MaxPool2dConfig::new([3, 2])
        .with_strides([1, 2])
        .with_dilation([2, 1])
        .with_padding(nn::PaddingConfig2d::Explicit(1, 0, 1, 0))
        .with_ceil_mode(true)
        .init();
    let ours = MemSaveMaxPool2d::from_nn_max_pool2d(stock.clone());
    let x = Tensor::<4>::random([2, 3, 9, 8], Distribution::Normal(0.0, 1.0), &autodiff());
    let [y, dx] = outcome(&x, |x| ours.forward(x));
    let [y_stock, dx_stock] = outcome(&x, |x| stock.forward(x));
    y.assert_eq(&y_stock, true);
    dx.assert_approx_eq::<f32>(&dx_stock, Tolerance::rel_abs(1e-6, 1e-6));
}

/// Batch norm must count every training batch once, and none while frozen.
#[test]
fn batch_norm_updates_running_statistics_once() {
    let stock = nn::BatchNormConfig::new(3).with_momentum(0.3).init(&autodiff());
    let ours = MemSaveBatchNorm::from_nn_batch_norm(
        nn::BatchNormConfig::new(3).with_momentum(0.3).init(&autodiff()),
    );
    for _ in 0..3 {
        let x = Tensor::<3>::random([4, 3, 5], Distribution::Normal(1.0, 2.0), &autodiff()).require_grad();
        let [y, expected] = [ours.forward(x.clone()), stock.forward(x)];
        y.sum().backward();
        expected.sum().backward();
    }
    let close = Tolerance::<f32>::rel_abs(1e-5, 1e-6);
    let pairs = [(&ours.running_mean, &stock.running_mean), (&ours.running_var, &stock.running_var)];
    for (ours, stock) in pairs {
        ours.value_sync().into_data().assert_approx_eq::<f32>(&stock.value_sync().into_data(), close);
    }
    let before = ours.running_mean.value_sync().into_data();
    let frozen = ours.freeze();
    frozen.forward(Tensor::<3>::ones([4, 3, 5], &autodiff()).require_grad());
    frozen.running_mean.value_sync().into_data().assert_eq(&before, true);
}

/// Dropout's gradient is that of its own rate, in training only.
#[test]
fn dropout_replays_its_own_rate() {
    let x = Tensor::<1>::ones([4096], &autodiff()).require_grad();
    for rate in [0.1, 0.5, 0.9] {
        let y = MemSaveDropout::from_nn_dropout(nn::DropoutConfig::new(rate).init()).forward(x.clone());
        let gradients = y.clone().sum().backward();
        // With x = 1 the gradient is the output itself.
        x.grad(&gradients).expect("tracked").into_data().assert_eq(&y.clone().into_data(), true);
        let dropped = y.equal_elem(0.0).int().sum().into_scalar::<i64>() as f64 / 4096.0;
        assert!((dropped - rate).abs() < 0.05, "{dropped} dropped at a rate of {rate}");
    }
    let frozen = MemSaveDropout::from_nn_dropout(nn::DropoutConfig::new(0.5).init()).freeze();
    frozen.forward(x.clone()).into_data().assert_eq(&x.into_data(), true);
}

/// Converting a model with tied weights keeps them tied.
#[test]
fn tied_weights_stay_tied() {
    let device = autodiff();
    let embedding = nn::EmbeddingConfig::new(6, 4).init(&device);
    let mut head = nn::LinearConfig::new(4, 4).with_bias(false).init(&device);
    head.weight = embedding.weight.clone();
    let (embedding, head) =
        (MemSaveEmbedding::from_nn_embedding(embedding), MemSaveLinear::from_nn_linear(head));
    assert_eq!(embedding.weight.id, head.weight.id);
    let indices = Tensor::<2, Int>::from_ints([[0, 1, 5]], &device);
    let rows = embedding.forward(indices);
    let x = Tensor::<2>::ones([1, 6], &device);
    let loss = rows.sum() + head.forward(x).sum();
    let gradients = loss.backward();
    // One gradient for the shared tensor: 1 from every lookup, 1 from the product.
    let gradient = embedding.weight.val().grad(&gradients).expect("trainable").into_data();
    let row = |value: f32| [value; 4];
    gradient.assert_eq(&TensorData::from([row(2.0), row(2.0), row(1.0), row(1.0), row(1.0), row(2.0)]), true);
}

/// What is kept can be read by more than one consumer, under both checkpointing strategies.
#[test]
fn an_output_is_used_twice() {
    for device in [autodiff(), autodiff().gradient_checkpointing()] {
        let conv = nn::conv::Conv2dConfig::new([2, 2], [3, 3]).init(&device);
        let ours = MemSaveConv2d::from_nn_conv2d(conv.clone());
        let x = Tensor::<4>::random([1, 2, 6, 6], Distribution::Normal(0.0, 1.0), &device);
        let gradient = |forward: &dyn Fn(Tensor<4>) -> Tensor<4>, relu: &dyn Fn(Tensor<4>) -> Tensor<4>| {
            let x = x.clone().require_grad();
            let y = relu(forward(x.clone()));
            let gradients = (y.clone() * y.clone() + y.exp()).sum().backward();
            (
                x.grad(&gradients).expect("tracked").into_data(),
                conv.weight.val().grad(&gradients).expect("trainable").into_data(),
            )
        };
        let stock = gradient(&|x| conv.forward(x), &|x| nn::Relu::new().forward(x));
        let ours = gradient(&|x| ours.forward(x), &|x| MemSaveRelu::new().forward(x));
        let close = Tolerance::<f32>::rel_abs(1e-5, 1e-5);
        ours.0.assert_approx_eq::<f32>(&stock.0, close);
        ours.1.assert_approx_eq::<f32>(&stock.1, close);
    }
}

/// A convolution, a ReLU and a pool, of an input and of a weight.
type Trunk = fn(Tensor<4>, Tensor<4>) -> Tensor<4>;

const CONV: ConvOptions<2> =
    ConvOptions { stride: [1, 1], padding: [(1, 1), (1, 1)], dilation: [1, 1], groups: 1 };

const OURS: Trunk =
    |x, weight| F::max_pool2d(F::relu(F::conv2d(x, weight, None, CONV)), MaxPoolOptions::new([2, 2]));

const STOCK: Trunk = |x, weight| {
    module::max_pool2d(activation::relu(module::conv2d(x, weight, None, CONV)), MaxPoolOptions::new([2, 2]))
};

/// An input and a weight.
fn inputs(device: &Device) -> [Tensor<4>; 2] {
    let normal = Distribution::Normal(0.0, 0.3); // small enough that no exponential drowns the rest
    [[2, 3, 6, 6], [4, 3, 3, 3]].map(|shape| Tensor::random(shape, normal, device))
}

/// What the graph kept is given away by the first backward pass: the second is refused, as by stock, and not wrong.
#[test]
fn a_consumed_graph_is_refused() {
    for device in [autodiff(), autodiff().gradient_checkpointing()] {
        let [x, weight] = inputs(&device);
        let message = |trunk: Trunk| {
            let y = trunk(x.clone().require_grad(), weight.clone().require_grad());
            y.clone().sum().backward();
            let message = refusal(|| y.exp().sum().backward());
            message.replace(char::is_numeric, "") // without the name of the node
        };
        let (ours, stock) = (message(OURS), message(STOCK));
        assert!(ours.contains("graph tape has already been consumed"), "{ours}");
        assert_eq!(ours, stock);
    }
}

/// Two losses of one forward pass, combined as that refusal says.
#[test]
fn two_losses_are_combined() {
    for device in [autodiff(), autodiff().gradient_checkpointing()] {
        let inputs = inputs(&device);
        let gradients = |trunk: Trunk| {
            let [x, weight] = inputs.clone().map(Tensor::require_grad);
            let y = trunk(x.clone(), weight.clone());
            let (first, second) = (y.clone().powf_scalar(2.0).mean(), y.exp().sum() * 0.1);
            let gradients = (first + second).backward();
            [x, weight].map(|leaf| leaf.grad(&gradients).expect("tracked").into_data())
        };
        for (ours, stock) in gradients(OURS).iter().zip(&gradients(STOCK)) {
            ours.assert_approx_eq::<f32>(stock, Tolerance::rel_abs(1e-5, 1e-5));
        }
    }
}
