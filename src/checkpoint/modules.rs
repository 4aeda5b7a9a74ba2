//! Modules that are recomputed, and sequences of them.
use super::{Tensors, checkpoint};
use burn::module::{
    Content, Devices, DisplaySettings, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper,
    ModuleVisitor,
};
use burn::tensor::Device;
use std::ops::{Deref, DerefMut};

/// A module that is recomputed in the backward pass. Its record is that of the module inside, so it can take the place of that module in a
/// model that has been trained without it.
///
/// ```
/// use burn::module::Module;
/// use burn::tensor::{Device, Tensor};
/// use burn_memsave::checkpoint::Checkpointed;
/// use burn_memsave::nn::{Linear, LinearConfig};
///
/// #[derive(Module, Debug)]
/// struct Model {
///     first: Checkpointed<Linear>,
///     second: Linear,
/// }
///
/// impl Model {
///     fn forward(&self, x: Tensor<2>) -> Tensor<2> {
///         self.second.forward(self.first.run(x, Linear::forward))
///     }
/// }
///
/// let device = Device::flex().autodiff();
/// let linear = || LinearConfig::new(4, 4).init(&device);
/// let model = Model { first: Checkpointed::new(linear()), second: linear() };
/// let gradients = model.forward(Tensor::ones([2, 4], &device)).sum().backward();
/// assert!(model.first.weight.grad(&gradients).is_some()); // the fields are those of the module
/// ```
#[derive(Clone, Debug)]
pub struct Checkpointed<M>(M);

impl<M: Module + 'static> Checkpointed<M> {
    /// Wraps a module.
    pub fn new(module: M) -> Self {
        Self(module)
    }

    /// Runs `forward` of the module as a [checkpointed segment](checkpoint).
    pub fn run<I, O, F>(&self, input: I, forward: F) -> O
    where
        I: Tensors,
        O: Tensors,
        F: Fn(&M, I) -> O + Copy + Send + Sync + 'static,
    {
        checkpoint(&self.0, input, forward)
    }
}

impl<M> Checkpointed<M> {
    /// The module.
    pub fn into_inner(self) -> M {
        self.0
    }
}

impl<M> Deref for Checkpointed<M> {
    type Target = M;

    fn deref(&self) -> &M {
        &self.0
    }
}

impl<M> DerefMut for Checkpointed<M> {
    fn deref_mut(&mut self) -> &mut M {
        &mut self.0
    }
}

impl<M: Module> Module for Checkpointed<M> {
    fn collect_devices(&self, devices: Devices) -> Devices {
        self.0.collect_devices(devices)
    }
    fn fork(self, device: &Device) -> Self {
        Self(self.0.fork(device))
    }
    fn to_device(self, device: &Device) -> Self {
        Self(self.0.to_device(device))
    }
    fn train(self) -> Self {
        Self(self.0.train())
    }
    fn valid(&self) -> Self {
        Self(self.0.valid())
    }
    fn materialize(self) -> Self {
        Self(self.0.materialize())
    }
    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        self.0.visit(visitor);
    }
    fn map<V: ModuleMapper>(self, mapper: &mut V) -> Self {
        Self(self.0.map(mapper))
    }
}

impl<M: ModuleDisplay> ModuleDisplayDefault for Checkpointed<M> {
    fn content(&self, content: Content) -> Option<Content> {
        self.0.content(content)
    }
}

impl<M: ModuleDisplay> ModuleDisplay for Checkpointed<M> {
    fn custom_settings(&self) -> Option<DisplaySettings> {
        self.0.custom_settings()
    }
    fn custom_content(&self, content: Content) -> Option<Content> {
        self.0.custom_content(content)
    }
}

/// Runs `n` modules one after another, in about `sqrt(n)` [segments](checkpoint). The inputs of the segments are kept, and, for one segment
/// at a time, what its modules keep ([arXiv 1604.06174](https://arxiv.org/abs/1604.06174)).
///
/// `forward` runs one module. For segments of other lengths, call [`checkpoint`] with a part of the modules, as a vector.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_memsave::checkpoint::checkpoint_sequential;
/// use burn_memsave::nn::{Linear, LinearConfig};
///
/// let device = Device::flex().autodiff();
/// let layers: Vec<Linear> = (0..9).map(|_| LinearConfig::new(4, 4).init(&device)).collect();
/// let y = checkpoint_sequential(&layers, Tensor::<2>::ones([2, 4], &device), Linear::forward); // three of three
/// assert!(layers[8].weight.grad(&y.sum().backward()).is_some());
/// ```
pub fn checkpoint_sequential<M, I, F>(modules: &[M], input: I, forward: F) -> I
where
    M: Module + 'static,
    I: Tensors,
    F: Fn(&M, I) -> I + Copy + Send + Sync + 'static,
{
    let segment = (modules.len() as f64).sqrt().ceil().max(1.0) as usize;
    modules.chunks(segment).fold(input, |input, modules| {
        checkpoint(&modules.to_vec(), input, move |modules, input| {
            modules.iter().fold(input, |input, module| forward(module, input))
        })
    })
}
