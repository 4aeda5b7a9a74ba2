//! How to train and run models in less memory: one page per technique, each with tested code.
//!
//! Start with [profiling], then make the [swap](swap_and_freeze). After that, choose techniques for whatever takes most of the
//! remaining memory: activations, gradients, optimizer state or weights. If Burn already offers a technique, its page shows
//! Burn's version.
//!
//! All pages use four words. A tensor is *tracked* if a gradient may flow to it. A tensor is *kept* if the graph holds it for
//! the backward pass; in a table, "kept" is the total size of all kept tensors. The *peak* is the most memory in use at one
//! time during a step, not counting parameters and input. A *frozen* parameter requires no gradient.
//!
//! | technique | saves | costs | page |
//! | --- | --- | --- | --- |
//! | measure where the bytes are | nothing by itself | two measured steps | [profiling] |
//! | layers that keep only what the backward pass reads; freezing | 41 to 98 % of a model's activations | nothing | [swap_and_freeze] |
//! | move tensors, and drop them early | one tensor for each place that you fix | care with ownership | [in_place] |
//! | bf16 or f16 steps; kept tensors in 16 or 8 bits | half or three quarters of the activations | precision | [precision] |
//! | recomputed parts of the network (segments) | up to nine tenths of the activations | 7 to 37 % of a step | [checkpointing] |
//! | the largest batch that fits; a batch in parts | the activations of all parts but one | every gradient twice | [batch_size] |
//! | low-rank adapters | gradients and optimizer state of all but the factors | perhaps some quality | [adapters] |
//! | quantized frozen weights | three quarters of them, in 8 bits | rounding, and time to dequantize | [quantized_weights] |
//! | pruned frozen weights | the pruned values, less one bit per element | accuracy | [pruning] |
//! | 8-bit optimizers; updates in the backward pass | three quarters of the state; all gradients but one | no accumulation | [optimizers] |
//! | weights and activations in files or on the host | the offloaded bytes | time to move them | [offload] |
//! | a batch on several devices or machines | the activations of the other parts | gradients are sent | [devices] |
//! | optimizer and frozen weights divided among devices | the parts of the others | frozen weights are sent when used | [devices] |
//! | distillation from a teacher that stays in its file | the teacher's weights, all logits | the teacher's forward pass | [distillation] |
//! | a merged model whose weights are read as it runs | weights beyond a budget | precision, if weights are rounded | [deployment] |
//! | a Hugging Face model that is larger than memory | weights beyond a budget | time to read them | [hugging_face] |
//! | a short queue of batches | the batches that would wait in a longer queue | one thread makes all batches | [data_loading] |
//!
//! Most techniques combine, and their savings add up. The pages name combinations that work: mixed precision with checkpointing
//! and with replicas, lazy or quantized weights with adapters, and policies for the inputs of checkpointed segments. Two
//! combinations do not work: updates in the backward pass with anything that needs all gradients first, and a batch in parts with
//! batch norms in training mode.
//!
//! Every figure comes from the command next to it, run on two cores of a shared x86-64 machine, or is asserted by the named test.
//! In the table above, the savings of whole models come from `cargo run --release -p burn-memsave-paper -- models`, and the cost
//! of recomputation from the same command with `-- language`. The README has other shapes and models. The examples count bytes
//! with [`TrackingAllocator`](crate::measure::TrackingAllocator), which has to be the program's global allocator. They run a
//! step several times and use the smallest number of bytes, because threads allocate when they start.
pub mod adapters;
pub mod batch_size;
pub mod checkpointing;
pub mod data_loading;
pub mod deployment;
pub mod devices;
pub mod distillation;
pub mod hugging_face;
pub mod in_place;
pub mod offload;
pub mod optimizers;
pub mod precision;
pub mod profiling;
pub mod pruning;
pub mod quantized_weights;
pub mod swap_and_freeze;
