//! The same three questions as SQL, for engines that people have: views of the tables in each dialect, and queries that are the
//! same in all of them.

use crate::args::{Engine, Period, SqlArgs};
use crate::questions::Question;
use anyhow::{Context as _, ensure};
use std::io::{BufRead as _, BufReader, Write};
use std::process::{Command, Stdio};
use std::thread;
use std::time::SystemTime;
use tachyon::advice::Refusal;
use tachyon::sinks::text::escape_controls;

/// Hands a script to an engine's Python module and prints rows as JSON.
const RUNNER: &str = include_str!("sql/run.py");
/// The exit status of [`RUNNER`] when there is no such module.
const NO_MODULE: i32 = 3;

impl Engine {
    const fn views(self) -> &'static str {
        match self {
            Self::Duckdb => include_str!("sql/duckdb.sql"),
            Self::Clickhouse => include_str!("sql/clickhouse.sql"),
            Self::Spark => include_str!("sql/spark.sql"),
            Self::Trino => include_str!("sql/trino.sql"),
        }
    }

    /// A moment as a literal.
    fn moment(self, time: SystemTime) -> String {
        let time = humantime::format_rfc3339_seconds(time).to_string();
        let (date, clock) = (&time[..10], &time[11..19]);
        match self {
            Self::Duckdb => format!("TIMESTAMPTZ '{date} {clock}+00'"),
            Self::Clickhouse => format!("toDateTime64('{date} {clock}', 3, 'UTC')"),
            Self::Spark => format!("TIMESTAMP '{date}T{clock}Z'"),
            Self::Trino => format!("TIMESTAMP '{date} {clock} UTC'"),
        }
    }

    /// A text inside of a literal; Spark's paths are names, not texts.
    fn quoted(self, text: &str) -> String {
        match self {
            Self::Clickhouse => text.replace('\\', "\\\\").replace('\'', "\\'"),
            Self::Spark => text.replace('`', "``"),
            Self::Duckdb | Self::Trino => text.replace('\'', "''"),
        }
    }

    /// The Python module that runs it, and how to get it; `None`: it takes a server, or more.
    const fn module(self) -> Option<(&'static str, &'static str)> {
        match self {
            Self::Duckdb => Some(("duckdb", "python3 -m pip install duckdb")),
            Self::Clickhouse => Some(("chdb", "python3 -m pip install chdb")),
            Self::Spark => Some(("pyspark", "python3 -m pip install pyspark; it needs Java, too")),
            Self::Trino => None,
        }
    }
}

impl Question {
    const fn sql(self) -> &'static str {
        match self {
            Self::Functions => include_str!("sql/functions.sql"),
            Self::Changes => include_str!("sql/changes.sql"),
            Self::Losses => include_str!("sql/losses.sql"),
        }
    }
}

/// Runs the command.
///
/// # Errors
/// When the engine is not there or fails, or `out` does.
pub fn run(args: &SqlArgs, out: &mut dyn Write) -> anyhow::Result<()> {
    let root = args.run.as_deref().unwrap_or(&args.from);
    let questions = args.question.as_ref().map_or(&Question::ALL[..], std::slice::from_ref);
    let script = script(args.engine, root, questions, args.lines, args.period);
    if args.run.is_some() { execute(args.engine, &script, out) } else { Ok(out.write_all(script.as_bytes())?) }
}

/// Views and questions, each statement ended by a semicolon.
#[must_use]
pub fn script(engine: Engine, root: &str, questions: &[Question], lines: usize, period: Period) -> String {
    let root = engine.quoted(root.trim_end_matches('/'));
    let bounds = [(">=", period.since), ("<", period.until)];
    let bounds = bounds.map(|(is, time)| Some(format!("slice_start {is} {}", engine.moment(time?))));
    let bounds: Vec<String> = bounds.into_iter().flatten().collect();
    let bounds = if bounds.is_empty() { String::new() } else { format!("\nWHERE {}", bounds.join(" AND ")) };
    // The root comes last: it may hold anything.
    let mut script = engine.views().replace("{where}", &bounds).replace("{root}", &root);
    for question in questions {
        script += "\n";
        script += &question.sql().replace("{lines}", &lines.to_string());
    }
    script
}

fn execute(engine: Engine, script: &str, out: &mut dyn Write) -> anyhow::Result<()> {
    let Some((module, install)) = engine.module() else {
        let message = format!("{} is not run from here", engine.name());
        let hint = "without --run its SQL is printed, for trino -f";
        return Err(Refusal::new(message).with_hint(hint).into());
    };
    let mut python = Command::new("python3");
    python.args(["-c", RUNNER, module]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = python.spawn().context("cannot start python3")?;
    let mut input = child.stdin.take().context("python3 has no input")?;
    let output = child.stdout.take().context("python3 has no output")?;
    thread::scope(|scope| -> anyhow::Result<()> {
        // What it says about a script that it does not read to the end is its exit status.
        scope.spawn(move || input.write_all(script.as_bytes()));
        for line in BufReader::new(output).lines() {
            writeln!(out, "{}", escape_controls(&line?))?;
        }
        Ok(())
    })?;
    let status = child.wait().context("cannot wait for python3")?;
    if status.code() == Some(NO_MODULE) {
        return Err(Refusal::new(format!("python3 has no module {module}")).with_hint(install).into());
    }
    ensure!(status.success(), "{} failed: {status}", engine.name());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_and_times_are_literals() {
        let since = humantime::parse_rfc3339("2026-11-22T19:01:13Z").ok();
        let until = humantime::parse_rfc3339("2026-11-23T00:00:00Z").ok();
        for (engine, path, moment) in [
            (Engine::Duckdb, "'a''b`{lines}\\/samples/", "TIMESTAMPTZ '2026-11-22 19:01:13+00'"),
            (Engine::Clickhouse, "'a\\'b`{lines}\\\\/samples/", "toDateTime64('2026-11-22 19:01:13', 3, 'UTC')"),
            (Engine::Spark, "`a'b``{lines}\\/samples/", "TIMESTAMP '2026-11-22T19:01:13Z'"),
            (Engine::Trino, "'a''b`{lines}\\/samples'", "TIMESTAMP '2026-11-22 19:01:13 UTC'"),
        ] {
            let script = script(engine, "a'b`{lines}\\/", &Question::ALL, 7, Period { since, until });
            assert!(script.contains(path), "{script}");
            assert_eq!(
                script.matches(&format!("WHERE slice_start >= {moment} AND slice_start < ")).count(),
                2,
                "{script}"
            );
            assert_eq!(script.matches("place <= 7").count(), 2);
            let all = super::script(engine, ".", &Question::ALL, 7, Period::default());
            assert!(!all.contains("WHERE slice_start") && !all.contains('{'), "{all}");
        }
    }
}
