//! The profilers: where they come from, and one run of either.

use std::cell::Cell;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::Pid;
use serde::Deserialize;
use tempfile::TempDir;

use super::{machine, probe};
use crate::{cache, command, zoo};

/// How often a profiler that goes on is interrupted again, and how long it has to end each time.
const AGAIN: u32 = 3;
const PATIENCE: Duration = Duration::from_secs(20);

/// The other profiler, from PyPI.
const PY_SPY: &str = "py-spy==0.4.2";

/// Builds the profiler as users get it. Returns its executable.
///
/// # Errors
/// It does not build.
pub(crate) fn build() -> Result<PathBuf> {
    built(&["--release"], "release")
}

/// The same without optimisation.
///
/// # Errors
/// It does not build.
pub(crate) fn build_unoptimised() -> Result<PathBuf> {
    built(&[], "debug")
}

fn built(options: &[&str], profile: &str) -> Result<PathBuf> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut line = Command::new(cargo);
    line.current_dir(command::project_root()).arg("build").args(options);
    command::run(line.args(["--locked", "-p", "tachyon"]))?;
    Ok(target_directory()?.join(profile).join("tachyon-bpf"))
}

/// Where cargo puts build results.
///
/// # Errors
/// It does not say.
pub(crate) fn target_directory() -> Result<PathBuf> {
    #[derive(Deserialize)]
    struct Metadata {
        target_directory: PathBuf,
    }
    let mut line = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    line.current_dir(command::project_root()).args(["metadata", "--format-version", "1", "--no-deps", "--locked"]);
    let metadata: Metadata =
        serde_json::from_str(&command::stdout(&mut line)?).context("cannot read cargo metadata")?;
    Ok(metadata.target_directory)
}

/// Builds a benchmark of `tachyon/benches`. Returns its executable.
///
/// # Errors
/// It does not build.
pub(crate) fn benchmark(name: &str, options: &[&str]) -> Result<PathBuf> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut line = Command::new(cargo);
    line.current_dir(command::project_root()).arg("bench").args(options);
    line.args(["--no-run", "--locked", "-p", "tachyon", "--bench", name, "--message-format", "json"]);
    #[derive(Deserialize)]
    struct Message {
        executable: Option<PathBuf>,
        target: Option<Target>,
    }
    #[derive(Deserialize)]
    struct Target {
        name: String,
    }
    let told = command::stdout(line.stderr(Stdio::inherit()))?;
    let messages = told.lines().filter_map(|line| serde_json::from_str::<Message>(line).ok());
    // The program itself is built, too.
    let mut ours = messages.filter(|message| message.target.as_ref().is_some_and(|target| target.name == name));
    ours.find_map(|message| message.executable).context("cargo names no benchmark")
}

/// Installs py-spy into a virtual environment in the cache, if needed. Returns its executable.
///
/// # Errors
/// It cannot be installed.
pub(crate) fn py_spy(python: &Path) -> Result<PathBuf> {
    let programs = crate::tools::in_venv(python, &cache::dir()?.join("bench/py-spy"), PY_SPY)?;
    Ok(programs.join("py-spy"))
}

/// Both executables, and the CPUs they may use.
pub(crate) struct Tools {
    pub(crate) tachyon: PathBuf,
    pub(crate) py_spy: PathBuf,
    /// In the form for `taskset -c`.
    pub(crate) cpus: String,
    /// Whether they may use all others as well, as where nobody has reserved any.
    pub(crate) everywhere: Cell<bool>,
    pub(crate) work: TempDir,
    /// Whether this profiler keeps names of native functions for later recordings, in a folder of the benchmark's own, and knows those
    /// of earlier ones. Otherwise it knows nothing of any file.
    pub(crate) keeps_names: Cell<bool>,
}

/// Seconds after which CPython's profiler of one process ends by itself, longer than it is watched: it may drop each of three interrupts.
const ITS_OWN_END: &str = "30";

/// Which profiler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tool {
    /// Python frames only.
    Tachyon,
    /// Native frames too, as by default.
    Native,
    /// Python frames, and the tasks that await the running one.
    Awaiting,
    /// Waiting threads, too, and children of the process.
    Wall,
    /// Waiting threads only.
    OffCpu,
    PySpy,
    /// py-spy, with threads that wait and children of the process.
    PySpyIdle,
    /// CPython 3.15's own, in wall-clock mode, with children of the process.
    Sampling,
    /// The same, in the mode that takes running threads, of one process.
    SamplingOne,
    /// `perf record -g`.
    Perf,
}

impl Tool {
    /// Whether it is this project's.
    pub(crate) fn is_ours(self) -> bool {
        !matches!(self, Self::PySpy | Self::PySpyIdle | Self::Sampling | Self::SamplingOne | Self::Perf)
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Tachyon => "tachyon-bpf",
            Self::Native => "tachyon-bpf, native frames too",
            Self::Awaiting => "tachyon-bpf --async",
            Self::Wall => "tachyon-bpf --wall",
            Self::OffCpu => "tachyon-bpf --off-cpu",
            Self::PySpy => "py-spy",
            Self::PySpyIdle => "py-spy --idle",
            Self::Sampling => "profiling.sampling --mode wall",
            Self::SamplingOne => "profiling.sampling --mode cpu",
            Self::Perf => "perf record -g",
        }
    }
}

/// What to profile.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Aim {
    Pid(u32),
    AllPython,
    /// All Python processes of these names.
    Named(&'static str),
}

impl Tools {
    /// Starts `tool`, which profiles until it is interrupted.
    ///
    /// # Errors
    /// It cannot be started.
    pub(crate) fn start(&self, tool: Tool, aim: Aim, rate_hz: u32) -> Result<Run> {
        let program = match tool {
            Tool::PySpy | Tool::PySpyIdle => self.py_spy.clone(),
            Tool::Sampling | Tool::SamplingOne => "chroot".into(),
            Tool::Perf => "perf".into(),
            _ => self.tachyon.clone(),
        };
        let path = |name: &str| self.work.path().join(format!("{}.{name}", tool.name()));
        let (profile, report, log) = (path("profile"), path("report.json"), path("log"));
        let mut line = Command::new("taskset");
        let cpus = if self.everywhere.get() { machine::listed(&machine::allowed_cpus()) } else { self.cpus.clone() };
        line.args(["-c", &cpus]).arg(&program);
        if tool == Tool::Perf {
            let Aim::Pid(pid) = aim else { bail!("{} profiles one process", tool.name()) };
            line.args(["record", "-g", "-F", &rate_hz.to_string(), "-p", &pid.to_string(), "-o"]).arg(profile);
            return self.run(tool, line, report, &log);
        }
        if matches!(tool, Tool::Sampling | Tool::SamplingOne) {
            let Aim::Pid(pid) = aim else { bail!("{} profiles one process", tool.name()) };
            let python = zoo::in_sid("3.15").context("hint: cargo xtask zoo")?;
            line.arg(python.root.as_deref().unwrap_or(Path::new("/"))).arg(&python.path);
            let seconds = if tool == Tool::SamplingOne { ITS_OWN_END } else { "86400" };
            line.args(["-m", "profiling.sampling", "attach", "-d", seconds]);
            line.args(if tool == Tool::Sampling {
                &["--mode", "wall", "--subprocesses"][..]
            } else {
                &["--mode", "cpu"]
            });
            line.args(["-r", &rate_hz.to_string(), "--collapsed", "-o", "/tmp/bench.collapsed", &pid.to_string()]);
            return self.run(tool, line, report, &log);
        }
        line.arg("record");
        match aim {
            Aim::Pid(pid) => line.args(["--pid", &pid.to_string()]),
            Aim::AllPython => line.arg("--all-python"),
            Aim::Named(pattern) => line.args(["--all-python", "--comm", pattern]),
        };
        let rate = rate_hz.to_string();
        if tool.is_ours() {
            let names = self.work.path().join("symbols");
            line.env("TACHYON_SYMBOL_CACHE", if self.keeps_names.get() { names.as_path() } else { Path::new("off") });
            line.args((tool != Tool::Native).then_some("--no-native"));
            line.args(match tool {
                Tool::Awaiting => Some("--async"),
                Tool::Wall => Some("--wall"),
                Tool::OffCpu => Some("--off-cpu"),
                _ => None,
            });
            let has_children = matches!((tool, aim), (Tool::Wall | Tool::OffCpu, Aim::Pid(_)));
            line.args(has_children.then_some("--subprocesses"));
            line.args(["--frequency", &rate, "--format", "tach", "--force", "--report"]).arg(&report);
        } else {
            // Longer than any measurement: without a duration it asks for one on the terminal.
            line.args(["--rate", &rate, "--format", "raw", "--duration", "86400"]);
            if tool == Tool::PySpyIdle {
                line.args(["--idle", "--subprocesses"]);
            }
        }
        line.arg("--output").arg(profile);
        self.run(tool, line, report, &log)
    }

    fn run(&self, tool: Tool, mut line: Command, report: PathBuf, log: &Path) -> Result<Run> {
        let log_file = fs::File::create(log).with_context(|| format!("cannot create {}", log.display()))?;
        line.stdin(Stdio::null()).stdout(log_file.try_clone().context("cannot share a log file")?).stderr(log_file);
        let started = Instant::now();
        let child = line.spawn().with_context(|| format!("cannot start {}", tool.name()))?;
        Ok(Run { tool, child: Some(child), started, report, log: log.to_owned() })
    }
}

/// A profiler at work.
pub(crate) struct Run {
    tool: Tool,
    child: Option<Child>,
    started: Instant,
    report: PathBuf,
    log: PathBuf,
}

/// What a whole run cost, including start and end, according to wait4(2).
#[derive(Clone, Debug, Default)]
pub(crate) struct Usage {
    pub(crate) wall: Duration,
    pub(crate) cpu: Duration,
    pub(crate) peak_rss_bytes: u64,
    /// The profiler's own account; py-spy has none.
    pub(crate) report: Option<Report>,
    /// Samples the tool says it wrote.
    pub(crate) samples: Option<u64>,
}

/// The part of `--report` that is used here (`docs/report.md`).
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Report {
    pub(crate) ran: u64,
    pub(crate) stored: u64,
    pub(crate) expected: Option<u64>,
    pub(crate) event: String,
    pub(crate) cost: Cost,
}

/// `cost` of the report.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Cost {
    pub(crate) bpf_run_count: Option<u64>,
    pub(crate) bpf_stats: String,
    pub(crate) map_bytes: u64,
    pub(crate) peak_rss_bytes: u64,
    pub(crate) ring_bytes: u64,
    pub(crate) start: Start,
}

/// `cost.start` of the report, in seconds.
#[derive(Clone, Copy, Debug, Deserialize)]
pub(crate) struct Start {
    pub(crate) machine_s: f64,
    pub(crate) types_s: f64,
    pub(crate) maps_s: f64,
    pub(crate) programs_s: f64,
    pub(crate) processes_s: f64,
    pub(crate) attach_s: f64,
    pub(crate) total_s: f64,
}

impl Run {
    pub(crate) fn pid(&self) -> u32 {
        self.child.as_ref().map_or(0, Child::id)
    }

    pub(crate) fn started(&self) -> Instant {
        self.started
    }

    /// Fails if the tool has already ended.
    ///
    /// # Errors
    /// It has.
    pub(crate) fn check(&mut self) -> Result<()> {
        let status = self.child.as_mut().map(Child::try_wait).transpose().context("cannot wait for a profiler")?;
        if let Some(Some(status)) = status {
            self.child = None;
            return Err(self.failed(status));
        }
        Ok(())
    }

    fn failed(&self, status: ExitStatus) -> anyhow::Error {
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        anyhow::anyhow!("{} failed: {status}\n{}", self.tool.name(), log.trim_end())
    }

    /// Interrupts the tool, as Ctrl-C would, and waits for its end.
    ///
    /// # Errors
    /// It failed, or left no report.
    pub(crate) fn finish(mut self) -> Result<Usage> {
        self.check()?;
        let Some(child) = self.child.take() else { bail!("{} has ended", self.tool.name()) };
        let pid = i32::try_from(child.id()).context("a pid is no larger")?;
        let child = Pid::from_raw(pid);
        // What `wait4` tells is at least what the benchmark itself had when it started the tool (`signal->maxrss` outlives exec).
        let peak = probe::field(&format!("/proc/{pid}/status"), "VmHWM");
        let peak_kib: u64 = peak.and_then(|text| text.strip_suffix(" kB")?.trim().parse().ok()).unwrap_or(0);
        kill(child, Signal::SIGINT).context("cannot interrupt a profiler")?;
        if !self.tool.is_ours() && !interrupted(child, PATIENCE)? {
            kill(child, Signal::SIGKILL).context("cannot kill a profiler")?;
            bail!("{} does not end when it is interrupted", self.tool.name());
        }
        let (status, rusage) = wait4(pid).with_context(|| format!("cannot wait for {}", self.tool.name()))?;
        let mut usage = Usage {
            wall: self.started.elapsed(),
            cpu: duration(rusage.ru_utime) + duration(rusage.ru_stime),
            peak_rss_bytes: peak_kib * 1024,
            ..Usage::default()
        };
        // perf ends itself with the signal that interrupted it.
        let is_ended = self.tool == Tool::Perf && status.signal() == Some(Signal::SIGINT as i32);
        if !status.success() && !is_ended {
            return Err(self.failed(status));
        }
        if self.tool.is_ours() {
            let path = &self.report;
            let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
            let report: Report =
                serde_json::from_str(&text).with_context(|| format!("{} is no report", path.display()))?;
            usage.samples = Some(report.stored);
            usage.peak_rss_bytes = report.cost.peak_rss_bytes;
            usage.report = Some(report);
        } else if matches!(self.tool, Tool::PySpy | Tool::PySpyIdle) {
            usage.samples = py_spy_samples(&fs::read_to_string(&self.log).unwrap_or_default());
        }
        Ok(usage)
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            // One that ended by itself is not an error.
            let _gone = child.kill();
            let _reaped = child.wait();
        }
    }
}

/// py-spy ends with `Wrote raw flamegraph data to '...'. Samples: 1980 Errors: 0`.
fn py_spy_samples(log: &str) -> Option<u64> {
    let after = log.rsplit_once("Samples: ")?.1;
    after.split_whitespace().next()?.parse().ok()
}

/// Interrupts a child again if it goes on: Python drops an interrupt that it meets in a destructor. Returns whether it has ended.
fn interrupted(child: Pid, patience: Duration) -> Result<bool> {
    for _ in 0..AGAIN {
        let begun = Instant::now();
        while begun.elapsed() < patience {
            if has_ended(child)? {
                return Ok(true);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        kill(child, Signal::SIGINT).context("cannot interrupt a profiler")?;
    }
    Ok(false)
}

/// Whether a child has ended, without waiting for it.
fn has_ended(pid: Pid) -> Result<bool> {
    let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
    let status = waitid(Id::Pid(pid), flags).context("cannot look at a profiler")?;
    Ok(status != WaitStatus::StillAlive)
}

/// Waits for a child and returns what that child alone has cost: `getrusage` only gives all children together.
pub(crate) fn wait4(pid: i32) -> std::io::Result<(ExitStatus, libc::rusage)> {
    let mut status = 0;
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    loop {
        // SAFETY: both pointers are to live variables of the types wait4(2) fills.
        let reaped = unsafe { libc::wait4(pid, &raw mut status, 0, usage.as_mut_ptr()) };
        if reaped == pid {
            break;
        }
        let error = std::io::Error::last_os_error();
        if error.kind() != std::io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
    // SAFETY: wait4 succeeded and filled it; it was zeroed before, which is a valid value too.
    let usage = unsafe { usage.assume_init() };
    Ok((ExitStatus::from_raw(status), usage))
}

pub(super) fn duration(time: libc::timeval) -> Duration {
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_usec).unwrap_or(0) * 1000)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read as _;

    #[test]
    fn py_spy_tells_its_samples() {
        let log = "py-spy> Sampling process 99 times a second.\npy-spy> Stopped sampling because Control-C pressed\n\
                   py-spy> Wrote raw flamegraph data to 'x'. Samples: 1980 Errors: 3\n";
        assert_eq!(py_spy_samples(log), Some(1980));
        assert_eq!(py_spy_samples("Error: no such process"), None);
    }

    #[test]
    #[expect(clippy::zombie_processes, reason = "wait4 is what reaps it")]
    fn a_child_is_reaped_with_its_cost() {
        let child = Command::new("true").spawn().unwrap();
        let (status, usage) = wait4(i32::try_from(child.id()).unwrap()).unwrap();
        assert!(status.success());
        assert!(usage.ru_maxrss > 0);
    }

    #[test]
    fn who_drops_an_interrupt_gets_another() {
        let ends = |trap: &str| {
            let script = format!("trap '{trap}' INT; echo; while :; do sleep 0.01; done");
            let mut child = Command::new("sh").args(["-c", &script]).stdout(Stdio::piped()).spawn().unwrap();
            // It has said how it takes them.
            child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
            let pid = Pid::from_raw(i32::try_from(child.id()).unwrap());
            kill(pid, Signal::SIGINT).unwrap();
            let ended = interrupted(pid, Duration::from_millis(300)).unwrap();
            child.kill().unwrap();
            child.wait().unwrap();
            ended
        };
        assert!(ends("trap - INT"));
        assert!(!ends(""));
    }
}
