//! [`LazyLoad`]: loads a module whose weights stay in their file. First a [`LoadPlan`] finds the tensor of each parameter, or returns an
//! error; then parameters are loaded or made lazy.
use super::cache::{Cache, CachedWeight, Settings};
use super::report::ReportedParameter;
use super::source::Entry;
use super::targets::{ElementKind, Target, Targets};
use super::words::into_bytes;
use super::{LazyError, LazyOptions, LazyReport, WeightFile};
use crate::lazy_paths::lazy_paths;
use burn::module::{Module, ModuleMapper, Param, ParamId, Parameter, Reparameterizer};
use burn::tensor::{
    AllocationProperty, Bool, BoolStore, Bytes, DType, Device, Int, Shape, Tensor, TensorData, kind::Basic,
};
use burn_memsave_layers::follow_path;
use burn_memsave_layers::frozen::{
    DeviceBudget, FrozenWeight, LazyWeight, PackedElements, PackedRows, Resident,
};
use burn_memsave_layers::visit::VisitPath;
use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Loads a module, Burn's or this library's, whose weights stay in their file.
pub trait LazyLoad: Module {
    /// Loads a module. Parameters that the options select become lazy: they are read from the file when their layer runs. The others are
    /// read now. The initial values of a module that was just initialized are never allocated, since Burn initializes parameters at their
    /// first use.
    ///
    /// Load a module on the device where it will run. If you move it after it was used or cloned, or after adapters were attached, it takes
    /// as much memory as its weights on the other device.
    ///
    /// Lazy parameters are frozen. In training, layers of this library read them again in the backward pass, where Burn's layers keep them;
    /// see [`LazyCache::held`](super::LazyCache::held).
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
    /// let eager = config.init(&device);
    /// eager.clone().save_file(&path)?;
    ///
    /// let file = WeightFile::open(&path)?;
    /// let (lazy, report) = config.init(&device).lazy_load(&file, &LazyOptions::new())?;
    /// assert_eq!((report.lazy_bytes(), report.resident_bytes()), (256 * 256 * 4, 256 * 4));
    ///
    /// let x = Tensor::<2>::ones([1, 256], &device);
    /// lazy.forward(x.clone()).into_data().assert_eq(&eager.forward(x).into_data(), true);
    /// println!("{report}");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Returns an error if the file has no tensor for a parameter, or one of another shape or kind; if a parameter has a
    /// reparameterization already (attach adapters afterwards); and if a tensor cannot be read, of those that are read now, or of a dtype
    /// that Burn does not have. [`WeightFile::check`] lists everything that does not fit.
    fn lazy_load(self, file: &WeightFile, options: &LazyOptions) -> Result<(Self, LazyReport), LazyError> {
        let mut targets = Targets::default();
        self.visit(&mut targets);
        let plan = LoadPlan::new(targets, file, options)?;
        let cache = plan.cache(options);

        let mut floats = LoadFloats { cache: cache.clone(), plan: &plan, error: None };
        let module = self.apply_reparameterization(&mut floats);
        floats.error.map_or(Ok(()), Err)?;
        let mut rest =
            LoadRest { path: VisitPath::default(), plan: &plan, lazy: lazy_paths(&module), error: None };
        let module = module.map(&mut rest);
        rest.error.map_or(Ok(()), Err)?;

        let lazy = lazy_paths(&module);
        let (lazy, resident) = plan.reported(&lazy).partition(|parameter| lazy.contains(&parameter.path));
        let (unused, warnings, cache) = (plan.unused(file), plan.warnings(file), cache.handle());
        let missing = plan.missing;
        Ok((module, LazyReport { lazy, resident, missing, unused, warnings, cache }))
    }
}

impl<M: Module> LazyLoad for M {}

/// A parameter, and the tensor it is loaded from.
struct Planned {
    path: String,
    /// The name of its tensor.
    name: String,
    /// The type of the module it is in.
    module: String,
    entry: Entry,
    dtype: DType,
    /// Its index in the cache, if it becomes lazy.
    index: Option<usize>,
}

/// The tensor for a parameter, of its kind and shape; `None` if the file has none.
pub(super) fn find_fitting(file: &WeightFile, target: &Target) -> Result<Option<(String, Entry)>, LazyError> {
    let Target { path, short_path, containers, kind, shape, .. } = target;
    let Some((name, entry)) = file.find(&[path.clone(), short_path.clone()], containers)? else {
        return Ok(None);
    };
    let (file, tensor, parameter) = (entry.file.clone(), name.clone(), path.clone());
    let (stored, found) = (entry.tensor.dtype, entry.shape());
    if !kind.accepts(stored) {
        return Err(LazyError::DType { file, tensor, parameter, kind: kind.name(), found: stored });
    }
    if found != *shape {
        let [expected, found] = [shape.to_vec(), found.to_vec()].map(Vec::into_boxed_slice);
        return Err(LazyError::Shape { file, tensor, parameter, expected, found });
    }
    Ok(Some((name, entry)))
}

/// The type of the module that a parameter is in.
pub(super) fn module_type(containers: &[String]) -> &str {
    let module = containers.iter().rev().find_map(|container| container.split_once(':'));
    module.map_or("", |(_, module)| module)
}

/// The names in the file that are not among those `used`.
pub(super) fn unused<'a>(file: &WeightFile, used: impl Iterator<Item = &'a String>) -> Vec<String> {
    let used: BTreeSet<_> = used.collect();
    file.contents().names().filter(|name| !used.contains(name)).cloned().collect()
}

/// What fits by its shape but is likely to be wrong.
pub(super) fn warning(file: &WeightFile, path: &str, module: &str, entry: &Entry) -> Option<String> {
    let shape = entry.shape();
    let is_square = matches!(shape[..], [rows, columns] if rows == columns && rows > 1);
    let suspicious = is_square && module == "Linear" && file.contents().of_pytorch && !file.has_adapter();
    suspicious.then(|| {
        format!("PyTorch wrote the square weight {path}, which has no transposing adapter: see WeightFile::with_pytorch_adapter")
    })
}

/// What is loaded from where, decided before anything is read.
struct LoadPlan {
    planned: Vec<Planned>,
    by_path: HashMap<String, usize>,
    missing: Vec<String>,
}

impl LoadPlan {
    fn new(targets: Targets, file: &WeightFile, options: &LazyOptions) -> Result<Self, LazyError> {
        let selection = options.selection()?;
        let mut plan = Self { planned: vec![], by_path: HashMap::new(), missing: vec![] };
        // What is packed is f32, and so is the rest of its module.
        let is_packed = file.contents().entries.values().any(|entry| entry.packing().is_some());
        let default = is_packed.then_some(DType::F32);
        let mut count = 0;
        for target in targets.targets {
            if target.reparameterized {
                return Err(LazyError::Reparameterized { parameter: target.path });
            }
            let Some((name, entry)) = find_fitting(file, &target)? else {
                plan.missing.push(target.path);
                continue;
            };
            let Target { path, containers, kind, rank, .. } = target;
            let (stored, shape) = (entry.tensor.dtype, entry.shape());
            let module = module_type(&containers).to_owned();
            let dtype = match kind {
                ElementKind::Float => {
                    entry.float().map_or(stored, |float| options.dtype.or(default).unwrap_or(float))
                }
                _ => stored,
            };
            let lazy = kind == ElementKind::Float
                && dtype.is_float()
                && rank > 1
                && shape.num_elements() > 1
                && entry.len_as(dtype) >= options.min_bytes
                && selection.matches(&path, &module);
            let index = lazy.then_some(count);
            count += usize::from(lazy);
            plan.by_path.insert(path.clone(), plan.planned.len());
            plan.planned.push(Planned { path, name, module, entry, dtype, index });
        }
        match &plan.missing[..] {
            [first, others @ ..] if !options.allow_partial => Err(file.missing(first, others)),
            _ => Ok(plan),
        }
    }

    fn get(&self, path: &str) -> Option<&Planned> {
        self.by_path.get(path).map(|&index| &self.planned[index])
    }

    fn cache(&self, options: &LazyOptions) -> Arc<Cache> {
        let lazy = self.planned.iter().filter(|planned| planned.index.is_some());
        let device_budget = DeviceBudget::new(options.device_budget);
        let weights: Vec<_> = lazy
            .map(|planned| CachedWeight {
                path: planned.path.clone(),
                entry: planned.entry.clone(),
                dtype: planned.dtype,
                by_rows: planned.module == "Embedding",
                resident: Resident::new(device_budget.clone(), planned.entry.len_as(planned.dtype) as u64),
            })
            .collect();
        let largest =
            weights.iter().filter(|weight| !weight.by_rows).map(CachedWeight::footprint).max().unwrap_or(0);
        let budget = options
            .budget
            .map_or(largest.saturating_mul(2), |bytes| usize::try_from(bytes).unwrap_or(usize::MAX));
        let (prefetch, on_progress) = (options.prefetch, options.on_progress.clone());
        let settings = Settings { budget, device_budget, prefetch, on_progress };
        Arc::new(Cache::new(weights, settings))
    }

    fn unused(&self, file: &WeightFile) -> Vec<String> {
        unused(file, self.planned.iter().map(|planned| &planned.name))
    }

    fn warnings(&self, file: &WeightFile) -> Vec<String> {
        self.planned
            .iter()
            .filter_map(|planned| warning(file, &planned.path, &planned.module, &planned.entry))
            .collect()
    }

    fn reported(&self, lazy: &BTreeSet<String>) -> impl Iterator<Item = ReportedParameter> {
        self.planned.iter().map(|planned| ReportedParameter {
            path: planned.path.clone(),
            module: planned.module.clone(),
            tensor: planned.name.clone(),
            shape: planned.entry.shape(),
            stored: planned.entry.tensor.dtype,
            packing: planned.entry.packing().map(|packing| packing.name().to_owned()),
            dtype: planned.dtype,
            bytes: planned.entry.len_as(planned.dtype) as u64,
            mapped: lazy.contains(&planned.path) && planned.entry.map(planned.dtype).is_some(),
        })
    }
}

impl Planned {
    /// Reads the tensor now, and returns it with the identifier that it has in the file, if any.
    fn load<const D: usize, K: Basic>(
        &self,
        device: &Device,
    ) -> Result<(Tensor<D, K>, Option<ParamId>), LazyError> {
        let Self { entry, dtype, .. } = self;
        let bytes = entry.read(*dtype)?;
        if let DType::Bool(BoolStore::Native | BoolStore::U8) = dtype
            && let Some(byte) = bytes.iter().find(|&&byte| byte > 1)
        {
            return Err(entry.error(format!("{byte} is not a bool")));
        }
        let data = TensorData::from_bytes(bytes, entry.shape(), *dtype);
        // A backend panics at a scheme of packed weights that it does not know.
        let tensor = catch_unwind(AssertUnwindSafe(|| Tensor::from_data(data, (device, *dtype))))
            .map_err(|_| entry.error(format!("{device:?} cannot hold {dtype:?}")))?;
        Ok((tensor, entry.tensor.param_id.map(ParamId::from)))
    }
}

/// Loads the float parameters: attaches lazy weights to those that become lazy, and reads the others.
struct LoadFloats<'a> {
    cache: Arc<Cache>,
    plan: &'a LoadPlan,
    error: Option<LazyError>,
}

impl Reparameterizer for &mut LoadFloats<'_> {
    type Reparam = LazyWeight;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        mut param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<LazyWeight>) {
        let Some(planned) = self.plan.get(path) else { return (param, None) };
        if let Some(index) = planned.index {
            if let Some(id) = planned.entry.tensor.param_id {
                param.id = ParamId::from(id);
            }
            let weight = FileWeight { cache: self.cache.clone(), index };
            let (param, lazy) = LazyWeight::attach(param, Arc::new(weight));
            return (param, Some(lazy));
        }
        (load_into(planned, param, &mut self.error), None)
    }
}

/// Loads the tensor into a parameter. After the first error, which is stored, parameters stay as they are.
fn load_into<const D: usize, K: Basic>(
    planned: &Planned,
    param: Param<Tensor<D, K>>,
    error: &mut Option<LazyError>,
) -> Param<Tensor<D, K>>
where
    Tensor<D, K>: Parameter,
{
    if error.is_some() {
        return param;
    }
    match planned.load(&param.lazy_device()) {
        Ok((tensor, id)) => {
            let id = id.unwrap_or(param.id);
            param.transform_for_load(tensor, id)
        }
        Err(failed) => {
            *error = Some(failed);
            param
        }
    }
}

/// Loads what [`LoadFloats`] cannot: integers, booleans, and running statistics, which drop a reparameterization.
struct LoadRest<'a> {
    path: VisitPath,
    plan: &'a LoadPlan,
    lazy: BTreeSet<String>,
    error: Option<LazyError>,
}

macro_rules! load {
    ($map:ident, $kind:ty) => {
        fn $map<const D: usize>(&mut self, param: Param<Tensor<D, $kind>>) -> Param<Tensor<D, $kind>> {
            match self.plan.get(&self.path.joined()) {
                Some(planned) => load_into(planned, param, &mut self.error),
                None => param,
            }
        }
    };
}

impl ModuleMapper for LoadRest<'_> {
    follow_path!();
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let path = self.path.joined();
        match self.plan.get(&path) {
            Some(planned) if planned.index.is_some() && !self.lazy.contains(&path) => {
                load_into(planned, param, &mut self.error)
            }
            _ => param,
        }
    }
    load!(map_int, Int);
    load!(map_bool, Bool);
}

/// A weight in a file, read through the cache.
#[derive(Debug)]
struct FileWeight {
    cache: Arc<Cache>,
    index: usize,
}

impl FileWeight {
    fn weight(&self) -> &CachedWeight {
        self.cache.weight(self.index)
    }

    /// Consecutive rows as they are stored, in the dtype of the weight.
    fn stored_rows(&self, rows: Range<usize>) -> Bytes {
        let bytes = self.cache.row_range(self.index, rows).unwrap_or_else(|error| panic!("{error}"));
        Bytes::from_shared(bytes, AllocationProperty::Other)
    }

    /// The bytes as they are stored, in the dtype of the weight.
    fn stored(&self) -> Bytes {
        let bytes = self.cache.get(self.index).unwrap_or_else(|error| panic!("{error}"));
        Bytes::from_shared(bytes, AllocationProperty::Other)
    }
}

impl FrozenWeight for FileWeight {
    fn shape(&self) -> Shape {
        self.weight().entry.shape()
    }

    fn dtype(&self) -> DType {
        self.weight().dtype
    }

    fn resident(&self) -> Option<&Resident> {
        Some(&self.weight().resident)
    }

    fn read(&self) -> TensorData {
        let CachedWeight { entry, dtype, .. } = self.weight();
        let bytes = match entry.transposed {
            // Not for a layer but for a file, for example: past the cache, which has it in another order.
            true => entry.read(*dtype).unwrap_or_else(|error| panic!("{error}")),
            false => self.stored(),
        };
        TensorData::from_bytes(bytes, self.shape(), *dtype)
    }

    fn read_transposed(&self) -> Option<TensorData> {
        let CachedWeight { entry, dtype, .. } = self.weight();
        entry.transposed.then(|| TensorData::from_bytes(self.stored(), entry.tensor.shape.clone(), *dtype))
    }

    fn read_rows(&self, rows: &[usize]) -> TensorData {
        let mut shape = self.shape();
        let width = shape[1..].iter().product::<usize>() * self.dtype().size();
        shape[0] = rows.len();
        let bytes = match self.weight().entry.transposed {
            // No row lies in one piece. (Layers that read rows have no such weights.)
            true => {
                let whole = self.read();
                let rows = rows.iter().flat_map(|row| &whole.bytes()[row * width..][..width]);
                Bytes::from_bytes_vec(rows.copied().collect())
            }
            false => {
                let words = self.cache.rows(self.index, rows).unwrap_or_else(|error| panic!("{error}"));
                into_bytes(words, rows.len() * width)
            }
        };
        TensorData::from_bytes(bytes, shape, self.dtype())
    }

    fn read_row_range(&self, rows: Range<usize>) -> TensorData {
        if self.weight().entry.transposed {
            return self.read_rows(&rows.collect::<Vec<_>>());
        }
        let mut shape = self.shape();
        shape[0] = rows.len();
        TensorData::from_bytes(self.stored_rows(rows), shape, self.dtype())
    }

    fn columns_at_once(&self) -> Option<usize> {
        let CachedWeight { entry, dtype, .. } = self.weight();
        let fits = self.weight().footprint() <= self.cache.budget() || self.cache.keeps_on_devices();
        // Of a mapped weight nothing is copied, and without a place in the file every block would need all of it.
        if !entry.transposed || fits || entry.map(*dtype).is_some() || !entry.has_parts() {
            return None;
        }
        let [columns, rows] = entry.tensor.shape.dims();
        let at_once = (BLOCK / (rows * dtype.size()).max(1)).max(1);
        (at_once < columns).then_some(at_once)
    }

    fn packed_rows(&self, of_transpose: bool) -> Option<&dyn PackedRows> {
        let CachedWeight { entry, dtype, .. } = self.weight();
        let is_matrix = entry.packing().is_some() && entry.tensor.shape.num_dims() == 2;
        if !is_matrix || entry.transposed != of_transpose || *dtype != entry.tensor.dtype {
            return None;
        }
        Some(self)
    }

    fn read_transposed_columns(&self, columns: Range<usize>) -> TensorData {
        let mut shape = self.weight().entry.tensor.shape.clone();
        shape[0] = columns.len();
        TensorData::from_bytes(self.stored_rows(columns), shape, self.dtype())
    }
}

impl PackedRows for FileWeight {
    fn read_packed(&self, rows: Range<usize>) -> Box<dyn PackedElements + '_> {
        let entry = &self.weight().entry;
        let packing = entry.packing().expect("only packed weights give their rows");
        let width = entry.tensor.shape[1];
        let read = packing.read(rows.start * width, rows.len() * width);
        read.unwrap_or_else(|error| panic!("{}", entry.error(error)))
    }

    fn were_used(&self) {
        let entry = &self.weight().entry;
        let unchanged = entry.packing().map_or(Ok(()), |packing| packing.check_unchanged());
        unchanged.unwrap_or_else(|error| panic!("{}", entry.error(error)));
        self.cache.count_unpacked(self.index);
    }
}

/// The bytes of a matrix that does not fit into the budget that a thread reads at a time, beside the cache.
const BLOCK: usize = 16 << 20;
