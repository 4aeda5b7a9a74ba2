//! Surveys: read the whole graph of a loss, which Burn shows only to the steps of its backward pass.
//!
//! | step | what it does in the backward pass |
//! | --- | --- |
//! | *survey*, one, after the loss | runs first: reads which nodes the graph has, and passes the gradient on |
use super::bare::recorded;
use crate::backend::plain_backends;
use crate::burn_internals::{self, Graph};
use crate::burn_next::routed;
use burn::backend::{
    Backend, Dispatch,
    autodiff::{
        Autodiff,
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, Ops},
    },
    tensor::FloatTensor,
};
use burn::tensor::Tensor;
use core::mem::take;
use std::sync::{Arc, Mutex, PoisonError};

impl Graph {
    /// The graph of a loss; empty if it is not tracked. Takes the last handle of the loss, and frees the graph by a backward pass.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave_layers::{burn_internals::Graph, node::node_id};
    ///
    /// let x = Tensor::<1>::ones([4], &Device::flex().autodiff()).require_grad();
    /// let y = x.clone().exp();
    /// let [of_x, of_y] = [x.clone(), y.clone()].map(|tensor| node_id(tensor).unwrap());
    /// let graph = Graph::of(y.sum());
    /// assert_eq!(graph.parents[&of_y], [of_x]);
    /// assert_eq!((graph.kept.get(&of_x), graph.kept.get(&of_y)), (Some(&1), None));
    /// ```
    pub fn of(loss: Tensor<1>) -> Self {
        if !loss.is_tracked() {
            return Self::default();
        }
        let survey = Survey::default();
        let loss = Dispatch::memsave_survey(loss.into_dispatch(), survey.clone());
        drop(Tensor::<1>::from_dispatch(loss).backward());
        take(&mut survey.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Where the step writes the graph.
#[derive(Clone, Debug, Default)]
pub struct Survey(Arc<Mutex<Graph>>);

routed! {
    [Autodiff]
    /// Reads the graph of a loss in its backward pass.
    pub trait SurveyOps: Backend {
        /// The loss, with a step that writes its graph to `survey`.
        fn memsave_survey(loss: FloatTensor<Self>, _survey: Survey) -> FloatTensor<Self> {
            loss
        }
    }
}
plain_backends!(SurveyOps);

impl<B: SurveyOps, C: CheckpointStrategy> SurveyOps for Autodiff<B, C> {
    fn memsave_survey(loss: FloatTensor<Self>, survey: Survey) -> FloatTensor<Self> {
        let (primitive, node) = loss.into_parts();
        recorded::<B, _, 1>(SurveyStep, [node], survey, primitive)
    }
}

#[derive(Debug)]
struct SurveyStep;

impl<B: Backend> Backward<B, 1> for SurveyStep {
    type State = Survey;

    fn backward(self, ops: Ops<Survey, 1>, gradients: &mut Gradients, checkpointer: &mut Checkpointer) {
        let mut graph = burn_internals::graph(checkpointer);
        graph.parents.remove(&ops.node.id);
        *ops.state.0.lock().unwrap_or_else(PoisonError::into_inner) = graph;
        let gradient = gradients.consume::<B>(&ops.node);
        if let [Some(loss)] = ops.parents {
            gradients.register::<B>(loss.id, gradient);
        }
    }
}
