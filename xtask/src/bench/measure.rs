//! The measurements, one function each. None of them judges: that is left to [`super::results`].

use std::path::PathBuf;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::probe::{self, BpfObjects};
use super::stats::Interval;
use super::target::{Idle, Mark, Shape, Target};
use super::tools::{Aim, Run, Tool, Tools, Usage};
use crate::zoo::Python;

/// How long and how often to measure.
#[derive(Clone, Copy)]
pub(crate) struct Effort {
    /// Length of each measurement of a tool's cost.
    pub(crate) cost: Duration,
    /// Length of each measurement inside the kernel.
    pub(crate) kernel: Duration,
    /// Length of each half of a pair with and without a profiler.
    pub(crate) window: Duration,
    /// Pairs.
    pub(crate) pairs: usize,
    /// Starts.
    pub(crate) starts: usize,
}

/// What all measurements share.
pub(crate) struct Bench {
    pub(crate) tools: Tools,
    /// The target's, outside of any chroot.
    pub(crate) python: PathBuf,
    /// One that counts freed code objects (3.14+), so that nothing has to be read for known ones.
    pub(crate) counting: Python,
    /// One whose code objects have no version (before 3.12): the strings and the line table of each are hashed every time.
    pub(crate) hashed: Python,
    /// The target's CPU; no tool runs there.
    pub(crate) cpu: usize,
    pub(crate) effort: Effort,
}

/// Rates both tools are compared at.
pub(crate) const RATES_HZ: [u32; 2] = [99, 1000];
/// The rate at which caches stay warm between samples.
pub(crate) const WARM_HZ: u32 = 5000;
/// Depth of the ordinary target.
pub(crate) const DEPTH: usize = 30;
/// Depths that separate the cost of a frame from the cost of a sample.
pub(crate) const DEPTHS: [usize; 3] = [2, DEPTH, 200];
/// Frames called from C when native frames are measured: with those that start the program, native stacks of pyenv's
/// 3.13 then have 20 frames.
pub(super) const THROUGH_C: usize = 1;
/// Memory the target reads through between samples, so that they find cold caches: more than a core's own.
pub(crate) const SWEEP_MIB: usize = 8;

/// Nothing needs longer to start.
const PATIENCE: Duration = Duration::from_secs(30);
/// Between the first sample and the measurement: by then the names of whatever runs all the time are known.
pub(crate) const SETTLE: Duration = Duration::from_millis(300);
/// The same when the profiler's own CPU time is measured: symbols are read when the first samples are, which may be 0.8 s later.
const STEADY: Duration = Duration::from_secs(2);
/// The other tools do not show when they have started.
const OTHERS_START: Duration = Duration::from_secs(1);

/// One tool at one rate.
pub(crate) struct ToolCost {
    pub(crate) tool: Tool,
    pub(crate) rate_hz: u32,
    /// Its processes' CPU time, shares of a core, while it samples.
    pub(crate) user_share: f64,
    /// Its BPF programs' time in the same window, shares of a core.
    pub(crate) bpf_share: f64,
    /// The timer's program's time divided by the target's CPU time.
    pub(crate) bpf_of_target: f64,
    /// How long the window was.
    pub(crate) watched: Duration,
    /// Runs of the timer's program in the window.
    pub(crate) runs: u64,
    /// How often its threads woke.
    pub(crate) wakeups_a_second: f64,
    /// The run from its start to its end.
    pub(crate) whole: Usage,
}

impl ToolCost {
    /// Process and BPF together.
    pub(crate) fn share(&self) -> f64 {
        self.user_share + self.bpf_share
    }
}

/// Both tools at both rates on one target.
pub(crate) fn tool_costs(bench: &Bench) -> Result<Vec<ToolCost>> {
    let target = bench.target(DEPTH, 0)?;
    let mut costs = Vec::new();
    for rate_hz in RATES_HZ {
        for tool in [Tool::Tachyon, Tool::Native, Tool::PySpy] {
            eprintln!("{} at {rate_hz} Hz", tool.name());
            costs.push(bench.cost(tool, Aim::Pid(target.pid()), rate_hz, &target)?);
        }
    }
    Ok(costs)
}

/// What happened in a window of a run.
pub(crate) struct Watched {
    pub(crate) wall: Duration,
    pub(crate) tool_cpu: Duration,
    /// Voluntary context switches of its threads.
    pub(crate) tool_wakeups: u64,
    pub(crate) target_cpu: Duration,
    pub(crate) bpf: BpfObjects,
}

impl Bench {
    /// The ordinary target's interpreter.
    pub(crate) fn ordinary(&self) -> Python {
        Python { path: self.python.clone(), root: None }
    }

    pub(crate) fn target(&self, depth: usize, sweep_mib: usize) -> Result<Target> {
        Target::start(&self.ordinary(), self.cpu, Shape { sweep_mib, ..Shape::deep(depth) })
    }

    /// Starts a tool and returns once it samples.
    pub(crate) fn begin(&self, tool: Tool, aim: Aim, rate_hz: u32) -> Result<Run> {
        let mut run = self.tools.start(tool, aim, rate_hz)?;
        match tool {
            // It samples no running threads: the only sign that it has started is that its tracepoints run.
            Tool::OffCpu => sleep(OTHERS_START),
            _ if tool.is_ours() => drop(start_phases(&mut run, Duration::from_millis(5))?),
            _ => sleep(OTHERS_START),
        }
        sleep(SETTLE);
        run.check()?;
        Ok(run)
    }

    /// What a tool costs while it samples `target`, perhaps among others.
    pub(crate) fn cost(&self, tool: Tool, aim: Aim, rate_hz: u32, target: &Target) -> Result<ToolCost> {
        self.cost_after(STEADY, tool, aim, rate_hz, target)
    }

    /// The same, from so long after its start on.
    pub(crate) fn cost_after(
        &self,
        start: Duration,
        tool: Tool,
        aim: Aim,
        rate_hz: u32,
        target: &Target,
    ) -> Result<ToolCost> {
        let run = self.begin(tool, aim, rate_hz)?;
        sleep(start);
        let watched = self.watch(&run, target, self.effort.cost)?;
        let wall = watched.wall.as_secs_f64();
        let timer = watched.bpf.timer_ns as f64 / 1e9;
        Ok(ToolCost {
            tool,
            rate_hz,
            user_share: watched.tool_cpu.as_secs_f64() / wall,
            bpf_share: (timer + watched.bpf.other_ns as f64 / 1e9) / wall,
            bpf_of_target: timer / watched.target_cpu.as_secs_f64(),
            watched: watched.wall,
            runs: watched.bpf.timer_runs,
            wakeups_a_second: watched.tool_wakeups as f64 / wall,
            whole: run.finish()?,
        })
    }

    pub(crate) fn watch(&self, run: &Run, target: &Target, length: Duration) -> Result<Watched> {
        // When waits are sampled the profiler does not keep it on.
        let _measured = probe::measure_bpf()?;
        let before = (target.mark()?, probe::cpu_time(run.pid())?, BpfObjects::of(run.pid()));
        let wakeups = probe::wakeups(run.pid());
        sleep(length);
        let tool_wakeups = probe::wakeups(run.pid()).saturating_sub(wakeups);
        let (mark, cpu, bpf) = (target.mark()?, probe::cpu_time(run.pid())?, BpfObjects::of(run.pid()));
        let (wall, target_cpu) = mark.since(&before.0);
        let tool_cpu = cpu.saturating_sub(before.1);
        Ok(Watched { wall, tool_cpu, tool_wakeups, target_cpu, bpf: bpf.since(&before.2) })
    }
}

/// Nanoseconds of one run of the timer's program with nothing selected, at the sampling rate and warm.
#[derive(Clone, Copy)]
pub(crate) struct NothingSelected {
    pub(crate) cold_ns: f64,
    pub(crate) warm_ns: f64,
}

/// Profiles a process that waits, beside one that works.
pub(crate) fn nothing_selected(bench: &Bench) -> Result<NothingSelected> {
    let waiting = Idle::pythons(&bench.python, 1)?;
    let aim = Aim::Pid(waiting.pid().context("one idle process was started")?);
    // It must be CPython by the time the profiler looks at it.
    sleep(Duration::from_millis(300));
    let measure = |rate_hz, sweep_mib| -> Result<f64> {
        eprintln!("nothing selected at {rate_hz} Hz");
        let target = bench.target(DEPTH, sweep_mib)?;
        let run = bench.begin(Tool::Tachyon, aim, rate_hz)?;
        let bpf = bench.watch(&run, &target, bench.effort.kernel)?.bpf;
        run.finish()?;
        per_run(&bpf)
    };
    Ok(NothingSelected { cold_ns: measure(RATES_HZ[0], SWEEP_MIB)?, warm_ns: measure(WARM_HZ, 0)? })
}

fn per_run(bpf: &BpfObjects) -> Result<f64> {
    if bpf.timer_runs == 0 || bpf.timer_ns == 0 {
        bail!("the kernel counted no runs of the BPF program\nhint: needs Linux 5.12 and CAP_SYS_ADMIN");
    }
    Ok(bpf.timer_ns as f64 / bpf.timer_runs as f64)
}

/// The in-kernel cost of a sample under one condition, by depth.
pub(crate) struct SampleCost {
    pub(crate) rate_hz: u32,
    pub(crate) sweep_mib: usize,
    /// Depth and nanoseconds.
    pub(crate) points: Vec<(usize, f64)>,
}

impl SampleCost {
    /// Nanoseconds at a depth.
    pub(crate) fn at(&self, depth: usize) -> Option<f64> {
        self.points.iter().find(|point| point.0 == depth).map(|point| point.1)
    }
}

/// The in-kernel costs of samples of one interpreter.
pub(crate) struct Samples {
    /// Its name.
    pub(crate) python: String,
    pub(crate) costs: Vec<SampleCost>,
}

impl Samples {
    /// Each cost with the interpreter's name.
    pub(crate) fn rows(&self) -> impl Iterator<Item = (&str, &SampleCost)> {
        self.costs.iter().map(|cost| (&*self.python, cost))
    }

    pub(crate) fn under(&self, rate_hz: u32, sweep_mib: usize) -> Option<&SampleCost> {
        self.costs.iter().find(|cost| (cost.rate_hz, cost.sweep_mib) == (rate_hz, sweep_mib))
    }
}

/// Samples of three depths: cold and warm at the lower rate, warm at the higher ones.
pub(crate) fn sample_costs(bench: &Bench, python: &Python, nothing: NothingSelected) -> Result<Samples> {
    let name = python.name();
    let conditions = [(RATES_HZ[0], SWEEP_MIB), (RATES_HZ[0], 0), (RATES_HZ[1], 0), (WARM_HZ, 0)];
    let mut costs = Vec::new();
    for (rate_hz, sweep_mib) in conditions {
        let mut points = Vec::new();
        for depth in DEPTHS {
            eprintln!("{depth} frames of {name} at {rate_hz} Hz, {sweep_mib} MiB swept");
            let target = Target::start(python, bench.cpu, Shape { sweep_mib, ..Shape::deep(depth) })?;
            points.push((depth, sample_cost(bench, &target, Tool::Tachyon, Aim::Pid(target.pid()), rate_hz, nothing)?));
        }
        costs.push(SampleCost { rate_hz, sweep_mib, points });
    }
    Ok(Samples { python: name, costs })
}

/// Samples of the ordinary depth with native frames: at the lower rate, then with cold caches, and warm.
pub(crate) fn native_costs(bench: &Bench, nothing: NothingSelected) -> Result<Vec<SampleCost>> {
    let mut costs = Vec::new();
    for (rate_hz, sweep_mib) in [(RATES_HZ[0], 0), (RATES_HZ[0], SWEEP_MIB), (WARM_HZ, 0)] {
        eprintln!("{DEPTH} frames and native ones at {rate_hz} Hz, {sweep_mib} MiB swept");
        let shape = Shape { sweep_mib, through_c: THROUGH_C, ..Shape::deep(DEPTH) };
        let target = Target::start(&bench.ordinary(), bench.cpu, shape)?;
        let points =
            vec![(DEPTH, sample_cost(bench, &target, Tool::Native, Aim::Pid(target.pid()), rate_hz, nothing)?)];
        costs.push(SampleCost { rate_hz, sweep_mib, points });
    }
    Ok(costs)
}

/// Nanoseconds of a sample of the target, which nearly all samples meet.
pub(crate) fn sample_cost(
    bench: &Bench,
    target: &Target,
    tool: Tool,
    aim: Aim,
    rate_hz: u32,
    nothing: NothingSelected,
) -> Result<f64> {
    let other_ns = if rate_hz == RATES_HZ[0] { nothing.cold_ns } else { nothing.warm_ns };
    let run = bench.begin(tool, aim, rate_hz)?;
    let mean = per_run(&bench.watch(&run, target, bench.effort.kernel)?.bpf)?;
    let report = run.finish()?.report.context("the profiler writes a report")?;
    // The other runs met other CPUs: idle, or busy with unselected programs.
    let share = report.stored as f64 / report.ran as f64;
    Ok((mean - (1.0 - share) * other_ns) / share)
}

/// The speed that a target loses to one tool at one rate, in percent of its speed without.
pub(crate) struct Slowdown {
    pub(crate) tool: Tool,
    pub(crate) rate_hz: u32,
    pub(crate) percent: Interval,
}

/// Windows with a profiler between windows without, tools and their rates in turn: each window with one is compared with
/// the mean of the two beside it, which removes slow drifts.
pub(crate) fn slowdowns(bench: &Bench, conditions: &[(Tool, u32)], pairs: usize) -> Result<Vec<Slowdown>> {
    let target = bench.target(DEPTH, 0)?;
    let mut values = vec![Vec::new(); conditions.len()];
    let window = |begin: Mark| -> Result<f64> {
        sleep(bench.effort.window);
        Ok(target.mark()?.speed_since(&begin))
    };
    let mut before = window(target.mark()?)?;
    for pair in 1..=pairs {
        eprintln!("slowdown, pair {pair} of {pairs}");
        for (condition, &(tool, rate_hz)) in conditions.iter().enumerate() {
            let run = bench.begin(tool, Aim::Pid(target.pid()), rate_hz)?;
            let with = window(target.mark()?)?;
            run.finish()?;
            let after = window(target.mark()?)?;
            values[condition].push((1.0 - with / f64::midpoint(before, after)) * 100.0);
            before = after;
        }
    }
    conditions
        .iter()
        .zip(values)
        .map(|(&(tool, rate_hz), values)| {
            let percent = Interval::of(&values).context("an interval needs two pairs")?;
            Ok(Slowdown { tool, rate_hz, percent })
        })
        .collect()
}

/// Time from a profiler's start, in milliseconds, until ...
#[derive(Clone, Copy, Default)]
pub(crate) struct StartPhases {
    /// ... its first map exists: program start and the kernel's types.
    pub(crate) types_ms: f64,
    /// ... its programs are loaded.
    pub(crate) loaded_ms: f64,
    /// ... the timer is attached: processes found and inspected.
    pub(crate) attached_ms: f64,
    /// ... the timer's program ran.
    pub(crate) first_run_ms: f64,
}

/// Raw tracepoints, which are attached before processes are searched for.
const TRACEPOINTS: usize = 4;

/// Watches a start from outside until the timer's program runs.
pub(crate) fn start_phases(run: &mut Run, poll: Duration) -> Result<StartPhases> {
    let (mut phases, start) = (StartPhases::default(), run.started());
    let reach = |phase: &mut f64, reached: bool| {
        if reached && *phase == 0.0 {
            *phase = start.elapsed().as_secs_f64() * 1e3;
        }
    };
    while start.elapsed() < PATIENCE {
        let objects = BpfObjects::of(run.pid());
        reach(&mut phases.types_ms, objects.maps > 0);
        // The event that follows mappings is opened once the programs are loaded.
        reach(&mut phases.loaded_ms, objects.perf_events > 0);
        reach(&mut phases.attached_ms, objects.links > TRACEPOINTS || objects.timer_runs > 0);
        reach(&mut phases.first_run_ms, objects.timer_runs > 0);
        if objects.timer_runs > 0 {
            return Ok(phases);
        }
        run.check()?;
        sleep(poll);
    }
    bail!("the profiler did not sample within {} s", PATIENCE.as_secs())
}
