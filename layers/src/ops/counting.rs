//! Counts, for tables of shapes and for 1 to 256 threads, what every thread computes.
//!
//! A kernel is even if no task takes longer than it takes to wake a thread, or if all tasks together take at most 1.25 times as long as work
//! that is divided evenly. Every step is in one task, and tasks hold no more than they may. Where that cannot be, the table says so.
use super::{conv, cross_entropy, linear_divergence, local_response, max_pool, recurrent, row_norm, softmax};
use crate::backend::cpu::{
    axis_map::counting as axis_map,
    plan::{Division, EVEN, Items},
};
use std::fmt::Display;

const THREADS: [usize; 17] = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256];

/// The loops of the kernels, for so many threads, with their divisions.
type Plans<'a> = &'a dyn Fn(usize) -> Vec<(Items, Division)>;

/// The worst imbalance of tasks that take longer than `longest`, in units of work.
struct Table {
    kernel: &'static str,
    longest: f64,
    worst: (f64, String),
}

impl Table {
    fn new(kernel: &'static str) -> Self {
        Self { kernel, longest: (1 << 17) as f64, worst: (0.0, String::new()) }
    }

    fn count(&mut self, shape: impl Display, plans: Plans<'_>) {
        for threads in THREADS {
            for (items, division) in plans(threads) {
                let counted = items.assert_whole(division, threads, &format!("{}: {shape}", self.kernel));
                if counted.largest > self.longest && counted.imbalance > self.worst.0 {
                    let case = format!("{shape}, {threads} threads: {division:?}, {counted:?}");
                    self.worst = (counted.imbalance, case);
                }
            }
        }
    }

    fn assert_at_most(self, bound: f64) {
        let Self { kernel, worst: (imbalance, case), .. } = self;
        println!("{kernel}: {imbalance:.2} ({case})");
        assert!(imbalance <= bound, "{kernel}: {case}");
    }
}

fn divided(items: Items) -> impl Fn(usize) -> Vec<(Items, Division)> {
    move |threads| vec![(items, items.division(threads))]
}

/// Batches and channels, and the sides of square planes.
fn planes() -> impl Iterator<Item = [usize; 3]> {
    let batches = [1, 2, 7, 64].into_iter();
    let images = batches.flat_map(|batch| [1, 3, 16, 33, 100, 512, 2048].map(|channels| [batch, channels]));
    let planes = images
        .flat_map(|[batch, channels]| [1, 7, 14, 56, 112, 224, 512].map(|side| [batch, channels, side]));
    planes.filter(|[batch, channels, side]| batch * channels * side * side <= 1 << 28)
}

/// 1 % more than [`EVEN`] where 510 rows of windows, of 37,000 units each, are divided among 160 threads; and more in half precision, where
/// threads may not hold the sums of planes of 56 x 56.
#[test]
fn planes_keep_all_threads_busy() {
    let [mut forward, mut backward] = ["max_pool2d", "max_pool2d, backward"].map(Table::new);
    let [mut means, mut selections] = ["maps along axes, adjoint", "selections, adjoint"].map(Table::new);
    let [mut of_half, mut images] =
        ["adjoint, half precision", "maps along axes, half precision"].map(Table::new);
    let mut responses = Table::new("local_response_norm");
    for [batch, channels, side] in planes() {
        let shape = format!("[{batch}, {channels}, {side}, {side}]");
        for (kernel, stride) in [(2, 2), (3, 2), (3, 1), (7, 7)] {
            if kernel > side {
                continue;
            }
            let [items, of_backward] =
                max_pool::cpu::counting::items([batch, channels, side], kernel, stride);
            let shape = format!("{shape}, kernel {kernel}, stride {stride}");
            forward.count(&shape, &divided(items));
            backward.count(&shape, &divided(of_backward));
            let adjoint = |is_wide, threads| {
                vec![axis_map::mean_adjoint([batch * channels, side], kernel, stride, (is_wide, threads))]
            };
            means.count(&shape, &|threads| adjoint(true, threads));
            of_half.count(&shape, &|threads| adjoint(false, threads));
            images.count(&shape, &divided(axis_map::mean_image([batch * channels, side], kernel, stride)));
        }
        for out in [2 * side, side.div_ceil(2)] {
            let shape = format!("{shape} to {out}");
            selections.count(&shape, &|threads| {
                vec![axis_map::nearest_adjoint([batch * channels, side], out, threads)]
            });
        }
        responses.count(&shape, &divided(local_response::cpu::counting::items([batch, channels, side])));
    }
    for table in [forward, backward, means, images, selections, responses] {
        table.assert_at_most(1.01 * EVEN);
    }
    of_half.assert_at_most(1.8);
}

/// More than [`EVEN`] only for tasks that take less than twice as long as it takes to wake a thread: smaller ones lay out more rows twice.
#[test]
fn depthwise_convolutions_keep_threads_busy() {
    let [mut table, mut gradients] =
        ["depthwise convolutions", "depthwise convolutions, weight"].map(Table::new);
    for [batch, channels, side] in planes() {
        for (kernel, stride) in [(3, 1), (3, 2), (7, 1)] {
            if kernel > side || batch * channels > 3000 {
                continue;
            }
            let shape = format!("[{batch}, {channels}, {side}, {side}], kernel {kernel}, stride {stride}");
            let (sides, options) = ([side, side], [kernel, stride]);
            table.count(&shape, &|threads| {
                vec![conv::cpu::depthwise_counting::division(batch * channels, &sides, options, threads)]
            });
            gradients.count(&shape, &|threads| {
                vec![conv::cpu::correlate_counting::division([batch, channels], &sides, options, threads)]
            });
        }
    }
    table.assert_at_most(2.0);
    gradients.assert_at_most(2.0);
}

/// Planes of a single row. Convolutions as [for other planes](depthwise_convolutions_keep_threads_busy).
#[test]
fn signals_keep_threads_busy() {
    let [mut forward, mut backward] = ["max_pool1d", "max_pool1d, backward"].map(Table::new);
    let [mut convolutions, mut gradients] =
        ["depthwise convolutions of signals", "depthwise convolutions of signals, weight"].map(Table::new);
    for [batch, channels] in [[1, 1], [1, 2], [3, 1], [2, 8], [1, 100], [64, 3]] {
        for size in [1000, 30_000, 1 << 18, 1 << 20] {
            for (kernel, stride) in [(3, 1), (3, 2), (25, 1), (400, 160)] {
                let shape = format!("[{batch}, {channels}, {size}], kernel {kernel}, stride {stride}");
                let [items, of_backward] =
                    max_pool::cpu::counting::items_of_signals(batch * channels, size, kernel, stride);
                forward.count(&shape, &divided(items));
                backward.count(&shape, &divided(of_backward));
                let options = [kernel, stride];
                convolutions.count(&shape, &|threads| {
                    vec![conv::cpu::depthwise_counting::division(batch * channels, &[size], options, threads)]
                });
                gradients.count(&shape, &|threads| {
                    vec![conv::cpu::correlate_counting::division(
                        [batch, channels],
                        &[size],
                        options,
                        threads,
                    )]
                });
            }
        }
    }
    for table in [forward, backward] {
        table.assert_at_most(EVEN);
    }
    for table in [convolutions, gradients] {
        table.assert_at_most(2.0);
    }
}

/// The loops between the products. A step of a single sequence stays on one thread unless it has more than 8192 hidden units.
#[test]
fn steps_of_recurrent_layers_keep_threads_busy() {
    let mut table = Table::new("recurrent steps");
    for batch in [1, 2, 3, 16, 33, 100, 1000] {
        for hidden in [1, 100, 1024, 4096, 10_000, 1 << 16] {
            table.count(format!("[{batch}, {hidden}]"), &|threads| {
                vec![recurrent::cpu::counting::division([batch, hidden], threads)]
            });
        }
    }
    table.assert_at_most(EVEN);
}

/// Parts have 256 rows at least, of 64 to 127 columns: some tasks take twice as long as it takes to wake a thread. A tenth more than [`EVEN`]
/// where 351 such parts are divided among 160 threads.
#[test]
fn softmaxes_along_other_axes_keep_threads_busy() {
    let mut table = Table::new("softmax along another axis");
    table.longest *= 2.25;
    for blocks in [1, 2, 3, 16, 100] {
        for inner in [2, 3, 16, 63, 64, 100, 127, 130, 512, 1000, 4096, 50_000] {
            for length in [1, 100, 300, 511, 512, 2000, 30_000, 1 << 20] {
                if blocks * inner * length <= 1 << 28 {
                    table.count(format!("[{blocks}, {length}, {inner}]"), &|threads| {
                        vec![softmax::cpu::counting::division([blocks, length, inner], threads)]
                    });
                }
            }
        }
    }
    table.assert_at_most(1.1 * EVEN);
}

/// Rows of up to 2^16 elements are not cut. In a softmax or cross entropy, they take twice as long as it takes to wake a thread; in a
/// divergence 32 times, and parts of longer rows four times. The backward pass of a row norm stays in one pass where several passes, which
/// read everything half as often again, would save nothing.
#[test]
fn few_long_rows_keep_all_threads_busy() {
    let [mut softmaxes, mut entropies] = ["softmax", "cross_entropy"].map(Table::new);
    let [mut norms, mut gradients] = ["row norms", "row norms, backward"].map(Table::new);
    let mut divergences = Table::new("divergence");
    softmaxes.longest *= 2.0;
    entropies.longest *= 2.0;
    divergences.longest *= 32.0;
    for rows in [1, 2, 3, 5, 8, 16, 33, 64, 100, 257, 1030] {
        for length in [1, 49, 1000, 8192, 32_768, 65_536, 70_000, 128_256, 262_144, 1 << 20, 1 << 24] {
            if rows * length > 1 << 28 {
                continue;
            }
            let shape = format!("[{rows}, {length}]");
            softmaxes.count(&shape, &divided(softmax::cpu::counting::items([rows, length])));
            entropies.count(&shape, &divided(cross_entropy::cpu::counting::items([rows, length])));
            divergences.count(&shape, &divided(linear_divergence::cpu::counting::items([rows, length])));
            for (groups, inner) in [(1, 1), (1, 64), (32, 256), (1, 1 << 18)] {
                if length % inner != 0 || (groups > 1 && rows % groups != 0) {
                    continue;
                }
                let shape = format!("{shape}, {groups} groups, {inner} elements per channel");
                let norm = [groups, length / inner, inner];
                norms.count(&shape, &divided(row_norm::cpu::counting::forward(rows, norm)));
                for wanted in [[false; 2], [true; 2]] {
                    gradients.count(&shape, &|threads| {
                        row_norm::cpu::counting::backward(rows, norm, wanted, threads)
                    });
                }
            }
        }
    }
    for table in [softmaxes, entropies, divergences, norms] {
        table.assert_at_most(EVEN);
    }
    gradients.assert_at_most(2.0);
}
