//! [`KeyValueCache`]: what attention reads of the tokens so far, so that they are not computed again for the next one.
use burn::tensor::{Bool, DType, Device, Int, Tensor, TensorData};

/// Keys and values of all tokens so far, in every layer.
///
/// Whole pages of 64 tokens are stored in one dtype, and up to 63 tokens more in the dtype of the model. While a layer runs, its keys and
/// values are there once more, in the dtype of the model.
///
/// The texts of a batch end together: shorter ones begin with padding, which no other token sees. Layers with a window keep all tokens, too.
#[derive(Debug)]
pub struct KeyValueCache {
    layers: Vec<LayerCache>,
    /// Tokens of padding before each text; empty if there are none.
    padding: Vec<usize>,
    /// Tokens so far, with padding.
    tokens: usize,
}

/// Keys and values of a layer, `[batch, heads, tokens, width]`.
#[derive(Clone, Debug, Default)]
pub(crate) struct LayerCache {
    stored: Option<DType>,
    /// In order, each of one or more whole pages.
    pages: Vec<[Tensor<4>; 2]>,
    /// What does not fill a page.
    tail: Option<[Tensor<4>; 2]>,
}

/// Tokens of a page.
pub(crate) const PAGE: usize = 64;

impl KeyValueCache {
    /// An empty cache, for a model of so many layers. Pages are stored in this dtype, or in that of the model.
    pub(crate) fn new(layers: usize, stored: Option<DType>) -> Self {
        let layer = LayerCache { stored, ..LayerCache::default() };
        Self { layers: vec![layer; layers], padding: vec![], tokens: 0 }
    }

    /// With so many tokens of padding before each text of the batch, or before none if it is empty.
    ///
    /// # Panics
    ///
    /// Panics if there are tokens already.
    pub fn with_padding(self, padding: Vec<usize>) -> Self {
        assert_eq!(self.tokens, 0, "padding is before the first token");
        let padding = if padding.iter().all(|&tokens| tokens == 0) { vec![] } else { padding };
        Self { padding, ..self }
    }

    /// The number of tokens so far, with padding.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// The bytes of keys and values so far.
    pub fn bytes(&self) -> u64 {
        let tensors = self.layers.iter().flat_map(|layer| layer.pages.iter().chain(&layer.tail).flatten());
        tensors.map(|x| (x.shape().num_elements() * x.dtype().size()) as u64).sum()
    }

    /// What all layers of a model make of the next tokens, `[batch, length, width]`, `at_once` of each text at a time. One layer after the
    /// other computes all parts, so that its weights are read once if the budget holds a layer. `window` gives the window of a layer.
    pub(crate) fn pass<L>(
        &mut self,
        layers: &[L],
        mut x: Tensor<3>,
        at_once: usize,
        window: impl Fn(&L) -> Option<usize>,
        forward: impl Fn(&L, Tensor<3>, Part<'_>) -> Tensor<3>,
    ) -> Tensor<3> {
        let ([batch, length, _], device) = (x.dims(), x.device());
        assert!(length > 0 && at_once > 0, "some tokens, and some at once");
        assert!(self.padding.is_empty() || self.padding.len() == batch, "a number for each text");
        assert_eq!(self.layers.len(), layers.len(), "the cache of a model is made by it");
        for (layer, before) in layers.iter().zip(&mut self.layers) {
            let parts = (0..length).step_by(at_once).map(|first| {
                let count = at_once.min(length - first);
                let start = self.tokens + first;
                let unseen = unseen([start, start + count], window(layer), &self.padding, &device);
                let part = Part { start, unseen, before: Some(&mut *before) };
                forward(layer, x.clone().narrow(1, first, count), part)
            });
            x = Tensor::cat(parts.collect(), 1);
        }
        self.tokens += length;
        x
    }

    /// The places of the next tokens in their texts, `[batch or 1, length]`. Padding has the first place.
    pub(crate) fn places(&self, length: usize, device: &Device) -> Tensor<2, Int> {
        let texts = if self.padding.is_empty() { &[0][..] } else { &self.padding };
        let tokens = self.tokens..self.tokens + length;
        let of_text =
            |&padding: &usize| tokens.clone().map(move |token| token.saturating_sub(padding) as i64);
        let places: Vec<i64> = texts.iter().flat_map(of_text).collect();
        Tensor::from_data(TensorData::new(places, [texts.len(), length]), device)
    }
}

impl LayerCache {
    /// Adds keys and values, and returns all of them.
    pub(crate) fn extend(&mut self, new: [Tensor<4>; 2]) -> [Tensor<4>; 2] {
        let dtype = new[0].dtype();
        // What is joined has memory of its own.
        let (tail, is_own) = match self.tail.take() {
            Some(tail) => (zip(tail, new, |tail, new| Tensor::cat(vec![tail, new], 2)), true),
            None => (new, false),
        };
        let all = [0, 1].map(|at| {
            let pages = self.pages.iter().map(|page| page[at].clone().cast(dtype));
            joined(pages.chain([tail[at].clone()]).collect())
        });
        self.keep(tail, is_own);
        all
    }

    /// Stores the whole pages of what does not fill a page yet.
    fn keep(&mut self, tail: [Tensor<4>; 2], is_own: bool) {
        let (tokens, dtype) = (tail[0].dims()[2], tail[0].dtype());
        let (whole, rest) = (tokens / PAGE * PAGE, tokens % PAGE);
        if whole == 0 && is_own {
            self.tail = Some(tail);
            return;
        }
        let stored = self.stored.unwrap_or(dtype);
        let page = |x: Tensor<4>| match x.narrow(2, 0, whole) {
            page if stored == dtype => copied(page),
            page => page.cast(stored),
        };
        if whole > 0 {
            self.pages.push(tail.clone().map(page));
        }
        self.tail = (rest > 0).then(|| tail.map(|x| copied(x.narrow(2, whole, rest))));
    }
}

/// In memory of its own: a view would keep all of the tensor that it is a part of.
fn copied(x: Tensor<4>) -> Tensor<4> {
    let all = x.dims().map(|size| 0..size);
    Tensor::zeros(x.shape(), (&x.device(), x.dtype())).slice_assign(all, x)
}

fn zip<T>([a, b]: [T; 2], [c, d]: [T; 2], f: impl Fn(T, T) -> T) -> [T; 2] {
    [f(a, c), f(b, d)]
}

fn joined(mut parts: Vec<Tensor<4>>) -> Tensor<4> {
    if parts.len() == 1 { parts.remove(0) } else { Tensor::cat(parts, 2) }
}

/// The tokens that go through a layer together, and what they see.
#[derive(Default)]
pub(crate) struct Part<'a> {
    /// The position of the first of them.
    pub(crate) start: usize,
    /// The tokens that each of them does not see, `[batch or 1, 1, tokens, all tokens so far]`; if `None`, those after it.
    pub(crate) unseen: Option<Tensor<4, Bool>>,
    /// The tokens before them, if there may be any.
    pub(crate) before: Option<&'a mut LayerCache>,
}

/// [`Part::unseen`] of the tokens `start..end`.
pub(crate) fn unseen(
    [start, end]: [usize; 2],
    window: Option<usize>,
    padding: &[usize],
    device: &Device,
) -> Option<Tensor<4, Bool>> {
    let window = window.filter(|&window| window < end);
    if window.is_none() && padding.is_empty() {
        return None;
    }
    let first = |token: usize| window.map_or(0, |window| (token + 1).saturating_sub(window));
    let texts = if padding.is_empty() { &[0] } else { padding };
    let mut values = Vec::with_capacity(texts.len() * (end - start) * end);
    for &padding in texts {
        for token in start..end {
            // Padding sees itself, so that its numbers are finite on every backend.
            let seen = first(token).max(padding.min(token));
            for (is_unseen, keys) in [(true, seen), (false, token + 1 - seen), (true, end - token - 1)] {
                values.resize(values.len() + keys, is_unseen);
            }
        }
    }
    let data = TensorData::new(values, [texts.len(), 1, end - start, end]);
    Some(Tensor::from_data(data, device))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_see_their_window_of_their_text() {
        let device = Device::flex();
        assert!(unseen([0, 5], None, &[], &device).is_none());
        assert!(unseen([3, 5], Some(5), &[], &device).is_none());
        let rows = |mask: Option<Tensor<4, Bool>>| -> Vec<String> {
            let mask = mask.expect("some tokens are not seen");
            let width = mask.dims()[3];
            let values: Vec<bool> = mask.into_data().iter::<bool>().collect();
            let row = |row: &[bool]| row.iter().map(|&unseen| if unseen { '.' } else { 'x' }).collect();
            values.chunks(width).map(row).collect()
        };
        assert_eq!(rows(unseen([0, 4], Some(2), &[], &device)), ["x...", "xx..", ".xx.", "..xx"]);
        assert_eq!(rows(unseen([2, 4], None, &[1, 0], &device)), [".xx.", ".xxx", "xxx.", "xxxx"]);
        assert_eq!(rows(unseen([0, 3], None, &[2], &device)), ["x..", ".x.", "..x"]);
        assert_eq!(rows(unseen([3, 4], Some(2), &[3], &device)), ["...x"]);
    }

    /// What is added comes back in order, and is stored once.
    #[test]
    fn pages_hold_what_was_added() {
        let device = Device::flex();
        let numbers = |tokens: core::ops::Range<usize>| {
            let values: Vec<f32> =
                tokens.clone().flat_map(|token| [token as f32, token as f32 + 0.5]).collect();
            Tensor::<4>::from_data(TensorData::new(values, [1, 1, tokens.len(), 2]), &device)
        };
        for stored in [None, Some(DType::BF16)] {
            let mut cache = KeyValueCache::new(1, stored);
            let mut end = 0;
            for tokens in [1, 2, 61, 1, 200, 56, 1] {
                let layer = &mut cache.layers[0];
                let new = numbers(end..end + tokens);
                end += tokens;
                let [keys, values] = layer.extend([new.clone(), -new]);
                // Whole numbers up to 256, and halves up to 128, are exact in bf16.
                let off = (keys.clone() - numbers(0..end)).abs().max().into_scalar::<f32>();
                assert!(off <= if stored.is_none() { 0.0 } else { 1.0 }, "{off}");
                assert_eq!((-values).into_data(), keys.into_data());
            }
            let (pages, tail) = (end / PAGE * PAGE, end % PAGE);
            let bytes = if stored.is_none() { 4 } else { 2 };
            assert_eq!(cache.bytes(), 2 * 2 * (pages * bytes + tail * 4) as u64);
        }
    }
}
