//! Every function of `burn::tensor::{activation, module}` 0.22.1 at the same path below `burn_memsave`, of the same signature: ours where
//! there is one. This file does not compile when one is missing.
use burn::tensor::module::BatchNormTrainOutput;
use burn::tensor::ops::{
    AttentionModuleOptions, AvgPoolOptions, ConvOptions, ConvTransposeOptions, DeformConvOptions,
    InterpolateOptions, MaxPoolOptions,
};
use burn::tensor::{Bool, Int, Tensor};
use std::any::type_name;

#[allow(unused_imports)]
mod of_burn {
    use burn_memsave::tensor::activation::DEFAULT_SOFTPLUS_THRESHOLD;
    use burn_memsave::tensor::module::{
        attention_fallback, avg_pool2d_backward, conv2d_weight_backward, ctc_loss, fold4d,
        max_pool1d_with_indices, max_pool2d_with_indices, max_pool2d_with_indices_backward, unfold4d,
    };
}

macro_rules! functions {
    ($($module:ident { $($function:ident($($argument:ty),+) -> $output:ty;)+ })+) => {
        #[test]
        fn functions_are_ours() {
            $($({
                fn path<F: Fn($($argument),+) -> $output>(_: F) -> &'static str {
                    type_name::<F>()
                }
                let stock = path(burn::tensor::$module::$function);
                assert!(stock.starts_with("burn_tensor::"), "{stock}");
                let ours = path(burn_memsave::tensor::$module::$function);
                assert!(ours.starts_with("burn_memsave_layers::functional::"), "{ours}");
            })+)+
        }
    };
}

type Bias = Option<Tensor<1>>;

functions! {
    activation {
        celu(Tensor<2>, f64) -> Tensor<2>;
        elu(Tensor<2>, f64) -> Tensor<2>;
        gelu(Tensor<2>) -> Tensor<2>;
        gelu_approximate(Tensor<2>) -> Tensor<2>;
        glu(Tensor<2>, usize) -> Tensor<2>;
        hard_shrink(Tensor<2>, f64) -> Tensor<2>;
        hard_sigmoid(Tensor<2>, f64, f64) -> Tensor<2>;
        hard_swish(Tensor<2>) -> Tensor<2>;
        hardtanh(Tensor<2>, f64, f64) -> Tensor<2>;
        leaky_relu(Tensor<2>, f64) -> Tensor<2>;
        log_sigmoid(Tensor<2>) -> Tensor<2>;
        log_softmax(Tensor<2>, isize) -> Tensor<2>;
        mish(Tensor<2>) -> Tensor<2>;
        prelu(Tensor<2>, Tensor<1>) -> Tensor<2>;
        quiet_softmax(Tensor<2>, usize) -> Tensor<2>;
        relu(Tensor<2>) -> Tensor<2>;
        relu6(Tensor<2>) -> Tensor<2>;
        selu(Tensor<2>) -> Tensor<2>;
        shrink(Tensor<2>, f64, f64) -> Tensor<2>;
        sigmoid(Tensor<2>) -> Tensor<2>;
        silu(Tensor<2>) -> Tensor<2>;
        soft_shrink(Tensor<2>, f64) -> Tensor<2>;
        softmax(Tensor<2>, usize) -> Tensor<2>;
        softmin(Tensor<2>, usize) -> Tensor<2>;
        softplus(Tensor<2>, f64) -> Tensor<2>;
        softplus_with_threshold(Tensor<2>, f64, f64) -> Tensor<2>;
        softsign(Tensor<2>) -> Tensor<2>;
        tanh(Tensor<2>) -> Tensor<2>;
        tanhshrink(Tensor<2>) -> Tensor<2>;
        threshold(Tensor<2>, f64, f64) -> Tensor<2>;
        thresholded_relu(Tensor<2>, f64) -> Tensor<2>;
    }
    module {
        adaptive_avg_pool1d(Tensor<3>, usize) -> Tensor<3>;
        adaptive_avg_pool2d(Tensor<4>, [usize; 2]) -> Tensor<4>;
        adaptive_avg_pool3d(Tensor<5>, [usize; 3]) -> Tensor<5>;
        attention(Tensor<4>, Tensor<4>, Tensor<4>, Option<Tensor<4, Bool>>, Option<Tensor<4>>, AttentionModuleOptions) -> Tensor<4>;
        avg_pool1d(Tensor<3>, AvgPoolOptions<1>) -> Tensor<3>;
        avg_pool2d(Tensor<4>, AvgPoolOptions<2>) -> Tensor<4>;
        batch_norm(Tensor<4>, Tensor<1>, Tensor<1>, Tensor<1>, Tensor<1>, f64) -> Tensor<4>;
        batch_norm_train(Tensor<4>, Tensor<1>, Tensor<1>, f64) -> BatchNormTrainOutput<4>;
        conv_transpose1d(Tensor<3>, Tensor<3>, Bias, ConvTransposeOptions<1>) -> Tensor<3>;
        conv_transpose2d(Tensor<4>, Tensor<4>, Bias, ConvTransposeOptions<2>) -> Tensor<4>;
        conv_transpose3d(Tensor<5>, Tensor<5>, Bias, ConvTransposeOptions<3>) -> Tensor<5>;
        conv1d(Tensor<3>, Tensor<3>, Bias, ConvOptions<1>) -> Tensor<3>;
        conv2d(Tensor<4>, Tensor<4>, Bias, ConvOptions<2>) -> Tensor<4>;
        conv3d(Tensor<5>, Tensor<5>, Bias, ConvOptions<3>) -> Tensor<5>;
        deform_conv2d(Tensor<4>, Tensor<4>, Tensor<4>, Option<Tensor<4>>, Bias, DeformConvOptions<2>) -> Tensor<4>;
        embedding(Tensor<2>, Tensor<2, Int>) -> Tensor<3>;
        interpolate(Tensor<4>, InterpolateOptions) -> Tensor<4>;
        layer_norm(Tensor<2>, Tensor<1>, Bias, f64) -> Tensor<2>;
        linear(Tensor<2>, Tensor<2>, Bias) -> Tensor<2>;
        max_pool1d(Tensor<3>, MaxPoolOptions<1>) -> Tensor<3>;
        max_pool2d(Tensor<4>, MaxPoolOptions<2>) -> Tensor<4>;
    }
}
