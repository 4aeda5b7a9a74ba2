//! The fields of rotary positions.
use super::{ConfigError, Fields};
use crate::{LongRope, RotaryStretch};

/// The sequences of a model, and what is rotated.
#[derive(Clone, Copy)]
pub(super) struct Sequences {
    /// The most tokens of a sequence.
    pub(super) length: usize,
    /// The most tokens before wavelengths were stretched, if it is said outside of the fields that say how.
    pub(super) original: Option<f64>,
    /// Features of a head that are rotated.
    pub(super) rotated: usize,
}

impl Fields {
    /// [`rotary_positions`](Self::rotary_positions) of layers that see all tokens, and the base in those with a window: of Gemma 3.
    pub(super) fn rotary_positions_of_both(
        &mut self,
        sequences: Sequences,
    ) -> Result<(f32, Option<RotaryStretch>, f32), ConfigError> {
        const FULL: f64 = 1e6;
        const WINDOW: f64 = 1e4;
        let Some(mut both) = self.take_fields("rope_parameters")? else {
            let of_windows = self.real("rope_local_base_freq")?.unwrap_or(WINDOW);
            let (theta, stretch) = self.rotary_positions(FULL, sequences)?;
            return Ok((theta, stretch, of_windows as f32));
        };
        let mut of = |kind: &str, usual: f64| {
            let mut parameters = match both.take_fields(kind)? {
                Some(parameters) => parameters,
                None => return Ok((usual as f32, None)),
            };
            let theta = parameters.real("rope_theta")?.unwrap_or(usual);
            let stretch = parameters.stretch(sequences)?;
            Ok((theta as f32, stretch))
        };
        let ((theta, stretch), (of_windows, none)) =
            (of("full_attention", FULL)?, of("sliding_attention", WINDOW)?);
        if none.is_some() {
            return Err(both.unsupported("sliding_attention", "stretched".into()));
        }
        both.finish()?;
        Ok((theta, stretch, of_windows))
    }

    /// The base of the wavelengths of rotary positions, which may be the usual one, and how they are stretched: `rope_parameters` as of version
    /// 5, before that `rope_theta` and `rope_scaling`.
    pub(super) fn rotary_positions(
        &mut self,
        usual: f64,
        mut sequences: Sequences,
    ) -> Result<(f32, Option<RotaryStretch>), ConfigError> {
        if let Some(original) = self.real("original_max_position_embeddings")? {
            sequences.original = Some(original);
        }
        let theta = self.real("rope_theta")?;
        let (parameters, theta) = match self.take_fields("rope_parameters")? {
            Some(mut parameters) => {
                let inner = parameters.real("rope_theta")?;
                (parameters, inner.or(theta))
            }
            None => match self.take_fields("rope_scaling")? {
                Some(parameters) => (parameters, theta),
                None => return Ok((theta.unwrap_or(usual) as f32, None)),
            },
        };
        let stretch = parameters.stretch(sequences)?;
        Ok((theta.unwrap_or(usual) as f32, stretch))
    }

    /// How wavelengths are stretched, by the fields that say so and no others.
    fn stretch(mut self, sequences: Sequences) -> Result<Option<RotaryStretch>, ConfigError> {
        let name = if self.has("rope_type") { "rope_type" } else { "type" };
        let kind: Option<String> = self.take(name)?;
        let kind = kind.unwrap_or("default".into());
        self.expect("type", &[kind.clone().into()])?; // both, with the same name
        self.expect("partial_rotary_factor", &[1.0.into(), 1.into()])?;
        let stretch = match kind.as_str() {
            "default" => {
                self.real("original_max_position_embeddings")?;
                None
            }
            "linear" => Some(RotaryStretch::Linear(self.require_real("factor")?)),
            "llama3" => Some(self.llama3(sequences)?),
            "yarn" => Some(self.yarn(sequences)?),
            "longrope" | "su" => Some(self.long_rope(sequences)?),
            _ => return Err(self.unsupported(name, kind.into())),
        };
        self.finish()?;
        Ok(stretch)
    }

    fn llama3(&mut self, sequences: Sequences) -> Result<RotaryStretch, ConfigError> {
        let factor = self.require_real("factor")?;
        let [low, high] = ["low_freq_factor", "high_freq_factor"].map(|field| self.require_real(field));
        let (low, high) = (low?, high?);
        if low >= high {
            return Err(self.unsupported("high_freq_factor", high.into()));
        }
        Ok(RotaryStretch::Llama3 { factor, low, high, original_length: self.original_length(sequences)? })
    }

    fn yarn(&mut self, sequences: Sequences) -> Result<RotaryStretch, ConfigError> {
        let original_length = self.original_length(sequences)?;
        let factor = self.real("factor")?.unwrap_or(sequences.length as f64 / original_length);
        let (fast, slow) = (self.real("beta_fast")?.unwrap_or(32.0), self.real("beta_slow")?.unwrap_or(1.0));
        let scale = |of: f64| if factor > 1.0 { 0.1 * of * factor.ln() + 1.0 } else { 1.0 };
        let usual = match (self.real("mscale")?, self.real("mscale_all_dim")?) {
            (Some(one), Some(all)) => scale(one) / scale(all),
            _ => scale(1.0),
        };
        Ok(RotaryStretch::Yarn {
            factor,
            fast,
            slow,
            original_length,
            truncates: self.take("truncate")?.unwrap_or(true),
            scale: self.real("attention_factor")?.unwrap_or(usual),
        })
    }

    fn long_rope(&mut self, sequences: Sequences) -> Result<RotaryStretch, ConfigError> {
        let original_length = self.original_length(sequences)?;
        let mut factors = |field: &str| {
            let factors: Vec<f64> = self.require(field)?;
            let is_positive = |factor: &f64| *factor as f32 > 0.0 && (*factor as f32).is_finite();
            match factors.len() == sequences.rotated / 2 && factors.iter().all(is_positive) {
                true => Ok(factors),
                false => Err(self.unsupported(field, factors.into())),
            }
        };
        let (short, long) = (factors("short_factor")?, factors("long_factor")?);
        let factor = self.real("factor")?.unwrap_or(sequences.length as f64 / original_length);
        let usual = if factor > 1.0 { (1.0 + factor.ln() / original_length.ln()).sqrt() } else { 1.0 };
        let scale = self.real("attention_factor")?.unwrap_or(usual);
        if original_length < 1.0 || !scale.is_finite() {
            return Err(self.unsupported("original_max_position_embeddings", original_length.into()));
        }
        Ok(RotaryStretch::LongRope(LongRope { short, long, original_length, scale }.kept()))
    }

    /// The longest sequence before the stretching.
    fn original_length(&mut self, sequences: Sequences) -> Result<f64, ConfigError> {
        let here = self.real("original_max_position_embeddings")?;
        Ok(sequences.original.or(here).unwrap_or(sequences.length as f64))
    }
}
