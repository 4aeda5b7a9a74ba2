//! Blocks of a model, and what a plan does with them.
use super::trace::Tracing;
use crate::checkpoint::{Tensors, segment::checkpoint_around};
use crate::saved::SavedPolicy;
use burn::module::Module;
use burn_memsave_layers::graph::tape::is_within;
use serde::{Serialize, Serializer};
use std::any::type_name;
use std::cell::RefCell;
use std::fmt;
use std::sync::Arc;

/// What is done with a block, so that it takes less memory.
///
/// ```
/// use burn_memsave::{plan::Treatment, saved::SavedPolicy};
///
/// assert_eq!(Treatment::default().to_string(), "keep");
/// assert_eq!(Treatment { recompute: true, saved: SavedPolicy::Half }.to_string(), "recompute, in half as many bits");
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Treatment {
    /// Whether it is a [segment](crate::checkpoint), computed again in the backward pass.
    pub recompute: bool,
    /// How what it keeps waits for the backward pass. `Keep` leaves that to the policy of the thread.
    pub saved: SavedPolicy,
}

impl Treatment {
    /// `forward(module, input)`, so treated; if it is computed again, within `around`.
    pub(super) fn run<M, I, O, F>(
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

/// What happens to blocks.
pub(super) enum Running {
    /// What was planned, and the number of the next one.
    Planned {
        treatments: Arc<[(&'static str, Treatment)]>,
        next: usize,
    },
    Tracing(Tracing),
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

/// `forward(module, input)`, as a block that a plan may treat: within [`Plan::scope`](super::Plan::scope) it is kept, computed again in the
/// backward pass, or kept in another form; anywhere else, and inside of blocks and of [segments](crate::checkpoint), it is just that.
///
/// The model marks its blocks so because Burn has no hooks around the forward pass of a module: the module tree says how a block is
/// called, not when it runs.
///
/// What goes in, what comes out and what the closure may do is as for [`checkpoint`](crate::checkpoint::checkpoint).
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
    // Taken out meanwhile, so that blocks in this one are parts of it.
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
        Running::Tracing(tracing) => tracing.block(module, input, forward),
    };
    RUNNING.set(Some(running));
    output
}

/// Runs a forward pass whose blocks are treated so; what is left of it.
pub(super) fn with<R>(running: Running, forward: impl FnOnce() -> R) -> (R, Running) {
    /// Restores what was outside, also after a panic.
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
