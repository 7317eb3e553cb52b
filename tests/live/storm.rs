//! Many short lives: of what their programs ran, how much is named.

use crate::processes::run_by_twos;
use std::collections::BTreeSet;
use tachyon_tests::{Interpreter, Profiler, live};

/// 50 ms of CPU time, the interpreter's own start included.
const SHORT: &str = "import time\ndef busy():\n    while time.process_time() < 0.05: pass\nbusy()\n";

/// So many processes, two at a time, shared out over the interpreters. The denominator is every run of the timer's
/// program in them from `exec` to exit, those included that met them before they were inspected.
fn storm(count: usize) {
    let Some(_live) = live() else { return };
    let interpreters = Interpreter::at_home();
    let running = Profiler::new().arg("--all-python").rate(999).start();
    let mut pids: Vec<BTreeSet<u32>> = vec![BTreeSet::new(); interpreters.len()];
    for (pid, which) in run_by_twos(&interpreters, SHORT, count) {
        pids[which].insert(pid);
    }
    running.signal(libc::SIGINT);
    let recording = running.finish();
    let (mut all, mut early, mut after, mut named) = (0, 0, 0, 0);
    for (Interpreter { name, .. }, pids) in interpreters.iter().zip(&pids) {
        let ours = recording.report.processes.iter().filter(|process| pids.contains(&process.pid));
        let (mut processes, mut of_one) = (0, [0; 4]);
        for process in ours {
            processes += 1;
            let [runs, before, uninspected, whole] = &mut of_one;
            *runs += process.samples + process.uninspected;
            *before += process.not_initialized;
            *uninspected += process.uninspected;
            *whole += process.named;
        }
        let [runs, before, uninspected, whole] = of_one;
        println!(
            "{name}: {processes} processes, {runs} runs: {uninspected} before their inspection, {before} before \
             `_PyRuntime` was initialised or after its end, {whole} of the others fully named"
        );
        // One that was over before anybody could look at it is counted among what is not CPython: of its 50 runs none is
        // named. That is the host's worst moment, not the rule.
        let missing = pids.len() - processes;
        assert!(missing * 100 <= pids.len(), "{name}: {missing} processes are missing: {:?}", recording.report.refused);
        let runs = runs + 50 * missing as u64;
        all += runs;
        // Which of the two the uninspected ones were is not known: each judgement takes the worse.
        early += before + uninspected;
        after += runs - before;
        named += whole;
    }
    println!("lost {:?}, stops {:?}", recording.report.loss, recording.report.stops);
    println!("named {named} of {after}, early {early} of {all}");
    assert!(named * 100 >= after * 95, "named {named} of {after} runs after the interpreter was initialised");
    assert!(early * 100 <= all * 10, "{early} of {all} runs before");
}

#[test]
fn hundreds_of_50_ms() {
    storm(280);
}

#[test]
#[ignore = "takes minutes on two processors"]
fn thousand_of_50_ms() {
    storm(1_001);
}
