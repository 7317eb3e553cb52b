//! A thousand hosts for a week: tables made from segments of real programs, with the three questions answered by every engine and in plain
//! Rust, and `regressions`, which has to find what was planted and nothing else. The tests in `tachyon-fleet/tests/engines.rs` are the
//! short form, with three hosts with awkward names.

use std::fmt::Write as _;
use std::fs;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde::Deserialize;
use serde_json::Value;

use crate::bench::machine::Machine;
use crate::bench::memory::Watch;
use crate::bench::soak::Crowd;
use crate::{bench, cache, command, tools, zoo};

/// Arguments of `cargo xtask fleet`.
#[derive(clap::Args)]
pub(crate) struct FleetArgs {
    /// Hosts
    #[arg(long, value_name = "N", default_value_t = 1000)]
    hosts: u32,
    /// Days, from a Monday on
    #[arg(long, value_name = "N", default_value_t = 7)]
    days: u32,
    /// Keep the tables in this directory, and use those that are there
    #[arg(long, value_name = "DIR")]
    keep: Option<PathBuf>,
    /// 20 hosts for a day, unoptimised, without Spark: whether this works. What `regressions` finds there is told and not judged
    #[arg(long, conflicts_with_all = ["hosts", "days", "write"])]
    quick: bool,
    /// This build of the profiler, instead of one that is made now
    #[arg(long, value_name = "PATH")]
    profiler: Option<PathBuf>,
    /// Write the section to docs/fleet.md, of tables that are made now
    #[arg(long, conflicts_with = "keep")]
    write: bool,
}

impl FleetArgs {
    const fn recorded(&self) -> Duration {
        if self.quick { RECORDED_QUICKLY } else { RECORDED }
    }
}

const PAGE: &str = "docs/fleet.md";
const HEADING: &str = "## A thousand hosts for a week\n";
/// Programs in one recording, each with its own work; and how long they are recorded, in segments of a third of that.
const PROGRAMS: u32 = 8;
const RECORDED: Duration = Duration::from_secs(60);
const RECORDED_QUICKLY: Duration = Duration::from_secs(15);
/// Limits: seconds for the first question on DuckDB; bytes of Parquet per sample.
const FIRST_ON_DUCKDB: f64 = 5.0;
const BYTES_A_SAMPLE: f64 = 4.0;

/// The questions by their names in `sql --question`, with `top`'s option.
const QUESTIONS: [(&str, Option<&str>); 3] =
    [("functions", None), ("changes", Some("--changes")), ("losses", Some("--losses"))];

/// An engine that answers, besides plain Rust.
struct Engine {
    /// Its name for readers, and for `sql`.
    name: &'static str,
    word: &'static str,
    /// The virtual environment that has it.
    environment: &'static str,
}

const DUCKDB: Engine = Engine { name: "DuckDB", word: "duckdb", environment: "engines" };
const CLICKHOUSE: Engine = Engine { name: "ClickHouse (chDB)", word: "clickhouse", environment: "engines" };
const SPARK: Engine = Engine { name: "Spark, `local-cluster[2,1,2048]`", word: "spark", environment: "spark" };

/// The results.
#[derive(Default)]
struct Found {
    page: String,
    /// Where an engine's rows differ from plain Rust's.
    other_rows: Vec<String>,
    /// Promises that do not hold.
    broken: Vec<String>,
}

/// What the generator reports about what it made.
#[derive(Debug, Deserialize)]
struct Made {
    hosts: u64,
    days: u64,
    services: u64,
    samples: u64,
    rows: u64,
    bytes: u64,
    files: u64,
    bytes_a_sample: f64,
    seconds: f64,
}

/// What a program cost.
struct Cost {
    took: Duration,
    peak_bytes: u64,
}

/// Runs `cargo xtask fleet`.
///
/// # Errors
/// Not root, something cannot be built, recorded or queried, engines disagree, or a promise does not hold.
pub(crate) fn run(args: &FleetArgs) -> Result<()> {
    command::require_root("loading BPF programs")?;
    tools::set_up_engines()?;
    let programs = Programs::build(args)?;
    let python = zoo::newest_supported().context("no CPython 3.11 to 3.13 in pyenv")?;
    let mut machine = Machine::look_at(("recorded", &python), ("programs", &[&programs.fleet]))?;
    let temporary = tempfile::tempdir().context("cannot make a directory")?;
    let tables = args.keep.clone().unwrap_or_else(|| temporary.path().join("tables"));
    let made = programs.tables(args, &python, &tables)?;
    let mut found =
        Found { page: format!("{HEADING}\n{}\n", introduction(&made, args.recorded())), ..Found::default() };
    if made.bytes_a_sample > BYTES_A_SAMPLE {
        found.broken.push(format!("{:.2} bytes a sample", made.bytes_a_sample));
    }
    let engines: &[Engine] = if args.quick { &[DUCKDB, CLICKHOUSE] } else { &[DUCKDB, CLICKHOUSE, SPARK] };
    questions(&programs, &tables, engines, &mut found)?;
    regressions(&programs, &tables, &mut found)?;
    let Found { mut page, other_rows, broken } = found;
    machine.end();
    page.push('\n');
    machine.describe(&mut page);
    print!("{page}");
    if args.write {
        let path = command::project_root().join(PAGE);
        let whole = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        fs::write(&path, bench::replace(&whole, HEADING, &page))
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    ensure!(other_rows.is_empty(), "other rows than plain Rust has: {}", other_rows.join("; "));
    if args.quick {
        println!("\na day of 20 hosts has too few samples for most of what was planted: only the rows are judged");
        return Ok(());
    }
    ensure!(broken.is_empty(), "not as promised: {}", broken.join("; "));
    Ok(())
}

fn introduction(made: &Made, recorded: Duration) -> String {
    let Made { hosts, days, services, rows, files, bytes_a_sample, seconds, .. } = made;
    format!(
        "`cargo xtask fleet --write` records {PROGRAMS} programs for {} s, turns them into {hosts} hosts that run {services} services for \
         {days} days, two on each host, with versions, noise, slow hosts and losses drawn at random, and asks every engine. The result is \
         {:.0} million samples at 19 Hz in {:.0} million rows (slices of 60 s) and {files} files, {:.2} GB in all: \
         **{bytes_a_sample:.2} bytes a sample** ({BYTES_A_SAMPLE:.0} promised), made in {seconds:.0} s.\n",
        recorded.as_secs(),
        made.samples as f64 / 1e6,
        *rows as f64 / 1e6,
        made.bytes as f64 / 1e9,
    )
}

/// The programs to run.
struct Programs {
    profiler: PathBuf,
    fleet: PathBuf,
    generate: PathBuf,
}

impl Programs {
    fn build(args: &FleetArgs) -> Result<Self> {
        let profiler = match &args.profiler {
            Some(profiler) => std::path::absolute(profiler).context("the profiler's path is none")?,
            None if args.quick => bench::build_unoptimised()?,
            None => bench::build()?,
        };
        // Like the tests' build, which CI has already made.
        let (options, profile): (&[&str], _) =
            if args.quick { (&["--workspace"], "debug") } else { (&["--release", "-p", "tachyon-fleet"], "release") };
        let mut line = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        line.current_dir(command::project_root()).arg("build").args(options);
        command::run(line.args(["--locked", "--bins", "--example", "generate"]))?;
        let built = bench::target_directory()?.join(profile);
        Ok(Self { profiler, fleet: built.join("tachyon-fleet"), generate: built.join("examples/generate") })
    }

    /// Makes the tables, unless they exist.
    fn tables(&self, args: &FleetArgs, python: &Path, tables: &Path) -> Result<Made> {
        let told = tables.join("made.json");
        if !told.exists() {
            let temporary = tempfile::tempdir().context("cannot make a directory")?;
            let segments = temporary.path().join("segments");
            self.record(python, args.recorded(), &segments)?;
            let (hosts, days) = if args.quick { (20, 1) } else { (args.hosts, args.days) };
            eprintln!("{hosts} hosts, {days} days ...");
            let mut line = Command::new(&self.generate);
            line.arg(&segments).arg(tables).args(["--hosts", &hosts.to_string(), "--days", &days.to_string()]);
            let made = command::stdout(&mut line)?;
            fs::write(&told, made).with_context(|| format!("cannot write {}", told.display()))?;
        }
        let made = fs::read(&told).with_context(|| format!("cannot read {}", told.display()))?;
        serde_json::from_slice(&made).with_context(|| format!("{} is not the generator's", told.display()))
    }

    /// Records segments of programs that do many kinds of work.
    fn record(&self, python: &Path, length: Duration, directory: &Path) -> Result<()> {
        let source = command::project_root().join("tests/programs/many_kinds.py");
        let mut running = Crowd(Vec::new());
        let mut line = Command::new(&self.profiler);
        line.arg("record");
        for seed in 1..=PROGRAMS {
            let mut program = Command::new(python);
            program.arg(&source).args([seed.to_string(), (length * 2).as_secs().to_string()]);
            let child = program.stdin(Stdio::null()).spawn().context("cannot start a program")?;
            line.args(["-p", &child.id().to_string()]);
            running.0.push(child);
        }
        let [length, third] = [length, length / 3].map(|length| format!("{}s", length.as_secs()));
        line.args(["--duration", &length, "--rotate", &third, "-F", "99", "-o"]).arg(directory);
        command::run_quietly(&format!("recording {PROGRAMS} programs for {length}"), &mut line)
    }

    /// Asks plain Rust. Returns the answer and what it cost.
    fn ask(&self, words: &[&str], tables: &Path) -> Result<(Value, Cost)> {
        let mut line = Command::new(&self.fleet);
        answer(line.args(words).arg(tables))
    }

    /// Asks an engine.
    fn ask_engine(&self, engine: &Engine, question: &str, tables: &Path) -> Result<(Value, Cost)> {
        let programs = cache::dir()?.join(engine.environment).join("bin");
        let path = std::env::var("PATH").unwrap_or_default();
        let mut line = Command::new(&self.fleet);
        line.env("PATH", format!("{}:{path}", programs.display())).env("SPARK_MASTER", "local-cluster[2,1,2048]");
        answer(line.args(["sql", engine.word, "--question", question, "--run"]).arg(tables))
    }
}

/// Runs a program that answers in JSON; returns the answer and what it cost.
fn answer(line: &mut Command) -> Result<(Value, Cost)> {
    let shown = command::shown(line);
    eprint!("{shown} ... ");
    let started = Instant::now();
    let mut child = line.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().context("cannot start tachyon-fleet")?;
    let memory = Watch::of(child.id());
    let mut told = String::new();
    child.stdout.take().context("it has no output")?.read_to_string(&mut told).context("cannot read its answer")?;
    let (status, usage) = bench::wait4(i32::try_from(child.id())?).context("cannot wait for tachyon-fleet")?;
    let took = started.elapsed();
    eprintln!("{:.1} s", took.as_secs_f64());
    ensure!(status.success(), "`{shown}` failed: {status}");
    let value = serde_json::from_str(&told).with_context(|| format!("`{shown}` says {told:.200}"))?;
    // In KiB (getrusage(2)); for the largest of the processes that it waited for, which may have been larger for a moment.
    let largest = u64::try_from(usage.ru_maxrss).unwrap_or(0) * 1024;
    Ok((value, Cost { took, peak_bytes: memory.most().max(largest) }))
}

/// A row of the table of engines.
fn row(name: &str, costs: &[Cost]) -> String {
    let peak_bytes = costs.iter().map(|cost| cost.peak_bytes).max().unwrap_or(0);
    let times: Vec<String> = costs.iter().map(|cost| format!("{:.1} s", cost.took.as_secs_f64())).collect();
    format!("| {name} | {} | {:.2} GB |\n", times.join(" | "), peak_bytes as f64 / 1e9)
}

/// The three questions on each engine: a table; the engines' answers have to agree.
fn questions(programs: &Programs, tables: &Path, engines: &[Engine], found: &mut Found) -> Result<()> {
    found.page.push_str(
        "| engine | top functions by service | what changed | who loses | most memory of its processes |\n|---|--:|--:|--:|--:|\n",
    );
    let (mut expected, mut costs) = (Vec::new(), Vec::new());
    for (question, option) in QUESTIONS {
        let words: Vec<&str> = ["top", "--json"].into_iter().chain(option).collect();
        let (mut answer, cost) = programs.ask(&words, tables)?;
        let rows = answer["rows"].take();
        ensure!(rows.as_array().is_some_and(|rows| !rows.is_empty()), "{question}: no rows");
        expected.push(rows);
        costs.push(cost);
    }
    found.page.push_str(&row("`tachyon-fleet top`", &costs));
    let mut first_on_duckdb = Duration::ZERO;
    for engine in engines {
        let mut costs = Vec::new();
        for ((question, _), expected) in QUESTIONS.into_iter().zip(&expected) {
            let is_promised = engine.word == DUCKDB.word && costs.is_empty();
            let times = if is_promised { 3 } else { 1 };
            let mut answers = (0..times)
                .map(|_| programs.ask_engine(engine, question, tables))
                .collect::<Result<Vec<(Value, Cost)>>>()?;
            answers.sort_by_key(|(_, cost)| cost.took);
            let (answer, cost) = answers.swap_remove(times / 2);
            if answer != *expected {
                found.other_rows.push(format!("{}, {question}", engine.name));
            }
            if is_promised {
                first_on_duckdb = cost.took;
            }
            costs.push(cost);
        }
        found.page.push_str(&row(engine.name, &costs));
    }
    let seconds = first_on_duckdb.as_secs_f64();
    let verdict = if seconds > FIRST_ON_DUCKDB { "**over**" } else { "kept" };
    if seconds > FIRST_ON_DUCKDB {
        found.broken.push(format!("the first question takes {seconds:.1} s on DuckDB"));
    }
    let counts: Vec<String> = expected.iter().filter_map(Value::as_array).map(|rows| rows.len().to_string()).collect();
    let all = if found.other_rows.is_empty() { "all" } else { "**not all**" };
    let _ = writeln!(
        found.page,
        "\nTimes include the start of each program, on two CPUs. For the first question on DuckDB (the median of three), \
         {FIRST_ON_DUCKDB:.0} s were promised: {verdict}. The rows ({}) are the same in {all} of the engines.\n",
        counts.join(", ")
    );
    Ok(())
}

/// What was planted in a service.
#[derive(Debug, Deserialize)]
struct Planted {
    service: String,
    what: String,
    real: bool,
    before: f64,
    after: f64,
}

/// A service in the output of `regressions --json`.
#[derive(Debug, Deserialize)]
struct Compared {
    service: String,
    cpu_seconds_per_process_second: Measured,
    changes: Vec<Change>,
}

#[derive(Debug, Deserialize)]
struct Change {
    function: String,
    #[serde(flatten)]
    share: Measured,
    moved_to: Option<String>,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
struct Measured {
    before: f64,
    after: f64,
    significant: bool,
}

impl Planted {
    /// What `regressions` says about it, in words; and whether that is right.
    fn judge(&self, compared: Option<&Compared>) -> (String, bool) {
        let Some(compared) = compared else { return ("not compared".to_owned(), false) };
        let whole = compared.cpu_seconds_per_process_second;
        let significant: Vec<&Change> = compared.changes.iter().filter(|change| change.share.significant).collect();
        let of_all = format!("CPU time of a process-hour {:+.1} %", (whole.after / whole.before - 1.0) * 100.0);
        if !self.real {
            if let Some(change) = significant.first() {
                return (format!("{} of {} changed", significant.len(), change.function), false);
            }
            if whole.significant {
                return (of_all, false);
            }
            let moved = compared.changes.iter().find_map(|change| Some((&change.function, change.moved_to.as_ref()?)));
            return match moved {
                Some((from, to)) => (format!("`{from}` only moved to `{to}`"), from == "planted"),
                None => ("no change".to_owned(), self.before == self.after),
            };
        }
        if self.before == self.after {
            return (of_all, whole.significant && (whole.after > whole.before));
        }
        let found = significant.iter().find(|change| change.function == "planted");
        found.map_or_else(
            || ("not found".to_owned(), false),
            |Change { share, .. }| {
                let told = format!("{:.3} % → {:.3} %", share.before * 100.0, share.after * 100.0);
                (told, (share.after > share.before) == (self.after > self.before))
            },
        )
    }
}

/// What `regressions` finds of what was planted.
fn regressions(programs: &Programs, tables: &Path, found: &mut Found) -> Result<()> {
    #[derive(Deserialize)]
    struct All {
        planted: Vec<Planted>,
    }
    #[derive(Deserialize)]
    struct Answer {
        services: Vec<Compared>,
    }
    let planted = fs::read(tables.join("planted.json")).context("the generator tells what it planted")?;
    let All { planted } = serde_json::from_slice(&planted).context("the generator tells what it planted")?;
    let (told, Cost { took, peak_bytes }) = programs.ask(&["regressions", "--json"], tables)?;
    let Answer { services } = serde_json::from_value(told).context("`regressions` says something else")?;
    let _ = writeln!(
        found.page,
        "`tachyon-fleet regressions` compares {} services in {:.0} s and takes {:.2} GB of memory:\n\n\
         | planted in the new version | share before, after | said | |\n|---|---|---|---|",
        services.len(),
        took.as_secs_f64(),
        peak_bytes as f64 / 1e9
    );
    for planted in &planted {
        let Planted { service, what, before, after, .. } = planted;
        let (said, right) = planted.judge(services.iter().find(|compared| compared.service == *service));
        let verdict = if right { "ok" } else { "**wrong**" };
        if !right {
            found.broken.push(format!("{what} ({service}): {said}"));
        }
        // The sum of nothing is -0.
        let [before, after] = [before, after].map(|share| (share + 0.0) * 100.0);
        let _ = writeln!(found.page, "| {what} | {before:.3} %, {after:.3} % | {said} | {verdict} |");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn planted(real: bool, after: f64) -> Planted {
        Planted { service: "s".to_owned(), what: "w".to_owned(), real, before: 0.01, after }
    }

    fn compared(function: &str, (before, after, significant): (f64, f64, bool), moved_to: Option<&str>) -> Compared {
        Compared {
            service: "s".to_owned(),
            cpu_seconds_per_process_second: Measured { before: 0.5, after: 0.55, significant: false },
            changes: vec![Change {
                function: function.to_owned(),
                share: Measured { before, after, significant },
                moved_to: moved_to.map(ToOwned::to_owned),
            }],
        }
    }

    #[test]
    fn what_is_said_is_judged() {
        let twice = |function, measured| compared(function, measured, None);
        for (planted, compared, expected) in [
            (planted(true, 0.02), twice("planted", (0.01, 0.02, true)), ("1.000 % → 2.000 %", true)),
            (planted(true, 0.02), twice("planted", (0.01, 0.005, true)), ("1.000 % → 0.500 %", false)),
            (planted(true, 0.02), twice("planted", (0.01, 0.02, false)), ("not found", false)),
            (planted(true, 0.02), twice("other", (0.01, 0.02, true)), ("not found", false)),
            (planted(true, 0.01), twice("planted", (0.01, 0.01, false)), ("CPU time of a process-hour +10.0 %", false)),
            (planted(false, 0.01), twice("other", (0.01, 0.02, true)), ("1 of other changed", false)),
            (planted(false, 0.01), twice("other", (0.01, 0.02, false)), ("no change", true)),
            (planted(false, 0.0), twice("planted", (0.01, 0.0, false)), ("no change", false)),
            (
                planted(false, 0.0),
                compared("planted", (0.01, 0.0, false), Some("new")),
                ("`planted` only moved to `new`", true),
            ),
        ] {
            let (said, right) = planted.judge(Some(&compared));
            assert_eq!((&*said, right), expected, "{planted:?} {compared:?}");
        }
        let mut slower = compared("planted", (0.01, 0.01, false), None);
        slower.cpu_seconds_per_process_second.significant = true;
        assert!(planted(true, 0.01).judge(Some(&slower)).1 && !planted(false, 0.01).judge(Some(&slower)).1);
        assert!(!planted(false, 0.01).judge(None).1);
    }
}
