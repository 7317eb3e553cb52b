//! What recording costs the way people record: with default options, so with native frames, on several interpreters and hosts, beside
//! the other profilers. [`rows`] has the profilers side by side, [`many_cpus`] a machine that this one is not, [`energy`] one with hardly
//! anything to do.

mod energy;
mod many_cpus;
mod rows;

use std::fmt::Write as _;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::aims::Aimed;
use super::measure::{Bench, DEPTH, RATES_HZ, ToolCost, slowdowns, start_phases};
use super::probe;
use super::stats::{Interval, median};
use super::target::{Idle, Target};
use super::tools::{Aim, Tool};
use crate::programs;
use rows::Names;

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
/// Recordings from which names are known where they are, and their rate, so that they meet what there is.
const EARLIER: usize = 6;
const EARLIER_HZ: u32 = 499;
/// Pairs of windows with and without the profiler.
const PAIRS: usize = 40;
/// How long the recordings last of which a start's cost is taken.
const SHORT: Duration = Duration::from_millis(500);

/// A part of the section, for `--usual-only`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Part {
    /// All profilers on each interpreter
    Interpreters,
    /// Both profilers on a program that trains with torch, whose packages take 7 GiB of the cache
    Torch,
    /// Guests with 2 and with 16 emulated CPUs
    ManyCpus,
    /// Short recordings
    Start,
    /// How much slower the target runs
    Slowdown,
    /// Memory
    Memory,
    /// A host with many busy processes
    Busy,
    /// A host with many idle ones
    Idle,
    /// A machine with hardly anything to do: energy and wake-ups
    Energy,
}

impl Part {
    /// Whether it is measured: one of `only`, or of all if that names none, but for two that `--quick` would not be quick with.
    fn is_wanted(self, only: &[Self], quick: bool) -> bool {
        if only.is_empty() { !(quick && matches!(self, Self::Torch | Self::ManyCpus)) } else { only.contains(&self) }
    }
}

/// The page's section, or some parts of it.
///
/// # Errors
/// An interpreter is missing, a package is not available, a guest does not boot, or a profiler failed.
pub(crate) fn section(bench: &Bench, quick: bool, only: &[Part]) -> Result<String> {
    let [low, high] = RATES_HZ;
    let wanted = |part: Part| part.is_wanted(only, quick);
    // First what is most likely to fail.
    let many_cpus = wanted(Part::ManyCpus).then(|| many_cpus::measure(&bench.tools.tachyon)).transpose()?;
    let torch = wanted(Part::Torch).then(programs::torch).transpose()?;
    let mut short = Vec::new();
    let mut page = format!(
        "\nOne busy process of {DEPTH} frames, each profiler with its default options (this one with native frames), watched for \
         {} s from {} s after its start. Wake-ups are voluntary context switches of all its threads. `perf record -g` can only see Python \
         functions of programs that were started with `-X perf`; its own work in the kernel is in no clock of its process. \
         \"Whole run\" is user and system time from start to end (`wait4`). Names of native functions are known from earlier recordings, \
         as from the second one of a program on, only where that is said.{}\n",
        bench.effort.cost.as_secs_f64(),
        STEADY.as_secs_f64(),
        if torch.is_some() {
            " The row with torch is a loop that trains a small network on the CPU, with one thread; the wheel's CUDA libraries are mapped."
        } else {
            ""
        },
    );
    let mut aims = Vec::new();
    let mut add = |what: String, value: f64, aim: f64, unit: &'static str, decimals: usize| {
        aims.push(Aimed { what, value, aim, unit, decimals });
    };
    let mut costs = Vec::new();
    if wanted(Part::Interpreters) {
        costs = rows::interpreters(bench)?;
        let ordinary = bench.ordinary().name();
        let of =
            |names, tool, rate_hz| rows::find(&costs, &ordinary, (names, tool), rate_hz).context("it was measured");
        for (names, rate_hz, aim) in [(Names::Unknown, low, 0.2), (Names::Known, low, 0.2), (Names::Known, high, 0.8)] {
            let cost = of(names, Tool::Native, rate_hz)?;
            let what = format!("whole profiler at {rate_hz} Hz, {ordinary}{}", names.shown());
            add(what, cost.share() * 100.0, aim, "% of a core", 3);
        }
        let (ours, theirs) = (of(Names::Known, Tool::Native, low)?, of(Names::Unknown, Tool::PySpy, low)?);
        add(format!("the same at {low} Hz as a share of py-spy's"), ours.share() / theirs.share() * 100.0, 3.3, "%", 2);
        add(format!("wake-ups at {low} Hz, {ordinary}"), ours.wakeups_a_second, 5.0, "a second", 1);
        let first = of(Names::Unknown, Tool::Native, low)?;
        short.push(format!(
            "At {low} Hz, the profiler takes {:.2} % of a core, including the kernel side, and wakes {:.1} times a second; in the first \
             recording of a program {:.2} %. py-spy takes {:.1} %, without native frames, and wakes {:.0} times.",
            ours.share() * 100.0,
            ours.wakeups_a_second,
            first.share() * 100.0,
            theirs.share() * 100.0,
            theirs.wakeups_a_second,
        ));
        let (ours, theirs) = (of(Names::Known, Tool::Native, high)?, of(Names::Unknown, Tool::PySpy, high)?);
        let shares = [ours, theirs].map(|cost| cost.share() * 100.0);
        short.push(format!("At {high} Hz, it takes {:.2} %, and py-spy {:.1} %.", shares[0], shares[1]));
    }
    if let Some(many_cpus) = &many_cpus {
        let (what, value) = many_cpus.aimed();
        add(what, value, 5.0, "a second", 1);
    }
    if let Some(torch) = &torch {
        costs.extend(rows::program(bench, torch)?);
    }
    if !costs.is_empty() {
        page.push_str(&rows::table(&costs));
    }
    if wanted(Part::Start) {
        let whole = "CPU time of a recording of half a second, start and end included";
        let (unknown, known) = (start(bench)?, with_names(bench, || start(bench))?);
        add(format!("{whole}: nothing is known of its files"), unknown, 80.0, "ms", 0);
        add(format!("{whole}: names of their functions are known"), known, 30.0, "ms", 0);
        short.push(format!(
            "A recording of half a second takes {known:.0} ms of CPU time, the first one {unknown:.0} ms."
        ));
        let first = first_sample(bench)?;
        add(
            format!("first sample, `--all-python`, {PROCESSES} processes on the host, one of them busy, on all CPUs"),
            first,
            100.0,
            "ms",
            0,
        );
    }
    let slowdown = wanted(Part::Slowdown).then(|| slowdown(bench, quick)).transpose()?;
    if let Some(Interval { mean, half, count }) = slowdown {
        let what = format!("target's slowdown at {low} Hz, {count} pairs, upper end of the 95 % interval");
        add(what, mean + half, 0.5, "%", 2);
    }
    short.extend(slowdown.as_ref().map(told));
    if wanted(Part::Memory) {
        for (pythons, aim) in PYTHONS.into_iter().zip([24.0, 60.0, 100.0]) {
            let what = format!("memory with the maps, Python processes: {pythons}");
            add(what.clone(), memory(bench, pythons)?, aim, "MiB", 1);
            if pythons == 1 {
                let value = with_names(bench, || memory(bench, pythons))?;
                short.push(format!("It uses {value:.0} MiB of memory, including its maps in the kernel."));
                add(format!("{what}, names of functions are known"), value, aim, "MiB", 1);
            }
        }
    }
    if wanted(Part::Busy) {
        let (user, bpf) = busy(bench)?;
        let host = format!("`--all-python` at {low} Hz, {BUSY} of {PROCESSES} processes busy");
        add(format!("{host}: CPU of its process, a sample"), user, 25.0, "µs", 1);
        add(format!("{host}: BPF, a run"), bpf, 10.0, "µs", 1);
    }
    if !aims.is_empty() {
        page.push_str("\n| what | measured | aim | |\n|---|---:|---:|---|\n");
        aims.iter().for_each(|aimed| page.push_str(&aimed.shown()));
    }
    if wanted(Part::Idle) {
        let many = if quick { PROCESSES } else { MANY_IDLE };
        let idle = idle(bench, many)?;
        // `fmt::Write` for `String` does not fail.
        let _ = writeln!(
            page,
            "\nWith {many} idle Python processes and one busy one, `--all-python` at {low} Hz takes {:.3} % of a core and {:.1} wake-ups \
             a second.",
            idle.share() * 100.0,
            idle.wakeups_a_second,
        );
    }
    if let Some(many_cpus) = &many_cpus {
        page.push_str(&many_cpus.table());
    }
    if wanted(Part::Energy) {
        page.push_str(&energy::sentences(bench, quick)?);
    }
    Ok(format!("{HEADING}{}{page}", in_short(&short)))
}

/// The answers that most readers look for.
fn in_short(answers: &[String]) -> String {
    if answers.is_empty() {
        return String::new();
    }
    let list: String = answers.iter().map(|answer| format!("- {answer}\n")).collect();
    format!(
        "\nA busy Python program with a stack of {DEPTH} frames, recorded with default options, so with native frames; but for the first \
         recording of a program, names of its native functions are known from an earlier one:\n\n{list}"
    )
}

/// The share of its speed that the target loses, in percent; names of functions are known.
fn slowdown(bench: &Bench, quick: bool) -> Result<Interval> {
    let pairs = if quick { bench.effort.pairs } else { PAIRS };
    let measured = with_names(bench, || slowdowns(bench, &[(Tool::Native, RATES_HZ[0])], pairs))?;
    Ok(measured.into_iter().next().context("it was measured")?.percent)
}

/// What that came to, and whether it is anything.
fn told(&Interval { mean, half, count }: &Interval) -> String {
    let (least, most) = (mean - half, mean + half);
    let verdict = if least > 0.0 { "more than nothing" } else { "not to be told from 0" };
    format!(
        "The target's slowdown at {} Hz is {mean:.2} % (95 % interval: {least:.2} to {most:.2} %, {count} pairs): {verdict}.",
        RATES_HZ[0],
    )
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

/// The same measurement where earlier recordings have kept the names of nearly all functions that are met.
fn with_names<T>(bench: &Bench, measure: impl Fn() -> Result<T>) -> Result<T> {
    let target = bench.target(DEPTH, 0)?;
    know(bench, &target)?;
    drop(target);
    knowing(bench, measure)
}

/// Records a target as often as it takes to keep the names of nearly all functions that it runs.
fn know(bench: &Bench, target: &Target) -> Result<()> {
    knowing(bench, || {
        for _ in 0..EARLIER {
            let run = bench.tools.start(Tool::Native, Aim::Pid(target.pid()), EARLIER_HZ)?;
            sleep(Duration::from_secs(2));
            run.finish()?;
        }
        Ok(())
    })
}

/// Measures with the names that are kept.
fn knowing<T>(bench: &Bench, measure: impl Fn() -> Result<T>) -> Result<T> {
    bench.tools.keeps_names.set(true);
    let measured = measure();
    bench.tools.keeps_names.set(false);
    measured
}

/// Milliseconds from the start of a recording of a host until the timer's program has run, median of several. It may use the busy
/// process's CPU, too, as it does unless somebody forbids it: what it does at first is for several CPUs.
fn first_sample(bench: &Bench) -> Result<f64> {
    let _target = bench.target(DEPTH, 0)?;
    let _others = Idle::fill_up_to(PROCESSES)?;
    sleep(Duration::from_secs(2));
    let mut found = Vec::new();
    for _ in 0..2 * bench.effort.starts {
        bench.tools.everywhere.set(true);
        let run = bench.tools.start(Tool::Native, Aim::AllPython, RATES_HZ[0]);
        bench.tools.everywhere.set(false);
        let mut run = run?;
        found.push(start_phases(&mut run, Duration::from_millis(1))?.first_run_ms);
        run.finish()?;
    }
    median(&found).context("at least one start")
}

/// Peak RSS and maps in MiB, with so many Python processes of which one is busy. Pages of maps that the profiler has mapped are in both,
/// and count once.
fn memory(bench: &Bench, pythons: usize) -> Result<f64> {
    eprintln!("memory, Python processes: {pythons}");
    let target = bench.target(DEPTH, 0)?;
    let _others = Idle::pythons(&bench.python, pythons - 1)?;
    sleep(Duration::from_secs(2));
    let aim = if pythons == 1 { Aim::Pid(target.pid()) } else { Aim::AllPython };
    let run = bench.begin(Tool::Native, aim, RATES_HZ[0])?;
    let end = Instant::now() + bench.effort.cost / 2;
    let (mut peak, mut mapped) = (None, 0);
    while Instant::now() < end {
        let now = probe::field(&format!("/proc/{}/status", run.pid()), "VmHWM");
        if now != peak {
            // As of then, but for the moment between two looks.
            (peak, mapped) = (now, probe::mapped_maps(run.pid())?);
        }
        sleep(Duration::from_millis(5));
    }
    let whole = run.finish()?;
    let maps = whole.report.context("the profiler writes a report")?.cost.map_bytes;
    Ok((whole.peak_rss_bytes.saturating_sub(mapped) + maps) as f64 / MIB)
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

#[cfg(test)]
mod tests {
    use super::*;
    use clap::ValueEnum as _;

    #[test]
    fn a_slowdown_is_told_from_nothing() {
        let interval = |mean, half| Interval { mean, half, count: 40 };
        assert!(
            told(&interval(0.2, 0.3))
                .contains("at 99 Hz is 0.20 % (95 % interval: -0.10 to 0.50 %, 40 pairs): not to be told")
        );
        assert!(told(&interval(0.4, 0.3)).contains("0.10 to 0.70 %, 40 pairs): more than nothing"));
    }

    #[test]
    fn what_is_measured() {
        let parts = |only: &[Part], quick: bool| -> Vec<Part> {
            Part::value_variants().iter().copied().filter(|part| part.is_wanted(only, quick)).collect()
        };
        assert_eq!(parts(&[], false), Part::value_variants());
        let quick = parts(&[], true);
        assert_eq!(quick.len() + 2, Part::value_variants().len());
        assert!(!quick.contains(&Part::Torch) && !quick.contains(&Part::ManyCpus));
        assert_eq!(parts(&[Part::Torch], true), [Part::Torch]);
        assert_eq!(parts(&[Part::Energy, Part::Start], false), [Part::Start, Part::Energy]);
    }
}
