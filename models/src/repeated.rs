//! Grouped-query attention, as users of Burn write it.
use burn::tensor::{Bool, Shape, Tensor, module, ops::AttentionModuleOptions};

/// Burn's attention, with the heads of keys and values repeated for the heads of queries that share them.
pub fn attention(
    query: Tensor<4>,
    key: Tensor<4>,
    value: Tensor<4>,
    mask: Option<Tensor<4, Bool>>,
    bias: Option<Tensor<4>>,
    options: AttentionModuleOptions,
) -> Tensor<4> {
    let heads = query.dims()[1];
    let repeated = |x: Tensor<4>| match heads / x.dims()[1] {
        1 => x,
        times => {
            let [batch, groups, length, width] = x.dims();
            let shape = Shape::new([batch, groups, times, length, width]);
            x.unsqueeze_dim::<5>(2).expand::<5, _>(shape).flatten(1, 2)
        }
    };
    module::attention(query, repeated(key), repeated(value), mask, bias, options)
}
