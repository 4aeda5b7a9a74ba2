use burn::module::{Module, ModuleVisitor, Param, ParamGroup};
use burn::tensor::Tensor;

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
    /// The last quarter of the layers.
    LastQuarter,
}

impl Case {
    /// All cases.
    pub const ALL: [Self; 6] =
        [Self::All, Self::Input, Self::InputRunning, Self::Norm, Self::FirstQuarter, Self::LastQuarter];

    /// The name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::All => "all trainable",
            Self::Input => "only the input requires a gradient",
            Self::InputRunning => "the same, batch norm on running statistics",
            Self::Norm => "only norm layers trainable",
            Self::FirstQuarter => "only the first quarter of the layers trainable",
            Self::LastQuarter => "only the last quarter of the layers trainable",
        }
    }

    /// The name where there is little room.
    pub fn short_name(self) -> &'static str {
        match self {
            Self::All => "all",
            Self::Input => "input",
            Self::InputRunning => "input, running statistics",
            Self::Norm => "norm",
            Self::FirstQuarter => "first quarter",
            Self::LastQuarter => "last quarter",
        }
    }

    /// Whether the input requires a gradient.
    pub fn tracks_input(self) -> bool {
        matches!(self, Self::Input | Self::InputRunning)
    }

    /// Sets which parameters require gradients. A quarter of a residual network is one of its four stages, with what is before the
    /// first or after the last; of any other module a quarter of the layers that have parameters, in the order of its fields.
    ///
    /// # Panics
    ///
    /// Never: the patterns are valid.
    pub fn prepare<M: Module>(self, model: M) -> M {
        match self {
            Self::All => model,
            Self::Input => model.no_grad(),
            Self::InputRunning => model.freeze(),
            Self::Norm => only(model, "norm"),
            Self::FirstQuarter => {
                let layers = layers(&model);
                let pattern = match has_stages(&layers) {
                    true => r"^(stem|layer1)\.".into(),
                    false => any_of(&layers[..layers.len().div_ceil(4)]),
                };
                only(model, &pattern)
            }
            Self::LastQuarter => {
                let layers = layers(&model);
                let pattern = match has_stages(&layers) {
                    true => r"^(layer4|head)\.".into(),
                    false => any_of(&layers[layers.len() - layers.len().div_ceil(4)..]),
                };
                only(model, &pattern)
            }
        }
    }
}

/// The parameters whose paths match require gradients, and no others.
fn only<M: Module>(model: M, pattern: &str) -> M {
    let group = ParamGroup::from_regex(pattern).expect("a valid pattern");
    model.no_grad().set_require_grad_group(group, true)
}

fn has_stages(layers: &[String]) -> bool {
    layers.iter().any(|layer| layer.starts_with("layer1."))
}

/// Matches the parameters of these layers.
fn any_of(layers: &[String]) -> String {
    let layers: Vec<String> = layers.iter().map(|layer| layer.replace('.', r"\.")).collect();
    format!(r"^({})\.[^.]+$", layers.join("|"))
}

/// The paths of what has parameters of its own.
fn layers<M: Module>(model: &M) -> Vec<String> {
    #[derive(Default)]
    struct Layers {
        path: Vec<String>,
        found: Vec<String>,
    }
    impl ModuleVisitor for Layers {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.path.push(name.into());
        }
        fn exit_module(&mut self, _: &str, _: &str) {
            self.path.pop();
        }
        fn visit_float<const D: usize>(&mut self, _: &Param<Tensor<D>>) {
            let layer = self.path[..self.path.len() - 1].join(".");
            if self.found.last() != Some(&layer) {
                self.found.push(layer);
            }
        }
    }
    let mut layers = Layers::default();
    model.visit(&mut layers);
    layers.found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vision::{Classifier, EfficientNet, ResNet, memsave::efficientnet, memsave::resnet};
    use burn::tensor::Device;

    /// The paths of the parameters that require a gradient.
    fn trainable<M: Module>(model: &M) -> Vec<String> {
        #[derive(Default)]
        struct Trainable(Vec<String>, Vec<String>);
        impl ModuleVisitor for Trainable {
            fn enter_module(&mut self, name: &str, _: &str) {
                self.0.push(name.into());
            }
            fn exit_module(&mut self, _: &str, _: &str) {
                self.0.pop();
            }
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                if param.is_require_grad() {
                    self.1.push(self.0.join("."));
                }
            }
        }
        let mut trainable = Trainable::default();
        model.visit(&mut trainable);
        trainable.1
    }

    #[test]
    fn a_quarter_of_a_residual_network_is_a_stage() {
        let device = Device::flex().autodiff();
        let of = |case: Case| trainable(&case.prepare(resnet::Net::new(ResNet::D18, &device)));
        let starts = |path: &String, of: [&str; 2]| of.iter().any(|start| path.starts_with(start));
        let (first, last) = (of(Case::FirstQuarter), of(Case::LastQuarter));
        assert!(
            first.len() == 15 && first.iter().all(|path| starts(path, ["stem.", "layer1."])),
            "{first:?}"
        );
        assert!(last.len() == 17 && last.iter().all(|path| starts(path, ["layer4.", "head."])), "{last:?}");
        assert_eq!(of(Case::All).len(), 62);
        assert!(of(Case::InputRunning).is_empty());
    }

    #[test]
    fn a_quarter_of_another_network_is_a_quarter_of_its_layers() {
        let device = Device::flex().autodiff();
        let net = |case: Case| case.prepare(efficientnet::Net::new(EfficientNet::V2S, &device));
        let all = layers(&net(Case::All)).len();
        let of = |case| {
            let mut of: Vec<String> = trainable(&net(case))
                .into_iter()
                .filter_map(|path| Some(path.rsplit_once('.')?.0.to_string()))
                .collect();
            of.dedup();
            of
        };
        let (first, last) = (of(Case::FirstQuarter), of(Case::LastQuarter));
        assert_eq!((first.len(), last.len()), (all.div_ceil(4), all.div_ceil(4)));
        assert_eq!((first[0].as_str(), last[last.len() - 1].as_str()), ("stem.conv", "head"));
    }
}
