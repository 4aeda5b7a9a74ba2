//! Runs Python's own libraries, where they are installed.
use std::io::{self, Write};
use std::path::Path;
use std::process::Command;

/// The Python that has these packages. If there is none, it says so.
pub fn with(packages: &[&str]) -> Option<String> {
    let python = std::env::var("PYTHON").unwrap_or_else(|_| "python3".into());
    let has_it = Command::new(&python).args(["-c", &format!("import {}", packages.join(", "))]).output();
    if has_it.is_ok_and(|output| output.status.success()) {
        return Some(python);
    }
    // Not by a macro: what those print is captured, and not shown of a test that passes.
    let why = format!("skipped: {python} has not all of them (`pip install {}`)\n", packages.join(" "));
    io::stderr().write_all(why.as_bytes()).unwrap();
    None
}

/// Runs a script of the tests' folder, with a directory as its last argument.
pub fn run(python: &str, script: &str, arguments: &[&str], directory: &Path) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(script);
    let output = Command::new(python).arg(script).args(arguments).arg(directory).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
