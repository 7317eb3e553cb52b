//! Loads and feeds the BPF side: object, kernel offsets, maps, events.
//!
//! In: what to sample and how often, process entries and layouts. Out: two ring buffers and the counters. It knows
//! neither CPython nor profiles. Everything it attaches is held by file descriptors of this process: when the
//! profiler dies, however it dies, the kernel detaches all of it.

mod btf;
mod chosen;
mod diagnostics;
mod error;
mod jitter;
mod kept;
mod loader;
mod made_for;
mod native;
mod numbered;
mod object;
mod options;
mod perf;
mod pod;
mod privileges;
mod programs;
mod rows;
mod sampling;
mod segment;
mod shared;
mod waits;

pub use btf::{BtfError, kernel_config};
pub use chosen::{ChosenEvent, EventError, Events, Listed, events};
#[cfg(debug_assertions)]
pub use diagnostics::log_with;
pub use error::KernelError;
pub use made_for::MadeFor;
pub use native::NativeMaps;
pub use object::{Kernel, LoadTimes};
pub use options::{Options, processes, ring_bytes};
pub use perf::{Event, cpus as online_cpus};
pub use pod::FileKey;
pub use privileges::{drop_privileges, drop_privileges_but_sampling, make_immediate, make_urgent};
pub use programs::{Verified, Verifying};
pub use sampling::RunStats;
pub use segment::{Cut, since};
pub use waits::{WaitMethod, WaitTotals, Waits, wait_method};
