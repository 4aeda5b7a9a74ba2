//! [`Activation`] and its config: any activation, chosen at run time.
use super::*;
use crate::nn::Identity;
use crate::nn::drop_in::any_of;
use burn::config::Config;
use burn::module::Module;

any_of! {
    /// Any activation, chosen at run time.
    ///
    /// Keeps for the backward pass what the wrapped module keeps.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave_layers::nn::activation::ActivationConfig;
    ///
    /// let device = Device::flex();
    /// let activation = ActivationConfig::Relu.init(&device);
    /// let y = activation.forward(Tensor::<1>::from_floats([-1.0, 2.0], &device));
    /// y.to_data().assert_eq(&[0.0f32, 2.0].into(), true);
    /// ```
    #[derive(Module, Debug)]
    #[allow(clippy::large_enum_variant)] // as in Burn
    pub enum Activation as MemSaveActivation =
        burn::nn::activation::Activation, from_nn_activation, into_nn_activation;
    #[derive(Config, Debug)]
    pub enum ActivationConfig = burn::nn::activation::ActivationConfig;
    /// Applies the activation.
    pub fn forward;
    device:
    Identity(Identity) => Identity::new();
    Gelu(Gelu) => Gelu::new(), or GeluApproximate("[`Gelu`] approximated by tanh.") => Gelu::new_approximate();
    PRelu(PRelu) from config: PReluConfig => config.init(device);
    Relu(Relu) => Relu::new();
    LeakyRelu(LeakyRelu) from config: LeakyReluConfig => config.init();
    SwiGlu(SwiGlu) from config: SwiGluConfig => config.init(device);
    Selu(Selu) => Selu::new();
    Sigmoid(Sigmoid) => Sigmoid::new();
    Tanh(Tanh) => Tanh::new();
    HardSigmoid(HardSigmoid) from config: HardSigmoidConfig => config.init();
    HardSwish(HardSwish) => HardSwish::new();
    Softplus(Softplus) from config: SoftplusConfig => config.init();
    Softsign(Softsign) => Softsign::new();
    Elu(Elu) from config: EluConfig => config.init();
    Celu(Celu) from config: CeluConfig => config.init();
    ThresholdedRelu(ThresholdedRelu) from config: ThresholdedReluConfig => config.init();
    HardShrink(HardShrink) from config: HardShrinkConfig => config.init();
    SoftShrink(SoftShrink) from config: SoftShrinkConfig => config.init();
    Shrink(Shrink) from config: ShrinkConfig => config.init();
}
