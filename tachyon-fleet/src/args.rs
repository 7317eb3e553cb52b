//! What may be typed. Each flag is described here and nowhere else: `--help` is made from this module.

use clap::{Args, Parser, Subcommand};
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

const EXAMPLES: &str = "\
Examples:
  tachyon-fleet convert /var/spool/tachyon-bpf -o lake/    the agent's segments as Parquet
  tachyon-fleet convert app.tach -o lake/                  one recording, by tachyon-bpf or CPython 3.15
  tachyon-fleet convert lake/ -o all.tach                  back: for tachyon-bpf report, diff and export

It runs as an ordinary user: to read the agent's spool takes its group, and nothing else.
Exit status: 0 if it was done, 1 if not, 2 for a usage error.";

/// Profiles of many hosts: what tachyon-bpf recorded, as tables for the engines you run
#[derive(Debug, Parser)]
#[command(name = "tachyon-fleet", version, disable_help_subcommand = true, after_long_help = EXAMPLES, max_term_width = 110)]
pub(crate) struct CommandLine {
    #[command(subcommand)]
    pub verb: Verb,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Turn TACH files into Parquet tables, or tables back into a TACH file
    Convert(ConvertArgs),
}

/// Arguments of `convert`.
#[derive(Args, Debug)]
#[command(after_help = "\
OUT that ends in .tach is written from tables; otherwise OUT is a directory, and gets the files
  TABLE/date=YYYY-MM-DD/hour=HH/service=NAME/HOST-START-SEQ.parquet
of the tables samples, stacks, frames and loss (docs/fleet.md). The same input gives the same files with the same bytes, so a \
second run changes nothing.")]
pub struct ConvertArgs {
    /// TACH files, or directories of them (a spool, with its accounts); with -o OUT.tach, directories of tables
    #[arg(value_name = "IN", required = true)]
    pub inputs: Vec<PathBuf>,

    /// Directory of tables to write to, or a TACH file to make from tables
    #[arg(short, long, value_name = "OUT")]
    pub output: PathBuf,

    /// Count samples in slices of this length: 10s, 5m
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = slice)]
    pub slice: Duration,

    /// When a recording began that does not say so itself (CPython's do not), in UTC: 2026-11-22T19:01:13Z
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_rfc3339_weak)]
    pub start: Option<SystemTime>,

    /// Replace OUT.tach if it exists
    #[arg(long)]
    pub force: bool,
}

/// Parses a command line, whose first word is the program's own name.
pub(crate) fn parse(words: Vec<OsString>) -> Result<CommandLine, clap::Error> {
    CommandLine::try_parse_from(words)
}

fn slice(text: &str) -> Result<Duration, String> {
    let length = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    let day = Duration::from_secs(24 * 60 * 60);
    let fits = (Duration::from_secs(1)..=day).contains(&length);
    fits.then_some(length).ok_or_else(|| "a slice takes between 1s and 24h".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn the_command_line_is_consistent() {
        CommandLine::command().debug_assert();
    }

    #[test]
    fn slices_have_bounds() {
        for (text, fits) in [("60s", true), ("1s", true), ("500ms", false), ("24h", true), ("25h", false), ("x", false)]
        {
            assert_eq!(slice(text).is_ok(), fits, "{text}");
        }
    }
}
