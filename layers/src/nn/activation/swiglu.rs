//! The SwiGLU gate: two dense layers and a SiLU.
use crate::functional;
use crate::nn::drop_in::{config_twin, drop_in};
use crate::nn::{Initializer, Linear, LinearLayout};
use burn::config::Config;
use burn::module::Module;
use burn::tensor::{Device, Tensor};

config_twin! {
    #[derive(Config, Debug)]
    pub struct SwiGluConfig = burn::nn::activation::SwiGluConfig {
        /// The size of the input features.
        pub d_input: usize,
        /// The size of the output features.
        pub d_output: usize,
        /// If a bias should be learned additively. Default: false
        #[config(default = false)]
        pub bias: bool,
        /// The type of function used to initialize the weights of the linear layers
        #[config(default = "Initializer::KaimingUniform{gain:1.0/3.0f64.sqrt(), fan_out_only:false}")]
        pub initializer: Initializer,
        /// The layout in which the weights of the linear layers are stored. Default: [`LinearLayout::Row`]
        #[config(default = "LinearLayout::Row")]
        pub layout: LinearLayout,
    }
    pub fn init(&self, device: &Device) -> SwiGlu;
}

drop_in! {
    /// Gated linear unit with a SiLU, `silu(inner(x)) * outer(x)`, after [arXiv 2002.05202](https://arxiv.org/abs/2002.05202).
    ///
    /// Keeps for the backward pass the outputs of its two linear layers, and its input if their weights are trainable;
    /// [`burn::nn::activation::SwiGlu`] keeps two more tensors.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave_layers::nn::activation::SwiGluConfig;
    ///
    /// let device = Device::flex();
    /// let gate = SwiGluConfig::new(4, 6).init(&device);
    /// assert_eq!(gate.forward(Tensor::<2>::ones([3, 4], &device)).dims(), [3, 6]);
    /// ```
    #[derive(Module, Debug)]
    pub struct SwiGlu as MemSaveSwiGlu = burn::nn::activation::SwiGlu, from_nn_swiglu, into_nn_swiglu {
        /// The inner linear layer for the SiLU activation.
        pub linear_inner: Linear,
        /// The outer linear layer, which is multiplied by the activation.
        pub linear_outer: Linear,
    }
}

impl SwiGlu {
    /// Applies the layer.
    ///
    /// # Shapes
    ///
    /// - input: `[..., d_input]`
    /// - output: `[..., d_output]`
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        let inner = self.linear_inner.forward(input.clone());
        functional::silu_gate(self.linear_outer.forward(input), inner)
    }
}
