use crate::common::*;
use burn::tensor::{Bool, DType, Device, Tensor, TensorData, module, ops::AttentionModuleOptions};
use burn_memsave::functional as F;
use proptest::prelude::*;

/// Sizes: batch, heads, queries, keys, width, width of the values.
type Sizes = [usize; 6];

/// What hides some keys, or not; and what is added to the scores.
#[derive(Clone, Debug)]
struct Case {
    sizes: Sizes,
    options: AttentionModuleOptions,
    /// Which axes of the mask are 1.
    mask: Option<[bool; 4]>,
    /// Which axes of the bias are 1.
    bias: Option<[bool; 4]>,
}

impl Case {
    fn new(sizes: Sizes) -> Self {
        let options = AttentionModuleOptions { scale: None, softcap: None, is_causal: false };
        Self { sizes, options, mask: None, bias: None }
    }

    fn causal(mut self) -> Self {
        self.options.is_causal = true;
        self
    }

    fn masked(self) -> Self {
        Self { mask: Some([false; 4]), ..self }
    }

    fn biased(self) -> Self {
        Self { bias: Some([false; 4]), ..self }
    }

    fn spread(&self, ones: [bool; 4]) -> [usize; 4] {
        let [batch, heads, queries, keys, ..] = self.sizes;
        let sizes = [batch, heads, queries, keys];
        std::array::from_fn(|axis| if ones[axis] { 1 } else { sizes[axis] })
    }

    fn inputs(&self) -> Vec<Input> {
        let [batch, heads, queries, keys, width, value_width] = self.sizes;
        let shapes = [[queries, width], [keys, width], [keys, value_width]];
        let mut inputs: Vec<_> =
            shapes.map(|[rows, width]| Input::between([batch, heads, rows, width], -2.0..2.0)).to_vec();
        inputs.extend(self.bias.map(|ones| Input::random(self.spread(ones))));
        inputs
    }

    /// A third is hidden, but not the first key, which every query sees: stock has no gradients where one sees nothing.
    fn mask(&self, device: &Device) -> Option<Tensor<4, Bool>> {
        let shape = self.spread(self.mask?);
        let hidden = uniform(shape.iter().product(), 7, 0.0..3.0);
        let hidden = hidden.iter().enumerate().map(|(at, &v)| v < 1.0 && at % shape[3] > 0);
        Some(Tensor::from_data(TensorData::new(hidden.collect::<Vec<_>>(), shape), device))
    }

    fn check(&self, setting: Setting) {
        let check = Check::new(self.inputs(), setting);
        let check = match (self.options.softcap, setting.dtype) {
            (Some(_), DType::F64) => check.gradients_within(1e-7), // stock divides by the cap in f32
            // Sums that cancel out: a row of gradients of scores sums to 0.
            (_, DType::F32) => check.gradients_within(5e-5),
            _ => check,
        };
        check.compare::<4>(&|t| self.ours(t), &|t| self.stock(t));
    }

    fn ours(&self, t: &Operands) -> Tensor<4> {
        F::attention(t.get(0), t.get(1), t.get(2), self.mask(t.device()), t.maybe(3), self.options)
    }

    fn stock(&self, t: &Operands) -> Tensor<4> {
        let mask = self.mask(t.device());
        module::attention(t.get(0), t.get(1), t.get(2), mask, t.maybe(3), self.options)
    }
}

fn cases() -> impl Strategy<Value = Case> {
    let sizes = [1..3usize, 1..4, 1..12, 0..9, 1..9, 1..9];
    // No more queries than keys: a causal one sees something.
    let sizes = sizes.prop_map(|[batch, heads, queries, more, width, value_width]| {
        [batch, heads, queries, queries + more, width, value_width]
    });
    let scale = prop::option::of(0.1..1.0f64);
    let softcap = prop::option::of(0.5..3.0f64);
    let ones = || prop::option::of(prop::array::uniform4(any::<bool>()));
    (sizes, scale, softcap, any::<bool>(), ones(), ones()).prop_map(
        |(sizes, scale, softcap, is_causal, mask, bias)| Case {
            sizes,
            options: AttentionModuleOptions { scale, softcap, is_causal },
            mask,
            bias,
        },
    )
}

#[test]
fn equals_stock() {
    for_all(128, (cases(), settings()), |(case, setting)| case.check(setting));
}

/// Several chunks: of batches, of heads, of queries.
#[test]
fn equals_stock_for_long_sequences() {
    let spread = Some([true, false, true, false]);
    for case in [
        Case::new([40, 2, 64, 64, 2, 2]),
        Case::new([3, 5, 100, 300, 4, 3]).masked(),
        Case::new([1, 1, 40, 7000, 2, 2]).causal(),
        Case::new([1, 2, 530, 530, 4, 5]).causal(),
        Case { mask: spread, bias: spread, ..Case::new([1, 2, 300, 1000, 2, 3]).causal() },
    ] {
        case.check(Setting::default());
    }
    Case::new([1, 1, 270, 1000, 2, 2]).biased().check(Setting::of(DType::F64));
}

/// Where a query sees nothing, its output is zero, and nothing depends on it. (Stock has gradients that are no numbers.)
#[test]
fn a_query_that_sees_nothing_changes_nothing() {
    for sizes @ [batch, heads, queries, keys, _, value_width] in
        [[1, 2, 9, 4, 3, 2], [1, 1, 700, 600, 3, 2], [2, 1, 8, 1, 3, 2]]
    {
        let (causal, square) =
            (Case::new(sizes).causal(), Case::new([batch, heads, keys, keys, sizes[4], value_width]));
        let (square, blind) = (square.causal(), queries - keys);
        let check = Check::new(causal.inputs(), Setting::default());
        check.compare::<4>(&|t| causal.ours(t), &|t| {
            let query = t.get::<4>(0).slice_dim(2, blind..queries);
            let seen = module::attention(query, t.get(1), t.get(2), None, None, square.options);
            let nothing = Tensor::zeros([batch, heads, blind, value_width], t.device());
            Tensor::cat(vec![nothing, seen], 2)
        });
        let hides = |t: &Operands| {
            let rows = Tensor::<1, burn::tensor::Int>::arange(0..queries as i64, t.device());
            rows.lower_elem(blind as i64).reshape([1, 1, queries, 1])
        };
        let open = Case::new(sizes);
        check.compare::<4>(
            &|t| F::attention(t.get(0), t.get(1), t.get(2), Some(hides(t)), None, open.options),
            &|t| {
                let query = t.get::<4>(0).slice_dim(2, blind..queries);
                let seen = module::attention(query, t.get(1), t.get(2), None, None, open.options);
                let nothing = Tensor::zeros([batch, heads, blind, value_width], t.device());
                Tensor::cat(vec![nothing, seen], 2)
            },
        );
    }
}

#[test]
fn equals_stock_in_half_precision() {
    for dtype in HALF {
        for case in
            [Case::new([2, 2, 8, 8, 16, 16]).causal(), Case::new([1, 2, 5, 9, 8, 4]).masked().biased()]
        {
            let check = Check::new(case.inputs(), Setting::of(dtype)).within(6e-2);
            check.compare::<4>(&|t| case.ours(t), &|t| case.stock(t));
        }
    }
}

#[test]
fn is_differentiated() {
    let case = Case::new([2, 2, 5, 6, 3, 4]).biased();
    let masked = Case {
        options: AttentionModuleOptions { scale: Some(0.7), softcap: Some(1.5), is_causal: true },
        mask: Some([true, true, false, false]),
        bias: Some([false, true, true, false]),
        ..case.clone()
    };
    for case in [case, masked] {
        Check::new(case.inputs(), Setting::default()).differentiate::<4>(&|t| case.ours(t));
    }
}

#[test]
fn takes_one_input_for_all() {
    let options = AttentionModuleOptions { scale: None, softcap: None, is_causal: true };
    let check = Check::new([Input::random([2, 2, 7, 4])], Setting::default());
    check.compare::<4>(
        &|t| F::attention(t.get(0), t.get(0), t.get(0), None, None, options) * t.get(0),
        &|t| module::attention(t.get(0), t.get(0), t.get(0), None, None, options) * t.get(0),
    );
}

/// An infinite score, or one that is none, spoils its row and no other.
#[test]
fn treats_special_values_as_stock() {
    for value in [f64::INFINITY, f64::NEG_INFINITY, f64::NAN, 1e30] {
        let case = Case::new([1, 1, 3, 4, 1, 2]);
        let mut inputs = case.inputs();
        inputs[0] = Input::given([1, 1, 3, 1], [0.5, value, -1.0]);
        Check::new(inputs, Setting::default()).compare::<4>(&|t| case.ours(t), &|t| case.stock(t));
    }
}

/// What does not fit is left to Burn.
#[test]
fn treats_odd_shapes_as_stock() {
    let options = || AttentionModuleOptions { scale: None, softcap: None, is_causal: false };
    let check = |shapes: [[usize; 4]; 3]| {
        Check::new(shapes.map(Input::random), Setting::default()).compare_panics::<4>(
            &|t| F::attention(t.get(0), t.get(1), t.get(2), None, None, options()),
            &|t| module::attention(t.get(0), t.get(1), t.get(2), None, None, options()),
        );
    };
    check([[2, 2, 3, 4], [2, 2, 5, 3], [2, 2, 5, 4]]);
    check([[2, 4, 3, 4], [2, 1, 5, 4], [2, 1, 5, 4]]);
}
