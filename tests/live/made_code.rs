//! Code that a program generates while it runs has the names that the program gives debuggers and `perf`, and is unwound by the
//! rules that it gives debuggers.

use std::process::Command;
use tachyon_tests::{Interpreter, Profiler, Recording, Target, on_each_interpreter, program};
use tempfile::TempDir;

on_each_interpreter!(on [pyenv_3_8 pyenv_3_12] long [debian_3_11]: functions_are_named_as_perf_is_told);
on_each_interpreter!(on [pyenv_3_8 pyenv_3_12] long [debian_3_11]: functions_are_named_as_a_jitdump_tells);
on_each_interpreter!(on [pyenv_3_12]: a_map_of_another_process_is_not_believed);
on_each_interpreter!(on [pyenv_3_8 pyenv_3_12] long [debian_3_11]: functions_are_named_and_unwound_as_debuggers_are_told);
on_each_interpreter!(on [pyenv_3_13] long [pyenv_3_8]: the_list_of_a_library_that_keeps_it_to_itself_is_found);

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

/// The library with the list of images and the function of which it tells, in a directory that goes away with what is returned.
fn list_and_function(of_list: &[&str], of_function: &[&str]) -> (TempDir, [String; 2]) {
    let dir = tempfile::tempdir().expect("a temporary directory can be made");
    let build = |source: &str, name: &str, options: &[&str]| {
        let built = dir.path().join(name);
        let status = Command::new("cc").args(options).arg("-o").arg(&built).arg(program(source)).status();
        assert!(status.expect("a C compiler can be run").success());
        built.to_string_lossy().into_owned()
    };
    let library = build("made_code.c", "made_code.so", &[&["-shared", "-fPIC"], of_list].concat());
    let object =
        build("made_code_function.c", "function.o", &[&["-c", "-O1", "-fno-stack-protector"], of_function].concat());
    (dir, [library, object])
}

/// XLA has LLVM, and with it the list, in a library that exports neither.
fn the_list_of_a_library_that_keeps_it_to_itself_is_found(interpreter: &Interpreter) {
    let dir = tempfile::tempdir().expect("a temporary directory can be made");
    let script = dir.path().join("exported");
    std::fs::write(&script, "{ global: tell; run; local: *; };").expect("written");
    let exported = format!("-Wl,--version-script={}", script.display());
    // Until the list is found, frame pointers lead from the function to the library.
    let (_built, [library, object]) = list_and_function(&[&exported], &["-fno-omit-frame-pointer"]);
    let target = Target::start_with(interpreter, "made_code.py", &["told", &library, &object, "by-library"]);
    let recording = Profiler::of(target.pid()).native().rate(499).cpu_milliseconds(target.pid(), 2_000).record();
    is_named(&recording, "[jit]!told_work");
}

fn functions_are_named_and_unwound_as_debuggers_are_told(interpreter: &Interpreter) {
    let (_dir, [library, object]) = list_and_function(&[], &["-fomit-frame-pointer"]);
    let arguments = ["told", &library, &object];
    let target = Target::start_with(interpreter, "made_code.py", &arguments);
    let recording = Profiler::of(target.pid()).native().rate(499).cpu_milliseconds(target.pid(), 2_000).record();
    is_named(&recording, "[jit]!told_work");
    let (stored, native) = (recording.report.stored, recording.report.native.as_ref());
    let native = native.expect("native frames were recorded");
    println!("{}: {native:?}", interpreter.name);
    assert!(native.exact * 2 > stored, "{native:#?}");
}
