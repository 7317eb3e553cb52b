//! Waiting threads: `--wall` and `--off-cpu`.

use serde_json::Value;
use std::process::Command;
use std::time::Duration;
use tachyon::report::TimeReport;
use tachyon_tests::{
    Interpreter, Profiler, Recording, Sample, ShownFrame, Target, binary, live, on_each_interpreter, status,
    waited_for_cpu,
};

on_each_interpreter!(of_each_kind_with_gil: gil);
on_each_interpreter!(on [pyenv_3_8 sid_3_15] long [pyenv_3_12 debian_3_11]: shares);
on_each_interpreter!(on [pyenv_3_12] long [pyenv_3_8 debian_3_11 built_3_14t sid_3_15]: right);
on_each_interpreter!(on [pyenv_3_8 debian_3_11 musl_3_13 built_3_14t] long [pyenv_3_12 sid_3_15]: causes);

fn all_waiting(recording: &Recording) -> usize {
    usize::try_from(recording.report.wall.as_ref().expect("waits were sampled").stored).expect("not that many")
}

/// A program in step with the rate: 0.7 of its main thread is sleep and 0.3 the lock, both read from the program's own waits,
/// which last a little longer than asked; a thread that never runs is there all the time.
fn shares(interpreter: &Interpreter) {
    let target = Target::start(interpreter, "wall_shares.py");
    let recording = Profiler::of(target.pid()).rate(100).milliseconds(5_000).arg("--wall").record();
    let sleeps = recording.recorded.waiting("sleep", &["sleeps"]);
    let locks = recording.recorded.waiting("lock", &["locks"]);
    let forever = recording.recorded.waiting("lock", &["forever"]);
    let seconds = recording.report.duration_s;
    println!("{}: {sleeps} sleep, {locks} lock, {forever} forever in {seconds} s", interpreter.name);
    let both = sleeps + locks;
    // Each wait lasts up to a tenth of a millisecond longer if the machine is idle, and any time longer if it is not.
    let share = sleeps as f64 / both as f64;
    let wide = 4.4 * (0.7 * 0.3 / both as f64).sqrt() + 0.04;
    assert!((share - 0.7).abs() < wide, "{sleeps} of {both}");
    // One tick in each period, except for those at the two ends.
    let periods = seconds * 100.0;
    assert!((forever as f64 - periods).abs() <= 0.02 * periods + 3.0, "{forever} of {periods}");
    // Running or waiting: the main thread's life.
    let main = recording.recorded.samples.len() - forever;
    assert!((main as f64 - periods).abs() <= 0.1 * periods, "{main} of {periods}: {:#?}", recording.report);
    let on_cpu = recording.recorded.samples.iter().filter(|sample| sample.status & status::ON_CPU != 0).count();
    assert_eq!(on_cpu as u64, recording.report.stored, "who waits is on no CPU");
    assert!(recording.stderr.contains(" waiting: "), "{}", recording.stderr);
}

/// A line of JSON lines is a wait with all that is known about it, however long it lasted.
#[test]
fn json_lines_tell_the_whole_wait() {
    let Some(_live) = live() else { return };
    let target = Target::start(&Interpreter::named("pyenv_3_12"), "wall_shares.py");
    let profiler = Profiler::of(target.pid()).rate(100).milliseconds(4_000).arg("--wall").arg("--format").arg("jsonl");
    let output = profiler.run();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = std::fs::read_to_string(profiler.output()).expect("it was written");
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect("a sample")).collect();
    let report = std::fs::read_to_string(profiler.report()).expect("it was written");
    let report: Value = serde_json::from_str(&report).expect("an account");
    let weight = |line: &&Value| line.get("weight").map_or(1, |weight| weight.as_u64().expect("a number"));
    let (waits, runs): (Vec<&Value>, Vec<&Value>) = lines.iter().partition(|line| line.get("waiting").is_some());
    let weights: u64 = waits.iter().map(weight).sum();
    assert_eq!(Some(weights), report["wall"]["stored"].as_u64());
    assert_eq!(Some(runs.len() as u64), report["stored"].as_u64());
    assert!(runs.iter().all(|line| line.get("weight").is_none()));
    let in_function = |line: &Value, name: &str| {
        line["frames"].as_array().is_some_and(|frames| frames.iter().any(|frame| frame["function"] == name))
    };
    for line in &waits {
        let (since, length) = (&line["waiting"]["since_us"], &line["waiting"]["wait_us"]);
        let ended = since.as_u64().zip(length.as_u64()).map(|(since, length)| since + length);
        let now = line["time_us"].as_u64().expect("a time");
        assert!(ended.is_some_and(|ended| ended.abs_diff(now) <= 1), "{line}");
    }
    let of = |name: &str, cause: &str| {
        let fits = |line: &&&Value| in_function(line, name) && line["waiting"]["cause"] == cause;
        waits.iter().filter(fits).copied().collect::<Vec<_>>()
    };
    let sleeps = of("sleeps", "sleep");
    assert!(sleeps.len() > 150, "{}", sleeps.len());
    for line in &sleeps {
        let waiting = &line["waiting"];
        assert!(waiting["syscall"] == "clock_nanosleep" && waiting.get("futex").is_none(), "{line}");
    }
    // A wait begins when its thread leaves the CPU. The timer of its sleep was set before: some microseconds, or longer if the thread
    // is interrupted or preempted in between. The recording's two ends may lie within a wait, too.
    let whole = |line: &&&Value| line["waiting"]["wait_us"].as_u64().is_some_and(|length| length >= 6_500);
    let cut = sleeps.len() - sleeps.iter().filter(whole).count();
    assert!(cut <= 2 + sleeps.len() / 50, "{cut} of {} are shorter than the program sleeps", sleeps.len());
    let [forever] = of("forever", "lock")[..] else { panic!("it waits once") };
    let periods = report["duration_s"].as_f64().expect("seconds") * 100.0;
    assert!((weight(&forever) as f64 - periods).abs() <= 0.02 * periods + 3.0, "{forever} of {periods}");
    assert_eq!(forever["waiting"]["syscall"], "futex");
    let futex = forever["waiting"]["futex"].as_str().and_then(|address| address.strip_prefix("0x"));
    let address = futex.and_then(|address| u64::from_str_radix(address, 16).ok()).expect("the lock's address");
    // Another lock than the one that is waited for with a timeout.
    let others = of("locks", "lock");
    let other = |line: &&Value| line["waiting"]["futex"] != format!("{address:#x}");
    assert!(others.len() > 50 && others.iter().all(other), "{} lines", others.len());
}

/// A wait that began before the recording and ends in it counts from the recording's start: the sleep and what follows are the
/// thread's whole life, and the main thread waits for it all the time.
#[test]
fn a_sleep_from_before_the_recording() {
    let Some(_live) = live() else { return };
    let target = Target::start_with(&Interpreter::named("pyenv_3_12"), "wall_asleep.py", &["4"]);
    let recording = Profiler::of(target.pid()).rate(100).milliseconds(6_000).arg("--wall").record();
    let (first, then) =
        (recording.recorded.waiting("sleep", &["first"]), recording.recorded.waiting("lock", &["then"]));
    let periods = recording.report.duration_s * 100.0;
    println!("{first} first, {then} then, of {periods}");
    let both = (first + then) as f64;
    assert!(
        (both - periods).abs() <= 0.02 * periods + 3.0,
        "{first} and {then} of {periods}: {:#?}",
        recording.report.wall
    );
    // The recording's own start takes up to the sleep's end on the busiest machine.
    assert!(first > 0 && then >= 100, "{first} first, {then} then");
    let main = recording.recorded.samples.len() as f64 - both;
    assert!((main - periods).abs() <= 0.02 * periods + 3.0, "{main} of {periods}");
}

/// Each program waits for one thing: nearly all its waits at that line have that name.
fn causes(interpreter: &Interpreter) {
    let programs = [
        ("sleep", "sleep"),
        ("lock", "lock"),
        ("poll", "poll"),
        ("socket", "socket"),
        ("socket_with_timeout", "socket"),
        ("pipe", "pipe"),
        ("child", "child"),
    ];
    let start = |(program, cause)| (Target::start_with(interpreter, "wall_causes.py", &[program]), program, cause);
    let targets = programs.map(start);
    let profiler = Profiler::new().rate(399).milliseconds(1_000).arg("--off-cpu");
    let of = |profiler: Profiler, pid: u32| profiler.arg("-p").arg(pid.to_string());
    let recording = targets.iter().fold(profiler, |profiler, (target, ..)| of(profiler, target.pid())).record();
    let recorded = &recording.recorded;
    for (target, program, cause) in &targets {
        let has = |sample: &Sample, name: &str| recorded.frames_of(sample).any(|frame| frame.function == name);
        let of_main = |sample: &&Sample| sample.thread_id == u64::from(target.pid()) && has(sample, "waits");
        let here: Vec<&Sample> = recorded.samples.iter().filter(of_main).collect();
        let called = |cause: &str| {
            let mark = format!("<waiting: {cause}>");
            here.iter().filter(|sample| recorded.leaf(sample).is_some_and(|leaf| leaf.function == mark)).count()
        };
        let (right, queued, all) = (called(cause), called("cpu"), here.len());
        println!("{} {program}: {right} of {all} are {cause}, {queued} for a CPU", interpreter.name);
        assert!(all > 100, "{program}: {all}");
        // Of two threads one waits for the other's GIL now and then.
        let gil = called("gil");
        assert!(right * 100 >= (all - queued - gil) * 98, "{program}: {right} of {all}: {:#?}", recording.report.wall);
        // If the machine is busy, woken threads wait for a CPU as long as they were asleep.
        assert!(all - gil - queued > 40, "{program}: {gil} for the GIL, {queued} for a CPU, of {all}");
    }
    assert_eq!(recording.report.stored, 0, "only waits were asked for");
}

/// The stack of a wait is that of the thread while it waits, not of what it does next. `TACHYON_ORACLE_SAMPLES` are met.
fn right(interpreter: &Interpreter) {
    const RATE: u32 = 999;
    let wanted =
        std::env::var("TACHYON_ORACLE_SAMPLES").ok().and_then(|count| count.parse::<u32>().ok()).unwrap_or(5_000);
    let target = Target::start(interpreter, "wall_right.py");
    let line = target.facts["line"].as_i64().expect("it tells its line");
    // Eight threads, of whose time some goes to waits for a CPU and for the GIL.
    let milliseconds = 1_000 + u64::from(wanted) * 1_000 / u64::from(4 * RATE);
    let recording = Profiler::of(target.pid()).rate(RATE).milliseconds(milliseconds).arg("--off-cpu").record();
    let recorded = &recording.recorded;
    let (mut all, mut wrong) = (0, Vec::new());
    for sample in &recorded.samples {
        let mut frames = recorded.frames_of(sample);
        if frames.next().is_none_or(|leaf| leaf.function != "<waiting: sleep>") {
            continue;
        }
        all += 1;
        let python = frames.find(|frame| !frame.is_special());
        let fits = |frame: &ShownFrame| {
            frame.function == "waits" && frame.place.is_some_and(|place| i64::from(place[0]) == line)
        };
        if !python.is_some_and(fits) {
            wrong.push(recorded.frames_of(sample).map(|frame| frame.function.clone()).collect::<Vec<_>>());
        }
    }
    println!("{}: {} of {all} wrong", interpreter.name, wrong.len());
    assert!(all >= wanted, "{all} samples: {:#?}", recording.report.wall);
    assert!(wrong.is_empty(), "{} of {all}: {:?}", wrong.len(), wrong.first());
}

/// Four threads that want the GIL: what is not for a CPU is for it.
fn gil(interpreter: &Interpreter) {
    let target = Target::start(interpreter, "wall_gil.py");
    let recording = Profiler::of(target.pid()).rate(199).milliseconds(1_500).arg("--wall").record();
    let (gil, cpu) = (recording.recorded.waiting("gil", &["spins"]), recording.recorded.waiting("cpu", &["spins"]));
    let all = all_waiting(&recording);
    println!("{}: {gil} of {all} for the GIL, {cpu} for a CPU", interpreter.name);
    assert!(gil * 100 >= (all - cpu) * 97, "{gil} of {all}, {cpu} for a CPU: {:#?}", recording.report.wall);
    // Three of four wait at any time; if the machine is busy, for a CPU too.
    assert!(gil > 100 && gil + cpu > 600, "{gil} for the GIL, {cpu} for a CPU");
    // One of the four held it, at its line.
    let wall = recording.report.wall.as_ref().expect("waits were sampled");
    let held: u64 = wall.holders.iter().filter(|line| line.function == "spins").map(|line| line.stored).sum();
    println!("{}: of {gil} ticks {held} have a holder", interpreter.name);
    assert!(held * 100 >= gil as u64 * 95, "{held} of {gil}: {wall:#?}");
    assert!(recording.stderr.contains(" GIL (held by spins, "), "{}", recording.stderr);
}

/// What is not asked for is not loaded.
#[test]
fn a_recording_without_waits_is_as_before() {
    let Some(_live) = live() else { return };
    let target = Target::start(&Interpreter::named("pyenv_3_12"), "wall_shares.py");
    let recording = Profiler::of(target.pid()).rate(100).milliseconds(500).record();
    assert!(recording.report.wall.is_none());
    assert_eq!(recording.recorded.waiting("sleep", &[]), 0);
}

/// A thread that holds the GIL does not wait for anything: both together make no sense.
#[test]
fn bad_input() {
    for words in [["--wall", "--gil"], ["--wall", "--off-cpu"], ["--off-cpu", "--gil"]] {
        let output = Command::new(binary()).args(words).args(["-p", "1"]).output().expect("it runs");
        assert_eq!(output.status.code(), Some(2), "{words:?}");
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(words.iter().all(|word| told.contains(word)), "{words:?}: {told}");
    }
}

/// The time of all threads together, including those that came and went, is the time they ran, waited for a CPU and were
/// blocked, as the kernel counts it; and cuts change nothing.
#[test]
fn the_times_of_a_process_add_up_to_its_threads_lives() {
    let Some(_live) = live() else { return };
    let mut target = Target::start(&Interpreter::named("pyenv_3_12"), "wall_lives.py");
    let running = Profiler::of(target.pid()).arg("--wall").start();
    let (before, delay_before) = (target.ask(), waited_for_cpu(target.pid()));
    std::thread::sleep(Duration::from_secs(3));
    let (after, delay_after) = (target.ask(), waited_for_cpu(target.pid()));
    running.signal(libc::SIGINT);
    let recording = running.finish();

    let passed = |key: &str| after[key].as_f64().expect("a number") - before[key].as_f64().expect("likewise");
    let report = &recording.report;
    let time = report.processes[0].time.as_ref().expect("waits were sampled");
    let blocked: f64 = time.blocked_s.values().sum();
    let all = time.running_s + time.queued_s + blocked;
    println!("{time:#?}: {all} s in {} s; visitors {after} - {before}", report.duration_s);
    // Main, two that sleep, one that works, one that receives: those live all the time. A visitor is there nearly as often.
    let visitors = passed("lived_s") / passed("now_s") * report.duration_s;
    let lives = 5.0 * report.duration_s + visitors;
    assert!((all / lives - 1.0).abs() < 0.03, "{all} s of {lives} s: {time:#?}");
    // What the kernel tells of threads that are still there is a part of what all of them waited for a CPU.
    let queued = (delay_after - delay_before).as_secs_f64();
    assert!(time.queued_s > queued * 0.95 - 0.01 && time.queued_s < queued + 0.1 * lives, "{queued} s: {time:#?}");
    // By the threads' switches, which the kernel's own count differs from by a little.
    let cpu_s = report.processes[0].cpu_s.expect("the kernel tells it");
    assert!(time.running_s <= cpu_s && time.running_s > cpu_s * 0.95 - 0.05, "{cpu_s} s: {time:#?}");
    // Each thread has its part of it, including the visitors.
    let threads = &report.processes[0].threads;
    let life = |time: &TimeReport| time.running_s + time.queued_s + time.blocked_s.values().sum::<f64>();
    let of_threads: f64 = threads.iter().map(|thread| life(&thread.time)).sum();
    assert!((of_threads / all - 1.0).abs() < 0.02, "{of_threads} s of {all} s: {threads:#?}");
    assert!(threads.len() > 20 && threads.iter().take(5).all(|thread| life(&thread.time) > 0.9 * report.duration_s));
    let sleep = time.blocked_s.get("sleep").copied().unwrap_or(0.0);
    assert!(sleep > 0.4 * blocked && time.gil_wait_s < 0.2 * blocked, "{time:#?}");
}
