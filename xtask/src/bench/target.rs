//! The programs that are profiled: a busy one that counts its work, and idle ones that are just present.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use tempfile::{NamedTempFile, TempDir};

use super::probe;
use crate::command;
use crate::programs::Program;
use crate::zoo::Python;

/// A running `xtask/bench/deep.py`, or another program; dropping this ends it.
pub(crate) struct Target {
    child: Child,
    /// Other programs have none.
    counter: Option<NamedTempFile>,
    /// The program and the counter, or what another program says.
    _dir: TempDir,
}

/// How far a target had got at one moment.
#[derive(Clone, Copy)]
pub(crate) struct Mark {
    at: Instant,
    iterations: u64,
    run_delay: Duration,
    cpu: Duration,
}

/// What a target's samples find.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    /// Python frames.
    pub(crate) depth: usize,
    /// Memory that is scanned between samples.
    pub(crate) sweep_mib: usize,
    /// Frames called from C.
    pub(crate) through_c: usize,
    /// Whose work it is, as an argument of `deep.py`; empty: nobody's.
    pub(crate) whose: &'static str,
    /// Options of the interpreter.
    pub(crate) options: &'static [&'static str],
}

impl Shape {
    pub(crate) const fn deep(depth: usize) -> Self {
        Self { depth, sweep_mib: 0, through_c: 0, whose: "", options: &[] }
    }
}

impl Target {
    /// Starts the program on one CPU and waits until it works.
    ///
    /// # Errors
    /// It does not start, or does nothing.
    pub(crate) fn start(python: &Python, cpu: usize, shape: Shape) -> Result<Self> {
        let Shape { depth, sweep_mib, through_c, whose, options } = shape;
        // Its path as the interpreter sees it.
        let root = python.root.as_deref();
        let all = root.map_or_else(std::env::temp_dir, |root| root.join("tmp"));
        let dir = tempfile::Builder::new().prefix("bench").tempdir_in(&all);
        let dir = dir.with_context(|| format!("cannot work in {}", all.display()))?;
        let program = dir.path().join("deep.py");
        std::fs::copy(command::project_root().join("xtask/bench/deep.py"), &program).context("cannot copy deep.py")?;
        let counter = NamedTempFile::new_in(dir.path()).context("cannot create the target's counter")?;
        counter.as_file().set_len(8).context("cannot size the target's counter")?;
        let mut line = Command::new("taskset");
        line.args(["-c", &cpu.to_string()]);
        if let Some(root) = root {
            line.arg("chroot").arg(root);
        }
        line.arg(&python.path).args(options).arg(python.sees(&program));
        line.args([depth.to_string(), sweep_mib.to_string()]).arg(python.sees(counter.path()));
        line.args([&through_c.to_string(), whose]);
        // What the tests' setup has put there.
        if matches!(whose, "span" | "traced") {
            line.env("PYTHONPATH", "/opt/ddtrace");
        } else if whose.starts_with("greenlet") || whose.starts_with("named") {
            line.env("PYTHONPATH", "/opt/greenlet");
        }
        let child = line.stdin(Stdio::null()).spawn();
        let child = child.with_context(|| format!("cannot start {}", python.path.display()))?;
        let mut target = Self { child, counter: Some(counter), _dir: dir };
        target.wait_until(Duration::from_secs(20), |target| Ok(target.iterations()? > 0))?;
        Ok(target)
    }

    /// Starts another program on one CPU and waits until it says `ready`. It counts nothing.
    ///
    /// # Errors
    /// It does not start, or ends.
    pub(crate) fn program(program: &Program, cpu: usize) -> Result<Self> {
        let dir = tempfile::tempdir().context("cannot create a directory for a target")?;
        let path = dir.path().join("said");
        let said = File::create(&path).with_context(|| format!("cannot create {}", path.display()))?;
        // It does not look whether its parent is still there.
        let mut line = Command::new("setpriv");
        line.args(["--pdeathsig", "KILL", "taskset", "-c", &cpu.to_string()]).arg(&program.python).args(&program.words);
        line.env("PYTHONDONTWRITEBYTECODE", "1").stdin(Stdio::null());
        let child = line.stderr(said.try_clone().context("cannot share a log file")?).stdout(said).spawn();
        let mut target = Self { child: child.context("cannot start setpriv")?, counter: None, _dir: dir };
        let says = || std::fs::read_to_string(&path).unwrap_or_default();
        let is_ready =
            target.wait_until(Duration::from_secs(300), |_| Ok(says().lines().any(|line| line.starts_with("ready"))));
        is_ready.with_context(|| format!("it said {:?}", says()))?;
        Ok(target)
    }

    fn wait_until(&mut self, patience: Duration, is_so: impl Fn(&Self) -> Result<bool>) -> Result<()> {
        let begun = Instant::now();
        while !is_so(self)? {
            if let Some(status) = self.child.try_wait().context("cannot wait for the target")? {
                bail!("the target ended before it worked: {status}");
            }
            if begun.elapsed() > patience {
                bail!("the target did nothing for {} s", patience.as_secs());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// None of a program that does not count.
    fn iterations(&self) -> Result<u64> {
        let mut bytes = [0; 8];
        let Some(counter) = &self.counter else { return Ok(0) };
        let file: &File = counter.as_file();
        file.read_exact_at(&mut bytes, 0).context("cannot read the target's counter")?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// How far it has got at its next iteration, if it counts: the kernel adds a wait for the CPU to `run_delay` only once it is over.
    ///
    /// # Errors
    /// It is gone.
    pub(crate) fn mark(&self) -> Result<Mark> {
        let before = self.iterations()?;
        let patience = Instant::now() + Duration::from_secs(10);
        while self.counter.is_some() && self.iterations()? == before && Instant::now() < patience {
            std::thread::sleep(Duration::from_micros(100));
        }
        Ok(Mark {
            at: Instant::now(),
            iterations: self.iterations()?,
            run_delay: probe::run_delay(self.pid())?,
            cpu: probe::cpu_time(self.pid())?,
        })
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        end(&mut self.child);
    }
}

impl Mark {
    /// Iterations a second of the time since `before` during which other processes did not keep the target from its
    /// CPU: their activity is not a slowdown caused by a profiler, but interrupts and stops are.
    pub(crate) fn speed_since(&self, before: &Self) -> f64 {
        let waited = self.run_delay.saturating_sub(before.run_delay);
        let free = (self.at - before.at).saturating_sub(waited);
        self.iterations.saturating_sub(before.iterations) as f64 / free.as_secs_f64()
    }

    /// Iterations a second since `before`, for a program that spends most of its time waiting for others.
    pub(crate) fn trips_since(&self, before: &Self) -> f64 {
        self.iterations.saturating_sub(before.iterations) as f64 / (self.at - before.at).as_secs_f64()
    }

    /// Time since `before`, and the target's CPU time in it.
    pub(crate) fn since(&self, before: &Self) -> (Duration, Duration) {
        (self.at - before.at, self.cpu.saturating_sub(before.cpu))
    }
}

/// Processes that wait; they end when this is dropped, or when the benchmark ends.
pub(crate) struct Idle(Vec<Child>);

impl Idle {
    /// Starts `count` interpreters that wait.
    ///
    /// # Errors
    /// One cannot be started.
    pub(crate) fn pythons(python: &Path, count: usize) -> Result<Self> {
        Self::start(count, || {
            let mut line = Command::new(python);
            line.args(["-c", "import sys; sys.stdin.read()"]);
            line
        })
    }

    /// Starts `count` of this interpreter that work, `depth` frames deep; with `nice`, so that a profiler gets to start.
    ///
    /// # Errors
    /// One cannot be started.
    pub(crate) fn busy(python: &Path, depth: usize, count: usize) -> Result<Self> {
        let deep = format!("def f(n):\n    while not n: pass\n    f(n - 1)\nf({})", depth - 2);
        Self::start(count, || {
            let mut line = Command::new("nice");
            line.args(["-n", "19"]).arg(python).args(["-S", "-c", &deep]);
            line
        })
    }

    /// Starts processes that are not Python until the machine has `wanted` processes.
    ///
    /// # Errors
    /// One cannot be started.
    pub(crate) fn fill_up_to(wanted: usize) -> Result<Self> {
        let is_process = |entry: &std::fs::DirEntry| entry.file_name().to_string_lossy().parse::<u32>().is_ok();
        let there = std::fs::read_dir("/proc").context("cannot read /proc")?;
        let count = there.filter_map(std::result::Result::ok).filter(is_process).count();
        Self::start(wanted.saturating_sub(count), || Command::new("cat"))
    }

    fn start(count: usize, line: impl Fn() -> Command) -> Result<Self> {
        let mut idle = Self(Vec::new());
        for _ in 0..count {
            // This process holds the pipe's other end: they see it close when this process is gone.
            let child = line().stdin(Stdio::piped()).stdout(Stdio::null()).spawn();
            idle.0.push(child.context("cannot start an idle process")?);
        }
        Ok(idle)
    }

    /// The first one's pid.
    pub(crate) fn pid(&self) -> Option<u32> {
        self.0.first().map(Child::id)
    }
}

impl Drop for Idle {
    fn drop(&mut self) {
        self.0.iter_mut().for_each(end);
    }
}

/// Ends a process of the benchmark; one that ended by itself is not an error.
fn end(child: &mut Child) {
    let _gone = child.kill();
    let _reaped = child.wait();
}
