//! The limits that the profiler sets itself.

use std::process::Command;
use tachyon_tests::{Interpreter, Profiler, Target, binary, live};

/// Thousands of samples a second cost far more than half a thousandth of a core: the rate is lowered, which is
/// reported, and the account counts which rate was asked of the kernel when.
#[test]
fn the_rate_gives_way_to_max_cpu() {
    let Some(_live) = live() else { return };
    let target = Target::start(&Interpreter::named("debian_3_11"), "shares.py");
    // Compared every second from the first on; two in a row above the limit take a step.
    let recording = Profiler::of(target.pid()).rate(4_999).arg("--max-cpu").arg("0.05").milliseconds(7_500).record();
    let report = &recording.report;
    assert_eq!(report.rate_hz, 4_999.0);
    assert!(report.effective_rate_hz > 0.0 && report.effective_rate_hz < 0.8 * report.rate_hz, "{report:#?}");
    assert!(
        recording.stderr.contains("more than its CPU limit, 0.05 % of a core: sampling at"),
        "{}",
        recording.stderr
    );
    assert!(report.notes.iter().any(|note| note.contains("was lowered to")), "{:?}", report.notes);
    let cpu_s: f64 = report.processes.iter().filter_map(|process| process.cpu_s).sum();
    let expected = report.expected.expect("the target's time is known") as f64;
    assert!((expected - report.effective_rate_hz * cpu_s).abs() <= 1.0, "{report:#?}");
    // At the rate that was asked for at first, most of them would be missing.
    let met = report.stored + report.loss.values().sum::<u64>();
    assert!((met as f64) > 0.5 * expected && (met as f64) < 1.2 * expected, "{report:#?}");
}

/// Where there is room, nothing changes.
#[test]
fn a_limit_with_room_changes_nothing() {
    let Some(_live) = live() else { return };
    let target = Target::start(&Interpreter::named("debian_3_11"), "shares.py");
    let recording = Profiler::of(target.pid()).rate(19).arg("--max-cpu").arg("400%").milliseconds(3_500).record();
    let report = &recording.report;
    assert_eq!((report.rate_hz, report.effective_rate_hz), (19.0, 19.0));
    assert!(report.notes.iter().all(|note| !note.contains("CPU limit")), "{:?}", report.notes);
}

/// Memory of the program that executes the profiler is not the profiler's: this once reported 525 MiB instead of 40.
#[test]
fn peak_memory_is_of_the_profiler_alone() {
    let Some(_live) = live() else { return };
    const BEFORE: u64 = 512 << 20;
    let python = Interpreter::named("debian_3_11");
    let dir = tempfile::tempdir().expect("a temporary directory can be made");
    let (report, output) = (dir.path().join("report.json"), dir.path().join("out.tach"));
    let code = format!("import os, sys; held = b'x' * {BEFORE}; os.execv(sys.argv[1], sys.argv[1:])");
    let mut command = python.command();
    command.args(["-c", &code]).arg(binary()).args(["record", "-o"]).arg(output).arg("--report").arg(&report);
    let status = command.args(["--", "sleep", "0.1"]).status().expect("it starts");
    let text = std::fs::read_to_string(&report).unwrap_or_else(|error| panic!("{status}: {error}"));
    let report: serde_json::Value = serde_json::from_str(&text).expect("it is JSON");
    let peak = report["cost"]["peak_rss_bytes"].as_u64().expect("a number");
    assert!(peak > 1 << 20 && peak < BEFORE / 2, "{peak}");
}

/// A program that makes functions without end would take memory without end: names are given up in time, then the
/// recording. What was recorded is written, and memory was never above the limit.
#[test]
fn memory_stays_within_max_memory() {
    let Some(_live) = live() else { return };
    let target = Target::start(&Interpreter::named("pyenv_3_12"), "many_functions.py");
    let least = Profiler::of(target.pid()).milliseconds(300).rate(999).record();
    let base = least.report.cost.peak_rss_bytes + least.report.cost.map_bytes;
    // Room for some thousand functions.
    let limit = (base / 5 * 7).next_multiple_of(1 << 20);
    let profiler = Profiler::of(target.pid()).rate(999).arg("--max-memory").arg((limit >> 20).to_string() + "MiB");
    let recording = profiler.cpu_milliseconds(target.pid(), 16_000).record();
    let report = &recording.report;
    let used = report.cost.peak_rss_bytes + report.cost.map_bytes;
    println!("{used} bytes of {limit}, {base} at the start; notes {:?}", report.notes);
    assert!(used <= limit, "{report:#?}");
    for word in ["caches are dropped", "get no names"] {
        assert_eq!(recording.stderr.matches(word).count(), 1, "{}", recording.stderr);
        assert!(report.notes.iter().any(|note| note.contains(word)), "{:?}", report.notes);
    }
    // Samples go on: at 999 Hz each function is sampled about twice.
    let unknown = recording
        .recorded
        .samples
        .iter()
        .filter(|sample| recording.recorded.frames_of(sample).any(|frame| frame.function == "<unknown function>"));
    assert!(unknown.count() > 100, "{report:#?}");
    assert_eq!(report.loss.values().sum::<u64>(), 0, "{report:#?}");
}

/// Too little is refused before anything is recorded, and the message says what would be enough.
#[test]
fn too_little_memory_is_refused() {
    let Some(_live) = live() else { return };
    let target = Target::start(&Interpreter::named("pyenv_3_12"), "spin.py");
    // The ring of ten thousand samples a second is cut to fit; what the program itself needs cannot be.
    let output = Profiler::of(target.pid()).rate(9_999).milliseconds(100).arg("--max-memory").arg("32MiB").run();
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{told}");
    assert!(told.contains("a memory limit of 32 MiB is too little") && told.contains("hint: give it "), "{told}");
}

/// Maps, programs and events are open files. A soft limit is no limit; a hard one that cannot be enough is refused, by
/// the recording and by `doctor`; and the command has the limit that it would have without a profiler.
#[test]
fn few_open_files() {
    let Some(_live) = live() else { return };
    let python = Interpreter::named("debian_3_11").path;
    let script = "import resource, sys, time\nwhile time.process_time() < 0.3: pass\nsys.exit(resource.getrlimit(resource.RLIMIT_NOFILE)[0])";
    let profiler = Profiler::new().rate(499).command(&[python.to_str().expect("a plain path"), "-c", script]);
    let recording = profiler.within(&["prlimit", "--nofile=64:4096"]).record();
    assert_eq!(recording.status, 64, "{}", recording.stderr);
    assert!(recording.report.stored > 50, "{:#?}", recording.report);

    let target = Target::start(&Interpreter::named("debian_3_11"), "spin.py");
    for limit in ["--nofile=20", "--nofile=64"] {
        let output = Profiler::of(target.pid()).milliseconds(100).within(&["prlimit", limit]).run();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(
            said.contains("files may be open at once") && said.contains("hint: raise the hard limit: `ulimit"),
            "{said}"
        );
        let output =
            Command::new("prlimit").arg(limit).arg(binary()).arg("doctor").output().expect("prlimit can be run");
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let line = said.lines().find(|line| line.contains("open files: ")).unwrap_or_default();
        assert!(line.starts_with("FAIL") && line.contains("ulimit"), "{said}");
    }
}
