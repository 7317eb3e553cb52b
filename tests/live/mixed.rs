//! `tachyon-bpf dump --native` of live interpreters: native frames are where C was called and calls back, and each
//! stack says how far it can be trusted.

use serde_json::Value;
use std::process::Command;
use std::time::{Duration, Instant};
use tachyon::inspect::{self, ElfCache, Evaluator, EvaluatorCode, Verdict};
use tachyon::remote::RemoteProcess;
use tachyon::remote::elf::ReadAt as _;
use tachyon::types::Pid;
use tachyon_tests::{Interpreter, Target, binary, on_each_interpreter};

on_each_interpreter!(of_each_kind: each_way_through_c_is_shown_in_call_order);
on_each_interpreter!(the_evaluator_is_found_also_without_symbols);

fn dump(pid: u32, more: &[&str]) -> Value {
    let mut command = Command::new(binary());
    let output = command.args(["dump", "-p", &pid.to_string(), "--json", "--native"]).args(more).output();
    let output = output.expect("it runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

fn threads(dump: &Value) -> &[Value] {
    dump["threads"].as_array().expect("a list")
}

/// A dump in which all threads sleep.
fn asleep(pid: u32, more: &[&str]) -> Value {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let dump = dump(pid, more);
        let awake: Vec<_> = threads(&dump).iter().filter(|thread| !thread["no_native"].is_null()).collect();
        if awake.is_empty() {
            return dump;
        }
        assert!(Instant::now() < deadline, "these threads never slept: {awake:#?}");
    }
}

/// The last part of a function's name: up to 3.10 it is the only one.
fn short(frame: &Value) -> &str {
    frame["function"].as_str().unwrap_or_default().rsplit('.').next().unwrap_or_default()
}

fn is_python(frame: &&Value) -> bool {
    frame["kind"] == "python"
}

/// Whether the stack of a sleeping thread is cut near its leaf: 3.15 is built with frame pointers, and the C library below
/// it is not, so that none tells the register; musl's system calls have no unwind tables.
fn is_cut(python: &Interpreter) -> bool {
    matches!(python.name, "sid_3_15" | "wheel_3_15t" | "musl_3_13")
}

fn each_way_through_c_is_shown_in_call_order(python: &Interpreter) {
    let target = Target::start(python, "mixed.py");
    let dump_of_all = asleep(target.pid(), &[]);
    for (name, path) in target.facts["paths"].as_object().expect("told") {
        let thread = threads(&dump_of_all).iter().find(|thread| thread["name"] == name.as_str());
        let thread = thread.unwrap_or_else(|| panic!("no thread {name}"));
        let mixed = thread["mixed"].as_array().expect("a list");
        let told: Vec<_> = mixed.iter().filter(is_python).collect();
        // All Python frames, in their order: those of the path, and above its root `threading`'s.
        let all: Vec<_> = thread["frames"].as_array().expect("a list").iter().map(short).collect();
        assert_eq!(told.iter().map(|frame| short(frame)).collect::<Vec<_>>(), all, "{name}");
        let own: Vec<&str> =
            path.as_array().expect("a list").iter().map(|name| name.as_str().expect("a name")).collect();
        let found: Vec<&str> = all.iter().copied().filter(|name| own.contains(name)).collect();
        assert_eq!(found, own, "{name}");
        // It sleeps in the C library, called by Python.
        let first = mixed.iter().position(|frame| is_python(&frame)).expect("Python frames");
        assert!(first > 0 && mixed[0]["kind"] == "native", "{name}: {mixed:#?}");
        if is_cut(python) {
            assert_eq!(thread["merge"], "repaired: native stack cut", "{name}");
            continue;
        }
        assert_eq!(thread["merge"], "exact", "{name}: {mixed:#?}");
        assert!(mixed.last().is_some_and(|frame| frame["kind"] == "native"), "{name}: a thread begins in C");
        if name == "by_qsort" {
            let at = |name: &str| mixed.iter().position(|frame| short(frame) == name);
            let (callback, sort, caller) = (at("compare"), at("qsort").or_else(|| at("qsort_r")), at("by_qsort"));
            assert!(callback < caller, "{mixed:#?}");
            let between = &mixed[callback.expect("there") + 1..caller.expect("there")];
            assert!(between.len() > 2 && between.iter().all(|frame| frame["kind"] == "native"), "{mixed:#?}");
            assert!(sort.is_none_or(|sort| callback < Some(sort) && Some(sort) < caller), "{mixed:#?}");
        }
    }
    if is_cut(python) {
        return;
    }
    let all = asleep(target.pid(), &["--interpreter-frames"]);
    let nest = threads(&all).iter().find(|thread| thread["name"] == "by_nest").expect("it sleeps");
    let mixed = nest["mixed"].as_array().expect("a list");
    let folded = threads(&dump_of_all).iter().find(|thread| thread["name"] == "by_nest").expect("it sleeps");
    let folded = folded["mixed"].as_array().expect("a list").len();
    assert!(mixed.len() > folded + 300, "100 sorts have more than {} C frames", mixed.len() - folded);
    assert_eq!(nest["merge"], "exact");
}

fn the_evaluator_is_found_also_without_symbols(python: &Interpreter) {
    let target = Target::start(python, "mixed.py");
    let process = RemoteProcess::open(Pid(target.pid())).expect("it runs");
    let verdict = inspect::inspect(&process, &mut ElfCache::default()).expect("readable");
    let Verdict::Python(interpreter) = verdict else { panic!("not Python: {verdict:?}") };
    let maps = process.maps().expect("readable");
    let own = maps.iter().find(|mapping| mapping.file_path() == Some(&*interpreter.path)).expect("mapped");
    let file = process.mapped_file(own).expect("a file");
    let found = Evaluator::of_file(file.open().expect("readable")).expect("found");
    let size = |evaluator: &Evaluator| evaluator.parts().iter().map(|part| part.end - part.start).sum::<u64>();
    // A tail-calling evaluator is its handlers: what is called by C only jumps to the first of them. Without symbols they
    // are code of the interpreter like any other, and what C calls is still what tells one evaluator from the next.
    let handlers: u64 = found.handlers().iter().map(|part| part.end - part.start).sum();
    assert!((30_000..200_000).contains(&(size(&found) + handlers)), "{found:x?}");

    let folder = tempfile::tempdir().expect("a folder");
    let stripped = folder.path().join("stripped");
    let mut bytes = vec![0; usize::try_from(file.identity().size).expect("it fits")];
    file.open().expect("readable").read_exact_at(0, &mut bytes).expect("read");
    std::fs::write(&stripped, bytes).expect("copied");
    let done = Command::new("strip").arg(&stripped).status().expect("strip is part of the C compiler's kit");
    assert!(done.success());
    let blind = Evaluator::of_file(std::fs::File::open(&stripped).expect("there")).expect("found");
    for part in blind.parts() {
        let missed = (part.start..part.end).find(|&at| found.code_at(at) != Some(EvaluatorCode::Evaluator));
        assert_eq!(missed, None, "{blind:x?} is not in {found:x?}");
    }
    // A part that only aborts, and is entered through a table, is not found.
    assert!(size(&found) - size(&blind) < 64, "{blind:x?} lacks some of {found:x?}");
}
