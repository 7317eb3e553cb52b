//! The account where things go wrong. Every recording in these tests is checked to add up.

use std::time::Duration;
use tachyon_tests::{Interpreter, Profiler, Target, let_run, on_each_interpreter};

on_each_interpreter!(at_home: tiny_ring, unreadable_page);
on_each_interpreter!(on [pyenv_3_12]: profiler_stopped);

/// A ring of one page at the highest rate, with stacks of 1,000 frames: one record is bigger than the ring.
fn tiny_ring(interpreter: &Interpreter) {
    let target = Target::start(interpreter, "recursion.py");
    let recording = Profiler::of(target.pid())
        .rate(4_999)
        .cpu_milliseconds(target.pid(), 700)
        .env("TACHYON_RING_BYTES", 4_096)
        .record();
    assert!(recording.lost("ring_full") > 100, "{:#?}", recording.report);
    assert!(recording.stderr.contains("ring_full"), "people are told: {}", recording.stderr);

    // Here some fit and some do not.
    let target = Target::start(interpreter, "entered_from_c.py");
    let recording = Profiler::of(target.pid())
        .rate(9_999)
        .cpu_milliseconds(target.pid(), 700)
        .env("TACHYON_RING_BYTES", 4_096)
        .record();
    assert!(recording.report.stored > 100, "{:#?}", recording.report);
}

/// A caller's code object cannot be read: the leaf is named, and the stack says that it was cut and why.
fn unreadable_page(interpreter: &Interpreter) {
    let target = Target::start(interpreter, "unreadable.py");
    let recording = Profiler::of(target.pid()).rate(1_999).cpu_milliseconds(target.pid(), 750).record();
    let recorded = &recording.recorded;
    let cut = recording.stopped("unreadable_code");
    assert!(cut > 100, "{:#?}", recording.report.stops);
    let shown = recorded.samples.iter().filter(|sample| {
        let names: Vec<&str> = recorded.frames_of(sample).map(|frame| frame.function.as_str()).collect();
        matches!(names[..], ["hash_long", "<stack cut: unreadable_code>"])
    });
    assert!(shown.count() as f64 > 0.9 * cut as f64, "{:#?}", recording.report.stops);
}

/// The profiler is stopped for five seconds under load: the ring fills up, and every run is in the file or in a named
/// count of losses. Every recording is checked to add up exactly.
fn profiler_stopped(interpreter: &Interpreter) {
    let target = Target::start(interpreter, "deep_stack.py");
    let running = Profiler::of(target.pid()).rate(999).env("TACHYON_RING_BYTES", 1 << 18).start();
    let_run(target.pid(), Duration::from_millis(300));
    running.signal(libc::SIGSTOP);
    std::thread::sleep(Duration::from_secs(5));
    running.signal(libc::SIGCONT);
    let_run(target.pid(), Duration::from_millis(300));
    running.signal(libc::SIGINT);
    let recording = running.finish();
    let report = &recording.report;
    println!("stored {}, lost {:?}, stall {} s", report.stored, report.loss, report.longest_reader_stall_s);
    assert!(recording.lost("ring_full") > 100 && report.stored > 100, "{report:#?}");
    assert!(report.longest_reader_stall_s > 4.0, "it tells that it stood still: {report:#?}");
}
