//! [`block`](block()): marks the blocks of a model, and treats them as the plan of the thread says.
use crate::checkpoint::{Tensors, segment::checkpoint_around};
use crate::saved::SavedPolicy;
use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::Tensor;
use burn_memsave_layers::{follow_path, graph::tape::is_within, visit::VisitPath};
use serde::{Serialize, Serializer};
use std::any::type_name;
use std::cell::RefCell;
use std::fmt;
use std::sync::Arc;

/// What is done with a block so that it takes less memory.
///
/// ```
/// use burn_memsave::{plan::Treatment, saved::SavedPolicy};
///
/// assert_eq!(Treatment::default().to_string(), "keep");
/// assert_eq!(Treatment { recompute: true, saved: SavedPolicy::Half }.to_string(), "recompute, in half as many bits");
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Treatment {
    /// Whether it is a [segment](crate::checkpoint), which is recomputed in the backward pass.
    pub recompute: bool,
    /// The form in which what it keeps waits for the backward pass. `Keep` leaves this to the policy of the thread.
    pub saved: SavedPolicy,
}

impl Treatment {
    /// Runs `forward(module, input)` with this treatment. If the block is recomputed, `around` runs the recomputation.
    fn run<M, I, O, F>(
        &self,
        module: &M,
        input: I,
        forward: F,
        around: impl FnOnce(Box<dyn FnOnce() + Send>) + Send + 'static,
    ) -> O
    where
        M: Module + 'static,
        I: Tensors,
        O: Tensors,
        F: Fn(&M, I) -> O + Copy + Send + Sync + 'static,
    {
        let run = || match self.recompute {
            true => checkpoint_around(module, input, forward, around),
            false => forward(module, input),
        };
        if self.saved == SavedPolicy::Keep { run() } else { self.saved.scope(run) }
    }
}

impl fmt::Display for Treatment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.recompute, &self.saved) {
            (false, SavedPolicy::Keep) => f.write_str("keep"),
            (true, SavedPolicy::Keep) => f.write_str("recompute"),
            (false, saved) => f.write_str(saved.reason()),
            (true, saved) => write!(f, "recompute, {}", saved.reason()),
        }
    }
}

impl Serialize for Treatment {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// What a forward pass does with its blocks.
pub(super) enum Running {
    /// What was planned for each block, by its type, and the number of the next block.
    Planned {
        treatments: Arc<[(&'static str, Treatment)]>,
        next: usize,
    },
    Followed(Arc<dyn Follower>),
}

/// Follows the blocks of a step, and says how each is treated.
pub(super) trait Follower: Send + Sync {
    /// A block begins. Returns its number and its treatment.
    fn enter(&self, block: Block) -> (usize, Treatment);
    /// A block ends.
    fn leave(&self, number: usize);
    /// The recomputation of a block begins.
    fn replay(&self, number: usize);
    /// The recomputation of a block ends.
    fn replayed(&self, number: usize);
}

/// A block that runs.
#[derive(Clone, PartialEq)]
pub(super) struct Block {
    /// Its type.
    pub(super) name: &'static str,
    /// Its first parameter, and the path of that parameter in it.
    pub(super) parameter: Option<(ParamId, Vec<String>)>,
}

impl Block {
    fn of<M: Module>(module: &M) -> Self {
        /// Finds the first parameter.
        #[derive(Default)]
        struct First {
            path: VisitPath,
            parameter: Option<(ParamId, Vec<String>)>,
        }
        impl ModuleVisitor for First {
            follow_path!();
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                self.parameter.get_or_insert_with(|| (param.id, self.path.names().to_vec()));
            }
        }
        let mut first = First::default();
        module.visit(&mut first);
        Self { name: type_name::<M>(), parameter: first.parameter }
    }
}

thread_local! {
    static RUNNING: RefCell<Option<Running>> = const { RefCell::new(None) };
}

/// See [`apart`](crate::parallel::apart()).
pub(crate) fn set_aside() -> impl Sized {
    struct Aside(Option<Running>);
    impl Drop for Aside {
        fn drop(&mut self) {
            RUNNING.set(self.0.take());
        }
    }
    Aside(RUNNING.take())
}

/// Runs `forward(module, input)` as a block that a plan can treat. Within [`Plan::scope`](super::Plan::scope) the block is kept as it is,
/// recomputed in the backward pass, or kept in another form. Anywhere else, and inside other blocks and
/// [segments](crate::checkpoint), this only calls `forward`.
///
/// The model has to mark its blocks because Burn has no hooks around the forward pass of a module: the module tree shows the name of a
/// block, but not when it runs.
///
/// For inputs, outputs and the closure, the rules of [`checkpoint`](crate::checkpoint::checkpoint) apply.
///
/// # Panics
///
/// Within a plan that was made for other blocks.
///
/// ```
/// use burn::module::Module;
/// use burn::tensor::Tensor;
/// use burn_memsave::nn::transformer::TransformerEncoderLayer;
/// use burn_memsave::plan::block;
///
/// #[derive(Module, Debug)]
/// struct Encoder {
///     layers: Vec<TransformerEncoderLayer>,
/// }
///
/// impl Encoder {
///     fn forward(&self, x: Tensor<3>) -> Tensor<3> {
///         self.layers.iter().fold(x, |x, layer| block(layer, x, |layer, x| layer.forward(x, None, None)))
///     }
/// }
/// ```
pub fn block<M, I, O, F>(module: &M, input: I, forward: F) -> O
where
    M: Module + 'static,
    I: Tensors,
    O: Tensors,
    F: Fn(&M, I) -> O + Copy + Send + Sync + 'static,
{
    // Taken out meanwhile, so that blocks inside this one are parts of it.
    let running = if is_within() { None } else { RUNNING.take() };
    let Some(mut running) = running else { return forward(module, input) };
    let output = match &mut running {
        Running::Planned { treatments, next } => {
            let Some((name, treatment)) = treatments.get(*next) else {
                panic!("plan: made for {} blocks, and there are more", treatments.len())
            };
            let found = type_name::<M>();
            assert!(*name == found, "plan: made for {name} as block {next}, which is {found}");
            *next += 1;
            treatment.run(module, input, forward, |replay| replay())
        }
        Running::Followed(follower) => {
            let (number, treatment) = follower.enter(Block::of(module));
            let of_replay = follower.clone();
            let output = treatment.run(module, input, forward, move |replay| {
                of_replay.replay(number);
                replay();
                of_replay.replayed(number);
            });
            follower.leave(number);
            output
        }
    };
    RUNNING.set(Some(running));
    output
}

/// Runs a forward pass whose blocks are treated as `running` says. Also returns `running` as it is afterwards.
pub(super) fn with<R>(running: Running, forward: impl FnOnce() -> R) -> (R, Running) {
    /// Restores what ran outside, also after a panic.
    struct Outer(Option<Running>);
    impl Drop for Outer {
        fn drop(&mut self) {
            RUNNING.set(self.0.take());
        }
    }
    let outer = Outer(RUNNING.replace(Some(running)));
    let result = forward();
    let running = RUNNING.take().expect("every block gives it back");
    drop(outer);
    (result, running)
}
