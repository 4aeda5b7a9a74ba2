//! How the tests compare: they compute the same function of the same inputs with this library and with a truth, on every backend, with
//! every checkpointing strategy, for every choice of tracked inputs.
pub use crate::draws::for_all;
use crate::table::closeness::{Closeness, SMALLEST_SCALE};
pub use crate::table::{
    closeness::numbers,
    run::{rounded, tensor, uniform},
};
use burn::tensor::{DType, Device, Gradients, Tensor, TensorData};
use proptest::prelude::*;
use std::any::Any;
use std::cell::OnceCell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A function of some inputs, in terms of tensors that the harness makes.
pub type Op<'a, const D: usize> = &'a dyn Fn(&Operands) -> Tensor<D>;

/// Whatever draws holds this: the generators of the devices belong to the whole process, and a test that seeds one compares
/// what it draws afterwards. Layers whose parameters are initialized at random draw, too.
pub fn generator() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One input of an operation.
#[derive(Clone, Debug)]
pub struct Input {
    shape: Vec<usize>,
    values: Values,
}

#[derive(Clone, Debug)]
enum Values {
    Between(f64, f64),
    Steps(u32),
    Given(Vec<f64>),
}

impl Input {
    /// Uniform in -1..1.
    pub fn random<const D: usize>(shape: [usize; D]) -> Self {
        Self::between(shape, -1.0..1.0)
    }

    pub fn between<const D: usize>(shape: [usize; D], range: Range<f64>) -> Self {
        Self { shape: shape.to_vec(), values: Values::Between(range.start, range.end) }
    }

    /// Whole numbers from 0 to `steps` (exclusive): many are equal.
    pub fn steps<const D: usize>(shape: [usize; D], steps: u32) -> Self {
        Self { shape: shape.to_vec(), values: Values::Steps(steps) }
    }

    /// Given values; only for [`Form::Leaf`].
    pub fn given<const D: usize>(shape: [usize; D], values: impl Into<Vec<f64>>) -> Self {
        Self { shape: shape.to_vec(), values: Values::Given(values.into()) }
    }

    fn values(&self, shape: &[usize], seed: u64) -> Vec<f64> {
        let uniform = |range| uniform(shape.iter().product(), seed, range);
        match &self.values {
            Values::Between(low, high) => uniform(*low..*high),
            Values::Steps(steps) => uniform(0.0..f64::from(*steps)).into_iter().map(f64::floor).collect(),
            Values::Given(values) => values.clone(),
        }
    }
}

/// How an operand comes from a leaf of the graph.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Form {
    /// It is the leaf: contiguous.
    Leaf,
    /// The output of a computation, which nobody else holds.
    Computed,
    /// A view with exchanged strides.
    Transposed,
    /// A view that begins in the middle.
    Sliced,
    /// A view that may run backwards.
    Flipped,
    /// A view with stride zero.
    Expanded,
}

impl Form {
    const ALL: [Self; 6] =
        [Self::Leaf, Self::Computed, Self::Transposed, Self::Sliced, Self::Flipped, Self::Expanded];

    /// The shape of the leaf of an operand of shape `shape`.
    fn leaf_shape(self, shape: &[usize]) -> Vec<usize> {
        let mut leaf = shape.to_vec();
        match self {
            Self::Leaf | Self::Computed | Self::Flipped => {}
            Self::Transposed => leaf.swap(0, shape.len() - 1),
            Self::Sliced => leaf.iter_mut().for_each(|size| *size += 2),
            Self::Expanded => leaf[0] = 1,
        }
        leaf
    }

    fn apply<const D: usize>(self, leaf: Tensor<D>, shape: &[usize]) -> Tensor<D> {
        match self {
            Self::Leaf => leaf,
            Self::Computed => leaf * 1.5,
            Self::Transposed => leaf.swap_dims(0, D - 1),
            Self::Sliced => leaf.slice::<[Range<usize>; D]>(std::array::from_fn(|axis| 1..1 + shape[axis])),
            Self::Flipped => leaf.flip([D - 1]),
            Self::Expanded => leaf.expand::<D, [usize; D]>(std::array::from_fn(|axis| shape[axis])),
        }
    }
}

/// How the output becomes a loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Reading {
    /// A weighted sum: an arbitrary gradient comes in.
    Weighted,
    /// A sum: a gradient of stride zero comes in.
    Sum,
    /// A weighted sum of the transpose: a gradient that is not contiguous comes in.
    Transposed,
    /// Two consumers.
    Twice,
}

impl Reading {
    const ALL: [Self; 4] = [Self::Weighted, Self::Sum, Self::Transposed, Self::Twice];

    /// The weights are rounded to `precision`.
    fn loss<const D: usize>(self, y: Tensor<D>, seed: u64, precision: DType) -> Tensor<1> {
        let weighted = |y: Tensor<D>| {
            let weights = rounded(uniform(y.shape().num_elements(), seed, -1.0..1.0), precision);
            let weights = tensor(weights, &y.dims(), &y.device(), y.dtype());
            (y * weights).sum()
        };
        match self {
            Self::Weighted => weighted(y),
            Self::Sum => y.sum(),
            Self::Transposed => weighted(y.swap_dims(0, D - 1)),
            Self::Twice => weighted(y.clone()) + (y.clone() * y).sum(),
        }
    }
}

/// The circumstances of a comparison.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    pub dtype: DType,
    pub form: Form,
    pub reading: Reading,
    pub seed: u64,
}

impl Default for Setting {
    fn default() -> Self {
        Self { dtype: DType::F32, form: Form::Leaf, reading: Reading::Weighted, seed: 1 }
    }
}

impl Setting {
    pub fn of(dtype: DType) -> Self {
        Self { dtype, ..Self::default() }
    }
}

/// Any setting of `f32` and `f64`.
pub fn settings() -> impl Strategy<Value = Setting> {
    let dtype = prop::sample::select(vec![DType::F32, DType::F64]);
    let (form, reading) = (prop::sample::select(&Form::ALL[..]), prop::sample::select(&Reading::ALL[..]));
    (dtype, form, reading, any::<u64>()).prop_map(|(dtype, form, reading, seed)| Setting {
        dtype,
        form,
        reading,
        seed,
    })
}

/// Half precision, which only Flex has.
pub const HALF: [DType; 2] = [DType::F16, DType::BF16];

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Backend {
    Flex,
    NdArray,
}

impl Backend {
    #[cfg(feature = "ndarray")]
    pub const ALL: [Self; 2] = [Self::Flex, Self::NdArray];
    #[cfg(not(feature = "ndarray"))]
    pub const ALL: [Self; 1] = [Self::Flex];

    /// Without autodiff.
    #[allow(deprecated)] // burn-ndarray is deprecated as a whole
    pub fn device(self) -> Device {
        match self {
            Self::Flex => Device::flex(),
            #[cfg(feature = "ndarray")]
            Self::NdArray => Device::ndarray(),
            #[cfg(not(feature = "ndarray"))]
            Self::NdArray => panic!("the feature `ndarray` is off"),
        }
    }

    /// With autodiff: without and with gradient checkpointing.
    pub fn autodiff_devices(self) -> [Device; 2] {
        let autodiff = || self.device().autodiff();
        [autodiff(), autodiff().gradient_checkpointing()]
    }
}

/// The tensors of one run, made when the operation asks for them.
pub struct Operands<'a> {
    check: &'a Check,
    device: Device,
    /// One bit per input.
    tracked: u32,
    /// `(input, element, shift)`: one element moved a little.
    moved: Option<(usize, usize, f64)>,
    leaves: Vec<OnceCell<Box<dyn Leaf>>>,
}

trait Leaf {
    fn as_any(&self) -> &dyn Any;
    fn gradient(&self, gradients: &Gradients) -> Option<TensorData>;
}

impl<const D: usize> Leaf for Tensor<D> {
    fn as_any(&self) -> &dyn Any {
        self
    }
    fn gradient(&self, gradients: &Gradients) -> Option<TensorData> {
        self.grad(gradients).map(Tensor::into_data)
    }
}

impl Operands<'_> {
    /// Input `index`, the same leaf at every call.
    pub fn get<const D: usize>(&self, index: usize) -> Tensor<D> {
        let Check { inputs, setting, .. } = self.check;
        let leaf = self.leaves[index].get_or_init(|| Box::new(self.leaf::<D>(index)));
        let leaf = leaf.as_any().downcast_ref::<Tensor<D>>().expect("an input has one rank").clone();
        setting.form.apply(leaf, &inputs[index].shape)
    }

    /// Input `index` if there are that many.
    pub fn maybe<const D: usize>(&self, index: usize) -> Option<Tensor<D>> {
        (index < self.leaves.len()).then(|| self.get(index))
    }

    pub fn device(&self) -> &Device {
        &self.device
    }

    fn leaf<const D: usize>(&self, index: usize) -> Tensor<D> {
        let Check { inputs, setting, precision, .. } = self.check;
        let input = &inputs[index];
        let shape = setting.form.leaf_shape(&input.shape);
        let values = input.values(&shape, setting.seed.wrapping_add(1 + index as u64));
        let mut values = rounded(values, *precision);
        if let Some((moved, element, shift)) = self.moved
            && moved == index
        {
            values[element] += shift;
        }
        let leaf = tensor(values, &shape, &self.device, setting.dtype);
        match self.tracked >> index & 1 {
            0 => leaf,
            _ => leaf.require_grad(),
        }
    }
}

/// What a run gives.
#[derive(Debug)]
struct Outcome {
    output: TensorData,
    tracked: bool,
    gradients: Vec<Option<TensorData>>,
}

/// A comparison of an operation with a truth.
#[derive(Clone, Debug)]
pub struct Check {
    inputs: Vec<Input>,
    setting: Setting,
    backends: Vec<Backend>,
    output: Closeness,
    gradient: Closeness,
    /// Of one input.
    gradient_of: Option<(usize, Closeness)>,
    /// Inputs are rounded to it, whatever the dtype that is computed in.
    precision: DType,
}

impl Check {
    /// On both backends (those that have the dtype), with the tolerances of the dtype; in half precision against f64, with
    /// errors not above those of the truth.
    pub fn new(inputs: impl Into<Vec<Input>>, setting: Setting) -> Self {
        let (output, gradient) = match setting.dtype {
            DType::F64 => (Closeness::Relative(1e-12), Closeness::Relative(1e-10)),
            DType::F32 => (Closeness::Relative(1e-6), Closeness::Relative(1e-5)),
            _ => (Closeness::NotWorse, Closeness::NotWorse),
        };
        let backends =
            if HALF.contains(&setting.dtype) { vec![Backend::Flex] } else { Backend::ALL.to_vec() };
        let (inputs, precision) = (inputs.into(), setting.dtype);
        Self { inputs, setting, backends, output, gradient, gradient_of: None, precision }
    }

    /// Outputs must be equal.
    pub fn same_output(mut self) -> Self {
        self.output = Closeness::Equal;
        self
    }

    /// Outputs and gradients must be equal.
    pub fn same(mut self) -> Self {
        (self.output, self.gradient) = (Closeness::Equal, Closeness::Equal);
        self
    }

    /// Another tolerance, for outputs and gradients.
    pub fn within(mut self, tolerance: f64) -> Self {
        (self.output, self.gradient) = (Closeness::Relative(tolerance), Closeness::Relative(tolerance));
        self
    }

    /// Another tolerance, for gradients.
    pub fn gradients_within(mut self, tolerance: f64) -> Self {
        self.gradient = Closeness::Relative(tolerance);
        self
    }

    /// Another tolerance, for the gradient of one input.
    pub fn gradient_within(mut self, input: usize, tolerance: f64) -> Self {
        self.gradient_of = Some((input, Closeness::Relative(tolerance)));
        self
    }

    /// On one backend only.
    pub fn on(mut self, backend: Backend) -> Self {
        self.backends.retain(|b| *b == backend);
        self
    }

    /// Outputs and gradients of `ours` are those of `truth`: for every backend, strategy and choice of tracked inputs, and
    /// without autodiff.
    pub fn compare<const D: usize>(&self, ours: Op<D>, truth: Op<D>) {
        self.each_run(|device, tracked| {
            let exact = self.run_exactly(truth, device, tracked);
            let outcomes = [ours, truth].map(|op| self.run(op, device, tracked));
            let agree = |exact| self.outcomes_agree(&outcomes[0], &outcomes[1], exact);
            match (agree(exact), self.setting.dtype) {
                // Terms may cancel.
                (Err(_), DType::F32) => agree(Some(self.run_in_f64(truth, device, tracked))),
                (agree, _) => agree,
            }
        });
    }

    /// The truth in f64, of the same inputs.
    fn run_in_f64<const D: usize>(&self, truth: Op<D>, device: &Device, tracked: u32) -> Outcome {
        let setting = Setting { dtype: DType::F64, ..self.setting };
        Self { setting, ..self.clone() }.run(truth, device, tracked)
    }

    /// The same, where errors are compared.
    fn run_exactly<const D: usize>(&self, truth: Op<D>, device: &Device, tracked: u32) -> Option<Outcome> {
        [self.output, self.gradient]
            .contains(&Closeness::NotWorse)
            .then(|| self.run_in_f64(truth, device, tracked))
    }

    /// The same, but where the truth panics, `ours` panics with the same message.
    pub fn compare_panics<const D: usize>(&self, ours: Op<D>, truth: Op<D>) {
        self.each_run(|device, tracked| {
            let attempt = |op| {
                catch_unwind(AssertUnwindSafe(|| self.run(op, device, tracked))).map_err(|payload| {
                    let text = payload.downcast_ref::<&str>().map(|text| text.to_string());
                    text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_default()
                })
            };
            match (attempt(ours), attempt(truth)) {
                (Ok(ours), Ok(outcome)) => {
                    self.outcomes_agree(&ours, &outcome, self.run_exactly(truth, device, tracked))
                }
                (Err(ours), Err(truth)) if ours == truth => Ok(()),
                (ours, truth) => {
                    let of = |result: Result<Outcome, String>| match result {
                        Ok(outcome) => format!("a result of shape {:?}", outcome.output.shape()),
                        Err(message) => format!("the panic {message:?}"),
                    };
                    Err(format!("{} instead of {}", of(ours), of(truth)))
                }
            }
        });
    }

    /// The gradients of all inputs, on Flex.
    pub fn gradients<const D: usize>(&self, op: Op<D>) -> Vec<Vec<f64>> {
        let outcome = self.run(op, &Backend::Flex.autodiff_devices()[0], u32::MAX);
        let numbers = |gradient: &Option<TensorData>| numbers(gradient.as_ref().expect("it is tracked"));
        outcome.gradients.iter().map(numbers).collect()
    }

    /// The gradients of `op` are its central differences in f64, at a few elements of every input. The truth reads
    /// outputs only, of runs without autodiff on Flex (some operations of NdArray 0.22.1 compute f64 in f32).
    pub fn differentiate<const D: usize>(&self, op: Op<D>) {
        const STEP: f64 = 1e-6;
        const ELEMENTS: usize = 5;
        let setting = Setting { dtype: DType::F64, ..self.setting };
        let this = Self { setting, precision: DType::F64, ..self.clone() };
        let tolerance = match self.gradient {
            Closeness::Relative(tolerance) => tolerance.max(1e-6),
            other => panic!("differences are not exact, {other:?} cannot be"),
        };
        let loss = |moved| {
            let y = op(&this.operands(&Backend::Flex.device(), 0, Some(moved)));
            numbers(&this.loss(y).into_data())[0]
        };
        for backend in &this.backends {
            for device in backend.autodiff_devices() {
                let outcome = this.run(op, &device, u32::MAX);
                for (index, gradient) in outcome.gradients.iter().enumerate() {
                    let gradient = numbers(gradient.as_ref().expect("every input is tracked"));
                    let scale = gradient.iter().fold(SMALLEST_SCALE, |scale, g| scale.max(g.abs()));
                    let len = gradient.len() as f64;
                    for element in uniform(ELEMENTS, this.setting.seed, 0.0..len) {
                        let element = (element as usize).min(gradient.len() - 1);
                        let difference =
                            (loss((index, element, STEP)) - loss((index, element, -STEP))) / (2.0 * STEP);
                        assert!(
                            (gradient[element] - difference).abs() <= tolerance * scale,
                            "{device:?}: gradient of input {index} at {element} is {:e}, the difference {difference:e}",
                            gradient[element],
                        );
                    }
                }
            }
        }
    }

    /// Calls `agree` for every backend, strategy and choice of tracked inputs.
    fn each_run(&self, agree: impl Fn(&Device, u32) -> Result<(), String>) {
        for backend in &self.backends {
            let check = |device: &Device, tracked: u32| {
                agree(device, tracked).unwrap_or_else(|difference| {
                    let shapes: Vec<_> = self.inputs.iter().map(|input| &input.shape).collect();
                    panic!("{device:?}, {shapes:?}, {:?}, tracked {tracked:#b}: {difference}", self.setting)
                });
            };
            check(&backend.device(), 0);
            for device in backend.autodiff_devices() {
                (0..1 << self.inputs.len()).for_each(|tracked| check(&device, tracked));
            }
        }
    }

    fn loss<const D: usize>(&self, y: Tensor<D>) -> Tensor<1> {
        self.setting.reading.loss(y, self.setting.seed, self.precision)
    }

    fn operands(&self, device: &Device, tracked: u32, moved: Option<(usize, usize, f64)>) -> Operands<'_> {
        let leaves = self.inputs.iter().map(|_| OnceCell::new()).collect();
        Operands { check: self, device: device.clone(), tracked, moved, leaves }
    }

    fn run<const D: usize>(&self, op: Op<D>, device: &Device, tracked: u32) -> Outcome {
        let operands = self.operands(device, tracked, None);
        let y = op(&operands);
        let (output, tracked) = (y.clone().into_data(), y.is_tracked());
        let gradients = match tracked {
            false => self.inputs.iter().map(|_| None).collect(),
            true => {
                let gradients = self.loss(y).backward();
                let of = |leaf: &OnceCell<Box<dyn Leaf>>| leaf.get()?.gradient(&gradients);
                operands.leaves.iter().map(of).collect()
            }
        };
        Outcome { output, tracked, gradients }
    }

    fn outcomes_agree(&self, ours: &Outcome, truth: &Outcome, exact: Option<Outcome>) -> Result<(), String> {
        let output = exact.as_ref().map(|exact| &exact.output);
        self.output
            .compare(&ours.output, &truth.output, output)
            .map_err(|error| format!("output: {error}"))?;
        if ours.tracked != truth.tracked {
            return Err(format!("tracked: {} instead of {}", ours.tracked, truth.tracked));
        }
        for (index, pair) in ours.gradients.iter().zip(&truth.gradients).enumerate() {
            let agree = match pair {
                (None, None) => Ok(()),
                (Some(ours), Some(truth)) => {
                    let exact = exact.as_ref().and_then(|exact| exact.gradients[index].as_ref());
                    let own = self.gradient_of.filter(|&(input, _)| input == index);
                    own.map_or(self.gradient, |(_, own)| own).compare(ours, truth, exact)
                }
                (Some(_), None) => Err("is there".into()),
                (None, Some(_)) => Err("is missing".into()),
            };
            agree.map_err(|error| format!("gradient of input {index}: {error}"))?;
        }
        Ok(())
    }
}
