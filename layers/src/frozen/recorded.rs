//! What a record holds of a parameter, without reading lazy weights.
use super::{FrozenWeight, side_channel};
use burn::module::Param;
use burn::tensor::Tensor;
use std::sync::Arc;

/// What a record holds of a parameter.
#[derive(Debug)]
#[allow(
    clippy::large_enum_variant,
    reason = "returned to the caller, one at a time; small without a backend"
)]
pub enum Recorded<const D: usize> {
    /// The value of an ordinary parameter.
    Value(Tensor<D>),
    /// The weight of a lazy parameter, not read.
    Frozen(Arc<dyn FrozenWeight>),
}

impl<const D: usize> Recorded<D> {
    /// What a record holds of this parameter, which is given as a visitor gets it. A lazy weight is not read.
    pub fn of(param: &Param<Tensor<D>>) -> Self {
        let (value, frozen) = side_channel::ask_for_weight(|| param.transform_for_save().into_value());
        frozen.map_or(Self::Value(value), Self::Frozen)
    }

    /// The value of this parameter as its layer uses it, which its module may lay out in another way than a record, without its adapter. A lazy
    /// weight is read.
    pub fn read(param: &Param<Tensor<D>>) -> Tensor<D> {
        let Self::Frozen(weight) = Self::of(param) else { return param.base() };
        let value = Tensor::from_data(weight.read(), (&param.lazy_device(), weight.dtype()));
        side_channel::without_note(|| param.clone().transform_for_load(value, param.id)).base()
    }
}
