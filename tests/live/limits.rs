//! What the profiler allows itself.

use tachyon_tests::{Interpreter, Profiler, Target, live};

/// Thousands of samples a second cost far more than half a thousandth of a core: the rate gives
/// way, which is told, and the account counts what was asked of the kernel when.
#[test]
fn the_rate_gives_way_to_max_cpu() {
    let Some(_live) = live() else { return };
    let target = Target::start(&Interpreter::named("debian_3_11"), "shares.py");
    // Compared every second from the first on; two in a row above the limit take a step.
    let recording = Profiler::of(target.pid()).rate(4_999).arg("--max-cpu").arg("0.05").milliseconds(7_500).record();
    let report = &recording.report;
    assert_eq!(report.rate_hz, 4_999.0);
    assert!(report.effective_rate_hz > 0.0 && report.effective_rate_hz < 0.8 * report.rate_hz, "{report:#?}");
    assert!(recording.stderr.contains("(--max-cpu): sampling at"), "{}", recording.stderr);
    assert!(report.notes.iter().any(|note| note.contains("was lowered to")), "{:?}", report.notes);
    let cpu_s: f64 = report.processes.iter().filter_map(|process| process.cpu_s).sum();
    let expected = report.expected.expect("the target's time is known") as f64;
    assert!((expected - report.effective_rate_hz * cpu_s).abs() <= 1.0, "{report:#?}");
    // At the rate that was asked for at first, most of them would be missing.
    let met = report.stored + report.loss.values().sum::<u64>();
    assert!((met as f64) > 0.5 * expected && (met as f64) < 1.2 * expected, "{report:#?}");
}

/// Where there is room, nothing changes.
#[test]
fn a_limit_with_room_changes_nothing() {
    let Some(_live) = live() else { return };
    let target = Target::start(&Interpreter::named("debian_3_11"), "shares.py");
    let recording = Profiler::of(target.pid()).rate(19).arg("--max-cpu").arg("400%").milliseconds(3_500).record();
    let report = &recording.report;
    assert_eq!((report.rate_hz, report.effective_rate_hz), (19.0, 19.0));
    assert!(report.notes.iter().all(|note| !note.contains("--max-cpu")), "{:?}", report.notes);
}
