//! `tachyon-bpf dump --async`: names, coroutines and awaiters of tasks are what the blocked program says of itself, and the tree is
//! the one that CPython's own `python -m asyncio pstree` prints.

mod lies;

use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::process::{Command, Output};
use tachyon_tests::{Interpreter, Target, binary, on_each_interpreter};

on_each_interpreter!(every_task_is_what_the_program_says);
on_each_interpreter!(on [sid_3_14 sid_3_15 built_3_14t wheel_3_15t]: the_tree_is_the_one_of_pstree);
on_each_interpreter!(on [pyenv_3_8 pyenv_3_12 sid_3_14 sid_3_15 built_3_14t wheel_3_15t]: tasks_that_await_each_other_are_told);
on_each_interpreter!(of_each_kind: a_thousand_tasks, a_loop_that_never_rests);
on_each_interpreter!(on [pyenv_3_8 pyenv_3_13 sid_3_14 sid_3_15]: without_tasks_there_is_no_tree);

pub(crate) fn dump(pid: u32, json: bool) -> Output {
    let mut command = Command::new(binary());
    let command = command.args(["dump", "--async", "-p", &pid.to_string()]).args(json.then_some("--json"));
    command.output().expect("it runs")
}

fn dumped(pid: u32) -> Value {
    let output = dump(pid, true);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let dump: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(dump["problems"], Value::Array(Vec::new()), "{dump:#}");
    dump["asyncio"].clone()
}

fn tree(pid: u32) -> String {
    let output = dump(pid, false);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("UTF-8")
}

fn list(value: &Value) -> &[Value] {
    value.as_array().unwrap_or_else(|| panic!("{value} is no list"))
}

/// By their `id`.
fn by_id(tasks: &Value) -> BTreeMap<u64, &Value> {
    list(tasks).iter().map(|task| (task["id"].as_u64().expect("a number"), task)).collect()
}

/// Function, file and line of each frame, innermost first.
fn stack(task: &Value) -> Vec<(String, String, u64)> {
    let text = |value: &Value| value.as_str().expect("a text").to_owned();
    let frame =
        |frame: &Value| (text(&frame["function"]), text(&frame["filename"]), frame["lineno"].as_u64().expect("a line"));
    list(&task["frames"]).iter().map(frame).collect()
}

/// The same as the program reports it.
fn told_stack(stack: &Value) -> Vec<(String, String, u64)> {
    let text = |value: &Value| value.as_str().expect("a text").to_owned();
    list(stack).iter().map(|frame| (text(&frame[0]), text(&frame[1]), frame[2].as_u64().expect("a line"))).collect()
}

/// Names of the functions in which tasks wait that a program cannot look into: an asynchronous generator that is iterated over,
/// and the generator of an object with `__await__`.
fn beyond(name: &str) -> &'static [&'static str] {
    match name {
        "iterates" => &["sleep", "leaf", "generates"],
        "generator" => &["sleep", "__await__"],
        _ => &[],
    }
}

fn every_task_is_what_the_program_says(python: &Interpreter) {
    let target = Target::start(python, "task_tree.py");
    let (told, asyncio) = (&target.facts, dumped(target.pid()));
    let found = by_id(&asyncio["tasks"]);
    let expected = by_id(&told["tasks"]);
    let running = told["running"].as_u64().expect("a number");
    let ids: BTreeSet<u64> = expected.keys().copied().chain([running]).collect();
    assert_eq!(found.keys().copied().collect::<BTreeSet<_>>(), ids);
    for (id, told) in &expected {
        let task = found[id];
        let name = told["name"].as_str().expect("a text");
        for key in ["name", "tid", "loop", "awaited_by"] {
            assert_eq!(task[key], told[key], "{key} of {told:#}");
        }
        let (stack, told_stack) = (stack(task), told_stack(&told["stack"]));
        // Up to 3.10 there are no qualified names.
        let bare = |function: &'_ str| function.rsplit('.').next().unwrap_or_default().to_owned();
        let inner: Vec<String> = stack.iter().map(|(function, ..)| bare(function)).take(beyond(name).len()).collect();
        // What the program can see may extend into it.
        let (own, seen) = (stack.len().saturating_sub(told_stack.len()), beyond(name).len());
        assert_eq!(inner, beyond(name), "{task:#}");
        assert!(own <= seen, "{task:#}\n{told:#}");
        assert_eq!(stack[own..], told_stack, "{name}");
        assert_eq!(
            (&task["running"], &task["steady"], &task["whole"]),
            (&false.into(), &true.into(), &true.into()),
            "{name}"
        );
    }
    let main = found[&running];
    assert_eq!((&main["name"], &main["running"], &main["tid"]), (&told["name"], &true.into(), &told["tid"]));
    assert_eq!(stack(main), told_stack(&told["stack"]));
    let loops = list(&asyncio["loops"]);
    assert_eq!((loops.len(), &loops[0]["id"], &loops[0]["tid"]), (3, &told["main_loop"], &told["tid"]));
    for event_loop in loops {
        assert_eq!((&event_loop["type"], &event_loop["running"]), (&"_UnixSelectorEventLoop".into(), &true.into()));
    }
    assert_eq!(list(&asyncio["cycles"]).len(), 0);
    assert!(tree(target.pid()).contains("(T) bell\\x07 \\x1b[31mred\\x1b[0m\\nnew line\n"), "names are escaped");
}

/// Trees, except that of the running task: CPython shows only its coroutine.
fn trees(text: &str) -> Vec<Vec<&str>> {
    let mut trees: Vec<Vec<&str>> = Vec::new();
    for line in text.lines() {
        if line.starts_with("└── (T) ") {
            trees.push(vec![line]);
        } else if line.trim_start().starts_with(['└', '├', '│']) {
            trees.last_mut().expect("a root").push(line);
        }
    }
    trees.retain(|tree| !tree[0].starts_with("└── (T) Task-1"));
    trees
}

fn the_tree_is_the_one_of_pstree(python: &Interpreter) {
    let target = Target::start_with(python, "task_tree.py", &["plain"]);
    // From outside its root the interpreter's own tool would look for files that are elsewhere.
    let pid = target.pid().to_string();
    let mut command = Command::new(&python.path);
    if let Some(root) = &python.root {
        command = Command::new("chroot");
        command.arg(root).arg(&python.path);
    }
    let command = command.args(["-m", "asyncio", "pstree", &pid]).env("PYTHONIOENCODING", "utf-8:replace");
    let theirs = command.output().expect("it runs");
    assert!(theirs.status.success(), "{}", String::from_utf8_lossy(&theirs.stderr));
    let (theirs, ours) = (String::from_utf8_lossy(&theirs.stdout).into_owned(), tree(target.pid()));
    let (theirs, ours) = (trees(&theirs), trees(&ours));
    assert!(theirs.len() > 10, "{theirs:#?}");
    assert_eq!(ours, theirs);
}

fn tasks_that_await_each_other_are_told(python: &Interpreter) {
    let target = Target::start_with(python, "task_tree.py", &["cycle"]);
    let asyncio = dumped(target.pid());
    let names: BTreeMap<u64, &str> =
        by_id(&asyncio["tasks"]).iter().map(|(id, task)| (*id, task["name"].as_str().expect("a text"))).collect();
    let cycles = list(&asyncio["cycles"]);
    let cycle: BTreeSet<&str> = list(&cycles[0]).iter().map(|id| names[&id.as_u64().expect("a number")]).collect();
    assert_eq!((cycles.len(), cycle), (1, BTreeSet::from(["first of a pair", "second of a pair"])));
    let text = tree(target.pid());
    let told =
        "They await each other, and none of them can end: first of a pair → second of a pair → first of a pair\n";
    let told_too =
        "They await each other, and none of them can end: second of a pair → first of a pair → second of a pair\n";
    assert!(text.contains(told) || text.contains(told_too), "{text}");
    let closed = text.lines().filter(|line| line.ends_with(" (awaits a task above that awaits it)")).count();
    assert_eq!(closed, 1, "{text}");
    // The others are shown as usual.
    assert!(text.contains("\n└── (T) outer\n") && text.contains("\n└── (T) gathers\n"), "{text}");
}

fn a_thousand_tasks(python: &Interpreter) {
    let target = Target::start_with(python, "task_tree.py", &["many", "1000"]);
    let asyncio = dumped(target.pid());
    let names: BTreeSet<&str> =
        list(&asyncio["tasks"]).iter().map(|task| task["name"].as_str().expect("a text")).collect();
    let wanted: Vec<String> = (0..1000).map(|number| format!("number {number}")).collect();
    let wanted: BTreeSet<&str> = wanted.iter().map(String::as_str).chain(["Task-1"]).collect();
    assert_eq!(names, wanted);
    for task in list(&asyncio["tasks"]) {
        let functions: Vec<String> = stack(task).into_iter().map(|(function, ..)| function).collect();
        let expected = if task["running"] == true { ["tell_and_wait", "many"] } else { ["sleep", "leaf"] };
        assert_eq!(functions, expected, "{task:#}");
    }
    let text = tree(target.pid());
    assert!(text.contains(": 1001 tasks, runs Task-1\n"), "{text}");
}

/// In such a loop only what sleeps is consistent.
fn a_loop_that_never_rests(python: &Interpreter) {
    let target = Target::start(python, "busy_tasks.py");
    let mut whole = 0;
    for _ in 0..10 {
        let output = dump(target.pid(), true);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let dump: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let asyncio = &dump["asyncio"];
        assert_eq!(list(&asyncio["cycles"]).len(), 0, "{asyncio:#}");
        let name = |task: &Value| task["name"].as_str().unwrap_or_default().to_owned();
        let sleepers: Vec<_> =
            list(&asyncio["tasks"]).iter().filter(|task| name(task).starts_with("sleeper ")).collect();
        for sleeper in &sleepers {
            let functions: Vec<String> = stack(sleeper).into_iter().map(|(function, ..)| function).collect();
            assert_eq!(functions, ["sleep", "sleeps"], "{sleeper:#}");
            assert_eq!((&sleeper["steady"], &sleeper["running"]), (&true.into(), &false.into()), "{sleeper:#}");
        }
        let problems = list(&dump["problems"]);
        assert!(sleepers.len() == 10 || !problems.is_empty(), "{dump:#}");
        whole += usize::from(problems.is_empty());
        assert!(tree(target.pid()).contains("CPython "));
    }
    println!("{whole} of 10 dumps were told to be whole");
}

fn without_tasks_there_is_no_tree(python: &Interpreter) {
    let target = Target::start(python, "spin.py");
    let asyncio = dumped(target.pid());
    assert_eq!((list(&asyncio["tasks"]).len(), list(&asyncio["loops"]).len()), (0, 0));
    assert!(tree(target.pid()).ends_with("\nNo asyncio tasks, and no event loop that runs\n"));
}
