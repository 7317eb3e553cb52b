use super::*;
use crate::kernel::ring_bytes;

#[test]
fn ring_size_follows_rate_and_cpus() {
    let table =
        [(99.0, 2, 1 << 20), (999.0, 2, 1 << 23), (99.0, 64, 1 << 25), (999.0, 16, 1 << 26), (1e9, 512, 1 << 26)];
    for (rate, cpus, bytes) in table {
        assert_eq!(ring_bytes(rate, cpus), bytes, "{rate} Hz on {cpus} CPUs");
    }
}

#[test]
fn the_kernel_accepts_the_object() {
    let options =
        Options { all_python: true, processes: MAX_PROCESSES, unwind_memory: Some(1 << 20), ..Options::default() };
    let mut kernel = Kernel::open(&options).expect("needs root and BPF");
    kernel.attach_lifecycle().expect("raw tracepoints attach");
    let verifying = kernel.verify().expect("a thread can be made");
    assert!(matches!(kernel.attach_sampling(options.interval), Err(KernelError::Verifying)));
    kernel.add_samplers(verifying.wait().expect("the verifier is content")).expect("the table takes them");
    kernel.attach_sampling(options.interval).expect("the event attaches");
    std::thread::sleep(Duration::from_millis(200));
    // Kernels verify up to 1,000,000 instructions (`BPF_COMPLEXITY_LIMIT_INSNS`) and differ from each other: half is
    // left as a margin for others.
    for (program, verified) in kernel.verified_instructions() {
        println!("{program}: {verified:?} instructions verified");
        assert!(verified.is_none_or(|verified| verified < 500_000), "{program}: {verified:?}");
    }
    kernel.detach_sampling();
    let counters = kernel.counters().expect("the counters can be read");
    assert!(counters.ran > 0, "the program ran");
    let accounted = counters.sent + counters.idle + counters.filtered + counters.not_python;
    assert_eq!(counters.ran, accounted + counters.loss.iter().sum::<u64>());
}
