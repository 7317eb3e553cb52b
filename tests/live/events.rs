//! Events in place of the clock (`-e`): each is sampled where it happens, and counted.

use serde_json::Value;
use std::collections::BTreeMap;
use std::process::Command;
use tachyon_tests::{Interpreter, Profiler, Recording, Target, binary, live, on_each_interpreter};

on_each_interpreter!(on [pyenv_3_8 debian_3_11 sid_3_15] long [pyenv_3_12 built_3_14t]: each_is_where_it_happens);

const ROUNDS: u64 = 25;
const FAULTS: &str = "page-faults";
const OPENS: &str = "syscalls:sys_enter_openat";

/// Records `events.py` at work.
fn record(interpreter: &Interpreter, events: &[&str]) -> Recording {
    let mut target = Target::start_with(interpreter, "events.py", &[&ROUNDS.to_string()]);
    let asked = |profiler: Profiler, event: &&str| profiler.arg("-e").arg(*event);
    let running = events.iter().fold(Profiler::of(target.pid()).native(), asked).start();
    target.go();
    assert_eq!(target.line(), "done");
    running.signal(libc::SIGINT);
    running.finish()
}

/// Samples of an event, by the program's function in which it happened.
fn by_function(recording: &Recording, event: &str) -> BTreeMap<String, u64> {
    let root = format!("<event: {event}>");
    let mut counts = BTreeMap::new();
    for sample in &recording.recorded.samples {
        let frames: Vec<_> = recording.recorded.frames_of(sample).collect();
        if frames.last().is_some_and(|frame| frame.function == root) {
            // Native frames stand at the line that called them: `object!function`.
            let python =
                frames.iter().find(|frame| frame.filename.ends_with("events.py") && !frame.function.contains('!'));
            *counts.entry(python.map_or_else(String::new, |frame| frame.function.clone())).or_default() += 1;
        }
    }
    counts
}

fn stored(recording: &Recording, event: &str) -> u64 {
    recording.report.events.iter().find(|it| it.name == event).expect("the report has each event").stored
}

/// Faults and opens are counted one by one, each in the function that causes it, in one recording.
fn each_is_where_it_happens(interpreter: &Interpreter) {
    let recording = record(interpreter, &[FAULTS, OPENS]);
    assert_eq!(recording.report.loss.values().sum::<u64>(), 0, "{:#?}", recording.report);
    let (faults, opens) = (by_function(&recording, FAULTS), by_function(&recording, OPENS));
    println!("{}: {faults:?}, {opens:?}", interpreter.name);
    for (function, pages) in [("touch_few", 100), ("touch_many", 300), ("touch_all", 400)] {
        // The interpreter may touch a page of its own for the first time.
        let (met, wanted) = (faults.get(function).copied().unwrap_or(0), pages * ROUNDS);
        assert!((wanted..=wanted + 4).contains(&met), "{function}: {met}, {wanted} wanted: {faults:?}");
    }
    assert_eq!((opens.get("open_one"), opens.get("open_more")), (Some(&ROUNDS), Some(&(7 * ROUNDS))), "{opens:?}");
    for (event, counts) in [(FAULTS, &faults), (OPENS, &opens)] {
        assert_eq!(stored(&recording, event), counts.values().sum::<u64>());
        assert!(recording.stderr.contains(&format!("\n{event}: ")), "{}", recording.stderr);
    }
    assert_eq!(recording.report.expected, None, "an event has no rate");
}

/// Every tenth is a sample that stands for ten; the clock can be sampled beside it; and each format keeps them apart.
#[test]
fn a_sample_stands_for_a_period() {
    let Some(_live) = live() else { return };
    let recording =
        record(&Interpreter::named("pyenv_3_12"), &["faults:10", "cpu-clock", "syscalls:sys_enter_openat:2"]);
    let samples = stored(&recording, FAULTS);
    let (about, caused) = (samples * 10, 800 * ROUNDS);
    assert!(about.abs_diff(caused) < caused / 20, "{about} of {caused} faults");
    // Which of two opens is sampled depends on other programs.
    let (opens, caused) = (stored(&recording, OPENS), 8 * ROUNDS);
    assert!(opens > caused / 5 && opens <= caused, "{opens} of {caused} opens");
    let clock = stored(&recording, "cpu-clock");
    assert_eq!(recording.report.stored, samples + opens + clock);

    let lines = exported(&recording, "out.jsonl");
    let lines = String::from_utf8(lines).expect("JSON is UTF-8");
    let mut by_event: BTreeMap<(String, u64), u64> = BTreeMap::new();
    for line in lines.lines() {
        let sample: Value = serde_json::from_str(line).expect("a line is a sample");
        let event = sample.get("event").map_or("", |event| event.as_str().expect("a name")).to_owned();
        *by_event
            .entry((event, sample.get("weight").map_or(1, |weight| weight.as_u64().expect("a count"))))
            .or_default() += 1;
    }
    let told: BTreeMap<_, _> = [(FAULTS, 10, samples), (OPENS, 2, opens), ("", 1, clock)]
        .into_iter()
        .filter(|(.., count)| *count > 0)
        .map(|(event, weight, count)| ((event.to_owned(), weight), count))
        .collect();
    assert_eq!(by_event, told);

    let report = run(&["report", "--json", recording.path.to_str().expect("it is UTF-8")]);
    let report: Value = serde_json::from_slice(&report.stdout).expect("the report is JSON");
    let shown =
        |name: &str| report["events"].as_array()?.iter().find(|event| event["name"] == name)?["stored"].as_u64();
    assert_eq!((shown(FAULTS), shown(OPENS)), (Some(samples), Some(opens)), "{report:#}");
    let seconds = report["sampled_seconds"].as_f64().expect("a number");
    assert!(seconds * 99.0 < clock as f64 + 1.0, "{seconds} s of the clock, which has {clock} samples");
}

/// The recording in another format.
fn exported(recording: &Recording, name: &str) -> Vec<u8> {
    let path = recording.path.with_file_name(name);
    let (from, to) = (recording.path.to_str().expect("it is UTF-8"), path.to_str().expect("likewise"));
    let output = run(&["export", from, "-o", to]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    std::fs::read(path).expect("it was written")
}

fn run(words: &[&str]) -> std::process::Output {
    Command::new(binary()).args(words).output().expect("the profiler can be run")
}

/// Events of this machine are listed, and ones that it lacks are refused in a line that says where to look.
#[test]
fn what_there_is_is_listed_and_nothing_else_taken() {
    let Some(_live) = live() else { return };
    let list = String::from_utf8(run(&["record", "-e", "list"]).stdout).expect("the list is text");
    for event in
        ["page-faults, faults", "context-switches, cs", "  sched:sched_process_exec\n", "  syscalls:sys_enter_openat\n"]
    {
        assert!(list.contains(event), "{event}: {list}");
    }
    let target = Target::start(&Interpreter::named("pyenv_3_12"), "spin.py");
    let asked = |event: &str| {
        let output = Profiler::of(target.pid()).arg("-e").arg(event).milliseconds(200).run();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let has_counters = !list.contains("Hardware events: none");
    let (status, said) = asked("cycles:1000000");
    assert_eq!(status == Some(0), has_counters, "{said}");
    assert!(has_counters || said.contains("this machine has no event cycles"), "{said}");
    let (status, said) = asked("sched:no_such_point");
    assert!(
        status == Some(1) && said.contains("no tracepoint sched:no_such_point") && said.contains("-e list"),
        "{said}"
    );
    let (status, said) = asked("pagefaults");
    assert!(status == Some(2) && said.contains("no event has the name 'pagefaults'"), "{said}");
}
