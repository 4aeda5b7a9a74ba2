// What only a model with a fused head and loss can do.

impl Llama {
    /// The mean cross entropy of the tokens in `next [batch, length]` for which `counts [batch, length]` is 1. Tokens for which it is 0 are not
    /// learned: questions, or padding, which belongs after a text, where no other token sees it. If it is 0 everywhere, the result is NaN.
    ///
    /// Logits are computed in chunks, and a lazy head that is not in memory is read once, block by block.
    ///
    /// ```
    /// use burn::tensor::{Device, Int, Tensor, Tolerance};
    /// use burn_memsave_models::{Decoder, DecoderSize, fused::decoder::Llama};
    ///
    /// let device = Device::flex();
    /// let model = Llama::new(&DecoderSize::LLAMA_3_2_1B.tiny(), &device);
    /// let [text, next] = [[[1, 2, 3]], [[2, 3, 4]]].map(|tokens| Tensor::<2, Int>::from_ints(tokens, &device));
    /// let [padded, follows] = [[[1, 2, 3, 0]], [[2, 3, 4, 0]]].map(|tokens| Tensor::<2, Int>::from_ints(tokens, &device));
    /// let counts = Tensor::<2>::from_floats([[1.0, 1.0, 1.0, 0.0]], &device);
    /// let loss = model.loss_of_some(padded, follows, counts).into_data();
    /// loss.assert_approx_eq::<f32>(&model.loss(text, next).into_data(), Tolerance::default());
    /// ```
    pub fn loss_of_some(&self, tokens: Tensor<2, Int>, next: Tensor<2, Int>, counts: Tensor<2>) -> Tensor<1> {
        let factors = (counts.clone() / counts.sum().unsqueeze()).flatten::<1>(0, 1);
        let (x, next) = (self.hidden(tokens), next.flatten::<1>(0, 1));
        let options = functional::LinearCrossEntropyOptions {
            factors: Some(factors),
            softcap: self.logit_softcap,
            ..Default::default()
        };
        match &self.head {
            Some(head) => head.cross_entropy(x.flatten(0, 1), next, options),
            None => self.words.cross_entropy(x.flatten(0, 1), next, options),
        }
    }
}
