//! The start: what can be done beside the verifier is done beside it, and each part's time is taken.

use crate::cli::plan::Targets;
use crate::discover::{self, Filter};
use crate::inspect::{self, ElfCache};
use crate::kernel::LoadTimes;
use crate::remote::RemoteProcess;
use crate::report::StartReport;
use std::num::NonZero;
use std::thread::JoinHandle;
use std::time::Instant;

/// Reads the files of the processes that there are, while the verifier looks at our programs: when the processes are
/// selected afterwards, in the order that loses none, all that is dear about it is known.
pub(super) struct Foresight(Option<JoinHandle<ElfCache>>);

impl Foresight {
    /// Begins, where there are processes to be found and a second CPU for it.
    pub fn begin(targets: &Targets, filter: &Filter) -> Self {
        let alone = std::thread::available_parallelism().map_or(1, NonZero::get) == 1;
        if alone || *targets != Targets::AllPython {
            return Self(None);
        }
        let filter = filter.clone();
        // Without the thread the files are read later.
        Self(std::thread::Builder::new().name("tachyon-foresee".to_owned()).spawn(move || look_ahead(&filter)).ok())
    }

    /// What was learnt.
    pub fn end(self) -> ElfCache {
        // What makes it panic would do so again where it is reported.
        self.0.and_then(|thread| thread.join().ok()).unwrap_or_default()
    }
}

fn look_ahead(filter: &Filter) -> ElfCache {
    let mut cache = ElfCache::default();
    for found in discover::scan().unwrap_or_default() {
        if !found.has_memory() {
            continue;
        }
        let process = RemoteProcess::at(found.pid);
        if filter.is_empty() || filter.admits(&process).unwrap_or(false) {
            // What it is counts when it is selected.
            let _verdict = inspect::inspect(&process, &mut cache);
        }
    }
    cache
}

/// Takes the time of each part of the start.
pub(super) struct Clock {
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
