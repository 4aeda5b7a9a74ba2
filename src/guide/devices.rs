//! One model on several devices, in one machine or in many.
//!
//! [`Replicas`](crate::parallel::Replicas) holds a module on several devices. Each device computes the gradients of its part of
//! a batch. The gradients are summed on the first device, where the optimizer runs, and the new values go back to the others.
//! So activations are divided among the devices, and the optimizer state exists once. Frozen weights are sent only once, so
//! with [adapters](super::adapters) a step sends little. Devices may also belong to Burn's compute servers:
//! `Device::remote_options(&host).init()?.autodiff()`.
//!
//! Two options divide more than the batch, and work together:
//!
//! - [`with_sharded_optimizer`](crate::parallel::ReplicaOptions::with_sharded_optimizer): each trained parameter has an owner.
//!   Its gradients are sent there during the backward pass, as soon as they are complete, and dropped where they were
//!   computed. The owner sums them, keeps the state of the optimizer, and sends the new value to the others.
//! - [`with_sharded_frozen`](crate::parallel::ReplicaOptions::with_sharded_frozen): each frozen weight is on one device. The
//!   others copy it when its layer runs, in the forward and again in the backward pass, and drop the copy, unless a budget
//!   has room for it. If the weights get adapters, call [`shard_frozen`](crate::parallel::shard_frozen) before.
//!
//! Burn's own `ExecutionStrategy::ddp` also trains one model on several devices, with NCCL, on the CUDA devices of one
//! machine.
//!
//! # What it saves
//!
//! Each device holds the activations of its own part only. With `N` devices, `T` bytes of trained parameters, `S` of the
//! optimizer's state, and `F` of frozen weights that are divided, it also holds:
//!
//! | option | trained | gradients after a step | state | frozen |
//! | --- | --- | --- | --- | --- |
//! | none | `T` | `T` on the first device | `S` on the first device | `F` |
//! | `with_sharded_optimizer` | `T` | `T / N` | `S / N` | `F` |
//! | `with_sharded_frozen` | `T` | as without | as without | `F / N`, the budget, and the weight in use |
//!
//! During the backward pass, beyond the gradients that it owns, a device has those of about one parameter (asserted by
//! `cargo test --test optim gradients_of_replicas`). A single large parameter is not cut: by [`divide`](crate::parallel::divide), no device owns more than the mean and the
//! largest parameter together. Small weights and those of one axis are on every device.
//! [`estimate_replicas`](crate::parallel::estimate_replicas) reports the bytes of each device before anything is moved.
//!
//! `cargo run --release --features remote-server --example finetune_ddp -- --compare` starts two servers on this machine,
//! fine-tunes a language model with LoRA on them, and compares every gradient with that of one device. The largest difference
//! in 20 steps was 1.0e-6 of the largest gradient (two cores); in 200 steps with `--shard frozen,optimizer`, 4.4e-6 on two servers and
//! 4.3e-6 on four; in 20 steps of `--model resnet --shard optimizer`, 1.0e-6 and 0.8e-6. The example prints the most memory of each server. The next table has that of three models on two cores, with batches of
//! 4 passages of 16 characters (`--batch-size 4 --length 16`). `MALLOC_ARENA_MAX=2 MALLOC_MMAP_THRESHOLD_=65536` had freed memory return to
//! the system.
//!
//! | model | largest weight | 1 server | 2 with `--shard frozen,optimizer` | 4 with it |
//! | --- | --- | --- | --- | --- |
//! | 99 MiB: `--width 512 --blocks 8` | 2.7 MiB | 140 MiB | 100 MiB (0.71) | 88 MiB (0.63) |
//! | 392 MiB: `--width 1024 --blocks 8` | 10.7 MiB | 460 MiB | 323 MiB (0.70) | 271 MiB (0.59) |
//! | 463 MiB: `--width 256 --blocks 144` | 0.7 MiB | 641 MiB | 352 MiB (0.55) | 221 MiB (0.34) |
//!
//! These are peaks of the largest server, less what it has while it is idle. Beyond its part, a server holds weights on their way, several
//! times each: as a tensor, in a message, and in the buffers of the connection. So dividing saves most where no single weight is large.
//! These runs bounded what is on its way to a device ([`with_read_ahead`](crate::parallel::FrozenOptions::with_read_ahead),
//! `--read-ahead`) by two to three times the largest weight. Without a bound, servers keep much more of what they send (up to 124 MiB in a
//! model of 50 MiB).
//!
//! In an address space of 256 MiB each (`ulimit -v`), 1, 2 and 4 servers fine-tune models of 157, 277 and 507 MiB of frozen weights
//! (`cargo bench --features remote-server --bench servers`; two cores). With 1 GiB each, four servers fine-tune one of 3088 MiB
//! (`-- --servers 4 --limit 1024 --blocks 256`).
//!
//! # What it costs
//!
//! | option | sent in a step, in all | by whom |
//! | --- | --- | --- |
//! | none | gradients `(N - 1) T`, values `(N - 1) T` | all by or to the first device |
//! | `with_sharded_optimizer` | the same | evenly |
//! | `with_sharded_frozen` | in addition at most `2 (N - 1) F` | evenly |
//!
//! [`Replicas::traffic`](crate::parallel::Replicas::traffic) counts these bytes; `cargo test --features ndarray --test parallel`
//! compares them with the table. Embeddings send only the rows that are used; a weight whose layer needs no gradient of its input is copied
//! once; one that stays within the budget is not copied again. Burn's own layers keep their copy from the forward to the
//! backward pass. Tied parameters are sent once.
//!
//! A step of `finetune_ddp` (0.5 MiB of weights, servers on this machine, two cores) takes 0.07 s on two servers without options, 0.08 s with
//! a divided optimizer, and 0.14 s if frozen weights are divided, too; on four, 0.16, 0.18 and 0.30 s.
//!
//! With a divided optimizer, all forward passes run before the backward passes. So if several replicas are on one device, the
//! graphs of all of them exist at once.
//!
//! Burn's servers work through the operations of a device in order, and send a tensor only when its turn comes. With divided
//! frozen weights, a device therefore waits in the forward pass until the devices that own weights have run theirs. Give each
//! server a second device for the weights to avoid this:
//! [`with_owners`](crate::parallel::FrozenOptions::with_owners). A server keeps what it sends until it is fetched.
//!
//! A batch norm in training mode is an error, unless you choose
//! [`with_synchronized_batch_norm`](crate::parallel::ReplicaOptions::with_synchronized_batch_norm). Then every replica runs on a
//! thread of its own, and waits in each batch norm for the others: they exchange means and variances in the forward pass, and
//! two sums per channel in the backward pass. These numbers pass through the program, per replica and batch norm
//! `16 * channels + 8` bytes in the forward pass, and again in a recomputed segment, and `16 * channels` in the backward pass. On remote devices, each exchange waits for an
//! answer of every server. `cargo test --test parallel synchronized` trains a residual network on two, three and four devices,
//! with uneven and empty parts: losses, gradients, parameters and running statistics of 20 steps equal those of one device within
//! 1e-5. (`ExecutionStrategy::ddp` does not refuse a batch norm: each device normalizes with the statistics of its part.)
//!
//! Divided frozen weights cannot be quantized: leave such weights out of the group, and they are on
//! every device. Adapters that are attached already are an error, too.
//!
//! # When something fails
//!
//! | what fails | what you see | what has changed |
//! | --- | --- | --- |
//! | the loss or its backward pass panics | the panic, or, with synchronized batch norms, an error of `backward` that names the replica | nothing: run the step again |
//! | a replica does not come to a batch norm in time, or never will | an error of `backward` that names it | nothing |
//! | a device or a server, while `backward` runs | an error of `backward`, or of `sync` before the update, which names it | nothing on devices that answer |
//! | a device or a server, during an update | an error of `sync` after the update | some devices have new values or states |
//! | the step of the optimizer panics | the panic; then `ParallelError::Lost` | the replicas are lost, some states may have changed |
//!
//! So call [`sync`](crate::parallel::Replicas::sync) before an update and after it, and write checkpoints after a `sync` without an
//! error. In the last two cases, make new replicas from the last checkpoint, with more or fewer devices: records of the optimizer
//! are whole. Gradients are sent in the backward pass, but states and parameters change in `update` alone.
//! `cargo test --test parallel faults` has a replica panic at every moment of a step, and goes on with one, two and three devices.
//! `cargo test --features remote-server --test remote faults` kills each of two servers at every moment of a step, with and without divided
//! weights and synchronized batch norms, and one of three at every fourth moment, with both: the error names the server, parameters are as
//! before, and the run goes on from its checkpoint on the servers that are left. It also has servers stop, and go on after the time-out.
//!
//! A device may be lost with another one: Burn's server ends a session that needs a tensor of a server that is gone. So keep checkpoints in
//! files, not on devices.
//!
//! A server of Burn 0.22.1 keeps its connection to another server for as long as it runs, and does not open a new one when that has failed
//! (`channels` in `external_comm.rs` of burn-communication). So if you restart a server, give it another address, or restart the others,
//! too: otherwise each later step fails on those that had a connection to it, and the error names them, as `finetune_ddp --resume`
//! showed. A program that goes on without being restarted also needs another credential (`RemoteHost::with_credential`), since Burn goes on
//! with a session of the same address and credential, though it is lost.
//!
//! [`with_timeout`](crate::parallel::ReplicaOptions::with_timeout) bounds how long `sync` waits for servers that neither answer nor
//! close the connection, and how long replicas wait for each other and for divided frozen weights. A server that was only slow may answer
//! later, and the step can be run again. A read by your own code, such as that of the loss, is not bounded: call `sync` before it.
//! A server of Burn 0.22.1 that has no memory left ends, which is an error at once, or, if it had none for a message, lives on without
//! sending it (`expose_data` in `external_comm.rs` panics in a task): then only a time-out ends the step.
//!
//! # What is not divided
//!
//! Trained parameters are whole on every device (there is no ZeRO-3). Burn 0.22.1 gives a parameter no way to let go of its
//! value and to get it back: `Param` owns it (`LazyInitState::value` in burn-core, `module/param/base.rs`), and what requires
//! a gradient is a tensor with its data (`AutodiffTensor::primitive` in burn-autodiff, `tensor.rs`). A frozen weight can be
//! read when it is used because it needs neither.
//!
//! # When to use it
//!
//! Use it if you have more than one device. If memory is short on a single device, first process the batch in parts, one after
//! the other: see [batch size](super::batch_size). Divide the optimizer if many parameters are trained: it sends no more than
//! without. Divide frozen weights if they do not fit on each device, and the connection is fast.
//!
//! # Example
//!
//! ```
//! use burn::module::Module;
//! use burn::optim::{AdamConfig, SgdConfig};
//! use burn::tensor::{Device, Distribution, Tensor, Tolerance};
//! use burn_memsave::nn::LinearConfig;
//! use burn_memsave::optim::clip_grad_norm;
//! use burn_memsave::parallel::{ReplicaOptions, Replicas};
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
//! let whole = model.weight.grad(&loss(&model, x.clone()).backward()).unwrap();
//! let summed = gradients.get::<2>(model.weight.id).unwrap();
//! summed.into_data().assert_approx_eq::<f32>(&whole.into_data(), Tolerance::default());
//!
//! let mut optimizer = SgdConfig::new().init();
//! replicas.update(|model| optimizer.step(0.1, model, gradients));
//! replicas.sync()?; // reports a failed device or a lost server
//!
//! // Each device has its part of the gradients and of Adam's state.
//! let devices = [device.clone(), device.clone()];
//! let options = ReplicaOptions::new().with_sharded_optimizer();
//! let mut replicas = Replicas::with_options(replicas.module(), devices, &options)?;
//! let mut optimizer = AdamConfig::new().init();
//! let parts = [(x.clone().slice(0..3), 3), (x.slice(3..5), 2)];
//! let (_, gradients) = replicas.backward(parts, loss)?; // each on the device that owns it
//! let (gradients, _norm) = clip_grad_norm(replicas.module(), gradients, 1.0);
//! replicas.update(|model| optimizer.step(1e-3, model, gradients));
//! replicas.sync()?;
//! # Ok::<(), burn_memsave::parallel::ParallelError>(())
//! ```
//!
//! # In PyTorch
//!
//! `torch.nn.parallel.DistributedDataParallel`; synchronized batch norms are `torch.nn.SyncBatchNorm`; with a divided optimizer, ZeRO-2 of DeepSpeed or `SHARD_GRAD_OP` of
//! `FullyShardedDataParallel`. Frozen weights can be divided as by `FULL_SHARD`; trained ones cannot.
