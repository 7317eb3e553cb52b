//! One row: the program runs, both profilers watch.

use super::Bench;
use super::agreement::{Agreement, Functions, agreement};
use super::counts::{Counts, samples};
use super::rows::{Compared, Kind, Row};
use super::work::{URGENT, Work};
use anyhow::{Context as _, Result, bail};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Rates. (py-spy stops the program for each sample.)
pub(super) const OURS_HZ: u32 = 199;
pub(super) const THEIRS_HZ: u32 = 99;

/// A row is measured again until py-spy has this many samples: then chance makes less than the tolerated difference.
pub(super) const ENOUGH: u64 = 600;

/// py-spy takes longer to start, so it watches this much longer.
const LATER: Duration = Duration::from_secs(1);

/// The results of a row.
pub(super) struct Measured {
    pub counts: Counts,
    /// Time from the profiler's own start to its first sample.
    pub first_sample: Option<Duration>,
    pub agreement: Agreement,
    /// Samples of py-spy.
    pub their_samples: u64,
}

/// Measures one row.
///
/// # Errors
/// The program or one of the profilers failed.
pub(super) fn row(bench: &Bench, row: &Row) -> Result<Measured> {
    eprintln!("{}: {}", row.name, row.what);
    let python = row.venv.python()?;
    let mut work = Work::new(&python)?;
    let mut seen = Seen::default();
    match &row.kind {
        Kind::Steady { start, children } => {
            let pid = start(&mut work)?;
            let of = Aim { pid, children: *children };
            seen.enough(bench, |seen| {
                seen.steady(bench, &work, &of, row.compared)?;
                work.check()
            })?;
        }
        Kind::Short(words) => {
            seen.enough(bench, |seen| {
                (0..bench.repeats).try_for_each(|_| seen.short(bench, &work, words, row.compared))
            })?;
        }
    }
    Ok(Measured {
        agreement: agreement(&seen.ours, &seen.theirs),
        their_samples: seen.theirs.samples,
        counts: seen.counts,
        first_sample: seen.first_sample,
    })
}

/// What to look at.
struct Aim {
    pid: u32,
    children: bool,
}

#[derive(Default)]
struct Seen {
    counts: Counts,
    ours: Functions,
    theirs: Functions,
    first_sample: Option<Duration>,
}

impl Seen {
    /// Measures until there are enough samples of py-spy.
    fn enough(&mut self, bench: &Bench, mut measure: impl FnMut(&mut Self) -> Result<()>) -> Result<()> {
        for _ in 0..bench.most {
            measure(self)?;
            if self.theirs.samples >= ENOUGH {
                break;
            }
        }
        Ok(())
    }

    fn steady(&mut self, bench: &Bench, work: &Work<'_>, aim: &Aim, compared: Compared) -> Result<()> {
        let pid = aim.pid.to_string();
        let mut line = urgent(&bench.profiler);
        line.args(["--pid", &pid, "--duration", &format!("{}s", bench.length.as_secs())]);
        line.args(aim.children.then_some("--subprocesses"));
        let (ours, begun) = Ours::start(&mut line, work)?;
        let theirs = Theirs::start(bench, work, compared, |line| {
            line.args(["--duration", &(bench.length + LATER).as_secs().to_string(), "--pid", &pid]);
            line.args(aim.children.then_some("--subprocesses"));
        })?;
        self.take(ours, begun, compared)?;
        self.theirs.add_theirs(&theirs.finish()?);
        Ok(())
    }

    fn short(&mut self, bench: &Bench, work: &Work<'_>, words: &[&str], compared: Compared) -> Result<()> {
        let program = work.command(&words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>());
        let program: Vec<_> = std::iter::once(program.get_program()).chain(program.get_args()).collect();
        let mut line = urgent(&bench.profiler);
        work.surroundings(&mut line);
        line.arg("--as-root");
        let (ours, begun) = Ours::start_with(&mut line, work, |line| {
            line.arg("--").args(&program);
        })?;
        self.take(ours, begun, compared)?;
        let theirs = Theirs::start(bench, work, compared, |line| {
            work.surroundings(line);
            line.arg("--").args(&program);
        })?;
        self.theirs.add_theirs(&theirs.finish()?);
        Ok(())
    }

    fn take(&mut self, ours: Ours, begun: Duration, compared: Compared) -> Result<()> {
        let (report, lines) = ours.finish()?;
        let samples = samples(&lines)?;
        self.counts.add(&report, &samples)?;
        self.ours.add_ours(&samples, compared);
        let first = samples.iter().map(|sample| sample.time_us).min();
        let first = first.map(|first| Duration::from_micros(first).saturating_sub(begun));
        self.first_sample = self.first_sample.max(first);
        Ok(())
    }
}

/// A profiler, with the same priority as the programs: other activity must not decide how soon it gets to work.
fn urgent(profiler: &Path) -> Command {
    let mut line = Command::new("nice");
    line.args(["-n", &URGENT.to_string()]).arg(profiler);
    line
}

/// The profiler at work.
struct Ours {
    child: Child,
    log: PathBuf,
    report: PathBuf,
    lines: PathBuf,
}

impl Ours {
    fn start(line: &mut Command, work: &Work<'_>) -> Result<(Self, Duration)> {
        Self::start_with(line, work, |_| {})
    }

    /// Starts it; `last` adds what follows its options. Returns the time, on the samples' clock.
    fn start_with(line: &mut Command, work: &Work<'_>, last: impl FnOnce(&mut Command)) -> Result<(Self, Duration)> {
        let path = |name: &str| work.dir().join(name);
        let (log, report, lines) = (path("ours.log"), path("report.json"), path("ours.jsonl"));
        line.args(["--frequency", &OURS_HZ.to_string(), "--format", "jsonl", "--force", "--output"]).arg(&lines);
        line.arg("--report").arg(&report);
        last(line);
        let file = std::fs::File::create(&log).context("cannot create a log file")?;
        line.current_dir(super::work::scripts()).stdin(Stdio::null()).stdout(Stdio::null()).stderr(file);
        let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC).context("cannot read a clock")?;
        let child = line.spawn().context("cannot start the profiler")?;
        Ok((Self { child, log, report, lines }, Duration::from(now)))
    }

    /// Its account, and its samples.
    fn finish(mut self) -> Result<(String, String)> {
        let status = self.child.wait().context("cannot wait for the profiler")?;
        let read =
            |path: &Path| std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()));
        // The report distinguishes a program that failed from a profile that was not written.
        if !self.report.exists() {
            bail!("the profiler ended with {status}\n{}", read(&self.log)?);
        }
        Ok((read(&self.report)?, read(&self.lines)?))
    }
}

/// py-spy at work.
struct Theirs {
    child: Child,
    raw: PathBuf,
}

impl Theirs {
    fn start(bench: &Bench, work: &Work<'_>, compared: Compared, last: impl FnOnce(&mut Command)) -> Result<Self> {
        let raw = work.dir().join("theirs.raw");
        let mut line = urgent(&bench.py_spy);
        line.args(["record", "--format", "raw", "--rate", &THEIRS_HZ.to_string(), "--output"]).arg(&raw);
        line.args((compared == Compared::Gil).then_some("--gil"));
        last(&mut line);
        line.current_dir(super::work::scripts()).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Ok(Self { child: line.spawn().context("cannot start py-spy")?, raw })
    }

    /// What it saw, possibly nothing.
    fn finish(mut self) -> Result<String> {
        self.child.wait().context("cannot wait for py-spy")?;
        Ok(std::fs::read_to_string(&self.raw).unwrap_or_default())
    }
}
