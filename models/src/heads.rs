//! Heads of attentions.
use burn::tensor::Tensor;

/// `[batch, tokens, heads * width]` as `[batch, heads, tokens, width]`: a view.
pub(crate) fn by_heads(x: Tensor<3>, heads: usize) -> Tensor<4> {
    let [batch, tokens, width] = x.dims();
    x.reshape([batch, tokens, heads, width / heads]).swap_dims(1, 2)
}
