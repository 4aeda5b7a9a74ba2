//! Optimizers that keep little, and updates in the backward pass.
//!
//! | | per element, where Burn's keep 8 bytes (AdamW) and 4 (Muon) |
//! | --- | --- |
//! | [`AdamW8bit`] | 2.03 bytes of state |
//! | [`Muon8bit`] | 1.02 bytes of state |
//! | [`step_in_backward`] | any optimizer; one gradient at a time, where a backward pass leaves all of them |
//!
//! Both are [optimizers of Burn's](burn::optim::Optimizer), with its records, groups of parameters and learning rates. Weights in half
//! precision are rounded at random, so that small changes are not lost and no copy in f32 is needed.
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
//! optimizer.into_bytes()?; // a record, from which training goes on bit for bit
//! # assert_eq!(layers.num_params(), 3 * 65 * 64);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A step is one pass over memory, in place: a loop on CPU backends, a kernel on wgpu and CUDA, where codes are stored four in a word of 32
//! bits. On remote devices it is composed of Burn's operations.
mod adamw;
mod codes;
mod error;
mod in_backward;
mod muon;
mod rounding;

pub use adamw::{AdamW8bit, AdamW8bitConfig, AdamW8bitState};
pub use error::InBackwardError;
pub use in_backward::step_in_backward;
pub use muon::{Muon8bit, Muon8bitConfig, Muon8bitState};
