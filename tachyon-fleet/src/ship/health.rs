//! Whether profiling works on this host: samples come while CPythons run.
//!
//! The shipper has no privileges, and needs none: the agent says in `state.json` what it did, accounts name the processes that had samples,
//! and anyone may read in `/proc/PID/stat` whether those still run and use CPU time.

use serde::Deserialize;
use std::collections::BTreeMap;
use std::fs;
use std::io::Read as _;
use std::path::Path;

/// Longest state of an agent that is read.
const LONGEST: u64 = 1 << 20;
/// An agent that has ended no segment for this many segment lengths has stopped; lengths count as at least a minute.
const SEGMENTS: f64 = 3.0;
/// CPU time without a sample, in ticks, after which a process is suspicious: two seconds are 38 samples at 19 Hz.
const TICKS_WITHOUT_SAMPLE: u64 = 200;

/// What the agent says.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default)]
pub struct AgentState {
    /// Its process.
    pub pid: u32,
    /// Segments that ended.
    pub segments: u64,
    /// When the last one ended.
    pub segment_end_unix: f64,
    /// Samples.
    pub stored: u64,
}

/// What is known from look to look.
#[derive(Debug, Default)]
pub struct Health {
    last: Option<AgentState>,
    /// When `stored` last grew.
    grew_unix: f64,
    /// Length of a segment, as seen.
    segment_s: f64,
    /// Processes that had samples: pid, start and CPU time (in ticks) when samples last came, or when it was first noticed.
    processes: BTreeMap<u32, (u64, u64)>,
    trouble: Vec<String>,
}

impl Health {
    /// Looks again. `sampled` are pids of the newest segment that was read.
    pub fn look(&mut self, spool: &Path, sampled: &[u32], now_unix: f64) {
        self.look_at(state(spool), sampled, now_unix, &cpu_of);
    }

    fn look_at(
        &mut self,
        state: Option<AgentState>,
        sampled: &[u32],
        now_unix: f64,
        cpu_of: &dyn Fn(u32) -> Option<(u64, u64)>,
    ) {
        self.trouble.clear();
        // A directory of recordings has no agent.
        let Some(state) = state else { return };
        let last = self.last.replace(state.clone());
        if last.as_ref().is_none_or(|last| last.stored != state.stored) {
            self.grew_unix = now_unix;
            self.processes.retain(|&pid, (start, ticks)| {
                let now = cpu_of(pid).filter(|(now_start, _)| now_start == start);
                *ticks = now.map_or(*ticks, |(_, now)| now);
                now.is_some()
            });
        }
        // A segment is read some time after its samples are counted.
        for &pid in sampled {
            let Some(now) = cpu_of(pid) else { continue };
            let known = self.processes.entry(pid).or_insert(now);
            if known.0 != now.0 {
                *known = now;
            }
        }
        if let Some(last) = last.filter(|last| last.pid == state.pid && last.segments < state.segments) {
            let ended = (state.segments - last.segments) as f64;
            self.segment_s = (state.segment_end_unix - last.segment_end_unix) / ended;
        }
        let patience = SEGMENTS * self.segment_s.clamp(60.0, 86_400.0);
        let silent = now_unix - state.segment_end_unix;
        if silent > patience {
            let why = format!("the agent (pid {}) has ended no segment for {silent:.0} s", state.pid);
            self.trouble.push(why);
        } else if now_unix - self.grew_unix > patience {
            let busy = self.processes.iter().filter(|(pid, (start, ticks))| {
                cpu_of(**pid).is_some_and(|(now_start, now)| now_start == *start && now > ticks + TICKS_WITHOUT_SAMPLE)
            });
            let busy: Vec<String> = busy.map(|(pid, _)| pid.to_string()).collect();
            if !busy.is_empty() {
                let since = now_unix - self.grew_unix;
                self.trouble.push(format!("no sample for {since:.0} s, though CPythons run: pid {}", busy.join(", ")));
            }
        }
    }

    /// What is wrong; nothing, if profiling works.
    #[must_use]
    pub fn trouble(&self) -> &[String] {
        &self.trouble
    }
}

fn state(spool: &Path) -> Option<AgentState> {
    let file = tachyon::input::open(&spool.join("state.json")).ok()?;
    serde_json::from_reader(file.take(LONGEST)).ok()
}

/// Start and CPU time of a process, in ticks (man proc: fields 22, and 14 and 15).
fn cpu_of(pid: u32) -> Option<(u64, u64)> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may hold anything.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
    Some((field(22)?, field(14)? + field(15)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(segments: u64, end: f64, stored: u64) -> Option<AgentState> {
        Some(AgentState { pid: 9, segments, segment_end_unix: end, stored })
    }

    #[test]
    fn it_is_false_when_samples_stop_while_cpythons_run() {
        let mut health = Health::default();
        let busy = |ticks| move |pid| (pid == 7).then_some((100, ticks));
        health.look_at(state(1, 60.0, 10), &[7], 61.0, &busy(1000));
        health.look_at(state(2, 120.0, 20), &[7], 121.0, &busy(2000));
        assert!(health.trouble().is_empty());
        // The process runs on, segments come, samples do not.
        health.look_at(state(5, 300.0, 20), &[], 302.0, &busy(9000));
        assert_eq!(health.trouble(), ["no sample for 181 s, though CPythons run: pid 7"]);
        // It sleeps.
        let mut idle = Health::default();
        idle.look_at(state(1, 60.0, 10), &[7], 61.0, &busy(1000));
        idle.look_at(state(5, 300.0, 10), &[], 302.0, &busy(1003));
        assert!(idle.trouble().is_empty());
        // Another process has its pid.
        let mut other = Health::default();
        other.look_at(state(1, 60.0, 10), &[7], 61.0, &busy(1000));
        other.look_at(state(5, 300.0, 10), &[], 302.0, &|_| Some((500, 9000)));
        assert!(other.trouble().is_empty());
        // Samples come again.
        health.look_at(state(6, 360.0, 21), &[7], 361.0, &busy(9100));
        assert!(health.trouble().is_empty());
    }

    #[test]
    fn what_was_sampled_is_known_however_late_its_segment_is_read() {
        let mut health = Health::default();
        let busy = |ticks| move |pid| (pid == 7).then_some((100, ticks));
        health.look_at(state(1, 60.0, 10), &[], 61.0, &busy(1000));
        health.look_at(state(1, 60.0, 10), &[7], 71.0, &busy(1100));
        // Samples of others, or from its next segment, which has yet to be read.
        health.look_at(state(2, 120.0, 20), &[], 121.0, &busy(2000));
        health.look_at(state(5, 300.0, 20), &[], 302.0, &busy(2100));
        assert!(health.trouble().is_empty(), "100 ticks are two samples: by chance there may be none");
        health.look_at(state(5, 300.0, 20), &[7], 303.0, &busy(9000));
        assert_eq!(health.trouble(), ["no sample for 182 s, though CPythons run: pid 7"]);
    }

    #[test]
    fn it_is_false_when_the_agent_has_stopped() {
        let mut health = Health::default();
        health.look_at(state(1, 60.0, 10), &[], 61.0, &|_| None);
        health.look_at(state(1, 60.0, 10), &[], 239.0, &|_| None);
        assert!(health.trouble().is_empty());
        health.look_at(state(1, 60.0, 10), &[], 241.0, &|_| None);
        assert_eq!(health.trouble(), ["the agent (pid 9) has ended no segment for 181 s"]);
        health.look_at(None, &[], 1000.0, &|_| None);
        assert!(health.trouble().is_empty(), "a directory of recordings has no agent");
    }

    #[test]
    fn a_process_uses_cpu_time() {
        assert!(cpu_of(std::process::id()).is_some_and(|(start, _)| start > 0));
        assert_eq!(cpu_of(u32::MAX), None);
    }
}
