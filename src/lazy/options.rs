use super::LazyError;
use super::cache::{OnProgress, Progress};
use burn::tensor::DType;
use glob::Pattern;
use std::fmt;
use std::sync::Arc;

/// Which parameters become lazy, and how they are read.
///
/// Patterns are globs: `*` is any text, `?` any character, `[abc]` one of these. A pattern matches a parameter, such as
/// `encoder.layers.0.linear.weight`, and everything in a module, such as `encoder.layers.0`.
#[derive(Clone)]
pub struct LazyOptions {
    pub(super) include: Vec<String>,
    pub(super) exclude: Vec<String>,
    pub(super) include_types: Vec<String>,
    pub(super) exclude_types: Vec<String>,
    pub(super) min_bytes: usize,
    pub(super) dtype: Option<DType>,
    pub(super) budget: Option<u64>,
    pub(super) prefetch: usize,
    pub(super) partial: bool,
    pub(super) on_progress: Option<OnProgress>,
}

impl Default for LazyOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl LazyOptions {
    /// Every parameter of two axes and more, from 64 KiB on; a budget of two weights, one of which is read ahead.
    pub fn new() -> Self {
        Self {
            include: vec![],
            exclude: vec![],
            include_types: vec![],
            exclude_types: vec![],
            min_bytes: 1 << 16,
            dtype: None,
            budget: None,
            prefetch: 1,
            partial: false,
            on_progress: None,
        }
    }

    /// Only parameters that this pattern matches, or another one that is included.
    pub fn include(mut self, pattern: impl Into<String>) -> Self {
        self.include.push(pattern.into());
        self
    }

    /// No parameter that this pattern matches.
    pub fn exclude(mut self, pattern: impl Into<String>) -> Self {
        self.exclude.push(pattern.into());
        self
    }

    /// Only parameters of modules of this type (such as `Linear`), or of another one that is included.
    pub fn include_type(mut self, name: impl Into<String>) -> Self {
        self.include_types.push(name.into());
        self
    }

    /// No parameters of modules of this type.
    pub fn exclude_type(mut self, name: impl Into<String>) -> Self {
        self.exclude_types.push(name.into());
        self
    }

    /// No parameter of fewer bytes. Those of one axis, and running statistics, are never lazy.
    pub fn with_min_bytes(mut self, bytes: usize) -> Self {
        self.min_bytes = bytes;
        self
    }

    /// The dtype of all floats in memory, whatever the file has.
    pub fn with_dtype(mut self, dtype: DType) -> Self {
        self.dtype = Some(dtype);
        self
    }

    /// So many bytes of lazy weights may be in memory, used or not. What does not fit is read again in the next pass. A weight
    /// that is larger than that is read nevertheless, and dropped behind its use.
    ///
    /// Without a budget: twice the largest weight.
    pub fn with_budget(mut self, bytes: u64) -> Self {
        self.budget = Some(bytes);
        self
    }

    /// So many weights are read before they are needed, on a thread of their own, as far as the budget allows; 0 for none.
    pub fn with_prefetch(mut self, weights: usize) -> Self {
        self.prefetch = weights;
        self
    }

    /// Parameters that the file does not have keep their own initialization.
    pub fn allow_partial(mut self) -> Self {
        self.partial = true;
        self
    }

    /// Is told of every lazy parameter when it is read for the first time, by the thread that read it.
    pub fn with_progress(mut self, on_progress: impl Fn(Progress<'_>) + Send + Sync + 'static) -> Self {
        self.on_progress = Some(Arc::new(on_progress));
        self
    }

    /// The rule by which parameters are chosen.
    pub(super) fn choice(&self) -> Result<Choice, LazyError> {
        let compile = |patterns: &[String]| {
            patterns.iter().map(|pattern| compile(pattern)).collect::<Result<Vec<_>, _>>()
        };
        Ok(Choice {
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

/// Names of parameters and of types of modules.
pub(super) struct Choice {
    include: Vec<Pattern>,
    exclude: Vec<Pattern>,
    include_types: Vec<String>,
    exclude_types: Vec<String>,
}

impl Choice {
    /// Whether a parameter is chosen, by its path and the type of the module it is in.
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
            .field("prefetch", &self.prefetch)
            .field("partial", &self.partial)
            .finish_non_exhaustive()
    }
}
