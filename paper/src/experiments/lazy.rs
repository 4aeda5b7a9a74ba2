//! Frozen weights that stay in their file: peak against throughput for several budgets, on a BERT-like encoder of random weights. Table and
//! plot follow those of Pylomin (<https://github.com/siahuat0727/pylomin>).
//!
//! Every run is a process of its own with one computing thread. Its memory is counted above that of the process before the model is made.
use super::child::{Task, peak_above, process};
use super::models::lines;
use super::step::median;
use super::{Failure, Measured, Output, Part, Settings, Table, in_mib, mib, ratio};
use crate::figures::{Axis, Figure, Marker, Panel, Series, Style, Whose};
use bert::BertConfig;
use burn::tensor::{Device, Int, Tensor};
use burn_memsave::lazy::{LazyLoad, LazyOptions, WeightFile};
use burn_memsave::measure::{ResidentMemory, TrackingAllocator};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::time::Instant;

#[allow(dead_code)] // checkpoints of Hugging Face
#[path = "../../../examples/infer_lazy/bert.rs"]
mod bert;

pub struct Lazy;

/// A way to hold the weights.
#[derive(Serialize, Deserialize)]
pub struct Row {
    weights: String,
    file_bytes: u64,
    /// The budget of weights in memory. `None`: all weights are loaded in advance.
    budget_bytes: Option<u64>,
    read_ahead: usize,
    heap_bytes: u64,
    resident_bytes: u64,
    building_bytes: u64,
    seconds_per_batch: f64,
    /// The mean of two runs with all weights in memory, just before and after.
    eager_seconds_per_batch: f64,
    check: f32,
}

/// An encoder and a way to hold its weights.
#[derive(Clone, Serialize, Deserialize)]
pub struct Run {
    weights: PathBuf,
    vocabulary: usize,
    width: usize,
    layers: usize,
    length: usize,
    batches: usize,
    budget: Option<u64>,
    read_ahead: usize,
}

/// What a child process reports, in bytes above those of the idle process.
#[derive(Serialize, Deserialize)]
pub struct Outcome {
    heap: u64,
    resident: u64,
    building: u64,
    seconds_per_batch: f64,
    check: f32,
}

impl Run {
    fn of(settings: &Settings) -> Self {
        let large = (119_547, 1024, 24);
        let (vocabulary, width, layers) = settings.pick((2000, 128, 4), large, large);
        let weights = format!("../target/paper-lazy-{vocabulary}-{width}-{layers}.bpk");
        Self {
            weights: Path::new(env!("CARGO_MANIFEST_DIR")).join(weights),
            vocabulary,
            width,
            layers,
            length: 128,
            batches: settings.pick(2, 3, 7),
            budget: None,
            read_ahead: 0,
        }
    }

    fn config(&self) -> BertConfig {
        BertConfig {
            vocab_size: self.vocabulary,
            hidden_size: self.width,
            intermediate_size: 4 * self.width,
            num_attention_heads: (self.width / 64).max(1),
            num_hidden_layers: self.layers,
            ..BertConfig::large()
        }
    }

    /// Bytes of the largest weight of a layer.
    fn largest(&self) -> u64 {
        (4 * self.width * 4 * self.width) as u64
    }

    fn in_process(&self) -> Result<Outcome, Failure> {
        Task::Lazy(self.clone()).in_process(None)
    }

    pub fn measure(&self) -> Result<Outcome, Failure> {
        let device = Device::flex();
        let (idle, idle_heap) = (ResidentMemory::of_process(), TrackingAllocator::live());
        let options = match self.budget {
            Some(bytes) => LazyOptions::new().with_budget(bytes).with_prefetch(self.read_ahead),
            None => LazyOptions::new().exclude("*"),
        };
        let file = WeightFile::open(&self.weights)?;
        let (model, _report) = self.config().init(&device).lazy_load(&file, &options)?;
        let building = peak_above(idle)?;
        let tokens = |batch: usize| {
            let token = |index: usize| ((batch * 7919 + index * 104_729) % self.vocabulary) as i64;
            let tokens: Vec<i64> = (0..self.length).map(token).collect();
            Tensor::<1, Int>::from_ints(&tokens[..], &device).unsqueeze::<2>()
        };
        let mut check = model.forward(tokens(0)).abs().mean().into_scalar::<f32>();
        let mut seconds = vec![];
        for batch in 1..=self.batches {
            let begin = Instant::now();
            check += model.forward(tokens(batch)).abs().mean().into_scalar::<f32>();
            seconds.push(begin.elapsed().as_secs_f64());
        }
        Ok(Outcome {
            heap: TrackingAllocator::peak() - idle_heap,
            resident: peak_above(idle)?,
            building,
            seconds_per_batch: median(seconds),
            check,
        })
    }
}

/// Ways to hold the weights: name, budget, and how many weights are read ahead.
fn ways(settings: &Settings) -> Vec<(String, Option<u64>, usize)> {
    let largest = Run::of(settings).largest();
    // The last budget holds all weights.
    let budgets = settings.pick(vec![1, 4, 128], vec![1, 4, 16, 128], vec![1, 2, 4, 16, 64, 128]);
    let mut ways = vec![(IN_MEMORY.into(), None, 0)];
    for read_ahead in [0, 2] {
        for times in &budgets {
            let name = if read_ahead > 0 { "lazy, read ahead" } else { "lazy" };
            ways.push((name.into(), Some(*times * largest), read_ahead));
        }
    }
    ways
}

fn measure(
    (weights, budget_bytes, read_ahead): (String, Option<u64>, usize),
    settings: &Settings,
) -> Result<Vec<Row>, Failure> {
    let eager = Run::of(settings);
    if !eager.weights.exists() {
        process::write_random_weights(&eager.config().init(&Device::flex()), &eager.weights)?;
    }
    let run = Run { budget: budget_bytes, read_ahead, ..eager.clone() };
    let [before, outcome, after] = [eager.in_process()?, run.in_process()?, eager.in_process()?];
    if [before.check, after.check] != [outcome.check; 2] {
        return Err("another result than with all weights in memory".into());
    }
    Ok(vec![Row {
        weights,
        file_bytes: std::fs::metadata(&eager.weights)?.len(),
        budget_bytes,
        read_ahead,
        heap_bytes: outcome.heap,
        resident_bytes: outcome.resident,
        building_bytes: outcome.building,
        seconds_per_batch: outcome.seconds_per_batch,
        eager_seconds_per_batch: before.seconds_per_batch.midpoint(after.seconds_per_batch),
        check: outcome.check,
    }])
}

impl Measured for Lazy {
    type Row = Row;
    const NAME: &'static str = "lazy";
    const IS_ON_CPU: bool = true;
    const ABOUT: &'static str =
        "frozen weights that stay in their file: peak against throughput over budgets";

    fn parts(settings: &Settings) -> Vec<Part<Row>> {
        let part = |way: (String, Option<u64>, usize)| {
            let settings = settings.clone();
            let budget = way.1.map_or_else(String::new, |bytes| format!(", {} MiB", mib(bytes)));
            Part::new(format!("{}{budget}", way.0), move || measure(way, &settings))
        };
        ways(settings).into_iter().map(part).collect()
    }

    fn render(rows: &[Row]) -> Vec<Output> {
        vec![table(rows), Output::Figure(figure(rows))]
    }
}

/// What another framework does with the same encoder: a row of `paper/peers-lazy.csv`.
#[derive(Deserialize)]
struct Peer {
    peer: String,
    weights: String,
    file_mib: f64,
    heap_mib: f64,
    resident_mib: f64,
    building_mib: f64,
    throughput: f64,
}

/// The name of runs with all weights in memory, for ours and for others.
const IN_MEMORY: &str = "in memory";

/// The frameworks that ran the encoder of the rows. (Theirs has one more layer, a pooler of 4 MiB.)
fn peers(rows: &[Row]) -> Vec<Peer> {
    let peers: Vec<Peer> = lines(include_str!("../../peers-lazy.csv"));
    let is_same =
        |peer: &Peer| rows.iter().any(|row| (in_mib(row.file_bytes) / peer.file_mib - 1.0).abs() < 0.01);
    peers.into_iter().filter(is_same).collect()
}

fn throughput(row: &Row) -> f64 {
    row.eager_seconds_per_batch / row.seconds_per_batch
}

fn table(rows: &[Row]) -> Output {
    let header = [
        "weights",
        "file (MiB)",
        "budget (MiB)",
        "heap peak (MiB)",
        "resident peak (MiB)",
        "resident while building (MiB)",
        "throughput, of that in memory",
    ];
    let mut table = Table::new(&header, 1);
    for row in rows {
        table.add([
            row.weights.clone(),
            mib(row.file_bytes),
            row.budget_bytes.map_or_else(|| "-".into(), mib),
            mib(row.heap_bytes),
            mib(row.resident_bytes),
            mib(row.building_bytes),
            ratio(throughput(row), 1.0),
        ]);
    }
    for peer in peers(rows) {
        let mib = |mib: f64| format!("{mib:.0}");
        table.add([
            format!("{}: {}", peer.peer, peer.weights),
            mib(peer.file_mib),
            "-".into(),
            mib(peer.heap_mib),
            mib(peer.resident_mib),
            mib(peer.building_mib),
            ratio(peer.throughput, 1.0),
        ]);
    }
    table.output("lazy-table")
}

fn figure(rows: &[Row]) -> Figure {
    let of = |(name, whose, marker): (&str, Whose, Marker)| Series {
        name: name.into(),
        style: Style { whose, marker },
        points: rows
            .iter()
            .filter(|row| row.weights == name)
            .map(|row| (in_mib(row.heap_bytes), throughput(row)))
            .collect(),
    };
    // With all weights in memory both throughputs are 1 by definition.
    let peers: Vec<Peer> = peers(rows).into_iter().filter(|peer| peer.weights != IN_MEMORY).collect();
    let of_peer = |(name, marker): (&str, Marker)| Series {
        name: name.into(),
        style: Style { whose: Whose::Peer, marker },
        points: peers
            .iter()
            .filter(|peer| peer.peer == name)
            .map(|peer| (peer.heap_mib, peer.throughput))
            .collect(),
    };
    let ours = [("lazy", Whose::Ours, Marker::Circle), ("lazy, read ahead", Whose::Ours, Marker::Triangle)];
    let theirs =
        [("Pylomin", Marker::Circle), ("PyTorch-LIT", Marker::Square), ("accelerate", Marker::Triangle)];
    let series = ours.map(of).into_iter().chain(theirs.map(of_peer));
    let panel = Panel {
        title: "".into(),
        x: Axis::log("heap peak (MiB)", 2),
        y: Axis::linear("throughput, of that in memory"),
        series: series.filter(|series| !series.points.is_empty()).collect(),
        bars: vec![],
    };
    Figure {
        name: "lazy".into(),
        title: "Weights in their file: peak against throughput".into(),
        columns: 2,
        panels: vec![panel],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(file_bytes: u64) -> Row {
        Row {
            weights: IN_MEMORY.into(),
            file_bytes,
            budget_bytes: None,
            read_ahead: 0,
            heap_bytes: 0,
            resident_bytes: 0,
            building_bytes: 0,
            seconds_per_batch: 1.0,
            eager_seconds_per_batch: 1.0,
            check: 0.0,
        }
    }

    /// Other frameworks are shown only beside the encoder that they ran, and each of their points is drawn.
    #[test]
    fn peers_are_read() {
        assert!(peers(&[row(415 << 20)]).is_empty());
        let rows = [row(1622 << 20)];
        assert_eq!(peers(&rows).len(), 6);
        let Output::Table(_, table) = table(&rows) else { panic!("a table") };
        assert!(table.lines().any(|line| line.contains("Pylomin: lazy") && line.contains("0.57")), "{table}");
        let drawn: usize = figure(&rows).panels[0].series.iter().map(|series| series.points.len()).sum();
        assert_eq!(drawn, 5);
    }
}
