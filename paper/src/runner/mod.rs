//! Runs experiments part by part, goes on where it was stopped, and makes tables and figures of what there is.
use crate::experiments::{self, Experiment, Output, Settings};
use crate::figures;
use indicatif::{ProgressBar, ProgressStyle};
use results::Results;
use std::error::Error;
use std::fs;
use std::path::Path;
use std::time::Instant;

pub mod provenance;
pub mod readme;
pub mod results;

/// The experiments of these names, in the order of the table.
fn chosen(names: &[String]) -> Result<Vec<&'static Experiment>, String> {
    let known = || experiments::ALL.iter().map(|experiment| experiment.name);
    if let Some(name) = names.iter().find(|name| *name != "all" && !known().any(|known| known == **name)) {
        let known: Vec<&str> = known().chain(["all", "render"]).collect();
        return Err(format!("{name}: no such experiment; there are {}", known.join(", ")));
    }
    let is_chosen =
        |experiment: &&Experiment| names.iter().any(|name| name == "all" || name == experiment.name);
    Ok(experiments::ALL.iter().filter(is_chosen).collect())
}

/// Runs the parts of the experiments that have no results yet, or all of them `again`.
pub fn run(names: &[String], settings: &Settings, again: bool, output: &Path) -> Result<(), Box<dyn Error>> {
    let directory = output.join("results");
    fs::create_dir_all(&directory).map_err(|error| format!("{}: {error}", directory.display()))?;
    let source = provenance::source();
    let mut left = vec![];
    for experiment in chosen(names)? {
        let mut results = Results::begin(experiment, settings, &source);
        if !again {
            results.take_over(&directory);
        }
        let parts: Vec<_> =
            (experiment.parts)(settings).into_iter().filter(|part| !results.has(&part.name)).collect();
        if parts.is_empty() {
            println!("{}: results are there already; --again runs it anew", experiment.name);
        }
        left.push((experiment, results, parts));
    }
    let count = left.iter().map(|(_, _, parts)| parts.len()).sum::<usize>();
    // No thread of its own ticks: it would allocate while memory is counted.
    let bar = ProgressBar::new(count as u64);
    bar.set_style(ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed_precise} {msg}")?);
    for (experiment, mut results, parts) in left {
        let total = results.parts.len() + parts.len();
        for part in parts {
            bar.set_message(format!("{}: {}", experiment.name, part.name));
            bar.tick();
            let start = Instant::now();
            let rows =
                (part.run)().map_err(|error| format!("{}: {}: {error}", experiment.name, part.name))?;
            results.add(part.name, start.elapsed().as_secs_f64(), rows);
            results.complete = results.parts.len() == total;
            results.write(&directory)?;
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    Ok(())
}

/// Writes the tables, the figures and the README of the results that are there.
pub fn render(template: &Path, output: &Path) -> Result<(), Box<dyn Error>> {
    let text = fs::read_to_string(template).map_err(|error| format!("{}: {error}", template.display()))?;
    let directories = ["results", "figures"].map(|name| output.join(name));
    for directory in &directories {
        fs::create_dir_all(directory).map_err(|error| format!("{}: {error}", directory.display()))?;
    }
    let [results, figures] = directories;
    let mut blocks = vec![];
    for experiment in experiments::ALL {
        let found = Results::read(&results, experiment.name)?;
        let source = found.as_ref().map(Results::source_line);
        let rows = found.as_ref().map(|found| found.rows().cloned().collect::<Vec<_>>());
        for made in (experiment.render)(&rows.unwrap_or_default())? {
            let block = match (&made, &source) {
                (_, None) => format!(
                    "*Not measured yet: `{}`.*",
                    provenance::command(experiment.name, &Settings::default())
                ),
                (Output::Table(_, table), Some(source)) => format!("{table}\n\n{source}"),
                (Output::Figure(figure), Some(source)) => {
                    figures::write(figure, &figures)?;
                    format!("![{0}](figures/{1}.svg)\n\n{source}", figure.title, figure.name)
                }
            };
            if let (Output::Table(name, _), Some(_)) = (&made, &source) {
                let path = results.join(format!("{name}.md"));
                fs::write(&path, format!("{block}\n"))
                    .map_err(|error| format!("{}: {error}", path.display()))?;
            }
            blocks.push((made.name().to_string(), block));
        }
    }
    let path = output.join("README.md");
    fs::write(&path, readme::fill(&text, &blocks)?)
        .map_err(|error| format!("{}: {error}", path.display()))?;
    println!("{}", path.display());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_choose_experiments_in_the_order_of_the_table() {
        let names = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|&name| name.into()).collect();
            chosen(&names).map(|chosen| chosen.iter().map(|experiment| experiment.name).collect::<Vec<_>>())
        };
        assert_eq!(names(&["models", "layers"]), Ok(vec!["layers", "models"]));
        assert_eq!(names(&["all"]).map(|all| all.len()), Ok(experiments::ALL.len()));
        assert!(names(&["layer"]).is_err_and(|error| error.starts_with("layer: no such experiment")));
    }

    /// A table or a figure of each name is in the README once, and nothing else is.
    #[test]
    fn the_readme_has_a_place_for_everything() {
        let text = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/README.md")).unwrap();
        let blocks: Vec<(String, String)> = experiments::ALL
            .iter()
            .flat_map(|experiment| (experiment.render)(&[]).unwrap())
            .map(|made| (made.name().to_string(), String::new()))
            .collect();
        readme::fill(&text, &blocks).unwrap();
    }
}
