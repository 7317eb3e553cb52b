//! A program that knows its own stacks, of Python and of C: recorded stacks equal these, or say that they are incomplete.

use serde::Deserialize;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::File;
use std::path::Path;
use std::time::Duration;
use tachyon::recording::{NativePlan, Request, Targets};
use tachyon::sinks::Sink;
use tachyon::sinks::jsonl::JsonlSink;
use tachyon::types::Pid;
use tachyon_tests::{Frame, Interpreter, Line, Profiler, SharedLibrary, Target, on_each_interpreter, with_wheels};

on_each_interpreter!(on [pyenv_3_8 pyenv_3_12 debian_3_11 sid_3_15] long [pyenv_3_10 pyenv_3_11 pyenv_3_13 sid_3_14]
    and [tail_3_14 standalone_3_14]: every_way_from_python_to_c_and_back);
on_each_interpreter!(on [debian_3_11 sid_3_14] long [pyenv_3_11]: in_many_threads);
on_each_interpreter!(on [pyenv_3_8 debian_3_11 pyenv_3_13] long [sid_3_15]: walked_in_user_space);
on_each_interpreter!(on [pyenv_3_11] long [sid_3_15]: hundreds_deep);
on_each_interpreter!(on [pyenv_3_11] long [pyenv_3_13]: in_greenlets);

/// What the program tells: `programs/mixed_truth.py` says what it means.
#[derive(Debug, Deserialize)]
struct Truth {
    paths: Vec<Vec<Step>>,
    leaves: HashMap<String, Vec<String>>,
    roots: Vec<String>,
    everywhere: Vec<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum StepKind {
    Py,
    C,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Names {
    One(String),
    All(Vec<String>),
}

#[derive(Debug, Deserialize)]
struct Step(StepKind, Names);

/// Whether these C functions, caller first, are these: each element is one function, or any number of an object.
fn is_run(frames: &[&Frame], wanted: &[String]) -> bool {
    let mut frames = frames.iter().peekable();
    for element in wanted {
        let named = element.contains('!');
        let is = |frame: &Frame| if named { frame.shown() == *element } else { frame.object() == element };
        if frames.next_if(|frame| is(frame)).is_none() {
            return false;
        }
        while !named && frames.next_if(|frame| is(frame)).is_some() {}
    }
    frames.next().is_none()
}

impl Truth {
    /// Whether a stack, root first, is the beginning of a path; `Some(true)`: the whole path.
    fn on_path(&self, frames: &[&Frame], path: &[Step]) -> Option<bool> {
        let run = |frames: &[&Frame]| frames.iter().take_while(|frame| frame.is_native()).count();
        let everywhere = |frame: &Frame| self.everywhere.iter().any(|object| object == frame.object());
        let mut at = run(frames);
        // Below the program's own functions are those in which every program begins.
        let begins = |frame: &Frame| everywhere(frame) || self.roots.iter().any(|object| object == frame.object());
        if !frames[..at].iter().all(|frame| begins(frame)) || at == frames.len() {
            return None;
        }
        let mut innermost = "";
        let mut steps = path.iter();
        while at < frames.len() {
            let here = run(&frames[at..]);
            if at + here == frames.len() {
                let may = self.leaves.get(innermost);
                let may = |frame: &Frame| may.is_some_and(|may| may.iter().any(|object| object == frame.object()));
                return frames[at..].iter().all(|frame| everywhere(frame) || may(frame)).then_some(steps.len() == 0);
            }
            match steps.next()? {
                Step(StepKind::Py, Names::One(name)) => {
                    if here > 0 || frames[at].function != *name {
                        return None;
                    }
                    innermost = name;
                    at += 1;
                }
                Step(StepKind::C, Names::All(wanted)) => {
                    if !is_run(&frames[at..at + here], wanted) {
                        return None;
                    }
                    at += here;
                }
                step => panic!("the program tells nonsense: {step:?}"),
            }
        }
        Some(steps.len() == 0)
    }

    /// The paths that a stack is on, and whether it is the whole path.
    fn find<'a>(&'a self, frames: &'a [&Frame]) -> impl Iterator<Item = (usize, bool)> + 'a {
        let paths = self.paths.iter().enumerate();
        paths.filter_map(|(index, path)| Some((index, self.on_path(frames, path)?)))
    }
}

/// Whether they belong to a greenlet that has not called its Python function yet, or has left it: root first.
fn is_greenlet_without_python(frames: &[&Frame]) -> bool {
    let begins = ["g_switch", "g_initialstub", "inner_bootstrap"];
    frames.len() >= begins.len()
        && begins.iter().zip(frames).all(|(name, frame)| frame.function.ends_with(&format!("UserGreenlet::{name}")))
        && frames.iter().all(|frame| frame.is_native())
}

/// The mark of an evaluator that has not linked its frame yet.
const ENTERING: &str = "<entering evaluator>";

/// The program with these arguments, and what it tells.
fn started(python: &Interpreter, arguments: &[&str]) -> (Target, Truth) {
    let library = SharedLibrary::compile("extension", python);
    let target = Target::start_with(python, "mixed_truth.py", &[&[library.text()], arguments].concat());
    target.make_urgent();
    let truth = serde_json::from_value(target.facts.clone()).expect("the program tells its paths");
    (target, truth)
}

/// Samples of it.
fn record(python: &Interpreter, arguments: &[&str], milliseconds: u64) -> (Truth, Vec<Line>) {
    let (target, truth) = started(python, arguments);
    let profiler = Profiler::of(target.pid()).native_whole().rate(1_999).arg("--format").arg("jsonl");
    let profiler = profiler.milliseconds(milliseconds);
    let output = profiler.run();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let lines = lines_of(profiler.output());
    (truth, lines)
}

fn lines_of(path: &Path) -> Vec<Line> {
    let text = std::fs::read_to_string(path).expect("the recording was written");
    let lines: Vec<_> = Line::all(&text).collect();
    assert!(lines.len() > 500, "{} samples", lines.len());
    lines
}

/// What is required of the samples, in thousandths.
struct Limits {
    /// At least this many are right.
    right: usize,
    /// At most this many are wrong but called exact, apart from chance.
    mislabelled: usize,
    /// At most this many states are never seen.
    missing: usize,
}

/// One at a time: the program lists every state.
const STRICT: Limits = Limits { right: 995, mislabelled: 0, missing: 100 };

/// As many stacks as copies are made of, for so many states; where there is none, the stack is cut and says so.
const FEW: Limits = Limits { right: 970, mislabelled: 0, missing: 1_000 };

/// Threads share the CPUs, so fewer states are seen; and between two states there are moments that the program does not
/// list, as when a call's arguments are freed.
const THREADS: Limits = Limits { right: 995, mislabelled: 2, missing: 400 };

/// While one greenlet switches to another, the native stack is one's and the Python stack the other's: the sample is labelled
/// so. As among threads there are moments between two states.
const GREENLETS: Limits = Limits { right: 985, mislabelled: 1, missing: 100 };

fn check(python: &Interpreter, arguments: &[&str], milliseconds: u64, limits: &Limits) {
    judge(python, arguments, &record(python, arguments, milliseconds), limits);
}

fn judge(python: &Interpreter, arguments: &[&str], (truth, lines): &(Truth, Vec<Line>), limits: &Limits) {
    let (mut right, mut total, mut mislabelled, mut seen) = (0_usize, 0_usize, 0_usize, HashSet::new());
    let mut wrong: BTreeMap<String, usize> = BTreeMap::new();
    let mut labels: BTreeMap<String, [usize; 2]> = BTreeMap::new();
    for line in lines {
        let frames: Vec<_> = line.frames.iter().rev().filter(|frame| frame.function != "<GC>").collect();
        total += 1;
        // This mark of an innermost frame that is not linked yet says that the others are its callers.
        let (mark, callers) = frames.split_last().expect("a stack has frames");
        let callers = if line.merge == "exact" && mark.function == ENTERING { callers } else { &frames[..] };
        let found: Vec<_> = truth.find(callers).collect();
        seen.extend(found.iter().filter(|(_, whole)| *whole).map(|(path, _)| *path));
        let is_right = !found.is_empty() || is_greenlet_without_python(&frames);
        right += usize::from(is_right);
        labels.entry(line.merge.clone()).or_default()[usize::from(is_right)] += 1;
        if !is_right {
            mislabelled += usize::from(line.merge == "exact");
            let shown: Vec<_> = frames.iter().map(|frame| frame.shown()).collect();
            *wrong.entry(format!("{}: {}", line.merge, shown.join(" > "))).or_default() += 1;
        }
    }
    println!("{} {arguments:?}: {right} of {total} stacks right; wrong, right by label: {labels:?}", python.name);
    let mut most: Vec<_> = wrong.iter().map(|(stack, count)| (count, stack)).collect();
    most.sort_unstable_by(|one, other| other.cmp(one));
    let shown: Vec<_> = most.iter().take(8).map(|(count, stack)| format!("{count} x {stack}")).collect();
    let shown = shown.join("\n");
    println!("{shown}");
    assert!(right * 1000 >= total * limits.right, "{right} of {total} stacks are right:\n{shown}");
    // As many as are allowed, plus what chance adds: 11 of 5,043 were seen where 10 were allowed.
    let granted = (total * limits.mislabelled) as f64 / 1000.0;
    let most = granted + 3.0 * granted.sqrt();
    assert!(mislabelled as f64 <= most, "{mislabelled} wrong stacks are called exact:\n{shown}");
    let missing = (0..truth.paths.len()).filter(|path| !seen.contains(path));
    let missing: Vec<_> = missing.map(|path| &truth.paths[path]).collect();
    assert!(missing.len() * 1000 <= truth.paths.len() * limits.missing, "never seen: {missing:?}");
}

fn every_way_from_python_to_c_and_back(python: &Interpreter) {
    check(python, &["0"], 2_500, &STRICT);
}

/// The kernel side has room for no unwind table: it sends copies of all stacks, and user space walks those to their ends.
fn walked_in_user_space(python: &Interpreter) {
    let (target, truth) = started(python, &["0"]);
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("out.jsonl");
    let targets = Targets::Pids(vec![Pid(target.pid())]);
    let mut native = NativePlan::new(4096);
    native.keep.roots = true;
    let request = Request { native: Some(native), ..Request::new(targets, Duration::from_millis(5)) };
    let opened = request.open().expect("the object is accepted");
    let sink = |_: &_| Ok(Box::new(JsonlSink::new(File::create(&path)?)) as Box<dyn Sink + Send>);
    let running = opened.start_into(sink).expect("the event attaches");
    std::thread::sleep(Duration::from_secs(5));
    let report = running.finish().expect("it is written").report;
    let lines = lines_of(&path);
    let exact = lines.iter().filter(|line| line.merge == "exact").count();
    let copied = report.native.expect("native frames were recorded").copied;
    let all = lines.len();
    println!("{}: {exact} of {all} stacks are exact, {copied} walked in copies", python.name);
    assert!(exact * 100 >= all * 95 && copied * 100 >= all as u64 * 95, "{exact} of {all}, {copied} in copies");
    judge(python, &["0"], &(truth, lines), &FEW);
}

fn in_many_threads(python: &Interpreter) {
    check(python, &["4"], 2_000, &THREADS);
}

fn in_greenlets(python: &Interpreter) {
    check(&with_wheels(python, &["greenlet==3.5.6"]), &["0", "6", "greenlets"], 2_500, &GREENLETS);
}

/// Native stacks have 512 frames at most: the inner part is right, the outer part has Python's frames only, and the
/// stack says that it was cut.
fn hundreds_deep(python: &Interpreter) {
    const DEPTH: usize = 400;
    let (_, lines) = record(python, &["0", &DEPTH.to_string()], 1_500);
    let mut deep = 0;
    for line in &lines {
        let calls: Vec<_> = line.frames.iter().enumerate().filter(|(_, frame)| frame.function == "deeper").collect();
        if calls.len() < DEPTH / 2 {
            continue;
        }
        deep += 1;
        let shown = || line.frames.iter().map(Frame::shown).collect::<Vec<_>>();
        assert_eq!(line.merge, "repaired", "{:?}", shown());
        let mut runs = calls.windows(2).map(|pair| &line.frames[pair[0].0 + 1..pair[1].0]);
        let whole = |run: &[Frame]| {
            let names: Vec<_> = run.iter().map(|frame| &*frame.function).collect();
            names == ["innermost", "three_deep", "plain"]
        };
        let known = runs.by_ref().take_while(|run| whole(run)).count();
        assert!(known > 10, "{:?}", shown());
        // The path in which the native stack was cut has been taken.
        assert!(runs.all(<[Frame]>::is_empty), "{:?}", shown());
    }
    println!("{}: {deep} of {} stacks have more than {} calls", python.name, lines.len(), DEPTH / 2);
    assert!(deep * 4 > lines.len(), "{deep} of {}", lines.len());
}
