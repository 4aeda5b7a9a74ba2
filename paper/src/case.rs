use burn::module::{Module, ModuleVisitor, Param, ParamGroup};
use burn::tensor::Tensor;

/// What requires a gradient: the cases of the table in [arXiv 2404.12406](https://arxiv.org/abs/2404.12406), and the last quarter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Case {
    /// All parameters.
    All,
    /// The input only; batch norm uses the statistics of the batch.
    Input,
    /// The input only; batch norm uses its running statistics.
    InputRunning,
    /// The parameters of convolutions over images, or over more axes.
    Conv,
    /// The parameters of norm layers.
    Norm,
    /// The first quarter of the layers.
    FirstQuarter,
    /// The last quarter of the layers.
    LastQuarter,
}

impl Case {
    /// All cases.
    pub const ALL: [Self; 7] = [
        Self::All,
        Self::Input,
        Self::InputRunning,
        Self::Conv,
        Self::Norm,
        Self::FirstQuarter,
        Self::LastQuarter,
    ];

    /// The name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::All => "all trainable",
            Self::Input => "only the input requires a gradient",
            Self::InputRunning => "the same, batch norm on running statistics",
            Self::Conv => "only convolutions trainable",
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
            Self::Conv => "conv",
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
    pub fn prepare<M: Module>(self, model: M) -> M {
        match self {
            Self::All => model,
            Self::Input => model.no_grad(),
            Self::InputRunning => model.freeze(),
            Self::Conv => {
                let convolutions = layers(&model).into_iter().filter(|layer| layer.is_convolution);
                let paths = convolutions.flat_map(|layer| layer.parameters).collect();
                only(model, ParamGroup::from_paths(paths))
            }
            Self::Norm => only(model, ParamGroup::from_predicate("norm")),
            Self::FirstQuarter => {
                let layers = layers(&model);
                let count = layers.len().div_ceil(4);
                only(model, quarter(&layers, ["stem.", "layer1."], &layers[..count]))
            }
            Self::LastQuarter => {
                let layers = layers(&model);
                let count = layers.len().div_ceil(4);
                only(model, quarter(&layers, ["layer4.", "head."], &layers[layers.len() - count..]))
            }
        }
    }
}

/// The parameters of the group require gradients, and no others.
fn only<M: Module>(model: M, group: ParamGroup) -> M {
    model.no_grad().set_require_grad_group(group, true)
}

/// What has parameters of its own: its path, and theirs.
struct Layer {
    path: String,
    parameters: Vec<String>,
    /// Whether its weight has two axes of channels and two or more of a kernel.
    is_convolution: bool,
}

/// The parameters of these layers; of a residual network those whose paths begin so.
fn quarter(all: &[Layer], of_residual: [&str; 2], layers: &[Layer]) -> ParamGroup {
    let parameters = |layers: &[Layer]| -> Vec<String> {
        layers.iter().flat_map(|layer| layer.parameters.iter().cloned()).collect()
    };
    let is_residual = all.iter().any(|layer| layer.path.starts_with("layer1."));
    let begins = |path: &String| of_residual.iter().any(|begin| path.starts_with(begin));
    ParamGroup::from_paths(match is_residual {
        true => parameters(all).into_iter().filter(begins).collect(),
        false => parameters(layers),
    })
}

/// The layers of a model.
fn layers<M: Module>(model: &M) -> Vec<Layer> {
    #[derive(Default)]
    struct Layers {
        path: Vec<String>,
        found: Vec<Layer>,
    }
    impl ModuleVisitor for Layers {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.path.push(name.into());
        }
        fn exit_module(&mut self, _: &str, _: &str) {
            self.path.pop();
        }
        fn visit_float<const D: usize>(&mut self, _: &Param<Tensor<D>>) {
            let (path, parameter) = (self.path[..self.path.len() - 1].join("."), self.path.join("."));
            let is_convolution = D >= 4 && self.path.last().is_some_and(|name| name == "weight");
            match self.found.last_mut().filter(|layer| layer.path == path) {
                Some(layer) => {
                    layer.parameters.push(parameter);
                    layer.is_convolution |= is_convolution;
                }
                None => self.found.push(Layer { path, parameters: vec![parameter], is_convolution }),
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
    use crate::vision::memsave::{convnext, efficientnet, resnet, vit};
    use crate::vision::{Classifier, ConvNext, EfficientNet, ResNet, Vit};
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
    fn convolutions_are_trained_with_their_biases_and_nothing_else_is() {
        let device = Device::flex().autodiff();
        let of_resnet = trainable(&Case::Conv.prepare(resnet::Net::new(ResNet::D18, &device)));
        assert_eq!(of_resnet.len(), 20, "{of_resnet:?}");
        assert!(
            of_resnet.iter().all(|path| path.ends_with(".weight") && !path.contains("norm")),
            "{of_resnet:?}"
        );
        assert!(!of_resnet.iter().any(|path| path.starts_with("head.")), "{of_resnet:?}");
        let tiny =
            Vit { image: 32, patch: 8, layers: 2, heads: 6, width: 24, hidden: 40, classes: 5, ..Vit::B16 };
        let of_vit = trainable(&Case::Conv.prepare(vit::Net::new(tiny, &device)));
        assert_eq!(of_vit, ["patches.weight", "patches.bias"]);
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

    /// Parameters that a network has itself are of its first layer.
    #[test]
    fn the_first_quarter_has_what_comes_first() {
        let device = Device::flex().autodiff();
        let tiny =
            Vit { image: 32, patch: 8, layers: 2, heads: 6, width: 24, hidden: 40, classes: 5, ..Vit::B16 };
        let first = trainable(&Case::FirstQuarter.prepare(vit::Net::new(tiny, &device)));
        assert!(["class_token", "positions"].iter().all(|path| first.contains(&(*path).into())), "{first:?}");
        let tiny = ConvNext { widths: [8, 12, 16, 20], blocks: [1, 2, 1, 1], scale: 0.5, classes: 5 };
        let last = trainable(&Case::LastQuarter.prepare(convnext::Net::new(tiny, &device)));
        assert!(
            last.iter().all(|path| !path.starts_with("stages.0") && !path.starts_with("stages.1")),
            "{last:?}"
        );
    }
}
