//! [`Tensors`]: what is in a file, by name.
use super::source::Entry;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The tensors of a file, by name.
#[derive(Clone, Default)]
pub(super) struct Tensors {
    pub entries: BTreeMap<String, Entry>,
    /// Those that cannot be read, and the errors that say why.
    pub unreadable: BTreeMap<String, Unreadable>,
    /// Why there may be others in the file, which are not known.
    pub incomplete: Option<String>,
    /// What a GGUF file says of its model.
    pub metadata: Option<Arc<Map<String, Value>>>,
    /// Whether PyTorch wrote them, so that the matrices of linear layers are transposed.
    pub of_pytorch: bool,
}

/// Why a tensor cannot be read.
#[derive(Clone)]
pub(super) struct Unreadable {
    pub file: PathBuf,
    pub reason: String,
}

impl Tensors {
    pub fn names(&self) -> impl Iterator<Item = &String> + Clone {
        self.entries.keys().chain(self.unreadable.keys())
    }

    /// Whether there is a tensor of this name.
    pub fn has(&self, name: &str) -> bool {
        self.entries.contains_key(name) || self.unreadable.contains_key(name)
    }

    /// The file that has a tensor of this name.
    pub fn file_of(&self, name: &str) -> Option<&Path> {
        let entry = self.entries.get(name).map(|entry| &entry.file);
        entry.or_else(|| self.unreadable.get(name).map(|tensor| &tensor.file)).map(PathBuf::as_path)
    }

    /// The tensors under other names; those that have none are left out. Returns the first clash: the names of two, and what both would be
    /// called. Entries keep the name that they have in the file, for messages.
    pub fn renamed(&self, to: impl Fn(&str) -> Option<String>) -> Result<Self, [String; 3]> {
        let mut renamed = Self::default();
        renamed.has_part(self);
        let mut former: BTreeMap<String, &String> = BTreeMap::new();
        for name in self.names() {
            let Some(new) = to(name) else { continue };
            if let Some(other) = former.insert(new.clone(), name) {
                return Err([other.clone(), name.clone(), new]);
            }
            match self.entries.get(name) {
                Some(entry) => drop(renamed.entries.insert(new, entry.clone())),
                None => drop(renamed.unreadable.insert(new, self.unreadable[name].clone())),
            }
        }
        Ok(renamed)
    }

    /// Takes over what is true of all tensors of a part.
    pub fn has_part(&mut self, part: &Self) {
        self.of_pytorch |= part.of_pytorch;
        self.metadata = self.metadata.take().or_else(|| part.metadata.clone());
        self.incomplete = self.incomplete.take().or_else(|| part.incomplete.clone());
    }

    /// Moves a tensor to `to`; false if there is none.
    pub fn give(&mut self, name: &str, to: &mut Self) -> bool {
        let entry = self.entries.remove(name).map(|entry| to.entries.insert(name.into(), entry));
        let other = self.unreadable.remove(name).map(|tensor| to.unreadable.insert(name.into(), tensor));
        entry.is_some() || other.is_some()
    }
}
