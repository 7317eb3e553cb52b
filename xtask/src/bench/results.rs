//! What was measured, as the page `docs/performance.md`: each figure beside its budget, including those over it.

use std::fmt::Write as _;

use super::aims::Aimed;
use super::crowd::{Crowd, PROCESSES, PYTHONS};
use super::machine::Machine;
use super::measure::{
    Bench, DEPTH, DEPTHS, NothingSelected, RATES_HZ, SWEEP_MIB, SampleCost, Samples, Slowdown, ToolCost, WARM_HZ,
};
use super::stats::line;
use super::tools::Tool;
use super::usual;

/// Everything one run of the benchmark measured.
pub(crate) struct Results {
    pub(crate) machine: Machine,
    pub(crate) nothing: NothingSelected,
    pub(crate) samples: Samples,
    /// The same for the interpreter that counts freed code objects.
    pub(crate) counting: Samples,
    /// The same for one before 3.12.
    pub(crate) hashed: Samples,
    pub(crate) native: Vec<SampleCost>,
    pub(crate) tools: Vec<ToolCost>,
    pub(crate) crowd: Crowd,
    pub(crate) slowdowns: Vec<Slowdown>,
}

const MIB: f64 = 1024.0 * 1024.0;

impl Results {
    fn tool(&self, tool: Tool, rate_hz: u32) -> Option<&ToolCost> {
        self.tools.iter().find(|cost| cost.tool == tool && cost.rate_hz == rate_hz)
    }

    fn slowdown(&self, tool: Tool, rate_hz: u32) -> Option<&Slowdown> {
        self.slowdowns.iter().find(|slowdown| slowdown.tool == tool && slowdown.rate_hz == rate_hz)
    }

    fn memory_mib(&self) -> f64 {
        let maps = self.crowd.whole.report.as_ref().map_or(0, |report| report.cost.map_bytes);
        (self.crowd.whole.peak_rss_bytes + maps) as f64 / MIB
    }

    /// The budget of the design, as far as this version has the budgeted features.
    fn budgeted(&self) -> Vec<Aimed> {
        let mut all = Vec::new();
        let mut add = |what: String, value: Option<f64>, budget: f64, unit: &'static str, decimals: usize| {
            all.extend(value.map(|value| Aimed { what, value, aim: budget, unit, decimals }));
        };
        let [low, high] = RATES_HZ;
        let swept = |mib: usize| if mib > 0 { ", caches swept" } else { "" };
        add(format!("firing where nothing is selected, {WARM_HZ} Hz"), Some(self.nothing.warm_ns), 150.0, "ns", 0);
        // What the budget calls found in the cache, and checked again: on 3.12 and 3.13 each frame's `co_version` is
        // read, before that everything shown of it.
        for (of, each, budget) in [
            (&self.counting, "found known", 80.0),
            (&self.samples, "checked anew", 170.0),
            (&self.hashed, "hashed anew", 170.0),
        ] {
            let python = &of.python;
            let warm = of.under(WARM_HZ, 0).and_then(|cost| line(&as_points(cost)));
            let what = format!("sample of {python} in the kernel, {WARM_HZ} Hz: without its frames");
            add(what, warm.map(|fit| fit.0), 1200.0, "ns", 0);
            add(format!("the same: each frame, {each}"), warm.map(|fit| fit.1), budget, "ns", 0);
            // The budget names the rate. Sweeping the caches as well is harder than the budget asks, but is checked against
            // it, too.
            for mib in [0, SWEEP_MIB] {
                let what = format!("sample of {DEPTH} frames of {python} in the kernel, {low} Hz{}", swept(mib));
                add(what, of.under(low, mib).and_then(|cost| cost.at(DEPTH)).map(|ns| ns / 1e3), 8.0, "µs", 1);
            }
        }
        for cost in &self.native {
            let (rate, what) = (cost.rate_hz, swept(cost.sweep_mib));
            let what = format!("sample of {DEPTH} Python and 20 native frames, {rate} Hz{what}");
            let budget = if rate == WARM_HZ { 10.0 } else { 20.0 };
            add(what, cost.at(DEPTH).map(|ns| ns / 1e3), budget, "µs", 1);
        }
        let share = |tool, rate| self.tool(tool, rate).map(ToolCost::share);
        let percent = |share: Option<f64>| share.map(|share| share * 100.0);
        let ours = share(Tool::Tachyon, low);
        add(format!("whole profiler at {low} Hz, one busy process"), percent(ours), 0.3, "% of a core", 3);
        let ratio = ours.zip(share(Tool::PySpy, low)).map(|(ours, theirs)| ours / theirs);
        add("the same as a share of py-spy's".to_owned(), percent(ratio), 5.0, "%", 2);
        let ours = share(Tool::Tachyon, high);
        add(format!("whole profiler at {high} Hz, one busy process"), percent(ours), 1.0, "% of a core", 3);
        let slowdown = self.slowdown(Tool::Tachyon, low).map(|slowdown| slowdown.percent.upper());
        add(format!("target's slowdown at {low} Hz, upper end of the interval"), slowdown, 1.0, "%", 2);
        for (rate, budget) in [(low, 0.1), (high, 1.0)] {
            let of_target = self.tool(Tool::Tachyon, rate).map(|cost| cost.bpf_of_target);
            add(format!("BPF time as a share of the target's CPU time, {rate} Hz"), percent(of_target), budget, "%", 3);
        }
        add(
            format!("memory with the maps, {PYTHONS} Python processes, native frames too"),
            Some(self.memory_mib()),
            100.0,
            "MiB",
            1,
        );
        let first = self.crowd.start.first_run_ms;
        add(format!("start to first firing, {PROCESSES} processes on the host"), Some(first), 300.0, "ms", 0);
        let share = self.crowd.filtered * 100.0;
        add("a run with 1 of 100 busy processes selected, of one with all".to_owned(), Some(share), 5.0, "%", 2);
        all
    }

    /// How many figures are over their budget.
    pub(crate) fn over(&self) -> usize {
        self.budgeted().iter().filter(|row| row.is_over()).count()
    }

    /// The page.
    pub(crate) fn page(&self, bench: &Bench) -> String {
        let mut page = String::new();
        page.push_str(HEAD);
        // First of all the way people record; its section takes this place.
        page.push_str(usual::HEADING);
        page.push_str("\n## Without native frames\n\n");
        self.in_short(&mut page);
        self.machine.describe(&mut page);
        page.push_str("\n## Against the budget\n\n| what | measured | budget | |\n|---|---:|---:|---|\n");
        self.budgeted().iter().for_each(|row| page.push_str(&row.shown()));
        page.push_str(NOT_MEASURED);
        self.beside(&mut page, bench);
        self.in_kernel(&mut page);
        self.slower(&mut page, bench);
        self.crowd.describe(&mut page);
        page.push_str(METHOD);
        page
    }

    /// The answers that most readers look for.
    fn in_short(&self, page: &mut String) {
        page.push_str(
            "A busy Python program with a stack of 30 frames, recorded with `--no-native`, on the machine below:\n\n",
        );
        for rate_hz in RATES_HZ {
            let [ours, theirs] = [Tool::Tachyon, Tool::PySpy].map(|tool| self.slowdown(tool, rate_hz));
            if let (Some(ours), Some(theirs)) = (ours, theirs) {
                let [low, high] = [ours.percent.mean - ours.percent.half, ours.percent.upper()];
                let _ = writeln!(
                    page,
                    "- Sampled at {rate_hz} Hz, it runs {:.1} % slower (95 % interval: {low:.1} to {high:.1} %). With py-spy: \
                     {:.1} %.",
                    ours.percent.mean, theirs.percent.mean
                );
            }
        }
        let [python, native, theirs] =
            [Tool::Tachyon, Tool::Native, Tool::PySpy].map(|tool| self.tool(tool, RATES_HZ[0]));
        if let (Some(python), Some(native), Some(theirs)) = (python, native, theirs) {
            let [python, native, theirs] = [python, native, theirs].map(|cost| cost.share() * 100.0);
            let _ = writeln!(
                page,
                "- At {} Hz, the profiler takes {python:.2} % of a core, including the kernel side, and {native:.2} % with native \
                 frames; py-spy takes {theirs:.1} % without native frames.",
                RATES_HZ[0]
            );
        }
        let _ = writeln!(
            page,
            "- With {PYTHONS} Python processes and native frames, it uses {:.0} MiB of memory, including its maps in the kernel.",
            self.memory_mib()
        );
        let (start, share) = (self.crowd.start.first_run_ms, self.crowd.filtered * 100.0);
        let _ = writeln!(
            page,
            "- On a host with {PROCESSES} processes, the first sample is taken {start:.0} ms after the start. Recording one of 100 \
             busy processes takes {share:.0} % of the kernel time that recording all of them takes.\n"
        );
    }

    fn beside(&self, page: &mut String, bench: &Bench) {
        let seconds = bench.effort.cost.as_secs_f64();
        let _ = write!(
            page,
            "\n## Beside py-spy\n\nOne run with the same busy process of {DEPTH} frames, watched for {seconds} s with each profiler while \
             it samples. \"Whole run\" is user and system time from start to end (`wait4`).\n\n\
             | | rate | CPU of its process | CPU in BPF | together | whole run | peak RSS | samples |\n\
             |---|---:|---:|---:|---:|---:|---:|---:|\n"
        );
        for cost in &self.tools {
            let bpf = if cost.tool.is_ours() { format!("{:.3} %", cost.bpf_share * 100.0) } else { "–".to_owned() };
            let _ = writeln!(
                page,
                "| {} | {} Hz | {:.3} % | {bpf} | {:.3} % | {:.2} s of {:.1} s | {:.1} MiB | {} |",
                cost.tool.name(),
                cost.rate_hz,
                cost.user_share * 100.0,
                cost.share() * 100.0,
                cost.whole.cpu.as_secs_f64(),
                cost.whole.wall.as_secs_f64(),
                cost.whole.peak_rss_bytes as f64 / MIB,
                cost.whole.samples.map_or_else(|| "?".to_owned(), |samples| samples.to_string()),
            );
        }
        page.push('\n');
        for cost in self.tools.iter().filter(|cost| cost.tool == Tool::Tachyon) {
            let Some(report) = &cost.whole.report else { continue };
            let number = |count: Option<u64>| count.map_or_else(|| "unknown".to_owned(), |count| count.to_string());
            let _ = writeln!(
                page,
                "- {} Hz: event `{}`; {} samples stored, {} expected; the timer's program ran {} times, {} by the kernel's count.",
                cost.rate_hz,
                report.event,
                report.stored,
                number(report.expected),
                report.ran,
                number(report.cost.bpf_run_count),
            );
        }
    }

    fn in_kernel(&self, page: &mut String) {
        let _ = write!(
            page,
            "\n## In the kernel\n\nNanoseconds per run of the timer's program (`run_time_ns` ÷ `run_cnt`), by the depth \
             of the Python stack; every frame has a code object of its own. The last two columns are the line fitted through \
             the depths: its intercept and its slope. If nothing is selected, a run takes {:.0} ns at {WARM_HZ} Hz, and {:.0} ns at {} Hz \
             with caches swept. From 3.14 on, nothing is read from code objects that are already known; on 3.12 and 3.13, the version \
             of each is read; before 3.12, its names and its line table, because nothing cheaper proves that they are unchanged.\n\n\
             | target | rate | swept between samples |",
            self.nothing.warm_ns, self.nothing.cold_ns, RATES_HZ[0],
        );
        for depth in DEPTHS {
            let _ = write!(page, " {depth} frames |");
        }
        page.push_str(" a sample | + a frame |\n|---|---:|---:|");
        page.push_str(&"---:|".repeat(DEPTHS.len() + 2));
        page.push('\n');
        for (python, cost) in [&self.samples, &self.counting, &self.hashed].into_iter().flat_map(Samples::rows) {
            let _ = write!(page, "| {python} | {} Hz | {} MiB |", cost.rate_hz, cost.sweep_mib);
            for (_, ns) in &cost.points {
                let _ = write!(page, " {ns:.0} |");
            }
            if let Some((intercept, slope)) = line(&as_points(cost)) {
                let _ = write!(page, " {intercept:.0} | {slope:.0} |");
            }
            page.push('\n');
        }
    }

    fn slower(&self, page: &mut String, bench: &Bench) {
        let _ = write!(
            page,
            "\n## The target's slowdown\n\n{} interleaved pairs of {} s with the profiler and {} s without it: the share of \
             its speed that the target loses, with the mean and its 95 % interval (Student's t). If the interval contains 0, no slowdown \
             was detected.\n\n\
             | | rate | slowdown | 95 % interval |\n|---|---:|---:|---:|\n",
            bench.effort.pairs,
            bench.effort.window.as_secs_f64(),
            bench.effort.window.as_secs_f64(),
        );
        for Slowdown { tool, rate_hz, percent } in &self.slowdowns {
            let _ = writeln!(
                page,
                "| {} | {rate_hz} Hz | {:.2} % | {:.2} to {:.2} % |",
                tool.name(),
                percent.mean,
                percent.mean - percent.half,
                percent.upper(),
            );
        }
    }
}

fn as_points(cost: &SampleCost) -> Vec<(f64, f64)> {
    cost.points.iter().map(|&(depth, ns)| (depth as f64, ns)).collect()
}

const HEAD: &str = "\
# Performance

Written by `cargo xtask bench --write`. All figures of a section come from one run on one machine, its own or the one
of the section before, and only figures of the same run are comparable. Nothing here is a promise, and no test asserts on it.

";

const NOT_MEASURED: &str = "
Short-lived processes have a budget too, but are not measured by this command: the live tests print their figures. Figures
here are without native frames (`--no-native`) unless stated otherwise. Writer and exports have a section of their own.
";

const METHOD: &str = "
## How it is measured

- The target is `xtask/bench/deep.py`. The benchmark runs nothing else on its CPU; the profilers run on the other CPUs.
- BPF time is the kernel's own figure (`BPF_ENABLE_STATS`), read from the descriptors of the running profiler. Measuring adds
  two clock reads to each run, which are part of every figure here and of the slowdown; the interrupt around the program
  is part of the slowdown only.
- A profiled process's clock includes the BPF time of its samples: \"together\" counts that time towards the profiler.
- Runs on CPUs where the target is not running are removed from the in-kernel figures: each is assumed to cost as much as a run
  for which nothing is selected.
- \"CPU of its process\" is the profiler's process clock over a window that excludes start and end. The whole run includes them,
  and the shorter the recording, the more they weigh.
- This profiler's raw tracepoints run whenever a thread on the machine starts or ends, and with `--all-python` its process
  follows the mappings of every process: a build that runs meanwhile shows in both.
- py-spy stops the target while it reads. If other work keeps py-spy off its CPU, the target stays stopped for longer.
- The target's speed is its iterations divided by the time in which no other process kept it off its CPU
  (`/proc/PID/schedstat`). Work on the other CPUs and other guests of the host still disturb it: see the load and the time
  taken by the hypervisor above.
- Memory is peak RSS plus maps. Pages of maps that the profiler has mapped are in both, so the sum errs on the high side; with default
  options, they count once.
";
