//! What recording costs the way people record: with default options, so with native frames, on several interpreters and hosts, beside
//! the other profilers.

use std::fmt::Write as _;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result};

use super::aims::Aimed;
use super::measure::{Bench, DEPTH, RATES_HZ, ToolCost};
use super::stats::median;
use super::target::{Idle, Shape, Target};
use super::tools::{Aim, Tool};
use crate::zoo::{self, Python};

/// The section's heading.
pub(crate) const HEADING: &str = "## With default options\n";

const MIB: f64 = 1024.0 * 1024.0;

/// Processes on a host, and how many of them are busy.
const PROCESSES: usize = 200;
const BUSY: usize = 64;
/// Idle interpreters on a large one.
const MANY_IDLE: usize = 1_000;
/// Interpreters on hosts whose memory is measured.
const PYTHONS: [usize; 3] = [1, 50, 200];
/// What a program begins with is known by then, so the ring is read less often.
const STEADY: Duration = Duration::from_secs(8);
/// How long the recordings last of which a start's cost is taken.
const SHORT: Duration = Duration::from_millis(500);

/// What a tool costs on an interpreter.
struct Cost {
    python: String,
    of: ToolCost,
}

impl Cost {
    fn row(&self) -> String {
        let Self { python, of } = self;
        let bpf = if of.tool.is_ours() { format!("{:.3} %", of.bpf_share * 100.0) } else { "–".to_owned() };
        format!(
            "| {python} | {} | {} Hz | {:.3} % | {bpf} | {:.3} % | {:.1} | {:.2} s of {:.1} s | {:.1} MiB |\n",
            of.tool.name(),
            of.rate_hz,
            of.user_share * 100.0,
            of.share() * 100.0,
            of.wakeups_a_second,
            of.whole.cpu.as_secs_f64(),
            of.whole.wall.as_secs_f64(),
            of.whole.peak_rss_bytes as f64 / MIB,
        )
    }
}

/// The page's section.
///
/// # Errors
/// An interpreter is missing, or a profiler failed.
pub(crate) fn section(bench: &Bench, quick: bool) -> Result<String> {
    let [low, high] = RATES_HZ;
    let mut page = format!(
        "{HEADING}\nOne busy process of {DEPTH} frames, each profiler with its default options (this one with native frames), watched for \
         {} s from {} s after its start. Wake-ups are voluntary context switches of all its threads. `perf record -g` can only see Python \
         functions of programs that were started with `-X perf`; its own work in the kernel is in no clock of its process. \
         \"Whole run\" and peak RSS as above.\n\n\
         | target | profiler | rate | CPU of its process | CPU in BPF | together | wake-ups a second | whole run | peak RSS |\n\
         |---|---|---:|---:|---:|---:|---:|---:|---:|\n",
        bench.effort.cost.as_secs_f64(),
        STEADY.as_secs_f64(),
    );
    let costs = costs(bench)?;
    costs.iter().for_each(|cost| page.push_str(&cost.row()));
    let ordinary = bench.ordinary().name();
    let of = |tool, rate_hz| {
        let is_it = |cost: &&Cost| (cost.of.tool, cost.of.rate_hz) == (tool, rate_hz) && cost.python == ordinary;
        costs.iter().find(is_it).map(|cost| &cost.of).context("it was measured")
    };
    let mut aims = Vec::new();
    let mut add = |what: String, value: f64, aim: f64, unit: &'static str, decimals: usize| {
        aims.push(Aimed { what, value, aim, unit, decimals });
    };
    for (rate_hz, aim) in [(low, 0.2), (high, 0.8)] {
        let cost = of(Tool::Native, rate_hz)?;
        add(format!("whole profiler at {rate_hz} Hz, {ordinary}"), cost.share() * 100.0, aim, "% of a core", 3);
    }
    let (ours, theirs) = (of(Tool::Native, low)?, of(Tool::PySpy, low)?);
    add(format!("the same at {low} Hz as a share of py-spy's"), ours.share() / theirs.share() * 100.0, 3.3, "%", 2);
    add(format!("wake-ups at {low} Hz, {ordinary}"), ours.wakeups_a_second, 5.0, "a second", 1);
    let start = start(bench)?;
    add("CPU time of a recording of half a second, start and end included".to_owned(), start, 80.0, "ms", 0);
    for (pythons, aim) in PYTHONS.into_iter().zip([24.0, 60.0, 100.0]) {
        let (value, what) = (memory(bench, pythons)?, format!("memory with the maps, Python processes: {pythons}"));
        add(what, value, aim, "MiB", 1);
    }
    let (user, bpf) = busy(bench)?;
    let host = format!("`--all-python` at {low} Hz, {BUSY} of {PROCESSES} processes busy");
    add(format!("{host}: CPU of its process, a sample"), user, 25.0, "µs", 1);
    add(format!("{host}: BPF, a run"), bpf, 10.0, "µs", 1);
    let many = if quick { PROCESSES } else { MANY_IDLE };
    let idle = idle(bench, many)?;
    page.push_str("\n| what | measured | aim | |\n|---|---:|---:|---|\n");
    aims.iter().for_each(|aimed| page.push_str(&aimed.shown()));
    // `fmt::Write` for `String` does not fail.
    let _ = writeln!(
        page,
        "\nWith {many} idle Python processes and one busy one, `--all-python` at {low} Hz takes {:.3} % of a core and {:.1} wake-ups \
         a second.",
        idle.share() * 100.0,
        idle.wakeups_a_second,
    );
    Ok(page)
}

/// All tools that fit on each interpreter.
fn costs(bench: &Bench) -> Result<Vec<Cost>> {
    let [low, high] = RATES_HZ;
    let mut costs = Vec::new();
    let pyenv = |minor: &str| zoo::in_pyenv(minor).with_context(|| format!("hint: pyenv install {minor}"));
    let sid = |minor: &str| zoo::in_sid(minor).context("hint: cargo xtask zoo");
    let ordinary = bench.ordinary();
    let rows: [(&Python, &[(Tool, u32)]); 5] = [
        (&pyenv("3.8")?, &[(Tool::Native, low), (Tool::PySpy, low)]),
        (&bench.hashed, &[(Tool::Native, low), (Tool::PySpy, low)]),
        (
            &ordinary,
            &[(Tool::Native, low), (Tool::Native, high), (Tool::PySpy, low), (Tool::PySpy, high), (Tool::Perf, low)],
        ),
        (&sid("3.14")?, &[(Tool::Native, low), (Tool::Perf, low)]),
        (&sid("3.15")?, &[(Tool::Native, low), (Tool::SamplingOne, low)]),
    ];
    for (python, tools) in rows {
        for &(tool, rate_hz) in tools {
            eprintln!("{} at {rate_hz} Hz on {}", tool.name(), python.name());
            let options: &[&str] = if tool == Tool::Perf { &["-X", "perf"] } else { &[] };
            let target = Target::start(python, bench.cpu, Shape { options, ..Shape::deep(DEPTH) })?;
            let of = bench.cost_after(STEADY, tool, Aim::Pid(target.pid()), rate_hz, &target)?;
            costs.push(Cost { python: python.name(), of });
        }
    }
    Ok(costs)
}

/// Milliseconds of CPU time of a short recording of one process, median of several.
fn start(bench: &Bench) -> Result<f64> {
    eprintln!("starts");
    let target = bench.target(DEPTH, 0)?;
    let mut found = Vec::new();
    for _ in 0..2 * bench.effort.starts {
        let run = bench.tools.start(Tool::Native, Aim::Pid(target.pid()), RATES_HZ[0])?;
        sleep(SHORT);
        found.push(run.finish()?.cpu.as_secs_f64() * 1e3);
    }
    median(&found).context("at least one start")
}

/// Peak RSS and maps in MiB, with so many Python processes of which one is busy.
fn memory(bench: &Bench, pythons: usize) -> Result<f64> {
    eprintln!("memory, Python processes: {pythons}");
    let target = bench.target(DEPTH, 0)?;
    let _others = Idle::pythons(&bench.python, pythons - 1)?;
    sleep(Duration::from_secs(2));
    let aim = if pythons == 1 { Aim::Pid(target.pid()) } else { Aim::AllPython };
    let run = bench.begin(Tool::Native, aim, RATES_HZ[0])?;
    sleep(bench.effort.cost / 2);
    let whole = run.finish()?;
    let maps = whole.report.context("the profiler writes a report")?.cost.map_bytes;
    Ok((whole.peak_rss_bytes + maps) as f64 / MIB)
}

/// Microseconds of the profiler's process for a sample, and of BPF for a run, where many processes are busy.
fn busy(bench: &Bench) -> Result<(f64, f64)> {
    eprintln!("{BUSY} busy processes of {PROCESSES}");
    let _busy = Idle::busy(&bench.python, DEPTH, BUSY)?;
    let target = bench.target(DEPTH, 0)?;
    let _others = Idle::fill_up_to(PROCESSES)?;
    sleep(Duration::from_secs(3));
    let cost = bench.cost_after(STEADY, Tool::Native, Aim::AllPython, RATES_HZ[0], &target)?;
    let (runs, wall_us) = (cost.runs.max(1) as f64, cost.watched.as_secs_f64() * 1e6);
    Ok((cost.user_share * wall_us / runs, cost.bpf_share * wall_us / runs))
}

/// What it costs where many Python processes are idle.
fn idle(bench: &Bench, pythons: usize) -> Result<ToolCost> {
    eprintln!("{pythons} idle Python processes");
    let target = bench.target(DEPTH, 0)?;
    let _idle = Idle::pythons(&bench.python, pythons)?;
    sleep(Duration::from_secs(3));
    bench.cost_after(STEADY, Tool::Native, Aim::AllPython, RATES_HZ[0], &target)
}
