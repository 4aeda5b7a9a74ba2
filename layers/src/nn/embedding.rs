//! The embedding, a lookup table of vectors, and the logits of a head that is tied to it.
use crate::frozen::{is_host, packed_logits, rows_and_adapter, transposed_blocks, weight_and_adapter};
use crate::functional::{self, LinearCrossEntropyOptions, cross_entropy_by_blocks, fits_blocks};
use crate::nn::drop_in::{config_twin, drop_in};
use crate::nn::linear::pays_by_blocks;
use burn::config::Config;
use burn::module::{Module, Param};
use burn::nn::Initializer;
use burn::tensor::{Device, Int, Tensor, assert_shape};

config_twin! {
    #[derive(Config, Debug)]
    pub struct EmbeddingConfig = burn::nn::EmbeddingConfig {
        /// The number of embedding vectors.
        pub n_embedding: usize,
        /// The size of each vector.
        pub d_model: usize,
        /// The type of function used to initialize neural network parameters
        #[config(default = "Initializer::Normal{mean:0.0, std:1.0}")]
        pub initializer: Initializer,
    }
    pub fn init(&self, device: &Device) -> Embedding;
}

drop_in! {
    /// Lookup table of vectors.
    ///
    /// Keeps the indices for the backward pass if the table is trainable; [`burn::nn::Embedding`] keeps the table's handle,
    /// too. With a [LoRA adapter](burn::module::LoraAdapter), the effective table is not computed: see
    /// [`embedding_lora`](functional::embedding_lora).
    ///
    /// ```
    /// use burn::tensor::{Device, Int, Tensor};
    /// use burn_memsave_layers::nn::EmbeddingConfig;
    ///
    /// let device = Device::flex();
    /// let embedding = EmbeddingConfig::new(10, 4).init(&device);
    /// let indices = Tensor::<2, Int>::from_ints([[1, 2, 3], [9, 9, 0]], &device);
    /// assert_eq!(embedding.forward(indices).dims(), [2, 3, 4]);
    /// ```
    #[derive(Module, Debug)]
    pub struct Embedding as MemSaveEmbedding = burn::nn::Embedding, from_nn_embedding, into_nn_embedding {
        /// The learnable weights of the module of shape `[n_embedding, d_model]` initialized
        /// from a normal distribution `N(0, 1)`.
        pub weight: Param<Tensor<2>>,
    }
}

impl Embedding {
    /// Applies the layer.
    ///
    /// # Shapes
    ///
    /// - input: `[batch_size, seq_length]`
    /// - output: `[batch_size, seq_length, d_model]`
    pub fn forward(&self, input: Tensor<2, Int>) -> Tensor<3> {
        if let Some((rows, adapter)) = rows_and_adapter(&self.weight, &input) {
            return match adapter {
                Some(adapter) => functional::adapted_rows(rows, adapter, input),
                None => rows,
            };
        }
        let (weight, adapter) = weight_and_adapter(&self.weight);
        match adapter {
            Some(adapter) => functional::embedding_lora(weight, adapter, input),
            None => functional::embedding(weight, input),
        }
    }

    /// Computes the logits of a head that is tied to the table, `input weight^T`.
    ///
    /// A [lazy](crate::frozen) table that is not in memory is read, multiplied and dropped block by block, in the backward pass,
    /// too, so that only 16 MiB of it are there at a time. It is read whole if it has an adapter, if the input has more rows than
    /// features, or if a tracked input has half precision, whose gradient would be rounded once per block.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave_layers::nn::EmbeddingConfig;
    ///
    /// let device = Device::flex();
    /// let embedding = EmbeddingConfig::new(10, 4).init(&device);
    /// assert_eq!(embedding.logits(Tensor::<3>::ones([2, 3, 4], &device)).dims(), [2, 3, 10]);
    /// ```
    ///
    /// # Shapes
    ///
    /// - input: `[..., d_model]`
    /// - output: `[..., n_embedding]`
    ///
    /// # Panics
    ///
    /// Panics if the last axis of `input` is not `d_model`.
    pub fn logits<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        if let Some(logits) = packed_logits(&self.weight, &input) {
            return logits;
        }
        let product = |columns: Tensor<2>| functional::linear(input.clone(), columns, None);
        match transposed_blocks(&self.weight, BLOCK_BYTES) {
            Some(blocks) if pays_by_blocks(&input, self.weight.lazy_shape()[1]) => {
                Tensor::cat(blocks.map(product).collect(), D - 1)
            }
            _ => product(self.weight.val().transpose()),
        }
    }

    /// The [cross entropy](functional::linear_cross_entropy) of the [logits](Self::logits), computed in chunks.
    ///
    /// On a CPU, a [lazy](crate::frozen) table is read once, block by block, so that only 16 MiB of it are there at a time (in bf16, 16 MiB more in
    /// f32), unless it has an adapter, `x` is in f16, or the options have smoothing or class weights. The gradient of `x` is computed with the
    /// loss, as from any frozen weight. Meanwhile there are five tensors of the size of `x`, in f32 at least.
    ///
    /// ```
    /// use burn::tensor::{Device, Int, Tensor};
    /// use burn_memsave_layers::functional::LinearCrossEntropyOptions;
    /// use burn_memsave_layers::nn::EmbeddingConfig;
    ///
    /// let device = Device::flex();
    /// let embedding = EmbeddingConfig::new(10, 4).init(&device);
    /// let options = LinearCrossEntropyOptions { softcap: Some(30.0), ..Default::default() };
    /// let (x, targets) = (Tensor::<2>::ones([3, 4], &device), Tensor::<1, Int>::from_ints([1, 9, 0], &device));
    /// assert_eq!(embedding.cross_entropy(x, targets, options).dims(), [1]);
    /// ```
    ///
    /// # Shapes
    ///
    /// - x: `[rows, d_model]`
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
        // On other devices a table may stay.
        let fits = is_host(&x.device()) && fits_blocks(&x, &None, &options);
        match transposed_blocks(&self.weight, BLOCK_BYTES).filter(|_| fits) {
            Some(blocks) => {
                let [classes, d_model] = self.weight.lazy_shape().dims();
                assert_shape!(x, [.., d_model]);
                cross_entropy_by_blocks(x, blocks, classes, None, targets, options)
            }
            None => {
                let weight = self.weight.val().transpose();
                functional::linear_cross_entropy(x, weight, None, targets, options)
            }
        }
    }
}

/// How many bytes of a lazy table are in memory at a time, for its logits and their cross entropy.
const BLOCK_BYTES: usize = 16 << 20;
