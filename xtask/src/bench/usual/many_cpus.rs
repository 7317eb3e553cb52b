//! A machine with many processors, emulated: QEMU without KVM on however few there are. Emulated CPU time says nothing, but how often
//! the profiler wakes, what memory it takes and whether its account closes hardly depend on how fast a processor is; and a guest with
//! few processors says what of that is due to their number.
//!
//! The guests' part is `tests/kernel/usual.sh`.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use super::MIB;
use crate::account::Sums;
use crate::vm::guest::{self, Given};
use crate::vm::initramfs;
use crate::vm::kernels::{self, Kernel};
use crate::vm::machine::Machine;
use crate::{apt, cache};

/// Processors of the guests: few, and many.
const FEW: u32 = 2;
const MANY: u32 = 16;
const KERNEL: &str = "6.12";
/// Emulated by two processors that have nothing else to do, a guest takes a minute and a half.
const AT_MOST: Duration = Duration::from_secs(600);

/// What the guests have sent.
pub(super) struct ManyCpus {
    few: Guest,
    many: Guest,
}

/// What one of them has sent.
struct Guest {
    cpus: u32,
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

/// The part of the report that is used here.
#[derive(Debug, Deserialize)]
struct Account {
    #[serde(flatten)]
    sums: Sums,
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
        self.sums.ran.abs_diff(self.sums.parts()) + self.inconsistent
    }
}

/// Boots the guests with this build of the profiler.
///
/// # Errors
/// A package is not available, a guest does not boot, or a recording failed.
pub(super) fn measure(profiler: &Path) -> Result<ManyCpus> {
    eprintln!("{FEW} and {MANY} emulated CPUs");
    apt::ensure(&initramfs::PROGRAMS)?;
    apt::ensure(Machine::X86_64.programs())?;
    let dir = cache::dir()?.join("vm");
    let work = tempfile::tempdir().context("cannot create a directory for a guest")?;
    let kernel: Kernel = KERNEL.parse()?;
    let lock = cache::lock(&dir)?;
    let archive = initramfs::build_usual(&dir, work.path(), profiler)?;
    let image = kernels::fetch(&dir, kernel)?;
    drop(lock);
    let guest = |cpus: u32| {
        let given = Given { at_most: AT_MOST, ..Given::check(cpus) };
        let sent = guest::run(kernel, given, &image, &archive, work.path())?;
        Guest::sent(cpus, &|name: &str| {
            let bytes = fs::read(sent.join(name)).with_context(|| format!("the guest sent no {name}"))?;
            Ok(String::from_utf8_lossy(&bytes).into_owned())
        })
    };
    Ok(ManyCpus { few: guest(FEW)?, many: guest(MANY)? })
}

impl ManyCpus {
    /// What a wake-up's aim applies to.
    pub(super) fn aimed(&self) -> (String, f64) {
        (format!("wake-ups at 99 Hz, `-p`, python3.11, {MANY} CPUs (emulated)"), self.many.process.wakeups_a_second)
    }

    /// The page's table, with what it is of.
    pub(super) fn table(&self) -> String {
        let Guest { kernel, process, .. } = &self.many;
        let rows: String = [&self.few, &self.many].map(Guest::rows).concat();
        format!(
            "\nOn emulated CPUs (QEMU without KVM, Linux {kernel}) CPU time says nothing; wake-ups, memory and the account of samples hardly \
             depend on it. One python3.11 process is busy; at 99 Hz, in {:.0} s from 10 s after the start:\n\n\
             | CPUs | options | wake-ups a second | peak RSS | maps | samples | of runs | account |\n\
             |---:|---|---:|---:|---:|---:|---:|---|\n{rows}",
            process.watched_s
        )
    }
}

impl Guest {
    fn sent(cpus: u32, read: &impl Fn(&str) -> Result<String>) -> Result<Self> {
        let told = read("cpus")?;
        ensure!(told.trim() == cpus.to_string(), "a guest with {cpus} CPUs has {}", told.trim());
        Ok(Self {
            cpus,
            kernel: read("kernel")?.trim().to_owned(),
            process: Recording::sent(read, "process")?,
            all: Recording::sent(read, "all")?,
        })
    }

    fn rows(&self) -> String {
        let row = |options: &str, recording: &Recording| {
            let Recording { wakeups_a_second, peak_rss_bytes, account, .. } = recording;
            let closes = match account.gap() {
                0 => "closes".to_owned(),
                gap => format!("**differs by {gap}**"),
            };
            format!(
                "| {} | {options} | {wakeups_a_second:.1} | {:.1} MiB | {:.1} MiB | {} | {} | {closes} |\n",
                self.cpus,
                *peak_rss_bytes as f64 / MIB,
                account.cost.map_bytes as f64 / MIB,
                account.sums.stored,
                account.sums.ran,
            )
        };
        row("`-p`", &self.process) + &row("`--all-python`", &self.all)
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
    fn sent(from: &str, to: &str) -> Result<Guest> {
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
        Guest::sent(MANY, &read)
    }

    #[test]
    fn what_guests_send_becomes_figures() {
        let few = Guest { cpus: FEW, ..sent("180", "200").unwrap() };
        let seen = ManyCpus { few, many: sent("", "").unwrap() };
        assert_eq!(seen.aimed().1, 4.1);
        let page = seen.table();
        let row = |start: &str| format!("| {start} | 31.0 MiB | 22.0 MiB | 2950 | 3100 | closes |\n");
        for start in ["2 | `-p` | 5.1", "2 | `--all-python` | 5.1", "16 | `-p` | 4.1", "16 | `--all-python` | 4.1"] {
            assert!(page.contains(&row(start)), "{page}");
        }
        assert!(page.contains("Linux 6.12.48-cloud-amd64"), "{page}");
        assert!(page.contains("in 20 s from 10 s after the start"), "{page}");
    }

    #[test]
    fn a_gap_is_told_and_a_failure_has_its_reason() {
        let rows = |from: &str, to: &str| sent(from, to).unwrap().rows();
        assert!(rows("\"ran\": 3100", "\"ran\": 3101").contains("**differs by 1**"));
        assert!(rows("\"inconsistent\": 0", "\"inconsistent\": 2").contains("**differs by 2**"));
        for (from, to, why) in [
            ("16\n", "2\n", "with 16 CPUs has 2"),
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
