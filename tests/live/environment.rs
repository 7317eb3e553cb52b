//! `--label-env`: samples carry variables of their process's environment.

use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use tachyon_tests::{Interpreter, Profiler, Target, binary, live, on_each_interpreter};

on_each_interpreter!(on [pyenv_3_8 sid_3_15] long [debian_3_11]: whose_job);

/// Each sample's pid and its values of two variables, counted.
fn labels(file: &Path) -> BTreeMap<(u64, Option<String>, Option<String>), u64> {
    let mut found = BTreeMap::new();
    for line in std::fs::read_to_string(file).expect("it was written").lines() {
        let sample: Value = serde_json::from_str(line).expect("JSON");
        let label = |name: &str| sample.get(name).map(|value| value.as_str().expect("a text").to_owned());
        let key = (sample["pid"].as_u64().expect("a pid"), label("env.TACHYON_JOB"), label("env.TACHYON_ARRAY"));
        *found.entry(key).or_default() += sample.get("weight").map_or(1, |weight| weight.as_u64().expect("a number"));
    }
    found
}

/// A server with forked workers, one job that has both variables, and a program that has neither.
fn whose_job(interpreter: &Interpreter) {
    let server = Target::start_in(interpreter, "prefork.py", &[], &[("TACHYON_JOB", "a server, 1=2")]);
    let long = "ä".repeat(300);
    let job = Target::start_in(interpreter, "spin.py", &[], &[("TACHYON_JOB", &long), ("TACHYON_ARRAY", "7")]);
    let other = Target::start(interpreter, "spin.py");
    let dir = tempfile::tempdir().expect("a temporary directory can be made");
    let [tach, again] = ["jobs.tach", "again.jsonl"].map(|name| dir.path().join(name));
    let record = |format: &str| {
        let mut profiler = Profiler::of(server.pid()).milliseconds(1_000).rate(499).arg("--subprocesses");
        for pid in [job.pid(), other.pid()] {
            profiler = profiler.arg("-p").arg(pid.to_string());
        }
        for name in ["TACHYON_JOB", "TACHYON_ARRAY", "TACHYON_JOBB"] {
            profiler = profiler.arg("--label-env").arg(name);
        }
        profiler = profiler.arg("--format").arg(format);
        let output = profiler.run();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        profiler
    };
    let check = |found: &BTreeMap<(u64, Option<String>, Option<String>), u64>| {
        let cut = long.chars().take(256).chain(['…']).collect::<String>();
        let (mut of_server, mut workers) = (0, 0);
        for ((pid, name, array), samples) in found {
            let told = (name.as_deref(), array.as_deref());
            if *pid == u64::from(job.pid()) {
                assert_eq!(told, (Some(&*cut), Some("7")));
            } else if *pid == u64::from(other.pid()) {
                assert_eq!(told, (None, None), "it was started without them");
            } else {
                assert_eq!(told, (Some("a server, 1=2"), None), "{pid}");
                (of_server, workers) = (of_server + samples, workers + 1);
            }
        }
        assert!(workers >= 4 && of_server > 20, "{found:?}");
        assert!([&job, &other].iter().all(|target| found.keys().any(|key| key.0 == u64::from(target.pid()))));
    };
    let lines = record("jsonl");
    check(&labels(lines.output()));
    let report: Value = serde_json::from_slice(&std::fs::read(lines.report()).expect("written")).expect("JSON");
    let processes = report["processes"].as_array().expect("a list");
    let of = |pid: u32| processes.iter().find(|process| process["pid"] == pid).expect("it was sampled");
    assert_eq!(of(job.pid())["environment"]["TACHYON_ARRAY"], "7");
    assert_eq!(of(other.pid()).get("environment"), None);
    let notes: Vec<_> = report["notes"].as_array().expect("a list").iter().filter_map(Value::as_str).collect();
    let of_variables: Vec<_> = notes.iter().filter(|note| note.contains("TACHYON_")).collect();
    assert_eq!(of_variables, [&"no sampled process has the variable TACHYON_JOBB in its environment"], "{notes:?}");
    // Other formats have the same ones as TACH.
    let recorded = record("tach");
    std::fs::copy(recorded.output(), &tach).expect("it was written");
    let mut export = Command::new(binary());
    assert!(export.arg("export").arg(&tach).arg("-o").arg(&again).status().expect("it can be run").success());
    check(&labels(&again));
}

#[test]
fn a_value_is_not_asked_for() {
    let Some(_live) = live() else { return };
    let target = Target::start(&Interpreter::named("pyenv_3_12"), "spin.py");
    for (word, expected) in [("TACHYON_JOB=7", "write --label-env TACHYON_JOB"), ("", "must be a name")] {
        let output = Profiler::of(target.pid()).milliseconds(100).arg("--label-env").arg(word).run();
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{told}");
        assert!(told.contains(expected), "{told}");
    }
}
