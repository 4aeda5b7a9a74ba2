//! Everything that this library reads from Burn 0.22.1 beyond its public interface; no other file does so.
//!
//! Most of it is text that Burn prints. The readings are exact for the one version that `Cargo.toml` pins (`=0.22.1`). Each has a test
//! below, which fails if another version prints something else.
//!
//! | What is read | From | If Burn prints something else |
//! | --- | --- | --- |
//! | a private field of a stock module (`displayed`), and a field of a module in it (`displayed_in`) | what the module displays | the conversion panics |
//! | private parameters (`Parameters`) of a stock module | a visitor, which visits them in the order of the fields | the conversion panics |
//! | whether the `Balanced` strategy recomputes a tensor (`is_recomputed_by_strategy`) | `Debug` of a `CheckpointerBuilder` | the tensor counts as kept: less is recomputed |
//! | what a tensor is computed from (`parents`) | `Debug` of a `NodeGuard` | an explanation does not see that a head and its loss could be one |
//! | the whole graph of a loss (`graph`) | `Debug` of a `Checkpointer` | an explanation says nothing of Burn's operations |
//! | how deep a tensor is in its graph (`depth`) | `Debug` of a `NodeGuard` | a training step with updates in the backward pass panics |
//! | the type name of a reparameterization (`REPARAMETERIZATION`) | paths of visitors | adapters of lazy weights have other paths |
use burn::backend::{
    Backend,
    autodiff::{
        Autodiff, NodeId,
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        ops::NodeGuard,
    },
    tensor::FloatTensor,
};
use burn::module::{
    Content, DisplaySettings, Flag, Module, ModuleDisplay, ModuleMapper, ModuleVisitor, Param,
};
use burn::tensor::Tensor;
use core::any::Any;
use core::fmt::Write;
use core::str::FromStr;
use std::collections::BTreeMap;

/// The container type that Burn tells visitors and mappers for a reparameterization.
pub const REPARAMETERIZATION: &str = "Reparameterization";

/// Reads a private field of a stock module. Numbers are displayed with all digits, so they parse to the same value.
///
/// # Panics
///
/// Panics if the module does not display such a field.
pub(crate) fn displayed<T: FromStr>(module: &impl ModuleDisplay, field: &str) -> T {
    parsed(field, attribute(module, field).as_deref())
}

/// Reads a field of a module that is itself a private field of a stock module.
///
/// # Panics
///
/// Panics if the modules do not display such fields.
pub(crate) fn displayed_in<T: FromStr>(module: &impl ModuleDisplay, inner: &str, field: &str) -> T {
    let text = attribute(module, inner);
    // `Dropout {prob: 0.1}`, `Dropout {prob: 0.1, training: false}`
    let rest = text.as_ref().and_then(|text| text.split_once(&format!("{field}: ")));
    parsed(field, rest.and_then(|(_, rest)| rest.split([',', '}']).next()))
}

/// The parameters and flags of a module, one by one in the order of its fields. This reads a stock module with private fields; as a
/// mapper it fills one.
pub(crate) struct Parameters(std::vec::IntoIter<Box<dyn Any>>);

impl Parameters {
    pub(crate) fn of(module: &impl Module) -> Self {
        #[derive(Default)]
        struct Found(Vec<Box<dyn Any>>);
        impl ModuleVisitor for Found {
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                self.0.push(Box::new(param.clone()));
            }
            fn visit_flag(&mut self, flag: &Param<Flag>) {
                self.0.push(Box::new(flag.clone()));
            }
        }
        let mut found = Found::default();
        module.visit(&mut found);
        Self(found.0.into_iter())
    }

    /// The next parameter.
    ///
    /// # Panics
    ///
    /// Panics if it has another type.
    pub(crate) fn next<T: 'static>(&mut self) -> T {
        let parameter = self.0.next().and_then(|parameter| parameter.downcast().ok());
        *parameter.expect("the parameters of burn 0.22.1, in its order")
    }
}

impl ModuleMapper for Parameters {
    fn map_float<const D: usize>(&mut self, _: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.next()
    }
    fn map_flag(&mut self, _: Param<Flag>) -> Param<Flag> {
        self.next()
    }
}

fn attribute(module: &impl ModuleDisplay, field: &str) -> Option<String> {
    let new = || Content::new(DisplaySettings::default());
    let find = |content: Option<Content>| {
        content?.attributes.into_iter().find(|attribute| attribute.name == field).map(|found| found.value)
    };
    find(module.custom_content(new())).or_else(|| find(module.content(new())))
}

fn parsed<T: FromStr>(field: &str, text: Option<&str>) -> T {
    let value = text.and_then(|text| text.trim().parse().ok());
    value.unwrap_or_else(|| panic!("burn 0.22.1 displays the field {field}, this one does not"))
}

/// Whether the strategy recomputes this tracked tensor when the backward pass asks for it.
///
/// This runs the public hook of the strategy on a throw-away builder, whose `Debug` form names the action it would take:
/// `Computed { .. }` or `Recompute { .. }`.
pub(crate) fn is_recomputed_by_strategy<B: Backend, C: CheckpointStrategy>(
    x: &FloatTensor<Autodiff<B, C>>,
) -> bool {
    /// Finds the first of the two words, and stops the formatting there, since what follows may print a whole tensor.
    struct FirstAction(bool);
    impl Write for FirstAction {
        fn write_str(&mut self, text: &str) -> core::fmt::Result {
            match text {
                "Recompute" => self.0 = true,
                "Computed" => {}
                _ => return Ok(()),
            }
            Err(core::fmt::Error)
        }
    }
    let mut builder = Default::default();
    if C::checkpoint_parents([x], &mut builder).is_err() {
        return false;
    }
    let mut action = FirstAction(false);
    let _ = write!(action, "{builder:?}"); // the error is how the formatting stops
    action.0
}

/// The depth of a tensor in its graph: 0 for a leaf, otherwise more than that of every tensor it is computed from.
pub(crate) fn depth(node: &NodeGuard) -> usize {
    let text = beginning(node);
    let depth = text.split("order: ").nth(1).and_then(|rest| rest.split(',').next());
    parsed("order", depth)
}

/// The nodes of the tensors that a tensor is computed from.
pub(crate) fn parents(node: &NodeGuard) -> Vec<NodeId> {
    let text = beginning(node);
    let before = text.split("order: ").next().unwrap_or("");
    let of_parents = before.split("parents: [").nth(1).unwrap_or("");
    let values =
        of_parents.split("value: ").skip(1).map(|rest| rest.split(|c: char| !c.is_ascii_digit()).next());
    values.filter_map(|value| Some(NodeId { value: value?.parse().ok()? })).collect()
}

/// What Burn prints of a node up to its depth.
fn beginning(node: &NodeGuard) -> String {
    /// Collects the text up to the depth, and stops the formatting there, since what follows may print a whole tensor.
    struct Beginning(String);
    impl Write for Beginning {
        fn write_str(&mut self, text: &str) -> core::fmt::Result {
            self.0.push_str(text);
            match self.0.find("order: ") {
                Some(at) if self.0[at..].contains(',') => Err(core::fmt::Error),
                _ => Ok(()),
            }
        }
    }
    let mut text = Beginning(String::new());
    let _ = write!(text, "{node:?}"); // the error is how the formatting stops
    text.0
}

/// The tracked tensors of a graph, by their nodes.
///
/// Burn tells no more than this: neither their shapes nor (with one exception) the operations that computed them. Its list of steps is
/// private.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Graph {
    /// What each tensor is computed from: nothing for a leaf.
    pub parents: BTreeMap<NodeId, Vec<NodeId>>,
    /// How often the backward pass asks the checkpointer for a tensor. (What a step keeps elsewhere, such as a mask, does not show.)
    pub kept: BTreeMap<NodeId, usize>,
    /// Burn's operations, such as `Sigmoid`, by their outputs. Only those that the strategy of `gradient_checkpointing` recomputes in the
    /// backward pass.
    pub names: BTreeMap<NodeId, String>,
}

/// The graph of a backward pass that begins. Burn does not print the values of tensors, since it has them as `Any`.
///
/// The text is a list of keys `NodeId { value: 7 }: `, each followed by one of:
///
/// - `Computed { .., n_required: 1 }` or `Recompute { n_required: 1 }`: how often the backward pass asks for the tensor;
/// - `RetroSigmoid { .. }`: the operation that recomputes it;
/// - `[NodeId { value: 5 }, ..]`: what it is computed from.
pub(crate) fn graph(checkpointer: &Checkpointer) -> Graph {
    let mut graph = Graph::default();
    let number = |text: &str| {
        let digits = text.split(|c: char| !c.is_ascii_digit()).next();
        digits.and_then(|digits| digits.parse::<u64>().ok())
    };
    let text = format!("{checkpointer:?}");
    let mut key = None;
    // The last key, with the text after it up to the next node. Nodes in brackets belong to that key.
    for part in text.split("NodeId { value: ").skip(1) {
        let node = number(part).map(|value| NodeId { value });
        let after = part.trim_start_matches(|c: char| c.is_ascii_digit());
        match (after.strip_prefix(" }: "), key) {
            (Some(value), _) => key = node.map(|node| (node, value)),
            (None, Some((child, "["))) => {
                graph.parents.entry(child).or_default().extend(node);
                continue;
            }
            (None, _) => continue, // a node within a recomputation
        }
        let Some((node, value)) = key else { continue };
        let name = value.split(' ').next().unwrap_or("");
        if let Some(operation) = name.strip_prefix("Retro") {
            graph.names.insert(node, operation.into());
        } else if value.starts_with('[') {
            graph.parents.entry(node).or_default();
        } else if let Some(times) = value.split("n_required: ").nth(1).and_then(number) {
            graph.kept.insert(node, times as usize);
        }
    }
    graph
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use burn::backend::autodiff::checkpoint::strategy::{BalancedCheckpointing, NoCheckpointing};
    use burn::backend::{AutodiffBackend, Scalar, TensorMetadata, ops::FloatTensorOps};
    use burn::module::Lora;
    use burn::nn::{self, attention::CrossAttentionConfig};
    use burn::tensor::Device;

    /// A number that is read back the same only with all its digits.
    const THIRD: f64 = 1.0 / 3.0;

    #[test]
    fn private_fields_are_displayed() {
        let device = Device::flex();
        let norm = nn::LayerNormConfig::new(4).with_epsilon(THIRD * 1e-9).init(&device);
        assert_eq!(displayed::<f64>(&norm, "epsilon"), THIRD * 1e-9);

        let config = nn::LocalResponseNormConfig::new(5).with_alpha(THIRD).with_beta(0.1).with_k(1e-300);
        let norm = config.init();
        assert_eq!(displayed::<usize>(&norm, "size"), 5);
        let fields = ["alpha", "beta", "k"].map(|field| displayed::<f64>(&norm, field));
        assert_eq!(fields, [THIRD, 0.1, 1e-300]);

        let mut rotary = nn::RotaryEncodingConfig::new(8, 4).init(&device);
        rotary.shift(3);
        assert_eq!(displayed::<usize>(&rotary, "start_offset"), 3);

        assert_eq!(displayed::<isize>(&nn::GLU::new(-2), "dim"), -2);

        let config = CrossAttentionConfig::new(8, 6, 4, 2, 3).with_min_float(-THIRD).with_quiet_softmax(true);
        let attention = config.init(&device);
        let numbers = ["n_heads", "n_heads_kv", "d_head"].map(|field| displayed::<usize>(&attention, field));
        assert_eq!(numbers, [4, 2, 3]);
        assert_eq!(displayed::<f64>(&attention, "scale"), 3f64.sqrt().recip());
        assert_eq!(displayed::<f64>(&attention, "min_float"), -THIRD);
        assert!(displayed::<bool>(&attention, "quiet_softmax"));
    }

    #[test]
    fn fields_of_private_modules_are_displayed() {
        let attention = CrossAttentionConfig::new(8, 6, 4, 2, 3).with_dropout(THIRD).init(&Device::flex());
        assert_eq!(displayed_in::<f64>(&attention, "dropout", "prob"), THIRD);
        // A frozen layer displays its flag, too.
        assert_eq!(displayed_in::<f64>(&attention.freeze(), "dropout", "prob"), THIRD);
    }

    #[test]
    fn private_parameters_come_in_the_order_of_the_fields() {
        let attention = CrossAttentionConfig::new(8, 6, 4, 2, 3).init(&Device::flex());
        let mut parameters = Parameters::of(&attention);
        for [d_input, d_output] in [[8, 12], [6, 6], [6, 6], [12, 8]] {
            assert_eq!(parameters.next::<Param<Tensor<2>>>().dims(), [d_input, d_output]);
            assert_eq!(parameters.next::<Param<Tensor<1>>>().dims(), [d_output]);
        }
        assert!(parameters.next::<Param<Flag>>().is_enabled());
        assert_eq!(parameters.0.len(), 0);
    }

    #[test]
    #[should_panic = "burn 0.22.1 displays the field dim, this one does not"]
    fn a_field_that_is_not_displayed_panics() {
        displayed::<isize>(&nn::Relu::new(), "dim");
    }

    #[test]
    fn builders_show_what_is_recomputed() {
        fn check<C: CheckpointStrategy>(recomputes: bool) {
            type Plain = burn::backend::Flex;
            type Recorded<C> = Autodiff<Plain, C>;
            let x = Plain::float_ones([2, 2].into(), &Default::default(), burn::tensor::FloatDType::F32);
            let x = Recorded::<C>::from_inner(x);
            let x = Recorded::<C>::float_set_require_grad(x, true);
            assert!(!is_recomputed_by_strategy::<Plain, C>(&x), "a leaf");
            let product = Recorded::<C>::float_matmul(x.clone(), x.clone());
            assert!(!is_recomputed_by_strategy::<Plain, C>(&product), "bound by its computation");
            let scaled = Recorded::<C>::float_mul_scalar(x, Scalar::Float(2.0));
            assert_eq!(is_recomputed_by_strategy::<Plain, C>(&scaled), recomputes, "bound by its memory");
            assert_eq!(scaled.shape().to_vec(), [2, 2]);
        }
        check::<BalancedCheckpointing>(true);
        check::<NoCheckpointing>(false);
    }

    #[test]
    fn nodes_show_their_depth_and_parents() {
        type Recorded = Autodiff<burn::backend::Flex>;
        let x = Recorded::float_ones([2, 2].into(), &Default::default(), burn::tensor::FloatDType::F32);
        let x = Recorded::float_set_require_grad(x, true);
        assert_eq!(depth(&x.node()), 0);
        let y = Recorded::float_matmul(x.clone(), x.clone());
        assert_eq!(depth(&y.node()), 1);
        let product = Recorded::float_mul(x.clone(), y.clone());
        assert_eq!(parents(&product.node()), [x.id(), y.id()]);
        assert_eq!(parents(&x.node()), []);
        let z = Recorded::float_exp(product);
        assert_eq!(depth(&z.node()), 3);
    }

    #[test]
    fn backward_passes_show_their_graph() {
        use crate::node::node_id;
        let nodes =
            |tensors: [&Tensor<1>; 4]| tensors.map(|tensor| node_id(tensor.clone()).expect("autodiff"));
        let plain = Device::flex().autodiff();
        for (device, is_recomputed) in [(plain.clone(), false), (plain.gradient_checkpointing(), true)] {
            let a = Tensor::<1>::ones([2], &device).require_grad();
            let b = burn::tensor::activation::sigmoid(a.clone());
            let c = a.clone() * b.clone();
            let loss = c.clone().sum();
            let [of_a, of_b, of_c, of_loss] = nodes([&a, &b, &c, &loss]);
            let graph = Graph::of(loss);
            let parents: Vec<(NodeId, Vec<NodeId>)> = graph.parents.into_iter().collect();
            let expected =
                [(of_a, vec![]), (of_b, vec![of_a]), (of_c, vec![of_a, of_b]), (of_loss, vec![of_c])];
            assert_eq!(parents, expected);
            let asked: Vec<NodeId> = graph.kept.keys().copied().collect();
            assert_eq!(asked, [of_a, of_b]);
            assert!(graph.kept[&of_a] >= 2, "by the sigmoid and by the product");
            let names: Vec<(NodeId, &str)> =
                graph.names.iter().map(|(node, name)| (*node, name.as_str())).collect();
            assert_eq!(names, if is_recomputed { vec![(of_b, "Sigmoid")] } else { vec![] });
        }
    }

    #[test]
    fn reparameterizations_are_containers_of_their_name() {
        #[derive(Default)]
        struct Containers(Vec<(String, String)>);
        impl ModuleVisitor for Containers {
            fn enter_module(&mut self, name: &str, container: &str) {
                self.0.push((name.into(), container.into()));
            }
        }
        let linear = nn::LinearConfig::new(4, 4).with_bias(false).init(&Device::flex());
        let mut found = Containers::default();
        linear.apply_lora(Lora::new(2, 4.0)).visit(&mut found);
        assert!(found.0.contains(&("lora".into(), REPARAMETERIZATION.into())), "{:?}", found.0);
    }
}
