//! Runs the real `tachyon-bpf`, and checks on every recording what must hold for all.

use crate::{Recorded, judge};
use std::ffi::OsString;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};
use tachyon::report::{Report, WallReport};
use tempfile::TempDir;

/// The profiler, which is beside the tests.
///
/// # Panics
/// When it is not there: it belongs to another package, so building the tests alone does not build it.
#[must_use]
pub fn binary() -> PathBuf {
    let tests = std::env::current_exe().expect("a running program has a path");
    // target/<profile>/deps/<this test>
    let profile = tests.parent().and_then(Path::parent).expect("tests lie in target/<profile>/deps");
    let binary = profile.join("tachyon-bpf");
    assert!(binary.is_file(), "{} is missing\nhint: `cargo build -p tachyon`, or `cargo xtask test`", binary.display());
    binary
}

/// The longest that a target may take to use its CPU time.
const CPU_TIME_LIMIT: Duration = Duration::from_secs(40);

/// Waits until a process has used this much more CPU time, however busy the machine is.
///
/// # Panics
/// When that takes longer than 40 s.
pub fn let_run(pid: u32, cpu: Duration) {
    let (from, begin) = (cpu_time(pid), Instant::now());
    while cpu_time(pid).saturating_sub(from) < cpu {
        assert!(begin.elapsed() < CPU_TIME_LIMIT, "{pid} does not use {cpu:?} of CPU time");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// CPU time of a process's living threads (`/proc/PID/task/TID/schedstat`, first number, nanoseconds).
#[must_use]
pub fn cpu_time(pid: u32) -> Duration {
    Duration::from_nanos(schedstat(pid, 0).sum())
}

/// CPU time of one of its threads.
///
/// # Panics
/// When it has ended.
#[must_use]
pub fn cpu_time_of(pid: u32, tid: u32) -> Duration {
    let text = std::fs::read_to_string(format!("/proc/{pid}/task/{tid}/schedstat")).expect("the thread lives");
    let used = text.split_ascii_whitespace().next().and_then(|number| number.parse().ok());
    Duration::from_nanos(used.expect("schedstat has three numbers"))
}

/// How often a process's living threads have begun to run (`/proc/PID/task/TID/schedstat`, third number).
#[must_use]
pub fn stretches(pid: u32) -> u64 {
    schedstat(pid, 2).sum()
}

/// The longest time that one of a process's threads has waited for a CPU so far (`schedstat`, second number).
#[must_use]
pub fn waited_for_cpu(pid: u32) -> Duration {
    Duration::from_nanos(schedstat(pid, 1).max().unwrap_or(0))
}

/// One number of each living thread's `schedstat`.
fn schedstat(pid: u32, number: usize) -> impl Iterator<Item = u64> {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    threads.filter_map(move |thread| {
        let text = std::fs::read_to_string(thread.path().join("schedstat")).ok()?;
        text.split_ascii_whitespace().nth(number)?.parse().ok()
    })
}

/// What the kernel says about the BPF programs, links and maps that a process has open.
fn bpf_files(pid: u32) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(format!("/proc/{pid}/fdinfo")) else { return Vec::new() };
    let texts = entries.filter_map(|entry| std::fs::read_to_string(entry.ok()?.path()).ok());
    texts.filter(|text| ["prog_id:", "link_id:", "map_id:"].iter().any(|key| text.contains(key))).collect()
}

/// Whether one of this profiler's sampling programs has run. (`BPF_PROG_TYPE_PERF_EVENT` is 7 and
/// `BPF_PROG_TYPE_TRACEPOINT` 5; `run_cnt` counts while it measures.)
#[must_use]
pub fn is_sampling(pid: u32) -> bool {
    let samples = |text: &str| text.lines().any(|line| ["prog_type:\t7", "prog_type:\t5"].contains(&line));
    let ran = |text: &str| text.lines().any(|line| line.strip_prefix("run_cnt:\t").is_some_and(|count| count != "0"));
    bpf_files(pid).iter().any(|text| samples(text) && ran(text))
}

/// What a recording is to do.
#[derive(Debug)]
pub struct Profiler {
    args: Vec<OsString>,
    environment: Vec<(&'static str, String)>,
    dir: TempDir,
    output: PathBuf,
    command: Vec<OsString>,
    /// The process, and the CPU time that it must use meanwhile.
    cpu: Option<(u32, Duration)>,
    wrapper: Vec<OsString>,
}

/// A running recording.
#[derive(Debug)]
pub struct Running {
    child: Child,
    profiler: Profiler,
}

/// A recording that has succeeded.
#[derive(Debug)]
pub struct Recording {
    /// The account.
    pub report: Report,
    /// The file, as the project's own reader sees it; CPython's sees the same.
    pub recorded: Recorded,
    /// The file.
    pub path: PathBuf,
    /// What the profiler printed for its user.
    pub stderr: String,
    /// Exit status.
    pub status: i32,
    _dir: TempDir,
}

impl Profiler {
    /// With no target yet; Python frames only.
    ///
    /// # Panics
    /// When no temporary directory can be made.
    #[must_use]
    pub fn new() -> Self {
        let dir = tempfile::Builder::new().prefix("tachyon-live").tempdir().expect("a temporary directory can be made");
        let output = dir.path().join("live.tach");
        Self {
            args: vec!["--no-native".into()],
            environment: Vec::new(),
            dir,
            output,
            command: Vec::new(),
            cpu: None,
            wrapper: Vec::new(),
        }
    }

    /// For a process.
    #[must_use]
    pub fn of(pid: u32) -> Self {
        Self::new().arg("-p").arg(pid.to_string())
    }

    /// Native frames too.
    #[must_use]
    pub fn native(self) -> Self {
        self.arg("--native")
    }

    /// Native frames too, also those below the outermost Python frame.
    #[must_use]
    pub fn native_whole(self) -> Self {
        self.arg("--native=all")
    }

    /// Samples per second.
    #[must_use]
    pub fn rate(self, hz: u32) -> Self {
        self.arg("-F").arg(hz.to_string())
    }

    /// Length of the recording.
    #[must_use]
    pub fn milliseconds(self, milliseconds: u64) -> Self {
        self.arg("-d").arg(format!("{milliseconds}ms"))
    }

    /// Ends the recording when this process has used this much CPU time: on a loaded machine that takes longer, but
    /// gives as many samples.
    #[must_use]
    pub fn cpu_milliseconds(mut self, pid: u32, milliseconds: u64) -> Self {
        self.cpu = Some((pid, Duration::from_millis(milliseconds)));
        self
    }

    /// One more word of its command line.
    #[must_use]
    pub fn arg(mut self, word: impl Into<OsString>) -> Self {
        self.args.push(word.into());
        self
    }

    /// A variable of its environment.
    #[must_use]
    pub fn env(mut self, name: &'static str, value: impl ToString) -> Self {
        self.environment.push((name, value.to_string()));
        self
    }

    /// `-- CMD ARGS`.
    #[must_use]
    pub fn command(mut self, words: &[&str]) -> Self {
        self.command = words.iter().map(OsString::from).collect();
        self
    }

    /// A program that runs it: `unshare ...`, `setpriv ...`, a shell. The profiler's own command line follows these words.
    #[must_use]
    pub fn within(mut self, words: &[&str]) -> Self {
        self.wrapper = words.iter().map(OsString::from).collect();
        self
    }

    /// Where the file goes.
    #[must_use]
    pub fn output(&self) -> &Path {
        &self.output
    }

    /// Where the account goes.
    #[must_use]
    pub fn report(&self) -> PathBuf {
        self.dir.path().join("report.json")
    }

    /// A command that runs it.
    fn built(&self) -> Command {
        let mut words = self.wrapper.iter().cloned().chain([binary().into_os_string()]);
        let mut command = Command::new(words.next().expect("the profiler at least"));
        command.args(words);
        command.args(&self.args).arg("-o").arg(&self.output).arg("--report").arg(self.report());
        if !self.command.is_empty() {
            command.arg("--").args(&self.command);
        }
        // What earlier recordings found out would hide that this one does not.
        command.env("TACHYON_SYMBOL_CACHE", "off");
        command.envs(self.environment.iter().map(|(name, value)| (name, value))).env("NO_COLOR", "1");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Starts it and waits until it samples.
    ///
    /// # Panics
    /// When it does not within a minute.
    #[must_use]
    pub fn start(self) -> Running {
        let child = self.built().spawn().expect("the profiler can be run");
        let mut running = Running { child, profiler: self };
        // It usually takes two seconds, and ten if other programs compete for the same two CPUs.
        let deadline = Instant::now() + Duration::from_secs(60);
        while !is_sampling(running.pid()) {
            if running.child.try_wait().is_ok_and(|status| status.is_some()) || Instant::now() > deadline {
                let _gone = running.child.kill();
                let output = running.child.wait_with_output().expect("a child can be waited for");
                panic!("the profiler does not sample:\n{}", String::from_utf8_lossy(&output.stderr));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        running
    }

    /// Runs it until it ends.
    ///
    /// # Panics
    /// When it fails, or when something that must hold for every recording does not.
    #[must_use]
    pub fn record(self) -> Recording {
        if let Some((pid, enough)) = self.cpu {
            let running = self.start();
            let (from, deadline) = (cpu_time(pid), Instant::now() + CPU_TIME_LIMIT);
            while cpu_time(pid).saturating_sub(from) < enough && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(10));
            }
            running.signal(libc::SIGINT);
            return running.finish();
        }
        let output = self.built().output().expect("the profiler can be run");
        self.recording(output)
    }

    /// Runs it and returns its output. For recordings that fail or write no TACH file.
    ///
    /// # Panics
    /// When it cannot be run.
    #[must_use]
    pub fn run(&self) -> Output {
        self.built().output().expect("the profiler can be run")
    }

    /// Runs it with standard input for its command.
    ///
    /// # Panics
    /// When it cannot be run.
    #[must_use]
    pub fn run_with_input(&self, input: &str) -> Output {
        let mut child = self.built().stdin(Stdio::piped()).spawn().expect("the profiler can be run");
        let mut stdin = child.stdin.take().expect("standard input is a pipe");
        stdin.write_all(input.as_bytes()).expect("a line fits into a pipe");
        child.wait_with_output().expect("a child can be waited for")
    }

    fn recording(self, output: Output) -> Recording {
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        let report = std::fs::read(self.report());
        let report = report.unwrap_or_else(|error| panic!("no report ({error}), {}:\n{stderr}", output.status));
        let report: Report = serde_json::from_slice(&report).expect("the report is JSON of its schema");
        let status = output.status.code().unwrap_or_else(|| panic!("{}:\n{stderr}", output.status));
        if self.command.is_empty() {
            assert_eq!(status, 0, "{stderr}");
        }
        let recorded = Recorded::read(&self.output);
        let recording = Recording { report, recorded, path: self.output, stderr, status, _dir: self.dir };
        recording.check();
        recording
    }
}

impl Default for Profiler {
    fn default() -> Self {
        Self::new()
    }
}

impl Running {
    /// Its pid.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What the kernel says about the BPF programs, links and maps that it has open.
    #[must_use]
    pub fn bpf_files(&self) -> Vec<String> {
        bpf_files(self.pid())
    }

    /// Sends it a signal.
    ///
    /// # Panics
    /// When it has gone.
    pub fn signal(&self, signal: i32) {
        let pid = i32::try_from(self.pid()).expect("pids are positive");
        // SAFETY: kill(2) touches no memory; the child has not been waited for, so the pid is its.
        let result = unsafe { libc::kill(pid, signal) };
        assert_eq!(result, 0, "the profiler has gone");
    }

    /// Waits for its end.
    ///
    /// # Panics
    /// As [`Profiler::record`].
    #[must_use]
    pub fn finish(self) -> Recording {
        let output = self.child.wait_with_output().expect("a child can be waited for");
        self.profiler.recording(output)
    }

    /// Waits for its end, whatever the format of its output. The output's directory lives on in the result.
    ///
    /// # Panics
    /// When it fails.
    #[must_use]
    pub fn ended(self) -> Profiler {
        let output = self.child.wait_with_output().expect("a child can be waited for");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        self.profiler
    }

    /// Like [`Running::finish`], but the caller waits, and so notices when it hangs.
    ///
    /// # Panics
    /// As [`Profiler::record`].
    #[must_use]
    pub fn finish_with(self, wait: impl FnOnce(Child) -> Output) -> Recording {
        let output = wait(self.child);
        self.profiler.recording(output)
    }

    /// Kills it. The directory of its output lives on in the result.
    ///
    /// # Panics
    /// When it cannot be waited for.
    #[must_use]
    pub fn kill(mut self) -> Profiler {
        self.signal(libc::SIGKILL);
        self.child.wait().expect("a child can be waited for");
        self.profiler
    }
}

impl Recording {
    /// Checks what holds for every recording.
    fn check(&self) {
        let Self { report, recorded, stderr, .. } = self;
        let loss: u64 = report.loss.values().sum();
        let account = report.stored + report.idle + report.filtered + report.not_python + loss;
        assert_eq!(report.ran, account, "the account does not add up: {report:#?}\n{stderr}");
        assert_eq!(report.inconsistent, 0, "counts of the same differ: {report:#?}\n{stderr}");
        let cost = &report.cost;
        if report.wall.is_some() && cost.bpf_stats != "on" {
            // When waits are sampled the kernel counts for one second only: its programs run at each switch of threads.
            assert!(cost.bpf_stats.starts_with("for the first second") && cost.bpf_run_ns > Some(0), "{report:#?}");
            assert_eq!(cost.bpf_run_count, None, "not all of them were counted");
        } else {
            let kernels = cost.bpf_run_count;
            assert_eq!(kernels, Some(report.ran), "the kernel counted other runs ({}): {report:#?}", cost.bpf_stats);
        }
        let of_tasks = |wall: &WallReport| wall.tasks.as_ref().map_or(0, |tasks| tasks.stored);
        let waits = report.wall.as_ref().map_or(0, |wall| wall.stored + of_tasks(wall));
        assert_eq!(report.stored + waits, recorded.samples.len() as u64, "`stored` is what a reader decodes");
        if let Some(wall) = &report.wall {
            let due = wall.stored + wall.loss.values().sum::<u64>();
            assert_eq!(wall.ticks_due, due, "the account of waits does not add up: {report:#?}\n{stderr}");
            let causes = wall.causes.values().map(|cause| cause.stored).sum::<u64>();
            assert_eq!(wall.stored, causes, "each wait has one cause: {report:#?}");
            if let Some(tasks) = &wall.tasks {
                let lost = |cause: &str| tasks.loss.get(cause).copied().expect("each cause is told");
                let read = tasks.read + lost("went_on") + lost("unreadable") + lost("late");
                assert_eq!(tasks.idle, read, "the account of waiting tasks does not add up: {report:#?}\n{stderr}");
            }
        }
        assert_eq!(report.stops.values().sum::<u64>(), report.stored, "each sample has one reason: {report:#?}");
        let samples: u64 = report.processes.iter().map(|process| process.samples).sum();
        assert_eq!(samples, report.stored, "each sample has one process: {report:#?}");
        assert!(report.processes.iter().all(|process| process.named <= process.samples), "{report:#?}");
        if let Some(native) = &report.native {
            let of = native.exact + native.repaired + native.failed + native.missing;
            assert_eq!(of, report.stored, "each sample was merged somehow: {report:#?}");
            assert_eq!(native.stops.values().sum::<u64>(), report.stored, "each native stack has one end: {report:#?}");
        }
        judge::agrees(&self.path, recorded);
    }

    /// Samples that ended for this reason.
    #[must_use]
    pub fn stopped(&self, reason: &str) -> u64 {
        self.report.stops.get(reason).copied().unwrap_or(0)
    }

    /// Runs lost to this cause.
    #[must_use]
    pub fn lost(&self, cause: &str) -> u64 {
        self.report.loss.get(cause).copied().unwrap_or(0)
    }
}
