//! `--opcodes`: the viewers of CPython 3.15 name each frame's opcode as the program's own `dis` does.

use std::collections::{BTreeMap, BTreeSet};
use tachyon_tests::{Interpreter, Profiler, Target, judge, on_each_interpreter};

on_each_interpreter!(on [sid_3_15 wheel_3_15t]: opcodes_are_named_right);
on_each_interpreter!(on [pyenv_3_11 pyenv_3_13 sid_3_14 built_3_14t]: other_numbers_are_not_recorded);

/// A function, its opcode, the opcode's name and that of its general form.
type Named = (String, u8, String, String);

fn opcodes_are_named_right(interpreter: &Interpreter) {
    let target = Target::start(interpreter, "opcodes.py");
    let recording =
        Profiler::of(target.pid()).arg("--opcodes").rate(999).cpu_milliseconds(target.pid(), 1_000).record();
    let callers: BTreeMap<String, BTreeSet<String>> =
        serde_json::from_value(target.facts["callers"].clone()).expect("the program tells its callers");
    let leaf: BTreeSet<String> =
        serde_json::from_value(target.facts["leaf"].clone()).expect("the program tells its leaf");
    assert_eq!(callers.len(), 5, "method, attribute, by_attribute, by_keyword, <module>");
    let recorded = &recording.recorded;
    for frame in recorded.frames.iter().filter(|frame| frame.filename != "~") {
        assert!(frame.opcode.is_some(), "{frame:?}");
    }
    let named = judge::python(&recording.path, Some("opcode_names.py"), &["FILE"]).0;
    let named: Vec<Named> = serde_json::from_str(&named).expect("the judge prints JSON");
    let mut seen = BTreeMap::<String, BTreeSet<String>>::new();
    for (function, opcode, name, general) in named {
        let function = function.rsplit('.').next().expect("not empty").to_owned();
        let expected = if function == "leaf" { &leaf } else { &callers[&function] };
        assert!(expected.contains(&name), "{function} is at {opcode}: {name} ({general}), not one of {expected:?}");
        seen.entry(function).or_default().insert(general);
    }
    println!("{}: {seen:?}", interpreter.name);
    assert_eq!(seen.len(), 6, "every function was seen: {seen:?}");
    assert!(seen["leaf"].contains("BINARY_OP") && seen["leaf"].len() > 1, "{seen:?}");
}

/// Each minor version numbers its opcodes anew, and the format's readers know those of 3.15.
fn other_numbers_are_not_recorded(interpreter: &Interpreter) {
    let target = Target::start(interpreter, "spin.py");
    let recording = Profiler::of(target.pid()).arg("--opcodes").rate(499).cpu_milliseconds(target.pid(), 300).record();
    assert!(recording.recorded.samples.len() > 50, "{:#?}", recording.report);
    assert!(recording.recorded.frames.iter().all(|frame| frame.opcode.is_none()));
}
