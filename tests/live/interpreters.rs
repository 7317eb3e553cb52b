//! Sub-interpreters with their own GIL.

use std::collections::BTreeMap;
use tachyon_tests::{Interpreter, Profiler, Target, on_each_interpreter, status};

on_each_interpreter!(on [pyenv_3_12 pyenv_3_13 sid_3_15 built_3_14t]
    long [sid_3_14 built_3_13t musl_3_13 wheel_3_15t]: each_has_its_gil);

/// Two interpreters run at the same time, each in its own thread: ids, stacks, and that both hold a GIL.
fn each_has_its_gil(interpreter: &Interpreter) {
    let target = Target::start(interpreter, "own_gil.py");
    let owned: BTreeMap<String, u32> =
        serde_json::from_value(target.facts["interpreters"].clone()).expect("the program tells its interpreters");
    let recording = Profiler::of(target.pid()).rate(1_999).cpu_milliseconds(target.pid(), 1_000).record();
    let recorded = &recording.recorded;
    let mut counts = BTreeMap::<u32, [usize; 3]>::new();
    for sample in &recorded.samples {
        let Some(&id) = owned.get(&sample.thread_id.to_string()) else { continue };
        assert_eq!(sample.interpreter_id, id, "{}", recorded.shown(sample.stack));
        let names: Vec<&str> = recorded.frames_of(sample).map(|frame| frame.function.as_str()).collect();
        let right = names == [&format!("inner_{id}"), &format!("outer_{id}"), "<module>"];
        let holds = sample.status & status::HAS_GIL != 0;
        let [total, stacks, held] = counts.entry(id).or_default();
        (*total, *stacks, *held) = (*total + 1, *stacks + usize::from(right), *held + usize::from(holds));
    }
    println!("{}: {counts:?} (samples, right, with the GIL)", interpreter.name);
    assert_eq!(counts.len(), 2);
    for (id, [total, right, held]) in counts {
        assert!(total > 200, "interpreter {id}: {total} samples");
        assert!(right as f64 >= 0.99 * total as f64, "interpreter {id}: {right} of {total} are right");
        let expected = if interpreter.free_threaded { 0.0 } else { 0.99 };
        let share = held as f64 / total as f64;
        assert!(share >= expected && (expected > 0.0 || held == 0), "interpreter {id}: {held} of {total} hold a GIL");
    }
}
