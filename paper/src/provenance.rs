//! Where results come from: the machine, the date, the source and its versions.
use serde::{Deserialize, Serialize};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

/// The machine that results were measured on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// The name of its processor.
    pub cpu: String,
    /// How many threads run at the same time.
    pub cores: usize,
    /// The memory of the whole machine.
    pub memory_bytes: u64,
    /// Operating system and architecture.
    pub system: String,
}

/// The versions that were compiled.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Versions {
    /// The version in the lock file.
    pub burn: String,
    /// The version of this workspace.
    pub burn_memsave: String,
    /// The current compiler.
    pub rustc: String,
}

/// The value of a line of a file under `/proc`. These files exist only on Linux; elsewhere less is known.
fn line_of(path: &str, name: &str) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    let line = text.lines().find(|line| line.starts_with(name))?;
    Some(line.split_once(':')?.1.trim().to_string())
}

/// The bytes that a line of `/proc/meminfo` states; 0 if there is no such line.
fn memory(name: &str) -> u64 {
    let kibibytes = line_of("/proc/meminfo", name);
    let kibibytes = kibibytes.and_then(|text| text.split_whitespace().next()?.parse::<u64>().ok());
    kibibytes.unwrap_or(0) << 10
}

/// Bytes of free memory on this machine; 0 if they are unknown.
pub fn available_bytes() -> u64 {
    memory("MemAvailable")
}

/// This machine.
pub fn machine() -> Machine {
    Machine {
        cpu: line_of("/proc/cpuinfo", "model name").unwrap_or_else(|| "unknown".into()),
        cores: std::thread::available_parallelism().map_or(0, usize::from),
        memory_bytes: memory("MemTotal"),
        system: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
    }
}

/// The current versions.
pub fn versions() -> Versions {
    Versions {
        burn: locked(include_str!("../../Cargo.lock"), "burn").unwrap_or("unknown").into(),
        burn_memsave: env!("CARGO_PKG_VERSION").into(),
        rustc: output("rustc", &["--version"]).unwrap_or_else(|| "unknown".into()),
    }
}

/// The version of a package in a lock file.
fn locked<'a>(lock: &'a str, package: &str) -> Option<&'a str> {
    let after = lock.split_once(&format!("name = \"{package}\"\nversion = \""))?.1;
    Some(after.split_once('"')?.0)
}

fn output(program: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program)
        .args(arguments)
        .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
        .output()
        .ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_string())
}

/// The paths in the repository that results depend on.
const SOURCE: [&str; 11] = [
    "Cargo.toml",
    "Cargo.lock",
    "src",
    "layers",
    "models/src",
    "tests/table",
    "examples/finetune_lm",
    "examples/infer_lazy",
    "paper/Cargo.toml",
    "paper/src/vision",
    "paper/src/text",
];
/// Those of the experiments themselves, without the code that only draws.
const EXPERIMENTS: [&str; 2] = ["paper/src/experiments", "paper/src/case.rs"];

/// The last commit that changed the source, followed by `+` and a hash of the uncommitted changes, if there are any.
/// `None` without git.
pub fn source() -> Option<String> {
    source_with(&[])
}

/// The same for results that also depend on the paths `more`.
pub fn source_with(more: &[&str]) -> Option<String> {
    let paths = || SOURCE.into_iter().chain(EXPERIMENTS).chain(more.iter().copied());
    let git = |arguments: &[&str]| {
        let arguments: Vec<&str> = arguments.iter().copied().chain(["--"]).chain(paths()).collect();
        output("git", &arguments)
    };
    let commit = git(&["log", "-1", "--format=%H"]).filter(|commit| !commit.is_empty())?;
    let changes = git(&["diff", "HEAD"])? + &git(&["ls-files", "--others", "--exclude-standard"])?;
    if changes.is_empty() {
        return Some(commit);
    }
    let mut hasher = DefaultHasher::new();
    changes.hash(&mut hasher);
    Some(format!("{commit}+{:08x}", hasher.finish() as u32))
}

/// Today, as `YYYY-MM-DD`, in UTC.
pub fn today() -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    let (year, month, day) = date(seconds / 86_400);
    format!("{year}-{month:02}-{day:02}")
}

/// The date of a day since 1970-01-01.
fn date(days: u64) -> (u64, u64, u64) {
    let is_leap =
        |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let (mut year, mut left) = (1970, days);
    while left >= 365 + u64::from(is_leap(year)) {
        left -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let months = [31, 28 + u64::from(is_leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 0;
    while left >= months[month] {
        left -= months[month];
        month += 1;
    }
    (year, month as u64 + 1, left + 1)
}

/// The line below a table: what made it, where and when.
pub fn line(command: &str, machine: &Machine, device: &str, date: &str, commit: Option<&str>) -> String {
    let commit = commit.unwrap_or("unknown");
    let (commit, changes) = commit.split_once('+').map_or((commit, ""), |(commit, _)| (commit, ", changed"));
    let short = &commit[..commit.len().min(10)];
    format!(
        "`{command}` on {}, {} threads, {device}; {date}, commit {short}{changes}.",
        machine.cpu, machine.cores
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_are_dates() {
        assert_eq!(date(0), (1970, 1, 1));
        assert_eq!(date(59), (1970, 3, 1));
        assert_eq!(date(11_016), (2000, 2, 29));
        assert_eq!(date(20_454), (2026, 1, 1));
    }

    #[test]
    fn versions_are_those_of_the_lock_file() {
        let lock = "[[package]]\nname = \"burn-flex\"\nversion = \"1.0.0\"\n[[package]]\nname = \"burn\"\nversion = \"0.22.1\"\n";
        assert_eq!((locked(lock, "burn"), locked(lock, "bur")), (Some("0.22.1"), None));
        assert_eq!(versions().burn, "0.22.1");
    }
}
