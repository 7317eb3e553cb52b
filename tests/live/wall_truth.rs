//! Shares and times of waits, compared with what is known from elsewhere: from the program, from its construction, from each
//! switch.
//!
//! `cargo xtask oracle` sets `TACHYON_ORACLE_SAMPLES`: then each takes as long as a bias of a hundredth needs to show.

use serde_json::Value;
use std::time::Duration;
use tachyon_tests::{
    Interpreter, Profiler, Recording, SharedLibrary, Target, live, on_each_interpreter, waited_for_cpu,
};

on_each_interpreter!(on [pyenv_3_8 sid_3_15] long [pyenv_3_9 pyenv_3_10 pyenv_3_11 pyenv_3_12 pyenv_3_13 debian_3_11 sid_3_14]:
    as_long_as_threads_wait_for_the_gil);

/// 4.4 deviations of a normal distribution leave one run in 90,000 outside.
const WIDE: f64 = 4.4;

fn is_long() -> bool {
    std::env::var_os("TACHYON_ORACLE_SAMPLES").is_some()
}

fn waiting(recording: &Recording, cause: &str, function: &str) -> f64 {
    recording.recorded.waiting(cause, &[function]) as f64
}

/// Waits of some tens of microseconds, of which one in hundreds has a sample: together these say how long all of them lasted, which is
/// counted at each switch beside them.
#[test]
fn short_waits() {
    const RATE_HZ: u32 = 499;
    let Some(_live) = live() else { return };
    let target = Target::start(&Interpreter::named("pyenv_3_12"), "wall_echo.py");
    let milliseconds = if is_long() { 30_000 } else { 5_000 };
    let profiler = Profiler::of(target.pid()).rate(RATE_HZ).milliseconds(milliseconds);
    let recording = profiler.arg("--wall").arg("--subprocesses").record();
    let report = &recording.report;
    let times = || report.processes.iter().filter_map(|process| process.time.as_ref());
    let waited: f64 = times().map(|time| time.queued_s + time.blocked_s.values().sum::<f64>()).sum();
    let running: f64 = times().map(|time| time.running_s).sum();
    let wall = report.wall.as_ref().expect("waits were sampled");
    let sampled = wall.ticks_due as f64 / f64::from(RATE_HZ);
    let lives = 2.0 * report.duration_s;
    println!("{sampled:.3} s by samples, {waited:.3} s counted, {running:.3} s on a CPU, of {lives:.3} s");
    let share = waited / lives;
    let wide = WIDE * (share * (1.0 - share) / (lives * f64::from(RATE_HZ))).sqrt() / share + 0.01;
    assert!(!is_long() || wide < 0.05, "{wide}: too short to tell");
    assert!((sampled / waited - 1.0).abs() < wide, "{sampled} s by samples, {waited} s counted: {report:#?}");
    assert!(((waited + running) / lives - 1.0).abs() < 0.03, "{waited} s and {running} s of {lives} s: {report:#?}");
}

/// A program in step with the rate, 7 ms of sleep and 3 ms of waiting for a lock: whenever the recording begins, 7 of 10 waits are
/// the sleep.
#[test]
fn each_start_is_as_good_as_any() {
    let Some(_live) = live() else { return };
    let target =
        Target::start_in(&Interpreter::named("pyenv_3_12"), "wall_shares.py", &[], &[("TACHYON_TEST_SECONDS", "600")]);
    let (starts, milliseconds) = if is_long() { (20, 10_000) } else { (4, 1_000) };
    let mut shares = Vec::new();
    let mut all = 0.0;
    for _ in 0..starts {
        let recording = Profiler::of(target.pid()).rate(100).milliseconds(milliseconds).arg("--off-cpu").record();
        let (sleeps, locks) = (waiting(&recording, "sleep", "sleeps"), waiting(&recording, "lock", "locks"));
        let both = sleeps + locks;
        all += both;
        let wide = WIDE * (0.7 * 0.3 / both).sqrt() + 0.01;
        assert!(!is_long() || wide < 0.0755, "{both} samples are too few");
        assert!((sleeps / both - 0.7).abs() < wide, "{sleeps} of {both}");
        shares.push(sleeps / both);
    }
    let mean = shares.iter().sum::<f64>() / f64::from(starts);
    println!("{shares:.3?}: {mean:.4}");
    // Each wait lasts a little longer than it was told, which is more of 3 ms than of 7.
    assert!((mean - 0.7).abs() < WIDE * (0.7 * 0.3 / all).sqrt() + 0.005, "{shares:?}");
}

/// Threads that move from CPU to CPU lose nothing uncounted, and their shares are as right as those of threads that stay.
#[test]
fn threads_that_migrate() {
    let Some(_live) = live() else { return };
    let seconds = if is_long() { 15 } else { 3 };
    // At 2 Hz one CPU may take nearly all stacks, so nearly each tick is drawn alone. At 99 Hz periods become longer, to no more than 128
    // times theirs: at 64 times, half of all waits have no stack.
    for (what, rate_hz, most) in [("stays", 2, 2.0), ("moves", 2, 2.0), ("moves", 99, 128.0)] {
        let mut target = Target::start_with(&Interpreter::named("pyenv_3_12"), "wall_migrating.py", &[what]);
        let running = Profiler::of(target.pid()).rate(rate_hz).arg("--wall").start();
        let before = target.ask();
        std::thread::sleep(Duration::from_secs(seconds));
        let after = target.ask();
        running.signal(libc::SIGINT);
        let recording = running.finish();

        // For the sleep, and for the GIL and a CPU after it.
        let causes = ["sleep", "gil", "cpu"];
        let all = |function| causes.iter().map(|cause| waiting(&recording, cause, function)).sum::<f64>();
        let (long, short) = (all("sleeps_long"), all("sleeps"));
        let [long_s, short_s] = ["long_s", "short_s"].map(|key| passed(&before, &after, key));
        let (share, truth) = (long / (long + short), long_s / (long_s + short_s));
        let wall = recording.report.wall.as_ref().expect("waits were sampled");
        let (due, lost) = (wall.ticks_due as f64, wall.loss.values().sum::<u64>());
        let longer = wall.widened;
        let scatter = 1.0 + (most - 1.0) * longer as f64 / due;
        // What is lost at the end are rather the longer waits.
        let unread = lost as f64 / due * (1.0 - truth);
        let wide = WIDE * (truth * (1.0 - truth) / (long + short) * scatter).sqrt() + 0.0025 + unread;
        println!(
            "{what}, {rate_hz} Hz: {share:.4} of {due} ticks ({wide:.4}), {truth:.4} of the time; {lost} lost, {longer} with a longer period"
        );
        assert!(!is_long() || rate_hz > 2 || wide < 0.021, "{wide}: too short to tell");
        assert!((share - truth).abs() < wide, "{long} and {short} for {long_s} s and {short_s} s: {wall:#?}");
        let lives = 500.0 * f64::from(rate_hz) * recording.report.duration_s;
        assert!((due / lives - 1.0).abs() < 0.03, "{lives}: {wall:#?}");
        // But for the waits that last at the end, of which not all can be read in time, and those whose end this kernel keeps to itself.
        assert_eq!(lost, wall.loss["unread"] + wall.loss["unreported"], "{wall:#?}");
        assert!((lost as f64) < 0.1 * due, "{wall:#?}");
    }
}

/// What a program counted meanwhile.
fn passed(before: &Value, after: &Value, key: &str) -> f64 {
    after[key].as_f64().expect("a number") - before[key].as_f64().expect("likewise")
}

/// What threads themselves measure around `PyEval_RestoreThread`. A thread that has been given the GIL waits for a CPU if others want it.
fn as_long_as_threads_wait_for_the_gil(interpreter: &Interpreter) {
    let library = SharedLibrary::compile("gil_waits", interpreter);
    // Threads, rate and seconds: as many samples as the oracle's 2 points need.
    let turns: &[(u32, u32, u64)] =
        if is_long() { &[(2, 999, 24), (4, 499, 16), (16, 199, 10)] } else { &[(4, 199, 3)] };
    for &(threads, rate_hz, seconds) in turns {
        let words = [library.text(), &threads.to_string()];
        let mut target = Target::start_with(interpreter, "wall_gil_truth.py", &words);
        let pid = target.pid();
        let running = Profiler::of(pid).rate(rate_hz).arg("--wall").start();
        let (before, delay_before) = (target.ask(), waited_for_cpu(pid));
        std::thread::sleep(Duration::from_secs(seconds));
        let (after, delay_after) = (target.ask(), waited_for_cpu(pid));
        running.signal(libc::SIGINT);
        let recording = running.finish();

        let passed = |key| passed(&before, &after, key);
        let truth = passed("waited_s") / passed("now_s") / f64::from(threads);
        let queued = (delay_after - delay_before).as_secs_f64() / passed("now_s") / f64::from(threads);
        let lives = recording.report.duration_s * f64::from(rate_hz) * f64::from(threads);
        let gil = waiting(&recording, "gil", "works") / lives;
        println!(
            "{}, {threads} threads: {gil:.4} for the GIL, {truth:.4} as they measure it; {queued:.4} for a CPU",
            interpreter.name
        );
        // One tick in each period of each thread; they count their way back to a CPU, too.
        let wide = (WIDE * (truth * (1.0 - truth) / lives).sqrt()).max(0.01) + 0.01;
        assert!(!is_long() || wide < 0.025, "{wide}: too short to tell");
        assert!(gil < truth + wide && gil + queued > truth - wide, "{gil} for {truth}: {:#?}", recording.report.wall);
    }
}

/// A thread that only waits for locks does not wait for the GIL.
#[test]
fn locks_are_no_gil() {
    let Some(_live) = live() else { return };
    for interpreter in ["pyenv_3_8", "debian_3_11", "sid_3_15"] {
        let target = Target::start(&Interpreter::named(interpreter), "wall_shares.py");
        let recording = Profiler::of(target.pid()).rate(499).milliseconds(2_000).arg("--off-cpu").record();
        let wall = recording.report.wall.as_ref().expect("waits were sampled");
        let gil = wall.causes.get("gil").map_or(0, |cause| cause.stored);
        println!("{interpreter}: {gil} of {} for the GIL", wall.stored);
        assert!(wall.stored > 1_000 && gil * 200 < wall.stored, "{wall:#?}");
    }
}
