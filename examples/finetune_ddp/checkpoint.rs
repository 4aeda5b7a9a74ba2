//! Checkpoints from which a run can continue: what is trained, and the optimizer's state. (The frozen weights do not change.)
use burn::module::{Module, ParamGroup};
use burn::optim::ModuleOptimizer;
use burn::store::ModuleRecord;
use std::error::Error;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

/// A folder with a folder for the checkpoint, such as `step-10`, which appears only when it is complete.
pub struct Checkpoint {
    folder: PathBuf,
    /// The settings that determine the frozen weights and the batches of the run.
    run: String,
    saved: Saved,
}

/// Which parameters are saved.
#[derive(Clone, Copy)]
pub struct Saved {
    /// A regular expression of their paths.
    pub paths: &'static str,
    pub file: &'static str,
}

pub const ADAPTERS: Saved = Saved { paths: r"(^|\.)(lora|dora)\.", file: "adapters.bpk" };
const OPTIMIZER: &str = "optimizer.bpk";
const RUN: &str = "run.txt";

impl Checkpoint {
    pub fn new(folder: PathBuf, run: String, saved: Saved) -> Self {
        Self { folder, run, saved }
    }

    /// The number of steps of the last checkpoint.
    pub fn last(&self) -> Option<usize> {
        let entries = fs::read_dir(&self.folder).ok()?;
        let steps = |entry: fs::DirEntry| entry.file_name().to_str()?.strip_prefix("step-")?.parse().ok();
        entries.filter_map(Result::ok).filter_map(steps).max()
    }

    fn of(&self, steps: usize) -> PathBuf {
        self.folder.join(format!("step-{steps}"))
    }

    /// Saves a checkpoint. The one before is removed once the new one is complete.
    pub fn save(
        &self,
        model: &impl Module,
        optimizer: &ModuleOptimizer,
        steps: usize,
    ) -> Result<(), Box<dyn Error>> {
        let (before, partial) = (self.last(), self.folder.join("partial"));
        if partial.exists() {
            fs::remove_dir_all(&partial)?; // from a run that ended while saving
        }
        fs::create_dir_all(&partial)?;
        let Saved { paths, file } = self.saved;
        let saved = ParamGroup::from_regex(paths).map_err(|error| format!("{error:?}"))?;
        model.clone().into_record_group(saved).save(partial.join(file))?;
        optimizer.save(partial.join(OPTIMIZER))?;
        fs::write(partial.join(RUN), &self.run)?;
        // The files must be on disk before the folder has its name.
        // (Windows writes only files that are open for writing.)
        let on_disk = |file| File::options().write(true).open(partial.join(file))?.sync_all();
        [file, OPTIMIZER, RUN].into_iter().try_for_each(on_disk)?;
        fs::rename(&partial, self.of(steps))?;
        match before.filter(|before| *before != steps) {
            Some(before) => Ok(fs::remove_dir_all(self.of(before))?),
            None => Ok(()),
        }
    }

    /// The model and the optimizer of the last checkpoint, and its steps.
    pub fn load<M: Module>(
        &self,
        model: M,
        optimizer: ModuleOptimizer,
    ) -> Result<(M, ModuleOptimizer, usize), Box<dyn Error>> {
        let steps = self.last().ok_or_else(|| format!("{}: no checkpoint", self.folder.display()))?;
        let named = |path: &Path, error: &dyn Error| format!("{}: {error}", path.display());
        let path = self.of(steps).join(RUN);
        let run = fs::read_to_string(&path).map_err(|error| named(&path, &error))?;
        if run != self.run {
            return Err(
                format!("{}: another run, of {run}; this one is of {}", path.display(), self.run).into()
            );
        }
        let path = self.of(steps).join(self.saved.file);
        let record = ModuleRecord::load(&path).map_err(|error| named(&path, &error))?;
        let model =
            model.try_load_record(record.allow_partial(true)).map_err(|error| named(&path, &error))?;
        let path = self.of(steps).join(OPTIMIZER);
        let optimizer = optimizer.load(&path).map_err(|error| named(&path, &error))?;
        Ok((model, optimizer, steps))
    }
}
