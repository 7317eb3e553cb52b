//! Recordings with native frames: Python's part of a stack is the same as without them, native frames are where C was
//! called and calls back, and each stack says how far it can be trusted.

use std::collections::HashSet;
use std::process::Command;
use tachyon_tests::{Interpreter, Profiler, Recording, Target, binary, expect, live, on_each_interpreter};

on_each_interpreter!(on [pyenv_3_8 pyenv_3_12 debian_3_11 musl_3_13 built_3_14t]
    long [pyenv_3_10 sid_3_15]: pythons_part_is_the_same);
on_each_interpreter!(on [pyenv_3_9 pyenv_3_11 sid_3_15 wheel_3_15t] long [pyenv_3_13 sid_3_14 musl_3_13]:
    c_stands_between_its_caller_and_its_callee);

/// Whether the C library's code can be unwound from anywhere: musl has tables for a part of its code only.
fn has_tables(python: &Interpreter) -> bool {
    python.name != "musl_3_13"
}

/// Checks that all but a few stacks were put together exactly.
fn check_merges(python: &Interpreter, recording: &Recording) {
    let native = recording.report.native.as_ref().expect("native frames were recorded");
    println!("{}: {native:?}", python.name);
    if has_tables(python) {
        // libffi writes three instructions for each callback, without tables and frame pointers: a stack that was met
        // there says that it is cut.
        let recorded = &recording.recorded;
        let leaves = recorded.samples.iter().filter_map(|sample| recorded.leaf(sample));
        let trampolines = leaves.filter(|leaf| leaf.function.starts_with("[anonymous]!")).count() as u64;
        let cut: u64 = native.repairs.iter().filter(|(reason, _)| reason.contains("cut")).map(|(_, count)| count).sum();
        assert!(trampolines <= cut && trampolines * 50 <= recording.report.stored, "{trampolines}: {native:#?}");
        let entering = native.repairs.iter().filter(|(reason, _)| reason.contains("entering"));
        let known = native.exact + entering.map(|(_, count)| count).sum::<u64>() + recording.stopped("entering_eval");
        // One in 200 may be met in code without rules, and by chance a few more.
        let stored = recording.report.stored as f64;
        let allowed = 0.005 * stored + 4.0 * (0.005 * stored).sqrt();
        assert!((known + trampolines) as f64 >= stored - allowed, "{trampolines}: {native:#?}");
    }
    assert!(native.failed * 1000 <= recording.report.stored, "{native:#?}");
}

/// What a recording prints at its end is what `report` begins with: native code is charged to the Python function that called
/// it.
#[test]
fn the_summary_is_the_head_of_the_report() {
    let Some(_live) = live() else { return };
    let target = Target::start(&Interpreter::named("pyenv_3_12"), "gil_share.py");
    let recording = Profiler::of(target.pid()).native().rate(499).cpu_milliseconds(target.pid(), 1_000).record();
    let mut command = Command::new(binary());
    let output = command.args(["report", "--json"]).arg(&recording.path).output().expect("it can be run");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("it is JSON");
    let rows = report["rows"].as_array().expect("rows").iter().filter(|row| row["self"].as_u64() > Some(0));
    let expected: Vec<String> = rows
        .take(2)
        .map(|row| {
            let share = row["self_share"].as_f64().expect("a share") * 100.0;
            format!("{share:.1} %  {} (", row["function"].as_str().expect("a name"))
        })
        .collect();
    assert!(expected[0].contains("held") && expected[1].contains("released"), "{expected:?}");
    let told: Vec<&str> = recording.stderr.lines().map(str::trim_start).collect();
    let at = told
        .iter()
        .position(|line| line.starts_with(&expected[0]))
        .unwrap_or_else(|| panic!("{expected:?}: {told:#?}"));
    assert!(told[at + 1].starts_with(&expected[1]), "{expected:?}: {told:#?}");
}

fn pythons_part_is_the_same(python: &Interpreter) {
    let target = Target::start(python, "deep_stack.py");
    let recording = Profiler::of(target.pid()).native_whole().rate(999).cpu_milliseconds(target.pid(), 1_000).record();
    check_merges(python, &recording);
    let _seen = expect::check_stacks(&recording.recorded.without_native(), &target.facts, 0.99);
    if has_tables(python) {
        // Native code started the program.
        let recorded = &recording.recorded;
        let roots = recorded.samples.iter().filter_map(|sample| recorded.root(sample));
        let native = roots.filter(|root| root.is_native()).count();
        assert!(native as f64 >= 0.99 * recorded.samples.len() as f64, "{native} of {}", recorded.samples.len());
    }
}

/// Python calls zlib's C code; `sorted` and `qsort` call Python.
fn c_stands_between_its_caller_and_its_callee(python: &Interpreter) {
    let target = Target::start(python, "calls_c.py");
    let recording = Profiler::of(target.pid()).native().rate(999).cpu_milliseconds(target.pid(), 1_500).record();
    check_merges(python, &recording);
    let recorded = &recording.recorded;
    let mut seen = HashSet::new();
    for (stack, count) in recorded.counts().into_iter().enumerate() {
        let frames: Vec<_> = recorded.stacks[stack].iter().map(|&frame| &recorded.frames[frame]).collect();
        let at = |name: &str| frames.iter().position(|frame| !frame.is_native() && frame.function == name);
        let native_between =
            |inner: usize, outer: usize| frames[inner + 1..outer].iter().all(|frame| frame.is_native());
        if let (Some(compare), Some(caller)) = (at("compare"), at("by_qsort")) {
            assert!(compare + 1 < caller && native_between(compare, caller), "{count} x\n{}", recorded.shown(stack));
            seen.insert("qsort");
        }
        if let (Some(key), Some(caller)) = (at("key"), at("by_sorted")) {
            assert!(key < caller && native_between(key, caller), "{count} x\n{}", recorded.shown(stack));
            seen.insert("sorted");
        }
        if let Some(caller) = at("by_zlib")
            && frames.first().is_some_and(|leaf| leaf.is_native() && leaf.function.starts_with("libz"))
        {
            assert!(frames[..caller].iter().all(|frame| frame.is_native()), "{count} x\n{}", recorded.shown(stack));
            seen.insert("zlib");
        }
    }
    let wanted: HashSet<&str> =
        target.facts["ways"].as_array().expect("told").iter().filter_map(|way| way.as_str()).collect();
    assert_eq!(seen, wanted, "{:#?}", recording.report.native);
}

/// Twice the least memory for unwind tables: the tables of its libraries alone take five times as much, but only what samples meet
/// gets rules, at first sight. With the least it depends on which code is met whether there is room for all of it; what is told
/// where there is none `unwind/store/tests.rs` shows.
#[test]
fn little_memory_suffices_for_the_code_that_runs() {
    let Some(_live) = live() else { return };
    // It has libcrypto mapped.
    let target = Target::start(&Interpreter::named("pyenv_3_12"), "gil_two.py");
    let profiler = Profiler::of(target.pid()).native().arg("--unwind-memory").arg("2MiB").rate(499);
    let recording = profiler.cpu_milliseconds(target.pid(), 2_000).record();
    let native = recording.report.native.as_ref().expect("native frames were recorded");
    assert!(native.table_bytes <= 2 << 20, "{native:#?}");
    // What comes before its rules is walked in a copy of the stack.
    assert!(native.exact * 100 >= recording.report.stored * 95, "{native:#?}");
    assert!(!recording.report.notes.iter().any(|note| note.contains("no room")), "{:?}", recording.report.notes);
}

/// `--kernel`: the kernel's frames are above the C library's, which are above the Python function that called.
#[test]
fn the_kernel_stands_above_what_called_it() {
    let Some(_live) = live() else { return };
    let target = Target::start(&Interpreter::named("pyenv_3_12"), "system_calls.py");
    for native in [true, false] {
        let profiler = Profiler::of(target.pid()).arg("--kernel").rate(999);
        let profiler = if native { profiler.native() } else { profiler };
        let recording = profiler.cpu_milliseconds(target.pid(), 700).record();
        let recorded = &recording.recorded;
        let (mut in_kernel, mut right) = (0, 0);
        for sample in &recorded.samples {
            let frames: Vec<_> = recorded.frames_of(sample).collect();
            let kernel = frames.iter().take_while(|frame| frame.is_kernel()).count();
            if kernel == 0 {
                continue;
            }
            in_kernel += 1;
            let called = |frame: &tachyon_tests::ShownFrame| frame.function.starts_with("[k] do_syscall_64");
            let below = frames
                .get(kernel)
                .is_some_and(|frame| if native { frame.is_native() } else { frame.function == "reader" });
            let reader = frames[kernel..].iter().any(|frame| frame.function == "reader");
            right += usize::from(below && reader && frames[..kernel].iter().any(|frame| called(frame)));
        }
        let total = recorded.samples.len();
        assert!(in_kernel * 2 > total, "{in_kernel} of {total} were met in the kernel");
        assert!(right * 100 >= in_kernel * 95, "native {native}: {right} of {in_kernel} are right");
    }
}
