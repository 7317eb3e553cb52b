//! Known shares of time, and how many samples a second of CPU time gives.

use tachyon_tests::{Interpreter, Profiler, Target, on_each_interpreter, statistics};

on_each_interpreter!(shares_and_counts);

/// 60/30/10 in the binomial interval, at both rates; counts within 5 % of rate x time on a CPU.
fn shares_and_counts(interpreter: &Interpreter) {
    let target = Target::start(interpreter, "shares.py");
    for (rate, milliseconds) in [(99, 3_500), (199, 2_000)] {
        let recording = Profiler::of(target.pid()).rate(rate).cpu_milliseconds(target.pid(), milliseconds).record();
        let (report, recorded) = (&recording.report, &recording.recorded);
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
        assert!(statistics::within(ran as f64, expected, 0.05), "{ran} of {expected} at {rate} Hz: {report:#?}");
        let told = report.expected.expect("the process was measured") as f64;
        assert!(statistics::within(told, expected, 0.01), "{told} is not {expected}");
    }
}
