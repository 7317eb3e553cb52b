//! A machine with many processors, emulated: QEMU without KVM on however few there are. Emulated CPU time says nothing, but how often
//! the profiler wakes, what memory it takes and whether its account closes do not depend on how fast a processor is.
//!
//! The guest's part is `tests/kernel/usual.sh`.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use super::MIB;
use crate::vm::guest::{self, Given};
use crate::vm::initramfs;
use crate::vm::kernels::{self, Kernel};
use crate::vm::machine::Machine;
use crate::{apt, cache};

/// Processors of the guest.
const CPUS: u32 = 16;
const KERNEL: &str = "6.12";
/// Of a guest whose processors take turns on two.
const AT_MOST: Duration = Duration::from_secs(600);

/// What a guest has sent.
pub(super) struct ManyCpus {
    kernel: String,
    /// The recording of one process.
    process: Recording,
    /// The recording of all Python processes.
    all: Recording,
}

/// One of a guest's recordings.
#[derive(Debug)]
struct Recording {
    watched_s: f64,
    wakeups_a_second: f64,
    peak_rss_bytes: u64,
    account: Account,
}

/// The part of the report that is used here: `ran = stored + idle + filtered + not_python + Σ loss`.
#[derive(Debug, Deserialize)]
struct Account {
    ran: u64,
    stored: u64,
    idle: u64,
    filtered: u64,
    not_python: u64,
    loss: BTreeMap<String, u64>,
    inconsistent: u64,
    cost: Cost,
}

#[derive(Debug, Deserialize)]
struct Cost {
    map_bytes: u64,
}

impl Account {
    /// By how much its sums differ.
    fn gap(&self) -> u64 {
        let ends = self.stored + self.idle + self.filtered + self.not_python + self.loss.values().sum::<u64>();
        self.ran.abs_diff(ends) + self.inconsistent
    }
}

/// Boots the guest with this build of the profiler.
///
/// # Errors
/// A package is not available, the guest does not boot, or a recording failed.
pub(super) fn measure(profiler: &Path) -> Result<ManyCpus> {
    eprintln!("{CPUS} emulated CPUs");
    apt::ensure(&initramfs::PROGRAMS)?;
    apt::ensure(Machine::X86_64.programs())?;
    let dir = cache::dir()?.join("vm");
    let work = tempfile::tempdir().context("cannot create a directory for a guest")?;
    let kernel: Kernel = KERNEL.parse()?;
    let lock = cache::lock(&dir)?;
    let archive = initramfs::build_usual(&dir, work.path(), profiler)?;
    let image = kernels::fetch(&dir, kernel)?;
    drop(lock);
    let given = Given { at_most: AT_MOST, ..Given::check(CPUS) };
    let sent = guest::run(kernel, given, &image, &archive, work.path())?;
    ManyCpus::sent(&|name: &str| {
        let bytes = fs::read(sent.join(name)).with_context(|| format!("the guest sent no {name}"))?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    })
}

impl ManyCpus {
    fn sent(read: &impl Fn(&str) -> Result<String>) -> Result<Self> {
        let cpus = read("cpus")?;
        ensure!(cpus.trim() == CPUS.to_string(), "the guest has {} CPUs", cpus.trim());
        Ok(Self {
            kernel: read("kernel")?.trim().to_owned(),
            process: Recording::sent(read, "process")?,
            all: Recording::sent(read, "all")?,
        })
    }

    /// What a wake-up's aim applies to.
    pub(super) fn aimed(&self) -> (String, f64) {
        (format!("wake-ups at 99 Hz, `-p`, {CPUS} CPUs (VM)"), self.process.wakeups_a_second)
    }

    /// The page's sentences.
    pub(super) fn sentences(&self) -> String {
        let Self { kernel, process, all } = self;
        let of = |recording: &Recording| {
            let account = &recording.account;
            let closes = match account.gap() {
                0 => "whose account closes".to_owned(),
                gap => format!("whose account **differs by {gap}**"),
            };
            format!(
                "{:.1} wake-ups a second, a peak RSS of {:.1} MiB, maps of {:.1} MiB, and {} samples of {} runs, {closes}",
                recording.wakeups_a_second,
                recording.peak_rss_bytes as f64 / MIB,
                account.cost.map_bytes as f64 / MIB,
                account.stored,
                account.ran,
            )
        };
        format!(
            "\nWith {CPUS} CPUs (emulated by QEMU without KVM, which does not change the following figures; Linux {kernel}, python3.11), one of \
             them busy, the profiler has at 99 Hz in {:.0} s from 10 s after its start: with `-p` {}; with `--all-python` {}.\n",
            process.watched_s,
            of(process),
            of(all),
        )
    }
}

impl Recording {
    fn sent(read: &impl Fn(&str) -> Result<String>, name: &str) -> Result<Self> {
        let read = |file: &str| read(&format!("{name}/{file}"));
        let status = read("record.status")?;
        let said = || read("record.log").unwrap_or_default();
        ensure!(status.trim() == "0", "a guest's recording ended with status {}: {}", status.trim(), said());
        let (before, after) = (Moment::parse(&read("before")?)?, Moment::parse(&read("after")?)?);
        let watched_s = after.uptime_s - before.uptime_s;
        ensure!(watched_s > 0.0 && after.sleeps > 0, "a guest's recording was not watched: {}", said());
        let memory = read("memory")?;
        let kib = memory.split_whitespace().nth(1).and_then(|word| word.parse::<u64>().ok());
        Ok(Self {
            watched_s,
            wakeups_a_second: after.sleeps.saturating_sub(before.sleeps) as f64 / watched_s,
            peak_rss_bytes: kib.with_context(|| format!("no peak RSS: {memory:?}"))? * 1024,
            account: serde_json::from_str(&read("report.json")?).context("a guest's report is no account")?,
        })
    }
}

/// A moment of a recording.
#[derive(Debug, PartialEq)]
struct Moment {
    uptime_s: f64,
    /// How often the profiler's threads have slept.
    sleeps: u64,
}

impl Moment {
    /// The time since boot, then a line `voluntary_ctxt_switches: N` of each thread.
    fn parse(text: &str) -> Result<Self> {
        let (uptime, threads) = text.split_once('\n').context("a guest sent no moment")?;
        let sleeps = |line: &str| line.rsplit(char::is_whitespace).next()?.parse::<u64>().ok();
        Ok(Self {
            uptime_s: uptime.trim().parse().with_context(|| format!("no time: {uptime:?}"))?,
            sleeps: threads.lines().filter_map(sleeps).sum(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REPORT: &str = r#"{"ran": 3100, "stored": 2950, "idle": 90, "filtered": 0, "not_python": 40, "loss": {"unreadable": 20},
        "inconsistent": 0, "cost": {"map_bytes": 23068672}}"#;

    /// What a guest sends, one text of it replaced by another.
    fn sent(from: &str, to: &str) -> Result<ManyCpus> {
        let read = |name: &str| {
            let text = match name.rsplit('/').next().unwrap_or(name) {
                "cpus" => "16\n",
                "kernel" => "6.12.48-cloud-amd64\n",
                "before" => "41.50\nvoluntary_ctxt_switches:\t100\nvoluntary_ctxt_switches:\t7\n",
                "after" => "61.50\nvoluntary_ctxt_switches:\t180\nvoluntary_ctxt_switches:\t9\n",
                "memory" => "VmHWM:\t   31744 kB\n",
                "record.status" => "0\n",
                "record.log" => "a hint\n",
                _ => REPORT,
            };
            Ok(text.replace(from, to))
        };
        ManyCpus::sent(&read)
    }

    #[test]
    fn what_a_guest_sends_becomes_figures() {
        let seen = sent("", "").unwrap();
        assert_eq!(seen.aimed(), ("wake-ups at 99 Hz, `-p`, 16 CPUs (VM)".to_owned(), 4.1));
        let page = seen.sentences();
        let figures = "4.1 wake-ups a second, a peak RSS of 31.0 MiB, maps of 22.0 MiB, and 2950 samples of 3100 runs, whose account closes";
        assert_eq!(page.matches(figures).count(), 2, "{page}");
        assert!(page.contains("Linux 6.12.48-cloud-amd64"), "{page}");
        assert!(page.contains("in 20 s from 10 s after its start"), "{page}");
    }

    #[test]
    fn a_gap_is_told_and_a_failure_has_its_reason() {
        let page = |from: &str, to: &str| sent(from, to).unwrap().sentences();
        assert!(page("\"ran\": 3100", "\"ran\": 3101").contains("**differs by 1**"));
        assert!(page("\"inconsistent\": 0", "\"inconsistent\": 2").contains("**differs by 2**"));
        for (from, to, why) in [
            ("16\n", "2\n", "has 2 CPUs"),
            ("0\n", "1\n", "status 1: a hint"),
            ("61.50", "41.50", "not watched: a hint"),
            ("VmHWM:\t   31744 kB\n", "", "no peak RSS"),
            ("{\"ran\"", "{\"run\"", "no account"),
        ] {
            let error = sent(from, to).map(|_| ()).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }
}
