//! The interpreter's internal frames, which no traceback shows.

use tachyon_tests::{Interpreter, Profiler, Target, on_each_interpreter};

on_each_interpreter!(on [pyenv_3_12 pyenv_3_13 sid_3_15] long [sid_3_14 built_3_14t]: constructors_are_called_by_their_callers);

/// From 3.13 on 98 % of the samples of a constructor showed `__init__ (file "__init__")` below it.
fn constructors_are_called_by_their_callers(interpreter: &Interpreter) {
    let target = Target::start(interpreter, "constructors.py");
    for native in [false, true] {
        let profiler = Profiler::of(target.pid()).rate(997);
        let profiler = if native { profiler.native() } else { profiler };
        let recording = profiler.cpu_milliseconds(target.pid(), 500).record();
        let recorded = recording.recorded.without_native();
        let mut called = 0;
        for sample in &recorded.samples {
            let frames: Vec<_> = recorded.frames_of(sample).collect();
            assert!(frames.iter().all(|frame| frame.filename != "__init__"), "{}", recorded.shown(sample.stack));
            let names: Vec<&str> = frames.iter().map(|frame| frame.function.as_str()).collect();
            called += usize::from(names[..] == ["Item.__init__", "making", "turns", "<module>"]);
        }
        println!("{}: {called} of {} in a constructor", interpreter.name, recorded.samples.len());
        assert!(called * 10 > recorded.samples.len() * 8, "{called} of {}", recorded.samples.len());
    }
}
