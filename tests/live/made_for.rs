//! Programs are loaded for the interpreter that a recording begins with; whatever else it meets later is recorded as well.

use crate::greenlets::with_greenlet;
use std::time::{Duration, Instant};
use tachyon_tests::{Interpreter, Profiler, Recording, Running, Target, on_each_interpreter};

on_each_interpreter!(on [pyenv_3_8 pyenv_3_13]: a_process_that_executes_another_version);
on_each_interpreter!(on [pyenv_3_13]: children_need_programs_for_all_versions);
on_each_interpreter!(on [pyenv_3_13]: greenlets_that_come_later);

/// Whether it still has the thread that is to load programs for everything else.
fn is_narrow(running: &Running) -> bool {
    let threads = std::fs::read_dir(format!("/proc/{}/task", running.pid())).expect("it runs");
    let names = threads.filter_map(|thread| std::fs::read_to_string(thread.ok()?.path().join("comm")).ok());
    names.into_iter().any(|name| name == "tachyon-rest\n")
}

/// Records a program until it has ended, and has it become what it becomes meanwhile.
fn record(mut target: Target, profiler: Profiler) -> Recording {
    let running = profiler.rate(499).start();
    std::thread::sleep(Duration::from_millis(700));
    assert!(is_narrow(&running));
    target.tell("go");
    let last = Instant::now() + Duration::from_secs(20);
    while is_narrow(&running) {
        assert!(Instant::now() < last);
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(target.wait().success());
    running.finish()
}

/// How many samples have a frame of this function.
fn with(recording: &Recording, function: &str) -> usize {
    let recorded = &recording.recorded;
    recorded.samples.iter().filter(|sample| recorded.frames_of(sample).any(|frame| frame.function == function)).count()
}

/// Another one than this.
fn other_than(python: &Interpreter) -> String {
    let other = if python.minor == 12 { "pyenv_3_9" } else { "pyenv_3_12" };
    Interpreter::named(other).path.to_str().expect("a plain path").to_owned()
}

/// Of 1.5 s of CPU time at 499 Hz: what was burnt while programs were loaded is lost, and in the account that each recording is checked by.
fn is_most(recording: &Recording) {
    let after = with(recording, "after");
    let uninspected = recording.lost("uninspected");
    println!("{} before, {after} after, {uninspected} not inspected", with(recording, "before"));
    assert!(with(recording, "before") > 100, "{:#?}", recording.report);
    assert!(after > 300, "{:#?}", recording.report);
}

fn a_process_that_executes_another_version(python: &Interpreter) {
    let target = Target::start_with(python, "turns_into.py", &["exec", &other_than(python)]);
    let profiler = Profiler::of(target.pid()).milliseconds(10_000);
    is_most(&record(target, profiler));
}

/// What a child runs is not known before, and it may live for only a moment.
fn children_need_programs_for_all_versions(python: &Interpreter) {
    let target = Target::start(python, "spin.py");
    let running = Profiler::of(target.pid()).milliseconds(1_000).arg("--subprocesses").start();
    std::thread::sleep(Duration::from_millis(500));
    assert!(!is_narrow(&running));
    assert!(running.finish().report.stored > 0);
}

fn greenlets_that_come_later(python: &Interpreter) {
    let (python, path) = with_greenlet(python);
    let environment: Vec<_> = path.iter().map(|path| ("PYTHONPATH", path.as_str())).collect();
    let target = Target::start_in(&python, "turns_into.py", &["greenlet"], &environment);
    let pid = target.pid();
    let recording = record(target, Profiler::of(pid).milliseconds(10_000).arg("--async"));
    is_most(&recording);
    // With --async the parent's frames follow, behind a frame that stands for the greenlet.
    let recorded = &recording.recorded;
    let told = |sample| recorded.frames_of(sample).any(|frame| frame.filename == "<greenlet>");
    let told = recorded.samples.iter().filter(|sample| told(sample)).count();
    println!("{told} samples tell their greenlet");
    // Where greenlet keeps them is looked for a moment after it was mapped, and programs for --async take the verifier longest.
    assert!(told > 50, "{:#?}", recording.report);
}
