//! [`LazyCache`]: shows the cache of a loaded module to its user.
use super::{Shared, Slot, Statistics};
use crate::measure::human_bytes;
use std::fmt;
use std::sync::Arc;

/// Shows the lazy weights of a module at any time: which ones are in memory, which ones are held elsewhere, and what was read. Displays as
/// a few lines.
///
/// It keeps no weight alive: the cache frees its weights when the module and its clones are dropped.
///
/// ```
/// use burn::module::Module;
/// use burn::tensor::{Device, Tensor};
/// use burn_memsave::lazy::{LazyLoad, LazyOptions, WeightFile};
/// use burn_memsave::nn::LinearConfig;
///
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("model.bpk");
/// let (device, config) = (Device::flex(), LinearConfig::new(256, 256));
/// config.init(&device).save_file(&path)?;
/// let file = WeightFile::open(&path)?;
/// let (linear, report) = config.init(&device).lazy_load(&file, &LazyOptions::new())?;
///
/// let cache = report.cache;
/// assert_eq!(cache.cached_bytes(), 0);
/// linear.forward(Tensor::<2>::ones([1, 256], &device));
/// assert_eq!((cache.cached(), cache.statistics().reads), (vec!["weight"], 1));
/// drop(linear);
/// assert_eq!(cache.cached_bytes(), 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct LazyCache(pub(super) Arc<Shared>);

impl LazyCache {
    /// The bytes of lazy weights that are in memory now, in use or not.
    pub fn cached_bytes(&self) -> u64 {
        self.0.pool.bytes() as u64
    }

    /// The most bytes of lazy weights that may be in memory.
    pub fn budget(&self) -> u64 {
        self.0.settings.budget as u64
    }

    /// The bytes of lazy weights that stay on devices now.
    pub fn device_bytes(&self) -> u64 {
        self.0.settings.device_budget.used()
    }

    /// What was read so far, and how often and how long layers waited.
    pub fn statistics(&self) -> Statistics {
        self.0.lock().statistics
    }

    /// Paths of the lazy parameters whose weights are in the cache now.
    pub fn cached(&self) -> Vec<&str> {
        let state = self.0.lock();
        self.paths(|index| matches!(state.slots[index], Slot::Present(_)))
    }

    /// Paths of the lazy parameters whose weights something outside the cache holds now. Between a forward pass and its backward pass these
    /// are the weights of Burn's layers, which keep what layers of this library read again.
    pub fn held(&self) -> Vec<&str> {
        let state = self.0.lock();
        self.paths(|index| {
            let cached = matches!(state.slots[index], Slot::Present(_));
            state.last_read[index].strong_count() > usize::from(cached)
        })
    }

    /// Says which weights are used next, in this order, by the paths of their parameters or of modules that they are in. They are read ahead
    /// before what is expected otherwise, as far as the budget allows: until they are used, weights that are used later make room for them,
    /// and they stay. Each call replaces what the call before said. Returns the number of lazy weights with these paths, so 0 for a layer
    /// that is not lazy.
    ///
    /// A cache learns the order of passes that repeat by itself. A mixture of experts uses other weights for every token: call this when its
    /// router has chosen. Without a thread that reads ahead ([`with_prefetch(0)`](super::super::LazyOptions::with_prefetch)) nothing is read
    /// early.
    ///
    /// ```
    /// use burn::module::Module;
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave::lazy::{LazyCache, LazyLoad, LazyOptions, WeightFile};
    /// use burn_memsave::nn::{Linear, LinearConfig};
    ///
    /// #[derive(Module, Debug)]
    /// struct Mixture {
    ///     router: Linear,
    ///     experts: Vec<Linear>,
    /// }
    ///
    /// impl Mixture {
    ///     /// The mean of the two experts with the highest scores.
    ///     fn forward(&self, x: Tensor<2>, cache: &LazyCache) -> Tensor<2> {
    ///         let (_, chosen) = self.router.forward(x.clone()).topk_with_indices(2, 1);
    ///         let chosen: Vec<i64> = chosen.into_data().convert::<i64>().iter().collect();
    ///         cache.expect(chosen.iter().map(|expert| format!("experts.{expert}")));
    ///         let outputs = chosen.iter().map(|&expert| self.experts[expert as usize].forward(x.clone()));
    ///         outputs.reduce(|sum, y| sum + y).expect("two were chosen") / 2.0
    ///     }
    /// }
    ///
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("model.bpk");
    /// let (device, expert) = (Device::flex(), LinearConfig::new(128, 128));
    /// let model = Mixture {
    ///     router: LinearConfig::new(128, 16).init(&device),
    ///     experts: (0..16).map(|_| expert.init(&device)).collect(),
    /// };
    /// model.clone().save_file(&path)?;
    /// let options = LazyOptions::new().include("experts").with_budget(4 << 16); // four of sixteen
    /// let (lazy, report) = model.clone().lazy_load(&WeightFile::open(&path)?, &options)?;
    /// let x = Tensor::<2>::ones([1, 128], &device);
    /// lazy.forward(x, &report.cache);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn expect(&self, paths: impl IntoIterator<Item = impl AsRef<str>>) -> usize {
        let weights: Vec<usize> = paths.into_iter().flat_map(|path| self.0.at_path(path.as_ref())).collect();
        let found = weights.len();
        self.0.lock().announce(weights);
        self.0.changed.notify_all();
        found
    }

    fn paths(&self, of: impl Fn(usize) -> bool) -> Vec<&str> {
        let weights = self.0.weights.iter().enumerate();
        weights.filter(|(index, _)| of(*index)).map(|(_, weight)| &weight.path[..]).collect()
    }
}

impl fmt::Display for LazyCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [cached, budget] = [self.cached_bytes(), self.budget()].map(human_bytes);
        write!(f, "{cached} of lazy weights in memory, of at most {budget}\n{}", self.statistics())?;
        if self.device_bytes() > 0 {
            write!(f, "\n{} stay on devices", human_bytes(self.device_bytes()))?;
        }
        let held = self.held();
        if !held.is_empty() {
            write!(
                f,
                "\nheld by somebody (stock layers do so until the backward pass): {}",
                held.join(", ")
            )?;
        }
        Ok(())
    }
}

impl fmt::Debug for LazyCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LazyCache({} weights)", self.0.weights.len())
    }
}
