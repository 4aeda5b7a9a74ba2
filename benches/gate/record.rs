//! What is recorded.
use burn_memsave::measure::{LayerMeasurement, Measurement};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, error::Error, path::Path};

/// Bytes of a step.
#[derive(Clone, Copy, Debug)]
pub struct Needs {
    pub kept: u64,
    pub peak: u64,
}

impl Needs {
    pub fn of_layer(measured: &LayerMeasurement) -> Result<Self, &'static str> {
        Self::new(measured.kept, measured.peak)
    }

    pub fn of_step(measured: &Measurement) -> Result<Self, &'static str> {
        Self::new(measured.kept, measured.peak)
    }

    fn new(kept: Option<u64>, peak: Option<u64>) -> Result<Self, &'static str> {
        let counted = kept.zip(peak).map(|(kept, peak)| Self { kept, peak });
        counted.ok_or("bytes are not counted on this device")
    }
}

#[derive(Serialize, Deserialize)]
struct Line {
    name: String,
    kept: u64,
    peak: u64,
}

/// By name.
pub struct Record(BTreeMap<String, Needs>);

impl Record {
    pub fn read(path: &Path) -> Result<Self, Box<dyn Error>> {
        let failed = |error: csv::Error| format!("{}: {error}", path.display());
        let lines = csv::Reader::from_path(path).map_err(failed)?.into_deserialize();
        let needs = |line: Result<Line, _>| {
            line.map(|Line { name, kept, peak }| (name, Needs { kept, peak })).map_err(failed)
        };
        Ok(Self(lines.map(needs).collect::<Result<_, _>>()?))
    }

    pub fn write<'a>(
        path: &Path,
        rows: impl Iterator<Item = (&'a str, Needs)>,
    ) -> Result<(), Box<dyn Error>> {
        let failed = |error: csv::Error| format!("{}: {error}", path.display());
        let mut writer = csv::Writer::from_path(path).map_err(failed)?;
        for (name, Needs { kept, peak }) in rows {
            writer.serialize(Line { name: name.into(), kept, peak }).map_err(failed)?;
        }
        Ok(writer.flush()?)
    }

    pub fn get(&self, name: &str) -> Option<Needs> {
        self.0.get(name).copied()
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }
}
