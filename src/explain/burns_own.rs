//! What the graph shows of operations of Burn that run beside those of this library.
//!
//! Burn 0.22.1 has the steps of a graph in a private table. A backward pass sees only which tensor is computed from which, and which of
//! them are read again ([`Graph`]). So an operation is recognized by its neighbors: by the parameters that it uses, or by the form of a few
//! operations together. Its name and the bytes that it keeps are unknown.
use crate::measure::{Path, shown};
use burn::backend::autodiff::NodeId;
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
    /// `softmax(q kᵀ) v`: a product of two tensors, a softmax, and a product with a third tensor. The softmax is one of this library, or
    /// has the form `e / sum(e)`, where `e` may be `exp`. Scales, masks and dropout may be between.
    Attention,
    /// `min(max(x, 0), 6)` by two operations, such as `relu(x).clamp_max(6.0)`. The graph does not distinguish these from other pairs, so
    /// the values decide: an operation of this library computes `x`, another one reads the result, and some of `x` is above 6.
    Relu6,
    /// `x f(x)`, where `f` keeps `x`, such as `x * sigmoid(x)`. If an operation of this library computes `x` and another one reads the
    /// result, the values must also be those of a SiLU.
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
    /// Path of the module before it: the innermost one that contains all parameters from which its inputs are computed. Empty if that is
    /// the model itself.
    pub module: String,
}

impl fmt::Display for FoundPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let module = if self.module.is_empty() { "the model" } else { &self.module };
        write!(f, "{module}: {}", self.pattern)
    }
}

/// The graph of a step, and what this library knows about it.
pub(super) struct Surveyed<'a> {
    pub(super) graph: &'a Graph,
    /// The steps of this library.
    steps: &'a [LiveStep],
    /// The nodes that they computed.
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

    /// Operations of Burn: what they compute, and from what.
    fn burns(&self) -> impl Iterator<Item = (NodeId, &[NodeId])> {
        let all = self.graph.parents.iter().filter(|(_, parents)| !parents.is_empty());
        all.filter(|(node, _)| !self.ours.contains(node)).map(|(node, parents)| (*node, &parents[..]))
    }

    pub(super) fn count(&self) -> usize {
        self.burns().count()
    }

    /// The modules whose parameters operations of Burn use. Parameters that only reach a layer of this library in another form, such as a
    /// reshaped slope, do not count.
    pub(super) fn unswapped(&self) -> BTreeSet<&Path> {
        let used = self.burns().filter(|(node, parents)| parents.len() > 1 || !self.is_for_ours(*node));
        used.flat_map(|(_, parents)| parents).filter_map(|parent| self.modules.get(parent)).collect()
    }

    /// Whether only operations of this library read a tensor, or what is computed from it alone.
    fn is_for_ours(&self, node: NodeId) -> bool {
        let is_read =
            |&child: &NodeId| self.is_ours(child) || self.parent(child).is_some() && self.is_for_ours(child);
        let children = self.children(node);
        !children.is_empty() && children.iter().all(is_read)
    }

    /// How often each operation occurs whose name the graph shows.
    pub(super) fn names(&self) -> BTreeMap<&str, usize> {
        let mut names = BTreeMap::new();
        for (node, _) in self.burns() {
            if let Some(name) = self.graph.names.get(&node) {
                *names.entry(name.as_str()).or_default() += 1;
            }
        }
        names
    }

    /// What is composed by hand of operations of Burn, in the order of the forward pass.
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

    /// The innermost module that contains the parameters of the last operations with any before these tensors.
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

/// How many operations may be between a product and a softmax.
const BETWEEN: usize = 8;

/// Forms of operations.
impl Surveyed<'_> {
    fn parents(&self, node: NodeId) -> &[NodeId] {
        self.graph.parents.get(&node).map_or(&[], |parents| parents)
    }

    /// The tensor that this one is computed from, if it is one alone.
    fn parent(&self, node: NodeId) -> Option<NodeId> {
        match self.parents(node) {
            &[parent] => Some(parent),
            _ => None,
        }
    }

    fn children(&self, node: NodeId) -> &[NodeId] {
        self.children.get(&node).map_or(&[], |children| children)
    }

    /// How often the backward pass reads a tensor.
    fn asked(&self, node: NodeId) -> usize {
        self.graph.kept.get(&node).copied().unwrap_or(0)
    }

    fn is_ours(&self, node: NodeId) -> bool {
        self.ours.contains(&node)
    }

    /// Whether the graph shows no other name of the operation. A graph that shows names shows those of everything that is read again.
    fn may_be(&self, node: NodeId, name: &str) -> bool {
        let names = &self.graph.names;
        names.is_empty() || names.get(&node).is_some_and(|known| known == name)
    }

    /// Whether an operation of Burn computes the tensor as a product of two tensors, both of which are kept. A recomputed sum reads both,
    /// too, but has a name. Matrix products are never recomputed.
    fn is_product(&self, node: NodeId) -> bool {
        let [a, b] = self.parents(node) else { return false };
        if self.graph.names.contains_key(&node) {
            return false;
        }
        let is_parameter = |node: &NodeId| self.modules.contains_key(node);
        !self.is_ours(node) && [a, b].into_iter().all(|node| self.asked(*node) > 0 && !is_parameter(node))
    }

    /// The input of a softmax: `e / sum(e)`, where the operation that computes `e` keeps its input, and `sum` keeps nothing.
    fn softmax(&self, node: NodeId) -> Option<NodeId> {
        let step = self.steps.iter().find(|step| step.output == Some(node));
        if let Some(step) = step {
            return step.inputs.first().filter(|_| step.operation == "softmax").map(|input| input.node);
        }
        let &[e, sum] = self.parents(node) else { return None };
        let shifted = self.parent(e)?;
        let is_sum = self.leads_to(sum, e) && self.children(sum) == [node] && self.asked(sum) > 0;
        // Only the quotient reads it; where operations have names, so does what is recomputed.
        let is_asked_once = self.asked(e) == 1 || !self.graph.names.is_empty();
        let is_exp = self.may_be(e, "Exp") && is_asked_once && self.asked(shifted) > 0;
        let is_all = self.children(e).len() == 2 && ![node, e, sum].iter().any(|&node| self.is_ours(node));
        let scores = match *self.parents(shifted) {
            [scores, maximum] if self.leads_to(maximum, scores) => scores,
            _ => shifted,
        };
        (is_sum && is_exp && is_all).then_some(scores)
    }

    /// Whether one operation or two compute a tensor from another one, such as a clamped sum.
    fn leads_to(&self, node: NodeId, from: NodeId) -> bool {
        let before = self.parent(node);
        before == Some(from) || before.is_some_and(|before| self.parent(before) == Some(from))
    }

    /// The inputs of the attention that this softmax is in.
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

    /// The input of a SiLU: `x f(x)`, both factors of which need `x` in the backward pass.
    fn silu(&self, node: NodeId) -> Option<NodeId> {
        let &[a, b] = self.parents(node) else { return None };
        let (x, of_x) = [(a, b), (b, a)].into_iter().find(|&(x, of_x)| self.parent(of_x) == Some(x))?;
        let is_form = self.children(x).len() == 2 && self.children(of_x) == [node];
        let are_kept = self.asked(x) >= 2 && self.asked(of_x) > 0;
        let is_burns = ![node, of_x].iter().any(|&node| self.is_ours(node)) && self.may_be(of_x, "Sigmoid");
        let values = self.values(x, node, |step| step.after.silu);
        (is_form && are_kept && is_burns && values != Some(false)).then_some(x)
    }

    /// The input of a ReLU6 of two operations.
    fn relu6(&self, node: NodeId) -> Option<NodeId> {
        let first = self.parent(node)?;
        let x = self.parent(first)?;
        let is_burns = ![node, first].iter().any(|&node| self.is_ours(node));
        let values = self.values(x, node, |step| step.after.relu6);
        (is_burns && self.children(first) == [node] && values == Some(true)).then_some(x)
    }

    /// Whether values are those of an activation; `None` if this library does not see both the input and the output.
    fn values(&self, x: NodeId, node: NodeId, after: fn(&LiveStep) -> Option<u64>) -> Option<bool> {
        let steps = self.steps;
        let expected = after(steps.iter().find(|step| step.output == Some(x))?)?;
        let mut inputs = steps.iter().flat_map(|step| &step.inputs);
        Some(inputs.find(|input| input.node == node)?.values? == expected)
    }
}
