//! Busy threads that share their functions: each one's stack and line, even if each has a copy of the bytecode.

use std::collections::BTreeMap;
use tachyon_tests::{Interpreter, Place, Profiler, Target, expect, on_each_interpreter, status};

on_each_interpreter!(on [built_3_13t pyenv_3_13 sid_3_15 built_3_14t wheel_3_15t] and [wheel_3_14t]: same_code);
on_each_interpreter!(on [built_3_14t wheel_3_15t] and [wheel_3_14t]: without_copies);

fn same_code(interpreter: &Interpreter) {
    let target = Target::start(interpreter, "same_code.py");
    if interpreter.free_threaded && interpreter.minor >= 14 {
        assert_eq!(target.facts["copies"], 4, "each thread runs a copy of the bytecode");
    }
    check(interpreter, &target);
}

/// Copies of the bytecode can be switched off: then all threads run the code object's own.
fn without_copies(interpreter: &Interpreter) {
    let target = Target::start_in(interpreter, "same_code.py", &[], &[("PYTHON_TLBC", "0")]);
    assert_eq!(target.facts["copies"], 1);
    check(interpreter, &target);
}

fn check(interpreter: &Interpreter, target: &Target) {
    let recording = Profiler::of(target.pid()).rate(1_999).cpu_milliseconds(target.pid(), 1_500).record();
    let recorded = &recording.recorded;
    expect::check_stacks(recorded, &target.facts, 0.99);
    let expected = expect::stacks(&target.facts);
    let threads: BTreeMap<String, usize> =
        serde_json::from_value(target.facts["threads"].clone()).expect("the program tells its threads");
    let places: Vec<Place> =
        serde_json::from_value(target.facts["multiplications"].clone()).expect("the program tells its places");
    let mut counts = [(0_usize, 0_usize); 4];
    for sample in &recorded.samples {
        let Some(&kind) = threads.get(&sample.thread_id.to_string()) else { continue };
        let (total, hot) = &mut counts[kind];
        *total += 1;
        if interpreter.free_threaded {
            assert_eq!(sample.status & status::HAS_GIL, 0, "there is none");
        }
        let of_thread = expected[kind].is(recorded.frames_of(sample), None);
        let place = recorded.leaf(sample).and_then(|leaf| leaf.place);
        let of_others = places.iter().enumerate().any(|(other, at)| other != kind && place == Some(*at));
        assert!(!of_others, "thread {kind} multiplies in another one's line:\n{}", recorded.shown(sample.stack));
        *hot += usize::from(of_thread && place == Some(places[kind]));
    }
    println!("{}: {counts:?} (samples, at the thread's own multiplication)", interpreter.name);
    // A fair share is a quarter. How many samples there are depends on the machine: CPU time that a hypervisor took has
    // none.
    let samples = recorded.samples.len();
    assert!(samples > 400, "{:#?}", recording.report);
    for (kind, (total, hot)) in counts.into_iter().enumerate() {
        assert!(total * 16 > samples, "thread {kind} has {total} of {samples} samples: {:#?}", recording.report);
        assert!(hot as f64 > 0.8 * total as f64, "thread {kind}: {hot} of {total} at its multiplication");
    }
}
