//! Checks what a guest sent against what it must be: the known stack, the account, a quiet kernel log.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use super::{events, hotplug, kick, refusals, waits};
use crate::account::Sums;

/// A stack is cut now and then by a page that cannot be read at that moment, so not every one can be exact.
const EXACT_SHARE: f64 = 0.99;

/// 2 s at 199 Hz are 398 samples. A loaded machine takes time from the emulated CPUs, whose timers then fire late (55
/// were seen when 18 programs wanted two CPUs): stacks are judged here, counts on the host.
const FEWEST_SAMPLES: u64 = 40;

/// The recordings that a guest makes of the running target. The first has only Python frames, the second is what the
/// profiler does by default: native frames as well.
const RECORDINGS: [&str; 2] = ["python", "default"];

/// Programs of a recording without native frames: four stages of sampling and four lifecycle hooks.
const PROGRAMS: usize = 8;

/// A program with more verified instructions is refused (`BPF_COMPLEXITY_LIMIT_INSNS`), and kernels count differently:
/// this project's programs leave a quarter of it free.
const LIMIT_VERIFIED: u32 = 1_000_000;
const MOST_VERIFIED: u32 = LIMIT_VERIFIED / 4 * 3;

/// The part of the report that is judged here.
#[derive(Deserialize)]
struct Account {
    #[serde(flatten)]
    sums: Sums,
    #[serde(default)]
    native: Option<Native>,
    cost: Cost,
}

/// What became of native stacks.
#[derive(Deserialize)]
struct Native {
    exact: u64,
    repaired: u64,
    failed: u64,
}

/// Shown, not judged: under emulation, times are not this machine's.
#[derive(Deserialize)]
struct Cost {
    bpf_run_count: Option<u64>,
    bpf_run_ns: Option<u64>,
    user_cpu_s: f64,
    ring_bytes: u64,
    map_bytes: u64,
    start: Start,
}

/// Parts of the start.
#[derive(Deserialize)]
struct Start {
    total_s: f64,
    attach_s: f64,
}

/// A Python frame that must be there: a function, and the lines it may be on.
#[derive(Debug, PartialEq)]
struct Expected<'a> {
    function: &'a str,
    first_line: u32,
    last_line: u32,
}

/// The object whose native frames the target declares; what libc and the interpreter do in between does not matter.
const OBJECT: &str = "extension.so!";

/// What the target says about its stack, root first.
#[derive(Debug, PartialEq)]
struct Truth<'a> {
    stack: Vec<Entry<'a>>,
    /// The native functions that may be above it.
    above: Vec<Vec<&'a str>>,
}

/// A frame of Python, or a native function of [`OBJECT`].
#[derive(Debug, PartialEq)]
enum Entry<'a> {
    Python(Expected<'a>),
    Native(&'a str),
}

/// Judges a guest's files and sums them up in a line. `refusal` is what the profiler must say where it cannot work.
///
/// # Errors
/// One of the promises is broken; the message says which, and ends with what the profiler printed.
pub(crate) fn judge(results: &Path, with_profiler: bool, promise: &Promise) -> Result<String> {
    let read = |name: &str| {
        let bytes = fs::read(results.join(name)).with_context(|| format!("the guest sent no {name}"))?;
        Ok::<_, anyhow::Error>(String::from_utf8_lossy(&bytes).into_owned())
    };
    let release = read("kernel")?;
    let dmesg = read("dmesg")?;
    if let Some(line) = complaint(&dmesg) {
        anyhow::bail!("the kernel complained: {line}");
    }
    let target = read("target")?;
    let truth = truth(&target)?;
    ensure!(target.ends_with("ready\n"), "python did not get ready: {}", read("target.log").unwrap_or_default());
    let mut summary = format!("{}, python ready with {} frames", release.trim(), truth.stack.len());
    kick::judge(&read("kick")?, &mut summary)?;
    if !with_profiler {
        return Ok(summary);
    }
    if let Some(refusal) = promise.refusal {
        let (status, said) = (read("python/record.status")?, read("python/record.log")?);
        ensure!(status.trim() == "1" && said.contains(refusal), "status {}, not refused: {said}", status.trim());
        return Ok(format!("{summary}; refused as it must be: {}", said.lines().next().unwrap_or_default()));
    }
    for recording in RECORDINGS {
        let read = |name: &str| read(&format!("{recording}/{name}"));
        let said = ["record.log", "export.log"].map(|name| read(name).unwrap_or_default()).join("");
        judge_recording(&read, &truth, recording == "default", &mut summary)
            .with_context(|| format!("recording `{recording}`: the profiler said:\n{said}"))?;
    }
    judge_deepest(&read, &mut summary).with_context(|| {
        format!("recording `deepest`: the profiler said:\n{}", read("deepest/record.log").unwrap_or_default())
    })?;
    waits::judge(&read, &mut summary).with_context(|| {
        format!("recording `waiting`: the profiler said:\n{}", read("waiting/record.log").unwrap_or_default())
    })?;
    events::judge(&read, &mut summary).with_context(|| {
        format!("recording `events`: the profiler said:\n{}", read("events/record.log").unwrap_or_default())
    })?;
    hotplug::judge(&read, &mut summary).with_context(|| {
        format!("recording `hotplug`: the profiler said:\n{}", read("hotplug/record.log").unwrap_or_default())
    })?;
    if promise.many_cpus {
        let idle: Account =
            serde_json::from_str(&read("idle/report.json")?).context("the idle report is no account")?;
        ensure!(
            idle.sums.stored == 0 && idle.sums.idle > 0,
            "idle: {} samples, {} idle runs",
            idle.sums.stored,
            idle.sums.idle
        );
        tell_cost(&idle, &mut summary).context("cannot sum up")?;
    }
    refusals::judge(&read, promise.memlock)?;
    Ok(summary)
}

/// Frames of one sample of the deepest stack: the maximum of Python and of native frames.
const DEEPEST: [usize; 2] = [1_024, 512];

/// Fewest samples of it. (One takes an emulated CPU some milliseconds.)
const FEWEST_DEEPEST: usize = 20;

/// A sample in JSON lines, as far as it is judged here.
#[derive(Deserialize)]
struct Sample {
    merge: String,
    frames: Vec<Kind>,
}

#[derive(Deserialize)]
struct Kind {
    kind: String,
}

/// Checks that each sample has all frames that there is room for, and says that it was cut.
fn judge_deepest(read: &impl Fn(&str) -> Result<String>, summary: &mut String) -> Result<()> {
    let status = read("deepest/record.status")?;
    ensure!(status.trim() == "0", "it ended with status {}", status.trim());
    let account: Account = serde_json::from_str(&read("deepest/report.json")?).context("the report is no account")?;
    let lines = read("deepest/out.jsonl")?;
    let samples = lines.lines().map(serde_json::from_str::<Sample>).collect::<Result<Vec<_>, _>>();
    let samples = samples.context("a line is no sample")?;
    ensure!(samples.len() as u64 == account.sums.stored, "{} samples, {} stored", samples.len(), account.sums.stored);
    ensure!(samples.len() >= FEWEST_DEEPEST, "{} samples, at least {FEWEST_DEEPEST} wanted", samples.len());
    let [python, native] = DEEPEST;
    let whole = |sample: &&Sample| {
        let of = |kind: &str| sample.frames.iter().filter(|frame| frame.kind == kind).count();
        [of("python"), of("native")] == DEEPEST && sample.merge == "repaired"
    };
    let right = samples.iter().filter(whole).count();
    #[expect(clippy::cast_precision_loss, reason = "some dozens of samples")]
    let share = right as f64 / samples.len() as f64;
    let shown = lines.lines().next().map_or("", |line| line.get(..300).unwrap_or(line));
    ensure!(share >= EXACT_SHARE, "{right} of {} have {python} and {native} frames: {shown}", samples.len());
    write!(summary, "; {right} of {} with {python} and {native} frames", samples.len()).context("cannot sum up")
}

/// What must be seen on a kernel.
pub(crate) struct Promise {
    /// Whether there are so many CPUs that their idle cost is shown.
    pub(crate) many_cpus: bool,
    /// What the profiler must say if it cannot work.
    pub(crate) refusal: Option<&'static str>,
    /// Whether maps count as locked memory; `None` if that cannot be tried.
    pub(crate) memlock: Option<bool>,
}

/// Shows what events on all CPUs cost while nothing wanted runs.
fn tell_cost(idle: &Account, summary: &mut String) -> std::fmt::Result {
    let Cost { start: Start { total_s, attach_s }, user_cpu_s, ring_bytes, map_bytes, .. } = idle.cost;
    let (attach_ms, ring_kib, maps_kib) = (attach_s * 1e3, ring_bytes >> 10, map_bytes >> 10);
    write!(
        summary,
        "; started in {total_s:.2} s, events of all CPUs attached in {attach_ms:.1} ms, ring {ring_kib} KiB, maps {maps_kib} KiB; \
         2 s idle: {user_cpu_s:.2} s CPU from start to end"
    )?;
    match (idle.cost.bpf_run_ns, idle.cost.bpf_run_count) {
        (Some(ns), Some(count @ 1..)) => write!(summary, ", {} ns for each of {count} firings", ns / count),
        _ => Ok(()),
    }
}

fn judge_recording(
    read: &impl Fn(&str) -> Result<String>,
    truth: &Truth<'_>,
    native: bool,
    summary: &mut String,
) -> Result<()> {
    for step in ["record", "export"] {
        let status = read(&format!("{step}.status"))?;
        ensure!(status.trim() == "0", "{step} ended with status {}", status.trim());
    }
    let account: Account = serde_json::from_str(&read("report.json")?).context("the report is no account")?;
    let (sums, loss, sum) = (&account.sums, account.sums.lost(), account.sums.parts());
    ensure!(
        sums.ran == sum,
        "ran {} times, but stored {}, idle {}, filtered {}, not Python {} and lost {loss} make {sum}",
        sums.ran,
        sums.stored,
        sums.idle,
        sums.filtered,
        sums.not_python,
    );
    let collapsed = read("out.collapsed")?;
    let Counted { python: exact, mixed, above, total } = count(&collapsed, truth)?;
    ensure!(total == account.sums.stored, "{total} samples exported, {} stored", account.sums.stored);
    ensure!(total >= FEWEST_SAMPLES, "{total} samples, at least {FEWEST_SAMPLES} wanted");
    #[expect(clippy::cast_precision_loss, reason = "a few hundred samples")]
    let share = exact as f64 / total as f64;
    ensure!(share >= EXACT_SHARE, "{exact} of {total} stacks exact; exported:\n{}", first_lines(&collapsed));
    write!(summary, "; {exact} of {total} stacks exact, {loss} lost").context("cannot sum up")?;
    ensure!(account.native.is_some() == native, "native frames: {}, wanted: {native}", account.native.is_some());
    if let Some(Native { exact, repaired, failed }) = account.native {
        let roots = collapsed.lines().filter(|line| line.split(';').nth(1).is_some_and(is_native)).count();
        ensure!(roots > 0, "native code started the program; exported:\n{}", first_lines(&collapsed));
        #[expect(clippy::cast_precision_loss, reason = "a few hundred samples")]
        let share = exact as f64 / total as f64;
        ensure!(share >= EXACT_SHARE, "native: {exact} of {total} exact, {repaired} repaired, {failed} failed");
        #[expect(clippy::cast_precision_loss, reason = "a few hundred samples")]
        let share = mixed as f64 / total as f64;
        ensure!(share >= EXACT_SHARE, "{mixed} of {total} mixed stacks exact; exported:\n{}", first_lines(&collapsed));
        // Among them functions that have saved nothing, and a signal handler.
        let never = truth.above.iter().zip(&above).find(|(names, seen)| names.last() == Some(&"turn") && **seen == 0);
        ensure!(never.is_none(), "never seen: {never:?}; exported:\n{}", first_lines(&collapsed));
        write!(summary, ", {mixed} mixed stacks of Python and C exact").context("cannot sum up")?;
    }
    // One line for each descriptor of a program; kernels before 5.16 do not give the number.
    let programs = read("programs")?;
    let ids = programs.lines().filter_map(|program| program.split_once("prog_id:")?.1.split_whitespace().next());
    let loaded = ids.collect::<BTreeSet<_>>().len();
    let wanted = PROGRAMS + usize::from(native);
    ensure!(loaded == wanted, "the kernel told of {loaded} programs, not of {wanted}:\n{programs}");
    let verified: Vec<&str> = programs
        .lines()
        .filter_map(|program| program.split_once("verified_insns:")?.1.split_whitespace().next())
        .collect();
    for count in &verified {
        let count: u32 = count.parse().with_context(|| format!("verified_insns is {count:?}"))?;
        ensure!(count < MOST_VERIFIED, "{count} instructions of a program were verified: no room for other kernels");
    }
    if !verified.is_empty() {
        let of = verified.iter().filter_map(|count| count.parse::<u32>().ok()).max().unwrap_or(0);
        write!(summary, "; at most {of} of {LIMIT_VERIFIED} instructions of a program verified")
            .context("cannot sum up")?;
    }
    Ok(())
}

/// The first line of the kernel's log that reports a fault.
fn complaint(dmesg: &str) -> Option<&str> {
    dmesg
        .lines()
        .find(|line| ["WARNING:", "BUG:", "Oops", "Call Trace:", "rcu: INFO"].iter().any(|bad| line.contains(bad)))
}

/// The target's lines `frame NAME FIRST LAST`, `native NAME` and `above NAME ...`, root first.
fn truth(target: &str) -> Result<Truth<'_>> {
    let mut truth = Truth { stack: Vec::new(), above: Vec::new() };
    for line in target.lines() {
        match line.split(' ').collect::<Vec<_>>()[..] {
            ["frame", function, first, last] => truth.stack.push(Entry::Python(Expected {
                function,
                first_line: first.parse()?,
                last_line: last.parse()?,
            })),
            ["native", function] => truth.stack.push(Entry::Native(function)),
            ["above", ref functions @ ..] => truth.above.push(functions.to_vec()),
            ["ready"] => {}
            _ => anyhow::bail!("the target printed `{line}`"),
        }
    }
    Ok(truth)
}

/// Samples, and those whose stack matches what the target says.
#[derive(Debug, Default, PartialEq)]
struct Counted {
    total: u64,
    /// Matching in Python frames only.
    python: u64,
    /// Matching in Python and native frames, in order.
    mixed: u64,
    /// Of the latter, how many have each of [`Truth::above`].
    above: Vec<u64>,
}

/// Counts lines `tid:N;file:function:line;... COUNT`.
fn count(collapsed: &str, truth: &Truth<'_>) -> Result<Counted> {
    let mut counted = Counted { above: vec![0; truth.above.len()], ..Counted::default() };
    let expected = truth.stack.iter().filter_map(|entry| match entry {
        Entry::Python(expected) => Some(expected),
        Entry::Native(_) => None,
    });
    let expected: Vec<_> = expected.collect();
    for line in collapsed.lines() {
        let (stack, samples) = line.rsplit_once(' ').with_context(|| format!("no count in the line {line}"))?;
        let samples: u64 = samples.parse().with_context(|| format!("no count in the line {line}"))?;
        counted.total += samples;
        let frames = stack.split(';').filter(|frame| !frame.starts_with("tid:")).collect::<Vec<_>>();
        let python = frames.iter().filter(|frame| !is_native(frame)).collect::<Vec<_>>();
        if python.len() == expected.len() && python.iter().zip(&expected).all(|(frame, expected)| fits(frame, expected))
        {
            counted.python += samples;
        }
        let told = |frame: &&&str| !is_native(frame) || frame.starts_with(OBJECT);
        let mixed = frames.iter().filter(told).collect::<Vec<_>>();
        let Some((below, above)) = mixed.split_at_checked(truth.stack.len()) else { continue };
        let right = below.iter().zip(&truth.stack).all(|(frame, entry)| match entry {
            Entry::Python(expected) => fits(frame, expected),
            Entry::Native(function) => frame.strip_prefix(OBJECT) == Some(function),
        });
        let above: Vec<_> = above.iter().map(|frame| frame.strip_prefix(OBJECT).unwrap_or_default()).collect();
        if right && let Some(at) = truth.above.iter().position(|known| *known == above) {
            counted.mixed += samples;
            counted.above[at] += samples;
        }
    }
    Ok(counted)
}

/// Whether a frame is native code: `object!function`, without a place.
fn is_native(frame: &str) -> bool {
    frame.contains('!') && !frame.contains(':')
}

fn fits(frame: &str, expected: &Expected<'_>) -> bool {
    let mut parts = frame.rsplitn(3, ':');
    let line = parts.next().and_then(|line| line.parse::<u32>().ok());
    let function = parts.next();
    let file = parts.next().is_some_and(|file| file.rsplit('/').next() == Some("known_stack.py"));
    file && function == Some(expected.function)
        && line.is_some_and(|line| (expected.first_line..=expected.last_line).contains(&line))
}

fn first_lines(text: &str) -> String {
    text.lines().take(20).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests;
