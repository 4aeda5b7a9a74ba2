//! Rotary positional encoding.
use crate::burn_internals::displayed;
use crate::functional;
use crate::nn::drop_in::{config_twin, drop_in};
use burn::config::Config;
use burn::module::Module;
use burn::tensor::{Device, Tensor, assert_shape};

config_twin! {
    #[derive(Config, Debug)]
    pub struct RotaryEncodingConfig = burn::nn::RotaryEncodingConfig {
        /// Maximum sequence length of input
        pub max_sequence_length: usize,
        /// Size of the input embedding or hidden dimension
        pub d_model: usize,
        /// Scaling factor for frequency computation. Defaults to 10000.0
        #[config(default = "10000.0")]
        pub theta: f32,
    }
    pub fn init(&self, device: &Device) -> RotaryEncoding, or panics = from_config;
}

drop_in! {
    /// Rotary positional encoding, after [arXiv 2104.09864](https://arxiv.org/abs/2104.09864): it rotates every pair of
    /// features by an angle that grows with the position.
    ///
    /// Keeps only handles of its own constants for the backward pass, and works in place where it can.
    /// [`burn::nn::RotaryEncoding`] creates several temporary tensors of twice the size of its input.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave_layers::nn::RotaryEncodingConfig;
    ///
    /// let device = Device::flex();
    /// let encoding = RotaryEncodingConfig::new(16, 4).init(&device);
    /// assert_eq!(encoding.forward(Tensor::<3>::ones([2, 5, 4], &device)).dims(), [2, 5, 4]);
    /// ```
    #[derive(Module, Debug)]
    pub struct RotaryEncoding as MemSaveRotaryEncoding = burn::nn::RotaryEncoding,
        from_nn_rotary_encoding = from_displayed, into_nn_rotary_encoding = into_stock {
        /// Complex frequency tensor of shape (max_sequence_length, d_model, 2) with real and imaginary components
        pub freq_complex: Tensor<3>,
        /// Frequency vector used to compute/apply the complex rotations.
        pub theta: Tensor<1>,
        start_offset: usize,
    }
}

fn from_config(_: &RotaryEncodingConfig, stock: burn::nn::RotaryEncoding) -> RotaryEncoding {
    from_stock(stock, 0)
}

fn from_displayed(stock: burn::nn::RotaryEncoding) -> RotaryEncoding {
    let start_offset = displayed(&stock, "start_offset");
    from_stock(stock, start_offset)
}

fn into_stock(ours: RotaryEncoding) -> burn::nn::RotaryEncoding {
    let [positions, d_model, _] = ours.freq_complex.dims();
    let mut stock = burn::nn::RotaryEncodingConfig::new(positions, d_model).init(&ours.freq_complex.device());
    stock.theta = ours.theta;
    if ours.start_offset > 0 {
        stock.shift(ours.start_offset); // the field is private
    }
    stock.freq_complex = ours.freq_complex;
    stock
}

fn from_stock(stock: burn::nn::RotaryEncoding, start_offset: usize) -> RotaryEncoding {
    let burn::nn::RotaryEncoding { freq_complex, theta, .. } = stock;
    RotaryEncoding { freq_complex, theta, start_offset }
}

impl RotaryEncodingConfig {
    /// Initializes the module with frequencies that `scaling` changes, as the stock config does, for extensions of the
    /// encoding.
    ///
    /// # Panics
    ///
    /// Panics for the values that the stock config refuses, with its message.
    pub fn init_with_frequency_scaling(
        &self,
        scaling: impl Fn(Tensor<1>) -> Tensor<1>,
        device: &Device,
    ) -> RotaryEncoding {
        let config = burn::nn::RotaryEncodingConfig::from(self.clone());
        from_stock(config.init_with_frequency_scaling(scaling, device), 0)
    }
}

impl RotaryEncoding {
    /// Applies the encoding.
    ///
    /// # Shapes
    ///
    /// - input: `[..., seq_len, d_model]`
    /// - output: the same
    ///
    /// # Panics
    ///
    /// Panics as [`apply`](Self::apply) does.
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        self.apply(x, 0)
    }

    /// Applies the encoding, with the first position at `start`.
    ///
    /// # Shapes
    ///
    /// - input: `[..., seq_len, d_model]`
    /// - output: the same
    ///
    /// # Panics
    ///
    /// Panics if the input has fewer than 2 axes, if its last axis is not `d_model`, or if it has positions beyond
    /// `max_sequence_length`.
    pub fn apply<const D: usize>(&self, x: Tensor<D>, start: usize) -> Tensor<D> {
        let factors = self.factors(&x, start);
        functional::rotary_encoding(x, factors)
    }

    /// [`forward`](Self::forward) of pairs of features `i` and `i + d_model / 2`, as networks in Hugging Face's `transformers` have them.
    /// Burn's are `2 i` and `2 i + 1`. Their weights of queries and keys differ by the order of their rows, and so do adapters on them:
    /// with this encoding, both load as they are.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave_layers::nn::RotaryEncodingConfig;
    ///
    /// let device = Device::flex();
    /// let encoding = RotaryEncodingConfig::new(16, 4).init(&device);
    /// let x = Tensor::<2>::from_data([[1.0, 2.0, 3.0, 4.0]], &device).expand([5, 4]);
    /// // Features 0 and 2 are a pair, and 1 and 3.
    /// let paired = x.clone().reshape([5, 2, 2]).swap_dims(1, 2).reshape([5, 4]);
    /// let rotated = encoding.forward(paired).reshape([5, 2, 2]).swap_dims(1, 2).reshape([5, 4]);
    /// encoding.forward_halves(x).into_data().assert_eq(&rotated.into_data(), true);
    /// ```
    ///
    /// # Shapes
    ///
    /// - input: `[..., seq_len, d_model]`
    /// - output: the same
    ///
    /// # Panics
    ///
    /// Panics as [`apply`](Self::apply) does.
    pub fn forward_halves<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        self.apply_halves(x, 0)
    }

    /// [`forward_halves`](Self::forward_halves), with the first position at `start`.
    ///
    /// # Shapes
    ///
    /// - input: `[..., seq_len, d_model]`
    /// - output: the same
    ///
    /// # Panics
    ///
    /// Panics as [`apply`](Self::apply) does.
    pub fn apply_halves<const D: usize>(&self, x: Tensor<D>, start: usize) -> Tensor<D> {
        let factors = self.factors(&x, start);
        functional::rotary_encoding_halves(x, factors)
    }

    /// The factors of the positions of `x`, the first of which is `start`.
    fn factors<const D: usize>(&self, x: &Tensor<D>, start: usize) -> Tensor<3> {
        let [positions, d_model, _] = self.freq_complex.dims();
        assert_shape!(x, [.., _, d_model]);
        let end = start + x.dims()[D - 2];
        assert!(end <= positions, "the last position is {end}, the longest sequence has {positions}");
        self.freq_complex.clone().slice_dim(0, start..end)
    }

    /// Shifts the window of precomputed positions to begin at `start`.
    ///
    /// # Panics
    ///
    /// Panics if the window does not move forward.
    pub fn shift(&mut self, start: usize) {
        self.as_stock(start, |stock| stock.shift(start));
    }

    /// Shifts the window of precomputed positions back to 0.
    pub fn reset(&mut self) {
        self.as_stock(0, burn::nn::RotaryEncoding::reset);
    }

    fn as_stock(&mut self, start_offset: usize, f: impl FnOnce(&mut burn::nn::RotaryEncoding)) {
        let mut stock = self.clone().into_nn_rotary_encoding();
        f(&mut stock);
        *self = from_stock(stock, start_offset);
    }
}
