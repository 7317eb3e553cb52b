//! Arguments of `record`, and output arguments that it shares with other verbs.

use super::shared::{SamplingArgs, TargetArgs};
use super::values;
use crate::cli::events::AskedEvent;
use crate::cli::failure::Failure;
use crate::cli::format;
use crate::cli::plan::Keep;
use crate::sinks::Format;
use crate::tach::Layout;
use clap::{Args, ValueEnum};
use std::path::PathBuf;
use std::time::Duration;

/// Arguments of `record`.
#[derive(Args, Debug)]
pub struct RecordArgs {
    #[command(flatten)]
    pub targets: TargetArgs,

    /// Stop after this time, e.g. 30s, 500ms, "1m 30s" [default: at Ctrl-C, or when all processes have ended]
    #[arg(short, long, value_name = "TIME", value_parser = values::duration, help_heading = "How")]
    pub duration: Option<Duration>,

    #[command(flatten)]
    pub sampling: SamplingArgs,

    /// Limit the profiler's memory, its own and its BPF maps together, e.g. 128MiB or 1GiB, at least 32MiB; near the limit
    /// it drops caches, then names, then stops, and says so
    #[arg(long, value_name = "SIZE", value_parser = values::memory, help_heading = "How")]
    pub max_memory: Option<u64>,

    /// Also record each frame's current opcode (CPython 3.15 and later)
    #[arg(long, help_heading = "How")]
    pub opcodes: bool,

    /// Record kernel frames too, for threads sampled in the kernel; their names need CAP_SYSLOG
    #[arg(long, help_heading = "How")]
    pub kernel: bool,

    /// Also sample waiting threads, each once in every interval, with what they wait for: gil, lock, sleep, poll, socket, pipe,
    /// disk, child, a cpu
    #[arg(long, conflicts_with = "gil", help_heading = "How")]
    pub wall: bool,

    /// Sample waiting threads only
    #[arg(long, conflicts_with_all = ["wall", "gil"], help_heading = "How")]
    pub off_cpu: bool,

    /// With --wall or --off-cpu: also record who ends each wait, thread and stack
    #[arg(long, help_heading = "How")]
    pub wakers: bool,

    /// Put the name of the running asyncio task below its coroutines, in place of the event loop's frames; from CPython 3.14 on each stack
    /// goes on with the coroutines and the name of the task that awaits it, and so on. The stack of a greenlet goes on with its name and its
    /// parents. With --wall also tell where tasks and greenlets wait while their thread is idle
    #[arg(long = "async", help_heading = "How")]
    pub awaiting: bool,

    /// Sample this event in place of the clock: page-faults, cache-misses, or a tracepoint such as
    /// syscalls:sys_enter_openat; with :PERIOD, every PERIODth. Up to 4, cpu-clock among them if wanted; `-e list` shows
    /// what this machine has
    #[arg(short = 'e', long = "event", value_name = "EVENT[:PERIOD]", conflicts_with_all = ["wall", "off_cpu", "max_cpu"], help_heading = "How")]
    pub events: Vec<AskedEvent>,

    /// Keep the interpreter's own frames between and below Python frames, which add no information
    #[arg(long, conflicts_with = "no_native", help_heading = "How")]
    pub interpreter_frames: bool,

    /// Memory for the unwind tables of native code, e.g. 32MiB; when it is full, the least recently used tables are evicted
    #[arg(long, value_name = "SIZE", value_parser = values::unwind_memory, default_value = "64MiB", conflicts_with = "no_native", help_heading = "How")]
    pub unwind_memory: u32,

    /// File to write, `-` for standard output [default: tachyon-DATE-TIME.tach, in UTC]
    #[arg(short, long, value_name = "PATH", help_heading = "Output")]
    pub output: Option<PathBuf>,

    /// Format: tach, collapsed, gperftools, pprof, speedscope, report, flamegraph, firefox or jsonl [default: by the extension of PATH, else tach]
    #[arg(long, value_name = "FORMAT", value_parser = format::parse_name, long_help = format::long_help("PATH, else tach"), help_heading = "Output")]
    pub format: Option<Format>,

    /// Overwrite existing files
    #[arg(long, help_heading = "Output")]
    pub force: bool,

    /// Label samples with this variable of their process's environment, as it was when the program started, e.g.
    /// SLURM_JOB_ID: `env.SLURM_JOB_ID` in pprof and JSON lines, `environment` in TACH and the report; may be given
    /// several times
    #[arg(long, value_name = "NAME", value_parser = values::variable, help_heading = "Output")]
    pub label_env: Vec<String>,

    /// Keep threads separate in formats that merge them (gperftools, pprof, flamegraph); the others always do
    #[arg(long, help_heading = "Output")]
    pub threads: bool,

    /// Embed the source text of functions with samples in the report (-o x.html); files are read from the target's root
    #[arg(long, help_heading = "Output")]
    pub source: bool,

    #[command(flatten)]
    pub merge: MergeProcesses,

    /// Write one file per process: PATH is then a directory, and only --format sets the format
    #[arg(long, value_enum, value_name = "BY", help_heading = "Output")]
    pub split: Option<Split>,

    /// Start a new file at this interval, e.g. 60s: PATH is then a directory of HOST-START-SEQ.tach (or any --format), each
    /// with its report HOST-START-SEQ.json; no sample is lost or counted twice between two files
    #[arg(long, value_name = "TIME", value_parser = values::rotation, conflicts_with = "split", help_heading = "Output")]
    pub rotate: Option<Duration>,

    /// With --rotate: limit the directory by size or age, e.g. 2GiB or 7d; the oldest files are deleted first. May be given
    /// twice, for both
    #[arg(long, value_name = "SIZE|AGE", value_parser = values::keep, requires = "rotate", help_heading = "Output")]
    pub keep: Vec<Keep>,

    /// Write a report of the recording itself as JSON: samples, losses, cost
    #[arg(long, value_name = "PATH", help_heading = "Output")]
    pub report: Option<PathBuf>,

    /// Compression of TACH files
    #[arg(long, value_enum, default_value_t = Compression::Zstd, help_heading = "Output")]
    pub compression: Compression,

    /// Layout of TACH files; `early` is for the readers of CPython 3.15.0a4 to b3
    #[arg(long, value_enum, default_value_t = TachLayout::Released, help_heading = "Output")]
    pub tach_layout: TachLayout,

    /// Load the diagnostic BPF object, which tells on standard error why walks stop (`cargo xtask bpf build --log`); debug
    /// builds only
    #[cfg(debug_assertions)]
    #[arg(long, hide = true, value_name = "OBJECT", num_args = 0..=1, default_missing_value = "target/bpf/log/tachyon.bpf.o")]
    pub bpf_log: Option<PathBuf>,

    /// Sync TACH files to disk at least once a second (fdatasync), so that a power cut loses no more than that
    #[arg(long, help_heading = "Output")]
    pub sync: bool,
}

/// Whether processes of one program are one in the output.
#[derive(Args, Clone, Copy, Debug, Default)]
pub struct MergeProcesses {
    /// Show processes of one program as one (flamegraph, where this is the default, pprof, gperftools)
    #[arg(long, overrides_with = "no_merge_processes", help_heading = "Output")]
    pub merge_processes: bool,

    /// Keep processes separate in flame graphs too
    #[arg(long, overrides_with = "merge_processes", help_heading = "Output")]
    pub no_merge_processes: bool,
}

impl MergeProcesses {
    /// What the arguments mean for a format.
    ///
    /// # Errors
    /// When the format cannot merge them.
    pub fn wanted(self, format: Format) -> Result<bool, Failure> {
        if self.merge_processes && !matches!(format, Format::Flamegraph | Format::Pprof | Format::Gperftools) {
            return Err(Failure::usage(format!("{format} files keep processes separate"))
                .with_hint("--merge-processes is for flamegraph, pprof and gperftools"));
        }
        Ok(self.merge_processes || (format == Format::Flamegraph && !self.no_merge_processes))
    }
}

/// What gets a file of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Split {
    /// Each process
    Process,
}

/// Layout of a TACH file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TachLayout {
    /// CPython 3.15.0b4 and later
    Released,
    /// CPython 3.15.0a4 to b3
    Early,
}

impl From<TachLayout> for Layout {
    fn from(layout: TachLayout) -> Self {
        match layout {
            TachLayout::Released => Self::Released,
            TachLayout::Early => Self::Early,
        }
    }
}

/// How a TACH file is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Compression {
    /// One zstd stream, level 5
    Zstd,
    /// No compression
    None,
}
