//! Fails when a layer or a model keeps more bytes, or peaks higher, than recorded in `benches/gate.csv`, or than its stock twin.
//!
//! ```sh
//! cargo bench --bench gate                  # or with a part of a name
//! MEMSAVE_BLESS=1 cargo bench --bench gate  # writes the file
//! ```
//!
//! It measures every row of the table of layers with about a million elements, and small models in every case. Bytes are the same on any
//! machine. Times are not, so they are shown but not gated. Packed operands of products are as large as a machine's caches, and are not
//! counted.
#![recursion_limit = "256"]
use burn::tensor::Device;
use burn_memsave::measure::{Gate, LayerMeasurement, Ledger, Measurement, TrackingAllocator};
use bytes::Bytes;
use clap::Parser;
use std::error::Error;
use uncounted::ButPacked;

mod bytes;
#[path = "gate/models.rs"]
mod models;
#[path = "../tests/table/mod.rs"]
mod table;
#[path = "gate/uncounted.rs"]
mod uncounted;

#[global_allocator]
static ALLOCATOR: ButPacked = ButPacked(TrackingAllocator::new());

/// By how much kept bytes may differ: the graph's own records, and tables that double.
const RECORDS: u64 = 4096;

/// A thread's working memory beside its tensors, such as tiles and padded planes. It has a fixed size, which differs for Burn and ours.
const SCRATCH: u64 = 1 << 19;

/// Fails when a layer or a model needs more memory than it did, or than stock Burn.
#[derive(Parser)]
struct Args {
    /// Only rows whose name contains this.
    #[arg(default_value = "")]
    filter: String,
    /// Given by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

/// Bytes of a step.
#[derive(Clone, Copy, Debug)]
struct Needs {
    kept: u64,
    peak: u64,
}

impl Needs {
    fn of_layer(measured: &LayerMeasurement) -> Result<Self, &'static str> {
        Self::new(measured.kept, measured.peak)
    }

    fn of_step(measured: &Measurement) -> Result<Self, &'static str> {
        Self::new(measured.kept, measured.peak)
    }

    fn new(kept: Option<u64>, peak: Option<u64>) -> Result<Self, &'static str> {
        let counted = kept.zip(peak).map(|(kept, peak)| Self { kept, peak });
        counted.ok_or("bytes are not counted on this device")
    }
}

/// A row of the table of layers, or a model in a case.
#[derive(Clone, Debug)]
struct Measured {
    name: String,
    burn: Needs,
    ours: Needs,
    ledger: Ledger,
    /// The ratio of our time to Burn's.
    time: f64,
    /// Why the peak may be above Burn's, if it may.
    known_peak: Option<&'static str>,
}

impl Measured {
    /// What it needs more of than Burn.
    fn faults(&self) -> Vec<String> {
        let mut faults = vec![];
        let mut expect = |what: &str, ours: u64, most: u64| {
            faults.extend((ours > most).then(|| format!("{}: {what} {ours} bytes, Burn {most}", self.name)));
        };
        expect("keeps", self.ours.kept, self.burn.kept + RECORDS);
        match self.known_peak {
            None => expect("peaks at", self.ours.peak, self.burn.peak + SCRATCH),
            Some(why) => println!("{}: its peak is known: {why}", self.name),
        }
        faults
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    // How much a kernel works on at once must not depend on the number of threads.
    rayon::ThreadPoolBuilder::new().num_threads(1).build_global()?;
    let record = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/gate.csv");
    let mut gate = Gate::open(record)?.with_filter(&args.filter);
    let measured = measure(&args.filter)?;
    println!("ours / Burn: kept, peak, time");
    for row in &measured {
        let ratio = |ours: u64, burn: u64| ours as f64 / burn.max(1) as f64;
        let (kept, peak) = (ratio(row.ours.kept, row.burn.kept), ratio(row.ours.peak, row.burn.peak));
        println!("{kept:.2}  {peak:.2}  {:.2}  {}", row.time, row.name);
    }
    for row in &measured {
        gate.check(&row.name, Some(row.ours.kept), Some(row.ours.peak), &row.ledger);
    }
    let above_burn: Vec<String> = measured.iter().flat_map(Measured::faults).collect();
    above_burn.iter().for_each(|fault| eprintln!("{fault}"));
    gate.finish()?;
    if !above_burn.is_empty() {
        return Err(format!("{} times more than Burn", above_burn.len()).into());
    }
    println!("{} rows need no more than recorded, and no more than Burn", measured.len());
    Ok(())
}

/// Measures everything whose name contains `filter`.
fn measure(filter: &str) -> Result<Vec<Measured>, Box<dyn Error>> {
    let device = Device::flex().autodiff();
    let mut layers = Bytes { device: &device, filter, smaller: true, rows: vec![] };
    table::visit(&mut layers);
    let mut measured = vec![];
    for row in layers.rows {
        let [burn, ours] = row.times.map(|time| time.as_secs_f64());
        measured.push(Measured {
            name: format!("{}, {}, {}", row.layer, row.parameters, row.input),
            burn: Needs::of_layer(&row.burn)?,
            ours: Needs::of_layer(&row.ours)?,
            ledger: row.ledger,
            time: ours / burn,
            known_peak: row.known_peak,
        });
    }
    measured.extend(models::measure(&device, filter)?);
    Ok(measured)
}
