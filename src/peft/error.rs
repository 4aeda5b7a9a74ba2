//! [`PeftError`]: what can be wrong with adapters or their files.
use crate::lazy::LazyError;
use std::io;
use std::path::PathBuf;

/// What can be wrong with adapters, or with their files.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PeftError {
    /// A file or directory cannot be read or written.
    #[error("{}: {source}", file.display())]
    Io {
        /// The file.
        file: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// The configuration is damaged, or asks for something that is not supported.
    #[error("{}: {reason}", file.display())]
    Config {
        /// The file.
        file: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// The tensors are damaged, or do not fit the module.
    #[error("{}: {reason}", file.display())]
    Tensors {
        /// The file.
        file: PathBuf,
        /// What is wrong, and with which tensor.
        reason: String,
    },
    /// The file of tensors cannot be read.
    #[error(transparent)]
    File(#[from] LazyError),
    /// An adapter of a module cannot be written, or a module has one already.
    #[error("the adapter of {module}: {reason}")]
    Adapter {
        /// Path of the module.
        module: String,
        /// What is wrong.
        reason: String,
    },
    /// A parameter that is trained beside adapters cannot be written.
    #[error("the parameter {parameter}: {reason}")]
    Parameter {
        /// Path of the parameter.
        parameter: String,
        /// What is wrong.
        reason: String,
    },
    /// The module has no adapter.
    #[error("the module has no adapter")]
    NoAdapter,
}
