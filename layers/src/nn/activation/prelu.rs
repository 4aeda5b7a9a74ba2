//! The parametric rectified linear unit.
use crate::functional;
use crate::nn::drop_in::{config_twin, drop_in};
use burn::config::Config;
use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor};

config_twin! {
    #[derive(Config, Debug)]
    pub struct PReluConfig = burn::nn::activation::PReluConfig {
        /// The number of parameters.
        #[config(default = "1")]
        pub num_parameters: usize,
        /// The learnable weight alpha. Default is 0.25
        #[config(default = "0.25")]
        pub alpha: f64,
    }
    pub fn init(&self, device: &Device) -> PRelu;
}

drop_in! {
    /// Parametric rectified linear unit: `x` if `x >= 0`, else `alpha x`, with one slope or one per channel.
    ///
    /// Keeps its input for the backward pass if `alpha` is trainable, else one bit per element;
    /// [`burn::nn::activation::PRelu`] keeps more than its input in both cases.
    #[derive(Module, Debug)]
    pub struct PRelu as MemSavePRelu = burn::nn::activation::PRelu, from_nn_prelu, into_nn_prelu {
        /// The learned slopes, of shape `[1]` or `[num_parameters]`; in the latter case the input must have as many channels.
        pub alpha: Param<Tensor<1>>,

        /// Alpha value for the PRelu layer
        pub alpha_value: f64,
    }
}

impl PRelu {
    /// Applies the function element by element.
    ///
    /// # Shapes
    ///
    /// - input: any
    /// - output: the same
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        functional::prelu(input, self.alpha.val())
    }
}
