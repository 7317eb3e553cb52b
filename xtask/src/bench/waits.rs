//! What it costs to sample waiting threads, with threads switched ten thousand times a second, compared with the other
//! profilers.

use std::fmt::Write as _;
use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::aims::Aimed;
use super::measure::{Bench, RATES_HZ, Watched};
use super::stats::{Interval, Longer};
use super::target::{Idle, Shape, Target};
use super::tools::{Aim, Tool};
use crate::zoo::{self, Python};

/// The section's heading.
pub(crate) const HEADING: &str = "## Waiting threads\n";

/// Frames of the process that sends requests.
const DEPTH: usize = 10;
/// Runs of `perf bench sched pipe` in each round, without the profiler and with it.
const RUNS: usize = 4;
/// When the profiler has reached a steady state: in its first second it also has the kernel measure what a switch costs.
const STEADY: Duration = Duration::from_millis(1_500);

/// The page's section.
///
/// # Errors
/// An interpreter is missing, or a profiler failed.
pub(crate) fn section(bench: &Bench, quick: bool) -> Result<String> {
    let [rate_hz, _] = RATES_HZ;
    let python = bench.ordinary();
    let switches = switches(bench, &python, rate_hz)?;
    let mut page = format!(
        "{HEADING}\nTwo {} processes on one CPU send each other a byte back and forth, with {:.0} switches a second. In the kernel \
         (`run_time_ns` ÷ `run_cnt`), at {rate_hz} Hz:\n\n\
         | what | measured | aim | |\n|---|---:|---:|---|\n",
        python.name(),
        switches.a_second,
    );
    for row in &switches.rows {
        page.push_str(&row.shown());
    }
    for place in [Where::Anywhere, Where::OneCpu] {
        let rounds = if quick { 2 } else { 2 * bench.effort.pairs };
        page.push_str(&beside_perf_bench(bench, place, rate_hz, rounds)?.shown());
    }
    let newest = zoo::in_sid("3.15").context("hint: cargo xtask zoo")?;
    page.push_str(
        "\nCompared with other profilers: the profiler's CPU time, including BPF, and how much of their speed the two processes lose. \
         Each window with the profiler is compared with the two windows without it before and after; mean and 95 % interval.\n\n\
         | profiler | program | CPU, % of a core | slowdown | 95 % interval |\n|---|---|---:|---:|---:|\n",
    );
    let others = [(&python, Tool::Wall), (&python, Tool::PySpyIdle), (&newest, Tool::Wall), (&newest, Tool::Sampling)];
    for (python, tool) in others {
        page.push_str(&compared(bench, python, tool, rate_hz, if quick { 2 } else { bench.effort.pairs.min(10) })?);
    }
    Ok(page)
}

/// Two processes that wait for each other.
fn pair(bench: &Bench, python: &Python) -> Result<Target> {
    let target = Target::start(python, bench.cpu, Shape { whose: "pipe", ..Shape::deep(DEPTH) })?;
    // By then its speed is steady.
    sleep(Duration::from_millis(300));
    Ok(target)
}

struct Switches {
    a_second: f64,
    rows: Vec<Aimed>,
}

/// The costs of a switch of unrecorded threads and of recorded ones; of a stack; and of the whole profiler.
fn switches(bench: &Bench, python: &Python, rate_hz: u32) -> Result<Switches> {
    let target = pair(bench, python)?;
    let idle = Idle::pythons(&bench.python, 1)?;
    let other = Aim::Pid(idle.pid().context("one idle process was started")?);
    sleep(Duration::from_millis(300));
    let watch = |tool: Tool, aim: Aim| -> Result<Watched> {
        eprintln!("{} where threads are switched", tool.name());
        let run = bench.begin(tool, aim, rate_hz)?;
        let watched = bench.watch(&run, &target, bench.effort.kernel)?;
        run.finish()?;
        ensure!(watched.bpf.switch_runs > 0, "no switch was heard of");
        Ok(watched)
    };
    let others = watch(Tool::OffCpu, other)?.bpf;
    let off_cpu = watch(Tool::OffCpu, Aim::Pid(target.pid()))?;
    let (own, seconds) = (off_cpu.bpf, off_cpu.wall.as_secs_f64());
    let wall = watch(Tool::Wall, Aim::Pid(target.pid()))?;
    let whole = wall.tool_cpu.as_secs_f64() + (wall.bpf.timer_ns + wall.bpf.other_ns) as f64 / 1e9;
    let each = |nanoseconds: u64, runs: u64| nanoseconds as f64 / runs.max(1) as f64;
    let row = |what: &str, value: f64, aim: f64, unit: &'static str, decimals: usize| Aimed {
        what: what.to_owned(),
        value,
        aim,
        unit,
        decimals,
    };
    let rows = vec![
        row("a switch, neither thread recorded", each(others.switch_ns, others.switch_runs), 80.0, "ns", 0),
        row("a switch, both threads recorded", each(own.switch_ns, own.switch_runs), 250.0, "ns", 0),
        row("a stack, by the interrupt that meets its thread", each(own.kick_ns, own.kick_runs) / 1e3, 15.0, "µs", 1),
        row(
            "the whole profiler, `--wall`, for each 20,000 switches a second",
            whole / wall.bpf.switch_runs as f64 * 20_000.0 * 100.0,
            1.0,
            "% of a core",
            2,
        ),
    ];
    Ok(Switches { a_second: own.switch_runs as f64 / seconds, rows })
}

/// Where the two processes of `perf bench sched pipe` run.
#[derive(Clone, Copy)]
enum Where {
    /// Where the kernel puts them, as in normal use.
    Anywhere,
    /// Both on the benchmark's CPU: nothing but switches.
    OneCpu,
}

impl Where {
    /// Round trips in half a second.
    const fn trips(self) -> u32 {
        match self {
            Self::Anywhere => 50_000,
            Self::OneCpu => 150_000,
        }
    }
}

/// What `perf bench sched pipe` loses beside a recording of the whole host. (Debian's perf contains CPython: its threads are watched.)
fn beside_perf_bench(bench: &Bench, place: Where, rate_hz: u32, rounds: usize) -> Result<Aimed> {
    let once = || -> Result<f64> {
        let trips = place.trips().to_string();
        let mut words = vec!["perf", "bench", "-f", "simple", "sched", "pipe", "-l", &trips];
        let cpu = bench.cpu.to_string();
        if let Where::OneCpu = place {
            words.splice(0..0, ["taskset", "-c", &cpu]);
        }
        let (program, arguments) = words.split_first().context("not empty")?;
        let output = Command::new(program).args(arguments).output();
        let output = output.context("cannot start perf\nhint: apt-get install linux-perf")?;
        let told = String::from_utf8_lossy(&output.stdout);
        ensure!(output.status.success(), "perf bench: {}", String::from_utf8_lossy(&output.stderr));
        told.trim().parse().with_context(|| format!("perf bench said {told:?}, and no seconds"))
    };
    let runs = || (0..RUNS).map(|_| once()).collect::<Result<Vec<f64>>>();
    let what = match place {
        Where::Anywhere => "`perf bench sched pipe`",
        Where::OneCpu => "the same with both of its processes on one CPU",
    };
    let (mut without, mut with) = (Vec::new(), Vec::new());
    for round in 1..=rounds {
        eprintln!("{what}, round {round} of {rounds}");
        without.push(runs()?);
        let run = bench.begin(Tool::Wall, Aim::AllPython, rate_hz)?;
        sleep(STEADY);
        with.push(runs()?);
        run.finish()?;
    }
    let Longer { percent, interval: [low, high] } =
        Longer::of(&without, &with).context("an interval needs two rounds")?;
    let what = format!(
        "{what}, the fastest tenth of {} runs each way by turns, is slower beside `--all-python --wall` (95 % interval {low:.1} to {high:.1})",
        rounds * RUNS
    );
    Ok(Aimed { what, value: percent, aim: 5.0, unit: "%", decimals: 1 })
}

/// A row of one profiler.
fn compared(bench: &Bench, python: &Python, tool: Tool, rate_hz: u32, pairs: usize) -> Result<String> {
    let target = pair(bench, python)?;
    let (mut cpu, mut slower) = (Vec::new(), Vec::new());
    let window = || -> Result<f64> {
        let begin = target.mark()?;
        sleep(bench.effort.window);
        Ok(target.mark()?.trips_since(&begin))
    };
    let mut before = window()?;
    for pair in 1..=pairs {
        eprintln!("{}, {}, pair {pair} of {pairs}", tool.name(), python.name());
        let run = bench.begin(tool, Aim::Pid(target.pid()), rate_hz)?;
        let begin = target.mark()?;
        let watched = bench.watch(&run, &target, bench.effort.window)?;
        let with = target.mark()?.trips_since(&begin);
        let busy = watched.tool_cpu.as_secs_f64() + (watched.bpf.timer_ns + watched.bpf.other_ns) as f64 / 1e9;
        cpu.push(busy / watched.wall.as_secs_f64() * 100.0);
        run.finish()?;
        let after = window()?;
        slower.push((1.0 - with / f64::midpoint(before, after)) * 100.0);
        before = after;
    }
    let mut row = String::new();
    let (Some(cpu), Some(slower)) = (Interval::of(&cpu), Interval::of(&slower)) else { return Ok(row) };
    let [low, high] = [slower.mean - slower.half, slower.upper()];
    let (tool, python) = (tool.name(), python.name());
    let _ = writeln!(row, "| {tool} | {python} | {:.2} | {:.1} % | {low:.1} to {high:.1} % |", cpu.mean, slower.mean);
    Ok(row)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_has_its_verdict() {
        let row = |value| Aimed { what: "a switch".to_owned(), value, aim: 80.0, unit: "ns", decimals: 0 }.shown();
        assert_eq!(row(79.6), "| a switch | 80 ns | 80 ns | ok |\n");
        assert_eq!(row(81.2), "| a switch | 81 ns | 80 ns | **over** |\n");
    }
}
