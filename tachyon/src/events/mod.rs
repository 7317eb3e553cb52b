//! Ring buffer -> typed events. Decodes bytes and reads no process.
//!
//! [`Reader`] empties the ring on a thread of its own, so that it never waits for symbolization or for the disk;
//! [`Event`] is one record, checked.

mod decode;
mod pace;
mod reader;

pub use decode::{BadRecord, Event, Events, Frames, head, with_native};
pub use reader::{Batch, Reader, ReaderStats, Sent};
