//! Graphs that stay alive.
use crate::{alone, cpu_devices};
use burn::module::Module;
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{Device, Tensor};
use burn_memsave::checkpoint::checkpoint;
use burn_memsave::measure::watch_graphs;
use burn_memsave::nn::{Linear, LinearConfig};

#[derive(Module, Debug)]
struct Network {
    body: Vec<Linear>,
    head: Linear,
}

impl Network {
    fn new(device: &Device) -> Self {
        let layer = |outputs| LinearConfig::new(8, outputs).init(device);
        Self { body: vec![layer(8), layer(8)], head: layer(2) }
    }

    fn hidden(&self, x: Tensor<2>) -> Tensor<2> {
        self.body.iter().fold(x, |x, layer| burn_memsave::functional::relu(layer.forward(x)))
    }

    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        self.head.forward(self.hidden(x)).mean()
    }
}

fn input(device: &Device) -> Tensor<2> {
    Tensor::ones([16, 8], device)
}

#[test]
fn a_loss_that_is_held_is_a_leak_with_its_modules() {
    let _alone = alone();
    for device in cpu_devices() {
        let model = Network::new(&device);
        let mut watch = watch_graphs();
        let losses = [model.loss(input(&device)), model.loss(input(&device))];
        let alive = watch.alive(&model);
        let rows: Vec<_> =
            alive.rows.iter().map(|row| (row.module.as_str(), row.operation, row.steps)).collect();
        for module in ["body.0", "body.1", "head"] {
            assert!(rows.contains(&(module, "linear", 2)), "{alive}");
        }
        assert!(rows.contains(&("body", "relu", 2)), "{alive}");
        // Every linear layer keeps its input, or has it computed again from the bits of the ReLU.
        assert!(alive.total() >= 2 * 16 * 8 * 4, "{alive}");
        assert!(alive.to_csv().starts_with("module,operation,steps,bytes\n"));
        assert!(alive.to_json().contains("\"module\": \"head\""));
        // The next step has Burn free what nobody holds.
        drop(losses);
        drop(model.loss(input(&device)).backward());
        assert!(watch.alive(&model).rows.is_empty());
    }
}

#[test]
fn a_step_that_goes_backward_leaves_nothing() {
    let _alone = alone();
    for device in cpu_devices() {
        let model = Network::new(&device);
        let mut watch = watch_graphs();
        let loss = model.loss(input(&device));
        let value = loss.clone().inner();
        drop(loss.backward());
        assert!(watch.alive(&model).rows.is_empty(), "{}", watch.alive(&model));
        drop(value);
    }
}

/// Of a training run, in which parameters change, the part that is not in the loss is found.
#[test]
fn a_branch_that_no_backward_pass_comes_by_is_named() {
    let _alone = alone();
    for device in cpu_devices() {
        let mut model = Network::new(&device);
        let mut optimizer = SgdConfig::new().init();
        let mut watch = watch_graphs();
        let mut held = vec![];
        for _ in 0..3 {
            watch.before_step(&model);
            let hidden = model.hidden(input(&device));
            held.push(model.head.forward(hidden.clone().detach())); // for a metric
            let gradients = GradientsParams::from_grads(hidden.mean().backward(), &model);
            model = optimizer.step(0.1, model, gradients);
        }
        let alive = watch.alive(&model);
        let rows: Vec<_> =
            alive.rows.iter().map(|row| (row.module.as_str(), row.operation, row.steps, row.bytes)).collect();
        assert_eq!(rows, [("head", "linear", 3, 3 * 16 * 8 * 4)], "{alive}");
    }
}

/// Nothing is seen before a watch, after it, or in the inner one of two by the outer one.
#[test]
fn watches_end_and_nest() {
    let _alone = alone();
    let Some(device) = cpu_devices().pop() else { return };
    let model = Network::new(&device);
    let mut outer = watch_graphs();
    let mut inner = watch_graphs();
    let in_inner = model.loss(input(&device));
    assert!(outer.alive(&model).rows.is_empty());
    assert!(!inner.alive(&model).rows.is_empty());
    drop(inner);
    let in_outer = model.loss(input(&device));
    assert!(!outer.alive(&model).rows.is_empty());
    drop(outer);
    let before = model.loss(input(&device));
    let mut later = watch_graphs();
    assert!(later.alive(&model).rows.is_empty());
    drop((in_inner, in_outer, before));
}

#[test]
fn a_segment_that_is_held_is_seen_by_its_input() {
    let _alone = alone();
    let Some(device) = cpu_devices().pop() else { return };
    let model = Network::new(&device);
    let mut watch = watch_graphs();
    let loss =
        checkpoint(&model, input(&device).require_grad(), |model: &Network, x: Tensor<2>| model.loss(x));
    let alive = watch.alive(&model);
    let rows: Vec<_> = alive.rows.iter().map(|row| (row.operation, row.steps, row.bytes)).collect();
    assert_eq!(rows, [("checkpoint", 1, 16 * 8 * 4)], "{alive}");
    drop(loss.backward());
    assert!(watch.alive(&model).rows.is_empty());
}
