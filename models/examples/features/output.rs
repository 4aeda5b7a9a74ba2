//! [`Output`]: features in a file, written in any order.
use burn::tensor::TensorData;
use serde_json::json;
use std::error::Error;
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

/// A safetensors file that is written a batch at a time, so that not all features have to be in memory. It appears when it is complete.
pub struct Output {
    file: NamedTempFile,
    path: PathBuf,
    /// Where the first row is in the file.
    begin: u64,
    /// The first row of each input, and the number of all rows.
    rows: Vec<u64>,
    /// The bytes of a row.
    width: u64,
}

impl Output {
    /// An empty file for so many rows of each input. `has_lengths`: their number goes there, too.
    pub fn create(
        path: &Path,
        rows: &[usize],
        width: usize,
        has_lengths: bool,
    ) -> Result<Self, Box<dyn Error>> {
        let mut all = 0;
        let mut starts = vec![0];
        starts.extend(rows.iter().map(|&rows| {
            all += rows as u64;
            all
        }));
        // Numbers of 8 bytes first, so that all are aligned.
        let lengths: Vec<u8> = match has_lengths {
            true => rows.iter().flat_map(|&rows| (rows as i64).to_le_bytes()).collect(),
            false => vec![],
        };
        let (middle, end) = (lengths.len(), lengths.len() as u64 + all * 4 * width as u64);
        let mut header = json!({
            "features": { "dtype": "F32", "shape": [all, width], "data_offsets": [middle, end] },
        });
        if has_lengths {
            header["lengths"] = json!({ "dtype": "I64", "shape": [rows.len()], "data_offsets": [0, middle] });
        }
        let mut header = header.to_string().into_bytes();
        header.resize(header.len().next_multiple_of(8), b' ');

        let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let mut file = NamedTempFile::new_in(directory.unwrap_or(Path::new(".")))?;
        let begin = 8 + header.len() as u64 + middle as u64;
        file.write_all(&[&(header.len() as u64).to_le_bytes()[..], &header, &lengths].concat())?;
        file.as_file().set_len(8 + header.len() as u64 + end)?;
        Ok(Self { file, path: path.to_path_buf(), begin, rows: starts, width: 4 * width as u64 })
    }

    /// Writes the rows of some inputs, one after the other, to their places.
    pub fn write(&mut self, inputs: &[usize], features: TensorData) -> Result<(), Box<dyn Error>> {
        let bytes: Vec<u8> = features.iter::<f32>().flat_map(f32::to_le_bytes).collect();
        let mut rest = &bytes[..];
        for &input in inputs {
            let [start, end] = [self.rows[input], self.rows[input + 1]];
            let (rows, others) = rest.split_at(((end - start) * self.width) as usize);
            self.file.seek(SeekFrom::Start(self.begin + start * self.width))?;
            self.file.write_all(rows)?;
            rest = others;
        }
        Ok(())
    }

    /// Gives the file its name.
    pub fn finish(self) -> Result<(), Box<dyn Error>> {
        self.file.persist(self.path)?;
        Ok(())
    }
}
