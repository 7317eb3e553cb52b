//! Many processes: they start, fork and end while the recording runs.

use std::collections::{BTreeMap, BTreeSet};
use tachyon::report::ProcessReport;
use tachyon_tests::{Interpreter, Profiler, Recorded, Recording, Sample, Target, expect, live, on_each_interpreter};

on_each_interpreter!(at_home: prefork_subprocesses, prefork_all_python);
on_each_interpreter!(on [pyenv_3_8 debian_3_11 sid_3_15] long [pyenv_3_12 pyenv_3_13 built_3_14t]: a_forked_child_is_initialized);

/// The process that a sample's outermost frame names, `comm (pid)`.
pub fn process_of(recorded: &Recorded, sample: &Sample) -> u32 {
    let root = recorded.root(sample).expect("a file of many processes has a root frame");
    assert_eq!((root.filename.as_str(), root.place), ("~", None), "{root:?}");
    let pid = root.function.rsplit_once(" (").and_then(|(_, pid)| pid.strip_suffix(')')?.parse().ok());
    pid.unwrap_or_else(|| panic!("no process in {root:?}"))
}

/// Whether a frame marks where a stack was cut.
pub fn is_marker(function: &str) -> bool {
    function.starts_with("<stack cut: ") || function == "<entering evaluator>"
}

/// Parents of a recording's processes are gone by then, so the stacks tell which one is a worker.
fn check_workers(recording: &Recording, is_ours: impl Fn(u32) -> bool) {
    let recorded = &recording.recorded;
    let (mut right, mut total, mut workers) = (0, 0, BTreeSet::new());
    let mut cut: BTreeMap<u32, u64> = BTreeMap::new();
    for sample in &recorded.samples {
        let pid = process_of(recorded, sample);
        let names: Vec<&str> = recorded.frames_of(sample).map(|frame| frame.function.as_str()).collect();
        if !is_ours(pid) {
            continue;
        }
        let worker = names.contains(&"worker_main");
        total += usize::from(worker || names.len() == 2);
        // Not by `worker` alone: a cut stack may lack that frame.
        *cut.entry(pid).or_default() += u64::from(names.iter().any(|name| is_marker(name)));
        if worker {
            assert_eq!(names[names.len() - 4..names.len() - 1], ["worker_main", "master", "<module>"]);
            assert_eq!(sample.thread_id, u64::from(pid), "a worker has one thread");
            right += usize::from(names.contains(&"handle"));
            workers.insert(pid);
        }
    }
    println!("{} workers, {right} of {total} samples right", workers.len());
    assert!(workers.len() >= 6, "{} workers: {:#?}", workers.len(), recording.report);
    assert!(right as f64 >= 0.99 * total as f64 && total > 100, "{right} of {total}: {:#?}", recording.report.stops);
    // A forked worker has its parent's names: all are named.
    for process in recording.report.processes.iter().filter(|process| workers.contains(&process.pid)) {
        assert!(
            expect::all_named(process, cut.get(&process.pid).copied().unwrap_or(0)) && process.uninspected == 0,
            "{process:?}"
        );
    }
}

fn prefork_subprocesses(interpreter: &Interpreter) {
    let target = Target::start(interpreter, "prefork.py");
    let recording = Profiler::of(target.pid()).rate(499).milliseconds(1_500).arg("--subprocesses").record();
    check_workers(&recording, |_| true);
}

fn prefork_all_python(interpreter: &Interpreter) {
    let target = Target::start(interpreter, "prefork.py");
    let recording = Profiler::new().arg("--all-python").rate(499).milliseconds(1_500).record();
    let own: BTreeSet<u32> = recording
        .recorded
        .samples
        .iter()
        .filter(|sample| recording.recorded.frames_of(sample).any(|frame| frame.filename.ends_with("prefork.py")))
        .map(|sample| process_of(&recording.recorded, sample))
        .collect();
    check_workers(&recording, |pid| own.contains(&pid));
    drop(target);
}

/// After a fork, a page that either process writes to for the first time cannot be read while the kernel copies it: some samples
/// of a thousand children find `_PyRuntime` so. These are cut, and do not say that the runtime has not begun.
fn a_forked_child_is_initialized(interpreter: &Interpreter) {
    let mut target = Target::start(interpreter, "forks.py");
    let running = Profiler::of(target.pid()).rate(4_999).arg("--subprocesses").start();
    target.go();
    assert_eq!(target.line(), "done");
    running.signal(libc::SIGINT);
    let report = running.finish().report;
    let sum = |of: fn(&ProcessReport) -> u64| report.processes.iter().map(of).sum::<u64>();
    println!(
        "{}: {} processes, {} samples: {:?}",
        interpreter.name,
        report.processes.len(),
        sum(|of| of.samples),
        report.stops
    );
    assert!(report.processes.len() > 100 && sum(|of| of.samples) > 1_000, "{:#?}", report.stops);
    assert_eq!(sum(|of| of.not_initialized), 0, "{:#?}", report.stops);
}

/// A program that was not CPython starts one, whose executable has a fixed address and was seen before: the kernel side
/// knows it at its `exec`, and user space still learns the rest.
#[test]
fn started_by_another_program() {
    let Some(_live) = live() else { return };
    let interpreter = Interpreter::named("debian_3_11");
    let earlier = Target::start(&interpreter, "spin.py");
    let running = Profiler::new().arg("--all-python").native().rate(499).start();
    // This test is no CPython.
    let later = Target::start(&interpreter, "spin.py");
    std::thread::sleep(std::time::Duration::from_secs(3));
    running.signal(libc::SIGINT);
    let recording = running.finish();
    for pid in [earlier.pid(), later.pid()] {
        let process = recording.report.processes.iter().find(|process| process.pid == pid);
        let process = process.unwrap_or_else(|| panic!("{pid} is missing: {:#?}", recording.report));
        assert!(process.python_version.starts_with("3.11") && process.cpu_s.is_some(), "{process:?}");
        // Native frames begin once its mappings have been read, which takes a while on a busy machine.
        assert!(process.samples > 50 && process.merge_exact > 0, "{process:?}");
    }
}

/// A target that execs something else was CPython all the same: its version stays, in the report and in the file.
#[test]
fn becomes_another_program() {
    let Some(_live) = live() else { return };
    let python = Interpreter::named("debian_3_11").path;
    let script = "import os, time\nwhile time.process_time() < 0.4: pass\nos.execvp('sleep', ['sleep', '0.2'])";
    let profiler = Profiler::new().rate(499).command(&[python.to_str().expect("a plain path"), "-S", "-c", script]);
    let recording = profiler.record();
    let process = recording.report.processes.first().unwrap_or_else(|| panic!("{:#?}", recording.report));
    assert!(process.samples > 50 && process.python_version.starts_with("3.11."), "{process:?}");
    assert_eq!(recording.recorded.header.python_version[..2], [3, 11]);
}
