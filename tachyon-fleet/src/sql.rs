//! The same three questions as SQL, for common engines: views of the tables in each dialect, and queries that are the same in
//! all of them.

use crate::args::{Engine, Period, SqlArgs};
use crate::lake::{Lake, LakeFile};
use crate::net::bucket::is_url;
use crate::place;
use crate::questions::Question;
use crate::tables::Table;
use anyhow::{Context as _, ensure};
use std::collections::BTreeMap;
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
/// Most services for which DuckDB groups one at a time: with 200 it is faster than with all at once, with 500 slower
/// (2.0.0).
const MOST_SERVICES: usize = 200;

/// Services by their directories.
type Services = BTreeMap<String, Option<String>>;

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

    /// A text inside a literal; Spark's paths are names, not texts.
    fn quoted(self, text: &str) -> String {
        match self {
            Self::Clickhouse => text.replace('\\', "\\\\").replace('\'', "\\'"),
            Self::Spark => text.replace('`', "``"),
            Self::Duckdb | Self::Trino => text.replace('\'', "''"),
        }
    }

    /// The Python module that runs it, and how to get it; `None`: it needs a server, or more.
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
    let questions = args.question.as_ref().map_or(&Question::ALL[..], std::slice::from_ref);
    let (engine, lines, period) = (args.engine, args.lines, args.period);
    let Some(root) = &args.run else {
        // Stored views must also show services that come later.
        let script = script(engine, &args.from, &Services::new(), questions, lines, period);
        return Ok(out.write_all(script.as_bytes())?);
    };
    let services = if engine == Engine::Duckdb { services(root, period)? } else { Services::new() };
    execute(engine, &script(engine, root, &services, questions, lines, period), out)
}

/// Services of tables in a local directory; none if they are not to be grouped one at a time.
fn services(root: &str, period: Period) -> anyhow::Result<Services> {
    if is_url(root) {
        return Ok(Services::new());
    }
    Ok(grouped_apart(Lake::open(root)?.files(Table::Samples, period)?))
}

/// Services that have directories of their own with names that DuckDB takes as they are; none, unless that holds for all.
fn grouped_apart(files: Vec<LakeFile>) -> Services {
    let mut services = Services::new();
    for file in files {
        let Some(directory) = file.path.split('/').nth_back(1) else { return Services::new() };
        if services.contains_key(directory) {
            continue;
        }
        let name = file.service.as_deref().map_or_else(|| place::NO_SERVICE.to_owned(), place::part);
        let is_own = place::is_whole(&name) && directory.strip_prefix("service=") == Some(&name);
        if !is_own || services.len() == MOST_SERVICES {
            return Services::new();
        }
        services.insert(directory.to_owned(), file.service);
    }
    services
}

/// Views and questions, each statement ended by a semicolon.
#[must_use]
fn script(
    engine: Engine,
    root: &str,
    services: &Services,
    questions: &[Question],
    lines: usize,
    period: Period,
) -> String {
    let bounds = [(">=", period.since), ("<", period.until)];
    let bounds = bounds.map(|(is, time)| Some(format!("slice_start {is} {}", engine.moment(time?))));
    let bounds: Vec<String> = bounds.into_iter().flatten().collect();
    let bounds = if bounds.is_empty() { String::new() } else { format!("\nWHERE {}", bounds.join(" AND ")) };
    let root = engine.quoted(root.trim_end_matches('/'));
    // The root comes last, and nothing is replaced in names of services: both may contain anything.
    let filled = |sql: &str| sql.replace("{where}", &bounds).replace("{root}", &root);
    let views = engine.views();
    let mut script = match views.split_once("{stack_time}") {
        Some((before, after)) => filled(before) + &stack_time(engine, services, filled) + &filled(after),
        None => filled(views),
    };
    for question in questions {
        script += "\n";
        script += &question.sql().replace("{lines}", &lines.to_string());
    }
    script
}

/// CPU time by service and stack. DuckDB finds the group for one column once per value of its dictionary, but for two columns once per
/// row.
fn stack_time(engine: Engine, services: &Services, filled: impl Fn(&str) -> String) -> String {
    if services.is_empty() {
        let sum = "CAST(sum(on_cpu_ns) AS BIGINT) AS ns";
        return format!("SELECT service, stack_id, {sum} FROM samples GROUP BY service, stack_id");
    }
    let of = |(directory, service): (&String, &Option<String>)| {
        let literal = |service: &String| format!("'{}'", engine.quoted(service));
        let service = service.as_ref().map_or_else(|| "CAST(NULL AS VARCHAR)".to_owned(), literal);
        let files =
            filled(&format!("'{{root}}/samples/*/*/{directory}/*.parquet', hive_partitioning = false){{where}}"));
        let columns = "hash(stack_id) AS stack_id, CAST(sum(on_cpu_ns) AS BIGINT) AS ns";
        format!("SELECT {service} AS service, {columns}\nFROM read_parquet({files}\nGROUP BY ALL")
    };
    services.iter().map(of).collect::<Vec<_>>().join("\nUNION ALL\n")
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
        // If it does not read the script to its end, its exit status says why.
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
            let none = Services::new();
            let script = script(engine, "a'b`{lines}\\/", &none, &Question::ALL, 7, Period { since, until });
            assert!(script.contains(path), "{script}");
            assert_eq!(
                script.matches(&format!("WHERE slice_start >= {moment} AND slice_start < ")).count(),
                2,
                "{script}"
            );
            assert_eq!(script.matches("place <= 7").count(), 2);
            let all = super::script(engine, ".", &none, &Question::ALL, 7, Period::default());
            assert!(!all.contains("WHERE slice_start") && !all.contains('{'), "{all}");
        }
    }

    #[test]
    fn duckdb_groups_services_apart_that_have_directories_of_their_own() {
        let file = |service: &str| LakeFile {
            path: format!("samples/date=2026-11-22/hour=19/service={}/h-1.parquet", place::part(service)),
            service: Some(service.to_owned()),
            hour: "2026-11-22T19".to_owned(),
        };
        let services = grouped_apart(vec![file("web"), file("{root}'"), file("web")]);
        assert_eq!(services.len(), 2);
        let until = humantime::parse_rfc3339("2026-11-23T00:00:00Z").ok();
        let period = Period { since: None, until };
        let script = script(Engine::Duckdb, "lake", &services, &[Question::Functions], 7, period);
        let odd = "SELECT '{root}''' AS service, hash(stack_id) AS stack_id, CAST(sum(on_cpu_ns) AS BIGINT) AS ns\n\
            FROM read_parquet('lake/samples/*/*/service=%7Broot%7D%27/*.parquet', hive_partitioning = false)\n\
            WHERE slice_start < TIMESTAMPTZ '2026-11-23 00:00:00+00'\nGROUP BY ALL\nUNION ALL\nSELECT 'web' AS service";
        assert!(script.contains(odd), "{script}");

        // Two services may be in one directory where its name was cut.
        assert_eq!(grouped_apart(vec![file("web"), file(&"n".repeat(300))]), Services::new());
        let pattern =
            LakeFile { path: "samples/date=2026-11-22/hour=19/service=a*/h.parquet".to_owned(), ..file("a*") };
        assert_eq!(grouped_apart(vec![pattern]), Services::new(), "DuckDB would take it for a pattern");
        let many = |services: usize| grouped_apart((0..services).map(|n| file(&n.to_string())).collect());
        assert_eq!((many(MOST_SERVICES).len(), many(MOST_SERVICES + 1).len()), (MOST_SERVICES, 0));
    }
}
