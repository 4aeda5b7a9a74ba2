//! The experiments, one file each, the list of them, and what they share.
use burn::tensor::Device;
use clap::ValueEnum;
use comfy_table::{Cell, CellAlignment, presets};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::Value;
use std::error::Error;
use std::fmt;

pub mod child;
mod fit;
mod language;
mod layers;
mod lazy;
mod limits;
mod models;
mod scaling;
mod step;
mod techniques;
mod toolbox;
mod twins;

use crate::figures::Figure;

/// All experiments, in the order in which they run and appear.
pub const ALL: &[Experiment] = &[
    experiment::<layers::Layers>(),
    experiment::<models::Models>(),
    experiment::<scaling::Scaling>(),
    experiment::<language::Language>(),
    experiment::<toolbox::Toolbox>(),
    experiment::<techniques::Techniques>(),
    experiment::<lazy::Lazy>(),
    experiment::<limits::Limits>(),
    experiment::<twins::Twins>(),
];

/// How large models and inputs are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Size {
    Quick,
    #[default]
    Usual,
    Full,
}

/// The device of the tensors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum DeviceName {
    #[default]
    Flex,
    #[cfg(feature = "wgpu")]
    Wgpu,
    #[cfg(feature = "cuda")]
    Cuda,
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Flex => "flex",
            #[cfg(feature = "wgpu")]
            Self::Wgpu => "wgpu",
            #[cfg(feature = "cuda")]
            Self::Cuda => "cuda",
        })
    }
}

/// What a run of an experiment depends on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    pub size: Size,
    pub device: DeviceName,
}

impl Settings {
    /// The value for the current size.
    pub fn pick<T>(&self, quick: T, usual: T, full: T) -> T {
        match self.size {
            Size::Quick => quick,
            Size::Usual => usual,
            Size::Full => full,
        }
    }

    /// The device, without autodiff.
    pub fn device(&self) -> Device {
        match self.device {
            DeviceName::Flex => Device::flex(),
            #[cfg(feature = "wgpu")]
            DeviceName::Wgpu => Device::wgpu(burn::tensor::DeviceKind::DefaultDevice),
            #[cfg(feature = "cuda")]
            DeviceName::Cuda => Device::cuda(0),
        }
    }

    /// The device with autodiff, its random numbers seeded anew.
    pub fn autodiff(&self) -> Device {
        let device = self.device().autodiff();
        device.seed(0);
        device
    }

    /// How often each time is measured, in turns.
    pub fn turns(&self) -> usize {
        self.pick(1, 3, 5)
    }
}

/// The error of an experiment.
pub type Failure = Box<dyn Error>;

/// An experiment: parts that produce rows, and tables and figures made from the rows.
pub trait Measured {
    /// A row of its CSV file.
    type Row: Serialize + DeserializeOwned + 'static;
    /// Its name on the command line.
    const NAME: &'static str;
    /// What it measures, in one line.
    const ABOUT: &'static str;
    /// Whether it measures on the CPU whatever the device is.
    const IS_ON_CPU: bool = false;
    /// The parts to run. No two have the same name.
    fn parts(settings: &Settings) -> Vec<Part<Self::Row>>;
    /// Tables and figures: always the same ones, even without rows.
    fn render(rows: &[Self::Row]) -> Vec<Output>;
}

/// A part of an experiment. Results are written after each part, so a run that was stopped continues with the next one.
pub struct Part<R> {
    pub name: String,
    pub run: Box<dyn FnOnce() -> Result<Vec<R>, Failure>>,
}

impl<R> Part<R> {
    pub fn new(name: impl Into<String>, run: impl FnOnce() -> Result<Vec<R>, Failure> + 'static) -> Self {
        Self { name: name.into(), run: Box::new(run) }
    }
}

/// A table or a figure.
pub enum Output {
    /// Its name, and Markdown.
    Table(&'static str, String),
    Figure(Figure),
}

impl Output {
    pub fn name(&self) -> &str {
        match self {
            Self::Table(name, _) => name,
            Self::Figure(figure) => &figure.name,
        }
    }
}

/// A [`Measured`] whose rows are JSON.
pub struct Experiment {
    pub name: &'static str,
    pub about: &'static str,
    pub is_on_cpu: bool,
    pub parts: fn(&Settings) -> Vec<Part<Value>>,
    pub render: fn(&[Value]) -> Result<Vec<Output>, Failure>,
    pub csv: fn(&[Value]) -> Result<String, Failure>,
}

const fn experiment<E: Measured>() -> Experiment {
    Experiment {
        name: E::NAME,
        about: E::ABOUT,
        is_on_cpu: E::IS_ON_CPU,
        parts: parts::<E>,
        render: render::<E>,
        csv: csv::<E>,
    }
}

fn parts<E: Measured>(settings: &Settings) -> Vec<Part<Value>> {
    let untyped = |part: Part<E::Row>| {
        Part::new(part.name, || {
            Ok((part.run)()?.iter().map(serde_json::to_value).collect::<Result<_, _>>()?)
        })
    };
    E::parts(settings).into_iter().map(untyped).collect()
}

fn typed<E: Measured>(rows: &[Value]) -> Result<Vec<E::Row>, Failure> {
    let rows = rows.iter().map(|row| serde_json::from_value(row.clone())).collect::<Result<_, _>>();
    rows.map_err(|error| format!("{}: rows of another version of the experiment: {error}", E::NAME).into())
}

fn render<E: Measured>(rows: &[Value]) -> Result<Vec<Output>, Failure> {
    Ok(E::render(&typed::<E>(rows)?))
}

fn csv<E: Measured>(rows: &[Value]) -> Result<String, Failure> {
    let mut writer = csv::Writer::from_writer(vec![]);
    typed::<E>(rows)?.iter().try_for_each(|row| writer.serialize(row))?;
    let text = writer.into_inner().map_err(|error| error.into_error())?;
    Ok(String::from_utf8(text)?)
}

/// A Markdown table. Its first `texts` columns are texts, the others numbers.
pub struct Table {
    table: comfy_table::Table,
    texts: usize,
}

impl Table {
    pub fn new(header: &[&str], texts: usize) -> Self {
        let mut table = comfy_table::Table::new();
        table.load_preset(presets::ASCII_MARKDOWN);
        let mut table = Self { table, texts };
        let header = table.cells(header.iter().map(|text| (*text).into()));
        table.table.set_header(header);
        table
    }

    fn cells(&self, row: impl IntoIterator<Item = String>) -> Vec<Cell> {
        let align = |(column, text): (usize, String)| match column < self.texts {
            true => Cell::new(text),
            false => Cell::new(text).set_alignment(CellAlignment::Right),
        };
        row.into_iter().enumerate().map(align).collect()
    }

    pub fn add(&mut self, row: impl IntoIterator<Item = String>) {
        let row = self.cells(row);
        self.table.add_row(row);
    }

    pub fn output(self, name: &'static str) -> Output {
        Output::Table(name, self.to_string())
    }
}

impl fmt::Display for Table {
    /// The line below the header makes Markdown align the columns of numbers to the right.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = self.table.to_string();
        for (number, line) in text.lines().enumerate() {
            if number > 0 {
                writeln!(f)?;
            }
            if number != 1 {
                f.write_str(line)?;
                continue;
            }
            for (column, dashes) in line.trim_matches('|').split('|').enumerate() {
                match column < self.texts {
                    true => write!(f, "|{dashes}")?,
                    false => write!(f, "|{}:", &dashes[1..])?,
                }
            }
            f.write_str("|")?;
        }
        Ok(())
    }
}

/// MiB with two decimals.
pub fn mib(bytes: u64) -> String {
    burn_memsave::measure::mib(bytes)
}

/// MiB as a number.
pub fn in_mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// A ratio with two decimals, three if it is small; a dash if it is not finite.
pub fn ratio(of: f64, to: f64) -> String {
    match of / to {
        ratio if !ratio.is_finite() => "-".into(),
        ratio if ratio < 0.1 => format!("{ratio:.3}"),
        ratio => format!("{ratio:.2}"),
    }
}

/// The geometric mean of those ratios whose logarithm is finite.
pub fn geometric_mean(ratios: impl Iterator<Item = f64>) -> f64 {
    let logarithms: Vec<f64> = ratios.map(f64::ln).filter(|logarithm| logarithm.is_finite()).collect();
    (logarithms.iter().sum::<f64>() / logarithms.len() as f64).exp()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_markdown_whose_numbers_are_on_the_right() {
        let mut table = Table::new(&["layer", "MiB"], 1);
        table.add(["linear".into(), "1.50".into()]);
        let lines: Vec<String> = table.to_string().lines().map(String::from).collect();
        assert_eq!(lines, ["| layer  |  MiB |", "|--------|-----:|", "| linear | 1.50 |"]);
    }

    #[test]
    fn ratios_have_as_many_digits_as_mean_something() {
        assert_eq!(ratio(1.0, 2.0), "0.50");
        assert_eq!(ratio(1.0, 64.0), "0.016");
        assert_eq!(ratio(0.0, 0.0), "-");
    }

    /// Files of results are named after experiments, and parts are found by name.
    #[test]
    fn names_differ() {
        let unique = |mut names: Vec<String>| {
            let count = names.len();
            names.sort();
            names.dedup();
            assert_eq!(names.len(), count, "{names:?}");
        };
        unique(ALL.iter().map(|experiment| experiment.name.into()).collect());
        for size in [Size::Quick, Size::Usual, Size::Full] {
            let settings = Settings { size, ..Settings::default() };
            for experiment in ALL {
                unique((experiment.parts)(&settings).into_iter().map(|part| part.name).collect());
            }
        }
        let made = ALL.iter().flat_map(|experiment| (experiment.render)(&[]).unwrap());
        unique(made.map(|made| made.name().into()).collect());
    }
}
