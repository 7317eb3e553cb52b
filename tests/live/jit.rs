//! CPython's JIT, which is built into Debian's 3.14 and 3.15: stacks have the right functions, and callers the right lines too.
//! The leaf's line inside a trace is not known, and not shown; with native frames such a stack is not called exact.

use tachyon_tests::{Interpreter, Profiler, Target, on_each_interpreter, program};

on_each_interpreter!(on [sid_3_14 sid_3_15]: functions_are_right);
on_each_interpreter!(on [sid_3_14 sid_3_15]: lines_of_traces_are_not_called_exact);

/// In a loop that runs in traces, 7 and 9 of some 1,200 samples were called exact (3.15, 3.14), and those were outside the
/// traces.
fn lines_of_traces_are_not_called_exact(interpreter: &Interpreter) {
    let target = Target::start_in(interpreter, "jit.py", &[], &[("PYTHON_JIT", "1")]);
    let recording = Profiler::of(target.pid()).native().rate(997).cpu_milliseconds(target.pid(), 1_500).record();
    let native = recording.report.native.as_ref().expect("native frames were recorded");
    println!("{}: {native:?}", interpreter.name);
    assert!(native.exact * 20 <= recording.report.stored, "{native:#?}");
    let text = std::fs::read_to_string(program("jit.py")).expect("readable");
    let call = text.lines().position(|line| line.contains("total += square(number)")).expect("it is called") as i32 + 1;
    let recorded = recording.recorded.without_native();
    let (mut right, mut all) = (0, 0);
    for sample in &recorded.samples {
        let frames: Vec<_> = recorded.frames_of(sample).collect();
        if let [square, hot, ..] = &frames[..]
            && (&*square.function, &*hot.function) == ("square", "hot")
        {
            all += 1;
            right += usize::from(hot.place.is_some_and(|place| place[0] == call));
        }
    }
    assert!(all > 20 && right == all, "{right} of {all} callers are at their line");
}

/// Nearly all samples of such a loop showed the line of an earlier instruction, without any sign of it.
fn functions_are_right(interpreter: &Interpreter) {
    let target = Target::start_in(interpreter, "jit.py", &[], &[("PYTHON_JIT", "1")]);
    assert_eq!(target.facts["enabled"], true, "this build has a JIT");
    assert_eq!(target.facts["active"], true, "the JIT has made code of a loop");
    let recording = Profiler::of(target.pid()).rate(997).cpu_milliseconds(target.pid(), 1_500).record();
    let recorded = &recording.recorded;
    let (mut right, mut called) = (0, 0);
    let mut lineless = 0;
    let mut others = None;
    for sample in &recorded.samples {
        let names: Vec<&str> = recorded.frames_of(sample).map(|frame| frame.function.as_str()).collect();
        match names[..] {
            ["hot", "turns", "<module>"] => right += 1,
            ["square", "hot", "turns", "<module>"] => (right, called) = (right + 1, called + 1),
            _ => others = Some(sample.stack),
        }
        let in_loop = names.len() > 2;
        lineless += usize::from(in_loop && recorded.leaf(sample).is_some_and(|leaf| leaf.place.is_none()));
        let callers = recorded.frames_of(sample).skip(1);
        assert!(callers.into_iter().all(|frame| frame.place.is_some()), "{}", recorded.shown(sample.stack));
    }
    let total = recorded.samples.len();
    println!("{}: {right} of {total} are right, {called} of them in the function called", interpreter.name);
    let shown = others.map(|stack| recorded.shown(stack)).unwrap_or_default();
    assert!(total > 500 && f64::from(right) >= 0.99 * total as f64, "{right} of {total}; others:\n{shown}");
    assert!(lineless * 10 > total * 8, "{lineless} of {total} have no line");
    // Without the JIT, which is the default, all have one.
    let target = Target::start_in(interpreter, "jit.py", &[], &[("PYTHON_JIT", "0")]);
    let recording = Profiler::of(target.pid()).rate(997).cpu_milliseconds(target.pid(), 300).record();
    for sample in &recording.recorded.samples {
        let lines = recording.recorded.frames_of(sample).all(|frame| frame.place.is_some());
        assert!(lines, "{}", recording.recorded.shown(sample.stack));
    }
}
