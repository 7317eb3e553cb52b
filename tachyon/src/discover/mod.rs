//! Which processes there are: at the start, by a scan of `/proc`, and from then on, by what they map and execute.

pub mod filter;
mod scan;
pub mod watch;

pub use filter::Filter;
pub use scan::{ScannedProcess, descendants, family, look_at, pids, scan};
