//! What a window shows as a whole.

use crate::analysis::rows::Sum;

/// What all samples together show.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Shares {
    /// Samples and the time that they stand for: CPU time, unless waiting threads are sampled too.
    pub sum: Sum,
    /// Those of them that ran on a CPU.
    pub running: Sum,
    /// Share of samples of waiting threads.
    pub waiting: f64,
    /// Length of the stretch of time.
    pub seconds: f64,
    /// Share of samples that held the GIL, among those for which that is known.
    pub gil: Option<f64>,
    /// Share of samples in the garbage collector.
    pub gc: f64,
    /// Share of samples whose leaf is native code.
    pub native: f64,
    /// Share of samples in which an exception was being raised or handled.
    pub exceptions: f64,
    /// Samples lost, of any thread.
    pub lost: u64,
    /// CPU time of the profiler.
    pub profiler_s: f64,
}

impl Shares {
    /// CPUs in use.
    #[must_use]
    pub fn cpus(&self) -> f64 {
        if self.seconds > 0.0 { self.running.cpu_us as f64 / 1e6 / self.seconds } else { 0.0 }
    }

    /// Share of one CPU that the profiler used.
    #[must_use]
    pub fn profiler(&self) -> f64 {
        if self.seconds > 0.0 { self.profiler_s / self.seconds } else { 0.0 }
    }
}
