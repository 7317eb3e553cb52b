//! What a recording costs that has met all there is to meet: it sleeps.

use std::collections::HashMap;
use std::fs;
use std::time::{Duration, Instant};
use tachyon_tests::{Interpreter, Profiler, Target, live};

/// What is new is looked at sooner for so long.
const UNTIL_CALM: Duration = Duration::from_secs(8);
const MEASURED: Duration = Duration::from_secs(6);

/// Wake-ups a second of all threads together. About four are the rule, and five more while other programs of the host start; with a
/// poll for each thing that may happen it was thirty on a machine where nothing else ran, and a hundred beside a build.
const MOST: f64 = 20.0;

/// How often each thread of a process has gone to sleep, by its id, with its name.
fn sleeps(pid: u32) -> HashMap<String, (String, u64)> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("it runs");
    let of = |task: std::io::Result<fs::DirEntry>| {
        let path = task.expect("it runs").path();
        let status = fs::read_to_string(path.join("status")).ok()?;
        let field = |name: &str| Some(status.lines().find_map(|line| line.strip_prefix(name))?.trim().to_owned());
        let switches = field("voluntary_ctxt_switches:")?.parse().expect("a number");
        Some((path.display().to_string(), (field("Name:")?, switches)))
    };
    tasks.filter_map(of).collect()
}

#[test]
fn a_steady_recording_sleeps() {
    let Some(_live) = live() else { return };
    let target = Target::start(&Interpreter::named("pyenv_3_12"), "spin.py");
    // As people record: native frames too, no terminal, no end of its own.
    let running = Profiler::of(target.pid()).native().rate(99).start();
    std::thread::sleep(UNTIL_CALM);
    let (before, begun) = (sleeps(running.pid()), Instant::now());
    std::thread::sleep(MEASURED);
    let (after, seconds) = (sleeps(running.pid()), begun.elapsed().as_secs_f64());
    let since = |(task, (name, count)): (&String, &(String, u64))| {
        (name.clone(), count - before.get(task).map_or(0, |(_, count)| *count))
    };
    let woken: Vec<(String, u64)> = after.iter().map(since).collect();
    let all: u64 = woken.iter().map(|(_, count)| count).sum();
    println!("{all} wake-ups in {seconds:.1} s: {woken:?}");
    assert!(all as f64 <= MOST * seconds, "{all} wake-ups in {seconds:.1} s: {woken:?}");
    running.signal(libc::SIGINT);
    let recording = running.finish();
    assert!(recording.report.stored > 100, "and yet it samples: {:?}", recording.report);
    assert_eq!(recording.report.inconsistent, 0);
}

/// Nobody looks at a recording without a terminal again and again: it is told that its target has ended.
#[test]
fn it_wakes_when_its_target_ends() {
    let Some(_live) = live() else { return };
    let mut target = Target::start(&Interpreter::named("pyenv_3_12"), "spin.py");
    let running = Profiler::of(target.pid()).native().start();
    std::thread::sleep(Duration::from_secs(1));
    target.kill();
    // Without being told it would wait for ever.
    let recording = running.finish();
    assert!(recording.report.stored > 0, "{:?}", recording.report);
    assert_eq!(recording.report.inconsistent, 0);
}
