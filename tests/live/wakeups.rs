//! What a recording costs once it has seen everything: it sleeps.

use std::collections::HashMap;
use std::fs;
use std::time::{Duration, Instant};
use tachyon_tests::{Interpreter, Profiler, Target, live};

/// New things are looked at sooner for this long.
const UNTIL_CALM: Duration = Duration::from_secs(8);
const MEASURED: Duration = Duration::from_secs(6);

/// Wake-ups per second of all threads together. Usually about four, and five more while other programs of the host start; with a
/// poll for each thing that may happen it was thirty on an otherwise idle machine, and a hundred beside a build.
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
    // As users record: with native frames, without a terminal or a set end.
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

/// A recording without a terminal does not poll: it is told that its target has ended.
#[test]
fn it_wakes_when_its_target_ends() {
    let Some(_live) = live() else { return };
    let mut target = Target::start(&Interpreter::named("pyenv_3_12"), "spin.py");
    let running = Profiler::of(target.pid()).native().start();
    std::thread::sleep(Duration::from_secs(1));
    target.kill();
    // Otherwise it would wait for ever.
    let recording = running.finish();
    assert!(recording.report.stored > 0, "{:?}", recording.report);
    assert_eq!(recording.report.inconsistent, 0);
}
