//! The end-of-run account: samples, losses, reasons. `docs/report.md` documents the JSON.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What a recording did, to the unit: `ran = stored + idle + filtered + not_python + Σ loss`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Version of this schema.
    pub schema: u32,
    /// Runs of the timer's program.
    pub ran: u64,
    /// Samples in the finished file.
    pub stored: u64,
    /// The file was recovered of a recording that was cut: what was lost, and what came after the last sample, is not
    /// known. Only `stored`, `duration_s` and `rate_hz` are then told.
    #[serde(default)]
    pub cut: bool,
    /// Runs that met the idle task.
    pub idle: u64,
    /// Runs that met a process that was not selected.
    pub filtered: u64,
    /// Runs that met a process that is not CPython.
    pub not_python: u64,
    /// Runs lost, by cause; causes with 0 are listed too.
    pub loss: BTreeMap<String, u64>,
    /// Rate x on-CPU time of the selected processes; `null` when no process could be measured.
    pub expected: Option<u64>,
    /// `expected` minus the runs that met a selected process, at least 0: firings that never reached the program.
    pub not_fired: Option<u64>,
    /// Samples by the reason why their Python stack ended.
    pub stops: BTreeMap<String, u64>,
    /// Native stacks; `null` when they were not recorded.
    #[serde(default)]
    pub native: Option<NativeReport>,
    /// Samples per second that were asked for.
    pub rate_hz: f64,
    /// The mean over the targets' CPU time of what was asked of the kernel; less than `rate_hz` with `--max-cpu` alone.
    #[serde(default)]
    pub effective_rate_hz: f64,
    /// The event that made the program run: `cpu-clock` or `cycles`.
    pub event: String,
    /// Length of the recording, seconds.
    pub duration_s: f64,
    /// Longest time the ring's reader was late, seconds.
    pub longest_reader_stall_s: f64,
    /// Of it, the time in which the reader could have run and no CPU ran it.
    #[serde(default)]
    pub reader_stall_without_cpu_s: f64,
    /// Code objects that found the ring full and were sent with a later sample, or not at all.
    pub codes_not_sent: u64,
    /// Process starts and ends that found their ring full.
    pub process_events_lost: u64,
    /// Processes that could not be profiled, with the reason.
    pub refused: Vec<String>,
    /// What is weaker than it should be, e.g. an evaluator whose entry was not found.
    pub notes: Vec<String>,
    /// One entry for each sampled process.
    pub processes: Vec<ProcessReport>,
    /// The profiler's own cost.
    pub cost: CostReport,
}

impl Report {
    /// Samples per second of CPU time that were asked of the kernel, on the mean. Reports of old files tell one rate.
    #[must_use]
    pub fn mean_rate_hz(&self) -> f64 {
        if self.effective_rate_hz > 0.0 { self.effective_rate_hz } else { self.rate_hz }
    }

    /// The same as microseconds of CPU time between samples; 0 when no rate is known.
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

/// What became of native stacks.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct NativeReport {
    /// Samples whose native and Python stacks were both whole, and fit: `exact + repaired + failed + missing = stored`.
    pub exact: u64,
    /// Samples whose stacks were put together although they differed, for a known reason.
    pub repaired: u64,
    /// Samples whose stacks contradicted each other: native frames between Python frames are left out.
    pub failed: u64,
    /// Samples without native frames.
    pub missing: u64,
    /// `repaired` and `failed` by reason.
    pub repairs: BTreeMap<String, u64>,
    /// Samples by the reason why their native stack ended.
    pub stops: BTreeMap<String, u64>,
    /// Unwind tables in use at the end, bytes.
    pub table_bytes: u64,
    /// Files that cannot be unwound, by path, each with its reason.
    pub refused: BTreeMap<String, String>,
}

/// One sampled process.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ProcessReport {
    /// Pid in the profiler's namespace.
    pub pid: u32,
    /// The kernel's short name.
    pub comm: String,
    /// CPython's version.
    pub python_version: String,
    /// Samples in the file.
    pub samples: u64,
    /// Samples with a whole stack of Python frames that all have names, and samples of threads that run no Python.
    pub named: u64,
    /// Samples taken before `_PyRuntime` was initialised (or after it was finalised).
    pub not_initialized: u64,
    /// Samples whose native and Python stacks were put together exactly.
    #[serde(default)]
    pub merge_exact: u64,
    /// The same of those that differed for a known reason.
    #[serde(default)]
    pub merge_repaired: u64,
    /// The same of those that contradicted each other.
    #[serde(default)]
    pub merge_failed: u64,
    /// Runs that met it before it was inspected (a part of the `uninspected` loss).
    pub uninspected: u64,
    /// On-CPU time while it was selected and ran CPython, seconds; `null` when it could not be measured.
    pub cpu_s: Option<f64>,
    /// Script or module of its command line; empty when it has none.
    #[serde(default)]
    pub script: String,
    /// Id of its container; empty when it is in none that can be seen.
    #[serde(default)]
    pub container: String,
    /// Uid of its Kubernetes pod, likewise.
    #[serde(default)]
    pub pod: String,
}

/// What profiling cost.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CostReport {
    /// Runs as the kernel counts them (`run_cnt`); `null` where the kernel keeps no statistics, see `bpf_stats`.
    pub bpf_run_count: Option<u64>,
    /// Nanoseconds in the BPF programs (`run_time_ns`); `null` likewise.
    pub bpf_run_ns: Option<u64>,
    /// `on`, or why the kernel keeps no statistics.
    pub bpf_stats: String,
    /// User and system CPU time of the profiler, seconds.
    pub user_cpu_s: f64,
    /// Peak resident memory, bytes.
    pub peak_rss_bytes: u64,
    /// Memory of the BPF maps as the kernel tells it, bytes.
    pub map_bytes: u64,
    /// Size of the sample ring, a part of `map_bytes`; `docs/report.md` has its arithmetic.
    pub ring_bytes: u64,
    /// Where the start's time went.
    #[serde(default)]
    pub start: StartReport,
}

/// The parts of the start, in seconds: one after the other, but for [`Self::processes_s`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StartReport {
    /// Asking the machine whether it can profile.
    pub machine_s: f64,
    /// Reading the kernel's types.
    pub types_s: f64,
    /// Taking the BPF object apart, making its maps, loading the hooks that follow processes.
    pub maps_s: f64,
    /// The verifier, of the programs that make samples.
    pub programs_s: f64,
    /// Beside the verifier: finding, inspecting and entering the processes that there are.
    pub processes_s: f64,
    /// Output, threads and the event.
    pub attach_s: f64,
    /// All of it, until the event is attached.
    pub total_s: f64,
}
