//! The cases in which models are measured: what requires a gradient, and which statistics batch norms use.
use burn::module::{Module, ModuleVisitor, Param, ParamGroup};
use burn::tensor::Tensor;

/// What requires a gradient: the choices of the tables in [arXiv 2404.12406](https://arxiv.org/abs/2404.12406), and the last quarter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tracked {
    /// All parameters.
    All,
    /// The input only.
    Input,
    /// The parameters of convolutions over two or more axes.
    Conv,
    /// The parameters of norm layers.
    Norm,
    /// The first quarter of the layers.
    FirstQuarter,
    /// The last quarter of the layers.
    LastQuarter,
}

impl Tracked {
    const ALL: [Self; 6] =
        [Self::All, Self::Input, Self::Conv, Self::Norm, Self::FirstQuarter, Self::LastQuarter];

    fn name(self) -> &'static str {
        match self {
            Self::All => "all trainable",
            Self::Input => "only the input requires a gradient",
            Self::Conv => "only convolutions trainable",
            Self::Norm => "only norm layers trainable",
            Self::FirstQuarter => "only the first quarter of the layers trainable",
            Self::LastQuarter => "only the last quarter of the layers trainable",
        }
    }

    fn short_name(self) -> &'static str {
        match self {
            Self::All => "all",
            Self::Input => "input",
            Self::Conv => "conv",
            Self::Norm => "norm",
            Self::FirstQuarter => "first quarter",
            Self::LastQuarter => "last quarter",
        }
    }
}

/// The statistics that batch norms normalize with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Statistics {
    /// The statistics of the batch, which also update the running ones.
    Batch,
    /// The running statistics, which do not change.
    Running,
}

/// What requires a gradient, and the statistics that batch norms normalize with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Case {
    /// What requires a gradient.
    pub tracked: Tracked,
    /// The statistics that batch norms normalize with.
    pub statistics: Statistics,
}

impl Case {
    /// With the statistics of the batch.
    pub const fn batch(tracked: Tracked) -> Self {
        Self { tracked, statistics: Statistics::Batch }
    }

    /// With running statistics.
    pub const fn running(tracked: Tracked) -> Self {
        Self { tracked, statistics: Statistics::Running }
    }

    /// All cases.
    pub fn all() -> impl Iterator<Item = Self> {
        Tracked::ALL.into_iter().flat_map(|tracked| [Self::batch(tracked), Self::running(tracked)])
    }

    /// All cases of a network without batch norm.
    pub fn without_batch_norm() -> impl Iterator<Item = Self> {
        Tracked::ALL.into_iter().map(Self::batch)
    }

    /// The name in tables.
    pub fn name(self) -> String {
        self.named(self.tracked.name(), "batch norm on running statistics")
    }

    /// A shorter name.
    pub fn short_name(self) -> String {
        self.named(self.tracked.short_name(), "running statistics")
    }

    fn named(self, tracked: &str, running: &str) -> String {
        match self.statistics {
            Statistics::Batch => tracked.into(),
            Statistics::Running => format!("{tracked}, {running}"),
        }
    }

    /// Whether the input requires a gradient.
    pub fn tracks_input(self) -> bool {
        self.tracked == Tracked::Input
    }

    /// Sets which parameters require gradients, and the statistics that batch norms normalize with. In a residual network, a quarter
    /// is the first of its four stages and everything before it, or the last and everything after it. In any other module, it is a
    /// quarter of the layers that have parameters, in the order of the fields.
    pub fn prepare<M: Module>(self, model: M) -> M {
        let layers = layers(&model);
        let quarter_of = layers.len().div_ceil(4);
        let trained = match self.tracked {
            Tracked::All => ParamGroup::all(),
            Tracked::Input => ParamGroup::from_paths(Vec::<String>::new()),
            Tracked::Conv => {
                let convolutions = layers.iter().filter(|layer| layer.is_convolution);
                ParamGroup::from_paths(convolutions.flat_map(|layer| layer.parameters.clone()).collect())
            }
            Tracked::Norm => ParamGroup::from_predicate("norm"),
            Tracked::FirstQuarter => quarter(&layers, ["stem.", "layer1."], &layers[..quarter_of]),
            Tracked::LastQuarter => {
                quarter(&layers, ["layer4.", "head."], &layers[layers.len() - quarter_of..])
            }
        };
        // A frozen module keeps its running statistics, even if its parameters require gradients again.
        let model = match self.statistics {
            Statistics::Batch => model.no_grad(),
            Statistics::Running => model.freeze(),
        };
        model.set_require_grad_group(trained, true)
    }
}

/// A module with parameters of its own: its path and theirs.
struct Layer {
    path: String,
    parameters: Vec<String>,
    /// Whether its weight has two axes of channels and two or more of a kernel.
    is_convolution: bool,
}

/// The parameters of these layers; in a residual network, those whose paths begin with one of `of_residual`.
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
        let (first, last) = (of(Case::batch(Tracked::FirstQuarter)), of(Case::batch(Tracked::LastQuarter)));
        assert!(
            first.len() == 15 && first.iter().all(|path| starts(path, ["stem.", "layer1."])),
            "{first:?}"
        );
        assert!(last.len() == 17 && last.iter().all(|path| starts(path, ["layer4.", "head."])), "{last:?}");
        assert_eq!(of(Case::batch(Tracked::All)).len(), 62);
        assert!(of(Case::running(Tracked::Input)).is_empty());
    }

    #[test]
    fn convolutions_are_trained_with_their_biases_and_nothing_else_is() {
        let device = Device::flex().autodiff();
        let of_resnet =
            trainable(&Case::batch(Tracked::Conv).prepare(resnet::Net::new(ResNet::D18, &device)));
        assert_eq!(of_resnet.len(), 20, "{of_resnet:?}");
        assert!(
            of_resnet.iter().all(|path| path.ends_with(".weight") && !path.contains("norm")),
            "{of_resnet:?}"
        );
        assert!(!of_resnet.iter().any(|path| path.starts_with("head.")), "{of_resnet:?}");
        let tiny =
            Vit { image: 32, patch: 8, layers: 2, heads: 6, width: 24, hidden: 40, classes: 5, ..Vit::B16 };
        let of_vit = trainable(&Case::batch(Tracked::Conv).prepare(vit::Net::new(tiny, &device)));
        assert_eq!(of_vit, ["patches.weight", "patches.bias"]);
    }

    #[test]
    fn a_quarter_of_another_network_is_a_quarter_of_its_layers() {
        let device = Device::flex().autodiff();
        let net = |case: Case| case.prepare(efficientnet::Net::new(EfficientNet::V2S, &device));
        let all = layers(&net(Case::batch(Tracked::All))).len();
        let of = |case| {
            let mut of: Vec<String> = trainable(&net(case))
                .into_iter()
                .filter_map(|path| Some(path.rsplit_once('.')?.0.to_string()))
                .collect();
            of.dedup();
            of
        };
        let (first, last) = (of(Case::batch(Tracked::FirstQuarter)), of(Case::batch(Tracked::LastQuarter)));
        assert_eq!((first.len(), last.len()), (all.div_ceil(4), all.div_ceil(4)));
        assert_eq!((first[0].as_str(), last[last.len() - 1].as_str()), ("stem.conv", "head"));
    }

    /// Parameters that a network has itself are of its first layer.
    #[test]
    fn the_first_quarter_has_what_comes_first() {
        let device = Device::flex().autodiff();
        let tiny =
            Vit { image: 32, patch: 8, layers: 2, heads: 6, width: 24, hidden: 40, classes: 5, ..Vit::B16 };
        let first = trainable(&Case::batch(Tracked::FirstQuarter).prepare(vit::Net::new(tiny, &device)));
        assert!(["class_token", "positions"].iter().all(|path| first.contains(&(*path).into())), "{first:?}");
        let tiny = ConvNext { widths: [8, 12, 16, 20], blocks: [1, 2, 1, 1], scale: 0.5, classes: 5 };
        let last = trainable(&Case::batch(Tracked::LastQuarter).prepare(convnext::Net::new(tiny, &device)));
        assert!(
            last.iter().all(|path| !path.starts_with("stages.0") && !path.starts_with("stages.1")),
            "{last:?}"
        );
    }
}
