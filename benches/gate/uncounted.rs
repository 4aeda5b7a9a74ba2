//! An allocator that leaves out the bytes that depend on the machine.
use burn_memsave::measure::TrackingAllocator;
use std::alloc::{GlobalAlloc, Layout, System};

/// The alignment of the memory into which `gemm` packs the operands of a product (`gemm_common::gemm::CACHELINE_ALIGN`). Neither Burn nor
/// we align anything like this.
const OF_PACKED: usize = 128;

/// Counts everything but packed operands of products, whose sizes depend on the machine's caches and differ by megabytes.
pub struct ButPacked(pub TrackingAllocator);

// SAFETY: every call is passed to one of two allocators with its own arguments, and the result is returned unchanged. Which allocator
// depends only on the alignment, which is the same in all calls for one allocation, so memory returns to the allocator it came from.
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
