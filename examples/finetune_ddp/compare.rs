//! Compares the gradients of every step with those of one device with the whole batch.
use super::tasks::Task;
use burn::module::{Module, ModuleVisitor, Param, ParamGroup};
use burn::optim::GradientsParams;
use burn::tensor::{FloatDType, Tensor};

/// How far gradients may differ, relative to the largest: sums are rounded differently.
const TOLERANCE: f32 = 1e-5;

/// The same steps on one device, each from the values that the replicas have: of two runs, an optimizer such as Adam would make different ones,
/// as it scales up gradients that are nothing but rounding errors.
pub struct Comparison<T: Task> {
    model: T::Model,
    trained: ParamGroup,
    /// Of each step.
    differences: Vec<f32>,
}

impl<T: Task> Comparison<T> {
    /// `model`: on one device. `trained`: what the replicas train.
    pub fn new(model: T::Model, trained: ParamGroup) -> Self {
        Self { model, trained, differences: vec![] }
    }

    /// Compares the gradients of a step. `of_replicas`: their module before the update.
    pub fn step(&mut self, batch: T::Batch, ours: &GradientsParams, of_replicas: &T::Model) {
        let values = of_replicas.clone().into_record_group(self.trained.clone());
        let model = self.model.clone().load_record(values.allow_partial(true));
        let whole = GradientsParams::from_grads(T::loss(&model, batch).backward(), &model);
        self.differences.push(difference(&model, ours, &whole));
    }

    /// Reports the differences, which are an error if they are too large.
    pub fn finish(mut self) -> Result<(), Box<dyn std::error::Error>> {
        self.differences.sort_by(f32::total_cmp); // NaN is the largest
        let of = |at: usize| self.differences.get(at).copied().unwrap_or(f32::NAN);
        let count = self.differences.len();
        let (median, largest) = (of(count / 2), of(count.wrapping_sub(1)));
        println!(
            "differences to the gradients of one device: {median:.1e} of the largest gradient in the median step, {largest:.1e} at most"
        );
        let difference = if T::HAS_JUMPS { median } else { largest };
        match difference <= TOLERANCE && largest.is_finite() {
            true => Ok(()),
            false => Err(format!("gradients differ by {difference}").into()),
        }
    }
}

/// The bytes of what is trained.
pub fn trainable_bytes(model: &impl Module) -> u64 {
    struct Bytes(u64);
    impl ModuleVisitor for Bytes {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if param.is_require_grad() {
                self.0 += (param.shape().num_elements() * param.val().dtype().size()) as u64;
            }
        }
    }
    let mut bytes = Bytes(0);
    model.visit(&mut bytes);
    bytes.0
}

/// The larger number, or NaN if one is.
fn worse(a: f32, b: f32) -> f32 {
    if a.is_nan() || a > b { a } else { b }
}

/// The largest difference of gradients, relative to the largest gradient. Infinite if they belong to different parameters.
fn difference(model: &impl Module, ours: &GradientsParams, whole: &GradientsParams) -> f32 {
    struct Compare<'a> {
        ours: &'a GradientsParams,
        whole: &'a GradientsParams,
        largest: f32,
        difference: f32,
    }
    impl ModuleVisitor for Compare<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            match (self.ours.get::<D>(param.id), self.whole.get::<D>(param.id)) {
                (Some(ours), Some(whole)) => {
                    let (ours, whole) = (ours.to_device(&whole.device()), whole.cast(FloatDType::F32));
                    let max = |tensor: Tensor<D>| tensor.abs().max().into_scalar::<f32>();
                    self.largest = worse(self.largest, max(whole.clone()));
                    self.difference = worse(self.difference, max(ours - whole));
                }
                (None, None) => {}
                _ => self.difference = f32::INFINITY,
            }
        }
    }
    let mut compare = Compare { ours, whole, largest: 0.0, difference: 0.0 };
    model.visit(&mut compare);
    compare.difference / compare.largest
}
