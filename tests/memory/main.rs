//! Tests the bytes that every layer keeps and needs at its peak: exactly what the head of its file says, and never more than stock.
//!
//! Memory is counted for the whole process, so every test holds a lock. See [`meter`].
#![recursion_limit = "256"]
use burn_memsave::measure::TrackingAllocator;

#[path = "../table/mod.rs"]
mod table;

mod chains;
mod conv_norm_relu;
mod head_losses;
mod linger;
mod lora;
mod meter;
mod table_walk;
mod targets;
mod threads;

#[global_allocator]
static ALLOCATOR: TrackingAllocator<linger::Allocator> = TrackingAllocator::with_inner(linger::Allocator);
