//! Where a profile goes. Sinks read the profile and nothing else.
//!
//! There is one module for each format; [`Format`] names them and [`export`] opens all but TACH. [`metadata`] is the document that carries
//! what a format has no place for; [`text`] makes names from hostile programs harmless where they are shown.

pub mod collapsed;
pub mod export;
pub mod firefox;
pub mod flamegraph;
mod format;
pub mod gperftools;
pub mod journal;
pub mod jsonl;
pub(crate) mod label;
pub mod metadata;
pub(in crate::sinks) mod need;
pub mod page;
pub mod pprof;
pub mod speedscope;
pub mod split;
mod spool;
pub(crate) mod stacks;
mod streams;
pub mod tach;
pub mod tail;
pub mod text;

pub use collapsed::CollapsedSink;
pub use format::{Format, UnknownFormat};
pub use label::{Kind as FrameKind, Label as FrameLabel, RootOptions};
pub use tach::TachSink;

use crate::profile::{FrameId, Process, Profile, Sample, ThreadId, Wait, script};
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

    /// Takes samples that differ only in their times: `times_us` has all of them, including that of `sample`, the first one.
    /// The same as [`Sink::sample`] for each; a sink that ignores times counts them in one step.
    ///
    /// # Errors
    /// As [`Sink::sample`].
    fn repeated(&mut self, profile: &Profile, sample: &Sample<'_>, times_us: &[u64]) -> std::io::Result<()> {
        times_us.iter().try_for_each(|&time_us| self.sample(profile, &Sample { time_us, ..*sample }))
    }

    /// Takes a wait of any weight at once, if the format supports that; `sample` has the time of its end. If not (`false`),
    /// nothing was taken, and [`Sink::sample`] is called as often as the weight says.
    ///
    /// # Errors
    /// As [`Sink::sample`].
    fn wait(&mut self, profile: &Profile, sample: &Sample<'_>, wait: &Wait<'_>) -> std::io::Result<bool> {
        let _as_samples = (profile, sample, wait);
        Ok(false)
    }

    /// Whether the file records whose work each sample was ([`Sample::work`]): if no sink does, that is not kept.
    fn tells_work(&self) -> bool {
        false
    }

    /// Whether samples reach the file while they are taken, so that a recording that is cut short has them: then waits that are still
    /// going on are taken in parts, too.
    fn streams(&self) -> bool {
        false
    }

    /// Writes what was taken so far to the file. A sink that writes everything at the end has nothing to do.
    ///
    /// # Errors
    /// When the output cannot be written.
    fn tick(&mut self, profile: &Profile) -> std::io::Result<()> {
        let _nothing_yet = profile;
        Ok(())
    }

    /// Roughly the most additional bytes of memory that [`Sink::finish`] will take: a recording ends while there is still room for
    /// that.
    fn finish_bytes(&self, profile: &Profile) -> u64 {
        need::of_tables(profile)
    }

    /// A recording may use this much memory: finishing its file should take only a part of that, if it can take less.
    fn limit(&mut self, memory_bytes: u64) {
        let _takes_little = memory_bytes;
    }

    /// Ends the file.
    ///
    /// # Errors
    /// When the output cannot be written.
    fn finish(&mut self, profile: &Profile, report: &Report) -> std::io::Result<()>;
}

/// Whether a frame is native or kernel code: neither a line of Python nor a mark.
#[must_use]
pub fn is_machine_code(profile: &Profile, frame: FrameId) -> bool {
    let kind = label::Label::of(profile, profile.frames.get(frame)).kind;
    matches!(kind, label::Kind::Native | label::Kind::Kernel)
}

/// The thread id that files show: unique on the host when the profile has many processes (viewers group by it alone),
/// the target's own in a profile of one process, as CPython's profiler writes it.
#[must_use]
pub fn file_thread_id(profile: &Profile, id: ThreadId) -> u64 {
    let thread = profile.thread(id);
    // 0 is not a valid thread id: a profile that was read from a file may have ids that are not Linux's.
    if profile.meta.many_processes || thread.ns_tid == 0 { thread.unique_tid } else { u64::from(thread.ns_tid) }
}

/// Name of a process for people: with the script or module it runs, if it has one.
#[must_use]
pub fn process_title(process: &Process) -> String {
    format!("{} ({})", named(process, |script| script), process.pid)
}

/// Name of the outermost frame, which identifies the process in a profile of many: `python3 app.py (4242)`.
#[must_use]
pub fn process_frame_name(process: &Process) -> String {
    format!("{} ({})", program_name(process), process.pid)
}

/// The same in files that older versions wrote.
#[must_use]
pub(crate) fn former_process_frame_name(process: &Process) -> String {
    format!("{} ({})", process.comm, process.pid)
}

/// What a process runs, without directories: `python3 app.py`, or its `comm` if its command line is not a Python's.
pub(crate) fn program_name(process: &Process) -> String {
    named(process, |script| if script.starts_with('-') { script } else { label::base_name(script) })
}

/// Most bytes of a script's name: a program may write anything into its command line.
const LONGEST_SCRIPT: usize = 100;

fn named(process: &Process, shown: fn(&str) -> &str) -> String {
    let script = script(&process.cmdline);
    let program = process.cmdline.first().map_or("", |word| label::base_name(word).trim_start_matches('-'));
    if script.is_empty() {
        process.comm.clone()
    } else {
        format!("{program} {}", text::cut(shown(&script), LONGEST_SCRIPT))
    }
}
