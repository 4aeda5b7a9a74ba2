//! [`Gate`]: compares the bytes of steps with those that a file records, and names the layers that need more.
use super::{Ledger, StepInput, ledger, measure_step};
use burn::module::Module;
use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::path::{Path, PathBuf};
use std::{env, fmt, fs, io, mem, thread};

/// The environment variable that makes a gate record what it measures instead of comparing it, if it is 1.
const BLESS: &str = "MEMSAVE_BLESS";

/// By how much kept bytes that are not listed may grow: the graph's own records, and its hash tables, one of which may double by chance, since
/// Burn's hashes differ from run to run.
fn records(recorded: u64) -> u64 {
    (recorded / 400).clamp(1 << 12, 1 << 16)
}

/// By how much a peak may grow, since it was recorded on another machine with other caches and vectors: a quarter of what is recorded, but
/// at most 1 MiB, and at least 64 KiB, in which threads work however small a step is.
fn scratch_of_machines(recorded: u64) -> u64 {
    (recorded / 4).clamp(1 << 16, 1 << 20)
}

/// Fails when a step needs more memory than a file records, and names the layers that grew.
///
/// A test opens the file, which belongs into version control, runs [`step`](Self::step) for every case, and returns the result of
/// [`finish`](Self::finish). With `MEMSAVE_BLESS=1` in the environment, the test writes the file: do this the first time, and whenever a
/// step is meant to need more. The test tolerates some growth:
///
/// - of kept bytes that the [`ledger`](fn@ledger) lists: none;
/// - of kept bytes that it does not list, those of Burn's operations and the graph's own records: a 400th, but at least 4 KiB and at most
///   64 KiB, since a hash table of the graph may double by chance;
/// - of the peak: a quarter, but at least 64 KiB and at most 1 MiB, since the memory that kernels work in depends on the machine.
///
/// Bytes are those of the whole program; on CPU devices they depend on the number of threads. So put the test into a file of its own, with
/// the [`TrackingAllocator`](super::TrackingAllocator) and no other test, and run its kernels on one thread
/// (`rayon::ThreadPoolBuilder::new().num_threads(1).build_global()`). Every device needs its own record.
///
/// ```
/// use burn::module::Module;
/// use burn::tensor::{Device, Tensor};
/// use burn_memsave::measure::{Gate, GateError, TrackingAllocator};
/// use burn_memsave::nn::{LinearConfig, Relu};
///
/// #[global_allocator]
/// static ALLOCATOR: TrackingAllocator = TrackingAllocator::new();
///
/// fn activation_memory(mut gate: Gate) -> Result<(), GateError> {
///     let device = Device::flex().autodiff();
///     let model = LinearConfig::new(64, 32).init(&device);
///     let x = Tensor::<2>::ones([128, 64], &device);
///     gate.step("trained", &model, x.clone(), |model, x| Relu::new().forward(model.forward(x)).mean());
///     gate.step("frozen", &model.clone().freeze(), x, |model, x| model.forward(x).mean());
///     gate.finish()
/// }
///
/// // In a test of yours: `activation_memory(Gate::open("tests/memory.csv")?)`.
/// let directory = tempfile::tempdir().unwrap();
/// let path = directory.path().join("memory.csv");
/// activation_memory(Gate::open(&path)?.with_bless(true))?; // as with `MEMSAVE_BLESS=1`
/// activation_memory(Gate::open(&path)?)?;
/// let record = std::fs::read_to_string(&path).unwrap();
/// assert!(record.contains(&format!("\n,relu,relu,{},\n", 128 * 32 / 8)), "{record}"); // a bit per element
/// # Ok::<(), GateError>(())
/// ```
#[derive(Debug)]
#[must_use = "`finish` says what was found"]
pub struct Gate {
    path: PathBuf,
    bless: bool,
    filter: String,
    recorded: Vec<Case>,
    measured: Vec<Case>,
    faults: Vec<GateFault>,
}

#[derive(Clone, Debug)]
struct Case {
    name: String,
    kept: u64,
    peak: u64,
    /// The rows of the ledger, in the order of the forward pass.
    layers: Vec<Layer>,
}

#[derive(Clone, Debug)]
struct Layer {
    layer: String,
    operation: String,
    kept: u64,
}

/// Bytes of a step, recorded or measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GateBytes {
    /// What is kept for the backward pass; see [`Measurement::kept`](super::Measurement::kept).
    pub kept: u64,
    /// The part of it that operations of this library keep: [`Ledger::total`].
    pub listed: u64,
    /// See [`Measurement::peak`](super::Measurement::peak).
    pub peak: u64,
}

/// A layer that keeps more or less than is recorded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GateLayer {
    /// The module, as [`LedgerRow::module`](super::LedgerRow::module).
    pub layer: String,
    /// The operation in it.
    pub operation: String,
    /// Bytes kept; 0 if it is not recorded.
    pub recorded: u64,
    /// Bytes kept; 0 if the ledger does not list it now, for example because Burn's own operation runs.
    pub measured: u64,
}

/// What is wrong with a case.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GateFault {
    /// It needs more than is recorded.
    #[error("{case}: {}", grown(*recorded, *measured, layers))]
    Grown {
        /// Its name.
        case: String,
        /// Bytes.
        recorded: GateBytes,
        /// Bytes.
        measured: GateBytes,
        /// The layers that differ, most growth first.
        layers: Vec<GateLayer>,
    },
    /// The file does not contain it.
    #[error("{case}: keeps {} bytes and peaks at {}, and is not recorded", measured.kept, measured.peak)]
    Unrecorded {
        /// Its name.
        case: String,
        /// Bytes.
        measured: GateBytes,
    },
    /// The file contains it, but it did not run.
    #[error("{case}: is recorded, and was not measured")]
    Unmeasured {
        /// Its name.
        case: String,
    },
    /// Two cases have one name.
    #[error("{case}: two cases have this name")]
    Repeated {
        /// The name.
        case: String,
    },
    /// Bytes are not counted on this device.
    #[error(
        "{case}: bytes are not counted on this device: on a CPU device, make `measure::TrackingAllocator` the global allocator; \
         servers do not say what they have"
    )]
    NotCounted {
        /// Its name.
        case: String,
    },
}

/// Why a [`Gate`] fails. A test that returns this error prints it in full.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum GateError {
    /// The file cannot be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// No gate has written the file.
    #[error("{}:{line}: {problem}", path.display())]
    Csv {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: u64,
        /// What is wrong there.
        problem: String,
    },
    /// Cases need more than recorded, or other cases ran than those that are recorded.
    #[error("{}: cases that are not as recorded:\n{}\nIf it is meant to be, record it: {BLESS}=1", path.display(), lines(faults))]
    Faults {
        /// The file.
        path: PathBuf,
        /// One per case.
        faults: Vec<GateFault>,
    },
}

/// Like `Display`, since a test that returns an error prints it by `Debug`.
impl fmt::Debug for GateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl Gate {
    /// Reads the record. If the file does not exist, nothing is recorded. A relative path begins at the folder of the package, in which
    /// `cargo test` and `cargo bench` run.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, or if no gate has written it: the error names the line.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, GateError> {
        let path = path.as_ref().to_owned();
        let bless = env::var_os(BLESS).is_some_and(|value| value == "1");
        let recorded = read(&path)?;
        Ok(Self { path, bless, filter: String::new(), recorded, measured: vec![], faults: vec![] })
    }

    /// Whether [`finish`](Self::finish) records what was measured instead of comparing it. By default it does if `MEMSAVE_BLESS` is 1.
    pub fn with_bless(mut self, bless: bool) -> Self {
        self.bless = bless;
        self
    }

    /// Measures and compares only cases whose names contain `filter`. The recorded bytes of others stay.
    pub fn with_filter(mut self, filter: impl Into<String>) -> Self {
        self.filter = filter.into();
        self
    }

    /// Measures a case as [`measure_step`] does, and lists it as [`ledger`](fn@ledger) does. This takes three forward and backward passes,
    /// and four on a device.
    ///
    /// # Panics
    ///
    /// If `case` is empty.
    pub fn step<M: Module, I: StepInput>(
        &mut self,
        case: &str,
        model: &M,
        input: I,
        loss: impl Fn(&M, I) -> Tensor<1>,
    ) {
        if !case.contains(&self.filter) {
            return;
        }
        let step = measure_step(model, input.copy(), &loss);
        let (loss, ledger) = ledger(model, input.copy(), &loss);
        // If the loss were only dropped, Burn would free its graph at the next backward pass, which may be measured.
        if loss.is_tracked() {
            drop(loss.backward());
        }
        self.check(case, step.kept, step.peak, &ledger);
    }

    /// Adds a case that was measured in another way, such as by [`measure_layer`](super::measure_layer): its bytes kept, its peak and its
    /// ledger.
    ///
    /// # Panics
    ///
    /// If `case` is empty.
    pub fn check(&mut self, case: &str, kept: Option<u64>, peak: Option<u64>, ledger: &Ledger) {
        assert!(!case.is_empty(), "a case has a name");
        if !case.contains(&self.filter) {
            return;
        }
        let name = case.to_owned();
        let Some((kept, peak)) = kept.zip(peak) else {
            self.faults.push(GateFault::NotCounted { case: name });
            return;
        };
        if find(&self.measured, case).is_some() {
            self.faults.push(GateFault::Repeated { case: name });
            return;
        }
        let measured = Case { name, kept, peak, layers: layers(ledger) };
        if !self.bless {
            self.faults.extend(fault(find(&self.recorded, case), &measured));
        }
        self.measured.push(measured);
    }

    /// Reports what is not as recorded, or records what was measured.
    ///
    /// # Errors
    ///
    /// [`GateError::Faults`] if a case needs more than is recorded, is not recorded, or is recorded and was not measured; [`GateError::Io`]
    /// if the file cannot be written.
    pub fn finish(mut self) -> Result<(), GateError> {
        let mut faults = mem::take(&mut self.faults);
        if !self.bless {
            let expected = self.recorded.iter().filter(|case| case.name.contains(&self.filter));
            let missing = expected.filter(|case| find(&self.measured, &case.name).is_none());
            faults.extend(missing.map(|case| GateFault::Unmeasured { case: case.name.clone() }));
        }
        let path = self.path.clone();
        if !faults.is_empty() {
            return Err(GateError::Faults { path, faults });
        }
        if self.bless {
            write(&path, &self.blessed()).map_err(|source| GateError::Io { path, source })?;
        }
        Ok(())
    }

    /// The cases to record: those that were measured, and with a filter, those that were recorded before.
    fn blessed(&mut self) -> Vec<Case> {
        let mut cases = mem::take(&mut self.recorded);
        if self.filter.is_empty() {
            cases.clear();
        }
        for measured in mem::take(&mut self.measured) {
            match cases.iter_mut().find(|case| case.name == measured.name) {
                Some(case) => *case = measured,
                None => cases.push(measured),
            }
        }
        cases
    }
}

impl Drop for Gate {
    /// Panics if there are faults, so that none goes unnoticed.
    fn drop(&mut self) {
        if !self.faults.is_empty() && !thread::panicking() {
            panic!("`Gate::finish` was not called:\n{}", lines(&self.faults));
        }
    }
}

fn find<'a>(cases: &'a [Case], name: &str) -> Option<&'a Case> {
    cases.iter().find(|case| case.name == name)
}

/// The rows of a ledger that count, summed by module and operation.
fn layers(ledger: &Ledger) -> Vec<Layer> {
    let mut layers: Vec<Layer> = vec![];
    for row in ledger.rows.iter().filter(|row| row.counts()) {
        let kept = row.bytes.unwrap_or(0);
        let same = |layer: &&mut Layer| layer.layer == row.module && layer.operation == row.operation;
        match layers.iter_mut().find(same) {
            Some(layer) => layer.kept += kept,
            None => {
                layers.push(Layer { layer: row.module.clone(), operation: row.operation.into(), kept });
            }
        }
    }
    layers
}

impl Case {
    fn bytes(&self) -> GateBytes {
        let listed = self.layers.iter().map(|layer| layer.kept).sum();
        GateBytes { kept: self.kept, listed, peak: self.peak }
    }
}

fn fault(recorded: Option<&Case>, measured: &Case) -> Option<GateFault> {
    let (case, bytes) = (measured.name.clone(), measured.bytes());
    let Some(recorded) = recorded else {
        return Some(GateFault::Unrecorded { case, measured: bytes });
    };
    let most = recorded.bytes();
    // What is listed must not decide alone: an output that an operation keeps and the input of the next one are one tensor, and are listed
    // as two.
    let listed = bytes.listed > most.listed && bytes.kept > most.kept;
    let grown = listed
        || bytes.kept > most.kept + records(most.kept)
        || bytes.peak > most.peak + scratch_of_machines(most.peak);
    grown.then(|| GateFault::Grown {
        case,
        recorded: most,
        measured: bytes,
        layers: differences(&recorded.layers, &measured.layers),
    })
}

/// Layers that keep more or less than recorded, most growth first.
fn differences(recorded: &[Layer], measured: &[Layer]) -> Vec<GateLayer> {
    let of = |layers: &[Layer], like: &Layer| {
        let same = |layer: &&Layer| layer.layer == like.layer && layer.operation == like.operation;
        layers.iter().find(same).map(|layer| layer.kept)
    };
    let gone = recorded.iter().filter(|layer| of(measured, layer).is_none());
    let all = measured.iter().chain(gone).map(|layer| GateLayer {
        layer: layer.layer.clone(),
        operation: layer.operation.clone(),
        recorded: of(recorded, layer).unwrap_or(0),
        measured: of(measured, layer).unwrap_or(0),
    });
    let mut layers: Vec<_> = all.filter(|layer| layer.recorded != layer.measured).collect();
    layers.sort_by_key(|layer| Reverse(layer.measured as i128 - layer.recorded as i128));
    layers
}

fn grown(recorded: GateBytes, measured: GateBytes, layers: &[GateLayer]) -> String {
    let mut text = format!(
        "keeps {} bytes (recorded: {}), of which {} are listed ({}), and peaks at {} ({})",
        measured.kept, recorded.kept, measured.listed, recorded.listed, measured.peak, recorded.peak,
    );
    for GateLayer { layer, operation, recorded, measured } in layers {
        text += &format!("\n    {layer}, {operation}: keeps {measured} bytes (recorded: {recorded})");
    }
    // If a layer stops keeping a tensor, the tensor counts for the next layer that keeps it.
    if measured.kept > recorded.kept + records(recorded.kept) && measured.listed <= recorded.listed {
        text += "\n    what grew is not listed: operations of Burn keep it";
    }
    text
}

fn lines(faults: &[GateFault]) -> String {
    faults.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}

/// A case, or, if `case` is empty, a layer of the case before.
#[derive(Serialize, Deserialize)]
struct Row {
    case: String,
    layer: String,
    operation: String,
    kept: u64,
    /// Only cases have one.
    peak: Option<u64>,
}

fn read(path: &Path) -> Result<Vec<Case>, GateError> {
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(vec![]),
        Err(source) => return Err(GateError::Io { path: path.to_owned(), source }),
    };
    let at = |line: u64, problem: String| GateError::Csv { path: path.to_owned(), line, problem };
    let failed = |error: csv::Error| {
        let line = error.position().map_or(1, csv::Position::line);
        match error.kind() {
            csv::ErrorKind::Deserialize { err, .. } => at(line, err.to_string()),
            _ => at(line, error.to_string()),
        }
    };
    let mut reader = csv::ReaderBuilder::new().comment(Some(b'#')).from_reader(&bytes[..]);
    let headers = reader.headers().map_err(failed)?.clone();
    let mut cases: Vec<Case> = vec![];
    for record in reader.records() {
        let record = record.map_err(failed)?;
        let line = record.position().map_or(1, csv::Position::line);
        let Row { case: name, layer, operation, kept, peak } =
            record.deserialize(Some(&headers)).map_err(failed)?;
        if !name.is_empty() {
            if find(&cases, &name).is_some() {
                return Err(at(line, format!("{name} was recorded before")));
            }
            let peak = peak.ok_or_else(|| at(line, format!("{name} has no peak")))?;
            cases.push(Case { name, kept, peak, layers: vec![] });
        } else {
            let case = cases.last_mut().ok_or_else(|| at(line, "a layer of no case".into()))?;
            case.layers.push(Layer { layer, operation, kept });
        }
    }
    Ok(cases)
}

fn write(path: &Path, cases: &[Case]) -> io::Result<()> {
    let head = format!(
        "# Recorded with {BLESS}=1 by burn-memsave {}, on {} {}. A row of each case, and below it one of each layer that keeps something.\n",
        env!("CARGO_PKG_VERSION"),
        env::consts::OS,
        env::consts::ARCH,
    );
    // Names that begin like a comment are quoted.
    let mut writer = csv::WriterBuilder::new().comment(Some(b'#')).from_writer(head.into_bytes());
    for Case { name, kept, peak, layers } in cases {
        let [layer, operation] = [const { String::new() }; 2];
        writer.serialize(Row { case: name.clone(), layer, operation, kept: *kept, peak: Some(*peak) })?;
        for Layer { layer, operation, kept } in layers.iter().cloned() {
            writer.serialize(Row { case: String::new(), layer, operation, kept, peak: None })?;
        }
    }
    fs::write(path, writer.into_inner().map_err(|error| error.into_error())?)
}
