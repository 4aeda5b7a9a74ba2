//! Every layer beside its twin in Burn: what it keeps, its peak, and the time of a forward and backward pass, on usual shapes. Times are
//! also measured on small shapes, where the cost of a call shows.
//!
//! The layers are those of the table that the tests walk (`tests/table`).
use super::step::{NOT_COUNTED, median};
use super::{Failure, Measured, Output, Part, Settings, Table, geometric_mean, mib, ratio};
use crate::table::run::{initialize, second, variants};
use crate::table::{self, Check, Visitor};
use burn::module::Module;
use burn::tensor::{Device, Distribution, Tensor};
use burn_memsave::measure::{LayerMeasurement, measure_layer};
use serde::{Deserialize, Serialize};
use std::fmt::Display;
use std::hint::black_box;
use std::time::Instant;

pub struct Twins;

/// A layer, and what is tracked.
#[derive(Serialize, Deserialize)]
pub struct Row {
    family: String,
    layer: String,
    shape: String,
    /// "trainable", "frozen", or "-" if there are none.
    parameters: String,
    /// Whether the input requires a gradient.
    input_tracked: bool,
    burn_kept_bytes: u64,
    ours_kept_bytes: u64,
    burn_peak_bytes: u64,
    ours_peak_bytes: u64,
    burn_seconds: f64,
    ours_seconds: f64,
    burn_small_seconds: f64,
    ours_small_seconds: f64,
}

/// One side of a row.
type Side<'a, const D: usize, const O: usize> = &'a dyn Fn(Tensor<D>) -> Tensor<O>;

/// A walk through a family of layers.
struct Walk<'a> {
    settings: &'a Settings,
    family: &'static str,
    device: Device,
    rows: Result<Vec<Row>, Failure>,
}

impl Visitor for Walk<'_> {
    fn row<const D: usize, const O: usize, S, M>(&mut self, row: table::Row<'_, D, O, S, M>)
    where
        S: Module + Display + From<M>,
        M: Module + Display + From<S>,
    {
        if self.rows.is_err() || row.notes.leaves_out(Check::Time, &row.name) {
            return;
        }
        let usual = self.settings.pick(row.shapes.test, row.shapes.usual, row.shapes.usual);
        let (of_stock, of_ours) = (&row.stock.forward, &row.ours.forward);
        // A layer may be made for the shape of its input.
        let made = |shape| {
            let stock = (row.stock.init)(&self.device, shape);
            initialize(shape, &self.device, |x| of_stock(&stock, x));
            variants(stock)
        };
        for ((parameters, stock), (_, small_stock)) in made(usual).into_iter().zip(made(row.shapes.small)) {
            let (ours, small_ours) = (M::from(stock.clone()), M::from(small_stock.clone()));
            let sides: [Side<D, O>; 2] = [&|x| of_stock(&stock, x), &|x| of_ours(&ours, x)];
            let small: [Side<D, O>; 2] = [&|x| of_stock(&small_stock, x), &|x| of_ours(&small_ours, x)];
            // If the input requires no gradient, only trainable parameters make a graph.
            let inputs = if parameters == "trainable" { &[true, false][..] } else { &[true] };
            for &tracked in inputs {
                let name = (&row.name[..], parameters);
                let measured = self.measure(name, tracked, (usual, sides), (row.shapes.small, small));
                match (&mut self.rows, measured) {
                    (Ok(rows), Ok(row)) => rows.push(row),
                    (rows @ Ok(_), Err(error)) => *rows = Err(error),
                    (Err(_), _) => {}
                }
            }
        }
    }
}

impl Walk<'_> {
    fn measure<const D: usize, const O: usize>(
        &self,
        (layer, parameters): (&str, &str),
        tracked: bool,
        (shape, sides): ([usize; D], [Side<D, O>; 2]),
        (small_shape, small): ([usize; D], [Side<D, O>; 2]),
    ) -> Result<Row, Failure> {
        let input = |shape: [usize; D]| {
            let normal = Distribution::Normal(0.0, 1.0);
            Tensor::<D>::random(shape, normal, &self.device).set_require_grad(tracked)
        };
        let bytes = |side: Side<D, O>| match second(&self.device, || measure_layer(|| input(shape), side)) {
            LayerMeasurement { kept: Some(kept), peak: Some(peak), .. } => Ok([kept, peak]),
            _ => Err(NOT_COUNTED),
        };
        let [burn_kept_bytes, burn_peak_bytes] = bytes(sides[0])?;
        let [ours_kept_bytes, ours_peak_bytes] = bytes(sides[1])?;
        let [burn_seconds, ours_seconds] = self.seconds(sides, &input(shape));
        let [burn_small_seconds, ours_small_seconds] = self.seconds(small, &input(small_shape));
        Ok(Row {
            family: self.family.into(),
            layer: layer.into(),
            shape: format!("{shape:?}"),
            parameters: parameters.into(),
            input_tracked: tracked,
            burn_kept_bytes,
            ours_kept_bytes,
            burn_peak_bytes,
            ours_peak_bytes,
            burn_seconds,
            ours_seconds,
            burn_small_seconds,
            ours_small_seconds,
        })
    }

    /// The median times of both sides, which run in turns, so that a machine whose speed drifts is fair to both.
    fn seconds<const D: usize, const O: usize>(&self, sides: [Side<D, O>; 2], x: &Tensor<D>) -> [f64; 2] {
        let (least, most, enough) = self.settings.pick((1, 1, 0.0), (5, 41, 0.25), (11, 101, 1.0));
        let is_tracked = x.is_require_grad();
        let run = |side: usize| {
            // Every run has a tensor that nothing else holds, so that a layer may work in place.
            let x = x.clone().inner().add_scalar(0.0);
            let x = Tensor::from_inner(x).set_require_grad(is_tracked);
            // If the device fails here, it already failed when bytes were measured, which reports it.
            let _ = self.device.sync();
            let start = Instant::now();
            let y = black_box(sides[side](x));
            // A frozen embedding has no graph.
            if y.is_tracked() {
                drop(black_box(y.sum().backward())); // also frees the graph, which counts
            }
            let _ = self.device.sync();
            start.elapsed().as_secs_f64()
        };
        let mut times = [vec![], vec![]];
        let start = Instant::now();
        for turn in 0..most {
            let first = turn % 2;
            [first, 1 - first].into_iter().for_each(|side| times[side].push(run(side)));
            if turn + 1 >= least && start.elapsed().as_secs_f64() > enough {
                break;
            }
        }
        times.map(median)
    }
}

impl Measured for Twins {
    type Row = Row;
    const NAME: &'static str = "twins";
    const ABOUT: &'static str = "every layer beside its twin in Burn: bytes and times";

    fn parts(settings: &Settings) -> Vec<Part<Row>> {
        macro_rules! part_of_each {
            ($($family:ident),+) => {
                vec![$({
                    let settings = settings.clone();
                    Part::new(stringify!($family), move || {
                        let (family, device) = (stringify!($family), settings.autodiff());
                        let mut walk = Walk { settings: &settings, family, device, rows: Ok(vec![]) };
                        table::$family::visit(&mut walk);
                        walk.rows
                    })
                }),+]
            };
        }
        table::families!(part_of_each)
    }

    fn render(rows: &[Row]) -> Vec<Output> {
        vec![summary(rows), table(rows)]
    }
}

impl Row {
    fn kept(&self) -> f64 {
        self.ours_kept_bytes as f64 / self.burn_kept_bytes as f64
    }
    fn peak(&self) -> f64 {
        self.ours_peak_bytes as f64 / self.burn_peak_bytes as f64
    }
    fn time(&self) -> f64 {
        self.ours_seconds / self.burn_seconds
    }
    fn small_time(&self) -> f64 {
        self.ours_small_seconds / self.burn_small_seconds
    }
}

/// The least and the greatest of the finite values.
fn range(values: impl Iterator<Item = f64>) -> String {
    let values: Vec<f64> = values.filter(|value| value.is_finite()).collect();
    let least = values.iter().copied().fold(f64::INFINITY, f64::min);
    let most = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    format!("{} to {}", ratio(least, 1.0), ratio(most, 1.0))
}

/// A line for every family.
fn summary(rows: &[Row]) -> Output {
    let header = [
        "layers",
        "rows",
        "kept",
        "peak",
        "time",
        "geometric mean",
        "time on small tensors",
        "geometric mean",
    ];
    let mut table = Table::new(&header, 1);
    let mut families: Vec<&str> = rows.iter().map(|row| &row.family[..]).collect();
    families.dedup();
    for family in families {
        let of = || rows.iter().filter(|row| row.family == family);
        table.add([
            family.into(),
            of().count().to_string(),
            range(of().map(Row::kept)),
            range(of().map(Row::peak)),
            range(of().map(Row::time)),
            ratio(geometric_mean(of().map(Row::time)), 1.0),
            range(of().map(Row::small_time)),
            ratio(geometric_mean(of().map(Row::small_time)), 1.0),
        ]);
    }
    table.output("twins-summary")
}

fn table(rows: &[Row]) -> Output {
    let header = [
        "layer, input",
        "parameters",
        "input tracked",
        "Burn kept (MiB)",
        "ours kept (MiB)",
        "Burn peak (MiB)",
        "ours peak (MiB)",
        "Burn (ms)",
        "ours (ms)",
        "time",
        "time on small tensors",
    ];
    let mut table = Table::new(&header, 3);
    for row in rows {
        table.add([
            format!("{}, {}", row.layer, row.shape),
            row.parameters.clone(),
            if row.input_tracked { "yes" } else { "no" }.into(),
            mib(row.burn_kept_bytes),
            mib(row.ours_kept_bytes),
            mib(row.burn_peak_bytes),
            mib(row.ours_peak_bytes),
            format!("{:.2}", 1e3 * row.burn_seconds),
            format!("{:.2}", 1e3 * row.ours_seconds),
            ratio(row.time(), 1.0),
            ratio(row.small_time(), 1.0),
        ]);
    }
    table.output("twins-table")
}
