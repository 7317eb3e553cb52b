//! What each profiler costs on a busy process: a row for each interpreter, and for a program that trains with torch.

use anyhow::{Context, Result};

use super::{MIB, STEADY, know, knowing};
use crate::bench::measure::{Bench, DEPTH, RATES_HZ, ToolCost};
use crate::bench::target::{Shape, Target};
use crate::bench::tools::{Aim, Tool};
use crate::programs::Program;
use crate::zoo::{self, Python};

/// Whether this profiler knows names of native functions from earlier recordings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Names {
    Unknown,
    Known,
}

impl Names {
    /// What a profiler's name is followed by.
    pub(super) fn shown(self) -> &'static str {
        match self {
            Self::Unknown => "",
            Self::Known => ", names known",
        }
    }
}

/// A tool, and what it knows.
type Profiler = (Names, Tool);

/// What a tool costs on a program.
pub(super) struct Cost {
    /// For readers.
    target: String,
    names: Names,
    of: ToolCost,
}

impl Cost {
    fn row(&self) -> String {
        let Self { target, names, of } = self;
        let bpf = if of.tool.is_ours() { format!("{:.3} %", of.bpf_share * 100.0) } else { "–".to_owned() };
        format!(
            "| {target} | {}{} | {} Hz | {:.3} % | {bpf} | {:.3} % | {:.1} | {:.2} s of {:.1} s | {:.1} MiB |\n",
            of.tool.name(),
            names.shown(),
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

/// The table.
pub(super) fn table(costs: &[Cost]) -> String {
    let rows: String = costs.iter().map(Cost::row).collect();
    format!(
        "\n| target | profiler | rate | CPU of its process | CPU in BPF | together | wake-ups a second | whole run | peak RSS |\n\
         |---|---|---:|---:|---:|---:|---:|---:|---:|\n{rows}"
    )
}

/// The row of one tool at one rate on an interpreter.
pub(super) fn find<'a>(costs: &'a [Cost], python: &str, (names, tool): Profiler, rate_hz: u32) -> Option<&'a ToolCost> {
    let is_it =
        |cost: &&Cost| (cost.names, cost.of.tool, cost.of.rate_hz) == (names, tool, rate_hz) && cost.target == python;
    costs.iter().find(is_it).map(|cost| &cost.of)
}

/// All tools that fit on each interpreter.
pub(super) fn interpreters(bench: &Bench) -> Result<Vec<Cost>> {
    let [low, high] = RATES_HZ;
    let mut costs = Vec::new();
    let pyenv = |minor: &str| zoo::in_pyenv(minor).with_context(|| format!("hint: pyenv install {minor}"));
    let sid = |minor: &str| zoo::in_sid(minor).context("hint: cargo xtask zoo");
    let ordinary = bench.ordinary();
    let (unknown, known) = ((Names::Unknown, Tool::Native), (Names::Known, Tool::Native));
    let others = |tool| (Names::Unknown, tool);
    let (spy, perf) = (others(Tool::PySpy), others(Tool::Perf));
    let rows: [(&Python, &[(Profiler, u32)]); 5] = [
        (&pyenv("3.8")?, &[(known, low), (spy, low)]),
        (&bench.hashed, &[(known, low), (spy, low)]),
        (&ordinary, &[(unknown, low), (known, low), (known, high), (spy, low), (spy, high), (perf, low)]),
        (&sid("3.14")?, &[(known, low), (perf, low)]),
        (&sid("3.15")?, &[(known, low), (others(Tool::SamplingOne), low)]),
    ];
    for (python, tools) in rows {
        let mut knows = false;
        for &((names, tool), rate_hz) in tools {
            eprintln!("{}{} at {rate_hz} Hz on {}", tool.name(), names.shown(), python.name());
            let options: &[&str] = if tool == Tool::Perf { &["-X", "perf"] } else { &[] };
            let target = Target::start(python, bench.cpu, Shape { options, ..Shape::deep(DEPTH) })?;
            let measure = || bench.cost_after(STEADY, tool, Aim::Pid(target.pid()), rate_hz, &target);
            let of = if names == Names::Known {
                if !std::mem::replace(&mut knows, true) {
                    know(bench, &target)?;
                }
                knowing(bench, measure)?
            } else {
                measure()?
            };
            costs.push(Cost { target: python.name(), names, of });
        }
    }
    Ok(costs)
}

/// Both tools on another program.
pub(super) fn program(bench: &Bench, program: &Program) -> Result<Vec<Cost>> {
    let [low, _] = RATES_HZ;
    let cost = |tool: Tool| {
        eprintln!("{} at {low} Hz on {}", tool.name(), program.name);
        let target = Target::program(program, bench.cpu)?;
        let of = bench.cost_after(STEADY, tool, Aim::Pid(target.pid()), low, &target)?;
        Ok(Cost { target: program.name.clone(), names: Names::Unknown, of })
    };
    [Tool::Native, Tool::PySpy].into_iter().map(cost).collect()
}
