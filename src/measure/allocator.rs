//! A global allocator that counts.
use std::alloc::{GlobalAlloc, Layout, System};
use std::hint::black_box;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Bytes allocated and not yet freed.
static LIVE: AtomicUsize = AtomicUsize::new(0);
/// The highest [`LIVE`] since the innermost [`Scope`] started, or since the program did.
static PEAK: AtomicUsize = AtomicUsize::new(0);

fn grow(bytes: usize) {
    let live = LIVE.fetch_add(bytes, Relaxed) + bytes;
    // The load keeps the shared cache line clean in the common case, where the peak stands.
    if live > PEAK.load(Relaxed) {
        PEAK.fetch_max(live, Relaxed);
    }
}

fn shrink(bytes: usize) {
    LIVE.fetch_sub(bytes, Relaxed);
}

/// A global allocator that counts live and peak bytes, and leaves allocation to another allocator.
///
/// It counts the sizes that were asked for. What the inner allocator adds for headers and alignment does not count, so the numbers are the
/// same on every machine. All threads count together, as measurements of parallel operations need. An allocation costs one or two relaxed
/// atomic operations more, so this allocator can stay installed.
///
/// It does not see the memory of a device (CUDA, WebGPU, ...): see [`bytes_in_use`](super::bytes_in_use).
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_memsave::measure::TrackingAllocator;
///
/// #[global_allocator]
/// static ALLOCATOR: TrackingAllocator = TrackingAllocator::new();
///
/// assert!(TrackingAllocator::is_installed());
/// let before = TrackingAllocator::live();
/// let x = Tensor::<1>::ones([1000], &Device::flex());
/// assert!(TrackingAllocator::live() >= before + 4000);
/// # drop(x);
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct TrackingAllocator<A = System> {
    inner: A,
}

impl TrackingAllocator {
    /// Counts what [`System`] allocates.
    ///
    /// ```
    /// use burn_memsave::measure::TrackingAllocator;
    ///
    /// // Counts once it has the attribute `#[global_allocator]`.
    /// static ALLOCATOR: TrackingAllocator = TrackingAllocator::new();
    /// ```
    pub const fn new() -> Self {
        Self::with_inner(System)
    }

    /// Bytes allocated and not yet freed, by all threads; 0 if no tracking allocator is installed.
    ///
    /// ```
    /// use burn_memsave::measure::TrackingAllocator;
    ///
    /// let live = TrackingAllocator::live();
    /// assert!(TrackingAllocator::is_installed() || live == 0);
    /// ```
    pub fn live() -> u64 {
        LIVE.load(Relaxed) as u64
    }

    /// The highest [`live`](Self::live) so far. While a [`Scope`] lives: since the innermost one started.
    ///
    /// ```
    /// use burn_memsave::measure::TrackingAllocator;
    ///
    /// drop(vec![1u8; 1 << 20]);
    /// assert!(TrackingAllocator::peak() >= 1 << 20 || !TrackingAllocator::is_installed());
    /// ```
    pub fn peak() -> u64 {
        // The peak may lag behind for an instant, while another thread counts or starts a scope.
        PEAK.load(Relaxed).max(LIVE.load(Relaxed)) as u64
    }

    /// Whether a tracking allocator is the global allocator of this program. If not, every count is 0, which measurements report as
    /// `None`.
    ///
    /// ```
    /// use burn_memsave::measure::TrackingAllocator;
    ///
    /// assert!(!TrackingAllocator::is_installed()); // not in this program
    /// ```
    pub fn is_installed() -> bool {
        // Something is allocated now, so the count is 0 only if nobody counts.
        let _allocation = black_box(Box::new(0u8));
        LIVE.load(Relaxed) > 0
    }
}

impl<A> TrackingAllocator<A> {
    /// Counts what `inner` allocates.
    ///
    /// ```
    /// use burn_memsave::measure::TrackingAllocator;
    /// use std::alloc::System; // or jemalloc, mimalloc, ...
    ///
    /// static ALLOCATOR: TrackingAllocator<System> = TrackingAllocator::with_inner(System);
    /// ```
    pub const fn with_inner(inner: A) -> Self {
        Self { inner }
    }
}

// SAFETY: every call is passed to `inner` with the same arguments, and its result is returned unchanged; `inner` upholds the contract.
// Counting neither allocates nor unwinds.
unsafe impl<A: GlobalAlloc> GlobalAlloc for TrackingAllocator<A> {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's obligations are those of the inner call.
        let pointer = unsafe { self.inner.alloc(layout) };
        if !pointer.is_null() {
            grow(layout.size());
        }
        pointer
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's obligations are those of the inner call.
        let pointer = unsafe { self.inner.alloc_zeroed(layout) };
        if !pointer.is_null() {
            grow(layout.size());
        }
        pointer
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's obligations are those of the inner call; `pointer` came from `inner`, as all do.
        unsafe { self.inner.dealloc(pointer, layout) };
        shrink(layout.size());
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // SAFETY: the caller's obligations are those of the inner call; `pointer` came from `inner`, as all do.
        let moved = unsafe { self.inner.realloc(pointer, layout, new_size) };
        // Only the difference counts: whether both blocks exist for a moment is up to the inner allocator.
        if !moved.is_null() {
            match new_size.checked_sub(layout.size()) {
                Some(more) => grow(more),
                None => shrink(layout.size() - new_size),
            }
        }
        moved
    }
}

/// Live and peak bytes since a point in the program, as counted by the installed [`TrackingAllocator`].
///
/// Scopes nest: each has its own peak, whatever happens in the scopes inside it. They must end in the reverse order of their starts, as
/// guards do. Read a scope's peak only after the scopes inside it have ended. Allocations of other threads count, too.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_memsave::measure::{Scope, TrackingAllocator};
///
/// #[global_allocator]
/// static ALLOCATOR: TrackingAllocator = TrackingAllocator::new();
///
/// let scope = Scope::start();
/// let x = Tensor::<1>::ones([1000], &Device::flex());
/// drop(x);
/// assert!(scope.live() < 4000);
/// assert!(scope.peak() >= 4000);
/// ```
#[derive(Debug)]
#[must_use = "a scope ends when it is dropped"]
pub struct Scope {
    /// Live bytes at the start.
    base: usize,
    /// The peak of the enclosing scope at the start.
    outer_peak: usize,
}

impl Scope {
    /// Starts a scope here. See the [example](Self).
    ///
    /// ```
    /// let scope = burn_memsave::measure::Scope::start();
    /// assert_eq!((scope.live(), scope.peak()), (0, 0));
    /// ```
    pub fn start() -> Self {
        let base = LIVE.load(Relaxed);
        Self { base, outer_peak: PEAK.swap(base, Relaxed) }
    }

    /// Live bytes now, minus those at the start. Negative if more was freed than allocated.
    ///
    /// ```
    /// use burn_memsave::measure::{Scope, TrackingAllocator};
    ///
    /// let bytes = vec![1u8; 100];
    /// let scope = Scope::start();
    /// drop(bytes);
    /// assert_eq!(scope.live(), if TrackingAllocator::is_installed() { -100 } else { 0 });
    /// ```
    pub fn live(&self) -> i64 {
        LIVE.load(Relaxed) as i64 - self.base as i64
    }

    /// The most bytes alive at one time since the start, beyond those alive at the start.
    ///
    /// ```
    /// use burn_memsave::measure::{Scope, TrackingAllocator};
    ///
    /// let scope = Scope::start();
    /// drop(vec![1u8; 100]);
    /// drop(vec![1u8; 200]);
    /// assert_eq!(scope.peak(), if TrackingAllocator::is_installed() { 200 } else { 0 });
    /// ```
    pub fn peak(&self) -> u64 {
        TrackingAllocator::peak().saturating_sub(self.base as u64)
    }
}

impl Drop for Scope {
    fn drop(&mut self) {
        PEAK.fetch_max(self.outer_peak, Relaxed);
    }
}
