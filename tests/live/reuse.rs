//! Reused pids and thread ids: processes that never ran together are never mixed.

use std::collections::{BTreeMap, BTreeSet};
use tachyon_tests::{Interpreter, Profiler, on_each_interpreter, program};

on_each_interpreter!(at_home: one_pid);

const PID: u32 = 7_000;
const PROCESSES: usize = 8;

/// Eight processes with the same pid, with threads of the same ids, in a namespace where the test may choose them.
fn one_pid(interpreter: &Interpreter) {
    let python = interpreter.command().get_program().to_str().expect("ASCII").to_owned();
    let (script, pid, count) = (program("same_pid.py").display().to_string(), PID.to_string(), PROCESSES.to_string());
    let profiler = Profiler::new().rate(499).command(&[&python, "-B", &script, &pid, &count]);
    let recording = profiler.within(&["unshare", "--pid", "--fork", "--mount-proc"]).record();
    assert_eq!(recording.status, 0, "{}", recording.stderr);
    let same: Vec<_> = recording.report.processes.iter().filter(|process| process.pid == PID).collect();
    // A forked child counts, before its `exec`, with the program that follows.
    assert_eq!(same.iter().filter(|process| process.samples > 20).count(), PROCESSES, "{:#?}", recording.report);
    let mut tasks: BTreeMap<u64, BTreeSet<&str>> = BTreeMap::new();
    for sample in &recording.recorded.samples {
        for frame in recording.recorded.frames_of(sample).filter(|frame| frame.function.starts_with("task_")) {
            tasks.entry(sample.thread_id).or_default().insert(&frame.function);
        }
    }
    println!("{}: {tasks:?}", interpreter.name);
    assert!(tasks.values().all(|names| names.len() == 1), "a thread of the profile ran two programs: {tasks:?}");
    let own = |tid: &&u64| **tid & 0xffff_ffff == u64::from(PID);
    assert_eq!(tasks.keys().filter(own).count(), PROCESSES, "main threads: {tasks:?}");
    assert_eq!(tasks.len(), 2 * PROCESSES, "each has a second thread: {tasks:?}");
    let low: BTreeSet<u64> = tasks.keys().map(|tid| tid & 0xffff_ffff).collect();
    assert!(low.len() < tasks.len(), "thread ids were used again: {tasks:?}");
}
