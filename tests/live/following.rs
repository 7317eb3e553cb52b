//! Which processes are followed: those already running, those that start by the hundred, those that could not be looked
//! at in time.

use std::collections::BTreeSet;
use std::io::Read as _;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tachyon_tests::{Interpreter, Profiler, Recording, Target, live, on_each_interpreter, program};

on_each_interpreter!(on [pyenv_3_12]: living_children);
on_each_interpreter!(on [pyenv_3_12]: born_during_the_start);
on_each_interpreter!(on [pyenv_3_12]: ends_late);
on_each_interpreter!(on [pyenv_3_12]: never_looked_at);
on_each_interpreter!(on [pyenv_3_12]: a_full_table);

fn pids(recording: &Recording) -> BTreeSet<u32> {
    recording.report.processes.iter().filter(|process| process.samples > 10).map(|process| process.pid).collect()
}

/// Workers that are already running belong to their master: forked by it, and below a shell.
fn living_children(interpreter: &Interpreter) {
    let target = Target::start(interpreter, "busy_children.py");
    let children = target.facts["children"].as_array().expect("it has told them").iter();
    let children: BTreeSet<u32> =
        children.map(|pid| pid.as_u64().and_then(|pid| pid.try_into().ok()).unwrap()).collect();
    assert_eq!(children.len(), 2);
    let recording = Profiler::of(target.pid()).arg("--subprocesses").rate(499).milliseconds(1_000).record();
    assert!(pids(&recording).is_superset(&children), "{children:?}: {:#?}", recording.report);
    assert!(!recording.stderr.contains("add --subprocesses"), "{}", recording.stderr);
}

/// A process forked while the host's processes are looked at, by one whose turn has not come, is known all the same.
fn born_during_the_start(interpreter: &Interpreter) {
    let mut host = Vec::new();
    // Looked at before the one that forks: pids are given out in order.
    for _ in 0..60 {
        let mut command = interpreter.command();
        host.push(command.args(["-S", "-c", "input()"]).stdin(Stdio::piped()).spawn().expect("it runs"));
    }
    let forks = "import os, signal, time\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\nprint(flush=True)\nwhile True:\n    \
                 if not os.fork():\n        while time.process_time() < 0.02: pass\n        os._exit(0)\n    time.sleep(0.02)";
    let mut command = interpreter.command();
    let mut parent = command.args(["-S", "-c", forks]).stdout(Stdio::piped()).spawn().expect("it runs");
    parent.stdout.as_mut().expect("it is a pipe").read_exact(&mut [0]).expect("it tells that it forks");
    let recording = Profiler::new().arg("--all-python").rate(499).milliseconds(1_000).record();
    for child in std::iter::once(&mut parent).chain(&mut host) {
        child.kill().expect("it runs");
        child.wait().expect("a child can be waited for");
    }
    assert!(recording.report.stored > 10, "{:#?}", recording.report);
    assert_eq!(recording.lost("unknown_process"), 0, "{:#?}", recording.report);
}

/// What a process has used is known until it ends, whichever of its threads ends last.
fn ends_late(interpreter: &Interpreter) {
    let dir = tempfile::tempdir().expect("a temporary directory can be made");
    let python = interpreter.command().get_program().to_str().expect("ASCII").to_owned();
    let script = program("ends_late.py").display().to_string();
    for how in ["leader", "together"] {
        let used = dir.path().join(how).display().to_string();
        let recording = Profiler::new().rate(499).command(&[&python, "-B", &script, how, &used]).record();
        assert_eq!(recording.status, 0, "{}", recording.stderr);
        let used: f64 = std::fs::read_to_string(&used).expect("it was written").parse().expect("a number");
        let report = &recording.report;
        let told: f64 = report.processes.iter().filter_map(|process| process.cpu_s).sum();
        println!("{how}: it used {used} s, {told} s are told; {} samples of {:?}", report.stored, report.expected);
        assert!((used - 0.15..used + 0.3).contains(&told), "{how}: {told} of {used} s: {report:#?}");
        assert!(report.expected.is_some_and(|expected| expected as f64 > 0.8 * used * 499.0), "{report:#?}");
    }
}

/// The profiler is stopped while Pythons start, run and end: it cannot know that they were Pythons, so their runs are lost.
fn never_looked_at(interpreter: &Interpreter) {
    let running = Profiler::new().arg("--all-python").rate(499).start();
    running.signal(libc::SIGSTOP);
    let mut missed = 0;
    for _ in 0..3 {
        let mut command = interpreter.command();
        command.args(["-c", "import time\nwhile time.process_time() < 0.4: pass\nprint(time.process_time())"]);
        let output = command.output().expect("it runs");
        let used: f64 = String::from_utf8_lossy(&output.stdout).trim().parse().expect("a number");
        missed += (used * 499.0) as u64;
    }
    running.signal(libc::SIGCONT);
    std::thread::sleep(Duration::from_millis(500));
    running.signal(libc::SIGINT);
    let recording = running.finish();
    let lost = recording.lost("never_inspected");
    println!("{lost} of about {missed} runs are lost by name");
    assert!(lost * 10 > missed * 7, "{missed}: {:#?}", recording.report);
    assert!(recording.stderr.contains("never_inspected"), "{}", recording.stderr);
}

/// More processes at once than there is room for: the user is told, and when they have gone there is room again.
fn a_full_table(interpreter: &Interpreter) {
    let mut target = Target::start(interpreter, "bursts.py");
    let profiler = Profiler::of(target.pid()).arg("--subprocesses").env("TACHYON_MAX_PROCESSES", 64);
    let running = profiler.rate(499).start();
    target.go();
    let workers: BTreeSet<u32> = target.line().split(' ').map(|pid| pid.parse().expect("a pid")).collect();
    running.signal(libc::SIGINT);
    let recording = running.finish();
    assert_eq!(workers.len(), 3);
    assert!(pids(&recording).is_superset(&workers), "{workers:?}: {:#?}", recording.report);
    assert!(recording.stderr.contains("the table of processes is full"), "{}", recording.stderr);
    let told = |note: &String| note.contains("found the table of processes full");
    assert!(recording.report.notes.iter().any(told), "{:#?}", recording.report.notes);
}

/// One program changes its mappings all the time: programs that start beside it are recorded, and the recording ends.
#[test]
fn a_mapping_storm() {
    let Some(_live) = live() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let storm = folder.path().join("storm");
    let built = Command::new("cc").arg("-o").arg(&storm).arg(program("mapping_storm.c")).status();
    assert!(built.is_ok_and(|status| status.success()), "a C compiler is needed, as for building the profiler");
    // Named like a library, which is what is looked at.
    let named = folder.path().join("library.so");
    std::fs::copy(&storm, &named).expect("it can be copied");
    let mut command = Command::new(&storm);
    command.arg(&named).arg("10000");
    let _storm = Target::embedded(&mut command, "mapping_storm.c");
    let running = Profiler::new().arg("--all-python").rate(499).start();
    let mut honest = BTreeSet::new();
    for _ in 0..3 {
        let mut command = Interpreter::named("pyenv_3_12").command();
        command.args(["-c", "import time\nwhile time.process_time() < 0.5: pass"]);
        let mut child = command.spawn().expect("it runs");
        honest.insert(child.id());
        child.wait().expect("a child can be waited for");
    }
    running.signal(libc::SIGINT);
    let asked = Instant::now();
    let recording = running.finish();
    let took = asked.elapsed();
    println!("the end took {took:?}, the profiler {} s of CPU time", recording.report.cost.user_cpu_s);
    assert!(pids(&recording).is_superset(&honest), "{honest:?}: {:#?}", recording.report);
    assert!(took < Duration::from_secs(8), "{took:?}");
}
