//! What this crate asks the operating system for beyond what `std` has everywhere: reads at an offset in a file, advice about a mapped
//! file, and the memory of the process.
//!
//! Every function has a portable body. `RUSTFLAGS='--cfg memsave_portable'` selects it on Linux, in all crates of the workspace, so that it
//! is compiled and tested there as well (steps of `.ci/run` and `.ci/run rest`). `.ci/targets` compiles the crates for the other systems.
//!
//! | what depends on the system or the processor | Linux | macOS, other Unix | Windows | elsewhere, and portable |
//! | --- | --- | --- | --- | --- |
//! | [`files::read_exact_at`] | `pread` | `pread` | `ReadFile` with an offset | seek and read, one thread at a time |
//! | [`files::read_ahead`] | `MADV_POPULATE_READ` (before Linux 5.14 as macOS) | `MADV_WILLNEED`, and one byte of each page is read | one byte of each page is read | as Windows |
//! | [`files::forget`] | `MADV_DONTNEED` | `MADV_DONTNEED` | nothing: pages stay until the system needs them | nothing |
//! | [`ResidentMemory::of_process`] | `/proc/self/status` | unknown | unknown | unknown |
//! | `layers/src/backend/cpu/parallel.rs`: vectors (`x86_64`) | AVX2 where the machine has it | as Linux on Intel; elsewhere what the target has | as Linux | what the target has |
//! | `layers/src/backend/cpu/bit_mask.rs`: packing bits (`x86_64`) | SSE2 | SSE2 on Intel; elsewhere a multiplication | SSE2 | a multiplication |
//! | `examples/infer_lazy/process.rs`, for `finetune_lazy` and the paper: a limit of memory | `ulimit -v` of `sh` | none; the paper returns an error | as macOS | as macOS |
//! | `paper/src/provenance.rs`: the machine | `/proc` | "unknown" | "unknown" | "unknown" |
//! | `paper/tests/command.rs`; the full disk of `layers/src/saved/file.rs` | tested | not tested: `ulimit`, `/dev/full` | not tested | not tested |
//!
//! The rest depends on other crates: `tempfile` (a file without a name on Unix, one that is deleted when it is closed on Windows),
//! `memmap2` (errors where nothing can be mapped), `pulp` and `gemm` (vectors at run time on x86, NEON on ARM), `rayon` (one thread where
//! there are no others).
//!
//! On 32-bit targets, sizes of tensors are `usize`, amounts of work and offsets in files are `u64`, and a file of more than 4 GiB is
//! refused as malformed. On big-endian processors the feature `system` does not compile, since files are little-endian and are read as they
//! are.

/// Bytes of memory that a process has in RAM, mapped files included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResidentMemory {
    /// Now.
    pub live: u64,
    /// The most since the process began.
    pub peak: u64,
}

impl ResidentMemory {
    /// The memory of this process; `None` where it is unknown, which is everywhere but on Linux.
    ///
    /// ```
    /// use burn_memsave::measure::ResidentMemory;
    ///
    /// if let Some(memory) = ResidentMemory::of_process() {
    ///     assert!(0 < memory.live && memory.live <= memory.peak);
    /// }
    /// ```
    pub fn of_process() -> Option<Self> {
        #[cfg(all(target_os = "linux", not(memsave_portable)))]
        {
            let status = std::fs::read_to_string("/proc/self/status").ok()?;
            let bytes = |name: &str| {
                let line = status.lines().find_map(|line| line.strip_prefix(name))?;
                Some(line.split_whitespace().next()?.parse::<u64>().ok()? << 10)
            };
            Some(Self { live: bytes("VmRSS:")?, peak: bytes("VmHWM:")? })
        }
        #[cfg(any(memsave_portable, not(target_os = "linux")))]
        None
    }
}

#[cfg(feature = "system")]
pub(crate) mod files {
    //! Reads at an offset in a file, and advice about mapped files.
    #[cfg(target_endian = "big")]
    compile_error!("the feature `system` reads files whose numbers begin with the lowest byte");

    use memmap2::Mmap;
    use std::fs::File;
    use std::hint::black_box;
    use std::io;
    use std::ops::Range;

    /// The size of the smallest pages that any system has.
    const PAGE: usize = 4096;

    /// Reads `out.len()` bytes that begin at `offset`. Threads may call it at the same time.
    pub(crate) fn read_exact_at(file: &File, out: &mut [u8], offset: u64) -> io::Result<()> {
        #[cfg(all(unix, not(memsave_portable)))]
        return std::os::unix::fs::FileExt::read_exact_at(file, out, offset);
        #[cfg(all(windows, not(memsave_portable)))]
        return fill(out, |rest, done| std::os::windows::fs::FileExt::seek_read(file, rest, offset + done));
        #[cfg(any(memsave_portable, not(any(unix, windows))))]
        {
            use std::io::{Read, Seek, SeekFrom};
            use std::sync::{Mutex, PoisonError};
            /// A file has one cursor for all threads: no other thread may move it between a seek and its read.
            static CURSOR: Mutex<()> = Mutex::new(());
            let _cursor = CURSOR.lock().unwrap_or_else(PoisonError::into_inner);
            let mut file = file;
            file.seek(SeekFrom::Start(offset))?;
            file.read_exact(out)
        }
    }

    /// Fills `out` with calls of `read(rest, done)`, each of which may read only a part: `read_exact` for reads at an offset.
    #[cfg(any(test, all(windows, not(memsave_portable))))]
    fn fill(out: &mut [u8], mut read: impl FnMut(&mut [u8], u64) -> io::Result<usize>) -> io::Result<()> {
        let mut done = 0;
        while done < out.len() {
            match read(&mut out[done..], done as u64) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => done += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => (),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Brings a part of a mapped file into memory, and returns when it is there.
    ///
    /// # Panics
    ///
    /// Panics if the mapping has no such part.
    pub(crate) fn read_ahead(map: &Mmap, part: Range<usize>) {
        let bytes = &map[part.clone()];
        #[cfg(all(target_os = "linux", not(memsave_portable)))]
        match map.advise_range(memmap2::Advice::PopulateRead, part.start, part.len()) {
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => (), // a Linux that does not know it
            // A read error shows where the bytes are used.
            Ok(()) | Err(_) => return,
        }
        #[cfg(all(unix, not(memsave_portable)))]
        let _ = map.advise_range(memmap2::Advice::WillNeed, part.start, part.len());
        bytes.iter().step_by(PAGE).chain(bytes.last()).for_each(|byte| {
            black_box(*byte);
        });
    }

    /// Gives the memory of a part of a mapped file back to the system, where the system takes it.
    ///
    /// # Panics
    ///
    /// Panics if the mapping has no such part.
    pub(crate) fn forget(map: &Mmap, part: Range<usize>) {
        let (start, len) = (part.start, map[part].len());
        #[cfg(all(unix, not(memsave_portable)))]
        {
            let dont_need = memmap2::UncheckedAdvice::DontNeed;
            // SAFETY: the part is of this mapping, which is read-only: its pages come back from the file, which is as it was.
            let _ = unsafe { map.unchecked_advise_range(dont_need, start, len) };
        }
        #[cfg(any(memsave_portable, not(unix)))]
        let _ = (start, len);
    }

    #[cfg(test)]
    mod tests {
        use super::*;
        use std::io::Write;

        fn file_of(bytes: &[u8]) -> File {
            let mut file = tempfile::tempfile().expect("a temporary file");
            file.write_all(bytes).expect("room for it");
            file
        }

        #[test]
        fn threads_read_from_different_places() {
            let bytes: Vec<u8> = (0..10_000u32).map(|at| ((at * 31) >> 3) as u8).collect();
            let file = file_of(&bytes);
            std::thread::scope(|scope| {
                for thread in 0..4 {
                    let (file, bytes) = (&file, &bytes);
                    scope.spawn(move || {
                        for start in (thread..9_000).step_by(37) {
                            let mut out = [0; 900];
                            read_exact_at(file, &mut out, start as u64).expect("it is that long");
                            assert_eq!(out, bytes[start..start + 900]);
                        }
                    });
                }
            });
            let error = read_exact_at(&file, &mut [0; 2], 9_999).expect_err("one byte is left");
            assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
            read_exact_at(&file, &mut [], 20_000).expect("nothing is read");
        }

        #[test]
        fn reads_go_on_after_a_part() {
            let source: Vec<u8> = (0..10).collect();
            let mut calls = 0;
            let mut read = |rest: &mut [u8], done: u64| {
                calls += 1;
                if calls == 2 {
                    return Err(io::ErrorKind::Interrupted.into());
                }
                let left = &source[done as usize..];
                let count = rest.len().min(left.len()).min(3);
                rest[..count].copy_from_slice(&left[..count]);
                Ok(count)
            };
            let mut out = [0; 10];
            fill(&mut out, &mut read).expect("all of it is there");
            assert_eq!(out[..], source[..]);
            let error = fill(&mut [0; 11], &mut read).expect_err("one byte is missing");
            assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
        }

        #[test]
        fn a_mapping_is_as_before_when_it_comes_back() {
            let bytes: Vec<u8> = (0..100_000u32).map(|at| (at % 251) as u8).collect();
            let file = file_of(&bytes);
            // SAFETY: nobody else has this file.
            let map = unsafe { Mmap::map(&file) }.expect("files can be mapped here");
            for part in [0..bytes.len(), 1..2, 4096..12_288, 99_999..100_000, 5..5] {
                read_ahead(&map, part.clone());
                forget(&map, part);
                assert_eq!(map[..], bytes[..]);
            }
        }
    }
}
