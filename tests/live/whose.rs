//! Whose work a sample shows: the asyncio task that ran, and the tasks that awaited it.

pub(crate) mod waiting;

use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use tachyon_common::whose::{MAX_AWAITING, NAME_BYTES};
use tachyon_tests::{Interpreter, Profiler, Target, let_run, on_each_interpreter, package};

on_each_interpreter!(on [pyenv_3_8 pyenv_3_13 sid_3_14 sid_3_15 wheel_3_15t]
    long [pyenv_3_9 pyenv_3_10 pyenv_3_11 pyenv_3_12 debian_3_11 musl_3_13 built_3_13t built_3_14t]: each_sample_is_of_its_task);
on_each_interpreter!(on [sid_3_14 wheel_3_15t] long [sid_3_15 built_3_14t]: stacks_go_on_with_those_that_await);
on_each_interpreter!(on [pyenv_3_8 debian_3_11 pyenv_3_13]: who_awaits_is_not_known_before_3_14);
on_each_interpreter!(on [pyenv_3_10 sid_3_15] long [sid_3_14]: a_task_that_waits_is_told);
on_each_interpreter!(on [pyenv_3_9 sid_3_15] long [pyenv_3_13 sid_3_14]: a_program_that_begins_is_told);
on_each_interpreter!(on [pyenv_3_13 sid_3_14]: of_uvloop_too);
on_each_interpreter!(on [pyenv_3_12 sid_3_14]: a_report_by_task_adds_up);
on_each_interpreter!(on [sid_3_14]: each_process_s_file_tells_its_tasks);

/// The lines of a recording of `whose.py`.
pub(crate) fn record(target: &Target, milliseconds: u64, arguments: &[&str]) -> Vec<Value> {
    let mut profiler = Profiler::of(target.pid()).native().rate(499).arg("--format").arg("jsonl");
    for argument in arguments {
        profiler = profiler.arg(*argument);
    }
    let running = profiler.start();
    let_run(target.pid(), Duration::from_millis(milliseconds));
    running.signal(libc::SIGINT);
    let text = std::fs::read_to_string(running.ended().output()).expect("a recording");
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

fn functions(sample: &Value) -> impl DoubleEndedIterator<Item = &str> {
    let frames = sample["frames"].as_array().expect("frames");
    frames.iter().map(|frame| frame["function"].as_str().expect("a name"))
}

/// What the program says: for each function, the task in which it burns, and those that await it.
fn truth(target: &Target) -> BTreeMap<String, (String, Vec<String>)> {
    serde_json::from_value(target.facts["truth"].clone()).expect("the program tells whose functions are")
}

/// A name as it is shown: only the first part if it is long.
fn shown(name: &str) -> String {
    let taken: String = name.chars().take(NAME_BYTES).collect();
    // A string has as many bytes per code point as its widest one needs.
    let widest = match name.chars().max().map_or(0, u32::from) {
        0..=0xff => 1,
        0x100..=0xffff => 2,
        _ => 4,
    };
    let cut: String = taken.chars().take(NAME_BYTES / widest).collect();
    if cut == name { cut } else { format!("{cut}\u{2026}") }
}

/// Compares each sample of a function that burns with what the program says about it; returns the functions that were seen.
fn judge(samples: &[Value], truth: &BTreeMap<String, (String, Vec<String>)>, chains: bool) -> BTreeSet<String> {
    let (mut met, mut unknown, mut all) = (BTreeSet::new(), 0, 0);
    for sample in samples {
        let Some(function) = functions(sample).find(|name| truth.contains_key(*name)) else { continue };
        all += 1;
        let task = &sample["task"];
        if task.is_null() {
            unknown += 1;
            continue;
        }
        let (name, chain) = &truth[function];
        assert_eq!(task["name"].as_str(), Some(&*shown(name)), "{function}: {sample:#}");
        assert!(task["id"].as_u64().is_some_and(|id| id != 0), "{sample:#}");
        let told: Vec<_> = task["chain"].as_array().expect("a list").iter().filter_map(Value::as_str).collect();
        if chains {
            let true_chain: Vec<_> = chain.iter().take(MAX_AWAITING).map(|name| shown(name)).collect();
            assert_eq!(told, true_chain, "{function}: {sample:#}");
        } else {
            assert!(told.is_empty(), "{sample:#}");
        }
        met.insert(function.to_owned());
    }
    println!("{all} samples of functions of {} tasks, {unknown} without a task", met.len());
    assert!(all > 500 && unknown * 1000 <= all, "{unknown} of {all} without a task");
    met
}

/// A task belongs to its thread, whatever loop runs it.
fn of_uvloop_too(interpreter: &Interpreter) {
    let path = package("uvloop", interpreter);
    let target = Target::start_in(interpreter, "whose.py", &["uvloop"], &[("PYTHONPATH", &path)]);
    let truth = truth(&target);
    let all: BTreeSet<String> = truth.keys().cloned().collect();
    let samples = record(&target, 2_500, &[]);
    assert_eq!(judge(&samples, &truth, false), all);
    assert!(samples.iter().any(|sample| functions(sample).any(|name| name.contains("uv_run"))), "the loop is native");
    let samples = record(&target, 2_500, &["--async"]);
    let says_who_awaits = interpreter.minor >= 14;
    assert_eq!(judge(&samples, &truth, says_who_awaits), all);
    for sample in &samples {
        let stack: Vec<_> = functions(sample).collect();
        if let Some(at) = stack.iter().position(|name| *name == "burn_a_shield") {
            let name = "sh\u{e9}ltered \u{4e2d}\u{1f600}";
            let expected: &[_] =
                if says_who_awaits { &["work", name, "shields", "shields", "main"] } else { &["work", name] };
            assert!(stack[at + 1..].starts_with(expected), "{stack:?}");
            assert!(!stack.iter().any(|name| name.contains("uv_run")), "the loop's frames are left out: {stack:?}");
        }
    }
}

fn each_sample_is_of_its_task(interpreter: &Interpreter) {
    let target = Target::start(interpreter, "whose.py");
    let truth = truth(&target);
    let samples = record(&target, 2_500, &[]);
    assert_eq!(judge(&samples, &truth, false), truth.keys().cloned().collect());
    // Stacks are the thread's: the event loop called the task.
    assert!(samples.iter().all(|sample| functions(sample).all(|name| name != "shared")));
    assert!(samples.iter().any(|sample| functions(sample).any(|name| name == "Handle._run" || name == "_run")));
}

fn stacks_go_on_with_those_that_await(interpreter: &Interpreter) {
    let target = Target::start(interpreter, "whose.py");
    let truth = truth(&target);
    let samples = record(&target, 4_000, &["--async"]);
    assert_eq!(judge(&samples, &truth, true), truth.keys().cloned().collect());
    let stacks = |function: &str| -> BTreeSet<Vec<&str>> {
        let of = |sample: &&Value| functions(sample).any(|name| name == function);
        samples
            .iter()
            .filter(of)
            .map(|sample| functions(sample).skip_while(|name| *name != function).skip(1).collect())
            .collect()
    };
    let is = |function: &str, expected: &[&str]| assert_eq!(stacks(function), BTreeSet::from([expected.to_vec()]));
    let root = ["main", truth["burn_a_shield"].1.last().expect("the loop's own task")];
    let below = |frames: &[&'static str]| -> Vec<&str> { frames.iter().copied().chain(root).collect() };
    is("burn_a_gather_one", &below(&["work", "a_gather one", "gathers", "gathers"]));
    is("burn_a_shield", &below(&["work", "sh\u{e9}ltered \u{4e2d}\u{1f600}", "shields", "shields"]));
    is(
        "burn_a_group_named",
        &below(&["work", "in a \n group \u{20ac}", "TaskGroup._aexit", "TaskGroup.__aexit__", "groups", "groups"]),
    );
    // Two await it: the stack continues with one of them, and the frame says so.
    for stack in stacks("burn_a_two") {
        assert_eq!(stack[..2], ["work", "shared (2 parents)"], "{stack:?}");
        assert!(stack[2] == "waits_for" && stack[3].starts_with("waits "), "{stack:?}");
        assert_eq!(stack[4..], below(&["awaited_by_two", "two"]), "{stack:?}");
    }
    // More than eight await it: the stack says that there are more.
    for stack in stacks("burn_a_nested") {
        assert_eq!(stack.last(), Some(&"<stack cut: tasks that await it>"), "{stack:?}");
    }
    // Of a task with more than 16 coroutines 16 are followed, from the outermost, and a mark shows that there are more.
    for stack in stacks("burn_a_awaits") {
        let at = stack.iter().position(|name| *name == "<stack cut: coroutines>").expect("a mark");
        assert_eq!(stack[at - 1], "child", "{stack:?}");
        assert_eq!(stack[at + 1..at + 17], [&["awaits_deeper"; 15][..], &["awaits_deep"]].concat(), "{stack:?}");
    }
    // An eager task runs above the one that created it, which does not await it.
    is("burn_a_eager", &["eager.<locals>.first", "eager a_eager"]);
}

/// Before 3.14 a task does not say who awaits it: its stack ends with it, and says that it is cut there.
fn who_awaits_is_not_known_before_3_14(interpreter: &Interpreter) {
    let target = Target::start(interpreter, "whose.py");
    let truth = truth(&target);
    let samples = record(&target, 2_500, &["--async"]);
    assert_eq!(judge(&samples, &truth, false), truth.keys().cloned().collect());
    let mut met = 0;
    for sample in &samples {
        let stack: Vec<_> = functions(sample).collect();
        if let Some(at) = stack.iter().position(|name| *name == "burn_a_shield") {
            let expected = ["work", "sh\u{e9}ltered \u{4e2d}\u{1f600}", "<stack cut: tasks that await it>"];
            assert_eq!(stack[at + 1..], expected);
            met += 1;
        }
    }
    assert!(met > 0, "the task is met");
}

/// asyncio is not imported yet when the recording begins.
fn a_program_that_begins_is_told(interpreter: &Interpreter) {
    let script = "import asyncio, time\ndef burn():\n end = time.process_time() + 2\n while time.process_time() < end: pass\n\
                  async def work(): burn()\nasync def main(): await asyncio.create_task(work(), name='begun')\nasyncio.run(main())";
    let dir = tempfile::tempdir().expect("a folder");
    let out = dir.path().join("begun.jsonl");
    let mut command = std::process::Command::new(tachyon_tests::binary());
    let python = interpreter.command();
    command.args(["-F", "499", "-o"]).arg(&out).arg("--").arg(python.get_program()).args(python.get_args());
    command.args(["-c", script]);
    assert!(command.status().expect("it can be run").success());
    let text = std::fs::read_to_string(&out).expect("a recording");
    let samples: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let burns: Vec<_> = samples.iter().filter(|sample| functions(sample).any(|name| name == "burn")).collect();
    let known: Vec<_> = burns.iter().filter(|sample| !sample["task"].is_null()).collect();
    println!("{} of {} samples have their task", known.len(), burns.len());
    assert!(known.iter().all(|sample| sample["task"]["name"] == "begun"));
    // It is looked at 0.2 s after its start, and again soon if it was still importing then.
    assert!(burns.len() > 500 && known.len() * 2 > burns.len(), "{} of {}", known.len(), burns.len());
    let first = burns.iter().position(|sample| !sample["task"].is_null()).expect("some are known");
    assert!(burns[first..].iter().all(|sample| !sample["task"].is_null()), "once it is known, it stays so");
}

/// Each sample belongs to one task, and counts in the total of those that await it.
fn a_report_by_task_adds_up(interpreter: &Interpreter) {
    let target = Target::start(interpreter, "whose.py");
    let report = |path: &std::path::Path| {
        let mut command = std::process::Command::new(tachyon_tests::binary());
        command.args(["report", "--by", "task", "--json"]).arg(path).output().expect("it can be run")
    };
    let plain = Profiler::of(target.pid()).rate(499).cpu_milliseconds(target.pid(), 200).record();
    let refused = report(&plain.path);
    assert!(String::from_utf8_lossy(&refused.stderr).contains("record with --async"), "{refused:?}");
    let recording = Profiler::of(target.pid()).rate(499).cpu_milliseconds(target.pid(), 1_000).arg("--async").record();
    let told: Value = serde_json::from_slice(&report(&recording.path).stdout).expect("it is JSON");
    let row = |name: &str| {
        let mut rows = told["rows"].as_array().expect("rows").iter();
        let row = rows.find(|row| row["name"] == name).unwrap_or_else(|| panic!("no row {name}: {told:#}"));
        let count = |key: &str| row[key].as_u64().expect("a count");
        (count("self"), count("total"))
    };
    let rows = told["rows"].as_array().expect("rows");
    let own: u64 = rows.iter().map(|row| row["self"].as_u64().expect("a count")).sum();
    assert_eq!((own, &told["by"]), (recording.report.stored, &Value::from("task")), "{told:#}");
    let (own, total) = row("sh\u{e9}ltered \u{4e2d}\u{1f600}");
    assert!(own > 0 && own == total, "nobody is awaited by it: {told:#}");
    assert!(rows.iter().all(|row| row["name"] != "<no task>") || row("<no task>").0 * 20 < recording.report.stored);
    if interpreter.minor >= 14 {
        // The task that awaits it runs itself only for a moment at its beginning.
        let (waits, with) = row("shields");
        assert!(waits == 0 && with == total, "{told:#}");
    }
}

fn a_task_that_waits_is_told(interpreter: &Interpreter) {
    let target = Target::start_with(interpreter, "whose.py", &["sleeps"]);
    // Most of the time it has no CPU.
    let samples = record(&target, 30, &["--wall"]);
    let sleeping: Vec<_> = samples.iter().filter(|sample| functions(sample).any(|name| name == "sleeps")).collect();
    assert!(!sleeping.is_empty(), "the task that sleeps is met");
    for sample in sleeping {
        assert_eq!(sample["task"]["name"], "blocks", "{sample:#}");
    }
}

/// Files for each process are made at the end, from what was kept meanwhile.
fn each_process_s_file_tells_its_tasks(interpreter: &Interpreter) {
    let target = Target::start(interpreter, "whose.py");
    let truth = truth(&target);
    let dir = tempfile::tempdir().expect("a folder");
    let out = dir.path().join("split");
    let status = std::process::Command::new(tachyon_tests::binary())
        .args([
            "-p",
            &target.pid().to_string(),
            "-F",
            "499",
            "-d",
            "3s",
            "--split",
            "process",
            "--format",
            "jsonl",
            "-o",
        ])
        .arg(&out)
        .status();
    assert!(status.expect("it can be run").success());
    let files: Vec<_> = std::fs::read_dir(&out).expect("a folder").flatten().map(|entry| entry.path()).collect();
    let file = files.iter().find(|path| path.extension().is_some_and(|it| it == "jsonl")).expect("a file");
    let text = std::fs::read_to_string(file).expect("it can be read");
    let samples: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    judge(&samples, &truth, false);
}
