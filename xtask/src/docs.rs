//! `cargo xtask docs`: pages that are made from runs, and the check that they are not older than what they describe.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;
use sha2::{Digest as _, Sha256};

use crate::{command, zoo};

/// Subcommands of `cargo xtask docs`.
#[derive(clap::Subcommand)]
pub(crate) enum DocsCommand {
    /// Run the live tests on every interpreter and write `docs/support-matrix.md` from their figures
    Matrix {
        /// Take the figures of a run that was made already (`TACHYON_MATRIX=FILE` beside the live tests)
        #[arg(long, value_name = "FILE")]
        figures: Option<PathBuf>,
        /// Keep the entries that these figures do not renew, where today's layouts were measured
        #[arg(long, requires = "figures")]
        keep: bool,
        /// Also the interpreters of `cargo xtask zoo --all`, those that are set up
        #[arg(long, conflicts_with = "figures")]
        all: bool,
    },
    /// Fail when an entry of the matrix is older than the last change of a layout, or an interpreter of CI has none
    Check,
}

/// The page.
const MATRIX: &str = "docs/support-matrix.md";

/// What no figure shows.
const NOTES: &str = "
## What these builds are

- `pyenv`: `--enable-shared`. `debian`: static, stripped, not position-independent. `sid`: static, position-independent,
  in a chroot; its 3.14 and 3.15 have a JIT built in, and with `PYTHON_JIT=1` the functions of stacks are right
  (`tests/live/jit.rs`; a leaf in a trace has no line). A name that ends in `d` is a build with `--with-pydebug`.
- `built_3_13t`, `built_3_14t`: free-threaded, built from Debian's source with `-O1`, with symbols. `musl`: the same source with
  another C library.
- `wheel_3_14t`, `wheel_3_15t`: free-threaded releases with per-thread bytecode, static, stripped, not position-independent,
  optimised with GCC 10. They are the executables that cx_Freeze's wheels contain for frozen programs, built in the images that
  most wheels are built in. `xtask/src/zoo/wheel.rs` says what was changed (a jump over `main`); their Python library is that of
  Debian's nearest patch release. The headers of these two patch releases were never seen, which is one of the cases that the
  self-test on a live runtime is for. `tests/live/free_threaded.rs` runs four busy threads on two CPUs in the same functions,
  each at its own lines.
- `tail_3_14`: the tail-calling interpreter, clang 19. `standalone_3_14`: built with nearly the settings of
  python-build-standalone (clang 19, tail calls, `--enable-optimizations --with-lto=thin`), but without BOLT, whose version 19
  crashes on it, and with a shorter training run for the profile. Its optimiser moves code of the evaluator into its callers;
  joined stacks are right all the same (`mixed_truth::` on it: 4,983 of 4,984).
- gdb's embedded CPython, a renamed executable and one that is deleted while it runs are tested in `tests/live/embedded.rs`.

`cargo xtask zoo --all` makes those that end in `d`, `wheel_3_14t`, `tail_3_14` and `standalone_3_14`. CI must have all the
others: it fails if one is missing.

## What was not to be had

- python-build-standalone's own binaries are in none of the package registries at hand. `standalone_3_14` comes closest.
- Debian's archive lists sources of 3.14 and 3.15 that it no longer has. It still has older sources of 3.14, which
  `xtask/src/zoo/built.rs` names with their digests, but no release of 3.15.
";

/// What an entry must not be older than.
const LAYOUTS: [&str; 4] = [
    "tachyon-common/src/layout.rs",
    "tachyon/src/inspect/builtin.rs",
    "tachyon/src/inspect/debug_offsets.rs",
    "tachyon/src/inspect/layout.rs",
];

/// One measurement, as noted by a live test.
#[derive(Deserialize)]
struct Figure {
    interpreter: String,
    version: String,
    test: String,
    right: u64,
    samples: u64,
}

/// Runs `cargo xtask docs`.
///
/// # Errors
/// A live test fails, or the page is out of date.
pub(crate) fn run(docs: DocsCommand) -> Result<()> {
    let root = command::project_root();
    match docs {
        DocsCommand::Matrix { figures, keep, all } => {
            let figures = figures.map_or_else(|| measure(all), |path| read(&path))?;
            let date = command::stdout(Command::new("date").args(["-u", "+%F"]))?;
            let digest = digest(root)?;
            let kept = if keep { entries(root, &digest)? } else { Vec::new() };
            let text = render(&figures, &kept, date.trim(), &digest)?;
            fs::write(root.join(MATRIX), text).with_context(|| format!("cannot write {MATRIX}"))
        }
        DocsCommand::Check => check(root),
    }
}

/// Runs the tests of stacks and collects what they note.
fn measure(all: bool) -> Result<Vec<Figure>> {
    command::require_root("loading BPF programs in the live tests")?;
    let file = tempfile::NamedTempFile::new().context("cannot make a file for the figures")?;
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    command::run(Command::new(&cargo).current_dir(command::project_root()).args(["build", "--package", "tachyon"]))?;
    let mut tests = Command::new(cargo);
    tests.current_dir(command::project_root()).args(["test", "--package", "tachyon-tests", "--test", "live"]);
    // Including those that CI runs on some interpreters only.
    tests.args(["stacks::", "--", "--test-threads", "1", "--include-ignored"]);
    for name in if all { zoo::missing_extras()? } else { zoo::extras() } {
        if all {
            eprintln!("without {name}, which is not set up");
        }
        tests.args(["--skip", &name]);
    }
    command::run(tests.env("TACHYON_LIVE_TESTS", "required").env("TACHYON_MATRIX", file.path()))?;
    read(file.path())
}

/// The figures in a file, one per line.
fn read(path: &Path) -> Result<Vec<Figure>> {
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    text.lines().map(|line| serde_json::from_str(line).with_context(|| format!("odd figure {line:?}"))).collect()
}

/// The page's entries that today's layouts were measured for.
fn entries(root: &Path, digest: &str) -> Result<Vec<String>> {
    let text = fs::read_to_string(root.join(MATRIX)).with_context(|| format!("cannot read {MATRIX}"))?;
    let fresh = text.lines().filter(|line| line.starts_with("| ") && line.ends_with(&format!(" {digest} |")));
    Ok(fresh.map(str::to_owned).collect())
}

/// The page: one line for each interpreter, one column for each test. Lines that are kept have the same columns.
fn render(figures: &[Figure], kept: &[String], date: &str, digest: &str) -> Result<String> {
    ensure!(!figures.is_empty(), "the tests noted no figures");
    let mut tests: Vec<&str> = figures.iter().map(|figure| figure.test.as_str()).collect();
    tests.sort_unstable();
    tests.dedup();
    let mut rows: BTreeMap<(&str, &str), BTreeMap<&str, &Figure>> = BTreeMap::new();
    for figure in figures {
        rows.entry((&figure.interpreter, &figure.version)).or_default().insert(&figure.test, figure);
    }
    let mut text = String::from(
        "# Supported interpreters\n\n\
         Written by `cargo xtask docs matrix` from the live tests, never by hand. A figure is the share of samples whose\n\
         whole stack, with each frame's file, function, line and (from 3.11 on) columns, is exactly what the program reports\n\
         about itself; the number of samples is in parentheses. The last column is a digest of the layouts that were measured:\n\
         `cargo xtask docs check` fails for an entry that is older than the last change of a layout.\n\n",
    );
    writeln!(text, "| interpreter | version | {} | date | layouts |", tests.join(" | "))?;
    writeln!(text, "|---|---|{}---|---|", "---|".repeat(tests.len()))?;
    let renewed = |line: &String| rows.keys().any(|(name, _)| line.starts_with(&format!("| {name} |")));
    let mut lines: Vec<String> = kept.iter().filter(|line| !renewed(line)).cloned().collect();
    for ((interpreter, version), figures) in &rows {
        let mut text = format!("| {interpreter} | {version} |");
        for test in &tests {
            match figures.get(test) {
                Some(figure) if figure.samples > 0 => {
                    let share = figure.right as f64 / figure.samples as f64 * 100.0;
                    write!(text, " {share:.2} % ({}) |", figure.samples)?;
                }
                _ => write!(text, " – |")?,
            }
        }
        write!(text, " {date} | {digest} |")?;
        lines.push(text);
    }
    lines.sort_unstable();
    text.extend(lines.iter().map(|line| format!("{line}\n")));
    text.push_str(NOTES);
    Ok(text)
}

/// The first twelve digits of SHA-256 over the layouts.
fn digest(root: &Path) -> Result<String> {
    let mut hash = Sha256::new();
    for name in LAYOUTS {
        hash.update(fs::read(root.join(name)).with_context(|| format!("cannot read {name}"))?);
    }
    Ok(format!("{:x}", hash.finalize())[..12].to_owned())
}

/// Every entry must carry the digest of today's layouts, and every CI interpreter must have a complete one.
fn check(root: &Path) -> Result<()> {
    let text = fs::read_to_string(root.join(MATRIX)).with_context(|| format!("cannot read {MATRIX}"))?;
    let digest = digest(root)?;
    let entries = text.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| interpreter"));
    let (fresh, old): (Vec<&str>, Vec<&str>) = entries.partition(|line| line.ends_with(&format!(" {digest} |")));
    if !old.is_empty() || fresh.is_empty() {
        let names: Vec<&str> = old.iter().filter_map(|line| line.split('|').nth(1)).map(str::trim).collect();
        bail!(
            "{MATRIX} is older than the layouts ({digest}): {}\nhint: cargo xtask docs matrix",
            if names.is_empty() { "it has no entry".to_owned() } else { names.join(", ") }
        );
    }
    let is_whole = |line: &&str| !line.contains("| – |");
    let measured =
        |name: &String| fresh.iter().filter(|line| is_whole(line)).any(|line| line.starts_with(&format!("| {name} |")));
    let missing: Vec<String> = zoo::ci_names().into_iter().filter(|name| !measured(name)).collect();
    ensure!(missing.is_empty(), "{MATRIX} lacks {}\nhint: cargo xtask docs matrix", missing.join(", "));
    println!("{MATRIX}: {} interpreters, all measured with the layouts of today", fresh.len());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_matrix_is_not_older_than_the_layouts() {
        check(command::project_root()).unwrap();
    }

    #[test]
    fn an_entry_has_its_figures() {
        let figure = |test: &str, right| Figure {
            interpreter: "sid_3_15".into(),
            version: "3.15.2".into(),
            test: test.into(),
            right,
            samples: 1000,
        };
        let figures = [figure("names", 1000), figure("deep_stack", 995)];
        let kept = ["| pyenv_3_9 | kept |".to_owned(), "| sid_3_15 | old |".to_owned()];
        let text = render(&figures, &kept, "2026-11-20", "abc").unwrap();
        let line = "| sid_3_15 | 3.15.2 | 99.50 % (1000) | 100.00 % (1000) | 2026-11-20 | abc |\n";
        assert!(text.contains(line), "{text}");
        assert!(text.contains("| pyenv_3_9 | kept |\n| sid_3_15 |") && !text.contains("| old |"), "{text}");
        assert!(render(&[], &[], "", "").is_err());
    }
}
