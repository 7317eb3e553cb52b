//! Code objects that take each other's memory: a name is never another one's.

use std::collections::BTreeSet;
use tachyon::report::ProcessReport;
use tachyon_tests::{Interpreter, Profiler, Recording, Target, on_each_interpreter};

on_each_interpreter!(recycled, recycled_after_fork, recycled_after_exec);

/// 2,000 template code objects: function, file and line of a frame are of the same page.
fn recycled(interpreter: &Interpreter) {
    let mut target = Target::start(interpreter, "recycled.py");
    let running = Profiler::of(target.pid()).rate(4_999).start();
    target.go();
    assert_eq!(target.line(), "done");
    running.signal(libc::SIGINT);
    check(interpreter, &running.finish(), |_, _| true);
}

/// The same by two children, which give the same addresses and versions to different code.
fn recycled_after_fork(interpreter: &Interpreter) {
    let mut target = Target::start_with(interpreter, "recycled.py", &["2"]);
    let running = Profiler::of(target.pid()).rate(4_999).arg("--subprocesses").start();
    target.go();
    let children: Vec<u64> = serde_json::from_str(&target.line()).expect("a list of process ids");
    running.signal(libc::SIGINT);
    let own = |thread: u64, page: i32| children.iter().position(|child| *child == thread) == Some((page % 2) as usize);
    check(interpreter, &running.finish(), own);
}

/// The same by two programs that one process runs, one after the other.
fn recycled_after_exec(interpreter: &Interpreter) {
    let mut target = Target::start_with(interpreter, "recycled.py", &["exec"]);
    let running = Profiler::of(target.pid()).rate(4_999).start();
    target.go();
    assert_eq!(target.line(), "done");
    running.signal(libc::SIGINT);
    check(interpreter, &running.finish(), |_, _| true);
}

/// Every frame of a page is right, and of a page that its thread has.
fn check(interpreter: &Interpreter, recording: &Recording, has: impl Fn(u64, i32) -> bool) {
    let recorded = &recording.recorded;
    let mut pages = BTreeSet::new();
    for sample in &recorded.samples {
        let Some(leaf) = recorded.leaf(sample) else { continue };
        let page_of = |text: &str, prefix: &str, suffix: &str| -> Option<i32> {
            text.strip_prefix(prefix)?.strip_suffix(suffix)?.parse().ok()
        };
        let (function, file) = (page_of(&leaf.function, "render_", ""), page_of(&leaf.filename, "page_", ".html"));
        if let Some(page) = file {
            let first_line = page % 7 + 1;
            let line = leaf.place.expect("a source line")[0];
            // A module begins at line 0.
            let right = match leaf.function.as_str() {
                "<module>" => (0..first_line + 4).contains(&line),
                _ => function == Some(page) && (first_line..first_line + 4).contains(&line),
            };
            assert!(right && has(sample.thread_id, page), "{sample:?}\n{}", recorded.shown(sample.stack));
            pages.insert(page);
        } else {
            assert_eq!(function, None, "a page's function in another file:\n{}", recorded.shown(sample.stack));
        }
    }
    println!("{}: {} pages in {} samples", interpreter.name, pages.len(), recorded.samples.len());
    assert!(pages.len() > 1_900, "{} of 2,000 pages were seen: {:#?}", pages.len(), recording.report);
    let sum = |of: fn(&ProcessReport) -> u64| recording.report.processes.iter().map(of).sum::<u64>();
    let (named, samples) = (sum(|process| process.named), sum(|process| process.samples));
    assert!(named as f64 > 0.99 * samples as f64, "{named} of {samples} are named");
}
