//! Batch norms of replicas on the device, beside one on Flex.
use crate::{EXACT, among_others, assert_within, gpu, values};
use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_memsave::nn::{BatchNorm, BatchNormConfig};
use burn_memsave::parallel::{ReplicaOptions, Replicas};

/// A norm of what was shifted by columns.
#[derive(Module, Debug)]
struct Shifted {
    shift: Param<Tensor<4>>,
    norm: BatchNorm,
}

struct Cast(DType);

impl ModuleMapper for Cast {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let is_trained = param.is_require_grad();
        param.map(|value| {
            let value = value.detach().set_require_grad(false).cast(self.0);
            if is_trained { value.require_grad() } else { value }
        })
    }
}

/// The gradient of the shift, from a batch that is divided into parts of so many items, one for each replica.
fn gradient(device: &Device, dtype: DType, parts: &[usize], factor: f32) -> TensorData {
    let device = device.clone().autodiff();
    let of = |data: TensorData| Tensor::<4>::from_data(data.convert_dtype(DType::F16), (&device, DType::F32));
    let shift = Param::initialized(ParamId::new(), of(values([1, 1, 1, 40], 2)).require_grad());
    let net = Shifted { shift, norm: BatchNormConfig::new(1).init(&device) }.map(&mut Cast(dtype));
    let options = ReplicaOptions::new().with_synchronized_batch_norm();
    let replicas = Replicas::with_options(&net, vec![device.clone(); parts.len()], &options).unwrap();
    let x = of(values([4, 1, 40, 40], 1)).cast(dtype);
    let mut start = 0;
    let parts = parts.iter().map(|&items| {
        start += items;
        (x.clone().narrow(0, start - items, items), items)
    });
    let loss = |net: &Shifted, x: Tensor<4>| {
        let y = net.norm.forward(x + net.shift.val());
        (y.clone() * y.clone() * y).mean().mul_scalar(factor)
    };
    let (_, gradients) = replicas.backward(parts, loss).unwrap();
    gradients.get::<4>(net.shift.id).unwrap().into_data().convert_dtype(DType::F32)
}

/// In half precision, the sums of gradients are larger than any number of that type.
#[test]
fn synchronized_batch_norms_equal_one_device() {
    let _device = among_others();
    for (dtype, tolerance) in [(DType::F32, EXACT), (DType::F16, 1e-2)] {
        if gpu().supports_dtype(dtype) {
            let expected = gradient(&Device::flex(), DType::F32, &[4], 3e4);
            let found = gradient(&gpu(), dtype, &[3, 1], 3e4);
            assert_within(tolerance, 1e-6, "the gradient of the shift", &found, &expected);
        }
    }
}
