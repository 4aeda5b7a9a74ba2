use burn::tensor::DType;
use std::io;
use std::path::PathBuf;

/// What can be wrong with a weight file, or with a file for a module.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LazyError {
    /// The file cannot be opened or read.
    #[error("{}: {source}", file.display())]
    Io {
        /// The file.
        file: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file is none of the formats that are known, or its header is damaged.
    #[error("{}: {reason}", file.display())]
    Malformed {
        /// The file.
        file: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A tensor cannot be read: its file became shorter, the disk failed, or its data contradict its header.
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
    #[error("{}: no tensor for the parameter {parameter}{}", file.display(), similar(similar_names))]
    Missing {
        /// The file.
        file: PathBuf,
        /// Path of the parameter.
        parameter: String,
        /// Names in the file that end alike.
        similar_names: Vec<String>,
    },
    /// The tensor of a parameter has another shape.
    #[error(
        "{}: tensor {tensor} has the shape {found:?}, the parameter {parameter} has {expected:?}",
        file.display()
    )]
    Shape {
        /// The file.
        file: PathBuf,
        /// The tensor, by its name in the file.
        tensor: String,
        /// Path of the parameter.
        parameter: String,
        /// Of the parameter.
        expected: Box<[usize]>,
        /// Of the tensor.
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
        /// What the parameter consists of: float, int or bool.
        kind: &'static str,
        /// Of the tensor.
        found: DType,
    },
    /// The parameter is reparameterized: it is lazy already, or has an adapter, which is attached after loading.
    #[error("the parameter {parameter} has a reparameterization already")]
    Reparameterized {
        /// Path of the parameter.
        parameter: String,
    },
    /// The tensors of a file with an adapter are to be prepared without the module they are for.
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
        /// What was read.
        source_file: PathBuf,
        /// What was to be written.
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

fn similar(names: &[String]) -> String {
    match names {
        [] => String::new(),
        names => format!(" (it has {})", names.join(", ")),
    }
}
