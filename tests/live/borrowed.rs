//! Thread states that another thread runs than the one that made them.

use serde_json::Value;
use std::collections::BTreeMap;
use std::process::Command;
use tachyon_tests::{Interpreter, Profiler, SharedLibrary, Target, binary, on_each_interpreter};

on_each_interpreter!(on [pyenv_3_8 pyenv_3_10 pyenv_3_12 sid_3_15]
    long [pyenv_3_9 pyenv_3_11 debian_3_11 pyenv_3_13 sid_3_14 built_3_14t]: borrowed_state);
on_each_interpreter!(on [pyenv_3_8 debian_3_11 pyenv_3_13]
    long [pyenv_3_9 pyenv_3_10 pyenv_3_11 pyenv_3_12]: borrowed_interpreter);

on_each_interpreter!(on [pyenv_3_10 pyenv_3_12 debian_3_11 sid_3_15 built_3_14t] long [pyenv_3_11 pyenv_3_13 sid_3_14]: dumped);

/// What a thread's samples show.
#[derive(Debug, Default)]
struct Shown {
    /// Its own functions, in a complete stack.
    own: u64,
    /// A mark that says that the stack is not known.
    unsure: u64,
    /// Nothing of Python, as if it had none.
    nothing: u64,
}

/// `PyThreadState_New` in one thread, used in another: 3 to 20 % of the maker's samples showed the borrower's stack on 3.8
/// to 3.11, and the borrower's Python was `<native>` on every version.
fn borrowed_state(interpreter: &Interpreter) {
    let library = SharedLibrary::compile("borrowed", interpreter);
    each_shows_its_own(interpreter, &["state", library.text()]);
}

/// `dump` of the same: of two states with the same id it kept the last one made, so the maker was shown with the borrower's
/// stack (3.12, in the first dump).
fn dumped(interpreter: &Interpreter) {
    let library = SharedLibrary::compile("borrowed", interpreter);
    let target = Target::start_with(interpreter, "borrowed.py", &["state", library.text()]);
    let borrower = target.facts["borrower"].as_u64().expect("the program tells its thread");
    let (mut shown, mut all) = ([0; 2], 0);
    for _ in 0..20 {
        let dump = Command::new(binary()).args(["dump", "-p", &target.pid().to_string(), "--json"]).output();
        let dump: Value = serde_json::from_slice(&dump.expect("it runs").stdout).expect("JSON");
        let threads = dump["threads"].as_array().expect("a list");
        all += 1;
        for (at, (tid, own, other)) in
            [(u64::from(target.pid()), "maker_", "borrower_"), (borrower, "borrower_", "maker_")]
                .into_iter()
                .enumerate()
        {
            let thread =
                threads.iter().find(|thread| thread["tid"] == tid).unwrap_or_else(|| panic!("{tid}: {dump:#}"));
            let frames = thread["frames"].as_array().map_or(&[][..], Vec::as_slice);
            let of = |name: &str| {
                let function = |frame: &&Value| frame["function"].as_str().is_some_and(|it| it.starts_with(name));
                frames.iter().filter(function).count()
            };
            assert_eq!(of(other), 0, "another thread's stack: {dump:#}");
            shown[at] += usize::from(of(own) > 0);
        }
    }
    println!("{}: maker and borrower shown with their own in {shown:?} of {all} dumps", interpreter.name);
    assert!(shown.iter().all(|&shown| shown * 10 >= all * 9), "{shown:?} of {all}");
}

/// A sub-interpreter made by the main thread and run by another one: 10 to 98 % of the main thread's samples showed the
/// other's stack (3.8 to 3.12).
fn borrowed_interpreter(interpreter: &Interpreter) {
    each_shows_its_own(interpreter, &["interpreter"]);
}

fn each_shows_its_own(interpreter: &Interpreter, words: &[&str]) {
    for native in [true, false] {
        let target = Target::start_with(interpreter, "borrowed.py", words);
        let borrower = target.facts["borrower"].as_u64().expect("the program tells its thread");
        let profiler = Profiler::of(target.pid()).rate(1_999);
        let profiler = if native { profiler.native() } else { profiler };
        let recording = profiler.cpu_milliseconds(target.pid(), 800).record();
        let recorded = &recording.recorded;
        let mut shown: BTreeMap<&str, Shown> = BTreeMap::new();
        for sample in &recorded.samples {
            let (own, other) =
                if sample.thread_id == borrower { ("borrower", "maker_") } else { ("maker", "borrower_") };
            let names: Vec<&str> = recorded.frames_of(sample).map(|frame| frame.function.as_str()).collect();
            let of = |name: &str| names.iter().filter(|function| function.starts_with(name)).count();
            assert_eq!(of(other), 0, "{own} with another thread's stack:\n{}", recorded.shown(sample.stack));
            let shown = shown.entry(own).or_default();
            if names.iter().any(|name| name.starts_with("<stack cut") || *name == "<entering evaluator>") {
                shown.unsure += 1;
            } else if of(own) >= 1 && names.iter().any(|name| name.ends_with("_turns")) {
                shown.own += 1;
            } else {
                shown.nothing += 1;
            }
        }
        println!("{} {words:?}, native {native}: {shown:?}; {:?}", interpreter.name, recording.report.stops);
        for (thread, Shown { own, unsure, nothing }) in shown {
            let all = own + unsure + nothing;
            assert!(all > 100, "{thread}: {all} samples");
            // 3.8 and 3.9: when another thread runs a state, only the GIL's holder is known, and only native frames tell
            // the others from a thread without Python.
            let holder_only = interpreter.minor < 10 && words[0] == "state";
            let most = if holder_only && !native { 30 } else { 1 };
            assert!(nothing * 100 <= all * most, "{thread} is shown without Python in {nothing} of {all}");
            // Up to 3.9 a reference on the stack is a reason to doubt, not a proof: a state that another thread made is
            // never shown as this one's, and the thread's own state only if nothing contradicts it.
            let least = match (interpreter.minor < 10, thread) {
                (false, _) => 95,
                (true, "maker") => 50,
                (true, _) => 0,
            };
            assert!(own * 100 >= all * least, "{thread} in {own} of {all}");
        }
    }
}
