//! [`LazyError`]: what can go wrong with weight files.
use burn::tensor::DType;
use std::io;
use std::path::PathBuf;

/// What can be wrong with a weight file, or with a file and the module that is loaded from it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LazyError {
    /// The file cannot be opened or read.
    #[error("{}: {source}", file.display())]
    Io {
        /// The file.
        file: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// The file has none of the known formats, its header is damaged, it is not clear which file of a directory is meant, or it has nothing of
    /// what was asked for.
    #[error("{}: {reason}", file.display())]
    Malformed {
        /// The file.
        file: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A tensor cannot be read: its file was changed, the disk failed, or its data contradict its header.
    #[error("{}: tensor {tensor} cannot be read: {reason}", file.display())]
    Tensor {
        /// The file.
        file: PathBuf,
        /// The tensor, by its name in the file.
        tensor: String,
        /// What is wrong.
        reason: String,
    },
    /// The file has no tensor for a parameter of the module.
    #[error("{}: no tensor for the parameter {parameter}{}{}", file.display(), similar(similar_names), and(others))]
    Missing {
        /// The file.
        file: PathBuf,
        /// Path of the parameter.
        parameter: String,
        /// Similar names in the file, the most similar one first.
        similar_names: Vec<String>,
        /// Paths of other parameters that it has no tensor for.
        others: Vec<String>,
    },
    /// The tensor of a parameter has another shape.
    #[error(
        "{}: tensor {tensor} has the shape {found:?}, the parameter {parameter} has {expected:?}{}",
        file.display(),
        transposed(expected, found)
    )]
    Shape {
        /// The file.
        file: PathBuf,
        /// The tensor, by its name in the file.
        tensor: String,
        /// Path of the parameter.
        parameter: String,
        /// The shape of the parameter.
        expected: Box<[usize]>,
        /// The shape of the tensor.
        found: Box<[usize]>,
    },
    /// The tensor of a parameter has a dtype of another kind.
    #[error("{}: tensor {tensor} of {found:?} cannot be the {kind} parameter {parameter}", file.display())]
    DType {
        /// The file.
        file: PathBuf,
        /// The tensor, by its name in the file.
        tensor: String,
        /// Path of the parameter.
        parameter: String,
        /// The kind of the parameter: float, int or bool.
        kind: &'static str,
        /// The dtype of the tensor.
        found: DType,
    },
    /// The parameter has a reparameterization: it is lazy already, or has an adapter, which must be attached after loading.
    #[error("the parameter {parameter} has a reparameterization already")]
    Reparameterized {
        /// Path of the parameter.
        parameter: String,
    },
    /// A file with an adapter was to be prepared without the module that it is for.
    #[error(
        "{}: what the adapter changes depends on the module, see PrepareSource::for_module", file.display()
    )]
    Adapter {
        /// The file.
        file: PathBuf,
    },
    /// A prepared file cannot be written.
    #[error("{} cannot be prepared from {}: {reason}", file.display(), source_file.display())]
    Prepare {
        /// The file that was read.
        source_file: PathBuf,
        /// The file that was to be written.
        file: PathBuf,
        /// What went wrong.
        reason: String,
    },
    /// A pattern is malformed.
    #[error("pattern {pattern:?}: {reason}")]
    Pattern {
        /// The pattern.
        pattern: String,
        /// What is wrong.
        reason: String,
    },
}

/// What to do about a matrix as PyTorch stores it.
fn transposed(expected: &[usize], found: &[usize]) -> &'static str {
    match (expected, found) {
        (&[rows, columns], &[of_columns, of_rows]) if (rows, columns) == (of_rows, of_columns) => {
            ", transposed; see WeightFile::with_pytorch_adapter"
        }
        _ => "",
    }
}

/// Names of others.
fn and(others: &[String]) -> String {
    const SHOWN: usize = 8;
    match others {
        [] => String::new(),
        [..] if others.len() <= SHOWN => format!(", nor for {}", others.join(", ")),
        [shown @ .., _] => {
            let shown = &shown[..SHOWN];
            let rest = others.len() - shown.len();
            format!(", nor for {} and {rest} others; WeightFile::check lists all", shown.join(", "))
        }
    }
}

fn similar(names: &[String]) -> String {
    match names {
        [] => String::new(),
        names => format!(" (it has {})", names.join(", ")),
    }
}
