//! [`KeyValueCache`]: what attention reads of the tokens so far, so that they are not computed again for the next one.
use burn::tensor::{Bool, DType, Device, FloatDType, Int, IntDType, Tensor, TensorData};

/// Keys and values of all tokens so far, in every layer.
///
/// Whole pages of 64 tokens are stored in one dtype, and up to 63 tokens more in the dtype of the model. While a layer runs, its keys and
/// values are there once more, in the dtype of the model.
///
/// The texts of a batch end together: shorter ones begin with padding, which no other token sees. Layers with a window drop pages that no
/// later token sees.
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
    /// Whether later tokens do not see all.
    has_window: bool,
    /// Tokens that were dropped, since none of the next ones sees them.
    dropped: usize,
    /// In order, each of one or more whole pages.
    pages: Vec<[Page; 2]>,
    /// What does not fill a page.
    tail: Option<[Tensor<4>; 2]>,
}

/// Tokens of a page.
pub(crate) const PAGE: usize = 64;

/// Keys or values of whole pages.
#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant, reason = "one for 64 tokens or more")]
enum Page {
    Float(Tensor<4>),
    /// Integers of eight bits from -127 to 127, and what they are multiplied with, in f32: `[batch, heads, tokens, 1]`.
    Integers(Tensor<4, Int>, Tensor<4>),
}

impl Page {
    /// In a dtype of floats, or in `I8`. It has memory of its own.
    fn new(x: Tensor<4>, stored: DType) -> Self {
        if stored != DType::I8 {
            return Self::Float(if x.dtype() == stored { copied(x) } else { x.cast(stored) });
        }
        let x = x.cast(FloatDType::F32);
        // Features that are all 0 stay so.
        let scales = (x.clone().abs().max_dim(3) / 127.0).clamp_min(f32::MIN_POSITIVE);
        let integers = (x / scales.clone()).round().int().cast(IntDType::I8);
        Self::Integers(integers, scales)
    }

    fn tokens(&self) -> usize {
        match self {
            Self::Float(x) => x.dims()[2],
            Self::Integers(x, _) => x.dims()[2],
        }
    }

    fn to_float(&self, dtype: DType) -> Tensor<4> {
        match self {
            Self::Float(x) => x.clone().cast(dtype),
            Self::Integers(x, scales) => {
                (x.clone().float().cast(FloatDType::F32) * scales.clone()).cast(dtype)
            }
        }
    }

    fn bytes(&self) -> u64 {
        match self {
            Self::Float(x) => bytes(x),
            Self::Integers(x, scales) => x.shape().num_elements() as u64 + bytes(scales),
        }
    }
}

fn bytes(x: &Tensor<4>) -> u64 {
    (x.shape().num_elements() * x.dtype().size()) as u64
}

/// The bytes of keys and values.
pub(crate) fn bytes_of(states: &[Tensor<4>; 2]) -> u64 {
    states.iter().map(bytes).sum()
}

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
        self.layers.iter().map(LayerCache::bytes).sum()
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
                let (start, window) = (self.tokens + first, window(layer));
                before.has_window = window.is_some();
                before.drop_before((start + 1).saturating_sub(window.unwrap_or(usize::MAX)));
                let tokens = [before.dropped, start, start + count];
                let unseen = unseen(tokens, window, &self.padding, &device);
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
    fn bytes(&self) -> u64 {
        let pages = self.pages.iter().flatten().map(Page::bytes);
        pages.sum::<u64>() + self.tail.iter().map(bytes_of).sum::<u64>()
    }

    /// Drops whole pages of tokens before this one.
    fn drop_before(&mut self, token: usize) {
        let mut first = self.dropped;
        let count = self.pages.iter().take_while(|[keys, _]| {
            first += keys.tokens();
            first <= token
        });
        let count = count.count();
        self.dropped += self.pages.drain(..count).map(|[keys, _]| keys.tokens()).sum::<usize>();
    }

    /// Adds keys and values, and returns all that were not dropped.
    pub(crate) fn extend(&mut self, new: [Tensor<4>; 2]) -> [Tensor<4>; 2] {
        let dtype = new[0].dtype();
        // What is joined has memory of its own.
        let (tail, is_own) = match self.tail.take() {
            Some(tail) => (zip(tail, new, |tail, new| Tensor::cat(vec![tail, new], 2)), true),
            None => (new, false),
        };
        let all = [0, 1].map(|at| {
            let pages = self.pages.iter().map(|page| page[at].to_float(dtype));
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
        // Pages are dropped one after the other.
        let at_once = if self.has_window { PAGE } else { whole.max(1) };
        for first in (0..whole).step_by(at_once) {
            self.pages.push(tail.clone().map(|x| Page::new(x.narrow(2, first, at_once), stored)));
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
    /// The tokens that each of them does not see, `[batch or 1, 1, tokens, all tokens in the cache]`; if `None`, those after it.
    pub(crate) unseen: Option<Tensor<4, Bool>>,
    /// The tokens before them, if there may be any.
    pub(crate) before: Option<&'a mut LayerCache>,
}

/// [`Part::unseen`] of the tokens `start..end`, where tokens before `kept` are not there any more.
pub(crate) fn unseen(
    [kept, start, end]: [usize; 3],
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
    let mut values = Vec::with_capacity(texts.len() * (end - start) * (end - kept));
    for &padding in texts {
        for token in start..end {
            // Padding sees itself, so that its numbers are finite on every backend.
            let seen = first(token).max(padding.min(token)).max(kept);
            for (is_unseen, keys) in [(true, seen - kept), (false, token + 1 - seen), (true, end - token - 1)]
            {
                values.resize(values.len() + keys, is_unseen);
            }
        }
    }
    let data = TensorData::new(values, [texts.len(), 1, end - start, end - kept]);
    Some(Tensor::from_data(data, device))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_see_their_window_of_their_text() {
        let device = Device::flex();
        assert!(unseen([0, 0, 5], None, &[], &device).is_none());
        assert!(unseen([0, 3, 5], Some(5), &[], &device).is_none());
        let rows = |mask: Option<Tensor<4, Bool>>| -> Vec<String> {
            let mask = mask.expect("some tokens are not seen");
            let width = mask.dims()[3];
            let values: Vec<bool> = mask.into_data().iter::<bool>().collect();
            let row = |row: &[bool]| row.iter().map(|&unseen| if unseen { '.' } else { 'x' }).collect();
            values.chunks(width).map(row).collect()
        };
        assert_eq!(rows(unseen([0, 0, 4], Some(2), &[], &device)), ["x...", "xx..", ".xx.", "..xx"]);
        assert_eq!(rows(unseen([0, 2, 4], None, &[1, 0], &device)), [".xx.", ".xxx", "xxx.", "xxxx"]);
        assert_eq!(rows(unseen([0, 0, 3], None, &[2], &device)), ["x..", ".x.", "..x"]);
        assert_eq!(rows(unseen([0, 3, 4], Some(2), &[3], &device)), ["...x"]);
        assert_eq!(rows(unseen([2, 3, 5], Some(2), &[], &device)), ["xx.", ".xx"]);
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
        // Whole numbers up to 256, and halves up to 128, are exact in bf16. Integers are off by at most a 254th of the largest.
        for (stored, rounding) in
            [(None, 0.0), (Some(DType::BF16), 1.0), (Some(DType::I8), 322.5 / 254.0 + 1e-4)]
        {
            let mut cache = KeyValueCache::new(1, stored);
            let mut end = 0;
            for tokens in [1, 2, 61, 1, 200, 56, 1] {
                let layer = &mut cache.layers[0];
                let new = numbers(end..end + tokens);
                end += tokens;
                let [keys, values] = layer.extend([new.clone(), -new]);
                let off = (keys.clone() - numbers(0..end)).abs().max().into_scalar::<f32>();
                assert!(off <= rounding, "{stored:?}: {off}");
                assert_eq!((keys + values).abs().max().into_scalar::<f32>(), 0.0);
            }
            let (pages, tail) = (end / PAGE * PAGE, end % PAGE);
            let (bytes, scale) = match stored {
                None => (4, 0),
                Some(DType::I8) => (1, 4),
                Some(_) => (2, 0),
            };
            assert_eq!(cache.bytes(), 2 * (pages * (2 * bytes + scale) + tail * 2 * 4) as u64);
        }
    }

    /// Tokens with features of 0 are exact, and so are those that integers have.
    #[test]
    fn integers_keep_zeros_and_the_largest() {
        let rows = [[0.0f32, 0.0, 0.0], [127.0, -127.0, 3.0], [1e-30, 0.0, -1e-30], [1e30, 0.0, -1e30]];
        let x = Tensor::<2>::from_floats(rows, &Device::flex()).reshape([1, 1, 4, 3]);
        let off = Page::new(x.clone(), DType::I8).to_float(DType::F32) - x.clone();
        let largest = x.abs().max_dim(3).clamp_min(f32::MIN_POSITIVE);
        assert!((off / largest).abs().max().into_scalar::<f32>() <= 1e-6);
    }

    #[test]
    fn pages_are_dropped_when_no_token_sees_them() {
        let x = |tokens| Tensor::<4>::zeros([1, 2, tokens, 3], &Device::flex());
        let mut layer = LayerCache { has_window: true, ..LayerCache::default() };
        for tokens in [70, 60, 128, 5] {
            layer.extend([x(tokens), x(tokens)]);
        }
        for (token, dropped) in [(63, 0), (64, 64), (100, 64), (191, 128), (192, 192), (1000, 256)] {
            layer.drop_before(token);
            assert_eq!(layer.dropped, dropped, "before {token}");
            assert_eq!(layer.bytes(), 2 * 4 * 2 * 3 * (263 - dropped as u64));
        }
        assert_eq!(layer.extend([x(1), x(1)])[0].dims(), [1, 2, 8, 3]);
    }
}
