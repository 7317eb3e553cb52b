//! `docs/programs.md`: a table, and the details behind its figures. Rows that were not measured this time stay as they are.

use super::agreement::TOLERATED;
use super::measure::{ENOUGH, Measured, OURS_HZ, THEIRS_HZ};
use super::rows::{Kind, ROWS, Row};
use super::venv::Venv;
use crate::command;
use anyhow::{Context as _, Result};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::process::Command;

/// The page, from the project's directory.
const PAGE: &str = "docs/programs.md";

/// Packages whose versions the page shows.
const TOLD: &[&str] = &[
    "apache-airflow",
    "celery",
    "dask",
    "django",
    "dramatiq",
    "fastapi",
    "gevent",
    "gunicorn",
    "ipykernel",
    "jax",
    "lxml",
    "numba",
    "numpy",
    "pandas",
    "polars",
    "py-spy",
    "pyarrow",
    "pydantic",
    "pytest",
    "scikit-learn",
    "torch",
    "uvicorn",
    "uvloop",
];

const STEADY: &str = "steady";
const SHORT: &str = "short";

/// One line for the terminal.
pub(super) fn shown(row: &Row, measured: &Measured) -> String {
    let cells = cells(row, measured, "");
    format!("  {}\n  {}", cells[1..cells.len() - 1].join(", "), behind(measured))
}

/// Writes the page.
///
/// # Errors
/// It cannot be read or written.
pub(super) fn write(measured: &[(&Row, Measured)]) -> Result<()> {
    let path = command::project_root().join(PAGE);
    let before = std::fs::read_to_string(&path).unwrap_or_default();
    let date = command::stdout(Command::new("date").args(["-u", "+%F"]))?;
    let load = std::fs::read_to_string("/proc/loadavg").context("cannot read /proc/loadavg")?;
    // The load of the last fifteen minutes.
    let load = load.split(' ').nth(2).unwrap_or_default();
    let text = page(&before, measured, &format!("{}, load {load}", date.trim()));
    std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    eprintln!("written: {PAGE}");
    Ok(())
}

fn page(before: &str, measured: &[(&Row, Measured)], date: &str) -> String {
    let (mut lines, mut reasons) = (kept(before, &HEADS), kept(before, &REASONS));
    for (row, measured) in measured {
        let cells = cells(row, measured, date);
        lines.insert(row.name.to_owned(), format!("| {} |", cells.join(" | ")));
        reasons.insert(row.name.to_owned(), format!("| {} | {} |", row.name, behind(measured)));
    }
    let mut page = INTRODUCTION
        .replace("{OURS}", &OURS_HZ.to_string())
        .replace("{THEIRS}", &THEIRS_HZ.to_string())
        .replace("{ENOUGH}", &ENOUGH.to_string());
    page = page.replace("{POINTS}", &format!("{:.0}", TOLERATED * 100.0));
    let versions: BTreeMap<_, _> =
        [Venv::Small, Venv::Services, Venv::Libraries].iter().flat_map(|venv| venv.versions()).collect();
    let told = TOLD.iter().filter_map(|name| Some(format!("{name} {}", versions.get(name)?)));
    let _ = writeln!(page, "\nCPython 3.13 with {}.", told.collect::<Vec<_>>().join(", "));
    for (kind, heading) in
        [(STEADY, "\n## Steady programs\n"), (SHORT, "\n## Short programs, from their start to their end\n")]
    {
        let _ = writeln!(page, "{heading}\n{}", head(&HEADS));
        of_kind(kind).filter_map(|row| lines.get(row.name)).for_each(|line| page.extend([line, "\n"]));
    }
    let _ = writeln!(page, "\n## Behind the figures\n\n{EXPLAINED}\n{}", head(&REASONS));
    ROWS.iter().filter_map(|row| reasons.get(row.name)).for_each(|line| page.extend([line, "\n"]));
    page
}

fn of_kind(kind: &str) -> impl Iterator<Item = &'static Row> {
    ROWS.iter().filter(move |row| matches!(row.kind, Kind::Short(_)) == (kind == SHORT))
}

const HEADS: [&str; 10] = [
    "program",
    "what",
    "samples",
    "exact",
    "exact up to code without rules",
    "unknown",
    "lost",
    "first sample",
    "memory",
    "as py-spy",
];
const REASONS: [&str; 2] = ["what", "not exact because, and functions that py-spy sees differently"];

fn head(heads: &[&str]) -> String {
    let rule: Vec<_> = heads.iter().enumerate().map(|(at, _)| if at < 2 { "---" } else { "---:" }).collect();
    format!("| {} |\n|{}|", heads.join(" | "), rule.join("|"))
}

/// Rows of the tables with this head, by program.
fn kept(page: &str, heads: &[&str]) -> BTreeMap<String, String> {
    let head = head(heads);
    let tables = page.split(&head).skip(1);
    let lines = tables.flat_map(|table| table.trim_start().lines().take_while(|line| line.starts_with('|')));
    lines
        .filter_map(|line| Some((line.split(" | ").next()?.trim_start_matches("| ").to_owned(), line.to_owned())))
        .collect()
}

fn cells(row: &Row, measured: &Measured, date: &str) -> Vec<String> {
    let counts = &measured.counts;
    let percent = |part: u64| format!("{:.1} %", counts.share(part) * 100.0);
    let lost = counts.lost as f64 * 100.0 / (counts.stored + counts.lost).max(1) as f64;
    let agreement = &measured.agreement;
    let what = if date.is_empty() { row.what.to_owned() } else { format!("{} ({date})", row.what) };
    vec![
        row.name.to_owned(),
        what,
        counts.stored.to_string(),
        percent(counts.exact),
        percent(counts.exact + counts.to_the_last_rule),
        percent(counts.unknown),
        format!("{lost:.1} %"),
        measured.first_sample.map_or_else(|| "-".to_owned(), |first| format!("{:.2} s", first.as_secs_f64())),
        format!("{} MiB", counts.memory_bytes >> 20),
        format!("{} of {}", agreement.same, agreement.of),
    ]
}

/// Reasons of at least a thousandth, where stacks end, and what differs from py-spy.
fn behind(measured: &Measured) -> String {
    let counts = &measured.counts;
    let mut parts = Vec::new();
    let mut told = |what: &str, of: &BTreeMap<String, u64>, most: usize| {
        let mut all: Vec<_> = of.iter().filter(|(_, count)| counts.share(**count) >= 0.001).collect();
        all.sort_by_key(|(name, count)| (std::cmp::Reverse(**count), *name));
        let all = all.iter().take(most).map(|(name, count)| format!("{name} {:.1} %", counts.share(**count) * 100.0));
        let all: Vec<_> = all.collect();
        if !all.is_empty() {
            parts.push(format!("{what}{}", all.join(", ")));
        }
    };
    told("", &counts.reasons, 6);
    told("in ", &counts.cut_in, 3);
    let differ = measured.agreement.differ.iter();
    let differ: Vec<_> = differ
        .map(|(name, ours, theirs)| format!("`{name}` {:.1} % for {:.1} %", ours * 100.0, theirs * 100.0))
        .collect();
    if !differ.is_empty() {
        parts.push(format!("py-spy ({} samples): {}", measured.their_samples, differ.join(", ")));
    }
    if parts.is_empty() { "nothing".to_owned() } else { parts.join("; ") }
}

const INTRODUCTION: &str = "\
# What people really run

Servers, workers, notebooks, numerical libraries and short programs, with unmodified packages from PyPI. `cargo xtask programs --write`
installs them (pinned by digest, `xtask/programs/requirements/`), runs each program, profiles it with default options at {OURS} Hz, and has
py-spy profile the same process at the same time ({THEIRS} Hz). Steady programs are profiled by process id once they have warmed up (servers
with `--subprocesses`); short ones are started by the profiler, five times. What leaves py-spy with fewer than {ENOUGH} samples is repeated, up to
four times (since 2026-11-29). The programs are in `xtask/programs/`.

Each row shows the day on which it was measured, and the machine's load average over the fifteen minutes before. On two CPUs for which
many programs compete, unwind tables are ready late, more stacks of the first seconds are cut, and py-spy counts the time in which a
thread waits for a CPU.

- *exact*: the native stack and the Python stack were both complete and fitted together ([native.md](native.md)).
- *exact up to code without rules*: these, plus stacks that reach code without unwind rules and say so. They end there if that code was
  generated at run time; they go on through it if it is assembly language whose rules follow from its instructions (kernels of BLAS
  libraries; before 2026-11-28 they ended there, too), or if frame pointers lead on (these count here since 2026-11-29; where they do,
  one frame may be missing). Stacks taken while one greenlet gives way to another also count: since 2026-11-29, what called the switch is
  left out, because the native stack behind it is being exchanged. Everything that can be known about these stacks is shown.
- *unknown*: the innermost frame has neither a name nor an address in a file.
- *lost*: runs of the timer's program that left no sample, for any reason.
- *first sample*: the time from the start of the profiler. If the program is idle at that moment, its first sample comes later: so
  with celery, whose workers look for jobs now and then (in 20 starts beside them on 2026-11-29, sampling began after 0.17 to 0.26 s).
- *memory*: the profiler's peak resident memory plus its BPF maps. (In rows of 2026-11-27 and before, the peak memory of the command that
  started the profiler counts instead if it was higher; so the figure is too high in rows that follow those with more packages.)
- *as py-spy*: of the ten Python functions that py-spy samples most often, how many have the same share of samples, within {POINTS}
  percentage points. For servers, and for polars, only threads that hold the GIL are compared (`--gil`), for other libraries, threads
  that run. (While polars' own threads work, the thread that waits for them runs on and off: py-spy takes most of that for running.)
  `totals` differs in several rows. Checked in pywsgi (15 s each on 2026-11-29), by the clock of its own thread it had 25 % of the CPU
  time while this profiler said 27 %, and 22 % while py-spy said 13 %.
";

const EXPLAINED: &str = "\
Shares are of all samples of the row. A stack can have two reasons: why its native part ended, and how that affected the merge.
";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_that_were_not_measured_stay() {
        let row = |name: &str| ROWS.iter().find(|row| row.name == name).unwrap();
        let measured = |stored: u64| {
            let mut measured = Measured {
                counts: Default::default(),
                first_sample: None,
                agreement: Default::default(),
                their_samples: 0,
            };
            (measured.counts.stored, measured.counts.exact) = (stored, stored / 2);
            measured.counts.reasons.insert("native stack cut".to_owned(), stored / 4);
            measured
        };
        let first = page("", &[(row("lxml"), measured(100)), (row("pytest"), measured(200))], "2026-01-01");
        assert!(
            first.contains("(2026-01-01) | 100 | 50.0 % |") && first.contains("(2026-01-01) | 200 | 50.0 % |"),
            "{first}"
        );
        let second = page(&first, &[(row("lxml"), measured(300))], "2026-01-02");
        assert!(second.contains("(2026-01-02) | 300 |") && !second.contains("| 100 |"), "{second}");
        assert!(
            second.contains("(2026-01-01) | 200 |") && second.contains("| pytest | native stack cut 25.0 % |"),
            "{second}"
        );
        assert!(second.contains("numpy 2.5.5"), "{second}");
    }
}
