//! Programs that are run instruction by instruction: no instruction gives a wrong stack, and each stack follows from the
//! one before by one frame that comes or goes.
//!
//! Samples at random moments hit a window of three instructions now and then, and a compiler's next version may have another one.
//! Here each instruction of a turn of work is sampled once. `cargo xtask oracle` takes as many for each kind of work.

use super::judge::{Frame, Judged, Line, Truths, Verdict};
use super::{ANYWHERE, KINDS, LIVES, conclude, long_form};
use std::fmt::Write as _;
use std::time::Duration;
use tachyon_tests::{Interpreter, Profiler, Stepper, Target, let_run, on_each_interpreter};

on_each_interpreter!(on [pyenv_3_11 pyenv_3_12 sid_3_15] long [pyenv_3_8]: every_instruction);

/// Instructions in the short form: a turn of the kind `steps` has some 100,000.
const SHORT: usize = 6_000;

fn every_instruction(python: &Interpreter) {
    let Some(count) = long_form() else { return follow(python, &["steps"], SHORT) };
    follow(python, &["steps"], count);
    let never_ends = |kind: &&&str| !["threads", "signals"].contains(*kind);
    for kind in KINDS.iter().chain(&ANYWHERE).filter(never_ends) {
        follow(python, &[kind], count);
    }
}

/// Runs the program's first thread through this many instructions, and judges the sample of each.
fn follow(python: &Interpreter, kinds: &[&str], count: usize) {
    let target = Target::start_in(python, "truth.py", kinds, &LIVES);
    let truths = Truths::of(&target.facts);
    for native in [true, false] {
        let profiler = Profiler::of(target.pid()).arg("-e").arg("context-switches").arg("--format").arg("jsonl");
        let profiler = if native { profiler.native().arg("--interpreter-frames") } else { profiler };
        // Until then it may still be saying that it is ready.
        let_run(target.pid(), Duration::from_millis(100));
        // It is stopped while the recording begins, and until its last sample has been written.
        let mut stepper = Stepper::stop(target.pid());
        let running = profiler.start();
        stepper.steps(count);
        running.signal(libc::SIGINT);
        let profiler = running.ended();
        drop(stepper);
        let text = std::fs::read_to_string(profiler.output()).expect("the recording was written");
        let (mut judged, mut path) = (Judged::new(native), Path::default());
        for line in text.lines() {
            let line: Line = serde_json::from_str(line).expect("each line is one sample");
            let verdict = judged.judge(&truths, &line);
            path.goes_on(verdict, &line);
        }
        assert!(judged.samples * 100 >= count * 99, "{} of {count} instructions were met", judged.samples);
        println!("{}: {} changes of stacks", python.name, path.changes);
        assert!(path.jumps.is_empty(), "{}: stacks do not follow from each other:\n{}", python.name, path.jumps);
        let how = if native { "each instruction" } else { "each instruction, Python alone" };
        conclude(judged, python, &format!("{}: {how}", kinds.join(" ")));
    }
}

/// Stacks that follow each other.
#[derive(Default)]
struct Path {
    /// The one before, leaf first; `None`: it was not sure.
    before: Option<Vec<Frame>>,
    changes: usize,
    /// Those that do not follow from the one before.
    jumps: String,
}

impl Path {
    fn goes_on(&mut self, verdict: Verdict, line: &Line) {
        let now: Vec<Frame> = line.python().cloned().collect();
        let now = Some(now).filter(|_| verdict == Verdict::Right);
        if let (Some(before), Some(now)) = (&self.before, &now)
            && before != now
        {
            self.changes += 1;
            if !follows(before, now) && self.jumps.len() < 4_000 {
                let shown = |stack: &[Frame]| stack.iter().map(|frame| frame.shown() + "; ").collect::<String>();
                let _ = writeln!(self.jumps, "from {}\n  to {}", shown(before), shown(now));
            }
        }
        self.before = now;
    }
}

/// Whether a stack can be one instruction behind another: its leaf has moved, has called, or has returned.
fn follows(before: &[Frame], now: &[Frame]) -> bool {
    let moved = |before: &[Frame], now: &[Frame]| match (before.split_first(), now.split_first()) {
        (Some((before, callers)), Some((now, same))) => before.same_function(now) && callers == same,
        (None, None) => true,
        _ => false,
    };
    let called = |now: &[Frame], before: &[Frame]| now.len() == before.len() + 1 && moved(&now[1..], before);
    moved(before, now) || called(now, before) || called(before, now)
}
