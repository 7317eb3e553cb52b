//! The time of each part of the start.

use crate::kernel::LoadTimes;
use crate::report::StartReport;
use std::time::Instant;

/// Measures the time of each part of the start.
pub(crate) struct Clock {
    start: Instant,
    last: Instant,
}

impl Clock {
    pub fn start() -> Self {
        let now = Instant::now();
        Self { start: now, last: now }
    }

    /// Seconds since the last call.
    pub fn lap(&mut self) -> f64 {
        let last = std::mem::replace(&mut self.last, Instant::now());
        (self.last - last).as_secs_f64()
    }

    /// Puts the parts together, when the event is attached.
    pub fn finish(mut self, machine_s: f64, load: LoadTimes, processes_s: f64) -> StartReport {
        let attach_s = self.lap();
        StartReport {
            machine_s,
            types_s: load.types.as_secs_f64(),
            maps_s: load.maps.as_secs_f64(),
            programs_s: load.programs.as_secs_f64(),
            processes_s,
            attach_s,
            total_s: (self.last - self.start).as_secs_f64(),
        }
    }
}
