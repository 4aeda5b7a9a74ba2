//! Batch normalization, with the statistics of the batch or with running statistics.
use crate::functional::{self, ElementActivation, GivenNorm};
use crate::graph::Member;
use crate::nn::drop_in::{config_twin, drop_in};
use burn::config::Config;
use burn::module::{Flag, Module, ModuleVisitor, Param, ParamId, RunningState};
use burn::tensor::{Device, Tensor, assert_shape, module::BatchNormTrainOutput};

config_twin! {
    #[derive(Config, Debug)]
    pub struct BatchNormConfig = burn::nn::BatchNormConfig {
        /// The number of features. Must be greater than zero.
        pub num_features: usize,
        /// A finite, positive value required for numerical stability. Default: 1e-5
        #[config(default = 1e-5)]
        pub epsilon: f64,
        /// A finite momentum in `[0, 1]` used to update the running statistics. Default: 0.1
        ///
        /// A value of 0 preserves the running statistics; 1 replaces them with the current
        /// batch statistics.
        #[config(default = 0.1)]
        pub momentum: f64,
    }
    pub fn init(&self, device: &Device) -> BatchNorm, or panics;
}

drop_in! {
    /// Batch normalization over `[batch_size, channels, ...]`, `y = (x - mean) / sqrt(variance + epsilon) * gamma + beta`, after
    /// [arXiv 1502.03167](https://arxiv.org/abs/1502.03167).
    ///
    /// On an autodiff device, while `training` is enabled, it uses the statistics of the batch and updates the running
    /// statistics. Otherwise it uses the running statistics. [`burn::nn::BatchNorm`] does the same.
    ///
    /// With the statistics of the batch, it keeps its input and tensors of size `[channels]` for the backward pass. With the
    /// running statistics, it keeps its input only if `gamma` is trainable. It never keeps two tensors of the input's size.
    ///
    /// The running statistics may have another dtype than the parameters, for example f32 with parameters in half precision.
    /// They are updated in their own dtype, and cast to the dtype of `gamma` for normalization.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave_layers::nn::BatchNormConfig;
    ///
    /// let device = Device::flex().autodiff();
    /// let norm = BatchNormConfig::new(1).init(&device);
    /// let y = norm.forward(Tensor::<2>::from_floats([[1.0], [3.0]], &device));
    /// y.to_data().assert_approx_eq::<f32>(&[[-1.0f32], [1.0]].into(), burn::tensor::Tolerance::default());
    /// ```
    #[derive(Module, Debug)]
    pub struct BatchNorm as MemSaveBatchNorm = burn::nn::BatchNorm, from_nn_batch_norm, into_nn_batch_norm {
        /// The learnable weight gamma.
        pub gamma: Param<Tensor<1>>,
        /// The learnable weight beta.
        pub beta: Param<Tensor<1>>,
        /// Whether training behavior is enabled for this layer.
        pub training: Param<Flag>,
        /// The running mean.
        pub running_mean: RunningState<Tensor<1>>,
        /// The running variance.
        pub running_var: RunningState<Tensor<1>>,
        /// Momentum used to update the metrics.
        pub momentum: f64,
        /// A value required for numerical stability.
        pub epsilon: f64,
    }
}

impl BatchNorm {
    /// Applies the layer.
    ///
    /// # Shapes
    ///
    /// - input: `[batch_size, num_features, ...]`
    /// - output: the same
    ///
    /// # Panics
    ///
    /// Panics if the input has a rank below 2 or its second axis is not `num_features`.
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        self.require_features(&input);
        match self.uses_batch(&input.device()) {
            true => self.forward_train(input, functional::batch_norm_train),
            false => self.forward_inference(input),
        }
    }

    /// Applies the layer, and then an activation: `activation(norm.forward(input))`.
    ///
    /// With the statistics of the batch, on CPUs, both take the same passes over the elements, forward and backward; see
    /// [`batch_norm_train_activated`](functional::batch_norm_train_activated). For running statistics, see `forward_norm_relu` of
    /// convolutions.
    ///
    /// ```
    /// use burn::tensor::{Device, Distribution, Tensor};
    /// use burn_memsave_layers::{functional::Smooth, nn::BatchNormConfig};
    ///
    /// let device = Device::flex().autodiff();
    /// let norm = BatchNormConfig::new(3).init(&device);
    /// let x = Tensor::<4>::random([2, 3, 5, 5], Distribution::Default, &device);
    /// let y = norm.forward_activated(x, Smooth::Silu);
    /// assert_eq!(y.dims(), [2, 3, 5, 5]);
    /// ```
    ///
    /// # Panics
    ///
    /// As [`forward`](Self::forward), and if the bounds of a piecewise linear activation are not in order.
    pub fn forward_activated<const D: usize>(
        &self,
        input: Tensor<D>,
        activation: impl Into<ElementActivation>,
    ) -> Tensor<D> {
        let activation = activation.into();
        self.require_features(&input);
        match self.uses_batch(&input.device()) {
            true => self.forward_train(input, |x, gamma, beta, epsilon| {
                functional::batch_norm_train_activated(x, gamma, beta, epsilon, activation)
            }),
            false => functional::activate(self.forward_inference(input), activation),
        }
    }

    fn require_features<const D: usize>(&self, input: &Tensor<D>) {
        let [num_features] = self.gamma.shape().dims();
        assert_shape!(input, [_, num_features, ..]);
    }

    fn forward_inference<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        let GivenNorm { gamma, beta, mean, variance, epsilon } = self.running(&input.device());
        functional::batch_norm(input, gamma, beta, mean, variance, epsilon)
    }

    /// The normalization with the running statistics.
    fn running(&self, device: &Device) -> GivenNorm {
        let gamma = self.gamma.val();
        // Running statistics stay in f32 when the parameters are cast to half precision.
        let statistic = |state: &RunningState<Tensor<1>>| {
            let value = state.value().to_device(device);
            if gamma.dtype().is_float() { value.cast(gamma.dtype()) } else { value }
        };
        let [mean, variance] = [&self.running_mean, &self.running_var].map(statistic);
        GivenNorm { gamma, beta: self.beta.val(), mean, variance, epsilon: self.epsilon }
    }

    /// The normalization of inputs on a device; `None` if it uses the statistics of the batch.
    pub(crate) fn given(&self, device: &Device) -> Option<GivenNorm> {
        (!self.uses_batch(device)).then(|| self.running(device))
    }

    /// Whether it uses the statistics of the batch.
    fn uses_batch(&self, device: &Device) -> bool {
        device.is_autodiff() && self.training.is_enabled()
    }

    fn forward_train<const D: usize>(
        &self,
        input: Tensor<D>,
        normalize: impl FnOnce(Tensor<D>, Tensor<1>, Tensor<1>, f64) -> BatchNormTrainOutput<D>,
    ) -> Tensor<D> {
        let device = input.device();
        let result = normalize(input, self.gamma.val(), self.beta.val(), self.epsilon);
        for (state, batch) in [(&self.running_mean, result.mean), (&self.running_var, result.variance)] {
            match Member::current() {
                None => update(state, batch, self.momentum, &device),
                Some(member) => update_later(&member, state, batch, self.momentum, &device),
            }
        }
        result.output
    }
}

/// Moves a running statistic towards that of a batch.
fn update(state: &RunningState<Tensor<1>>, batch: Tensor<1>, momentum: f64, device: &Device) {
    let running = state.value_sync().to_device(device);
    let batch = batch.detach().cast(running.dtype());
    let kept = running.mul_scalar(1.0 - momentum);
    state.update(kept.add(batch.mul_scalar(momentum)).detach());
}

/// The same after a step in which all replicas succeed.
fn update_later(
    member: &Member,
    state: &RunningState<Tensor<1>>,
    batch: Tensor<1>,
    momentum: f64,
    device: &Device,
) {
    let (id, state, device) = (id(state), state.clone(), device.clone());
    member.update_later(id, move || {
        update(&state, batch, momentum, &device);
        state.value_sync(); // Burn keeps updates apart by thread until it is asked
    });
}

fn id(state: &RunningState<Tensor<1>>) -> ParamId {
    struct Id(Option<ParamId>);
    impl ModuleVisitor for Id {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0 = Some(param.id);
        }
    }
    let mut id = Id(None);
    state.visit(&mut id);
    id.0.expect("a running state visits its value")
}
