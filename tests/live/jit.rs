//! CPython's JIT, which Debian's 3.14 and 3.15 have built in: stacks are right by function. Lines inside of a trace are not
//! judged.

use tachyon_tests::{Interpreter, Profiler, Target, on_each_interpreter};

on_each_interpreter!(on [sid_3_14 sid_3_15]: functions_are_right);

fn functions_are_right(interpreter: &Interpreter) {
    let target = Target::start_in(interpreter, "jit.py", &[], &[("PYTHON_JIT", "1")]);
    assert_eq!(target.facts["enabled"], true, "this build has a JIT");
    assert_eq!(target.facts["active"], true, "the JIT has made code of a loop");
    let recording = Profiler::of(target.pid()).rate(997).cpu_milliseconds(target.pid(), 1_500).record();
    let recorded = &recording.recorded;
    let (mut right, mut called) = (0, 0);
    let mut others = None;
    for sample in &recorded.samples {
        let names: Vec<&str> = recorded.frames_of(sample).map(|frame| frame.function.as_str()).collect();
        match names[..] {
            ["hot", "turns", "<module>"] => right += 1,
            ["square", "hot", "turns", "<module>"] => (right, called) = (right + 1, called + 1),
            _ => others = Some(sample.stack),
        }
    }
    let total = recorded.samples.len();
    println!("{}: {right} of {total} are right, {called} of them in the function called", interpreter.name);
    let shown = others.map(|stack| recorded.shown(stack)).unwrap_or_default();
    assert!(total > 500 && f64::from(right) >= 0.99 * total as f64, "{right} of {total}; others:\n{shown}");
}
