//! Tests plans and batches that fit into memory, and estimates of memory.
#![cfg(feature = "flex")]
#![recursion_limit = "256"]
use burn_memsave::measure::TrackingAllocator;

mod batches;
mod estimate;
#[path = "../memory/meter.rs"]
#[allow(dead_code, reason = "every test uses its part")]
mod meter;
mod networks;
mod plans;

#[global_allocator]
static ALLOCATOR: TrackingAllocator = TrackingAllocator::new();
