//! Native frames beside py-spy's: one process at one time, and the native functions that py-spy finds most often.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use super::tools::Tools;
use crate::{cache, command, tools};

/// The section's heading.
pub(crate) const HEADING: &str = "## Native frames beside py-spy\n";

/// What works in C, C++ and Rust.
const PACKAGES: &str = "numpy==2.4.6 pyarrow==26.0.1 orjson==3.13.0 pydantic-core==2.50.4";

/// Functions that are compared.
const TOP: usize = 12;

/// Rates of both. (py-spy stops the target for each sample.)
const OURS_HZ: u32 = 499;
const THEIRS_HZ: u32 = 99;

/// Share of a sample at which the frames of both count as the same, beside the sampling error.
const TOLERATED: f64 = 0.03;

/// Of a normal distribution, 99.9 % lie so many deviations from its mean.
const DEVIATIONS: f64 = 3.29;

#[derive(Deserialize)]
struct Sample {
    frames: Vec<Frame>,
}

#[derive(Deserialize)]
struct Frame {
    function: String,
    kind: String,
}

/// The innermost Python function of a stack, and a native function above it.
type Pair = (String, String);

/// In how many stacks each pair was met.
#[derive(Default)]
struct Shares {
    stacks: u64,
    /// The native function anywhere above the Python function.
    above: BTreeMap<Pair, u64>,
    /// The one that was running.
    running: BTreeMap<Pair, u64>,
}

impl Shares {
    /// Counts stacks: the native functions above a Python function, the innermost first, `None` for those without a name.
    fn add(&mut self, python: &str, native: &[Option<&str>], count: u64) {
        self.stacks += count;
        let names: Vec<_> = native.iter().map(|name| name.map(plain)).collect();
        if let Some(Some(running)) = names.first() {
            *self.running.entry((python.to_owned(), running.clone())).or_default() += count;
        }
        for name in names.into_iter().flatten().collect::<BTreeSet<_>>() {
            *self.above.entry((python.to_owned(), name)).or_default() += count;
        }
    }
}

/// A function of C++ without what is in brackets, which demanglers write in different ways.
fn plain(name: &str) -> String {
    let name = name.replace("(anonymous namespace)", "{anonymous}");
    let name = name.split(['<', '(']).next().unwrap_or_default();
    name.trim_end().rsplit(' ').next().unwrap_or_default().to_owned()
}

/// py-spy's lines are `name (place);name (place) count`, the leaf last. What has no name is an address.
fn theirs(text: &str) -> Shares {
    let mut shares = Shares::default();
    for line in text.lines() {
        let Some((stack, count)) = line.rsplit_once(' ') else { continue };
        let frames: Vec<_> = stack.split(';').collect();
        let Some(at) = frames.iter().rposition(|frame| frame.contains(".py:")) else { continue };
        let named = |frame: &&'_ str| !frame.starts_with("0x");
        let native: Vec<_> = frames[at + 1..].iter().rev().map(|frame| Some(*frame).filter(named)).collect();
        let python = frames[at].split(" (").next().unwrap_or_default();
        shares.add(python, &native, count.parse().unwrap_or(0));
    }
    shares
}

/// Ours are JSON lines, the leaf first.
fn ours(text: &str) -> Result<Shares> {
    let mut shares = Shares::default();
    for line in text.lines() {
        let Sample { frames } = serde_json::from_str(line).context("a line of ours is no sample")?;
        let Some(at) = frames.iter().position(|frame| frame.kind == "python") else { continue };
        // One without a symbol has its object's.
        let named = |frame: &Frame| !frame.function.contains(".so");
        let native: Vec<_> = frames[..at].iter().map(|frame| Some(&*frame.function).filter(|_| named(frame))).collect();
        // py-spy has names without their class or the function around.
        shares.add(frames[at].function.rsplit('.').next().unwrap_or_default(), &native, 1);
    }
    Ok(shares)
}

/// The busy program; it ends when this is dropped.
struct Program(Child);

impl Program {
    fn start(python: &Path) -> Result<Self> {
        let mut line = Command::new(python);
        line.arg(command::project_root().join("tests/programs/wheels.py")).env("OPENBLAS_NUM_THREADS", "1");
        let child = line.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().context("cannot start the program")?;
        let mut program = Self(child);
        let mut ready = String::new();
        let output = program.0.stdout.take().context("its output is ours")?;
        BufReader::new(output).read_line(&mut ready).context("cannot read what the program says")?;
        ensure!(!ready.is_empty(), "the program ended before it worked");
        Ok(program)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _gone = self.0.kill();
        let _reaped = self.0.wait();
    }
}

/// Profiles the program with both at once. The page's section.
///
/// # Errors
/// The packages cannot be had, or a profiler failed.
pub(crate) fn section(tools: &Tools, python: &Path, quick: bool) -> Result<String> {
    eprintln!("native frames beside py-spy's");
    let python = tools::in_venv(python, &cache::dir()?.join("bench/wheels"), PACKAGES)?.join("python");
    let program = Program::start(&python)?;
    let length = Duration::from_secs(if quick { 3 } else { 20 });
    let (pid, path) = (program.0.id().to_string(), |name: &str| tools.work.path().join(name));
    let (raw, lines) = (path("native.raw"), path("native.jsonl"));
    // py-spy takes longer to start: it is to be there for as long as we are.
    let seconds = (length.as_secs() + 1).to_string();
    let mut line = Command::new(&tools.py_spy);
    line.args(["record", "--native", "--format", "raw", "--rate", &THEIRS_HZ.to_string(), "--duration", &seconds]);
    line.args(["--pid", &pid, "--output"]).arg(&raw).stdout(Stdio::null()).stderr(Stdio::null());
    let mut py_spy = line.spawn().context("cannot start py-spy")?;
    let mut line = Command::new(&tools.tachyon);
    line.args(["--pid", &pid, "--frequency", &OURS_HZ.to_string(), "--duration", &format!("{}s", length.as_secs())]);
    line.args(["--format", "jsonl", "--output"]).arg(&lines);
    let recorded = command::run_quietly("recording with native frames", &mut line);
    let status = py_spy.wait().context("cannot wait for py-spy")?;
    recorded?;
    ensure!(status.success(), "py-spy ended with {status}");
    let read = |path: &Path| fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()));
    Ok(compared(&ours(&read(&lines)?)?, &theirs(&read(&raw)?)))
}

fn compared(ours: &Shares, theirs: &Shares) -> String {
    let mut page = format!(
        "{HEADING}\nnumpy, pyarrow, orjson and pydantic-core from PyPI (`tests/programs/wheels.py`), profiled by both at once: {} \
         stacks of ours at {OURS_HZ} Hz, {} of `py-spy record --native` at {THEIRS_HZ} Hz. Two shares are the same when they \
         differ by no more than the sampling error (99.9 %) and {:.0} %.\n",
        ours.stacks,
        theirs.stacks,
        TOLERATED * 100.0,
    );
    for (what, ours_of, theirs_of) in [
        ("that has a native function running for its innermost Python function", &ours.running, &theirs.running),
        ("that has a native function anywhere above its innermost Python function", &ours.above, &theirs.above),
    ] {
        let share = |of: &BTreeMap<Pair, u64>, pair: &Pair, stacks: u64| {
            of.get(pair).copied().unwrap_or(0) as f64 / stacks as f64
        };
        let mut top: Vec<_> = theirs_of.iter().map(|(pair, count)| (count, pair)).collect();
        top.sort_unstable_by(|one, other| other.cmp(one));
        top.truncate(TOP);
        let (mut rows, mut agree) = (String::new(), 0);
        for (_, pair) in &top {
            let (our, their) = (share(ours_of, pair, ours.stacks), share(theirs_of, pair, theirs.stacks));
            let mean = f64::midpoint(our, their);
            let variance = mean * (1.0 - mean) * (1.0 / ours.stacks as f64 + 1.0 / theirs.stacks as f64);
            let same = (our - their).abs() <= DEVIATIONS * variance.sqrt() + TOLERATED;
            agree += usize::from(same);
            let (our, their, verdict) = (our * 100.0, their * 100.0, if same { "the same" } else { "**differs**" });
            let _ = writeln!(rows, "| `{}` | `{}` | {our:.1} % | {their:.1} % | {verdict} |", pair.0, pair.1);
        }
        let _ = write!(
            page,
            "\nThe share of samples {what}, of the pairs that py-spy met most often: {agree} of {} are the same.\n\n\
             | Python function | native function | tachyon-bpf | py-spy | |\n|---|---|---:|---:|---|\n{rows}",
            top.len(),
        );
    }
    page + EXPLAINED
}

const EXPLAINED: &str = "
py-spy samples by the wall clock and stops the program for each sample; we sample by its CPU time, in which it does not run
while it is stopped. Functions without symbols (the Rust of orjson and pydantic-core) are addresses in py-spy's output and
have their object's name in ours, so they are in neither table. py-spy gives Cython's functions the names of the source, we
those of the symbols: its `call` is our `__pyx_pw_7pyarrow_8_compute_8Function_7call`.
";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_that_differ_are_told() {
        let line = |native: &str| {
            let frame = |function: &str, kind: &str| format!(r#"{{"function": "{function}", "kind": "{kind}"}}"#);
            format!(
                "{{\"frames\": [{}, {}, {}]}}\n",
                frame(native, "native"),
                frame("A.sort", "python"),
                frame("main", "native")
            )
        };
        let ours = ours(&(line("std::sort<int>(int*)").repeat(900) + &line("other").repeat(100))).unwrap();
        assert_eq!((ours.stacks, ours.above[&("sort".to_owned(), "std::sort".to_owned())]), (1_000, 900));
        let theirs = theirs(
            "main (x.py:1);sort (x.py:2);void std::sort<int> (libx.so);0x7f (libx.so) 60\nsort (x.py:2);other (libx.so) 40\n",
        );
        assert_eq!((theirs.stacks, theirs.above.len(), theirs.running.len()), (100, 2, 1));
        let page = compared(&ours, &theirs);
        assert!(page.contains("| `sort` | `std::sort` | 90.0 % | 60.0 % | **differs** |"), "{page}");
        assert!(page.contains("0 of 2 are the same"), "{page}");
        let page = compared(&theirs, &theirs);
        assert!(page.contains("2 of 2 are the same") && page.starts_with(HEADING), "{page}");
    }
}
