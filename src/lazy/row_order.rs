//! [`RowOrders`]: layers whose outputs are in another order in a file.
use super::LazyError;
use crate::burn_next::{StoreTensor, handed, packed};
use burn::module::{ParamGroup, ParamId};
use burn::tensor::{DType, Shape, TensorData};
use burn_store::burn_pack::{self, Error};
use burn_store::{ModuleAdapter, ModuleContext, PyTorchToBurnAdapter, bridge};

/// An order of the outputs of a layer, other than in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowOrder {
    head: usize,
}

impl RowOrder {
    /// Queries and keys with rotary positions. Burn's [`RotaryEncoding`](burn::nn::RotaryEncoding) rotates features `2 i` and `2 i + 1` of
    /// a head of `head` features by one angle, Hugging Face's `transformers` features `i` and `i + head / 2`. So row `2 i + k` here is row
    /// `i + k head / 2` in the file.
    ///
    /// [`forward_halves`](crate::nn::RotaryEncoding::forward_halves) needs no other order.
    pub const fn rotary_pairs(head: usize) -> Self {
        Self { head }
    }

    /// The row in the file of a row here.
    fn in_file(self, row: usize) -> usize {
        let (first, of_head) = (row - row % self.head, row % self.head);
        first + of_head / 2 + of_head % 2 * (self.head / 2)
    }

    /// The number of outputs of values that can be reordered.
    pub(crate) fn check(self, shape: &Shape, dtype: DType, axis: usize) -> Result<usize, String> {
        if let DType::QFloat(_) = dtype {
            return Err("quantized tensors are used as they are only".into());
        }
        let Some(&rows) = shape.get(axis) else { return Err("it has no outputs".into()) };
        if self.head == 0 || !self.head.is_multiple_of(2) || !rows.is_multiple_of(self.head) {
            return Err(format!("{rows} outputs are no heads of {} features in pairs", self.head));
        }
        Ok(rows)
    }

    /// Values of a file in the order here, or with `invert` values here in the order of the file. `axis` has the outputs.
    pub(crate) fn reorder(self, data: TensorData, axis: usize, invert: bool) -> Result<TensorData, String> {
        let (shape, dtype) = (data.shape().clone(), data.dtype());
        let rows = self.check(&shape, dtype, axis)?;
        let bytes = data.as_bytes();
        let row = shape[axis + 1..].iter().product::<usize>() * dtype.size();
        let mut result = vec![0; bytes.len()];
        let blocks =
            bytes.chunks_exact((rows * row).max(1)).zip(result.chunks_exact_mut((rows * row).max(1)));
        for (from, to) in blocks {
            for here in 0..rows {
                let file = self.in_file(here);
                let [source, target] = if invert { [here, file] } else { [file, here] };
                to[target * row..][..row].copy_from_slice(&from[source * row..][..row]);
            }
        }
        Ok(TensorData::from_bytes_vec(result, shape, dtype))
    }
}

/// The layers whose outputs are in another order in a file of PyTorch. For [`WeightFile::with_adapter`](super::WeightFile::with_adapter) it
/// is Burn's [`PyTorchToBurnAdapter`] that reorders weights and biases, too. Give the same orders to [`peft`](crate::peft), which reorders
/// the adapters of these layers.
///
/// ```
/// use burn::module::Module;
/// use burn::tensor::Device;
/// use burn_memsave::lazy::{LazyLoad, LazyOptions, RowOrder, RowOrders, WeightFile};
/// use burn_memsave::nn::{Linear, LinearConfig};
///
/// #[derive(Module, Debug)]
/// struct Attention {
///     query: Linear,
/// }
///
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("model.safetensors");
/// # let rows: Vec<u8> = (0..16u8).flat_map(|row| f32::from(row).to_le_bytes()).collect();
/// # let view = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, vec![16, 1], &rows)?;
/// # safetensors::serialize_to_file([("query.weight", view)], None, &path)?;
/// // Heads of 8 features.
/// let orders = RowOrders::new().with(r"^query$", RowOrder::rotary_pairs(8))?;
/// let file = WeightFile::open(&path)?.with_adapter(orders);
/// let attention = Attention { query: LinearConfig::new(1, 16).with_bias(false).init(&Device::flex()) };
/// let (attention, _) = attention.lazy_load(&file, &LazyOptions::new())?;
/// let rows: Vec<f32> = attention.query.weight.val().into_data().iter().collect();
/// assert_eq!(rows[..8], [0.0, 4.0, 1.0, 5.0, 2.0, 6.0, 3.0, 7.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct RowOrders(Vec<(ParamGroup, RowOrder)>);

impl RowOrders {
    /// No layers.
    pub fn new() -> Self {
        Self::default()
    }

    /// The layers whose paths the regular expression matches somewhere have this order. Paths are those of the module, with the names of the
    /// variants of enums.
    ///
    /// # Errors
    ///
    /// If the expression is malformed.
    pub fn with(mut self, layers: &str, order: RowOrder) -> Result<Self, LazyError> {
        let error = |reason| LazyError::Pattern { pattern: layers.into(), reason: format!("{reason:?}") };
        self.0.push((ParamGroup::from_regex(layers).map_err(error)?, order));
        Ok(self)
    }

    /// The order of the outputs of the layer at this path: that of the first expression that matches it.
    pub fn get(&self, path: &str) -> Option<RowOrder> {
        let matches = |group: &ParamGroup| group.matches(&ParamId::new(), Some(path));
        self.0.iter().find(|(group, _)| matches(group)).map(|(_, order)| *order)
    }
}

impl ModuleAdapter for RowOrders {
    fn adapt(&self, tensor: StoreTensor, context: ModuleContext<'_>) -> StoreTensor {
        let tensor = packed(tensor);
        let layer = tensor.name.rsplit_once('.').map_or("", |(layer, _)| layer);
        let tensor = match self.get(layer) {
            Some(order) => reordered(tensor, order),
            None => tensor,
        };
        PyTorchToBurnAdapter.adapt(handed(tensor), context)
    }

    fn get_alternative_param_name(&self, parameter: &str, module: &str) -> Option<String> {
        PyTorchToBurnAdapter.get_alternative_param_name(parameter, module)
    }

    fn clone_box(&self) -> Box<dyn ModuleAdapter> {
        Box::new(self.clone())
    }
}

/// A tensor whose rows are reordered when it is read.
fn reordered(tensor: burn_pack::Tensor, order: RowOrder) -> burn_pack::Tensor {
    let (name, dtype, shape, id) = (tensor.name.clone(), tensor.dtype, tensor.shape.clone(), tensor.param_id);
    bridge::deferred(name, dtype, shape, id, move || {
        order.reorder(bridge::to_data(&tensor)?, 0, false).map_err(Error::ValidationError)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::quantization::QuantScheme;

    #[test]
    fn orders_are_inverted() {
        let order = RowOrder::rotary_pairs(4);
        let data = TensorData::new((0..24).collect::<Vec<i32>>(), [8, 3]);
        let here = order.reorder(data.clone(), 0, false).unwrap();
        let first: Vec<i32> = here.iter::<i32>().step_by(3).collect();
        assert_eq!(first, [0, 6, 3, 9, 12, 18, 15, 21]);
        assert_eq!(order.reorder(here, 0, true).unwrap(), data);
        let columns = TensorData::new((0..8).collect::<Vec<i32>>(), [2, 4]);
        let here = order.reorder(columns.clone(), 1, false).unwrap();
        assert_eq!(here.iter::<i32>().collect::<Vec<_>>(), [0, 2, 1, 3, 4, 6, 5, 7]);
        assert_eq!(order.reorder(here, 1, true).unwrap(), columns);
        for (head, axis) in [(3, 0), (0, 0), (6, 0), (2, 1), (2, 2)] {
            let refused = RowOrder::rotary_pairs(head).reorder(data.clone(), axis, false);
            assert!(refused.is_err(), "{head} {axis}");
        }
        // Its scales are behind its rows.
        let quantized = TensorData::quantized(vec![0i8; 24], [8, 3], QuantScheme::default(), &[1.0], None);
        assert!(order.reorder(quantized, 0, false).is_err());
    }
}
