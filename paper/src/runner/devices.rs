//! The table of devices in `RESULTS.md`: a few rows of the files of devices in `paper/recorded`, side by side.
use crate::experiments::Table;
use serde::Deserialize;
use std::error::Error;
use std::iter;
use std::path::Path;

/// File names, each with the header of its peaks.
const DEVICES: [(&str, &str); 3] = [
    ("devices-cuda", "peak on an H200"),
    ("devices-wgpu", "peak on wgpu in software"),
    ("devices-wgpu-fusion", "peak, with fusion"),
];

/// For each row its title here, then its layer and parameters in the files.
const ROWS: [(&str, &str, &str); 13] = [
    ("`Relu`", "relu", "-"),
    ("`Dropout`", "dropout", "-"),
    ("`BatchNorm`, all parameters trained", "batch_norm", "trainable"),
    ("`LayerNorm`", "layer_norm", "trainable"),
    ("`MultiHeadAttention`", "multi-head attention, dropout 0", "trainable"),
    ("`Lstm`", "lstm", "trainable"),
    ("`Linear` with LoRA", "linear, LoRA", "trainable"),
    ("`Linear`, frozen, quantized, with an adapter", "linear, QLoRA", "frozen"),
    ("`Conv2d`", "conv2d", "trainable"),
    ("ResNet-18", "ResNet-18, 2 x 64", "trainable"),
    ("ResNet-18, frozen", "ResNet-18, 2 x 64", "frozen"),
    ("language model", "language model, 2 x 128", "trainable"),
    ("language model, LoRA", "language model, 2 x 128", "LoRA"),
];

#[derive(Deserialize)]
struct Row {
    layer: String,
    parameters: String,
    peak_ratio: f64,
    step_ratio: f64,
}

/// The table of peaks and times of a step, ours relative to Burn's.
///
/// # Errors
///
/// If a file cannot be read, or lacks a row.
pub fn table(directory: &Path) -> Result<Table, Box<dyn Error>> {
    let mut rows = ROWS.map(|(title, ..)| vec![title.to_string()]);
    for (file, _) in DEVICES {
        let path = directory.join(format!("{file}.csv"));
        let of = |error: &dyn Error| format!("{}: {error}", path.display());
        let mut reader =
            csv::ReaderBuilder::new().comment(Some(b'#')).from_path(&path).map_err(|error| of(&error))?;
        let found = reader.deserialize().collect::<Result<Vec<Row>, _>>().map_err(|error| of(&error))?;
        for (row, (_, layer, parameters)) in iter::zip(&mut rows, ROWS) {
            let found = found.iter().find(|row| row.layer == layer && row.parameters == parameters);
            let found =
                found.ok_or_else(|| format!("{}: {layer}, {parameters}: no such row", path.display()))?;
            row.extend([found.peak_ratio, found.step_ratio].map(|ratio| format!("{ratio:.2}")));
        }
    }
    let header = DEVICES.iter().flat_map(|(_, peak)| [peak, "time"]);
    let header: Vec<&str> = iter::once("a step, ours to Burn's").chain(header).collect();
    let mut table = Table::new(&header, 1);
    rows.into_iter().for_each(|row| table.add(row));
    Ok(table)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn the_results_have_this_table() {
        let paper = Path::new(env!("CARGO_MANIFEST_DIR"));
        let table = table(&paper.join("recorded")).unwrap().to_string();
        let results = fs::read_to_string(paper.join("RESULTS.md")).unwrap();
        assert!(results.contains(&table), "RESULTS.md is another: run `render`\n{table}");
    }

    #[test]
    fn what_lacks_is_said() {
        let directory = tempfile::tempdir().unwrap();
        let error = || table(directory.path()).err().unwrap().to_string();
        assert!(error().contains("devices-cuda.csv"), "{}", error());
        let csv = "# By a bench.\nlayer,parameters,peak_ratio,step_ratio\nrelu,-,0.1,0.2\n";
        fs::write(directory.path().join("devices-cuda.csv"), csv).unwrap();
        assert!(error().ends_with("devices-cuda.csv: dropout, -: no such row"), "{}", error());
    }
}
