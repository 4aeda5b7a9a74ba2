//! The hard hyperbolic tangent, which clamps elements between two bounds.
use crate::functional;
use crate::nn::drop_in::{config_twin, drop_in};
use burn::config::Config;
use burn::module::Module;
use burn::tensor::Tensor;

config_twin! {
    #[derive(Config, Debug)]
    pub struct HardtanhConfig = burn::nn::activation::HardtanhConfig {
        /// The finite minimum value of the linear region range. Default is -1.0.
        /// Must be less than or equal to `max_val`.
        #[config(default = "-1.0")]
        pub min_val: f64,
        /// The finite maximum value of the linear region range. Default is 1.0.
        /// Must be greater than or equal to `min_val`.
        #[config(default = "1.0")]
        pub max_val: f64,
    }
    pub fn init(&self) -> Hardtanh, or panics;
}

drop_in! {
    /// `min(max(x, min_val), max_val)`.
    ///
    /// Keeps one bit per element for the backward pass; [`burn::nn::activation::Hardtanh`] keeps tensors of the input's size.
    #[derive(Module, Debug)]
    pub struct Hardtanh as MemSaveHardtanh = burn::nn::activation::Hardtanh,
        from_nn_hardtanh, into_nn_hardtanh {
        /// The minimum value of the linear region range.
        pub min_val: f64,
        /// The maximum value of the linear region range.
        pub max_val: f64,
    }
}

impl Hardtanh {
    /// Applies the function element by element.
    ///
    /// # Shapes
    ///
    /// - input: any
    /// - output: the same
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        functional::hardtanh(input, self.min_val, self.max_val)
    }
}
