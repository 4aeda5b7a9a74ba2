//! What bytes depend on the machine by.
use burn_memsave::measure::TrackingAllocator;
use std::alloc::{GlobalAlloc, Layout, System};

/// How `gemm` aligns what it packs the operands of a product into (`gemm_common::gemm::CACHELINE_ALIGN`), and nothing of ours or of Burn is
/// aligned.
const OF_PACKED: usize = 128;

/// Counts everything but packed operands of products: they are as large as the caches of a machine make them, megabytes apart.
pub struct ButPacked(pub TrackingAllocator);

// SAFETY: every call goes to one of two allocators with the arguments it came with, and its answer is returned as it is. Which one
// depends on the alignment alone, which is the same for all calls for an allocation: memory returns to where it came from.
unsafe impl GlobalAlloc for ButPacked {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's obligations are those of the inner call.
        unsafe { if layout.align() == OF_PACKED { System.alloc(layout) } else { self.0.alloc(layout) } }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as above.
        unsafe {
            if layout.align() == OF_PACKED {
                System.alloc_zeroed(layout)
            } else {
                self.0.alloc_zeroed(layout)
            }
        }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe {
            if layout.align() == OF_PACKED {
                System.dealloc(pointer, layout);
            } else {
                self.0.dealloc(pointer, layout);
            }
        }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // SAFETY: as above.
        unsafe {
            if layout.align() == OF_PACKED {
                System.realloc(pointer, layout, new_size)
            } else {
                self.0.realloc(pointer, layout, new_size)
            }
        }
    }
}
