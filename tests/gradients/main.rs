//! Compares every function of [`burn_memsave::functional`] with stock Burn and with finite differences: outputs, gradients, and which
//! gradients exist.
#![recursion_limit = "256"]

#[path = "../table/draws.rs"]
mod draws;
#[path = "../table/mod.rs"]
mod table;

mod activations;
mod attention;
mod batch_norm;
mod chains;
mod common;
mod conv;
mod conv_definition;
mod dora;
mod dropout;
mod embedding;
mod head_losses;
mod linear;
mod linear_cross_entropy;
mod local_response;
mod lora;
mod loss;
mod modules;
mod pools;
mod preference;
mod recurrent;
mod row_norm;
mod smooth;
mod softmax;
mod table_walk;
#[cfg(feature = "rayon")]
mod threads;
mod transformers;
