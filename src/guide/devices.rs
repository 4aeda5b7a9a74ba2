//! One model on several devices, of one machine or of many.
//!
//! [`Replicas`](crate::parallel::Replicas) holds a module on several devices, each of which computes the gradients of its part
//! of a batch; they are summed on the first, where the optimizer runs, and the new values go back. So activations are divided
//! among the devices, and the state of the optimizer exists once. Frozen weights are sent once; with
//! [adapters](super::adapters) a step sends little. Devices may be those of Burn's compute servers:
//! `Device::remote_options(&host).init()?.autodiff()`.
//!
//! Weights are not divided: each device has all of them, or reads them from files ([offload](super::offload)). Burn's own
//! `ExecutionStrategy::ddp` does the same with NCCL, on the CUDA devices of one machine.
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
//! // For each replica its part, on its device, and the items in it.
//! let parts = [(x.clone().slice(0..3), 3), (x.clone().slice(3..5), 2)];
//! let (_, gradients) = replicas.backward(parts, loss)?;
//! let whole = model.weight.grad(&loss(&model, x).backward()).unwrap();
//! let summed = gradients.get::<2>(model.weight.id).unwrap();
//! summed.into_data().assert_approx_eq::<f32>(&whole.into_data(), Tolerance::default());
//!
//! let mut optimizer = SgdConfig::new().init();
//! replicas.update(|model| optimizer.step(0.1, model, gradients));
//! replicas.sync()?; // names a device that failed, or a server that is gone
//! # Ok::<(), burn_memsave::parallel::ParallelError>(())
//! ```
//!
//! # What it saves
//!
//! On each device, the activations of the other parts.
//! `cargo run --release --features remote-server --example finetune_ddp -- --compare` starts two servers on this machine,
//! fine-tunes a language model with LoRA on them, and compares every gradient with those of one device: the largest difference
//! in 20 steps was 1.6e-6 of the largest gradient (two cores). Memory is not measured there: servers do not say what they have.
//!
//! # What it costs
//!
//! Per step, the gradients of trainable parameters once to the first device, and their values once back. A batch norm in
//! training mode is an error. (Under `ExecutionStrategy::ddp` a batch norm is none: each device then normalizes with the
//! statistics of its part.) A parameter that is tied is sent once.
//!
//! # When
//!
//! If there is more than one device. If memory is short on one, first divide the batch in time: [batch
//! size](super::batch_size).
//!
//! # In PyTorch
//!
//! `torch.nn.parallel.DistributedDataParallel`. There is nothing like `FullyShardedDataParallel` here.
