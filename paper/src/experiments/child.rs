//! Measurements in processes of their own: their memory is theirs alone, and may be limited.
use super::{Failure, lazy, limits};
use burn_memsave::measure::ResidentMemory;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

#[allow(dead_code)] // examples use the rest
#[path = "../../../examples/infer_lazy/process.rs"]
pub mod process;

/// The most memory that this process had in RAM so far, above what it had at some time.
///
/// # Errors
///
/// If the system does not say it.
pub fn peak_above(idle: Option<ResidentMemory>) -> Result<u64, Failure> {
    process::peak_above(idle).ok_or_else(|| "only Linux says what a process has in RAM".into())
}

/// What a process is to do.
#[derive(Serialize, Deserialize)]
pub enum Task {
    Lazy(lazy::Run),
    Limits(limits::Run),
}

impl Task {
    /// What a process of one computing thread says that does this, with an address space of at most so many bytes.
    ///
    /// # Errors
    ///
    /// If it fails, as it does where the limit is too low.
    pub fn in_process<O: DeserializeOwned>(&self, limit: Option<u64>) -> Result<O, Failure> {
        let output = process::again(limit)?
            .args(["--child", &serde_json::to_string(self)?])
            .env("RAYON_NUM_THREADS", "1")
            .output()?;
        serde_json::from_slice(&output.stdout)
            .map_err(|_| format!("a process: {}", String::from_utf8_lossy(&output.stderr)).into())
    }
}

/// What a process of its own does, and says as JSON.
///
/// # Errors
///
/// If the task is none, or fails.
pub fn in_child(task: &str) -> Result<String, Failure> {
    Ok(match serde_json::from_str(task)? {
        Task::Lazy(run) => serde_json::to_string(&run.measure()?)?,
        Task::Limits(run) => serde_json::to_string(&run.measure()?)?,
    })
}
