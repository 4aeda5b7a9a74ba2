//! [`save_merged`]: a whole module for Python, its adapters merged into its weights.
use super::adapters::{Adapter, Adapters};
use super::trained::{is_dense, of_python_layout, outputs, place, python_name};
use super::{ModuleNames, PeftConfig, PeftError, refused};
use crate::lora::DoraAdapter;
use burn::module::{LoraAdapter, Module, ModuleVisitor, Param, Reparameterization};
use burn::tensor::{DType, Shape, Tensor, TensorData};
use burn_memsave_layers::burn_internals::REPARAMETERIZATION;
use burn_memsave_layers::frozen::{LazyWeight, Recorded};
use burn_memsave_layers::visit::VisitPath;
use safetensors::{Dtype, tensor::View};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

/// Writes all float parameters of a module as safetensors, under their names and in their layouts in Python. Weights have their adapters
/// merged into them: `base + scale a b`, or what [DoRA](crate::lora::Dora) makes of it, rounded to `dtype`, which is that of all parameters, as
/// `transformers` saves models. `config` and `names` are as for [`save`](super::save); without adapters, the configuration does not matter.
///
/// It knows the names of norms and of all layers whose parameters are called `weight` and `bias` in Python, too; recurrent layers are not among
/// them. One parameter is read and merged at a time, so that a model of lazy weights may be larger than memory. The file appears only when it is
/// complete.
///
/// ```
/// use burn::module::{Lora, Module};
/// use burn::tensor::{DType, Device};
/// use burn_memsave::lazy::WeightFile;
/// use burn_memsave::nn::{Linear, LinearConfig};
/// use burn_memsave::peft;
///
/// #[derive(Module, Debug)]
/// struct Model {
///     query: Linear,
/// }
///
/// let lora = Lora::new(2, 4.0);
/// let model = Model { query: LinearConfig::new(8, 4).init(&Device::flex()) }.apply_lora(lora.clone());
/// let directory = tempfile::tempdir()?;
/// let path = directory.path().join("model.safetensors");
/// peft::save_merged(&model, &lora, &path, |path: &str| path.replace("query", "q_proj"), DType::BF16)?;
/// let file = WeightFile::open(&path)?;
/// let shapes: Vec<_> = file.tensors().map(|tensor| (tensor.name, tensor.shape.to_vec())).collect();
/// assert_eq!(shapes, [("q_proj.bias", vec![4]), ("q_proj.weight", vec![4, 8])]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
///
/// Returns an error if an adapter is not of a `weight`, is of another kind than LoRA and DoRA, or has another rank than `config` says, if two parameters get the same name, if rows
/// cannot be reordered, if a lazy weight cannot be read, if `dtype` is no float, or if the file cannot be written.
pub fn save_merged<M: Module>(
    module: &M,
    config: impl Into<PeftConfig>,
    file: impl AsRef<Path>,
    names: impl ModuleNames,
    dtype: DType,
) -> Result<(), PeftError> {
    let (file, config) = (file.as_ref(), config.into());
    let error = |reason: String| PeftError::Tensors { file: file.to_path_buf(), reason };
    let stored = match dtype {
        DType::F64 => Dtype::F64,
        DType::F32 => Dtype::F32,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        _ => return Err(error(format!("{dtype:?} is no dtype of merged weights"))),
    };
    let mut found = Adapters::default();
    module.visit(&mut found);
    if let Some(path) = found.unnamed {
        return Err(refused(&path, "it is not of a weight"));
    }
    let adapters = found.adapters.into_iter().map(|(path, adapter)| {
        let composed = Composed::new(adapter, &names.name(&path), &config);
        composed.map(|composed| (path.clone(), composed)).map_err(|reason| refused(&path, reason))
    });
    let mut merged = Merged {
        path: VisitPath::default(),
        adapters: adapters.collect::<Result<_, _>>()?,
        names: &names,
        dtypes: (dtype, stored),
        tensors: BTreeMap::new(),
        error: None,
    };
    module.visit(&mut merged);
    merged.error.map_or(Ok(()), Err)?;
    if let Some(path) = merged.adapters.keys().next() {
        return Err(refused(path, "it is of no float weight"));
    }
    let format = [("format".to_string(), "pt".to_string())].into();
    // A lazy weight that cannot be read is a panic.
    let written =
        catch_unwind(AssertUnwindSafe(|| safetensors::serialize_to_file(merged.tensors, Some(format), file)));
    match written {
        Ok(written) => written.map_err(|reason| error(reason.to_string())),
        Err(panic) => {
            let message = panic.downcast::<String>().map(|message| *message);
            Err(error(message.unwrap_or_else(|_| "a parameter cannot be read".into())))
        }
    }
}

/// The factors of an adapter, with their scale.
enum Composed {
    Lora(LoraAdapter),
    Dora(DoraAdapter),
}

impl Composed {
    fn new(adapter: Adapter, name: &str, config: &PeftConfig) -> Result<Self, String> {
        let Adapter { a: Some(a), b: Some(b), magnitude, .. } = adapter else {
            return Err("it has not both factors".into());
        };
        let scale = config.scale(name, a.dims()[1])?;
        let [a, b] = [a, b].map(|factor| Param::from_tensor(wide(factor)));
        let lora = LoraAdapter { a, b, scale };
        Ok(match magnitude {
            Some(magnitude) => {
                Self::Dora(DoraAdapter { lora, magnitude: Param::from_tensor(wide(magnitude)) })
            }
            None => Self::Lora(lora),
        })
    }

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        match self {
            Self::Lora(adapter) => adapter.apply(base),
            Self::Dora(adapter) => adapter.apply(base),
        }
    }
}

/// Half precision in f32, so that what is merged is rounded once.
fn wide<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    if x.dtype().size() < size_of::<f32>() { x.cast(DType::F32) } else { x }
}

/// A parameter that is merged when its turn comes.
struct Later<'a> {
    shape: Shape,
    dtypes: (DType, Dtype),
    merge: Box<dyn Fn() -> TensorData + 'a>,
}

impl View for Later<'_> {
    fn dtype(&self) -> Dtype {
        self.dtypes.1
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let data = (self.merge)().convert_dtype(self.dtypes.0);
        assert_eq!(*data.shape(), self.shape, "a parameter has another shape than was said");
        Cow::Owned(data.into_bytes().to_vec())
    }

    fn data_len(&self) -> usize {
        self.shape.num_elements() * self.dtypes.0.size()
    }
}

/// Collects the parameters, without reading lazy ones.
struct Merged<'a, N> {
    path: VisitPath,
    adapters: BTreeMap<String, Composed>,
    names: &'a N,
    dtypes: (DType, Dtype),
    tensors: BTreeMap<String, Later<'a>>,
    error: Option<PeftError>,
}

impl<N: ModuleNames> ModuleVisitor for Merged<'_, N> {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.path.enter(name, container);
        const KNOWN: [&str; 3] = [LoraAdapter::NAME, DoraAdapter::NAME, LazyWeight::NAME];
        if container == REPARAMETERIZATION && !KNOWN.contains(&name) {
            self.error.get_or_insert(refused(&self.path.joined(), "it is of an unknown kind"));
        }
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.exit();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some((module, parameter, containers)) = place(&self.path) else { return };
        let name = match self.names.name(&module) {
            name if name.is_empty() => python_name(parameter, containers).to_owned(),
            name => format!("{name}.{}", python_name(parameter, containers)),
        };
        let is_transposed = D == 2 && is_dense(containers) && !self.names.has_inputs_first(&module);
        let (mut shape, order) = (param.base().shape(), self.names.row_order(&module));
        if let Some(order) = order
            && let Err(reason) = order.check(&shape, self.dtypes.0, outputs(containers, D))
        {
            self.error.get_or_insert(refused(&module, format!("{parameter}: {reason}")));
        }
        if is_transposed {
            shape.swap(0, 1);
        }
        let adapter = if parameter == "weight" { self.adapters.remove(&module) } else { None };
        let (param, path, containers) = (param.clone(), self.path.joined(), containers.to_vec());
        let merge = move || {
            let base = Recorded::read(&param).without_autodiff();
            let base = if base.dtype().is_float() { base } else { base.dequantize() };
            let data = match &adapter {
                Some(adapter) => adapter.apply(wide(base)).into_data(),
                None => base.into_data(),
            };
            let data = of_python_layout(&path, data, order, is_transposed, &containers, D);
            data.unwrap_or_else(|reason| panic!("{path}: {reason}"))
        };
        let later = Later { shape, dtypes: self.dtypes, merge: Box::new(merge) };
        if self.tensors.insert(name.clone(), later).is_some() {
            self.error.get_or_insert(refused(&self.path.joined(), format!("{name} is there twice")));
        }
    }
}
