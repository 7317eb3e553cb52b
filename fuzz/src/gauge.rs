//! How much memory is allocated, and how much it was at most.

use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// Starts to watch for a peak; returns what is allocated now.
#[must_use]
pub fn begin() -> usize {
    ALLOCATOR.reset_peak_usage();
    ALLOCATOR.current_usage()
}

/// Most bytes allocated beyond `before` since [`begin`].
#[must_use]
pub fn peak_since(before: usize) -> usize {
    ALLOCATOR.peak_usage().saturating_sub(before)
}
