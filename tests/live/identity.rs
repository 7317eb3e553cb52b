//! Code objects that reuse each other's memory: none ever gets another one's name.

use std::collections::{BTreeMap, BTreeSet};
use tachyon::report::ProcessReport;
use tachyon_tests::{Interpreter, Profiler, Recording, Target, on_each_interpreter};

on_each_interpreter!(of_each_kind: tenants, recycled, recycled_after_fork, recycled_after_exec);
on_each_interpreter!(on [pyenv_3_8 pyenv_3_12 pyenv_3_13 sid_3_14]: workers);

/// 2,000 template code objects: a frame's function, file and line belong to the same page.
fn recycled(interpreter: &Interpreter) {
    let mut target = Target::start(interpreter, "recycled.py");
    let running = Profiler::of(target.pid()).rate(4_999).start();
    target.go();
    assert_eq!(target.line(), "done");
    running.signal(libc::SIGINT);
    check(interpreter, &running.finish(), |_, _| true);
}

/// The same with two children, which give the same addresses and versions to different code.
fn recycled_after_fork(interpreter: &Interpreter) {
    let mut target = Target::start_with(interpreter, "recycled.py", &["2"]);
    let running = Profiler::of(target.pid()).rate(4_999).arg("--subprocesses").start();
    target.go();
    let children: Vec<u64> = serde_json::from_str(&target.line()).expect("a list of process ids");
    running.signal(libc::SIGINT);
    let own = |thread: u64, page: i32| children.iter().position(|child| *child == thread) == Some((page % 2) as usize);
    check(interpreter, &running.finish(), own);
}

/// The same with two programs that one process runs, one after the other.
fn recycled_after_exec(interpreter: &Interpreter) {
    let mut target = Target::start_with(interpreter, "recycled.py", &["exec"]);
    let running = Profiler::of(target.pid()).rate(4_999).start();
    target.go();
    assert_eq!(target.line(), "done");
    running.signal(libc::SIGINT);
    check(interpreter, &running.finish(), |_, _| true);
}

/// Every frame of a page is right, and belongs to a page of its thread.
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
    // A program that has just begun has no Python frames to name yet.
    let samples = sum(|process| process.samples - process.not_initialized);
    let named = sum(|process| process.named);
    assert!(named as f64 > 0.99 * samples as f64, "{named} of {samples} are named: {:#?}", recording.report);
}

/// Code that differs only at the front of a long name or in the middle of a line table, made by forked siblings at the
/// same addresses with the same versions, or by one program again and again. A frame's caller tells which it must be.
///
/// While an identity had of long names the last 32 bytes, and of the line table nothing (3.12+) or the first 32 bytes, these
/// shares were another's: of `paths` 67 % on 3.8 to 3.12; of `names` 67 % on 3.11 and 3.12; of `lines` 33 to 67 % on all
/// but 3.11, whose tables are longer in front; of `exec` 67 % on 3.8 to 3.10 and 2 to 26 % on 3.11; of `reload` 39 % on 3.10.
///
/// `TACHYON_LONG=N` makes it N times as long: 20 are 50,000 samples of tenants.
fn tenants(interpreter: &Interpreter) {
    let long = std::env::var("TACHYON_LONG").unwrap_or_else(|_| "1".to_owned());
    let mut target = Target::start_with(interpreter, "tenants.py", &[&long]);
    let [top, lines, edited] = ["top", "lines", "edited"].map(|fact| target.facts[fact].clone());
    let top = top.as_str().expect("a path").to_owned();
    let [lines, edited] = [lines, edited].map(|line| line.as_i64().expect("a line") as i32);
    let running = Profiler::of(target.pid()).rate(4_999).arg("--subprocesses").start();
    target.go();
    assert_eq!(target.line(), "done");
    running.signal(libc::SIGINT);
    let recording = running.finish();
    let recorded = &recording.recorded;
    // For each kind: samples, and how many of them are another's.
    let mut kinds: BTreeMap<&str, (u32, u32)> = BTreeMap::new();
    let mut first_wrong = None;
    for sample in &recorded.samples {
        let frames: Vec<_> = recorded.frames_of(sample).collect();
        let number =
            |frame: &&tachyon_tests::ShownFrame, prefix: &str| frame.function.strip_prefix(prefix)?.parse().ok();
        let tenant = |frame| number(frame, "tenant_").or_else(|| number(frame, "edition_"));
        let Some((caller, own)) = frames.iter().enumerate().find_map(|(at, frame)| Some((at, tenant(frame)?))) else {
            continue;
        };
        let own: i32 = own;
        let [leaf, ..] = frames[..caller] else { continue };
        // Code that was not in memory when it was sampled has no line.
        let line = leaf.place.map_or(-1, |place| place[0]);
        // The two lines of the loop, moved by this many; what comes before them is not moved.
        let moved = |base: i32| line < base || (base + own..base + own + 2).contains(&line);
        let (kind, right) = match leaf.function.as_str() {
            "plugin" => ("paths", leaf.filename == format!("{top}/tenant_{own}/{}/plugin.py", "d".repeat(60))),
            "lines" => ("lines", moved(lines)),
            "edited" => (if leaf.filename == "executed.py" { "exec" } else { "reload" }, moved(edited)),
            name => ("names", name.ends_with(&format!("t{own}_{}", "n".repeat(60)))),
        };
        let (samples, wrong) = kinds.entry(kind).or_default();
        *samples += 1;
        if !right {
            *wrong += 1;
            first_wrong.get_or_insert_with(|| recorded.shown(sample.stack));
        }
    }
    println!("{}: {kinds:?} (samples, wrong)", interpreter.name);
    let met: Vec<&str> = kinds.keys().copied().collect();
    assert_eq!(met, ["exec", "lines", "names", "paths", "reload"], "{kinds:?}");
    assert!(kinds.values().all(|&(samples, _)| samples > 300), "{kinds:?}");
    assert!(kinds.values().all(|&(_, wrong)| wrong == 0), "{kinds:?}\n{}", first_wrong.unwrap_or_default());
}

/// 200 forked workers: each looks up the code objects that they share by itself, and none sends them again.
fn workers(interpreter: &Interpreter) {
    let mut target = Target::start(interpreter, "workers.py");
    let running = Profiler::of(target.pid()).rate(1_999).arg("--subprocesses").start();
    target.go();
    assert_eq!(target.line(), "done");
    running.signal(libc::SIGINT);
    let recording = running.finish();
    let (recorded, report) = (&recording.recorded, &recording.report);
    let mut at_work = BTreeSet::new();
    for sample in &recorded.samples {
        // Fewer are there on the way in and out.
        if recorded.frames_of(sample).filter(|frame| frame.function.starts_with("shared_")).count() == 12 {
            at_work.insert(sample.thread_id);
        }
    }
    let functions: BTreeSet<_> = recorded.frames.iter().map(|frame| (&frame.function, &frame.filename)).collect();
    println!(
        "{}: {} records, {} functions, {} workers",
        interpreter.name,
        report.codes_sent,
        functions.len(),
        at_work.len()
    );
    assert!(at_work.len() > 190, "{} workers", at_work.len());
    // Two CPUs may come across one at the same time.
    assert!(report.codes_sent >= 12 && report.codes_sent <= 2 * functions.len() as u64, "{report:#?}");
}
