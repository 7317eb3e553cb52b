//! `cargo xtask page bench`: how long a report of a million samples takes to open and to filter, beside speedscope with the
//! same samples.
//!
//! `tachyon/benches/page` makes the profile, `xtask/bench/page.mjs` opens both. It asserts nothing: times differ from machine to
//! machine, and only those of one run are comparable.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::bench::machine::Machine;
use crate::bench::stats::median;
use crate::bench::tach::{Export, export};
use crate::{bench, command, tools};

/// Arguments of `cargo xtask page bench`.
#[derive(clap::Args)]
pub(crate) struct BenchArgs {
    /// Samples of the profile
    #[arg(long, default_value_t = 1_000_000, value_parser = clap::value_parser!(u32).range(1000..))]
    samples: u32,
    /// Distinct stacks of the profile
    #[arg(long, default_value_t = 100_000, value_parser = clap::value_parser!(u32).range(100..))]
    stacks: u32,
    /// How often each is opened
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,
    /// Write the page to docs/dev/page.md as well
    #[arg(long)]
    write: bool,
    /// Leave the report and the speedscope file there
    #[arg(long, value_name = "DIR")]
    keep: Option<PathBuf>,
    /// The program that exports [default: built from this project, as a release]
    #[arg(long, value_name = "PATH")]
    profiler: Option<PathBuf>,
}

/// Where the page is kept, from the project's directory.
const PAGE: &str = "docs/dev/page.md";
/// Speedscope gets one sample in so many if it cannot load all of them.
const TENTH: u32 = 10;
/// Most milliseconds until the flame graph is painted, and for a filter.
const FIRST_MS: f64 = 1000.0;
const FILTER_MS: f64 = 100.0;

/// What is done to the page, as `page.mjs` calls it, and what that is. Those with a budget are filters.
const ACTS: [(&str, &str, bool); 11] = [
    ("search", "search: a text of three kinds", true),
    ("process", "one process", true),
    ("thread", "one thread", true),
    ("module", "samples with a module in them", true),
    ("range", "a range of the time line, by the pointer", true),
    ("zoom", "a box of the flame graph: zoom, and its function", true),
    ("function", "a function of the table: callers, callees, lines", true),
    ("inverted", "the inverted graph", false),
    ("inverted, back", "and back", false),
    ("native", "native frames folded, for the first time", false),
    ("native, back", "and back", false),
];

/// Milliseconds of one act: elapsed, and for the page's main thread, running and ready without a CPU.
#[derive(Deserialize)]
struct Cost {
    passed: f64,
    ran: f64,
    waited: f64,
}

/// What `page.mjs` prints; memory is in MiB.
#[derive(Deserialize)]
struct Found {
    first: Vec<Cost>,
    all: Vec<Cost>,
    filters: BTreeMap<String, Vec<Cost>>,
    memory: Vec<f64>,
    speedscope: Vec<Cost>,
    speedscope_memory: Vec<f64>,
    /// Speedscope could not load the whole profile: the milliseconds until its page crashed. Then the other figures are for a
    /// tenth.
    crashed_after: Option<f64>,
    /// Moments that the page itself marks.
    marks: BTreeMap<String, Vec<f64>>,
}

/// Runs `cargo xtask page bench`.
///
/// # Errors
/// Something cannot be built or obtained, or the page fails. A figure over its budget is not an error.
pub(super) fn run(args: &BenchArgs) -> Result<()> {
    let viewers = tools::viewers()?;
    let profiler = args.profiler.clone().map_or_else(bench::build, Ok)?;
    let maker = bench::benchmark("page", &[])?;
    let temporary = tempfile::tempdir().context("cannot make a directory")?;
    let dir = args.keep.as_deref().unwrap_or(temporary.path());
    std::fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    let [tach, report, speedscope] = ["page.tach", "page.html", "page.speedscope.json"].map(|name| dir.join(name));
    let [small_tach, small] = ["tenth.tach", "tenth.speedscope.json"].map(|name| dir.join(name));
    let mut machine = Machine::look_at(("browser", Path::new("chromium")), ("program", &[&profiler]))?;
    for (to, samples) in [(&tach, args.samples), (&small_tach, args.samples / TENTH)] {
        let (count, stacks) = (samples.to_string(), args.stacks.min(samples).to_string());
        let mut line = Command::new(&maker);
        command::run_quietly("making a profile", line.arg("write").arg(to).args([count, stacks]))?;
    }
    let exports = [
        ("report.html", export(&profiler, &tach, &report)?),
        ("speedscope.json", export(&profiler, &tach, &speedscope)?),
    ];
    export(&profiler, &small_tach, &small)?;
    let found = drive(&viewers, args.rounds, [&report, &speedscope, &small])?;
    machine.end();
    let tach_bytes = std::fs::metadata(&tach).context("the profile is gone")?.len();
    let page = page(args, &machine, tach_bytes, &exports, &found)?;
    print!("{page}");
    if args.write {
        let path = command::project_root().join(PAGE);
        std::fs::write(&path, &page).with_context(|| format!("cannot write {}", path.display()))?;
        eprintln!("written: {PAGE}");
    }
    Ok(())
}

fn drive(viewers: &Path, rounds: u16, files: [&Path; 3]) -> Result<Found> {
    eprintln!("opening both, {rounds} times");
    let [report, speedscopes @ ..] = files.map(std::path::absolute);
    let mut line = Command::new("node");
    line.arg(command::project_root().join("xtask/bench/page.mjs")).arg(viewers);
    line.arg(report.context("the report has no path")?).arg(rounds.to_string());
    for path in speedscopes {
        line.arg(path.context("a speedscope file has no path")?);
    }
    let told = command::stdout(&mut line)?;
    serde_json::from_str(&told).with_context(|| format!("page.mjs says {told:?}"))
}

fn middle(values: &[f64]) -> Result<f64> {
    median(values).context("page.mjs has measured nothing")
}

/// Medians of elapsed, running and ready time, and the longest elapsed time.
fn of(costs: &[Cost]) -> Result<[f64; 4]> {
    let column = |of: fn(&Cost) -> f64| costs.iter().map(of).collect::<Vec<f64>>();
    let passed = column(|cost| cost.passed);
    let worst = passed.iter().copied().fold(f64::NAN, f64::max);
    Ok([middle(&passed)?, middle(&column(|cost| cost.ran))?, middle(&column(|cost| cost.waited))?, worst])
}

fn page(
    args: &BenchArgs,
    machine: &Machine,
    tach_bytes: u64,
    exports: &[(&str, Export); 2],
    found: &Found,
) -> Result<String> {
    let BenchArgs { samples, stacks, rounds, .. } = args;
    let mut page = String::from(
        "# A large report in the browser\n\n\
         Written by `cargo xtask page bench --write`: one run on one machine, and only figures of the same run are comparable.\n\n",
    );
    machine.describe(&mut page);
    // `fmt::Write` for `String` does not fail; so everywhere below.
    let _ = write!(
        page,
        "\n{samples} samples with {stacks} distinct stacks of 10 to 60 Python and native frames, of 3,000 functions; four processes, \
         24 threads. The TACH file takes {:.1} MB.\n\n\
         | export | file | wall | CPU | peak RSS |\n|---|---:|---:|---:|---:|\n",
        tach_bytes as f64 / 1e6
    );
    for (name, Export { bytes, wall_s, cpu_s, peak_mib }) in exports {
        let megabytes = *bytes as f64 / 1e6;
        let _ = writeln!(page, "| {name} | {megabytes:.1} MB | {wall_s:.1} s | {cpu_s:.1} s | {peak_mib:.0} MiB |");
    }
    let theirs = of(&found.speedscope)?[0];
    let loaded = match found.crashed_after {
        None => "the same samples".to_owned(),
        Some(ms) => {
            let seconds = ms / 1e3;
            format!("a tenth of the samples (with all of them, its page crashed after {seconds:.0} s)")
        }
    };
    let _ = write!(
        page,
        "\nEach was opened {rounds} times, alternately, in a new browser each time; in each, every action on the page was done three \
         times, with different choices. Times are in milliseconds; the ratio is that of the median to the time in which \
         speedscope loads {loaded}.\n\n\
         | | median | worst | main thread ran | and waited for a CPU | budget | | ratio to speedscope |\n\
         |---|---:|---:|---:|---:|---:|---|---:|\n"
    );
    let mut row = |what: &str, costs: &[Cost], most: Option<f64>| -> Result<()> {
        let [median, ran, waited, worst] = of(costs)?;
        let budget = most.map_or("– | ".to_owned(), |most| {
            format!("{most:.0} | {}", if median <= most { "ok" } else { "**over**" })
        });
        let ratio = median / theirs;
        let _ =
            writeln!(page, "| {what} | {median:.0} | {worst:.0} | {ran:.0} | {waited:.0} | {budget} | {ratio:.4} |");
        Ok(())
    };
    row("the report opens: the flame graph is painted", &found.first, Some(FIRST_MS))?;
    row("and everything else", &found.all, None)?;
    for (name, what, budget) in ACTS {
        let costs = found.filters.get(name).with_context(|| format!("page.mjs has not measured {name:?}"))?;
        row(what, costs, budget.then_some(FILTER_MS))?;
    }
    row("speedscope loads: its flame graph is painted", &found.speedscope, None)?;
    let _ = writeln!(
        page,
        "\nMemory of the page's process once the report has opened: {:.0} MiB; with speedscope: {:.0} MiB.\n",
        middle(&found.memory)?,
        middle(&found.speedscope_memory)?,
    );
    let _ = writeln!(page, "The steps of opening the report, in milliseconds since the address was given (medians):\n");
    let mut marks = found.marks.iter().map(|(name, times)| Ok((middle(times)?, name))).collect::<Result<Vec<_>>>()?;
    marks.sort_by(|a, b| a.0.total_cmp(&b.0));
    let marks: Vec<String> = marks.iter().map(|(time, name)| format!("{name} {time:.0}")).collect();
    let _ = writeln!(page, "{}.", marks.join(", "));
    page.push_str(NOTES);
    Ok(page)
}

const NOTES: &str = "
*Main thread*: the one of the page's process, from the start of the process or of the action until everything was painted, as the
kernel's scheduler counts it (each column has its own median; checking whether anything still changes is included). The
report's time runs from the moment its address is given until the frame in which the flame graph's boxes are painted; a page that is
there but has no boxes does not count. An action's time runs from its input event until the frame after which nothing on the page
changes any more, including tables and time line. Speedscope's time runs from the moment the file is chosen, so that starting
speedscope itself does not count, until the frame with its graph; it shows one of its 24 threads. Chromium paints without a GPU here.
";
