//! Frozen weights that live elsewhere, in a file for example, until an operation reads them.
//!
//! A [`FrozenWeight`] is read whenever its parameter is used, and dropped behind the operation. It is attached to a parameter of
//! any module, Burn's or this library's, as a [`LazyWeight`]. The layers of this library read it again in the backward pass,
//! too, where a stock layer keeps the tensor; embeddings read only the rows that are asked for.
//!
//! `burn_memsave::lazy` reads from files, with a cache.
//!
//! ```
//! use burn::module::{Module, Param, Reparameterizer};
//! use burn::tensor::{DType, Device, Shape, Tensor, TensorData};
//! use burn_memsave_layers::frozen::{FrozenWeight, LazyWeight};
//! use burn_memsave_layers::nn::LinearConfig;
//! use std::sync::Arc;
//!
//! #[derive(Debug)]
//! struct Ones(Shape);
//! impl FrozenWeight for Ones {
//!     fn shape(&self) -> Shape {
//!         self.0.clone()
//!     }
//!     fn dtype(&self) -> DType {
//!         DType::F32
//!     }
//!     fn read(&self) -> TensorData {
//!         TensorData::ones::<f32, _>(self.0.clone())
//!     }
//! }
//!
//! struct AllOnes;
//! impl Reparameterizer for AllOnes {
//!     type Reparam = LazyWeight;
//!     fn reparameterize<const D: usize>(
//!         &mut self,
//!         _path: &str,
//!         param: Param<Tensor<D>>,
//!     ) -> (Param<Tensor<D>>, Option<LazyWeight>) {
//!         if D == 1 {
//!             return (param, None);
//!         }
//!         let weight = Arc::new(Ones(param.lazy_shape()));
//!         let (param, lazy) = LazyWeight::attach(param, weight);
//!         (param, Some(lazy))
//!     }
//! }
//!
//! let device = Device::flex();
//! let linear = LinearConfig::new(4, 8).with_bias(false).init(&device).apply_reparameterization(AllOnes);
//! let y = linear.forward(Tensor::<2>::ones([1, 4], &device));
//! y.into_data().assert_eq(&TensorData::new(vec![4.0f32; 8], [1, 8]), true);
//! ```
use crate::burn_internals::{REPARAMETERIZATION, is_changed_by};
use crate::ops::node_id;
#[cfg(feature = "ndarray")]
use burn::backend::DispatchDevice;
use burn::backend::{
    Backend,
    autodiff::NodeId,
    tensor::{Device as BackendDevice, FloatTensor},
};
use burn::module::{
    Content, LoraAdapter, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper, ModuleVisitor, Param,
    ParamId, ParamMapper, Reparameterization,
};
use burn::tensor::{Bytes, DType, Device, Int, Shape, Tensor, TensorData};
use core::any::Any;
use core::cell::{Cell, RefCell};
use core::fmt::Debug;
use core::ops::Range;
use std::collections::VecDeque;
use std::sync::{Arc, OnceLock, Weak};

/// A weight that can be read again and again, always the same.
pub trait FrozenWeight: Debug + Send + Sync {
    /// Its shape.
    fn shape(&self) -> Shape;

    /// The dtype in which it is read.
    fn dtype(&self) -> DType;

    /// Reads it.
    ///
    /// # Panics
    ///
    /// Panics if it cannot be read any more: a forward pass has no other way to fail.
    fn read(&self) -> TensorData;

    /// Reads the rows (entries of the first axis) of these indices, in their order.
    ///
    /// # Panics
    ///
    /// As [`read`](Self::read), and for an index beyond the last row.
    fn read_rows(&self, rows: &[usize]) -> TensorData {
        let (table, mut shape) = (self.read(), self.shape());
        let size = table.bytes().len() / shape[0].max(1);
        let bytes: Vec<u8> =
            rows.iter().flat_map(|row| &table.bytes()[row * size..][..size]).copied().collect();
        shape[0] = rows.len();
        TensorData::from_bytes(Bytes::from_bytes_vec(bytes), shape, self.dtype())
    }
}

/// The reparameterization of a parameter whose value is a [`FrozenWeight`].
///
/// The parameter itself holds a stand-in of the right shape that takes no memory. It is frozen: a use of it while it requires a
/// gradient panics. [`Module::apply_lora`] attaches its adapter on top, under the path it has on any other weight
/// (`linear.weight.lora.a`). Records hold the weight; a weight of floats that a record brings replaces the lazy one. Other
/// mappers of values (`cast`, `quantize_weights`) want `materialize` before. A weight that its module transposes where it loads
/// it ([`LinearLayout::Col`](burn::nn::LinearLayout)) is kept for the backward pass.
#[derive(Clone, Debug)]
pub struct LazyWeight {
    weight: Arc<dyn FrozenWeight>,
    adapter: Option<LoraAdapter>,
    /// What the module does to a weight of a record: a `ParamMapper<Tensor<D>>`, if it does anything.
    mapper: Option<Arc<dyn Any + Send + Sync>>,
    id: ParamId,
    device: Device,
    /// Of the parameter.
    dtype: DType,
    /// Whether the parameter holds something else than its stand-in by now.
    replaced: OnceLock<bool>,
}

impl LazyWeight {
    /// Gives a parameter this weight, without initializing it: the parameter with a stand-in, and what makes it lazy.
    ///
    /// The weight has the shape that a record of the parameter has.
    pub fn attach<const D: usize>(
        param: Param<Tensor<D>>,
        weight: Arc<dyn FrozenWeight>,
    ) -> (Param<Tensor<D>>, Self) {
        let (id, device) = (param.id, param.lazy_device());
        // Neither initializes the parameter nor changes what its clones share with it.
        LOADED.take();
        let (shape, dtype) = (weight.shape(), weight.dtype());
        let (_, _, mapper) = param.transform_for_load(stand_in(shape.clone(), dtype, &device), id).consume();
        // Ours, of a weight before, is always there, and says whether the one below it does anything.
        let maps = LOADED.take().map_or_else(|| is_changed_by(&mapper), |loaded| loaded.maps);
        let mapper = Arc::new(mapper);

        let on_init = mapper.clone();
        let init = move |device: &Device, require_grad| {
            load(&on_init, stand_in(shape, dtype, device)).set_require_grad(require_grad)
        };
        let on_load = mapper.clone();
        let param = Param::uninitialized(id, init, device.clone(), false, weight.shape());
        let param = param.load_mapper(move |value| {
            let value = load(&on_load, value);
            LOADED.set(Some(Loaded { id, maps, dtype: value.dtype() }));
            value
        });
        // The parameter outlives the weight where it is materialized.
        let (of, on_save) = (Arc::downgrade(&weight), mapper.clone());
        let param = param.save_mapper(move |base| match is_stand_in(&base) {
            true => saved(&of.upgrade().expect("a module that is saved has its weights"), base),
            false => on_save.on_save(base),
        });
        let mapper = maps.then_some(mapper as Arc<dyn Any + Send + Sync>);
        (param, Self { weight, adapter: None, mapper, id, device, dtype, replaced: OnceLock::new() })
    }

    /// The weight.
    pub fn weight(&self) -> &Arc<dyn FrozenWeight> {
        &self.weight
    }

    /// The low-rank adapter on the weight, if there is one.
    pub fn adapter(&self) -> Option<&LoraAdapter> {
        self.adapter.as_ref()
    }

    /// The weight without its adapter, now, in the place of its stand-in `base`.
    pub(crate) fn read<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        if self.is_replaced(&base) {
            return base;
        }
        let weight = dense(&*self.weight, &base.device());
        if self.mapper.is_none() {
            remember(&weight, &self.weight, false);
        }
        self.loaded(weight)
    }

    /// What the module makes of a weight that it loads.
    fn loaded<const D: usize>(&self, weight: Tensor<D>) -> Tensor<D> {
        match self.mapper.as_ref().and_then(|mapper| mapper.downcast_ref::<ParamMapper<Tensor<D>>>()) {
            Some(mapper) => load(mapper, weight),
            None => weight,
        }
    }

    /// The rows `[batch, length, row]` of the indices `[batch, length]`.
    fn read_rows(&self, base: Tensor<2>, indices: Tensor<2, Int>) -> Tensor<3> {
        let ([batch, length], device) = (indices.dims(), base.device());
        if self.mapper.is_some() || self.is_replaced(&base) || batch * length == 0 {
            return crate::functional::embedding(self.read(base), indices);
        }
        let [_, width] = base.dims();
        let indices = indices.into_data().convert::<i64>();
        let rows = indices.iter::<i64>().map(|row| usize::try_from(row).unwrap_or(usize::MAX));
        let rows = self.weight.read_rows(&rows.collect::<Vec<_>>());
        Tensor::<2>::from_data(rows, (&device, self.weight.dtype())).reshape([batch, length, width])
    }

    fn is_replaced<const D: usize>(&self, base: &Tensor<D>) -> bool {
        *self.replaced.get_or_init(|| {
            let (dtype, found) = (self.weight.dtype(), base.dtype());
            // Nobody knows of a packed tensor whether it was a stand-in.
            let replaced = found.is_float() && !is_stand_in(base);
            assert!(
                replaced || found == dtype,
                "a lazy weight {:?} of {dtype:?} cannot become {found:?}: `materialize` the module before",
                self.weight.shape(),
            );
            assert!(
                replaced || !base.is_require_grad(),
                "a lazy weight {:?} is frozen: `materialize` the module to train it, or leave it out of `unfreeze`",
                self.weight.shape(),
            );
            replaced
        })
    }

    /// A device, with the autodiff of the one before: as tensors are moved.
    fn moved_to(&self, device: &Device) -> Device {
        device.clone().with_autodiff_context_from(&self.device)
    }

    /// Lets a mapper attach an adapter, which it can do to a parameter only: to it this one and its base are two.
    fn offer<M: ModuleMapper>(&mut self, mapper: &mut M) {
        match self.weight.shape().num_dims() {
            2 => self.offer_of_rank::<2, _>(mapper),
            3 => self.offer_of_rank::<3, _>(mapper),
            4 => self.offer_of_rank::<4, _>(mapper),
            5 => self.offer_of_rank::<5, _>(mapper),
            _ => (),
        }
    }

    fn offer_of_rank<const D: usize, M: ModuleMapper>(&mut self, mapper: &mut M) {
        let like = self.loaded(stand_in::<D>(self.weight.shape(), self.dtype, &self.device));
        let shape = like.shape();
        let param = Param::uninitialized(self.id, |_, _| like, self.device.clone(), false, shape);
        self.adapter = mapper.map_float(param).reparameterization::<LoraAdapter>().cloned();
    }
}

impl Reparameterization for LazyWeight {
    const NAME: &'static str = "lazy";

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        let weight = self.read(base);
        match &self.adapter {
            Some(adapter) => adapter.apply(weight),
            None => weight,
        }
    }
}

impl Module for LazyWeight {
    fn collect_devices(&self, devices: Vec<Device>) -> Vec<Device> {
        self.adapter.collect_devices(devices)
    }

    fn fork(self, device: &Device) -> Self {
        let (device, adapter) = (self.moved_to(device), self.adapter.fork(device));
        Self { adapter, device, ..self }
    }

    fn to_device(self, device: &Device) -> Self {
        let (device, adapter) = (self.moved_to(device), self.adapter.to_device(device));
        Self { adapter, device, ..self }
    }

    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        if let Some(adapter) = &self.adapter {
            // As if it were the only reparameterization.
            visitor.exit_module(Self::NAME, REPARAMETERIZATION);
            visitor.enter_module(LoraAdapter::NAME, REPARAMETERIZATION);
            adapter.visit(visitor);
            visitor.exit_module(LoraAdapter::NAME, REPARAMETERIZATION);
            visitor.enter_module(Self::NAME, REPARAMETERIZATION);
        }
    }

    fn map<M: ModuleMapper>(mut self, mapper: &mut M) -> Self {
        self.replaced = OnceLock::new();
        let loaded = LOADED.take().filter(|loaded| loaded.id == self.id);
        self.dtype = loaded.map_or(self.dtype, |loaded| loaded.dtype);
        mapper.exit_module(Self::NAME, REPARAMETERIZATION);
        match self.adapter.take() {
            Some(adapter) => {
                mapper.enter_module(LoraAdapter::NAME, REPARAMETERIZATION);
                self.adapter = Some(adapter.map(mapper));
                mapper.exit_module(LoraAdapter::NAME, REPARAMETERIZATION);
            }
            // A record has the parameter once, and its base just took that.
            None if loaded.is_none() => self.offer(mapper),
            None => (),
        }
        mapper.enter_module(Self::NAME, REPARAMETERIZATION);
        self
    }

    fn valid(&self) -> Self {
        let (adapter, device) = (self.adapter.valid(), self.device.clone().inner());
        Self { adapter, device, ..self.clone() }
    }

    fn train(self) -> Self {
        let (adapter, device) = (self.adapter.train(), self.device.clone().autodiff());
        Self { adapter, device, replaced: OnceLock::new(), ..self }
    }

    fn materialize(self) -> Self {
        self
    }
}

impl ModuleDisplayDefault for LazyWeight {
    fn content(&self, content: Content) -> Option<Content> {
        content.add("adapter", &self.adapter).optional()
    }
}

impl ModuleDisplay for LazyWeight {}

/// What a record holds of a parameter.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "on its way to whoever asked, one at a time")]
pub enum Recorded<const D: usize> {
    /// Its value.
    Value(Tensor<D>),
    /// Its lazy weight, which was not read.
    Frozen(Arc<dyn FrozenWeight>),
}

impl<const D: usize> Recorded<D> {
    /// What a record would hold, of a parameter as visitors see it. A lazy weight is not read.
    pub fn of(param: &Param<Tensor<D>>) -> Self {
        struct Done;
        impl Drop for Done {
            fn drop(&mut self) {
                ASKED.take();
            }
        }
        let _done = Done;
        ASKED.set(Some(None));
        let value = param.transform_for_save().into_value();
        ASKED.take().flatten().map_or(Self::Value(value), Self::Frozen)
    }
}

/// That a value was loaded into a parameter.
#[derive(Clone, Copy)]
struct Loaded {
    id: ParamId,
    /// Whether its module changes what it loads.
    maps: bool,
    dtype: DType,
}

/// What a module makes of a value that it loads, without that it counts as loaded.
fn load<const D: usize>(mapper: &ParamMapper<Tensor<D>>, value: Tensor<D>) -> Tensor<D> {
    let before = LOADED.take();
    let value = mapper.on_load(value);
    LOADED.set(before);
    value
}

thread_local! {
    /// What was loaded last, until somebody asks.
    static LOADED: Cell<Option<Loaded>> = const { Cell::new(None) };

    /// If somebody asks for it: the lazy weight of the parameter that is being saved.
    static ASKED: RefCell<Option<Option<Arc<dyn FrozenWeight>>>> = const { RefCell::new(None) };
}

/// What is saved in the place of a stand-in.
fn saved<const D: usize>(weight: &Arc<dyn FrozenWeight>, stand_in: Tensor<D>) -> Tensor<D> {
    let asked = ASKED.with_borrow_mut(|asked| asked.as_mut().map(|answer| *answer = Some(weight.clone())));
    match asked {
        Some(()) => stand_in,
        None => dense(&**weight, &stand_in.device()),
    }
}

/// The weight of a parameter without its low-rank adapter, and the adapter.
pub(crate) fn weight_and_adapter<const D: usize>(
    param: &Param<Tensor<D>>,
) -> (Tensor<D>, Option<&LoraAdapter>) {
    if let Some(lazy) = param.reparameterization::<LazyWeight>() {
        return (lazy.read(param.base()), lazy.adapter());
    }
    match param.reparameterization::<LoraAdapter>() {
        Some(adapter) => (param.base(), Some(adapter)),
        None => (param.val(), None),
    }
}

/// Rows of a lazy table without its low-rank adapter, and the adapter; nothing if the table is not lazy.
pub(crate) fn rows_and_adapter<'a>(
    param: &'a Param<Tensor<2>>,
    indices: &Tensor<2, Int>,
) -> Option<(Tensor<3>, Option<&'a LoraAdapter>)> {
    let lazy = param.reparameterization::<LazyWeight>()?;
    Some((lazy.read_rows(param.base(), indices.clone()), lazy.adapter()))
}

/// Blocks of rows of a lazy table, transposed, each read when it is asked for; nothing if the table is not lazy, or has an adapter.
/// Operations read them again in the backward pass, if a block is used before the next is asked for.
pub(crate) fn transposed_blocks(
    param: &Param<Tensor<2>>,
    bytes: usize,
) -> Option<impl Iterator<Item = Tensor<2>>> {
    let lazy = param.reparameterization::<LazyWeight>()?;
    let (base, [rows, width]) = (param.base(), param.base().dims());
    if lazy.adapter.is_some() || lazy.mapper.is_some() || rows * width == 0 || lazy.is_replaced(&base) {
        return None;
    }
    let (table, device) = (lazy.weight.clone(), base.device());
    let block = (bytes / (width * table.dtype().size())).max(1);
    let mut held: Option<Arc<dyn FrozenWeight>> = None;
    Some((0..rows).step_by(block).map(move |first| {
        let rows = Rows { table: table.clone(), rows: first..rows.min(first + block) };
        let rows = held.insert(Arc::new(rows)); // as long as the block is used
        let block = dense::<2>(&**rows, &device).transpose();
        remember(&block, rows, true);
        block
    }))
}

/// Rows of a table that follow each other.
#[derive(Debug)]
struct Rows {
    table: Arc<dyn FrozenWeight>,
    rows: Range<usize>,
}

impl FrozenWeight for Rows {
    fn shape(&self) -> Shape {
        let mut shape = self.table.shape();
        shape[0] = self.rows.len();
        shape
    }

    fn dtype(&self) -> DType {
        self.table.dtype()
    }

    fn read(&self) -> TensorData {
        self.table.read_rows(&self.rows.clone().collect::<Vec<_>>())
    }
}

fn dense<const D: usize>(weight: &dyn FrozenWeight, device: &Device) -> Tensor<D> {
    Tensor::from_data(weight.read(), (device, weight.dtype()))
}

/// Begins a stand-in: a NaN, whatever the dtype, and also as another one, that is not the NaN of a CPU's arithmetic.
const ONES: u8 = 0xff;

/// A tensor that takes no memory, and begins with what no weight begins with.
fn stand_in<const D: usize>(shape: Shape, dtype: DType, device: &Device) -> Tensor<D> {
    #[cfg(feature = "ndarray")]
    if let DispatchDevice::NdArray(_) = device.clone().inner().as_dispatch() {
        let bytes = untouched::bytes(shape.num_elements() * dtype.size());
        return Tensor::from_data(TensorData::from_bytes(bytes, shape, dtype), (device, dtype));
    }
    let nan = TensorData::from_bytes_vec(vec![ONES; dtype.size()], [1; D], dtype);
    Tensor::<D>::from_data(nan, (device, dtype)).expand(shape)
}

/// Memory that nobody touches, for NdArray, whose tensors cannot have strides of zero.
#[cfg(feature = "ndarray")]
mod untouched {
    use burn::tensor::{AllocationProperty, Bytes};
    use std::sync::{Mutex, PoisonError};

    /// The largest mapping so far; all stand-ins share its address range.
    static MAPPED: Mutex<bytes::Bytes> = Mutex::new(bytes::Bytes::new());

    /// So many bytes, of which only the first page exists. They begin with ones.
    pub(super) fn bytes(len: usize) -> Bytes {
        let mut mapped = MAPPED.lock().unwrap_or_else(PoisonError::into_inner); // always whole
        if mapped.len() < len {
            *mapped = map(len);
        }
        Bytes::from_shared(mapped.slice(..len), AllocationProperty::Other)
    }

    fn map(len: usize) -> bytes::Bytes {
        const NAN: [u8; 8] = [super::ONES; 8];
        let Ok(mut map) = memmap2::MmapMut::map_anon(len.max(NAN.len())) else {
            return bytes::Bytes::from([&NAN[..], &vec![0; len.saturating_sub(NAN.len())]].concat());
        };
        map[..NAN.len()].copy_from_slice(&NAN);
        bytes::Bytes::from_owner(map)
    }
}

/// Whether a tensor is a stand-in, or was one before it was cast: the highest bits stay, of a bf16 seven of its fraction.
fn is_stand_in<const D: usize>(base: &Tensor<D>) -> bool {
    let least = if base.dtype() == DType::F16 { 0xf8 } else { ONES };
    base.dtype().is_float()
        && matches!(first(base).as_bytes(), [.., low, high] if *high == ONES && *low >= least)
}

fn first<const D: usize>(base: &Tensor<D>) -> TensorData {
    base.clone().slice(core::array::from_fn::<_, D, _>(|_| 0..1)).into_data()
}

/// So many reads are remembered: more than lie between any read and its use.
const REMEMBERED: usize = 256;

thread_local! {
    /// Which weight was read into which node. A layer reads its weights, and uses them: what lies further back is not asked for
    /// any more.
    static READ: RefCell<VecDeque<Read>> = RefCell::default();
}

struct Read {
    node: NodeId,
    weight: Weak<dyn FrozenWeight>,
    transposed: bool,
}

/// That a tensor is this weight, or this weight transposed.
fn remember<const D: usize>(tensor: &Tensor<D>, weight: &Arc<dyn FrozenWeight>, transposed: bool) {
    let Some(node) = node_id(tensor.clone()) else { return };
    READ.with_borrow_mut(|read| {
        if read.len() == REMEMBERED {
            read.pop_front();
        }
        read.push_back(Read { node, weight: Arc::downgrade(weight), transposed });
    });
}

/// What a frozen weight is read from again.
#[derive(Clone, Debug)]
pub(crate) struct Origin {
    weight: Arc<dyn FrozenWeight>,
    transposed: bool,
}

impl Origin {
    /// That of a node into which a weight was read.
    pub(crate) fn of(node: NodeId) -> Option<Self> {
        READ.with_borrow(|read| {
            let Read { weight, transposed, .. } = read.iter().rev().find(|read| read.node == node)?;
            Some(Self { weight: weight.upgrade()?, transposed: *transposed })
        })
    }

    pub(crate) fn read<B: Backend>(&self, device: &BackendDevice<B>) -> FloatTensor<B> {
        let weight = B::float_from_data(self.weight.read(), device);
        match self.transposed {
            true => B::float_swap_dims(weight, 0, 1),
            false => weight,
        }
    }
}
