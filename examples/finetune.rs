//! Placeholder while the workspace is built.
fn main() {}
