//! Code that a program generates while it runs has the names that the program gives debuggers and `perf`, and is unwound by the
//! rules that it gives debuggers.

use std::process::Command;
use tachyon_tests::{Interpreter, Profiler, Recording, Target, on_each_interpreter, program};

on_each_interpreter!(on [pyenv_3_8 pyenv_3_12] long [debian_3_11]: functions_are_named_as_perf_is_told);
on_each_interpreter!(on [pyenv_3_8 pyenv_3_12] long [debian_3_11]: functions_are_named_as_a_jitdump_tells);
on_each_interpreter!(on [pyenv_3_12]: a_map_of_another_process_is_not_believed);
on_each_interpreter!(on [pyenv_3_8 pyenv_3_12] long [debian_3_11]: functions_are_named_and_unwound_as_debuggers_are_told);

/// Since the first sample that has this function above the Python function that called it, nearly all have that are of code which the
/// program made, and most samples are: `ctypes` works between two calls, too. The profiler asks a program for its code a moment after
/// it has found it: what comes before is no more than half.
fn is_named(recording: &Recording, function: &str) {
    let recorded = &recording.recorded;
    let stacks: Vec<Vec<_>> = recorded
        .samples
        .iter()
        .map(|sample| recorded.frames_of(sample).map(|frame| &frame.function[..]).collect())
        .collect();
    let is_named = |names: &[&str]| {
        let at = names.iter().position(|name| *name == function);
        at.is_some_and(|at| names[at..].contains(&"work"))
    };
    let is_made = |names: &[&str]| {
        names.first().is_some_and(|name| ["[jit]!", "[anonymous]!"].iter().any(|made| name.starts_with(made)))
    };
    let (all, first) = (stacks.len(), stacks.iter().position(|names| is_named(names)).unwrap_or(stacks.len()));
    let (named, others): (Vec<_>, Vec<_>) = stacks[first..].iter().partition(|names| is_named(names));
    let unnamed: Vec<_> = others.iter().filter(|names| is_made(names)).collect();
    println!("{all} in all, {first} before the first, {} named, {} unnamed", named.len(), unnamed.len());
    assert!(all > 300 && first * 2 < all, "{first} of {all} before the first");
    assert!(
        unnamed.len() * 50 <= named.len() && others.len() * 5 <= named.len(),
        "{} named, not these: {others:?}",
        named.len()
    );
}

fn functions_are_named_as_perf_is_told(interpreter: &Interpreter) {
    let target = Target::start_with(interpreter, "made_code.py", &["mapped"]);
    let recording = Profiler::of(target.pid()).native().rate(499).cpu_milliseconds(target.pid(), 2_000).record();
    let _gone = std::fs::remove_file(format!("/tmp/perf-{}.map", target.pid()));
    is_named(&recording, "[jit]!mapped_work");
}

/// Reading continues where it stopped: another function is announced and called first.
fn functions_are_named_as_a_jitdump_tells(interpreter: &Interpreter) {
    let dir = tempfile::tempdir().expect("a temporary directory can be made");
    let target = Target::start_with(interpreter, "made_code.py", &["dumped", &dir.path().to_string_lossy()]);
    let recording = Profiler::of(target.pid()).native().rate(499).cpu_milliseconds(target.pid(), 3_000).record();
    is_named(&recording, "[jit]!dumped_work");
}

/// A map stays in `/tmp` when its process has ended, and another process has its pid one day.
fn a_map_of_another_process_is_not_believed(interpreter: &Interpreter) {
    let target = Target::start_with(interpreter, "made_code.py", &["old"]);
    let recording = Profiler::of(target.pid()).native().rate(499).cpu_milliseconds(target.pid(), 1_000).record();
    let _gone = std::fs::remove_file(format!("/tmp/perf-{}.map", target.pid()));
    let recorded = &recording.recorded;
    let frames = recorded.samples.iter().flat_map(|sample| recorded.frames_of(sample));
    let (named, others): (Vec<_>, Vec<_>) = frames
        .filter(|frame| frame.function.starts_with("[jit]!") || frame.function.starts_with("[anonymous]!"))
        .partition(|frame| frame.function.starts_with("[jit]!"));
    assert!(named.is_empty() && others.len() > 100, "{} named, {} not", named.len(), others.len());
}

fn functions_are_named_and_unwound_as_debuggers_are_told(interpreter: &Interpreter) {
    let dir = tempfile::tempdir().expect("a temporary directory can be made");
    let (library, object) = (dir.path().join("made_code.so"), dir.path().join("function.o"));
    let (list, function) = (program("made_code.c"), program("made_code_function.c"));
    for arguments in [&["-shared", "-fPIC"][..], &["-c", "-O1", "-fomit-frame-pointer", "-fno-stack-protector"]] {
        let shared = arguments.len() == 2;
        let (source, built) = if shared { (&list, &library) } else { (&function, &object) };
        let status = Command::new("cc").args(arguments).arg("-o").arg(built).arg(source).status();
        assert!(status.expect("a C compiler can be run").success());
    }
    let arguments = ["told", &library.to_string_lossy(), &object.to_string_lossy()];
    let target = Target::start_with(interpreter, "made_code.py", &arguments);
    let recording = Profiler::of(target.pid()).native().rate(499).cpu_milliseconds(target.pid(), 2_000).record();
    is_named(&recording, "[jit]!told_work");
    let (stored, native) = (recording.report.stored, recording.report.native.as_ref());
    let native = native.expect("native frames were recorded");
    println!("{}: {native:?}", interpreter.name);
    assert!(native.exact * 2 > stored, "{native:#?}");
}
