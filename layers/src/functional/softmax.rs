//! Softmax and its variants.
use super::guard::{NO_WEIGHT, accepts, require_floats};
use crate::ops::Softmax;
use crate::ops::SoftmaxOps;
use burn::backend::Dispatch;
use burn::tensor::{AsIndex, Tensor, activation};

macro_rules! softmax {
    ($($function:ident = $f:expr, $formula:literal;)+) => {$(
        #[doc = concat!("`", $formula, "` along an axis; see [`burn::tensor::activation::", stringify!($function), "`].")]
        ///
        /// Keeps its output.
        ///
        /// # Panics
        ///
        /// Panics if the axis does not exist.
        pub fn $function<const D: usize>(x: Tensor<D>, dim: impl AsIndex) -> Tensor<D> {
            let dim = dim.as_index();
            let axis = usize::try_from(if dim < 0 { dim + D as isize } else { dim }).ok();
            let accepted = || accepts(stringify!($function), require_floats(&x), x.is_tracked(), NO_WEIGHT);
            match axis.filter(|&axis| axis < D && accepted()) {
                Some(axis) => Tensor::from_dispatch(Dispatch::memsave_softmax(x.into_dispatch(), $f, axis)),
                None => activation::$function(x, dim),
            }
        }
    )+};
}
softmax! {
    softmax = Softmax::Softmax, "exp(x) / sum(exp(x))";
    log_softmax = Softmax::LogSoftmax, "x - log(sum(exp(x)))";
    softmin = Softmax::Softmin, "exp(-x) / sum(exp(-x))";
    quiet_softmax = Softmax::QuietSoftmax, "exp(x) / (1 + sum(exp(x)))";
}
