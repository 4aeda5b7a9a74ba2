//! [`RotaryStretch`]: rotary positions of longer sequences than those of the first training.
use std::f64::consts::TAU;

/// How the wavelengths of rotary positions were stretched for longer sequences than those of the first training. The names of the kinds are those of
/// `rope_type` in `config.json`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RotaryStretch {
    /// `linear`: all alike, by this factor.
    Linear(f64),
    /// `llama3`: long ones.
    Llama3 {
        /// The factor by which long wavelengths are stretched.
        factor: f64,
        /// Wavelengths that fit fewer times than this into the original length are long.
        low: f64,
        /// Wavelengths that fit more times than this into it are short, and stay as they are.
        high: f64,
        /// The longest sequence before the stretching.
        original_length: f64,
    },
    /// `yarn` ([arXiv 2309.00071](https://arxiv.org/abs/2309.00071)): long ones, and rotated features are scaled.
    Yarn {
        /// The factor by which long wavelengths are stretched.
        factor: f64,
        /// Wavelengths that fit more times than this into the original length stay as they are.
        fast: f64,
        /// Wavelengths that fit fewer times than this into it are long. Between the two, the share of the factor grows evenly from pair to pair.
        slow: f64,
        /// The longest sequence before the stretching.
        original_length: f64,
        /// Whether the two bounds are moved to whole pairs, apart from each other.
        truncates: bool,
        /// What rotated features are multiplied by.
        scale: f64,
    },
    /// `longrope` ([arXiv 2402.13753](https://arxiv.org/abs/2402.13753)): each by a factor of its own, and rotated features are scaled.
    LongRope(&'static LongRope),
}

/// The factors of `longrope`.
#[derive(Clone, Debug, PartialEq)]
pub struct LongRope {
    /// Of each pair of rotated features, for sequences up to the original length.
    pub short: Vec<f64>,
    /// The same for longer sequences. A model has these if the length of its size is above the original one, also for its short sequences.
    pub long: Vec<f64>,
    /// The longest sequence before the stretching.
    pub original_length: f64,
    /// What rotated features are multiplied by.
    pub scale: f64,
}

impl LongRope {
    /// Keeps these lists for the rest of the program, so that sizes can be copied: a few hundred bytes for each configuration that is read.
    pub fn kept(self) -> &'static Self {
        Box::leak(Box::new(self))
    }
}

impl RotaryStretch {
    /// The factor of the wavelength of each pair of so many features, in a model for sequences of up to `length` tokens.
    pub(crate) fn factors(&self, [length, width]: [usize; 2], theta: f32) -> Vec<f64> {
        let (pairs, theta) = (width / 2, f64::from(theta));
        let each = |factor: &dyn Fn(usize) -> f64| (0..pairs).map(factor).collect();
        match *self {
            Self::Linear(factor) => vec![factor; pairs],
            Self::Llama3 { factor, low, high, original_length } => each(&|pair| {
                let fits = original_length * theta.powf(-(2.0 * pair as f64) / width as f64) / TAU;
                let short = ((fits - low) / (high - low)).clamp(0.0, 1.0);
                1.0 / (short + (1.0 - short) / factor)
            }),
            Self::Yarn { factor, fast, slow, original_length, truncates, .. } => {
                // The pair whose wavelength fits so many times into the original length.
                let pair =
                    |fits: f64| width as f64 * (original_length / (fits * TAU)).ln() / (2.0 * theta.ln());
                let (first, last) = match truncates {
                    true => (pair(fast).floor(), pair(slow).ceil()),
                    false => (pair(fast), pair(slow)),
                };
                // The bound of the last one is that of Python, and is not the number of pairs.
                let (first, last) = (first.max(0.0), last.min(width as f64 - 1.0));
                let between = if first == last { 0.001 } else { last - first };
                each(&|pair| {
                    let long = ((pair as f64 - first) / between).clamp(0.0, 1.0);
                    1.0 / (long / factor + (1.0 - long))
                })
            }
            Self::LongRope(LongRope { short, long, original_length, .. }) => {
                if length as f64 > *original_length { long.clone() } else { short.clone() }
            }
        }
    }

    /// The most tokens of a sequence, of `length` tokens, for which positions are as those of short sequences.
    pub(crate) fn short_length(&self, length: usize) -> usize {
        match self {
            Self::LongRope(LongRope { original_length, .. }) => length.min(*original_length as usize),
            _ => length,
        }
    }

    /// What rotated features are multiplied by.
    pub(crate) fn scale(&self) -> f64 {
        match *self {
            Self::Linear(_) | Self::Llama3 { .. } => 1.0,
            Self::Yarn { scale, .. } | Self::LongRope(&LongRope { scale, .. }) => scale,
        }
    }
}
