//! Reports of measured steps, as a table and as JSON.
use burn_memsave::measure::{Measurement, mib};
use comfy_table::{Table, presets};
use serde_json::{Value, json};
use std::{fs, path::Path};

/// Measured training steps, Burn's layers beside ours.
#[derive(Debug, Default)]
pub struct Report(Vec<(String, [Measurement; 2])>);

impl Report {
    /// Adds a row: the measurement of Burn's layers, and that of ours.
    pub fn add(&mut self, case: impl Into<String>, measurements: [Measurement; 2]) {
        self.0.push((case.into(), measurements));
    }

    /// The report as a Markdown table.
    pub fn table(&self) -> Table {
        let mut table = Table::new();
        table.load_preset(presets::ASCII_MARKDOWN).set_header([
            "case",
            "Burn kept (MiB)",
            "ours kept (MiB)",
            "Burn peak (MiB)",
            "ours peak (MiB)",
            "Burn step (s)",
            "ours step (s)",
        ]);
        let size = |bytes: Option<u64>| bytes.map_or_else(|| "unknown".into(), mib);
        let time =
            |step: &Measurement| format!("{:.2}", (step.forward_time + step.backward_time).as_secs_f64());
        for (case, [burn, ours]) in &self.0 {
            table.add_row([
                case.clone(),
                size(burn.kept),
                size(ours.kept),
                size(burn.peak),
                size(ours.peak),
                time(burn),
                time(ours),
            ]);
        }
        table
    }

    /// Writes the measurements to a file, as JSON.
    ///
    /// # Errors
    ///
    /// If the file cannot be written. The error names it.
    pub fn write(&self, path: &Path) -> Result<(), String> {
        let rows =
            self.0.iter().map(|(case, [burn, ours])| json!({ "case": case, "burn": burn, "ours": ours }));
        let text = format!("{:#}\n", Value::Array(rows.collect()));
        fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))
    }
}
