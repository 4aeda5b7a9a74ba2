//! Compares attention with stock Burn: masks, biases, causal and grouped heads, long sequences and half precision.
use crate::common::*;
use burn::tensor::{Bool, DType, Device, Tensor, TensorData, module, ops::AttentionModuleOptions};
use burn_memsave::functional as F;
use burn_memsave_paper::text::repeated;
use proptest::prelude::*;
use std::ops::Range;

/// Sizes: batch, heads of keys, queries, keys, width, width of the values.
type Sizes = [usize; 6];

/// What hides some keys, or not; and what is added to the scores.
#[derive(Clone, Debug)]
struct Case {
    sizes: Sizes,
    /// How many heads of queries each head of keys and values is for.
    shared: usize,
    options: AttentionModuleOptions,
    /// Which axes of the mask are 1.
    mask: Option<[bool; 4]>,
    /// Which axes of the bias are 1.
    bias: Option<[bool; 4]>,
}

impl Case {
    fn new(sizes: Sizes) -> Self {
        let options = AttentionModuleOptions::default();
        Self { sizes, shared: 1, options, mask: None, bias: None }
    }

    fn shared(self, shared: usize) -> Self {
        Self { shared, ..self }
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
        let sizes = [batch, heads * self.shared, queries, keys];
        std::array::from_fn(|axis| if ones[axis] { 1 } else { sizes[axis] })
    }

    /// Of query, key and value.
    fn shapes(&self) -> [[usize; 4]; 3] {
        let [batch, heads, queries, keys, width, value_width] = self.sizes;
        [[heads * self.shared, queries, width], [heads, keys, width], [heads, keys, value_width]]
            .map(|[heads, rows, width]| [batch, heads, rows, width])
    }

    fn inputs(&self) -> Vec<Input> {
        let mut inputs = self.shapes().map(|shape| Input::between(shape, -2.0..2.0)).to_vec();
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
        let check = match (self.bias, setting.dtype) {
            // That is all that a bias for a whole row gets: its largest gradient is no scale.
            (Some([.., true]), DType::F32) => check.gradient_within(3, 3e-4),
            _ => check,
        };
        check.compare::<4>(&|t| self.ours(t), &|t| self.stock(t));
    }

    fn ours(&self, t: &Operands) -> Tensor<4> {
        F::attention(t.get(0), t.get(1), t.get(2), self.mask(t.device()), t.maybe(3), self.options)
    }

    fn stock(&self, t: &Operands) -> Tensor<4> {
        repeated::attention(t.get(0), t.get(1), t.get(2), self.mask(t.device()), t.maybe(3), self.options)
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
    (sizes, 1..4usize, scale, softcap, any::<bool>(), ones(), ones()).prop_map(
        |(sizes, shared, scale, softcap, is_causal, mask, bias)| {
            let causal = AttentionModuleOptions { is_causal, ..Default::default() };
            Case { sizes, shared, options: AttentionModuleOptions { scale, softcap, ..causal }, mask, bias }
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
        Case::new([1, 2, 530, 530, 4, 5]).causal().biased(),
        Case { mask: spread, bias: spread, ..Case::new([1, 2, 300, 1000, 2, 3]).causal() },
        // Chunks of all heads of a group, of half of them, and of one.
        Case::new([1, 4, 140, 200, 2, 3]).shared(3).masked(),
        Case::new([1, 2, 160, 400, 3, 2]).shared(6).causal(),
        Case::new([1, 2, 300, 600, 2, 3]).shared(8).causal(),
        Case::new([2, 1, 100, 3000, 2, 2]).shared(3).biased(),
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
        for case in [
            Case::new([2, 2, 8, 8, 16, 16]).causal(),
            Case::new([1, 2, 5, 9, 8, 4]).masked().biased(),
            Case::new([1, 2, 5, 9, 8, 4]).shared(2).masked(),
        ] {
            let check = Check::new(case.inputs(), Setting::of(dtype));
            check.compare::<4>(&|t| case.ours(t), &|t| case.stock(t));
        }
    }
}

#[test]
fn is_differentiated() {
    let case = Case::new([2, 2, 5, 6, 3, 4]).biased();
    let masked = Case {
        options: AttentionModuleOptions {
            scale: Some(0.7),
            softcap: Some(1.5),
            ..case.clone().causal().options
        },
        mask: Some([true, true, false, false]),
        bias: Some([false, true, true, false]),
        ..case.clone()
    };
    for case in [case, masked.clone(), masked.shared(2)] {
        Check::new(case.inputs(), Setting::default()).differentiate::<4>(&|t| case.ours(t));
    }
}

#[test]
fn takes_one_input_for_all() {
    let options = AttentionModuleOptions { is_causal: true, ..Default::default() };
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

/// What is added where a key is hidden by a finite number: Burn's default, what Hugging Face adds, and numbers between. In f32 the two
/// largest leave nothing of the scores.
const FINITE: [f32; 4] = [-1e4, -1e6, -1e9, f32::MIN];

/// A row whose keys are all hidden by a finite number weighs them by what is left of their scores. Products of small whole numbers are
/// exact, and so are their sums with what hides them.
#[test]
fn keys_hidden_by_finite_numbers_are_weighed_as_in_stock() {
    for (hides, is_causal, dtype) in FINITE
        .iter()
        .flat_map(|&hides| [(hides, false), (hides, true)])
        .flat_map(|(hides, is_causal)| [(hides, is_causal, DType::F32), (hides, is_causal, DType::F64)])
    {
        let options = AttentionModuleOptions { scale: Some(1.0), is_causal, ..Default::default() };
        let case = Case { options, ..Case::new([2, 2, 5, 9, 4, 3]) };
        let mut inputs: Vec<Input> = case
            .shapes()
            .into_iter()
            .zip(1..)
            .map(|(shape, seed)| {
                let values = uniform(shape.iter().product(), seed, -1.5..1.5);
                Input::given(shape, values.into_iter().map(f64::round).collect::<Vec<_>>())
            })
            .collect();
        // All keys of the first rows, as of padding, and the first ones of the others.
        let hidden = (0..5 * 9).map(|at| if at < 18 || at % 9 < 2 { f64::from(hides) } else { 0.0 });
        inputs.push(Input::given([1, 1, 5, 9], hidden.collect::<Vec<_>>()));
        let check = Check::new(inputs, Setting::of(dtype));
        check.compare::<4>(&|t| case.ours(t), &|t| case.stock(t));
    }
}

/// By hand: four keys that are all alike weigh a quarter each, in each of four rows.
#[test]
fn hidden_keys_that_are_alike_share_the_gradient() {
    for device in Backend::ALL.map(Backend::device) {
        for hides in FINITE {
            let ones = || Tensor::<4>::ones([1, 1, 4, 2], &device.clone().autodiff()).require_grad();
            let (query, key, value) = (ones(), ones(), ones());
            let bias = Tensor::full([1, 1, 4, 4], hides, &query.device()).require_grad();
            let attended = F::attention(
                query.clone(),
                key.clone(),
                value.clone(),
                None,
                Some(bias.clone()),
                Default::default(),
            );
            let gradients = attended.sum().backward();
            let of = |x: &Tensor<4>| numbers(&x.grad(&gradients).expect("tracked").into_data());
            assert!(of(&value).iter().all(|dv| (dv - 1.0).abs() < 1e-6), "{hides}: {:?}", of(&value));
            for x in [&query, &key, &bias] {
                assert!(of(x).iter().all(|dx| dx.abs() < 1e-6), "{hides}: {:?}", of(x));
            }
        }
    }
}

/// Nothing to compute: left to Burn, with keys and values for all heads.
#[test]
fn groups_without_elements_are_as_in_stock() {
    for sizes in [[0, 2, 3, 4, 5, 2], [1, 2, 0, 4, 5, 2]] {
        let case = Case::new(sizes).shared(2);
        for case in [case.clone(), Case { bias: Some([false, false, true, false]), ..case }] {
            let check = Check::new(case.inputs(), Setting::default());
            check.compare_panics::<4>(&|t| case.ours(t), &|t| case.stock(t));
        }
    }
}

/// Without a graph, on all backends.
#[test]
fn groups_are_taken_in_inference() {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for device in Backend::ALL.map(Backend::device) {
            if !device.supports_dtype(dtype) {
                continue;
            }
            let case = Case::new([2, 2, 5, 7, 8, 3]).shared(3).causal();
            // Products of queries and keys that are no f16.
            let shapes = case.shapes();
            let input = |at: usize| {
                tensor::<4>(
                    vec![if at < 2 { 24.0 } else { 1.0 }; shapes[at].iter().product()],
                    &shapes[at],
                    &device,
                    dtype,
                )
            };
            let [query, key, value] = [0, 1, 2].map(input);
            let found = F::attention(query.clone(), key.clone(), value.clone(), None, None, case.options);
            let stock = repeated::attention(query, key, value, None, None, case.options);
            assert_eq!(numbers(&found.into_data()), numbers(&stock.into_data()), "{dtype:?}");
        }
    }
}

/// What does not fit is left to Burn.
#[test]
fn treats_odd_shapes_as_stock() {
    let options = AttentionModuleOptions::default;
    let check = |shapes: [[usize; 4]; 3]| {
        Check::new(shapes.map(Input::random), Setting::default()).compare_panics::<4>(
            &|t| F::attention(t.get(0), t.get(1), t.get(2), None, None, options()),
            &|t| module::attention(t.get(0), t.get(1), t.get(2), None, None, options()),
        );
    };
    check([[2, 2, 3, 4], [2, 2, 5, 3], [2, 2, 5, 4]]);
    check([[2, 4, 3, 4], [2, 1, 5, 4], [2, 1, 5, 4]]);
    check([[2, 4, 3, 4], [2, 3, 5, 4], [2, 3, 5, 4]]);
    check([[2, 4, 3, 4], [2, 2, 5, 4], [2, 4, 5, 4]]);
}

/// Gradients that many chunks add to, in half precision.
mod sums_in_half_precision {
    use super::*;

    /// The root of the mean square of what is between a gradient and the truth.
    fn distance(found: &[f64], truth: &[f64]) -> f64 {
        let squares = found.iter().zip(truth).map(|(found, truth)| (found - truth).powi(2));
        (squares.sum::<f64>() / truth.len() as f64).sqrt()
    }

    /// The gradients of ours are no further from those in f64, of the same numbers, than those of Burn's own operations.
    fn check(case: &Case, ranges: [Range<f64>; 4]) {
        let device = Device::flex().autodiff();
        let mut shapes = case.shapes().to_vec();
        shapes.extend(case.bias.map(|ones| case.spread(ones)));
        let [batch, heads, queries, _] = shapes[0];
        let output = [batch, heads, queries, case.sizes[5]];
        for dtype in HALF {
            let rounded = |shape: [usize; 4], seed: usize, range: &Range<f64>| {
                let values = uniform(shape.iter().product(), seed as u64, range.clone());
                numbers(&tensor::<4>(values, &shape, &device, dtype).into_data())
            };
            let of_input = |at: usize| rounded(shapes[at], at, &ranges[at.min(2)]);
            let inputs: Vec<_> = (0..shapes.len()).map(of_input).collect();
            let dy = rounded(output, 9, &ranges[3]);
            let gradients = |dtype: DType, ours: bool| -> Vec<Vec<f64>> {
                let leaf =
                    |at: usize| tensor::<4>(inputs[at].clone(), &shapes[at], &device, dtype).require_grad();
                let leaves: Vec<_> = (0..shapes.len()).map(leaf).collect();
                let [query, key, value] = [0, 1, 2].map(|at| leaves[at].clone());
                let (mask, bias) = (case.mask(&device), leaves.get(3).cloned());
                let y = match ours {
                    true => F::attention(query, key, value, mask, bias, case.options),
                    false => repeated::attention(query, key, value, mask, bias, case.options),
                };
                let dy = tensor(dy.clone(), &output, &device, dtype);
                let gradients = (y * dy).sum().backward();
                let of = |leaf: &Tensor<4>| numbers(&leaf.grad(&gradients).expect("tracked").into_data());
                leaves.iter().map(of).collect()
            };
            let truth = gradients(DType::F64, false);
            let (ours, stock) = (gradients(dtype, true), gradients(dtype, false));
            for (index, truth) in truth.iter().enumerate() {
                let [ours, stock] = [&ours, &stock].map(|found| distance(&found[index], truth));
                let name = ["query", "key", "value", "bias"][index];
                assert!(
                    ours <= stock,
                    "{case:?}, {dtype:?}: the gradient of the {name} is {ours:e} from that in f64, stock's {stock:e}"
                );
            }
        }
    }

    /// Gradients of one sign, each small beside their sum.
    const SAME_SIGN: [Range<f64>; 4] = [-2.0..2.0, -2.0..2.0, 0.0..1.0, 0.5..1.0];
    /// Gradients that nearly cancel.
    const ANY_SIGN: [Range<f64>; 4] = [-2.0..2.0, -2.0..2.0, -1.0..1.0, -1.0..1.0];

    /// 16 chunks of queries.
    #[test]
    fn of_queries() {
        for ranges in [SAME_SIGN, ANY_SIGN] {
            check(&Case::new([1, 1, 1024, 4096, 4, 4]), ranges);
        }
    }

    /// 16 chunks, of which the early ones see fewer keys; two heads.
    #[test]
    fn of_queries_that_see_some_keys() {
        check(&Case::new([1, 2, 1024, 1024, 4, 4]).causal(), ANY_SIGN);
    }

    /// Chunks of some heads of a group, whose queries see some keys.
    #[test]
    fn of_shared_heads() {
        for ranges in [SAME_SIGN, ANY_SIGN] {
            check(&Case::new([1, 2, 512, 1024, 4, 4]).shared(6).causal(), ranges);
        }
    }

    /// A bias of all queries, then of all heads: 16 chunks add to it.
    #[test]
    fn of_a_bias() {
        for (sizes, ones) in [
            ([1, 1, 1024, 4096, 4, 4], [true, true, true, false]),
            ([1, 16, 64, 4096, 4, 4], [true, true, false, false]),
            ([1, 2, 64, 4096, 4, 4], [false; 4]),
        ] {
            for ranges in [SAME_SIGN, ANY_SIGN] {
                check(&Case { bias: Some(ones), ..Case::new(sizes) }, ranges);
            }
        }
    }
}
