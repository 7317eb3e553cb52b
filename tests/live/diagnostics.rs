//! The diagnostic build of the BPF object tells why walks stop; the shipped object does not.

use std::path::Path;
use std::process::Command;
use tachyon_tests::{Interpreter, Profiler, Target, live, not_run};

#[test]
fn tells_why_walks_stop() {
    let Some(_live) = live() else { return };
    let object = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/bpf/log/tachyon.bpf.o");
    if !object.is_file() {
        return not_run("the diagnostic object: `cargo xtask bpf build --log`");
    }
    let target = Target::start(&Interpreter::named("pyenv_3_12"), "unreadable.py");
    // A CPU reports what it held back when its next second begins. A target that moves to another CPU every second would
    // show none of that.
    let pinned = Command::new("taskset").args(["-a", "-c", "-p", "0", &target.pid().to_string()]).output();
    assert!(pinned.expect("taskset can be run").status.success());
    let profiler = || Profiler::of(target.pid()).rate(997).cpu_milliseconds(target.pid(), 2_500);
    let recording = profiler().arg("--bpf-log").arg(&object).record();
    let lines: Vec<&str> = recording.stderr.lines().filter(|line| line.starts_with("tachyon: bpf: ")).collect();
    let of = format!("tachyon: bpf: pid {} thread ", target.pid());
    let told = lines.iter().filter_map(|line| line.strip_prefix(&of)?.split_once(": python stop unreadable_code at "));
    let told: Vec<&str> = told.map(|(_thread, rest)| rest).collect();
    let cut = recording.stopped("unreadable_code");
    println!("{} lines of {cut} stops; the first: {:?}", lines.len(), lines.first());
    assert!(!told.is_empty() && cut > 100, "{lines:?}");
    let address = |line: &str| u64::from_str_radix(line.split(',').next()?, 16).ok();
    assert!(told.iter().all(|line| address(line).is_some_and(|address| address > 0)), "{told:?}");
    // Ten in each second that has begun.
    let most = (recording.report.duration_s + 2.0) * 10.0;
    assert!((lines.len() as f64) <= most, "{} lines in {} s", lines.len(), recording.report.duration_s);
    let held_back: u64 =
        told.iter().filter_map(|line| line.rsplit_once("; ")?.1.strip_suffix(" not told")?.parse::<u64>().ok()).sum();
    assert!(held_back > 0, "what was not told is counted: {told:?}");

    let recording = profiler().record();
    assert!(!recording.stderr.contains("tachyon: bpf:"), "{}", recording.stderr);
}
