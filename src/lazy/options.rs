//! [`LazyOptions`]: which parameters become lazy, how many of their bytes stay in memory, and how they are read.
use super::LazyError;
use super::cache::{OnProgress, Progress};
use burn::tensor::DType;
use glob::Pattern;
use std::fmt;
use std::sync::Arc;

/// Which parameters become lazy, and how they are read.
///
/// Patterns are globs: `*` is any text, `?` any character, `[abc]` one of these characters. A pattern matches the path of a
/// parameter, such as `encoder.layers.0.linear.weight`, or that of a module, such as `encoder.layers.0`, with everything in it.
///
/// ```
/// use burn_memsave::lazy::LazyOptions;
///
/// let options = LazyOptions::new()
///     .include("encoder.*")
///     .exclude("*.word_embeddings")
///     .with_budget(64 << 20) // at most 64 MiB of weights in memory
///     .with_prefetch(2); // the next two weights are read ahead
/// ```
#[derive(Clone)]
pub struct LazyOptions {
    pub(super) include: Vec<String>,
    pub(super) exclude: Vec<String>,
    pub(super) include_types: Vec<String>,
    pub(super) exclude_types: Vec<String>,
    pub(super) min_bytes: usize,
    pub(super) dtype: Option<DType>,
    pub(super) budget: Option<u64>,
    pub(super) device_budget: u64,
    pub(super) prefetch: usize,
    pub(super) allow_partial: bool,
    pub(super) on_progress: Option<OnProgress>,
}

impl Default for LazyOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl LazyOptions {
    /// All parameters of at least two axes and 64 KiB become lazy. The budget is twice the largest weight, and one weight
    /// is read ahead.
    pub fn new() -> Self {
        Self {
            include: vec![],
            exclude: vec![],
            include_types: vec![],
            exclude_types: vec![],
            min_bytes: 1 << 16,
            dtype: None,
            budget: None,
            device_budget: 0,
            prefetch: 1,
            allow_partial: false,
            on_progress: None,
        }
    }

    /// Makes only parameters lazy that this pattern, or another included one, matches.
    pub fn include(mut self, pattern: impl Into<String>) -> Self {
        self.include.push(pattern.into());
        self
    }

    /// Excludes parameters that this pattern matches: they are read when the module is loaded.
    pub fn exclude(mut self, pattern: impl Into<String>) -> Self {
        self.exclude.push(pattern.into());
        self
    }

    /// Makes only parameters lazy that are in modules of this type, such as `Linear`, or of another included type.
    pub fn include_type(mut self, name: impl Into<String>) -> Self {
        self.include_types.push(name.into());
        self
    }

    /// Excludes the parameters of modules of this type.
    pub fn exclude_type(mut self, name: impl Into<String>) -> Self {
        self.exclude_types.push(name.into());
        self
    }

    /// Excludes parameters of fewer bytes. Parameters of one axis and running statistics are never lazy.
    pub fn with_min_bytes(mut self, bytes: usize) -> Self {
        self.min_bytes = bytes;
        self
    }

    /// Converts all floats to this dtype when they are read. By default they keep the dtype of the file; if some of the file are
    /// [packed](super::TensorInfo::packing), all are f32.
    pub fn with_dtype(mut self, dtype: DType) -> Self {
        self.dtype = Some(dtype);
        self
    }

    /// The dtype that floats are converted to, if one was chosen.
    pub fn dtype(&self) -> Option<DType> {
        self.dtype
    }

    /// The most bytes of lazy weights that may be in memory, in use or not. Weights that do not fit are read again in the next pass. A
    /// weight larger than the budget is still read, and dropped after its use. If it is the weight of a dense layer in PyTorch's layout, or a
    /// table that is used as a head, blocks of 16 MiB are read instead where the layer can use them, beside the budget.
    ///
    /// The default is twice the largest weight.
    pub fn with_budget(mut self, bytes: u64) -> Self {
        self.budget = Some(bytes);
        self
    }

    /// The most bytes of lazy weights that stay on a device (CUDA, WebGPU, a compute server) after their use. If the module is on several
    /// devices, this applies to each. The weights that are used first stay until the module is dropped. The others are sent to the device
    /// whenever they are used, and are there only while a layer uses them, as are the rows of embeddings, and the blocks of rows that a
    /// head reads of an embedding that it is tied to.
    ///
    /// The default is 0. On the CPU nothing is sent, and only [`with_budget`](Self::with_budget) counts.
    pub fn with_device_budget(mut self, bytes: u64) -> Self {
        self.device_budget = bytes;
        self
    }

    /// The number of weights that are read ahead, as far as the budget allows, on a thread of their own. With 0 there is no such thread.
    /// The default is 1.
    ///
    /// Weights are read ahead into host memory. A weight is sent to a device when its layer is called, without waiting for it: meanwhile
    /// the device still computes the layers before it.
    pub fn with_prefetch(mut self, weights: usize) -> Self {
        self.prefetch = weights;
        self
    }

    /// Whether parameters without a tensor in the file keep their initialization. By default they are an error.
    pub fn with_allow_partial(mut self, allow_partial: bool) -> Self {
        self.allow_partial = allow_partial;
        self
    }

    /// Calls this function for every lazy parameter when it is read for the first time, on the thread that read it.
    pub fn with_progress(mut self, on_progress: impl Fn(Progress<'_>) + Send + Sync + 'static) -> Self {
        self.on_progress = Some(Arc::new(on_progress));
        self
    }

    /// The patterns, compiled.
    pub(super) fn selection(&self) -> Result<Selection, LazyError> {
        let compile = |patterns: &[String]| {
            patterns.iter().map(|pattern| compile(pattern)).collect::<Result<Vec<_>, _>>()
        };
        Ok(Selection {
            include: compile(&self.include)?,
            exclude: compile(&self.exclude)?,
            include_types: self.include_types.clone(),
            exclude_types: self.exclude_types.clone(),
        })
    }
}

fn compile(pattern: &str) -> Result<Pattern, LazyError> {
    Pattern::new(pattern)
        .map_err(|error| LazyError::Pattern { pattern: pattern.into(), reason: error.to_string() })
}

/// The parameters that become lazy, by their paths and the types of their modules.
pub(super) struct Selection {
    include: Vec<Pattern>,
    exclude: Vec<Pattern>,
    include_types: Vec<String>,
    exclude_types: Vec<String>,
}

impl Selection {
    /// Whether a parameter with this path, in a module of this type, is selected.
    pub fn matches(&self, path: &str, module: &str) -> bool {
        let ends = path.match_indices('.').map(|(end, _)| end).chain([path.len()]);
        let matched = |patterns: &[Pattern]| {
            ends.clone().any(|end| patterns.iter().any(|pattern| pattern.matches(&path[..end])))
        };
        let of_type = |types: &[String]| types.iter().any(|name| name == module);
        (self.include.is_empty() || matched(&self.include))
            && (self.include_types.is_empty() || of_type(&self.include_types))
            && !matched(&self.exclude)
            && !of_type(&self.exclude_types)
    }
}

impl fmt::Debug for LazyOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LazyOptions")
            .field("include", &self.include)
            .field("exclude", &self.exclude)
            .field("include_types", &self.include_types)
            .field("exclude_types", &self.exclude_types)
            .field("min_bytes", &self.min_bytes)
            .field("dtype", &self.dtype)
            .field("budget", &self.budget)
            .field("device_budget", &self.device_budget)
            .field("prefetch", &self.prefetch)
            .field("allow_partial", &self.allow_partial)
            .finish_non_exhaustive()
    }
}
