//! Compares divergences of a head from a teacher's head, and log probabilities of targets, with their definitions on all logits.
use crate::common::*;
use crate::loss::labels;
use burn::tensor::{Bool, DType, Device, Int, Tensor, TensorData, activation};
use burn_memsave::functional::{self as F, DistillationOptions, HardLabels, KlDirection, Teacher};
use proptest::prelude::*;

/// What is computed.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Kl(KlDirection),
    Jsd(f64),
}

const KINDS: [Kind; 5] = [
    Kind::Kl(KlDirection::Forward),
    Kind::Kl(KlDirection::Reverse),
    Kind::Jsd(0.5),
    Kind::Jsd(0.1),
    Kind::Jsd(0.95),
];

/// Besides the student.
#[derive(Clone, Copy, Debug)]
struct Case {
    kind: Kind,
    temperature: f64,
    teacher_bias: bool,
    /// The weight of hard labels.
    hard: Option<f64>,
    /// Rows with factors, of which every third is 0.
    factors: bool,
    chunk_bytes: usize,
}

const PLAIN: Case = Case {
    kind: Kind::Kl(KlDirection::Forward),
    temperature: 1.0,
    teacher_bias: false,
    hard: None,
    factors: false,
    chunk_bytes: 100,
};

fn cases() -> impl Strategy<Value = Case> {
    let temperature = prop::sample::select(vec![1.0, 2.5, 0.5]);
    let hard = prop::sample::select(vec![None, Some(0.3)]);
    let chunk = prop::sample::select(vec![1usize, 200, 1 << 20]);
    let kind = prop::sample::select(&KINDS[..]);
    (kind, temperature, any::<bool>(), hard, any::<bool>(), chunk).prop_map(
        |(kind, temperature, teacher_bias, hard, factors, chunk_bytes)| Case {
            kind,
            temperature,
            teacher_bias,
            hard,
            factors,
            chunk_bytes,
        },
    )
}

/// The width of the teacher.
const D_TEACHER: usize = 4;

/// The same for every dtype but for rounding to `rounded`.
fn teacher(
    case: Case,
    [rows, classes]: [usize; 2],
    device: &Device,
    [rounded_to, dtype]: [DType; 2],
) -> Teacher {
    let values = |len, seed| rounded(uniform(len, seed, -1.5..1.5), rounded_to);
    Teacher {
        x: tensor(values(rows * D_TEACHER, 101), &[rows, D_TEACHER], device, dtype),
        weight: tensor(values(D_TEACHER * classes, 102), &[D_TEACHER, classes], device, dtype),
        bias: case.teacher_bias.then(|| tensor(values(classes, 103), &[classes], device, dtype)),
    }
}

/// In the type that sums are made in.
fn factors(rows: usize, device: &Device, dtype: DType) -> Tensor<1> {
    let values = uniform(rows, 104, 0.2..1.0).into_iter().enumerate();
    let values = values.map(|(row, factor)| if row % 3 == 1 { 0.0 } else { factor }).collect();
    tensor(values, &[rows], device, dtype)
}

fn dense(x: Tensor<2>, weight: Tensor<2>, bias: Option<Tensor<1>>) -> Tensor<2> {
    let logits = x.matmul(weight);
    match bias {
        Some(bias) => logits + bias.unsqueeze::<2>(),
        None => logits,
    }
}

fn ours(
    (x, weight, bias): (Tensor<2>, Tensor<2>, Option<Tensor<1>>),
    teacher: Teacher,
    factors: Option<Tensor<1>>,
    case: Case,
) -> Tensor<1> {
    let targets = labels([x.dims()[0]], weight.dims()[1], &x.device());
    let options = DistillationOptions {
        temperature: case.temperature,
        factors,
        hard_labels: case.hard.map(|weight| HardLabels { targets, weight }),
        chunk_bytes: Some(case.chunk_bytes),
    };
    match case.kind {
        Kind::Kl(direction) => F::linear_kl_div(x, weight, bias, teacher, direction, options),
        Kind::Jsd(beta) => F::linear_jsd(x, weight, bias, teacher, beta, options),
    }
}

/// The loss of every row, by Burn's operations on all logits.
fn of_rows(student: Tensor<2>, teacher: Tensor<2>, case: Case) -> Tensor<1> {
    let [rows, classes] = student.dims();
    // Not by `div_scalar` or `mean`, whose gradients Burn 0.22.1 multiplies by a number of f32.
    let inverse = case.temperature.recip();
    let [log_q, log_p] =
        [&student, &teacher].map(|x| activation::log_softmax(x.clone().mul_scalar(inverse), 1));
    let kl = |a: &Tensor<2>, b: &Tensor<2>| (a.clone().exp() * (a.clone() - b.clone())).sum_dim(1);
    let soft = match case.kind {
        Kind::Kl(KlDirection::Forward) => kl(&log_p, &log_q),
        Kind::Kl(KlDirection::Reverse) => kl(&log_q, &log_p),
        Kind::Jsd(beta) => {
            let mixture = log_p.clone().exp().mul_scalar(beta) + log_q.clone().exp().mul_scalar(1.0 - beta);
            let log_m = mixture.log();
            kl(&log_p, &log_m).mul_scalar(beta) + kl(&log_q, &log_m).mul_scalar(1.0 - beta)
        }
    };
    let soft = soft.reshape([rows]);
    let Some(weight) = case.hard else { return soft };
    let targets = labels([rows], classes, &student.device()).reshape([rows, 1]);
    let hard = activation::log_softmax(student, 1).gather(1, targets).neg();
    soft + hard.reshape([rows]).mul_scalar(weight)
}

fn defined(
    (x, weight, bias): (Tensor<2>, Tensor<2>, Option<Tensor<1>>),
    teacher: Teacher,
    factors: Option<Tensor<1>>,
    case: Case,
) -> Tensor<1> {
    let teacher = dense(teacher.x, teacher.weight, teacher.bias);
    let rows = x.dims()[0];
    let losses = of_rows(dense(x, weight, bias), teacher, case);
    match factors {
        None => losses.sum().mul_scalar((rows as f64).recip()),
        Some(factors) => (losses.clone() * factors.cast(losses.dtype())).sum(),
    }
}

fn operands(rows: usize, d_input: usize, classes: usize, bias: bool) -> Vec<Input> {
    let mut inputs = vec![Input::random([rows, d_input]), Input::random([d_input, classes])];
    inputs.extend(bias.then(|| Input::random([classes])));
    inputs
}

fn student(t: &Operands) -> (Tensor<2>, Tensor<2>, Option<Tensor<1>>) {
    (t.get::<2>(0), t.get::<2>(1), t.maybe::<1>(2))
}

type Divergence =
    fn((Tensor<2>, Tensor<2>, Option<Tensor<1>>), Teacher, Option<Tensor<1>>, Case) -> Tensor<1>;

/// With a teacher and factors of a case.
fn with_teacher(t: &Operands, case: Case, f: Divergence) -> Tensor<1> {
    let student = student(t);
    let ([rows, _], [_, classes], dtype) = (student.0.dims(), student.1.dims(), student.0.dtype());
    let factors = case.factors.then(|| factors(rows, t.device(), dtype));
    f(student, teacher(case, [rows, classes], t.device(), [dtype; 2]), factors, case)
}

#[test]
fn divergences_equal_their_definitions() {
    let shape = (1..9usize, 1..6usize, 1..24usize, any::<bool>());
    for_all(128, (shape, cases(), settings()), |((rows, d_input, classes, bias), case, setting)| {
        let tolerance = if setting.dtype == DType::F64 { 1e-9 } else { 5e-5 };
        let check = Check::new(operands(rows, d_input, classes, bias), setting).within(tolerance);
        check.compare::<1>(&|t| with_teacher(t, case, ours), &|t| with_teacher(t, case, defined));
    });
}

#[test]
fn divergences_of_many_elements_equal_their_definitions() {
    let shapes = [(70, 1 << 15), (70, 1 << 24), (20, 1 << 14)];
    for (kind, (rows, chunk_bytes)) in KINDS.into_iter().zip(shapes.into_iter().cycle()) {
        let case = Case { kind, chunk_bytes, temperature: 1.5, hard: Some(0.5), ..PLAIN };
        let check = Check::new(operands(rows, 30, 900, true), Setting::default()).within(2e-5);
        check.compare::<1>(&|t| with_teacher(t, case, ours), &|t| with_teacher(t, case, defined));
    }
}

#[test]
fn divergences_are_differentiated() {
    for kind in KINDS {
        for (rows, hard) in [(5, None), (2, Some(0.3))] {
            let case = Case { kind, hard, temperature: 2.0, factors: true, teacher_bias: true, ..PLAIN };
            let check = Check::new(operands(rows, 3, 7, true), Setting::default());
            check.differentiate::<1>(&|t| with_teacher(t, case, ours));
        }
    }
}

/// A teacher that is the student: nothing is lost, and there is no gradient.
#[test]
fn a_student_does_not_diverge_from_itself() {
    let device = &Device::flex().autodiff();
    let leaf = |shape: &[usize], seed| {
        tensor::<2>(uniform(shape.iter().product(), seed, -3.0..3.0), shape, device, DType::F32)
    };
    for kind in KINDS {
        let (x, weight) = (leaf(&[6, 5], 1), leaf(&[5, 40], 2));
        let teacher = Teacher { x: x.clone(), weight: weight.clone(), bias: None };
        let (x, weight) = (x.require_grad(), weight.require_grad());
        let loss = ours((x.clone(), weight.clone(), None), teacher, None, Case { kind, ..PLAIN });
        let gradients = loss.backward();
        let all = [loss.into_data(), x.grad(&gradients).unwrap().into_data()];
        for data in all.into_iter().chain([weight.grad(&gradients).unwrap().into_data()]) {
            assert!(numbers(&data).iter().all(|x| x.abs() < 1e-6), "{kind:?}: {data}");
        }
    }
}

/// The two limits that the documentation names.
#[test]
fn jensen_shannon_becomes_both_divergences() {
    let device = Device::flex();
    let leaf = |shape: &[usize], seed| {
        tensor::<2>(uniform(shape.iter().product(), seed, -1.0..1.0), shape, &device, DType::F64)
    };
    let of = |kind| {
        let student = (leaf(&[6, 5], 1), leaf(&[5, 40], 2), None);
        let teacher = Teacher { x: leaf(&[6, 3], 3), weight: leaf(&[3, 40], 4), bias: None };
        numbers(&ours(student, teacher, None, Case { kind, ..PLAIN }).into_data())[0]
    };
    const SMALL: f64 = 1e-6;
    for (jsd, kl) in [
        (of(Kind::Jsd(SMALL)), of(Kind::Kl(KlDirection::Forward))),
        (of(Kind::Jsd(1.0 - SMALL)), of(Kind::Kl(KlDirection::Reverse))),
    ] {
        assert!((jsd / SMALL / kl - 1.0).abs() < 1e-4, "{jsd:e} instead of {:e}", SMALL * kl);
    }
}

fn log_probs(t: &Operands, chunk_bytes: usize, masked: bool) -> Tensor<1> {
    let (x, weight, bias) = student(t);
    let ([rows, _], [_, classes]) = (x.dims(), weight.dims());
    let mask = masked.then(|| mask(rows, t.device()));
    let options = F::LinearLogProbOptions { mask, chunk_bytes: Some(chunk_bytes) };
    F::linear_log_prob(x, weight, bias, labels([rows], classes, t.device()), options)
}

/// Every third row does not count.
fn mask(rows: usize, device: &Device) -> Tensor<1, Bool> {
    let counts = (0..rows).map(|row| row % 3 != 1).collect::<Vec<_>>();
    Tensor::from_data(TensorData::new(counts, [rows]), device)
}

fn defined_log_probs(t: &Operands, masked: bool) -> Tensor<1> {
    let (x, weight, bias) = student(t);
    let ([rows, _], [_, classes]) = (x.dims(), weight.dims());
    let logs = activation::log_softmax(dense(x, weight, bias), 1);
    let targets = labels([rows], classes, t.device());
    let picked = logs.gather(1, targets.reshape([rows, 1])).reshape([rows]);
    if masked { picked.mask_fill(mask(rows, t.device()).bool_not(), 0) } else { picked }
}

#[test]
fn log_probabilities_equal_their_definition() {
    let shape = (1..9usize, 1..6usize, 1..24usize, any::<bool>());
    let chunk = prop::sample::select(vec![1usize, 100, 1 << 20]);
    for_all(
        96,
        (shape, chunk, any::<bool>(), settings()),
        |((rows, d_input, classes, bias), chunk, masked, setting)| {
            let tolerance = if setting.dtype == DType::F64 { 1e-9 } else { 2e-5 };
            let check = Check::new(operands(rows, d_input, classes, bias), setting).within(tolerance);
            check.compare::<1>(&|t| log_probs(t, chunk, masked), &|t| defined_log_probs(t, masked));
        },
    );
}

#[test]
fn log_probabilities_of_many_elements_equal_their_definition() {
    for (rows, chunk) in [(70, 1 << 15), (70, 1 << 24), (20, 1 << 14)] {
        let check = Check::new(operands(rows, 30, 900, true), Setting::default()).within(1e-5);
        check.compare::<1>(&|t| log_probs(t, chunk, true), &|t| defined_log_probs(t, true));
    }
}

#[test]
fn log_probabilities_are_differentiated() {
    let check = Check::new(operands(5, 3, 7, true), Setting::default());
    check.differentiate::<1>(&|t| log_probs(t, 100, true));
}

/// One run in some dtype: loss and gradients of x, weight and bias.
struct Run {
    shape: [usize; 3],
    tracked: [bool; 3],
    /// Inputs are rounded to the first.
    dtypes: [DType; 2],
    /// Rows of NaN, whose factor is 0.
    spoiled: bool,
}

type Function<'a> = &'a dyn Fn((Tensor<2>, Tensor<2>, Option<Tensor<1>>), [DType; 2]) -> Tensor<1>;

impl Run {
    fn results(&self, f: Function) -> Vec<Option<Vec<f64>>> {
        let Self { shape: [rows, d_input, classes], tracked, dtypes: [rounded_to, dtype], spoiled } = *self;
        let device = &Device::flex().autodiff();
        let values = |len, seed| rounded(uniform(len, seed, -1.0..1.0), rounded_to);
        let mut of_x = values(rows * d_input, 1);
        if spoiled {
            let rows = of_x.chunks_mut(d_input).skip(1).step_by(3);
            rows.for_each(|row| row.fill(f64::NAN));
        }
        let track = |wanted: bool, leaf: Tensor<2>| if wanted { leaf.require_grad() } else { leaf };
        let x = track(tracked[0], tensor(of_x, &[rows, d_input], device, dtype));
        let weight =
            track(tracked[1], tensor(values(d_input * classes, 2), &[d_input, classes], device, dtype));
        let bias = tensor::<1>(values(classes, 3), &[classes], device, dtype);
        let bias = if tracked[2] { bias.require_grad() } else { bias };
        let loss = f((x.clone(), weight.clone(), Some(bias.clone())), self.dtypes);
        let gradients = loss.backward();
        let of = |gradient: Option<TensorData>| gradient.map(|gradient| numbers(&gradient));
        vec![
            Some(numbers(&loss.into_data())),
            of(x.grad(&gradients).map(Tensor::into_data)),
            of(weight.grad(&gradients).map(Tensor::into_data)),
            of(bias.grad(&gradients).map(Tensor::into_data)),
        ]
    }
}

const TRACKED: [[bool; 3]; 5] =
    [[true; 3], [true, false, false], [false, true, false], [false, false, true], [true, true, false]];

/// Rows that do not count may hold anything: student's, teacher's, and targets that are no class.
#[test]
fn rows_that_do_not_count_are_not_read() {
    let spoil = |x: Tensor<2>, mask: Tensor<1, Bool>| {
        let [rows, columns] = x.dims();
        x.mask_fill(mask.bool_not().reshape([rows, 1]).expand([rows, columns]), f32::NAN)
    };
    let weights = |x: &Tensor<2>| {
        let [rows, _] = x.dims();
        tensor::<1>(uniform(rows, 9, 0.5..1.0), &[rows], &x.device(), DType::F32)
    };
    let divergence = |kind, spoils: bool| {
        let case = Case { kind, hard: Some(0.5), factors: true, ..PLAIN };
        move |student: (Tensor<2>, Tensor<2>, Option<Tensor<1>>), dtypes: [DType; 2]| {
            let ([rows, _], [_, classes], device) = (student.0.dims(), student.1.dims(), student.0.device());
            let teacher = teacher(case, [rows, classes], &device, dtypes);
            let x = if spoils { spoil(teacher.x, mask(rows, &device)) } else { teacher.x };
            ours(student, Teacher { x, ..teacher }, Some(factors(rows, &device, DType::F32)), case)
        }
    };
    let log_prob = |spoils: bool| {
        move |(x, weight, bias): (Tensor<2>, Tensor<2>, Option<Tensor<1>>), _: [DType; 2]| {
            let ([rows, _], [_, classes], device) = (x.dims(), weight.dims(), x.device());
            let (mask, weights) = (mask(rows, &device), weights(&x));
            let targets = labels([rows], classes, &device);
            let targets = if spoils { targets.mask_fill(mask.clone().bool_not(), -100) } else { targets };
            let options = F::LinearLogProbOptions { mask: Some(mask), chunk_bytes: Some(200) };
            (F::linear_log_prob(x, weight, bias, targets, options) * weights).sum()
        }
    };
    for dtype in [DType::F32, DType::F16] {
        for (shape, tracked) in TRACKED.into_iter().flat_map(|t| [([20, 4, 30], t), ([8, 12, 30], t)]) {
            let run = |spoiled, f: Function| Run { shape, tracked, dtypes: [dtype; 2], spoiled }.results(f);
            let kinds = KINDS.into_iter().map(|kind| {
                let [clean, spoiled] = [false, true].map(|spoils| run(spoils, &divergence(kind, spoils)));
                (format!("{kind:?}"), clean, spoiled)
            });
            let log_probs = [false, true].map(|spoils| run(spoils, &log_prob(spoils)));
            let [clean, spoiled] = log_probs;
            for (what, clean, spoiled) in kinds.chain([("log_prob".into(), clean, spoiled)]) {
                assert!(clean.iter().flatten().flatten().all(|x| x.is_finite()), "{what}: {clean:?}");
                assert_eq!(clean, spoiled, "{what}, {dtype:?}, {shape:?}, {tracked:?}");
            }
        }
    }
}

/// A number that is added to all logits of a row, here by the bias, changes nothing: `exp(x - max)` does not lose what is small beside it.
#[test]
fn logits_may_be_large() {
    let heads: [&dyn Fn(Tensor<2>, Tensor<2>, Tensor<1>) -> Tensor<1>; 7] = [
        &|x, weight, bias| {
            let targets = Tensor::<1, Int>::ones([x.dims()[0]], &x.device());
            F::linear_log_prob(x, weight, Some(bias), targets, Default::default()).sum()
        },
        &|x, weight, bias| {
            let targets = Tensor::<1, Int>::ones([x.dims()[0]], &x.device());
            F::linear_cross_entropy(x, weight, Some(bias), targets, Default::default())
        },
        &|x, weight, bias| divergence(KINDS[0], x, weight, bias),
        &|x, weight, bias| divergence(KINDS[1], x, weight, bias),
        &|x, weight, bias| divergence(KINDS[2], x, weight, bias),
        &|x, weight, bias| divergence(KINDS[3], x, weight, bias),
        &|x, weight, bias| divergence(KINDS[4], x, weight, bias),
    ];
    /// From a teacher of the probabilities 1/4 and 3/4.
    fn divergence(kind: Kind, x: Tensor<2>, weight: Tensor<2>, bias: Tensor<1>) -> Tensor<1> {
        let [rows, _] = x.dims();
        let device = x.device();
        let zeros = || Tensor::zeros([rows, 2], &device);
        let bias_of_teacher = Tensor::from_data([0.0, 3f32.ln()], &device);
        let teacher =
            Teacher { x: zeros(), weight: Tensor::zeros([2, 2], &device), bias: Some(bias_of_teacher) };
        ours((x, weight, Some(bias)), teacher, None, Case { kind, hard: Some(0.3), ..PLAIN })
    }
    for (device, is_frozen) in
        Backend::ALL.into_iter().flat_map(|b| [true, false].map(|frozen| (b.device().autodiff(), frozen)))
    {
        for (at, head) in heads.iter().enumerate() {
            // Logits that are all equal: `x` is 0.
            let run = |shift: f32| {
                let x = Tensor::<2>::zeros([3, 2], &device).require_grad();
                let weight = Tensor::<2>::from_data([[1.0, -1.0], [0.5, 2.0]], &device);
                let weight = if is_frozen { weight } else { weight.require_grad() };
                let bias = Tensor::<1>::full([2], shift, &device).require_grad();
                let y = head(x.clone(), weight, bias.clone());
                let gradients = y.backward();
                let mut all = numbers(&y.into_data());
                all.extend(numbers(&x.grad(&gradients).expect("tracked").into_data()));
                all.extend(numbers(&bias.grad(&gradients).expect("tracked").into_data()));
                all
            };
            let exact = run(0.0);
            for shift in [1e5, 1e8, -1e8, 1e30] {
                for (found, exact) in run(shift).into_iter().zip(&exact) {
                    assert!((found - exact).abs() < 1e-6, "head {at}, {shift}: {found} instead of {exact}");
                }
            }
        }
    }
}

/// Half precision, against f64: the errors of gradients are not above those of stock, and small.
mod half {
    use super::*;

    /// The root mean square of the errors, and of the values.
    fn error(result: &[f64], truth: &[f64]) -> [f64; 2] {
        let mean_square = |values: &mut dyn Iterator<Item = f64>| {
            (values.map(|value| value * value).sum::<f64>() / truth.len() as f64).sqrt()
        };
        let errors = &mut result.iter().zip(truth).map(|(a, b)| a - b);
        [mean_square(errors), mean_square(&mut truth.iter().copied())]
    }

    fn is_not_worse_than_stock(
        what: &str,
        run: impl Fn([DType; 2]) -> Run,
        dtype: DType,
        [ours, stock]: [Function; 2],
    ) {
        let truth = run([dtype, DType::F64]).results(stock);
        let stock = run([dtype; 2]).results(stock);
        let ours = run([dtype; 2]).results(ours);
        let allowed = if dtype == DType::F16 { 2e-3 } else { 1.6e-2 };
        for (which, ((ours, stock), truth)) in ours.into_iter().zip(stock).zip(truth).enumerate() {
            assert_eq!(ours.is_some(), truth.is_some());
            let (Some(ours), Some(stock), Some(truth)) = (ours, stock, truth) else { continue };
            let ([ours, scale], [stock, _]) = (error(&ours, &truth), error(&stock, &truth));
            assert!(
                (which == 0 || ours <= 1.05 * stock) && ours <= allowed * scale,
                "{what}, {dtype:?}, result {which}: {ours:e}, stock {stock:e}, of {scale:e}"
            );
        }
    }

    /// Many chunks of rows, and fewer rows than features.
    const SHAPES: [[usize; 3]; 2] = [[600, 32, 150], [60, 128, 150]];

    #[test]
    fn divergences_are_not_worse_than_stock() {
        for (dtype, kind) in HALF.into_iter().flat_map(|dtype| KINDS.map(|kind| (dtype, kind))) {
            for (shape, tracked) in SHAPES.into_iter().flat_map(|shape| TRACKED.map(|t| (shape, t))) {
                let case = Case { kind, temperature: 2.0, teacher_bias: true, chunk_bytes: 4000, ..PLAIN };
                let with = |f: Divergence| {
                    move |student: (Tensor<2>, Tensor<2>, Option<Tensor<1>>), dtypes: [DType; 2]| {
                        let (shape, device) =
                            ([student.0.dims()[0], student.1.dims()[1]], student.0.device());
                        let teacher = teacher(case, shape, &device, dtypes);
                        // Large enough for the gradients to be normal numbers of f16.
                        let wide = if dtypes[1] == DType::F64 { DType::F64 } else { DType::F32 };
                        let factors = Tensor::full([shape[0]], 0.0625, (&device, wide));
                        f(student, teacher, Some(factors), case)
                    }
                };
                let run = |dtypes| Run { shape, tracked, dtypes, spoiled: false };
                let what = format!("{kind:?}, {shape:?}, {tracked:?}");
                is_not_worse_than_stock(&what, run, dtype, [&with(ours), &with(defined)]);
            }
        }
    }

    #[test]
    fn log_probabilities_are_not_worse_than_stock() {
        fn weighted(logs: Tensor<1>) -> Tensor<1> {
            let [rows] = logs.dims();
            let weights = tensor::<1>(uniform(rows, 9, 0.5..1.0), &[rows], &logs.device(), DType::F32);
            (logs.clone() * weights.cast(logs.dtype())).sum()
        }
        let ours = |(x, weight, bias): (Tensor<2>, Tensor<2>, Option<Tensor<1>>), _: [DType; 2]| {
            let targets = labels([x.dims()[0]], weight.dims()[1], &x.device());
            let options = F::LinearLogProbOptions { chunk_bytes: Some(4000), ..Default::default() };
            let logs = F::linear_log_prob(x, weight, bias, targets, options);
            assert_eq!(logs.dtype(), DType::F32);
            weighted(logs)
        };
        let stock = |(x, weight, bias): (Tensor<2>, Tensor<2>, Option<Tensor<1>>), _: [DType; 2]| {
            let [rows, _] = x.dims();
            let targets: Tensor<1, Int> = labels([rows], weight.dims()[1], &x.device());
            let logs = activation::log_softmax(dense(x, weight, bias), 1);
            let logs = logs.gather(1, targets.reshape([rows, 1])).reshape([rows]);
            let dtype = if logs.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
            weighted(logs.cast(dtype))
        };
        for (dtype, shape) in HALF.into_iter().flat_map(|dtype| SHAPES.map(|shape| (dtype, shape))) {
            for tracked in TRACKED {
                let run = |dtypes| Run { shape, tracked, dtypes, spoiled: false };
                is_not_worse_than_stock(&format!("{shape:?}, {tracked:?}"), run, dtype, [&ours, &stock]);
            }
        }
    }

    /// Of many classes each gradient is small beside what one of a teacher far away could be.
    #[test]
    fn many_classes_are_not_lost_in_f16() {
        for kind in KINDS {
            let shape = [20, 16, 20_000];
            let results = |dtypes: [DType; 2]| {
                let run = Run { shape, tracked: [true, false, false], dtypes, spoiled: false };
                run.results(&|(x, weight, bias), dtypes| {
                    let wide = if dtypes[1] == DType::F64 { DType::F64 } else { DType::F32 };
                    let factors = Tensor::full([shape[0]], 1.0, (&x.device(), wide));
                    let untracked = |tensor: &Tensor<2>| Tensor::from_inner(tensor.clone().inner());
                    let weight_of_teacher = untracked(&weight).mul_scalar(2.0);
                    let teacher = Teacher { x: untracked(&x), weight: weight_of_teacher, bias: None };
                    ours((x, weight, bias), teacher, Some(factors), Case { kind, ..PLAIN })
                })
            };
            let (truth, ours) = (results([DType::F16, DType::F64]), results([DType::F16; 2]));
            let [ours, truth] = [ours, truth].map(|results| results[1].clone().expect("x is tracked"));
            let [error, of] = error(&ours, &truth);
            assert!(error <= 2e-3 * of, "{kind:?}: {error:e} of {of:e}");
        }
    }

    /// Gradients that f16 cannot hold until a scaled loss brings them into its range; a teacher far away does not overflow.
    #[test]
    fn small_factors_and_large_logits_are_not_lost_in_f16() {
        for kind in KINDS {
            for (shape, scale) in [([200, 16, 64], 1.0), ([12, 16, 64], 1.0), ([200, 16, 64], 40.0)] {
                let case = Case { kind, ..PLAIN };
                let results = |factor: f64, upstream: f64, dtypes: [DType; 2]| {
                    let run = Run { shape, tracked: [true, false, true], dtypes, spoiled: false };
                    run.results(&|student, dtypes| {
                        let (rows, device) = (shape[0], student.0.device());
                        let teacher = teacher(case, [rows, shape[2]], &device, dtypes);
                        let teacher = Teacher { weight: teacher.weight.mul_scalar(scale), ..teacher };
                        let wide = if dtypes[1] == DType::F64 { DType::F64 } else { DType::F32 };
                        let factors = Tensor::full([rows], factor, (&device, wide));
                        ours(student, teacher, Some(factors), case).mul_scalar(upstream)
                    })
                };
                let truth = results(2f64.powi(-9), 1.0, [DType::F16, DType::F64]);
                let ours = results(2f64.powi(-22), 2f64.powi(13), [DType::F16; 2]);
                for (which, (ours, truth)) in ours.into_iter().zip(truth).enumerate().skip(1) {
                    assert_eq!(ours.is_some(), truth.is_some());
                    let (Some(ours), Some(truth)) = (ours, truth) else { continue };
                    let [ours, of] = error(&ours, &truth);
                    assert!(ours <= 1e-2 * of, "{kind:?}, {shape:?}, {scale}, {which}: {ours:e} of {of:e}");
                }
            }
        }
    }
}

#[test]
fn arguments_that_do_not_fit_are_refused() {
    let device = Device::flex().autodiff();
    let teacher = |rows, classes, dtype| Teacher {
        x: Tensor::zeros([rows, 3], (&device, dtype)),
        weight: Tensor::zeros([3, classes], (&device, dtype)),
        bias: None,
    };
    let run = |teacher: Teacher, beta: f64, options: DistillationOptions| {
        let (x, weight) = (Tensor::<2>::zeros([2, 4], &device), Tensor::<2>::zeros([4, 5], &device));
        let attempt = || F::linear_jsd(x, weight, None, teacher, beta, options).into_data();
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(attempt)).is_ok()
    };
    let options = DistillationOptions::default;
    assert!(run(teacher(2, 5, DType::F32), 0.5, options()));
    assert!(!run(teacher(3, 5, DType::F32), 0.5, options()));
    assert!(!run(teacher(2, 4, DType::F32), 0.5, options()));
    assert!(!run(teacher(2, 5, DType::F64), 0.5, options()));
    for beta in [0.0, 1.0, -0.5, f64::NAN] {
        assert!(!run(teacher(2, 5, DType::F32), beta, options()));
    }
    for temperature in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        assert!(!run(teacher(2, 5, DType::F32), 0.5, DistillationOptions { temperature, ..options() }));
    }
    let tracked = teacher(2, 5, DType::F32);
    assert!(!run(Teacher { x: tracked.x.require_grad(), ..tracked }, 0.5, options()));
}
