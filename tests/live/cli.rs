//! What the command line promises, with real recordings.

use serde_json::Value;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;
use tachyon_tests::{Interpreter, Profiler, Target, binary, judge, let_run, live, on_each_interpreter};

on_each_interpreter!(at_home: blocked, files_and_exports, busy_children, finished_by_a_signal, passed_on, printing, command);

/// The sum of the counts in collapsed stacks.
fn samples_in(collapsed: &str) -> u64 {
    let count = |line: &str| line.rsplit_once(' ').and_then(|(_, count)| count.parse::<u64>().ok());
    collapsed.lines().map(|line| count(line).unwrap_or_else(|| panic!("no count in {line:?}"))).sum()
}

fn tachyon(words: &[&str], paths: &[&Path]) -> Output {
    Command::new(binary()).args(words).args(paths).output().expect("the profiler can be run")
}

/// A process that always waits: exit status 0, a valid file, and a line that says where it waits.
fn blocked(interpreter: &Interpreter) {
    let target = Target::start(interpreter, "blocked.py");
    let recording = Profiler::of(target.pid()).milliseconds(700).record();
    let line = recording
        .stderr
        .lines()
        .find(|line| line.starts_with("ran "))
        .unwrap_or_else(|| panic!("{}", recording.stderr));
    let (share, place) = line.split_once("; waiting in ").unwrap_or_else(|| panic!("{line}"));
    assert!(share.starts_with("ran 0.0 % of 0.7 s"), "{line}");
    assert!(place.starts_with("selectors.py:") && place.ends_with(" EpollSelector.select"), "{line}");
}

/// `info`, `export` and a collapsed recording report the same samples as the TACH file.
fn files_and_exports(interpreter: &Interpreter) {
    let target = Target::start(interpreter, "shares.py");
    let recording = Profiler::of(target.pid()).rate(499).cpu_milliseconds(target.pid(), 1_000).record();
    let stored = recording.report.stored;
    let mode = std::fs::metadata(&recording.path).expect("the file is there").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);

    let info = tachyon(&["info", "--json"], &[&recording.path]);
    assert!(info.status.success(), "{}", String::from_utf8_lossy(&info.stderr));
    let info: Value = serde_json::from_slice(&info.stdout).expect("`info --json` prints JSON");
    assert!(info.to_string().contains(&format!(":{stored}")), "{info:#}");

    let exported = tachyon(&["export", "-o", "-", "--format", "collapsed"], &[&recording.path]);
    assert!(exported.status.success(), "{}", String::from_utf8_lossy(&exported.stderr));
    let exported = String::from_utf8(exported.stdout).expect("collapsed stacks are text");
    assert_eq!(samples_in(&exported), stored);
    let replayed = judge::collapsed(&recording.path);
    let sorted = |text: &str| {
        let mut lines: Vec<_> = text.lines().map(str::to_owned).collect();
        lines.sort_unstable();
        lines
    };
    assert_eq!(sorted(&exported), sorted(&replayed), "ours and CPython's collapsed stacks of the same file");

    let profiler = Profiler::of(target.pid()).rate(499).milliseconds(800).arg("--format").arg("collapsed");
    let ended = profiler.run();
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    let report = std::fs::read(profiler.report()).expect("the report is there");
    let report: Value = serde_json::from_slice(&report).expect("the report is JSON");
    let collapsed = std::fs::read_to_string(profiler.output()).expect("the file is there");
    assert_eq!(Some(samples_in(&collapsed)), report["stored"].as_u64());
    // On 3.11 and 3.12 a thread is sampled now and then while it enters the evaluator.
    let known = |line: &str| line.contains("shares.py:<module>:") || line.contains(";<entering evaluator> ");
    assert!(collapsed.lines().all(known), "{collapsed}");
}

/// `-p` on a master whose children do the work says so.
fn busy_children(interpreter: &Interpreter) {
    let target = Target::start(interpreter, "busy_children.py");
    let recording = Profiler::of(target.pid()).milliseconds(1_000).record();
    let hint = format!("pid {} has 2 busy Python children: add --subprocesses", target.pid());
    assert!(recording.stderr.lines().any(|line| line == hint), "{}", recording.stderr);
}

/// SIGINT, SIGTERM and SIGHUP finish the file; a SIGHUP that is ignored (`nohup`) does not.
fn finished_by_a_signal(interpreter: &Interpreter) {
    let target = Target::start(interpreter, "spin.py");
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        let running = Profiler::of(target.pid()).rate(499).start();
        let_run(target.pid(), Duration::from_millis(300));
        running.signal(signal);
        let recording = running.finish();
        assert!(recording.report.stored > 50, "{:#?}", recording.report);
    }
    let running = Profiler::of(target.pid()).rate(499).within(&["nohup"]).start();
    running.signal(libc::SIGHUP);
    std::thread::sleep(Duration::from_millis(400));
    running.signal(libc::SIGINT);
    assert!(running.finish().report.duration_s > 0.4);
}

/// SIGTERM and SIGHUP sent to the profiler reach the command of `-- CMD`, whose status is its own.
fn passed_on(interpreter: &Interpreter) {
    let python = interpreter.path.to_str().expect("a plain path");
    for signal in [libc::SIGTERM, libc::SIGHUP] {
        let folder = tempfile::tempdir().expect("a folder");
        let ready = folder.path().join("ready");
        let script = format!(
            "import signal, sys, time\nsignal.signal({signal}, lambda *_: sys.exit(40 + {signal}))\nopen({ready:?}, 'w')\nwhile True: time.process_time()"
        );
        let running = Profiler::new().command(&[python, "-c", &script]).start();
        while !ready.exists() {
            std::thread::sleep(Duration::from_millis(10));
        }
        running.signal(signal);
        assert_eq!(running.finish().status, 40 + signal);
    }
}

/// With `-o -` and `--report -` standard output carries the profile or the report: what the command prints goes elsewhere.
fn printing(interpreter: &Interpreter) {
    let script = "import time\nprint('from the command', flush=True)\nwhile time.process_time() < 0.3: pass";
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("profile.tach");
    let run = |words: &[&str]| {
        let mut profiler = Command::new(binary());
        profiler.args(["-F", "999"]).args(words).arg("--").arg(&interpreter.path).args(["-c", script]);
        let ended = profiler.current_dir(folder.path()).output().expect("the profiler can be run");
        let (stdout, stderr) = (String::from_utf8(ended.stdout), String::from_utf8(ended.stderr).expect("text"));
        assert!(ended.status.success(), "{stderr}");
        (stdout.expect("text"), stderr)
    };
    let (profile, rest) = run(&["-o", "-", "--format", "collapsed"]);
    assert!(samples_in(&profile) > 100 && !profile.contains("from the command"), "{profile}");
    assert!(rest.lines().any(|line| line == "from the command"), "{rest}");

    let file = file.to_str().expect("a plain path");
    let (report, rest) = run(&["-o", file, "--report", "-"]);
    let report: Value = serde_json::from_str(&report).unwrap_or_else(|error| panic!("{error}: {report}"));
    assert!(report["stored"].as_u64() > Some(100) && rest.contains("from the command"), "{report:#}");

    let (printed, _) = run(&["-o", file, "--force"]);
    assert_eq!(printed, "from the command\n", "with a file it is as without a profiler");
}

/// `-- CMD`: its exit status is the profiler's, it and the files belong to the calling user, and it is profiled from
/// its start.
fn command(interpreter: &Interpreter) {
    const NOBODY: u32 = 65_534;
    let python = interpreter.path.to_str().expect("a plain path");
    let script = "import os, sys, time\ndef busy():\n    while time.process_time() < 0.3: pass\nbusy()\nsys.exit(os.getuid() % 100)";
    let profiler = Profiler::new().rate(999).command(&[python, "-c", script]);
    let as_root = profiler.record();
    assert_eq!(as_root.status, 0);
    assert!(as_root.stderr.contains("busy (<string>:"), "{}", as_root.stderr);

    // pyenv's are in root's home, which no other user may enter.
    if interpreter.path.starts_with("/usr") {
        let sudo = |profiler: Profiler| {
            profiler.env("SUDO_UID", NOBODY).env("SUDO_GID", NOBODY).env("SUDO_USER", "nobody").rate(999)
        };
        let as_caller = sudo(Profiler::new()).command(&[python, "-c", script]).record();
        assert_eq!(as_caller.status, 34, "it runs as the calling user: {}", as_caller.stderr);
        let owner = std::fs::metadata(&as_caller.path).expect("the file is there");
        assert_eq!((owner.uid(), owner.gid(), owner.mode() & 0o777), (NOBODY, NOBODY, 0o600));
        let as_root = sudo(Profiler::new()).arg("--as-root").command(&[python, "-c", script]).record();
        assert_eq!(as_root.status, 0);
    }

    let killed = Profiler::new().command(&[python, "-c", "import os; os.kill(os.getpid(), 9)"]).run();
    assert_eq!(killed.status.code(), Some(128 + 9), "{}", String::from_utf8_lossy(&killed.stderr));
    let missing = Profiler::new().command(&["/nonexistent/python"]).run();
    assert_eq!(missing.status.code(), Some(127), "{}", String::from_utf8_lossy(&missing.stderr));
}

/// What cannot be profiled: status 1, one line that says why, nothing written.
#[test]
fn refusals() {
    let Some(_live) = live() else { return };
    let mut other = Command::new("sleep").arg("60").spawn().expect("sleep can be run");
    let mut gone = Command::new("true").spawn().expect("true can be run");
    gone.wait().expect("a child can be waited for");
    for (pid, wanted) in [(gone.id(), "no such process"), (other.id(), "not a Python process")] {
        let profiler = Profiler::of(pid).milliseconds(300);
        let output = profiler.run();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        let line = stderr.lines().next().unwrap_or_default();
        assert!(line.starts_with("tachyon-bpf: ") && line.contains(&pid.to_string()), "{stderr}");
        println!("{stderr}");
        assert!(line.contains(wanted), "{stderr}");
        assert!(!profiler.output().exists() && !profiler.report().exists());
    }
    other.kill().expect("sleep can be killed");
    other.wait().expect("a child can be waited for");
}
