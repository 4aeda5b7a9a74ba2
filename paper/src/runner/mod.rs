//! Runs experiments part by part, continues a run that was stopped, and makes tables, figures and texts from the results.
use crate::experiments::{self, Experiment, Output, Settings, Size};
use crate::figures;
use blocks::Blocks;
use burn_memsave_paper::provenance;
use indicatif::{ProgressBar, ProgressStyle};
use results::Results;
use std::error::Error;
use std::fs;
use std::path::Path;
use std::time::Instant;

pub mod blocks;
mod devices;
mod recorded;
pub mod results;

/// The experiments with these names, in the order of `experiments::ALL`.
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

/// Runs the parts of the experiments that have no results yet, or with `again` all parts.
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
    // The bar has no thread that ticks, because it would allocate while memory is counted.
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

/// The command that makes the results of an experiment.
fn command(experiment: &str, settings: &Settings) -> String {
    let size = match settings.size {
        Size::Quick => " --quick",
        Size::Usual => "",
        Size::Full => " --full",
    };
    let device = match settings.device {
        device if device == Default::default() => String::new(),
        device => format!(" --device {device}"),
    };
    format!("cargo run --release -p burn-memsave-paper -- {experiment}{size}{device}")
}

/// Blocks of what benches recorded, by name.
fn recorded(directory: &Path) -> Result<Vec<(String, String)>, Box<dyn Error>> {
    let mut blocks = recorded::blocks(directory)?;
    blocks.push(("devices".into(), devices::table(directory)?.to_string()));
    Ok(blocks)
}

/// Hand-written texts with generated blocks.
const TEXTS: [&str; 2] = ["README.md", "RESULTS.md"];

/// Writes tables and figures from the existing results, and the texts of the `paper` with them filled in.
pub fn render(paper: &Path, output: &Path) -> Result<(), Box<dyn Error>> {
    let directories = ["results", "figures"].map(|name| output.join(name));
    for directory in &directories {
        fs::create_dir_all(directory).map_err(|error| format!("{}: {error}", directory.display()))?;
    }
    let [results, figures] = directories;
    let mut blocks = recorded(&paper.join("recorded"))?;
    for experiment in experiments::ALL {
        let found = Results::read(&results, experiment.name)?;
        let source = found.as_ref().map(Results::source_line);
        let rows = found.as_ref().map(|found| found.rows().cloned().collect::<Vec<_>>());
        for made in (experiment.render)(&rows.unwrap_or_default())? {
            let block = match (&made, &source) {
                (_, None) => {
                    format!("*Not measured yet: `{}`.*", command(experiment.name, &Settings::default()))
                }
                (Output::Table(name, table), Some(source)) => {
                    let block = format!("{table}\n\n{source}");
                    write(&results.join(format!("{name}.md")), &format!("{block}\n"))?;
                    block
                }
                (Output::Figure(figure), Some(source)) => {
                    figures::write(figure, &figures)?;
                    format!("![{0}](figures/{1}.svg)\n\n{source}", figure.title, figure.name)
                }
            };
            blocks.push((made.name().to_string(), block));
        }
    }
    let mut blocks = Blocks::new(blocks);
    for text in TEXTS {
        let (template, path) = (paper.join(text), output.join(text));
        let text =
            fs::read_to_string(&template).map_err(|error| format!("{}: {error}", template.display()))?;
        let filled = blocks.fill(&text).map_err(|error| format!("{}: {error}", template.display()))?;
        write(&path, &filled)?;
        println!("{}", path.display());
    }
    Ok(blocks.all_have_places()?)
}

fn write(path: &Path, text: &str) -> Result<(), String> {
    fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))
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

    /// Every table and figure has exactly one place in the texts, and nothing else has one.
    #[test]
    fn there_is_a_place_for_everything() {
        let paper = Path::new(env!("CARGO_MANIFEST_DIR"));
        let made = experiments::ALL.iter().flat_map(|experiment| (experiment.render)(&[]).unwrap());
        let made = made.map(|made| (made.name().to_string(), String::new()));
        let mut blocks = Blocks::new(recorded(&paper.join("recorded")).unwrap().into_iter().chain(made));
        for text in TEXTS {
            blocks.fill(&fs::read_to_string(paper.join(text)).unwrap()).unwrap();
        }
        blocks.all_have_places().unwrap();
    }
}
