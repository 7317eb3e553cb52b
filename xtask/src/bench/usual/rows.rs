//! What each profiler costs on a busy process: a row for each interpreter, and for a program that trains with torch.

use anyhow::{Context, Result};

use super::{MIB, STEADY};
use crate::bench::measure::{Bench, DEPTH, RATES_HZ, ToolCost};
use crate::bench::target::{Shape, Target};
use crate::bench::tools::{Aim, Tool};
use crate::programs::Program;
use crate::zoo::{self, Python};

/// What a tool costs on a program.
pub(super) struct Cost {
    /// For readers.
    target: String,
    of: ToolCost,
}

impl Cost {
    fn row(&self) -> String {
        let Self { target, of } = self;
        let bpf = if of.tool.is_ours() { format!("{:.3} %", of.bpf_share * 100.0) } else { "–".to_owned() };
        format!(
            "| {target} | {} | {} Hz | {:.3} % | {bpf} | {:.3} % | {:.1} | {:.2} s of {:.1} s | {:.1} MiB |\n",
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

/// The table.
pub(super) fn table(costs: &[Cost]) -> String {
    let rows: String = costs.iter().map(Cost::row).collect();
    format!(
        "\n| target | profiler | rate | CPU of its process | CPU in BPF | together | wake-ups a second | whole run | peak RSS |\n\
         |---|---|---:|---:|---:|---:|---:|---:|---:|\n{rows}"
    )
}

/// The row of one tool at one rate on an interpreter.
pub(super) fn find<'a>(costs: &'a [Cost], python: &str, tool: Tool, rate_hz: u32) -> Option<&'a ToolCost> {
    let is_it = |cost: &&Cost| (cost.of.tool, cost.of.rate_hz) == (tool, rate_hz) && cost.target == python;
    costs.iter().find(is_it).map(|cost| &cost.of)
}

/// All tools that fit on each interpreter.
pub(super) fn interpreters(bench: &Bench) -> Result<Vec<Cost>> {
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
            costs.push(Cost { target: python.name(), of });
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
        Ok(Cost { target: program.name.clone(), of })
    };
    [Tool::Native, Tool::PySpy].into_iter().map(cost).collect()
}
