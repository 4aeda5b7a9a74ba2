//! An allocator whose callers wait before they free what a thread works in.
//!
//! How many threads hold their buffers at the same time depends on cores and chance: the peak of a pool of 64 threads on two cores says
//! little about 64 cores. A thread that waits here still holds everything, and leaves its core to the others. So nearly all jobs that
//! can run at the same time do, and a peak is close to the highest that the shapes allow, on every machine.
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

/// The sizes of the buffers of threads, in bytes. Smaller ones are records, larger ones are tensors.
const BUFFERS: core::ops::Range<usize> = 1 << 12..1 << 18;

/// Long beside what it takes to wake a thread.
const WAIT: Duration = Duration::from_millis(1);

static WAITS: AtomicBool = AtomicBool::new(false);

/// While this lives, threads wait before they free a buffer.
pub struct Lingering(());

impl Lingering {
    pub fn start() -> Self {
        WAITS.store(true, Relaxed);
        Self(())
    }
}

impl Drop for Lingering {
    fn drop(&mut self) {
        WAITS.store(false, Relaxed);
    }
}

pub struct Allocator;

// SAFETY: every call is passed to `System`, which upholds the contract. Waiting neither allocates nor unwinds.
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's obligations are those of the inner call.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        if BUFFERS.contains(&layout.size()) && WAITS.load(Relaxed) {
            thread::sleep(WAIT);
        }
        // SAFETY: the caller's obligations are those of the inner call; `pointer` came from `System`, as all do.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // SAFETY: as above.
        unsafe { System.realloc(pointer, layout, new_size) }
    }
}
