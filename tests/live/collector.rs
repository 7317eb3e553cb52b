//! The frame that stands for the garbage collector, where CPython's own profiler shows it.

use tachyon_tests::{Interpreter, Profiler, Target, on_each_interpreter};

on_each_interpreter!(on [pyenv_3_8 pyenv_3_11 pyenv_3_12 pyenv_3_13 sid_3_14 sid_3_15 built_3_14t]: collections_are_shown);

/// The collector is above the function that asked for it, in nearly all samples of that function and in no other ones.
fn collections_are_shown(interpreter: &Interpreter) {
    let target = Target::start(interpreter, "collecting.py");
    let recording = Profiler::of(target.pid()).rate(997).cpu_milliseconds(target.pid(), 1_500).record();
    let recorded = &recording.recorded;
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
    if interpreter.free_threaded && interpreter.minor < 15 {
        // It lets other threads run meanwhile, and does not tell for whom it collects: nothing is guessed.
        assert_eq!(shown, 0);
        assert!(asked > 100, "{:#?}", recording.report);
    } else {
        assert!(shown > 100, "{:#?}", recording.report);
        assert!(f64::from(asked) < 0.05 * f64::from(shown), "{asked} collections are not shown, {shown} are");
    }
}
