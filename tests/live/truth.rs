//! Programs that record their own truth and then run freely: every Python frame of every sample, with its place, is one that
//! the program listed for that very thread, or the sample says that it is not sure. Recorded as users do, with native frames.
//!
//! Here each interpreter runs several kinds of work in one program, for some seconds. `cargo xtask oracle` sets
//! `TACHYON_ORACLE_SAMPLES`: then each kind is recorded by itself until it has that many samples, and what became of them is
//! written to `TACHYON_ORACLE_RESULTS`.

mod judge;
mod steps;

use judge::{Judged, Line, Truths};
use serde_json::json;
use std::collections::BTreeSet;
use std::io::Write as _;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};
use tachyon::inspect::{ElfCache, Verdict, inspect, self_test};
use tachyon::remote::RemoteProcess;
use tachyon::types::Pid;
use tachyon_tests::{
    Interpreter, Profiler, SharedLibrary, Target, cpu_time_of, on_each_interpreter, program, statistics, with_wheels,
};

on_each_interpreter!(every_stack_of_every_sample);
on_each_interpreter!(of_each_kind: what_is_called_anywhere);
on_each_interpreter!(on [pyenv_3_8 pyenv_3_12 sid_3_15 wheel_3_15t]
    long [pyenv_3_9 pyenv_3_10 pyenv_3_11 debian_3_11 pyenv_3_13 sid_3_14 built_3_13t built_3_14t]: threads_made_in_c);
on_each_interpreter!(on [pyenv_3_12 sid_3_15 built_3_14t]: a_layout_is_tested_while_threads_come_and_go);
on_each_interpreter!(on [pyenv_3_12 sid_3_15] long [pyenv_3_13]: interpreters_of_their_own);
// A minute each, most of it for the program's own trace.
on_each_interpreter!(on [pyenv_3_11]: greenlets);
on_each_interpreter!(on [pyenv_3_8 pyenv_3_11 pyenv_3_13] long [pyenv_3_9 pyenv_3_10 pyenv_3_12]: embedded);
on_each_interpreter!(on [pyenv_3_8 pyenv_3_12 debian_3_11 sid_3_15]
    long [pyenv_3_9 pyenv_3_10 pyenv_3_11 pyenv_3_13 sid_3_14 built_3_13t built_3_14t wheel_3_15t]: who_holds_the_gil);
on_each_interpreter!(of_each_kind: threads_and_their_time, programs_of_one_process);

/// Kinds of work of `programs/truth.py`.
const KINDS: [&str; 12] = [
    "callbacks",
    "generated",
    "generators",
    "exceptions",
    "recursion",
    "tasks",
    "coroutines",
    // Up to 3.11 CPython's own chain of frames is incomplete meanwhile, or has a frame without an evaluator (docs/native.md).
    "throws",
    "objects",
    "nested",
    "sizes",
    "threads",
];

/// Those in which the interpreter calls Python at any point, and what they must be tried with.
const ANYWHERE: [&str; 5] = ["ending", "signals", "monitored", "profiled", "groups"];

/// Those that take long to trace: in the long form only.
const LONG: [&str; 1] = ["limit"];

/// Time that one kind of work may take, however little of the CPUs other programs leave it.
const LONGEST: Duration = Duration::from_secs(900);

/// The samples of a running program as JSON lines, until there are `wanted`.
fn record(target: &Target, wanted: usize, rate: u32, words: &[&str], mut each: impl FnMut(&Line)) -> usize {
    let (begin, mut samples, mut recorded_ms) = (Instant::now(), 0, 0);
    while samples < wanted && begin.elapsed() < LONGEST {
        // At first as if it had a CPU to itself, then as it turned out.
        let pace = if samples == 0 { f64::from(rate) / 1_000.0 } else { samples as f64 / recorded_ms as f64 };
        let milliseconds = ((wanted - samples) as f64 / pace).clamp(500.0, 20_000.0) as u64 + 200;
        let profiler = Profiler::of(target.pid()).native().rate(rate).arg("--format").arg("jsonl");
        let profiler = words.iter().fold(profiler.arg("--interpreter-frames"), |profiler, word| profiler.arg(*word));
        let profiler = profiler.milliseconds(milliseconds);
        let output = profiler.run();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let text = std::fs::read_to_string(profiler.output()).expect("the recording was written");
        for line in text.lines() {
            each(&serde_json::from_str(line).expect("each line is one sample"));
            samples += 1;
        }
        recorded_ms += milliseconds;
    }
    assert!(samples >= wanted, "{samples} samples are fewer than {wanted}");
    samples
}

/// Says what became of the samples of some kinds of work, and asserts that nothing is wrong.
fn conclude(judged: Judged, python: &Interpreter, kinds: &str) {
    let Judged { samples, right, unsure, wrong, .. } = judged;
    let not_sure = unsure.values().sum::<usize>();
    let share = 100.0 * not_sure as f64 / samples.max(1) as f64;
    let called_exact: usize = wrong.values().map(|(count, _)| count).sum();
    println!(
        "{} {kinds}: {right} of {samples} right, {called_exact} wrong, {share:.2} % not sure: {unsure:?}",
        python.name
    );
    if let Some(path) = std::env::var_os("TACHYON_ORACLE_RESULTS") {
        let result = json!({
            "interpreter": python.name, "kind": kinds, "samples": samples, "wrong": called_exact,
            "not_sure": not_sure, "why": unsure,
        });
        let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
        writeln!(file.expect("the file of results can be opened"), "{result}").expect("it can be written");
    }
    let shown: String = wrong.iter().map(|(fault, (count, stack))| format!("{count} x {fault}:\n{stack}")).collect();
    assert!(wrong.is_empty(), "{}: stacks are wrong and called exact:\n{shown}", python.name);
    // A suite that judged nothing would pass. In an interpreter that another one runs, the outer evaluators are that one's, whose
    // frames this thread state does not have: most of these stacks are labelled (docs/native.md). So are those that are deeper than
    // native stacks go, up to 3.10, where each Python frame has several native ones.
    let most_unsure = match kinds {
        "interpreters" => 10,
        "limit" => 50,
        _ => 2,
    };
    assert!(right * most_unsure > samples, "{right} of {samples} are right and sure");
}

/// Judges all samples of the program, whose work has these kinds.
fn judge(target: &Target, python: &Interpreter, kinds: &[&str], words: &[&str]) {
    let truths = Truths::of(&target.facts);
    let mut judged = Judged::new(true);
    let (wanted, rate) = wanted();
    record(target, wanted, rate, words, |line| {
        judged.judge(&truths, line);
    });
    conclude(judged, python, &kinds.join(" "));
}

/// How many samples the long form wants of each kind.
fn long_form() -> Option<usize> {
    let samples = std::env::var("TACHYON_ORACLE_SAMPLES").ok()?;
    Some(samples.parse().expect("TACHYON_ORACLE_SAMPLES is a number"))
}

/// Samples to record, and at which rate.
fn wanted() -> (usize, u32) {
    long_form().map_or((1_500, 1_999), |samples| (samples, 9_973))
}

/// The long form takes longer than programs of tests live.
const LIVES: [(&str, &str); 1] = [("TACHYON_TEST_SECONDS", "1800")];

/// Each of these sets of kinds in the long form, all at once in the short one.
fn judge_kinds(python: &Interpreter, kinds: &[&str], always: &[&str], words: &[&str]) {
    let sets: Vec<&[&str]> = if long_form().is_some() { kinds.chunks(1).collect() } else { vec![kinds] };
    for kinds in sets {
        let with: Vec<&str> = kinds.iter().chain(always).copied().collect();
        let target = Target::start_in(python, "truth.py", &with, &LIVES);
        judge(&target, python, kinds, words);
    }
}

fn every_stack_of_every_sample(python: &Interpreter) {
    judge_kinds(python, &KINDS, &[], &[]);
    if long_form().is_some() {
        judge_kinds(python, &LONG, &[], &[]);
    }
}

/// Finalizers, signal handlers, profile functions, callbacks of `sys.monitoring`: below them is whatever was running.
fn what_is_called_anywhere(python: &Interpreter) {
    judge_kinds(python, &ANYWHERE, &[], &[]);
}

/// Threads that C code has made, which have a thread state while they call Python (`PyGILState_Ensure`); and Python that
/// calls C that calls Python, with the GIL released and taken again in between.
fn threads_made_in_c(python: &Interpreter) {
    let library = SharedLibrary::compile("truth", python);
    let [foreign, again] = ["foreign", "again"].map(|kind| format!("{kind}={}", library.text()));
    if long_form().is_none() {
        return judge_kinds(python, &["foreign", "again"], &[&foreign, &again], &[]);
    }
    judge_kinds(python, &["foreign"], &[&foreign], &[]);
    judge_kinds(python, &["again"], &[&again], &[]);
}

/// 3.15 was refused as if it had another layout when the first look hit a thread state that was being made or freed.
fn a_layout_is_tested_while_threads_come_and_go(python: &Interpreter) {
    let library = SharedLibrary::compile("truth", python);
    let target = Target::start_in(python, "truth.py", &[&format!("foreign={}", library.text())], &LIVES);
    let process = RemoteProcess::open(Pid(target.pid())).expect("it runs");
    let Ok(Verdict::Python(interpreter)) = inspect(&process, &mut ElfCache::new()) else { panic!("it is CPython") };
    for _ in 0..300 {
        self_test(&process, &interpreter).expect("it is its layout");
    }
}

/// Interpreters that are run by a thread each, from 3.12 on with a GIL each.
fn interpreters_of_their_own(python: &Interpreter) {
    let folder = tempfile::tempdir_in(python.root.as_deref().unwrap_or(Path::new("/")).join("tmp")).expect("a folder");
    let inside = Path::new("/tmp").join(folder.path().file_name().expect("it has a name"));
    judge_kinds(python, &["interpreters"], &[&format!("interpreters={}", inside.display())], &[]);
}

/// 1 of 1,936 samples on 3.11 was wrong and called exact: a new greenlet was just entering its first evaluator, and the stack had
/// the Python frames of the greenlet that had started it.
fn greenlets(python: &Interpreter) {
    let version = match python.minor {
        8 => "greenlet==3.1.1",
        9 => "greenlet==3.2.4",
        _ => "greenlet==3.5.6",
    };
    judge_kinds(&with_wheels(python, &[version]), &["greenlets"], &[], &[]);
}

/// A C program that loads CPython's library and runs a script.
fn embedded(python: &Interpreter) {
    let folder = tempfile::tempdir().expect("a folder");
    let host = folder.path().join("host");
    let built = Command::new("cc").arg("-o").arg(&host).arg(program("late_python.c")).arg("-ldl").status();
    assert!(built.is_ok_and(|status| status.success()), "a C compiler is needed, as for building the profiler");
    let home = python.path.parent().and_then(Path::parent).expect("bin lies in the installation");
    let library = home.join("lib").join(format!("libpython3.{}.so.1.0", python.minor));
    let (script, path) = (program("truth.py"), program(""));
    let script = format!(
        "import runpy, sys; sys.path.insert(0, {path:?}); sys.argv = ['truth.py', 'callbacks', 'generators', 'threads']; \
         runpy.run_path({script:?}, run_name='__main__')"
    );
    let mut command = Command::new(&host);
    command.arg("0").arg(&library).arg(&script).env("PYTHONHOME", home).env_remove("PYTHONPATH").envs(LIVES);
    let target = Target::embedded(command.env("PYTHONDONTWRITEBYTECODE", "1"), "truth.py");
    judge(&target, python, &["embedded"], &[]);
}

/// C functions that run with and without the GIL: each of their samples has the right mark.
fn who_holds_the_gil(python: &Interpreter) {
    let library = SharedLibrary::compile("truth", python);
    let target = Target::start_in(python, "gil_truth.py", &[library.text()], &LIVES);
    let (wanted, rate) = wanted();
    // With the GIL and without it: all samples, those that say otherwise, those that say nothing.
    let mut met = [(0, 0, 0); 2];
    record(&target, wanted, rate, &[], |line| {
        let of = |name: &str| line.frames.iter().any(|frame| frame.function.rsplit('!').next() == Some(name));
        for (at, name) in ["with_gil", "without_gil"].into_iter().enumerate().filter(|(_, name)| of(name)) {
            let (all, wrong, unsure) = &mut met[at];
            *all += 1;
            *wrong += usize::from(line.gil == Some(name != "with_gil" || python.free_threaded));
            *unsure += usize::from(line.gil.is_none());
        }
    });
    println!("{} gil: held, released (all, wrong, not sure): {met:?}", python.name);
    for (all, wrong, unsure) in met {
        assert!(all * 10 > wanted && wrong == 0 && unsure * 100 <= all, "{met:?}");
    }
}

/// Each thread's share of the samples is its share of the CPU time that they used, as the kernel counts it.
fn threads_and_their_time(python: &Interpreter) {
    let target = Target::start_in(python, "thread_shares.py", &[], &LIVES);
    let tids: Vec<u32> = serde_json::from_value(target.facts["threads"].clone()).expect("thread ids");
    let (wanted, rate) = (long_form().unwrap_or(1_000), 997);
    let clock_us = || tachyon::types::KtimeNs::now().0 / 1_000;
    let used = || tids.iter().map(|&tid| cpu_time_of(target.pid(), tid)).collect::<Vec<_>>();
    let running = Profiler::of(target.pid()).rate(rate).start();
    let (begin_us, before, deadline) = (clock_us(), used(), Instant::now() + LONGEST);
    let since = |before: &[Duration], now: &[Duration]| {
        before.iter().zip(now).map(|(before, now)| (*now - *before).as_secs_f64()).collect::<Vec<_>>()
    };
    let enough = wanted as f64 / f64::from(rate);
    let (end_us, ran) = loop {
        std::thread::sleep(Duration::from_millis(50));
        let (now_us, ran) = (clock_us(), since(&before, &used()));
        if ran.iter().sum::<f64>() >= enough || Instant::now() > deadline {
            break (now_us, ran);
        }
    };
    running.signal(libc::SIGINT);
    let recording = running.finish();
    let mut counts = vec![0_usize; tids.len()];
    for sample in recording.recorded.samples.iter().filter(|it| (begin_us..end_us).contains(&it.timestamp_us)) {
        if let Some(at) = tids.iter().position(|&tid| u64::from(tid) == sample.thread_id) {
            counts[at] += 1;
        }
    }
    let (total, all): (usize, f64) = (counts.iter().sum(), ran.iter().sum());
    let shares: Vec<_> = counts.iter().zip(&ran).map(|(&count, ran)| (count, ran / all * total as f64)).collect();
    println!("{} shares: {total} samples, (met, expected): {shares:.1?}", python.name);
    assert!(total as f64 > 0.8 * enough * f64::from(rate), "{total} samples");
    // A thread that stays on one CPU for so short a time is sampled more or less often than its share: by the drawn intervals of
    // two.
    let seconds = (end_us - begin_us) as f64 / 1e6;
    let uneven = 1.0 + std::f64::consts::SQRT_2 * statistics::of_drawn_intervals(seconds);
    for (&count, ran) in counts.iter().zip(&ran) {
        let share = ran / all;
        let [low, high] = [1.0 / uneven, uneven].map(|odds| share * odds / (share * odds + 1.0 - share));
        let met = count as f64 / total as f64;
        let within = (low..=high).contains(&met);
        let near = |share| statistics::within_binomial(count, total, share);
        assert!(within || near(low) || near(high), "{shares:?}");
    }
}

/// A process that execs: of each of its programs the samples show that one's functions, and the report has an entry.
///
/// All programs of a process used to be one: its samples had the name and the version of the first one seen.
fn programs_of_one_process(python: &Interpreter) {
    let (count, milliseconds) = match long_form() {
        Some(samples) => (samples / 500, 100),
        None => (4, 150),
    };
    let words = ["0".to_owned(), count.to_string(), milliseconds.to_string()];
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let mut target = Target::start_in(python, "execs.py", &words, &LIVES);
    let running = Profiler::of(target.pid()).rate(4_999).start();
    target.go();
    assert_eq!(target.line(), "done");
    running.signal(libc::SIGINT);
    let recording = running.finish();
    let recorded = &recording.recorded;
    let number = |text: &str, prefix: &str, suffix: &str| -> Option<usize> {
        text.strip_prefix(prefix)?.strip_suffix(suffix)?.parse().ok()
    };
    // For each program: its samples in its own function.
    let mut met = vec![0; count];
    for sample in &recorded.samples {
        let programs: BTreeSet<usize> = recorded
            .frames_of(sample)
            .flat_map(|frame| {
                let function = number(&frame.function, "outer_", "").or_else(|| number(&frame.function, "inner_", ""));
                [function, number(&frame.filename, "program_", ".py")].into_iter().flatten()
            })
            .collect();
        assert!(programs.len() <= 1, "functions of several programs:\n{}", recorded.shown(sample.stack));
        programs.into_iter().for_each(|program| met[program] += 1);
    }
    println!("{} execs: {met:?} samples of each program", python.name);
    assert!(met.iter().all(|&samples| samples > 50), "{met:?}");
    let processes: Vec<_> = recording.report.processes.iter().filter(|it| it.pid == target.pid()).collect();
    assert_eq!(processes.len(), count, "each program has an entry: {processes:#?}");
    for (process, met) in processes.iter().zip(met) {
        // A program that has just begun has no Python frames to name yet.
        let begun = process.samples - process.not_initialized;
        assert!(process.samples >= met && process.named * 10 >= begun * 9, "{process:#?}");
        // Threads' time on the CPU, each with its own start: a tenth at least of what it is sampled for.
        let cpu_s = process.cpu_s.expect("it was measured");
        assert!(statistics::within(process.samples as f64 / 4_999.0, cpu_s, 0.5), "{process:#?}");
    }
}
