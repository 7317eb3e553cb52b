//! Compares stacks of samples with what a program tells about its threads.

use serde::Deserialize;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

/// The mark of an evaluator that has not linked its frame yet.
const ENTERING: &str = "<entering evaluator>";

type Place = [i32; 4];

/// What the program tells about a thread; `programs/truth_trace.py` says what it means.
#[derive(Deserialize)]
struct Told {
    functions: Vec<(String, String, BTreeSet<i32>, i32)>,
    nodes: Vec<(usize, usize, i32, i32, i32, i32)>,
    leaves: Vec<(usize, usize)>,
}

/// The same, for look-ups.
struct Truth {
    functions: HashMap<(String, String), usize>,
    /// For each function: all its lines, and a generator's first.
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

/// A place without columns (before 3.11) has no end either: not every format has one.
fn place([line, end_line, column, end_column]: Place) -> Place {
    [line, if column < 0 { -1 } else { end_line }, column, end_column]
}

/// A line of JSON lines.
#[derive(Deserialize)]
pub(super) struct Line {
    pub(super) tid: u32,
    interpreter: u32,
    pub(super) gil: Option<bool>,
    #[serde(default)]
    merge: String,
    pub(super) frames: Vec<Frame>,
}

#[derive(Clone, PartialEq, Deserialize)]
pub(super) struct Frame {
    pub(super) function: String,
    file: Option<String>,
    line: Option<i32>,
    end_line: Option<i32>,
    column: Option<i32>,
    end_column: Option<i32>,
    kind: String,
}

impl Line {
    /// Its Python frames, leaf first.
    pub(super) fn python(&self) -> impl Iterator<Item = &Frame> {
        self.frames.iter().filter(|frame| frame.kind == "python")
    }
}

impl Frame {
    fn place(&self) -> Place {
        place([self.line, self.end_line, self.column, self.end_column].map(|part| part.unwrap_or(-1)))
    }

    pub(super) fn shown(&self) -> String {
        format!("{} ({}:{:?})", self.function, self.file.as_deref().unwrap_or("~"), self.place())
    }

    /// It has names but no line: the instruction has none, or its line table was not in memory when it was sampled.
    fn is_lineless(&self) -> bool {
        self.kind == "python" && self.line.is_none_or(|line| line < 0)
    }

    /// The function, if the other frame is in it too.
    pub(super) fn same_function(&self, other: &Self) -> bool {
        (&self.function, &self.file) == (&other.function, &other.file)
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

/// What a program tells about all its threads.
pub(super) struct Truths {
    /// By thread and interpreter.
    threads: HashMap<(u32, u32), Truth>,
    /// Threads of C.
    foreign: HashSet<u32>,
    /// Functions that the interpreter may call at any point.
    anywhere: HashSet<String>,
}

impl Truths {
    /// The threads of a program that is ready.
    pub(super) fn of(facts: &Value) -> Self {
        fn fact<T: serde::de::DeserializeOwned>(facts: &Value, name: &str) -> T {
            serde_json::from_value(facts[name].clone()).unwrap_or_else(|error| panic!("{name}: {error}"))
        }
        let threads: HashMap<String, Told> = fact(facts, "threads");
        let thread = |key: String| {
            let (tid, interpreter) = key.split_once('/').unwrap_or((&key, "0"));
            (tid.parse().expect("a number"), interpreter.parse().expect("a number"))
        };
        Self {
            threads: threads.into_iter().map(|(key, told)| (thread(key), told.into())).collect(),
            foreign: fact(facts, "foreign"),
            anywhere: fact(facts, "anywhere"),
        }
    }

    /// What is wrong with the Python frames of a thread, leaf first; `entering`: they are all callers.
    fn fault(&self, truth: &Truth, frames: &[&Frame], entering: bool) -> Option<String> {
        let called = frames.iter().position(|frame| self.anywhere.contains(&frame.function));
        // A function that can be called anywhere is its own root, and its caller may be anywhere.
        let (own, outer) = frames.split_at(called.map_or(frames.len(), |at| at + 1));
        let fault = if entering {
            // What is being entered may be one of those that are called anywhere: then the innermost is where a leaf may be.
            truth.callers(own).err().filter(|_| self.anywhere.is_empty() || truth.fault(own).is_some())
        } else {
            truth.fault(own)
        };
        fault.or_else(|| if outer.is_empty() { None } else { self.fault(truth, outer, false) })
    }
}

/// What became of samples.
pub(super) struct Judged {
    /// Native frames were recorded: then each stack says how sure its order is.
    native: bool,
    pub(super) samples: usize,
    /// Stacks with a Python frame that match the program's.
    pub(super) right: usize,
    /// They say that they are incomplete or unsure: how often, by what they say.
    pub(super) unsure: BTreeMap<String, usize>,
    /// Neither: how often, and an example of each.
    pub(super) wrong: BTreeMap<String, (usize, String)>,
}

/// The verdict on one sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Right,
    /// Its Python frames are those of the callers.
    Callers,
    Unsure,
    Wrong,
}

impl Judged {
    pub(super) fn new(native: bool) -> Self {
        Self { native, samples: 0, right: 0, unsure: BTreeMap::new(), wrong: BTreeMap::new() }
    }

    pub(super) fn judge(&mut self, truths: &Truths, line: &Line) -> Verdict {
        // Markers say where a stack was cut. That of the collector cuts nothing, and above Python frames that of an evaluator
        // that is being entered says that they are all callers.
        let frames: Vec<&Frame> = line.python().collect();
        let entering = |frame: &Frame| frame.function == ENTERING && !frames.is_empty();
        let marker = |frame: &&Frame| {
            frame.kind == "special"
                && frame.function != "<GC>"
                && !frame.function.starts_with("<event: ")
                && !entering(frame)
        };
        self.samples += 1;
        if (self.native && line.merge != "exact") || line.frames.iter().any(|frame| marker(&frame)) {
            let marks = line.frames.iter().filter(marker).map(|frame| frame.function.as_str());
            let words: BTreeSet<&str> = marks.chain([line.merge.as_str()]).collect();
            return self.unsure(words.into_iter().collect::<Vec<_>>().join(", "));
        }
        let callers = line.frames.iter().any(entering);
        let fault = match truths.threads.get(&(line.tid, line.interpreter)) {
            Some(_) if frames.is_empty() => without_python(truths, line),
            Some(truth) => truths.fault(truth, &frames, callers),
            None if frames.is_empty() => None,
            None => Some("a thread that the program does not know runs Python".to_owned()),
        };
        let Some(fault) = fault else {
            self.right += 1;
            return if callers { Verdict::Callers } else { Verdict::Right };
        };
        if frames.iter().any(|frame| frame.is_lineless()) {
            return self.unsure("a frame without a line, exact".to_owned());
        }
        let shown = || line.frames.iter().map(|frame| format!("{} {}\n", frame.kind, frame.shown())).collect();
        self.wrong.entry(fault).or_insert_with(|| (0, shown())).0 += 1;
        Verdict::Wrong
    }

    fn unsure(&mut self, words: String) -> Verdict {
        *self.unsure.entry(words).or_default() += 1;
        Verdict::Unsure
    }
}

/// What is wrong with a thread that runs Python and has no frame, if anything.
///
/// The outermost frame of a greenlet or of a call from C has been taken off, and its only evaluator is about to return. Between
/// two calls a thread of C has none.
fn without_python(truths: &Truths, line: &Line) -> Option<String> {
    let is = |frame: &Frame, name: &str| frame.kind == "native" && frame.function.contains(name);
    let is_at = |name: &str| line.frames.iter().any(|frame| is(frame, name));
    let is_evaluator = |frame: &&Frame| is(frame, "!_PyEval_EvalFrameDefault");
    if !is_at("g_initialstub") && !truths.foreign.contains(&line.tid) {
        return Some("a thread that runs Python has no Python frame".to_owned());
    }
    let first = line.frames.first().is_some_and(|leaf| is_evaluator(&leaf));
    let fits = match line.frames.iter().filter(is_evaluator).count() {
        0 => true,
        1 => first || is_at("_PyEvalFrameClearAndPop") || is_at("_Py_CheckFunctionResult"),
        _ => false,
    };
    (!fits).then(|| "an evaluator without a Python frame".to_owned())
}
