//! Optional tensors as arguments of an operation, which Burn can route to the backend of the other tensors.
use burn::backend::{
    Backend, BackendTensor, DispatchAutodiffContext, DispatchTensor, DispatchTensorKind, ExtensionType,
    tensor::{BoolTensor, FloatTensor},
};

/// An optional tensor of an operation, such as a bias.
#[derive(ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub enum MaybeTensor<B: Backend> {
    /// It is given.
    Some(FloatTensor<B>),
    /// It is not given.
    None,
}

impl<B: Backend> From<Option<FloatTensor<B>>> for MaybeTensor<B> {
    fn from(tensor: Option<FloatTensor<B>>) -> Self {
        tensor.map_or(Self::None, Self::Some)
    }
}

impl<B: Backend> MaybeTensor<B> {
    /// As an option.
    pub fn into_option(self) -> Option<FloatTensor<B>> {
        match self {
            Self::Some(tensor) => Some(tensor),
            Self::None => None,
        }
    }
}

/// Up to four optional tensors of an operation on devices, such as those of gates.
#[cfg(any(feature = "wgpu", feature = "cuda"))]
#[derive(ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct UpToFour<B: Backend> {
    #[extension_type]
    pub(crate) first: MaybeTensor<B>,
    #[extension_type]
    second: MaybeTensor<B>,
    #[extension_type]
    third: MaybeTensor<B>,
    #[extension_type]
    fourth: MaybeTensor<B>,
}

#[cfg(any(feature = "wgpu", feature = "cuda"))]
impl<B: Backend> UpToFour<B> {
    pub(crate) fn new(tensors: impl IntoIterator<Item = Option<FloatTensor<B>>>) -> Self {
        let mut tensors = tensors.into_iter();
        let mut next = || tensors.next().flatten().into();
        Self { first: next(), second: next(), third: next(), fourth: next() }
    }

    pub(crate) fn into_options(self) -> [Option<FloatTensor<B>>; 4] {
        [self.first, self.second, self.third, self.fourth].map(MaybeTensor::into_option)
    }
}

/// An optional mask of an operation.
#[derive(ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub enum MaybeMask<B: Backend> {
    /// It is given.
    Some(BoolTensor<B>),
    /// It is not given.
    None,
}

impl<B: Backend> From<Option<BoolTensor<B>>> for MaybeMask<B> {
    fn from(mask: Option<BoolTensor<B>>) -> Self {
        mask.map_or(Self::None, Self::Some)
    }
}

impl<B: Backend> MaybeMask<B> {
    /// As an option.
    pub fn into_option(self) -> Option<BoolTensor<B>> {
        match self {
            Self::Some(mask) => Some(mask),
            Self::None => None,
        }
    }
}

/// Any number of optional tensors.
pub struct OptionalTensors<B: Backend>(pub Vec<Option<FloatTensor<B>>>);

impl<B: Backend> ExtensionType<B> for OptionalTensors<B> {
    type Target = OptionalTensors<burn::backend::Dispatch>;

    fn map_to_dispatch<F>(self, map_kind: F, autodiff: DispatchAutodiffContext) -> Self::Target
    where
        F: Fn(BackendTensor<B>) -> DispatchTensorKind,
    {
        let wrap = |tensor| DispatchTensor { kind: map_kind(BackendTensor::Float(tensor)), autodiff };
        OptionalTensors(self.0.into_iter().map(|tensor| tensor.map(wrap)).collect())
    }

    fn map_from_dispatch<F>(target: Self::Target, unwrap_kind: F) -> Self
    where
        F: Fn(DispatchTensor) -> BackendTensor<B>,
    {
        let unwrap = |tensor| unwrap_kind(tensor).float();
        OptionalTensors(target.0.into_iter().map(|tensor| tensor.map(unwrap)).collect())
    }

    fn routing_tensor(target: &Self::Target) -> Option<&DispatchTensor> {
        target.0.iter().flatten().next()
    }

    fn routing_float_tensor(target: &Self::Target) -> Option<&DispatchTensor> {
        Self::routing_tensor(target)
    }

    fn autodiff_context(target: &Self::Target) -> DispatchAutodiffContext {
        let contexts = target.0.iter().flatten().map(|tensor| tensor.autodiff);
        contexts.fold(DispatchAutodiffContext::Disabled, |context, other| context.merge(other))
    }
}
