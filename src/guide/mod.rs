//! How to train and run models in less memory: one page per technique, each with a snippet that is tested.
//!
//! Begin with [profiling], take the [swap](swap_and_freeze), and then what fits the largest rest: activations, gradients, state
//! of the optimizer, or weights. Where Burn has a technique already, the page shows Burn.
//!
//! | technique | saves | costs | page |
//! | --- | --- | --- | --- |
//! | to know where the bytes are | nothing by itself | two measured steps | [profiling] |
//! | layers that keep what is read; frozen layers | of whole models 41 to 98 % of the activations | nothing | [swap_and_freeze] |
//! | tensors that are moved, and dropped early | a tensor per place, at the peak | attention | [in_place] |
//! | bf16 and f16, or only for what is kept | half of the activations, or three quarters | digits | [precision] |
//! | parts that are computed again | up to nine tenths of the activations | 15 to 40 % of a step | [checkpointing] |
//! | the largest batch that fits, in parts | activations of all parts but one | a second gradient | [batch_size] |
//! | adapters of low rank | gradients and state of all but the factors | some quality, perhaps | [adapters] |
//! | packed frozen weights | three quarters of them, in 8 bits | rounding, and time to unpack | [quantized_weights] |
//! | pruned frozen weights | what is pruned, less a bit per weight | accuracy | [pruning] |
//! | 8-bit optimizers; updates in the backward pass | three quarters of the state; gradients | no accumulation | [optimizers] |
//! | weights and activations in files or on the host | weights, and what waits | time to move them | [offload] |
//! | several devices and machines | activations of the other parts | gradients are sent | [devices] |
//! | distillation from a teacher in its file | the teacher's weights, all logits | its forward pass | [distillation] |
//! | a merged model that is read as it runs | weights, but for a budget | digits, if it is rounded | [deployment] |
//! | few batches ahead | batches that would wait | one thread makes them | [data_loading] |
//!
//! Bytes add up, and most techniques do, too. What was found to go together is on the pages: mixed precision with checkpointing
//! and replicas, lazy or quantized weights with adapters, policies within segments for their inputs. What does not: updates in
//! the backward pass with anything that needs all gradients first, batch norms in training mode with parts of a batch.
//!
//! In the table, whole models are those of `cargo run --release -p burn-memsave-paper -- models`, and what recomputation costs is
//! of its `-- language` and of the page.
//!
//! Figures are of the commands next to them, on two cores of a shared x86-64 machine, or are asserted by the test that is
//! named; shapes and other models are in the README. Snippets count bytes with
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
