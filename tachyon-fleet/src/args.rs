//! The command line's syntax. Each flag is described here and nowhere else: `--help` is made from this module.

use crate::questions::Question;
use clap::{Args, Parser, Subcommand, ValueEnum};
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

const EXAMPLES: &str = "\
Examples:
  tachyon-fleet convert /var/spool/tachyon-bpf -o lake/    the agent's segments as Parquet
  tachyon-fleet convert app.tach -o lake/                  one recording, by tachyon-bpf or CPython 3.15
  tachyon-fleet convert lake/ -o all.tach                  back: for tachyon-bpf report, diff and export
  tachyon-fleet top lake/                                  top functions of each service
  tachyon-fleet regressions s3://bucket/prefix             what changed with each service's newest version
  tachyon-fleet page s3://bucket/prefix -o fleet.html      an overview for the browser
  tachyon-fleet sql duckdb --from lake/ | duckdb           the questions in an engine that you have
  tachyon-fleet ship --dry-run                             what the shipper would send, and to whom

It runs as an ordinary user: to read the agent's spool takes its group, and nothing else.
Exit status: 0 if it was done, 1 if not, 2 for a usage error.";

/// Profiles of many hosts: ships what tachyon-bpf recorded, makes tables of it, tells what changed
#[derive(Debug, Parser)]
#[command(name = "tachyon-fleet", version, disable_help_subcommand = true, after_long_help = EXAMPLES, max_term_width = 110)]
pub(crate) struct CommandLine {
    #[command(subcommand)]
    pub verb: Verb,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Ship the agent's segments: OpenTelemetry, Pyroscope, object stores
    Ship(ShipArgs),
    /// Turn TACH files into Parquet tables, or tables back into a TACH file
    Convert(ConvertArgs),
    /// Answer the fleet's three questions from tables: top functions, changes between versions, losses
    Top(TopArgs),
    /// What changed between two versions of a service, and is more than noise
    Diff(DiffArgs),
    /// What changed with the newest version of each service
    Regressions(RegressionsArgs),
    /// Write an overview of the fleet as one HTML file
    Page(PageArgs),
    /// Print the same three questions as SQL for an engine, or run them with it
    Sql(SqlArgs),
}

/// Arguments of `ship`.
#[derive(Args, Debug)]
#[command(after_help = "\
Each backend has a progress of its own, and the spool is the queue: what is down gets everything later that is still in the spool. An object store has \
each segment exactly once; OTLP and Pyroscope at least once, and what may have arrived twice is counted.

SIGHUP reads the configuration and its secrets anew. /metrics and /healthz answer on 127.0.0.1:9464. docs/fleet.md explains it; deploy/fleet.toml has all \
keys with their defaults, and deploy/tachyon-fleet.service is a unit for systemd.")]
pub struct ShipArgs {
    /// Configuration [default: /etc/tachyon-bpf/fleet.toml]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Ship what is there and end: for cron. Exit status 1 if a backend failed or samples were refused
    #[arg(long)]
    pub once: bool,

    /// Show what would leave the host; send and write nothing
    #[arg(long, conflicts_with = "once")]
    pub dry_run: bool,
}

/// Arguments of `convert`.
#[derive(Args, Debug)]
#[command(after_help = "\
OUT that ends in .tach is written from tables; otherwise OUT is a directory, and gets the files
  TABLE/date=YYYY-MM-DD/hour=HH/service=NAME/HOST-START-SEQ.parquet
of the tables samples, stacks, frames and loss (docs/fleet.md). The same input gives the same files with the same bytes, so a \
second run changes nothing.

Tables become larger ones: one file of each table, hour and service for all hosts, and with --slice 1h a twentieth of the rows.")]
pub struct ConvertArgs {
    /// TACH files, or directories of them (a spool, with its accounts); or a directory or s3://bucket/prefix of tables
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

/// What part of the tables is looked at.
#[derive(Args, Clone, Copy, Debug, Default)]
pub struct Period {
    /// Only slices that began then or later, in UTC: 2026-11-22T19:00:00Z
    #[arg(long, value_name = "TIME", value_parser = second)]
    pub since: Option<SystemTime>,

    /// Only slices that began before that
    #[arg(long, value_name = "TIME", value_parser = second)]
    pub until: Option<SystemTime>,
}

/// Arguments of `top`.
#[derive(Args, Debug)]
#[command(after_help = "\
Tables are read where they lie, column by column; memory is that of the distinct stacks. S3, Google and Azure take their keys from the clouds' own \
variables (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, …).
Changes are differences of what was sampled, noise included: tachyon-fleet regressions tells which are significant.")]
pub struct TopArgs {
    /// Directory of tables, or s3://bucket/prefix, gs://…, az://…
    #[arg(value_name = "DIR|URL", value_parser = root)]
    pub root: String,

    /// What changed between the two versions of each service that were first seen last (the label service.version)
    #[arg(long)]
    pub changes: bool,

    /// Which hosts lose samples
    #[arg(long, conflicts_with = "changes")]
    pub losses: bool,

    /// Functions of each service
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub lines: usize,

    #[command(flatten)]
    pub period: Period,

    /// Print JSON: an object with the key rows, a list of objects whose keys are the columns of the same question in SQL
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `diff`.
#[derive(Args, Debug)]
#[command(after_help = "\
The statistics are those of tachyon-bpf diff: replicates are blocks of time of each host, false discoveries among all functions are held at 1 %, and a function \
that was renamed, split or inlined is set against its nearest common caller. Where both versions ran for a day or more, whole days are compared.")]
pub struct DiffArgs {
    /// Directory of tables, or s3://bucket/prefix, gs://…, az://…
    #[arg(value_name = "DIR|URL", value_parser = root)]
    pub root: String,

    /// Service; not needed where only one has two versions
    #[arg(long, value_name = "NAME")]
    pub service: Option<String>,

    /// The version before [default: the one before the new one]
    #[arg(long, value_name = "VERSION")]
    pub old: Option<String>,

    /// The version after [default: the one first seen last]
    #[arg(long, value_name = "VERSION")]
    pub new: Option<String>,

    /// Compare before and after a moment instead of versions: 2026-11-22T19:00:00Z
    #[arg(long, value_name = "TIME", value_parser = second, conflicts_with_all = ["old", "new"])]
    pub at: Option<SystemTime>,

    #[command(flatten)]
    pub period: Period,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `regressions`.
#[derive(Args, Debug)]
#[command(after_help = "\
Compares the two versions of each service that were first seen last (the label service.version), as diff does.")]
pub struct RegressionsArgs {
    /// Directory of tables, or s3://bucket/prefix, gs://…, az://…
    #[arg(value_name = "DIR|URL", value_parser = root)]
    pub root: String,

    #[command(flatten)]
    pub period: Period,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `page`.
#[derive(Args, Debug)]
#[command(after_help = "\
Services, their top functions over time, what changed with the newest versions, and which hosts lose samples. One file, which loads nothing; \
deploy/grafana-dashboard.json is a dashboard for whom has Prometheus and Grafana.")]
pub struct PageArgs {
    /// Directory of tables, or s3://bucket/prefix, gs://…, az://…
    #[arg(value_name = "DIR|URL", value_parser = root)]
    pub root: String,

    /// The file
    #[arg(short, long, value_name = "x.html")]
    pub output: PathBuf,

    /// Replace it if it exists
    #[arg(long)]
    pub force: bool,

    #[command(flatten)]
    pub period: Period,
}

/// An engine with a dialect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Engine {
    /// DuckDB
    Duckdb,
    /// ClickHouse, clickhouse local, chDB
    Clickhouse,
    /// Spark SQL
    Spark,
    /// Trino, with its Hive connector
    Trino,
}

impl Engine {
    /// The name it uses for itself.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Duckdb => "DuckDB",
            Self::Clickhouse => "ClickHouse",
            Self::Spark => "Spark",
            Self::Trino => "Trino",
        }
    }
}

/// Arguments of `sql`.
#[derive(Args, Debug)]
#[command(after_help = "\
Prints views (samples, stacks, frames, loss, stack_frames) and three queries: top functions of the fleet by service, what changed \
between two versions, which hosts lose samples. All give the same rows in all engines, and as tachyon-fleet top.

--run uses python3's module duckdb, chdb or pyspark (SPARK_MASTER names a cluster), and prints the rows of each query as a list of JSON objects.")]
pub struct SqlArgs {
    /// Engine
    #[arg(value_enum, value_name = "ENGINE")]
    pub engine: Engine,

    /// Where the tables are: a directory, or what the engine takes for one, e.g. s3://bucket/prefix
    #[arg(long, value_name = "DIR|URL", default_value = ".", value_parser = root)]
    pub from: String,

    /// Run it on these tables and print the rows
    #[arg(long, value_name = "DIR|URL", conflicts_with = "from", value_parser = root)]
    pub run: Option<String>,

    /// Only this one of the questions
    #[arg(long, value_enum, value_name = "NAME")]
    pub question: Option<Question>,

    /// Functions of each service
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub lines: usize,

    #[command(flatten)]
    pub period: Period,
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

/// Engines take whole seconds.
fn second(text: &str) -> Result<SystemTime, String> {
    let time = humantime::parse_rfc3339_weak(text).map_err(|error| error.to_string())?;
    let since = time.duration_since(SystemTime::UNIX_EPOCH).map_err(|_| "it is before 1970".to_owned())?;
    (since.subsec_nanos() == 0).then_some(time).ok_or_else(|| "whole seconds only".to_owned())
}

fn root(text: &str) -> Result<String, String> {
    let plain = !text.is_empty() && !text.contains(char::is_control);
    plain.then(|| text.to_owned()).ok_or_else(|| "it is empty or has control characters".to_owned())
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
    fn times_are_whole_seconds() {
        for (text, fits) in [("2026-11-22T19:00:00Z", true), ("2026-11-22", false), ("2026-11-22T19:00:00.5Z", false)] {
            assert_eq!(second(text).is_ok(), fits, "{text}");
        }
    }

    #[test]
    fn slices_have_bounds() {
        for (text, fits) in [("60s", true), ("1s", true), ("500ms", false), ("24h", true), ("25h", false), ("x", false)]
        {
            assert_eq!(slice(text).is_ok(), fits, "{text}");
        }
    }
}
