//! What a benchmark ran on, and how much else ran there.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use anyhow::{Result, bail};

use super::probe;
use crate::command;

/// The machine, when a run begins.
pub(crate) struct Machine {
    rows: Vec<(&'static str, String)>,
    start: Instant,
    jiffies: (u64, u64),
    forks: u64,
    /// Other work was going on when the run began.
    disturbed: bool,
}

impl Machine {
    /// Looks around. The first of the profilers is this project's.
    ///
    /// # Errors
    /// One of the versions cannot be determined, or there is no profiler.
    pub(crate) fn look(python: &Path, profilers: &[&Path]) -> Result<Self> {
        Self::look_at(("target", python), ("profilers", profilers))
    }

    /// The same with names other than target and profilers.
    ///
    /// # Errors
    /// As [`Self::look`].
    pub(crate) fn look_at(
        (what, target): (&'static str, &Path),
        (which, profilers): (&'static str, &[&Path]),
    ) -> Result<Self> {
        let told = |program: &Path, args: &[&str]| -> Result<String> {
            Ok(command::stdout(Command::new(program).args(args))?.trim().to_owned())
        };
        let git = |args: &[&str]| {
            let mut line = Command::new("git");
            command::stdout(line.current_dir(command::project_root()).args(args)).unwrap_or_default().trim().to_owned()
        };
        let dirty = if git(&["status", "--porcelain", "--untracked-files=no"]).is_empty() { "" } else { ", changed" };
        let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let model = probe::field("/proc/cpuinfo", "model name").unwrap_or_else(|| "unknown".to_owned());
        let memory = probe::field("/proc/meminfo", "MemTotal").and_then(|text| {
            let kib: f64 = text.strip_suffix(" kB")?.parse().ok()?;
            Some(format!(", {:.1} GiB", kib / 1024.0 / 1024.0))
        });
        let hypervisor = probe::field("/proc/cpuinfo", "flags").filter(|flags| flags.contains(" hypervisor"));
        let guest = if hypervisor.is_some() { ", virtual machine" } else { "" };
        let pmu = Path::new("/sys/bus/event_source/devices/cpu").exists();
        let [tachyon, others @ ..] = profilers else { bail!("no profiler to be named") };
        let mut versions =
            format!("{} ({}{dirty})", told(tachyon, &["--version"])?, git(&["rev-parse", "--short=12", "HEAD"]));
        for other in others {
            versions += &format!(", {}", told(other, &["--version"])?);
        }
        let rows = vec![
            ("date", told(Path::new("date"), &["-u", "+%Y-%m-%d %H:%M UTC"])?),
            ("kernel", format!("{} {}", told(Path::new("uname"), &["-sr"])?, told(Path::new("uname"), &["-m"])?)),
            ("CPU", format!("{model}, {cpus} CPUs{}{guest}", memory.unwrap_or_default())),
            ("performance counters", if pmu { "yes" } else { "none" }.to_owned()),
            (what, told(target, &["--version"])?),
            (which, versions),
            ("load when it began", load()),
        ];
        // The mean of the last minute, which includes a build that has just ended.
        let busy = load().parse::<f64>().unwrap_or(0.0);
        let disturbed = busy > cpus as f64 / 2.0;
        Ok(Self { rows, disturbed, start: Instant::now(), jiffies: probe::steal(), forks: probe::forks() })
    }

    /// Notes what is only known when the run is over.
    pub(crate) fn end(&mut self) {
        let (all, stolen) = probe::steal();
        let steal = stolen.saturating_sub(self.jiffies.1) as f64 / all.saturating_sub(self.jiffies.0).max(1) as f64;
        self.rows.push(("load when it ended", load()));
        self.rows.push(("taken by the hypervisor meanwhile", format!("{:.2} %", steal * 100.0)));
        let forks = probe::forks().saturating_sub(self.forks);
        self.rows.push(("processes and threads started meanwhile", forks.to_string()));
        self.rows.push(("the run took", format!("{:.0} s", self.start.elapsed().as_secs_f64())));
    }

    /// The rows as a table.
    pub(crate) fn describe(&self, page: &mut String) {
        page.push_str("| | |\n|---|---|\n");
        for (what, value) in &self.rows {
            let _ = writeln!(page, "| {what} | {value} |");
        }
        if self.disturbed {
            page.push_str(DISTURBED);
        }
    }
}

const DISTURBED: &str = "
**Other work was running on this machine**: when the run began, its load was above half the number of its CPUs. Caches are
colder and intervals wider than on an idle machine.
";

fn load() -> String {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load: Vec<&str> = text.split(' ').take(1).collect();
    load.concat()
}

/// The CPUs this process may use (`Cpus_allowed_list`: `0-3,6`).
pub(crate) fn allowed_cpus() -> Vec<usize> {
    let list = probe::field("/proc/self/status", "Cpus_allowed_list").unwrap_or_default();
    parse_cpus(&list)
}

/// CPUs in the form for `taskset -c`.
pub(crate) fn listed(cpus: &[usize]) -> String {
    cpus.iter().map(usize::to_string).collect::<Vec<_>>().join(",")
}

fn parse_cpus(list: &str) -> Vec<usize> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.trim().parse().ok()?..=last.trim().parse().ok()?)
    };
    list.split(',').filter_map(range).flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_lists() {
        assert_eq!(parse_cpus("0-3,6"), [0, 1, 2, 3, 6]);
        assert_eq!(parse_cpus("5"), [5]);
        assert_eq!(listed(&[0, 1, 6]), "0,1,6");
        assert_eq!(parse_cpus(""), [] as [usize; 0]);
        assert!(!allowed_cpus().is_empty());
    }
}
