//! Compares every row of the table with its twin: outputs, and the gradients of the input and of every parameter, whatever is tracked.
use crate::common::{Backend, HALF, generator};
use crate::table::{
    self, Case, Check, Notes, Row, Visitor,
    closeness::Closeness,
    run::{Layer, Named, Setting, outcome, parameter_gradients},
};
use burn::module::Module;
use burn::tensor::{DType, Device};
use std::fmt::Display;

/// One test per family.
macro_rules! families {
    ($($family:ident),+) => {$(
        #[test]
        fn $family() {
            let mut comparison = Comparison::default();
            table::$family::visit(&mut comparison);
            assert!(comparison.failures.is_empty(), "{}", comparison.failures.join("\n"));
        }
    )+};
}
table::families!(families);

#[derive(Default)]
struct Comparison {
    failures: Vec<String>,
}

impl Visitor for Comparison {
    fn row<const D: usize, const O: usize, S, M>(&mut self, row: Row<'_, D, O, S, M>)
    where
        S: Module + Display + From<M>,
        M: Module + Display + From<S>,
    {
        if row.notes.leaves_out(Check::Gradients, &row.name) {
            return;
        }
        let shape = row.shapes.test;
        let run = |side: Side, setting: &Setting| {
            let stock = setting.fill((row.stock.init)(&setting.device, shape));
            match side {
                Side::Stock => {
                    let forward = |x| (row.stock.forward)(&stock, x);
                    let gradients = |gradients: &_| parameter_gradients(&stock, gradients);
                    outcome(&Layer { forward: &forward, gradients: &gradients }, setting, shape)
                }
                Side::Ours => {
                    let ours = M::from(stock);
                    let forward = |x| (row.ours.forward)(&ours, x);
                    let gradients = |gradients: &_| parameter_gradients(&ours, gradients);
                    outcome(&Layer { forward: &forward, gradients: &gradients }, setting, shape)
                }
            }
        };
        // Whatever initializes parameters draws.
        let _generator = generator();
        println!("{}", row.name);
        self.failures.extend(compare(&format!("{} of {shape:?}", row.name), &row.notes, &run));
    }
}

#[derive(Clone, Copy)]
enum Side {
    Stock,
    Ours,
}

/// What differs between the two sides of a row.
fn compare(name: &str, notes: &Notes, run: &dyn Fn(Side, &Setting) -> Vec<Named>) -> Vec<String> {
    let mut failures = vec![];
    for backend in Backend::ALL {
        if backend == Backend::NdArray
            && let Some(why) = notes.not_on_ndarray
        {
            println!("{name} on NdArray left out: {why}");
            continue;
        }
        for setting in settings(backend, notes) {
            let of_output = setting.closeness(notes, 1e-6, 1e-12);
            let of_gradients = setting.closeness(notes, 1e-5, 1e-10);
            let Compared { setting, exact } = setting;
            let exact = exact.then(|| run(Side::Stock, &Setting { dtype: DType::F64, ..setting.clone() }));
            let (ours, stock) = (run(Side::Ours, &setting), run(Side::Stock, &setting));
            let names = |results: &[Named]| results.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
            if names(&ours) != names(&stock) {
                failures.push(format!(
                    "{name}, {setting:?}: {:?} instead of {:?}",
                    names(&ours),
                    names(&stock)
                ));
                continue;
            }
            for (at, ((what, ours), (_, stock))) in ours.iter().zip(&stock).enumerate() {
                let exact = exact.as_ref().and_then(|exact| exact[at].1.as_ref());
                let closeness = if at == 0 { of_output } else { of_gradients };
                let agree = match (ours, stock) {
                    (None, None) => Ok(()),
                    (Some(ours), Some(stock)) => closeness.compare(ours, stock, exact),
                    (Some(_), None) => Err("is there".into()),
                    (None, Some(_)) => Err("is missing".into()),
                };
                if let Err(difference) = agree {
                    failures.push(format!("{name}, {setting:?}, {what}: {difference}"));
                }
            }
        }
    }
    failures
}

/// A setting, and whether stock's results in f64 say what is right.
struct Compared {
    setting: Setting,
    exact: bool,
}

impl Compared {
    fn closeness(&self, notes: &Notes, of_f32: f64, of_f64: f64) -> Closeness {
        match self.setting.dtype {
            _ if self.exact => Closeness::NotWorse,
            DType::F64 => Closeness::Relative(notes.within.unwrap_or(of_f64).max(of_f64)),
            _ if notes.cancels.is_some() => Closeness::Relative(3.0 * of_f32),
            _ => Closeness::Relative(of_f32),
        }
    }
}

/// All cases with both strategies in full precision (on NdArray in f32: some of its operations compute f64 in that), and
/// without autodiff; in half precision, which only Flex has, the two that keep all there is to keep.
fn settings(backend: Backend, notes: &Notes) -> Vec<Compared> {
    let mut settings = vec![];
    let mut add = |device: &Device, case, dtype, exact| {
        settings.push(Compared { setting: Setting::new(device, case, dtype).on(notes.inputs()), exact });
    };
    let on_flex = backend == Backend::Flex && notes.only_f32.is_none();
    let full: &[DType] = if on_flex { &[DType::F32, DType::F64] } else { &[DType::F32] };
    for &dtype in full {
        add(&backend.device(), Case::Untracked, dtype, false);
        for device in backend.autodiff_devices() {
            Case::ALL.into_iter().for_each(|case| add(&device, case, dtype, false));
        }
    }
    if on_flex {
        if let Some(why) = notes.not_in_half {
            println!("half precision left out: {why}");
            return settings;
        }
        for dtype in HALF {
            for case in [Case::Trainable, Case::Frozen] {
                add(&backend.autodiff_devices()[0], case, dtype, true);
            }
        }
    }
    settings
}

#[test]
fn errors_above_those_of_the_truth_are_found() {
    use burn::tensor::TensorData;
    let half = |values: [f64; 3]| TensorData::from(values).convert_dtype(DType::F16);
    let exact = TensorData::from([1.0, 0.25, -3e-3]);
    let check = |ours, truth| Closeness::NotWorse.compare(&half(ours), &half(truth), Some(&exact)).is_ok();
    let unit = 2f64.powi(-10); // of 1 in f16
    assert!(check([1.0, 0.25, -3e-3], [1.0, 0.25, -3e-3]));
    assert!(check([1.0 + unit, 0.25, -3e-3], [1.0, 0.25, -3e-3]));
    assert!(!check([1.0 + 3.0 * unit, 0.25, -3e-3], [1.0, 0.25, -3e-3]));
    assert!(check([1.0 + 3.0 * unit, 0.25, -3e-3], [1.0 - 3.0 * unit, 0.25, -3e-3]));
    // A small number is lost.
    assert!(!check([1.0, 0.25, 0.0], [1.0, 0.25, -3e-3]));
    // The largest error is as large, but there are more of it.
    assert!(!check([1.0 + 4.0 * unit, 0.25 + 4.0 * unit, 0.0], [1.0 + 4.0 * unit, 0.25, -3e-3]));
    assert!(!check([f64::NAN, 0.25, -3e-3], [1.0, 0.25, -3e-3]));
}
