//! Where the garbage collector keeps its lists, which lead to all objects that can be part of a reference cycle.
//!
//! Free-threaded builds have no such lists: their collector goes through the allocator's pages instead.

use super::debug_offsets::DebugOffsets;
use tachyon_common::layout::{Layout, flags};

/// Where `struct _gc_runtime_state` is: it holds the heads of the lists. Which of its words those are differs between versions, but
/// the head of a circular list can be told from other words by its neighbours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Collector {
    /// It is in `_PyRuntimeState` (3.8), not in each `PyInterpreterState`.
    pub of_runtime: bool,
    /// Offset of the field `gc`.
    pub state: u64,
    /// Its size.
    pub size: u64,
}

/// Largest size that is believed: 3.8 to 3.15 have 240 bytes or less.
const MAX_SIZE: u64 = 1024;

impl Collector {
    /// That of an interpreter; `published` if it publishes offsets (3.13+). `None`: there are no lists.
    pub(super) fn of(layout: &Layout, published: Option<&DebugOffsets>) -> Option<Self> {
        let (version, free_threaded) = (layout.minor_version(), layout.has(flags::FREE_THREADED));
        let Some(published) = published.filter(|_| !free_threaded) else { return Self::row(version, free_threaded) };
        let (state, size) = (published.get("interpreter_state.gc")?, published.get("gc.size")?);
        (state % 8 == 0 && size <= MAX_SIZE).then_some(Self { of_runtime: false, state, size })
    }

    fn row(version: (u8, u8), free_threaded: bool) -> Option<Self> {
        // v3.8.18, v3.9.18 and v3.10.13, v3.11.7, v3.12.1.
        let (of_runtime, state) = match version {
            _ if free_threaded => return None,
            (3, 8) => (true, 344),
            (3, 9 | 10) => (false, 616),
            (3, 11) => (false, 648),
            (3, 12) => (false, 112),
            _ => return None,
        };
        Some(Self { of_runtime, state, size: 240 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inspect::objects::tests::compare;

    #[test]
    fn rows_are_what_the_headers_say() {
        compare(Collector::row, |row| {
            vec![
                ("collector_of_runtime", u8::from(row.of_runtime).to_string()),
                ("collector_state", row.state.to_string()),
                ("collector_size", row.size.to_string()),
            ]
        });
    }
}
