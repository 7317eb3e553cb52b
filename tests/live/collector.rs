//! The frame that stands for the garbage collector, at the place where CPython's own profiler shows it.

use tachyon_tests::{Interpreter, Profiler, Target, on_each_interpreter};

on_each_interpreter!(on [pyenv_3_8 pyenv_3_12 sid_3_15 built_3_14t] long [pyenv_3_11 pyenv_3_13 built_3_13t]: collections_are_shown);
on_each_interpreter!(on [pyenv_3_8 sid_3_15 built_3_14t] long [pyenv_3_11 pyenv_3_12 pyenv_3_13]: finalizers_stand_above_the_collector);

/// The collector is above the function that triggered it, in nearly all samples of that function and in no others.
fn collections_are_shown(interpreter: &Interpreter) {
    let target = Target::start(interpreter, "collecting.py");
    let recording = Profiler::of(target.pid()).native().rate(1_999).cpu_milliseconds(target.pid(), 750).record();
    let recorded = &recording.recorded.without_native();
    let (mut shown, mut asked, mut worked) = (0, 0, 0);
    for sample in &recorded.samples {
        let names: Vec<&str> = recorded.frames_of(sample).map(|frame| frame.function.as_str()).collect();
        match names[..] {
            ["<GC>", "collecting", "turns", "<module>"] => {
                let leaf = recorded.leaf(sample).expect("it has one");
                assert_eq!((leaf.filename.as_str(), leaf.place), ("~", None), "as CPython's profiler writes it");
                shown += 1;
            }
            ["collecting", "turns", "<module>"] => asked += 1,
            _ => {
                assert!(!names.contains(&"<GC>"), "{}", recorded.shown(sample.stack));
                worked += usize::from(names.contains(&"working"));
            }
        }
    }
    println!("{}: {shown} in the collector, {asked} about to call it, {worked} working", interpreter.name);
    assert!(worked > 100, "{:#?}", recording.report);
    assert!(shown > 100, "{:#?}", recording.report);
    assert!(f64::from(asked) < 0.05 * f64::from(shown), "{asked} collections are not shown, {shown} are");
}

/// A finalizer releases the GIL: 66 to 79 % of the other thread's samples were marked as the collector's (3.8 to 3.14),
/// and the finalizer's Python was below the mark.
fn finalizers_stand_above_the_collector(interpreter: &Interpreter) {
    let target = Target::start(interpreter, "finalizing.py");
    let other = target.facts["other"].as_u64().expect("the program tells its thread");
    let recording = Profiler::of(target.pid()).native().rate(1_999).cpu_milliseconds(target.pid(), 750).record();
    let recorded = &recording.recorded.without_native();
    let (mut others, mut finalizing) = (0, 0);
    for sample in &recorded.samples {
        let names: Vec<&str> = recorded.frames_of(sample).map(|frame| frame.function.as_str()).collect();
        let at = |name: &str| names.iter().position(|function| *function == name);
        if sample.thread_id == other {
            others += 1;
            assert_eq!(at("<GC>"), None, "it collects nothing:\n{}", recorded.shown(sample.stack));
        } else if let (Some(finalizer), Some(asked)) =
            (names.iter().position(|name| name.ends_with("__del__")), at("collecting"))
        {
            finalizing += 1;
            let collector = at("<GC>");
            assert!(collector.is_some_and(|at| finalizer < at && at < asked), "{}", recorded.shown(sample.stack));
        }
    }
    println!("{}: {others} of the other thread, {finalizing} in a finalizer", interpreter.name);
    assert!(others > 100 && finalizing > 100, "{others}, {finalizing}: {:#?}", recording.report);
}
