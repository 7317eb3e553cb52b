//! The greenlet that runs: named with each sample, and with `--async` its parents below it.

use super::{number, with_greenlet};
use crate::whose::record;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;
use tachyon_common::whose::MAX_GREENLETS;
use tachyon_tests::{Interpreter, Target, on_each_interpreter, package};

on_each_interpreter!(on [pyenv_3_8 pyenv_3_11 pyenv_3_13 sid_3_14 built_3_14t]
    long [pyenv_3_9 pyenv_3_10 pyenv_3_12 debian_3_11 sid_3_15]: each_stack_goes_on_with_the_greenlets_parents);
on_each_interpreter!(on [pyenv_3_10 sid_3_15] long [pyenv_3_12 built_3_14t]: none_is_mixed_with_another_however_often_they_switch);
on_each_interpreter!(on [pyenv_3_9 pyenv_3_12 sid_3_14]: a_task_is_found_below_its_greenlets);
on_each_interpreter!(on [pyenv_3_13 built_3_14t]: without_async_there_is_only_the_name);
on_each_interpreter!(on [pyenv_3_13]: a_stripped_module_is_read_too);
on_each_interpreter!(on [pyenv_3_13]: of_gevent);
on_each_interpreter!(on [pyenv_3_13]: of_eventlet);
on_each_interpreter!(on [pyenv_3_8 pyenv_3_13]: lies_change_nothing_of_the_threads_own_stack);
on_each_interpreter!(on [pyenv_3_11 pyenv_3_12]: a_stack_that_is_walked_again_keeps_its_parents);

/// How long a greenlet burns at a time: nothing like the time between two samples, or a switch met once would be met again by the next ones.
const BURN_MS: &str = "3.3";

/// What the program says about one of its towers.
struct Tower {
    name: String,
    id: u64,
    /// The greenlets below the innermost one, but for the main one.
    parents: usize,
}

fn start(python: &Interpreter, arguments: &[&str]) -> (Target, Vec<Tower>) {
    let (python, path) = with_greenlet(python);
    let environment: Vec<_> = path.iter().map(|path| ("PYTHONPATH", path.as_str())).collect();
    let target = Target::start_in(&python, "running_greenlets.py", arguments, &environment);
    let towers = towers_of(&target);
    (target, towers)
}

fn towers_of(target: &Target) -> Vec<Tower> {
    let towers = target.facts["towers"].as_array().expect("towers").iter();
    let towers = towers.map(|tower| Tower {
        name: tower["name"].as_str().expect("a name").to_owned(),
        id: number(&tower["id"]),
        parents: 1 + usize::try_from(number(&tower["depth"])).expect("few"),
    });
    towers.collect()
}

/// The functions that say whose work it is: the program's own, and what the profiler puts between them, each after its file if that
/// stands for something.
fn own(sample: &Value) -> Vec<String> {
    let text = |frame: &Value, key: &str| frame[key].as_str().unwrap_or_default().to_owned();
    let frames = sample["frames"].as_array().expect("frames").iter();
    let named = frames.map(|frame| (text(frame, "file"), text(frame, "function"))).filter_map(|(file, function)| {
        let is_own =
            file.ends_with("running_greenlets.py") && function != "<module>" || function.starts_with("<stack cut");
        match file.as_str() {
            "<greenlet>" | "<task>" => Some(format!("{file} {function}")),
            _ => is_own.then_some(function),
        }
    });
    named.collect()
}

/// How a stack goes on from the innermost function of a tower's innermost greenlet.
fn expected(tower: &Tower, at: usize) -> Vec<String> {
    let mut stack = vec![format!("inner_{at}"), format!("<greenlet> {}", tower.name)];
    for parent in 1..=tower.parents {
        if parent == MAX_GREENLETS {
            stack.push("<stack cut: parents of the greenlet>".to_owned());
            return stack;
        }
        let kind = if parent == tower.parents { "greenlet" } else { "Worker" };
        stack.extend([format!("outer_{at}"), format!("<greenlet> {kind}")]);
    }
    stack
}

/// Whether it was taken while a thread goes from one greenlet to another.
fn switches(sample: &Value) -> bool {
    let frames = sample["frames"].as_array().expect("frames").iter();
    let mut native = frames.take_while(|frame| frame["kind"] == "native");
    native.any(|frame| {
        frame["function"].as_str().is_some_and(|name| name.contains("greenlet::") || name.contains("slp_"))
    })
}

/// Compares all samples that are of a tower by their innermost function. Returns how many there were of each, and how many do not say of
/// which greenlet they are because the thread was going from one to another; hardly any other may be without, and none may say anything that is
/// not so. `below`: how stacks end, and how those do that are cut before.
fn judge(samples: &[Value], towers: &[Tower], below: &dyn Fn(bool) -> Vec<String>) -> (BTreeMap<usize, usize>, usize) {
    let (mut met, mut of_switches, mut others) = (BTreeMap::new(), 0, 0);
    // Where a process has its greenlets is found out while samples are taken already.
    let is_known = |sample: &Value| own(sample).iter().any(|name| name.starts_with("<greenlet>"));
    for sample in samples.iter().skip_while(|sample| !is_known(sample)) {
        let stack = own(sample);
        let leaf = stack.iter().find_map(|name| name.strip_prefix("burn_").or_else(|| name.strip_prefix("inner_")));
        let Some(at) = leaf.and_then(|number| number.parse::<usize>().ok()) else { continue };
        *met.entry(at).or_default() += 1;
        let shown: Vec<String> =
            stack.iter().filter(|name| !name.starts_with("burn_") && *name != "begin").cloned().collect();
        let names_none = !stack.iter().any(|name| name.starts_with("<greenlet>"));
        if names_none
            && shown.first() == Some(&format!("inner_{at}"))
            && !shown.iter().any(|name| name.contains("outer"))
        {
            *if switches(sample) { &mut of_switches } else { &mut others } += 1;
            continue;
        }
        let tower = &towers[at];
        let mut wanted = expected(tower, at);
        let cut = wanted.last().is_some_and(|last| last.starts_with("<stack cut"));
        wanted.extend(below(cut));
        assert_eq!(shown, wanted, "{sample:#}");
    }
    println!("{met:?} samples of greenlets; {of_switches} of their switches and {others} others do not say of which");
    let all: usize = met.values().sum();
    assert!(others * 100 <= all, "{others} of {all}");
    (met, of_switches)
}

/// How a thread's own stack ends.
fn main_ends(cut: bool) -> Vec<String> {
    if cut { Vec::new() } else { ["loop", "thread", "<greenlet> main"].map(str::to_owned).into() }
}

fn each_stack_goes_on_with_the_greenlets_parents(python: &Interpreter) {
    let (target, towers) = start(python, &[BURN_MS]);
    let samples = record(&target, 2_000, &["--async"]);
    let (met, of_switches) = judge(&samples, &towers, &main_ends);
    assert_eq!(met.len(), towers.len());
    let all: usize = met.values().sum();
    assert!(of_switches * 20 <= all, "{of_switches} of {all}");
    for sample in samples.iter().filter(|sample| !sample["task"].is_null()) {
        let stack = own(sample);
        let Some(at) = stack.iter().position(|name| name.starts_with("inner_")) else { continue };
        let number: usize = stack[at]["inner_".len()..].parse().expect("a number");
        assert_eq!(sample["task"]["id"], towers[number].id, "{sample:#}");
        assert_eq!(sample["task"]["name"], towers[number].name.as_str(), "{sample:#}");
        let greenlets: Vec<&str> = stack.iter().filter_map(|name| name.strip_prefix("<greenlet> ")).collect();
        // The parents, behind the one that runs.
        let chain = &greenlets[1..];
        assert_eq!(sample["task"]["chain"], Value::from(chain), "{sample:#}");
    }
}

/// They switch every few microseconds, so many samples are of a thread that is going from one to another.
fn none_is_mixed_with_another_however_often_they_switch(python: &Interpreter) {
    let (target, towers) = start(python, &["0.002"]);
    let samples = record(&target, 4_000, &["--async"]);
    let (met, of_switches) = judge(&samples, &towers, &main_ends);
    // greenlet takes out of the chain what C entered the evaluator for (3.12+), which looks like a frame that is being linked.
    let entering = samples.iter().filter(|sample| own(sample).is_empty()).count();
    println!("{entering} of {} samples have no frame of the program's own", samples.len());
    assert!(entering * 200 <= samples.len(), "{entering} of {}", samples.len());
    let all: usize = met.values().sum();
    assert!(met.len() == towers.len() && all > 1_000, "{met:?}");
    assert!(of_switches * 4 <= all, "{of_switches} of {all}");
    behind_a_switch_there_are_only_python_frames(&samples);
}

/// While the stack of one greenlet takes the place of another's, native frames behind the switch may be either's.
fn behind_a_switch_there_are_only_python_frames(samples: &[Value]) {
    let mut switches = 0;
    for sample in samples {
        let frames = sample["frames"].as_array().expect("frames");
        let function = |frame: &Value| frame["function"].as_str().unwrap_or_default().to_owned();
        let is_native = |frame: &&Value| frame["kind"] == "native";
        if !frames.iter().any(|frame| function(frame).contains("slp_restore_state")) {
            continue;
        }
        switches += 1;
        assert_eq!(sample["merge"], "repaired", "{sample:#}");
        let leaf = frames.iter().take_while(is_native).count();
        let all = frames.iter().filter(is_native).count();
        assert!(leaf == all && !frames.iter().any(|frame| function(frame).contains("PyEval")), "{sample:#}");
    }
    println!("{switches} samples while a stack was put in the place of another");
    assert!(switches > 10, "{switches}");
}

/// As SQLAlchemy's asyncio extension has it.
fn a_task_is_found_below_its_greenlets(python: &Interpreter) {
    let (target, towers) = start(python, &[BURN_MS, "asyncio"]);
    // From 3.14 on the thread says which task it runs; before, that shows in the frames.
    let says = python.minor >= 14;
    let below = |cut: bool| {
        let ends: &[&str] = match (cut, says) {
            (false, false) => &["loop", "in_task", "<task> Task-", "<stack cut: tasks that await it>"],
            (false, true) => &["loop", "in_task", "<task> Task-"],
            (true, false) => &[],
            (true, true) => &["<task> Task-"],
        };
        ends.iter().map(|&name| name.to_owned()).collect()
    };
    let mut samples = record(&target, 1_500, &["--async"]);
    for sample in &mut samples {
        let stack = own(sample);
        let burns = stack.first().is_some_and(|name| name.starts_with("burn_"));
        let has_task = stack.iter().any(|name| name.starts_with("<task>"));
        let name = sample["task"]["name"].as_str().unwrap_or_default();
        assert!(!burns || name.starts_with("Task-") == has_task, "{sample:#}");
        // Each thread has a task of its own.
        for frame in sample["frames"].as_array_mut().expect("frames") {
            if frame["file"] == "<task>" {
                frame["function"] = "Task-".into();
            }
        }
    }
    let (met, of_switches) = judge(&samples, &towers, &below);
    let all: usize = met.values().sum();
    assert!(met.len() == towers.len() && of_switches * 20 <= all, "{met:?}, {of_switches} of switches");
}

fn without_async_there_is_only_the_name(python: &Interpreter) {
    let (target, towers) = start(python, &[BURN_MS]);
    let samples = record(&target, 1_000, &[]);
    let (mut named, mut all) = (0, 0);
    for sample in samples.iter().skip_while(|sample| sample["task"].is_null()) {
        let stack = own(sample);
        let Some(at) = stack.last().and_then(|name| name.strip_prefix("inner_")) else { continue };
        let tower = &towers[at.parse::<usize>().expect("a number")];
        if sample["task"].is_null() && switches(sample) {
            continue;
        }
        all += 1;
        if sample["task"].is_null() {
            continue;
        }
        named += 1;
        assert_eq!(sample["task"], serde_json::json!({"name": tower.name, "id": tower.id, "chain": []}), "{sample:#}");
    }
    println!("{named} of {all} samples say of which greenlet they are");
    assert!(all > 100 && named * 100 >= all * 99, "{named} of {all}");
}

/// As distributions have it: without `.symtab`.
fn a_stripped_module_is_read_too(python: &Interpreter) {
    let (python, _) = with_greenlet(python);
    let find = "import greenlet, os; print(os.path.dirname(greenlet.__file__))";
    let found = python.command().args(["-c", find]).output().expect("it has greenlet").stdout;
    let package = String::from_utf8(found).expect("a path");
    let dir = tempfile::tempdir().expect("a folder");
    let copied = Command::new("cp").arg("-r").arg(package.trim()).arg(dir.path()).status().expect("cp");
    let modules = std::fs::read_dir(dir.path().join("greenlet")).expect("it is there").flatten();
    let module = modules.map(|entry| entry.path()).find(|path| path.to_string_lossy().contains("_greenlet."));
    let module = module.expect("greenlet's extension module");
    let before = std::fs::metadata(&module).expect("a file").len();
    let stripped = Command::new("strip").arg(&module).status().expect("strip");
    assert!(copied.success() && stripped.success() && std::fs::metadata(&module).expect("a file").len() < before);
    let path = dir.path().to_str().expect("UTF-8");
    let target = Target::start_in(&python, "running_greenlets.py", &[BURN_MS], &[("PYTHONPATH", path)]);
    let samples = record(&target, 1_000, &["--async"]);
    let (met, of_switches) = judge(&samples, &towers_of(&target), &main_ends);
    let all: usize = met.values().sum();
    assert!(met.len() == 6 && of_switches * 20 <= all, "{met:?}, {of_switches} of switches");
}

/// What its memory says of its parents, or of its name, is a lie.
fn lies_change_nothing_of_the_threads_own_stack(python: &Interpreter) {
    let (python, _) = with_greenlet(python);
    let no_parents: &[&str] = &["<greenlet> Inner", "<stack cut: parents of the greenlet>"];
    let without_frames =
        ["<greenlet> Inner", "<stack cut: greenlet>", "<greenlet> Outer", "<module>", "<greenlet> main"];
    let whole = ["<greenlet> Inner", "begins", "outer", "<greenlet> Outer", "<module>", "<greenlet> main"];
    let circle = [&["<greenlet> Inner"][..], &["begins"; 256], &without_frames[1..]].concat();
    let own_parent: Vec<&str> =
        ["<greenlet> Inner"].into_iter().chain([&whole[1..4]; MAX_GREENLETS - 1].concat()).collect();
    let own_parent = [&own_parent[..], &no_parents[1..]].concat();
    let lies: [(&str, &[&str]); 8] = [
        ("no-greenlet", no_parents),
        ("nowhere", no_parents),
        ("own-parent", &own_parent),
        ("circle", &circle),
        ("no-frame", &without_frames),
        ("dictionary", &whole),
        ("name", &whole),
        ("current", &[]),
    ];
    for (lie, below) in lies {
        let target = Target::start_with(&python, "running_lies.py", &[lie]);
        let samples = record(&target, 400, &["--async"]);
        let mut burning = 0;
        // Of the lie after which nothing can be told, there is none that is known.
        let known = samples.iter().position(|sample| !sample["task"].is_null()).unwrap_or(0);
        for sample in &samples[known..] {
            let frames = sample["frames"].as_array().expect("frames").iter();
            let shown: Vec<String> = frames
                .filter(|frame| frame["kind"] != "native")
                .map(|frame| (frame["file"].as_str().unwrap_or_default(), frame["function"].as_str().expect("a name")))
                .map(
                    |(file, function)| {
                        if file == "<greenlet>" { format!("{file} {function}") } else { function.to_owned() }
                    },
                )
                .collect();
            assert_eq!(shown[..2], ["burn", "inner"], "{lie}: {sample:#}");
            // A type's name, if its own cannot be read.
            assert_eq!(shown[2..], *below, "{lie}");
            burning += 1;
        }
        println!("{lie}: {burning} samples");
        assert!(burning > 50, "{lie}");
    }
}

fn of_gevent(python: &Interpreter) {
    of_a_hub(python, "gevent", "Hub.run", "Hub");
}

fn of_eventlet(python: &Interpreter) {
    of_a_hub(python, "eventlet", "BaseHub.run", "greenlet");
}

/// Each sample of a function that burns is of the greenlet whose that is, below the hub and what the thread began with.
fn of_a_hub(python: &Interpreter, framework: &str, run: &str, hub: &str) {
    let path = package("gevent", python);
    let target = Target::start_in(python, "greenlets_in_hubs.py", &[framework], &[("PYTHONPATH", &path)]);
    let (mut met, mut all, mut without) = (BTreeSet::new(), 0, 0);
    let samples = record(&target, 3_000, &["--async"]);
    for sample in samples.iter().skip_while(|sample| sample["task"].is_null()) {
        let frames = sample["frames"].as_array().expect("frames").iter();
        let python = frames.filter(|frame| frame["kind"] != "native");
        let shown: Vec<&str> = python.map(|frame| frame["function"].as_str().expect("a name")).collect();
        let Some(number) = shown.iter().find_map(|name| name.strip_prefix("burn_")) else { continue };
        if sample["task"].is_null() && switches(sample) {
            continue;
        }
        all += 1;
        if sample["task"].is_null() {
            without += 1;
            continue;
        }
        let (name, at) = (format!("worker {number}"), number.parse::<usize>().expect("a number"));
        assert_eq!(sample["task"]["id"], target.facts["ids"][at], "{sample:#}");
        let chain = serde_json::json!([hub, "main"]);
        assert_eq!((&sample["task"]["name"], &sample["task"]["chain"]), (&name.as_str().into(), &chain), "{sample:#}");
        let begins = shown.iter().position(|shown| *shown == name).expect("it has a frame");
        assert!(shown[begins - 1] == format!("work_{number}") || framework == "eventlet", "{shown:?}");
        let rest: Vec<&&str> = shown[begins..].iter().collect();
        let place = |name: &str| rest.iter().position(|shown| **shown == name);
        assert!(
            place(run) < place(hub) && place(hub) < place("<module>") && place("<module>") < place("main"),
            "{shown:?}"
        );
        met.insert(at);
    }
    println!("{framework}: {all} samples of {} greenlets, {without} do not say of which", met.len());
    assert!(met.len() == 20 && without * 1_000 <= all, "{met:?}, {without} of {all}");
}

/// Where the evaluator is being entered (3.11, 3.12), the thread's frames are walked once more, from the native stack, and so are its parents'.
fn a_stack_that_is_walked_again_keeps_its_parents(python: &Interpreter) {
    let (python, _) = with_greenlet(python);
    let target = Target::start(&python, "entering_greenlets.py");
    let samples = record(&target, 4_000, &["--async"]);
    let parents = ["<greenlet> greenlet", "begins", "outer", "<greenlet> greenlet", "<module>", "<greenlet> main"];
    let own = ["burn", "inner.<locals>.<lambda>", "inner"];
    let mut entering = 0;
    for sample in samples.iter().skip_while(|sample| sample["task"].is_null()) {
        let frames = sample["frames"].as_array().expect("frames").iter();
        let python = frames.filter(|frame| frame["kind"] != "native" && frame["function"] != "called");
        let text = |frame: &Value, key: &str| frame[key].as_str().unwrap_or_default().to_owned();
        let shown: Vec<String> = python
            .map(|frame| (text(frame, "file"), text(frame, "function")))
            .map(|(file, function)| if file == "<greenlet>" { format!("{file} {function}") } else { function })
            .collect();
        let is_entering = shown.first().is_some_and(|name| name == "<entering evaluator>");
        entering += usize::from(is_entering && shown.len() > 1 + parents.len());
        let shown = &shown[usize::from(is_entering)..];
        let wanted = [&own[..], &parents].concat();
        // Without its callers, where the native stack did not lead to them.
        assert!(shown == wanted || is_entering && shown == parents, "{shown:?}\n{sample:#}");
    }
    println!(
        "{entering} of {} samples were taken while the evaluator was entered, and have their callers",
        samples.len()
    );
    assert!(entering >= 3, "{entering} of {}", samples.len());
}
