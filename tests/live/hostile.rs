//! Processes that lie, beside an honest one whose profile stays exact. Each attack is a mode of `hostile.py`.
//!
//! What the profiler spends on a liar is bounded too: every recording must end in time and use little memory.

use std::time::{Duration, Instant};
use tachyon_tests::{Interpreter, Profiler, Recorded, Recording, Sample, Target, expect, on_each_interpreter};

on_each_interpreter!(at_home: frame_cycle,
    frame_elsewhere,
    thread_cycle,
    huge_name,
    long_name,
    odd_names,
    crafted_files,
    debug_offsets,
    storm,
    many_threads,
    absurd_eh_frame,
);

/// Peak memory that no target may push the profiler over: 160 MiB.
const MOST_BYTES: u64 = 160 << 20;
/// The same with native frames: another 64 and 48 MiB are allowed for tables and DWARF.
const MOST_BYTES_NATIVE: u64 = MOST_BYTES + (112 << 20);
/// How much longer than asked a recording may take: a storm leaves little of the machine.
const MOST_DELAY: Duration = Duration::from_secs(60);
/// The most CPU time of the profiler, in seconds, in an unoptimised build.
const MOST_CPU_S: f64 = 6.0;
const LENGTH: Duration = Duration::from_millis(1_000);

/// The pid in the outermost frame, `comm (pid)`.
fn process_of(recorded: &Recorded, sample: &Sample) -> u32 {
    let root = recorded.root(sample).expect("a file of many processes has a root frame");
    let pid = root.function.rsplit_once(" (").and_then(|(_, pid)| pid.strip_suffix(')')?.parse().ok());
    pid.unwrap_or_else(|| panic!("no process in {root:?}"))
}

/// The samples of one process, without the frame that names it.
pub(crate) fn only(recording: &Recording, pid: u32) -> Recorded {
    let all = &recording.recorded;
    let samples = all.samples.iter().filter(|sample| process_of(all, sample) == pid).copied().collect();
    let stacks = all.stacks.iter().map(|stack| stack.split_last().expect("there is a root").1.to_vec()).collect();
    Recorded { header: all.header, frames: all.frames.clone(), stacks, samples }
}

/// Records an honest process and a hostile one, and checks that all is right about the honest one. `arguments` are the
/// attack's, `options` the profiler's; unless they say otherwise it records only these two.
fn attacked(interpreter: &Interpreter, attack: &str, arguments: &[&str], options: &[&str]) -> (Recording, Target) {
    let good = Target::start(interpreter, "deep_stack.py");
    let bad = Target::start_with(interpreter, "hostile.py", &[&[attack], arguments].concat());
    let start = Instant::now();
    let mut profiler = Profiler::new().rate(499).milliseconds(LENGTH.as_millis() as u64);
    for &option in options {
        profiler = profiler.arg(option);
    }
    if !options.contains(&"--all-python") {
        profiler = profiler.arg("-p").arg(good.pid().to_string()).arg("-p").arg(bad.pid().to_string());
    }
    let recording = profiler.record();
    let took = start.elapsed();
    assert!(took < LENGTH + MOST_DELAY, "{attack}: it took {took:?}");
    let peak = recording.report.cost.peak_rss_bytes;
    let cpu_s = recording.report.cost.user_cpu_s;
    println!("{attack}: {took:?}, {cpu_s:.1} s CPU, peak {} MiB, stops {:?}", peak >> 20, recording.report.stops);
    assert!(cpu_s < MOST_CPU_S, "{attack}: {cpu_s} s of CPU time");
    let most = if options.contains(&"--native") { MOST_BYTES_NATIVE } else { MOST_BYTES };
    assert!(peak < most, "{attack}: {peak} bytes");

    expect::check_stacks(&only(&recording, good.pid()).without_native(), &good.facts, 0.99);
    let process = recording.report.processes.iter().find(|process| process.pid == good.pid());
    let process = process.unwrap_or_else(|| panic!("{:#?}", recording.report));
    assert!(expect::all_named(process, expect::cut(&recording.report)), "{process:?}");
    // Virtual machines skip firings (the report's `not_fired`), and the honest process shares the machine with the
    // hostile one.
    let expected = process.cpu_s.expect("its time can be measured") * 499.0;
    assert!(process.samples as f64 > 0.4 * expected && process.samples > 20, "{expected}: {process:?}");
    assert_eq!(process.uninspected, 0, "{process:?}");
    (recording, bad)
}

/// The names of each sample of a process, leaf first.
fn names(recording: &Recording, pid: u32) -> Vec<Vec<String>> {
    let recorded = only(recording, pid);
    let names = |sample| recorded.frames_of(sample).map(|frame| frame.function.clone()).collect();
    recorded.samples.iter().map(names).collect()
}

/// A frame that is its own caller: 1,024 frames, then an end.
fn frame_cycle(interpreter: &Interpreter) {
    let (recording, _bad) = attacked(interpreter, "frame_cycle", &[], &[]);
    assert!(recording.stopped("too_deep") > 20, "{:#?}", recording.report.stops);
}

/// Chains that lead to memory that is not mapped, not the program's, or not a frame.
fn frame_elsewhere(interpreter: &Interpreter) {
    for (attack, reasons) in [
        ("frame_unmapped", &["unreadable_frame"][..]),
        ("frame_not_canonical", &["unreadable_frame"]),
        ("frame_in_kernel", &["unreadable_frame"]),
        // A chain of one frame that leads nowhere is also what a frame being linked looks like.
        ("frame_of_itself", &["not_a_code_object", "unreadable_frame", "entering_eval"]),
    ] {
        let (recording, bad) = attacked(interpreter, attack, &[], &[]);
        let stopped: u64 = reasons.iter().map(|reason| recording.stopped(reason)).sum();
        assert!(stopped > 20, "{attack}: {:#?}", recording.report.stops);
        // The frames above the lie are true and are shown; or none is, and the stack says so.
        let shown = names(&recording, bad.pid());
        let honest = |leaf: &String| leaf == "linked" || leaf == "<entering evaluator>";
        assert!(shown.iter().all(|names| names.first().is_some_and(honest)), "{attack}: {shown:?}");
    }
}

fn thread_cycle(interpreter: &Interpreter) {
    let (recording, _bad) = attacked(interpreter, "thread_cycle", &[], &["--all-python"]);
    assert!(recording.stopped("thread_list_too_long") > 20, "{:#?}", recording.report.stops);
}

/// A name that claims 2^40 bytes is shown as far as its memory is mapped, or not at all.
fn huge_name(interpreter: &Interpreter) {
    let (recording, bad) = attacked(interpreter, "huge_name", &[], &["--all-python"]);
    let shown = names(&recording, bad.pid());
    assert!(shown.len() > 20 && shown.iter().all(|names| names[0].len() < 1 << 20), "{}", shown.len());
}

/// A real name of 4 MB is cut, and says so.
fn long_name(interpreter: &Interpreter) {
    let (recording, bad) = attacked(interpreter, "long_name", &[], &["--all-python"]);
    let shown = names(&recording, bad.pid());
    let cut = |names: &Vec<String>| names[0].starts_with("nnnn") && names[0].ends_with('…') && names[0].len() < 1 << 17;
    assert!(shown.len() > 20 && shown.iter().all(cut), "{} samples", shown.len());
    assert!(std::fs::metadata(&recording.path).expect("the file is there").len() < 1 << 20);
}

/// Names with escapes, line feeds, separators and invalid Unicode: complete in the file, harmless in every text.
fn odd_names(interpreter: &Interpreter) {
    use std::process::Command;
    let odd = ["\u{1b}[2Jhidden", "a\nb 7", "semi;colon", "\u{202e}gpj.exe", "\u{9b}31m", "tab\tcr\r", "back\\slash"];
    let (recording, bad) = attacked(interpreter, "odd_names", &odd, &["--all-python"]);
    let shown = names(&recording, bad.pid());
    for name in odd {
        assert!(shown.iter().all(|names| names.iter().any(|shown| shown == name)), "{name:?}: {:?}", shown.first());
    }
    assert!(shown.iter().all(|names| names.iter().any(|name| name == "lone\\udcff\\ud800")), "{:?}", shown.first());
    let run = |words: &[&str]| {
        let mut command = Command::new(tachyon_tests::binary());
        let output = command.args(words).output().expect("the profiler can be run");
        (String::from_utf8_lossy(&output.stdout).into_owned(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let path = recording.path.to_str().expect("temporary paths are text");
    let pid = bad.pid().to_string();
    let collapsed = run(&["export", path, "--format", "collapsed", "-o", "-"]).0;
    assert!(collapsed.contains("\\x1b[2Jhidden") && collapsed.contains("a\\nb 7"), "{collapsed}");
    for line in collapsed.lines() {
        let count = line.rsplit_once(' ').and_then(|(_, count)| count.parse::<u64>().ok());
        assert!(count.is_some_and(|count| count > 0), "one stack a line: {line:?}");
        assert!(!line.contains("semi;colon"), "{line:?}");
    }
    let report = std::fs::read_to_string(recording.path.with_file_name("report.json")).expect("the report is there");
    let texts = [
        ("collapsed", collapsed),
        ("info", run(&["info", path]).0),
        ("info --json", run(&["info", path, "--json"]).0),
        ("account", recording.stderr.clone()),
        ("report", report),
        ("dump", run(&["dump", "-p", &pid]).0),
        ("dump --json", run(&["dump", "-p", &pid, "--json"]).0),
        ("doctor", run(&["doctor"]).0),
        ("doctor --verbose", run(&["doctor", "--verbose"]).0),
        ("doctor --json", run(&["doctor", "--json"]).0),
        ("an error", run(&["info", "/nowhere/\u{1b}[2J\u{202e}"]).1),
    ];
    for (what, text) in &texts {
        harmless(what, text);
    }
}

/// No control character but line feeds, and no mark that reverses text.
fn harmless(what: &str, text: &str) {
    let harmful = |c: char| {
        (c.is_control() && c != '\n')
            || matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}')
    };
    let place = text.char_indices().find(|&(_, c)| harmful(c));
    assert!(place.is_none(), "{what}: {place:?} in {text:?}");
}

fn crafted_files(interpreter: &Interpreter) {
    let (recording, bad) = attacked(interpreter, "crafted_files", &[], &["--all-python"]);
    let folder = bad.facts["folder"].as_str().expect("the program tells its folder");
    std::fs::remove_dir_all(folder).expect("the program's folder can be removed");
    // What it is taken for does not matter: a crafted file may look like a CPython.
    println!("{:?}", recording.report.processes.iter().find(|process| process.pid == bad.pid()));
}

/// The interpreter's offsets are taken from its file: what it writes to its memory changes nothing.
fn debug_offsets(interpreter: &Interpreter) {
    let (recording, bad) = attacked(interpreter, "debug_offsets", &[], &["--all-python"]);
    let shown = names(&recording, bad.pid());
    let right = shown.iter().filter(|names| names.iter().any(|name| name == "debug_offsets")).count();
    assert!(shown.len() > 20 && right as f64 >= 0.99 * shown.len() as f64, "{right} of {}", shown.len());
}

fn storm(interpreter: &Interpreter) {
    let (recording, _bad) = attacked(interpreter, "storm", &[], &["--all-python"]);
    println!("{} processes, lost {:?}", recording.report.processes.len(), recording.report.loss);
}

fn many_threads(interpreter: &Interpreter) {
    let (recording, bad) = attacked(interpreter, "many_threads", &[], &["--all-python"]);
    let shown = names(&recording, bad.pid());
    println!("{} samples of it, {:?}", shown.len(), recording.report.stops);
    // Its main thread is last in the list, and is found with the second sample at the latest.
    let found = shown.iter().filter(|names| names.iter().any(|name| name == "many_threads")).count();
    assert!(
        shown.len() > 20 && found + 2 + expect::cut(&recording.report) as usize >= shown.len(),
        "{found}: {shown:?}"
    );
}

/// Unwind tables that make no sense, from files that change while they are read: none of their native stacks is believed,
/// and everything else is right.
fn absurd_eh_frame(interpreter: &Interpreter) {
    let (recording, bad) = attacked(interpreter, "absurd_eh_frame", &[], &["--native"]);
    let folder = bad.facts["folder"].as_str().expect("the program tells its folder");
    std::fs::remove_dir_all(folder).expect("the program's folder can be removed");
    let shown = names(&recording, bad.pid());
    let wrong = shown.iter().filter(|names| !names.iter().any(|name| name == "absurd_eh_frame")).count() as u64;
    // Every complete stack is right: its Python stacks have nothing to do with its tables.
    let cut = expect::cut(&recording.report);
    assert!(shown.len() > 20 && wrong <= cut, "{wrong} of {} wrong, {cut} cut", shown.len());
    let native = recording.report.native.as_ref().expect("native frames were recorded");
    println!("{} bytes of tables, refused: {:?}", native.table_bytes, native.refused);
    let process = recording.report.processes.iter().find(|process| process.pid != bad.pid()).expect("the good one");
    let merged = process.merge_exact + process.merge_repaired;
    assert!(merged as f64 >= 0.95 * process.samples as f64, "native stacks of the good one: {process:?}");
}
