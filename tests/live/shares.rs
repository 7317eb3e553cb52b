//! Known shares of time, and how many samples a second of CPU time gives.

use tachyon_tests::{Interpreter, Profiler, Target, live, on_each_interpreter, statistics, stretches};

on_each_interpreter!(on [pyenv_3_8 debian_3_11 built_3_14t]
    long [pyenv_3_9 pyenv_3_10 pyenv_3_11 pyenv_3_12 pyenv_3_13 sid_3_14 musl_3_13 built_3_13t sid_3_15 wheel_3_15t]
    and [sid_3_14d sid_3_15d wheel_3_14t tail_3_14 standalone_3_14]: shares_and_counts);

/// 60/30/10 in the binomial interval, at both rates; counts within 5 % of rate x time on a CPU, and what chance makes of a
/// thread that others interrupt.
fn shares_and_counts(interpreter: &Interpreter) {
    let target = Target::start(interpreter, "shares.py");
    for (rate, milliseconds) in [(99, 2_500), (199, 1_500)] {
        let before = stretches(target.pid());
        let recording = Profiler::of(target.pid()).rate(rate).cpu_milliseconds(target.pid(), milliseconds).record();
        let (report, recorded) = (&recording.report, &recording.recorded);
        let stretches = stretches(target.pid()) - before;
        let total = recorded.samples.len();
        for (function, share) in target.facts["shares"].as_object().expect("the program tells its shares") {
            let hits = recorded
                .samples
                .iter()
                .filter(|sample| recorded.leaf(sample).is_some_and(|leaf| leaf.function == *function));
            let (hits, share) = (hits.count(), share.as_f64().expect("a number"));
            assert!(statistics::within_binomial(hits, total, share), "{function}: {hits} of {total} at {rate} Hz");
        }
        let cpu_s = report.processes[0].cpu_s.expect("the process lives");
        let expected = cpu_s * f64::from(rate);
        assert!(cpu_s <= report.duration_s * 1.05, "one thread uses one CPU at most: {report:#?}");
        let ran = report.stored + report.loss.values().sum::<u64>();
        let fits = statistics::within_ticks(ran as usize, f64::from(rate), (cpu_s, cpu_s), stretches, 0.05);
        assert!(fits, "{ran} of {expected} at {rate} Hz in {stretches} stretches: {report:#?}");
        let told = report.expected.expect("the process was measured") as f64;
        assert!(statistics::within(told, expected, 0.01), "{told} is not {expected}");
    }
}

/// A program that does one thing for 5 ms and another for 5 ms is sampled in both equally often, though it is in step with 100
/// Hz: with a fixed interval each firing falls into the same one of them (0 : 400).
#[test]
fn a_program_in_step_with_the_rate_is_met_everywhere() {
    let Some(_live) = live() else { return };
    let target = Target::start(&Interpreter::named("pyenv_3_12"), "in_step.py");
    let recording = Profiler::of(target.pid()).rate(100).cpu_milliseconds(target.pid(), 4_000).record();
    let count = |function: &str| {
        let leaf = |sample| recording.recorded.leaf(sample).is_some_and(|leaf| leaf.function == function);
        recording.recorded.samples.iter().filter(|sample| leaf(sample)).count()
    };
    let (first, second) = (count("first"), count("second"));
    println!("{first} : {second}");
    // The samples between two changes of the interval depend on each other, 25 of them: four times what chance makes then.
    let (total, changes) = ((first + second) as f64, recording.report.duration_s * 4.0);
    let share = first as f64 / total;
    assert!((share - 0.5).abs() < 4.0 * 0.5 / changes.sqrt(), "{first} : {second}");
    assert!(total > 0.8 * recording.report.expected.expect("it was measured") as f64, "{:#?}", recording.report);
    assert_eq!(recording.report.jitter, 0.2);
}
