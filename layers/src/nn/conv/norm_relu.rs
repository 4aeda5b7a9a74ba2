//! The method `forward_norm_relu` of convolutions: a convolution, a batch normalization and a ReLU, fused.

macro_rules! norm_relu {
    ($conv:ident, $function:ident, $dims:literal) => {
        impl $conv {
            /// Computes `relu(norm.forward(self.forward(input)))`. If the norm uses its running statistics and its `gamma` is
            /// frozen, norm and ReLU take one pass over the result of the convolution, and only one bit per element of it is
            /// kept; see
            #[doc = concat!("[`", stringify!($function), "`](crate::functional::", stringify!($function), ").")]
            ///
            /// # Panics
            ///
            /// Panics if the input or the norm does not have the channels of the layer.
            pub fn forward_norm_relu(
                &self,
                input: burn::tensor::Tensor<$dims>,
                norm: &crate::nn::BatchNorm,
            ) -> burn::tensor::Tensor<$dims> {
                let Some(given) = norm.given(&input.device()) else {
                    return crate::functional::relu(norm.forward(self.forward(input)));
                };
                match weight_and_adapter(&self.weight) {
                    (weight, None) => {
                        let options = self.options(&input);
                        let bias = self.bias.as_ref().map(|bias| bias.val());
                        crate::functional::$function(input, weight, bias, given, options)
                    }
                    (weight, adapter) => {
                        crate::functional::relu(norm.forward(self.forward_with(input, weight, adapter)))
                    }
                }
            }
        }
    };
}
pub(super) use norm_relu;
