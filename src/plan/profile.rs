//! What each block of a model takes, measured.
use super::PlanError;
use super::block::Treatment;
use super::choose::{Chooser, Way, needs};
use super::table::Plan;
use super::trace::{Block, Part, Trace, Tracer};
use crate::measure::StepInput;
use crate::saved::SavedPolicy;
use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::Tensor;
use serde::Serialize;
use std::collections::HashMap;
use std::time::Duration;

/// What one block takes with each treatment.
#[derive(Clone, Debug, Serialize)]
pub struct BlockProfile {
    /// Path of the block in the model; its type if it has no parameters.
    pub module: String,
    /// Whether anything in it is tracked: else it keeps nothing, and there is nothing to choose.
    pub tracked: bool,
    /// By treatment, as it is first.
    pub costs: Vec<BlockCost>,
}

/// What a block takes with one treatment.
#[derive(Clone, Debug, Serialize)]
pub struct BlockCost {
    /// The treatment.
    pub treatment: Treatment,
    /// Bytes alive after the block, beyond those before it: its output and what it keeps, less its input where that is freed.
    pub kept: i64,
    /// The most bytes while it runs, forward or backward, beyond those before it; gradients of blocks after it count.
    pub most: i64,
    /// The forward pass.
    #[serde(rename = "forward_seconds", serialize_with = "seconds")]
    pub forward_time: Duration,
    /// The backward pass, with what is computed again in it.
    #[serde(rename = "backward_seconds", serialize_with = "seconds")]
    pub backward_time: Duration,
}

pub(super) fn seconds<S: serde::Serializer>(time: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(time.as_secs_f64())
}

/// What the [blocks](super::block) of a model take, measured by [`profile`]. Plans are made of it.
#[derive(Clone, Debug, Serialize)]
pub struct Profile {
    /// In the order in which they run.
    pub blocks: Vec<BlockProfile>,
    #[serde(skip)]
    names: Vec<&'static str>,
    /// A row for what runs before the first block, and one for each block, with what runs after it.
    #[serde(skip)]
    chain: Vec<Vec<Way>>,
}

impl Profile {
    /// The fastest plan whose step needs at most `budget` bytes beyond parameters and input, as
    /// [`Measurement::peak`](crate::measure::Measurement::peak) counts them: gradients count. A larger budget never gives a slower plan,
    /// by the times of this profile, and of plans that are as fast it is the one that needs least.
    ///
    /// # Errors
    ///
    /// If no plan needs as little.
    pub fn plan(&self, budget: u64) -> Result<Plan, PlanError> {
        let chooser = Chooser::new(&self.chain);
        let choice = i64::try_from(budget).map_or(i64::MAX / 2, |budget| budget.min(i64::MAX / 2));
        let choice = chooser
            .choose(choice)
            .ok_or_else(|| PlanError::Budget { budget, least: chooser.least() as u64 })?;
        Ok(self.planned(&choice))
    }

    /// The least bytes that any plan needs.
    pub fn least(&self) -> u64 {
        Chooser::new(&self.chain).least() as u64
    }

    /// The bytes that a step needs in which every block is kept as it is.
    pub fn most(&self) -> u64 {
        needs(&self.chain, &vec![0; self.chain.len()]).peak as u64
    }

    fn planned(&self, choice: &[usize]) -> Plan {
        let [needs, kept] = [choice, &vec![0; choice.len()]].map(|choice| needs(&self.chain, choice));
        let blocks = self.blocks.iter().zip(&self.names).zip(&choice[1..]);
        Plan {
            blocks: blocks
                .map(|((block, name), &number)| {
                    (block.module.clone(), *name, block.costs[number].treatment.clone())
                })
                .collect(),
            predicted: needs.peak as u64,
            extra_time: Duration::from_nanos(needs.cost - kept.cost),
            measured: None,
        }
    }
}

/// A profile runs a step for each block of a period.
const LONGEST_PERIOD: usize = 6;

/// Which plans a [profile](profile) is for.
#[derive(Clone, Debug)]
pub struct ProfileOptions {
    policies: Vec<SavedPolicy>,
    limit: Option<u64>,
}

impl Default for ProfileOptions {
    fn default() -> Self {
        Self { policies: vec![SavedPolicy::Keep], limit: None }
    }
}

impl ProfileOptions {
    /// Blocks are kept as they are, or computed again: gradients are those of the model without a plan.
    pub fn new() -> Self {
        Self::default()
    }

    /// What blocks keep may also wait so. [`SavedPolicy::Half`], [`SavedPolicy::HalfF16`] and [`SavedPolicy::Int8`] round it, which changes gradients.
    #[must_use]
    pub fn with_policy(mut self, policy: SavedPolicy) -> Self {
        self.policies.push(policy);
        self
    }

    /// Steps that are run for the profile should not need more bytes than this, if they can. If plans cannot, there is no profile.
    #[must_use]
    pub fn with_limit(mut self, bytes: u64) -> Self {
        self.limit = Some(bytes);
        self
    }

    /// Of how many blocks `run` may be treated otherwise while the rest is computed again, within the limit: at least one more.
    fn period(&self, recomputed: &Trace, run: usize) -> usize {
        let fits = |&period: &usize| {
            let is_so = |number: usize, offset: usize| (number + offset) % period < run;
            let of =
                |offset: usize| (0..recomputed.blocks.len()).filter(move |&number| is_so(number, offset));
            let more = |offset: usize| of(offset).map(|number| recomputed.keeps_at_most(number)).sum::<i64>();
            let most = recomputed.peak() + (0..period).map(more).max().unwrap_or(0);
            self.limit.is_none_or(|limit| most as u64 <= limit)
        };
        (run + 1..LONGEST_PERIOD).find(fits).unwrap_or(LONGEST_PERIOD)
    }

    fn treatments(&self) -> Vec<Treatment> {
        let with = |recompute| move |saved: &SavedPolicy| Treatment { recompute, saved: saved.clone() };
        self.policies.iter().map(with(false)).chain(self.policies.iter().map(with(true))).collect()
    }
}

/// Measures what each block of a model takes, that is, what its forward pass runs through [`block`](super::block()): as it is, computed
/// again and kept as the options say.
///
/// Runs steps of the model: two in which all blocks are computed again, two for each other treatment in which every other block is treated so,
/// and three in which two of three are; up to six of each if they would need more than a [limit](ProfileOptions::with_limit). So a model
/// can be profiled that does not fit into memory as it is. What a step does besides (running statistics, random numbers), it does each
/// time. Nothing else should run meanwhile, as memory is counted for the whole program or device.
///
/// # Errors
///
/// If the model runs no block, if the loss requires no gradient, if the limit is too small, or if bytes are not counted: on CPU devices, install the
/// [`TrackingAllocator`](crate::measure::TrackingAllocator).
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_memsave::measure::TrackingAllocator;
/// use burn_memsave::nn::transformer::{PositionWiseFeedForward, PositionWiseFeedForwardConfig};
/// use burn_memsave::plan::{ProfileOptions, block, profile};
///
/// #[global_allocator]
/// static ALLOCATOR: TrackingAllocator = TrackingAllocator::new();
///
/// fn loss(model: &Vec<PositionWiseFeedForward>, x: Tensor<3>) -> Tensor<1> {
///     model.iter().fold(x, |x, layer| block(layer, x, |layer, x: Tensor<3>| layer.forward(x))).mean()
/// }
///
/// let device = Device::flex().autodiff();
/// let config = PositionWiseFeedForwardConfig::new(32, 128).with_dropout(0.0);
/// let model: Vec<PositionWiseFeedForward> = (0..8).map(|_| config.init(&device)).collect();
/// let x = Tensor::ones([64, 128, 32], &device);
/// let profile = profile(&model, x, &ProfileOptions::new(), loss)?;
/// assert_eq!((profile.blocks.len(), profile.blocks[3].module.as_str()), (8, "3"));
/// let plan = profile.plan(profile.most() * 3 / 4)?;
/// assert!(plan.predicted <= profile.most() * 3 / 4);
/// # Ok::<(), burn_memsave::plan::PlanError>(())
/// ```
pub fn profile<M: Module, I: StepInput>(
    model: &M,
    input: I,
    options: &ProfileOptions,
    loss: impl Fn(&M, I) -> Tensor<1>,
) -> Result<Profile, PlanError> {
    let treatments = options.treatments();
    let recomputed = treatments.iter().position(|treatment| treatment.recompute);
    let recomputed = recomputed.expect("an option of all plans");
    let tracer = Tracer { model, input: &input, loss, treatments: &treatments };
    tracer.trace(move |_| recomputed)?; // pays for what is there only once
    let mut traces = vec![tracer.trace(move |_| recomputed)?];
    // Exact plans need little less than that in which everything is computed again, if at all.
    let least = traces[0].peak() as u64;
    if let Some(budget) = options.limit
        && options.policies.len() == 1
        && least - least / 20 > budget
    {
        return Err(PlanError::Budget { budget, least });
    }
    let others = (0..treatments.len()).filter(|&treatment| treatment != recomputed);
    for treatment in others {
        // Each block between two that are computed again, and each after one that is treated the same.
        for run in [1, 2] {
            let period = options.period(&traces[0], run);
            for offset in 0..period {
                let is_so = move |number: usize| (number + offset) % period < run;
                traces.push(tracer.trace(move |number| if is_so(number) { treatment } else { recomputed })?);
            }
        }
    }
    let blocks = &traces[0].blocks;
    if traces.iter().any(|trace| trace.blocks != *blocks) {
        return Err(PlanError::Blocks);
    }
    let paths = Paths::new(model);
    let profiled = (0..blocks.len()).map(|number| BlockProfile {
        module: paths.of(&blocks[number]),
        tracked: traces[0].was_replayed(number),
        costs: costs(number, &traces, &treatments),
    });
    let profiled: Vec<BlockProfile> = profiled.collect();
    let chain = chain(&profiled, &traces);
    Ok(Profile { names: blocks.iter().map(|block| block.name).collect(), blocks: profiled, chain })
}

/// A block with each treatment, between blocks that are computed again.
fn costs(number: usize, traces: &[Trace], treatments: &[Treatment]) -> Vec<BlockCost> {
    let cost = |(index, treatment): (usize, &Treatment)| {
        let parts = traces.iter().filter(|trace| trace.treatments[number] == index);
        let part = parts.map(|trace| trace.part(number)).next();
        let Part { grows, most, forward_time, backward_time } =
            part.unwrap_or_else(|| traces[0].part(number));
        BlockCost { treatment: treatment.clone(), kept: grows, most, forward_time, backward_time }
    };
    let count = if traces[0].was_replayed(number) { treatments.len() } else { 1 };
    treatments.iter().take(count).enumerate().map(cost).collect()
}

/// What runs before the blocks, and the ways of each.
fn chain(blocks: &[BlockProfile], traces: &[Trace]) -> Vec<Vec<Way>> {
    let (grows, most) = traces[0].stem();
    let mut chain = vec![vec![Way { grows: vec![grows], most: vec![most], cost: 0 }]];
    for (number, block) in blocks.iter().enumerate() {
        let ways_before = chain[number].len();
        let keeps = &block.costs[0];
        let way = |(index, cost): (usize, &BlockCost)| {
            // After a block of each treatment, where a trace has it.
            let after = |before: usize| {
                let is_so = |trace: &&Trace| {
                    let is_after = ways_before == 1 || trace.treatments[number - 1] == before;
                    is_after && (block.costs.len() == 1 || trace.treatments[number] == index)
                };
                traces.iter().find(is_so).map(|trace| trace.part(number))
            };
            let known: Vec<Option<Part>> = (0..ways_before).map(after).collect();
            let each = |bytes: fn(&Part) -> i64| {
                let most = known.iter().flatten().map(bytes).max().unwrap_or(0);
                known.iter().map(|part| part.as_ref().map_or(most, bytes)).collect()
            };
            let time = |cost: &BlockCost| cost.forward_time + cost.backward_time;
            let extra = time(cost).saturating_sub(time(keeps));
            // What runs twice takes longer, also where the clock does not show it.
            let extra = if cost.treatment.recompute { extra.max(keeps.forward_time) } else { extra };
            Way {
                grows: each(|part| part.grows),
                most: each(|part| part.most),
                cost: if block.tracked { extra.as_nanos() as u64 } else { 0 },
            }
        };
        chain.push(block.costs.iter().enumerate().map(way).collect());
    }
    chain
}

/// The paths of the parameters of a model.
#[derive(Default)]
struct Paths {
    path: Vec<String>,
    of: HashMap<ParamId, Vec<String>>,
}

impl Paths {
    fn new<M: Module>(model: &M) -> Self {
        let mut paths = Self::default();
        model.visit(&mut paths);
        paths
    }

    /// The path of a block: that of its first parameter, without its path in the block. If it has none, the block's type.
    fn of(&self, block: &Block) -> String {
        let path = block.parameter.as_ref().and_then(|(id, within)| Some((self.of.get(id)?, within)));
        path.map_or_else(
            || block.name.into(),
            |(path, within)| {
                // A tuple was made for the block: its places are none of the model.
                let within = &within[usize::from(block.name.starts_with('(')).min(within.len())..];
                let same = path.iter().rev().zip(within.iter().rev()).take_while(|(a, b)| a == b).count();
                path[..path.len() - same].join(".")
            },
        )
    }
}

impl ModuleVisitor for Paths {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.of.entry(param.id).or_insert_with(|| self.path.clone());
    }
}
