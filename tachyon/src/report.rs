//! The end-of-run account: samples, losses, reasons. `docs/report.md` documents the JSON.

mod sum;

pub use sum::{MOST_LINES, add_known};

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use tachyon_common::stop::StopReason;

/// What a recording did; the counts add up exactly: `ran = stored + idle + filtered + not_python + Σ loss`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Version of this schema.
    pub schema: u32,
    /// Runs of the timer's program.
    pub ran: u64,
    /// Samples in the finished file.
    pub stored: u64,
    /// The file was recovered from an interrupted recording: what was lost, and what came after the last sample, is
    /// unknown. Only `stored`, `duration_s` and `rate_hz` are given then.
    #[serde(default)]
    pub cut: bool,
    /// Runs while the CPU was idle.
    pub idle: u64,
    /// Runs in a process that was not selected.
    pub filtered: u64,
    /// Runs in a process that is not CPython.
    pub not_python: u64,
    /// Lost runs by cause; causes with 0 are included.
    pub loss: BTreeMap<String, u64>,
    /// Waiting threads; absent if they were not sampled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wall: Option<WallReport>,
    /// By how much independent counts of the same thing differ. If it is not 0, the recorder has a bug.
    #[serde(default)]
    pub inconsistent: u64,
    /// Which part of a recording this is; absent for a whole recording.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub segment: Option<SegmentReport>,
    /// Number of parts of the recording; absent for a single part.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub segments: Option<u64>,
    /// Rate x on-CPU time of the selected processes; `null` if no process could be measured.
    pub expected: Option<u64>,
    /// `expected` minus the runs in a selected process, at least 0: timer firings that never reached the program.
    pub not_fired: Option<u64>,
    /// Samples by the reason why their Python stack ended.
    pub stops: BTreeMap<String, u64>,
    /// Native stacks; `null` if they were not recorded.
    #[serde(default)]
    pub native: Option<NativeReport>,
    /// Requested samples per second.
    pub rate_hz: f64,
    /// The rate requested from the kernel, averaged over the targets' CPU time; below `rate_hz` only with `--max-cpu`.
    #[serde(default)]
    pub effective_rate_hz: f64,
    /// The event that made the program run: `cpu-clock` or `cycles`, or those that were chosen, separated by commas.
    pub event: String,
    /// Samples of each chosen event.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub events: Vec<EventReport>,
    /// How far an interval may lie from the mean, as a share of it, so that no program is in step with the intervals.
    #[serde(default)]
    pub jitter: f64,
    /// Length of the recording, seconds.
    pub duration_s: f64,
    /// Longest delay of the ring's reader, seconds.
    pub longest_reader_stall_s: f64,
    /// Of that delay, the time in which the reader was ready to run but got no CPU.
    #[serde(default)]
    pub reader_stall_without_cpu_s: f64,
    /// Records of code objects that were sent: one per code object, a few for a long line table.
    #[serde(default)]
    pub codes_sent: u64,
    /// Code objects for which the ring was full: sent with a later sample, or not at all.
    pub codes_not_sent: u64,
    /// Times that a code object was put off because its process, or user, had sent as much as it may in a second.
    #[serde(default)]
    pub codes_put_off: u64,
    /// Process starts and ends for which the ring was full.
    pub process_events_lost: u64,
    /// Processes that could not be profiled, with the reason.
    pub refused: Vec<String>,
    /// Weaknesses of this recording, e.g. an evaluator whose entry was not found.
    pub notes: Vec<String>,
    /// One entry per sampled process.
    pub processes: Vec<ProcessReport>,
    /// The profiler's own cost.
    pub cost: CostReport,
}

impl Report {
    /// Mean requested samples per second of CPU time. Reports of old files have only one rate.
    #[must_use]
    pub fn mean_rate_hz(&self) -> f64 {
        if self.effective_rate_hz > 0.0 { self.effective_rate_hz } else { self.rate_hz }
    }

    /// Samples missed because the timer did not fire, and how many were expected; `None` if that is not known, or if the two
    /// counts differ by no more than chance: 2.6 standard deviations of a Poisson count, its 99 % interval.
    #[must_use]
    pub fn missed(&self) -> Option<(u64, u64)> {
        let (missed, expected) = self.not_fired.zip(self.expected)?;
        // In integers, which are exact: 2.6² is 6.76.
        let beyond = u128::from(missed).pow(2) * 100 > u128::from(expected) * 676;
        beyond.then_some((missed, expected))
    }

    /// Samples whose Python stack was cut, by reason, most first.
    #[must_use]
    pub fn cut_stacks(&self) -> Vec<(&str, u64)> {
        let whole = [
            StopReason::Complete,
            StopReason::NoThreadState,
            StopReason::NoFrame,
            StopReason::RuntimeNotInitialized,
            // Its callers are found through the native stack.
            StopReason::EnteringEval,
        ];
        let cut = |name: &str| whole.iter().all(|reason| reason.name() != name);
        let mut stops: Vec<(&str, u64)> = self.stops.iter().map(|(name, &count)| (&**name, count)).collect();
        stops.retain(|&(name, count)| count > 0 && cut(name));
        stops.sort_by_key(|&(_, count)| std::cmp::Reverse(count));
        stops
    }

    /// The same as microseconds of CPU time between samples; 0 if no rate is known.
    #[must_use]
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a float that is too large becomes the largest number"
    )]
    pub fn mean_interval_us(&self) -> u64 {
        let rate_hz = self.mean_rate_hz();
        if rate_hz > 0.0 { (1e6 / rate_hz).round() as u64 } else { 0 }
    }
}

/// What became of waiting threads: each has one tick in each interval; `ticks_due = stored + Σ loss`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct WallReport {
    /// How their stacks are read: `kick`, when the wait is over; `switch_out`, when it begins, for some waits that stand for
    /// all.
    pub method: String,
    /// Ticks in waits of the selected processes' threads.
    pub ticks_due: u64,
    /// Those of them that are samples in the file.
    pub stored: u64,
    /// The others, by cause; causes with 0 are included.
    pub loss: BTreeMap<String, u64>,
    /// Ticks of `ticks_due` in waits of threads that had longer intervals because a CPU had too many of them.
    pub widened: u64,
    /// How often a thread was met for which there was no room: its waits are not counted anywhere.
    pub threads_without_room: u64,
    /// The stored ones by what was waited for.
    pub causes: BTreeMap<String, CauseReport>,
    /// Lines that held the GIL while others waited for it, most ticks first; 20 at most.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub holders: Vec<HolderReport>,
    /// Who ended waits, with `--wakers`: most ticks first, 20 at most.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub wakers: Vec<WakerReport>,
    /// asyncio tasks and greenlets that waited concurrently; only with `--async`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tasks: Option<TaskWaitReport>,
}

/// What asyncio tasks and greenlets waited for while their threads were idle. Each of them waits for all of that time, so these ticks are
/// not part of any thread's: `idle = read + loss.went_on + loss.unreadable + loss.late`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TaskWaitReport {
    /// Ticks in which event loops were idle when they were looked at, counted once per loop.
    pub idle: u64,
    /// Those of them in which their tasks were read.
    pub read: u64,
    /// The others: the loop went on while they were read, they could not be read, or the time was up. Also ticks of tasks beyond
    /// the limit on what is written (`too_many`), and of those that could not be written.
    pub loss: BTreeMap<String, u64>,
    /// Ticks of all tasks that are samples in the file.
    pub stored: u64,
    /// Those of them that are greenlets'.
    pub greenlets: u64,
    /// The lines at which they waited, most ticks first; 20 at most.
    pub places: Vec<PlaceReport>,
}

/// A line at which tasks waited: the innermost one that is not the standard library's.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PlaceReport {
    /// Ticks.
    pub stored: u64,
    /// The line, e.g. `db.py:88 execute`.
    pub place: String,
}

/// A line that held the GIL.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct HolderReport {
    /// Ticks of the threads that waited meanwhile.
    pub stored: u64,
    /// Its function.
    pub function: String,
    /// Its file.
    pub file: String,
    /// Its line; `null` if not known.
    pub line: Option<u32>,
}

/// Who ended waits at a line.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct WakerReport {
    /// Ticks of those waits.
    pub stored: u64,
    /// What was waited for.
    pub cause: String,
    /// The line that waited, e.g. `queue.py:171 get`.
    pub place: String,
    /// The line that woke it, likewise; for a thread that runs no recorded Python, its name.
    pub waker: String,
}

/// Waits of one cause.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CauseReport {
    /// Ticks.
    pub stored: u64,
    /// The line where most of them waited, e.g. `db.py:88 execute`, and how many did.
    pub place: String,
    /// Ticks of that line.
    pub at_place: u64,
}

/// The place of a segment in its recording.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SegmentReport {
    /// From 0.
    pub sequence: u64,
    /// Its start, seconds since 1970, UTC.
    pub start_unix: f64,
    /// Its end, in the same unit.
    pub end_unix: f64,
}

/// The outcome of native stacks.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct NativeReport {
    /// Samples whose native and Python stacks were both complete, and matched:
    /// `exact + repaired + failed + missing = stored`.
    pub exact: u64,
    /// Samples whose stacks differed for a known reason and were merged anyway.
    pub repaired: u64,
    /// Samples whose stacks contradicted each other: native frames between Python frames are left out.
    pub failed: u64,
    /// Samples without native frames.
    pub missing: u64,
    /// `repaired` and `failed` by reason.
    pub repairs: BTreeMap<String, u64>,
    /// Samples by the reason why their native stack ended.
    pub stops: BTreeMap<String, u64>,
    /// Samples whose native stack was walked on in a copy of the stack, because the kernel side had no table.
    #[serde(default)]
    pub copied: u64,
    /// Unwind tables in use at the end, bytes.
    pub table_bytes: u64,
    /// What all tables would take, including those that had no room, bytes; `None`: all had room.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub table_bytes_wanted: Option<u64>,
    /// Files that cannot be unwound, by path, each with the reason.
    pub refused: BTreeMap<String, String>,
}

/// One sampled process.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ProcessReport {
    /// What distinguishes it from every other one of the recording, including earlier ones with the same pid, and earlier
    /// programs of the same process: its instance and image. Not written: it means nothing elsewhere.
    #[serde(skip)]
    pub instance: (u64, u64),
    /// Pid in the profiler's namespace.
    pub pid: u32,
    /// The kernel's short name.
    pub comm: String,
    /// CPython's version.
    pub python_version: String,
    /// Samples in the file.
    pub samples: u64,
    /// Samples with a complete stack of named Python frames, and samples of threads that run no Python.
    pub named: u64,
    /// Samples taken before `_PyRuntime` was initialised (or after it was finalised).
    pub not_initialized: u64,
    /// Samples whose native and Python stacks were merged exactly.
    #[serde(default)]
    pub merge_exact: u64,
    /// Those that differed for a known reason.
    #[serde(default)]
    pub merge_repaired: u64,
    /// Those that contradicted each other.
    #[serde(default)]
    pub merge_failed: u64,
    /// Runs in it before it was inspected (a part of the `uninspected` loss).
    pub uninspected: u64,
    /// On-CPU time while it was selected and ran CPython, seconds; `null` if it could not be measured.
    pub cpu_s: Option<f64>,
    /// What its threads did with their time, if waiting threads were sampled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time: Option<TimeReport>,
    /// The same for each thread, including those that ended; the 1,000 that lived longest. Not in accounts of segments.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub threads: Vec<ThreadReport>,
    /// Script or module of its command line; empty if there is none.
    #[serde(default)]
    pub script: String,
    /// Id of its container; empty if none is visible.
    #[serde(default)]
    pub container: String,
    /// Uid of its Kubernetes pod; empty if none is visible.
    #[serde(default)]
    pub pod: String,
    /// The service that it says it belongs to, in OpenTelemetry's process context; empty if it does not say.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub service: String,
    /// Variables that it was started with, by name: those that `--label-env` asked for.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub environment: BTreeMap<String, String>,
    /// Labels, by name; the agent's segments have them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
}

/// What the threads of a process did with their time, as the kernel counts it: the parts add up to their lifetimes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct TimeReport {
    /// On a CPU, seconds.
    pub running_s: f64,
    /// Ready to run, without a CPU.
    pub queued_s: f64,
    /// Waiting for something else. The sum is measured; its parts by cause come from the samples.
    pub blocked_s: BTreeMap<String, f64>,
    /// The part of that for the GIL.
    pub gil_wait_s: f64,
}

/// What one thread did with its time.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ThreadReport {
    /// Its id in the profiler's namespace.
    pub tid: u32,
    /// Its name; empty if it had no sample.
    pub name: String,
    /// What it did.
    pub time: TimeReport,
}

/// What was sampled of a chosen event.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventReport {
    /// Its name.
    pub name: String,
    /// How many of them a sample stands for; `null` for the clock, which has a rate.
    pub period: Option<u64>,
    /// Samples of it that are in the profile.
    pub stored: u64,
}

/// What profiling cost.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CostReport {
    /// The kernel's own count of runs (`run_cnt`); `null` if the kernel keeps no statistics, see `bpf_stats`.
    pub bpf_run_count: Option<u64>,
    /// Nanoseconds in the BPF programs (`run_time_ns`); `null` in the same case.
    pub bpf_run_ns: Option<u64>,
    /// `on`, or why the kernel keeps no statistics.
    pub bpf_stats: String,
    /// User and system CPU time of the profiler, seconds.
    pub user_cpu_s: f64,
    /// Peak resident memory, bytes.
    pub peak_rss_bytes: u64,
    /// Memory of the BPF maps as reported by the kernel, bytes.
    pub map_bytes: u64,
    /// Size of the sample ring, a part of `map_bytes`; `docs/report.md` has its arithmetic.
    pub ring_bytes: u64,
    /// How long the parts of the start took.
    #[serde(default)]
    pub start: StartReport,
}

/// The parts of the start, in seconds: sequential, except for [`Self::processes_s`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StartReport {
    /// Checking whether the machine can profile.
    pub machine_s: f64,
    /// Reading the kernel's types.
    pub types_s: f64,
    /// Parsing the BPF object, creating its maps, loading the hooks that follow processes.
    pub maps_s: f64,
    /// The verifier, for the sampling programs.
    pub programs_s: f64,
    /// In parallel with the verifier: finding, inspecting and entering existing processes.
    pub processes_s: f64,
    /// Output, threads and the event.
    pub attach_s: f64,
    /// All of it, until the event is attached.
    pub total_s: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_count_may_differ_by_is_not_missed() {
        let missed = |not_fired, expected| Report { not_fired, expected, ..Report::default() }.missed();
        for (not_fired, expected, told) in [
            (3, 10, false),
            (8, 10, false),
            (9, 10, true),
            (26, 100, false),
            (27, 100, true),
            (300, 10_000, true),
            (0, 0, false),
        ] {
            assert_eq!(missed(Some(not_fired), Some(expected)), told.then_some((not_fired, expected)));
        }
        assert_eq!((missed(None, Some(9)), missed(Some(9), None)), (None, None));
    }
}
