use burn::module::{Module, ParamGroup};

/// What requires a gradient: the cases of the table in [arXiv 2404.12406](https://arxiv.org/abs/2404.12406).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Case {
    /// All parameters.
    All,
    /// The input only; batch norm uses the statistics of the batch.
    Input,
    /// The input only; batch norm uses its running statistics.
    InputRunning,
    /// The parameters of norm layers.
    Norm,
    /// The first quarter of the layers.
    FirstQuarter,
}

impl Case {
    /// All cases.
    pub const ALL: [Self; 5] = [Self::All, Self::Input, Self::InputRunning, Self::Norm, Self::FirstQuarter];

    /// The name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::All => "all trainable",
            Self::Input => "only the input requires a gradient",
            Self::InputRunning => "the same, batch norm on running statistics",
            Self::Norm => "only norm layers trainable",
            Self::FirstQuarter => "only the first quarter of the layers trainable",
        }
    }

    /// Whether the input requires a gradient.
    pub fn tracks_input(self) -> bool {
        matches!(self, Self::Input | Self::InputRunning)
    }

    /// Sets which parameters require gradients.
    ///
    /// # Panics
    ///
    /// Never: the patterns are valid.
    pub fn prepare<M: Module>(self, model: M) -> M {
        let group = |pattern: &str| ParamGroup::from_regex(pattern).expect("a valid pattern");
        match self {
            Self::All => model,
            Self::Input => model.no_grad(),
            Self::InputRunning => model.freeze(),
            Self::Norm => model.no_grad().set_require_grad_group(group(r"norm"), true),
            Self::FirstQuarter => model.no_grad().set_require_grad_group(group(r"^(stem|layer1)"), true),
        }
    }
}
