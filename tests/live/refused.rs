//! What is not CPython is named and counted, never guessed at.

use std::process::{Command, Output};
use tachyon_tests::{Interpreter, Profiler, Target, binary, live};

/// Debian's PyPy in a loop.
fn pypy() -> Target {
    let mut command = Command::new("pypy3");
    Target::embedded(command.args(["-c", "print('{}', flush=True)\nwhile True: pass"]), "a loop in PyPy")
}

fn tachyon(words: &[&str]) -> Output {
    Command::new(binary()).args(words).output().expect("it runs")
}

/// If asked for alone, it is the reason why there is no profile; among others, it is a line of the account.
#[test]
fn pypy_is_named() {
    let Some(_live) = live() else { return };
    let target = pypy();
    let pid = target.pid().to_string();
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("none.tach");
    let path = path.to_str().expect("UTF-8");
    for words in [&["record", "-p", &pid, "-d", "1s", "-o", path][..], &["dump", "-p", &pid]] {
        let output = tachyon(words);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{words:?}: {said}");
        assert!(said.contains(&format!("pid {pid}")) && said.contains("PyPy"), "{words:?}: {said}");
        assert!(output.stdout.is_empty(), "{words:?} guesses");
    }
    assert!(std::fs::read_dir(folder.path()).expect("a folder").next().is_none(), "no file is left");

    let other = Target::start(&Interpreter::named("debian_3_11"), "spin.py");
    let recording = Profiler::new().arg("--all-python").rate(499).milliseconds(2_000).record();
    let line = recording.report.refused.iter().find(|line| line.starts_with(&format!("pid {pid}:")));
    assert!(line.is_some_and(|line| line.contains("PyPy")), "{:#?}", recording.report.refused);
    assert!(recording.report.not_python > 0, "its runs are counted: {:#?}", recording.report);
    let pids: Vec<u32> = recording.report.processes.iter().map(|process| process.pid).collect();
    assert!(pids.contains(&other.pid()) && !pids.contains(&target.pid()), "{pids:?}");
}
