//! Compares modules of normalization with those of stock Burn.
use super::*;

/// The layer with running statistics of its own.
fn stock(t: &Operands, config: &BatchNormConfig, dtype: DType) -> BatchNorm {
    let channels = config.num_features;
    let state = |seed, range| {
        RunningState::new(tensor(uniform(channels, seed, range), &[channels], t.device(), dtype))
    };
    let mut layer = config.init(t.device());
    (layer.gamma, layer.beta) = (param(t, 1), param(t, 2));
    (layer.running_mean, layer.running_var) = (state(7, -0.5..0.5), state(8, 0.5..1.5));
    layer
}

/// Outputs, and the running statistics after two batches.
#[test]
fn batch_norm() {
    let shapes = [2..5usize, 1..4, 2..5, 2..5];
    let numbers = (prop::sample::select(vec![1e-5, 1e-3, 0.5]), prop::sample::select(vec![0.0, 0.1, 1.0]));
    for_all(32, (shapes, numbers, leaves()), |(shape, (epsilon, momentum), setting)| {
        let reading = match setting.reading {
            Reading::Sum => Reading::Weighted, // of a sum, the gradient is 0
            reading => reading,
        };
        let (channels, dtype) = (shape[1], setting.dtype);
        let config = BatchNormConfig::new(channels).with_epsilon(epsilon).with_momentum(momentum);
        let parameters = [Input::between([channels], 0.5..1.5), Input::random([channels])];
        let inputs = [&[Input::random(shape)][..], &parameters].concat();
        let check = Check::new(inputs, Setting { reading, ..setting });
        same_layers!(check, MemSaveBatchNorm, |t| stock(t, &config, dtype), |layer| {
            layer.forward(t.get::<4>(0))
        });
        same_layers!(check, MemSaveBatchNorm, |t| stock(t, &config, dtype), |layer| {
            let x = t.get::<4>(0);
            layer.forward(layer.forward(x) * 2.0 + 1.0);
            Tensor::cat(vec![layer.running_mean.value_sync(), layer.running_var.value_sync()], 0)
        });
    });
}

/// The layer of a config for a shape and an epsilon, with the parameters that `$set` gives it.
macro_rules! rows {
    ($($test:ident: $ours:ident = |$shape:ident: [usize; $rank:literal], $epsilon:ident| $config:expr, $parameters:expr,
        |$layer:ident, $t:ident| $set:expr;)+) => {$(
        #[test]
        fn $test() {
            let shapes = prop::array::uniform::<_, $rank>(2..5usize);
            let epsilons = prop::sample::select(vec![1e-5, 1e-3, 0.5]);
            for_all(32, (shapes, epsilons, leaves()), |($shape, $epsilon, setting)| {
                let parameters = $parameters;
                let inputs = [
                    Input::random($shape),
                    Input::between([parameters], 0.5..1.5),
                    Input::random([parameters]),
                ];
                let check = Check::new(inputs, crate::batch_norm::with_gradient(setting)).within(1e-5);
                let stock = |$t: &Operands| {
                    let mut $layer = $config.init($t.device());
                    $set;
                    $layer
                };
                same_layers!(check, $ours, |t| stock(t), |layer| layer.forward(t.get::<$rank>(0)));
            });
        }
    )+};
}
rows! {
    layer_norm: MemSaveLayerNorm = |shape: [usize; 3], epsilon|
        LayerNormConfig::new(shape[2]).with_epsilon(epsilon), shape[2],
        |layer, t| (layer.gamma, layer.beta) = (param(t, 1), Some(param(t, 2)));
    rms_norm: MemSaveRmsNorm = |shape: [usize; 3], epsilon|
        RmsNormConfig::new(shape[2]).with_epsilon(epsilon), shape[2],
        |layer, t| layer.gamma = param(t, 1);
    group_norm: MemSaveGroupNorm = |shape: [usize; 4], epsilon|
        GroupNormConfig::new(1, shape[1]).with_epsilon(epsilon), shape[1],
        |layer, t| (layer.gamma, layer.beta) = (Some(param(t, 1)), Some(param(t, 2)));
    instance_norm: MemSaveInstanceNorm = |shape: [usize; 4], epsilon|
        InstanceNormConfig::new(shape[1]).with_epsilon(epsilon), shape[1],
        |layer, t| (layer.gamma, layer.beta) = (Some(param(t, 1)), Some(param(t, 2)));
}

/// Half precision beside parameters in full precision is left to stock, which widens.
#[test]
fn layer_norm_of_mixed_types() {
    let check = Check::new([Input::random([3, 4])], Setting::of(DType::F16)).same();
    let config = LayerNormConfig::new(4);
    same_layers!(check, MemSaveLayerNorm, |t| config.init(t.device()), |layer| layer.forward(t.get::<2>(0)));
}

#[test]
fn what_stock_refuses_is_refused() {
    let config = BatchNormConfig::new(3);
    let check = Check::new([Input::random([2, 2, 4])], Setting::default());
    both_refuse!(check, MemSaveBatchNorm, |t| config.init(t.device()), |layer| {
        layer.forward(t.get::<3>(0))
    });
    let layer_norm = LayerNormConfig::new(3);
    both_refuse!(check, MemSaveLayerNorm, |t| layer_norm.init(t.device()), |layer| layer
        .forward(t.get::<3>(0)));
    let rms_norm = RmsNormConfig::new(3);
    both_refuse!(check, MemSaveRmsNorm, |t| rms_norm.init(t.device()), |layer| layer.forward(t.get::<3>(0)));
    let group_norm = GroupNormConfig::new(1, 3);
    both_refuse!(check, MemSaveGroupNorm, |t| group_norm.init(t.device()), |layer| layer
        .forward(t.get::<3>(0)));
    let instance_norm = InstanceNormConfig::new(3);
    both_refuse!(check, MemSaveInstanceNorm, |t| instance_norm.init(t.device()), |layer| {
        layer.forward(t.get::<3>(0))
    });
    let too_small = Check::new([Input::random([1, 1, 2])], Setting::default());
    let group_norm = GroupNormConfig::new(1, 1);
    both_refuse!(too_small, MemSaveGroupNorm, |t| group_norm.init(t.device()), |layer| {
        layer.forward(t.get::<3>(0))
    });
}
