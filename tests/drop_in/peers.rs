//! Faults of comparable libraries, which these layers must not have.
use burn::module::Module;
use burn::nn;
use burn::tensor::{Device, Distribution, Int, Tensor, TensorData};
use burn_memsave::layers::*;

fn autodiff() -> Device {
    Device::flex().autodiff()
}

/// A ReLU that multiplies by its mask turns an infinity into NaN.
#[test]
fn relu_passes_infinities() {
    let x =
        Tensor::<1>::from_floats([f32::INFINITY, f32::NEG_INFINITY, 1.0, -1.0], &autodiff()).require_grad();
    let y = MemSaveRelu::new().forward(x.clone());
    y.to_data().assert_eq(&TensorData::from([f32::INFINITY, 0.0, 1.0, 0.0]), true);
    let dy = Tensor::<1>::from_floats([2.0, f32::INFINITY, 3.0, f32::INFINITY], &autodiff());
    // (Not through `y * dy`, whose own gradient would be NaN where y is infinite.)
    let gradients = (y.mask_fill(y_is_infinite(), 0.0) * dy).sum().backward();
    assert_eq!(x.grad(&gradients).expect("tracked").to_data().iter::<f32>().collect::<Vec<_>>()[2], 3.0);
}

fn y_is_infinite() -> Tensor<1, burn::tensor::Bool> {
    Tensor::from_bool(TensorData::from([true, false, false, false]), &autodiff())
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
        let x = Tensor::<4>::random([2, 2, 7, 8], Distribution::Normal(0.0, 1.0), &autodiff()).require_grad();
        let [y, expected] = [ours.forward(x.clone()), stock.forward(x)];
        assert_eq!(y.dims(), [2, 3, 7usize.div_ceil(stride[0]), 8usize.div_ceil(stride[1])]);
        y.into_data().assert_eq(&expected.into_data(), true);
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
    let x = Tensor::<4>::random([2, 3, 9, 8], Distribution::Normal(0.0, 1.0), &autodiff()).require_grad();
    ours.forward(x.clone()).into_data().assert_eq(&stock.forward(x).into_data(), true);
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
    let close = burn::tensor::Tolerance::<f32>::rel_abs(1e-5, 1e-6);
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
        let close = burn::tensor::Tolerance::<f32>::rel_abs(1e-5, 1e-5);
        ours.0.assert_approx_eq::<f32>(&stock.0, close);
        ours.1.assert_approx_eq::<f32>(&stock.1, close);
    }
}
