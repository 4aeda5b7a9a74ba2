//! A small network with what can be divided and synchronized, and moments in its step at which something can happen.
use super::checkpoint::Saved;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Device, Int, Tensor};
use burn_memsave::checkpoint::checkpoint;
use burn_memsave::nn::{BatchNorm, BatchNormConfig, Embedding, EmbeddingConfig, Linear, LinearConfig, Relu};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::thread;
use std::time::Duration;

#[derive(Module, Debug)]
struct Block {
    linear: Linear,
    norm: BatchNorm,
    relu: Relu,
}

impl Block {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.relu.forward(self.norm.forward(self.linear.forward(x.clone()))) + x
    }
}

/// A network whose embedding and stem are frozen, and whose blocks are recomputed in the backward pass.
#[derive(Module, Debug)]
pub struct Net {
    embedding: Embedding,
    stem: Vec<Linear>,
    blocks: Vec<Block>,
    head: Linear,
}

pub const TRAINED: Saved = Saved { paths: r"^(blocks|head)\.", file: "model.bpk" };
const ITEMS: usize = 5;
pub type Item = (Tensor<2, Int>, Tensor<2>);

impl Net {
    /// With weights that do not depend on what other tests draw.
    pub fn new(device: &Device) -> Self {
        let block = || Block {
            linear: LinearConfig::new(8, 8).with_bias(false).init(device),
            norm: BatchNormConfig::new(8).init(device),
            relu: Relu::new(),
        };
        let frozen = || LinearConfig::new(8, 8).with_bias(false).init(device).freeze();
        let net = Self {
            embedding: EmbeddingConfig::new(13, 8).init(device).freeze(),
            // A weight for each of three servers.
            stem: vec![frozen(), frozen()],
            blocks: vec![block(), block()],
            head: LinearConfig::new(8, 3).with_bias(false).init(device),
        };
        net.map(&mut Fill::default())
    }

    pub fn with_frozen_norms(mut self) -> Self {
        for block in &mut self.blocks {
            block.norm = block.norm.clone().freeze();
        }
        self
    }

    /// With moments between its parts, in the forward and, since blocks are recomputed, in the backward pass.
    pub fn loss(&self, (tokens, target): Item, moments: &'static Moments) -> Tensor<1> {
        moments.pass("passes");
        let [items, length] = tokens.dims();
        let x = self.embedding.forward(tokens).reshape([items * length, 8]);
        let x = self.stem.iter().fold(x, |x, linear| linear.forward(x));
        let x = self.blocks.iter().fold(x, |x, block| {
            checkpoint(block, x, move |block: &Block, x| {
                moments.pass("passes");
                let x = block.forward(x);
                moments.pass("passes");
                x
            })
        });
        moments.pass("passes");
        let y = self.head.forward(x).reshape([items, length, 3]).mean_dim(1).reshape([items, 3]);
        (y - target).powf_scalar(2.0).mean()
    }
}

/// Fills weights of two axes with numbers of both signs.
#[derive(Default)]
struct Fill {
    weights: i64,
}

impl ModuleMapper for Fill {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if D != 2 {
            return param;
        }
        self.weights += 1;
        let shift = self.weights * 31;
        param.map(|old| {
            let numbers = Tensor::<1, Int>::arange(
                0..old.shape().num_elements() as i64,
                &old.device().without_autodiff(),
            );
            let new = ((numbers * 7919 + shift) % 2003).float().div_scalar(2003.0).sub_scalar(0.5);
            let new = new.reshape(old.shape()).autodiff();
            if old.is_require_grad() { new.require_grad() } else { new }
        })
    }
}

/// The parts of the batch of a step, on devices.
pub fn parts(at: usize, devices: &[Device]) -> Vec<(Item, usize)> {
    let host = Device::flex().autodiff();
    let tokens: Vec<i64> = (0..ITEMS * 4).map(|index| ((at + index * 7 + index / 4) % 13) as i64).collect();
    let tokens = Tensor::<1, Int>::from_data(tokens.as_slice(), &host).reshape([ITEMS, 4]);
    let target = tokens.clone().float().slice([0..ITEMS, 0..3]) / 13.0;
    let count = devices.len();
    let part = |(index, device): (usize, &Device)| {
        let rows = ITEMS * index / count..ITEMS * (index + 1) / count;
        let part = (
            tokens.clone().slice(rows.clone()).to_device(device),
            target.clone().slice(rows.clone()).to_device(device),
        );
        (part, rows.len())
    };
    devices.iter().enumerate().map(part).collect()
}

/// What steps change.
#[derive(Debug, PartialEq)]
pub struct Values {
    pub trained: Vec<f32>,
    /// Of batch norms.
    pub running: Vec<f32>,
}

impl Values {
    /// `None` if the device of the module is gone.
    pub fn of(module: &Net) -> Option<Self> {
        struct Trained(Option<Vec<f32>>);
        impl ModuleVisitor for Trained {
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                if param.is_require_grad() {
                    self.0 = self
                        .0
                        .take()
                        .zip(numbers(param.val().inner()))
                        .map(|(all, more)| [all, more].concat());
                }
            }
        }
        let mut trained = Trained(Some(vec![]));
        module.visit(&mut trained);
        let norms = module.blocks.iter().map(|block| &block.norm);
        let running = norms.flat_map(|norm| [norm.running_mean.value(), norm.running_var.value()]);
        let running =
            running.map(|statistic| numbers(statistic.inner())).collect::<Option<Vec<_>>>()?.concat();
        Some(Self { trained: trained.0?, running })
    }
}

fn numbers<const D: usize>(tensor: Tensor<D>) -> Option<Vec<f32>> {
    Some(tensor.try_into_data().ok()?.iter::<f32>().collect())
}

/// The moments of a step so far, and what is done at one of them.
pub struct Moments {
    pub count: AtomicUsize,
    at: usize,
    act: Mutex<Option<Box<dyn FnOnce() + Send>>>,
    /// In which part of the step it was done.
    done: Mutex<Option<&'static str>>,
    /// The part that the step came to last.
    last: Mutex<Option<&'static str>>,
}

impl Moments {
    /// For as long as the process lives, since what is checkpointed cannot own them.
    pub fn new(at: usize, act: impl FnOnce() + Send + 'static) -> &'static Self {
        let (count, done, last) = Default::default();
        Box::leak(Box::new(Self { count, at, act: Mutex::new(Some(Box::new(act))), done, last }))
    }

    pub fn none() -> &'static Self {
        Self::new(usize::MAX, || ())
    }

    pub fn pass(&self, part: &'static str) {
        *self.last.lock().expect("no panic") = Some(part);
        if self.count.fetch_add(1, SeqCst) == self.at
            && let Some(act) = self.act.lock().expect("no panic").take()
        {
            // Servers work through what they were given: some have done all of it, and some have not.
            thread::sleep(Duration::from_millis(10 * (self.at as u64 % 3)));
            act();
            *self.done.lock().expect("no panic") = Some(part);
        }
    }

    pub fn done(&self) -> Option<&'static str> {
        *self.done.lock().expect("no panic")
    }

    pub fn last(&self) -> Option<&'static str> {
        *self.last.lock().expect("no panic")
    }
}
