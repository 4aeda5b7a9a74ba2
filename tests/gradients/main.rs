//! Every function of [`burn_memsave::functional`] against stock Burn and against finite differences: outputs, gradients, and
//! which gradients there are.
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
mod transformers;
