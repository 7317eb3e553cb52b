//! What a guest sends, as it must be and as it must not.

use super::*;

const TARGET: &str = "frame <module> 9 9\nnative enter\nframe leaf 3 5\nabove\nabove turn\nready\n";

#[test]
fn only_the_very_stack_counts_as_exact() {
    let truth = truth(TARGET).unwrap();
    let collapsed = "tid:7;/known_stack.py:<module>:9;/known_stack.py:leaf:4 90\n\
         tid:7;known_stack.py:<module>:9;known_stack.py:leaf:5 6\n\
         tid:7;/known_stack.py:<module>:9 1\ntid:7;/known_stack.py:<module>:9;/known_stack.py:leaf:6 1\n\
         tid:7;/other.py:<module>:9;/known_stack.py:leaf:4 1\n\
         tid:7;~:comm:0;/known_stack.py:<module>:9;/known_stack.py:leaf:4 1\n";
    let python = count(collapsed, &truth).unwrap();
    assert_eq!(python, Counted { total: 100, python: 96, mixed: 0, above: vec![0, 0] });
    let (root, leaf) = ("libc.so.6!main;/known_stack.py:<module>:9", "/known_stack.py:leaf:4");
    let collapsed = format!(
        "tid:7;{root};extension.so!enter;{leaf} 7\ntid:7;{root};extension.so!enter;{leaf};libc.so.6!raise;extension.so!turn 5\n\
         tid:7;{root};{leaf} 1\ntid:7;extension.so!enter;{root};{leaf} 1\ntid:7;{root};extension.so!other;{leaf} 1\n\
         tid:7;{root};extension.so!enter;{leaf};extension.so!enter 1\n"
    );
    let mixed = count(&collapsed, &truth).unwrap();
    assert_eq!(mixed, Counted { total: 16, python: 16, mixed: 12, above: vec![7, 5] });
}

#[test]
fn a_fault_in_the_kernel_log_is_found() {
    assert_eq!(complaint("[ 1.0] ok\n[ 2.0] WARNING: CPU: 1 PID: 9\n"), Some("[ 2.0] WARNING: CPU: 1 PID: 9"));
    assert_eq!(complaint("[ 1.0] Spectre V2 mitigation: ok\n"), None);
}

const COST: &str = r#""cost": {"bpf_run_count": 300, "bpf_run_ns": 60000, "user_cpu_s": 0.25, "ring_bytes": 1048576,
    "map_bytes": 4194304, "start": {"total_s": 1.5, "attach_s": 0.0042}}}"#;

/// A guest's files, with native frames by default.
fn sent(dir: &Path, ran: u64) {
    let write = |name: &str, text: &str| {
        let path = dir.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    let stack = "/known_stack.py:<module>:9;extension.so!enter;/known_stack.py:leaf:4;extension.so!turn";
    let account = |ran: u64, stored: u64, native: &str| {
        format!(
            r#"{{"ran": {ran}, "stored": {stored}, "idle": 1, "filtered": 0, "not_python": 0, "loss": {{"ring_full": 1}},{native} {COST}"#
        )
    };
    let native = r#""native": {"exact": 396, "repaired": 1, "failed": 0},"#;
    for (name, text) in [("kernel", "5.10\n"), ("dmesg", ""), ("target", TARGET), ("kick", kick::tests::SENT)] {
        write(name, text);
    }
    for (recording, report, leading) in [
        ("python", account(ran, 397, ""), ""),
        ("default", account(399, 397, native), "libc.so.6!main;"),
        ("idle", account(399, 0, ""), ""),
    ] {
        let at = |name: &str| format!("{recording}/{name}");
        write(&at("record.status"), "0\n");
        write(&at("export.status"), "0\n");
        write(&at("report.json"), &report);
        let programs = (1..=if recording == "default" { 9 } else { 8 })
            .map(|id| format!("prog_type: 7 prog_id: {id} verified_insns: 5780\n"));
        write(&at("programs"), &programs.collect::<String>());
        write(&at("out.collapsed"), &format!("tid:7;{leading}{stack} 397\n"));
    }
    write("deepest/record.status", "0\n");
    write("deepest/report.json", &account(32, 30, native));
    write("deepest/out.jsonl", &deepest(512).repeat(30));
    write("waiting/record.status", "0\n");
    write("waiting/report.json", r#"{"wall": {"ticks_due": 50, "stored": 50, "loss": {}}, "inconsistent": 0}"#);
    let wait = r#"{"frames": [{"function": "<waiting: sleep>"}, {"function": "sleeps"}]}"#;
    write("waiting/out.jsonl", &format!("{wait}\n").repeat(50));
    write("hotplug/none", "cpu1 cannot go\n");
    for (name, text) in refusals::tests::SENT {
        write(name, text);
    }
    for (name, text) in events::tests::sent() {
        write(name, &text);
    }
}

/// A sample with that many native frames.
fn deepest(native: usize) -> String {
    let frames = [r#"{"kind": "python"}"#].repeat(1_024).into_iter().chain([r#"{"kind": "native"}"#].repeat(native));
    let frames = frames.collect::<Vec<_>>().join(", ");
    format!("{{\"merge\": \"repaired\", \"frames\": [{frames}]}}\n")
}

#[test]
fn an_account_that_does_not_add_up_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let promise = Promise { many_cpus: true, refusal: None, memlock: Some(true) };
    sent(dir.path(), 400);
    assert!(format!("{:#}", judge(dir.path(), true, &promise).unwrap_err()).contains("make 399"));
    sent(dir.path(), 399);
    let summary = judge(dir.path(), true, &promise).unwrap();
    assert!(
        summary.contains("397 of 397 stacks exact, 1 lost; at most 5780 of 1000000 instructions of a program verified"),
        "{summary}"
    );
    assert!(summary.contains("397 mixed stacks of Python and C exact"), "{summary}");
    assert!(summary.contains("attached in 4.2 ms, ring 1024 KiB") && summary.contains("200 ns for each"), "{summary}");
}

#[test]
fn what_was_promised_must_be_there() {
    let dir = tempfile::tempdir().unwrap();
    sent(dir.path(), 399);
    let promise = Promise { many_cpus: false, refusal: None, memlock: Some(true) };
    judge(dir.path(), true, &promise).unwrap();
    fs::copy(dir.path().join("python/report.json"), dir.path().join("default/report.json")).unwrap();
    let without = judge(dir.path(), true, &promise).unwrap_err();
    assert!(format!("{without:#}").contains("native frames: false, wanted: true"), "{without:#}");
    sent(dir.path(), 399);
    fs::write(dir.path().join("default/programs"), "prog_type: 7 prog_id: 3 verified_insns: 5780\n").unwrap();
    let few = judge(dir.path(), true, &promise).unwrap_err();
    assert!(format!("{few:#}").contains("the kernel told of 1 programs, not of 9"), "{few:#}");
    sent(dir.path(), 399);
    fs::write(dir.path().join("deepest/out.jsonl"), deepest(512).repeat(28) + &deepest(511).repeat(2)).unwrap();
    let cut = judge(dir.path(), true, &promise).unwrap_err();
    assert!(format!("{cut:#}").contains("28 of 30 have 1024 and 512 frames"), "{cut:#}");
    fs::write(dir.path().join("deepest/out.jsonl"), deepest(512).repeat(29)).unwrap();
    assert!(judge(dir.path(), true, &promise).is_err(), "a sample is missing");
    let promise = Promise { many_cpus: false, refusal: Some("(needs 6.0)"), memlock: None };
    assert!(judge(dir.path(), true, &promise).is_err(), "it was not refused");
    fs::write(dir.path().join("python/record.status"), "1\n").unwrap();
    fs::write(dir.path().join("python/record.log"), "tachyon-bpf: kernel 5.10 (needs 6.0)\n").unwrap();
    judge(dir.path(), true, &promise).unwrap();
}
