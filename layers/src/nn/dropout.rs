//! Dropout, which keeps one bit per element or, on wgpu and CUDA, a seed.
use crate::functional;
use crate::nn::drop_in::{config_twin, drop_in};
use burn::config::Config;
use burn::module::{Flag, Module, Param};
use burn::tensor::Tensor;

config_twin! {
    #[derive(Config, Debug)]
    pub struct DropoutConfig = burn::nn::DropoutConfig {
        /// The probability that an element of the input is zeroed during training.
        pub prob: f64,
    }
    pub fn init(&self) -> Dropout, or panics;
}

drop_in! {
    /// Zeroes elements at random during training, and divides the others by `1 - prob`.
    ///
    /// Keeps one bit per element for the backward pass, where [`burn::nn::Dropout`] keeps a float. With the same seed, both
    /// drop the same elements. On wgpu and CUDA devices it keeps only a seed, from which the backward pass draws the same
    /// numbers again; there it drops other elements than Burn does.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave_layers::nn::DropoutConfig;
    ///
    /// let x = Tensor::<1>::ones([8], &Device::flex());
    /// let y = DropoutConfig::new(0.5).init().forward(x.clone()); // no autodiff: no dropout
    /// y.to_data().assert_eq(&x.to_data(), true);
    /// ```
    #[derive(Module, Debug)]
    pub struct Dropout as MemSaveDropout = burn::nn::Dropout, from_nn_dropout, into_nn_dropout {
        /// The probability that an element of the input is zeroed during training.
        pub prob: f64,
        /// Whether to behave as during training. Cleared by
        /// [`freeze`](burn::module::Module::freeze) and matching
        /// [`freeze_group`](burn::module::Module::freeze_group) traversals.
        pub training: Param<Flag>,
    }
}

impl Dropout {
    /// Applies the layer on an autodiff device while `training` is enabled; returns its input otherwise.
    ///
    /// # Shapes
    ///
    /// - input: any
    /// - output: the same
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        if !self.training.is_enabled() || !input.device().is_autodiff() || self.prob == 0.0 {
            return input;
        }
        functional::dropout(input, self.prob)
    }
}
