//! Measures the bytes of every row of the table of layers, ours beside its stock twin.
use crate::table::{
    Check, Row as TableRow, Shapes, Visitor,
    run::{initialize, second, variants},
};
use burn::module::Module;
use burn::tensor::{Device, Distribution, Tensor};
use burn_memsave::measure::{LayerMeasurement, Ledger, ledger, measure_layer};
use std::fmt::Display;
use std::time::{Duration, Instant};

/// A layer and what is tracked.
#[derive(Clone, Debug)]
#[allow(dead_code, reason = "every bench uses its part")]
pub struct Row {
    pub layer: String,
    /// "trainable", "frozen", or "-" if there are none.
    pub parameters: &'static str,
    /// "tracked" or "untracked".
    pub input: &'static str,
    pub burn: LayerMeasurement,
    pub ours: LayerMeasurement,
    /// What each operation of ours keeps.
    pub ledger: Ledger,
    /// The times of one forward and backward pass, Burn's and ours.
    pub times: [Duration; 2],
    /// Why the peak may be above Burn's, if it may.
    pub known_peak: Option<&'static str>,
}

/// Measures every layer whose name contains `filter`: trainable and frozen on an input that requires a gradient, and trainable on one
/// that does not, as in a first layer.
pub struct Bytes<'a> {
    pub device: &'a Device,
    pub filter: &'a str,
    /// Whether shapes have about a million elements instead of the usual ones.
    pub smaller: bool,
    pub rows: Vec<Row>,
}

impl Visitor for Bytes<'_> {
    fn row<const D: usize, const O: usize, S, M>(&mut self, row: TableRow<'_, D, O, S, M>)
    where
        S: Module + Display + From<M>,
        M: Module + Display + From<S>,
    {
        if !row.name.contains(self.filter) || row.notes.leaves_out(Check::Time, &row.name) {
            return;
        }
        let shape = self.shape(row.shapes);
        let (forward_stock, forward_ours) = (&row.stock.forward, &row.ours.forward);
        let stock = (row.stock.init)(self.device, shape);
        initialize(shape, self.device, |x| forward_stock(&stock, x));
        for (parameters, stock) in variants(stock) {
            let ours = M::from(stock.clone());
            // If the input requires no gradient, only trainable parameters make a graph.
            let inputs = if parameters == "trainable" { &["tracked", "untracked"][..] } else { &["tracked"] };
            for &input in inputs {
                let tracked = input == "tracked";
                let burn = self.measure(shape, tracked, &|x| forward_stock(&stock, x));
                // The graph of this is freed before the measurement.
                let (_, ledger) = ledger(&ours, self.input(shape, tracked), forward_ours);
                let ours = self.measure(shape, tracked, &|x| forward_ours(&ours, x));
                self.rows.push(Row {
                    layer: row.name.clone(),
                    parameters,
                    input,
                    burn: burn.0,
                    ours: ours.0,
                    ledger,
                    times: [burn.1, ours.1],
                    known_peak: row.notes.known_peak.filter(|_| !tracked),
                });
            }
        }
    }
}

impl Bytes<'_> {
    fn shape<const D: usize>(&self, shapes: Shapes<D>) -> [usize; D] {
        if self.smaller { shapes.of_devices() } else { shapes.usual }
    }

    fn input<const D: usize>(&self, shape: [usize; D], tracked: bool) -> Tensor<D> {
        let normal = Distribution::Normal(0.0, 1.0);
        Tensor::random(shape, normal, self.device).set_require_grad(tracked)
    }

    /// Measures bytes and time.
    fn measure<const D: usize, const O: usize>(
        &self,
        shape: [usize; D],
        tracked: bool,
        forward: &dyn Fn(Tensor<D>) -> Tensor<O>,
    ) -> (LayerMeasurement, Duration) {
        let input = || self.input(shape, tracked);
        second(self.device, || {
            let start = Instant::now();
            (measure_layer(input, forward), start.elapsed())
        })
    }
}
