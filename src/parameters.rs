//! Looks at the parameters of a module: each one once, even if it is tied (in several places); which tied ones differ; and which ones are
//! running statistics.
use burn::module::{Flag, Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::Tensor;
use burn_memsave_layers::{follow_path, node::node_id, visit::VisitPath};
use std::any::Any;
use std::collections::{HashMap, HashSet};

/// Visits parameters.
pub(crate) trait EachOnce {
    /// Visits a parameter at this path. A tied one has other paths, too.
    fn visit<const D: usize>(&mut self, param: &Param<Tensor<D>>, path: &[String]);
}

/// Visits every parameter once, in order, at its first place. One that is frozen in one place and trainable in another is visited twice.
pub(crate) fn each_once(module: &impl Module, visitor: &mut impl EachOnce) {
    struct Once<'a, V> {
        visitor: &'a mut V,
        /// Whether it requires gradients: a module may have a part twice, trainable and frozen.
        seen: HashSet<(ParamId, bool)>,
        path: VisitPath,
    }
    impl<V: EachOnce> ModuleVisitor for Once<'_, V> {
        follow_path!();
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let is_trainable = param.is_initialized() && param.is_require_grad();
            if self.seen.insert((param.id, is_trainable)) {
                self.visitor.visit(param, self.path.names());
                // A visit may have initialized it, at its other places, too.
                if param.is_initialized() {
                    self.seen.insert((param.id, param.is_require_grad()));
                }
            }
        }
    }
    module.visit(&mut Once { visitor, seen: HashSet::new(), path: VisitPath::default() });
}

/// Gives tied parameters that require gradients the value of their first place, and its node of the graph, in all places.
pub(crate) fn tied<M: Module>(module: M) -> M {
    /// The values at the first places: tensors.
    #[derive(Default)]
    struct Tie(HashMap<ParamId, Box<dyn Any>>);
    impl ModuleMapper for Tie {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            if !param.is_require_grad() {
                return param;
            }
            match self.0.get(&param.id).and_then(|first| first.downcast_ref::<Tensor<D>>()) {
                Some(first) => {
                    let (id, _, mapper) = param.consume();
                    Param::from_mapped_value(id, first.clone(), mapper)
                }
                None => {
                    self.0.insert(param.id, Box::new(param.base()));
                    param
                }
            }
        }
    }
    module.map(&mut Tie::default())
}

/// The paths of two places of a parameter that requires gradients in which its values differ, since an optimizer changed only the first.
pub(crate) fn untied(module: &impl Module) -> Option<(String, String)> {
    /// The first path of a parameter, its node, and its value (a tensor).
    type First = (String, Option<u64>, Box<dyn Any>);
    #[derive(Default)]
    struct Search {
        path: VisitPath,
        seen: HashMap<ParamId, First>,
        found: Option<(String, String)>,
    }
    impl ModuleVisitor for Search {
        follow_path!();
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if self.found.is_some() || !param.is_require_grad() {
                return;
            }
            let value = param.base();
            let node = node_id(value.clone()).map(|id| id.value);
            let Some((first, of_first, before)) = self.seen.get(&param.id) else {
                self.seen.insert(param.id, (self.path.joined(), node, Box::new(value)));
                return;
            };
            let is_equal =
                |before: &Tensor<D>| before.shape() == value.shape() && before.to_data() == value.to_data();
            let is_one = node.is_some() && *of_first == node;
            if !is_one && !before.downcast_ref().is_some_and(is_equal) {
                self.found = Some((first.clone(), self.path.joined()));
            }
        }
    }
    let mut search = Search::default();
    module.visit(&mut search);
    search.found
}

/// Finds the running statistics of a module, whatever its type and that of its parts. A module shares them with its clones, so a mapper
/// changes them in all.
pub(crate) fn running_statistics<M: Module>(module: &M) -> HashSet<ParamId> {
    /// Gives parameters new ids. Running statistics ignore them, and their value is written back as it is.
    #[derive(Default)]
    struct Renumber(HashSet<ParamId>);
    impl ModuleMapper for Renumber {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            // A parameter that does not exist yet is not a running statistic.
            if !param.is_initialized() {
                return param;
            }
            self.0.insert(param.id);
            Param::initialized(ParamId::new(), param.base())
        }
    }
    struct Same(HashSet<ParamId>, HashSet<ParamId>);
    impl ModuleVisitor for Same {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if param.is_initialized() && self.0.contains(&param.id) {
                self.1.insert(param.id);
            }
        }
    }
    let mut renumber = Renumber::default();
    let renumbered = module.clone().map(&mut renumber);
    let mut same = Same(renumber.0, HashSet::new());
    renumbered.visit(&mut same);
    same.1
}

/// A running statistic.
#[derive(Clone, Debug)]
pub(crate) struct RunningStatistic {
    pub(crate) id: ParamId,
    /// The part of the module that has it.
    pub(crate) path: String,
}

/// The running statistics of a module that are updated: the nearest flag, beside or above them, is on, or there is none.
pub(crate) fn running_in_training(module: &impl Module) -> Vec<RunningStatistic> {
    struct Search {
        running: HashSet<ParamId>,
        path: VisitPath,
        /// In order, with the paths of their parts.
        statistics: Vec<RunningStatistic>,
        /// Parts with a flag, and whether one of their flags is on.
        flags: HashMap<String, bool>,
    }
    impl Search {
        /// The path of the part that the current field is in.
        fn part(&self) -> String {
            self.path.module().join(".")
        }
    }
    impl ModuleVisitor for Search {
        follow_path!();
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if self.running.contains(&param.id) {
                self.statistics.push(RunningStatistic { id: param.id, path: self.part() });
            }
        }
        fn visit_flag(&mut self, flag: &Param<Flag>) {
            *self.flags.entry(self.part()).or_default() |= flag.is_enabled();
        }
    }
    let running = running_statistics(module);
    if running.is_empty() {
        return vec![];
    }
    let mut search =
        Search { running, path: VisitPath::default(), statistics: vec![], flags: HashMap::new() };
    module.visit(&mut search);
    let Search { mut statistics, flags, .. } = search;
    // Looks upward for the nearest flag, since statistics may be in a list or in an option.
    let is_on = |part: &str| {
        let mut at = part;
        loop {
            match (flags.get(at), at.rsplit_once('.')) {
                (Some(&is_on), _) => return is_on,
                (None, Some((up, _))) => at = up,
                (None, None) if at.is_empty() => return true,
                (None, None) => at = "",
            }
        }
    };
    statistics.retain(|statistic| is_on(&statistic.path));
    for statistic in &mut statistics {
        if statistic.path.is_empty() {
            statistic.path = "the module".into();
        }
    }
    statistics
}
