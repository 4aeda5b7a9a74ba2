//! The dense layer, which reads frozen, quantized, lazy and adapted weights.
use crate::frozen::{Adapted, adapted, column_blocks, packed_product};
use crate::functional::{self, LinearCrossEntropyOptions, cross_entropy_by_blocks, fits_blocks};
use crate::nn::drop_in::{config_twin, drop_in};
use burn::config::Config;
use burn::module::{LoraAdapter, Module, Param};
use burn::nn::{Initializer, LinearLayout};
use burn::tensor::{Device, Int, Tensor, assert_shape};

config_twin! {
    #[derive(Config, Debug)]
    pub struct LinearConfig = burn::nn::LinearConfig {
        /// The size of the input features.
        pub d_input: usize,
        /// The size of the output features.
        pub d_output: usize,
        /// If a bias should be applied during the linear transformation.
        #[config(default = true)]
        pub bias: bool,
        /// The type of function used to initialize neural network parameters
        #[config(
            default = "Initializer::KaimingUniform{gain:1.0/num_traits::Float::sqrt(3.0), fan_out_only:false}"
        )]
        pub initializer: Initializer,
        /// The layout in which the linear parameters are stored.
        #[config(default = "LinearLayout::Row")]
        pub layout: LinearLayout,
    }
    pub fn init(&self, device: &Device) -> Linear;
}

drop_in! {
    /// Dense layer, `y = x weight + bias`.
    ///
    /// For the backward pass it keeps `x` `[..., d_input]` if the weight is trainable, a handle of the weight if `x` is
    /// tracked, and nothing else. [`burn::nn::Linear`] keeps the same, but its backward pass builds one weight gradient per
    /// batch row: its peak is 576 MiB where this one's is 96 MiB (1024 features, 64 x 128 rows).
    ///
    /// With a [LoRA adapter](burn::module::LoraAdapter), which [`Module::apply_lora`] attaches, the effective weight and its
    /// gradient are not computed unless the rank reaches `d_input` or `d_output`: see [`linear_lora`](functional::linear_lora),
    /// and [`linear_dora`](functional::linear_dora) for [DoRA](crate::lora::Dora). A quantized weight stays packed. A
    /// [lazy](crate::frozen) weight in PyTorch's layout that is larger than the budget, such as the head of a language model, is
    /// read, multiplied and dropped block by block, in the backward pass, too. It is read whole if it has an adapter, if the input
    /// has more rows than features, or if a tracked input has half precision, whose gradient would be rounded once per block. A weight that
    /// is packed in its file (in four bits, for example) is unpacked part by part for a product of up to 32 rows on a CPU that no
    /// gradient needs, and is never in memory as a whole.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave_layers::nn::LinearConfig;
    ///
    /// let device = Device::flex();
    /// let linear = LinearConfig::new(4, 8).init(&device);
    /// assert_eq!(linear.forward(Tensor::<3>::ones([2, 3, 4], &device)).dims(), [2, 3, 8]);
    /// ```
    #[derive(Module, Debug)]
    pub struct Linear as MemSaveLinear = burn::nn::Linear, from_nn_linear, into_nn_linear {
        /// Matrix of shape `[d_input, d_output]` initialized from a uniform distribution:
        ///     `U(-k, k)`, where `k = sqrt(1 / d_input)`
        pub weight: Param<Tensor<2>>,
        /// Vector of size `d_output` initialized from a uniform distribution:
        ///     `U(-k, k)`, where `k = sqrt(1 / d_input)`
        pub bias: Option<Param<Tensor<1>>>,
    }
}

impl Linear {
    /// Applies the layer.
    ///
    /// # Shapes
    ///
    /// - input: `[..., d_input]`
    /// - output: `[..., d_output]`
    ///
    /// # Panics
    ///
    /// Panics if the last axis of `input` is not `d_input`.
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        let bias = self.bias.as_ref().map(|bias| bias.val());
        if let Some((product, adapter)) = packed_product(&self.weight, &input) {
            let product = match adapter {
                Some(LoraAdapter { a, b, scale, .. }) => {
                    let narrow = functional::linear(input, a.val(), None);
                    product + functional::linear(narrow, b.val(), None) * *scale
                }
                None => product,
            };
            return match bias {
                Some(bias) => product + bias.unsqueeze(),
                None => product,
            };
        }
        if let Some(blocks) = column_blocks(&self.weight)
            && pays_by_blocks(&input, self.weight.lazy_shape()[0])
        {
            return by_blocks(input, blocks, bias);
        }
        let adapted = adapted(&self.weight);
        let [d_input, _] = adapted.weight().dims();
        assert_shape!(input, [.., d_input]);
        match adapted {
            Adapted::Plain(weight) => functional::linear(input, weight, bias),
            Adapted::Lora(weight, adapter) => functional::linear_lora(input, weight, adapter, bias),
            Adapted::Dora(weight, adapter) => functional::linear_dora(input, weight, adapter, bias),
        }
    }

    /// The [cross entropy](functional::linear_cross_entropy) of the outputs, as the head of a network, computed in chunks.
    ///
    /// A [lazy](crate::frozen) weight that is not to be read whole is read once, block by block, unless it has an adapter, `x` is in f16, the
    /// bias is tracked, or the options have smoothing or class weights. The gradient of `x` is computed with the loss, as from any frozen
    /// weight. Meanwhile there are five tensors of the size of `x`, in f32 at least, and chunks of logits take three times their bytes.
    ///
    /// ```
    /// use burn::tensor::{Device, Int, Tensor, Tolerance};
    /// use burn_memsave_layers::nn::{LinearConfig, loss::CrossEntropyLossConfig};
    ///
    /// let device = Device::flex();
    /// let head = LinearConfig::new(4, 10).init(&device);
    /// let (x, targets) = (Tensor::<2>::ones([3, 4], &device), Tensor::<1, Int>::from_ints([1, 9, 0], &device));
    /// let loss = head.cross_entropy(x.clone(), targets.clone(), Default::default());
    /// let expected = CrossEntropyLossConfig::new().init(&device).forward(head.forward(x), targets);
    /// loss.into_data().assert_approx_eq::<f32>(&expected.into_data(), Tolerance::default());
    /// ```
    ///
    /// # Shapes
    ///
    /// - x: `[rows, d_input]`
    /// - targets: `[rows]`
    /// - output: `[1]`
    ///
    /// # Panics
    ///
    /// As [`linear_cross_entropy`](functional::linear_cross_entropy).
    pub fn cross_entropy(
        &self,
        x: Tensor<2>,
        targets: Tensor<1, Int>,
        options: LinearCrossEntropyOptions,
    ) -> Tensor<1> {
        let bias = self.bias.as_ref().map(|bias| bias.val());
        match column_blocks(&self.weight).filter(|_| fits_blocks(&x, &bias, &options)) {
            Some(blocks) => {
                let [d_input, classes] = self.weight.lazy_shape().dims();
                assert_shape!(x, [.., d_input]);
                cross_entropy_by_blocks(x, blocks, classes, bias, targets, options)
            }
            None => functional::linear_cross_entropy(x, self.weight.val(), bias, targets, options),
        }
    }

    /// Whether [`cross_entropy`](Self::cross_entropy) reads the weight block by block.
    pub(crate) fn is_read_by_blocks(&self, x: &Tensor<2>, options: &LinearCrossEntropyOptions) -> bool {
        let bias = self.bias.as_ref().map(|bias| bias.val());
        column_blocks(&self.weight).is_some() && fits_blocks(x, &bias, options)
    }
}

/// Whether products of this input with blocks of a weight of `d_input` rows are as good as one product. Together they must not be larger than the
/// weight, since they are there twice when they are joined. No gradient may be rounded once per block.
pub(super) fn pays_by_blocks<const D: usize>(input: &Tensor<D>, d_input: usize) -> bool {
    let is_wide = input.dtype().size() >= size_of::<f32>();
    input.shape().num_elements() <= d_input.saturating_mul(d_input) && (is_wide || !input.is_tracked())
}

/// The products with blocks of columns of the weight, next to each other.
fn by_blocks<const D: usize>(
    input: Tensor<D>,
    blocks: impl Iterator<Item = Tensor<2>>,
    bias: Option<Tensor<1>>,
) -> Tensor<D> {
    let mut first = 0;
    let products = blocks.map(|columns| {
        let [d_input, count] = columns.dims();
        assert_shape!(input, [.., d_input]);
        let bias = bias.clone().map(|bias| bias.narrow(0, first, count));
        first += count;
        functional::linear(input.clone(), columns, bias)
    });
    Tensor::cat(products.collect(), D - 1)
}
