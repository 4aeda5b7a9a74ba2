//! Batches that are made while the last one trains, and never more than a few.
//!
//! Burn has the data loader: a `Dataset` gives items by their number, a `Batcher` makes a tensor of some, and
//! `DataLoaderBuilder` puts them together (`burn::data`, with Burn's feature `dataset`). This library adds nothing to it. What
//! decides about memory: a dataset should read an item in `get`, not hold all of them; and how many batches wait.
//!
//! Without workers (`num_workers(0)`, the default) a batch is made when it is asked for, and none waits, but training waits for
//! it. With workers Burn 0.22.1 queues up to 100 batches, whatever the number of workers. That is nothing for rows of numbers,
//! and 15 GB for batches of 256 images of 3x224x224 in f32. To have a few, run the loader without workers on one thread of your
//! own, and let a channel of that length stop it:
//!
//! ```
//! use burn::data::dataloader::{DataLoaderBuilder, batcher::Batcher};
//! use burn::data::dataset::{Dataset, DatasetError};
//! use burn::tensor::{Device, Tensor, TensorData};
//! use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
//! use std::{sync::mpsc::sync_channel, thread};
//!
//! /// 640 rows, each of which is made when it is needed.
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
//!     scope.spawn(move || loader.iter().try_for_each(|batch| sender.send(batch))); // ends when nobody receives any more
//!     for batch in receiver {
//!         let batch = batch?; // what the dataset could not read
//!         used += 1;
//!         // The one in use, those in the channel, and the one that waits to be sent.
//!         assert!(MADE.load(SeqCst) <= used + AHEAD + 1);
//!         assert_eq!(batch.dims(), [16, 256]); // here: a step
//!     }
//!     Ok::<(), DatasetError>(())
//! })?;
//! assert_eq!(used, 40);
//! # Ok::<(), DatasetError>(())
//! ```
//!
//! # What it saves
//!
//! Of the 100 batches that could wait, all but three: the snippet counts. Two are in the channel, and the next one is ready. On
//! a device every thread that makes tensors has memory pools of its own, too.
//! `cargo run --release --no-default-features --features wgpu --example growth -- --loaders 2` shows that (lavapipe, two
//! cores): with threads that come and go the reserved bytes grow from 53 to 101 MiB in 32 steps with Burn's layers and from 37
//! to 85 with ours, of which 5 are in use; with `max_streams = 1` in the section `[streaming]` of a file `cubecl.toml` they
//! stay at 37 and 21.
//!
//! # What it costs
//!
//! One thread makes all batches. If that is slower than a step, make the items of a batch in parallel, inside of the batcher,
//! rather than more batches at once.
//!
//! # When
//!
//! If batches are large (images, audio, long sequences), or memory grows over the first hundred steps with workers. Make
//! tensors in the batcher in the type of the data (bytes of an image), and cast them to floats in the step: they wait in a
//! quarter of the bytes.
//!
//! # In PyTorch
//!
//! `DataLoader(num_workers=..., prefetch_factor=2)`: `num_workers * prefetch_factor` batches wait.
