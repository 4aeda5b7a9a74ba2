//! Results of experiments, and their files.
use crate::experiments::{Experiment, Settings, Size};
use burn_memsave_paper::provenance::{self, Machine, Versions};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::error::Error;
use std::fs;
use std::path::Path;

/// What an experiment measured, and where and how it did so.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Results {
    pub experiment: String,
    pub command: String,
    pub settings: Settings,
    pub machine: Machine,
    pub date: String,
    /// See [`provenance::source`].
    pub commit: Option<String>,
    pub versions: Versions,
    /// Whether all parts are there.
    pub complete: bool,
    pub parts: Vec<Part>,
}

/// A part of an experiment, which is measured as a whole or not at all.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Part {
    pub name: String,
    pub seconds: f64,
    pub rows: Vec<Value>,
}

impl Results {
    /// Results without any parts yet.
    pub fn begin(experiment: &Experiment, settings: &Settings, source: &Option<String>) -> Self {
        Self {
            experiment: experiment.name.into(),
            command: super::command(experiment.name, settings),
            settings: settings.clone(),
            machine: provenance::machine(),
            date: provenance::today(),
            commit: source.clone(),
            versions: provenance::versions(),
            complete: false,
            parts: vec![],
        }
    }

    /// Whether parts of `other` need not be measured again, because the settings, the machine, the versions and the commit of the source
    /// are the same. A source without a commit is never the same.
    fn stands_for(&self, other: &Self) -> bool {
        let key = |results: &Self| {
            (
                results.experiment.clone(),
                results.settings.clone(),
                results.machine.clone(),
                results.versions.clone(),
            )
        };
        self.commit.is_some() && self.commit == other.commit && key(self) == key(other)
    }

    /// Takes over the parts of an earlier run, if they [stand for](Self::stands_for) those of this one.
    pub fn take_over(&mut self, directory: &Path) {
        // A file that cannot be read is replaced.
        if let Ok(Some(earlier)) = Self::read(directory, &self.experiment)
            && self.stands_for(&earlier)
        {
            *self = earlier;
        }
    }

    pub fn has(&self, part: &str) -> bool {
        self.parts.iter().any(|found| found.name == part)
    }

    pub fn add(&mut self, name: String, seconds: f64, rows: Vec<Value>) {
        self.parts.push(Part { name, seconds, rows });
    }

    pub fn rows(&self) -> impl Iterator<Item = &Value> {
        self.parts.iter().flat_map(|part| &part.rows)
    }

    /// The line below a table: how and where it was made.
    pub fn source_line(&self) -> String {
        let seconds = self.parts.iter().map(|part| part.seconds).sum::<f64>();
        let small = match self.settings.size {
            Size::Quick => "**Small sizes (`--quick`): times mean nothing.** ",
            _ => "",
        };
        let part = if self.complete { "" } else { "**Not all parts have run.** " };
        let is_on_cpu = || {
            let mut all = crate::experiments::ALL.iter();
            all.any(|experiment| experiment.name == self.experiment && experiment.is_on_cpu)
        };
        let device = if is_on_cpu() { Default::default() } else { self.settings.device }.to_string();
        let source =
            provenance::line(&self.command, &self.machine, &device, &self.date, self.commit.as_deref());
        format!("{small}{part}{source} It took {seconds:.0} s.")
    }

    /// The results of an experiment, if there are any.
    ///
    /// # Errors
    ///
    /// If the file cannot be read.
    pub fn read(directory: &Path, experiment: &str) -> Result<Option<Self>, String> {
        let path = directory.join(format!("{experiment}.json"));
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(format!("{}: {error}", path.display())),
        };
        serde_json::from_str(&text).map(Some).map_err(|error| format!("{}: {error}", path.display()))
    }

    /// Writes JSON and CSV. A run that is stopped leaves either the old file or the new one.
    pub fn write(&self, directory: &Path) -> Result<(), Box<dyn Error>> {
        let name = &self.experiment;
        let experiment = crate::experiments::ALL.iter().find(|experiment| experiment.name == name);
        let rows: Vec<Value> = self.rows().cloned().collect();
        let csv = experiment.map(|experiment| (experiment.csv)(&rows)).transpose()?;
        let json = format!("{}\n", serde_json::to_string_pretty(self)?);
        for (kind, text) in [("csv", csv.unwrap_or_default()), ("json", json)] {
            let path = directory.join(format!("{name}.{kind}"));
            let unfinished = directory.join(format!("{name}.{kind}.new"));
            fs::write(&unfinished, text)
                .and_then(|()| fs::rename(&unfinished, &path))
                .map_err(|error| format!("{}: {error}", path.display()))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiments;
    use serde_json::json;

    fn begin(settings: &Settings, commit: &str) -> Results {
        Results::begin(&experiments::ALL[0], settings, &Some(commit.into()))
    }

    #[test]
    fn a_run_goes_on_where_the_same_one_was_stopped() {
        let directory = tempfile::tempdir().unwrap();
        let settings = Settings::default();
        let mut stopped = begin(&settings, "abc");
        stopped.add("one".into(), 1.0, vec![]);
        stopped.write(directory.path()).unwrap();

        let mut same = begin(&settings, "abc");
        same.take_over(directory.path());
        assert!(same.has("one") && !same.has("two"));

        let quick = Settings { size: Size::Quick, ..Settings::default() };
        for mut other in [begin(&settings, "def"), begin(&quick, "abc")] {
            other.take_over(directory.path());
            assert!(!other.has("one"));
        }
        let mut unknown = Results::begin(&experiments::ALL[0], &settings, &None);
        unknown.take_over(directory.path());
        assert!(!unknown.has("one"));
        let mut elsewhere = begin(&settings, "abc");
        elsewhere.machine.cpu.push('x');
        elsewhere.take_over(directory.path());
        assert!(!elsewhere.has("one"));
    }

    #[test]
    fn what_was_written_is_read() {
        let directory = tempfile::tempdir().unwrap();
        let name = experiments::ALL[0].name;
        assert!(Results::read(directory.path(), name).unwrap().is_none());
        begin(&Settings::default(), "abc").write(directory.path()).unwrap();
        assert_eq!(Results::read(directory.path(), name).unwrap().unwrap().commit, Some("abc".into()));
        fs::write(directory.path().join(format!("{name}.json")), json!([1]).to_string()).unwrap();
        assert!(Results::read(directory.path(), name).is_err());
    }

    #[test]
    fn the_line_below_a_table_says_what_is_missing() {
        let quick = Settings { size: Size::Quick, ..Settings::default() };
        let line = begin(&quick, "0123456789abcdef+1").source_line();
        for part in ["--quick", "times mean nothing", "Not all parts", "commit 0123456789, changed"] {
            assert!(line.contains(part), "{line}");
        }
    }
}
