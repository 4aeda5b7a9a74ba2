//! Conversions, configs, displays and records of every module.
use crate::peers::outcome;
use crate::table::{self, Check, Row, Visitor};
use burn::config::Config;
use burn::module::{Module, ModuleVisitor, Param, ParamId, Quantizer};
use burn::nn;
use burn::store::ModuleRecord;
use burn::tensor::{
    Device, Distribution, Tensor, TensorData, Tolerance,
    quantization::{Calibration, QuantValue},
};
use burn_memsave::layers::*;
use burn_memsave::nn as ours;
use serde_json::Value;
use std::fmt::Display;

/// Ids, values and whether they require gradients, of all parameters.
#[derive(Default, Debug, PartialEq)]
struct Parameters(Vec<(ParamId, TensorData, bool)>);

impl ModuleVisitor for Parameters {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.push((param.id, param.val().into_data(), param.val().is_require_grad()));
    }
}

fn parameters(module: &impl Module) -> Parameters {
    let mut parameters = Parameters::default();
    module.visit(&mut parameters);
    parameters
}

/// One test per family.
macro_rules! families {
    ($($family:ident),+) => {$(
        #[test]
        fn $family() {
            table::$family::visit(&mut Conversions);
        }
    )+};
}
table::families!(families);

/// Every row of the table there and back, as it is and frozen; displays, configs and records must agree.
struct Conversions;

impl Visitor for Conversions {
    fn row<const D: usize, const O: usize, S, M>(&mut self, row: Row<'_, D, O, S, M>)
    where
        S: Module + Display + From<M>,
        M: Module + Display + From<S>,
    {
        if row.notes.leaves_out(Check::Conversion, &row.name) {
            return;
        }
        let name = row.name.as_str();
        let device = &Device::flex().autodiff();
        let stock = (row.stock.init)(device, row.shapes.test);
        match row.notes.unlike {
            Some(why) => println!("display of {name} left out: {why}"),
            None => {
                let display = format!("MemSave{stock}");
                assert_eq!(M::from(stock.clone()).to_string(), display, "{name}: displayed");
                let made = (row.ours.init)(device, row.shapes.test).to_string();
                assert_eq!(made, display, "{name}: made by our config, displayed");
            }
        }
        for frozen in [false, true] {
            check::<S, M>(name, || {
                let stock = (row.stock.init)(device, row.shapes.test);
                if frozen { stock.freeze() } else { stock }
            });
        }
    }

    fn configs<S, C>(&mut self, name: &str, stock: impl Fn() -> S, ours: impl Fn() -> C)
    where
        S: Config + From<C>,
        C: Config + From<S>,
    {
        let json = json(&stock());
        assert_eq!(self::json(&C::from(stock())), json, "{name}: config converted");
        self.configs_one_way(name, stock, ours);
    }

    fn configs_one_way<S: Config + From<C>, C: Config>(
        &mut self,
        name: &str,
        stock: impl Fn() -> S,
        ours: impl Fn() -> C,
    ) {
        let json = json(&stock());
        assert_eq!(self::json(&ours()), json, "{name}: config");
        assert_eq!(self::json(&S::from(ours())), json, "{name}: config converted to stock's");
    }
}

fn json(config: &impl Config) -> Value {
    serde_json::to_value(config).expect("a config")
}

/// Converts there and back; records must agree.
fn check<S, M>(name: &str, make: impl Fn() -> S)
where
    S: Module + Display + From<M>,
    M: Module + From<S>,
{
    let stock = make();
    let before = parameters(&stock);
    let display = stock.to_string();
    let ours = M::from(stock.clone());
    assert_eq!(parameters(&ours), before, "{name}: converted");
    assert_eq!(ours.num_params(), stock.num_params(), "{name}: counted");

    let values = |module: &Parameters| module.0.iter().map(|p| p.1.clone()).collect::<Vec<_>>();
    let bytes = |record: ModuleRecord| record.into_bytes().expect("a record of a module");
    let read = |bytes| ModuleRecord::from_bytes(bytes).expect("a record that was just written");
    let of_stock = M::from(make()).load_record(read(bytes(stock.into_record())));
    assert_eq!(values(&parameters(&of_stock)), values(&before), "{name}: stock's record in ours");
    let of_ours = make().load_record(read(bytes(ours.clone().into_record())));
    assert_eq!(values(&parameters(&of_ours)), values(&before), "{name}: our record in stock");

    let back = S::from(ours);
    assert_eq!(parameters(&back), before, "{name}: converted back");
    assert_eq!(back.to_string(), display, "{name}: displayed after that");
}

#[test]
fn wrappers_convert_there_and_back() {
    let device = &Device::flex().autodiff();
    let gate = nn::GateController::new(3, 4, true, nn::Initializer::Ones, device);
    let ours = MemSaveGateController::from_nn_gate_controller(gate.clone());
    assert_eq!(parameters(&ours), parameters(&gate));
    assert_eq!(parameters(&ours.into_nn_gate_controller()), parameters(&gate));
    let prelu = nn::activation::Activation::from(nn::activation::PReluConfig::new().init(device));
    let ours = MemSaveActivation::from_nn_activation(prelu.clone());
    assert_eq!(parameters(&ours), parameters(&prelu));
    assert_eq!(parameters(&ours.into_nn_activation()), parameters(&prelu));
    for norm in [
        nn::norm::Normalization::from(nn::BatchNormConfig::new(3).init(device)),
        nn::LayerNormConfig::new(3).init(device).into(),
        nn::RmsNormConfig::new(3).init(device).into(),
        nn::GroupNormConfig::new(2, 4).init(device).into(),
        nn::InstanceNormConfig::new(4).init(device).into(),
    ] {
        let ours = MemSaveNormalization::from_nn_normalization(norm.clone());
        assert_eq!(ours.num_features(), norm.num_features());
        assert_eq!(parameters(&ours.into_nn_normalization()), parameters(&norm));
    }
}

/// Defaults are written twice, once in Burn and once here: of configs whose rows of the table set them.
#[test]
fn defaults_are_the_same() {
    macro_rules! same_defaults {
        ($($($path:ident)::+ ($($argument:expr),*)),+ $(,)?) => {$(
            assert_eq!(
                serde_json::to_value(ours::$($path)::+::new($($argument),*)).expect("a config"),
                serde_json::to_value(nn::$($path)::+::new($($argument),*)).expect("a config"),
                stringify!($($path)::+),
            );
        )+};
    }
    same_defaults!(
        attention::MultiHeadAttentionConfig(4, 2),
        attention::CrossAttentionConfig(4, 3, 2, 1, 5),
        pool::MaxPool1dConfig(3),
        pool::MaxPool2dConfig([3, 2]),
        interpolate::Interpolate1dConfig(),
        interpolate::Interpolate2dConfig(),
        activation::PReluConfig(),
        transformer::PositionWiseFeedForwardConfig(8, 16),
        transformer::TransformerEncoderConfig(8, 16, 2, 1),
        transformer::TransformerDecoderConfig(8, 16, 2, 1),
        loss::BinaryCrossEntropyLossConfig(),
    );
}

/// Burn dequantizes what `quantize_weights` has made of a frozen layer, parameter by parameter; so do its twins.
#[test]
fn quantized_layers_compute_as_stock() {
    fn quantized<M: Module>(layer: M, device: &Device) -> M {
        let scheme = device.settings().quantization.scheme.with_value(QuantValue::Q8S);
        layer.freeze().quantize_weights(&mut Quantizer::new(Calibration::MinMax, scheme))
    }
    macro_rules! compare {
        ($shape:expr, $stock:expr => $ours:ty) => {
            let device = Device::flex().autodiff();
            let x = Tensor::<4>::random($shape, Distribution::Default, &device);
            let stock = quantized($stock.init(&device), &device);
            let ours = <$ours>::from(stock.clone());
            let [ours, stock] = [outcome(&x, |x| ours.forward(x)), outcome(&x, |x| stock.forward(x))];
            let close = Tolerance::<f32>::rel_abs(1e-5, 1e-5);
            ours.iter().zip(&stock).for_each(|(ours, stock)| ours.assert_approx_eq::<f32>(stock, close));
        };
    }
    compare!([2, 3, 4, 32], nn::LinearConfig::new(32, 32) => MemSaveLinear);
    compare!([2, 32, 5, 5], nn::conv::Conv2dConfig::new([32, 32], [3, 3]) => MemSaveConv2d);
    compare!([2, 32, 5, 5], nn::conv::ConvTranspose2dConfig::new([32, 32], [3, 3]) => MemSaveConvTranspose2d);
    compare!([2, 32, 5, 5], nn::BatchNormConfig::new(32) => MemSaveBatchNorm);
    compare!([2, 32, 5, 5], nn::PReluConfig::new().with_num_parameters(32) => MemSavePRelu);
}
