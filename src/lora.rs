//! Fine-tuning with low-rank adapters: [LoRA](https://arxiv.org/abs/2106.09685), QLoRA, LoRA-FA, rsLoRA, [DoRA](Dora), and [LoRA+](lora_plus).
#[doc(inline)]
pub use burn_memsave_layers::lora::*;

use burn::lr_scheduler::{LrScheduler, LrSchedulerRecord, module_lr_scheduler::ModuleLrScheduler};

/// [LoRA+](https://arxiv.org/abs/2402.12354): the factors `b` of adapters get `ratio` times the learning rate of `scheduler`, and
/// everything else gets that rate itself. The paper proposes 16, and a smaller rate for everything else.
///
/// `scheduler` is a learning rate, a scheduler of Burn, or what the `init` of its config returns. If it has groups, the factors `b` follow
/// the rate of everything else.
///
/// In an adapter that [`ConvLora`] attaches to a convolution, `b` is the factor that is applied first and begins as zeros.
///
/// ```
/// use burn::module::{Lora, Module};
/// use burn::optim::{AdamConfig, GradientsParams};
/// use burn::tensor::{Device, Tensor};
/// use burn_memsave::{lora, nn::LinearConfig};
///
/// let device = Device::flex().autodiff();
/// let mut model = LinearConfig::new(8, 4).init(&device).apply_lora(Lora::new(2, 4.0));
/// let (mut optimizer, mut rates) = (AdamConfig::new().init(), lora::lora_plus(1e-4, 16.0));
/// let loss = model.forward(Tensor::<2>::ones([3, 8], &device)).mean();
/// let gradients = GradientsParams::from_grads(loss.backward(), &model);
/// model = optimizer.step(rates.step(), model, gradients);
/// # let _ = model;
/// ```
///
/// # Panics
///
/// Panics if the ratio is not a positive finite number.
pub fn lora_plus(scheduler: impl Into<ModuleLrScheduler>, ratio: f64) -> ModuleLrScheduler {
    assert!(ratio > 0.0 && ratio.is_finite(), "a ratio of {ratio}");
    let scheduler = scheduler.into();
    let faster = Times { scheduler: scheduler.clone(), ratio };
    scheduler.with_group(b_factors(), faster)
}

/// The learning rate of a scheduler, times a factor.
#[derive(Clone)]
struct Times {
    scheduler: ModuleLrScheduler,
    ratio: f64,
}

impl LrScheduler for Times {
    fn step(&mut self) -> f64 {
        self.scheduler.step().base() * self.ratio
    }

    fn to_record(&self) -> LrSchedulerRecord {
        self.scheduler.to_record()
    }

    fn load_record(&mut self, record: LrSchedulerRecord) {
        self.scheduler = self.scheduler.clone().load_record(record);
    }
}
