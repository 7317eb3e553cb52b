//! What it costs the kernel side to find out whose work a sample is: the asyncio task, those that await it, the greenlet, the span.

use std::fmt::Write as _;

use anyhow::{Context, Result};

use super::measure::{Bench, DEPTH, NothingSelected, WARM_HZ, sample_cost};
use super::stats::{Interval, median};
use super::target::{Shape, Target};
use super::tools::{Aim, Tool};
use crate::zoo::{self, Python};

/// The section's heading.
pub(crate) const HEADING: &str = "## Whose work it was\n";

/// What is measured against a program whose work has no owner, but that has the same frames below.
struct Case {
    name: &'static str,
    nobodys: &'static str,
    whose: &'static str,
    tool: Tool,
    /// Most that it should add, nanoseconds.
    budget: f64,
}

const CASES: [Case; 7] = [
    Case { name: "in an asyncio task", nobodys: "loop", whose: "task:0", tool: Tool::Tachyon, budget: 500.0 },
    Case {
        name: "in an asyncio task, `--async`",
        nobodys: "loop",
        whose: "task:0",
        tool: Tool::Awaiting,
        budget: 500.0,
    },
    Case {
        name: "in a task that 8 others await, `--async`",
        nobodys: "loop",
        whose: "task:8",
        tool: Tool::Awaiting,
        budget: 3000.0,
    },
    Case { name: "in a span of ddtrace", nobodys: "traced", whose: "span", tool: Tool::Tachyon, budget: 100.0 },
    Case { name: "in a greenlet", nobodys: "greenlets", whose: "greenlet:0", tool: Tool::Tachyon, budget: 500.0 },
    Case {
        name: "in a greenlet with a name of its own",
        nobodys: "greenlets",
        whose: "named:0",
        tool: Tool::Tachyon,
        budget: 500.0,
    },
    Case {
        name: "in a greenlet with 6 parents and the main one, `--async`",
        nobodys: "greenlets",
        whose: "greenlet:6",
        tool: Tool::Awaiting,
        budget: 3000.0,
    },
];

/// Alternates measurements, so that drifts affect both of each pair. Returns the page's section.
///
/// # Errors
/// An interpreter is missing, or the profiler failed.
pub(crate) fn section(bench: &Bench, nothing: NothingSelected, quick: bool) -> Result<String> {
    let mut page = format!(
        "{HEADING}\nThe same program of {DEPTH} frames, including those of asyncio, alternately as nobody's work (a callback of the loop; \
         a span that ddtrace does not publish; the main greenlet) and as somebody's, at {WARM_HZ} Hz: how much more the second takes, as the median and \
         the 95 % interval of the differences.\n\n\
         | interpreter | | nobody's | more | 95 % interval | budget | |\n|---|---|---:|---:|---|---:|---|\n"
    );
    let rounds = if quick { 2 } else { 5 };
    for minor in ["3.11", "3.13", "3.14", "3.15"] {
        let is_new = matches!(minor, "3.14" | "3.15");
        let python = if is_new { zoo::in_sid(minor) } else { zoo::in_pyenv(minor) }.context("hint: cargo xtask zoo")?;
        // The tracer and greenlet are installed for 3.14; in earlier versions, no task says who awaits it.
        for case in CASES.iter().filter(|case| match case.whose {
            "span" | "greenlet:0" | "named:0" | "greenlet:6" => minor == "3.14",
            _ => is_new || case.tool == Tool::Tachyon,
        }) {
            let (mut nobodys, mut more) = (Vec::new(), Vec::new());
            for round in 1..=rounds {
                eprintln!("{}, {}, round {round} of {rounds}", python.name(), case.name);
                let without = cost(bench, &python, case.nobodys, Tool::Tachyon, nothing)?;
                nobodys.push(without);
                more.push(cost(bench, &python, case.whose, case.tool, nothing)? - without);
            }
            page.push_str(&row(&python.name(), case, &nobodys, &more));
        }
    }
    Ok(page)
}

fn cost(bench: &Bench, python: &Python, whose: &'static str, tool: Tool, nothing: NothingSelected) -> Result<f64> {
    let target = Target::start(python, bench.cpu, Shape { whose, ..Shape::deep(DEPTH) })?;
    sample_cost(bench, &target, tool, Aim::Pid(target.pid()), WARM_HZ, nothing)
}

fn row(python: &str, case: &Case, nobodys: &[f64], more: &[f64]) -> String {
    let mut row = String::new();
    let (Some(nobodys), Some(median), Some(interval)) = (median(nobodys), median(more), Interval::of(more)) else {
        return row;
    };
    let verdict = if median > case.budget { "**over**" } else { "ok" };
    let Case { name, budget, .. } = case;
    let [low, high] = [interval.mean - interval.half, interval.upper()];
    let _ = writeln!(
        row,
        "| {python} | {name} | {nobodys:.0} ns | {median:.0} ns | {low:.0} to {high:.0} | {budget:.0} ns | {verdict} |"
    );
    row
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_has_the_verdict_of_its_median() {
        let told = row("python3.14", &CASES[0], &[2000.0, 2100.0], &[400.0, 300.0, 900.0]);
        assert!(told.contains("| 2050 ns | 400 ns |") && told.ends_with("| 500 ns | ok |\n"), "{told}");
        let told = row("python3.14", &CASES[3], &[2000.0], &[150.0, 150.0]);
        assert!(told.ends_with("| 100 ns | **over** |\n"), "{told}");
    }
}
