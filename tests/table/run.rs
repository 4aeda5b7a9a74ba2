//! Runs a layer of any type behind closures, so that checks of it are compiled only once per rank.
use super::Case;
use super::closeness::numbers;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{DType, Device, Gradients, Tensor, TensorData};
use std::ops::Range;

/// `len` numbers in `range`, by SplitMix64, because tests share the generators of the devices.
pub fn uniform(len: usize, seed: u64, range: Range<f64>) -> Vec<f64> {
    let width = range.end - range.start;
    let mut state = seed;
    let mut numbers = vec![0.0; len];
    for number in &mut numbers {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        *number = range.start + (z ^ (z >> 31)) as f64 / u64::MAX as f64 * width;
    }
    numbers
}

/// The given numbers, rounded to a type.
pub fn rounded(values: Vec<f64>, precision: DType) -> Vec<f64> {
    let len = values.len();
    numbers(&TensorData::new(values, [len]).convert_dtype(precision))
}

/// Makes a tensor of the given values, rounded to `dtype`.
pub fn tensor<const D: usize>(values: Vec<f64>, shape: &[usize], device: &Device, dtype: DType) -> Tensor<D> {
    let data = TensorData::new(values, shape.to_vec()).convert_dtype(dtype);
    Tensor::from_data(data, (device, dtype))
}

/// The result of the second of two runs. The first one also pays for what is made on first use, such as parameters and kernels.
pub fn second<T>(device: &Device, run: impl Fn() -> T) -> T {
    drop(run());
    // Burn frees the graph of a dropped tensor in the next backward pass.
    drop(Tensor::<1>::ones([1], device).require_grad().backward());
    run()
}

/// The device and types that a layer computes in, and what is tracked.
#[derive(Clone, Debug)]
pub struct Setting {
    pub device: Device,
    pub case: Case,
    pub dtype: DType,
    /// Inputs and parameters are rounded to this type, whatever type the layer computes in.
    pub precision: DType,
    /// The range of the inputs.
    pub inputs: Range<f64>,
    /// The seed of the inputs. Gradients and parameters have those after it.
    pub seed: u64,
}

impl Setting {
    pub fn new(device: &Device, case: Case, dtype: DType) -> Self {
        Self { device: device.clone(), case, dtype, precision: dtype, inputs: -2.0..2.0, seed: 1 }
    }

    /// The same with inputs in this range.
    pub fn on(self, inputs: Range<f64>) -> Self {
        Self { inputs, ..self }
    }

    /// Numbers that depend only on the seed, tracked or not.
    pub fn input<const D: usize>(&self, shape: [usize; D], range: Range<f64>, seed: u64) -> Tensor<D> {
        let values = rounded(uniform(shape.iter().product(), seed, range), self.precision);
        tensor(values, &shape, &self.device, self.dtype)
    }

    /// The module with its initialized parameters, in the type of the setting.
    pub fn cast<M: Module>(&self, module: M) -> M {
        module.map(&mut Prepare { setting: self, fill: false, parameter: String::new(), count: 0 })
    }

    /// The module with parameters that are the same on every device.
    pub fn fill<M: Module>(&self, module: M) -> M {
        module.map(&mut Prepare { setting: self, fill: true, parameter: String::new(), count: 0 })
    }
}

/// Gives the parameters of a module their type, and tracks those that the case says.
struct Prepare<'a> {
    setting: &'a Setting,
    fill: bool,
    /// The name of the current one.
    parameter: String,
    /// The number of parameters so far.
    count: u64,
}

impl ModuleMapper for Prepare<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.parameter = name.into();
    }
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Setting { case, dtype, .. } = *self.setting;
        self.count += 1;
        let range = match self.parameter.as_str() {
            "gamma" | "running_var" => 0.5..1.5,
            _ => -0.5..0.5,
        };
        let mapped = param.map(|tensor| match self.fill {
            false => tensor.cast(dtype).detach(),
            true => self.setting.input(tensor.dims(), range, 99 + self.setting.seed + self.count),
        });
        mapped.set_require_grad(case.parameter(&self.parameter))
    }
}

/// A layer whose type is hidden; only the ranks are known.
pub struct Layer<'a, const D: usize, const O: usize> {
    pub forward: &'a dyn Fn(Tensor<D>) -> Tensor<O>,
    /// See [`parameter_gradients`].
    pub gradients: &'a dyn Fn(&Gradients) -> Vec<Named>,
}

/// The name of a tensor, and its data; `None` for a missing gradient.
pub type Named = (String, Option<TensorData>);

/// The output and, if it is tracked, the gradients of a weighted sum of it with respect to the input and to all parameters.
pub fn outcome<const D: usize, const O: usize>(
    layer: &Layer<D, O>,
    setting: &Setting,
    shape: [usize; D],
) -> Vec<Named> {
    let x = setting.input(shape, setting.inputs.clone(), setting.seed);
    let x = if setting.case.input() { x.require_grad() } else { x };
    setting.device.seed(7);
    let y = (layer.forward)(x.clone());
    // Copied, because the data of some devices is their memory, which the next operation may overwrite.
    let data = y.to_data();
    let data = TensorData::from_bytes_vec(data.as_bytes().to_vec(), data.shape(), data.dtype());
    let mut results = vec![("output".into(), Some(data))];
    if y.is_tracked() {
        let weights = setting.input(y.dims(), -1.0..1.0, setting.seed + 1).cast(y.dtype());
        let gradients = (y * weights).sum().backward();
        results.push(("gradient of x".into(), x.grad(&gradients).map(Tensor::into_data)));
        results.extend((layer.gradients)(&gradients));
    }
    results
}

/// The gradients of the parameters of a module, by path.
pub fn parameter_gradients(module: &impl Module, gradients: &Gradients) -> Vec<Named> {
    let mut visitor = ParameterGradients { gradients, path: vec![], found: vec![] };
    module.visit(&mut visitor);
    visitor.found
}

struct ParameterGradients<'a> {
    gradients: &'a Gradients,
    path: Vec<String>,
    found: Vec<Named>,
}

impl ModuleVisitor for ParameterGradients<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let gradient = param.grad(self.gradients).map(Tensor::into_data);
        self.found.push((format!("gradient of {}", self.path.join(".")), gradient));
    }
}

/// Runs a layer once, so that its parameters exist. Clones of parameters that do not exist yet share whether they require gradients.
pub fn initialize<const D: usize, const O: usize>(
    shape: [usize; D],
    device: &Device,
    forward: impl Fn(Tensor<D>) -> Tensor<O>,
) {
    forward(Tensor::zeros(shape, device));
}

/// The layer as it is and, if it has parameters, with frozen ones, each with a name. Frozen means that no parameter requires a gradient
/// and that batch norm uses its running statistics.
pub fn variants<S: Module>(stock: S) -> Vec<(&'static str, S)> {
    match stock.num_params() {
        0 => vec![("-", stock)],
        _ => vec![("trainable", stock.clone()), ("frozen", stock.freeze())],
    }
}
