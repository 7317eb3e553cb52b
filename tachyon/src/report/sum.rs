//! Adds up accounts: of the segments of a recording, or of several files.

use super::{CostReport, NativeReport, ProcessReport, Report, TimeReport};
use std::collections::BTreeMap;

impl Report {
    /// Adds the account of another recording, or of another part of the same one, without its processes: only the caller knows
    /// which ones are the same in both. Times and rates are not changed, because those of two recordings may overlap and differ.
    pub fn add(&mut self, more: &Self) {
        self.schema = self.schema.max(more.schema);
        self.ran += more.ran;
        self.stored += more.stored;
        self.cut |= more.cut;
        self.idle += more.idle;
        self.filtered += more.filtered;
        self.not_python += more.not_python;
        add_counts(&mut self.loss, &more.loss);
        match (&mut self.wall, &more.wall) {
            (Some(sum), Some(wall)) => {
                sum.ticks_due += wall.ticks_due;
                sum.stored += wall.stored;
                sum.widened += wall.widened;
                sum.threads_without_room += wall.threads_without_room;
                add_counts(&mut sum.loss, &wall.loss);
                add_lines(&mut sum.holders, &wall.holders, |line| &mut line.stored);
                add_lines(&mut sum.wakers, &wall.wakers, |line| &mut line.stored);
                for (cause, more) in &wall.causes {
                    let sum = sum.causes.entry(cause.clone()).or_default();
                    sum.stored += more.stored;
                    if more.at_place > sum.at_place {
                        (sum.place, sum.at_place) = (more.place.clone(), more.at_place);
                    }
                }
            }
            (sum, Some(wall)) => *sum = Some(wall.clone()),
            _ => {}
        }
        self.inconsistent += more.inconsistent;
        add_known(&mut self.segments, more.segment_count());
        add_known(&mut self.expected, more.expected);
        add_known(&mut self.not_fired, more.not_fired);
        add_counts(&mut self.stops, &more.stops);
        match (&mut self.native, &more.native) {
            (Some(sum), Some(native)) => add_native(sum, native),
            (sum, Some(native)) => *sum = Some(native.clone()),
            _ => {}
        }
        if self.event != more.event {
            self.event = [self.event.as_str(), more.event.as_str()].join(", ").trim_matches([',', ' ']).to_owned();
        }
        for event in &more.events {
            match self.events.iter_mut().find(|known| (&known.name, known.period) == (&event.name, event.period)) {
                Some(known) => known.stored += event.stored,
                None => self.events.push(event.clone()),
            }
        }
        self.jitter = self.jitter.max(more.jitter);
        self.longest_reader_stall_s = self.longest_reader_stall_s.max(more.longest_reader_stall_s);
        self.reader_stall_without_cpu_s = self.reader_stall_without_cpu_s.max(more.reader_stall_without_cpu_s);
        self.codes_sent += more.codes_sent;
        self.codes_not_sent += more.codes_not_sent;
        self.codes_put_off += more.codes_put_off;
        self.process_events_lost += more.process_events_lost;
        add_texts(&mut self.refused, &more.refused);
        add_texts(&mut self.notes, &more.notes);
        add_cost(&mut self.cost, &more.cost);
    }

    /// How many segments an account covers, if it says.
    #[must_use]
    pub fn segment_count(&self) -> Option<u64> {
        self.segments.or(self.segment.map(|_| 1))
    }
}

impl TimeReport {
    fn add(&mut self, more: &Self) {
        self.running_s += more.running_s;
        self.queued_s += more.queued_s;
        self.gil_wait_s += more.gil_wait_s;
        for (cause, seconds) in &more.blocked_s {
            *self.blocked_s.entry(cause.clone()).or_default() += seconds;
        }
    }
}

impl ProcessReport {
    /// Adds what was counted for the same process elsewhere.
    pub fn add(&mut self, more: &Self) {
        self.pid = more.pid;
        let texts = [
            (&mut self.comm, &more.comm),
            (&mut self.python_version, &more.python_version),
            (&mut self.script, &more.script),
            (&mut self.container, &more.container),
            (&mut self.pod, &more.pod),
        ];
        for (text, more) in texts {
            if text.is_empty() {
                text.clone_from(more);
            }
        }
        self.samples += more.samples;
        self.named += more.named;
        self.not_initialized += more.not_initialized;
        self.merge_exact += more.merge_exact;
        self.merge_repaired += more.merge_repaired;
        self.merge_failed += more.merge_failed;
        self.uninspected += more.uninspected;
        if let Some(time) = &more.time {
            self.time.get_or_insert_default().add(time);
        }
        for more in &more.threads {
            match self.threads.iter_mut().find(|known| known.tid == more.tid) {
                Some(known) => known.time.add(&more.time),
                None => self.threads.push(more.clone()),
            }
        }
        if let Some(cpu_s) = more.cpu_s {
            *self.cpu_s.get_or_insert(0.0) += cpu_s;
        }
    }
}

/// Most lines of a list of waits.
pub const MOST_LINES: usize = 20;

/// Adds lines with counts, and keeps the largest.
fn add_lines<T: Clone + Ord>(sum: &mut Vec<T>, more: &[T], count: impl Fn(&mut T) -> &mut u64) {
    for line in more {
        let without = |line: &T| {
            let mut line = line.clone();
            *count(&mut line) = 0;
            line
        };
        let wanted = without(line);
        match sum.iter_mut().find(|known| without(known) == wanted) {
            Some(known) => *count(known) += *count(&mut line.clone()),
            None => sum.push(line.clone()),
        }
    }
    sum.sort_by(|a, b| b.cmp(a));
    sum.truncate(MOST_LINES);
}

/// Adds a number that may be unknown.
pub fn add_known(sum: &mut Option<u64>, more: Option<u64>) {
    if let Some(more) = more {
        *sum.get_or_insert(0) += more;
    }
}

fn add_counts(sum: &mut BTreeMap<String, u64>, more: &BTreeMap<String, u64>) {
    for (name, count) in more {
        *sum.entry(name.clone()).or_default() += count;
    }
}

fn add_texts(sum: &mut Vec<String>, more: &[String]) {
    for text in more {
        if !sum.contains(text) {
            sum.push(text.clone());
        }
    }
}

fn add_native(sum: &mut NativeReport, more: &NativeReport) {
    sum.exact += more.exact;
    sum.repaired += more.repaired;
    sum.failed += more.failed;
    sum.missing += more.missing;
    add_counts(&mut sum.repairs, &more.repairs);
    add_counts(&mut sum.stops, &more.stops);
    sum.copied += more.copied;
    sum.table_bytes = sum.table_bytes.max(more.table_bytes);
    sum.table_bytes_wanted = sum.table_bytes_wanted.max(more.table_bytes_wanted);
    for (path, reason) in &more.refused {
        sum.refused.entry(path.clone()).or_insert_with(|| reason.clone());
    }
}

fn add_cost(sum: &mut CostReport, more: &CostReport) {
    add_known(&mut sum.bpf_run_count, more.bpf_run_count);
    add_known(&mut sum.bpf_run_ns, more.bpf_run_ns);
    sum.user_cpu_s += more.user_cpu_s;
    sum.peak_rss_bytes = sum.peak_rss_bytes.max(more.peak_rss_bytes);
    sum.map_bytes = sum.map_bytes.max(more.map_bytes);
    sum.ring_bytes = sum.ring_bytes.max(more.ring_bytes);
}
