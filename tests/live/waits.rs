//! What is reported about waits beside their causes: which thread ended them, since when they last, and what is used if no
//! kick comes.

use serde_json::Value;
use std::path::Path;
use std::process::Command;
use std::time::Duration;
use tachyon_tests::{Interpreter, Profiler, Recorded, Target, binary, live};

fn has_frame(of: &Value, function: &str) -> bool {
    of["frames"].as_array().is_some_and(|frames| frames.iter().any(|frame| frame["function"] == function))
}

/// A thread that waits for a lock is woken by the one that releases it, at the line that does; how long it was ready to run then
/// is a part of the wait.
#[test]
fn who_ends_a_wait() {
    let Some(_live) = live() else { return };
    let target = Target::start(&Interpreter::named("pyenv_3_12"), "wall_wakers.py");
    let profiler = Profiler::of(target.pid()).rate(199).milliseconds(3_000);
    let profiler = profiler.arg("--off-cpu").arg("--wakers").arg("--format").arg("jsonl");
    let output = profiler.run();
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{told}");
    let text = std::fs::read_to_string(profiler.output()).expect("it was written");
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect("a sample")).collect();
    let waits = |line: &&Value| has_frame(line, "consumes") && line["waiting"]["cause"] == "lock";
    let waits: Vec<&Value> = lines.iter().filter(waits).collect();
    let right = |line: &&&Value| {
        line["waiting"]["waker_tid"] == target.pid()
            && line["waker"]["tid"] == target.pid()
            && has_frame(&line["waker"], "produces")
    };
    let (right, all) = (waits.iter().filter(right).count(), waits.len());
    println!("{right} of {all}");
    assert!(all > 100, "{all} waits");
    assert!(right * 100 >= all * 99, "{right} of {all}: {:#}", waits[0]);
    let queued = |line: &&Value| {
        let us = |key: &str| line["waiting"][key].as_u64().expect("a number");
        us("queued_us") <= us("wait_us")
    };
    assert!(waits.iter().all(queued));
    assert!(told.contains("\nwoken by wall_wakers.py:"), "{told}");
}

/// If nothing else runs, a thread that is woken on another CPU has it once that CPU has woken too: that is part of its wait, and not a wait
/// for a CPU. The kernel, which counts how long each thread is ready to run, says so as well.
#[test]
fn an_idle_cpu_is_not_waited_for() {
    let Some(_live) = live() else { return };
    let target = Target::start(&Interpreter::named("pyenv_3_12"), "wall_echo.py");
    let profiler = || Profiler::of(target.pid()).rate(499).milliseconds(3_000).arg("--off-cpu").arg("--subprocesses");
    for (profiler, is_kernels) in [
        (profiler(), true),
        (profiler().arg("--wakers"), true),
        // If the kernel does not count it, the moment of the wake-up is taken, which is earlier.
        (profiler().env("TACHYON_WAIT_DELAYS", "hook"), false),
    ] {
        let recording = profiler.record();
        let wall = recording.report.wall.as_ref().expect("waits were sampled");
        let for_a_cpu = wall.causes.get("cpu").map_or(0, |cause| cause.stored) as f64 / wall.stored as f64;
        let times = recording.report.processes.iter().filter_map(|process| process.time.as_ref());
        let (queued, blocked) = times.fold((0.0, 0.0), |(queued, blocked), time| {
            (queued + time.queued_s, blocked + time.blocked_s.values().sum::<f64>())
        });
        let kernels = queued / (queued + blocked);
        println!("{for_a_cpu:.3} of {} ticks for a CPU; {kernels:.3} as the kernel counts it", wall.stored);
        assert!(wall.stored > 500, "{wall:#?}");
        let wide = 4.4 * (kernels * (1.0 - kernels) / wall.stored as f64).sqrt() + 0.03;
        if is_kernels {
            assert!((for_a_cpu - kernels).abs() < wide, "{for_a_cpu} or {kernels}: {wall:#?}");
        } else {
            assert!(for_a_cpu > 0.0, "the hook saw no wake-up: {wall:#?}");
        }
    }
}

/// A thread that is asleep before the recording begins and is never woken shows up while the recording lasts: the file of a profiler
/// that is killed has it up to two seconds before.
#[test]
fn a_long_wait_is_told_of_while_it_lasts() {
    let Some(_live) = live() else { return };
    let target = Target::start(&Interpreter::named("pyenv_3_12"), "wall_shares.py");
    let running = Profiler::of(target.pid()).rate(100).arg("--wall").start();
    std::thread::sleep(Duration::from_secs(6));
    let profiler = running.kill();
    let (part, good) = (profiler.output().with_extension("tach.part"), profiler.output().with_file_name("good.tach"));
    let output = Command::new(binary()).arg("recover").args([&part, Path::new("-o"), &good]).output().expect("it runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let recorded = Recorded::read(&good);
    let forever = recorded.waiting("lock", &["forever"]);
    println!("{forever} of 600");
    // If the machine is busy, a look is late.
    assert!((200..=620).contains(&forever), "{forever}");
}

/// If no interrupt comes at a wait's end, some stacks are taken at its beginning, and the shares are the same.
#[test]
fn stacks_taken_where_waits_begin() {
    let Some(_live) = live() else { return };
    let target = Target::start(&Interpreter::named("pyenv_3_12"), "wall_shares.py");
    let profiler = Profiler::of(target.pid()).rate(100).milliseconds(8_000).arg("--wall");
    let recording = profiler.env("TACHYON_WAIT_METHOD", "switch_out").record();
    let wall = recording.report.wall.as_ref().expect("waits were sampled");
    assert_eq!(wall.method, "switch_out");
    assert_eq!(wall.ticks_due, wall.stored + wall.loss.values().sum::<u64>(), "{wall:#?}");
    let recorded = &recording.recorded;
    let (sleeps, locks) = (recorded.waiting("sleep", &["sleeps"]), recorded.waiting("lock", &["locks"]));
    let forever = recorded.waiting("lock", &["forever"]);
    println!("{sleeps} sleep, {locks} lock, {forever} forever");
    let both = (sleeps + locks) as f64;
    let wide = 4.4 * (0.7 * 0.3 / both).sqrt() + 0.04;
    assert!(both > 400.0 && (sleeps as f64 / both - 0.7).abs() < wide, "{sleeps} of {both}: {wall:#?}");
    let periods = recording.report.duration_s * 100.0;
    assert!((forever as f64 - periods).abs() <= 0.02 * periods + 3.0, "{forever} of {periods}");
}

/// `doctor` says how waiting threads would be read here.
#[test]
fn doctor_names_the_method() {
    let Some(_live) = live() else { return };
    let output = Command::new(binary()).args(["doctor", "--verbose"]).output().expect("it runs");
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(told.contains("waiting threads") && told.contains("(kick)"), "{told}");
}

/// `dump` shows since when a thread has been asleep: the same moment each time, for a thread that was not watched when it
/// fell asleep.
#[test]
fn dump_tells_since_when() {
    let Some(_live) = live() else { return };
    let target = Target::start(&Interpreter::named("pyenv_3_12"), "wall_shares.py");
    let since = || {
        let output = Command::new(binary()).args(["dump", "--json", "-p", &target.pid().to_string()]).output();
        let dump: Value = serde_json::from_slice(&output.expect("it runs").stdout).expect("JSON");
        let threads = dump["threads"].as_array().expect("a list");
        let waits = threads.iter().find(|thread| has_frame(thread, "forever")).expect("it waits")["waiting"].clone();
        let us = |key: &str| waits[key].as_u64().unwrap_or_else(|| panic!("{waits:#}"));
        (us("since_us"), us("wait_us"))
    };
    let first = since();
    std::thread::sleep(Duration::from_secs(1));
    let then = since();
    println!("{first:?}, then {then:?}");
    assert!(first.0.abs_diff(then.0) < 100_000, "{first:?}, then {then:?}");
    assert!(then.1 >= first.1 + 900_000, "{first:?}, then {then:?}");
}
