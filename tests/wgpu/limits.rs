//! Every row of the table on a device: ours keeps, needs and launches no more than Burn.
//!
//! Not where operations are fused: what is launched there, and what waits to be launched, depends on what is around a layer.
//! `cargo bench --bench devices` measures that.
#![cfg(not(feature = "fusion"))]
use crate::table::{
    self, Case, Check, Input, Row, Visitor,
    run::{initialize, second, variants},
};
use crate::{alone, gpu, on_cuda};
use burn::module::Module;
use burn::tensor::{DType, Device, Distribution, Tensor, module, ops::AttentionModuleOptions};
use burn_memsave::functional as F;
use burn_memsave::measure::{LayerMeasurement, measure_layer};
use burn_memsave::nn as memsave;
use std::fmt::Display;

/// What the pool rounds up, of tensors that an operation keeps or makes beside large ones: statistics, masks of a few words.
const SLACK: u64 = 16 * 256;

/// Launches beyond Burn's: what is computed again is at most one kernel more.
const MORE_LAUNCHES: u64 = 1;

#[test]
fn no_layer_needs_more_than_burn() {
    if on_cuda() {
        println!("left out: Burn pads rows of some tensors there, of these shapes the most; see the bench");
        return;
    }
    let _alone = alone();
    let mut limits = Limits { device: gpu().autodiff(), faults: vec![] };
    table::visit(&mut limits);
    assert!(limits.faults.is_empty(), "{}", limits.faults.join("\n"));
}

struct Limits {
    device: Device,
    faults: Vec<String>,
}

impl Visitor for Limits {
    fn row<const D: usize, const O: usize, S, M>(&mut self, row: Row<'_, D, O, S, M>)
    where
        S: Module + Display + From<M>,
        M: Module + Display + From<S>,
    {
        if row.notes.leaves_out(Check::TimeOnDevices, &row.name) {
            return;
        }
        let (forward_stock, forward_ours) = (&row.stock.forward, &row.ours.forward);
        let shape = row.shapes.test;
        let stock = (row.stock.init)(&self.device, shape);
        initialize(shape, &self.device, |x| forward_stock(&stock, x));
        for (parameters, stock) in variants(stock) {
            let ours = M::from(stock.clone());
            let burn = self.measure(shape, &|x| forward_stock(&stock, x));
            let ours = self.measure(shape, &|x| forward_ours(&ours, x));
            let case = if parameters == "frozen" { Case::Frozen } else { Case::Trainable };
            let formula = (row.kept)(case, Input { shape, dtype: DType::F32 }) as u64;
            let mut expect = |what: &str, ours: Option<u64>, most: Option<u64>| {
                let (Some(ours), Some(most)) = (ours, most) else { panic!("the pool counts") };
                if ours > most {
                    self.faults.push(format!("{}, {parameters}: {what} {ours}, at most {most}", row.name));
                }
            };
            let slack = |bytes: Option<u64>| bytes.map(|bytes| bytes + SLACK);
            expect("keeps", ours.kept, slack(burn.kept));
            if !row.notes.leaves_out(Check::Bytes, &row.name)
                && row.notes.unstated.is_none()
                && !row.notes.summed
            {
                expect("keeps", ours.kept, Some(formula + SLACK));
            }
            expect("peaks at", ours.peak, slack(burn.peak));
            expect("launches", ours.launches, burn.launches.map(|launches| launches + MORE_LAUNCHES));
        }
    }
}

impl Limits {
    fn measure<const D: usize, const O: usize>(
        &self,
        shape: [usize; D],
        forward: &dyn Fn(Tensor<D>) -> Tensor<O>,
    ) -> LayerMeasurement {
        let input = || Tensor::random(shape, Distribution::Normal(0.0, 1.0), &self.device).require_grad();
        second(&self.device, || measure_layer(input, forward))
    }
}

/// A causal attention is made in parts, each of which leaves out what its queries do not see: no more of them than there are launches for.
#[test]
fn causal_attention_launches_no_more_than_burn() {
    let options = AttentionModuleOptions { is_causal: true, ..Default::default() };
    let _alone = alone();
    let limits = Limits { device: gpu().autodiff(), faults: vec![] };
    for shape in [[1, 2, 1024, 8], [4, 2, 256, 8]] {
        let burn =
            limits.measure(shape, &|x| module::attention(x.clone(), x.clone(), x, None, None, options));
        let ours = limits.measure(shape, &|x| F::attention(x.clone(), x.clone(), x, None, None, options));
        let [most, launches] = [&burn, &ours].map(|of| of.launches.expect("they are counted"));
        assert!(launches <= most + MORE_LAUNCHES, "{shape:?}: {launches} launches, Burn's are {most}");
        let [most, peak] = [&burn, &ours].map(|of| of.peak.expect("the pool counts"));
        assert!(peak * 2 <= most, "{shape:?}: {peak} bytes, Burn's are {most}");
    }
}

/// The weights of so few tokens are less than their queries, keys and values.
#[test]
fn attention_to_few_tokens_needs_no_more_than_burn() {
    if on_cuda() {
        println!("left out, as above");
        return;
    }
    let _alone = alone();
    let limits = Limits { device: gpu().autodiff(), faults: vec![] };
    for (batch, length) in [(256, 1), (16, 16), (16, 50)] {
        let stock = burn::nn::attention::MultiHeadAttentionConfig::new(128, 2).with_dropout(0.0);
        for (parameters, stock) in variants(stock.init(&limits.device)) {
            let layer = memsave::attention::MultiHeadAttention::from(stock.clone());
            let shape = [batch, length, 128];
            let burn = limits
                .measure(shape, &|x| stock.forward(burn::nn::attention::MhaInput::self_attn(x)).context);
            let ours =
                limits.measure(shape, &|x| layer.forward(memsave::attention::MhaInput::self_attn(x)).context);
            for (what, ours, burn) in [("keeps", ours.kept, burn.kept), ("needs", ours.peak, burn.peak)] {
                let [ours, burn] = [ours, burn].map(|of| of.expect("the pool counts"));
                let name = format!("{batch} x {length} tokens, {parameters}");
                assert!(ours <= burn + SLACK, "{name}: {what} {ours} bytes, Burn's {burn}");
            }
        }
    }
}

/// Sums by channels are made of parts in f32, which are few, also where there are many examples of a few elements.
#[test]
fn batch_norm_of_few_elements_needs_no_more_than_burn() {
    if on_cuda() {
        println!("left out, as above");
        return;
    }
    const SHAPE: [usize; 3] = [512, 64, 2];
    let _alone = alone();
    let limits = Limits { device: gpu().autodiff(), faults: vec![] };
    let stock = burn::nn::BatchNormConfig::new(SHAPE[1]);
    for (parameters, stock) in variants(stock.init(&limits.device)) {
        let layer = memsave::BatchNorm::from(stock.clone());
        let burn = limits.measure(SHAPE, &|x| stock.forward(x));
        let ours = limits.measure(SHAPE, &|x| layer.forward(x));
        let tensor = (4 * SHAPE.iter().product::<usize>()) as u64;
        let [burn, ours] = [burn, ours].map(|of| of.peak.expect("the pool counts"));
        assert!(ours <= burn + SLACK, "{parameters}: {ours} bytes, Burn's {burn}");
        // Beside the input, the output or the gradient.
        assert!(ours <= tensor + tensor / 8 + SLACK, "{parameters}: {ours} bytes");
    }
}

/// Norms of inputs that lie elsewhere in memory need no more than those of contiguous ones: nothing is copied.
#[test]
fn norms_do_not_copy_what_they_read() {
    type Op = fn(Tensor<3>, Tensor<1>) -> Tensor<3>;
    const SHAPE: [usize; 3] = [64; 3];
    /// The most that parts of sums take, whose number depends on the layout: two numbers in f32 for each of 4096 units.
    const PARTS: u64 = 4096 * 2 * 4;
    let ops: [(&str, Op); 5] = [
        ("layer_norm", |x, p| F::layer_norm(x, p.clone(), Some(p), 1e-3)),
        ("rms_norm", |x, p| F::rms_norm(x, p, 1e-3)),
        ("group_norm", |x, p| F::group_norm(x, Some(p.clone()), Some(p), 4, 1e-3)),
        ("batch_norm_train", |x, p| F::batch_norm_train(x, p.clone(), p, 1e-3).output),
        ("batch_norm", |x, p| {
            let fixed = p.clone().detach().set_require_grad(false);
            F::batch_norm(x, p.clone(), p, fixed.clone(), fixed, 1e-3)
        }),
    ];
    let _alone = alone();
    let limits = Limits { device: gpu().autodiff(), faults: vec![] };
    for (name, op) in ops {
        let parameter = || Tensor::<1>::ones([SHAPE[1]], (&limits.device, DType::F32)).require_grad();
        let measure = |axes: [usize; 3]| limits.measure(SHAPE, &|x| op(x.permute(axes), parameter()));
        let contiguous = measure([0, 1, 2]);
        for axes in [[0, 2, 1], [1, 0, 2], [2, 1, 0], [1, 2, 0]] {
            let strided = measure(axes);
            let [most, peak] = [&contiguous, &strided].map(|of| of.peak.expect("the pool counts"));
            assert!(peak <= most + PARTS + SLACK, "{name}, {axes:?}: {peak} bytes, contiguous {most}");
        }
    }
}
