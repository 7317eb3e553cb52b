//! What may be typed. Each flag is described here and nowhere else: `--help` is made from this file.
//!
//! Syntax only: a value in its range, flags that exclude each other. What they mean together is for [`super::plan`].

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
/// Most samples per second: at 10 kHz one sample of 10 µs is a tenth of the program's time.
pub const MAX_RATE_HZ: u32 = 10_000;
const MIN_INTERVAL: Duration = Duration::from_micros(100);
const MAX_INTERVAL: Duration = Duration::from_secs(1);
/// Longest `--duration`: far beyond any use, and safe to add to a clock.
const MAX_DURATION: Duration = Duration::from_secs(366 * 24 * 3600);

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
On SIGINT (Ctrl-C) or SIGTERM the file is finished; a second Ctrl-C aborts.";

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
    #[arg(short, long = "pid", value_name = "PID", value_parser = parse_pid, help_heading = "What to profile")]
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
    #[arg(short, long, value_name = "TIME", value_parser = parse_duration, help_heading = "How")]
    pub duration: Option<Duration>,

    /// Samples per second of CPU time of each thread, 1 to 10000 [default: 99]
    #[arg(short = 'F', long, value_name = "HZ", value_parser = parse_frequency, help_heading = "How")]
    pub frequency: Option<u32>,

    /// The same the other way round: CPU time between samples, 100us to 1s, e.g. 10ms
    #[arg(short, long, value_name = "TIME", value_parser = parse_interval, conflicts_with = "frequency", help_heading = "How")]
    pub interval: Option<Duration>,

    /// Only samples whose thread holds the GIL
    #[arg(long, help_heading = "How")]
    pub gil: bool,

    /// The running opcode of each frame too, for interpreters from 3.15 on
    #[arg(long, help_heading = "How")]
    pub opcodes: bool,

    /// Python frames only: the default, and all that this version records
    #[arg(long, help_heading = "How")]
    pub no_native: bool,

    /// File to write, `-` for standard output; by default `tachyon-<UTC date-time>.tach`
    #[arg(short, long, value_name = "PATH", help_heading = "Output")]
    pub output: Option<PathBuf>,

    /// Format: tach, collapsed, gperftools, pprof, speedscope, flamegraph, firefox or jsonl [default: by the extension of PATH, else tach]
    #[arg(long, value_name = "FORMAT", value_parser = format::parse_name, help_heading = "Output")]
    pub format: Option<Format>,

    /// Replace existing files
    #[arg(long, help_heading = "Output")]
    pub force: bool,

    /// Keep threads apart in formats that join them (gperftools, pprof, flamegraph); the others always do
    #[arg(long, help_heading = "Output")]
    pub threads: bool,

    /// Write the account of the recording as JSON: samples, losses, cost
    #[arg(long, value_name = "PATH", help_heading = "Output")]
    pub report: Option<PathBuf>,

    /// Compression of TACH files
    #[arg(long, value_enum, default_value_t = Compression::Zstd, help_heading = "Output")]
    pub compression: Compression,

    /// Layout of TACH files: `early` is for readers of CPython 3.15.0a4 to b3
    #[arg(long, value_enum, default_value_t = TachLayout::Released, help_heading = "Output")]
    pub tach_layout: TachLayout,

    /// Bring TACH files to the disk each second (fdatasync), so that a power cut loses no more
    #[arg(long, help_heading = "Output")]
    pub sync: bool,
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

    /// Format: tach, collapsed, gperftools, pprof, speedscope, flamegraph, firefox or jsonl [default: by the extension of OUT]
    #[arg(long, value_name = "FORMAT", value_parser = format::parse_name)]
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

    /// Its journal [default: BROKEN.journal, else BROKEN.part.journal]
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
    #[arg(short, long, value_name = "PID", value_parser = parse_pid)]
    pub pid: Pid,

    /// As JSON (docs/dump.md)
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `doctor`.
#[derive(Args, Debug)]
pub struct DoctorArgs {
    /// As JSON
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
const NOT_YET: [(&str, &str); 5] = [
    ("--native", "record native frames"),
    ("--kernel", "record kernel frames"),
    ("--split", "write one file for each process"),
    ("top", "show a live view"),
    ("help", "explain single words: --help does"),
];

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

fn parse_pid(text: &str) -> Result<Pid, String> {
    match text.parse::<i32>() {
        Ok(pid @ 1..) => Ok(Pid(pid.unsigned_abs())),
        _ => Err("a pid is a number from 1, as `ps` shows it".to_owned()),
    }
}

fn parse_time(text: &str, example: &str) -> Result<Duration, String> {
    if let Ok(number) = text.trim().parse::<f64>() {
        return Err(if number < 0.0 {
            format!("a time is positive, e.g. {example}")
        } else {
            format!("it has no unit, write e.g. {example}")
        });
    }
    humantime::parse_duration(text).map_err(|error| format!("{error}, write e.g. {example}"))
}

fn parse_duration(text: &str) -> Result<Duration, String> {
    if text.trim() == "0" {
        return Err("must be longer than 0, leave it out to record until Ctrl-C".to_owned());
    }
    match parse_time(text, "30s, 500ms or 5m")? {
        Duration::ZERO => Err("must be longer than 0, leave it out to record until Ctrl-C".to_owned()),
        duration if duration > MAX_DURATION => {
            Err("longer than a year, leave it out to record until Ctrl-C".to_owned())
        }
        duration => Ok(duration),
    }
}

fn parse_frequency(text: &str) -> Result<u32, String> {
    match text.parse::<u32>() {
        Ok(rate @ 1..=MAX_RATE_HZ) => Ok(rate),
        Ok(0) => Err("must be 1 to 10000 Hz: with 0 there are no samples".to_owned()),
        _ if text.bytes().all(|byte| byte.is_ascii_digit()) && !text.is_empty() => {
            Err("must be 1 to 10000 Hz: above, sampling would take more than a tenth of the program's time".to_owned())
        }
        _ => Err("must be a whole number from 1 to 10000, in Hz; for fractions use --interval".to_owned()),
    }
}

fn parse_interval(text: &str) -> Result<Duration, String> {
    let interval = parse_time(text, "10ms or 500us")?;
    if interval < MIN_INTERVAL {
        Err("must be 100us to 1s: below, sampling would take more than a tenth of the program's time".to_owned())
    } else if interval > MAX_INTERVAL {
        Err("must be 100us to 1s: rarer samples say nothing".to_owned())
    } else {
        Ok(interval)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &[&str]) -> Vec<OsString> {
        std::iter::once("tachyon-bpf").chain(line.iter().copied()).map(OsString::from).collect()
    }

    fn record(line: &[&str]) -> RecordArgs {
        match parse(words(line)) {
            Ok(Verb::Record(args)) => *args,
            other => panic!("{line:?}: {other:?}"),
        }
    }

    fn refused(line: &[&str]) -> (String, String) {
        match parse(words(line)) {
            Err(NoVerb::Usage(failure)) => {
                assert_eq!(failure.status(), super::super::failure::STATUS_USAGE);
                (failure.to_string(), failure.hint().unwrap_or_default().to_owned())
            }
            other => panic!("{line:?}: {other:?}"),
        }
    }

    #[test]
    fn definition_is_consistent() {
        CommandLine::command().debug_assert();
    }

    #[test]
    fn manual_and_completions_know_all_flags() {
        let mut man = Vec::new();
        write_man(&mut man).unwrap();
        let man = String::from_utf8(man).unwrap().replace("\\-", "-");
        let mut bash = Vec::new();
        write_completions(clap_complete::Shell::Bash, &mut bash);
        let bash = String::from_utf8(bash).unwrap();
        let command = CommandLine::command();
        let verbs = command.get_subcommands();
        for flag in verbs.flat_map(clap::Command::get_arguments).filter_map(clap::Arg::get_long) {
            assert!(man.contains(&format!("--{flag}")), "the manual lacks --{flag}");
            assert!(bash.contains(&format!("--{flag}")), "the completions lack --{flag}");
        }
        assert!(man.contains(".SH RECOVER") && man.contains("Exit status"));
    }

    #[test]
    fn record_is_the_default_verb() {
        for line in [&["-p", "1", "-p", "2", "-d", "3s"][..], &["record", "--pid=1", "-p2", "--duration", "3s"]] {
            let args = record(line);
            assert_eq!(args.pids, [Pid(1), Pid(2)]);
            assert_eq!(args.duration, Some(Duration::from_secs(3)));
        }
        assert!(record(&["--all-python"]).all_python);
        assert!(record(&["-p", "1", "--no-native"]).no_native);
    }

    #[test]
    fn what_follows_the_dashes_is_the_command() {
        assert_eq!(record(&["--", "python", "-c", "pass", "--", "-p"]).command, ["python", "-c", "pass", "--", "-p"]);
        assert_eq!(record(&["-d", "3s", "--", "info"]).command, ["info"]);
        assert_eq!(record(&["record", "--as-root", "--", "export", "-o"]).command, ["export", "-o"]);
    }

    #[test]
    fn verbs() {
        assert!(matches!(parse(words(&["doctor", "--json"])), Ok(Verb::Doctor(DoctorArgs { json: true }))));
        assert!(matches!(parse(words(&["info", "x.tach"])), Ok(Verb::Info(_))));
        let dump = parse(words(&["dump", "-p", "7", "--json"]));
        assert!(matches!(dump, Ok(Verb::Dump(DumpArgs { pid: Pid(7), json: true }))));
        let Ok(Verb::Export(args)) = parse(words(&["export", "x.tach", "-o", "-", "--format", "collapsed"])) else {
            panic!("export");
        };
        assert_eq!((args.output, args.format), ("-".into(), Some(Format::Collapsed)));
        for help in [&["--help"][..], &["-h"], &["record", "--help"], &["export", "-h"], &["--version"]] {
            assert!(matches!(parse(words(help)), Err(NoVerb::Shown(_))), "{help:?}");
        }
    }

    #[test]
    fn values_out_of_range_name_the_mend() {
        for (line, message) in [
            (&["-p", "0"][..], "invalid value '0' for '--pid <PID>': a pid is a number from 1, as `ps` shows it"),
            (
                &["-d", "0s", "-p", "1"],
                "invalid value '0s' for '--duration <TIME>': must be longer than 0, leave it out to record until Ctrl-C",
            ),
            (
                &["-d", "0", "-p", "1"],
                "invalid value '0' for '--duration <TIME>': must be longer than 0, leave it out to record until Ctrl-C",
            ),
            (
                &["-d", "30", "-p", "1"],
                "invalid value '30' for '--duration <TIME>': it has no unit, write e.g. 30s, 500ms or 5m",
            ),
            (
                &["-d=-3s", "-p", "1"],
                "invalid value '-3s' for '--duration <TIME>': expected number at 0, write e.g. 30s, 500ms or 5m",
            ),
            (
                &["-d", "1000y", "-p", "1"],
                "invalid value '1000y' for '--duration <TIME>': longer than a year, leave it out to record until Ctrl-C",
            ),
            (
                &["-F", "0", "-p", "1"],
                "invalid value '0' for '--frequency <HZ>': must be 1 to 10000 Hz: with 0 there are no samples",
            ),
            (
                &["-F", "10001", "-p", "1"],
                "invalid value '10001' for '--frequency <HZ>': must be 1 to 10000 Hz: above, sampling would take more than a tenth of the program's time",
            ),
            (
                &["-F", "99999999999", "-p", "1"],
                "invalid value '99999999999' for '--frequency <HZ>': must be 1 to 10000 Hz: above, sampling would take more than a tenth of the program's time",
            ),
            (
                &["-i", "10us", "-p", "1"],
                "invalid value '10us' for '--interval <TIME>': must be 100us to 1s: below, sampling would take more than a tenth of the program's time",
            ),
            (
                &["--format", "svg", "-p", "1"],
                "invalid value 'svg' for '--format <FORMAT>': one of tach, collapsed, gperftools, pprof, speedscope, flamegraph, firefox, jsonl",
            ),
            (
                &["--compression", "lz4", "-p", "1"],
                "invalid value 'lz4' for '--compression <COMPRESSION>' [possible values: zstd, none]",
            ),
            (&["-p", "1", "--all-python"], "the argument '--pid <PID>' cannot be used with '--all-python'"),
            (&["-p", "1", "--", "x"], "the argument '--pid <PID>' cannot be used with '[CMD]...'"),
            (&["-F", "9", "-i", "10ms"], "the argument '--frequency <HZ>' cannot be used with '--interval <TIME>'"),
            (&["dump"], "the following required arguments were not provided: --pid <PID>"),
            (&["export", "x.tach"], "the following required arguments were not provided: --output <OUT>"),
        ] {
            assert_eq!(refused(line).0, message, "{line:?}");
        }
    }

    #[test]
    fn what_is_not_there_yet_is_said_so() {
        for (line, message) in [
            (&["-p", "1", "--native"][..], "--native: this version cannot record native frames"),
            (&["-p", "1", "--split", "process"], "--split: this version cannot write one file for each process"),
            (&["top", "-p", "1"], "top: this version cannot show a live view"),
        ] {
            assert_eq!(refused(line).0, message, "{line:?}");
        }
        let (message, hint) = refused(&["python", "app.py"]);
        assert_eq!(message, "unexpected word 'python'");
        assert!(hint.contains("tachyon-bpf -- python app.py"));
        assert_eq!(refused(&["-p", "1", "--durationn", "3s"]).1, "a similar argument exists: '--duration'");
    }
}
