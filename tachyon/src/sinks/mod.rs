//! Where a profile goes. Sinks read the profile and nothing else.
//!
//! One file for each format, [`Format`] names them and [`export`] opens all but TACH; [`metadata`] is the document that carries what a format has no
//! place for, [`text`] makes names of hostile programs harmless where they are shown.

pub mod collapsed;
pub mod export;
pub mod firefox;
pub mod flamegraph;
mod format;
pub mod gperftools;
pub mod journal;
pub mod jsonl;
mod label;
pub mod metadata;
pub mod pprof;
pub mod speedscope;
pub mod split;
mod spool;
mod stacks;
mod streams;
pub mod tach;
pub mod tail;
pub mod text;

pub use collapsed::CollapsedSink;
pub use format::{Format, UnknownFormat};
pub use tach::TachSink;

use crate::profile::{Process, Profile, Sample, ThreadId, script};
use crate::report::Report;

/// Takes samples in time order per thread and makes one file of them.
///
/// The contract: [`Sink::sample`] is called once for each stored sample, with handles that are valid in the given
/// profile; [`Sink::tick`] about twice a second, so that a streaming sink can flush; [`Sink::finish`] exactly once, at
/// the end, when every frame of the profile has its names. A sink keeps no more than one sample's worth of state per
/// thread unless its format leaves no choice (aggregating sinks keep one entry per distinct stack).
pub trait Sink {
    /// Takes one sample.
    ///
    /// # Errors
    /// When the output cannot be written. The sample is then counted as `write_error`.
    fn sample(&mut self, profile: &Profile, sample: &Sample<'_>) -> std::io::Result<()>;

    /// Brings what was taken so far to the file. A sink that writes all at the end has nothing to bring.
    ///
    /// # Errors
    /// When the output cannot be written.
    fn tick(&mut self, profile: &Profile) -> std::io::Result<()> {
        let _nothing_yet = profile;
        Ok(())
    }

    /// Ends the file.
    ///
    /// # Errors
    /// When the output cannot be written.
    fn finish(&mut self, profile: &Profile, report: &Report) -> std::io::Result<()>;
}

/// The thread id that files show: unique on the host when the profile has many processes (viewers group by it alone),
/// the target's own in a profile of one process, as CPython's profiler writes it.
#[must_use]
pub fn file_thread_id(profile: &Profile, id: ThreadId) -> u64 {
    let thread = profile.thread(id);
    // 0 is no thread's id: a profile that was read from a file may have ids that are not Linux's.
    if profile.meta.many_processes || thread.ns_tid == 0 { thread.unique_tid } else { u64::from(thread.ns_tid) }
}

/// Name of a process for people: with the script or module it runs, if it has one.
#[must_use]
pub fn process_title(process: &Process) -> String {
    let script = script(&process.cmdline);
    let name = process_frame_name(process);
    if script.is_empty() { name } else { format!("{name} {script}") }
}

/// Name of the outermost frame that tells a process in a profile of many.
#[must_use]
pub fn process_frame_name(process: &Process) -> String {
    format!("{} ({})", process.comm, process.pid)
}
