//! Arguments of `top`.

use super::record::RecordArgs;
use super::shared::{SamplingArgs, TargetArgs};
use super::{CommandLine, values};
use crate::sinks::Format;
use clap::{Args, Parser as _};
use std::time::Duration;

/// Arguments of `top`.
#[derive(Args, Debug)]
#[command(
    override_usage = "tachyon-bpf top (-p PID... | --all-python | -- CMD [ARG...]) [OPTIONS]",
    after_help = "Examples:
  sudo tachyon-bpf top -p 4242                       watch a process; ? lists the keys, q quits
  sudo tachyon-bpf top --all-python                  watch every Python process on this machine
  sudo tachyon-bpf top --async -p 4242               with a table of its asyncio tasks: T shows it
  sudo tachyon-bpf top -p 4242 --once --json -d 10s  ten seconds of it as JSON, for scripts
Without --once, a program given after `--` gets no input, its output is discarded, and it is ended with SIGTERM when you quit.
Only threads on a CPU are sampled, unless --wall asks for the waiting ones too."
)]
pub struct TopArgs {
    #[command(flatten)]
    pub targets: TargetArgs,

    /// Time between two updates; with --once, how long to look
    #[arg(short, long, value_name = "TIME", value_parser = values::delay, default_value = "2s", help_heading = "How")]
    pub delay: Duration,

    /// Length of the sliding window that the first two columns are of, up to 1m
    #[arg(long, value_name = "TIME", value_parser = values::window, default_value = "10s", conflicts_with = "once", help_heading = "How")]
    pub window: Duration,

    /// Also sample waiting threads, each once in every interval: the time of a line includes what it waited for
    #[arg(long, conflicts_with = "gil", help_heading = "How")]
    pub wall: bool,

    /// Sample waiting threads only
    #[arg(long, conflicts_with_all = ["wall", "gil"], help_heading = "How")]
    pub off_cpu: bool,

    /// Also tell which asyncio task runs, and show a table of tasks
    #[arg(long = "async", help_heading = "How")]
    pub awaiting: bool,

    /// Look once and print the result instead of showing a live view
    #[arg(long, help_heading = "How")]
    pub once: bool,

    /// With --once: print JSON (docs/top.md)
    #[arg(long, requires = "once", help_heading = "How")]
    pub json: bool,

    #[command(flatten)]
    pub sampling: SamplingArgs,
}

impl TopArgs {
    /// The recording that is watched. None of it goes to a file by itself.
    ///
    /// # Panics
    /// If an empty command line is not valid.
    #[must_use]
    pub fn recording(&self) -> RecordArgs {
        let unset = CommandLine::try_parse_from(["tachyon-bpf"]).expect("all options have defaults").record;
        RecordArgs {
            targets: self.targets.clone(),
            sampling: self.sampling.clone(),
            wall: self.wall,
            off_cpu: self.off_cpu,
            awaiting: self.awaiting,
            output: Some("-".into()),
            format: Some(Format::Collapsed),
            ..unset
        }
    }
}
