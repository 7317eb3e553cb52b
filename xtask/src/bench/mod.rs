//! What profiling costs, in one run together with py-spy, each figure beside its budget.
//!
//! [`target`] is profiled by the [`tools`], [`probe`] watches them, [`measure`] says what is done, [`results`] makes the page, except for
//! the section on files, which comes from [`tach`]. It asserts nothing: times differ from machine to machine, and only those of one run are
//! comparable.

mod agreement;
mod aims;
mod crowd;
pub(crate) mod machine;
mod measure;
pub(crate) mod memory;
mod numbered;
mod probe;
mod results;
pub(crate) mod soak;
pub(crate) mod stats;
pub(crate) mod tach;
mod target;
mod tools;
mod turns;
mod usual;
mod waits;
mod whose;

use std::cell::Cell;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::{apt, command, zoo};
use machine::Machine;
use measure::{Bench, Effort, RATES_HZ};
use results::Results;
use tools::{Tool, Tools};
pub(crate) use tools::{benchmark, build, build_unoptimised, target_directory, wait4};

/// Arguments of `cargo xtask bench`.
#[derive(clap::Args)]
pub(crate) struct BenchArgs {
    /// Short measurements and three pairs: whether the benchmark works, not what anything costs
    #[arg(long)]
    quick: bool,
    /// Write the page to docs/performance.md as well
    #[arg(long, conflicts_with = "quick")]
    write: bool,
    /// Only the TACH writer, reader and exports, beside CPython 3.15's
    #[arg(long)]
    tach: bool,
    /// Only native frames beside py-spy's, on packages from PyPI
    #[arg(long, conflicts_with = "tach")]
    agreement: bool,
    /// Only what it costs to tell the asyncio task and the span of a sample
    #[arg(long, conflicts_with_all = ["tach", "agreement"])]
    whose: bool,
    /// Only what it costs to sample waiting threads
    #[arg(long, conflicts_with_all = ["tach", "agreement", "whose"])]
    waits: bool,
    /// Only what recording with default options costs, beside the other profilers
    #[arg(long, conflicts_with_all = ["tach", "agreement", "whose", "waits"])]
    usual: bool,
    /// Only these parts of `--usual`
    #[arg(long, value_name = "PART", value_enum, value_delimiter = ',', requires = "usual", conflicts_with = "write")]
    usual_only: Vec<usual::Part>,
    /// This build of the profiler, instead of one that is made now
    #[arg(long, value_name = "PATH", conflicts_with = "write")]
    profiler: Option<PathBuf>,
    /// Pairs of windows with and without a profiler, at least 2
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u16).range(2..), conflicts_with = "quick")]
    pairs: u16,
    /// Another build's `tachyon-bpf`: measure both by turns and print the ratios, nothing else
    #[arg(long, value_name = "PATH", conflicts_with_all = ["write", "tach", "agreement", "whose", "waits", "usual"])]
    against: Option<PathBuf>,
    /// Rounds of `--against`
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u16).range(2..), requires = "against")]
    rounds: u16,
    /// Only rows of `--against` whose names contain this text
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true, requires = "against")]
    row: String,
    /// Interpreter of the target [default: the newest supported one of pyenv]
    #[arg(long)]
    python: Option<PathBuf>,
}

/// Where the page is kept, from the project's directory.
const PAGE: &str = "docs/performance.md";

/// Runs `cargo xtask bench`.
///
/// # Errors
/// Not root, no interpreter, or a profiler failed. A figure over its budget is not an error.
pub(crate) fn run(args: BenchArgs) -> Result<()> {
    if args.tach || args.agreement {
        return one_section(&args);
    }
    command::require_root("loading BPF programs and stopping processes")?;
    apt::ensure(&[("taskset", "util-linux"), ("perf", "linux-perf")])?;
    let effort = if args.quick {
        Effort {
            cost: Duration::from_secs(2),
            kernel: Duration::from_secs(1),
            window: Duration::from_millis(300),
            pairs: 3,
            starts: 2,
        }
    } else {
        Effort {
            cost: Duration::from_secs(10),
            kernel: Duration::from_secs(4),
            window: Duration::from_secs(1),
            pairs: args.pairs.into(),
            starts: 7,
        }
    };
    let cpus = machine::allowed_cpus();
    let [cpu, others @ ..] = &cpus[..] else { bail!("this process may use no CPU") };
    if others.is_empty() {
        eprintln!("only one CPU: the profilers share it with the target, which the slowdown will show");
    }
    let others = machine::listed(if others.is_empty() { &cpus } else { others });
    let (python, tools) = tools_for(&args, others)?;
    let mut machine = Machine::look(&python, &[&tools.tachyon, &tools.py_spy])?;
    let counting = zoo::in_sid("3.14").context("hint: cargo xtask zoo")?;
    let hashed = zoo::in_pyenv("3.11").context("hint: pyenv install 3.11")?;
    let mut bench = Bench { tools, python, counting, hashed, cpu: *cpu, effort };
    if let Some(other) = &args.against {
        bench.effort.kernel = Duration::from_secs(2);
        bench.effort.cost = Duration::from_secs(3);
        return turns::run(&mut bench, other, args.rounds.into(), &args.row);
    }
    if args.waits {
        return put(&args, waits::HEADING, &alone(machine, waits::section(&bench, args.quick)?));
    }
    if args.usual {
        return put(&args, usual::HEADING, &alone(machine, usual::section(&bench, args.quick, &args.usual_only)?));
    }
    let nothing = measure::nothing_selected(&bench)?;
    if args.whose {
        return put(&args, whose::HEADING, &alone(machine, whose::section(&bench, nothing, args.quick)?));
    }
    let samples = measure::sample_costs(&bench, &bench.ordinary(), nothing)?;
    let counting = measure::sample_costs(&bench, &bench.counting, nothing)?;
    let hashed = measure::sample_costs(&bench, &bench.hashed, nothing)?;
    let native = measure::native_costs(&bench, nothing)?;
    let tools = measure::tool_costs(&bench)?;
    let crowd = crowd::crowd(&bench, nothing)?;
    let conditions = RATES_HZ.map(|rate_hz| [(Tool::Tachyon, rate_hz), (Tool::PySpy, rate_hz)]);
    let slowdowns = measure::slowdowns(&bench, conditions.as_flattened(), bench.effort.pairs)?;
    machine.end();
    let results = Results { machine, nothing, samples, counting, hashed, native, tools, crowd, slowdowns };
    let agreement = agreement::section(&bench.tools, &bench.python, args.quick)?;
    let page = replace(&results.page(&bench), agreement::HEADING, &agreement);
    let page = replace(&page, whose::HEADING, &whose::section(&bench, nothing, args.quick)?);
    let page = replace(&page, usual::HEADING, &usual::section(&bench, args.quick, &args.usual_only)?);
    let page = replace(&page, waits::HEADING, &waits::section(&bench, args.quick)?);
    let section = tach::section(&bench.tools.tachyon, args.quick)?;
    let page = replace(&page, tach::HEADING, &section);
    print!("{page}");
    eprintln!("{} figures are over their budget", results.over());
    if args.write { write(&page) } else { Ok(()) }
}

/// The target's interpreter, and both profilers, which may use these CPUs.
fn tools_for(args: &BenchArgs, cpus: String) -> Result<(PathBuf, Tools)> {
    let python = match &args.python {
        Some(python) => python.clone(),
        None => zoo::newest_supported().context("no CPython 3.11 to 3.13 in pyenv\nhint: give one with --python")?,
    };
    let tools = Tools {
        tachyon: profiler(args)?,
        py_spy: tools::py_spy(&python)?,
        cpus,
        everywhere: Cell::new(false),
        work: tempfile::tempdir().context("cannot create a directory for profiles")?,
        keeps_names: Cell::new(false),
    };
    Ok((python, tools))
}

/// The profiler that is measured.
fn profiler(args: &BenchArgs) -> Result<PathBuf> {
    match &args.profiler {
        Some(profiler) => std::path::absolute(profiler).context("the profiler's path is none"),
        None => tools::build(),
    }
}

fn write(page: &str) -> Result<()> {
    let path = command::project_root().join(PAGE);
    std::fs::write(&path, page).with_context(|| format!("cannot write {}", path.display()))?;
    eprintln!("written: {PAGE}");
    Ok(())
}

/// One section of the page, the others as they are.
fn one_section(args: &BenchArgs) -> Result<()> {
    command::require_root("loading BPF programs and chroot(2)")?;
    let (heading, section) = if args.tach {
        (tach::HEADING, tach::section(&profiler(args)?, args.quick)?)
    } else {
        let (python, tools) = tools_for(args, String::new())?;
        (agreement::HEADING, agreement::section(&tools, &python, args.quick)?)
    };
    put(args, heading, &section)
}

/// A section that is measured without the others, with the machine it was measured on.
fn alone(mut machine: Machine, mut section: String) -> String {
    machine.end();
    section.push_str("\nThis section was measured separately:\n\n");
    machine.describe(&mut section);
    section
}

/// Shows a section, and puts it into the page if asked to.
fn put(args: &BenchArgs, heading: &str, section: &str) -> Result<()> {
    print!("{section}");
    if !args.write {
        return Ok(());
    }
    let path = command::project_root().join(PAGE);
    let page = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    write(&replace(&page, heading, section))
}

/// The page with its section replaced by another, or with that added at its end.
pub(crate) fn replace(page: &str, heading: &str, section: &str) -> String {
    let Some(start) = page.find(heading) else { return format!("{}\n\n{section}", page.trim_end()) };
    let after = &page[start + heading.len()..];
    let end = after.find("\n## ").map_or(page.len(), |end| start + heading.len() + end + 1);
    let rest = &page[end..];
    let gap = if rest.is_empty() { "" } else { "\n" };
    format!("{}{section}{gap}{rest}", &page[..start])
}

#[cfg(test)]
mod tests {
    use super::replace;
    use super::tach::HEADING;

    #[test]
    fn a_section_takes_the_place_of_its_own() {
        let section = format!("{HEADING}\nnew\n");
        let page = replace("# P\n\n## A\n\na\n", HEADING, &section);
        assert_eq!(page, format!("# P\n\n## A\n\na\n\n{section}"));
        assert_eq!(replace(&page, HEADING, &section), page);
        let between = format!("# P\n\n{HEADING}\nold\n\nolder\n\n## Z\n\nz\n");
        assert_eq!(replace(&between, HEADING, &section), format!("# P\n\n{section}\n## Z\n\nz\n"));
    }
}
