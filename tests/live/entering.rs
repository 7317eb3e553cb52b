//! A program that does nothing but enter Python from C: no impossible stack, and the windows in which one could be read
//! are counted: that of 3.11 and 3.12, and that of compilers that link a frame before its entry frame is complete.
//!
//! 10^5 samples over all listed interpreters: each takes its part, at the highest rate there is.

use std::collections::{BTreeMap, BTreeSet};
use tachyon_tests::{Interpreter, Place, Profiler, Recorded, Target, live, on_each_interpreter};

on_each_interpreter!(on [pyenv_3_8 pyenv_3_11 pyenv_3_12 debian_3_11 sid_3_15 built_3_14t]
    long [pyenv_3_9 pyenv_3_10 pyenv_3_13 sid_3_14 musl_3_13 built_3_13t wheel_3_15t]: entered_from_c);
on_each_interpreter!(on [pyenv_3_10 pyenv_3_11 pyenv_3_12 sid_3_15] long [debian_3_11 sid_3_14 built_3_14t]: inlined_calls);

/// Samples of all interpreters together.
const SAMPLES: usize = 100_000;
/// Recordings that may be needed when other programs take the CPUs.
const TRIES: usize = 4;
/// What a thread on its way into the evaluator is shown as.
const ENTERING: &str = "<entering evaluator>";

struct Possible {
    filename: String,
    /// There are columns (3.11): a place without one belongs to a frame that has run nothing.
    columns: bool,
    edges: BTreeSet<(String, String)>,
    positions: BTreeMap<String, BTreeSet<Place>>,
}

impl Possible {
    /// What is impossible in a stack, if anything.
    fn fault(&self, recorded: &Recorded, stack: usize) -> Option<String> {
        let frames: Vec<_> = recorded.stacks[stack].iter().map(|&frame| &recorded.frames[frame]).collect();
        // A thread on its way into the evaluator is shown with its callers, if they are known.
        let entering = |frame: &&tachyon_tests::ShownFrame| frame.function == ENTERING && frame.filename == "~";
        let frames = if frames.first().is_some_and(entering) { &frames[1..] } else { &frames[..] };
        if frames.is_empty() {
            return None;
        }
        for frame in frames {
            let places = self.positions.get(&frame.function);
            if frame.filename != self.filename
                || !frame.place.zip(places).is_some_and(|(place, places)| places.contains(&place))
            {
                return Some(format!("{} at {:?} of {}", frame.function, frame.place, frame.filename));
            }
        }
        let calls =
            frames.windows(2).find(|pair| !self.edges.contains(&(pair[1].function.clone(), pair[0].function.clone())));
        if let Some(pair) = calls {
            return Some(format!("{} never calls {}", pair[1].function, pair[0].function));
        }
        // A caller has run something.
        let nowhere = |frame: &&&tachyon_tests::ShownFrame| frame.place.is_some_and(|place| place[2] < 0);
        if let Some(caller) = frames[1..].iter().find(nowhere).filter(|_| self.columns) {
            return Some(format!("{} calls at no place", caller.function));
        }
        let root = frames.last().map(|frame| frame.function.as_str());
        (root != Some("<module>")).then(|| format!("the root is {root:?}"))
    }
}

/// What all recordings of a program gave together.
#[derive(Default)]
struct Taken {
    samples: usize,
    entering: u64,
}

impl Possible {
    fn of(target: &Target, interpreter: &Interpreter) -> Self {
        let fact = |name: &str| target.facts[name].clone();
        Self {
            filename: serde_json::from_value(fact("filename")).expect("the program tells its file"),
            columns: interpreter.minor >= 11,
            edges: serde_json::from_value(fact("edges")).expect("the program tells its calls"),
            positions: serde_json::from_value(fact("positions")).expect("the program tells its places"),
        }
    }
}

/// If native frames are recorded, the native stack leads a thread in the window to its callers' frames.
#[test]
fn callers_are_found_through_the_native_stack() {
    let Some(_live) = live() else { return };
    for name in ["pyenv_3_11", "pyenv_3_12", "debian_3_11"] {
        let interpreter = Interpreter::named(name);
        let target = Target::start(&interpreter, "entered_from_c.py");
        let possible = Possible::of(&target, &interpreter);
        let (mut callers, mut bare) = (0, 0);
        for _ in 0..TRIES {
            let profiler = Profiler::of(target.pid()).native().rate(9_999);
            let recording = profiler.cpu_milliseconds(target.pid(), 1_500).record();
            let recorded = recording.recorded.without_native();
            for (stack, count) in recorded.counts().into_iter().enumerate() {
                if let Some(fault) = possible.fault(&recorded, stack) {
                    panic!("{name}: an impossible stack, {count} x: {fault}\n{}", recorded.shown(stack));
                }
                let frames = &recorded.stacks[stack];
                let entering = frames.first().is_some_and(|&leaf| recorded.frames[leaf].function == ENTERING);
                match (entering, frames.len()) {
                    (true, 2..) => callers += count,
                    (true, _) => bare += count,
                    (false, _) => {}
                }
            }
            if callers >= 20 {
                break;
            }
        }
        println!("{name}: {callers} stacks of callers, {bare} without");
        assert!(callers >= 20, "{name}: {callers} stacks of callers, {bare} without");
    }
}

/// Records a program until there are this many samples; all of their stacks are possible.
fn take(interpreter: &Interpreter, program: &str, milliseconds: u64, wanted: usize) -> Taken {
    let target = Target::start(interpreter, program);
    let possible = Possible::of(&target, interpreter);
    let mut taken = Taken::default();
    for _ in 0..TRIES {
        let recording = Profiler::of(target.pid()).rate(9_999).cpu_milliseconds(target.pid(), milliseconds).record();
        let recorded = &recording.recorded;
        for (stack, count) in recorded.counts().into_iter().enumerate() {
            if let Some(fault) = possible.fault(recorded, stack) {
                panic!("an impossible stack, {count} x: {fault}\n{}", recorded.shown(stack));
            }
        }
        let stops = &recording.report.stops;
        let cut: u64 = stops.iter().filter(|(reason, _)| *reason != "complete").map(|(_, count)| count).sum();
        assert_eq!(cut, recording.stopped("entering_eval"), "no other reason to stop: {stops:#?}");
        taken.samples += recorded.samples.len();
        taken.entering += cut;
        if taken.samples >= wanted {
            break;
        }
    }
    let Taken { samples, entering } = taken;
    println!("{}: {entering} of {samples} samples were entering the evaluator", interpreter.name);
    assert!(samples >= wanted, "{samples} samples are fewer than {wanted}");
    taken
}

fn entered_from_c(interpreter: &Interpreter) {
    let Taken { samples, entering } =
        take(interpreter, "entered_from_c.py", 2_800, SAMPLES.div_ceil(Interpreter::everywhere()));
    if interpreter.may_link_late() {
        assert!((entering as f64) < 0.02 * samples as f64, "{entering} of {samples}");
        return;
    }
    assert_eq!(entering > 0, interpreter.has_entering_window(), "{entering} of {samples}");
    // It is 26 instructions of each call.
    assert!((entering as f64) < 0.1 * samples as f64, "{entering} of {samples}");
}

/// Python that calls Python enters no evaluator: the frame is pushed in place. It may be the current one some
/// instructions before it is linked to its caller.
fn inlined_calls(interpreter: &Interpreter) {
    let _taken = take(interpreter, "inlined_calls.py", 1_200, 5_000);
}
