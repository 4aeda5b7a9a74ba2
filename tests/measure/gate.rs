//! What a gate lets pass, and what it says of what it does not.
use crate::{alone, cpu_devices, settled};
use burn::module::Module;
use burn::nn;
use burn::tensor::{Device, Tensor};
use burn_memsave::functional;
use burn_memsave::measure::{
    Gate, GateBytes, GateError, GateFault, GateLayer, Ledger, LedgerRow, ledger, measure_step,
};
use std::fs;
use std::path::Path;

const BATCH: usize = 1024;
const FEATURES: usize = 64;
const CASE: &str = "a model, \"quoted\"";

#[derive(Module, Debug)]
struct Model {
    first: nn::Linear,
    second: nn::Linear,
}

impl Model {
    fn new(device: &Device) -> Self {
        let layer = || nn::LinearConfig::new(FEATURES, FEATURES).with_bias(false).init(device);
        Self { first: layer(), second: layer() }
    }

    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        let x = functional::relu(functional::linear(x, self.first.weight.val(), None));
        functional::linear(x, self.second.weight.val(), None).sum()
    }
}

/// A gate of one case.
fn run(gate: Gate, device: &Device) -> Result<(), GateError> {
    let mut gate = gate;
    let x = Tensor::<2>::ones([BATCH, FEATURES], device);
    gate.step(CASE, &Model::new(device), x, Model::loss);
    gate.finish()
}

fn faults(result: Result<(), GateError>) -> (Vec<GateFault>, String) {
    match result {
        Err(error @ GateError::Faults { .. }) => {
            let text = format!("{error:?}");
            assert_eq!(text, error.to_string());
            let GateError::Faults { faults, .. } = error else { unreachable!() };
            (faults, text)
        }
        other => panic!("{other:?}"),
    }
}

fn open(path: &Path) -> Gate {
    Gate::open(path).expect("a good file").with_bless(false)
}

/// A weight needs its layer's input: 1024 x 64 numbers of 4 bytes for each of the two layers. A ReLU needs a bit per element.
#[test]
fn what_is_recorded_passes_and_a_layer_that_grew_is_named() {
    let _alone = alone();
    for device in cpu_devices() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("memory.csv");
        let (x, mask) = ((BATCH * FEATURES * 4) as u64, (BATCH * FEATURES / 8) as u64);

        // Nothing is recorded yet.
        let (found, text) = faults(run(open(&path), &device));
        assert!(matches!(&found[..], [GateFault::Unrecorded { case, measured }]
            if case.contains("quoted") && measured.listed == 2 * x + mask));
        assert!(text.contains("is not recorded") && text.contains("MEMSAVE_BLESS=1"), "{text}");
        assert!(!path.exists());

        run(open(&path).with_bless(true), &device).unwrap();
        run(open(&path), &device).unwrap();
        let written = fs::read_to_string(&path).unwrap();
        let rows: Vec<_> = written.lines().skip(3).collect();
        let [first, relu, second] = [("first,linear", x), ("relu,relu", mask), ("second,linear", x)]
            .map(|(layer, kept)| format!(",{layer},{kept},"));
        assert_eq!(rows, [first, relu, second]);
        let head = "case,layer,operation,kept,peak\n\"a model, \"\"quoted\"\"\",,,";
        assert!(written.starts_with("# ") && written.contains(head), "{written}");

        // The record of another day, when the mask was smaller.
        let x_of_step = Tensor::<2>::ones([BATCH, FEATURES], &device);
        let (_, mut smaller) = ledger(&Model::new(&device), x_of_step, Model::loss);
        let masks = smaller.rows.iter_mut().filter(|row| row.tensor == "mask");
        masks.for_each(|row| row.bytes = Some(8));
        let mut gate = open(&path).with_bless(true);
        gate.check(CASE, Some(2 * x), Some(1 << 40), &smaller);
        gate.finish().unwrap();
        let (found, text) = faults(run(open(&path), &device));
        let [GateFault::Grown { recorded, measured, layers, .. }] = &found[..] else { panic!("{text}") };
        assert_eq!((measured.listed, recorded.listed), (2 * x + mask, 2 * x + 8));
        let [GateLayer { operation, recorded, measured, .. }] = &layers[..] else { panic!("{text}") };
        assert_eq!((operation.as_str(), *recorded, *measured), ("relu", 8, mask));
        assert!(text.contains(&format!("relu: keeps {mask} bytes (recorded: 8)")), "{text}");
    }
}

/// Kept bytes that no ledger lists may grow by 4096, and a peak by a quarter of 64 KiB to 1 MiB; what is listed may not.
#[test]
fn what_may_grow_by_how_much() {
    let _alone = alone();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("memory.csv");
    let check = |kept: u64, peak: u64, bless: bool| {
        let mut gate = open(&path).with_bless(bless);
        gate.check("#1", Some(kept), Some(peak), &Ledger::default());
        gate.finish()
    };
    let mib = 1 << 20;
    check(1000, mib, true).unwrap();
    check(1000 + 4096, mib + mib / 4, false).unwrap();
    check(0, 0, false).unwrap();
    for (kept, peak) in [(1000 + 4097, mib), (1000, mib + mib / 4 + 1)] {
        let (found, text) = faults(check(kept, peak, false));
        let [GateFault::Grown { case, recorded, measured, layers }] = &found[..] else { panic!("{text}") };
        assert_eq!((case.as_str(), layers.len()), ("#1", 0));
        assert_eq!(*recorded, GateBytes { kept: 1000, listed: 0, peak: mib });
        assert_eq!(*measured, GateBytes { kept, listed: 0, peak });
        assert_eq!(text.contains("operations of Burn keep it"), kept > 1000);
    }
    for (recorded, most) in [(1000, 1000 + (1 << 16)), (100 * mib, 101 * mib)] {
        check(0, recorded, true).unwrap();
        check(0, most, false).unwrap();
        faults(check(0, most + 1, false));
    }
}

/// What is listed may not grow at all, unless no more is kept.
#[test]
fn a_byte_more_that_is_listed_is_a_fault() {
    let _alone = alone();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("memory.csv");
    let ledger = |bytes: [u64; 3]| {
        let rows = ["a", "b", "b"].into_iter().zip(bytes).map(|(module, bytes)| LedgerRow {
            module: module.into(),
            operation: "linear",
            tensor: "x",
            bytes: Some(bytes),
            reason: "",
            shared: false,
            parameter: false,
        });
        Ledger { rows: rows.collect() }
    };
    let check = |gate: Gate, kept, bytes| {
        let mut gate = gate;
        gate.check("a", Some(kept), Some(0), &ledger(bytes));
        gate.finish()
    };
    check(open(&path).with_bless(true), 60, [10, 20, 30]).unwrap();
    check(open(&path), 60, [10, 20, 31]).unwrap();
    check(open(&path), 61, [50, 10, 0]).unwrap(); // one layer keeps what another one did
    let (found, text) = faults(check(open(&path), 61, [5, 20, 36]));
    let layer = |layer: &str, recorded, measured| GateLayer {
        layer: layer.into(),
        operation: "linear".into(),
        recorded,
        measured,
    };
    let expected = GateFault::Grown {
        case: "a".into(),
        recorded: GateBytes { kept: 60, listed: 60, peak: 0 },
        measured: GateBytes { kept: 61, listed: 61, peak: 0 },
        layers: vec![layer("b", 50, 56), layer("a", 10, 5)],
    };
    assert_eq!(found, [expected], "{text}");
}

/// Cases that did not run, ran twice, or ran where nothing is counted; and those that a filter leaves out.
#[test]
fn cases_are_those_that_are_recorded() {
    let _alone = alone();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("memory.csv");
    let run = |gate: Gate, cases: &[(&str, Option<u64>)]| {
        let mut gate = gate;
        cases.iter().for_each(|(case, kept)| gate.check(case, *kept, Some(0), &Ledger::default()));
        gate.finish()
    };
    run(open(&path).with_bless(true), &[("a", Some(1)), ("b", Some(2))]).unwrap();

    let (found, text) = faults(run(open(&path), &[("a", Some(1))]));
    assert_eq!(found, [GateFault::Unmeasured { case: "b".into() }]);
    assert!(text.contains("b: is recorded, and was not measured"), "{text}");
    run(open(&path).with_filter("a"), &[("a", Some(1)), ("b", Some(1 << 20))]).unwrap();

    // With a filter, only what it lets through is recorded anew.
    run(open(&path).with_filter("a").with_bless(true), &[("a", Some(1 << 20)), ("b", Some(1 << 20))])
        .unwrap();
    let (found, _) = faults(run(open(&path), &[("a", Some(1 << 20)), ("b", Some(1 << 20))]));
    assert!(matches!(&found[..], [GateFault::Grown { case, .. }] if case == "b"), "{found:?}");

    let (found, _) = faults(run(open(&path), &[("a", Some(1)), ("a", Some(1)), ("b", None)]));
    let [a, b] = ["a", "b"].map(String::from);
    let not_counted = GateFault::NotCounted { case: b.clone() };
    assert_eq!(found, [GateFault::Repeated { case: a }, not_counted, GateFault::Unmeasured { case: b }]);
    // Nothing is recorded of what was not measured.
    let before = fs::read(&path).unwrap();
    faults(run(open(&path).with_bless(true), &[("a", None)]));
    assert_eq!(fs::read(&path).unwrap(), before);
}

#[test]
#[should_panic(expected = "`Gate::finish` was not called")]
fn a_fault_is_not_dropped() {
    let _alone = alone();
    let directory = tempfile::tempdir().unwrap();
    let mut gate = open(&directory.path().join("memory.csv"));
    gate.check("a", Some(1), Some(1), &Ledger::default());
}

#[test]
fn what_no_gate_has_written_is_an_error_that_says_where() {
    let _alone = alone();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("memory.csv");
    let head = "# head\ncase,layer,operation,kept,peak\n";
    let files: [(&str, &str); 9] = [
        ("name,kept,peak\na,1,2\n", "memory.csv:2: missing field"),
        (&format!("{head}a,,,1,2\na,,,-1,2\n"), "memory.csv:4: field 3: invalid digit"),
        (&format!("{head}a,,,1,2\n<<<<<<< HEAD\n"), "memory.csv:4: "),
        (&format!("{head}a,,,1,2\na,,,1,2\n"), "memory.csv:4: a was recorded before"),
        (&format!("{head}a,,,1,\n"), "memory.csv:3: a has no peak"),
        (&format!("{head},relu,relu,1,\n"), "memory.csv:3: a layer of no case"),
        (&format!("{head}a,,,1,2,3\n"), "memory.csv:3: "),
        (&format!("{head}a,,,99999999999999999999,2\n"), "memory.csv:3: field 3: number too large"),
        (&format!("{head}a,,,,2\n"), "memory.csv:3: field 3: cannot parse integer from empty"),
    ];
    for (text, expected) in files {
        fs::write(&path, text).unwrap();
        let error = Gate::open(&path).unwrap_err();
        assert!(matches!(&error, GateError::Csv { path: file, .. } if *file == path), "{error}");
        assert!(error.to_string().contains(expected), "{error}, expected {expected}");
    }
    fs::write(&path, [b"case,layer,operation,kept,peak\n".as_slice(), b"\xff,,,1,2\n"].concat()).unwrap();
    assert!(matches!(Gate::open(&path), Err(GateError::Csv { line: 2, .. })));
    // A folder is no file, and a folder that is not there cannot be written to.
    assert!(matches!(Gate::open(directory.path()), Err(GateError::Io { .. })));
    let nowhere = open(&directory.path().join("none/memory.csv")).with_bless(true);
    assert!(matches!(nowhere.finish(), Err(GateError::Io { .. })));
    for empty in ["", head] {
        fs::write(&path, empty).unwrap();
        open(&path).finish().unwrap();
    }
}

/// A step in a gate is that of `measure_step` and `ledger`.
#[test]
fn a_gate_measures_as_measure_does() {
    let _alone = alone();
    for device in cpu_devices() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("memory.csv");
        let model = Model::new(&device);
        let x = Tensor::<2>::ones([BATCH, FEATURES], &device);
        let (in_gate, measured) = settled(|| {
            let mut gate = open(&path);
            gate.step("a", &model, x.clone(), Model::loss);
            let (found, _) = faults(gate.finish());
            let [GateFault::Unrecorded { measured: in_gate, .. }] = found[..] else { panic!("{found:?}") };
            let step = measure_step(&model, x.clone(), Model::loss);
            let (_, ledger) = ledger(&model, x.clone(), Model::loss);
            let (kept, peak) = step.kept.zip(step.peak).expect("the allocator is installed");
            (in_gate, GateBytes { kept, listed: ledger.total(), peak })
        });
        assert_eq!(in_gate, measured);
    }
}
