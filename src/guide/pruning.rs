//! Pruning: frozen weights that are smaller, or stored without their zeros.
//!
//! Burn 0.22 has no sparse tensors and no sparse kernels: a weight that is multiplied by a mask of zeros takes as many bytes,
//! and as much time, as before. Two things do save memory: removing whole channels or heads, and storing single weights
//! sparsely.
//!
//! # What it saves
//!
//! Removing half of a block's hidden features halves its parameters. If you store only a share `s` of the values of an f32
//! weight, they take `s + 1/32` of its bytes. The examples below assert both (`cargo test --doc pruning`). In the second one, a
//! tenth of the values takes 0.55 MiB instead of 4 MiB (two cores). No command measures this on a larger model, because how
//! much you can prune depends on the model.
//!
//! # What it costs
//!
//! Pruning mostly costs accuracy, and more training to win it back. That training can use [adapters](super::adapters) on the
//! frozen sparse weights. Sparse storage also costs time, because every use of a weight makes it dense. Smaller matrices, on the
//! other hand, save time.
//!
//! # When to use it
//!
//! Use it rarely. 8 bits ([quantized weights](super::quantized_weights)) save as much as storing a quarter of the values, and
//! usually cost less accuracy. Remove channels if the model was trained or regularized for it.
//!
//! # Example: whole channels or heads
//!
//! A feed-forward block loses its least important hidden features: columns of its first weight, the same entries of its bias,
//! and rows of its second weight. What remains is an ordinary, smaller model. Burn's tensors are enough for this:
//!
//! ```
//! use burn::module::Module;
//! use burn::tensor::{Device, Distribution, Tensor, Tolerance};
//! use burn_memsave::nn::{Linear, LinearConfig, activation::Relu};
//!
//! let device = Device::flex();
//! let mut up = LinearConfig::new(32, 128).init(&device);
//! let mut down = LinearConfig::new(128, 32).init(&device);
//! // Every second hidden feature contributes nothing, as in a model that was trained for pruning.
//! let alive = Tensor::<1>::from_floats([1.0, 0.0], &device).repeat_dim(0, 64);
//! down.weight = down.weight.map(|weight| weight * alive.unsqueeze_dim(1));
//!
//! let forward = |up: &Linear, down: &Linear, x| down.forward(Relu::new().forward(up.forward(x)));
//! let x = Tensor::<2>::random([8, 32], Distribution::Default, &device);
//! let whole = forward(&up, &down, x.clone());
//! let parameters = up.num_params() + down.num_params();
//!
//! // Importance of a hidden feature: the squared norm of its incoming weights times that of its outgoing weights.
//! let squares = |weight: Tensor<2>| weight.powf_scalar(2.0);
//! let into = squares(up.weight.val()).sum_dim(0).squeeze_dim::<1>(0);
//! let out = squares(down.weight.val()).sum_dim(1).squeeze_dim::<1>(1);
//! let best = (into * out).argsort_descending(0).slice(0..64);
//! up.weight = up.weight.map(|weight| weight.select(1, best.clone()));
//! up.bias = up.bias.map(|bias| bias.map(|bias| bias.select(0, best.clone())));
//! down.weight = down.weight.map(|weight| weight.select(0, best.clone()));
//!
//! assert!(up.num_params() + down.num_params() < parameters * 51 / 100);
//! forward(&up, &down, x).into_data().assert_approx_eq::<f32>(&whole.into_data(), Tolerance::default());
//! ```
//!
//! # Example: single weights, stored sparsely
//!
//! A frozen weight does not have to be a tensor. A layer asks a [`FrozenWeight`](crate::frozen::FrozenWeight) for its values
//! when the layer runs, in the forward pass and again in the backward pass. So a frozen weight can store only the nonzero
//! values and their positions. Only the weight of one layer at a time is dense:
//!
//! ```
//! use burn::module::{Module, Param, Reparameterizer};
//! use burn::tensor::{DType, Device, Shape, Tensor, TensorData};
//! use burn_memsave::frozen::{FrozenWeight, LazyWeight};
//! use burn_memsave::measure::{TrackingAllocator, measure_layer};
//! use burn_memsave::nn::{Linear, LinearConfig};
//! use std::sync::Arc;
//!
//! #[global_allocator]
//! static ALLOCATOR: TrackingAllocator = TrackingAllocator::new();
//!
//! /// The nonzero values of a weight, and one bit per element that marks them.
//! #[derive(Debug)]
//! struct Sparse {
//!     shape: Shape,
//!     is_set: Vec<u8>,
//!     values: Vec<f32>,
//! }
//!
//! impl Sparse {
//!     /// Keeps the given share of the weight's values: those of the largest magnitude.
//!     fn pruned(weight: &[f32], shape: Shape, share: f64) -> Self {
//!         let mut magnitudes: Vec<f32> = weight.iter().map(|value| value.abs()).collect();
//!         magnitudes.sort_unstable_by(f32::total_cmp);
//!         let least = magnitudes[((1.0 - share) * weight.len() as f64) as usize];
//!         let (mut is_set, mut values) = (vec![0; weight.len().div_ceil(8)], vec![]);
//!         for (index, &value) in weight.iter().enumerate().filter(|(_, value)| value.abs() >= least) {
//!             is_set[index / 8] |= 1 << (index % 8);
//!             values.push(value);
//!         }
//!         values.shrink_to_fit();
//!         Self { shape, is_set, values }
//!     }
//! }
//!
//! impl FrozenWeight for Sparse {
//!     fn shape(&self) -> Shape {
//!         self.shape.clone()
//!     }
//!     fn dtype(&self) -> DType {
//!         DType::F32
//!     }
//!     fn read(&self) -> TensorData {
//!         let mut values = self.values.iter();
//!         let is_set = |index: usize| self.is_set[index / 8] >> (index % 8) & 1 == 1;
//!         let mut value = |index| if is_set(index) { *values.next().expect("a value per bit") } else { 0.0 };
//!         let dense: Vec<f32> = (0..self.shape.num_elements()).map(&mut value).collect();
//!         TensorData::new(dense, self.shape.clone())
//!     }
//! }
//!
//! /// Prunes every matrix to a tenth of its values.
//! struct Prune;
//! impl Reparameterizer for Prune {
//!     type Reparam = LazyWeight;
//!     fn reparameterize<const D: usize>(
//!         &mut self,
//!         _path: &str,
//!         param: Param<Tensor<D>>,
//!     ) -> (Param<Tensor<D>>, Option<LazyWeight>) {
//!         if D != 2 {
//!             return (param, None);
//!         }
//!         let data = param.base().into_data();
//!         let weight = Sparse::pruned(data.as_slice::<f32>().expect("f32"), param.base().shape(), 0.1);
//!         let (param, lazy) = LazyWeight::attach(param, Arc::new(weight));
//!         (param, Some(lazy))
//!     }
//! }
//!
//! let device = Device::flex().autodiff();
//! let dense = 4 * 512 * 512 * 4;
//! let before = TrackingAllocator::live();
//! let model: Vec<Linear> = (0..4).map(|_| LinearConfig::new(512, 512).init(&device)).collect();
//! let model = model.freeze().apply_reparameterization(Prune);
//! let bytes = TrackingAllocator::live() - before;
//! assert!(bytes < dense * 15 / 100); // a tenth of the values, and one bit per element
//!
//! // The graph keeps no dense weight. (The smallest of four runs, as starting threads allocate, too.)
//! let x = || Tensor::<2>::ones([4, 512], &device).require_grad();
//! let forward = |x| model.iter().fold(x, |x, layer| layer.forward(x));
//! let kept = (0..4).map(|_| measure_layer(x, forward).kept.unwrap()).min();
//! assert!(kept < Some(dense / 16));
//! ```
//!
//! # In PyTorch
//!
//! `torch.nn.utils.prune` (masks, which save nothing either), `torch.sparse` tensors, and `torchao.sparsity`, which has kernels
//! for 2:4 sparsity (two nonzero values of four). Burn has none.
