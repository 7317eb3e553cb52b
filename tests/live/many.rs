//! A host with hundreds of interpreters: each is found, and its functions are named.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead as _, BufReader, PipeReader, PipeWriter, Write as _, pipe};
use std::process::{Child, ChildStdin, Command, Stdio};
use tachyon_tests::{Interpreter, Profiler, binary, live};

/// Idle, except for 30 ms of CPU time for each line that it is sent; says when it is ready and when it has worked.
const SERVANT: &str = "import os, sys, time
def work():
    end = time.process_time() + 0.03
    while time.process_time() < end: pass
os.write(1, b'ready\\n')
for line in sys.stdin:
    work()
    os.write(1, b'done\\n')
";

/// Interpreters that end when this is dropped: their standard input is closed.
struct Servants {
    children: Vec<(Child, ChildStdin)>,
    told: BufReader<PipeReader>,
    /// The end that they write to.
    tell: PipeWriter,
}

impl Servants {
    fn none() -> Self {
        let (told, tell) = pipe().expect("a pipe can be made");
        Self { children: Vec::new(), told: BufReader::new(told), tell }
    }

    /// Starts this many more, with each interpreter in turn, and waits until they are ready.
    fn start(&mut self, interpreters: &[Interpreter], count: usize) {
        for number in 0..count {
            let mut command = interpreters[number % interpreters.len()].command();
            let tell = self.tell.try_clone().expect("there are descriptors left");
            command.args(["-S", "-c", SERVANT]).stdin(Stdio::piped()).stdout(tell);
            let mut child = command.spawn().expect("the interpreter can be run");
            let stdin = child.stdin.take().expect("standard input is a pipe");
            self.children.push((child, stdin));
        }
        self.hear("ready", count);
    }

    /// Lets each work, and waits until all have.
    fn work(&mut self) {
        for (_, stdin) in &mut self.children {
            stdin.write_all(b"work\n").expect("it listens");
        }
        self.hear("done", self.children.len());
    }

    fn hear(&mut self, word: &str, times: usize) {
        let mut line = String::new();
        for _ in 0..times {
            line.clear();
            self.told.read_line(&mut line).expect("the pipe can be read");
            assert_eq!(line.trim_end(), word);
        }
    }
}

impl Drop for Servants {
    fn drop(&mut self) {
        for (mut child, stdin) in self.children.drain(..) {
            drop(stdin);
            let _ended = child.wait();
        }
    }
}

/// A line for each build, with at least as many processes as there are; every process in JSON.
fn doctor_tells(interpreters: &[Interpreter], servants: &Servants) {
    let doctor = |words: &[&str]| {
        let output = Command::new(binary()).arg("doctor").args(words).output().expect("the profiler can be run");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("it is text")
    };
    let told = doctor(&[]);
    let counts: Vec<usize> = told.lines().filter_map(processes_of_build).collect();
    assert!(counts.len() >= interpreters.len() && counts.iter().sum::<usize>() >= servants.children.len(), "{told}");
    assert!(!told.lines().any(|line| line.starts_with("ok    pid ")), "processes that are well are counted:\n{told}");
    let json: serde_json::Value = serde_json::from_str(&doctor(&["--json"])).expect("it is JSON");
    let listed = json["interpreters"].as_array().expect("a list").iter();
    let listed: BTreeSet<u64> = listed.filter_map(|one| one["pid"].as_u64()).collect();
    for (child, _) in &servants.children {
        assert!(listed.contains(&child.id().into()), "{} is missing", child.id());
    }
}

/// The number in `ok    CPython 3.12.1: 63 processes, FILE`.
fn processes_of_build(line: &str) -> Option<usize> {
    let (_, rest) = line.strip_prefix("ok    CPython ")?.split_once(": ")?;
    rest.split_once(" process")?.0.parse().ok()
}

/// 500 interpreters that were already there, all idle, then all busy; and 50 that start meanwhile.
#[test]
fn five_hundred_interpreters() {
    let Some(_live) = live() else { return };
    let interpreters = Interpreter::at_home();
    let mut servants = Servants::none();
    servants.start(&interpreters, 500);
    doctor_tells(&interpreters, &servants);
    let running = Profiler::new().arg("--all-python").rate(999).start();
    servants.work();
    servants.start(&interpreters, 50);
    servants.work();
    running.signal(libc::SIGINT);
    let recording = running.finish();
    let (report, recorded) = (&recording.report, &recording.recorded);

    let mut working: BTreeMap<u64, u64> = BTreeMap::new();
    for sample in &recorded.samples {
        if recorded.frames_of(sample).any(|frame| frame.function == "work" && frame.filename == "<string>") {
            // Each has one thread, whose id is the process's.
            *working.entry(sample.thread_id).or_default() += 1;
        }
    }
    for (number, (child, _)) in servants.children.iter().enumerate() {
        let process = report.processes.iter().find(|process| process.pid == child.id());
        let process = process.unwrap_or_else(|| panic!("{} is missing: {:#?}", child.id(), report.refused));
        assert!(!process.python_version.is_empty(), "{process:?}");
        // It usually gets 30 samples each time it works.
        let working = working.get(&u64::from(child.id())).copied().unwrap_or(0);
        assert!(working > if number < 500 { 20 } else { 10 }, "{working} samples at work: {process:?}");
        // Those that were already there have been looked at before the first sample.
        assert!(number >= 500 || process.uninspected == 0, "{process:?}");
        let started = process.samples - process.not_initialized;
        assert!(process.named * 100 >= started * 95, "{process:?} {:?}", report.stops);
    }
    assert_eq!((report.process_events_lost, recording.lost("ring_full")), (0, 0), "{report:#?}");
    println!(
        "{} samples of {} processes, lost {:?}; {} MiB, reader at most {} s late",
        report.stored,
        report.processes.len(),
        report.loss,
        (report.cost.peak_rss_bytes + report.cost.map_bytes) >> 20,
        report.longest_reader_stall_s
    );
}
