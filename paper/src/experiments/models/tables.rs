//! Tables and the figure of the rows of models, beside what others published.
use super::Row;
use crate::experiments::{Output, Table, in_mib, mib, ratio};
use crate::figures::{Axis, Figure, Marker, Panel, Series, Style, Whose};
use serde::Deserialize;

pub(super) fn table(rows: &[Row]) -> Output {
    let mut table = Table::new(
        &[
            "model, input",
            "gradients of",
            "Burn kept (MiB)",
            "ours kept (MiB)",
            "ratio",
            "Burn peak (MiB)",
            "ours peak (MiB)",
            "ratio",
            "Burn step (s)",
            "ours step (s)",
            "ratio",
        ],
        2,
    );
    for row in rows {
        table.add([
            format!("{}, {}", row.model, row.input),
            row.case.clone(),
            mib(row.burn_kept_bytes),
            mib(row.ours_kept_bytes),
            ratio(row.ours_kept_bytes as f64, row.burn_kept_bytes as f64),
            mib(row.burn_peak_bytes),
            mib(row.ours_peak_bytes),
            ratio(row.ours_peak_bytes as f64, row.burn_peak_bytes as f64),
            format!("{:.3}", row.burn_seconds),
            format!("{:.3}", row.ours_seconds),
            ratio(row.ours_seconds, row.burn_seconds),
        ]);
    }
    table.output("models-table")
}

/// What others published: a row of `paper/published.csv`.
#[derive(Deserialize)]
struct Published {
    model: String,
    case: String,
    pytorch_gb: f64,
    memsave_gb: f64,
    pytorch_seconds: f64,
    memsave_seconds: f64,
}

/// What PyTorch and memsave_torch keep: a row of `paper/peers.csv`.
#[derive(Deserialize)]
struct Peer {
    model: String,
    input: String,
    case: String,
    pytorch_mib: f64,
    memsave_mib: f64,
}

/// The rows of a file. Its first lines, with `#`, say where they are from.
pub fn lines<R: serde::de::DeserializeOwned>(text: &str) -> Vec<R> {
    let mut reader = csv::ReaderBuilder::new().comment(Some(b'#')).from_reader(text.as_bytes());
    reader.deserialize().map(|row| row.expect("a test reads it")).collect()
}

fn published() -> Vec<Published> {
    lines(include_str!("../../../published.csv"))
}

fn peers() -> Vec<Peer> {
    lines(include_str!("../../../peers.csv"))
}

/// What is kept, beside PyTorch on the same input, and relative to PyTorch with everything trained.
pub(super) fn peers_table(rows: &[Row]) -> Output {
    let header = [
        "model, input",
        "gradients of",
        "PyTorch kept (MiB)",
        "memsave_torch kept (MiB)",
        "of PyTorch, all",
        "Burn kept (MiB)",
        "of PyTorch, all",
        "ours kept (MiB)",
        "of PyTorch, all",
    ];
    let mut table = Table::new(&header, 2);
    let peers = peers();
    for peer in &peers {
        let is_same =
            |row: &&Row| (&row.model, &row.input, &row.case) == (&peer.model, &peer.input, &peer.case);
        let Some(row) = rows.iter().find(is_same) else { continue };
        let all = peers.iter().find(|all| all.model == peer.model && all.case == "all");
        let all = all.map_or(f64::NAN, |all| all.pytorch_mib);
        table.add([
            format!("{}, {}", peer.model, peer.input),
            peer.case.clone(),
            format!("{:.0}", peer.pytorch_mib),
            format!("{:.0}", peer.memsave_mib),
            ratio(peer.memsave_mib, all),
            mib(row.burn_kept_bytes),
            ratio(in_mib(row.burn_kept_bytes), all),
            mib(row.ours_kept_bytes),
            ratio(in_mib(row.ours_kept_bytes), all),
        ]);
    }
    table.output("models-peers")
}

/// The published numbers beside ours. Both are relative to "all" of the framework that they build on: PyTorch, and Burn.
pub(super) fn published_table(rows: &[Row]) -> Output {
    let mut table = Table::new(
        &[
            "model",
            "gradients of",
            "PyTorch, memory",
            "memsave_torch, memory",
            "Burn, memory",
            "ours, memory",
            "PyTorch, time",
            "memsave_torch, time",
            "Burn, time",
            "ours, time",
        ],
        2,
    );
    let published = published();
    let (mut models, mut pairs): (Vec<&str>, Vec<(&str, &str)>) = (vec![], vec![]);
    for pair in published
        .iter()
        .map(|row| (row.model.as_str(), row.case.as_str()))
        .chain(rows.iter().map(|row| (row.model.as_str(), row.case.as_str())))
    {
        if !models.contains(&pair.0) {
            models.push(pair.0);
        }
        if !pairs.contains(&pair) {
            pairs.push(pair);
        }
    }
    // Models that both measured come first.
    let is_ours = |model: &str| rows.iter().any(|row| row.model == model);
    let is_theirs = |model: &str| published.iter().any(|row| row.model == model);
    models.sort_by_key(|model| !(is_ours(model) && is_theirs(model)));
    for model in models {
        for &(_, case) in pairs.iter().filter(|pair| pair.0 == model) {
            let theirs = |case: &str| published.iter().find(|row| row.model == model && row.case == case);
            let ours = |case: &str| rows.iter().find(|row| row.model == model && row.case == case);
            let of = |value: Option<f64>, all: Option<f64>| match (value, all) {
                (Some(value), Some(all)) => ratio(value, all),
                _ => String::new(),
            };
            let theirs = |value: fn(&Published) -> f64, all: fn(&Published) -> f64| {
                of(theirs(case).map(value), theirs("all").map(all))
            };
            let ours = |value: fn(&Row) -> f64, all: fn(&Row) -> f64| {
                of(ours(case).map(value), ours("all").map(all))
            };
            let burn_bytes = |row: &Row| (row.parameter_bytes + row.burn_kept_bytes) as f64;
            let our_bytes = |row: &Row| (row.parameter_bytes + row.ours_kept_bytes) as f64;
            table.add([
                model.into(),
                case.into(),
                theirs(|row| row.pytorch_gb, |row| row.pytorch_gb),
                theirs(|row| row.memsave_gb, |row| row.pytorch_gb),
                ours(burn_bytes, burn_bytes),
                ours(our_bytes, burn_bytes),
                theirs(|row| row.pytorch_seconds, |row| row.pytorch_seconds),
                theirs(|row| row.memsave_seconds, |row| row.pytorch_seconds),
                ours(|row| row.burn_seconds, |row| row.burn_seconds),
                ours(|row| row.ours_seconds, |row| row.burn_seconds),
            ]);
        }
    }
    table.output("models-published")
}

const RUNNING: &str = ", running statistics";

/// What requires a gradient in a case, and the suffix of cases with running statistics.
fn of_case(row: &Row) -> (&str, &'static str) {
    row.case.strip_suffix(RUNNING).map_or((&row.case, ""), |tracked| (tracked, RUNNING))
}

/// A panel for each model, and beside it one for the same model with running statistics.
pub(super) fn figure(rows: &[Row]) -> Figure {
    let name = |row: &Row| format!("{}, {}{}", row.model, row.input, of_case(row).1);
    // Each with the place of its model, by which they are sorted.
    let mut names: Vec<(Option<usize>, String)> = vec![];
    for row in rows {
        let named = (rows.iter().position(|first| first.model == row.model), name(row));
        if !names.contains(&named) {
            names.push(named);
        }
    }
    names.sort_by_key(|(place, _)| *place);
    let panel = |(_, title): &(Option<usize>, String)| {
        let of: Vec<&Row> = rows.iter().filter(|row| name(row) == *title).collect();
        let series = |name: &str, whose, bytes: fn(&Row) -> u64| Series {
            name: name.into(),
            style: Style { whose, marker: Marker::Circle },
            points: of.iter().enumerate().map(|(at, row)| (at as f64, in_mib(bytes(row)))).collect(),
        };
        Panel {
            title: title.clone(),
            x: Axis::linear(""),
            y: Axis::linear("kept (MiB)"),
            series: vec![
                series("Burn", Whose::Burn, |row| row.burn_kept_bytes),
                series("ours", Whose::Ours, |row| row.ours_kept_bytes),
            ],
            bars: of.iter().map(|row| of_case(row).0.into()).collect(),
        }
    };
    Figure {
        name: "models".into(),
        title: "What a step keeps, by what requires a gradient".into(),
        columns: 2,
        panels: names.iter().map(panel).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_memsave_paper::Case;

    /// Every published case is one of ours, and the published ratios are those of the file.
    #[test]
    fn what_was_published_is_read() {
        let published = published();
        let names: Vec<String> = Case::all().map(Case::short_name).collect();
        assert!(published.iter().all(|row| names.contains(&row.case)));
        assert!(peers().iter().all(|row| names.contains(&row.case)));
        let all = published.iter().find(|row| row.model == "ResNet-101" && row.case == "all").unwrap();
        assert_eq!(ratio(all.memsave_gb, all.pytorch_gb), "1.09");
        let Output::Table(_, table) = published_table(&[]) else { panic!("a table") };
        assert!(table.lines().any(|line| line.contains("ResNet-101") && line.contains("1.09")), "{table}");
    }
}
