//! The TACH writer and reader beside CPython 3.15's own, on the same samples, and what an export costs.
//!
//! CPython writes a file; this project's writer writes the samples of that file again. Both read both. Times are CPU
//! time of one process without its setup, the best of three, because what other work adds does not matter.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use super::tools::{duration, wait4};
use crate::{cache, command};

/// The section's heading in the page.
pub(crate) const HEADING: &str = "## TACH, beside CPython's own writer and reader\n";
/// What the samples are; `xtask/bench/tach.py` makes them.
const KINDS: [(&str, f64); 2] = [("repeated", 20e6), ("changing", 1e6)];
/// Export formats, by extension. Not JSON lines: at 3.8 kB per sample of 30 frames that would measure the disk.
const EXPORTS: [&str; 8] = ["collapsed", "prof", "pb.gz", "html", "svg", "speedscope.json", "firefox.json", "tach"];
/// Longest time that an export of [`LARGE`] samples should take, seconds.
const EXPORT_BUDGET_S: f64 = 2.0;
const LARGE: u64 = 5_000_000;
const SMALL: u64 = 1_000_000;

/// What both programs print.
#[derive(Clone, Copy, Deserialize)]
struct Timed {
    seconds: f64,
    samples: u64,
    bytes: u64,
}

impl Timed {
    fn rate(self) -> f64 {
        self.samples as f64 / self.seconds
    }

    fn bytes_per_sample(self) -> f64 {
        self.bytes as f64 / self.samples as f64
    }
}

/// Both programs, and where they work.
struct Both {
    root: PathBuf,
    dir: tempfile::TempDir,
    ours: PathBuf,
}

impl Both {
    fn set_up() -> Result<Self> {
        let root = cache::dir()?.join("zoo/sid");
        if !root.join("usr/bin/python3.15").is_file() {
            bail!("{}: no python3.15\nhint: cargo xtask zoo", root.display());
        }
        let dir = tempfile::Builder::new().prefix("bench").tempdir_in(root.join("tmp")).context("cannot work there")?;
        let script = command::project_root().join("xtask/bench/tach.py");
        std::fs::copy(&script, dir.path().join("tach.py"))
            .with_context(|| format!("cannot copy {}", script.display()))?;
        Ok(Self { root, dir, ours: super::tools::benchmark("tach", &[])? })
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The best of three runs.
    fn best(mut run: impl FnMut() -> Result<Timed>) -> Result<Timed> {
        let runs = [run()?, run()?, run()?];
        Ok(runs.into_iter().min_by(|a, b| a.seconds.total_cmp(&b.seconds)).expect("there are three"))
    }

    /// Runs CPython's. A path is the name of a file in the directory.
    fn theirs(&self, words: &[&str]) -> Result<Timed> {
        let inside = Path::new("/").join(self.dir.path().strip_prefix(&self.root).expect("it was made there"));
        let mut line = Command::new("chroot");
        line.arg(&self.root).arg("/usr/bin/python3.15").arg(inside.join("tach.py"));
        line.args(words.iter().map(|&word| match word.ends_with(".tach") {
            true => inside.join(word),
            false => PathBuf::from(word),
        }));
        let told = command::stdout(&mut line)?;
        serde_json::from_str(&told).with_context(|| format!("the benchmark says {told:?}"))
    }

    fn ours(&self, words: &[&str]) -> Result<Timed> {
        let mut line = Command::new(&self.ours);
        line.args(words.iter().map(|&word| match word.ends_with(".tach") {
            true => self.file(word),
            false => PathBuf::from(word),
        }));
        let told = command::stdout(&mut line)?;
        serde_json::from_str(&told).with_context(|| format!("the benchmark says {told:?}"))
    }
}

/// What one export cost.
pub(crate) struct Export {
    pub(crate) cpu_s: f64,
    pub(crate) wall_s: f64,
    pub(crate) peak_mib: f64,
    pub(crate) bytes: u64,
}

fn export_as(tachyon: &Path, from: &Path, extension: &str) -> Result<Export> {
    let dir = tempfile::tempdir().context("cannot make a directory")?;
    export(tachyon, from, &dir.path().join(format!("out.{extension}")))
}

/// Exports a TACH file to a path, whose extension gives the format.
///
/// # Errors
/// The export fails.
pub(crate) fn export(tachyon: &Path, from: &Path, to: &Path) -> Result<Export> {
    let begin = std::time::Instant::now();
    let child = Command::new(tachyon).arg("export").arg(from).arg("--force").arg("-o").arg(to).spawn();
    let child = child.with_context(|| format!("cannot run {}", tachyon.display()))?;
    let (status, usage) = wait4(i32::try_from(child.id()).expect("pids are positive"))?;
    if !status.success() {
        bail!("the export to {} failed", to.display());
    }
    Ok(Export {
        wall_s: begin.elapsed().as_secs_f64(),
        cpu_s: (duration(usage.ru_utime) + duration(usage.ru_stime)).as_secs_f64(),
        peak_mib: usage.ru_maxrss as f64 / 1024.0,
        bytes: std::fs::metadata(to)?.len(),
    })
}

/// Measures, and writes the section.
///
/// # Errors
/// There is no CPython 3.15, or either side fails. A figure over its budget is not an error.
pub(crate) fn section(tachyon: &Path, quick: bool) -> Result<String> {
    let both = Both::set_up()?;
    let per_kind = if quick { 20_000 } else { SMALL };
    let mut page = String::new();
    // `fmt::Write` for `String` does not fail; so everywhere below.
    let _ = write!(
        page,
        "{HEADING}\nThe same {per_kind} samples of 30 frames, zstd level 5, CPU time of one process, best of three. All \
         figures are from one run at a load of {}, not necessarily the run of the other sections. *Repeated*: always the same stack. \
         *Changing*: nearly always a different stack, one of 1,000 stacks of four threads that differ in their innermost 1 to 12 frames \
         (`xtask/bench/tach.py`).\n\n\
         | | writer, samples/s | budget | | reader, of its own file | of the other's | file | a sample |\n\
         |---|---:|---:|---|---:|---:|---:|---:|\n",
        std::fs::read_to_string("/proc/loadavg").unwrap_or_default().split(' ').next().unwrap_or("?"),
    );
    for (kind, budget) in KINDS {
        eprintln!("TACH, {kind} samples");
        let count = per_kind.to_string();
        let wrote = Both::best(|| both.theirs(&["write", kind, &count, "theirs.tach"]))?;
        let write = || both.ours(&["write", "theirs.tach", "ours.tach", &count]);
        let we_wrote = Both::best(write)?;
        let row = |page: &mut String, name: &str, wrote: Timed, budget: &str, own: Timed, other: Timed| {
            let _ = writeln!(
                page,
                "| {name}, {kind} | {:.2} M | {budget} | {:.2} M/s | {:.2} M/s | {} bytes | {:.2} bytes |",
                wrote.rate() / 1e6,
                own.rate() / 1e6,
                other.rate() / 1e6,
                wrote.bytes,
                wrote.bytes_per_sample(),
            );
        };
        let read = |file: &'static str| Both::best(|| both.ours(&["read", file]));
        let verdict = |ok: bool| if ok { "ok" } else { "**over**" };
        let ok = verdict(we_wrote.rate() >= budget && we_wrote.bytes <= wrote.bytes);
        let budget = format!("{:.0} M, and no larger file | {ok}", budget / 1e6);
        row(&mut page, "tachyon-bpf", we_wrote, &budget, read("ours.tach")?, read("theirs.tach")?);
        let read = |file: &'static str| Both::best(|| both.theirs(&["read", file]));
        row(&mut page, "CPython 3.15", wrote, "– | ", read("theirs.tach")?, read("ours.tach")?);
        let zstd = Both::best(|| both.ours(&["zstd", "theirs.tach"]))?;
        let _ = writeln!(page, "| zstd 5 alone, {kind} | {:.2} M | – |  | | | | |", zstd.rate() / 1e6);
    }
    // `theirs.tach` is the changing one now.
    let (large, small) = if quick { (100_000, 20_000) } else { (LARGE, SMALL) };
    for (count, name) in [(large, "large.tach"), (small, "small.tach")] {
        both.ours(&["write", "theirs.tach", name, &count.to_string()])?;
    }
    let _ = write!(
        page,
        "\nCPython's writer is called from Python, once for each sample; its reader calls a collector that does nothing. \
         *zstd 5 alone* compresses the bytes of the same samples in memory: no writer of these files with CPython's level and \
         parameters can be faster.\n\n\
         Exports of {large} changing samples ({} bytes), and the memory that {small} of them take:\n\n\
         | to | CPU | wall | budget | | peak RSS | of {small} | output |\n|---|---:|---:|---:|---|---:|---:|---:|\n",
        std::fs::metadata(both.file("large.tach"))?.len(),
    );
    for extension in EXPORTS {
        eprintln!("export to {extension}");
        let of_small = export_as(tachyon, &both.file("small.tach"), extension)?;
        let large = || export_as(tachyon, &both.file("large.tach"), extension);
        let runs = [large()?, large()?, large()?];
        let best = runs.into_iter().min_by(|a, b| a.wall_s.total_cmp(&b.wall_s)).expect("there are three");
        let Export { cpu_s, wall_s, peak_mib, bytes } = best;
        let verdict = if wall_s <= EXPORT_BUDGET_S { "ok" } else { "**over**" };
        let _ = writeln!(
            page,
            "| .{extension} | {cpu_s:.2} s | {wall_s:.2} s | {EXPORT_BUDGET_S} s | {verdict} | {peak_mib:.0} MiB | {:.0} MiB | {:.1} MB |",
            of_small.peak_mib,
            bytes as f64 / 1e6,
        );
    }
    page.push_str(NOTES);
    Ok(page)
}

const NOTES: &str = "
The best of three by wall time, to which the budget applies: one thread decodes, another produces the output. Formats that
keep every sample take time in proportion to the length of their text; JSON lines, at 3.8 kB a sample, are left out. From TACH
to TACH, samples are decoded to make sure that the output can be read, and copied unchanged.
";
