//! Whose stack it is: threads that come and go, and one thread in two interpreters.

use std::collections::{BTreeMap, BTreeSet};
use tachyon_tests::{Interpreter, Profiler, Recorded, Sample, Target, on_each_interpreter, status};

on_each_interpreter!(on [pyenv_3_8 sid_3_15 built_3_14t]
    long [pyenv_3_9 pyenv_3_10 pyenv_3_11 pyenv_3_12 pyenv_3_13 sid_3_14 musl_3_13 built_3_13t debian_3_11 wheel_3_15t]
    and [sid_3_14d sid_3_15d wheel_3_14t tail_3_14 standalone_3_14]: thread_storm);
on_each_interpreter!(of_each_kind: subinterpreter);
on_each_interpreter!(on [pyenv_3_8 built_3_14t] long [pyenv_3_12 sid_3_15]: crowd);

/// The number in names such as `thread_4242.<locals>.work_4242`, which before 3.11 is `work_4242`.
fn named_tid(function: &str) -> Option<u64> {
    function.strip_prefix("thread_").or(function.strip_prefix("work_"))?.split('.').next()?.parse().ok()
}

/// 3,000 threads, each of which runs a function named after its id: no sample with another thread's stack.
fn thread_storm(interpreter: &Interpreter) {
    let mut target = Target::start(interpreter, "thread_storm.py");
    let main = target.facts["tid"].as_u64().expect("the program tells its thread id");
    let running = Profiler::of(target.pid()).rate(4_999).start();
    target.go();
    assert_eq!(target.line(), "done");
    running.signal(libc::SIGINT);
    let recording = running.finish();
    let recorded = &recording.recorded;
    let mut seen = BTreeSet::new();
    for sample in &recorded.samples {
        let shown = || recorded.shown(sample.stack);
        let root = recorded.root(sample).map(|frame| frame.function.as_str()).unwrap_or_default();
        let is_main = sample.thread_id == main;
        // That it is the main thread is told by its thread state: of a sample whose search met one that was just freed, or a
        // word of its stack that may refer to another thread's frame (3.8, 3.9), nothing is, and the sample says so.
        let leaf = recorded.leaf(sample).map(|frame| frame.function.as_str()).unwrap_or_default();
        let without_state = ["unreadable_thread", "unknown_thread", "ambiguous_thread"]
            .iter()
            .any(|reason| leaf == format!("<stack cut: {reason}>"));
        let told_main = sample.status & status::MAIN_THREAD != 0;
        assert!(
            told_main == is_main || is_main && without_state,
            "main: {is_main}, told: {told_main}, {leaf}\n{}",
            shown()
        );
        for frame in recorded.frames_of(sample) {
            if let Some(tid) = named_tid(&frame.function) {
                assert_eq!(tid, sample.thread_id, "another thread's stack:\n{}", shown());
                assert_eq!(frame.filename, format!("storm_{tid}.py"));
                seen.insert(tid);
            }
        }
        // A complete stack begins where this kind of thread begins.
        if frames_are_whole(recorded, sample) {
            let bootstrap = if interpreter.minor < 11 { "_bootstrap" } else { "Thread._bootstrap" };
            // The thread's own object may die last: then `threading._dangling` is notified, by a callback that no frame
            // calls.
            let forgets = !is_main && root == "WeakSet.__init__.<locals>._remove";
            assert!(forgets || root == if is_main { "<module>" } else { bootstrap }, "{}", shown());
        }
    }
    let threads: BTreeSet<u64> = recorded.samples.iter().map(|sample| sample.thread_id).collect();
    println!(
        "{}: {} samples of {} threads, {} in their own function",
        interpreter.name,
        recorded.samples.len(),
        threads.len(),
        seen.len()
    );
    assert!(threads.len() > 2_000 && seen.len() > 1_500, "{} threads, {} named", threads.len(), seen.len());
    let whole = recorded.samples.iter().filter(|sample| frames_are_whole(recorded, sample)).count();
    // Without a GIL a thread has more to make and to clear away: more than half of its life has no frame (38 and 40 % of the
    // samples are whole on 3.14t and 3.15t). That it is its beginning and its end is what the holes below show.
    let expected = if interpreter.free_threaded { 0.3 } else { 0.6 };
    let stops = &recording.report.stops;
    assert!(whole as f64 > expected * recorded.samples.len() as f64, "{whole} whole stacks: {stops:#?}");
    let holes = threads.iter().filter(|&&thread| has_hole(recorded, thread)).count();
    assert!(holes as f64 <= 0.01 * threads.len() as f64, "{holes} threads lose their frames and find them again");
    assert_eq!(recording.stopped("thread_list_too_long"), 0);
}

/// Whether a thread is without frames between two samples with frames: it may be so only while it starts and ends.
fn has_hole(recorded: &Recorded, thread: u64) -> bool {
    let samples = recorded.samples.iter().filter(|sample| sample.thread_id == thread);
    let mut of_thread: Vec<_> =
        samples.map(|sample| (sample.timestamp_us, frames_are_whole(recorded, sample))).collect();
    of_thread.sort_unstable();
    let with_frames = |(_, whole): &(u64, bool)| *whole;
    let (first, last) = (of_thread.iter().position(with_frames), of_thread.iter().rposition(with_frames));
    first.zip(last).is_some_and(|(first, last)| !of_thread[first..=last].iter().all(with_frames))
}

fn frames_are_whole(recorded: &Recorded, sample: &Sample) -> bool {
    recorded.root(sample).is_some_and(|frame| frame.filename != "~")
}

/// 2,000 threads: one sample's search looks at 1,280 states, and the thread's next one goes on from there. Each thread that
/// works is found, the first one of the process too, which stands last in the list, and no stack is another thread's.
fn crowd(interpreter: &Interpreter) {
    let mut target = Target::start(interpreter, "crowd.py");
    let working = target.facts["threads"].as_object().expect("the program tells its threads").clone();
    assert_eq!(working.len(), 10);
    let running = Profiler::of(target.pid()).rate(999).start();
    target.go();
    assert_eq!(target.line(), "done");
    running.signal(libc::SIGINT);
    let recording = running.finish();
    let recorded = &recording.recorded;
    let mut found: BTreeMap<u64, u64> = BTreeMap::new();
    for sample in &recorded.samples {
        let own = working.get(&sample.thread_id.to_string()).map(|number| format!("crowd_{number}"));
        let mut in_its_own = sample.thread_id == u64::from(target.pid())
            && recorded.root(sample).is_some_and(|frame| frame.function == "<module>");
        for frame in recorded.frames_of(sample).filter(|frame| frame.function.starts_with("crowd_")) {
            assert_eq!(Some(&frame.function), own.as_ref(), "another thread's:\n{}", recorded.shown(sample.stack));
            in_its_own = true;
        }
        *found.entry(sample.thread_id).or_default() += u64::from(in_its_own);
    }
    let too_long = recording.stopped("thread_list_too_long");
    println!("{}: {too_long} samples' searches were broken off; found {found:?}", interpreter.name);
    for thread in working.keys().map(|tid| tid.parse().expect("a number")).chain([u64::from(target.pid())]) {
        assert!(found.get(&thread).is_some_and(|&samples| samples >= 20), "{thread}: {found:?}");
    }
    // One sample of each thread of the list's second half, up to 3.11 of each: there is no telling before the list's end
    // whether a match is the only one. A thread that is sampled while it wakes up is one more.
    assert!(too_long > 0 && too_long <= 2 * 11, "{too_long}: {:#?}", recording.report.stops);
    // And the terminal reports them beside losses. It once said "nothing lost" and no more.
    let told = recording.stderr.lines().find(|line| line.starts_with("cut ")).unwrap_or_default();
    assert!(told.contains(&format!("{too_long} thread_list_too_long")), "{}", recording.stderr);
}

/// One thread, two interpreters by turns: the interpreter's id and the stack belong together.
fn subinterpreter(interpreter: &Interpreter) {
    let target = Target::start(interpreter, "subinterpreter.py");
    let sub = target.facts["sub"].as_u64().expect("the program tells the interpreter's id");
    let recording = Profiler::of(target.pid()).rate(1_999).cpu_milliseconds(target.pid(), 1_500).record();
    let recorded = &recording.recorded;
    let (mut in_main, mut in_sub) = (0, 0);
    for sample in &recorded.samples {
        assert_eq!(sample.thread_id, u64::from(target.pid()));
        let is_sub = u64::from(sample.interpreter_id) == sub;
        assert!(is_sub || sample.interpreter_id == 0);
        for frame in recorded.frames_of(sample) {
            let fits = match frame.function.as_str() {
                "sub_outer" | "sub_inner" => is_sub,
                "main_outer" | "main_inner" | "spin" | "run" => !is_sub,
                _ => true,
            };
            assert!(fits, "interpreter {} with\n{}", sample.interpreter_id, recorded.shown(sample.stack));
        }
        let names: Vec<&str> = recorded.frames_of(sample).map(|frame| frame.function.as_str()).collect();
        match names[..] {
            ["sub_inner", "sub_outer", "<module>"] => in_sub += 1,
            ["spin", "main_inner", "main_outer", "<module>"] => in_main += 1,
            _ => {}
        }
    }
    let total = recorded.samples.len();
    println!("{}: {in_main} in the main interpreter, {in_sub} in the other one, of {total}", interpreter.name);
    // Each takes half of the time; starting and ending a run of the sub-interpreter takes some of it.
    assert!(f64::from(in_main.min(in_sub)) > 0.4 * total as f64, "{:#?}", recording.report);
}
