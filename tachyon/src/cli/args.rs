//! The command line's syntax. Each flag is described here and nowhere else: `--help` is made from this module.
//!
//! Syntax only: a value in its range, flags that exclude each other. What they mean together is for [`super::plan`].

mod files;
mod manual;
mod record;
mod shared;
mod top;
pub(in crate::cli) mod values;

pub use self::files::{
    DiffArgs, DiffBy, ExportArgs, GroupBy, InfoArgs, MergeArgs, RecoverArgs, ReportArgs, SymbolizeArgs,
};
pub use self::manual::{write_completions, write_man};
pub use self::record::{Compression, MergeProcesses, RecordArgs, Split, TachLayout};
pub use self::shared::{NativeFrames, SamplingArgs, TargetArgs};
pub use self::top::TopArgs;
use super::failure::Failure;
use super::{diff, habits};
use crate::types::Pid;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Args, CommandFactory as _, Parser, Subcommand};
use std::ffi::OsString;
use std::path::PathBuf;

/// Samples per second by default: not a divisor of the usual timer rates, so that a program that works in step with one
/// is not always met at the same place.
pub const DEFAULT_RATE_HZ: u32 = 99;

const EXAMPLES: &str = "\
Examples:
  sudo tachyon-bpf -p 4242 -d 30s                  what is this process doing?
  sudo tachyon-bpf --all-python -d 1m              what is the whole machine doing?
  sudo tachyon-bpf -o app.tach -- python app.py    run a program and profile it with its children
  sudo tachyon-bpf -p 4242 -d 10s -o out.html      a report for the browser
  sudo tachyon-bpf -p 4242 -e page-faults -d 30s   which lines make its memory grow?
  tachyon-bpf export app.tach -o app.html          the same without profiling again
  tachyon-bpf report app.tach                      which functions, lines and modules take the time?
  sudo tachyon-bpf top -p 4242                     watch it live
  sudo tachyon-bpf dump -p 4242                    every thread's stack right now
  tachyon-bpf doctor                               can this machine profile?

Exit status: 0 if a profile was written, 1 if not, 2 for a usage error; with `-- CMD`, the command's own.
SIGINT (Ctrl-C), SIGTERM and SIGHUP finish the file; a second Ctrl-C aborts.";

/// Profile running CPython programs with eBPF: no import, no restart, no pause
#[derive(Debug, Parser)]
#[command(
    name = "tachyon-bpf",
    version,
    args_conflicts_with_subcommands = true,
    disable_help_subcommand = true,
    after_long_help = EXAMPLES,
    max_term_width = 110,
    override_usage = "tachyon-bpf [record] (-p PID... | --all-python | -- CMD [ARG...]) [OPTIONS]\n       \
        tachyon-bpf export IN... -o OUT\n       tachyon-bpf merge IN... -o OUT\n       tachyon-bpf recover BROKEN -o GOOD\n       tachyon-bpf info FILE...\n       tachyon-bpf report FILE...\n       tachyon-bpf diff A... -- B...\n       tachyon-bpf top (-p PID... | --all-python | -- CMD [ARG...])\n       tachyon-bpf dump -p PID\n       tachyon-bpf doctor"
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
    /// Convert TACH files, including those written by CPython 3.15
    Export(ExportArgs),
    /// Merge several TACH files into one
    Merge(MergeArgs),
    /// Repair the TACH file of an interrupted recording
    Recover(RecoverArgs),
    /// Describe TACH files: header, counts, record statistics, loss
    Info(InfoArgs),
    /// Show where the time went: functions, lines, modules, processes, threads
    Report(Box<ReportArgs>),
    /// Compare profiles: what changed, beyond noise
    Diff(DiffArgs),
    /// Show live where the time goes
    Top(Box<TopArgs>),
    /// Record this host all the time, into a directory that others ship
    Agent(AgentArgs),
    /// Add names to native functions that a TACH file knows only by address
    Symbolize(SymbolizeArgs),
    /// Show every thread's stack right now, including sleeping threads; needs no BPF
    Dump(DumpArgs),
    /// Check whether this machine can profile, and say how to fix it if not
    Doctor(DoctorArgs),
    /// Print the manual page as roff: tachyon-bpf man | man -l -
    Man,
    /// Print shell completions
    Completions(CompletionsArgs),
}

/// Arguments of `agent`.
#[derive(Args, Debug)]
#[command(after_help = "\
The configuration is TOML: [record] frequency, native, max_cpu, max_memory, uid, cgroup, comm, container; [segments] length; \
[spool] path, keep_bytes, keep_age; [labels] environment, command_line; [[labels.rule]] match, keep, drop, rename, set. \
--check shows all keys with their values; docs/continuous.md explains them. The environment overrides the file \
(TACHYON_RECORD_FREQUENCY is record.frequency), and --set overrides the environment.

SIGHUP reads the configuration again; SIGTERM ends the last segment and the agent.")]
pub struct AgentArgs {
    /// Configuration [default: /etc/tachyon-bpf/agent.toml, if there is one]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Set a key, e.g. record.frequency=49; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub settings: Vec<String>,

    /// Check the configuration and the spool, show what they come to, and write nothing
    #[arg(long)]
    pub check: bool,
}

/// Arguments of `dump`.
#[derive(Args, Debug)]
#[command(
    after_help = "The process is not stopped. Its own user may read it unless kernel.yama.ptrace_scope forbids that; \
    otherwise this needs root or CAP_SYS_PTRACE.\n\n\
    Examples:\n  sudo tachyon-bpf dump -p 4242            every thread's stack\n  \
    sudo tachyon-bpf dump -p 4242 --async    where its asyncio tasks and greenlets wait"
)]
pub struct DumpArgs {
    /// Process to look at
    #[arg(short, long, value_name = "PID", value_parser = values::pid)]
    pub pid: Pid,

    /// Show native frames of sleeping threads too: C, C++ and Rust code that Python calls or that calls Python
    #[arg(long)]
    pub native: bool,

    /// Keep the interpreter's own frames between Python frames
    #[arg(long, requires = "native")]
    pub interpreter_frames: bool,

    /// Show the trees of asyncio tasks, where each awaits and who awaits it, and of greenlets
    #[arg(long = "async", conflicts_with = "native")]
    pub tasks: bool,

    /// Print JSON (docs/dump.md)
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `doctor`.
#[derive(Args, Debug)]
#[command(after_help = "Exit status: 0 if this machine can profile (and, with -p, these processes), otherwise 1.")]
pub struct DoctorArgs {
    /// Check only this Python process; may be repeated
    #[arg(short, long = "pid", value_name = "PID", value_parser = values::pid)]
    pub pids: Vec<Pid>,

    /// One line per Python process, not only per build
    #[arg(short, long)]
    pub verbose: bool,

    /// Print JSON, with every Python process
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
    let words: Vec<OsString> = words.into_iter().collect();
    match CommandLine::try_parse_from(diff::sides(words.iter().cloned())) {
        Ok(line) => {
            let mut verb = line.verb.unwrap_or_else(|| Verb::Record(Box::new(line.record)));
            match &mut verb {
                Verb::Record(args) => habits::with_interpreter(&mut args.targets.command),
                Verb::Top(args) => habits::with_interpreter(&mut args.targets.command),
                _ => {}
            }
            Ok(verb)
        }
        Err(error) if !error.use_stderr() => Err(NoVerb::Shown(error)),
        Err(error) => Err(NoVerb::Usage(usage(&error, words.get(1..).unwrap_or_default()))),
    }
}

/// Of the documented command line, what this version cannot do yet.
const NOT_YET: [(&str, &str); 1] = [("help", "explain single words: --help does")];

/// clap's several lines as one, with the remedy.
fn usage(error: &clap::Error, words: &[OsString]) -> Failure {
    let word =
        [ContextKind::InvalidArg, ContextKind::InvalidSubcommand].into_iter().find_map(|kind| match error.get(kind) {
            Some(ContextValue::String(word)) => Some(word.as_str()),
            _ => None,
        });
    if let (ErrorKind::UnknownArgument | ErrorKind::InvalidSubcommand, Some(word)) = (error.kind(), word)
        && let Some((_, what)) = NOT_YET.iter().find(|(known, _)| *known == word)
    {
        return Failure::usage(format!("{word}: this version cannot {what}"))
            .with_hint("tachyon-bpf --help lists what it can");
    }
    let command = CommandLine::command();
    let verbs: Vec<String> = command.get_subcommands().map(|verb| verb.get_name().to_owned()).collect();
    let can_wait = command.get_arguments().any(|argument| argument.get_long() == Some("wall"));
    if let Some(answer) = habits::answer(words, word, &verbs, can_wait) {
        return answer;
    }
    if let (ErrorKind::UnknownArgument | ErrorKind::InvalidSubcommand, Some(word)) = (error.kind(), word)
        && !word.starts_with('-')
    {
        return Failure::usage(format!("unexpected word '{word}'"))
            .with_hint("put the program to profile after `--`: tachyon-bpf -- python app.py");
    }
    let text = error.render().to_string();
    let mut paragraphs = text
        .split("\n\n")
        .map(|paragraph| paragraph.lines().map(str::trim).collect::<Vec<_>>().join(" "))
        .map(|paragraph| paragraph.trim().to_owned());
    let message = paragraphs.next().unwrap_or_default();
    let message = message.strip_prefix("error: ").unwrap_or(&message).to_owned();
    // The first of clap's tips; the others say how to pass the word as a value, which is never wanted.
    let tip = paragraphs.find_map(|paragraph| {
        let tips = paragraph.strip_prefix("tip: ")?;
        Some(tips.split(" tip: ").next().unwrap_or(tips).to_owned()).filter(|tip| !tip.starts_with("to pass "))
    });
    let lacks = error.kind() == ErrorKind::MissingRequiredArgument;
    let example = if lacks { habits::missing(words, &verbs) } else { None };
    let explained =
        || match words.first().and_then(|word| word.to_str()).filter(|word| verbs.iter().any(|verb| verb == word)) {
            Some(verb) => format!("tachyon-bpf {verb} --help explains all options"),
            None => "tachyon-bpf --help explains all options".to_owned(),
        };
    Failure::usage(message).with_hint(tip.or(example).unwrap_or_else(explained))
}

#[cfg(test)]
mod tests;
