//! One model on several devices, in one machine or in many.
//!
//! [`Replicas`](crate::parallel::Replicas) holds a module on several devices. Each device computes the gradients of its part of
//! a batch. The gradients are summed on the first device, where the optimizer runs, and the new values go back to the others.
//! So activations are divided among the devices, and the optimizer state exists once. Frozen weights are sent only once, so
//! with [adapters](super::adapters) a step sends little. Devices may also belong to Burn's compute servers:
//! `Device::remote_options(&host).init()?.autodiff()`.
//!
//! Weights are not divided: each device holds all of them, or reads them from files ([offload](super::offload)). Burn's own
//! `ExecutionStrategy::ddp` also trains one model on several devices, with NCCL, on the CUDA devices of one machine.
//!
//! # What it saves
//!
//! Each device holds the activations of its own part only.
//! `cargo run --release --features remote-server --example finetune_ddp -- --compare` starts two servers on this machine,
//! fine-tunes a language model with LoRA on them, and compares every gradient with that of one device. The largest difference
//! in 20 steps was 1.6e-6 of the largest gradient (two cores). This run does not measure memory, because servers do not report
//! theirs.
//!
//! # What it costs
//!
//! In each step, every other device sends the gradients of trainable parameters to the first one, and receives their new
//! values. Tied parameters are sent once. A batch norm in training mode is an error. (`ExecutionStrategy::ddp` allows it: each
//! device then normalizes with the statistics of its part.)
//!
//! # When to use it
//!
//! Use it if you have more than one device. If memory is short on a single device, first process the batch in parts, one after
//! the other: see [batch size](super::batch_size).
//!
//! # Example
//!
//! ```
//! use burn::module::Module;
//! use burn::optim::SgdConfig;
//! use burn::tensor::{Device, Distribution, Tensor, Tolerance};
//! use burn_memsave::nn::LinearConfig;
//! use burn_memsave::parallel::Replicas;
//!
//! let device = Device::flex().autodiff();
//! let model = LinearConfig::new(8, 4).init(&device);
//! let mut replicas = Replicas::new(&model, [device.clone(), device.clone()])?; // here: one device, twice
//! let x = Tensor::<2>::random([5, 8], Distribution::Default, &device);
//! let loss = |model: &burn_memsave::nn::Linear, x| model.forward(x).powf_scalar(2.0).mean();
//!
//! // For each replica: its part of the batch, on its device, and the number of items in the part.
//! let parts = [(x.clone().slice(0..3), 3), (x.clone().slice(3..5), 2)];
//! let (_, gradients) = replicas.backward(parts, loss)?;
//! let whole = model.weight.grad(&loss(&model, x).backward()).unwrap();
//! let summed = gradients.get::<2>(model.weight.id).unwrap();
//! summed.into_data().assert_approx_eq::<f32>(&whole.into_data(), Tolerance::default());
//!
//! let mut optimizer = SgdConfig::new().init();
//! replicas.update(|model| optimizer.step(0.1, model, gradients));
//! replicas.sync()?; // reports a failed device or a lost server
//! # Ok::<(), burn_memsave::parallel::ParallelError>(())
//! ```
//!
//! # In PyTorch
//!
//! `torch.nn.parallel.DistributedDataParallel`. There is nothing like `FullyShardedDataParallel` here.
