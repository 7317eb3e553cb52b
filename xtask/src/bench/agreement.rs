//! Native frames beside py-spy's: one process at one time, and the native functions that py-spy finds most often.

#[allow(unreachable_pub, reason = "the tests' library has it too")]
#[path = "../../../tests/support/native_shares.rs"]
mod shares;

use std::fmt::Write as _;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::tools::Tools;
use crate::{cache, command, tools};
use shares::{Compared, Shares, TOLERATED, compared, ours, py_spys};

/// The section's heading.
pub(crate) const HEADING: &str = "## Native frames beside py-spy\n";

/// Packages that do their work in C, C++ and Rust.
const PACKAGES: &str = "numpy==2.4.6 pyarrow==26.0.1 orjson==3.13.0 pydantic-core==2.50.4";

/// Functions that are compared.
const TOP: usize = 12;

/// Rates of both. (py-spy stops the target for each sample.)
const OURS_HZ: u32 = 499;
const THEIRS_HZ: u32 = 99;

/// The busy program; dropping this ends it.
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

/// Profiles the program with both at once. Returns the page's section.
///
/// # Errors
/// The packages are not available, or a profiler failed.
pub(crate) fn section(tools: &Tools, python: &Path, quick: bool) -> Result<String> {
    eprintln!("native frames beside py-spy's");
    let python = tools::in_venv(python, &cache::dir()?.join("bench/wheels"), PACKAGES)?.join("python");
    let program = Program::start(&python)?;
    let length = Duration::from_secs(if quick { 3 } else { 20 });
    let (pid, path) = (program.0.id().to_string(), |name: &str| tools.work.path().join(name));
    let (raw, lines) = (path("native.raw"), path("native.jsonl"));
    // py-spy takes longer to start, but must run for as long as this profiler.
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
    let ours = ours(&read(&lines)?).context("a line of ours is no sample")?;
    Ok(page(&ours, &py_spys(&read(&raw)?)))
}

fn page(ours: &Shares, theirs: &Shares) -> String {
    let mut page = format!(
        "{HEADING}\nnumpy, pyarrow, orjson and pydantic-core from PyPI (`tests/programs/wheels.py`), profiled by both at the same time: {} \
         stacks from tachyon-bpf at {OURS_HZ} Hz, {} from `py-spy record --native` at {THEIRS_HZ} Hz. Two shares count as the same if \
         they differ by no more than the sampling error (99.999 %) plus {:.0} %.\n",
        ours.stacks,
        theirs.stacks,
        TOLERATED * 100.0,
    );
    for (what, rows) in [
        ("runs for the", compared(ours, theirs, |shares| &shares.running, TOP)),
        ("is anywhere above the", compared(ours, theirs, |shares| &shares.above, TOP)),
    ] {
        let agree = rows.iter().filter(|row| row.same).count();
        let _ = write!(
            page,
            "\nThe share of samples in which a native function {what} innermost Python function, for the pairs that py-spy \
             sampled most often: {agree} of {} are the same.\n\n\
             | Python function | native function | tachyon-bpf | py-spy | |\n|---|---|---:|---:|---|\n",
            rows.len(),
        );
        for Compared { pair: (python, native), ours, theirs, same } in rows {
            let (ours, theirs, verdict) = (ours * 100.0, theirs * 100.0, if same { "the same" } else { "**differs**" });
            let _ = writeln!(page, "| `{python}` | `{native}` | {ours:.1} % | {theirs:.1} % | {verdict} |");
        }
    }
    page + EXPLAINED
}

const EXPLAINED: &str = "
py-spy samples by wall-clock time and stops the program for each sample; tachyon-bpf samples by the program's CPU time, which
does not advance while the program is stopped. Functions without symbols (the Rust code of orjson and pydantic-core) are
addresses in py-spy's output and have the name of their object file in tachyon-bpf's, so they are in neither table. py-spy
gives Cython's functions their names in the source, tachyon-bpf their symbols: py-spy's `call` is tachyon-bpf's
`__pyx_pw_7pyarrow_8_compute_8Function_7call`.
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
        let theirs = py_spys(
            "main (x.py:1);sort (x.py:2);void std::sort<int> (libx.so);0x7f (libx.so) 60\nsort (x.py:2);other (libx.so) 40\n",
        );
        assert_eq!((theirs.stacks, theirs.above.len(), theirs.running.len()), (100, 2, 1));
        let shown = page(&ours, &theirs);
        assert!(shown.contains("| `sort` | `std::sort` | 90.0 % | 60.0 % | **differs** |"), "{shown}");
        assert!(shown.contains("0 of 2 are the same"), "{shown}");
        let shown = page(&theirs, &theirs);
        assert!(shown.contains("2 of 2 are the same") && shown.starts_with(HEADING), "{shown}");
    }
}
