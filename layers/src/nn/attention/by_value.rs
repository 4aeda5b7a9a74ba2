//! The operators of [`Tensor`] and its methods that take `self` by value, for [`AttentionWeights`]; `Deref` covers the methods
//! that take a reference.
use super::AttentionWeights;
use burn::tensor::{
    AsIndex, Bool, BroadcastArgs, Cast, DType, Device, DimIter, Element, ElementConversion, ExecutionError,
    Float, IndexingUpdateOp, Int, IntoPadding, MovedimArgs, ReshapeArgs, Slice, SliceArg, Tensor, TensorData,
    TensorReadError, ops::PadMode,
};
use core::fmt::{self, Display, Formatter};
use core::ops::{Add, Div, Mul, Neg, Rem, Sub};

/// Defines methods by their signature: generics, arguments and return type, then the names of all methods that have it.
macro_rules! methods {
    ($($generics:tt $arguments:tt -> $output:ty: $($name:ident)*;)*) => {
        $(methods!(@each $generics $arguments ($output) $($name)*);)*
    };
    (@each $generics:tt $arguments:tt $output:tt $($name:ident)*) => {
        $(methods!(@one $name $generics $arguments $output);)*
    };
    (@one $name:ident [$($generics:tt)*] ($($argument:ident: $type:ty),*) ($output:ty)) => {
        #[doc = concat!("[`Tensor::", stringify!($name), "`] of the weights.")]
        pub fn $name<$($generics)*>(self, $($argument: $type),*) -> $output {
            self.into_tensor().$name($($argument),*)
        }
    };
}

#[rustfmt::skip] // a table
#[allow(clippy::should_implement_trait)] // the operators are implemented, too, below
impl AttentionWeights {
    methods! {
        [] () -> Tensor<4>:
            abs acos acosh asin asinh atan atanh ceil cos cosh deg2rad dequantize detach erf exp floor log log1p neg rad2deg recip
            require_grad round sign sin sinh sqrt square t tan tanh transpose trunc inner autodiff without_autodiff;
        [] () -> Tensor<1>: max max_abs mean min prod sum;
        [] () -> Tensor<4, Int>: int;
        [] () -> Tensor<4, Bool>: bool is_finite is_inf is_nan;
        [] () -> Tensor<1, Bool>: all any contains_nan;
        [] () -> TensorData: into_data;

        [I: AsIndex] (dim: I) -> Tensor<4>:
            cummax cummin cumprod cumsum max_abs_dim max_dim mean_dim median min_dim prod_dim sort sort_descending sum_dim var
            var_bias;
        [I: AsIndex] (dim: I) -> Tensor<4, Int>: argsort argsort_descending;
        [] (dim: impl AsIndex) -> Tensor<4, Int>: argmax argmin;
        [] (dim: impl AsIndex) -> Tensor<4, Bool>: all_dim any_dim;
        [I: AsIndex] (dim: I) -> (Tensor<4>, Tensor<4>): var_mean var_mean_bias;
        [I: AsIndex] (dim: I) -> (Tensor<4>, Tensor<4, Int>):
            max_dim_with_indices median_with_indices min_dim_with_indices sort_descending_with_indices sort_with_indices;
        [I: AsIndex] (dims: &[I]) -> Tensor<4>: max_abs_dims max_dims mean_dims min_dims prod_dims sum_dims;
        [const D2: usize, I: AsIndex] (dims: &[I]) -> Tensor<D2>: sum_dims_squeeze;
        [I: AsIndex] (k: usize, dim: I) -> Tensor<4>: topk;
        [I: AsIndex] (k: usize, dim: I) -> (Tensor<4>, Tensor<4, Int>): topk_with_indices;
        [] (k: usize, dim: impl AsIndex) -> Tensor<4, Int>: argtopk;
        [I: AsIndex] (dim: I, correction_factor: usize) -> Tensor<4>: cov;

        [] (other: Tensor<4>) -> Tensor<4>:
            add atan2 div fmod hypot matmul max_pair min_pair mul powf powi remainder sub;
        [] (other: Tensor<4>) -> Tensor<4, Bool>: equal greater greater_equal lower lower_equal not_equal;
        [Dim: AsIndex] (other: Tensor<4>, dim: Dim) -> Tensor<4>: cross;
        [] (other: Tensor<4>, rtol: Option<f64>, atol: Option<f64>) -> Tensor<4, Bool>: is_close;
        [] (other: Tensor<4>, rtol: Option<f64>, atol: Option<f64>) -> bool: all_close;
        [E: ElementConversion] (other: E) -> Tensor<4>:
            add_scalar div_scalar mul_scalar powf_scalar powi_scalar remainder_scalar sub_scalar;
        [] (scalar: f32) -> Tensor<4>: fmod_scalar;
        [E: ElementConversion] (min: E, max: E) -> Tensor<4>: clamp;
        [E: ElementConversion] (bound: E) -> Tensor<4>: clamp_max clamp_min;
        [E: ElementConversion] (other: E) -> Tensor<4, Bool>:
            greater_elem greater_equal_elem greater_equal_scalar greater_scalar lower_elem lower_equal_elem lower_equal_scalar
            lower_scalar;
        [E: Element] (other: E) -> Tensor<4, Bool>: equal_elem equal_scalar not_equal_elem not_equal_scalar;
        [] (diagonal: i64) -> Tensor<4>: tril triu;
        [] (num_samples: usize) -> Tensor<4, Int>: categorical;
        [const D2: usize] (num_classes: usize) -> Tensor<D2>: one_hot;

        [const D2: usize, S: ReshapeArgs<D2>] (shape: S) -> Tensor<D2>: reshape;
        [const D2: usize, S: BroadcastArgs<4, D2>] (shape: S) -> Tensor<D2>: expand;
        [Dim1: AsIndex, Dim2: AsIndex] (dim1: Dim1, dim2: Dim2) -> Tensor<4>: swap_dims;
        [Dim: AsIndex] (axes: [Dim; 4]) -> Tensor<4>: permute;
        [S1: MovedimArgs, S2: MovedimArgs] (src: S1, dst: S2) -> Tensor<4>: movedim;
        [const N: usize] (axes: [impl AsIndex; N]) -> Tensor<4>: flip;
        [const D2: usize] (start_dim: impl AsIndex, end_dim: impl AsIndex) -> Tensor<D2>: flatten;
        [const D2: usize] () -> Tensor<D2>: squeeze unsqueeze;
        [const D2: usize] (dim: impl AsIndex) -> Tensor<D2>: squeeze_dim unsqueeze_dim;
        [const D2: usize] (dims: &[impl AsIndex]) -> Tensor<D2>: squeeze_dims unsqueeze_dims;
        [const D2: usize, I: AsIndex] (dim: I, size: usize, step: usize) -> Tensor<D2>: unfold;
        [Shift: AsIndex, Dim: AsIndex] (shift: Shift, dim: Dim) -> Tensor<4>: roll_dim;
        [Shift: AsIndex, Dim: AsIndex] (shifts: &[Shift], dims: &[Dim]) -> Tensor<4>: roll;
        [] (dim: impl AsIndex, times: usize) -> Tensor<4>: repeat_dim;
        [] (sizes: &[usize]) -> Tensor<4>: repeat;
        [] (padding: impl IntoPadding<4>, mode: impl Into<PadMode>) -> Tensor<4>: pad;

        [S: SliceArg] (slices: S) -> Tensor<4>: slice;
        [S: SliceArg] (slices: S, values: Tensor<4>) -> Tensor<4>: slice_assign;
        [S: SliceArg, E: Element] (slices: S, value: E) -> Tensor<4>: slice_fill;
        [S: Into<Slice>] (dim: impl AsIndex, slice: S) -> Tensor<4>: slice_dim;
        [] (dim: impl AsIndex, start: usize, length: usize) -> Tensor<4>: narrow;
        [] (chunks: usize, dim: impl AsIndex) -> Vec<Tensor<4>>: chunk;
        [] (split_size: usize, dim: impl AsIndex) -> Vec<Tensor<4>>: split;
        [] (split_sizes: Vec<usize>, dim: impl AsIndex) -> Vec<Tensor<4>>: split_with_sizes;
        [] (dim: impl AsIndex) -> DimIter<4, Float>: iter_dim;
        [] (dim: impl AsIndex, indices: Tensor<1, Int>) -> Tensor<4>: select;
        [const D2: usize] (dim: impl AsIndex, index: impl AsIndex) -> Tensor<D2>: select_dim;
        [] (dim: impl AsIndex, indices: Tensor<1, Int>, values: Tensor<4>, update: IndexingUpdateOp) -> Tensor<4>: select_assign;
        [] (dim: impl AsIndex, indices: Tensor<4, Int>) -> Tensor<4>: gather;
        [] (dim: impl AsIndex, indices: Tensor<4, Int>, values: Tensor<4>, update: IndexingUpdateOp) -> Tensor<4>: scatter;
        [E: ElementConversion] (mask: Tensor<4, Bool>, value: E) -> Tensor<4>: mask_fill;
        [] (mask: Tensor<4, Bool>, value: Tensor<4>) -> Tensor<4>: mask_where;
        [] (mask: Tensor<4, Bool>) -> Tensor<1>: mask_select;

        [] (device: &Device) -> Tensor<4>: to_device;
        [T: Cast<4, Float>] (dtype: T) -> Tensor<4, T::OutputKind>: cast;
        [] (require_grad: bool) -> Tensor<4>: set_require_grad;
        [] (dtype: DType) -> TensorData: into_data_dtype;
        [E: Element] () -> E: into_scalar;
        [] () -> Result<TensorData, ExecutionError>: try_into_data;
        [] (dtype: DType) -> Result<TensorData, TensorReadError>: try_into_data_dtype;
        [E: Element] () -> Result<Vec<E>, TensorReadError>: try_into_vec_as;
        [E: Element] () -> Result<E, TensorReadError>: try_into_scalar;
        [] () -> impl Future<Output = Result<TensorData, ExecutionError>> + Send: into_data_async;
    }

    /// [`Tensor::into_data_as`] of the weights.
    pub fn into_data_as<E: Element>(self) -> TensorData {
        self.into_tensor().into_data_as::<E>()
    }

    /// [`Tensor::try_into_data_as`] of the weights.
    pub fn try_into_data_as<E: Element>(self) -> Result<TensorData, TensorReadError> {
        self.into_tensor().try_into_data_as::<E>()
    }

    /// [`Tensor::inplace`] of the weights.
    pub fn inplace<F: FnOnce(Tensor<4>) -> Tensor<4>>(&mut self, func: F) {
        *self = func(self.clone().into_tensor()).into();
    }
}

/// Implements an operator of [`Tensor`], with the weights on either side.
macro_rules! operators {
    ($($operator:ident $method:ident, $($number:ty)*;)*) => {$(
        impl<R> $operator<R> for AttentionWeights
        where
            Tensor<4>: $operator<R>,
        {
            type Output = <Tensor<4> as $operator<R>>::Output;

            fn $method(self, right: R) -> Self::Output {
                $operator::$method(self.into_tensor(), right)
            }
        }
        operators!(@left $operator $method Tensor<4>);
        $(operators!(@left $operator $method $number);)*
    )*};
    (@left $operator:ident $method:ident $left:ty) => {
        impl $operator<AttentionWeights> for $left {
            type Output = Tensor<4>;

            fn $method(self, right: AttentionWeights) -> Tensor<4> {
                $operator::$method(self, right.into_tensor())
            }
        }
    };
}

operators! {
    Add add, f32 f64 i32 i64 u32 u64;
    Sub sub, f32 f64 i32 i64 u32 u64;
    Mul mul, f32 f64 i32 i64 u32 u64;
    Div div, f32 f64;
    Rem rem,;
}

impl Neg for AttentionWeights {
    type Output = Tensor<4>;

    fn neg(self) -> Tensor<4> {
        -self.into_tensor()
    }
}

impl Display for AttentionWeights {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        Display::fmt(&**self, f)
    }
}
