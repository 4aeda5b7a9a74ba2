//! The command of the paper: everything at its small sizes, and what it does with bad arguments. (It limits the memory of processes as
//! Linux does.)
#![cfg(target_os = "linux")]
use burn_memsave_paper::provenance;
use std::collections::BTreeSet;
use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::process::{Command, Output};
use std::time::Instant;

fn paper(arguments: &[&str], output: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_burn-memsave-paper"))
        .args(arguments)
        .arg("--output")
        .arg(output)
        .output()
        .expect("the command starts")
}

fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The stems of the files in `directory` with this extension.
fn stems(directory: &Path, extension: &str) -> BTreeSet<String> {
    fs::read_dir(directory)
        .expect("a directory")
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.extension().is_some_and(|found| found == extension))
        .map(|path| path.file_stem().expect("a name").to_string_lossy().into_owned())
        .collect()
}

#[test]
fn everything_in_small() {
    let directory = tempfile::tempdir().expect("a directory");
    let output = directory.path();
    let start = Instant::now();
    stdout(&paper(&["all", "--quick"], output));
    // Past what the test harness captures: it is read where the test passes.
    let took = format!("all --quick took {:.0} s", start.elapsed().as_secs_f64());
    writeln!(io::stderr(), "{took}").expect("stderr is there");

    let listed = stdout(&paper(&["--list"], output));
    let experiments: BTreeSet<String> =
        listed.lines().filter_map(|line| line.split_whitespace().next()).map(String::from).collect();
    let results = output.join("results");
    assert!(experiments.contains("layers"), "{listed}");
    assert_eq!(stems(&results, "csv"), experiments);
    assert_eq!(stems(&results, "json"), experiments);
    let figures = output.join("figures");
    assert!(!stems(&figures, "svg").is_empty());
    assert_eq!(stems(&figures, "svg"), stems(&figures, "png"));
    let readme = fs::read_to_string(output.join("README.md")).expect("the write-up");
    assert!(!readme.contains("Not measured yet"), "{readme}");

    // Of a source without a commit nothing is taken over.
    if provenance::source().is_none() {
        return println!("not run again: there is no git here");
    }
    let again = stdout(&paper(&["all", "--quick"], output));
    let skipped = again.lines().filter(|line| line.contains("results are there already")).count();
    assert_eq!(skipped, experiments.len(), "{again}");
}

#[test]
fn an_experiment_that_is_not_there() {
    let directory = tempfile::tempdir().expect("a directory");
    let output = paper(&["layer"], directory.path());
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert!(error.contains("layer: no such experiment"), "{error}");
}
