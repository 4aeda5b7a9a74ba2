//! A convolution, a batch normalization and a ReLU at once.

macro_rules! norm_relu {
    ($conv:ident, $function:ident, $dims:literal) => {
        impl $conv {
            /// `relu(norm.forward(self.forward(input)))`. If the norm uses its running statistics and its `gamma` is frozen, that is
            /// one pass over the result of the convolution, of which a bit per element is kept; see
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
