//! [`LazyReport`]: which parameters became lazy, which ones were read, and what is missing or unused.
use super::LazyCache;
use crate::measure::{human_bytes, number, table};
use burn::tensor::{DType, Shape};
use comfy_table::Cell;
use std::fmt;

/// A parameter that was loaded from a [`WeightFile`](super::WeightFile).
#[derive(Clone, Debug)]
pub struct ReportedParameter {
    /// Its path in the module.
    pub path: String,
    /// The type of the module it is in, such as `Linear`.
    pub module: String,
    /// The name of its tensor in the file.
    pub tensor: String,
    /// Its shape in the file.
    pub shape: Shape,
    /// Its dtype in the file; f32 if it is packed.
    pub stored: DType,
    /// How its elements are packed in the file, if they are.
    pub packing: Option<String>,
    /// Its dtype in memory.
    pub dtype: DType,
    /// Its bytes in memory.
    pub bytes: u64,
    /// Whether it is lazy and used without a copy, where it lies in a [mapped](super::WeightFile::open_mapped) file.
    pub mapped: bool,
}

/// What [`lazy_load`](super::LazyLoad::lazy_load) did. Displays as a table.
#[derive(Clone, Debug)]
pub struct LazyReport {
    /// The lazy parameters, which are read when they are used.
    pub lazy: Vec<ReportedParameter>,
    /// The parameters that were read, and stay in memory.
    pub resident: Vec<ReportedParameter>,
    /// The parameters that the file has no tensor for.
    pub missing: Vec<String>,
    /// The tensors of the file that no parameter uses.
    pub unused: Vec<String>,
    /// What fits but is likely to be wrong: square weights that PyTorch wrote, loaded without an adapter that transposes them.
    pub warnings: Vec<String>,
    /// Shows the lazy weights from now on.
    pub cache: LazyCache,
}

impl LazyReport {
    /// The bytes that the lazy parameters would have in memory.
    pub fn lazy_bytes(&self) -> u64 {
        self.lazy.iter().map(|parameter| parameter.bytes).sum()
    }

    /// The bytes of the parameters that were read.
    pub fn resident_bytes(&self) -> u64 {
        self.resident.iter().map(|parameter| parameter.bytes).sum()
    }
}

impl fmt::Display for LazyReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = table(["parameter", "in", "shape", "stored as", "in memory", "bytes"]);
        let rows = self.lazy.iter().map(|parameter| (parameter, "when used"));
        for (parameter, when) in rows.chain(self.resident.iter().map(|parameter| (parameter, "always"))) {
            let ReportedParameter { path, module, shape, stored, packing, dtype, bytes, mapped, .. } =
                parameter;
            let when = if *mapped { "when used, mapped" } else { when };
            table.add_row([
                Cell::new(path),
                Cell::new(module),
                Cell::new(format!("{:?}", shape.as_slice())),
                Cell::new(packing.clone().unwrap_or_else(|| format!("{stored:?}"))),
                Cell::new(format!("{dtype:?} {when}")),
                number(human_bytes(*bytes)),
            ]);
        }
        writeln!(f, "{table}")?;
        let (lazy, resident) = (human_bytes(self.lazy_bytes()), human_bytes(self.resident_bytes()));
        write!(f, "{lazy} are read when used, {resident} are in memory")?;
        for (names, what) in [(&self.missing, "not in the file"), (&self.unused, "not in the module")] {
            if !names.is_empty() {
                write!(f, "\n{} {what}: {}", names.len(), names.join(", "))?;
            }
        }
        self.warnings.iter().try_for_each(|warning| write!(f, "\nwarning: {warning}"))
    }
}
