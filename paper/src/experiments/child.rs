//! Measurements in processes of their own: nothing else uses the memory of these processes, and it can be limited.
use super::{Failure, lazy, limits};
use burn_memsave::measure::ResidentMemory;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

#[allow(dead_code)] // examples use the rest
#[path = "../../../examples/infer_lazy/process.rs"]
pub mod process;

/// The most memory that this process has had in RAM so far, above that of the `idle` process.
///
/// # Errors
///
/// If the system does not report it.
pub fn peak_above(idle: Option<ResidentMemory>) -> Result<u64, Failure> {
    process::peak_above(idle).ok_or_else(|| "only Linux says what a process has in RAM".into())
}

/// What a child process measures.
#[derive(Serialize, Deserialize)]
pub enum Task {
    Lazy(lazy::Run),
    Limits(limits::Run),
}

impl Task {
    /// Runs this in a process with one computing thread and an address space of at most `limit` bytes, and returns its result.
    ///
    /// # Errors
    ///
    /// If the process fails, for example because the limit is too low.
    pub fn in_process<O: DeserializeOwned>(&self, limit: Option<u64>) -> Result<O, Failure> {
        let output = process::again(limit)?
            .args(["--child", &serde_json::to_string(self)?])
            .env("RAYON_NUM_THREADS", "1")
            .output()?;
        serde_json::from_slice(&output.stdout)
            .map_err(|_| format!("a process: {}", String::from_utf8_lossy(&output.stderr)).into())
    }
}

/// Runs a task in this child process, and returns its result as JSON.
///
/// # Errors
///
/// If the task is not valid JSON for a task, or fails.
pub fn in_child(task: &str) -> Result<String, Failure> {
    Ok(match serde_json::from_str(task)? {
        Task::Lazy(run) => serde_json::to_string(&run.measure()?)?,
        Task::Limits(run) => serde_json::to_string(&run.measure()?)?,
    })
}
