//! Wrong use gets the message that stock gives, or a better one.
#![allow(deprecated)] // burn-ndarray is deprecated as a whole
use burn::module::{Module, ModuleDisplay};
use burn::nn;
use burn::store::ModuleRecord;
use burn::tensor::{DType, Device, Tensor, TensorData, Tolerance, activation, module, ops::ConvOptions};
use burn_memsave::functional as F;
use burn_memsave::nn::conv::Conv2dConfig;
use burn_memsave::nn::{BatchNormConfig, DropoutConfig, LinearConfig};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The result of `f`, or the message of its panic.
fn attempt<R>(f: impl FnOnce() -> R) -> Result<R, String> {
    catch_unwind(AssertUnwindSafe(f)).map_err(|payload| {
        let text = payload.downcast_ref::<String>().cloned();
        text.or_else(|| payload.downcast_ref::<&str>().map(|text| text.to_string())).expect("a message")
    })
}

/// The message of the panic of `f`.
pub(crate) fn refusal<R>(f: impl FnOnce() -> R) -> String {
    attempt(f).err().expect("refused")
}

#[test]
fn a_wrong_axis_is_named() {
    let device = Device::flex().autodiff();
    let linear = LinearConfig::new(4, 2).init(&device);
    let message = refusal(|| linear.forward(Tensor::<2>::zeros([1, 3], &device)));
    assert!(
        message.starts_with("assert_shape!(input, [.., d_input]): axis 1 expected 4, got 3"),
        "{message}"
    );
    let norm = BatchNormConfig::new(3).init(&device);
    let message = refusal(|| norm.forward(Tensor::<3>::zeros([1, 4, 2], &device)));
    let expected = "assert_shape!(input, [_, num_features, ..]): axis 1 expected 3, got 4";
    assert!(message.starts_with(expected), "{message}");
    let conv = Conv2dConfig::new([5, 3], [3, 3]).init(&device);
    let message = refusal(|| conv.forward(Tensor::<4>::zeros([1, 4, 10, 10], &device)));
    assert!(message.contains("got: 4, expected: 5"), "{message}");
}

#[test]
fn a_config_refuses_what_stock_refuses() {
    let device = Device::flex();
    assert!(refusal(|| Conv2dConfig::new([1, 4], [1, 1]).with_groups(4).init(&device)).contains("divisible"));
    assert!(
        refusal(|| BatchNormConfig::new(0).init(&device)).contains("num_features must be greater than zero")
    );
    assert!(refusal(|| DropoutConfig::new(1.0).init()).contains("must be finite and in the range [0, 1)"));
}

#[test]
fn a_record_of_another_layer_is_refused_with_its_path() {
    let device = Device::flex();
    let record = |module: ModuleRecord| {
        ModuleRecord::from_bytes(module.into_bytes().expect("a record")).expect("read")
    };
    let other = record(LinearConfig::new(3, 4).init(&device).into_record());
    let error =
        BatchNormConfig::new(3).init(&device).try_load_record(other).expect_err("another layer's record");
    assert!(error.to_string().contains("gamma"), "{error}");
    let wider = record(LinearConfig::new(5, 4).init(&device).into_record());
    let error = LinearConfig::new(3, 4).init(&device).try_load_record(wider).expect_err("another shape");
    assert!(error.to_string().contains("weight"), "{error}");
}

#[derive(Module, Debug)]
struct Model<M: Module + ModuleDisplay> {
    block: Block<M>,
}

#[derive(Module, Debug)]
struct Block<M: Module + ModuleDisplay> {
    norm: M,
}

fn model<M: Module + ModuleDisplay>(norm: M) -> Model<M> {
    Model { block: Block { norm } }
}

fn refused(model: impl Module, record: &ModuleRecord) -> String {
    match model.try_load_record(record.clone()) {
        Ok(_) => panic!("another model's record is taken"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn a_record_of_another_model_is_refused_as_by_stock() {
    let device = Device::flex();
    let linear = model(LinearConfig::new(5, 4).init(&device)).into_record();
    let message = refused(model(BatchNormConfig::new(3).init(&device)), &linear);
    assert!(message.contains("block.norm.gamma"), "{message}");
    assert_eq!(message, refused(model(nn::BatchNormConfig::new(3).init(&device)), &linear));
    let message = refused(model(LinearConfig::new(3, 4).init(&device)), &linear);
    assert!(message.contains("block.norm.weight"), "{message}");
    assert_eq!(message, refused(model(nn::LinearConfig::new(3, 4).init(&device)), &linear));
}

/// A function of an input `[1, 4, 2, 2]` and of a parameter `[4]`.
type Op = fn(Tensor<4>, Tensor<1>) -> Tensor<4>;

/// Calls by the name of their function, ours and stock.
macro_rules! pairs {
    ($($stock:ident::$function:ident = |$x:ident, $p:ident| ($($argument:expr),*) $(.$field:ident)?;)+) => {
        [$((
            stringify!($function),
            (|$x, $p| F::$function($($argument),*)$(.$field)?) as Op,
            (|$x, $p| $stock::$function($($argument),*)$(.$field)?) as Op,
        )),+]
    };
}

/// Output and gradients, or a refusal. `dtypes` and `tracked` are of the input and of the parameter.
fn run(op: Op, device: &Device, dtypes: [DType; 2], tracked: [bool; 2]) -> Result<Vec<TensorData>, String> {
    attempt(|| {
        let values = [0.5f32, -1.0, 2.0, 1.5];
        let x = TensorData::new([values; 4].concat(), [1, 4, 2, 2]);
        let x = Tensor::<4>::from_data(x, (device, dtypes[0])).set_require_grad(tracked[0]);
        let parameter = Tensor::<1>::from_data(values, (device, dtypes[1])).set_require_grad(tracked[1]);
        let y = op(x.clone(), parameter.clone());
        let gradients = y.clone().exp().sum().backward();
        let [dx, dparameter] =
            [x.grad(&gradients).map(Tensor::into_data), parameter.grad(&gradients).map(Tensor::into_data)];
        [Some(y.into_data()), dx, dparameter].into_iter().flatten().collect()
    })
}

/// The same refusal or the same result, never a wrong one.
#[test]
fn dtypes_that_differ_or_are_unsupported_are_treated_as_by_stock() {
    use DType::{F16, F32, F64};
    let pairs = pairs! {
        module::batch_norm = |x, p| (x, p.clone(), p.clone(), p.clone().detach(), p.detach().abs(), 1e-5);
        module::batch_norm_train = |x, p| (x, p.clone(), p, 1e-5).output;
        activation::prelu = |x, p| (x, p);
        module::linear = |x, p| (x, p.reshape([2, 2]), None);
        module::conv2d = |x, p| (x, p.reshape([1, 4, 1, 1]), None, ConvOptions::new([1; 2], [0; 2], [1; 2], 1));
    };
    let devices = [
        Device::flex().autodiff(),
        #[cfg(feature = "ndarray")]
        Device::ndarray().autodiff(),
    ];
    let cases = [[F64, F32], [F32, F64], [F16, F16], [F16, F32]]
        .into_iter()
        .flat_map(|dtypes| [[true, true], [true, false], [false, true]].map(|tracked| (dtypes, tracked)));
    for (dtypes, tracked) in cases {
        for (device, (name, ours, stock)) in
            devices.iter().flat_map(|device| pairs.map(|pair| (device, pair)))
        {
            let what = format!("{device:?}: {name} of {dtypes:?}, tracked {tracked:?}");
            match [ours, stock].map(|op| run(op, device, dtypes, tracked)) {
                [Ok(ours), Ok(stock)] => {
                    assert_eq!(ours.len(), stock.len(), "{what}");
                    for (ours, stock) in ours.iter().zip(&stock) {
                        assert_eq!(ours.dtype(), stock.dtype(), "{what}");
                        ours.assert_approx_eq::<f32>(stock, Tolerance::rel_abs(3e-2, 1e-2));
                    }
                }
                [ours, stock] => assert_eq!(ours, stock, "{what}"),
            }
        }
    }
}
