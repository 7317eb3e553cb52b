//! Many short-lived programs: how much of what they ran is named.

use crate::processes::{is_marker, process_of};
use std::collections::BTreeMap;
use std::process::{Child, Stdio};
use tachyon_tests::{Interpreter, Profiler, Recording, live};

/// 50 ms of CPU time, the interpreter's own start included.
const SHORT: &str = "import time\ndef busy():\n    while time.process_time() < 0.05: pass\nbusy()\n";

/// Runs of the timer's program in the processes of one interpreter.
#[derive(Debug, Default)]
struct Runs {
    processes: u64,
    all: u64,
    /// Before the process was looked at. Whether its `_PyRuntime` was initialised is not known for these.
    uninspected: u64,
    /// Before `_PyRuntime` was initialised, or after its end.
    before: u64,
    /// Initialised, but no Python function runs: the interpreter starts or ends. There is nothing to be named.
    without_frames: u64,
    /// The others whose frames all have their names.
    named: u64,
}

impl Runs {
    /// The denominator for the named share, at its worst: as if everything not inspected in time had Python frames.
    fn with_frames(&self) -> u64 {
        self.all - self.before - self.without_frames
    }

    fn add(&mut self, other: &Self) {
        self.processes += other.processes;
        self.all += other.all;
        self.uninspected += other.uninspected;
        self.before += other.before;
        self.without_frames += other.without_frames;
        self.named += other.named;
    }
}

/// Runs by interpreter, of the processes in `pids`.
fn runs(recording: &Recording, pids: &BTreeMap<u32, usize>, interpreters: usize) -> Vec<Runs> {
    let mut runs: Vec<Runs> = (0..interpreters).map(|_| Runs::default()).collect();
    let recorded = &recording.recorded;
    // For each process: samples without a Python frame, and samples fully named.
    let mut seen: BTreeMap<u32, (u64, u64)> = BTreeMap::new();
    for sample in &recorded.samples {
        let mut names = recorded.frames_of(sample).map(|frame| frame.function.as_str()).peekable();
        let unnamed = |name| is_marker(name) || name.starts_with("<unreadable") || name.starts_with("<unknown");
        let (frameless, named) = seen.entry(process_of(recorded, sample)).or_default();
        // The process, and in the place of a stack that there is none.
        if names.peek() == Some(&"<native>") {
            *frameless += 1;
        } else if !names.any(unnamed) {
            *named += 1;
        }
    }
    for process in &recording.report.processes {
        let Some(&which) = pids.get(&process.pid) else { continue };
        let (frameless, named) = seen.remove(&process.pid).unwrap_or_default();
        runs[which].add(&Runs {
            processes: 1,
            all: process.samples + process.uninspected,
            uninspected: process.uninspected,
            before: process.not_initialized,
            // Those from before `_PyRuntime` was initialised have no stack either.
            without_frames: frameless.saturating_sub(process.not_initialized),
            named,
        });
    }
    runs
}

/// A thousand processes, two at a time, shared out over the interpreters. The denominator is every run of the timer's
/// program in them from `exec` to exit, those included that met them before they were inspected.
#[test]
fn thousand_of_50_ms() {
    const PROCESSES: usize = 1_001;
    let Some(_live) = live() else { return };
    let interpreters = Interpreter::at_home();
    let running = Profiler::new().arg("--all-python").rate(999).start();
    let pids = run_by_twos(&interpreters, SHORT, PROCESSES);
    running.signal(libc::SIGINT);
    let recording = running.finish();
    let mut all = Runs::default();
    for (index, mut runs) in runs(&recording, &pids, interpreters.len()).into_iter().enumerate() {
        let name = interpreters[index].name;
        println!("{name}: {runs:?}");
        // One that ended before it could be looked at is counted as not CPython: of its 50 runs none is named. That is
        // the host's worst moment, not the rule.
        let started = pids.values().filter(|which| **which == index).count() as u64;
        // A pid that was used twice is in the report twice.
        let missing = started.saturating_sub(runs.processes);
        assert!(missing * 100 <= started, "{name}: {missing} processes are missing: {:?}", recording.report.refused);
        runs.uninspected += 50 * missing;
        runs.all += 50 * missing;
        let (named, of) = (runs.named, runs.with_frames());
        assert!(named * 100 >= of * 90, "{name}: named {named} of {of} runs with Python frames");
        all.add(&runs);
    }
    let (named, of) = (all.named, all.with_frames());
    println!("together: {all:?}, named {named} of {of}");
    println!("lost {:?}, stops {:?}", recording.report.loss, recording.report.stops);
    // Each judgement takes the worse of what those may have been that were not inspected in time.
    let early = all.before + all.uninspected;
    assert!(named * 100 >= of * 95, "named {named} of {of} runs with Python frames");
    assert!(early * 100 <= all.all * 10, "{early} of {} runs before `_PyRuntime` was initialised", all.all);
}

/// Runs a program this many times, two at a time, with each interpreter in turn. Returns the index of each process's
/// interpreter.
fn run_by_twos(interpreters: &[Interpreter], program: &str, count: usize) -> BTreeMap<u32, usize> {
    let mut pids: BTreeMap<u32, usize> = BTreeMap::new();
    let mut children: Vec<Child> = Vec::new();
    for number in 0..count {
        let which = number % interpreters.len();
        let mut command = interpreters[which].command();
        command.args(["-c", program]).stdin(Stdio::null()).stdout(Stdio::null());
        let child = command.spawn().expect("the interpreter can be run");
        pids.insert(child.id(), which);
        children.push(child);
        if children.len() == 2 {
            assert!(children.remove(0).wait().expect("a child can be waited for").success());
        }
    }
    for mut child in children {
        assert!(child.wait().expect("a child can be waited for").success());
    }
    pids
}
