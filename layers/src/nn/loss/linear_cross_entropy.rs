//! The head of a network and its cross entropy, fused: a dense layer whose logits are computed in chunks of rows.
use super::cross_entropy::{padding, sum_type, weights_of, zero_where_padded};
use super::{CrossEntropyLoss, CrossEntropyLossConfig};
use crate::functional::guard::{
    Fit, Misfit, is_quantized, is_tracked, report_misfit, require, require_bias, require_floats,
};
use crate::functional::{LinearCrossEntropyOptions, linear, linear_cross_entropy};
use crate::nn::Linear;
use burn::config::Config;
use burn::module::Module;
use burn::tensor::{Device, Int, Tensor};

/// Configuration of [`FusedLinearCrossEntropy`].
#[derive(Config, Debug)]
pub struct FusedLinearCrossEntropyConfig {
    /// Targets that do not count. They need not be classes: [`IGNORE_INDEX`](super::IGNORE_INDEX) is -100. If no target of a
    /// batch counts, its loss is NaN, the mean of nothing.
    pub pad_tokens: Option<Vec<usize>>,
    /// A weight for each class, in the order of the classes.
    pub weights: Option<Vec<f32>>,
    /// Label smoothing: labels `y` of 0 and 1 become `y (1 - a) + a / nr_classes`.
    pub smoothing: Option<f32>,
    /// How many bytes of logits exist at a time. These are at least one row; with a trainable head in half precision, at least
    /// 64 classes of all rows; with a trainable head and fewer rows than features, all logits. Default: 16 MiB, or more if a
    /// device needs more rows to be busy.
    pub chunk_bytes: Option<usize>,
}

/// The head of a network (a dense layer) and the [cross entropy](CrossEntropyLoss) of its outputs, fused: the logits are
/// computed in chunks of rows.
///
/// The forward pass computes the gradients of what is tracked, and keeps them: of `x`, and of the weight and the bias of a
/// trainable head. There are two exceptions:
///
/// - With a trainable head and fewer rows than features, it computes all logits at once and keeps their gradient. This is
///   smaller than the gradient of the weight, and than what stock keeps.
/// - Otherwise, with a trainable head in half precision, it keeps `x` instead of the weight's gradient, and recomputes the
///   logits in the backward pass: sums over many chunks would lose small contributions.
///
/// A [lazy](crate::frozen) head that is not to be read whole is read block by block, as in [`Linear::cross_entropy`].
///
/// For 2048 rows of 1024 features and 32000 classes, Burn's peak is 754 MiB; this layer's is 165 MiB, 125 MiB of which are the
/// gradient of the weight.
///
/// ```
/// use burn::tensor::{Device, Int, Tensor};
/// use burn_memsave_layers::nn::{LinearConfig, loss::FusedLinearCrossEntropyConfig};
///
/// let device = Device::flex().autodiff();
/// let head = LinearConfig::new(16, 1000).with_bias(false).init(&device);
/// let loss = FusedLinearCrossEntropyConfig::new().with_pad_tokens(Some(vec![0])).init(&device);
///
/// let x = Tensor::<3>::ones([2, 8, 16], &device); // batch, sequence, features
/// let targets = Tensor::<2, Int>::ones([2, 8], &device);
/// let loss = loss.forward(&head, x, targets);
/// let gradients = loss.backward();
/// assert_eq!(head.weight.grad(&gradients).unwrap().dims(), [16, 1000]);
/// ```
#[derive(Module, Debug)]
pub struct FusedLinearCrossEntropy {
    /// Pad tokens to ignore in the loss calculation.
    pub pad_tokens: Option<Vec<usize>>,
    /// The class weights.
    pub weights: Option<Tensor<1>>,
    /// Label smoothing factor.
    pub smoothing: Option<f32>,
    /// How many bytes of logits exist at a time; see [`FusedLinearCrossEntropyConfig`].
    pub chunk_bytes: Option<usize>,
}

impl FusedLinearCrossEntropyConfig {
    /// Initializes the module.
    ///
    /// # Panics
    ///
    /// Panics for the values that [`CrossEntropyLossConfig`] refuses, with its message.
    pub fn init(&self, device: &Device) -> FusedLinearCrossEntropy {
        let loss = CrossEntropyLossConfig::new()
            .with_pad_tokens(self.pad_tokens.clone())
            .with_weights(self.weights.clone())
            .with_smoothing(self.smoothing);
        let CrossEntropyLoss { pad_tokens, weights, smoothing, .. } = loss.init(device);
        FusedLinearCrossEntropy { pad_tokens, weights, smoothing, chunk_bytes: self.chunk_bytes }
    }
}

impl FusedLinearCrossEntropy {
    /// Computes the mean loss of `head.forward(x)`.
    ///
    /// # Shapes
    ///
    /// - x: `[..., d_input]`
    /// - targets: `[...]`, the shape of `x` without its last axis
    /// - output: `[1]`
    ///
    /// # Panics
    ///
    /// Panics if the shapes are not these. A target that is neither a class nor padding panics on CPU backends, and makes the
    /// loss NaN on wgpu and CUDA.
    pub fn forward<const D: usize, const T: usize>(
        &self,
        head: &Linear,
        x: Tensor<D>,
        targets: Tensor<T, Int>,
    ) -> Tensor<1> {
        let dims = x.dims();
        assert!(
            dims[..D - 1] == targets.dims(),
            "The shape of the targets, {:?}, must be that of x, {dims:?}, but for its last axis",
            targets.dims(),
        );
        let rows = dims[..D - 1].iter().product::<usize>();
        let x = x.reshape([rows, dims[D - 1]]);
        let targets = targets.reshape([rows]);
        let options = LinearCrossEntropyOptions {
            class_weights: self.weights.clone(),
            smoothing: self.smoothing,
            chunk_bytes: self.chunk_bytes,
            ..Default::default()
        };
        if head.is_read_by_blocks(&x, &options) {
            return self
                .mean(x, targets, options, |x, targets, options| head.cross_entropy(x, targets, options));
        }
        let (weight, bias) = (head.weight.val(), head.bias.as_ref().map(|bias| bias.val()));
        if let Err(misfit) = self.fits(&x, &weight, &bias) {
            if x.is_tracked() || weight.is_tracked() || is_tracked(&bias) {
                report_misfit("linear_cross_entropy", "linear and cross_entropy", misfit, Some(&weight));
            }
            let loss = CrossEntropyLoss {
                pad_tokens: self.pad_tokens.clone(),
                weights: self.weights.clone(),
                smoothing: self.smoothing,
                logits: true,
            };
            return loss.forward(linear(x, weight, bias), targets);
        }
        let class_weights = options.class_weights.map(|weights| weights.cast(x.dtype()));
        let options = LinearCrossEntropyOptions { class_weights, ..options };
        self.mean(x, targets, options, |x, targets, options| {
            linear_cross_entropy(x, weight, bias, targets, options)
        })
    }

    /// The mean of a loss over the rows that count.
    fn mean(
        &self,
        x: Tensor<2>,
        targets: Tensor<1, Int>,
        options: LinearCrossEntropyOptions,
        loss: impl FnOnce(Tensor<2>, Tensor<1, Int>, LinearCrossEntropyOptions) -> Tensor<1>,
    ) -> Tensor<1> {
        let mask = padding(&self.pad_tokens, &targets);
        if options.class_weights.is_none() && mask.is_none() {
            return loss(x, targets, options);
        }
        let (dtype, rows) = (sum_type(x.dtype()), x.dims()[0]);
        let ones = Tensor::ones([rows], (&x.device(), dtype));
        let weights = options.class_weights.clone();
        let count = weights.map_or(ones.clone(), |weights| weights_of(weights.cast(dtype), &targets));
        let total = zero_where_padded(count, &mask).sum();
        // If all rows are padding, the loss is NaN, as in stock; the factors are 0, because stock's gradient is 0.
        let inverse = total.clone().recip().mask_fill(total.clone().equal_scalar(0), 0);
        let factors = zero_where_padded(ones * inverse, &mask);
        let options = LinearCrossEntropyOptions { factors: Some(factors), ..options };
        let nothing = (total.clone().mul_scalar(0.0) / total).cast(x.dtype());
        loss(x, targets, options) + nothing
    }

    /// Whether head and loss can be fused. If not, they run one after the other, and the ledger says why.
    fn fits(&self, x: &Tensor<2>, weight: &Tensor<2>, bias: &Option<Tensor<1>>) -> Fit {
        let ([_, d_input], [weight_input, classes]) = (x.dims(), weight.dims());
        let shapes = d_input == weight_input
            && self.weights.as_ref().is_none_or(|weights| weights.dims() == [classes]);
        require_floats(x)?;
        require(classes > 0, Misfit::Empty)?;
        require(!is_quantized(weight), Misfit::Quantized)?;
        require(x.dtype() == weight.dtype(), Misfit::Dtypes)?;
        require_bias(bias, classes)?;
        require(bias.as_ref().is_none_or(|bias| bias.dtype() == x.dtype()), Misfit::Dtypes)?;
        require(shapes, Misfit::Shapes)?;
        require(!is_tracked(&self.weights), Misfit::TrackedClassWeights)
    }
}
