//! Fine-tuning with low-rank adapters ([LoRA](https://arxiv.org/abs/2106.09685)), with Burn's own tools.
//!
//! [`Module::apply_lora`] freezes a model and attaches an [adapter](LoraAdapter) to each of
//! its matrices. Stock layers compute the effective weight, `weight + scale a b`, at every use, keep it, and compute its full
//! gradient; the layers of this library compute `x weight + scale (x a) b` (convolutions on devices, where that takes more
//! launches, make a small effective weight at every use, and keep none; gates of recurrent layers, deformable convolutions and the
//! head of a fused loss are adapted as Burn's layers are). The same goes for
//! [`Module::apply_qlora`], where the frozen weight is quantized and stays so: it is
//! dequantized at every use, on CPU backends block by block.
//!
//! - Merging: `model.valid().materialize()` folds the adapters into the weights, see
//!   [`materialize`](burn::module::Module::materialize).
//! - Training only `b` ([LoRA-FA](https://arxiv.org/abs/2308.03303)): [freeze the group](burn::module::Module::freeze_group)
//!   [`first_factors`]; an adapted dense layer then keeps `rank` elements per row.
//! - Adapters of convolutions: [`ConvLora`].
//! - [rsLoRA](https://arxiv.org/abs/2312.03732): [`rank_stabilized`].
//! - [DoRA](https://arxiv.org/abs/2402.09353): [`Dora`].
//! - [LoRA+](https://arxiv.org/abs/2402.12354), another learning rate for `b`: the group [`second_factors`].
//!   `burn_memsave::lora::plus` makes a schedule of it.
//! - The model as it was before, as the reference of a loss of preferences: [`without_adapters`].
//!
//! ```
//! use burn::module::{Lora, Module};
//! use burn::tensor::{Device, Tensor, Tolerance};
//! use burn_memsave_layers::{ledger, lora, nn::LinearConfig};
//!
//! let device = Device::flex().autodiff();
//! let model = LinearConfig::new(64, 32).init(&device).apply_lora(Lora::new(4, 8.0));
//! let model = model.freeze_group(lora::first_factors());
//!
//! let x = Tensor::<2>::ones([10, 64], &device);
//! let (y, kept) = ledger::record(|| model.forward(x.clone()));
//! assert_eq!(kept.iter().filter_map(|kept| kept.bytes).sum::<usize>(), 4 * 10 * 4); // x a
//! let gradients = y.clone().sum().backward();
//! let adapter = model.weight.adapter().unwrap();
//! assert!(adapter.b.grad(&gradients).is_some() && adapter.a.grad(&gradients).is_none());
//!
//! let merged = model.valid().materialize();
//! assert!(merged.weight.adapter().is_none());
//! let (merged, adapted) = (merged.forward(x.inner()).into_data(), y.inner().into_data());
//! merged.assert_approx_eq::<f32>(&adapted, Tolerance::default());
//! ```
pub use crate::adapter::DoraAdapter;
use crate::adapter::dense;
use crate::burn_internals::REPARAMETERIZATION;
use crate::frozen::{LazyWeight, is_offered_later, weight_and_adapter};
use burn::module::{
    Lora, LoraAdapter, Module, ModuleMapper, Param, ParamGroup, Reparameterization, Reparameterizer,
};
use burn::tensor::{Distribution, Tensor};

/// The group of the factors `a` of all adapters: those that an adapted dense layer or embedding applies first.
///
/// ```
/// use burn::module::{Lora, Module};
/// use burn::tensor::Device;
/// use burn_memsave_layers::{lora, nn::EmbeddingConfig};
///
/// let embedding = EmbeddingConfig::new(8, 4).init(&Device::flex().autodiff()).apply_lora(Lora::new(2, 2.0));
/// let embedding = embedding.freeze_group(lora::first_factors());
/// let adapter = embedding.weight.adapter().unwrap();
/// assert!(!adapter.a.is_require_grad() && adapter.b.is_require_grad());
/// ```
pub fn first_factors() -> ParamGroup {
    ParamGroup::from_regex(r"(^|\.)lora\.a$").expect("a regular expression")
}

/// The group of the factors `b` of all adapters: those that an adapted dense layer or embedding applies second.
///
/// ```
/// use burn::module::{Lora, Module};
/// use burn::tensor::Device;
/// use burn_memsave_layers::{lora, nn::LinearConfig};
///
/// let linear = LinearConfig::new(8, 4).init(&Device::flex().autodiff()).apply_lora(Lora::new(2, 2.0));
/// let linear = linear.freeze_group(lora::second_factors());
/// let adapter = linear.weight.adapter().unwrap();
/// assert!(adapter.a.is_require_grad() && !adapter.b.is_require_grad());
/// ```
pub fn second_factors() -> ParamGroup {
    ParamGroup::from_regex(r"(^|\.)lora\.b$").expect("a regular expression")
}

/// [rsLoRA](https://arxiv.org/abs/2312.03732): a scale of `alpha / sqrt(rank)`, so that gradients are as large for a higher rank;
/// Burn's is
/// `alpha / rank`.
///
/// ```
/// use burn::module::Module;
/// use burn::tensor::Device;
/// use burn_memsave_layers::{lora, nn::LinearConfig};
///
/// let linear = LinearConfig::new(32, 32).init(&Device::flex().autodiff());
/// let linear = linear.apply_lora(lora::rank_stabilized(16, 8.0));
/// assert_eq!(linear.weight.adapter().unwrap().scale, 2.0);
/// ```
pub fn rank_stabilized(rank: usize, alpha: f64) -> Lora {
    Lora::new(rank, alpha * (rank as f64).sqrt())
}

/// The model that the adapters were attached to, frozen: the reference of [`dpo_loss`](crate::functional::dpo_loss), for example.
///
/// It shares all other parameters with `model`: base weights, dense, quantized or lazy, are not copied. Burn cannot detach an
/// adapter, so in its place are factors of rank 1 that are 0, `d_input + d_output` numbers of a matrix: the result is the same,
/// and a layer computes `x weight + (x 0) 0`. A [`DoraAdapter`] has no magnitude then, and no norms are computed. What was trained besides adapters, such as a bias or a norm, is as it is in `model`;
/// training `model` further does not change what is returned here, nor the other way round.
///
/// With `model.valid()` it is a model without autodiff, and without dropout; else it keeps what it has of both, and nothing is kept
/// for a backward pass, as long as its input is untracked, too.
///
/// ```
/// use burn::module::{Lora, Module};
/// use burn::tensor::{Device, Tensor};
/// use burn_memsave_layers::{lora, nn::LinearConfig};
///
/// let device = Device::flex().autodiff();
/// let base = LinearConfig::new(8, 4).init(&device);
/// let model = base.clone().apply_lora(Lora::new(2, 4.0)); // and trained
///
/// let reference = lora::without_adapters(&model.valid());
/// assert!(reference.weight.adapter().unwrap().b.val().into_data().iter::<f32>().all(|b| b == 0.0));
/// let x = Tensor::<2>::ones([3, 8], &device.inner());
/// reference.forward(x.clone()).into_data().assert_eq(&base.valid().forward(x).into_data(), true);
/// ```
///
/// # Panics
///
/// Panics if the model has adapters of another kind than [`LoraAdapter`] and [`DoraAdapter`].
pub fn without_adapters<M: Module>(model: &M) -> M {
    model.clone().map(&mut ZeroFactors { within: Vec::new() }).no_grad()
}

/// Puts factors of rank 1 that are 0 in place of those of adapters, and no magnitude in place of theirs.
struct ZeroFactors {
    /// For every module around: the name of a field, and whether the field is one of an adapter.
    within: Vec<(String, bool)>,
}

impl ModuleMapper for ZeroFactors {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        let is_adapter = container_type == REPARAMETERIZATION && name != LazyWeight::NAME;
        assert!(
            !is_adapter || [LoraAdapter::NAME, DoraAdapter::NAME].contains(&name),
            "without_adapters: {} has an adapter of another kind, {name:?}: what it adds is not a product of factors",
            self.within.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(".")
        );
        self.within.push((name.into(), is_adapter));
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.within.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if !self.within.iter().any(|(_, is_adapter)| *is_adapter) {
            return param;
        }
        let name = self.within.last().map(|(name, _)| name.as_str());
        param.map(|value| match name {
            Some("magnitude") => Tensor::empty([0; D], (&value.device(), value.dtype())),
            // `a` is `[d_input, rank]`, `b` `[rank, d_output]`.
            Some("a") => value.narrow(1, 0, 1).zeros_like(),
            _ => value.narrow(0, 0, 1).zeros_like(),
        })
    }
}

/// [`Lora`] for convolutions, too: with [`apply_reparameterization`](burn::module::Module::apply_reparameterization) it attaches
/// adapters to all parameters of rank 2 or more that its group matches.
///
/// The adapter of a weight `[first, rest...]` has `a` `[first, rank]` and `b` `[rank, product of rest]`, so that stock layers
/// compute `weight + scale a b`, as usual. The layers of this library apply the factors as two narrow convolutions, or, on devices,
/// make a small effective weight at every use, see [`conv2d_lora`](crate::functional::conv2d_lora). `b` is initialized to zero.
///
/// ```
/// use burn::module::{Lora, Module};
/// use burn::tensor::{Device, Tensor};
/// use burn_memsave_layers::{lora::ConvLora, nn::conv::Conv2dConfig};
///
/// let device = Device::flex().autodiff();
/// let conv = Conv2dConfig::new([16, 32], [3, 3]).init(&device);
/// let conv = conv.apply_reparameterization(ConvLora::new(Lora::new(4, 4.0)));
/// assert_eq!(conv.weight.adapter().unwrap().b.dims(), [4, 16 * 3 * 3]);
/// let gradients = conv.forward(Tensor::ones([1, 16, 8, 8], &device)).sum().backward();
/// assert!(conv.weight.adapter().unwrap().b.grad(&gradients).is_some());
/// ```
#[derive(Clone, Debug)]
pub struct ConvLora(Lora);

impl ConvLora {
    /// With the settings of `lora`.
    pub fn new(lora: Lora) -> Self {
        Self(lora)
    }
}

impl Reparameterizer for ConvLora {
    type Reparam = LoraAdapter;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<LoraAdapter>) {
        let Self(lora) = self;
        if D < 3 || !lora.param_group.matches(&param.id, Some(path)) {
            return lora.reparameterize(path, param);
        }
        let base = param.base();
        let (device, first) = (base.device(), base.dims()[0]);
        let rest = base.shape().num_elements() / first.max(1);
        // As `Lora` does: the dtype of a quantized base says nothing.
        let dtype = lora.dtype.or_else(|| base.dtype().is_float().then(|| base.dtype().into()));
        let std = lora.init_std.unwrap_or(1.0 / lora.rank as f64);
        let a = Tensor::<2>::random([first, lora.rank], Distribution::Normal(0.0, std), &device);
        let b = Tensor::<2>::zeros([lora.rank, rest], &device);
        let [a, b] = [a, b].map(|factor| match dtype {
            Some(dtype) => factor.cast(dtype),
            None => factor,
        });
        let (a, b) = (Param::from_tensor(a), Param::from_tensor(b));
        let adapter = LoraAdapter { a, b, scale: lora.alpha / lora.rank as f64 };
        (param.set_require_grad(false), Some(adapter))
    }
}

/// [DoRA](https://arxiv.org/abs/2402.09353): with [`apply_reparameterization`](burn::module::Module::apply_reparameterization) it
/// attaches a [`DoraAdapter`] to every matrix that the group of `lora` matches, and freezes everything else.
///
/// The effective weight is `magnitude * v / |v|`, `v = weight + scale a b`, `|v|` the norm of each column (of each output of a
/// dense layer). At first it is the weight. Dense layers of this library compute with the factors, see
/// [`linear_dora`](functional::linear_dora); every other layer, Burn's too, makes the effective weight.
///
/// For a quantized base, quantize the weights first
/// ([`quantize_weights`](burn::module::Module::quantize_weights)). A [lazy](crate::frozen) weight is read once when the adapter is
/// attached, for its norms, and then once per pass: the norms are computed from what the product reads.
///
/// ```
/// use burn::module::{Lora, Module};
/// use burn::tensor::{Device, Tensor};
/// use burn_memsave_layers::{lora::{Dora, DoraAdapter}, nn::LinearConfig};
///
/// let device = Device::flex().autodiff();
/// let linear = LinearConfig::new(8, 4).init(&device).apply_reparameterization(Dora::new(Lora::new(2, 4.0)));
/// let gradients = linear.forward(Tensor::<2>::ones([3, 8], &device)).sum().backward();
/// let adapter = linear.weight.reparameterization::<DoraAdapter>().unwrap();
/// assert_eq!(adapter.magnitude.val().grad(&gradients).unwrap().dims(), [4]);
/// ```
#[derive(Clone, Debug)]
pub struct Dora(Lora);

impl Dora {
    /// With the settings of `lora`.
    pub fn new(lora: Lora) -> Self {
        Self(lora)
    }
}

impl Reparameterizer for Dora {
    type Reparam = DoraAdapter;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<DoraAdapter>) {
        let given = param.clone(); // with its lazy weight, which `param` loses when it is frozen
        // Of matrices.
        let (param, lora) = self.0.reparameterize(path, param);
        let adapter = lora.filter(|_| !is_offered_later(&given)).map(|lora| {
            let base = dense(weight_and_adapter(&given).0);
            let [rows, columns] = [lora.a.dims()[0], lora.b.dims()[1]];
            DoraAdapter::new(base.reshape([rows, columns]), lora)
        });
        (param, adapter)
    }
}
