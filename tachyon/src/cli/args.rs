//! What may be typed. Each flag is described here and nowhere else: `--help` is made from this file.
//!
//! Syntax only: a value in its range, flags that exclude each other. What they mean together is for [`super::plan`].

mod values;

use super::failure::Failure;
use super::format;
use crate::discover::filter;
use crate::sinks::Format;
use crate::tach::Layout;
use crate::types::Pid;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Args, CommandFactory as _, Parser, Subcommand, ValueEnum};
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

/// Samples per second when nothing is asked for: not a divisor of the usual timer rates, so that a program that works
/// in step with one is not always met at the same place.
pub const DEFAULT_RATE_HZ: u32 = 99;

const EXAMPLES: &str = "\
Examples:
  sudo tachyon-bpf -p 4242 -d 30s                  what is this process doing?
  sudo tachyon-bpf --all-python -d 1m              the same of the whole machine
  sudo tachyon-bpf -o app.tach -- python app.py    a program from its start, with its children
  sudo tachyon-bpf -p 4242 -d 10s -o out.collapsed one line per stack, for any flame graph tool
  tachyon-bpf export app.tach -o app.collapsed     convert without profiling again
  sudo tachyon-bpf dump -p 4242                    every thread's stack once, now
  tachyon-bpf doctor                               can this machine profile?

Exit status: 0 a profile was written, 1 could not profile, 2 usage; with `-- CMD` the command's own.
On SIGINT (Ctrl-C), SIGTERM or SIGHUP the file is finished; a second Ctrl-C aborts.";

/// Profile running CPython programs with eBPF: no import, no restart, no pause.
#[derive(Debug, Parser)]
#[command(
    name = "tachyon-bpf",
    version,
    args_conflicts_with_subcommands = true,
    disable_help_subcommand = true,
    after_long_help = EXAMPLES,
    max_term_width = 110,
    override_usage = "tachyon-bpf [record] (-p PID... | --all-python | -- CMD [ARG...]) [OPTIONS]\n       \
        tachyon-bpf export IN -o OUT\n       tachyon-bpf recover BROKEN -o GOOD\n       tachyon-bpf info FILE\n       tachyon-bpf dump -p PID\n       tachyon-bpf doctor"
)]
struct CommandLine {
    #[command(subcommand)]
    verb: Option<Verb>,
    #[command(flatten)]
    record: RecordArgs,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Record a profile (the default)
    #[command(after_long_help = EXAMPLES, override_usage = "tachyon-bpf [record] (-p PID... | --all-python | -- CMD [ARG...]) [OPTIONS]")]
    Record(Box<RecordArgs>),
    /// Convert a TACH file, also one that CPython 3.15 wrote
    Export(ExportArgs),
    /// Make a TACH file readable whose recording was cut
    Recover(RecoverArgs),
    /// Describe a TACH file: header, counts, record statistics, loss
    Info(InfoArgs),
    /// Show every thread's stack once, now, sleeping threads too; needs no BPF
    Dump(DumpArgs),
    /// Tell whether this machine can profile, and the mend where it cannot
    Doctor(DoctorArgs),
    /// Print the manual page, in roff: tachyon-bpf man | man -l -
    Man,
    /// Print the completions of a shell
    Completions(CompletionsArgs),
}

/// Arguments of `record`.
#[derive(Args, Debug)]
pub struct RecordArgs {
    /// Process to profile; may be given several times
    #[arg(short, long = "pid", value_name = "PID", value_parser = values::pid, help_heading = "What to profile")]
    pub pids: Vec<Pid>,

    /// Every CPython process of the machine, also those that start later
    #[arg(long, conflicts_with = "pids", help_heading = "What to profile")]
    pub all_python: bool,

    /// Also the children of -p that start from now on (always so with --all-python and -- CMD)
    #[arg(long, help_heading = "What to profile")]
    pub subprocesses: bool,

    /// Only processes in this control group or below, e.g. /system.slice/app.service
    #[arg(long = "cgroup", value_name = "PATH", value_parser = filter::cgroup_path, help_heading = "What to profile")]
    pub cgroups: Vec<String>,

    /// Only processes of this container: its id, or the first 8 digits of it at least
    #[arg(long = "container", value_name = "ID", value_parser = filter::container_id, help_heading = "What to profile")]
    pub containers: Vec<String>,

    /// Only processes whose kernel name matches this pattern, e.g. "gunicorn*"
    #[arg(long = "comm", value_name = "GLOB", value_parser = filter::comm_pattern, help_heading = "What to profile")]
    pub comms: Vec<glob::Pattern>,

    /// Only processes of this user, by number or name
    #[arg(long = "uid", value_name = "USER", value_parser = filter::user_id, help_heading = "What to profile")]
    pub uids: Vec<u32>,

    /// Run -- CMD as root under sudo; without it as the user who called sudo
    #[arg(long, help_heading = "What to profile")]
    pub as_root: bool,

    /// Program to run and profile from its start, with its children
    #[arg(last = true, value_name = "CMD", conflicts_with_all = ["pids", "all_python"], help_heading = "What to profile")]
    pub command: Vec<OsString>,

    /// Stop after this time, e.g. 30s, 500ms, "1m 30s"; without it at Ctrl-C or when all processes have ended
    #[arg(short, long, value_name = "TIME", value_parser = values::duration, help_heading = "How")]
    pub duration: Option<Duration>,

    /// Samples per second of CPU time of each thread, 1 to 10000 [default: 99]
    #[arg(short = 'F', long, value_name = "HZ", value_parser = values::frequency, help_heading = "How")]
    pub frequency: Option<u32>,

    /// The same the other way round: CPU time between samples, 100us to 1s, e.g. 10ms
    #[arg(short, long, value_name = "TIME", value_parser = values::interval, conflicts_with = "frequency", help_heading = "How")]
    pub interval: Option<Duration>,

    /// Most the profiler may use, user side and BPF together, in percent of one core, e.g. 1 or 0.5%; where it uses
    /// more it samples less often, and says so
    #[arg(long, value_name = "PERCENT", value_parser = values::share, help_heading = "How")]
    pub max_cpu: Option<f64>,

    /// Most memory, the profiler's own and its BPF maps together, e.g. 128MiB or 1GiB, 32MiB at least; where it needs more
    /// it drops caches, then names, then ends, and says so
    #[arg(long, value_name = "SIZE", value_parser = values::memory, help_heading = "How")]
    pub max_memory: Option<u64>,

    /// Only samples whose thread holds the GIL
    #[arg(long, help_heading = "How")]
    pub gil: bool,

    /// The running opcode of each frame too, for interpreters from 3.15 on
    #[arg(long, help_heading = "How")]
    pub opcodes: bool,

    /// Native frames too, C, C++ and Rust code that Python calls and is called by: the default
    #[arg(long, overrides_with = "no_native", help_heading = "How")]
    pub native: bool,

    /// Python frames only
    #[arg(long, overrides_with = "native", help_heading = "How")]
    pub no_native: bool,

    /// Kernel frames too, of threads that were met in the kernel; names take CAP_SYSLOG
    #[arg(long, help_heading = "How")]
    pub kernel: bool,

    /// Keep the interpreter's own frames between Python frames, which say nothing that those do not
    #[arg(long, conflicts_with = "no_native", help_heading = "How")]
    pub interpreter_frames: bool,

    /// Memory for unwind tables of native code, e.g. 32MiB; the tables of files used longest ago go when it is full
    #[arg(long, value_name = "SIZE", value_parser = values::unwind_memory, default_value = "64MiB", conflicts_with = "no_native", help_heading = "How")]
    pub unwind_memory: u32,

    /// File to write, `-` for standard output; by default `tachyon-<UTC date-time>.tach`
    #[arg(short, long, value_name = "PATH", help_heading = "Output")]
    pub output: Option<PathBuf>,

    /// Format: tach, collapsed, gperftools, pprof, speedscope, flamegraph, firefox or jsonl [default: by the extension of PATH, else tach]
    #[arg(long, value_name = "FORMAT", value_parser = format::parse_name, long_help = format::long_help("PATH, else tach"), help_heading = "Output")]
    pub format: Option<Format>,

    /// Replace existing files
    #[arg(long, help_heading = "Output")]
    pub force: bool,

    /// Keep threads apart in formats that join them (gperftools, pprof, flamegraph); the others always do
    #[arg(long, help_heading = "Output")]
    pub threads: bool,

    /// One file for each process: PATH is then a directory, and --format alone tells the format
    #[arg(long, value_enum, value_name = "BY", help_heading = "Output")]
    pub split: Option<Split>,

    /// Write the account of the recording as JSON: samples, losses, cost
    #[arg(long, value_name = "PATH", help_heading = "Output")]
    pub report: Option<PathBuf>,

    /// Compression of TACH files
    #[arg(long, value_enum, default_value_t = Compression::Zstd, help_heading = "Output")]
    pub compression: Compression,

    /// Layout of TACH files: `early` is for readers of CPython 3.15.0a4 to b3
    #[arg(long, value_enum, default_value_t = TachLayout::Released, help_heading = "Output")]
    pub tach_layout: TachLayout,

    /// Bring TACH files to the disk at least each second (fdatasync), so that a power cut loses no more
    #[arg(long, help_heading = "Output")]
    pub sync: bool,
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
    /// Not at all
    None,
}

/// Arguments of `export`.
#[derive(Args, Debug)]
#[command(after_help = "Example: tachyon-bpf export app.tach -o app.collapsed")]
pub struct ExportArgs {
    /// TACH file to read
    #[arg(value_name = "IN")]
    pub input: PathBuf,

    /// File to write, `-` for standard output
    #[arg(short, long, value_name = "OUT")]
    pub output: PathBuf,

    /// Format: tach, collapsed, gperftools, pprof, speedscope, flamegraph, firefox or jsonl [default: by the extension of OUT, collapsed for `-`]
    #[arg(long, value_name = "FORMAT", value_parser = format::parse_name, long_help = format::long_help("OUT, collapsed for `-`"))]
    pub format: Option<Format>,

    /// Keep threads apart in formats that join them (gperftools, pprof, flamegraph); the others always do
    #[arg(long)]
    pub threads: bool,

    /// Replace an existing file
    #[arg(long)]
    pub force: bool,
}

/// Arguments of `recover`.
#[derive(Args, Debug)]
#[command(after_help = "Example: tachyon-bpf recover app.tach.part -o app.tach")]
pub struct RecoverArgs {
    /// File of the recording that was cut, usually PATH.part
    #[arg(value_name = "BROKEN")]
    pub input: PathBuf,

    /// File to write
    #[arg(short, long, value_name = "GOOD")]
    pub output: PathBuf,

    /// Its journal, beside which its tail lies [default: BROKEN.journal, else BROKEN.part.journal]
    #[arg(long, value_name = "PATH")]
    pub journal: Option<PathBuf>,

    /// Replace an existing file
    #[arg(long)]
    pub force: bool,
}

/// Arguments of `info`.
#[derive(Args, Debug)]
pub struct InfoArgs {
    /// TACH file to read
    #[arg(value_name = "FILE")]
    pub file: PathBuf,

    /// As JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `dump`.
#[derive(Args, Debug)]
#[command(
    after_help = "The process is not stopped. Its own user may read it, unless kernel.yama.ptrace_scope forbids; \
    else it takes root or CAP_SYS_PTRACE."
)]
pub struct DumpArgs {
    /// Process to look at
    #[arg(short, long, value_name = "PID", value_parser = values::pid)]
    pub pid: Pid,

    /// Native frames, too, of threads that sleep: C, C++ and Rust code that Python calls and is called by
    #[arg(long)]
    pub native: bool,

    /// Keep the interpreter's own frames between Python frames
    #[arg(long, requires = "native")]
    pub interpreter_frames: bool,

    /// As JSON (docs/dump.md)
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `doctor`.
#[derive(Args, Debug)]
#[command(after_help = "Exit status: 0 this machine can profile, with -p these processes too; else 1.")]
pub struct DoctorArgs {
    /// Look at this Python process only; may be given several times
    #[arg(short, long = "pid", value_name = "PID", value_parser = values::pid)]
    pub pids: Vec<Pid>,

    /// A line for each Python process, not only for each build
    #[arg(short, long)]
    pub verbose: bool,

    /// As JSON, with every Python process
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `completions`.
#[derive(Args, Debug)]
#[command(after_help = "Example: tachyon-bpf completions bash > /etc/bash_completion.d/tachyon-bpf")]
pub struct CompletionsArgs {
    /// Shell
    #[arg(value_enum, value_name = "SHELL")]
    pub shell: clap_complete::Shell,
}

/// The manual page: the page of the program, then those of its verbs as sections.
///
/// # Errors
/// When `out` cannot be written.
pub fn write_man(out: &mut dyn std::io::Write) -> std::io::Result<()> {
    let mut command = CommandLine::command();
    command.build();
    let man =
        clap_mangen::Man::new(command.clone()).date("").source(concat!("tachyon-bpf ", env!("CARGO_PKG_VERSION")));
    man.render_title(out)?;
    man.render_name_section(out)?;
    man.render_synopsis_section(out)?;
    man.render_description_section(out)?;
    man.render_options_section(out)?;
    for verb in command.get_subcommands() {
        // Recording is what the options above are of.
        if verb.get_name() != "record" {
            let verb_man = clap_mangen::Man::new(verb.clone());
            writeln!(out, ".SH {}", verb.get_name().to_uppercase())?;
            writeln!(out, "{}", verb.get_about().map(ToString::to_string).unwrap_or_default())?;
            let mut options = Vec::new();
            verb_man.render_options_section(&mut options)?;
            out.write_all(String::from_utf8_lossy(&options).replace(".SH OPTIONS", ".SS Options").as_bytes())?;
        }
    }
    man.render_extra_section(out)?;
    out.flush()
}

/// The completions of a shell.
pub fn write_completions(shell: clap_complete::Shell, out: &mut dyn std::io::Write) {
    clap_complete::generate(shell, &mut CommandLine::command(), "tachyon-bpf", out);
}

/// Why there is nothing to do.
#[derive(Debug)]
pub enum NoVerb {
    /// Help or version was asked for; the error prints itself to standard output.
    Shown(clap::Error),
    /// The command line makes no sense.
    Usage(Failure),
}

/// Parses a command line, whose first word is the program's own name.
///
/// # Errors
/// When help was asked for, or the command line makes no sense.
pub fn parse(words: impl IntoIterator<Item = OsString>) -> Result<Verb, NoVerb> {
    match CommandLine::try_parse_from(words) {
        Ok(line) => Ok(line.verb.unwrap_or_else(|| Verb::Record(Box::new(line.record)))),
        Err(error) if !error.use_stderr() => Err(NoVerb::Shown(error)),
        Err(error) => Err(NoVerb::Usage(usage(&error))),
    }
}

/// Of the documented command line, what this version cannot do yet.
const NOT_YET: [(&str, &str); 2] = [("top", "show a live view"), ("help", "explain single words: --help does")];

/// clap's several lines as one, with the mend.
fn usage(error: &clap::Error) -> Failure {
    let word =
        [ContextKind::InvalidArg, ContextKind::InvalidSubcommand].into_iter().find_map(|kind| match error.get(kind) {
            Some(ContextValue::String(word)) => Some(word.as_str()),
            _ => None,
        });
    if let (ErrorKind::UnknownArgument | ErrorKind::InvalidSubcommand, Some(word)) = (error.kind(), word) {
        if let Some((_, what)) = NOT_YET.iter().find(|(known, _)| *known == word) {
            return Failure::usage(format!("{word}: this version cannot {what}"))
                .with_hint("tachyon-bpf --help lists what it can");
        }
        if !word.starts_with('-') {
            return Failure::usage(format!("unexpected word '{word}'"))
                .with_hint("a program to run and profile stands after `--`: tachyon-bpf -- python app.py");
        }
    }
    let text = error.render().to_string();
    let mut paragraphs = text
        .split("\n\n")
        .map(|paragraph| paragraph.lines().map(str::trim).collect::<Vec<_>>().join(" "))
        .map(|paragraph| paragraph.trim().to_owned());
    let message = paragraphs.next().unwrap_or_default();
    let message = message.strip_prefix("error: ").unwrap_or(&message).to_owned();
    // The first of clap's tips; the others say how to pass the word as a value, which nobody wants.
    let tip = paragraphs.find_map(|paragraph| {
        let tips = paragraph.strip_prefix("tip: ")?;
        Some(tips.split(" tip: ").next().unwrap_or(tips).to_owned()).filter(|tip| !tip.starts_with("to pass "))
    });
    Failure::usage(message).with_hint(tip.unwrap_or_else(|| "tachyon-bpf --help explains all options".to_owned()))
}

#[cfg(test)]
mod tests;
