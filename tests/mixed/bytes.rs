//! What a step in half precision keeps: half.
use super::{BOTH, values};
use crate::meter::{RECORDS, alone, bytes, devices, measure};
use burn::module::Module;
use burn::tensor::{Device, Tensor};
use burn_memsave::measure::ledger;
use burn_memsave::mixed::Precision;
use burn_memsave::nn::{Gelu, LayerNorm, LayerNormConfig, Linear, LinearConfig};

#[derive(Module, Debug)]
struct Block {
    norm: LayerNorm,
    up: Linear,
    down: Linear,
}

const WIDTH: usize = 64;

impl Block {
    fn new(width: usize, device: &Device) -> Self {
        Self {
            norm: LayerNormConfig::new(width).init(device),
            up: LinearConfig::new(width, 2 * width).init(device),
            down: LinearConfig::new(2 * width, width).init(device),
        }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.down.forward(Gelu::new().forward(self.up.forward(self.norm.forward(x))))
    }
}

#[test]
fn half_is_kept() {
    let _alone = alone();
    for device in devices() {
        let model = Block::new(WIDTH, &device);
        let kept = |precision: Option<&Precision>, rows: usize| {
            let x = || {
                let x = values([rows, WIDTH], 1, &device);
                precision.map_or(x.clone(), |precision| x.cast(precision.dtype())).require_grad()
            };
            let forward = |x| match precision {
                Some(precision) => precision.half_copy(&model).unwrap().forward(x),
                None => model.forward(x),
            };
            bytes(measure(&device, x, forward).kept)
        };
        let grown = |precision: Option<&Precision>| kept(precision, 256) - kept(precision, 128);
        let wide = grown(None);
        // The inputs of the norm and of the activation; statistics of the norm are computed again.
        assert!(wide >= (128 * 3 * WIDTH * 4) as i64, "{wide}");
        for precision in BOTH.map(|precision| precision()) {
            assert_eq!(2 * grown(Some(&precision)), wide, "{precision:?} on {device:?}");
            let totals = [false, true].map(|is_half| {
                let x = values([128, WIDTH], 1, &device);
                let (model, x) = match is_half {
                    true => (precision.half_copy(&model).unwrap(), x.cast(precision.dtype())),
                    false => (model.clone(), x),
                };
                ledger(&model, x.require_grad(), |model, x| model.forward(x)).1.total()
            });
            assert_eq!(totals[0], 2 * totals[1], "the ledger's totals");
        }
    }
}

/// The copies of trainable parameters are two bytes each; those of frozen ones that were cast once are none.
#[test]
fn copies_are_of_what_is_trained() {
    const LARGE: usize = 512;
    let _alone = alone();
    let device = Device::flex().autodiff();
    let model = Block::new(LARGE, &device);
    for precision in BOTH.map(|precision| precision()) {
        let x = || values([4, LARGE], 1, &device).cast(precision.dtype()).require_grad();
        let kept = |model: &Block| {
            bytes(measure(&device, x, |x| precision.half_copy(model).unwrap().forward(x)).kept)
        };
        let frozen = precision.narrow_frozen(model.clone().freeze()).unwrap();
        let reused = bytes(measure(&device, x, |x| frozen.forward(x)).kept);
        // Those that the backward pass reads: two weights and the scale of the norm. With the inputs of trainable weights.
        let read = (2 * (4 * LARGE * LARGE + LARGE) + 2 * 4 * (3 * LARGE)) as i64;
        let (copied, slack) = (kept(&model) - reused, 4 * RECORDS);
        assert!((copied - read).abs() < slack + 2 * 4 * (3 * LARGE) as i64, "{copied}, {read}");
        let copied = kept(&frozen) - reused;
        assert!(copied.abs() < RECORDS, "{copied}");
    }
}
