//! Recordings in parts: no sample is in two of them or in none, accounts add up, and the recorder can be used as a library.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use tachyon::recording::{Request, Segment, Targets, Totals};
use tachyon::report::Report;
use tachyon::types::Pid;
use tachyon_tests::{Interpreter, Profiler, Recorded, Target, binary, judge, live};

/// CPU time of one step of `numbered.py`; at 999 Hz each is sampled eight times, so that a missing one is a loss and not chance,
/// even if other programs take the CPU.
const STEP_MS: f64 = 8.0;

/// The step that a stack is in.
fn step(functions: impl Iterator<Item = impl AsRef<str>>) -> Option<u64> {
    functions.into_iter().find_map(|name| name.as_ref().strip_prefix("step_")?.parse().ok())
}

fn check(report: &Report) {
    let loss: u64 = report.loss.values().sum();
    assert_eq!(report.ran, report.stored + report.idle + report.filtered + report.not_python + loss, "{report:#?}");
    assert_eq!(report.inconsistent, 0, "{report:#?}");
}

/// Checks that segments are parts of one recording: `whole` is the sum of their accounts.
fn add_up<'a>(reports: impl IntoIterator<Item = &'a Report> + Clone, whole: &Report) {
    let sum = |of: fn(&Report) -> u64| reports.clone().into_iter().map(of).sum::<u64>();
    for (name, of) in [
        ("ran", (|report| report.ran) as fn(&Report) -> u64),
        ("stored", |report| report.stored),
        ("idle", |report| report.idle),
        ("filtered", |report| report.filtered),
        ("not_python", |report| report.not_python),
        ("loss", |report| report.loss.values().sum()),
        ("bpf_run_count", |report| report.cost.bpf_run_count.expect("the tests run as root")),
    ] {
        assert_eq!(sum(of), of(whole), "{name}");
    }
    assert_eq!(whole.cost.bpf_run_count, Some(whole.ran), "the kernel counted other runs");
    for (sequence, report) in (0..).zip(reports) {
        check(report);
        assert_eq!(report.segment.expect("a part says which it is").sequence, sequence);
    }
    check(whole);
}

/// Steps in order of time: each one between the first and the last was sampled, none came back, and only the one that
/// ran at a cut may be in two segments.
fn steps_go_on(segments: &[Vec<u64>]) {
    let last = follow_each_other(segments);
    assert!(last.is_some_and(|last| last > 20), "{last:?}");
}

/// The last step.
fn follow_each_other(segments: &[Vec<u64>]) -> Option<u64> {
    let mut last: Option<u64> = None;
    for (at, steps) in segments.iter().enumerate() {
        for &step in steps {
            if let Some(last) = last {
                // A step in which the machine ran something else may have been missed by every firing; two in a row were
                // lost.
                assert!((last..=last + 2).contains(&step), "segment {at}: step {step} after step {last}");
            }
            last = Some(step);
        }
    }
    last
}

fn files(directory: &Path, extension: &str) -> Vec<PathBuf> {
    // The profiler makes it when it begins.
    let entries = std::fs::read_dir(directory).into_iter().flatten();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.expect("it can be listed").path()).collect();
    paths.retain(|path| path.extension().is_some_and(|it| it == extension));
    paths.sort();
    paths
}

fn report(path: &Path) -> Report {
    serde_json::from_slice(&std::fs::read(path).expect("the account is there")).expect("it is JSON of its schema")
}

/// A wait across a cut has a part in each segment: every thread that only waits has one sample in each period, in every segment
/// and in all of them together.
#[test]
fn a_wait_is_in_every_segment_that_it_lasts_in() {
    const RATE: f64 = 200.0;
    let Some(_live) = live() else { return };
    let target = Target::start(&Interpreter::named("pyenv_3_12"), "wall_naps.py");
    let dir = tempfile::tempdir().expect("a temporary directory can be made");
    let (segments, whole) = (dir.path().join("segments"), dir.path().join("whole.json"));
    let mut command = Command::new(binary());
    command.args(["-p", &target.pid().to_string(), "-F", "200", "-d", "6s", "--off-cpu", "--rotate", "400ms", "-o"]);
    let output = command.arg(&segments).arg("--report").arg(&whole).output().expect("the profiler can be run");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let (profiles, accounts) = (files(&segments, "tach"), files(&segments, "json"));
    let (reports, whole): (Vec<Report>, Report) = (accounts.iter().map(|path| report(path)).collect(), report(&whole));
    assert!(reports.len() >= 4 && profiles.len() == reports.len(), "{profiles:?}");
    let mut all: BTreeMap<u64, u64> = BTreeMap::new();
    for (path, report) in profiles.iter().zip(&reports) {
        check(report);
        let wall = report.wall.as_ref().expect("waits were sampled");
        assert_eq!(wall.ticks_due, wall.stored + wall.loss.values().sum::<u64>(), "{report:#?}");
        let recorded = Recorded::read(path);
        assert_eq!(recorded.samples.len() as u64, report.stored + wall.stored, "{}", path.display());
        let of_forever = |sample: &&_| recorded.frames_of(sample).any(|frame| frame.function == "forever");
        let forever = recorded.samples.iter().filter(of_forever).count() as f64;
        // The main thread too.
        let periods = 2.0 * RATE * report.duration_s;
        assert!((forever - periods).abs() <= 4.0, "{forever} of {periods} in {}", path.display());
        for sample in &recorded.samples {
            *all.entry(sample.thread_id).or_default() += 1;
        }
    }
    let sum = |of: fn(&Report) -> u64| reports.iter().map(of).sum::<u64>();
    let due = |report: &Report| report.wall.as_ref().map_or(0, |wall| wall.ticks_due);
    assert_eq!(sum(due), due(&whole));
    check(&whole);
    let lost = whole.wall.as_ref().map_or(0, |wall| wall.ticks_due - wall.stored);
    let periods = RATE * whole.duration_s;
    println!("{all:?} of {periods}, {lost} lost");
    assert_eq!(all.len(), 9, "{all:?}");
    for (thread, count) in &all {
        // Running takes less than a thousandth of the thread that sleeps for the shortest time.
        assert!(
            (*count as f64 - periods).abs() <= 3.0 + 0.01 * periods + lost as f64,
            "{thread}: {count} of {periods}"
        );
    }
}

#[test]
fn rotated_files_hold_each_sample_once() {
    let Some(_live) = live() else { return };
    let target = Target::start_with(&Interpreter::named("pyenv_3_12"), "numbered.py", &[&STEP_MS.to_string()]);
    let dir = tempfile::tempdir().expect("a temporary directory can be made");
    let (segments, whole) = (dir.path().join("segments"), dir.path().join("whole.json"));
    let mut command = Command::new(binary());
    command.args(["-p", &target.pid().to_string(), "-F", "999", "-d", "3s", "--rotate", "250ms", "--no-native", "-o"]);
    let output = command.arg(&segments).arg("--report").arg(&whole).output().expect("the profiler can be run");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));

    let (profiles, accounts) = (files(&segments, "tach"), files(&segments, "json"));
    assert!(profiles.len() >= 4 && profiles.len() == accounts.len(), "{profiles:?} {accounts:?}");
    let (reports, whole): (Vec<Report>, Report) = (accounts.iter().map(|path| report(path)).collect(), report(&whole));
    add_up(&reports, &whole);
    assert_eq!(whole.segments, Some(reports.len() as u64));

    let mut steps = Vec::new();
    let mut last_us = 0;
    for (path, report) in profiles.iter().zip(&reports) {
        let recorded = Recorded::read(path);
        judge::agrees(path, &recorded);
        assert_eq!(recorded.samples.len() as u64, report.stored, "{}", path.display());
        for sample in &recorded.samples {
            assert!(sample.timestamp_us > last_us, "{}: time goes backwards", path.display());
            last_us = sample.timestamp_us;
        }
        let met = |sample| step(recorded.frames_of(sample).map(|frame| &frame.function));
        steps.push(recorded.samples.iter().filter_map(met).collect());
        let segment = report.segment.expect("a part says when it was");
        assert!((segment.end_unix - segment.start_unix - report.duration_s).abs() < 0.05, "{report:#?}");
    }
    steps_go_on(&steps);
}

#[test]
fn a_bound_of_bytes_keeps_the_newest() {
    let Some(_live) = live() else { return };
    let target = Target::start(&Interpreter::named("pyenv_3_12"), "spin.py");
    let dir = tempfile::tempdir().expect("a temporary directory can be made");
    let mut command = Command::new(binary());
    command.args([
        "-p",
        &target.pid().to_string(),
        "-d",
        "2s",
        "--rotate",
        "200ms",
        "--keep",
        "12KB",
        "--no-native",
        "-o",
    ]);
    let output = command.arg(dir.path()).output().expect("the profiler can be run");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && stderr.contains("old ones removed"), "{stderr}");
    let profiles = files(dir.path(), "tach");
    let bytes: u64 = files(dir.path(), "json").iter().chain(&profiles).map(|path| path.metadata().unwrap().len()).sum();
    assert!(bytes <= 12_000 || profiles.len() == 1, "{bytes} bytes: {profiles:?}");
    assert!(!profiles[0].to_string_lossy().ends_with("-000000.tach"), "{profiles:?}");
}

/// Kills of one run of the test; `TACHYON_KILLS` asks for more.
const KILLS: usize = 5;

/// A killed recorder leaves finished segments, and one that `recover` makes readable: from the first to the last sample that
/// is in any of them, none is missing and none is there twice.
#[test]
fn a_killed_rotation_loses_what_was_not_yet_written() {
    let Some(_live) = live() else { return };
    let python = Interpreter::named("pyenv_3_12");
    let kills = std::env::var("TACHYON_KILLS").map_or(KILLS, |kills| kills.parse().expect("TACHYON_KILLS is a number"));
    let (mut finished, mut recovered) = (0, 0);
    for kill in 0..kills {
        let target = Target::start_with(&python, "numbered.py", &[&STEP_MS.to_string()]);
        let segments = tempfile::tempdir().expect("a temporary directory can be made");
        let mut command = Command::new(binary());
        command.args(["-p", &target.pid().to_string(), "-F", "999", "--rotate", "150ms", "--no-native", "-o"]);
        let mut child = command.arg(segments.path()).spawn().expect("the profiler can be run");
        while files(segments.path(), "part").is_empty() {
            assert!(child.try_wait().expect("it is our child").is_none(), "the profiler ended");
            std::thread::sleep(Duration::from_millis(5));
        }
        let moment = Duration::from_micros(fastrand::u64(0..1_500_000));
        std::thread::sleep(moment);
        child.kill().expect("it runs");
        child.wait().expect("it is our child");
        let mut profiles = files(segments.path(), "tach");
        finished += profiles.len();
        for part in files(segments.path(), "part") {
            let good = part.with_extension("").with_extension("recovered.tach");
            let output = Command::new(binary()).arg("recover").arg(&part).arg("-o").arg(&good).output().unwrap();
            assert!(output.status.success(), "after {moment:?}: {}", String::from_utf8_lossy(&output.stderr));
            profiles.push(good);
            recovered += 1;
        }
        profiles.sort();
        let mut steps = Vec::new();
        let mut last_us = 0;
        for path in &profiles {
            let recorded = Recorded::read(path);
            if kill < KILLS {
                judge::agrees(path, &recorded);
            }
            for sample in &recorded.samples {
                assert!(sample.timestamp_us > last_us, "after {moment:?}, {}: time goes backwards", path.display());
                last_us = sample.timestamp_us;
            }
            let met = |sample| step(recorded.frames_of(sample).map(|frame| &frame.function));
            steps.push(recorded.samples.iter().filter_map(met).collect::<Vec<u64>>());
        }
        follow_each_other(&steps);
    }
    println!("{kills} kills: {finished} segments were finished, {recovered} recovered");
    // One kill in ten comes before the first cut.
    assert!(finished > 0 && recovered > 0, "{finished} finished, {recovered} recovered");
}

fn steps_of(segment: &Segment) -> BTreeMap<u64, u64> {
    let mut steps = BTreeMap::new();
    for stack in &segment.stacks {
        let names =
            stack.frames.iter().map(|&frame| segment.profile.strings.get(segment.profile.frames.get(frame).function));
        if let Some(step) = step(names) {
            *steps.entry(step).or_default() += stack.samples;
        }
    }
    steps
}

/// Two recorders in this very process, at different rates, each cut at its own times: neither disturbs the other, nor what
/// this process may do.
#[test]
fn two_recorders_in_one_process() {
    let Some(_live) = live() else { return };
    let python = Interpreter::named("pyenv_3_12");
    let targets = [(); 2].map(|()| Target::start_with(&python, "numbered.py", &[&STEP_MS.to_string()]));
    let limits = || std::fs::read_to_string("/proc/self/limits").expect("this process has limits");
    let rights = || {
        let status = std::fs::read_to_string("/proc/thread-self/status").expect("this thread has a status");
        // How many signals are queued (SigQ) is counted for all processes of a user.
        let theirs = |line: &&str| line.starts_with("Cap") || (line.starts_with("Sig") && !line.starts_with("SigQ"));
        status.lines().filter(theirs).collect::<String>()
    };
    let before = (limits(), rights());
    let mut recorders: Vec<_> = targets
        .iter()
        .zip([1000, 2000])
        .map(|(target, interval_us)| {
            let targets = Targets::Pids(vec![Pid(target.pid())]);
            let request = Request { native: None, ..Request::new(targets, Duration::from_micros(interval_us)) };
            let running = request.open().expect("this machine can profile").start().expect("the kernel agrees");
            (running, Totals::new(), Vec::new(), Vec::new())
        })
        .collect();
    assert_eq!((limits(), rights()), before, "nothing of the caller's is changed");
    for turn in 0..6 {
        std::thread::sleep(Duration::from_millis(150));
        for (at, (running, totals, reports, steps)) in recorders.iter_mut().enumerate() {
            if turn % (at + 1) == 0 {
                let segment = running.cut().expect("it runs");
                totals.add(&segment);
                steps.push(steps_of(&segment).into_keys().collect::<Vec<_>>());
                reports.push(segment.report);
            }
            assert_eq!(running.status().expect("it runs").over, None);
        }
    }
    for ((running, mut totals, mut reports, mut steps), target) in recorders.into_iter().zip(&targets) {
        let last = running.finish().expect("it runs");
        assert!(
            last.profile.processes.iter().all(|process| process.pid == target.pid()),
            "{:?}",
            last.profile.processes
        );
        let counted: u64 = last.stacks.iter().map(|stack| stack.samples).sum();
        assert_eq!(counted, last.report.stored);
        totals.add(&last);
        steps.push(steps_of(&last).into_keys().collect());
        reports.push(last.report);
        add_up(&reports, &totals.report());
        steps_go_on(&steps);
        let of_steps = totals.hottest_functions().iter().filter(|hot| hot.function.starts_with("step_")).count();
        assert!(of_steps > 20, "{:?}", totals.hottest_functions());
    }
    assert_eq!((limits(), rights()), before);
}

/// A dropped recorder leaves no thread behind.
#[test]
fn a_dropped_recorder_ends() {
    let Some(_live) = live() else { return };
    let target = Target::start(&Interpreter::named("pyenv_3_12"), "spin.py");
    let threads = || std::fs::read_dir("/proc/self/task").expect("this process has threads").count();
    let before = threads();
    let request = Request::new(Targets::Pids(vec![Pid(target.pid())]), Duration::from_millis(1));
    let running = request.open().expect("this machine can profile").start().expect("the kernel agrees");
    assert!(threads() > before);
    drop(running);
    assert_eq!(threads(), before);
}

/// A recording that nothing ends early is one segment, whose account is that of the whole.
#[test]
fn an_uncut_recording_is_one_segment() {
    let Some(_live) = live() else { return };
    let target = Target::start(&Interpreter::named("pyenv_3_12"), "spin.py");
    let recording = Profiler::of(target.pid()).milliseconds(300).record();
    assert_eq!((recording.report.segments, recording.report.segment), (Some(1), None));
}
