//! Data loading: batches are made while the previous one trains, and only a few of them wait in memory.
//!
//! Burn has the data loader: a `Dataset` returns items by index, a `Batcher` makes a tensor of several items, and
//! `DataLoaderBuilder` combines them (`burn::data`, with Burn's feature `dataset`). This library adds nothing to it. The memory
//! of a data loader depends on two things: whether the dataset reads each item in `get` or holds all of them, and how many
//! batches wait.
//!
//! Without workers (`num_workers(0)`, the default), a batch is made when training asks for it. No batch waits, but training
//! waits for each batch. With workers, Burn 0.22.1 queues up to 100 batches, whatever the number of workers. That is nothing
//! for rows of numbers, but 15 GB for batches of 256 images of 3x224x224 in f32. To queue only a few, run the loader without
//! workers on a thread of your own, and send its batches through a bounded channel, as in the example.
//!
//! # What it saves
//!
//! Only three batches wait instead of 100, as the example counts: two in the channel, and one that its thread is about to send.
//!
//! On a device, every thread that makes tensors also has its own memory pools.
//! `cargo run --release --no-default-features --features wgpu --example growth -- --loaders 2` shows this (on lavapipe, a Vulkan
//! driver in software, with two cores). If loader threads come and go, the reserved memory grows within 32 steps from 53 to 101
//! MiB with Burn's layers, and from 37 to 85 MiB with ours, although only 5 MiB are in use. With `max_streams = 1` in the section
//! `[streaming]` of a file `cubecl.toml`, it stays at 37 MiB with Burn's layers and at 21 MiB with ours.
//!
//! # What it costs
//!
//! One thread makes all batches. If it is slower than a step, make the items of one batch in parallel, inside the batcher,
//! rather than several batches at once.
//!
//! # When to use it
//!
//! Use it if batches are large (images, audio, long sequences), or if memory grows over the first hundred steps with workers.
//! In the batcher, make tensors in the data's own type (bytes for an image), and cast them to floats in the step. Waiting
//! batches then take a quarter of the bytes.
//!
//! # Example
//!
//! ```
//! use burn::data::dataloader::{DataLoaderBuilder, batcher::Batcher};
//! use burn::data::dataset::{Dataset, DatasetError};
//! use burn::tensor::{Device, Tensor, TensorData};
//! use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
//! use std::{sync::mpsc::sync_channel, thread};
//!
//! /// 640 rows, each made on demand.
//! struct Rows;
//! impl Dataset<Vec<f32>> for Rows {
//!     fn get(&self, index: usize) -> Result<Vec<f32>, DatasetError> {
//!         Ok(vec![index as f32; 256]) // here: read from a file
//!     }
//!     fn len(&self) -> usize {
//!         640
//!     }
//! }
//!
//! static MADE: AtomicUsize = AtomicUsize::new(0);
//!
//! struct Stack;
//! impl Batcher<Vec<f32>, Tensor<2>> for Stack {
//!     fn batch(&self, rows: Vec<Vec<f32>>, device: &Device) -> Tensor<2> {
//!         MADE.fetch_add(1, SeqCst);
//!         let shape = [rows.len(), rows[0].len()];
//!         Tensor::from_data(TensorData::new(rows.concat(), shape), device)
//!     }
//! }
//!
//! const AHEAD: usize = 2;
//! let device = Device::flex();
//! let loader = DataLoaderBuilder::new(Stack).batch_size(16).shuffle(42).set_device(device).build(Rows);
//! let (sender, receiver) = sync_channel(AHEAD);
//! let mut used = 0;
//! thread::scope(|scope| {
//!     scope.spawn(move || loader.iter().try_for_each(|batch| sender.send(batch))); // ends when the receiver is dropped
//!     for batch in receiver {
//!         let batch = batch?; // an error if the dataset could not read an item
//!         used += 1;
//!         // At most: the batch in use, those in the channel, and one that waits to be sent.
//!         assert!(MADE.load(SeqCst) <= used + AHEAD + 1);
//!         assert_eq!(batch.dims(), [16, 256]); // here: a training step
//!     }
//!     Ok::<(), DatasetError>(())
//! })?;
//! assert_eq!(used, 40);
//! # Ok::<(), DatasetError>(())
//! ```
//!
//! # In PyTorch
//!
//! `DataLoader(num_workers=..., prefetch_factor=2)`: `num_workers * prefetch_factor` batches wait.
