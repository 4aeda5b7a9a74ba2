//! What the graph shows of operations of Burn that run beside those of this library.
//!
//! Burn 0.22.1 keeps the steps of a graph in a private table, and shows a backward pass only which tensor is computed from which, and
//! which of them are asked for again ([`Graph`]). So an operation is known by its neighbours: by the parameters that it uses, or by the
//! form of a few operations together. Its name, and the bytes that it keeps, are not to be had.
use super::ledger::{Path, shown};
use burn::backend::autodiff::NodeId;
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::Tensor;
use burn_memsave_layers::{burn_internals::Graph, graph::watch::LiveStep};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fmt;

/// Operations of Burn that compute together what an operation of this library computes in one.
///
/// ```
/// use burn_memsave::measure::Pattern;
///
/// assert!(Pattern::Attention.to_string().contains("tensor::module::attention"));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Pattern {
    /// `softmax(q kᵀ) v`: a product of two tensors, `e / sum(e)` of what is made of it, where `e` may be `exp`, and a product of that
    /// with a third tensor. Or with a softmax of this library. Scales, masks and dropout may be between.
    Attention,
    /// `min(max(x, 0), 6)` by two operations, such as `relu(x).clamp_max(6.0)`. The graph does not tell these from other pairs, so it is
    /// found by its values, where an operation of this library makes `x`, one of it reads the result, and some of `x` is above 6.
    Relu6,
    /// `x f(x)`, where `f` keeps `x`, such as `x * sigmoid(x)`. Where an operation of this library makes `x`, and one of it reads
    /// the result, the values are those of a SiLU.
    Silu,
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Attention => {
                "matmul, softmax, matmul: `burn_memsave::tensor::module::attention` keeps no scores"
            }
            Self::Relu6 => {
                "min(max(x, 0), 6): `burn_memsave::tensor::activation::relu6` keeps one bit per element"
            }
            Self::Silu => "x f(x), as x sigmoid(x): `burn_memsave::tensor::activation::silu` keeps x alone",
        })
    }
}

/// A [`Pattern`] in the graph of a step.
///
/// ```
/// use burn::tensor::{Device, Tensor, activation::sigmoid};
/// use burn_memsave::{measure::{Pattern, explain}, nn::LinearConfig};
///
/// let device = Device::flex().autodiff();
/// let model = vec![LinearConfig::new(8, 4).init(&device)];
/// let x = Tensor::<2>::ones([2, 8], &device);
/// let explanation = explain(&model, x, |model, x| {
///     let y = model[0].forward(x);
///     (y.clone() * sigmoid(y)).mean()
/// });
/// let found = &explanation.patterns[0];
/// assert_eq!((found.pattern, found.module.as_str()), (Pattern::Silu, "0"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FoundPattern {
    /// What it computes.
    pub pattern: Pattern,
    /// Path of the module before it: the innermost one with all the parameters by which its inputs are computed. Empty if that is the
    /// model itself.
    pub module: String,
}

impl fmt::Display for FoundPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let module = if self.module.is_empty() { "the model" } else { &self.module };
        write!(f, "{module}: {}", self.pattern)
    }
}

/// The graph of a step, and what this library knows of it.
pub(super) struct Surveyed<'a> {
    pub(super) graph: &'a Graph,
    /// The steps of this library.
    steps: &'a [LiveStep],
    /// The nodes that they made.
    ours: &'a BTreeSet<NodeId>,
    /// The module of every parameter.
    modules: &'a HashMap<NodeId, Path>,
    children: HashMap<NodeId, Vec<NodeId>>,
}

impl<'a> Surveyed<'a> {
    pub(super) fn new(
        graph: &'a Graph,
        steps: &'a [LiveStep],
        ours: &'a BTreeSet<NodeId>,
        modules: &'a HashMap<NodeId, Path>,
    ) -> Self {
        let mut children: HashMap<NodeId, Vec<NodeId>> = HashMap::new();
        for (child, parents) in &graph.parents {
            let parents: BTreeSet<&NodeId> = parents.iter().collect();
            parents.into_iter().for_each(|parent| children.entry(*parent).or_default().push(*child));
        }
        Self { graph, steps, ours, modules, children }
    }

    /// Operations of Burn.
    fn burns(&self) -> impl Iterator<Item = (NodeId, &[NodeId])> {
        let all = self.graph.parents.iter().filter(|(_, parents)| !parents.is_empty());
        all.filter(|(node, _)| !self.ours.contains(node)).map(|(node, parents)| (*node, &parents[..]))
    }

    pub(super) fn count(&self) -> usize {
        self.burns().count()
    }

    /// The modules whose parameters operations of Burn use; but not those that reach a layer of this library in another form, such as a
    /// slope that is reshaped.
    pub(super) fn unswapped(&self) -> BTreeSet<&Path> {
        let used = self.burns().filter(|(node, parents)| parents.len() > 1 || !self.is_for_ours(*node));
        used.flat_map(|(_, parents)| parents).filter_map(|parent| self.modules.get(parent)).collect()
    }

    /// Whether all that is computed from a tensor alone is read by operations of this library.
    fn is_for_ours(&self, node: NodeId) -> bool {
        let is_read =
            |&child: &NodeId| self.is_ours(child) || self.parent(child).is_some() && self.is_for_ours(child);
        let children = self.children(node);
        !children.is_empty() && children.iter().all(is_read)
    }

    /// How often there is which operation, where the graph tells its name.
    pub(super) fn names(&self) -> BTreeMap<&str, usize> {
        let mut names = BTreeMap::new();
        for (node, _) in self.burns() {
            if let Some(name) = self.graph.names.get(&node) {
                *names.entry(name.as_str()).or_default() += 1;
            }
        }
        names
    }

    /// What is written by hand, in the order of the forward pass.
    pub(super) fn patterns(&self) -> Vec<FoundPattern> {
        let found = self.graph.parents.keys().filter_map(|&node| {
            let (pattern, inputs) = self
                .attention(node)
                .map(|inputs| (Pattern::Attention, inputs))
                .or_else(|| Some((Pattern::Silu, vec![self.silu(node)?])))
                .or_else(|| Some((Pattern::Relu6, vec![self.relu6(node)?])))?;
            let module = self.module_before(inputs);
            Some(FoundPattern { pattern, module: shown(&module, "") })
        });
        found.collect()
    }

    /// The innermost module with all the parameters by which tensors are computed, of the last operations before them that have any.
    fn module_before(&self, mut tensors: Vec<NodeId>) -> Path {
        let mut seen = HashSet::new();
        let mut common: Option<Path> = None;
        while let Some(node) = tensors.pop() {
            let Some(parents) = self.graph.parents.get(&node).filter(|_| seen.insert(node)) else { continue };
            let step = self.steps.iter().find(|step| step.output == Some(node));
            let of_step = step.and_then(|step| self.modules.get(&step.weight?));
            let of_parameters = parents.iter().filter_map(|parent| self.modules.get(parent));
            let here: Vec<&Path> = of_step.into_iter().chain(of_parameters).collect();
            if here.is_empty() {
                tensors.extend(parents);
            }
            for path in here {
                let both = match &common {
                    None => path.clone(),
                    Some(common) => {
                        let same = common.iter().zip(path).take_while(|(a, b)| a == b);
                        same.map(|(name, _)| name.clone()).collect()
                    }
                };
                common = Some(both);
            }
        }
        common.unwrap_or_default()
    }
}

/// So many operations may be between a product and a softmax.
const BETWEEN: usize = 8;

/// Forms of operations.
impl Surveyed<'_> {
    fn parents(&self, node: NodeId) -> &[NodeId] {
        self.graph.parents.get(&node).map_or(&[], |parents| parents)
    }

    /// The one tensor that this is computed from.
    fn parent(&self, node: NodeId) -> Option<NodeId> {
        match self.parents(node) {
            &[parent] => Some(parent),
            _ => None,
        }
    }

    fn children(&self, node: NodeId) -> &[NodeId] {
        self.children.get(&node).map_or(&[], |children| children)
    }

    /// How often the backward pass asks for a tensor.
    fn asked(&self, node: NodeId) -> usize {
        self.graph.kept.get(&node).copied().unwrap_or(0)
    }

    fn is_ours(&self, node: NodeId) -> bool {
        self.ours.contains(&node)
    }

    /// Whether the graph tells no other name of the operation. A graph that tells names tells those of all that is asked for.
    fn may_be(&self, node: NodeId, name: &str) -> bool {
        let names = &self.graph.names;
        names.is_empty() || names.get(&node).is_some_and(|known| known == name)
    }

    /// Whether the tensor is one of Burn's products of two tensors, both of which are kept. A sum that is computed again asks for both,
    /// too, but has a name; a matrix product is never computed again.
    fn is_product(&self, node: NodeId) -> bool {
        let [a, b] = self.parents(node) else { return false };
        if self.graph.names.contains_key(&node) {
            return false;
        }
        let is_parameter = |node: &NodeId| self.modules.contains_key(node);
        !self.is_ours(node) && [a, b].into_iter().all(|node| self.asked(*node) > 0 && !is_parameter(node))
    }

    /// What goes into a softmax: `e / sum(e)`, where the operation that makes `e` keeps its input, and `sum` keeps nothing.
    fn softmax(&self, node: NodeId) -> Option<NodeId> {
        let step = self.steps.iter().find(|step| step.output == Some(node));
        if let Some(step) = step {
            return step.inputs.first().filter(|_| step.operation == "softmax").map(|input| input.node);
        }
        let &[e, sum] = self.parents(node) else { return None };
        let shifted = self.parent(e)?;
        let is_sum = self.leads_to(sum, e) && self.children(sum) == [node] && self.asked(sum) > 0;
        // By the quotient alone; where operations have names, also by what is computed again.
        let is_asked_once = self.asked(e) == 1 || !self.graph.names.is_empty();
        let is_exp = self.may_be(e, "Exp") && is_asked_once && self.asked(shifted) > 0;
        let is_all = self.children(e).len() == 2 && ![node, e, sum].iter().any(|&node| self.is_ours(node));
        let scores = match *self.parents(shifted) {
            [scores, maximum] if self.leads_to(maximum, scores) => scores,
            _ => shifted,
        };
        (is_sum && is_exp && is_all).then_some(scores)
    }

    /// Whether a tensor is computed from another one by one operation or two, such as a sum that is clamped.
    fn leads_to(&self, node: NodeId, from: NodeId) -> bool {
        let before = self.parent(node);
        before == Some(from) || before.is_some_and(|before| self.parent(before) == Some(from))
    }

    /// The inputs of an attention whose softmax this is.
    fn attention(&self, softmax: NodeId) -> Option<Vec<NodeId>> {
        let mut scores = self.softmax(softmax)?;
        for _ in 0..BETWEEN {
            let Some(before) = self.parent(scores) else { break };
            scores = before;
        }
        let mut weights = softmax;
        let mut output = None;
        for _ in 0..BETWEEN {
            let &[next] = self.children(weights) else { break };
            if self.is_product(next) {
                output = Some(next);
                break;
            }
            weights = self.parent(next).map(|_| next)?;
        }
        let inputs = self.parents(scores).iter().chain(self.parents(output?)).copied();
        self.is_product(scores).then(|| inputs.filter(|&node| node != weights).collect())
    }

    /// What goes into a SiLU: `x f(x)`, for both of which `x` is kept.
    fn silu(&self, node: NodeId) -> Option<NodeId> {
        let &[a, b] = self.parents(node) else { return None };
        let (x, of_x) = [(a, b), (b, a)].into_iter().find(|&(x, of_x)| self.parent(of_x) == Some(x))?;
        let is_form = self.children(x).len() == 2 && self.children(of_x) == [node];
        let are_kept = self.asked(x) >= 2 && self.asked(of_x) > 0;
        let is_burns = ![node, of_x].iter().any(|&node| self.is_ours(node)) && self.may_be(of_x, "Sigmoid");
        let values = self.values(x, node, |step| step.after.silu);
        (is_form && are_kept && is_burns && values != Some(false)).then_some(x)
    }

    /// What goes into a ReLU6 of two operations.
    fn relu6(&self, node: NodeId) -> Option<NodeId> {
        let first = self.parent(node)?;
        let x = self.parent(first)?;
        let is_burns = ![node, first].iter().any(|&node| self.is_ours(node));
        let values = self.values(x, node, |step| step.after.relu6);
        (is_burns && self.children(first) == [node] && values == Some(true)).then_some(x)
    }

    /// Whether values are those of an activation; `None` where this library does not see both.
    fn values(&self, x: NodeId, node: NodeId, after: fn(&LiveStep) -> Option<u64>) -> Option<bool> {
        let steps = self.steps;
        let expected = after(steps.iter().find(|step| step.output == Some(x))?)?;
        let mut inputs = steps.iter().flat_map(|step| &step.inputs);
        Some(inputs.find(|input| input.node == node)?.values? == expected)
    }
}

/// The types of modules with parameters, by their paths, as Burn names them to visitors.
#[derive(Default)]
pub(super) struct ModuleTypes {
    here: Vec<(String, String)>,
    pub(super) types: HashMap<Path, String>,
}

impl ModuleTypes {
    pub(super) fn of<M: Module>(model: &M) -> Self {
        let mut types = Self::default();
        model.visit(&mut types);
        types
    }
}

impl ModuleVisitor for ModuleTypes {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.here.push((name.into(), container.trim_start_matches("Struct:").into()));
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.here.pop();
    }
    fn visit_float<const D: usize>(&mut self, _: &Param<Tensor<D>>) {
        if let Some(((_, of), around)) = self.here.split_last() {
            let path = around.iter().map(|(name, _)| name.clone()).collect();
            self.types.insert(path, of.clone());
        }
    }
}
