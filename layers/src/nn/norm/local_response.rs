//! Local response normalization over a window of channels.
use crate::burn_internals::displayed;
use crate::functional;
use crate::nn::drop_in::{config_twin, drop_in};
use burn::config::Config;
use burn::module::Module;
use burn::tensor::{Tensor, assert_shape};

config_twin! {
    #[derive(Config, Debug)]
    pub struct LocalResponseNormConfig = burn::nn::LocalResponseNormConfig {
        /// Number of channels in the sliding normalization window.
        pub size: usize,
        /// Scaling parameter. Default: 0.0001
        #[config(default = 0.0001)]
        pub alpha: f64,
        /// Exponent. Default: 0.75
        #[config(default = 0.75)]
        pub beta: f64,
        /// Bias constant (called `bias` in ONNX). Default: 1.0
        #[config(default = 1.0)]
        pub k: f64,
    }
    pub fn init(&self) -> LocalResponseNorm, or panics = from_config;
}

drop_in! {
    /// Local response normalization, `y = x / (k + alpha / size * sum(x^2))^beta`, after [ImageNet Classification with Deep
    /// Convolutional Neural Networks](https://papers.nips.cc/paper/2012/hash/c399862d3b9d6b76c8436e924a68c45b-Abstract.html).
    /// The sum is over a window of `size` channels around each channel; if `size` is even, the window has one more channel
    /// after it than before it.
    ///
    /// Keeps its input for the backward pass; [`burn::nn::LocalResponseNorm`] keeps four tensors of that size.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor, Tolerance};
    /// use burn_memsave_layers::nn::LocalResponseNormConfig;
    ///
    /// let norm = LocalResponseNormConfig::new(2).with_alpha(1.0).with_beta(1.0).with_k(0.0).init();
    /// let y = norm.forward(Tensor::<3>::from_floats([[[1.0], [2.0], [4.0]]], &Device::flex()));
    /// y.to_data().assert_approx_eq::<f32>(&[[[0.4f32], [0.2], [0.5]]].into(), Tolerance::default());
    /// ```
    #[derive(Module, Debug)]
    pub struct LocalResponseNorm as MemSaveLocalResponseNorm = burn::nn::LocalResponseNorm,
        from_nn_local_response_norm = from_stock, into_nn_local_response_norm = into_stock {
        /// Number of channels in the sliding window.
        size: usize,
        /// Scaling parameter.
        alpha: f64,
        /// Exponent.
        beta: f64,
        /// Bias constant.
        k: f64,
    }
}

fn from_config(config: &LocalResponseNormConfig, _: burn::nn::LocalResponseNorm) -> LocalResponseNorm {
    let LocalResponseNormConfig { size, alpha, beta, k } = *config;
    LocalResponseNorm { size, alpha, beta, k }
}

fn from_stock(stock: burn::nn::LocalResponseNorm) -> LocalResponseNorm {
    LocalResponseNorm {
        size: displayed(&stock, "size"),
        alpha: displayed(&stock, "alpha"),
        beta: displayed(&stock, "beta"),
        k: displayed(&stock, "k"),
    }
}

fn into_stock(ours: LocalResponseNorm) -> burn::nn::LocalResponseNorm {
    let LocalResponseNorm { size, alpha, beta, k } = ours;
    burn::nn::LocalResponseNormConfig { size, alpha, beta, k }.init()
}

impl LocalResponseNorm {
    /// Applies the layer.
    ///
    /// # Shapes
    ///
    /// - input: `[batch, channels, ...]` (rank >= 3)
    /// - output: the same
    ///
    /// # Panics
    ///
    /// Panics if the rank of the input is less than 3.
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        assert_shape!(input, [_, _, _, ..]);
        functional::local_response_norm(input, self.size, self.alpha, self.beta, self.k)
    }
}
