//! What a cache reports: statistics of its reads, and the progress of the first pass.
use serde::Serialize;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// What a cache has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Statistics {
    /// Uses that found their weight in memory.
    pub hits: u64,
    /// Uses that had to wait for their weight.
    pub stalls: u64,
    /// How long they waited in total.
    pub stalled: Duration,
    /// Reads of weights, or of rows of them.
    pub reads: u64,
    /// How many of the reads were made before the weight was used.
    pub read_ahead: u64,
    /// Bytes that were read, counted as they are in memory.
    pub bytes_read: u64,
    /// How long reading took, summed over threads.
    pub reading: Duration,
    /// Packed bytes that products of few rows unpacked for themselves. These are no reads.
    pub bytes_unpacked: u64,
}

impl fmt::Display for Statistics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { hits, stalls, stalled, reads, read_ahead, bytes_read, reading, bytes_unpacked } = self;
        let mebibytes = *bytes_read as f64 / f64::from(1 << 20);
        let speed = mebibytes / reading.as_secs_f64().max(1e-9);
        write!(
            f,
            "{hits} hits, {stalls} stalls ({:.0} ms), {reads} reads, {read_ahead} of them ahead, {mebibytes:.0} MiB at \
             {speed:.0} MiB/s",
            stalled.as_secs_f64() * 1e3
        )?;
        match bytes_unpacked {
            0 => Ok(()),
            bytes => write!(f, ", {:.0} MiB unpacked", *bytes as f64 / f64::from(1 << 20)),
        }
    }
}

/// How far the first pass over the lazy weights has come.
#[derive(Clone, Copy, Debug)]
pub struct Progress<'a> {
    /// Path of the parameter that was read.
    pub parameter: &'a str,
    /// The number of lazy parameters that were read at least once.
    pub parameters: usize,
    /// The number of all lazy parameters.
    pub of: usize,
    /// Bytes read so far.
    pub bytes: u64,
}

/// Called for every parameter when it is read for the first time.
pub(in crate::lazy) type OnProgress = Arc<dyn Fn(Progress<'_>) + Send + Sync>;
