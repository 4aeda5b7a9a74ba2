//! A small language model with adapters, and what it is trained on.
use burn::module::{Lora, Module, ModuleMapper, Param, ParamGroup};
use burn::tensor::{Device, Int, Tensor};
use burn_memsave_paper::text::llama::{LanguageModel, Size, memsave::Llama};

/// The sizes of the model.
pub const SIZE: Size = Size { vocabulary: 31, width: 16, heads: 2, hidden: 24, blocks: 2, length: 8 };

/// With adapters whose second factors are not zero, so that the first have gradients.
pub fn language_model(device: &Device) -> Llama {
    device.seed(5);
    adapted(Llama::new(&SIZE, device)).map(&mut Shift)
}

/// With adapters of all matrices in blocks.
pub fn adapted(model: Llama) -> Llama {
    let group = ParamGroup::from_regex(r"^blocks\..*\.weight$").expect("a regular expression");
    model.apply_lora(Lora::new(2, 4.0).set_param_group(group))
}

/// Moves the parameters that are trained away from zero.
pub struct Shift;

impl ModuleMapper for Shift {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match param.is_require_grad() {
            true => param.map(|value| (value.inner() + 0.05).autodiff().require_grad()),
            false => param,
        }
    }
}

/// Two factors of seven matrices in two blocks.
pub const ADAPTER_FACTORS: usize = 2 * 7 * 2;

/// Tokens, and those that follow.
pub type Batch = (Tensor<2, Int>, Tensor<2, Int>);

/// Passages of eight tokens, which depend on the step.
pub fn tokens(step: usize, items: usize, device: &Device) -> Batch {
    let of = |first: usize| {
        let tokens: Vec<i64> = (0..items * 8).map(|at| ((first + at * 7 + at / 8) % 31) as i64).collect();
        Tensor::<1, Int>::from_data(tokens.as_slice(), device).reshape([items, 8])
    };
    (of(step), of(step + 3))
}
