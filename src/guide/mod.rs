//! How to train and run models in less memory: one page per technique, each with tested code.
//!
//! Start with [profiling], then make the [swap](swap_and_freeze). After that, choose techniques for whatever takes most of the
//! remaining memory: activations, gradients, optimizer state or weights. Where Burn already has a technique, the page shows
//! Burn's.
//!
//! | technique | saves | costs | page |
//! | --- | --- | --- | --- |
//! | measure where the bytes are | nothing by itself | two measured steps | [profiling] |
//! | layers that keep only what the backward pass reads; freezing | 41 to 98 % of a model's activations | nothing | [swap_and_freeze] |
//! | move tensors, and drop them early | a tensor per place, at the peak | care with ownership | [in_place] |
//! | bf16 or f16 steps; kept tensors in 16 or 8 bits | half or three quarters of the activations | precision | [precision] |
//! | recomputed segments | up to nine tenths of the activations | 7 to 37 % of a step | [checkpointing] |
//! | the largest batch that fits; a batch in parts | the activations of all parts but one | a second gradient | [batch_size] |
//! | low-rank adapters | gradients and optimizer state of all but the factors | perhaps some quality | [adapters] |
//! | quantized frozen weights | three quarters of them, in 8 bits | rounding, and time to dequantize | [quantized_weights] |
//! | pruned frozen weights | the pruned values, minus a bit per weight | accuracy | [pruning] |
//! | 8-bit optimizers; updates in the backward pass | three quarters of the state; gradients | no accumulation | [optimizers] |
//! | weights and activations in files or on the host | the offloaded bytes | time to move them | [offload] |
//! | several devices and machines | the activations of the other parts | gradients are sent | [devices] |
//! | distillation from a teacher in its file | the teacher's weights, all logits | the teacher's forward pass | [distillation] |
//! | a merged model that is read as it runs | weights beyond a budget | precision, if it is rounded | [deployment] |
//! | only a few batches ahead | batches that would wait | one thread makes them all | [data_loading] |
//!
//! Most techniques combine, and their savings add up. The pages name combinations that work: mixed precision with checkpointing
//! and with replicas, lazy or quantized weights with adapters, and policies for the inputs of checkpointed segments. Two
//! combinations do not work. Updates in the backward pass exclude anything that needs all gradients first. A batch in parts
//! excludes batch norms in training mode.
//!
//! Every figure comes from the command next to it, run on two cores of a shared x86-64 machine, or is asserted by the named
//! test. In the table above, the savings of whole models come from `cargo run --release -p burn-memsave-paper -- models`, and
//! the cost of recomputation from `-- language`. The README has other shapes and models. The examples count bytes with
//! [`TrackingAllocator`](crate::measure::TrackingAllocator).
pub mod adapters;
pub mod batch_size;
pub mod checkpointing;
pub mod data_loading;
pub mod deployment;
pub mod devices;
pub mod distillation;
pub mod in_place;
pub mod offload;
pub mod optimizers;
pub mod precision;
pub mod profiling;
pub mod pruning;
pub mod quantized_weights;
pub mod swap_and_freeze;
