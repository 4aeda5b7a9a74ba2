//! [`Attach`]: attaches the adapters of a directory to a module.
use super::tensors::Tensors;
use super::{EMBEDDING, LAYER, MAGNITUDE, ModuleNames, PREFIX, PeftConfig, Suffixes, reshaped};
use crate::lora::DoraAdapter;
use burn::module::{LoraAdapter, Param, Reparameterizer};
use burn::tensor::{DType, Tensor, TensorData};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::rc::Rc;

/// What attaches adapters: where they come from, and the first error.
pub(super) struct Attach<N> {
    pub config: PeftConfig,
    pub names: N,
    pub tensors: Tensors,
    /// Modules that the file has values for although the configuration does not say so.
    pub unnamed: BTreeSet<String>,
    pub error: Option<String>,
}

impl<N> Attach<N> {
    /// The value of a result. The first error is stored, and every error gives `None`.
    fn or_error<T>(&mut self, result: Result<Option<T>, String>) -> Option<T> {
        result.unwrap_or_else(|reason| {
            self.error.get_or_insert(reason);
            None
        })
    }
}

/// Attaches LoRA.
pub(super) struct AttachLora<N>(pub Rc<RefCell<Attach<N>>>);

impl<N: ModuleNames> Reparameterizer for AttachLora<N> {
    type Reparam = LoraAdapter;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<LoraAdapter>) {
        let mut attach = self.0.borrow_mut();
        let adapter = attach.adapter(path, &param);
        (param.set_require_grad(false), attach.or_error(adapter))
    }
}

/// Attaches DoRA, which has magnitudes.
pub(super) struct AttachDora<N>(pub Rc<RefCell<Attach<N>>>);

impl<N: ModuleNames> Reparameterizer for AttachDora<N> {
    type Reparam = DoraAdapter;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<DoraAdapter>) {
        let mut attach = self.0.borrow_mut();
        let adapter = attach.dora_adapter(path, &param);
        (param.set_require_grad(false), attach.or_error(adapter))
    }
}

impl<N: ModuleNames> Attach<N> {
    /// The adapter of a weight with its magnitude, if there is one.
    fn dora_adapter<const D: usize>(
        &mut self,
        path: &str,
        param: &Param<Tensor<D>>,
    ) -> Result<Option<DoraAdapter>, String> {
        let Some(lora) = self.adapter(path, param)? else { return Ok(None) };
        let module = module_of(path);
        let name = self.names.name(module);
        let key = format!("{PREFIX}{name}{MAGNITUDE}");
        if D != 2 || self.tensors.is_taken(&format!("{PREFIX}{name}{}", EMBEDDING.0)) {
            return Err(format!("the adapter of {name} is DoRA, which is supported for dense layers only"));
        }
        let Some(magnitude) = self.tensors.take(&key, path)? else {
            return Err(format!("the adapter of {name} is DoRA without {key}"));
        };
        let outputs = param.base().dims()[1];
        let shape = magnitude.shape().to_vec();
        if magnitude.num_elements() != outputs || shape.iter().filter(|&&len| len > 1).count() > 1 {
            return Err(format!(
                "the magnitudes of {name} have the shape {shape:?}, but {module} has {outputs} outputs"
            ));
        }
        let magnitude = self.in_order(module, reshaped(magnitude, vec![outputs]))?;
        let (device, dtype) = (param.base().device(), lora.a.dtype());
        let magnitude = Tensor::<1>::from_data(magnitude, (&device, dtype));
        Ok(Some(DoraAdapter { lora, magnitude: Param::from_tensor(magnitude) }))
    }

    /// The adapter of a weight, if there is one.
    fn adapter<const D: usize>(
        &mut self,
        path: &str,
        param: &Param<Tensor<D>>,
    ) -> Result<Option<LoraAdapter>, String> {
        if !path.ends_with("weight") || D < 2 {
            return Ok(None);
        }
        let module = module_of(path);
        let name = self.names.name(module);
        let factors = match self.factors(LAYER, &name, path)? {
            Some(factors) => Some(factors),
            None => self.factors(EMBEDDING, &name, path)?,
        };
        let Some((first, second)) = factors else { return Ok(None) };
        let base = param.base();
        let shape = base.dims();
        let rank = first.shape().first().copied().unwrap_or(0);
        let scale = self.config.scale(&name, rank);
        let scale = scale.map_err(|reason| format!("the adapter of {name}: {reason}"))?;
        let rest = &shape[1..];
        let (expected_first, expected_second) = match D {
            2 => (vec![rank, shape[0]], vec![shape[1], rank]),
            _ => ([&[rank], rest].concat(), [&[shape[0], rank][..], &vec![1; D - 2]].concat()),
        };
        if first.shape()[..] != expected_first || second.shape()[..] != expected_second {
            return Err(format!(
                "the adapter of {name} has the shapes {:?} and {:?}, but the weight of {module} needs {expected_first:?} and \
                 {expected_second:?}",
                &first.shape()[..],
                &second.shape()[..]
            ));
        }
        let second = self.in_order(module, second)?;
        let dtype = float_of(&base);
        let tensor = |data: TensorData, shape: [usize; 2]| {
            Tensor::<2>::from_data(reshaped(data, shape.to_vec()), (&base.device(), dtype))
        };
        let (a, b) = match D {
            2 => (tensor(first, [rank, shape[0]]).transpose(), tensor(second, [shape[1], rank]).transpose()),
            _ => (tensor(second, [shape[0], rank]), tensor(first, [rank, rest.iter().product()])),
        };
        // In row-major order, as `Lora` makes them.
        let param = |factor: Tensor<2>| {
            let data = factor.into_data();
            Param::from_tensor(Tensor::<2>::from_data(data, (&base.device(), dtype)))
        };
        Ok(Some(LoraAdapter { a: param(a), b: param(b), scale }))
    }

    /// The factor that is applied first, and the second one, of the adapter of a module with this name.
    fn factors(
        &mut self,
        Suffixes(first, second): Suffixes,
        name: &str,
        path: &str,
    ) -> Result<Option<(TensorData, TensorData)>, String> {
        let [of_first, of_second] =
            [first, second].map(|suffix| self.tensors.take(&format!("{PREFIX}{name}{suffix}"), path));
        match (of_first?, of_second?) {
            (None, None) => Ok(None),
            (Some(first), Some(second)) => Ok(Some((first, second))),
            _ => Err(format!("{name} has only one of {first} and {second}")),
        }
    }

    /// Values for the outputs of a module, the first axis, in their order here.
    fn in_order(&self, module: &str, data: TensorData) -> Result<TensorData, String> {
        match self.names.row_order(module) {
            Some(order) => {
                order.reorder(data, 0, false).map_err(|reason| format!("the adapter of {module}: {reason}"))
            }
            None => Ok(data),
        }
    }
}

/// The dtype of a parameter, or that of the activations of its device if the parameter is quantized.
pub(super) fn float_of<const D: usize>(base: &Tensor<D>) -> DType {
    match base.dtype() {
        dtype if dtype.is_float() => dtype,
        _ => Tensor::<1>::empty([0], &base.device()).dtype(),
    }
}

/// The path of the module that has this weight.
fn module_of(path: &str) -> &str {
    path.strip_suffix("weight").unwrap_or(path).trim_end_matches('.')
}
