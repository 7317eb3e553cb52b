//! Native stacks that used to end early or late: `-X perf` has code without rules between any two Python frames, and the
//! memory below a greenlet's first function belongs to another one.

use std::path::Path;
use std::process::Command;
use tachyon_tests::{Interpreter, Profiler, Target, binary, live, on_each_interpreter, program, with_wheels};

on_each_interpreter!(on [pyenv_3_12 pyenv_3_13 sid_3_14]: trampolines_are_folded);
on_each_interpreter!(on [pyenv_3_13 sid_3_15]: trampolines_that_a_jitdump_tells_of_are_folded);

/// Of 322 stacks none was exact: all were cut at the innermost trampoline (3.12).
fn trampolines_are_folded(interpreter: &Interpreter) {
    let _pid = are_folded(interpreter, "PYTHONPERFSUPPORT");
}

/// `-X perf_jit`: the same code, which a `jitdump` file tells of, and has names from it.
fn trampolines_that_a_jitdump_tells_of_are_folded(interpreter: &Interpreter) {
    let pid = are_folded(interpreter, "PYTHON_PERF_JIT_SUPPORT");
    let root = interpreter.root.as_deref().unwrap_or(Path::new("/"));
    std::fs::remove_file(root.join(format!("tmp/jit-{pid}.dump"))).expect("CPython has written it");
}

fn are_folded(interpreter: &Interpreter, variable: &'static str) -> u32 {
    let target = Target::start_in(interpreter, "perf_trampolines.py", &[], &[(variable, "1")]);
    assert_eq!(target.facts["active"], true, "this build has trampolines");
    let recording = Profiler::of(target.pid()).native_whole().rate(499).cpu_milliseconds(target.pid(), 1_500).record();
    let (recorded, native) = (&recording.recorded, recording.report.native.as_ref().expect("wanted"));
    let (mut right, mut other) = (0, None);
    for sample in &recorded.samples {
        let frames: Vec<_> = recorded.frames_of(sample).collect();
        // In the order of the call: nothing native but at the ends, and every Python frame once.
        let python: Vec<_> = frames.iter().filter(|frame| !frame.is_native()).map(|frame| &*frame.function).collect();
        let from = frames.iter().position(|frame| !frame.is_native()).unwrap_or_default();
        let between = frames[from..from + python.len()].iter().any(|frame| frame.is_native());
        let whole = frames.last().is_some_and(|root| root.function.contains("_start"));
        let deep =
            python.starts_with(&["leaf", "middle", "middle", "middle", "middle", "middle", "middle", "<module>"]);
        if !between && whole && deep {
            right += 1;
        } else if whole && python.first().is_some_and(|leaf| *leaf != "leaf") && !between {
            // It was calling, or had returned.
            right += 1;
        } else {
            other = Some(sample.stack);
        }
    }
    let total = recorded.samples.len();
    println!("{}: {right} of {total} right, {native:?}", interpreter.name);
    let shown = other.map(|stack| recorded.shown(stack)).unwrap_or_default();
    assert!(total > 200 && right * 100 >= total * 98, "{right} of {total}; others:\n{shown}");
    assert!(native.exact * 100 >= total as u64 * 98, "{native:?}");
    target.pid()
}

/// Of 201 stacks none was exact: below each was the evaluator of whatever had started the greenlet.
#[test]
fn a_greenlet_ends_at_its_first_function() {
    let Some(_live) = live() else { return };
    let python = with_wheels(&Interpreter::named("pyenv_3_11"), &["greenlet==3.5.6"]);
    let target = Target::start(&python, "two_greenlets.py");
    let recording = Profiler::of(target.pid()).native_whole().rate(499).cpu_milliseconds(target.pid(), 1_500).record();
    let (recorded, native) = (&recording.recorded, recording.report.native.as_ref().expect("wanted"));
    let rooted = recorded.samples.iter().filter(|sample| {
        let names: Vec<_> = recorded.frames_of(sample).rev().map(|frame| &*frame.function).collect();
        let python: Vec<_> = names.iter().filter(|name| !name.contains('!')).collect();
        names[0].ends_with("g_switch") && (*python[0] == "one" || *python[0] == "two")
    });
    let (rooted, total) = (rooted.count(), recorded.samples.len());
    println!("{rooted} of {total} end in the greenlet's first function, {native:?}");
    assert!(total > 200 && rooted * 100 >= total * 97, "{rooted} of {total}");
    assert!(native.exact * 100 >= total as u64 * 97, "{native:?}");
}

/// gevent's functions that begin and end a greenlet are C. Of 589 stacks of a server 131 continued into the evaluator of whatever
/// had started such a greenlet, and had no Python stack for it.
#[test]
fn a_greenlet_that_runs_no_python_is_whole() {
    let Some(_live) = live() else { return };
    let python = with_wheels(&Interpreter::named("pyenv_3_13"), &["greenlet==3.5.6"]);
    let target = Target::start(&python, "greenlets_in_c.py");
    let recording = Profiler::of(target.pid()).native_whole().rate(499).cpu_milliseconds(target.pid(), 1_500).record();
    let (recorded, native) = (&recording.recorded, recording.report.native.as_ref().expect("wanted"));
    let (mut alone, mut called) = (0, 0);
    for sample in &recorded.samples {
        let names: Vec<_> = recorded.frames_of(sample).rev().map(|frame| &*frame.function).collect();
        let runs = |function: &str| names.iter().any(|name| name.ends_with(function));
        let python = names.iter().filter(|name| !name.contains('!')).count();
        if names[0].ends_with("g_switch") && runs("zlib_crc32") {
            assert_eq!(python, 0, "{names:?}");
            alone += 1;
        }
        called += usize::from(runs("work"));
    }
    let total = recorded.samples.len();
    println!("{alone} of {total} in greenlets without Python, {called} in their starter, {native:?}");
    assert!(alone * 100 >= total * 30 && called * 100 >= total * 30, "{alone} and {called} of {total}");
    assert!(native.exact * 100 >= total as u64 * 97, "{native:?}");
}

/// Threads, workers and the main program begin differently below Python: flame graphs show each program as one tower.
#[test]
fn one_program_is_one_tower() {
    let Some(_live) = live() else { return };
    let python = Interpreter::named("pyenv_3_11");
    let dir = tempfile::tempdir().expect("a temporary directory can be made");
    let (script, pids) = (program("pools.py").display().to_string(), dir.path().join("pids").display().to_string());
    let python = python.command().get_program().to_str().expect("ASCII").to_owned();
    let words = [python.as_str(), "-B", &script, "fork", &pids];
    let recording = Profiler::new().native().rate(499).command(&words).record();
    assert_eq!(recording.status, 0, "{}", recording.stderr);
    let recorded = &recording.recorded;
    let (mut with_python, mut below) = (0, Vec::new());
    for sample in &recorded.samples {
        let frames: Vec<_> = recorded.frames_of(sample).collect();
        // The outermost frame is the process's.
        let (process, frames) = frames.split_last().expect("a stack has frames");
        assert!(process.function.starts_with("python") && process.function.contains(" pools.py ("), "{process:?}");
        let Some(outermost) = frames
            .iter()
            .rposition(|frame| !frame.is_native() && !frame.function.starts_with('<') || frame.function == "<module>")
        else {
            continue;
        };
        with_python += 1;
        below.extend(
            frames[outermost + 1..].iter().map(|frame| frame.function.to_string()).filter(|name| name.contains('!')),
        );
    }
    assert!(with_python > 100 && below.is_empty(), "{with_python}: {below:?}");

    let export = |name: &str, words: &[&str]| {
        let path = dir.path().join(name);
        let output =
            Command::new(binary()).arg("export").arg(&recording.path).arg("-o").arg(&path).args(words).output();
        let output = output.expect("the profiler can be run");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        std::fs::read_to_string(&path).expect("the export was written")
    };
    let processes = recording.report.processes.iter().filter(|process| process.samples > 0).count();
    assert!(processes >= 4, "{:#?}", recording.report.processes);
    let merged = export("merged.svg", &[]);
    assert!(merged.contains(&format!(" pools.py ({processes} processes) (")), "{processes} processes");
    let apart = export("apart.svg", &["--no-merge-processes"]);
    for process in recording.report.processes.iter().filter(|process| process.samples > 0) {
        assert!(apart.contains(&format!(" pools.py ({}) (", process.pid)), "{process:?}");
    }
    let words = ["-o", "x.tach", "--merge-processes"];
    let refused = Command::new(binary()).arg("export").arg(&recording.path).args(words).output();
    let refused = refused.expect("the profiler can be run");
    assert_eq!(refused.status.code(), Some(2), "{}", String::from_utf8_lossy(&refused.stderr));
}
