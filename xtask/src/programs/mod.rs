//! `cargo xtask programs`: real-world programs, profiled, and the page that says how well that works: `docs/programs.md`.
//!
//! [`rows`] says which programs there are, [`work`] runs them, [`venv`] installs what they need, [`measure`] profiles one and
//! py-spy the same process at the same time, [`counts`] and [`agreement`] read what came out, [`page`] writes it.

mod agreement;
mod counts;
mod measure;
mod page;
mod rows;
mod venv;
mod work;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use crate::{bench, command};
use rows::{ROWS, Row};

/// Arguments of `cargo xtask programs`.
#[derive(clap::Args)]
pub(crate) struct ProgramsArgs {
    /// Write the rows to docs/programs.md; those that were not run stay as they are there
    #[arg(long)]
    write: bool,
    /// Only these rows, by name
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    only: Vec<String>,
    /// Only rows of small packages, two seconds each, with the unoptimised profiler: whether this works, and no number of worth
    #[arg(long, conflicts_with_all = ["write", "only"])]
    quick: bool,
    /// How long a steady program is profiled, in seconds
    #[arg(long, value_name = "N", default_value_t = 20)]
    seconds: u64,
    /// This build of the profiler, instead of one that is made now
    #[arg(long, value_name = "PATH")]
    profiler: Option<PathBuf>,
    /// List the rows
    #[arg(long)]
    list: bool,
}

/// A program that another task profiles, too.
pub(crate) struct Program {
    pub(crate) python: PathBuf,
    /// After the interpreter. It says `ready` when it has warmed up.
    pub(crate) words: Vec<PathBuf>,
    /// The interpreter and the library, for readers.
    pub(crate) name: String,
}

/// The program of the row `torch`, with its packages, which are installed if needed.
///
/// # Errors
/// A package is not available.
pub(crate) fn torch() -> Result<Program> {
    let venv = venv::Venv::Libraries;
    let python = venv.python()?;
    let (_, version) = venv.versions().find(|(name, _)| *name == "torch").context("torch is one of the libraries")?;
    let words = vec![work::scripts().join("libraries.py"), "torch".into()];
    Ok(Program { python, words, name: format!("python{}, torch {version}", venv::MINOR) })
}

/// What is needed to measure rows.
struct Bench {
    profiler: PathBuf,
    py_spy: PathBuf,
    length: Duration,
    /// How often a short program is run at a time.
    repeats: u32,
    /// How often a row is measured at most, until py-spy has enough samples.
    most: u32,
}

/// Runs `cargo xtask programs`.
///
/// # Errors
/// Not root, a package is not available, or a program did not run. A row below its target is not an error, except for a row
/// without samples with `--quick`.
pub(crate) fn run(args: &ProgramsArgs) -> Result<()> {
    if args.list {
        ROWS.iter().for_each(|row| println!("{:12} {}", row.name, row.what));
        return Ok(());
    }
    let rows = wanted(args)?;
    command::require_root("loading BPF programs and stopping processes")?;
    let bench = Bench {
        profiler: match &args.profiler {
            // Programs run in a directory of their own.
            Some(profiler) => std::path::absolute(profiler).context("the profiler's path is none")?,
            None if args.quick => bench::build_unoptimised()?,
            None => bench::build()?,
        },
        py_spy: venv::py_spy()?,
        length: Duration::from_secs(if args.quick { 2 } else { args.seconds }),
        repeats: if args.quick { 1 } else { 5 },
        most: if args.quick { 1 } else { 5 },
    };
    let mut lines = Vec::new();
    let mut failed = Vec::new();
    for row in rows {
        match measure::row(&bench, row) {
            Ok(measured) => {
                eprintln!("{}", page::shown(row, &measured));
                if args.quick && measured.counts.stored == 0 {
                    failed.push(format!("{}: no sample", row.name));
                }
                lines.push((row, measured));
            }
            Err(error) => {
                eprintln!("{}: {error:#}", row.name);
                failed.push(format!("{}: {error}", row.name));
            }
        }
    }
    if args.write {
        page::write(&lines)?;
    }
    if !failed.is_empty() {
        bail!("{} rows could not be measured:\n{}", failed.len(), failed.join("\n"));
    }
    Ok(())
}

fn wanted(args: &ProgramsArgs) -> Result<Vec<&'static Row>> {
    if args.quick {
        return Ok(ROWS.iter().filter(|row| row.quick).collect());
    }
    if args.only.is_empty() {
        return Ok(ROWS.iter().collect());
    }
    let named = |name: &String| {
        let row = ROWS.iter().find(|row| row.name == name);
        row.with_context(|| format!("no row is called {name:?}\nhint: cargo xtask programs --list"))
    };
    args.only.iter().map(named).collect()
}
