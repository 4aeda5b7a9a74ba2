//! Fails when a layer or a model keeps more bytes, or peaks higher, than recorded in `benches/gate.csv`, or than its stock twin.
//!
//! ```sh
//! cargo bench --bench gate                  # or with a part of a name
//! cargo bench --bench gate -- --record      # writes the file
//! ```
//!
//! Layers: every row of the table, with about a million elements; models: every case, small. Bytes hold on any machine, times do
//! not: they are shown, and not gated. What products pack is as large as a machine's caches, and not counted.
#![recursion_limit = "256"]
use burn::tensor::Device;
use burn_memsave::measure::TrackingAllocator;
use bytes::Bytes;
use clap::Parser;
use record::{Needs, Record};
use std::{collections::HashSet, error::Error, path::Path};
use uncounted::ButPacked;

mod bytes;
#[path = "gate/models.rs"]
mod models;
#[path = "gate/record.rs"]
mod record;
#[path = "../tests/table/mod.rs"]
mod table;
#[path = "gate/uncounted.rs"]
mod uncounted;

#[global_allocator]
static ALLOCATOR: ButPacked = ButPacked(TrackingAllocator::new());

/// The graph's own records, and tables that double: what bytes kept may differ by.
const RECORDS: u64 = 4096;

/// What a thread works in beside its tensors, of absolute size: tiles, planes with their padding. Burn's and ours are not the same.
const SCRATCH: u64 = 1 << 19;

/// The same, as it was recorded on another machine, with other caches and vectors: a quarter of what is recorded, but a mebibyte at most,
/// and 64 KiB at least, which is what threads work in however small a row is.
fn scratch_of_machines(recorded: u64) -> u64 {
    (recorded / 4).clamp(1 << 16, 1 << 20)
}

/// Fails when a layer or a model needs more memory than it did, or than stock Burn.
#[derive(Parser)]
struct Args {
    /// Writes `benches/gate.csv` anew.
    #[arg(long)]
    record: bool,
    /// Only rows whose name contains this.
    #[arg(default_value = "")]
    filter: String,
    /// Given by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

/// A row of the table of layers, or a model and what is trained of it.
#[derive(Clone, Debug)]
struct Measured {
    name: String,
    burn: Needs,
    ours: Needs,
    /// Ours to Burn's.
    time: f64,
    /// Why the peak may be above Burn's, if it may.
    known_peak: Option<&'static str>,
}

impl Measured {
    /// What is wrong with it.
    fn faults(&self, recorded: Option<Needs>) -> Vec<String> {
        let mut faults = vec![];
        let mut expect = |what: &str, ours: u64, most: u64, whose: &str| {
            faults
                .extend((ours > most).then(|| format!("{}: {what} {ours} bytes, {whose} {most}", self.name)));
        };
        expect("keeps", self.ours.kept, self.burn.kept + RECORDS, "Burn");
        match self.known_peak {
            None => expect("peaks at", self.ours.peak, self.burn.peak + SCRATCH, "Burn"),
            Some(why) => println!("{}: its peak is known: {why}", self.name),
        }
        match recorded {
            Some(recorded) => {
                expect("keeps", self.ours.kept, recorded.kept + RECORDS, "recorded");
                expect(
                    "peaks at",
                    self.ours.peak,
                    recorded.peak + scratch_of_machines(recorded.peak),
                    "recorded",
                );
            }
            None => faults.push(format!("{} is not recorded", self.name)),
        }
        faults
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    // How much kernels take at once must not depend on how many threads there are.
    rayon::ThreadPoolBuilder::new().num_threads(1).build_global()?;
    let path = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/benches/gate.csv"));
    let measured = measure(&args.filter)?;
    println!("ours / Burn: kept, peak, time");
    for row in &measured {
        let ratio = |ours: u64, burn: u64| ours as f64 / burn.max(1) as f64;
        let (kept, peak) = (ratio(row.ours.kept, row.burn.kept), ratio(row.ours.peak, row.burn.peak));
        println!("{kept:.2}  {peak:.2}  {:.2}  {}", row.time, row.name);
    }
    if args.record {
        if !args.filter.is_empty() {
            return Err("--record writes all rows: leave out the part of a name".into());
        }
        return Record::write(path, measured.iter().map(|row| (row.name.as_str(), row.ours)));
    }
    let record = Record::read(path)?;
    let mut faults: Vec<String> = measured.iter().flat_map(|row| row.faults(record.get(&row.name))).collect();
    let names: HashSet<&str> = measured.iter().map(|row| row.name.as_str()).collect();
    let gone = record.names().filter(|name| name.contains(&args.filter) && !names.contains(name));
    faults.extend(gone.map(|name| format!("{name} is recorded, and was not measured")));
    if !faults.is_empty() {
        return Err(format!("{}\nIf it is meant to be: --record", faults.join("\n")).into());
    }
    println!("{} rows need no more than recorded, and no more than Burn", measured.len());
    Ok(())
}

/// Everything whose name contains `filter`.
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
            time: ours / burn,
            known_peak: row.known_peak,
        });
    }
    measured.extend(models::measure(&device, filter)?);
    Ok(measured)
}
