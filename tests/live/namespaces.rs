//! Pid namespaces: the profiler inside, nested, and outside.

use std::collections::BTreeMap;
use std::process::Command;
use tachyon_tests::{Interpreter, Profiler, Recording, Target, binary, live, program};

/// Makes a pid namespace with its own `/proc`.
const UNSHARE: [&str; 4] = ["unshare", "--pid", "--fork", "--mount-proc"];

/// In `levels` nested namespaces: a shell that is process 1, starts two busy programs as 2 and 3, and runs the
/// profiler. All end with the shell.
fn record_inside(levels: usize, interpreter: &Interpreter, profiler: Profiler) -> Recording {
    let python = interpreter.command().get_program().to_str().expect("a path of ASCII").to_owned();
    let spin = program("spin.py");
    let script = format!("\"{python}\" \"{0}\" >&2 & \"{python}\" \"{0}\" >&2 & \"$@\"", spin.display());
    let mut words: Vec<&str> = UNSHARE.repeat(levels);
    words.extend(["sh", "-c", &script, "sh"]);
    profiler.within(&words).record()
}

/// Samples by pid.
fn samples_by_pid(recording: &Recording) -> BTreeMap<u32, u64> {
    recording.report.processes.iter().map(|process| (process.pid, process.samples)).collect()
}

/// Everything inside and nothing else, with the pids used there, whatever else runs on the host.
fn check_inside(levels: usize) {
    let Some(_live) = live() else { return };
    let interpreter = Interpreter::named("pyenv_3_12");
    let outside = Target::start(&interpreter, "spin.py");
    let profiler = Profiler::new().arg("--all-python").rate(499).milliseconds(1_500);
    let recording = record_inside(levels, &interpreter, profiler);
    let pids = samples_by_pid(&recording);
    assert_eq!(pids.keys().copied().collect::<Vec<_>>(), [2, 3], "{:#?}", recording.report);
    assert!(pids.values().all(|samples| *samples > 20), "{pids:?}");
    assert!(recording.report.filtered > 0, "processes of the host are counted: {:#?}", recording.report);
    assert_eq!(recording.lost("unknown_process"), 0, "what cannot be seen is not unknown");
    for sample in &recording.recorded.samples {
        assert!([2, 3].contains(&sample.thread_id), "threads are numbered likewise: {}", sample.thread_id);
    }
    drop(outside);
}

#[test]
fn inside() {
    check_inside(1);
}

#[test]
fn inside_nested() {
    check_inside(2);
}

/// `-p` takes the pid that the caller sees.
#[test]
fn pid_of_the_caller() {
    let Some(_live) = live() else { return };
    let interpreter = Interpreter::named("debian_3_11");
    let profiler = Profiler::of(3).rate(499).milliseconds(1_000);
    let recording = record_inside(1, &interpreter, profiler);
    let pids = samples_by_pid(&recording);
    assert_eq!(pids.keys().copied().collect::<Vec<_>>(), [3], "{:#?}", recording.report);
    assert!(pids[&3] > 20, "{pids:?}");
}

/// Children inside are followed, and their ends are seen although the kernel takes away their pids first.
#[test]
fn children_inside() {
    let Some(_live) = live() else { return };
    let interpreter = Interpreter::named("pyenv_3_12");
    let python = interpreter.command().get_program().to_str().expect("a path of ASCII").to_owned();
    // The parent works first: until it is inspected, what it starts is not either.
    let busy = "import os\nsum(i * i for i in range(3_000_000))\nfor _ in range(20):\n    if os.fork() == 0:\n        sum(i * i for i in range(2_000_000))\n        os._exit(0)\n    os.wait()\n";
    let profiler = Profiler::new().rate(999).command(&[&python, "-c", busy]).within(&UNSHARE);
    let recording = profiler.record();
    let workers = recording.report.processes.iter().filter(|process| process.samples > 0).count();
    assert!(workers > 20, "{workers}: {:#?}", recording.report);
    let ended = recording.report.processes.iter().filter(|process| process.cpu_s.is_some_and(|cpu| cpu > 0.0)).count();
    assert!(ended > 20, "{ended} ends were seen: {:#?}", recording.report);
}

/// From outside, processes of two namespaces with the same pids inside are kept apart.
#[test]
fn outside() {
    let Some(_live) = live() else { return };
    let interpreter = Interpreter::named("pyenv_3_12");
    let python = interpreter.command().get_program().to_str().expect("a path of ASCII").to_owned();
    let spin = program("spin.py").display().to_string();
    let mut inner = Vec::new();
    for _ in 0..2 {
        let mut command = std::process::Command::new(UNSHARE[0]);
        command.args(&UNSHARE[1..]).args(["--kill-child", &python, &spin]).stdout(std::process::Stdio::null());
        inner.push(command.spawn().expect("unshare can be run"));
    }
    let recording = Profiler::new().arg("--all-python").rate(499).milliseconds(1_500).record();
    let children: Vec<u32> = inner.iter().map(|child| only_child(child.id())).collect();
    for child in &mut inner {
        child.kill().expect("it runs");
        child.wait().expect("it can be waited for");
    }
    let pids = samples_by_pid(&recording);
    for child in children {
        assert!(pids.get(&child).is_some_and(|samples| *samples > 20), "{child}: {pids:?}");
    }
}

fn only_child(pid: u32) -> u32 {
    let path = format!("/proc/{pid}/task/{pid}/children");
    let children = std::fs::read_to_string(path).expect("it runs");
    children.trim().parse().unwrap_or_else(|_| panic!("{pid} has the children {children:?}"))
}

/// A process in its own user namespace is profiled from outside, and has the user that the profiler sees.
#[test]
fn user_namespace_from_outside() {
    let Some(_live) = live() else { return };
    let python = Interpreter::named("debian_3_11");
    let python = python.command().get_program().to_owned();
    let mut command = std::process::Command::new("setpriv");
    command.args(["--reuid", "65534", "--regid", "65534", "--clear-groups"]);
    // Inside it is root.
    command.args(["unshare", "--user", "--map-root-user"]).arg(python).args(["-S", "-c", "while True: pass"]);
    let mut child = command.stdin(std::process::Stdio::null()).spawn().expect("setpriv can be run");
    std::thread::sleep(std::time::Duration::from_secs(1));
    let record = |user: &str| Profiler::new().arg("--all-python").arg("--uid").arg(user).rate(499).milliseconds(1_000);
    let roots = record("0").run();
    let theirs = std::panic::catch_unwind(|| {
        (record("65534").record(), Profiler::of(child.id()).rate(499).milliseconds(500).record())
    });
    child.kill().expect("it runs");
    child.wait().expect("it can be waited for");
    let (theirs, by_pid) = theirs.unwrap_or_else(|failed| std::panic::resume_unwind(failed));
    let pids = samples_by_pid(&theirs);
    assert!(pids.get(&child.id()).is_some_and(|samples| *samples > 20), "{pids:?}");
    // Nobody else runs Python here as root, or there is a recording without it.
    let told = String::from_utf8_lossy(&roots.stderr);
    assert!(roots.status.success() || told.contains("no CPython fits --uid 0"), "{told}");
    assert!(!told.contains(&format!("pid {}", child.id())), "{told}");
    assert!(samples_by_pid(&by_pid)[&child.id()] > 10, "{:#?}", by_pid.report);
}

/// Inside one no process may load BPF programs, whatever its capabilities: the message says so.
#[test]
fn user_namespace_inside() {
    let Some(_live) = live() else { return };
    let profiler = Profiler::new().arg("--all-python").milliseconds(100);
    let output = profiler.within(&["unshare", "--user", "--map-root-user"]).run();
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{told}");
    assert!(told.contains("hint: ") && told.contains("user namespace"), "{told}");
    let mut doctor = std::process::Command::new("unshare");
    doctor.args(["--user", "--map-root-user"]).arg(tachyon_tests::binary()).arg("doctor");
    let told = String::from_utf8_lossy(&doctor.output().expect("unshare can be run").stdout).into_owned();
    assert!(told.contains("user namespace"), "{told}");
}

/// In a sidecar the path of the target's program leads to another file: without `CAP_SYS_PTRACE` that was given as the reason.
#[test]
fn a_sidecar_without_ptrace_says_so() {
    let Some(_live) = live() else { return };
    let target = Target::start(&Interpreter::named("pyenv_3_11"), "spin.py");
    let dir = tempfile::tempdir().expect("a temporary directory can be made");
    let report = dir.path().join("report.json");
    // Another file is mounted over every file that the target has mapped from its own installation.
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", target.pid())).expect("the target runs");
    let mut files: Vec<_> =
        maps.lines().filter_map(|line| line.split_once('/').map(|(_, path)| format!("/{path}"))).collect();
    files.retain(|path| path.contains("/.pyenv/"));
    files.dedup();
    let script = "report=$1; program=$2; shift 2; for file; do mount --bind /bin/true \"$file\"; done
        missing=-sys_ptrace,-checkpoint_restore,-sys_admin
        exec setpriv --bounding-set=$missing --inh-caps=$missing \"$program\" --all-python -d 500ms -o - --format collapsed --report \"$report\"";
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-ec", script, "sh"]).arg(&report).arg(binary()).args(&files);
    let output = command.output().expect("util-linux is installed");
    let told = String::from_utf8_lossy(&output.stderr);
    let report = std::fs::read_to_string(&report).unwrap_or_else(|error| panic!("{error}: {told}"));
    let report: tachyon::report::Report = serde_json::from_str(&report).expect("a report");
    let about = format!("pid {}:", target.pid());
    let refused = report.refused.iter().find(|refused| refused.starts_with(&about));
    let refused = refused.unwrap_or_else(|| panic!("{about} {:#?}", report.refused));
    assert!(refused.contains("--cap-add SYS_PTRACE") && !refused.contains("another file"), "{refused}");
}
