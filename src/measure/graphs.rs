//! Graphs that are still alive, named by the modules in them.
use super::bytes::{csv_of, human_bytes};
use super::ledger::{ModulePaths, Path, paths, shown};
use crate::checkpoint::parents::token;
use burn::backend::autodiff::NodeId;
use burn::module::Module;
use burn::tensor::Device;
use burn_memsave_layers::graph::watch::Watch;
use comfy_table::{Cell, CellAlignment, Table, presets};
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::marker::PhantomData;
use std::{fmt, io};

/// Watches the graphs that operations of this library record on this thread, until it is dropped. Made by [`watch_graphs`].
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
    /// The watch outside of this one.
    before: Option<Watch>,
    modules: HashMap<NodeId, Path>,
    /// Of one thread.
    _here: PhantomData<*const ()>,
}

/// Begins to watch graphs: which of them stay alive after a step, and which modules are in them.
///
/// A graph stays alive, with all that its operations keep, as long as a tensor in it does: a loss that is pushed to a list
/// without [`inner`](burn::tensor::Tensor::inner), a state that is carried to the next step without `detach`. What a backward
/// pass went through is freed at once; graphs that nobody holds any more are freed at the end of a later backward pass, so look
/// after one.
///
/// Graphs are seen by the operations of this library in them, which this thread records while the watch lives; operations of Burn
/// are not seen. Watches nest: the inner one sees what is recorded in it. A step costs a few hundred bytes more while it is
/// watched.
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
    /// Learns the names of parameters. To be called before each step of a training run, as an optimizer makes new parameters; of
    /// graphs of steps without it, operations are named, but not modules.
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
        self.modules.extend(ModulePaths::of(model).modules);
    }

    /// What is kept by graphs that are alive, largest first. Before that, backward passes of one number have Burn free graphs
    /// that nobody holds; those of parameters that had no backward pass yet stay until they have one.
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
        // Of a graph, Burn frees one layer of operations at a time.
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

/// Burn frees graphs whose tensors are gone at the end of other backward passes: this is one.
pub(super) fn sweep(device: &Device) {
    drop(token(&device.clone().autodiff()).require_grad().backward());
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
    /// How many steps of it are alive: one for each time it ran.
    pub steps: u64,
    /// Bytes that they keep; a tensor that several keep counts for the first. Parameters do not count.
    pub bytes: u64,
}

/// What graphs that are alive keep. Made by [`GraphWatch::alive`], shown as a table.
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
    /// assert_eq!(watch.alive(&model).to_csv()?, "module,operation,steps,bytes\n0,linear,1,64\n");
    /// # drop(loss);
    /// # Ok::<(), std::io::Error>(())
    /// ```
    ///
    /// # Errors
    /// None are known: the rows are plain text and numbers in memory.
    pub fn to_csv(&self) -> io::Result<String> {
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
    /// assert!(watch.alive(&model).to_json()?.contains(r#""bytes": 64"#));
    /// # drop(loss);
    /// # Ok::<(), std::io::Error>(())
    /// ```
    ///
    /// # Errors
    /// None are known: the rows are plain text and numbers in memory.
    pub fn to_json(&self) -> io::Result<String> {
        Ok(serde_json::to_string_pretty(self)?)
    }
}

impl fmt::Display for LiveGraphs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::new();
        table.load_preset(presets::ASCII_MARKDOWN);
        table.set_header(["module", "operation", "steps alive", "bytes"]);
        let number = |text: String| Cell::new(text).set_alignment(CellAlignment::Right);
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
