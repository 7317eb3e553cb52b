//! Greenlets that are switched away: each where it switched, by `dump --async` and as samples of `--wall --async`.

mod running;

use crate::tasks::dump;
use crate::whose::waiting::{looks, record, weight};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use tachyon_tests::{Interpreter, Target, on_each_interpreter, package, statistics, with_wheels};

on_each_interpreter!(on [pyenv_3_8 pyenv_3_11 pyenv_3_13 sid_3_14 sid_3_15]
    long [pyenv_3_9 pyenv_3_10 pyenv_3_12 debian_3_11]: each_is_where_the_program_says);
on_each_interpreter!(on [pyenv_3_8 sid_3_14] long [pyenv_3_12]: each_waits_where_it_switched_away);
on_each_interpreter!(on [pyenv_3_13]: of_gevent_too);
on_each_interpreter!(on [pyenv_3_13]: of_eventlet_too);
on_each_interpreter!(on [pyenv_3_13]: among_many_objects);
on_each_interpreter!(on [pyenv_3_13]: those_that_come_and_go);
on_each_interpreter!(on [pyenv_3_13]: a_main_one_is_found_by_its_greenlets);
on_each_interpreter!(on [built_3_14t]: without_lists_there_are_none);
on_each_interpreter!(on [pyenv_3_8 pyenv_3_13]: lies_do_not_hide_what_is_true);

const EVENT: &str = "<event: task-wait>";

/// A function whose name could not be read.
const UNKNOWN: &str = "<unknown function>";

/// The interpreter, and what it is started with, so that it can import greenlet.
pub(crate) fn with_greenlet(python: &Interpreter) -> (Interpreter, Option<String>) {
    if python.root.is_some() {
        return (python.clone(), Some(package("greenlet", python)));
    }
    let version = match python.minor {
        // From the oldest Python whose greenlets are read on; for those that greenlet no longer supports, the last version that did.
        8 => "greenlet==3.1.1",
        9 => "greenlet==3.2.4",
        _ => "greenlet==3.5.6",
    };
    (with_wheels(python, &[version]), None)
}

fn start(python: &Interpreter, arguments: &[&str]) -> Target {
    let (python, path) = with_greenlet(python);
    let environment: Vec<_> = path.iter().map(|path| ("PYTHONPATH", path.as_str())).collect();
    Target::start_in(&python, "waiting_greenlets.py", arguments, &environment)
}

fn dumped(pid: u32) -> Value {
    let output = dump(pid, true);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let dump: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(dump["problems"], Value::Array(Vec::new()), "{dump:#}");
    dump
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is no number"))
}

/// Functions and lines of a stack, only those of the program's own code that say where a greenlet waits.
fn own(frames: &Value) -> Vec<(&str, u64)> {
    let frames = frames.as_array().expect("frames").iter();
    let plain = |name: &'_ str| name.rsplit('.').next().expect("a name").to_owned();
    let shown = frames.filter(|frame| frame["filename"].as_str().is_some_and(|file| file.ends_with("greenlets.py")));
    let named = shown.map(|frame| (frame["function"].as_str().expect("a name"), frame["lineno"].as_u64().unwrap_or(0)));
    // All of them wait in these, or begin in them.
    named.filter(|(name, _)| !["<lambda>", "own_sleep"].contains(&plain(name).as_str())).collect()
}

/// Compares what was read with what the program says about itself. Returns how many greenlets were compared.
fn judge(target: &Target) -> usize {
    let dump = dumped(target.pid());
    let list = dump["greenlets"].as_array().unwrap_or_else(|| panic!("{dump:#}"));
    let found: BTreeMap<u64, &Value> = list.iter().map(|greenlet| (number(&greenlet["id"]), greenlet)).collect();
    assert_eq!(found.len(), list.len(), "each is told once");
    let told: BTreeMap<u64, &Value> = target.facts["greenlets"]
        .as_object()
        .expect("facts")
        .iter()
        .map(|(id, fact)| (id.parse().expect("an id"), fact))
        .collect();
    let (tids, line) = (&target.facts["tids"], number(&target.facts["line"]));
    let mut compared = 0;
    for (id, fact) in &told {
        let greenlet = found.get(id).unwrap_or_else(|| panic!("{fact} is missing: {dump:#}"));
        assert_eq!(greenlet["parent"], fact["parent"], "{greenlet:#}");
        let tid = if fact["name"] == "second" { &tids["second"] } else { &tids["first"] };
        assert_eq!(&greenlet["tid"], tid, "{greenlet:#}");
        assert_eq!(greenlet["name"], fact["name"], "{greenlet:#}");
        let Some(functions) = fact["functions"].as_array() else { continue };
        assert_eq!((&greenlet["running"], &greenlet["whole"]), (&false.into(), &true.into()), "{greenlet:#}");
        let stack = own(&greenlet["frames"]);
        let last = |name: &str| name.rsplit('.').next().expect("a name").to_owned();
        let names: Vec<String> = stack.iter().map(|(name, _)| last(name)).collect();
        assert_eq!(
            names,
            functions.iter().map(|name| name.as_str().expect("a name")).collect::<Vec<_>>(),
            "{greenlet:#}"
        );
        assert!(stack.iter().all(|(name, at)| *name != "never" || *at == line), "{greenlet:#}");
        compared += 1;
    }
    // In addition each thread has its main greenlet and its hub, and the second also one that sleeps: none that has not begun or has ended.
    let others = found.keys().filter(|id| !told.contains_key(id)).count();
    assert_eq!(others, 5, "{dump:#}");
    compared
}

fn each_is_where_the_program_says(python: &Interpreter) {
    let target = start(python, &[]);
    assert_eq!(judge(&target), 7);
    let text = String::from_utf8(dump(target.pid(), false).stdout).expect("UTF-8");
    assert!(text.contains(": 10 greenlets, runs ") && text.contains("(G) main\n"), "{text}");
    assert!(!text.contains("asyncio"), "it has none of those: {text}");
}

/// Names of the functions that say where a greenlet waits, and the greenlet's own name.
fn place(sample: &Value) -> Vec<&str> {
    let frames = sample["frames"].as_array().expect("frames").iter();
    let is_own = |frame: &&Value| {
        let file = frame["file"].as_str().unwrap_or_default();
        file.ends_with("waiting_greenlets.py") || file == "<greenlet>"
    };
    let names = frames.filter(is_own).map(|frame| frame["function"].as_str().expect("a name"));
    names.filter(|name| !name.ends_with("<lambda>") && *name != "own_sleep").collect()
}

/// All greenlets of a thread were missing if its main one was not found.
fn a_main_one_is_found_by_its_greenlets(python: &Interpreter) {
    assert_eq!(judge(&start(python, &["own", "untracked"])), 7);
}

fn each_waits_where_it_switched_away(python: &Interpreter) {
    judge_waits(&start(python, &[]), 5);
}

fn judge_waits(target: &Target, seconds: u64) {
    let (samples, report) = record(target, seconds);
    let mut sums: BTreeMap<(u64, Vec<&str>), u64> = BTreeMap::new();
    let waits: Vec<&Value> = samples.iter().filter(|sample| sample["event"] == "task-wait").collect();
    for sample in &waits {
        let frames = sample["frames"].as_array().expect("frames");
        assert_eq!(frames.last().map(|frame| &frame["function"]), Some(&EVENT.into()), "{sample:#}");
        assert_eq!(frames[frames.len() - 2]["file"], "<greenlet>", "{sample:#}");
        assert!(frames.iter().all(|frame| frame["function"] != UNKNOWN), "{sample:#}");
        *sums.entry((number(&sample["tid"]), place(sample))).or_default() += weight(sample);
    }
    println!("{sums:#?}\n{:?}", report.wall.as_ref().map(|wall| &wall.tasks));
    let tids = &target.facts["tids"];
    let (first, second) = (number(&tids["first"]), number(&tids["second"]));
    let of = |tid: u64, functions: &[&'static str], name: &'static str| {
        let place: Vec<&str> = [functions, &[name]].concat();
        sums.get(&(tid, place.clone())).copied().unwrap_or_else(|| panic!("no {place:?}"))
    };
    // All greenlets that wait the whole time wait equally long.
    let still = of(first, &["never", "by_key", "in_c"], "in_c");
    let deep = [&["never"][..], &["deep"; 61]].concat();
    assert_eq!(of(first, &deep, "deep"), still);
    // A few looks may find it at the same place each.
    let [short, long] = ["short", "long"].map(|wait| sums.get(&(first, vec![wait, "moves", "moves"])).unwrap_or(&0));
    assert_eq!(short + long, still, "each look finds it at one of both places");
    let looks = looks(&samples, first);
    let share = *short as f64 / still as f64;
    println!("{share} of the time in the shorter of two waits, looks with weights {looks:?}");
    assert!(looks.len() >= 3 && statistics::within_looks(share, 0.4, &looks));
    assert!(of(second, &["never", "still"], "second") >= still, "nothing keeps its thread busy");
    // Hubs run while their threads sleep.
    assert!(!sums.keys().any(|(_, place)| place.last() == Some(&"Hub")), "{sums:#?}");
    let tasks = report.wall.as_ref().and_then(|wall| wall.tasks.as_ref()).expect("an account of what waits");
    assert_eq!((tasks.stored, tasks.greenlets), (sums.values().sum::<u64>(), tasks.stored));
    assert_eq!(tasks.idle, tasks.read + tasks.loss.values().sum::<u64>());
    let causes: u64 = report.wall.as_ref().expect("waits").causes.values().map(|cause| cause.stored).sum();
    assert_eq!(causes, report.wall.as_ref().expect("waits").stored, "they are no part of any thread's time");
}

fn of_gevent_too(python: &Interpreter) {
    of_a_framework(python, "gevent", "Greenlet");
}

fn of_eventlet_too(python: &Interpreter) {
    of_a_framework(python, "eventlet", "GreenThread");
}

fn of_a_framework(python: &Interpreter, name: &str, kind: &str) {
    let path = package("gevent", python);
    let target = Target::start_in(python, "waiting_greenlets.py", &[name], &[("PYTHONPATH", &path)]);
    assert_eq!(judge(&target), 7);
    let (samples, _) = record(&target, 3);
    let waits = samples.iter().filter(|sample| sample["event"] == "task-wait");
    let mut places: BTreeMap<Vec<&str>, u64> = BTreeMap::new();
    waits.for_each(|sample| *places.entry(place(sample)).or_default() += weight(sample));
    println!("{kind}: {places:#?}");
    let wanted: [&[&str]; 3] =
        [&["never", "still", "still"], &["never", "still", "second"], &["nest.<locals>.parent", "outer"]];
    assert!(wanted.iter().all(|place| places.contains_key(*place)), "{kind}: {places:#?}");
    let moving = ["short", "long"].map(|place| places.get(&[place, "moves", "moves"][..]).copied().unwrap_or(0));
    assert_eq!(moving[0] + moving[1], places[wanted[0]], "{kind}: {places:#?}");
}

/// A process that had none at a look was left alone for up to a minute, so of four waits one was seen.
fn those_that_come_and_go(python: &Interpreter) {
    let (python, _) = with_greenlet(python);
    let (samples, _) = record(&Target::start(&python, "now_and_then.py"), 8);
    let of_greenlets: Vec<&Value> = samples.iter().filter(|sample| sample["event"] == "task-wait").collect();
    assert!(of_greenlets.iter().all(|sample| place(sample).contains(&"greenlet")), "{of_greenlets:#?}");
    let moments: BTreeSet<u64> = of_greenlets.iter().map(|sample| number(&sample["time_us"])).collect();
    // Each lasts half a second, and the next one comes more than a second later.
    let (waits, _) = moments.iter().fold((0, 0), |(waits, last), &at| (waits + u32::from(at > last + 800_000), at));
    println!("{waits} waits, {} looks at them", moments.len());
    assert!(waits >= 3, "{moments:?}");
}

/// More objects than one look goes through. An unoptimised build needs several looks, with a pause after each, until it has seen
/// them all.
fn among_many_objects(python: &Interpreter) {
    let target = start(python, &["", "many", "300000"]);
    assert_eq!(judge(&target), 7);
    judge_waits(&target, 8);
}

fn without_lists_there_are_none(python: &Interpreter) {
    let target = start(python, &[]);
    let dump: Value = serde_json::from_slice(&dump(target.pid(), true).stdout).expect("JSON");
    assert_eq!(dump["greenlets"], Value::Null);
    assert!(dump["problems"][0].as_str().is_some_and(|told| told.contains("greenlets are left out")), "{dump:#}");
}

/// Both the dump and the recording still end, and still show what is true.
fn lies_do_not_hide_what_is_true(python: &Interpreter) {
    let (python, _) = with_greenlet(python);
    let target = Target::start(&python, "lying_greenlets.py");
    let dump = dumped(target.pid());
    let liars = target.facts["liars"].as_array().expect("a list");
    let of = |id: &Value| dump["greenlets"].as_array().expect("a list").iter().find(|greenlet| greenlet["id"] == *id);
    let good = of(&target.facts["good"]).unwrap_or_else(|| panic!("{dump:#}"));
    let functions = |greenlet: &Value| -> Vec<String> {
        let frames = greenlet["frames"].as_array().expect("frames").iter();
        frames.map(|frame| frame["function"].as_str().expect("a name").to_owned()).collect()
    };
    assert_eq!((functions(good), &good["whole"]), (vec!["wait".to_owned(), "honest".to_owned()], &true.into()));
    // Liars without a readable stack are left out; one whose stack leads in a circle is cut.
    for number in [0, 2, 3] {
        assert!(of(&liars[number]).is_none(), "{:#}", of(&liars[number]).unwrap_or(&Value::Null));
    }
    let circle = of(&liars[4]).expect("it has frames");
    assert!(circle["whole"] == false && functions(circle).iter().all(|name| name == "wait"), "{circle:#}");
    let (samples, _) = record(&target, 2);
    let waits = samples.iter().filter(|sample| sample["event"] == "task-wait");
    let is_good = |sample: &&Value| functions(sample).iter().any(|name| name == "honest");
    assert!(waits.filter(is_good).count() > 0);
}
