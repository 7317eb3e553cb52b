//! What happens to the target when the profiler starts and ends, and to the profiler when the target does.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};
use tachyon_tests::{Interpreter, Profiler, Running, Target, expect, let_run, on_each_interpreter, program};

on_each_interpreter!(at_home: target_killed, profiler_killed, target_notices_nothing);

/// SIGKILL of the target mid-sample: the recording ends by itself, and what was sampled is named.
fn target_killed(interpreter: &Interpreter) {
    let mut target = Target::start(interpreter, "deep_stack.py");
    let running = Profiler::of(target.pid()).rate(4_999).start();
    let_run(target.pid(), Duration::from_millis(150));
    target.kill();
    // It has no length of its own.
    let recording = running.finish();
    let process = &recording.report.processes[0];
    assert!(process.samples > 100, "{:#?}", recording.report);
    assert!(expect::all_named(process, expect::cut(&recording.report)), "what was sampled is named: {process:?}");
    tachyon_tests::expect::check_stacks(&recording.recorded, &target.facts, 0.99);
}

/// The ids that bpf(2) enumerates with `command`.
///
/// Nothing is opened: a file descriptor made from a program array's id while its last owner closes it makes Linux 6.18
/// forget to free the map (`prog_array_map_clear` takes a reference for work that is already queued).
fn ids(command: libc::c_long) -> impl Iterator<Item = u32> {
    #[repr(C)]
    struct NextId {
        start_id: u32,
        next_id: u32,
        open_flags: u32,
    }
    let following = move |&start_id: &u32| {
        let mut attributes = NextId { start_id, next_id: 0, open_flags: 0 };
        // SAFETY: the kernel reads and writes as many bytes as it is told the structure has.
        let result = unsafe { libc::syscall(libc::SYS_bpf, command, &raw mut attributes, size_of::<NextId>()) };
        (result == 0).then_some(attributes.next_id)
    };
    std::iter::successors(following(&0), following)
}

/// What the kernel has loaded, by the kind of number that names it.
fn loaded() -> BTreeSet<(&'static str, u32)> {
    /// `BPF_PROG_GET_NEXT_ID`, `BPF_MAP_GET_NEXT_ID` and `BPF_LINK_GET_NEXT_ID` of linux/bpf.h.
    const COMMANDS: [(&str, libc::c_long); 3] = [("prog_id", 11), ("map_id", 12), ("link_id", 31)];
    COMMANDS.into_iter().flat_map(|(kind, command)| ids(command).map(move |id| (kind, id))).collect()
}

/// The part of it that this profiler has open.
fn held(running: &Running) -> BTreeSet<(&'static str, u32)> {
    let number = |text: &str, key: &'static str| {
        let value = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
        Some((key, value.trim().parse().ok()?))
    };
    let files = running.bpf_files();
    files
        .iter()
        .filter_map(|text| {
            number(text, "link_id").or_else(|| number(text, "map_id")).or_else(|| number(text, "prog_id"))
        })
        .collect()
}

/// SIGKILL of the profiler: the kernel drops programs, links and maps, and the target runs on.
fn profiler_killed(interpreter: &Interpreter) {
    let target = Target::start(interpreter, "spin.py");
    let running = Profiler::of(target.pid()).rate(999).start();
    let held = held(&running);
    for kind in ["prog_id", "link_id", "map_id"] {
        assert!(held.iter().any(|(key, _)| *key == kind), "no {kind} in {held:?}");
    }
    assert!(held.is_subset(&loaded()), "what it has open is loaded");
    let profiler = running.kill();
    // The kernel frees them after a grace period.
    let deadline = Instant::now() + Duration::from_secs(10);
    while held.intersection(&loaded()).next().is_some() {
        assert!(Instant::now() < deadline, "{:?} are still there", held.intersection(&loaded()).collect::<Vec<_>>());
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(!profiler.output().exists(), "an unfinished file has no final name");
    assert_eq!(tracer_of(target.pid()), "0");

    // And the next recording of the same process is as good as any.
    let recording = Profiler::of(target.pid()).rate(499).cpu_milliseconds(target.pid(), 500).record();
    assert!(recording.report.stored > 50, "{:#?}", recording.report);
}

fn tracer_of(pid: u32) -> String {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("the target lives");
    let tracer = status.lines().find_map(|line| line.strip_prefix("TracerPid:"));
    tracer.expect("every process has this field").trim().to_owned()
}

/// Output, exit status, signals and tracer are the same as without the profiler.
fn target_notices_nothing(interpreter: &Interpreter) {
    let run = |profiled: bool| {
        let mut target = Target::start(interpreter, "observed.py");
        let running = profiled.then(|| Profiler::of(target.pid()).rate(4_999).start());
        target.go();
        let mut tracers = BTreeSet::new();
        for _ in 0..20 {
            tracers.insert(tracer_of(target.pid()));
            std::thread::sleep(Duration::from_millis(20));
        }
        let (line, status) = (target.line(), target.wait());
        (line, status, tracers, running.map(Running::finish))
    };
    let (line, status, tracers, _) = run(false);
    let (profiled_line, profiled_status, profiled_tracers, recording) = run(true);
    assert_eq!((&profiled_line, profiled_status), (&line, status));
    assert_eq!((profiled_tracers, tracers), (["0".to_owned()].into(), ["0".to_owned()].into()));
    assert_eq!(status.code(), Some(7));
    assert!(recording.is_some_and(|recording| recording.report.stored > 500));

    // The same when the profiler starts it.
    let script = program("observed.py");
    let words = [interpreter.path.to_str().expect("a plain path"), "-B", script.to_str().expect("a plain path")];
    let output = Profiler::new().rate(999).command(&words).run_with_input("\n");
    assert_eq!(output.status.code(), Some(7), "{}", String::from_utf8_lossy(&output.stderr));
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert_eq!(stdout.lines().nth(1), Some(line.as_str()));
    assert!(String::from_utf8_lossy(&output.stderr).contains("to standard error\n"));
}
