//! Runs programs: starts them, waits until they have warmed up, and ends them.

use crate::command;
use anyhow::{Context as _, Result, bail, ensure};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use std::fs::File;
use std::net::TcpListener;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// If a program has not warmed up by then, it never will.
const PATIENCE: Duration = Duration::from_secs(300);

/// How long a program has to end after an interrupt.
const GRACE: Duration = Duration::from_secs(5);

/// The priority of the profiled program, and of the profilers.
pub(super) const URGENT: i32 = -19;

/// A command line after the interpreter.
#[derive(Clone, Debug, Default)]
pub(super) struct Run(Vec<String>);

impl Run {
    /// A script of `xtask/programs`.
    pub fn script(name: &str) -> Self {
        Self(vec![name.to_owned()])
    }

    pub fn module(name: &str) -> Self {
        Self(vec!["-m".to_owned(), name.to_owned()])
    }

    pub fn args<'a>(mut self, words: impl IntoIterator<Item = &'a (impl AsRef<str> + ?Sized + 'a)>) -> Self {
        self.0.extend(words.into_iter().map(|word| word.as_ref().to_owned()));
        self
    }
}

/// The programs of one row; dropping this ends them.
pub(super) struct Work<'a> {
    python: &'a Path,
    dir: TempDir,
    running: Vec<(Child, String)>,
}

impl<'a> Work<'a> {
    pub fn new(python: &'a Path) -> Result<Self> {
        let dir = tempfile::tempdir().context("cannot make a directory for the programs")?;
        std::fs::create_dir(dir.path().join("jobs")).context("cannot make a directory for jobs")?;
        Ok(Self { python, dir, running: Vec::new() })
    }

    /// The directory for files of the row.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// The command with which each of them is started.
    pub fn command(&self, words: &[String]) -> Command {
        let mut line = Command::new(self.python);
        line.args(words).current_dir(scripts()).stdin(Stdio::null());
        self.surroundings(&mut line);
        line
    }

    /// Removes this project's own environment, which on some machines makes numpy's OpenBLAS assume an older processor.
    pub fn surroundings(&self, line: &mut Command) {
        for name in ["OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "PYTHONHOME", "PYTHONPATH"] {
            line.env_remove(name);
        }
        let dir = self.dir();
        line.env("PYTHONDONTWRITEBYTECODE", "1").env("PYTHONPATH", scripts()).env("HOME", dir);
        line.env("PAGES_DIRECTORY", dir)
            .env("JOBS_DIRECTORY", dir.join("jobs"))
            .env("AIRFLOW_HOME", dir.join("airflow"));
        line.env("JUPYTER_RUNTIME_DIR", dir).env("IPYTHONDIR", dir);
    }

    /// Starts one. Returns its process id.
    pub fn start(&mut self, run: &Run) -> Result<u32> {
        let shown = run.0.join(" ");
        let log = self.log(self.running.len())?;
        let mut line = self.command(&run.0);
        line.stderr(log.try_clone().context("cannot share a log file")?).stdout(log).process_group(0);
        let child = line.spawn().with_context(|| format!("cannot start {shown}"))?;
        let pid = child.id();
        if self.running.is_empty() {
            // For the profiled one: py-spy counts time in which a thread waits for a CPU, and that must be short.
            // SAFETY: setpriority(2) touches no memory; the group is the child's own.
            let status = unsafe { libc::setpriority(libc::PRIO_PGRP, pid, URGENT) };
            ensure!(status == 0, "it cannot be made urgent: {}", std::io::Error::last_os_error());
        }
        self.running.push((child, shown));
        Ok(pid)
    }

    /// Starts one, and waits until it says that it is ready.
    pub fn ready(&mut self, run: &Run) -> Result<u32> {
        let pid = self.start(run)?;
        self.wait_for(self.running.len() - 1, "ready")?;
        Ok(pid)
    }

    /// Starts a server on a free port, and a client of it that has had an answer.
    pub fn served(&mut self, server: impl FnOnce(&str) -> Run) -> Result<u32> {
        let free = TcpListener::bind("127.0.0.1:0").and_then(|socket| socket.local_addr());
        let port = free.context("there is no free port")?.port().to_string();
        let pid = self.start(&server(&port))?;
        self.ready(&Run::script("client.py").args([&port]))?;
        self.settle();
        Ok(pid)
    }

    /// Waits for programs to warm up that do not say when they are ready.
    pub fn settle(&self) {
        self.settle_for(3);
    }

    /// The same for this many seconds.
    pub fn settle_for(&self, seconds: u64) {
        std::thread::sleep(Duration::from_secs(seconds));
    }

    /// Runs one that ends by itself.
    pub fn run_to_its_end(&self, run: &Run) -> Result<()> {
        let output = self.command(&run.0).output().with_context(|| format!("cannot start {}", run.0.join(" ")))?;
        let errors = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{}: {}\n{errors}", run.0.join(" "), output.status);
        Ok(())
    }

    /// The process that the last one named as the one to look at.
    pub fn told_pid(&self) -> Result<u32> {
        let told = std::fs::read_to_string(self.log_path(self.running.len() - 1)).unwrap_or_default();
        let pid = told.lines().find_map(|line| line.strip_prefix("ready ")?.parse().ok());
        pid.with_context(|| format!("it has not told a process id: {told:?}"))
    }

    /// Fails if one of them has ended.
    pub fn check(&mut self) -> Result<()> {
        for at in 0..self.running.len() {
            let (child, shown) = &mut self.running[at];
            if let Some(status) = child.try_wait().context("cannot wait for a program")? {
                let shown = shown.clone();
                bail!("{shown} ended: {status}\n{}", self.last_words(at));
            }
        }
        Ok(())
    }

    fn wait_for(&mut self, at: usize, word: &str) -> Result<()> {
        let begun = Instant::now();
        let path = self.log_path(at);
        while !std::fs::read_to_string(&path).is_ok_and(|told| told.lines().any(|line| line.starts_with(word))) {
            self.check()?;
            ensure!(begun.elapsed() < PATIENCE, "{} is not ready\n{}", self.running[at].1, self.last_words(at));
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    fn log_path(&self, at: usize) -> std::path::PathBuf {
        self.dir().join(format!("{at}.log"))
    }

    fn log(&self, at: usize) -> Result<File> {
        let path = self.log_path(at);
        File::create(&path).with_context(|| format!("cannot create {}", path.display()))
    }

    fn last_words(&self, at: usize) -> String {
        let told = std::fs::read_to_string(self.log_path(at)).unwrap_or_default();
        let lines: Vec<&str> = told.lines().collect();
        lines[lines.len().saturating_sub(12)..].join("\n")
    }
}

impl Drop for Work<'_> {
    fn drop(&mut self) {
        // Clients first: a server without clients ends sooner. Each leads a process group of its own, with all its children.
        for (child, _) in self.running.iter_mut().rev() {
            let Ok(group) = i32::try_from(child.id()).map(Pid::from_raw) else { continue };
            let _gone = killpg(group, Signal::SIGINT);
            let begun = Instant::now();
            while matches!(child.try_wait(), Ok(None)) && begun.elapsed() < GRACE {
                std::thread::sleep(Duration::from_millis(20));
            }
            let _gone = killpg(group, Signal::SIGKILL);
            let _reaped = child.wait();
        }
    }
}

/// Where the programs are.
pub(super) fn scripts() -> std::path::PathBuf {
    command::project_root().join("xtask/programs")
}
