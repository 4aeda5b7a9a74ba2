//! The lazy weight: a reparameterization that reads a frozen weight whenever its parameter is used.
use super::Adapted;
#[cfg(any(feature = "flex", feature = "ndarray"))]
use super::packed_rows::PackedRows;
use super::placeholder::{is_placeholder, placeholder};
use super::side_channel::{answer, note_loaded, take_loaded, without_note};
use super::source::{Read, remember};
use super::weight::{FrozenWeight, RowBlock, read_tensor};
use crate::adapter::DoraAdapter;
use crate::backend::remote::data;
use crate::burn_internals::REPARAMETERIZATION;
use crate::node::node_id;
use burn::backend::autodiff::NodeId;
use burn::module::{
    Content, LoraAdapter, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper, ModuleVisitor, Param,
    ParamId, ParamMapper, Reparameterization, Reparameterizer,
};
use burn::tensor::{DType, Device, Int, Shape, Tensor};
use core::any::Any;
use core::fmt::Debug;
use std::sync::{Arc, Mutex, PoisonError};

/// The adapter of a lazy weight.
#[derive(Module, Debug)]
enum Adapter {
    Lora(LoraAdapter),
    Dora(DoraAdapter),
}

impl Adapter {
    /// The adapter of a parameter, if it has one of these kinds.
    fn of<const D: usize>(param: &Param<Tensor<D>>) -> Option<Self> {
        let dora = param.reparameterization::<DoraAdapter>().cloned().map(Self::Dora);
        dora.or_else(|| param.adapter().cloned().map(Self::Lora))
    }

    /// Its name in the path of a parameter.
    fn name(&self) -> &'static str {
        match self {
            Self::Lora(_) => LoraAdapter::NAME,
            Self::Dora(_) => DoraAdapter::NAME,
        }
    }

    fn apply<const D: usize>(&self, weight: Tensor<D>) -> Tensor<D> {
        match self {
            Self::Lora(adapter) => adapter.apply(weight),
            Self::Dora(adapter) => adapter.apply(weight),
        }
    }
}

/// The reparameterization of a parameter whose value is a [`FrozenWeight`].
///
/// The parameter itself holds a placeholder of the right shape that takes no memory. It is frozen: using it while it requires a
/// gradient panics.
///
/// [`Module::apply_lora`] attaches its adapter to the lazy weight, under the path that the adapter of an ordinary weight has. So does
/// [`Dora`](crate::lora::Dora), which reads every weight once for its norms.
///
/// Records hold the weight. Loading a record replaces the lazy weight with the record's value, in memory. Call
/// [`materialize`](Module::materialize) before anything else that changes values (`cast`, `quantize_weights`).
///
/// A weight that its module transposes when loading it ([`LinearLayout::Col`](burn::nn::LinearLayout)) is kept for the backward pass,
/// not read again.
#[derive(Clone, Debug)]
pub struct LazyWeight {
    weight: Arc<dyn FrozenWeight>,
    adapter: Option<Adapter>,
    /// The functions of the base, a `ParamMapper<Tensor<D>>`, if the one for loading changes what it loads.
    mapper: Option<Arc<dyn Any + Send + Sync>>,
    id: ParamId,
    device: Device,
    /// The dtype of the base.
    dtype: DType,
    /// Whether the base is no longer the placeholder.
    replaced: Replaced,
}

/// Whether the base of a lazy weight is no longer its placeholder, for the node of the base that was looked at. (To look means to wait for
/// the device.) Without autodiff there is no node, and it is for any base.
#[derive(Debug, Default)]
struct Replaced(Mutex<Option<(Option<NodeId>, bool)>>);

impl Replaced {
    /// For this base. `look` tells if that is not known.
    fn of<const D: usize>(&self, base: &Tensor<D>, look: impl FnOnce() -> bool) -> bool {
        let node = node_id(base.clone());
        let known = || self.0.lock().unwrap_or_else(PoisonError::into_inner); // replaced as a whole
        let last = *known();
        match last {
            Some((of, is_replaced)) if of == node => is_replaced,
            _ => {
                let is_replaced = look(); // nobody waits for the lock meanwhile
                *known() = Some((node, is_replaced));
                is_replaced
            }
        }
    }

    /// After the base may have been exchanged for another one.
    fn exchanged(&mut self) {
        let known = self.0.get_mut().unwrap_or_else(PoisonError::into_inner);
        *known = known.filter(|(node, _)| node.is_some());
    }
}

impl Clone for Replaced {
    fn clone(&self) -> Self {
        Self(Mutex::new(*self.0.lock().unwrap_or_else(PoisonError::into_inner)))
    }
}

impl LazyWeight {
    /// Makes a parameter lazy, without initializing it: returns the parameter with a placeholder, and the
    /// reparameterization to attach to it.
    ///
    /// The weight must have the shape that the parameter has in a record.
    pub fn attach<const D: usize>(
        param: Param<Tensor<D>>,
        weight: Arc<dyn FrozenWeight>,
    ) -> (Param<Tensor<D>>, Self) {
        let (id, device) = (param.id, param.lazy_device());
        let (shape, dtype) = (weight.shape(), weight.dtype());
        // Loading is the only way to get the functions of the base without initializing the parameter or changing what it shares with
        // its clones.
        let loaded = placeholder(shape.clone(), dtype, &device);
        let (_, _, mapper) = without_note(|| param.transform_for_load(loaded, id)).consume();
        let changes = changes_loaded(&mapper, shape.clone(), dtype, &device);
        let mapper = Arc::new(mapper);

        let on_init = mapper.clone();
        let init = move |device: &Device, require_grad| {
            load(&on_init, placeholder(shape, dtype, device)).set_require_grad(require_grad)
        };
        let on_load = mapper.clone();
        let param = Param::uninitialized(id, init, device.clone(), false, weight.shape());
        let param = param.load_mapper(move |value| {
            let value = load(&on_load, value);
            note_loaded(id, value.dtype());
            value
        });
        // A weak handle, as a materialized parameter may outlive its weight.
        let (weak, on_save) = (Arc::downgrade(&weight), mapper.clone());
        let param = param.save_mapper(move |base| match is_placeholder(&base) {
            true => {
                let weight = weak.upgrade().expect("the module that is saved has its weights");
                if answer(&weight) { base } else { read_tensor(&*weight, &base.device()).0 }
            }
            false => on_save.on_save(base),
        });
        let mapper = changes.then_some(mapper as Arc<dyn Any + Send + Sync>);
        (param, Self { weight, adapter: None, mapper, id, device, dtype, replaced: Replaced::default() })
    }

    /// The weight.
    pub fn weight(&self) -> &Arc<dyn FrozenWeight> {
        &self.weight
    }

    /// The low-rank adapter on the weight, if there is one without a magnitude.
    pub fn adapter(&self) -> Option<&LoraAdapter> {
        match &self.adapter {
            Some(Adapter::Lora(adapter)) => Some(adapter),
            _ => None,
        }
    }

    /// The low-rank adapter with a magnitude, if there is one.
    pub fn dora_adapter(&self) -> Option<&DoraAdapter> {
        match &self.adapter {
            Some(Adapter::Dora(adapter)) => Some(adapter),
            _ => None,
        }
    }

    /// Reads the weight, and gives its adapter. `base` is what the parameter holds.
    pub(super) fn read_adapted<const D: usize>(&self, base: Tensor<D>) -> Adapted<'_, D> {
        let weight = self.read(base);
        match &self.adapter {
            None => Adapted::Plain(weight),
            Some(Adapter::Lora(adapter)) => Adapted::Lora(weight, adapter),
            Some(Adapter::Dora(adapter)) => Adapted::Dora(weight, adapter),
        }
    }

    /// Reads the weight without its adapter. If `base`, which the parameter holds, is no longer the placeholder, it is the weight.
    fn read<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        if self.is_replaced(&base) {
            return base;
        }
        let (weight, stays) = read_tensor(&*self.weight, &base.device());
        if self.mapper.is_none() {
            remember(&weight, &self.weight, Read { transposed: false, stays });
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

    /// Reads the rows `[batch, length, row]` with the indices `[batch, length]`. `None` if only [`read`](Self::read) can give them.
    pub(super) fn read_rows(&self, base: Tensor<2>, indices: &Tensor<2, Int>) -> Option<Tensor<3>> {
        let ([batch, length], device) = (indices.dims(), base.device());
        if self.mapper.is_some() || self.is_replaced(&base) || batch * length == 0 {
            return None;
        }
        let [_, width] = base.dims();
        if let Some(owned) = self.weight.on_device() {
            let rows = owned.rows(indices.clone().reshape([batch * length]), &device);
            return Some(rows.reshape([batch, length, width]));
        }
        let indices = indices.clone();
        let indices = data(&indices.device(), move || indices.try_into_data()).convert::<i64>();
        let rows = indices.iter::<i64>().map(|row| usize::try_from(row).unwrap_or(usize::MAX));
        let rows = self.weight.read_rows(&rows.collect::<Vec<_>>());
        Some(Tensor::<2>::from_data(rows, (&device, self.weight.dtype())).reshape([batch, length, width]))
    }

    /// See [`transposed_blocks`](super::transposed_blocks).
    pub(super) fn transposed_blocks(
        &self,
        base: Tensor<2>,
        bytes: usize,
    ) -> Option<impl Iterator<Item = Tensor<2>> + use<>> {
        let [rows, width] = base.dims();
        let at_once = bytes / (width * self.weight.dtype().size()).max(1);
        self.blocks(base, rows, at_once, false)
    }

    /// See [`column_blocks`](super::column_blocks).
    pub(super) fn column_blocks(&self, base: Tensor<2>) -> Option<impl Iterator<Item = Tensor<2>> + use<>> {
        let ([_, columns], at_once) = (base.dims(), self.weight.columns_at_once()?);
        self.blocks(base, columns, at_once, true)
    }

    /// The rows of the weight, or of its transpose, if they are packed and have this width, and no adapter with a magnitude scales them.
    #[cfg(any(feature = "flex", feature = "ndarray"))]
    pub(super) fn packed_rows(
        &self,
        base: Tensor<2>,
        of_transpose: bool,
        width: usize,
    ) -> Option<&dyn PackedRows> {
        let fits = self.weight.shape()[usize::from(!of_transpose)] == width;
        let is_adapted = matches!(self.adapter, Some(Adapter::Dora(_)));
        if !fits || is_adapted || self.mapper.is_some() || self.is_replaced(&base) {
            return None;
        }
        self.weight.packed_rows(of_transpose)
    }

    /// The rows of the weight, or of its transpose, in transposed blocks of some of the `count` rows. `None` if the weight must be read as a
    /// whole.
    fn blocks(
        &self,
        base: Tensor<2>,
        count: usize,
        at_once: usize,
        of_transpose: bool,
    ) -> Option<impl Iterator<Item = Tensor<2>> + use<>> {
        let is_empty = base.shape().num_elements() == 0;
        if self.adapter.is_some() || self.mapper.is_some() || is_empty || self.is_replaced(&base) {
            return None;
        }
        let (table, device) = (self.weight.clone(), base.device());
        let mut in_use: Option<Arc<dyn FrozenWeight>> = None;
        Some((0..count).step_by(at_once.max(1)).map(move |first| {
            let rows = first..count.min(first + at_once.max(1));
            // Remembering does not keep a block alive. `in_use` does so until the next block.
            let block = in_use.insert(Arc::new(RowBlock::new(table.clone(), of_transpose, rows)));
            let (rows, stays) = read_tensor::<2>(&**block, &device);
            let transposed = rows.transpose();
            remember(&transposed, block, Read { transposed: true, stays });
            transposed
        }))
    }

    /// Whether the base is no longer the placeholder, but holds the value.
    fn is_replaced<const D: usize>(&self, base: &Tensor<D>) -> bool {
        let (dtype, found) = (self.weight.dtype(), base.dtype());
        // A packed tensor cannot be recognized as the placeholder.
        let replaced = self.replaced.of(base, || found.is_float() && !is_placeholder(base));
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
    }

    /// `device` with the autodiff context of the present device, which a tensor keeps when it is moved.
    fn moved_to(&self, device: &Device) -> Device {
        device.clone().with_autodiff_context_from(&self.device)
    }

    /// Offers the parameter to a mapper that may attach an adapter to it. When the mapper had the base, the lazy weight was detached, so an
    /// adapter that it attached to the base is lost. The offered parameter is lazy, too, so that the mapper can read the weight.
    fn offer<M: ModuleMapper>(&mut self, mapper: &mut M) {
        match self.weight.shape().num_dims() {
            2 => self.offer_rank::<2, _>(mapper),
            3 => self.offer_rank::<3, _>(mapper),
            4 => self.offer_rank::<4, _>(mapper),
            5 => self.offer_rank::<5, _>(mapper),
            _ => (),
        }
    }

    fn offer_rank<const D: usize, M: ModuleMapper>(&mut self, mapper: &mut M) {
        let like = self.loaded(placeholder::<D>(self.weight.shape(), self.dtype, &self.device));
        let shape = like.shape();
        let param = Param::uninitialized(self.id, |_, _| like, self.device.clone(), false, shape);
        let param = param.apply_reparameterization(Attach(self));
        self.adapter = Adapter::of(&mapper.map_float(param));
    }
}

/// The base of a lazy parameter, as a mapper gets it, with a placeholder that is made only where the parameter is used or moved to. (If a
/// placeholder is moved between backends, it arrives with all its elements.)
pub fn unplaced<const D: usize>(param: Param<Tensor<D>>) -> Param<Tensor<D>> {
    let device = param.lazy_device();
    let (id, base, mapper) = param.consume();
    let (shape, dtype) = (base.shape(), base.dtype());
    let of_base = shape.clone();
    let init = move |device: &Device, require_grad| {
        placeholder(of_base, dtype, device).set_require_grad(require_grad)
    };
    let on_save = mapper.clone();
    Param::uninitialized(id, init, device, false, shape)
        .load_mapper(move |value| mapper.on_load(value))
        .save_mapper(move |value| on_save.on_save(value))
}

/// Attaches a lazy weight to a parameter that already has the placeholder.
struct Attach<'a>(&'a LazyWeight);

impl Reparameterizer for Attach<'_> {
    type Reparam = LazyWeight;

    fn reparameterize<const D: usize>(
        &mut self,
        _path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<LazyWeight>) {
        let lazy = LazyWeight { replaced: Replaced::default(), ..self.0.clone() };
        (param, Some(lazy))
    }
}

/// What a module makes of a value that it loads.
fn load<const D: usize>(mapper: &ParamMapper<Tensor<D>>, value: Tensor<D>) -> Tensor<D> {
    without_note(|| mapper.on_load(value))
}

/// Whether a module changes what it loads: a function that computes something does not return the autodiff node of the tensor that it
/// was given.
fn changes_loaded<const D: usize>(
    mapper: &ParamMapper<Tensor<D>>,
    shape: Shape,
    dtype: DType,
    device: &Device,
) -> bool {
    let device = if device.is_autodiff() { device.clone() } else { device.clone().autodiff() };
    let given = placeholder::<D>(shape, dtype, &device);
    let node = node_id(given.clone());
    node_id(load(mapper, given)) != node
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
            // Under the path that the adapter has if it is the only reparameterization.
            visitor.exit_module(Self::NAME, REPARAMETERIZATION);
            visitor.enter_module(adapter.name(), REPARAMETERIZATION);
            match adapter {
                Adapter::Lora(adapter) => adapter.visit(visitor),
                Adapter::Dora(adapter) => adapter.visit(visitor),
            }
            visitor.exit_module(adapter.name(), REPARAMETERIZATION);
            visitor.enter_module(Self::NAME, REPARAMETERIZATION);
        }
    }

    fn map<M: ModuleMapper>(mut self, mapper: &mut M) -> Self {
        self.replaced.exchanged();
        let loaded = take_loaded(self.id);
        self.dtype = loaded.unwrap_or(self.dtype);
        mapper.exit_module(Self::NAME, REPARAMETERIZATION);
        match self.adapter.take() {
            Some(adapter) => {
                let name = adapter.name();
                mapper.enter_module(name, REPARAMETERIZATION);
                self.adapter = Some(match adapter {
                    Adapter::Lora(adapter) => Adapter::Lora(adapter.map(mapper)),
                    Adapter::Dora(adapter) => Adapter::Dora(adapter.map(mapper)),
                });
                mapper.exit_module(name, REPARAMETERIZATION);
            }
            // If the base was loaded from a record, there is nothing to offer: a record has the parameter only once.
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
        Self { adapter, device, replaced: Replaced::default(), ..self }
    }

    fn materialize(self) -> Self {
        self
    }
}

impl ModuleDisplayDefault for LazyWeight {
    fn content(&self, content: Content) -> Option<Content> {
        match &self.adapter {
            Some(Adapter::Lora(adapter)) => content.add("adapter", adapter),
            Some(Adapter::Dora(adapter)) => content.add("adapter", adapter),
            None => content,
        }
        .optional()
    }
}

impl ModuleDisplay for LazyWeight {}
