//! Known stacks: every sample is exactly one of them, with lines and columns.

use std::collections::BTreeSet;
use tachyon_tests::{Interpreter, Place, Profiler, Target, expect, matrix, on_each_interpreter};

on_each_interpreter!(generators, names);
on_each_interpreter!(of_each_kind: deep_stack, async_tasks, eight_threads, recursion);

fn deep_stack(interpreter: &Interpreter) {
    let target = Target::start(interpreter, "deep_stack.py");
    let recording = Profiler::of(target.pid()).rate(1_999).cpu_milliseconds(target.pid(), 750).record();
    let seen = expect::check_stacks(&recording.recorded, &target.facts, 0.99);
    matrix::note(interpreter, "deep_stack", seen.iter().sum(), &recording);
    assert!(recording.report.stored > 1000, "{:#?}", recording.report);

    let hot: BTreeSet<Place> =
        serde_json::from_value(target.facts["hot"].clone()).expect("the program tells its hot places");
    let recorded = &recording.recorded;
    let seen = recorded.samples.iter().filter_map(|sample| recorded.leaf(sample)?.place);
    let seen: BTreeSet<Place> = seen.filter(|place| hot.contains(place)).collect();
    assert_eq!(hot, seen, "each hot place is met");
}

fn generators(interpreter: &Interpreter) {
    let target = Target::start(interpreter, "generators.py");
    let recording = Profiler::of(target.pid()).rate(999).cpu_milliseconds(target.pid(), 750).record();
    let seen = expect::check_stacks(&recording.recorded, &target.facts, 0.99);
    matrix::note(interpreter, "generators", seen.iter().sum(), &recording);
}

fn async_tasks(interpreter: &Interpreter) {
    let target = Target::start(interpreter, "async_tasks.py");
    let recording = Profiler::of(target.pid()).rate(999).cpu_milliseconds(target.pid(), 750).record();
    let seen = expect::check_stacks(&recording.recorded, &target.facts, 0.99);
    matrix::note(interpreter, "async_tasks", seen.iter().sum(), &recording);
}

/// Each of eight threads has its own stack: the thread id of a sample says which.
fn eight_threads(interpreter: &Interpreter) {
    let target = Target::start(interpreter, "eight_threads.py");
    let recording = Profiler::of(target.pid()).rate(1_999).cpu_milliseconds(target.pid(), 750).record();
    let recorded = &recording.recorded;
    let seen = expect::check_stacks(recorded, &target.facts, 0.99);
    assert_eq!(seen.len(), 8);
    matrix::note(interpreter, "eight_threads", seen.iter().sum(), &recording);
    let expected = expect::stacks(&target.facts);
    for sample in &recorded.samples {
        let Some(own) = target.facts["threads"].get(sample.thread_id.to_string()).and_then(serde_json::Value::as_u64)
        else {
            continue;
        };
        for (index, stack) in (0..).zip(&expected) {
            let other = index != own && stack.is(recorded.frames_of(sample), None);
            assert!(!other, "thread {own} has the stack of thread {index}");
        }
    }
}

/// 1,000 frames and the module: CPython's reader takes 256, so the file keeps both ends and says how many it left out.
fn recursion(interpreter: &Interpreter) {
    let target = Target::start(interpreter, "recursion.py");
    let recording = Profiler::of(target.pid()).rate(999).cpu_milliseconds(target.pid(), 400).record();
    let recorded = &recording.recorded;
    let expected = &expect::stacks(&target.facts)[0];
    assert_eq!(expected.callers.len(), 1000);
    let mut right = 0;
    for sample in &recorded.samples {
        let frames: Vec<_> = recorded.frames_of(sample).collect();
        let Some(at) = frames.iter().position(|frame| frame.function.ends_with(" frames omitted>")) else { continue };
        let omitted: usize =
            frames[at].function[1..].split(' ').next().and_then(|count| count.parse().ok()).expect("a number");
        assert_eq!((frames.len(), frames.len() - 1 + omitted), (256, 1001));
        assert_eq!((frames[at].filename.as_str(), frames[at].place), ("~", None));
        assert!(expected.leaf.positions.contains(&frames[0].place.expect("a source line")), "{:?}", frames[0]);
        let exact = |frame: &&tachyon_tests::ShownFrame, caller: &(String, String, i32, i32, i32, i32)| {
            let (function, filename, line, end_line, column, end_column) = caller;
            (&frame.function, &frame.filename, frame.place)
                == (function, filename, Some([*line, *end_line, *column, *end_column]))
        };
        let inner = frames[1..at].iter().zip(&expected.callers).all(|(frame, caller)| exact(frame, caller));
        let outer = frames[at + 1..].iter().rev().zip(expected.callers.iter().rev());
        right += usize::from(inner && outer.into_iter().all(|(frame, caller)| exact(frame, caller)));
    }
    let total = recorded.samples.len();
    assert!(right as f64 >= 0.99 * total as f64 && total > 100, "{right} of {total} samples are right");
}

fn names(interpreter: &Interpreter) {
    let target = Target::start(interpreter, "names.py");
    let recording = Profiler::of(target.pid()).rate(999).cpu_milliseconds(target.pid(), 400).record();
    let seen = expect::check_stacks(&recording.recorded, &target.facts, 0.99);
    matrix::note(interpreter, "names", seen.iter().sum(), &recording);
    let process = &recording.report.processes[0];
    assert!(expect::all_named(process, expect::cut(&recording.report)), "{process:?}");
    assert!(process.python_version.starts_with(&format!("3.{}.", interpreter.minor)), "{process:?}");
}
