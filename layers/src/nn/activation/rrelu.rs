//! The randomized leaky rectified linear unit.
use crate::functional;
use crate::nn::drop_in::{config_twin, drop_in};
use burn::config::Config;
use burn::module::{Flag, Module, Param};
use burn::tensor::Tensor;

config_twin! {
    #[derive(Config, Debug)]
    pub struct RReluConfig = burn::nn::activation::RReluConfig {
        /// The lower bound of the uniform slope range. Default: 1/8 = 0.125.
        #[config(default = "0.125")]
        pub lower: f64,
        /// The upper bound of the uniform slope range. Default: 1/3.
        #[config(default = "1.0 / 3.0")]
        pub upper: f64,
    }
    pub fn init(&self) -> RRelu, or panics;
}

drop_in! {
    /// Randomized leaky rectified linear unit: `x` if `x >= 0`, else `slope x`, after
    /// [arXiv 1505.00853](https://arxiv.org/abs/1505.00853). During training, the slope is drawn for each element; otherwise it
    /// is the mean of its bounds.
    ///
    /// During training it keeps one float per element for the backward pass (on wgpu and CUDA devices one bit per element and a
    /// seed of 16 bytes), otherwise one bit per element; [`burn::nn::activation::RRelu`] keeps several floats per element.
    #[derive(Module, Debug)]
    pub struct RRelu as MemSaveRRelu = burn::nn::activation::RRelu, from_nn_rrelu, into_nn_rrelu {
        /// The lower bound of the uniform slope range.
        pub lower: f64,
        /// The upper bound of the uniform slope range.
        pub upper: f64,
        /// Whether to behave as during training. Cleared by
        /// [`freeze`](burn::module::Module::freeze) and matching
        /// [`freeze_group`](burn::module::Module::freeze_group) traversals.
        pub training: Param<Flag>,
    }
}

impl RRelu {
    /// Applies the function element by element. Slopes are random on an autodiff device while `training` is enabled.
    ///
    /// # Shapes
    ///
    /// - input: any
    /// - output: the same
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        if !self.training.is_enabled() || !input.device().is_autodiff() {
            return functional::leaky_relu(input, (self.lower + self.upper) / 2.0);
        }
        functional::rrelu(input, self.lower, self.upper)
    }
}
