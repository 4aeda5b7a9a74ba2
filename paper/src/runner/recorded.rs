//! Tables of what benches measured, which this command does not run: `paper/recorded/NAME.csv`. Lines with `#` before the header say how.
use crate::experiments::{Table, mib};
use std::error::Error;
use std::fs;
use std::path::Path;

/// A table for every file, under the name `recorded-NAME`.
///
/// # Errors
///
/// If a file cannot be read.
pub fn blocks(directory: &Path) -> Result<Vec<(String, String)>, Box<dyn Error>> {
    let of = |path: &Path, error: &dyn Error| format!("{}: {error}", path.display());
    let mut blocks = vec![];
    for entry in fs::read_dir(directory).map_err(|error| of(directory, &error))? {
        let path = entry?.path();
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let text = fs::read_to_string(&path).map_err(|error| of(&path, &error))?;
        blocks.push((format!("recorded-{name}"), block(&text).map_err(|error| of(&path, &*error))?));
    }
    Ok(blocks)
}

/// The table of a file without its empty columns, and how it was made.
fn block(text: &str) -> Result<String, Box<dyn Error>> {
    let source: Vec<&str> = text.lines().map_while(|line| line.strip_prefix("# ")).collect();
    let mut reader = csv::ReaderBuilder::new().comment(Some(b'#')).from_reader(text.as_bytes());
    let names = reader.headers()?.clone();
    let rows = reader.records().collect::<Result<Vec<_>, _>>()?;
    let is_measured = |&column: &usize| rows.iter().any(|row| !row[column].is_empty());
    let columns: Vec<usize> = (0..names.len()).filter(is_measured).collect();
    let is_number =
        |column: usize| rows.iter().all(|row| row[column].is_empty() || row[column].parse::<f64>().is_ok());
    let texts = columns.iter().take_while(|&&column| !is_number(column)).count();
    let header: Vec<String> = columns.iter().map(|&column| title(&names[column])).collect();
    let header: Vec<&str> = header.iter().map(String::as_str).collect();
    let mut table = Table::new(&header, texts);
    for row in &rows {
        table.add(columns.iter().map(|&column| shown(&names[column], &row[column])));
    }
    Ok(format!("{table}\n\n{}", source.join("\n")))
}

/// The title of a column.
fn title(column: &str) -> String {
    let units = [("_bytes", " (MiB)"), ("_milliseconds", " (ms)")];
    let unit = units.into_iter().find_map(|(end, unit)| Some((column.strip_suffix(end)?, unit)));
    let (name, unit) = unit.unwrap_or((column, ""));
    format!("{}{unit}", name.replace('_', " ").replace("burn", "Burn").replace("pytorch", "PyTorch"))
}

/// A value in the unit of its [title], with as many digits as are meaningful.
fn shown(column: &str, value: &str) -> String {
    let bytes = value.parse().ok().filter(|_| column.ends_with("_bytes"));
    let decimal = value.parse::<f64>().ok().filter(|_| value.contains('.'));
    match (bytes, decimal) {
        _ if value.is_empty() => "-".into(),
        (Some(bytes), _) => mib(bytes),
        (None, Some(number)) => format!("{number:.2}"),
        (None, None) => value.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_a_table_in_units_that_one_reads() {
        let text = "# By a bench.\nlayer,burn_kept_bytes,launches,ratio,pytorch_milliseconds\nrelu,1048576,3,,0.5\nnorm,0,,,\n";
        let lines: Vec<String> = block(text).unwrap().lines().map(String::from).collect();
        assert_eq!(
            lines,
            [
                "| layer | Burn kept (MiB) | launches | PyTorch (ms) |",
                "|-------|----------------:|---------:|-------------:|",
                "| relu  |            1.00 |        3 |         0.50 |",
                "| norm  |            0.00 |        - |            - |",
                "",
                "By a bench.",
            ]
        );
        assert!(block("a,b\n1\n").is_err());
    }
}
