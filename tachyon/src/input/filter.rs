//! A part of a profile: some processes, some time, or only Python.

use super::InputError;
use crate::profile::{FrameId, Merge, Profile};
use crate::report::Report;
use crate::sinks::is_machine_code;
use std::time::Duration;

/// What is wanted of a profile; by default everything.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filter {
    /// Leaves native and kernel frames out. Their samples then count for their Python caller, line and all.
    pub no_native: bool,
    /// Only these processes; empty: all.
    pub pids: Vec<u32>,
    /// From this time on, after the start.
    pub from: Option<Duration>,
    /// Up to this time, after the start.
    pub to: Option<Duration>,
    /// Only samples of this event, by its name.
    pub event: Option<String>,
}

impl Filter {
    /// Whether everything is wanted.
    #[must_use]
    pub fn is_all(&self) -> bool {
        *self == Self::default()
    }
}

/// A filter being applied to a profile.
pub(super) struct Sieve {
    filter: Filter,
    /// By process.
    wanted: Vec<bool>,
    from_us: u64,
    to_us: u64,
    /// By frame, if already decided: whether it is left out.
    dropped: Vec<Option<bool>>,
    /// Samples left out.
    pub left_out: u64,
    /// By process: what was kept.
    kept: Vec<Kept>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Kept {
    samples: u64,
    by_merge: [u64; 4],
}

impl Sieve {
    /// # Errors
    /// When no process has one of the pids.
    pub fn new(filter: Filter, profile: &Profile) -> Result<Option<Self>, InputError> {
        if filter.is_all() {
            return Ok(None);
        }
        let known = |pid: &u32| profile.processes.iter().any(|process| process.pid == *pid);
        if let Some(&pid) = filter.pids.iter().find(|&pid| !known(pid)) {
            return Err(InputError::NoSuchPid(pid));
        }
        let time = |after: Duration| {
            profile.meta.start_us.saturating_add(u64::try_from(after.as_micros()).unwrap_or(u64::MAX))
        };
        Ok(Some(Self {
            wanted: Vec::new(),
            from_us: filter.from.map_or(0, time),
            to_us: filter.to.map_or(u64::MAX, time),
            dropped: Vec::new(),
            left_out: 0,
            kept: Vec::new(),
            filter,
        }))
    }

    /// Whether a process is wanted.
    pub fn wants(&mut self, profile: &Profile, process: u32) -> bool {
        let place = process as usize;
        while self.wanted.len() <= place {
            let pid = profile.processes.get(self.wanted.len()).map_or(0, |process| process.pid);
            self.wanted.push(self.filter.pids.is_empty() || self.filter.pids.contains(&pid));
            self.kept.push(Kept::default());
        }
        self.wanted[place]
    }

    /// Removes what is not wanted from samples of one stack; nothing may be left.
    pub fn take(
        &mut self,
        profile: &mut Profile,
        process: u32,
        merge: &mut Merge,
        stack: &mut Vec<FrameId>,
        times_us: &mut Vec<u64>,
    ) {
        let before = times_us.len();
        let (from_us, to_us) = (self.from_us, self.to_us);
        let of_event = |event: &String| profile.event_of(stack).is_some_and(|(name, _)| name == event.as_str());
        let of_event = self.filter.event.as_ref().is_none_or(of_event);
        if of_event && self.wants(profile, process) {
            times_us.retain(|&time_us| from_us <= time_us && time_us < to_us);
        } else {
            times_us.clear();
        }
        self.left_out += (before - times_us.len()) as u64;
        if self.filter.no_native && !stack.is_empty() {
            *merge = Merge::None;
            stack.retain(|&frame| !self.dropped(profile, frame));
            if stack.is_empty() {
                // As in a recording without native frames, for a thread that runs no Python.
                stack.push(profile.special_frame("<native>"));
            }
        }
        let kept = &mut self.kept[process as usize];
        kept.samples += times_us.len() as u64;
        kept.by_merge[usize::from(merge.number())] += times_us.len() as u64;
    }

    fn dropped(&mut self, profile: &Profile, frame: FrameId) -> bool {
        let place = frame.0 as usize;
        if place >= self.dropped.len() {
            self.dropped.resize(place + 1, None);
        }
        *self.dropped[place].get_or_insert_with(|| is_machine_code(profile, frame))
    }

    /// Makes the account one of what is left: what was left out counts as filtered, and what is unknown for a part is dropped.
    pub fn account(&self, report: &mut Report, stored: u64) {
        report.stored = stored;
        report.filtered += self.left_out;
        let timed = self.filter.from.is_some() || self.filter.to.is_some();
        if timed {
            let from_s = self.filter.from.unwrap_or_default().as_secs_f64().min(report.duration_s);
            let to_s = self.filter.to.map_or(report.duration_s, |to| to.as_secs_f64().min(report.duration_s));
            report.duration_s = (to_s - from_s).max(0.0);
        }
        if self.filter.no_native {
            report.native = None;
        }
        if self.left_out == 0 {
            return;
        }
        report.stops.clear();
        (report.expected, report.not_fired) = (None, None);
        let sum = |number: usize| self.kept.iter().map(|kept| kept.by_merge[number]).sum();
        if let Some(native) = &mut report.native {
            [native.missing, native.exact, native.repaired, native.failed] = [sum(0), sum(1), sum(2), sum(3)];
            native.repairs.clear();
            native.stops.clear();
        }
        for (place, process) in report.processes.iter_mut().enumerate() {
            let kept = self.kept.get(place).copied().unwrap_or_default();
            process.named =
                if kept.samples == process.samples { process.named } else { process.named.min(kept.samples) };
            process.samples = kept.samples;
            [_, process.merge_exact, process.merge_repaired, process.merge_failed] = kept.by_merge;
            process.not_initialized = process.not_initialized.min(kept.samples);
            if timed || kept.samples == 0 {
                process.cpu_s = None;
            }
        }
    }
}
