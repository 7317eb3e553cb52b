//! Code that a program runs as soon as it has loaded it, and never again: by the time there are unwind tables, it is over.

use std::path::PathBuf;
use std::process::Command;
use tachyon_tests::{Interpreter, Line, Profiler, Target, on_each_interpreter, program};
use tempfile::TempDir;

on_each_interpreter!(on [pyenv_3_8 pyenv_3_13] long [debian_3_11]: stacks_in_it_are_whole);
on_each_interpreter!(on [pyenv_3_13] long [pyenv_3_8]: it_is_known_as_soon_as_it_is_mapped);

/// What the C library's functions are called, leaf first.
const FUNCTIONS: [&str; 3] = ["innermost", "middle", "outer"];

/// The library, in a directory that goes away with what is returned.
fn library() -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().expect("a temporary directory can be made");
    let library = dir.path().join("just_loaded.so");
    let options = ["-shared", "-fPIC", "-O1", "-fomit-frame-pointer", "-o"];
    let built = Command::new("cc").args(options).arg(&library).arg(program("just_loaded.c")).status();
    assert!(built.expect("a C compiler can be run").success());
    (dir, library)
}

/// A program that maps a library every few milliseconds: until the profiler has read its mappings once more, nobody knows what the
/// code is.
fn it_is_known_as_soon_as_it_is_mapped(interpreter: &Interpreter) {
    let (_dir, library) = library();
    let target = Target::start_with(interpreter, "just_loaded.py", &[&library.to_string_lossy(), "30000000", "0"]);
    let profiler = Profiler::of(target.pid()).native().rate(199).arg("--format").arg("jsonl").milliseconds(3_000);
    let output = profiler.run();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = std::fs::read_to_string(profiler.output()).expect("the recording was written");
    let (mut inside, mut unknown) = (0, 0);
    for line in Line::all(&text) {
        let names: Vec<&str> = line.frames.iter().map(|frame| &*frame.function).collect();
        inside += u32::from(FUNCTIONS.contains(&names[0]));
        unknown += u32::from(names[0].contains("<unknown>"));
    }
    println!(
        "{}: {inside} samples in libraries that were just mapped, {unknown} in code that nobody knew",
        interpreter.name
    );
    assert!(inside > 50 && unknown * 20 <= inside, "{inside} samples, {unknown} unknown");
}

fn stacks_in_it_are_whole(interpreter: &Interpreter) {
    let (_dir, library) = library();
    let target = Target::start_with(interpreter, "just_loaded.py", &[&library.to_string_lossy()]);
    let profiler = Profiler::of(target.pid()).native().rate(499).arg("--format").arg("jsonl");
    let profiler = profiler.milliseconds(4_000);
    let output = profiler.run();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = std::fs::read_to_string(profiler.output()).expect("the recording was written");
    let (mut inside, mut whole, mut exact, mut wrong) = (0, 0, 0, Vec::new());
    for line in Line::all(&text) {
        let names: Vec<&str> = line.frames.iter().map(|frame| &*frame.function).collect();
        if names.first() != Some(&FUNCTIONS[0]) {
            continue;
        }
        inside += 1;
        // `ctypes` and libffi, whose functions each version calls as it likes, are in between.
        let is_whole = names.starts_with(&FUNCTIONS) && names.contains(&"work");
        whole += u32::from(is_whole);
        exact += u32::from(line.merge == "exact");
        if line.merge == "exact" && !is_whole {
            wrong.push(names.join(" "));
        }
    }
    println!("{}: {inside} samples in just loaded libraries, {whole} whole, {exact} exact", interpreter.name);
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(inside > 50 && exact * 10 >= inside * 6, "{inside} samples, {whole} whole, {exact} exact");
}
