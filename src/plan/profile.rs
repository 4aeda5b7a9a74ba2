//! [`profile`](profile()): measures the bytes and the time that each block of a model takes.
use super::PlanError;
use super::block::{Block, Treatment};
use super::choose::{Chooser, Way, needs};
use super::planned::Plan;
use super::trace::{Part, Trace, Tracer};
use crate::measure::{StepInput, seconds};
use crate::parameters::{EachOnce, each_once};
use crate::saved::SavedPolicy;
use burn::module::{Module, Param, ParamId};
use burn::tensor::Tensor;
use serde::Serialize;
use std::collections::HashMap;
use std::time::Duration;

/// What one block takes with each treatment.
#[derive(Clone, Debug, Serialize)]
pub struct BlockProfile {
    /// Path of the block in the model, or its type if it has no parameters.
    pub module: String,
    /// Whether anything in it is tracked. If not, it keeps nothing, and there is nothing to choose.
    pub tracked: bool,
    /// The costs by treatment. The first one keeps the block as it is.
    pub costs: Vec<BlockCost>,
}

/// What a block takes with one treatment.
#[derive(Clone, Debug, Serialize)]
pub struct BlockCost {
    /// The treatment.
    pub treatment: Treatment,
    /// Bytes alive after the block, beyond those before it: its output and what it keeps, minus its input if that is freed.
    pub kept: i64,
    /// The most bytes while it runs, forward or backward, beyond those before it; gradients of blocks after it count.
    pub most: i64,
    /// The time of the forward pass.
    #[serde(rename = "forward_seconds", serialize_with = "seconds")]
    pub forward_time: Duration,
    /// The time of the backward pass, with recomputation.
    #[serde(rename = "backward_seconds", serialize_with = "seconds")]
    pub backward_time: Duration,
}

/// What the [blocks](super::block()) of a model take, as measured by [`profile`](profile()). Plans are made from it.
#[derive(Clone, Debug, Serialize)]
pub struct Profile {
    /// The blocks, in the order in which they run.
    pub blocks: Vec<BlockProfile>,
    #[serde(skip)]
    names: Vec<&'static str>,
    /// The ways of what runs before the first block, and then of each block, together with what runs after it.
    #[serde(skip)]
    chain: Vec<Vec<Way>>,
}

impl Profile {
    /// The fastest plan whose step needs at most `budget` bytes beyond parameters and input, as
    /// [`Measurement::peak`](crate::measure::Measurement::peak) counts them (gradients count). Of several fastest plans, it is the one that
    /// needs least. By the times of this profile, a larger budget never gives a slower plan.
    ///
    /// # Errors
    ///
    /// If no plan fits.
    pub fn plan(&self, budget: u64) -> Result<Plan, PlanError> {
        let chooser = Chooser::new(&self.chain);
        let choice = i64::try_from(budget).map_or(i64::MAX / 2, |budget| budget.min(i64::MAX / 2));
        let choice = chooser
            .choose(choice)
            .ok_or_else(|| PlanError::Budget { budget, least: chooser.least() as u64 })?;
        Ok(self.planned(&choice))
    }

    /// The fewest bytes that a plan can need.
    pub fn least(&self) -> u64 {
        Chooser::new(&self.chain).least() as u64
    }

    /// The bytes of a step in which every block is kept as it is.
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

/// The longest period of treatments. A profile runs a step for each block of a period.
const LONGEST_PERIOD: usize = 6;

/// Which plans a [profile](profile()) is for.
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
    /// Blocks are kept as they are or recomputed, so gradients are those of the model without a plan.
    pub fn new() -> Self {
        Self::default()
    }

    /// Plans may also apply this policy to what blocks keep. [`SavedPolicy::Half`], [`SavedPolicy::HalfF16`] and [`SavedPolicy::Int8`]
    /// round it, which changes gradients.
    #[must_use]
    pub fn with_policy(mut self, policy: SavedPolicy) -> Self {
        self.policies.push(policy);
        self
    }

    /// Steps that run for the profile should not need more bytes than this, if possible. If no plan can fit, [`profile`](profile()) returns
    /// an error.
    #[must_use]
    pub fn with_limit(mut self, bytes: u64) -> Self {
        self.limit = Some(bytes);
        self
    }

    /// The period of treatments, in blocks: in each period, `run` blocks have another treatment, and the others, at least one, are
    /// recomputed, so that the step stays within the limit.
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

/// Measures what each [block](super::block()) of a model takes with each treatment: kept as it is, recomputed, and with the policies of the
/// options.
///
/// This runs two steps in which all blocks are recomputed. Then, for each other treatment, it runs two steps in which every second block
/// has this treatment, and three in which two of three blocks have it; if these would need more than a [limit](ProfileOptions::with_limit),
/// up to six steps of each kind. So even a model that does not fit into memory as it is can be profiled. Side effects of a step (running
/// statistics, random numbers) happen each time. Nothing else should run meanwhile, since memory is counted for the whole program or
/// device.
///
/// # Errors
///
/// If the model runs no block, if the loss requires no gradient, if the limit is too small, or if bytes are not counted: on CPU devices,
/// install the [`TrackingAllocator`](crate::measure::TrackingAllocator).
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
    tracer.trace(move |_| recomputed)?; // pays for what happens only once
    let mut traces = vec![tracer.trace(move |_| recomputed)?];
    // Without policies, no plan needs much less than the one that recomputes everything.
    let least = traces[0].peak() as u64;
    if let Some(budget) = options.limit
        && options.policies.len() == 1
        && least - least / 20 > budget
    {
        return Err(PlanError::Budget { budget, least });
    }
    let others = (0..treatments.len()).filter(|&treatment| treatment != recomputed);
    for treatment in others {
        // Each block runs between two that are recomputed, and after one with the same treatment.
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

/// The costs of a block with each treatment, between blocks that are recomputed.
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

/// The ways of what runs before the first block, and those of each block.
fn chain(blocks: &[BlockProfile], traces: &[Trace]) -> Vec<Vec<Way>> {
    let (grows, most) = traces[0].stem();
    let mut chain = vec![vec![Way { grows: vec![grows], most: vec![most], cost: 0 }]];
    for (number, block) in blocks.iter().enumerate() {
        let ways_before = chain[number].len();
        let keeps = &block.costs[0];
        let way = |(index, cost): (usize, &BlockCost)| {
            // After a block of each treatment, if a trace has that.
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
            // What runs twice takes longer, even where the clock does not show it.
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
struct Paths(HashMap<ParamId, Vec<String>>);

impl Paths {
    fn new<M: Module>(model: &M) -> Self {
        let mut paths = Self::default();
        each_once(model, &mut paths);
        paths
    }

    /// The path of a block: that of its first parameter, without the parameter's path in the block. If it has no parameter, its type.
    fn of(&self, block: &Block) -> String {
        let path = block.parameter.as_ref().and_then(|(id, within)| Some((self.0.get(id)?, within)));
        path.map_or_else(
            || block.name.into(),
            |(path, within)| {
                // A tuple was made for the block: its fields are not in the model.
                let within = &within[usize::from(block.name.starts_with('(')).min(within.len())..];
                let same = path.iter().rev().zip(within.iter().rev()).take_while(|(a, b)| a == b).count();
                path[..path.len() - same].join(".")
            },
        )
    }
}

impl EachOnce for Paths {
    fn visit<const D: usize>(&mut self, param: &Param<Tensor<D>>, path: &[String]) {
        self.0.entry(param.id).or_insert_with(|| path.to_vec());
    }
}
