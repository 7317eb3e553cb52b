//! A busy host over a long time: does memory stay flat, does the account add up, does the reader keep up?
//!
//! 200 live interpreters that work a little, a thousand program starts a minute of which every tenth is CPython, and
//! the profiler watching all of them. Memory is watched from outside.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

mod agent;

use super::machine::Machine;
use super::{numbered, probe, tools};
use crate::{command, zoo};

/// Arguments of `cargo xtask soak`.
#[derive(clap::Args)]
pub(crate) struct SoakArgs {
    /// How long, in seconds
    #[arg(long, default_value_t = 600, value_parser = clap::value_parser!(u64).range(20..))]
    seconds: u64,
    /// Cut the recording into segments of this length, e.g. 500ms, beside 20 interpreters, one that numbers its work, and 3
    /// starts of CPython a second: segments must add up to the unit, have each step of that work, and memory must not grow
    #[arg(long, value_name = "TIME", conflicts_with = "write")]
    rotate: Option<humantime::Duration>,
    /// Python frames only: nothing warms up then, and memory after the last look is held to that after the first
    #[arg(long, requires = "rotate")]
    no_native: bool,
    /// `tachyon-bpf agent` with its defaults and segments of 10 s, beside 50 interpreters: all segments must add up to what the
    /// agent and the kernel counted, and memory must not grow
    #[arg(long, conflicts_with_all = ["rotate", "write"])]
    agent: bool,
    /// Write the page to docs/dev/soak.md as well
    #[arg(long)]
    write: bool,
    /// The program to soak [default: built from this project, as a release]
    #[arg(long, value_name = "PATH")]
    profiler: Option<PathBuf>,
}

const PAGE: &str = "docs/dev/soak.md";
/// What runs beside the profiler.
#[derive(Clone, Copy)]
struct Load {
    /// Interpreters that run all the time.
    live: usize,
    /// Time between two program starts.
    between: Duration,
    /// One in this many of them is CPython.
    python_every: u64,
    /// Memory that each started CPython may cost.
    process_bytes: u64,
}

/// A thousand program starts a minute.
const BUSY: Load =
    Load { live: 200, between: Duration::from_millis(60), python_every: 10, process_bytes: PROCESS_BYTES };
/// A recording in segments keeps nothing about ended processes.
const CUT: Load = Load { live: 20, between: Duration::from_millis(333), python_every: 1, process_bytes: 0 };
/// Time between two looks at memory.
const LOOK: Duration = Duration::from_secs(5);
/// Longest time that counts as warming up (at most two thirds of a short run): compile units of a file's DWARF are read
/// when samples first fall into them, and that happens less and less.
const WARM: Duration = Duration::from_secs(120);
/// Growth allowed in addition to the cost of each sampled process: the allocator's own.
const SLACK_BYTES: u64 = 3 << 20;
/// What one sampled process may cost (`docs/limits.md`).
const PROCESS_BYTES: u64 = 6 << 10;
/// Growth from one look to the next that counts as a step: the symbols of a file that a sample has fallen into for the
/// first time.
const STEP_BYTES: u64 = 1 << 20;
/// Most that all steps may add up to: the profiler's own limit on symbols.
const STEPS_BYTES: u64 = 64 << 20;
/// Growth allowed in a recording in segments without native frames.
const FLAT_BYTES: u64 = 2 << 20;
/// Name of the interpreters that a recording in segments covers: no other Python on the machine counts.
const NAME: &str = "soak-python";
/// Longest the reader should ever be late.
const STALL_S: f64 = 0.1;

/// The program that runs all the time: half a millisecond of work, twice a second, until its parent is gone.
const WORK: &str = "
import os, time
parent = os.getppid()
def work():
    end = time.thread_time() + 0.0005
    while time.thread_time() < end: pass
while os.getppid() == parent:
    work()
    time.sleep(0.5)
";

/// Processes that end when this is dropped.
pub(crate) struct Crowd(pub(crate) Vec<Child>);

impl Drop for Crowd {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // One that has already ended is not an error.
            let _gone = child.kill();
            let _reaped = child.wait();
        }
    }
}

/// What was seen at one moment.
#[derive(Clone, Copy)]
struct Look {
    at: Duration,
    rss: u64,
    maps: u64,
    pythons: u64,
}

impl Look {
    fn of(pid: u32, at: Duration, pythons: u64) -> Result<Self> {
        let rss = probe::field(&format!("/proc/{pid}/status"), "VmRSS").context("the profiler has ended")?;
        let rss = rss.trim_end_matches(" kB").parse::<u64>().context("VmRSS is a number of KiB")? * 1024;
        let infos = fs::read_dir(format!("/proc/{pid}/fdinfo")).context("the profiler has ended")?;
        let infos = infos.filter_map(|info| fs::read_to_string(info.ok()?.path()).ok());
        let memlock = |info: String| {
            let map = info.lines().any(|line| line.starts_with("map_id:"));
            let bytes = info.lines().find_map(|line| line.strip_prefix("memlock:")?.trim().parse::<u64>().ok());
            if map { bytes } else { None }
        };
        Ok(Self { at, rss, maps: infos.filter_map(memlock).sum(), pythons })
    }
}

/// Runs `cargo xtask soak`.
///
/// # Errors
/// The profiler failed, its account does not add up, or its memory grew by more than what it sampled explains.
pub(crate) fn run(args: SoakArgs) -> Result<()> {
    command::require_root("loading BPF programs")?;
    let python = zoo::newest_supported().context("no CPython 3.11 to 3.13 in pyenv")?;
    let profiler = match args.profiler.clone() {
        Some(profiler) => profiler,
        None => tools::build()?,
    };
    let mut machine = Machine::look(&python, &[&profiler])?;
    let work = tempfile::tempdir().context("cannot create a directory for profiles")?;
    let load = match (args.agent, args.rotate) {
        (true, _) => agent::LOAD,
        (false, Some(_)) => CUT,
        (false, None) => BUSY,
    };
    let length = Duration::from_secs(args.seconds);
    let soaked = soak(&python, &profiler, work.path(), length, load, &args)?;
    machine.end();
    let page = page(&machine, &soaked, !args.no_native);
    print!("{page}");
    if args.write {
        let path = command::project_root().join(PAGE);
        fs::write(&path, &page).with_context(|| format!("cannot write {}", path.display()))?;
        eprintln!("written: {PAGE}");
    }
    let Account { ran, accounted, kernels } = soaked.account()?;
    ensure!(ran == accounted, "the account does not add up: {ran} runs, {accounted} accounted for");
    ensure!(ran == kernels, "the kernel counted {kernels} runs, the profiler {ran}");
    if args.agent {
        segments(&agent::spool(work.path()), &soaked.report, agent::LENGTH)?;
        return agent::judge(&soaked);
    }
    if let Some(length) = args.rotate {
        let directory = work.path().join(SEGMENTS);
        segments(&directory, &soaked.report, *length)?;
        let samples = numbered::check(&profiler, &files(&directory, "tach")?)?;
        ensure!(samples > args.seconds * 20, "the program that numbers its work has {samples} samples");
        println!("{samples} samples of work that numbers itself: none came back at a cut, and none is missing");
    }
    if args.no_native {
        return flat(&soaked.looks);
    }
    let (warm, last) = soaked.ends()?;
    let (allowed, steps) = (allowed_growth(&warm, &last, load), steps(&soaked.looks, warm.at));
    ensure!(last.rss <= warm.rss + steps + allowed, "resident memory grew from {} to {} bytes", warm.rss, last.rss);
    ensure!(steps <= STEPS_BYTES, "resident memory grew by steps of {steps} bytes");
    ensure!(last.maps == warm.maps, "the maps grew from {} to {} bytes", warm.maps, last.maps);
    Ok(())
}

/// Checks that memory after all the cuts is the same as after the first.
fn flat(looks: &[Look]) -> Result<()> {
    let (Some(first), Some(last)) = (looks.iter().find(|look| look.at >= LOOK), looks.last()) else {
        bail!("a run of {} looks shows nothing", looks.len());
    };
    let grown = last.rss.saturating_sub(first.rss);
    println!(
        "resident memory: {} KiB after {:.0} s, {} KiB at the end",
        first.rss >> 10,
        first.at.as_secs_f64(),
        last.rss >> 10
    );
    ensure!(
        grown <= FLAT_BYTES,
        "resident memory grew by {} KiB, which is more than {}",
        grown >> 10,
        FLAT_BYTES >> 10
    );
    ensure!(last.maps == first.maps, "the maps grew from {} to {} bytes", first.maps, last.maps);
    Ok(())
}

/// How much resident memory may grow between two looks.
fn allowed_growth(warm: &Look, last: &Look, load: Load) -> u64 {
    SLACK_BYTES + load.process_bytes * (last.pythons - warm.pythons)
}

/// Files of a directory with this extension, in order.
fn files(directory: &Path, extension: &str) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(directory).context("there are no segments")?;
    let mut paths: Vec<PathBuf> = entries.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    paths.retain(|path| path.extension().is_some_and(|it| it == extension));
    paths.sort();
    Ok(paths)
}

/// Where segments go, below the directory of a soak.
const SEGMENTS: &str = "segments";

/// Checks the accounts of all segments against each other and against the whole recording's.
fn segments(directory: &Path, whole: &Value, length: Duration) -> Result<()> {
    ensure!(files(directory, "part")?.is_empty(), "a segment was not finished");
    let mut paths = files(directory, "json")?;
    // The agent's own state.
    paths.retain(|path| !path.ends_with("state.json"));
    const COUNTS: [&str; 6] = ["ran", "stored", "idle", "filtered", "not_python", "inconsistent"];
    let count = |report: &Value, name: &str| report[name].as_u64().with_context(|| format!("an account has no {name}"));
    let lost = |report: &Value| -> u64 {
        report["loss"].as_object().into_iter().flatten().filter_map(|(_, count)| count.as_u64()).sum()
    };
    let mut sums = [0; COUNTS.len()];
    let (mut losses, mut kernels) = (0, 0);
    for (sequence, path) in (0_u64..).zip(&paths) {
        let report: Value = serde_json::from_slice(&fs::read(path)?).context("an account is JSON")?;
        for (sum, name) in sums.iter_mut().zip(COUNTS) {
            *sum += count(&report, name)?;
        }
        losses += lost(&report);
        kernels +=
            report.pointer("/cost/bpf_run_count").and_then(Value::as_u64).context("the kernel keeps no count")?;
        let ended: u64 = COUNTS[1..5].iter().map(|name| count(&report, name)).sum::<Result<u64>>()? + lost(&report);
        ensure!(count(&report, "ran")? == ended, "{}: the account does not add up", path.display());
        let told = report.pointer("/segment/sequence").and_then(Value::as_u64);
        ensure!(told == Some(sequence), "{}: it is segment {told:?}, not {sequence}", path.display());
    }
    for (sum, name) in sums.into_iter().zip(COUNTS) {
        ensure!(count(whole, name)? == sum, "{name}: the segments have {sum}, the whole {}", whole[name]);
    }
    let seconds = whole["duration_s"].as_f64().context("an account has no duration")?;
    let wanted = seconds / length.as_secs_f64();
    ensure!(paths.len() as f64 >= 0.9 * wanted, "{} segments where there should be {wanted:.0}", paths.len());
    ensure!(sums[5] == 0, "counts of the same thing differ by {}", sums[5]);
    ensure!(lost(whole) == losses, "lost: the segments have {losses}, the whole {}", lost(whole));
    ensure!(kernels == sums[0], "the kernel counted {kernels} runs, the segments {}", sums[0]);
    println!("{} segments add up: {} runs, {} samples, the kernel's own count too", paths.len(), sums[0], sums[1]);
    Ok(())
}

/// How much resident memory grew in steps since it was warm. A leak grows at each look, by less.
fn steps(looks: &[Look], warm: Duration) -> u64 {
    let since = looks.iter().filter(|look| look.at >= warm).map(|look| look.rss).collect::<Vec<_>>();
    since.windows(2).map(|pair| pair[1].saturating_sub(pair[0])).filter(|grown| *grown > STEP_BYTES).sum()
}

struct Soaked {
    looks: Vec<Look>,
    execs: u64,
    load: Load,
    report: Value,
}

struct Account {
    ran: u64,
    accounted: u64,
    kernels: u64,
}

impl Soaked {
    fn number(&self, path: &str) -> Result<u64> {
        self.report.pointer(path).and_then(Value::as_u64).with_context(|| format!("the report has no {path}"))
    }

    fn account(&self) -> Result<Account> {
        let loss = self.report["loss"].as_object().context("the report has no loss")?;
        let mut accounted: u64 = loss.values().filter_map(Value::as_u64).sum();
        for part in ["/stored", "/idle", "/filtered", "/not_python"] {
            accounted += self.number(part)?;
        }
        Ok(Account { ran: self.number("/ran")?, accounted, kernels: self.number("/cost/bpf_run_count")? })
    }

    /// The look when it was warm, and the last one.
    fn ends(&self) -> Result<(Look, Look)> {
        let last = *self.looks.last().context("nothing was looked at")?;
        let warm = WARM.min(last.at * 2 / 3);
        let warm = *self.looks.iter().find(|look| look.at >= warm).context("nothing was looked at")?;
        Ok((warm, last))
    }
}

fn soak(python: &Path, profiler: &Path, work: &Path, length: Duration, load: Load, args: &SoakArgs) -> Result<Soaked> {
    let Load { live: count, between, python_every, .. } = load;
    eprintln!("{count} interpreters, a program start each {} ms, {} s", between.as_millis(), length.as_secs());
    let quiet = |mut line: Command| line.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    let mut live = Crowd(Vec::new());
    let named = work.join(NAME);
    std::os::unix::fs::symlink(python, &named).context("cannot name the interpreter")?;
    for _ in 0..count {
        let mut line = Command::new(&named);
        line.args(["-S", "-c", WORK]);
        live.0.push(quiet(line).context("cannot start an interpreter")?);
    }
    if args.rotate.is_some() {
        let mut line = Command::new(&named);
        line.arg("-S").arg(numbered::write(work)?);
        live.0.push(quiet(line).context("cannot start the program that numbers its work")?);
    }
    // They have started: the profiler finds them by looking at them, not by following their start.
    sleep(Duration::from_secs(5));
    let report = work.join("report.json");
    let mut line = if args.agent { agent::command(profiler, work)? } else { recorder(profiler, work, &report, args) };
    let mut profiler = Crowd(vec![line.stdin(Stdio::null()).stderr(Stdio::null()).spawn().context("cannot start")?]);
    let pid = profiler.0[0].id();
    while probe::BpfObjects::of(pid).timer_runs == 0 {
        ensure!(profiler.0[0].try_wait()?.is_none(), "the profiler has ended");
        sleep(Duration::from_millis(20));
    }
    let (start, mut looks, mut execs, mut pythons) = (Instant::now(), Vec::new(), 0, 0);
    let mut running = Crowd(Vec::new());
    while start.elapsed() < length {
        if looks.len() as u128 * LOOK.as_millis() <= start.elapsed().as_millis() {
            looks.push(Look::of(pid, start.elapsed(), pythons)?);
        }
        // If this had no CPU for a while, it catches up on missed starts.
        while u128::from(execs) * between.as_millis() <= start.elapsed().as_millis() {
            let line = if execs % python_every == 0 {
                pythons += 1;
                let mut line = Command::new(&named);
                line.args(["-S", "-c", "sum(i * i for i in range(200_000))"]);
                line
            } else {
                Command::new("true")
            };
            running.0.push(quiet(line).context("cannot start a program")?);
            execs += 1;
        }
        running.0.retain_mut(|child| !matches!(child.try_wait(), Ok(Some(_))));
        sleep(Duration::from_millis(10));
    }
    looks.push(Look::of(pid, start.elapsed(), pythons)?);
    kill(Pid::from_raw(i32::try_from(pid)?), Signal::SIGINT).context("cannot interrupt the profiler")?;
    let status = profiler.0[0].wait()?;
    ensure!(status.success(), "the profiler failed: {status}");
    let report = if args.agent {
        agent::report(work)?
    } else {
        serde_json::from_slice(&fs::read(&report).context("the profiler left no report")?)?
    };
    Ok(Soaked { looks, execs, load, report })
}

/// The command line of a recording.
fn recorder(profiler: &Path, work: &Path, report: &Path, args: &SoakArgs) -> Command {
    let mut line = Command::new(profiler);
    line.arg("--all-python").arg("--report").arg(report);
    if args.no_native {
        line.arg("--no-native");
    }
    match &args.rotate {
        Some(length) => {
            line.args(["--comm", NAME, "--rotate", &length.to_string(), "--output"]).arg(work.join(SEGMENTS))
        }
        None => line.arg("--output").arg(work.join("soak.tach")),
    };
    line
}

fn page(machine: &Machine, soaked: &Soaked, native: bool) -> String {
    let mut page = String::from(
        "# Soak\n\nWritten by `cargo xtask soak --write`: one run on one machine. It fails if the account does not add \
         up, if the maps grow, or if\nresident memory, once warm, grows by more than 3 MiB plus 6 KiB for each CPython started \
         since then. Steps of more than 1 MiB in 5 s\nare not included: the symbols of a file are read when a sample falls \
         into it for the first time. Steps may add up to 64 MiB, the\nlimit on symbols.\n\n",
    );
    machine.describe(&mut page);
    page.push('\n');
    let Ok((warm, last)) = soaked.ends() else { return page };
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let minutes = last.at.as_secs_f64() / 60.0;
    let number = |path: &str| soaked.number(path).unwrap_or(0);
    let seconds = |path: &str| soaked.report.pointer(path).and_then(Value::as_f64).unwrap_or(0.0);
    let stall = seconds("/longest_reader_stall_s");
    let (ran, accounted) = soaked.account().map_or((0, 0), |account| (account.ran, account.accounted));
    let cost = seconds("/cost/user_cpu_s") + number("/cost/bpf_run_ns") as f64 / 1e9;
    let growth = mib(last.rss) - mib(warm.rss);
    let (allowed, steps) = (allowed_growth(&warm, &last, soaked.load), steps(&soaked.looks, warm.at));
    let _ = write!(
        page,
        "| | |\n|---|---:|\n\
         | live interpreters | {} |\n\
         | program starts a minute | {:.0} |\n\
         | of them CPython | {:.0} |\n\
         | length | {minutes:.1} min |\n\
         | runs of the timer's program | {ran} |\n\
         | accounted for | {accounted} |\n\
         | samples stored | {} |\n\
         | lost | {} |\n\
         | process events lost | {} |\n\
         | resident memory when warm, after {:.0} s | {:.1} MiB |\n\
         | the same at the end | {:.1} MiB ({growth:+.1}{}) |\n\
         | of that, in steps | {:.1} MiB |\n\
         | CPython processes started between | {} |\n\
         | maps when warm, and at the end | {:.1}, {:.1} MiB |\n\
         | longest that the reader was late | {:.0} ms{} |\n\
         | of that, ready to run while no CPU ran it | {:.0} ms |\n\
         | the profiler's CPU, BPF included | {:.2} % of a core |\n",
        soaked.load.live,
        soaked.execs as f64 / minutes,
        last.pythons as f64 / minutes,
        number("/stored"),
        soaked.report["loss"].as_object().map_or(0, |loss| loss.values().filter_map(Value::as_u64).sum::<u64>()),
        number("/process_events_lost"),
        warm.at.as_secs_f64(),
        mib(warm.rss),
        mib(last.rss),
        if last.rss > warm.rss + steps + allowed { format!(", **over** {:+.1}", mib(allowed)) } else { String::new() },
        mib(steps),
        last.pythons - warm.pythons,
        mib(warm.maps),
        mib(last.maps),
        stall * 1e3,
        if stall > STALL_S { ", **over** 100" } else { "" },
        seconds("/reader_stall_without_cpu_s") * 1e3,
        cost / last.at.as_secs_f64() * 100.0,
    );
    let _ = write!(page, "\nResident memory, MiB:");
    for look in soaked.looks.iter().step_by((soaked.looks.len() / 12).max(1)) {
        let _ = write!(page, " {:.1} ({:.0} s)", mib(look.rss), look.at.as_secs_f64());
    }
    page.push_str(if native {
        "\n\nNative frames are on: symbols (64 MiB at most) and unwind tables are kept for each file seen. If somebody else \
         meanwhile\nstarts a CPython of another build, it counts here too, as steps and in the maps.\n"
    } else {
        "\n\nNative frames are off: nothing is kept for each file.\n"
    });
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_a_step_and_a_leak_is_none() {
        let looks = |rss: &[u64]| {
            let look =
                |(at, rss): (u64, &u64)| Look { at: Duration::from_secs(at * 5), rss: rss << 10, maps: 0, pythons: 0 };
            (0..).zip(rss).map(look).collect::<Vec<_>>()
        };
        let warm = Duration::from_secs(5);
        assert_eq!(steps(&looks(&[1_000, 90_000, 90_900, 91_800, 92_800]), warm), 0, "less than a MiB each time");
        assert_eq!(steps(&looks(&[1_000, 90_000, 98_400, 98_300, 98_500]), warm), 8_400 << 10);
    }
}
