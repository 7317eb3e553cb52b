//! Arguments of the verbs that read files.

use super::record::MergeProcesses;
use super::values;
use crate::analysis::By;
use crate::cli::{diff, format, report};
use crate::sinks::Format;
use crate::types::Pid;
use clap::{Args, ValueEnum};
use regex::Regex;
use std::path::PathBuf;
use std::time::Duration;

/// Arguments of `export`.
#[derive(Args, Debug)]
#[command(after_help = "Example: tachyon-bpf export app.tach -o app.collapsed")]
pub struct ExportArgs {
    /// TACH files or directories of them, read as one profile
    #[arg(value_name = "IN", required = true)]
    pub inputs: Vec<PathBuf>,

    /// File to write, `-` for standard output
    #[arg(short, long, value_name = "OUT")]
    pub output: PathBuf,

    /// Format: tach, collapsed, gperftools, pprof, speedscope, report, flamegraph, firefox or jsonl [default: by the extension of OUT, collapsed for `-`]
    #[arg(long, value_name = "FORMAT", value_parser = format::parse_name, long_help = format::long_help("OUT, collapsed for `-`"))]
    pub format: Option<Format>,

    /// Keep threads separate in formats that merge them (gperftools, pprof, flamegraph); the others always do
    #[arg(long)]
    pub threads: bool,

    /// Embed the source text of functions with samples in the report (-o x.html); files are read from this machine
    #[arg(long)]
    pub source: bool,

    #[command(flatten)]
    pub merge: MergeProcesses,

    /// Keep Python frames only: native code is charged to its Python caller
    #[arg(long)]
    pub no_native: bool,

    /// Only this process; may be repeated
    #[arg(short, long = "pid", value_name = "PID", value_parser = values::pid)]
    pub pids: Vec<Pid>,

    /// Only samples from this time on, counted from the start, e.g. 10s
    #[arg(long, value_name = "TIME", value_parser = values::moment)]
    pub from: Option<Duration>,

    /// Only samples before this time, counted from the start
    #[arg(long, value_name = "TIME", value_parser = values::moment)]
    pub to: Option<Duration>,

    /// Only samples taken at this event: one of `record -e`, or task-wait, for what asyncio tasks awaited
    #[arg(long, value_name = "NAME")]
    pub event: Option<String>,

    /// Overwrite an existing file
    #[arg(long)]
    pub force: bool,

    /// Continue even if a file takes more time or memory than its size justifies
    #[arg(long)]
    pub force_large: bool,
}

/// Arguments of `merge`.
#[derive(Args, Debug)]
#[command(after_help = "Example: tachyon-bpf merge segments/ -o whole.tach")]
pub struct MergeArgs {
    /// TACH files or directories of them
    #[arg(value_name = "IN", required = true)]
    pub inputs: Vec<PathBuf>,

    /// TACH file to write
    #[arg(short, long, value_name = "OUT")]
    pub output: PathBuf,

    /// Overwrite an existing file
    #[arg(long)]
    pub force: bool,

    /// Continue even if a file takes more time or memory than its size justifies
    #[arg(long)]
    pub force_large: bool,
}

/// Arguments of `recover`.
#[derive(Args, Debug)]
#[command(after_help = "Example: tachyon-bpf recover app.tach.part -o app.tach")]
pub struct RecoverArgs {
    /// File of the interrupted recording, usually PATH.part
    #[arg(value_name = "BROKEN")]
    pub input: PathBuf,

    /// File to write
    #[arg(short, long, value_name = "GOOD")]
    pub output: PathBuf,

    /// Its journal, with its tail next to it [default: BROKEN.part.journal if there is one, else BROKEN.journal]
    #[arg(long, value_name = "PATH")]
    pub journal: Option<PathBuf>,

    /// Overwrite an existing file
    #[arg(long)]
    pub force: bool,

    /// Continue even if the file takes more time or memory than its size justifies
    #[arg(long)]
    pub force_large: bool,
}

/// Arguments of `symbolize`.
#[derive(Args, Debug)]
#[command(after_help = "\
A function in a file without symbols is named by its start address: etree.so!0x4a3c0. This command finds the file's debug file by \
the build id in the recording, and writes the names into the profile.

Example: tachyon-bpf symbolize app.tach --debug-dir /mnt/debug/usr/lib/debug
         debuginfod-find debuginfo BUILDID; tachyon-bpf symbolize app.tach")]
pub struct SymbolizeArgs {
    /// TACH file to read
    #[arg(value_name = "FILE")]
    pub file: PathBuf,

    /// Where to look for debug files: DIR/.build-id/ab/cdef.debug, DIR/BUILDID/debuginfo (debuginfod's cache) or DIR/OBJECT.debug; may be repeated [default: /usr/lib/debug and debuginfod's cache]
    #[arg(long = "debug-dir", value_name = "DIR")]
    pub debug_dirs: Vec<PathBuf>,

    /// File to write [default: overwrite FILE]
    #[arg(short, long, value_name = "OUT")]
    pub output: Option<PathBuf>,

    /// Overwrite an existing OUT
    #[arg(long)]
    pub force: bool,
}

/// Arguments of `info`.
#[derive(Args, Debug)]
pub struct InfoArgs {
    /// TACH files or directories of them, read as one profile
    #[arg(value_name = "FILE", required = true)]
    pub files: Vec<PathBuf>,

    /// Print JSON
    #[arg(long)]
    pub json: bool,

    /// Continue even if a file takes more time or memory than its size justifies
    #[arg(long)]
    pub force_large: bool,
}

/// What has a row in a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum GroupBy {
    /// Functions (the default)
    Function,
    /// Lines of functions
    Line,
    /// Distributions, the standard library, native objects, the program's own files
    Module,
    /// Processes
    Process,
    /// Threads
    Thread,
    /// Asyncio tasks, of recordings with --async
    Task,
}

/// Arguments of `report`.
#[derive(Args, Debug)]
#[command(after_help = "Examples:
  tachyon-bpf report app.tach                        which functions take the time?
  tachyon-bpf report app.tach --by line --focus parse
  tachyon-bpf report app.tach --callers '^Worker.run$'
Self: time in the function and in the native code it called. Total: plus the Python functions it called.")]
pub struct ReportArgs {
    /// TACH files or directories of them, read as one profile
    #[arg(value_name = "FILE", required = true)]
    pub files: Vec<PathBuf>,

    /// Print JSON (docs/reading.md)
    #[arg(long)]
    pub json: bool,

    /// One row per what [default: function]
    #[arg(long, value_enum, value_name = "BY")]
    pub by: Option<GroupBy>,

    /// Keep only samples with a frame whose function or file matches this regular expression
    #[arg(long, value_name = "RE", value_parser = report::pattern)]
    pub focus: Option<Regex>,

    /// Drop samples with a frame that matches
    #[arg(long, value_name = "RE", value_parser = report::pattern)]
    pub ignore: Option<Regex>,

    /// Keep only samples taken at this event: one of `record -e`, or task-wait, for what asyncio tasks awaited (`record --wall --async`)
    #[arg(long, value_name = "NAME")]
    pub event: Option<String>,

    /// Show who calls the matching functions
    #[arg(long, value_name = "RE", value_parser = report::pattern)]
    pub callers: Option<Regex>,

    /// Show what the matching functions call
    #[arg(long, value_name = "RE", value_parser = report::pattern)]
    pub callees: Option<Regex>,

    /// Number of rows [default: as many as fit the terminal; all with --json]
    #[arg(long, value_name = "N", value_parser = report::rows)]
    pub lines: Option<usize>,

    /// Show native functions too, below the Python functions that called them
    #[arg(long)]
    pub native: bool,

    /// File to write: Markdown (.md), text (.txt) or JSON (.json)
    #[arg(short, long, value_name = "PATH")]
    pub output: Option<PathBuf>,

    /// Overwrite an existing file
    #[arg(long)]
    pub force: bool,

    /// Continue even if a file takes more time or memory than its size justifies
    #[arg(long)]
    pub force_large: bool,
}

impl ReportArgs {
    /// What has a row.
    #[must_use]
    pub fn by(&self) -> By {
        match self.by {
            None | Some(GroupBy::Function) => By::Function,
            Some(GroupBy::Line) => By::Line,
            Some(GroupBy::Module) => By::Module,
            Some(GroupBy::Process) => By::Process,
            Some(GroupBy::Thread) => By::Thread,
            Some(GroupBy::Task) => By::Task,
        }
    }
}

/// What has a row in a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DiffBy {
    /// Functions
    Function,
    /// Lines of functions
    Line,
    /// Distributions, the standard library, native objects, the program's own files
    Module,
}

/// Arguments of `diff`.
#[derive(Args, Debug)]
#[command(
    override_usage = "tachyon-bpf diff A... -- B... [OPTIONS]\n       tachyon-bpf diff A B [OPTIONS]",
    after_help = "Examples:
  tachyon-bpf diff old.tach new.tach
  tachyon-bpf diff --fail-over 5% old/*.tach -- new/*.tach
Several files per side are replicates: the more there are, the smaller the changes that can be detected.
Exit status: 3 if a significant increase exceeds --fail-over."
)]
pub struct DiffArgs {
    /// TACH files from before the change
    #[arg(value_name = "A", required = true)]
    pub before: Vec<PathBuf>,

    /// TACH files from after the change; may also follow `--`
    #[arg(long, value_name = "B", num_args = 1..)]
    pub after: Vec<PathBuf>,

    /// Print JSON (docs/reading.md)
    #[arg(long)]
    pub json: bool,

    /// One row per what
    #[arg(long, value_enum, value_name = "BY", default_value_t = DiffBy::Function)]
    pub by: DiffBy,

    /// Exit with status 3 if a significant increase exceeds this, relative to before, e.g. 5%
    #[arg(long, value_name = "PERCENT", value_parser = diff::limit)]
    pub fail_over: Option<f64>,

    /// Compare CPU seconds per unit of work instead of shares: units done by each side, or N,M for before and after
    #[arg(long, value_name = "N", value_parser = diff::units)]
    pub per_unit: Option<(f64, f64)>,

    /// File to write: the page (.html), Markdown (.md), text (.txt) or JSON (.json)
    #[arg(short, long, value_name = "PATH")]
    pub output: Option<PathBuf>,

    /// Overwrite an existing file
    #[arg(long)]
    pub force: bool,

    /// Continue even if a file takes more time or memory than its size justifies
    #[arg(long)]
    pub force_large: bool,
}
