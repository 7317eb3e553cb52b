//! Programs that record their own truth and then run free: every Python frame of every sample, with its place, is one that
//! the program told for that very thread, or the sample says that it is not sure. Recorded as people do, native frames too.
//!
//! Each interpreter runs all kinds of work in one program here, for some seconds. `cargo xtask oracle` sets
//! `TACHYON_ORACLE_SAMPLES`: then each kind is recorded by itself until there are so many samples of it.

use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};
use tachyon_tests::{
    Interpreter, Profiler, SharedLibrary, Target, cpu_time_of, on_each_interpreter, program, statistics, with_wheels,
};

on_each_interpreter!(every_stack_of_every_sample);
on_each_interpreter!(on [pyenv_3_8 pyenv_3_9 pyenv_3_10 pyenv_3_11 pyenv_3_12 pyenv_3_13 debian_3_11 sid_3_14 sid_3_15
    built_3_13t built_3_14t wheel_3_15t]: threads_made_in_c);
// A minute each, of which most is the program's own trace.
on_each_interpreter!(on [pyenv_3_11]: greenlets);
on_each_interpreter!(on [pyenv_3_8 pyenv_3_9 pyenv_3_10 pyenv_3_11 pyenv_3_12 pyenv_3_13]: embedded);
on_each_interpreter!(on [pyenv_3_8 pyenv_3_9 pyenv_3_10 pyenv_3_11 pyenv_3_12 pyenv_3_13 debian_3_11 sid_3_14 sid_3_15
    built_3_13t built_3_14t wheel_3_15t]: who_holds_the_gil);
on_each_interpreter!(threads_and_their_time);
on_each_interpreter!(programs_of_one_process);

/// The kinds of work of `programs/truth.py`.
const KINDS: [&str; 7] = ["callbacks", "generated", "generators", "exceptions", "recursion", "tasks", "threads"];

/// Time that one kind of work may take, however little of the processors other programs leave it.
const LONGEST: Duration = Duration::from_secs(600);

/// The mark of an evaluator that has not linked its frame yet.
const ENTERING: &str = "<entering evaluator>";

type Place = [i32; 4];

/// What the program tells of a thread; `programs/truth.py` says what it means.
#[derive(Deserialize)]
struct Told {
    functions: Vec<(String, String, BTreeSet<i32>, i32)>,
    nodes: Vec<(usize, usize, i32, i32, i32, i32)>,
    leaves: Vec<(usize, usize)>,
}

/// The same, to look up.
struct Truth {
    functions: HashMap<(String, String), usize>,
    /// Of each function: all its lines, and a generator's first.
    lines: Vec<(BTreeSet<i32>, i32)>,
    nodes: HashMap<(usize, usize, Place), usize>,
    leaves: HashSet<(usize, usize)>,
}

impl From<Told> for Truth {
    fn from(told: Told) -> Self {
        let nodes = told.nodes.into_iter().zip(1..);
        let (names, lines): (Vec<_>, Vec<_>) =
            told.functions.into_iter().map(|(name, file, lines, first)| ((name, file), (lines, first))).unzip();
        Self {
            functions: names.into_iter().zip(0..).collect(),
            lines,
            nodes: nodes.map(|((parent, of, a, b, c, d), node)| ((parent, of, place([a, b, c, d])), node)).collect(),
            leaves: told.leaves.into_iter().collect(),
        }
    }
}

/// A place without columns (before 3.11) has no end either: not every format tells one.
fn place([line, end_line, column, end_column]: Place) -> Place {
    [line, if column < 0 { -1 } else { end_line }, column, end_column]
}

/// A line of JSON lines.
#[derive(Deserialize)]
struct Line {
    tid: u32,
    gil: Option<bool>,
    #[serde(default)]
    merge: String,
    frames: Vec<Frame>,
}

#[derive(Deserialize)]
struct Frame {
    function: String,
    file: Option<String>,
    line: Option<i32>,
    end_line: Option<i32>,
    column: Option<i32>,
    end_column: Option<i32>,
    kind: String,
}

impl Frame {
    fn place(&self) -> Place {
        place([self.line, self.end_line, self.column, self.end_column].map(|part| part.unwrap_or(-1)))
    }

    fn shown(&self) -> String {
        format!("{} ({}:{:?})", self.function, self.file.as_deref().unwrap_or("~"), self.place())
    }
}

impl Truth {
    /// What is wrong with these Python frames, leaf first, if anything. (A generator that is being made has been called where
    /// its caller is: then that one is judged as the leaf.)
    fn fault(&self, frames: &[&Frame]) -> Option<String> {
        let making = |leaf: &Frame| {
            let first = self.function(leaf).map_or(0, |function| self.lines[function].1);
            first > 0 && leaf.line == Some(first)
        };
        let (leaf, callers) = frames.split_first()?;
        // asyncio keeps its tasks in a weak set: C code calls this wherever it frees one, which the trace changes.
        let freeing = |leaf: &Frame| {
            let file = leaf.file.as_deref().unwrap_or_default();
            leaf.function.ends_with("_remove") && file.ends_with("/_weakrefset.py")
        };
        if (making(leaf) || freeing(leaf)) && !callers.is_empty() {
            return self.known(frames).and_then(|_| self.known(callers));
        }
        self.known(frames)
    }

    /// The node of these callers, the innermost first, or what is wrong with them.
    fn callers(&self, callers: &[&Frame]) -> Result<usize, String> {
        callers.iter().rev().try_fold(0, |node, caller| {
            let known = self.function(caller).and_then(|function| self.nodes.get(&(node, function, caller.place())));
            known.copied().ok_or_else(|| format!("{} does not call here", caller.shown()))
        })
    }

    fn function(&self, frame: &Frame) -> Option<usize> {
        self.functions.get(&(frame.function.clone(), frame.file.clone().unwrap_or_default())).copied()
    }

    fn known(&self, frames: &[&Frame]) -> Option<String> {
        let (leaf, callers) = frames.split_first()?;
        let node = match self.callers(callers) {
            Ok(node) => node,
            Err(fault) => return Some(fault),
        };
        let Some(function) = self.function(leaf).filter(|&function| self.leaves.contains(&(node, function))) else {
            return Some(format!("{} is not called here", leaf.shown()));
        };
        let line = leaf.line.unwrap_or(-1);
        (!self.lines[function].0.contains(&line)).then(|| format!("{} has no such line", leaf.shown()))
    }
}

/// What became of samples.
#[derive(Default)]
struct Judged {
    samples: usize,
    /// Stacks with a Python frame that are the program's.
    right: usize,
    /// They say that they are not whole or not sure: how often, by what they say.
    unsure: BTreeMap<String, usize>,
    /// Neither: how often, and an example of each.
    wrong: BTreeMap<String, (usize, String)>,
}

impl Judged {
    fn judge(&mut self, truths: &HashMap<u32, Truth>, foreign: &HashSet<u32>, line: &Line) {
        // Markers say where a stack was cut. That of the collector cuts nothing, and above Python frames that of an evaluator
        // that is being entered says that they are all callers.
        let entering =
            |frame: &Frame| frame.function == ENTERING && line.frames.iter().any(|frame| frame.kind == "python");
        let marker = |frame: &Frame| frame.kind == "special" && frame.function != "<GC>" && !entering(frame);
        // A frame whose line table was not in memory when it was met has its names and no line.
        let lineless = |frame: &Frame| frame.kind == "python" && frame.line.is_none_or(|line| line < 0);
        let says = line.merge != "exact" || line.frames.iter().any(|frame| marker(frame) || lineless(frame));
        let python = |frame: &&Frame| frame.kind == "python";
        let frames: Vec<&Frame> = line.frames.iter().filter(python).collect();
        self.samples += 1;
        if says {
            let marks = line.frames.iter().filter(|frame| marker(frame)).map(|frame| frame.function.as_str());
            let lineless = line.frames.iter().any(lineless).then_some("a frame without a line");
            let words: BTreeSet<&str> = marks.chain(lineless).chain([line.merge.as_str()]).collect();
            *self.unsure.entry(words.into_iter().collect::<Vec<_>>().join(", ")).or_default() += 1;
            return;
        }
        let is = |frame: &Frame, name: &str| frame.kind == "native" && frame.function.contains(name);
        let is_at = |name: &str| line.frames.iter().any(|frame| is(frame, name));
        let is_evaluator = |frame: &&Frame| is(frame, "!_PyEval_EvalFrameDefault");
        let fault = match truths.get(&line.tid) {
            // The outermost frame of a greenlet or of a call from C has been taken off, and its only evaluator is about to
            // return. Between two calls a thread of C has none.
            Some(_) if frames.is_empty() && (is_at("g_initialstub") || foreign.contains(&line.tid)) => {
                let first = line.frames.first().is_some_and(|leaf| is_evaluator(&leaf));
                let fits = match line.frames.iter().filter(is_evaluator).count() {
                    0 => true,
                    1 => first || is_at("_PyEvalFrameClearAndPop") || is_at("_Py_CheckFunctionResult"),
                    _ => false,
                };
                (!fits).then(|| "an evaluator without a Python frame".to_owned())
            }
            Some(_) if frames.is_empty() => Some("a thread that runs Python has no Python frame".to_owned()),
            Some(truth) if line.frames.iter().any(entering) => truth.callers(&frames).err(),
            Some(truth) => truth.fault(&frames),
            None if frames.is_empty() => None,
            None => Some("a thread that the program does not know runs Python".to_owned()),
        };
        let Some(fault) = fault else { return self.right += 1 };
        let shown = || line.frames.iter().map(|frame| format!("{} {}\n", frame.kind, frame.shown())).collect();
        self.wrong.entry(fault).or_insert_with(|| (0, shown())).0 += 1;
    }
}

/// The samples of a running program as JSON lines, until there are `wanted`.
fn record(target: &Target, wanted: usize, rate: u32, mut each: impl FnMut(&Line)) -> usize {
    let (begin, mut samples, mut recorded_ms) = (Instant::now(), 0, 0);
    while samples < wanted && begin.elapsed() < LONGEST {
        // At first as if it had a processor for itself, then as it turned out.
        let pace = if samples == 0 { f64::from(rate) / 1_000.0 } else { samples as f64 / recorded_ms as f64 };
        let milliseconds = ((wanted - samples) as f64 / pace).clamp(500.0, 20_000.0) as u64 + 200;
        let profiler = Profiler::of(target.pid()).native().rate(rate).arg("--format").arg("jsonl");
        let profiler = profiler.arg("--interpreter-frames").milliseconds(milliseconds);
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

/// Judges all samples of the program, whose work has these kinds.
fn judge(target: &Target, python: &Interpreter, kinds: &[&str], wanted: usize, rate: u32) {
    let told: HashMap<String, Told> =
        serde_json::from_value(target.facts["threads"].clone()).expect("the program tells its stacks");
    let truths: HashMap<u32, Truth> =
        told.into_iter().map(|(tid, told)| (tid.parse().expect("a number"), told.into())).collect();
    let foreign: HashSet<u32> = serde_json::from_value(target.facts["foreign"].clone()).expect("thread ids");
    let mut judged = Judged::default();
    record(target, wanted, rate, |line| judged.judge(&truths, &foreign, line));
    let Judged { samples, right, unsure, wrong } = judged;
    let share = 100.0 * unsure.values().sum::<usize>() as f64 / samples.max(1) as f64;
    let called_exact: usize = wrong.values().map(|(count, _)| count).sum();
    println!(
        "{} {kinds:?}: {right} of {samples} right, {called_exact} wrong, {share:.2} % not sure: {unsure:?}",
        python.name
    );
    let shown: String = wrong.iter().map(|(fault, (count, stack))| format!("{count} x {fault}:\n{stack}")).collect();
    assert!(wrong.is_empty(), "{}: stacks are wrong and called exact:\n{shown}", python.name);
    // A suite that judged nothing would pass.
    assert!(right * 2 > samples, "{right} of {samples} are right and sure");
}

/// How many samples the long form wants of each kind.
fn long_form() -> Option<usize> {
    let samples = std::env::var("TACHYON_ORACLE_SAMPLES").ok()?;
    Some(samples.parse().expect("TACHYON_ORACLE_SAMPLES is a number"))
}

/// Samples to record, and at which rate.
fn wanted() -> (usize, u32) {
    long_form().map_or((1_500, 1_999), |samples| (samples, 4_999))
}

/// The long form takes longer than programs of tests live.
const LIVES: [(&str, &str); 1] = [("TACHYON_TEST_SECONDS", "1800")];

/// Each of these sets of kinds in the long form, all at once in the short one.
fn judge_kinds(python: &Interpreter, kinds: &[&str], always: &[&str]) {
    let (wanted, rate) = wanted();
    let sets: Vec<&[&str]> = if long_form().is_some() { kinds.chunks(1).collect() } else { vec![kinds] };
    for kinds in sets {
        let words: Vec<&str> = kinds.iter().chain(always).copied().collect();
        let target = Target::start_in(python, "truth.py", &words, &LIVES);
        judge(&target, python, kinds, wanted, rate);
    }
}

fn every_stack_of_every_sample(python: &Interpreter) {
    judge_kinds(python, &KINDS, &[]);
}

/// Threads that C code has made, and which have a thread state while they call Python (`PyGILState_Ensure`).
fn threads_made_in_c(python: &Interpreter) {
    let library = SharedLibrary::compile("truth", python);
    judge_kinds(python, &["foreign"], &[&format!("foreign={}", library.text())]);
}

/// 1 of 1,936 samples on 3.11 was wrong and called exact: a new greenlet was just entering its first evaluator, and the stack had
/// the Python frames of the greenlet that had started it.
fn greenlets(python: &Interpreter) {
    let version = match python.minor {
        8 => "greenlet==3.1.1",
        9 => "greenlet==3.2.4",
        _ => "greenlet==3.5.6",
    };
    judge_kinds(&with_wheels(python, &[version]), &["greenlets"], &[]);
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
    let (wanted, rate) = wanted();
    judge(&target, python, &["embedded"], wanted, rate);
}

/// C functions that run with and without the GIL: in each sample of one the mark is what it has to be.
fn who_holds_the_gil(python: &Interpreter) {
    let library = SharedLibrary::compile("truth", python);
    let target = Target::start_in(python, "gil_truth.py", &[library.text()], &LIVES);
    let (wanted, rate) = wanted();
    // With the GIL and without it: all samples, those that say otherwise, those that say nothing.
    let mut met = [(0, 0, 0); 2];
    record(&target, wanted, rate, |line| {
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
    for (&count, ran) in counts.iter().zip(&ran) {
        assert!(statistics::within_binomial(count, total, ran / all), "{shares:?}");
    }
}

/// A process that execs: of each of its programs the samples show that one's functions, and the report has an entry.
///
/// All programs of a process were one: its samples had the name and the version of the one that was met first.
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
    // Of each program: its samples in its own function.
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
        assert!(process.samples >= met && process.named * 10 >= process.samples * 9, "{process:#?}");
        // Threads' time on the processor, each with its own start: a tenth of what it is sampled for at least.
        let cpu_s = process.cpu_s.expect("it was measured");
        assert!(statistics::within(process.samples as f64 / 4_999.0, cpu_s, 0.5), "{process:#?}");
    }
}
