//! Batch normalization with the statistics of a batch that is divided among replicas, which compute on threads of their own.
//!
//! | | with `n` elements of a channel in all parts, `n_i` of them here |
//! | --- | --- |
//! | computes | the output as without replicas, with the mean `sum(n_i mean_i) / n` |
//! | | and the variance `sum(n_i (var_i + (mean_i - mean)^2)) / n` |
//! | exchanges | forward: `n_i`, `mean_i`, `var_i`; backward, if `x` is tracked: `sum(dy)` and `sum(dy x_hat)` |
//! | keeps | `x`, `gamma` (handles), mean and variance, `[channels]` each, in f32 for half precision |
//! | backward | `dx = gamma / std (dy - sum(dy) / n - x_hat sum(dy x_hat) / n)`, sums over all parts |
//! | | `dgamma`, `dbeta`: the sums over this part, since replicas add up the gradients of parameters |
//!
//! That is what is kept without replicas, and in half precision, where statistics would otherwise be recomputed from `x`, two tensors of
//! the size of `gamma` in f32. The numbers pass through the host as f64, and every replica computes the same from them.
use super::{
    BETA, BatchNormKernels, BatchNormTrain, GAMMA, INPUTS, Statistics, X, plan_with_batch_statistics,
};
use crate::backend::remote::{data, remote_device};
use crate::backend::wide;
use crate::graph::{
    BackwardPass, Inputs, KeepPlan, Member, Operation, Place, Recorder, Run, Tracking, extension, given,
};
use burn::backend::{Backend, TensorMetadata, ops::FloatTensorOps, read_sync, tensor::FloatTensor};
use burn::tensor::{DType, Shape, TensorData};
use std::sync::Arc;

extension! {
    /// Batch normalization of a part of a batch.
    pub trait SynchronizedBatchNormOps(BatchNormKernels) {
        /// With the statistics of all parts; `x` `[batch, channels, ...]` is the part of this member, the others are `[channels]`.
        fn memsave_batch_norm_synchronized(
            x: FloatTensor<Self>,
            gamma: FloatTensor<Self>,
            beta: FloatTensor<Self>,
            epsilon: f64,
            member: Member,
        ) -> BatchNormTrain<Self> {
            let gamma_dtype = gamma.dtype();
            let [of_x, of_gamma, of_beta] = [&x, &gamma, &beta].map(Self::primitive);
            let operation = normalized::<<Self as Run>::Plain>(of_x, of_gamma, of_beta, epsilon, member);
            // As without replicas, in the dtype of the parameters.
            let dtype = gamma_dtype.into();
            let Statistics { mean, variance, .. } = operation.statistics.clone();
            let [mean, variance] =
                [mean, variance].map(|of| <<Self as Run>::Plain>::float_cast(of, dtype));
            BatchNormTrain {
                output: Self::run(operation, [Some(x), Some(gamma), Some(beta)]),
                mean: Self::untracked(mean),
                variance: Self::untracked(variance),
            }
        }
    }
}

/// With the statistics of all parts. These and the output are already known.
#[derive(Clone)]
pub struct WithStatisticsOfAll<T> {
    output: T,
    /// In the type that sums are made in.
    statistics: Statistics<T>,
    part: Part,
}

/// What a part is of its batch.
#[derive(Clone, Debug)]
pub struct Part {
    member: Member,
    /// Where the forward pass exchanged.
    place: Place,
    /// Elements of a channel, in this part and in all.
    elements: [f64; 2],
}

/// What the backward pass reads besides `x` and gamma.
#[derive(Clone, Debug)]
pub struct SavedOfPart<T> {
    /// `None` if only beta is tracked.
    statistics: Option<Arc<Statistics<T>>>,
    part: Part,
}

/// Normalizes a part of a batch.
fn normalized<B: BatchNormKernels>(
    x: FloatTensor<B>,
    gamma: FloatTensor<B>,
    beta: FloatTensor<B>,
    epsilon: f64,
    member: Member,
) -> WithStatisticsOfAll<FloatTensor<B>> {
    let (channels, device, dtype) = (gamma.shape()[0], x.device(), x.dtype());
    let own = x.shape().num_elements() / channels.max(1);
    let place = member.next();
    let mut moments = vec![own as f64];
    moments.extend(match own {
        0 => vec![0.0; 2 * channels],
        _ => numbers::<B>(B::batch_moments(x.clone())),
    });
    let Moments { count, mean, variance } = Moments::of_all(&member.exchange(place, moments), channels);
    let [mean, variance] = [mean, variance].map(|statistic| tensor::<B>(&statistic, dtype, &device));
    let output = B::normalize_by(x, gamma, beta, [mean.clone(), variance.clone()], epsilon);
    let part = Part { member, place, elements: [own as f64, count] };
    WithStatisticsOfAll { output, statistics: Statistics { mean, variance, epsilon }, part }
}

/// Moments of every channel.
struct Moments {
    count: f64,
    mean: Vec<f64>,
    variance: Vec<f64>,
}

impl Moments {
    /// Those of all parts, from the count, the means and the variances of each.
    fn of_all(parts: &[Vec<f64>], channels: usize) -> Self {
        assert!(
            parts.iter().all(|part| part.len() == 1 + 2 * channels),
            "replicas normalize different numbers of channels at the same time: each must run the same batch norms in the same order"
        );
        let count: f64 = parts.iter().map(|part| part[0]).sum();
        let over_parts =
            |f: &dyn Fn(&[f64]) -> f64| parts.iter().map(|part| part[0] * f(part)).sum::<f64>() / count;
        let mean: Vec<f64> = (1..=channels).map(|at| over_parts(&|part| part[at])).collect();
        let spread = |at: usize| {
            over_parts(&|part| part[channels + at] + (part[at] - mean[at - 1]) * (part[at] - mean[at - 1]))
        };
        let variance = (1..=channels).map(spread).collect();
        Self { count, mean, variance }
    }
}

/// The numbers of tensors `[channels]`, one tensor after the other.
fn numbers<B: Backend>(tensors: [FloatTensor<B>; 2]) -> Vec<f64> {
    let tensor = B::float_cat(tensors.into(), 0);
    let device = remote_device::<B>(&tensor.device());
    let read = || read_sync(B::float_into_data(tensor));
    let data = match device {
        Some(device) => data(&device, read),
        None => {
            read().unwrap_or_else(|error| panic!("the statistics of a batch norm could not be read: {error}"))
        }
    };
    data.iter::<f64>().collect()
}

/// A tensor `[channels]` of these numbers, in the type that sums of `dtype` are made in.
fn tensor<B: Backend>(numbers: &[f64], dtype: DType, device: &B::Device) -> FloatTensor<B> {
    let data = TensorData::new(numbers.to_vec(), Shape::new([numbers.len()]));
    B::float_from_data(data.convert_dtype(wide(dtype)), device)
}

impl<B: BatchNormKernels> Operation<B, 3> for WithStatisticsOfAll<FloatTensor<B>> {
    const INPUTS: [&'static str; 3] = INPUTS;
    const PARAMETERS: &'static [usize] = &[GAMMA];
    type Saved = SavedOfPart<FloatTensor<B>>;

    fn name(&self) -> &'static str {
        "batch_norm"
    }

    fn plan(&self, inputs: &Tracking<B, 3>) -> KeepPlan<3> {
        plan_with_batch_statistics(inputs)
    }

    fn forward(&self, _: Inputs<B, 3>) -> FloatTensor<B> {
        self.output.clone()
    }

    fn forward_saving(&self, _: Inputs<B, 3>, recorder: &Recorder<3>) -> (FloatTensor<B>, Self::Saved) {
        let statistics = self.statistics.saved(recorder);
        (self.output.clone(), SavedOfPart { statistics, part: self.part.clone() })
    }

    fn recompute(self, saved: &Self::Saved) -> impl Fn(Inputs<B, 3>) -> FloatTensor<B> + Send + 'static {
        let statistics = saved.statistics.clone().unwrap_or_else(|| Arc::new(self.statistics));
        move |[x, gamma, beta]| {
            let Statistics { mean, variance, epsilon } = Statistics::clone(&statistics);
            B::normalize_by(given(x), given(gamma), given(beta), [mean, variance], epsilon)
        }
    }

    fn backward(saved: Self::Saved, dy: FloatTensor<B>, pass: &mut BackwardPass<B, 3>) {
        let SavedOfPart { statistics, part } = saved;
        let Some(Statistics { mean, variance, epsilon }) = statistics.map(Arc::unwrap_or_clone) else {
            return pass.give(BETA, B::sum_to_channels(dy));
        };
        let statistics = [mean, variance];
        let (x, gamma) = (given(pass.take(X)), given(pass.take(GAMMA)));
        let dtype = gamma.dtype();
        let sums = B::gradient_sums(x.clone(), statistics.clone(), epsilon, dy.clone());
        for (input, sum) in [BETA, GAMMA].into_iter().zip(sums.clone()) {
            if pass.wants(input) {
                pass.give(input, B::float_cast(sum, dtype.into()));
            }
        }
        if pass.wants(X) {
            let means = part.means_of_all::<B>(sums, &x);
            pass.give(X, B::x_backward_by(x, gamma, statistics, epsilon, dy, means));
        }
    }
}

impl Part {
    /// The sums of all parts, divided by the elements of all parts.
    fn means_of_all<B: Backend>(&self, sums: [FloatTensor<B>; 2], x: &FloatTensor<B>) -> [FloatTensor<B>; 2] {
        let Self { member, place, elements: [own, all] } = self;
        let channels = sums[0].shape()[0];
        let own = match *own {
            0.0 => vec![0.0; 2 * channels],
            _ => numbers::<B>(sums),
        };
        let parts = member.exchange(Place { is_backward: true, ..*place }, own);
        let mean = |at: usize| parts.iter().map(|part| part[at]).sum::<f64>() / all;
        let of = |first: usize| (first..first + channels).map(mean).collect::<Vec<f64>>();
        [of(0), of(channels)].map(|means| tensor::<B>(&means, x.dtype(), &x.device()))
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::backend::testing::{Composed, assert_close, composed, random};
    use crate::graph::Exchange;
    use burn::backend::Flex;
    use burn::tensor::FloatDType;
    use core::time::Duration;

    #[test]
    fn default_bodies_equal_the_kernels() {
        for dtype in [FloatDType::F32, FloatDType::F16] {
            let cast = |x: FloatTensor<Flex>| Flex::float_cast(x, dtype);
            let wide = |x: FloatTensor<Flex>| Flex::float_cast(x, FloatDType::F32);
            let close = |what: &str, body: FloatTensor<Composed>, cpu| {
                // Casts of the composed results round where the kernels do.
                assert_close(what, Composed::float_cast(body, FloatDType::F32), wide(cpu));
            };
            let [gamma, beta] = [(); 2].map(|()| cast(random(&[3])));
            for shape in [&[6, 3][..], &[4, 3, 5], &[2, 3, 4, 4]] {
                let [x, dy] = [(); 2].map(|()| cast(random(shape)));
                let [mean, variance] = Flex::batch_moments(x.clone());
                let [body_mean, body_variance] = Composed::batch_moments(composed(&x));
                assert_eq!(body_mean.dtype(), mean.dtype());
                close("mean", body_mean, mean.clone());
                close("variance", body_variance, variance.clone());
                let statistics = [mean, variance];
                let c = || statistics.each_ref().map(composed);
                let [c_x, c_gamma, c_beta, c_dy] = [&x, &gamma, &beta, &dy].map(composed);
                let y = Flex::normalize_by(x.clone(), gamma.clone(), beta.clone(), statistics.clone(), 1e-5);
                let body = Composed::normalize_by(c_x.clone(), c_gamma.clone(), c_beta, c(), 1e-5);
                if dtype == FloatDType::F32 {
                    close("y", body, y); // (half precision may round to the next number)
                }
                let sums = Flex::gradient_sums(x.clone(), statistics.clone(), 1e-5, dy.clone());
                let body = Composed::gradient_sums(c_x.clone(), c(), 1e-5, c_dy.clone());
                let means = sums.clone();
                for (body, cpu) in body.into_iter().zip(sums) {
                    assert_eq!(body.dtype(), cpu.dtype());
                    close("sums", body, cpu);
                }
                let c_means = means.each_ref().map(composed);
                let dx = Flex::x_backward_by(x, gamma.clone(), statistics.clone(), 1e-5, dy, means);
                let body = Composed::x_backward_by(c_x, c_gamma, c(), 1e-5, c_dy, c_means);
                if dtype == FloatDType::F32 {
                    close("dx", body, dx);
                }
            }
        }
    }

    /// The moments of two parts are those of the whole, also if the mean is large, and a part without elements has none.
    #[test]
    fn moments_of_parts() {
        let exact = |values: &[f64]| {
            let mean = values.iter().sum::<f64>() / values.len() as f64;
            let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
            [mean, squares / values.len() as f64]
        };
        let part = |values: &[f64]| {
            let [mean, variance] = exact(values);
            vec![values.len() as f64, mean, variance]
        };
        let (first, second) = ([1e6, 1e6 + 1.0, 1e6 + 5.0], [1e6 + 2.0]);
        let all = Moments::of_all(&[part(&first), vec![0.0; 3], part(&second)], 1);
        let [mean, variance] = exact(&[&first[..], &second].concat());
        assert_eq!(all.count, 4.0);
        assert!((all.mean[0] - mean).abs() < 1e-9 && (all.variance[0] - variance).abs() < 1e-9);
    }

    /// One member has the whole batch.
    #[test]
    fn one_part_is_the_batch() {
        let [gamma, beta, x] = [random(&[3]), random(&[3]), random(&[4, 3, 5])];
        let exchange = Exchange::new(1, Duration::from_secs(600));
        let part = exchange.member(0).run(|| {
            let member = Member::current().expect("within a member");
            normalized::<Flex>(x.clone(), gamma.clone(), beta.clone(), 1e-5, member)
        });
        let part = part.expect("nothing fails");
        let whole = Flex::train_batch_norm(x, gamma, beta, 1e-5);
        let close = |what, part: FloatTensor<Flex>, whole| assert_close(what, composed(&part), whole);
        close("y", part.output, whole.output);
        close("mean", part.statistics.mean, whole.mean);
        close("variance", part.statistics.variance, whole.variance);
    }
}
