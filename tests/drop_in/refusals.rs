//! Wrong use gets the message that stock gives, or a better one.
use burn::module::Module;
use burn::store::ModuleRecord;
use burn::tensor::{Device, Tensor};
use burn_memsave::nn::conv::Conv2dConfig;
use burn_memsave::nn::{BatchNormConfig, DropoutConfig, LinearConfig};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The message of the panic of `f`.
fn refusal<R>(f: impl FnOnce() -> R) -> String {
    let payload = catch_unwind(AssertUnwindSafe(f)).err().expect("refused");
    let text = payload.downcast_ref::<String>().cloned();
    text.or_else(|| payload.downcast_ref::<&str>().map(|text| text.to_string())).expect("a message")
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
