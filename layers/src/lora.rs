//! Fine-tuning with low-rank adapters ([LoRA](https://arxiv.org/abs/2106.09685)), with Burn's own tools.
//!
//! [`Module::apply_lora`] freezes a model and attaches an [adapter](LoraAdapter) to each of its matrices. Stock layers compute the
//! effective weight, `weight + scale a b`, at every use, keep it, and compute its full gradient. The layers of this library compute
//! `x weight + scale (x a) b` instead. There are two exceptions: convolutions on devices, where that takes more launches, make a small
//! effective weight at every use and keep none; and gates of recurrent layers, deformable convolutions and the head of a fused loss use
//! the effective weight, as Burn's layers do.
//!
//! The same holds for [`Module::apply_qlora`], where the frozen weight stays quantized: it is dequantized at every use, on CPU backends
//! block by block.
//!
//! - Merging: `model.valid().materialize()` folds the adapters into the weights, see
//!   [`materialize`](burn::module::Module::materialize).
//! - Training only `b` ([LoRA-FA](https://arxiv.org/abs/2308.03303)): [freeze the group](burn::module::Module::freeze_group)
//!   [`a_factors`]; an adapted dense layer then keeps `rank` elements per row.
//! - Adapters of convolutions: [`ConvLora`].
//! - [rsLoRA](https://arxiv.org/abs/2312.03732): [`rank_stabilized`].
//! - [DoRA](https://arxiv.org/abs/2402.09353): [`Dora`].
//! - [LoRA+](https://arxiv.org/abs/2402.12354), another learning rate for `b`: the group [`b_factors`].
//!   `burn_memsave::lora::lora_plus` makes a schedule of it.
//! - The model as it was before, as the reference of a loss of preferences: [`without_adapters`].
//!
//! ```
//! use burn::module::{Lora, Module};
//! use burn::tensor::{Device, Tensor, Tolerance};
//! use burn_memsave_layers::{ledger, lora, nn::LinearConfig};
//!
//! let device = Device::flex().autodiff();
//! let model = LinearConfig::new(64, 32).init(&device).apply_lora(Lora::new(4, 8.0));
//! let model = model.freeze_group(lora::a_factors());
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
use crate::visit::VisitPath;
use burn::module::{
    Lora, LoraAdapter, Module, ModuleMapper, Param, ParamGroup, Reparameterization, Reparameterizer,
};
use burn::tensor::{Distribution, Tensor};

/// The group of the factors `a` of all adapters, which an adapted dense layer or embedding applies first.
///
/// ```
/// use burn::module::{Lora, Module};
/// use burn::tensor::Device;
/// use burn_memsave_layers::{lora, nn::EmbeddingConfig};
///
/// let embedding = EmbeddingConfig::new(8, 4).init(&Device::flex().autodiff()).apply_lora(Lora::new(2, 2.0));
/// let embedding = embedding.freeze_group(lora::a_factors());
/// let adapter = embedding.weight.adapter().unwrap();
/// assert!(!adapter.a.is_require_grad() && adapter.b.is_require_grad());
/// ```
pub fn a_factors() -> ParamGroup {
    ParamGroup::from_regex(r"(^|\.)lora\.a$").expect("a regular expression")
}

/// The group of the factors `b` of all adapters, which an adapted dense layer or embedding applies second.
///
/// ```
/// use burn::module::{Lora, Module};
/// use burn::tensor::Device;
/// use burn_memsave_layers::{lora, nn::LinearConfig};
///
/// let linear = LinearConfig::new(8, 4).init(&Device::flex().autodiff()).apply_lora(Lora::new(2, 2.0));
/// let linear = linear.freeze_group(lora::b_factors());
/// let adapter = linear.weight.adapter().unwrap();
/// assert!(adapter.a.is_require_grad() && !adapter.b.is_require_grad());
/// ```
pub fn b_factors() -> ParamGroup {
    ParamGroup::from_regex(r"(^|\.)lora\.b$").expect("a regular expression")
}

/// [rsLoRA](https://arxiv.org/abs/2312.03732): a scale of `alpha / sqrt(rank)`, so that gradients are not smaller for a higher rank.
/// Burn's scale is `alpha / rank`.
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
/// It shares all other parameters with `model`: base weights, whether dense, quantized or lazy, are not copied. Burn cannot detach an
/// adapter. So each adapter is replaced by one of rank 1 whose factors are 0, with `d_input + d_output` numbers per matrix: a layer
/// computes `x weight + (x 0) 0`, which is the same. A [`DoraAdapter`] then has no magnitude, and no norms are computed.
///
/// What was trained besides adapters, such as a bias or a norm, is as it is in `model`. Training `model` further does not change the
/// returned model, nor the other way round.
///
/// Given `model.valid()`, the returned model is without autodiff and dropout. Otherwise it has both if `model` has; even so, nothing is
/// kept for a backward pass if its input is untracked, too.
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
/// Panics if the model has adapters other than [`LoraAdapter`] and [`DoraAdapter`].
pub fn without_adapters<M: Module>(model: &M) -> M {
    model.clone().map(&mut ZeroFactors::default()).no_grad()
}

/// Replaces the factors of adapters by zeros of rank 1, and their magnitudes by tensors without elements.
#[derive(Default)]
struct ZeroFactors {
    path: VisitPath,
}

impl ModuleMapper for ZeroFactors {
    fn enter_module(&mut self, name: &str, container: &str) {
        assert!(
            !is_adapter(name, container) || [LoraAdapter::NAME, DoraAdapter::NAME].contains(&name),
            "without_adapters: {} has an adapter of another kind, {name:?}: what it adds is not a product of factors",
            self.path.joined()
        );
        self.path.enter(name, container);
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.exit();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if !self.path.fields().any(|(name, container)| is_adapter(name, container)) {
            return param;
        }
        let name = self.path.names().last().map(String::as_str);
        param.map(|value| match name {
            Some("magnitude") => Tensor::empty([0; D], (&value.device(), value.dtype())),
            // `a` is `[d_input, rank]`, `b` `[rank, d_output]`.
            Some("a") => value.narrow(1, 0, 1).zeros_like(),
            _ => value.narrow(0, 0, 1).zeros_like(),
        })
    }
}

/// Whether a field is an adapter.
fn is_adapter(name: &str, container: &str) -> bool {
    container == REPARAMETERIZATION && name != LazyWeight::NAME
}

/// [`Lora`] for convolutions, too: with [`apply_reparameterization`](burn::module::Module::apply_reparameterization) it attaches
/// adapters to all parameters of rank 2 or more that its group matches.
///
/// The adapter of a weight `[first, rest...]` has `a` `[first, rank]` and `b` `[rank, product of rest]`, so that stock layers
/// compute `weight + scale a b`, as usual. The layers of this library apply the factors as two narrow convolutions. On devices, they
/// may make a small effective weight at every use instead: see [`conv2d_lora`](crate::functional::conv2d_lora). `b` is initialized to
/// zero.
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
/// The effective weight is `magnitude * v / |v|`, where `v = weight + scale a b`, and `|v|` is the norm of each column (of each output of
/// a dense layer). At first it equals the weight. Dense layers of this library compute with the factors: see
/// [`linear_dora`](crate::functional::linear_dora). Every other layer, of Burn or of this library, makes the effective weight.
///
/// For a quantized base, quantize the weights first
/// ([`quantize_weights`](burn::module::Module::quantize_weights)). A [lazy](crate::frozen) weight is read once for its norms when the
/// adapter is attached, and then once per pass: norms and product use the same read.
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
        // Only matrices get an adapter.
        let (param, lora) = self.0.reparameterize(path, param);
        let adapter = lora.filter(|_| !is_offered_later(&given)).map(|lora| {
            let base = dense(weight_and_adapter(&given).0);
            let [rows, columns] = [lora.a.dims()[0], lora.b.dims()[1]];
            DoraAdapter::new(base.reshape([rows, columns]), lora)
        });
        (param, adapter)
    }
}
