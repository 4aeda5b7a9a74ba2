//! The front page of the crate says what the README says, in the same words.
use std::fs;
use std::path::Path;

/// Passages that both have, by how they begin and end.
const SHARED: [(&str, &str); 3] = [
    ("`burn-memsave` provides", "(`-- language`)"),
    ("Replace `burn::nn` with", "[1, 3, 16, 16]);\n```"),
    ("| module | contents |", "| [`guide`]"),
];

/// The passage without the lines of the picture, which is a link in one, and part of the page in the other.
fn passage(text: &str, (begin, end): (&str, &str)) -> String {
    let start = text.find(begin).unwrap_or_else(|| panic!("no passage begins with {begin:?}"));
    let length =
        text[start..].find(end).unwrap_or_else(|| panic!("no passage ends with {end:?}")) + end.len();
    let is_picture = |line: &&str| line.starts_with("![Memory over one") || line.starts_with("#![doc");
    text[start..start + length].lines().filter(|line| !is_picture(line)).collect::<Vec<_>>().join("\n")
}

#[test]
fn of_the_crate_is_that_of_the_readme() {
    let read = |path| fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap();
    let readme = read("README.md").replace("\r\n", "\n");
    let page = read("src/lib.rs");
    let page = page
        .lines()
        .map(|line| line.strip_prefix("//!").map_or(line, |line| line.strip_prefix(' ').unwrap_or(line)));
    let page = page.collect::<Vec<_>>().join("\n");
    for shared in SHARED {
        assert_eq!(passage(&page, shared), passage(&readme, shared));
    }
}
