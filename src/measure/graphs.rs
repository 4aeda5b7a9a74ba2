//! [`watch_graphs`]: which graphs are still alive, and which modules are in them.
use super::bytes::{csv_of, human_bytes, json_of};
use super::ledger::{Path, modules_of, paths, shown};
use super::table::{number, table};
use crate::strategy::sweep;
use burn::backend::autodiff::NodeId;
use burn::module::Module;
use burn_memsave_layers::graph::watch::Watch;
use comfy_table::Cell;
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::marker::PhantomData;

/// Watches the graphs that operations of this library record on this thread until it is dropped. Made by [`watch_graphs`].
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_memsave::{measure::watch_graphs, nn::LinearConfig};
///
/// let device = Device::flex().autodiff();
/// let model = vec![LinearConfig::new(8, 4).init(&device)];
/// let x = Tensor::<2>::ones([2, 8], &device);
/// let mut watch = watch_graphs();
/// let loss = model[0].forward(x).mean();
/// drop(watch); // graphs that are recorded from here on are not seen
/// # drop(loss);
/// ```
#[derive(Debug)]
#[must_use = "graphs are watched until this is dropped"]
pub struct GraphWatch {
    watch: Watch,
    /// The watch around this one.
    before: Option<Watch>,
    modules: HashMap<NodeId, Path>,
    /// Keeps the watch on its thread.
    _here: PhantomData<*const ()>,
}

/// Begins to watch graphs: which of them stay alive after a step, and which modules are in them.
///
/// A graph stays alive, with everything that its operations keep, as long as a tensor in it does: for example a loss that is pushed to a
/// list without [`inner`](burn::tensor::Tensor::inner), or a state that is carried to the next step without `detach`. A backward pass frees
/// the graph that it goes through at once. Burn frees graphs that nobody holds any more at the end of a later backward pass, so look after
/// one.
///
/// A watch sees the operations of this library that this thread records while the watch lives. It does not see operations of Burn. Watches
/// nest: the inner one sees what is recorded during its life. A watched step takes a few hundred bytes more.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_memsave::{measure::watch_graphs, nn::LinearConfig};
///
/// let device = Device::flex().autodiff();
/// let model = vec![LinearConfig::new(8, 8).init(&device), LinearConfig::new(8, 4).init(&device)];
/// let mut watch = watch_graphs();
/// let mut losses = vec![];
/// for _ in 0..3 {
///     watch.before_step(&model);
///     let x = Tensor::<2>::ones([2, 8], &device);
///     let hidden = model[0].forward(x);
///     losses.push(hidden.clone().mean()); // a leak: only the other loss goes backward
///     drop(model[1].forward(hidden.detach()).mean().backward());
/// }
/// let alive = watch.alive(&model);
/// assert_eq!((alive.rows[0].module.as_str(), alive.rows[0].steps), ("0", 3));
/// drop(losses);
/// drop(model[0].forward(Tensor::<2>::ones([2, 8], &device)).mean().backward()); // the next step has Burn free them
/// assert!(watch.alive(&model).rows.is_empty());
/// ```
pub fn watch_graphs() -> GraphWatch {
    let watch = Watch::default();
    let before = watch.start();
    GraphWatch { watch, before, modules: HashMap::new(), _here: PhantomData }
}

impl GraphWatch {
    /// Learns the names of parameters. Call it before each step of a training run, since an optimizer makes new parameters. Without it,
    /// operations are named, but not their modules.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave::{measure::watch_graphs, nn::LinearConfig};
    ///
    /// let device = Device::flex().autodiff();
    /// let model = vec![LinearConfig::new(8, 4).init(&device)];
    /// let x = Tensor::<2>::ones([2, 8], &device);
    /// let mut watch = watch_graphs();
    /// watch.before_step(&model);
    /// let loss = model[0].forward(x).mean();
    /// drop(loss.backward());
    /// assert!(watch.alive(&model).rows.is_empty());
    /// ```
    pub fn before_step<M: Module>(&mut self, model: &M) {
        self.modules.extend(modules_of(model));
    }

    /// What graphs that are alive keep, largest first. First, this runs backward passes of one number, so that Burn frees graphs that
    /// nobody holds. Graphs of parameters that had no backward pass yet stay until they have one.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave::{measure::watch_graphs, nn::LinearConfig};
    ///
    /// let device = Device::flex().autodiff();
    /// let model = vec![LinearConfig::new(8, 4).init(&device)];
    /// let x = Tensor::<2>::ones([2, 8], &device);
    /// let mut watch = watch_graphs();
    /// let loss = model[0].forward(x).mean();
    /// assert_eq!(watch.alive(&model).rows[0].module, "0");
    /// # drop(loss);
    /// ```
    pub fn alive<M: Module>(&mut self, model: &M) -> LiveGraphs {
        self.before_step(model);
        // Burn frees one layer of operations of a graph at a time.
        let mut before = usize::MAX;
        while self.watch.alive().len() < before {
            before = self.watch.alive().len();
            model.devices().iter().for_each(sweep);
        }
        let steps = self.watch.alive();
        let paths = paths(steps.iter().map(|step| step.weight), &self.modules);
        let mut seen = HashSet::new();
        let mut rows: Vec<LiveGraphRow> = vec![];
        for (step, path) in steps.iter().zip(&paths) {
            let (module, operation) = (shown(path, step.operation), step.operation);
            let is_so = |row: &LiveGraphRow| row.module == module && row.operation == operation;
            let index = rows.iter().position(is_so).unwrap_or_else(|| {
                rows.push(LiveGraphRow { module: module.clone(), operation, steps: 0, bytes: 0 });
                rows.len() - 1
            });
            rows[index].steps += 1;
            for entry in &step.entries {
                let counts =
                    entry.node.is_none_or(|node| !self.modules.contains_key(&node) && seen.insert(node));
                if counts {
                    rows[index].bytes += entry.bytes.unwrap_or(0) as u64;
                }
            }
        }
        rows.sort_by_key(|row| Reverse(row.bytes));
        LiveGraphs { rows }
    }
}

impl Drop for GraphWatch {
    fn drop(&mut self) {
        Watch::end(self.before.take());
    }
}

/// An operation of a module in graphs that are alive.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_memsave::{measure::watch_graphs, nn::LinearConfig};
///
/// let device = Device::flex().autodiff();
/// let model = vec![LinearConfig::new(8, 4).init(&device)];
/// let x = Tensor::<2>::ones([2, 8], &device);
/// let mut watch = watch_graphs();
/// let loss = model[0].forward(x).mean();
/// assert_eq!(watch.alive(&model).rows[0].steps, 1);
/// # drop(loss);
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LiveGraphRow {
    /// Path of the module, as in a [ledger](super::LedgerRow::module).
    pub module: String,
    /// The operation.
    pub operation: &'static str,
    /// How often it ran in graphs that are alive.
    pub steps: u64,
    /// Bytes that it keeps in them. A tensor that several operations keep counts for the first. Parameters do not count.
    pub bytes: u64,
}

/// What graphs that are alive keep. Made by [`GraphWatch::alive`], displayed as a table.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_memsave::{measure::watch_graphs, nn::LinearConfig};
///
/// let device = Device::flex().autodiff();
/// let model = vec![LinearConfig::new(8, 4).init(&device)];
/// let x = Tensor::<2>::ones([2, 8], &device);
/// let mut watch = watch_graphs();
/// let loss = model[0].forward(x).mean();
/// println!("{}", watch.alive(&model));
/// # drop(loss);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LiveGraphs {
    /// One row for every operation of every module, largest first.
    pub rows: Vec<LiveGraphRow>,
}

impl LiveGraphs {
    /// Bytes that they keep.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave::{measure::watch_graphs, nn::LinearConfig};
    ///
    /// let device = Device::flex().autodiff();
    /// let model = vec![LinearConfig::new(8, 4).init(&device)];
    /// let x = Tensor::<2>::ones([2, 8], &device);
    /// let mut watch = watch_graphs();
    /// let loss = model[0].forward(x).mean();
    /// assert_eq!(watch.alive(&model).total(), 64); // x
    /// # drop(loss);
    /// ```
    pub fn total(&self) -> u64 {
        self.rows.iter().map(|row| row.bytes).sum()
    }

    /// The rows as CSV with a header.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave::{measure::watch_graphs, nn::LinearConfig};
    ///
    /// let device = Device::flex().autodiff();
    /// let model = vec![LinearConfig::new(8, 4).init(&device)];
    /// let x = Tensor::<2>::ones([2, 8], &device);
    /// let mut watch = watch_graphs();
    /// let loss = model[0].forward(x).mean();
    /// assert_eq!(watch.alive(&model).to_csv(), "module,operation,steps,bytes\n0,linear,1,64\n");
    /// # drop(loss);
    /// ```
    pub fn to_csv(&self) -> String {
        csv_of(&self.rows)
    }

    /// The rows as JSON: `{"rows": [{"module": ..., "bytes": ..., ...}, ...]}`.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave::{measure::watch_graphs, nn::LinearConfig};
    ///
    /// let device = Device::flex().autodiff();
    /// let model = vec![LinearConfig::new(8, 4).init(&device)];
    /// let x = Tensor::<2>::ones([2, 8], &device);
    /// let mut watch = watch_graphs();
    /// let loss = model[0].forward(x).mean();
    /// assert!(watch.alive(&model).to_json().contains(r#""bytes": 64"#));
    /// # drop(loss);
    /// ```
    pub fn to_json(&self) -> String {
        json_of(self)
    }
}

impl fmt::Display for LiveGraphs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = table(["module", "operation", "steps alive", "bytes"]);
        for row in &self.rows {
            let [steps, bytes] = [row.steps.to_string(), human_bytes(row.bytes)].map(number);
            table.add_row([Cell::new(&row.module), Cell::new(row.operation), steps, bytes]);
        }
        let steps = self.rows.iter().map(|row| row.steps).sum::<u64>();
        let [steps, bytes] = [steps.to_string(), human_bytes(self.total())].map(number);
        table.add_row([Cell::new("total"), Cell::new(""), steps, bytes]);
        write!(f, "{table}")
    }
}
