//! Tables in Markdown, with numbers at the right.
use comfy_table::{Cell, CellAlignment, Row, Table, presets};

pub(crate) fn table(header: impl Into<Row>) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::ASCII_MARKDOWN).set_header(header);
    table
}

pub(crate) fn number(text: String) -> Cell {
    Cell::new(text).set_alignment(CellAlignment::Right)
}
