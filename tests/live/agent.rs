//! `agent`: records a host for ever, in segments whose account adds up whatever happens to it.

mod killed;

use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::io::Read as _;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};
use tachyon::report::Report;
use tachyon_tests::{Interpreter, Recorded, Target, binary, judge, live};

/// The longest that anything here is waited for.
const PATIENCE: Duration = Duration::from_secs(60);

/// A running agent with its own spool, below a directory that is removed at the end.
pub(crate) struct Agent {
    around: tempfile::TempDir,
    child: Option<Child>,
}

fn in_time<T>(what: &str, mut found: impl FnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(found) = found() {
            return found;
        }
        assert!(started.elapsed() < PATIENCE, "in vain: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

impl Agent {
    pub(crate) fn start(config: &str) -> Self {
        Self::start_within(config, |command| command)
    }

    /// Starts it through another command, built from its own.
    pub(crate) fn start_within(config: &str, within: impl FnOnce(Command) -> Command) -> Self {
        let around = tempfile::tempdir().expect("a temporary directory can be made");
        let mut agent = Self { around, child: None };
        agent.configure(config);
        agent.start_by(within(agent.command()));
        agent
    }

    fn spool(&self) -> PathBuf {
        self.around.path().join("spool")
    }

    fn config(&self) -> PathBuf {
        self.around.path().join("agent.toml")
    }

    fn configure(&self, config: &str) {
        fs::write(self.config(), format!("{config}\n[spool]\npath = \"{}\"\n", self.spool().display())).unwrap();
    }

    fn command(&self) -> Command {
        let mut command = Command::new(binary());
        command.arg("agent").arg("--config").arg(self.config());
        command
    }

    fn start_again(&mut self) {
        self.start_by(self.command());
    }

    fn start_by(&mut self, mut command: Command) {
        let log = fs::File::options().create(true).append(true).open(self.around.path().join("log")).unwrap();
        let said = self.log().matches("records this host").count();
        self.child = Some(command.stderr(log).spawn().expect("the profiler can be run"));
        in_time("the agent records", || {
            let ended = self.child.as_mut().and_then(|child| child.try_wait().expect("it is our child"));
            assert!(ended.is_none(), "the agent ended: {}", self.log());
            (self.log().matches("records this host").count() > said).then_some(())
        });
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.around.path().join("log")).unwrap_or_default()
    }

    fn pid(&self) -> u32 {
        self.child.as_ref().expect("it runs").id()
    }

    fn signal(&self, signal: i32) {
        let pid = self.pid();
        // SAFETY: sends a signal to our own child, which has not been waited for.
        let sent = unsafe { libc::kill(libc::pid_t::try_from(pid).unwrap(), signal) };
        assert_eq!(sent, 0);
    }

    pub(crate) fn end(&mut self, signal: i32) {
        self.signal(signal);
        let status = self.child.take().expect("it runs").wait().expect("it is our child");
        assert!(signal == libc::SIGKILL || status.success(), "{status}: {}", self.log());
    }

    fn files(&self, ending: &str) -> Vec<PathBuf> {
        files(&self.spool(), ending)
    }

    fn wait_for_segments(&self, count: usize) {
        in_time("segments", || (self.files(".tach").len() >= count).then_some(()));
    }

    fn state(&self) -> Value {
        json(&self.spool().join("state.json"))
    }

    pub(crate) fn reports(&self) -> Vec<Report> {
        self.files(".json").iter().map(|path| serde_json::from_value(json(path)).expect("it is an account")).collect()
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _gone = child.kill();
            let _reaped = child.wait();
        }
    }
}

/// Files of segments in a spool, the oldest first.
fn files(spool: &Path, ending: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(spool).into_iter().flatten();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.expect("it can be listed").path()).collect();
    paths.retain(|path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.contains("Z-") && name.ends_with(ending)
    });
    paths.sort();
    paths
}

fn json(path: &Path) -> Value {
    let text = fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_slice(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// An unoptimised build is slow and large, so its limits are not a user's.
pub(crate) const FAST: &str =
    "[record]\nfrequency = 199\nmax_cpu = \"100%\"\nmax_memory = \"512MiB\"\n[segments]\nlength = \"500ms\"\n";

#[test]
fn segments_add_up_to_the_state_and_have_labels() {
    let Some(_live) = live() else { return };
    let python = Interpreter::named("pyenv_3_12");
    let environment = [("OTEL_RESOURCE_ATTRIBUTES", "service.name=shop,service.version=1"), ("REGION", "eu")];
    let named = Target::start_in(&python, "spin.py", &[], &environment);
    let plain = Target::start(&python, "spin.py");
    // It has no sample in any segment, but is in every account.
    let idle = Target::start_in(&python, "wall_asleep.py", &["60"], &[]);
    let rules = "[labels]\nenvironment = [\"REGION\"]\n[[labels.rule]]\nmatch = { \"env.REGION\" = \"e*\" }\nset = { team = \"a\" }\n";
    let mut agent = Agent::start(&format!("{FAST}{rules}"));
    agent.wait_for_segments(3);
    agent.end(libc::SIGTERM);

    let (reports, state) = (agent.reports(), agent.state());
    assert_eq!(agent.files(".tach").len(), reports.len());
    assert!(agent.files(".part").is_empty());
    let sum = |of: fn(&Report) -> u64| reports.iter().map(of).sum::<u64>();
    for (name, of) in [
        ("ran", (|report| report.ran) as fn(&Report) -> u64),
        ("stored", |report| report.stored),
        ("idle", |report| report.idle),
        ("filtered", |report| report.filtered),
        ("not_python", |report| report.not_python),
        ("inconsistent", |report| report.inconsistent),
    ] {
        assert_eq!(state[name], sum(of), "{name}: {state:#}");
    }
    let lost: u64 = state["loss"].as_object().unwrap().values().map(|count| count.as_u64().unwrap()).sum();
    assert_eq!(lost, sum(|report| report.loss.values().sum()));
    assert_eq!(sum(|report| report.ran), sum(|report| report.cost.bpf_run_count.expect("the tests run as root")));
    assert_eq!((&state["inconsistent"], &state["dropped_segments"]), (&0.into(), &0.into()));
    assert!(state["cpu_share"].as_f64().unwrap() > 0.0 && state["memory_bytes"].as_u64().unwrap() > 1 << 20);
    assert!(state["spool_bytes"].as_u64().unwrap() > 0 && state["sequence"] == reports.len() as u64 - 1);

    let mut samples = 0;
    for (path, report) in agent.files(".tach").iter().zip(&reports) {
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o640);
        let recorded = Recorded::read(path);
        judge::agrees(path, &recorded);
        samples += recorded.samples.len() as u64;
        for (target, service, team) in
            [(&named, "shop", Some("a")), (&plain, "spin.py", None), (&idle, "wall_asleep.py", None)]
        {
            let process = report.processes.iter().find(|process| process.pid == target.pid()).expect("it is there");
            let label = |name: &str| process.labels.get(name).map(String::as_str);
            assert_eq!((label("service.name"), label("team")), (Some(service), team), "{process:#?}");
            assert_eq!((label("uid"), label("pid")), (Some("0"), Some(&*target.pid().to_string())));
            assert!(label("cgroup").is_some_and(|path| path.starts_with('/')), "{process:#?}");
            assert!(label("command_line").is_none() && label("host").is_some());
        }
    }
    assert_eq!(samples, state["stored"].as_u64().unwrap());
    let metrics = fs::read_to_string(agent.spool().join("metrics.prom")).unwrap();
    assert!(metrics.contains(&format!("tachyon_samples_total {samples}\n")), "{metrics}");
}

/// Waiting threads are in each segment with the part of their wait that lies in it; their account adds up beside the other one.
#[test]
fn waiting_threads_are_in_every_segment() {
    let Some(_live) = live() else { return };
    let _target = Target::start(&Interpreter::named("pyenv_3_12"), "wall_naps.py");
    let mut agent = Agent::start(&FAST.replacen("[record]\n", "[record]\nwall = true\n", 1));
    agent.wait_for_segments(3);
    agent.end(libc::SIGTERM);
    let reports = agent.reports();
    assert!(reports.len() >= 3);
    for (path, report) in agent.files(".tach").iter().zip(&reports) {
        let wall = report.wall.as_ref().expect("waits are recorded");
        assert_eq!(report.inconsistent, 0, "{report:#?}");
        assert_eq!(wall.ticks_due, wall.stored + wall.loss.values().sum::<u64>(), "{report:#?}");
        let recorded = Recorded::read(path);
        judge::agrees(path, &recorded);
        assert_eq!(recorded.samples.len() as u64, report.stored + wall.stored, "{}", path.display());
        let forever = |sample: &&_| recorded.frames_of(sample).any(|frame| frame.function == "forever");
        let count = recorded.samples.iter().filter(forever).count() as f64;
        // Two threads, each once in every period; a process first seen within a segment counts from then on.
        let periods = 2.0 * report.effective_rate_hz * report.duration_s;
        let least = if report.segment.is_some_and(|segment| segment.sequence > 0) { periods - 4.0 } else { 1.0 };
        assert!(count >= least && count <= periods + 4.0, "{count} of {periods}: {report:#?}");
    }
}

#[test]
fn systemd_is_told() {
    let Some(_live) = live() else { return };
    let around = tempfile::tempdir().expect("a temporary directory can be made");
    let socket = std::os::unix::net::UnixDatagram::bind(around.path().join("notify")).expect("a socket can be had");
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut command = Command::new(binary());
    command
        .args(["agent", "--config", "/dev/null", "--set"])
        .arg(format!("spool.path={}", around.path().join("spool").display()));
    command.env("NOTIFY_SOCKET", around.path().join("notify")).env("WATCHDOG_USEC", "60000000");
    let mut child = command.stderr(Stdio::null()).spawn().expect("the profiler can be run");
    let told = || {
        let mut message = [0; 256];
        let length = socket.recv(&mut message).expect("systemd is told");
        String::from_utf8_lossy(&message[..length]).into_owned()
    };
    assert!(told().contains("READY=1"));
    let signal = |signal: i32| {
        // SAFETY: sends a signal to our own child, which has not been waited for.
        let sent = unsafe { libc::kill(libc::pid_t::try_from(child.id()).unwrap(), signal) };
        assert_eq!(sent, 0);
    };
    let until = |wanted: &str| {
        for _ in 0..100 {
            if told().contains(wanted) {
                return;
            }
        }
        panic!("{wanted} was not told");
    };
    until("WATCHDOG=1");
    signal(libc::SIGHUP);
    until("RELOADING=1");
    until("READY=1");
    signal(libc::SIGTERM);
    until("STOPPING=1");
    assert!(child.wait().expect("it is our child").success());
}

#[test]
fn the_bound_of_the_spool_holds_and_a_reload_needs_no_pause() {
    let Some(_live) = live() else { return };
    // Steps of 15 ms of CPU time, each sampled twice or more.
    let _target = Target::start_with(&Interpreter::named("pyenv_3_12"), "numbered.py", &["15"]);
    let mut agent = Agent::start(&FAST.replace("500ms", "200ms"));
    agent.wait_for_segments(4);
    // An invalid one changes nothing.
    fs::write(agent.config(), "[record]\nfrequenzy = 3\n").unwrap();
    agent.signal(libc::SIGHUP);
    in_time("the complaint", || agent.log().contains("unknown key record.frequenzy").then_some(()));
    let bounded = format!(
        "{}[spool]\nkeep_bytes = \"20KB\"\npath = \"{}\"\n",
        FAST.replace("500ms", "200ms"),
        agent.spool().display()
    );
    fs::write(agent.config(), &bounded).unwrap();
    agent.signal(libc::SIGHUP);
    in_time("removed segments", || (agent.state()["removed_segments"].as_u64()? > 2).then_some(()));
    let bytes: u64 = agent
        .files("")
        .iter()
        .filter(|path| !path.to_string_lossy().contains(".part"))
        .filter_map(|path| path.metadata().ok())
        .map(|it| it.len())
        .sum();
    // The newest may have appeared since the last look.
    assert!(bytes < 40_000, "{bytes} bytes: {:?}", agent.files(""));
    assert_eq!(agent.state()["restarts"], 0, "{}", agent.log());
    // Another rate does: it samples before the old one ends.
    fs::write(agent.config(), bounded.replace("199", "499").replace("20KB", "1GB")).unwrap();
    let before: BTreeSet<PathBuf> = agent.files(".tach").into_iter().collect();
    agent.signal(libc::SIGHUP);
    in_time("another recorder", || (agent.state()["restarts"] == 1).then_some(()));
    in_time("its segments", || {
        (agent.files(".tach").iter().filter(|path| !before.contains(*path)).count() > 3).then_some(())
    });
    agent.end(libc::SIGINT);
    let new: Vec<PathBuf> = agent.files(".tach").into_iter().filter(|path| !before.contains(path)).collect();
    // No gap: what the target did while one recorder took over from the other was sampled by one of them or by both.
    let mut steps: BTreeSet<u64> = BTreeSet::new();
    for path in &new {
        let recorded = Recorded::read(path);
        let step =
            |sample| recorded.frames_of(sample).find_map(|frame| frame.function.strip_prefix("step_")?.parse().ok());
        steps.extend(recorded.samples.iter().filter_map(step).collect::<Vec<u64>>());
    }
    let steps: Vec<u64> = steps.into_iter().collect();
    for pair in steps.windows(2) {
        // A step in which the machine ran something else may have been missed by every firing.
        assert!(pair[1] - pair[0] <= 2, "no sample between steps {} and {}", pair[0], pair[1]);
    }
    assert!(steps.len() > 20, "{steps:?}");
    let accounts: Vec<Report> =
        new.iter().map(|path| serde_json::from_value(json(&path.with_extension("json"))).unwrap()).collect();
    assert!(
        accounts.iter().any(|account| account.rate_hz > 400.0)
            && accounts.iter().any(|account| account.rate_hz < 200.0)
    );
}

/// A segment whose successor has no room goes on, and what is buffered may fit into its file: then nothing is lost.
#[test]
fn a_full_disk_stops_files_and_not_the_agent() {
    let Some(_live) = live() else { return };
    let _target = Target::start(&Interpreter::named("pyenv_3_12"), "spin.py");
    let around = tempfile::tempdir().expect("a temporary directory can be made");
    let disk = around.path().join("disk");
    fs::create_dir(&disk).unwrap();
    let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", "size=1m", "tachyon-test"]).arg(&disk).status();
    assert!(mounted.expect("mount is there").success());
    let _unmount = Unmount(disk.clone());
    let spool = disk.join("spool");
    let mut agent = Agent::start(FAST);
    agent.end(libc::SIGTERM);
    fs::write(agent.config(), format!("{FAST}[spool]\npath = \"{}\"\n", spool.display())).unwrap();
    agent.start_again();
    let segments = |count: u64| {
        let state = || serde_json::from_slice::<Value>(&fs::read(spool.join("state.json")).ok()?).ok();
        in_time("segments", || (state()?["segments"].as_u64()? >= count).then_some(()));
    };
    segments(2);
    // Another program fills the disk.
    let filler = disk.join("filler");
    let mut file = fs::File::create(&filler).unwrap();
    let _full = std::io::copy(&mut std::io::repeat(0).take(4 << 20), &mut file);
    in_time("the complaint", || agent.log().to_lowercase().contains("no space left").then_some(()));
    std::thread::sleep(Duration::from_secs(1));
    drop(file);
    fs::remove_file(&filler).unwrap();
    in_time("segments that have room again", || agent.log().contains("segments are written again").then_some(()));
    segments(json(&spool.join("state.json"))["segments"].as_u64().unwrap() + 2);
    agent.end(libc::SIGTERM);
    let state = json(&spool.join("state.json"));
    let count = |name: &str| state[name].as_u64().unwrap();
    let lost: u64 = state["loss"].as_object().unwrap().values().map(|count| count.as_u64().unwrap()).sum();
    let accounted = count("stored") + count("idle") + count("filtered") + count("not_python") + lost;
    assert_eq!((count("ran"), count("inconsistent")), (accounted, 0), "{state:#}");
    let in_files: usize = files(&spool, ".tach").iter().map(|path| Recorded::read(path).samples.len()).sum();
    println!("{in_files} samples in files: {state:#}");
    assert_eq!(in_files as u64, count("stored") - count("dropped_samples"), "{state:#}");
    assert!(files(&spool, ".part").is_empty());
}

/// A mounted file system.
struct Unmount(PathBuf);

impl Drop for Unmount {
    fn drop(&mut self) {
        let _left = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

#[test]
fn what_cannot_be_a_spool_is_refused_and_nothing_written() {
    let Some(_live) = live() else { return };
    let around = tempfile::tempdir().expect("a temporary directory can be made");
    let path = |name: &str| around.path().join(name);
    for name in ["open", "foreign", "real"] {
        fs::create_dir(path(name)).unwrap();
    }
    fs::set_permissions(path("open"), fs::Permissions::from_mode(0o777)).unwrap();
    std::os::unix::fs::chown(path("foreign"), Some(65534), None).unwrap();
    symlink(path("real"), path("link")).unwrap();
    let run = |spool: &Path, more: &[&str]| {
        let mut command = Command::new(binary());
        command
            .args(["agent", "--config", "/dev/null", "--set"])
            .arg(format!("spool.path={}", spool.display()))
            .args(more);
        command.stdin(Stdio::null()).output().expect("the profiler can be run")
    };
    for (name, message) in [
        ("open", "others may write to the spool"),
        ("foreign", "belongs to user 65534"),
        ("link", "is a symbolic link"),
        ("no/such", "cannot make the spool"),
    ] {
        let output = run(&path(name), &[]);
        let text = stderr(&output);
        assert!(output.status.code() == Some(1) && text.contains(message), "{name}: {text}");
        assert_eq!(text.lines().count(), 2, "a line and a hint: {text}");
    }
    for name in ["open", "foreign", "real"] {
        assert_eq!(fs::read_dir(path(name)).unwrap().count(), 0, "{name}");
    }
    let output = run(&path("real"), &["--set", "record.frequency=0"]);
    assert!(
        output.status.code() == Some(2) && stderr(&output).contains("must be 1 to 10000 Hz"),
        "{}",
        stderr(&output)
    );
    let output = run(&path("new"), &["--check"]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && text.contains("record.frequency") && text.contains("--set"), "{text}");
    assert!(!path("new").exists(), "--check writes nothing");

    // A second agent on the same spool.
    let agent = Agent::start(FAST);
    let second = agent.command().output().expect("the profiler can be run");
    assert!(second.status.code() == Some(1) && stderr(&second).contains("another agent writes"), "{}", stderr(&second));
}
