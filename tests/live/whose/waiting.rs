//! Tasks that wait side by side while their loop is idle: each at the place where it awaits, weighted as waiting.

use super::functions;
use serde_json::Value;
use std::collections::BTreeMap;
use std::process::Command;
use std::time::Duration;
use tachyon::report::Report;
use tachyon_tests::{Interpreter, Profiler, Target, binary, on_each_interpreter, package, statistics};

on_each_interpreter!(on [pyenv_3_8 pyenv_3_13 sid_3_15] long [debian_3_11 sid_3_14 wheel_3_15t]: each_task_waits_where_it_awaits);
on_each_interpreter!(on [pyenv_3_13 sid_3_14]: of_uvloop_too);
on_each_interpreter!(on [pyenv_3_8 pyenv_3_12] long [debian_3_11 built_3_13t]: of_a_loop_that_does_not_say_its_thread);
on_each_interpreter!(on [pyenv_3_12]: a_report_has_them_where_they_are_asked_for);

/// The lines of a recording, and its account.
pub(crate) fn record(target: &Target, seconds: u64) -> (Vec<Value>, Report) {
    let profiler = Profiler::of(target.pid()).rate(100).arg("--wall").arg("--async").arg("--format").arg("jsonl");
    let running = profiler.start();
    std::thread::sleep(Duration::from_secs(seconds));
    running.signal(libc::SIGINT);
    let ended = running.ended();
    let text = std::fs::read_to_string(ended.output()).expect("a recording");
    let report = std::fs::read(ended.report()).expect("its account");
    let lines = text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    (lines, serde_json::from_slice(&report).expect("an account"))
}

pub(crate) fn weight(sample: &Value) -> u64 {
    sample.get("weight").map_or(1, |weight| weight.as_u64().expect("a count"))
}

fn is_of_tasks(sample: &&Value) -> bool {
    sample["event"] == "task-wait"
}

/// The weights of the looks at the tasks of a thread's loop.
pub(crate) fn looks(samples: &[Value], tid: u64) -> Vec<u64> {
    let of_loop = samples.iter().filter(is_of_tasks).filter(|sample| sample["tid"] == tid);
    let moments: BTreeMap<u64, u64> =
        of_loop.map(|sample| (sample["time_us"].as_u64().expect("a moment"), weight(sample))).collect();
    moments.into_values().collect()
}

/// The names of a stack's functions, without asyncio's own.
fn shown(sample: &Value) -> Vec<&str> {
    let frames = sample["frames"].as_array().expect("frames");
    let own = |frame: &&Value| frame["file"].as_str().is_none_or(|file| !file.contains("/asyncio/"));
    frames.iter().filter(own).map(|frame| frame["function"].as_str().expect("a name")).collect()
}

fn each_task_waits_where_it_awaits(python: &Interpreter) {
    let target = Target::start(python, "waiting_tasks.py");
    judge(&target, 5);
}

fn of_uvloop_too(python: &Interpreter) {
    let path = package("uvloop", python);
    let target = Target::start_in(python, "waiting_tasks.py", &["uvloop"], &[("PYTHONPATH", &path)]);
    judge(&target, 4);
}

/// The thread says which loop it runs.
fn of_a_loop_that_does_not_say_its_thread(python: &Interpreter) {
    let target = Target::start_with(python, "waiting_tasks.py", &["silent"]);
    judge(&target, 3);
}

fn judge(target: &Target, seconds: u64) {
    let (samples, report) = record(target, seconds);
    let tids: BTreeMap<String, u64> =
        serde_json::from_value(target.facts["tids"].clone()).expect("the program tells its threads");
    let mut sums: BTreeMap<(u64, &str, Vec<&str>), u64> = BTreeMap::new();
    for sample in samples.iter().filter(is_of_tasks) {
        let (tid, task) = (sample["tid"].as_u64().expect("a tid"), &sample["task"]);
        assert!(sample.get("waiting").is_none() && task["id"].as_u64().is_some_and(|id| id != 0), "{sample:#}");
        let chain: Vec<&str> = task["chain"].as_array().expect("a list").iter().filter_map(Value::as_str).collect();
        let name = task["name"].as_str().expect("a name");
        let stack = shown(sample);
        assert_eq!(stack.last(), Some(&"<event: task-wait>"), "{sample:#}");
        // Tasks that await the task are below it.
        let told: Vec<&str> = stack.iter().copied().filter(|function| chain.contains(function)).collect();
        assert_eq!(told.first(), chain.first(), "{sample:#}");
        *sums.entry((tid, name, stack)).or_default() += weight(sample);
    }
    println!("{sums:#?}");
    let event = "<event: task-wait>";
    let (first, second) = (tids["first"], tids["second"]);
    let of_child = |name| (first, name, vec!["never", "still", name, "parent", "parent", "first_loop", "main", event]);
    let below = ["first_loop", "main", event];
    let with = |name, above: &[&'static str]| (first, name, [above, &[name], &below].concat());
    let expected = [
        of_child("child-0"),
        of_child("child-1"),
        of_child("child-2"),
        with("alone", &["never", "still"]),
        with("busy", &["busy"]),
        with("m\u{f6}ves", &["short", "moves"]),
        with("m\u{f6}ves", &["long", "moves"]),
        (second, "second", vec!["never", "second_loop", "second", event]),
    ];
    let mut places: Vec<_> = sums.keys().cloned().collect();
    places.retain(|place| !expected.contains(place));
    assert!(places.is_empty(), "where no task waits: {places:?}");
    let of = |place: &(u64, &str, Vec<&str>)| sums.get(place).copied().unwrap_or_else(|| panic!("no {place:?}"));
    let still = of(&expected[0]);
    // All tasks that wait the whole time wait equally long.
    assert!(expected[1..5].iter().all(|place| of(place) == still), "{sums:#?}");
    // A few looks may find it at the same place each.
    let [short, long] = [5, 6].map(|at| sums.get(&expected[at]).unwrap_or(&0));
    assert_eq!(short + long, still);
    let of_first = looks(&samples, first);
    let share = *short as f64 / still as f64;
    println!("{share} of the time in the shorter of two waits, looks with weights {of_first:?}");
    assert!(of_first.len() >= 3 && statistics::within_looks(share, 0.4, &of_first));
    let tasks = report.wall.as_ref().and_then(|wall| wall.tasks.as_ref()).expect("an account of waiting tasks");
    assert_eq!(tasks.stored, sums.values().sum::<u64>());
    assert_eq!(tasks.idle, tasks.read + tasks.loss.values().sum::<u64>());
    assert_eq!(tasks.read, still + of(&expected[7]), "what was read is in the file");
    // The loop's thread says the same about itself: it waits in the loop's own code.
    let waits = |tid: u64| {
        let of_thread = |sample: &&Value| sample["tid"] == tid && sample.get("waiting").is_some();
        let for_a_cpu = |sample: &&Value| sample["waiting"]["cause"] == "cpu";
        samples.iter().filter(of_thread).filter(|sample| !for_a_cpu(sample)).map(weight).sum::<u64>()
    };
    let (own, other) = (waits(first) as f64, waits(second) as f64);
    let asleep = of(&expected[7]) as f64;
    assert!(
        (asleep - other).abs() <= other * 0.1,
        "tasks of a loop that never runs waited for {asleep}, it for {other}"
    );
    let idle = (still + tasks.loss["went_on"]) as f64;
    assert!(
        statistics::within_looks(idle / asleep, own / other, &looks(&samples, second)),
        "tasks waited for {idle}, their thread for {own}"
    );
    // Waits of tasks are in no sum of threads.
    let causes: u64 = report.wall.as_ref().expect("waits").causes.values().map(|cause| cause.stored).sum();
    assert_eq!(causes, report.wall.as_ref().expect("waits").stored);
    assert!(samples.iter().all(|sample| is_of_tasks(&sample) || functions(sample).all(|name| name != event)));
    assert!(tasks.places.iter().any(|place| place.place.ends_with(" never")), "{tasks:#?}");
}

fn a_report_has_them_where_they_are_asked_for(python: &Interpreter) {
    let target = Target::start(python, "waiting_tasks.py");
    let profiler = Profiler::of(target.pid()).rate(100).arg("--wall").arg("--async").milliseconds(2_500);
    let recording = profiler.record();
    let told = |arguments: &[&str]| {
        let output = Command::new(binary()).arg("report").arg(&recording.path).args(arguments).output();
        let output = output.expect("it can be run");
        (String::from_utf8_lossy(&output.stdout).into_owned(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let wall = recording.report.wall.as_ref().expect("waits");
    let tasks = wall.tasks.as_ref().expect("of tasks, too");
    let json = |arguments: &[&str]| -> Value {
        serde_json::from_str(&told(&[arguments, &["--json"]].concat()).0).expect("JSON")
    };
    assert_eq!(json(&[])["samples"], recording.report.stored + wall.stored, "threads' time alone");
    let by_task = json(&["--event", "task-wait", "--by", "task"]);
    assert_eq!(by_task["samples"], tasks.stored);
    let row = |name: &str| {
        let mut rows = by_task["rows"].as_array().expect("rows").iter();
        let row = rows.find(|row| row["name"] == name).unwrap_or_else(|| panic!("{name}: {by_task:#}"));
        (row["self"].as_u64().expect("a count"), row["total"].as_u64().expect("a count"))
    };
    let (own, total) = row("alone");
    assert!(own > 0 && own == total);
    assert_eq!(row("parent"), (0, 3 * own), "it waits for three");
    let by_function = json(&["--event", "task-wait"]);
    let first = &by_function["rows"][0];
    // Four tasks of one loop, and one of the other.
    let (_, of_other) = row("second");
    assert_eq!(
        (&first["function"], &first["self"]),
        (&"never".into(), &(4 * own + of_other).into()),
        "{by_function:#}"
    );
    let folder = tempfile::tempdir().expect("a folder");
    let exported = |name: &str, arguments: &[&str]| {
        let path = folder.path().join(name);
        let mut export = Command::new(binary());
        let output = export.arg("export").arg(&recording.path).args(arguments).arg("-o").arg(&path).output();
        assert!(output.expect("it can be run").status.success());
        std::fs::read_to_string(path).expect("text")
    };
    // Each line ends with its samples.
    let samples = |text: &str| -> u64 {
        let count = |line: &str| line.rsplit_once(' ').expect("a count").1.parse::<u64>().expect("a number");
        text.lines().map(count).sum()
    };
    let (whole, alone) = (exported("a.collapsed", &[]), exported("b.collapsed", &["--event", "task-wait"]));
    assert_eq!(samples(&whole), recording.report.stored + wall.stored + tasks.stored);
    assert_eq!(samples(&alone), tasks.stored);
    // The report's page is about one or the other.
    let (threads, of_tasks) = (exported("a.html", &[]), exported("b.html", &["--event", "task-wait"]));
    assert!(threads.contains("the threads\u{2019} time is in") && !threads.contains("<code>never</code>"));
    assert!(of_tasks.contains("the tasks\u{2019} waiting time is in") && of_tasks.contains("<code>Event.wait</code>"));
    assert!(told(&[]).0.contains("--event task-wait shows for what"), "{}", told(&[]).0);
    assert!(told(&["--event", "task-wait"]).0.contains("of waiting tasks' time"));
    assert!(told(&["--event", "page-faults"]).1.contains("task-wait"), "{}", told(&["--event", "page-faults"]).1);
}
