//! Native stacks of a recording: who keeps the kernel side's tables up to date, and what addresses mean.
//!
//! [`Mapper`] is a thread that reads a process's mappings, writes unwind tables and ranges for the kernel side, and holds
//! the files that addresses will be named from; [`Spaces`] is what it hands to [`Mixer`], which turns addresses into
//! frames for the thread that makes samples. A space is published before the kernel side uses it to walk stacks, so
//! whatever a sample holds can be named.

mod assembly;
mod copies;
mod kernel;
mod made;
mod mapper;
mod mixer;
mod spaces;
mod switch;

pub(super) use copies::{Copies, Finished};
pub(super) use kernel::{KernelFrames, above_the_wait};
pub(super) use mapper::{Mapped, Mapper, News};
pub(super) use mixer::Mixer;
pub(super) use spaces::Spaces;

pub use crate::merge::Keep;

/// What native stacks should contain, and the memory they may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NativePlan {
    /// Native frames to keep even though they say nothing about the Python code.
    pub keep: Keep,
    /// Bytes for unwind tables.
    pub unwind_memory: u32,
    /// Bytes for symbol tables and DWARF.
    pub symbol_memory: usize,
}

impl NativePlan {
    /// The defaults, with this much memory for unwind tables.
    #[must_use]
    pub fn new(unwind_memory: u32) -> Self {
        Self { keep: Keep::default(), unwind_memory, symbol_memory: crate::symbolize::native::MAX_BYTES }
    }

    /// The same with at most `share` bytes for each of the two, where there is a limit.
    pub(super) fn within(self, share: Option<u32>) -> Self {
        let Some(share) = share else { return self };
        let (unwind_memory, symbol_memory) = (self.unwind_memory.min(share), self.symbol_memory.min(share as usize));
        Self { unwind_memory, symbol_memory, ..self }
    }
}
