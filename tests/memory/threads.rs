//! Tests the working memory of threads, in pools of 2, 16 and 64 threads on as many cores as there are. Buffers that grow with the number
//! of threads would be more than stock has. Threads linger, so that each peak is close to the highest that chance allows: see
//! [`linger`](crate::linger).
use crate::linger::Lingering;
use crate::meter::{RECORDS, SCRATCH, alone, bytes};
use crate::table::{self, Case, Check, Row, Visitor, run::Setting};
use burn::module::Module;
use burn::tensor::{DType, Device, Distribution, Tensor, activation, module, ops::ConvOptions};
use burn_memsave::{functional as F, measure::measure_layer, nn as memsave};
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::fmt::Display;
use std::sync::OnceLock;

const POOLS: [usize; 3] = [2, 16, 64];

/// A pool that lives as long as the process: threads that end would free what they had during a measurement.
fn pool(threads: usize) -> &'static ThreadPool {
    static MADE: [OnceLock<ThreadPool>; POOLS.len()] = [const { OnceLock::new() }; POOLS.len()];
    let index = POOLS.iter().position(|&size| size == threads).expect("one of the pools");
    MADE[index]
        .get_or_init(|| ThreadPoolBuilder::new().num_threads(threads).build().expect("so many threads"))
}

/// The most bytes that a layer needs in a pool.
fn peak<const D: usize, const O: usize>(
    pool: &ThreadPool,
    device: &Device,
    input: &(dyn Fn() -> Tensor<D> + Sync),
    forward: impl Fn(Tensor<D>) -> Tensor<O> + Send,
) -> i64 {
    pool.install(move || {
        let run = || {
            // Burn frees the graph of a dropped tensor in the next backward pass.
            drop(Tensor::<1>::ones([1], device).require_grad().backward());
            bytes(measure_layer(input, &forward).peak)
        };
        // The first run also pays for what is made on first use.
        run();
        let _lingering = Lingering::start();
        run()
    })
}

/// In every pool `ours` needs no more than `stock`, and what one thread works in, and so many bytes.
fn within_stock<const D: usize, const O: usize>(
    (name, more): (&str, i64),
    shape: [usize; D],
    stock: impl Fn(Tensor<D>) -> Tensor<O> + Sync,
    ours: impl Fn(Tensor<D>) -> Tensor<O> + Sync,
) {
    let device = Device::flex().autodiff();
    for tracked in [false, true] {
        let normal = Distribution::Normal(0.0, 1.0);
        let input = || Tensor::random(shape, normal, &device).set_require_grad(tracked);
        for threads in POOLS {
            let pool = pool(threads);
            let [stock, ours]: [&(dyn Fn(Tensor<D>) -> Tensor<O> + Sync); 2] = [&stock, &ours];
            let [stock, ours] = [stock, ours].map(|side| peak(pool, &device, &input, side));
            println!("{name}, tracked: {tracked}, {threads} threads: {ours} bytes, stock {stock}");
            assert!(
                ours <= stock + RECORDS + SCRATCH + more,
                "{name}, tracked: {tracked}, {threads} threads: {ours} bytes, stock {stock}"
            );
        }
    }
}

#[test]
fn softmaxes_along_other_axes_need_no_sums_per_thread() {
    let _alone = alone();
    for shape in [[1, 32, 1 << 14], [1, 1 << 9, 1 << 10], [64, 64, 64]] {
        within_stock(("softmax", 0), shape, |x| activation::softmax(x, 1), |x| F::softmax(x, 1));
        within_stock(("log_softmax", 0), shape, |x| activation::log_softmax(x, 1), |x| F::log_softmax(x, 1));
    }
}

#[test]
fn parameters_of_long_rows_need_no_sums_per_thread() {
    let _alone = alone();
    const WIDTH: usize = 1 << 13;
    let device = Device::flex().autodiff();
    let stock = burn::nn::LayerNormConfig::new(WIDTH).init(&device);
    let ours = memsave::LayerNorm::from(stock.clone());
    // Burn's gradients of gamma and beta alone take little more than those: ours take sums of a quarter of `x`, and one of each.
    let more = (64 * WIDTH + 6 * WIDTH * 4) as i64;
    within_stock(("layer_norm", more), [64, WIDTH], |x| stock.forward(x), |x| ours.forward(x));
    let stock = burn::nn::PReluConfig::new().with_num_parameters(WIDTH).init(&device);
    let ours = memsave::PRelu::from(stock.clone());
    within_stock(("prelu", 0), [64, WIDTH], |x| stock.forward(x), |x| ours.forward(x));
}

#[test]
fn convolutions_of_small_images_need_no_reference_per_image() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    for (batch, channels, groups, [size, kernel]) in
        [(4096, 128, 1, [1, 1]), (1024, 64, 1, [2, 3]), (1024, 128, 32, [2, 3])]
    {
        let options = || ConvOptions::new([1, 1], [kernel / 2; 2], [1, 1], groups);
        let weight = [channels, channels / groups, kernel, kernel];
        let weight = Tensor::random(weight, Distribution::Normal(0.0, 1.0), &device).require_grad();
        within_stock(
            ("conv2d", 0),
            [batch, channels, size, size],
            |x: Tensor<4>| module::conv2d(x, weight.clone(), None, options()),
            |x: Tensor<4>| F::conv2d(x, weight.clone(), None, options()),
        );
    }
}

#[test]
fn kernels_of_planes_need_no_plane_per_thread() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let images = [1, 32, 200, 200];
    let options = || ConvOptions::new([1, 1], [1, 1], [1, 1], 32);
    let weight = Tensor::random([32, 1, 3, 3], Distribution::Normal(0.0, 1.0), &device).require_grad();
    within_stock(
        ("depthwise", 0),
        images,
        |x: Tensor<4>| module::conv2d(x, weight.clone(), None, options()),
        |x: Tensor<4>| F::conv2d(x, weight.clone(), None, options()),
    );
    let stock = burn::nn::pool::AvgPool2dConfig::new([2, 2]).init();
    let ours = memsave::pool::AvgPool2d::from(stock.clone());
    within_stock(("avg_pool2d", 0), images, |x: Tensor<4>| stock.forward(x), |x: Tensor<4>| ours.forward(x));
    let stock = burn::nn::pool::MaxPool2dConfig::new([2, 2]).init();
    let ours = memsave::pool::MaxPool2d::from(stock.clone());
    within_stock(("max_pool2d", 0), images, |x: Tensor<4>| stock.forward(x), |x: Tensor<4>| ours.forward(x));
}

/// Threads for rows of the table, which are many, and linger for long. (Fewer threads hold fewer buffers.)
const THREADS: usize = 64;

/// Elements of an input of the table, at least: enough to be worth more than one thread.
const ELEMENTS: usize = 1 << 17;

/// Layers whose kernels are Burn's, with a buffer per thread: how many of them there are at the same time is chance, in both.
const OF_BURN: [&str; 1] = ["deform_conv2d"];

/// One test per family of the table: everything is tracked.
macro_rules! families {
    ($($family:ident),+) => {
        mod table_in_pools {
            use super::*;
            $(
                #[test]
                fn $family() {
                    let _alone = alone();
                    let mut bytes = InPools::default();
                    table::$family::visit(&mut bytes);
                    assert!(bytes.failures.is_empty(), "{}", bytes.failures.join("\n"));
                }
            )+
        }
    };
}
table::families!(families);

#[derive(Default)]
struct InPools {
    failures: Vec<String>,
}

impl Visitor for InPools {
    fn row<const D: usize, const O: usize, S, M>(&mut self, row: Row<'_, D, O, S, M>)
    where
        S: Module + Display + From<M>,
        M: Module + Display + From<S>,
    {
        if row.notes.leaves_out(Check::Bytes, &row.name) || row.notes.leaves_out(Check::Time, &row.name) {
            return;
        }
        let device = Device::flex().autodiff();
        let setting = Setting::new(&device, Case::Trainable, DType::F32);
        let mut shape = row.shapes.usual;
        shape[0] = ELEMENTS.div_ceil(shape[1..].iter().product()).min(shape[0]);
        let stock = setting.cast((row.stock.init)(&device, shape));
        let ours = M::from(stock.clone());
        let normal = Distribution::Normal(0.0, 1.0);
        let input = || Tensor::random(shape, normal, &device).require_grad();
        let pool = pool(THREADS);
        let (of_stock, of_ours) = (&row.stock.forward, &row.ours.forward);
        let twin = stock.clone();
        let stock = peak(pool, &device, &input, move |x| of_stock(&twin, x));
        let ours = peak(pool, &device, &input, move |x| of_ours(&ours, x));
        let seen = format!("{}, {THREADS} threads: {ours} bytes, stock {stock}", row.name);
        println!("{seen}");
        let is_ours = !OF_BURN.iter().any(|name| row.name.contains(name));
        self.failures.extend((is_ours && ours > stock + RECORDS + SCRATCH).then_some(seen));
    }
}
