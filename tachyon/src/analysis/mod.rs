//! What a profile shows: where the time goes, and what changed between two of them.
//!
//! [`Collector`] takes the samples of one or more recordings and sums them up to an [`Aggregate`]: named stacks with their
//! counts, and nothing else from the files. [`Report`] turns it into the rows of a report, `live` those of a recording that
//! is being watched, `edges` the callers and callees of a function, [`diff`] compares two. All of these are pure functions:
//! they print nothing and read no file. `docs/reading.md` explains to users what the numbers mean.

mod aggregate;
mod collect;
pub mod diff;
mod edges;
mod filter;
mod groups;
pub mod live;
mod module;
mod rows;

pub use aggregate::{Aggregate, Entry, LeftAside, Place, PlaceId, Recording, ThreadInfo};
pub use collect::Collector;
pub use edges::{Edge, Edges, edges};
pub use filter::Filter;
pub use module::{Distributions, NoDistributions, module};
pub use rows::{By, Report, Row, RowKind, RowName, Sum, report};

/// A share of a whole; 0 of nothing.
#[must_use]
pub fn ratio(part: u64, whole: u64) -> f64 {
    // What a float loses beyond 2^53 does not matter in a share.
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}
