//! Processes that Python programs start: pools, chains, a server's workers. Every one of them is named.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tachyon_tests::{Interpreter, Profiler, Recording, live, on_each_interpreter, program};

on_each_interpreter!(at_home: pools, chains);

/// Each of `pids` is in the profile, its stacks have names, and this function is in most of them. At 499 Hz.
fn check_named(recording: &Recording, pids: &BTreeSet<u32>, function: &str) {
    let recorded = &recording.recorded;
    let (mut all, mut right): (BTreeMap<u64, u64>, BTreeMap<u64, u64>) = Default::default();
    for sample in &recorded.samples {
        // None of them has a second working thread. The bits above the id say which of the pid's programs it is.
        let tid = sample.thread_id & u64::from(u32::MAX);
        *all.entry(tid).or_default() += 1;
        let names = recorded.frames_of(sample).any(|frame| frame.function == function);
        *right.entry(tid).or_default() += u64::from(names);
    }
    let first = recording.report.processes.iter().map(|process| process.pid).min();
    for pid in pids {
        // Between its fork and its exec a child runs its parent's program.
        let programs = recording.report.processes.iter().filter(|process| process.pid == *pid);
        let process = programs
            .max_by_key(|process| process.samples)
            .unwrap_or_else(|| panic!("{pid} is missing: {:#?}", recording.report));
        assert!(!process.python_version.is_empty() && process.samples > 10, "{process:?}");
        // While the first process runs, the files of its build are read, possibly from a slow disk: that may take 50 ms.
        let reading = process.uninspected.min(if Some(*pid) == first { 25 } else { 0 });
        let after = process.samples - process.not_initialized + process.uninspected - reading;
        assert!(process.named as f64 >= 0.95 * after as f64, "{process:?} {:?}", recording.report.stops);
        let at = |counts: &BTreeMap<u64, u64>| counts.get(&u64::from(*pid)).copied().unwrap_or(0);
        assert!(at(&right) * 2 > at(&all), "{pid}: {} of {} samples are in {function}", at(&right), at(&all));
    }
}

fn python(interpreter: &Interpreter) -> String {
    interpreter.command().get_program().to_str().expect("ASCII").to_owned()
}

fn pools(interpreter: &Interpreter) {
    let dir = tempfile::tempdir().expect("a temporary directory can be made");
    for method in ["fork", "forkserver", "spawn"] {
        let path = dir.path().join(method).display().to_string();
        let script = program("pools.py").display().to_string();
        let profiler = Profiler::new().rate(499).command(&[&python(interpreter), "-B", &script, method, &path]);
        let recording = profiler.record();
        assert_eq!(recording.status, 0, "{}", recording.stderr);
        let pids = std::fs::read_to_string(&path).expect("the program has written it");
        let pids: BTreeSet<u32> = pids.lines().map(|pid| pid.parse().expect("a pid")).collect();
        assert_eq!(pids.len(), 4, "{method}");
        check_named(&recording, &pids, "work");
    }
}

fn chains(interpreter: &Interpreter) {
    let dir = tempfile::tempdir().expect("a temporary directory can be made");
    let path = dir.path().join("pids").display().to_string();
    let script = program("chain.py").display().to_string();
    let recording = Profiler::new().rate(499).command(&[&python(interpreter), "-B", &script, "6", &path]).record();
    assert_eq!(recording.status, 0, "{}", recording.stderr);
    let lines = std::fs::read_to_string(&path).expect("the program has written it");
    let pids = lines.lines().map(|line| line.split(' ').nth(1).and_then(|pid| pid.parse().ok()).expect("a pid"));
    let pids: BTreeSet<u32> = pids.collect();
    assert_eq!(pids.len(), 6);
    check_named(&recording, &pids, "level");
}

/// A server that is ended when dropped.
pub(super) struct Server {
    master: Child,
    pub(super) address: SocketAddr,
}

/// gunicorn from PyPI.
fn gunicorn_program() -> PathBuf {
    let cache = std::env::var_os("TACHYON_CACHE").map(PathBuf::from);
    let cache = cache.or_else(|| std::env::home_dir().map(|home| home.join(".cache/tachyon-bpf")));
    let gunicorn = cache.expect("there is a home directory").join("gunicorn/bin/gunicorn");
    assert!(gunicorn.is_file(), "{} is missing\nhint: cargo xtask tools", gunicorn.display());
    gunicorn
}

impl Server {
    /// gunicorn on its own port.
    pub(super) fn start(words: &[&str]) -> Self {
        let free = TcpListener::bind("127.0.0.1:0").and_then(|socket| socket.local_addr());
        let address = free.expect("loopback has a free port");
        let mut command = Command::new(gunicorn_program());
        command.args(["--bind", &address.to_string(), "--chdir"]).arg(program("")).args(words);
        command.env("PYTHONDONTWRITEBYTECODE", "1");
        let master = command.stdin(Stdio::null()).stderr(Stdio::null()).spawn().expect("gunicorn can be run");
        Self { master, address }
    }

    /// Its first process, whose children do the work.
    pub(super) fn pid(&self) -> u32 {
        self.master.id()
    }

    /// The pid of the worker that answered.
    pub(super) fn ask(&self) -> Option<u32> {
        let mut stream = TcpStream::connect(self.address).ok()?;
        stream.write_all(b"GET / HTTP/1.0\r\n\r\n").ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        answer.rsplit_once("\r\n\r\n")?.1.parse().ok()
    }

    /// Asks until each of three workers that are not among `others` has answered thirty times.
    fn serve(&self, others: &BTreeSet<u32>) -> BTreeSet<u32> {
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut answers: BTreeMap<u32, u32> = BTreeMap::new();
        while answers.values().filter(|count| **count >= 30).count() < 3 {
            assert!(Instant::now() < deadline, "{answers:?}");
            match self.ask().filter(|pid| !others.contains(pid)) {
                Some(pid) => *answers.entry(pid).or_default() += 1,
                // Not listening yet, or an earlier worker.
                None => std::thread::sleep(Duration::from_millis(20)),
            }
        }
        answers.into_keys().collect()
    }

    fn signal(&self, signal: i32) {
        let pid = i32::try_from(self.master.id()).expect("pids are positive");
        // SAFETY: kill(2) touches no memory; the child has not been waited for, so the pid is its.
        assert_eq!(unsafe { libc::kill(pid, signal) }, 0, "gunicorn has gone");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.signal(libc::SIGTERM);
        let _ended = self.master.wait();
    }
}

/// gunicorn from PyPI, serving: the workers that it starts with, and those that replace them.
#[test]
fn gunicorn() {
    let Some(_live) = live() else { return };
    let running = Profiler::new().arg("--all-python").rate(499).start();
    let server = Server::start(&["--workers", "3", "served:application"]);
    let first = server.serve(&BTreeSet::new());
    server.signal(libc::SIGHUP);
    let second = server.serve(&first);
    running.signal(libc::SIGINT);
    let recording = running.finish();
    let workers: BTreeSet<u32> = first.union(&second).copied().collect();
    assert!(workers.len() >= 6 && first.is_disjoint(&second), "{first:?} {second:?}");
    check_named(&recording, &workers, "application");
    let scripts = recording.report.processes.iter().filter(|process| workers.contains(&process.pid));
    assert!(scripts.map(|process| &process.script).all(|script| script.ends_with("bin/gunicorn")));
}
