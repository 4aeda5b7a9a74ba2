//! Scaled dot-product attention, which computes its weights in chunks.
use super::guard::{Fit, Misfit, NO_WEIGHT, accepts, into_maybe, is_quantized, require};
use crate::backend::optional::MaybeMask;
use crate::burn_next::sees_last_keys;
use crate::ops::{Attended, Attention, AttentionOps, Scores};
use burn::backend::Dispatch;
use burn::tensor::{Bool, Device, Shape, Tensor, module, ops::AttentionModuleOptions};

/// `softmax(q k^T * scale) v`; see [`burn::tensor::module::attention`].
///
/// Keeps handles of `q`, `k`, `v`, the mask and the bias, and nothing of the size queries x keys: it computes the weights in
/// chunks, and recomputes them in the backward pass. If only `v` is tracked, and the weights take no more memory than what they
/// are computed from, it keeps the weights instead.
///
/// Keys and values may have fewer heads than queries (grouped-query attention,
/// [arXiv 2305.13245](https://arxiv.org/abs/2305.13245)): equally many consecutive heads of queries then share one head of keys
/// and values. The shared heads are kept as they are, not repeated. Burn's own function accepts them only on Flex without
/// autodiff; if it is called elsewhere, they are repeated for it.
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor, ops::AttentionModuleOptions};
/// use burn_memsave_layers::functional::attention;
///
/// let device = Device::flex();
/// let random = |heads: usize| Tensor::<4>::random([1, heads, 5, 8], Distribution::Default, &device);
/// let (query, key, value) = (random(6), random(2), random(2));
/// let repeated = |x: Tensor<4>| x.unsqueeze_dim::<5>(2).expand([1, 2, 3, 5, 8]).reshape([1, 6, 5, 8]);
/// let options = AttentionModuleOptions::default;
/// let grouped = attention(query.clone(), key.clone(), value.clone(), None, None, options());
/// let whole = attention(query, repeated(key), repeated(value), None, None, options());
/// assert!(grouped.all_close(whole, None, None));
/// ```
pub fn attention(
    query: Tensor<4>,
    key: Tensor<4>,
    value: Tensor<4>,
    mask: Option<Tensor<4, Bool>>,
    attn_bias: Option<Tensor<4>>,
    options: AttentionModuleOptions,
) -> Tensor<4> {
    let positive = options.softcap.is_none_or(|softcap| softcap > 0.0);
    let aligned = !options.is_causal || sees_last_keys(&options, query.dims()[2], key.dims()[2]);
    let fit = tensors_fit(&query, &key, &value, &mask, &attn_bias)
        .and(require(positive, Misfit::Softcap))
        .and(require(aligned, Misfit::Options));
    let tracked = [&query, &key, &value].into_iter().chain(&attn_bias).any(Tensor::is_tracked);
    if !query.device().is_autodiff() || !accepts("attention", fit, tracked, NO_WEIGHT) {
        let [key, value] = heads_for_burn(&query, key, value);
        return module::attention(query, key, value, mask, attn_bias, options);
    }
    let scores = Scores {
        scale: options.scale.unwrap_or_else(|| (query.dims()[3] as f64).sqrt().recip()),
        softcap: options.softcap,
        causal: options.is_causal,
        masked: f64::NEG_INFINITY,
        quiet: false,
    };
    let attention = Attention { scores, dropout: None, merged: false };
    if value.is_tracked() && has_few_weights(&query, &key, &mask, &attn_bias) {
        return with_weights(query, key, value, mask, attn_bias, attention).0;
    }
    weighted(query, key, value, mask, attn_bias, attention)
}

/// Keys and values as Burn's function accepts them.
fn heads_for_burn(query: &Tensor<4>, key: Tensor<4>, value: Tensor<4>) -> [Tensor<4>; 2] {
    let ([_, heads, ..], [_, groups, ..]) = (query.dims(), key.dims());
    let are_grouped =
        groups != heads && groups > 0 && heads.is_multiple_of(groups) && value.dims()[1] == groups;
    if !are_grouped || [&key, &value].into_iter().any(is_quantized) || takes_groups(&query.device()) {
        return [key, value];
    }
    [key, value].map(|x| {
        let [batch, _, rows, width] = x.dims();
        let repeated = Shape::new([batch, groups, heads / groups, rows, width]);
        x.unsqueeze_dim::<5>(2).expand::<5, _>(repeated).flatten(1, 2)
    })
}

/// Whether Burn's function accepts shared heads on the device.
#[allow(clippy::match_single_binding, clippy::match_like_matches_macro)] // without Flex
fn takes_groups(device: &Device) -> bool {
    match device.as_dispatch() {
        #[cfg(feature = "flex")]
        burn::backend::DispatchDevice::Flex(_) => true,
        #[allow(unreachable_patterns)] // without any other backend
        _ => false,
    }
}

fn tensors_fit(
    query: &Tensor<4>,
    key: &Tensor<4>,
    value: &Tensor<4>,
    mask: &Option<Tensor<4, Bool>>,
    bias: &Option<Tensor<4>>,
) -> Fit {
    let [batch, heads, queries, width] = query.dims();
    let [_, groups, keys, _] = key.dims();
    let [_, _, _, value_width] = value.dims();
    let weights = [batch, heads, queries, keys];
    let spreads = |dims: [usize; 4]| dims.iter().zip(weights).all(|(&dim, of)| dim == 1 || dim == of);
    let shapes = heads.is_multiple_of(groups) // not of 0
        && key.dims() == [batch, groups, keys, width]
        && value.dims() == [batch, groups, keys, value_width]
        && mask.as_ref().is_none_or(|mask| spreads(mask.dims()))
        && bias.as_ref().is_none_or(|bias| spreads(bias.dims()));
    let mut others = [key, value].into_iter().chain(bias);
    require(![query, key, value].into_iter().any(is_quantized), Misfit::Quantized)?;
    require(others.all(|tensor| tensor.dtype() == query.dtype()), Misfit::Dtypes)?;
    require(weights.into_iter().chain([width, value_width]).all(|size| size > 0), Misfit::Empty)?;
    require(shapes, Misfit::Shapes)
}

/// The weighted values of tensors whose shapes fit; the weights are recomputed in the backward pass. The output is
/// `[batch, queries, heads * width]` if `merged`. If a tensor is empty, the output is zeros.
pub(crate) fn weighted<const D: usize>(
    query: Tensor<4>,
    key: Tensor<4>,
    value: Tensor<4>,
    mask: Option<Tensor<4, Bool>>,
    bias: Option<Tensor<4>>,
    attention: Attention,
) -> Tensor<D> {
    let [batch, heads, queries, _] = query.dims();
    let [_, _, keys, width] = value.dims();
    let fit = require(![batch, heads, queries, keys, width].contains(&0), Misfit::Empty);
    let tracked = [&query, &key, &value].into_iter().any(Tensor::is_tracked);
    if !accepts("attention", fit, tracked, NO_WEIGHT) {
        // A zero that is tracked if `x` is, but reads none of its elements.
        let nothing = |x: Tensor<4>| {
            let all = Tensor::<1, Bool>::from_data([true], &x.device()).unsqueeze::<4>();
            let all = all.expand(x.shape());
            x.mask_fill(all, 0).sum()
        };
        let sum = nothing(query) + nothing(key) + nothing(value);
        let shape = match attention.merged {
            true => Shape::new([batch, queries, heads * width]),
            false => Shape::new([batch, heads, queries, width]),
        };
        return Tensor::zeros(shape, (&sum.device(), sum.dtype())) + sum.reshape([1; D]);
    }
    let [query, key, value] = [query, key, value].map(Tensor::into_dispatch);
    let mask = into_maybe_mask(mask);
    Tensor::from_dispatch(Dispatch::memsave_attention(query, key, value, mask, into_maybe(bias), attention))
}

fn into_maybe_mask(mask: Option<Tensor<4, Bool>>) -> MaybeMask<Dispatch> {
    mask.map(Tensor::into_dispatch).into()
}

/// Whether to call [`with_weights`] instead of [`weighted`]: the weights need no gradient, and take no more memory than what they are
/// computed from, because there are few tokens. Then the weights are kept, as Burn does, instead of what they are computed from.
pub(crate) fn has_few_weights(
    query: &Tensor<4>,
    key: &Tensor<4>,
    mask: &Option<Tensor<4, Bool>>,
    bias: &Option<Tensor<4>>,
) -> bool {
    let mut operands = [query, key].into_iter().chain(bias);
    if operands.any(|tensor| tensor.is_tracked() || tensor.shape().num_elements() == 0) {
        return false;
    }
    let [query, key] = [query, key].map(|tensor| tensor.clone().into_dispatch());
    let mask = into_maybe_mask(mask.clone());
    Dispatch::memsave_has_few_weights(query, key, mask, into_maybe(bias.clone()))
}

/// The weighted values, and the weights after dropout, `[batch, heads, queries, keys]`, which are kept for the backward pass. The
/// tensors must fit, none may be empty, and at most the values may be tracked.
pub(crate) fn with_weights<const D: usize>(
    query: Tensor<4>,
    key: Tensor<4>,
    value: Tensor<4>,
    mask: Option<Tensor<4, Bool>>,
    bias: Option<Tensor<4>>,
    attention: Attention,
) -> (Tensor<D>, Tensor<4>) {
    let [query, key, value] = [query, key, value].map(Tensor::into_dispatch);
    let mask = into_maybe_mask(mask);
    let Attended { output, weights } =
        Dispatch::memsave_attention_with_weights(query, key, value, mask, into_maybe(bias), attention);
    (Tensor::from_dispatch(output), Tensor::from_dispatch(weights))
}
