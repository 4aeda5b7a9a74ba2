//! Optimizers with 8-bit state, and updates in the backward pass.
//!
//! | | memory |
//! | --- | --- |
//! | [`AdamW8bit`] | 2.03 bytes of state per element, where Burn's AdamW takes 8 |
//! | [`Muon8bit`] | 1.02 bytes of state per element, where Burn's Muon takes 4 |
//! | [`step_in_backward`] | with any optimizer, one gradient at a time, where a backward pass otherwise leaves all of them |
//!
//! [`clip_grad_norm`] clips gradients by the norm of all of them together, on one device or several.
//!
//! Both optimizers implement [Burn's `Optimizer`](burn::optim::Optimizer), so its records, groups of parameters and learning rates work with them.
//! Weights in half precision are rounded stochastically, so that small changes are not lost and no copy in f32 is needed.
//!
//! ```
//! use burn::module::Module;
//! use burn::tensor::{Device, Tensor};
//! use burn_memsave::nn::{Linear, LinearConfig};
//! use burn_memsave::optim::{AdamW8bitConfig, step_in_backward};
//!
//! let device = Device::flex().autodiff();
//! let mut layers: Vec<Linear> = (0..3).map(|_| LinearConfig::new(64, 64).init(&device)).collect();
//! let mut optimizer = AdamW8bitConfig::new().init_for(&layers);
//! let batch = Tensor::<2>::ones([4, 64], &device);
//! for _ in 0..3 {
//!     let loss = |layers: &Vec<Linear>| layers.iter().fold(batch.clone(), |x, layer| layer.forward(x)).powf_scalar(2.0).mean();
//!     (layers, _) = step_in_backward(layers, &mut optimizer, 1e-3, loss)?;
//! }
//! optimizer.into_bytes()?; // a record, from which training resumes bit for bit
//! # assert_eq!(layers.num_params(), 3 * 65 * 64);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A step of AdamW is one pass over memory, in place: a loop on CPU backends, and a kernel on wgpu and CUDA, where four codes share a
//! 32-bit word. Muon makes such a pass before and after its Newton-Schulz iteration. On remote devices both are composed of Burn's
//! operations.
mod adamw;
mod clip;
mod codes;
mod error;
mod in_backward;
mod muon;
mod rounding;

pub use adamw::{AdamW8bit, AdamW8bitConfig, AdamW8bitState};
pub use clip::clip_grad_norm;
pub use error::{InBackwardError, StepRefused};
pub use in_backward::step_in_backward;
pub use muon::{Muon8bit, Muon8bitConfig, Muon8bitState};
