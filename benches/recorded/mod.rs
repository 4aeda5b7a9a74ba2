//! Writes files for `paper/recorded`, from which `paper/RESULTS.md` is made.
use burn_memsave_paper::provenance;
use serde::Serialize;
use std::error::Error;
use std::io::Write;
use std::path::Path;

/// Writes rows as CSV, below a line that says how, where and when they were made.
///
/// # Errors
///
/// If the file cannot be written.
pub fn write<R: Serialize>(
    path: &Path,
    command: &str,
    device: &str,
    rows: &[R],
) -> Result<(), Box<dyn Error>> {
    let (machine, date, source) =
        (provenance::machine(), provenance::today(), provenance::source_with(&["benches"]));
    let named = |error: std::io::Error| format!("{}: {error}", path.display());
    let mut file = std::fs::File::create(path).map_err(named)?;
    let line = provenance::line(command, &machine, device, &date, source.as_deref());
    writeln!(file, "# {line}").map_err(named)?;
    let mut writer = csv::Writer::from_writer(file);
    rows.iter().try_for_each(|row| writer.serialize(row))?;
    writer.flush().map_err(named)?;
    Ok(())
}
