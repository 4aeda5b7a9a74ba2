//! Files that stay open, and ranges of them: read, mapped, and checked for changes.
use super::LazyError;
use super::words::{into_bytes, words_for};
use crate::platform::files;
use burn::tensor::Bytes;
use memmap2::Mmap;
use std::fs::{File, Metadata};
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;

/// A file that stays open.
#[derive(Debug)]
pub(super) struct OpenFile {
    pub path: PathBuf,
    file: File,
    pub len: u64,
    version: Version,
    map: Option<Mapped>,
}

/// Tells apart the contents of a file before and after a write, as far as its file system allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Version {
    len: u64,
    modified: Option<SystemTime>,
}

impl From<Metadata> for Version {
    fn from(metadata: Metadata) -> Self {
        Self { len: metadata.len(), modified: metadata.modified().ok() }
    }
}

/// A mapped file.
#[derive(Clone, Debug)]
pub(super) struct Mapped(Arc<Mmap>);

impl AsRef<[u8]> for Mapped {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl OpenFile {
    pub fn open(path: PathBuf) -> Result<Self, LazyError> {
        let opened = File::open(&path).and_then(|file| Ok((Version::from(file.metadata()?), file)));
        match opened {
            Ok((version, file)) => Ok(Self { path, file, len: version.len, version, map: None }),
            Err(source) => Err(LazyError::Io { file: path, source }),
        }
    }

    /// Opens a file and maps it.
    ///
    /// # Safety
    ///
    /// Nobody may write to the file or truncate it as long as this, or bytes of [`Entry::map`], are alive.
    pub unsafe fn open_mapped(path: PathBuf) -> Result<Self, LazyError> {
        let mut opened = Self::open(path)?;
        // SAFETY: the mapping is read-only, its bytes own it, and the file stays as it is, as the caller promises.
        match unsafe { Mmap::map(&opened.file) } {
            Ok(map) => opened.map = Some(Mapped(Arc::new(map))),
            Err(source) => return Err(LazyError::Io { file: opened.path, source }),
        }
        Ok(opened)
    }

    /// A reader of the same file, also if another one has its path by now. It must be done before [`read_at`](Self::read_at) is used, which
    /// moves its position on some systems.
    pub fn reader(&self) -> io::Result<File> {
        self.file.try_clone()
    }

    pub fn read_at(&self, out: &mut [u8], offset: u64) -> io::Result<()> {
        files::read_exact_at(&self.file, out, offset)
    }

    /// The first `len` bytes, or fewer if the file is shorter.
    pub fn head(&self, len: u64) -> Result<Vec<u8>, LazyError> {
        let mut head = vec![0; len.min(self.len) as usize];
        self.read_at(&mut head, 0).map_err(|source| LazyError::Io { file: self.path.clone(), source })?;
        Ok(head)
    }

    pub fn malformed(&self, reason: impl ToString) -> LazyError {
        LazyError::Malformed { file: self.path.clone(), reason: reason.to_string() }
    }

    /// Checks that the file is as it was when it was opened. Call it after a read, which may have seen what a writer wrote.
    pub fn check_unchanged(&self) -> io::Result<()> {
        self.check(self.file.metadata()?)
    }

    /// The same for a reader that opens the file again, by its path.
    pub fn check_not_replaced(&self) -> io::Result<()> {
        self.check(std::fs::metadata(&self.path)?)
    }

    fn check(&self, now: Metadata) -> io::Result<()> {
        match Version::from(now) == self.version {
            true => Ok(()),
            false => Err(io::Error::other("the file was changed after it was opened")),
        }
    }
}

/// How files are opened: mapped or not.
pub(super) type Opener<'a> = &'a dyn Fn(PathBuf) -> Result<OpenFile, LazyError>;

/// A range of a file.
#[derive(Clone, Debug)]
pub(super) struct Span {
    pub file: Arc<OpenFile>,
    pub offset: u64,
    pub len: usize,
}

impl Span {
    pub fn read_at(&self, out: &mut [u8], within: usize) -> io::Result<()> {
        match within.checked_add(out.len()) {
            Some(end) if end <= self.len => self.file.read_at(out, self.offset + within as u64),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    /// Its bytes, if the file is mapped.
    pub fn mapped(&self) -> Option<&[u8]> {
        let (map, range) = self.map()?;
        Some(&map.as_ref()[range])
    }

    /// Its file, if it is mapped, and where it is in there.
    pub fn map(&self) -> Option<(&Mapped, Range<usize>)> {
        let map = self.file.map.as_ref()?;
        let start = usize::try_from(self.offset).ok()?;
        let range = start..start.checked_add(self.len)?;
        (range.end <= map.0.len()).then_some((map, range))
    }

    pub fn read(&self) -> io::Result<Bytes> {
        let mut words = words_for(self.len);
        self.read_at(&mut bytemuck::cast_slice_mut(&mut words)[..self.len], 0)?;
        self.file.check_unchanged()?;
        Ok(into_bytes(words, self.len))
    }

    /// Brings it into memory, if the file is mapped.
    pub fn read_ahead(&self) {
        if let Some((map, range)) = self.map() {
            files::read_ahead(&map.0, range);
        }
    }

    /// Gives its memory back to the system, if the file is mapped.
    pub fn forget(&self) {
        if let Some((map, range)) = self.map() {
            files::forget(&map.0, range);
        }
    }
}
