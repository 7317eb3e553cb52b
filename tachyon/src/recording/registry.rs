//! What is known of every process of a recording, for those who name, account and report.
//!
//! Shared by the thread that follows processes (writer) and the one that makes samples (reader). Keyed by the
//! kernel side's *instance*, never by pid alone: a pid is used again. What turns out not to be CPython leaves it at
//! once, for the kernel side does not tell of its end; an always-on recording would collect every program of the host.

use crate::remote::RemoteProcess;
use crate::types::Pid;
use nix::time::{ClockId, clock_getcpuclockid, clock_gettime};
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::time::{Duration, Instant};
use tachyon_common::event::ProcessRecord;
use tachyon_common::layout::Layout;
use tachyon_common::process::flags;

/// Whether a process runs CPython.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Not told yet.
    Unknown,
    /// CPython of this version, `PY_VERSION_HEX` and as text.
    Python(u32, String),
    /// Something else, or a CPython that was refused.
    Other,
}

impl Verdict {
    fn python(&self) -> Option<(u32, String)> {
        match self {
            Self::Python(hex, text) => Some((*hex, text.clone())),
            Self::Unknown | Self::Other => None,
        }
    }
}

/// One process.
#[derive(Clone, Debug)]
pub(super) struct ProcessInfo {
    pub pid: u32,
    pub image: u64,
    pub verdict: Verdict,
    pub comm: String,
    pub cmdline: Vec<String>,
    /// Container and pod, empty when there are none.
    pub container: String,
    pub pod: String,
    /// CPU time it had when it was selected, or when its present program began, nanoseconds.
    cpu_start_ns: u64,
    /// CPU time of its earlier programs that were CPython.
    cpu_before_ns: u64,
    /// CPU time at its exit, as the kernel side told it.
    cpu_end_ns: Option<u64>,
    /// Runs that met it before it was inspected, over all its images that were CPython or are undecided.
    pub uninspected: u64,
    pub alive: bool,
    /// Version of its latest image that was CPython, as in [`Verdict::Python`].
    last_python: Option<(u32, String)>,
    /// Whether the profile has samples of it: it refers to what is known here, at the end.
    pub sampled: bool,
}

impl ProcessInfo {
    pub fn new(pid: u32, image: u64, verdict: Verdict, cpu_start_ns: u64) -> Self {
        let (container, pod) = read_container(pid);
        Self {
            pid,
            image,
            container,
            pod,
            last_python: verdict.python(),
            verdict,
            comm: read_comm(pid),
            cmdline: read_cmdline(pid),
            cpu_start_ns,
            cpu_before_ns: 0,
            cpu_end_ns: None,
            uninspected: 0,
            alive: true,
            sampled: false,
        }
    }

    /// CPython's version as text; empty when it is not CPython (any more).
    pub fn version(&self) -> &str {
        match &self.verdict {
            Verdict::Python(_, version) => version,
            Verdict::Unknown | Verdict::Other => "",
        }
    }

    /// Whether any of its images was CPython.
    pub fn ever_python(&self) -> bool {
        self.last_python.is_some()
    }

    /// Version of its latest CPython, `PY_VERSION_HEX` and as text, whatever it runs now.
    pub fn last_python(&self) -> Option<(u32, &str)> {
        self.last_python.as_ref().map(|(hex, text)| (*hex, text.as_str()))
    }

    /// CPU time of all its threads while it was selected and ran CPython, nanoseconds; `None` when it could not be
    /// measured.
    pub fn cpu_ns(&self) -> Option<u64> {
        if !self.is_python() {
            return Some(self.cpu_before_ns);
        }
        let now = || if self.alive { cpu_time_ns(self.pid) } else { None };
        self.cpu_end_ns.or_else(now).map(|end| self.cpu_before_ns + end.saturating_sub(self.cpu_start_ns))
    }

    fn is_python(&self) -> bool {
        matches!(self.verdict, Verdict::Python(..))
    }

    /// What it has used so far is not what its samples will stand for.
    pub fn cpu_starts_now(&mut self) {
        let now = if self.alive { cpu_time_ns(self.pid) } else { None };
        // One that has ended, whether that has been told or not, uses no more.
        self.cpu_start_ns = now.unwrap_or(u64::MAX);
    }

    /// A new program begins, at this CPU time.
    fn exec(&mut self, comm: String, cpu_ns: Option<u64>) {
        if let Some(cpu_ns) = cpu_ns {
            if self.is_python() {
                self.cpu_before_ns += cpu_ns.saturating_sub(self.cpu_start_ns);
            }
            self.cpu_start_ns = cpu_ns;
        }
        self.verdict = Verdict::Unknown;
        self.comm = comm;
        // Rather none than its parent's.
        self.cmdline = read_cmdline(self.pid);
    }

    /// Sets the verdict on the present image.
    pub fn decide(&mut self, verdict: Verdict) {
        self.last_python = verdict.python().or(self.last_python.take());
        self.verdict = verdict;
    }

    /// Brings name and command line up to date (they change at `exec`).
    pub fn refresh(&mut self) {
        let (comm, cmdline) = (read_comm(self.pid), read_cmdline(self.pid));
        if !comm.is_empty() {
            self.comm = comm;
        }
        if !cmdline.is_empty() {
            self.cmdline = cmdline;
        }
        // A runtime moves a process into its container before it execs the program.
        (self.container, self.pod) = read_container(self.pid);
    }
}

/// CPU time of a live process, dead threads included (`CLOCK_PROCESS_CPUTIME_ID` of another process).
pub(super) fn cpu_time_ns(pid: u32) -> Option<u64> {
    let clock: ClockId = clock_getcpuclockid(nix::unistd::Pid::from_raw(i32::try_from(pid).ok()?)).ok()?;
    let time = clock_gettime(clock).ok()?;
    Some(time.tv_sec().unsigned_abs() * 1_000_000_000 + time.tv_nsec().unsigned_abs())
}

fn read_comm(pid: u32) -> String {
    let text = std::fs::read(format!("/proc/{pid}/comm")).unwrap_or_default();
    String::from_utf8_lossy(text.strip_suffix(b"\n").unwrap_or(&text)).into_owned()
}

/// Container and pod of a process; empty where it is in none.
fn read_container(pid: u32) -> (String, String) {
    let cgroups = RemoteProcess::at(Pid(pid)).cgroups().unwrap_or_default();
    (cgroups.container().unwrap_or_default().to_owned(), cgroups.pod().unwrap_or_default())
}

/// At most 4 KiB of the command line: a target can make it as long as it likes.
fn read_cmdline(pid: u32) -> Vec<String> {
    use std::io::Read as _;
    let mut text = Vec::new();
    if let Ok(file) = std::fs::File::open(format!("/proc/{pid}/cmdline")) {
        // A process that vanishes meanwhile has no command line.
        let _gone = file.take(4096).read_to_end(&mut text);
    }
    let text = text.strip_suffix(b"\0").unwrap_or(&text);
    if text.is_empty() {
        return Vec::new();
    }
    text.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned()).collect()
}

/// All processes of a recording.
#[derive(Debug, Default)]
pub(super) struct Registry {
    by_instance: HashMap<u64, ProcessInfo>,
    current: HashMap<u32, u64>,
    layouts: Vec<Layout>,
    /// Runs counted as "not inspected" that turned out to have met something that is not CPython.
    not_python: u64,
    /// The same for runs counted as "process gone".
    not_python_gone: u64,
    /// Runs counted as "not inspected" that met a process that is not asked for.
    filtered: u64,
    /// What was met and refused, by reason, with the pids; the first [`MAX_REFUSED`].
    pub refused: Vec<String>,
    /// How many more there were.
    pub refused_more: u64,
    /// What is weaker than it should be, each once.
    pub notes: BTreeSet<String>,
    /// Notes that are to be told on the terminal while the recording runs.
    pub told: Vec<String>,
    /// Those that have been: its end does not repeat them.
    pub said: BTreeSet<String>,
    /// Memory is short: who keeps what can be made again drops it.
    pub shrink: bool,
    /// Images whose last process has ended, each with the time.
    pub dead_images: Vec<(u64, Instant)>,
    /// Images whose code objects make no sense: their layout is not what it was taken for.
    pub nonsense: Vec<u64>,
    /// Processes that were CPython and have become something else or ended, each with the time.
    left: VecDeque<(u64, Instant)>,
    /// CPU time, as CPython, of those of them that are forgotten.
    forgotten_cpu_ns: u64,
    /// How many of these had run CPython to their end.
    pub forgotten: u64,
    /// Ended processes that are known only because runs met them before they were inspected.
    uninspected_only: usize,
}

/// Processes that could not be profiled and are listed one by one.
const MAX_REFUSED: usize = 1000;
/// Notes are about interpreters, of which a host may see a new one each minute.
const MAX_NOTES: usize = 256;
/// Ended processes that were met, but never sampled, and are listed one by one.
const MAX_UNINSPECTED_ONLY: usize = 1000;

impl Registry {
    /// Sampling starts now: what processes used before is not what samples stand for.
    pub fn sampling_starts(&mut self) {
        for info in self.by_instance.values_mut() {
            info.cpu_before_ns = 0;
            info.cpu_starts_now();
        }
        self.forgotten_cpu_ns = 0;
    }

    /// Sampling has ended: what processes use from now on (on a busy machine the rest takes seconds) is not counted.
    pub fn sampling_ended(&mut self) {
        for info in self.by_instance.values_mut().filter(|info| info.alive) {
            info.cpu_end_ns = cpu_time_ns(info.pid);
        }
    }

    pub fn insert(&mut self, instance: u64, info: ProcessInfo) {
        let before = self.current.insert(info.pid, instance).filter(|&before| before != instance);
        // Its end was told to nobody (a full ring): it has ended all the same, for its pid is used again.
        if let Some((before, ended)) = before.and_then(|before| Some((before, self.by_instance.get_mut(&before)?))) {
            ended.alive = false;
            self.left.push_back((before, Instant::now()));
        }
        self.by_instance.insert(instance, info);
    }

    pub fn get(&self, instance: u64) -> Option<&ProcessInfo> {
        self.by_instance.get(&instance)
    }

    /// The profile has a first sample of a process. Returns what is known of it.
    pub fn sampled(&mut self, instance: u64) -> Option<&ProcessInfo> {
        let info = self.by_instance.get_mut(&instance)?;
        info.sampled = true;
        Some(info)
    }

    /// The process that has this pid now.
    pub fn by_pid(&mut self, pid: u32) -> Option<&mut ProcessInfo> {
        self.by_instance.get_mut(self.current.get(&pid)?)
    }

    pub fn set_layout(&mut self, number: u32, layout: &Layout) {
        let at = number as usize;
        if self.layouts.len() <= at {
            self.layouts.resize(at + 1, Layout::default());
        }
        self.layouts[at] = *layout;
    }

    pub fn layout(&self, number: u32) -> Option<&Layout> {
        self.layouts.get(number as usize)
    }

    /// Selected processes that run CPython now.
    pub fn live_python(&self) -> u64 {
        self.live().filter(|info| info.is_python()).count() as u64
    }

    /// Processes that have not ended, however many there were.
    fn live(&self) -> impl Iterator<Item = &ProcessInfo> {
        self.current.values().filter_map(|instance| self.by_instance.get(instance)).filter(|info| info.alive)
    }

    /// Whether any process is still alive that is or may become CPython.
    pub fn any_alive(&self) -> bool {
        self.live().any(|info| info.verdict != Verdict::Other)
    }

    /// Adds runs that met a process before it was inspected: lost if it is CPython, else none of ours.
    pub fn add_uninspected(&mut self, instance: u64, count: u64, python: bool) {
        match self.by_instance.get_mut(&instance) {
            Some(info) if python => info.uninspected += count,
            _ if python => {}
            _ => self.not_python += count,
        }
    }

    /// Runs that were counted as "not inspected" and belong to `not_python`.
    pub fn reclaimed(&self) -> u64 {
        self.not_python
    }

    /// Runs that were counted as "not inspected" and belong to `filtered`.
    pub fn reclaimed_filtered(&self) -> u64 {
        self.filtered
    }

    /// Runs that the kernel side counts as lost and that are not.
    pub fn not_lost(&self) -> u64 {
        self.not_python + self.not_python_gone + self.filtered
    }

    /// A process whose new program is not asked for. What it was before stays known if it was CPython.
    pub fn turn_away(&mut self, instance: u64, uninspected: u64) {
        self.filtered += uninspected;
        self.leave(instance);
    }

    /// A process turned out to run something that is not CPython. The kernel side tells no end of such a one, so it
    /// leaves now, and comes again with its next `exec`. One that was CPython may still have samples on their way.
    pub fn leave(&mut self, instance: u64) {
        let Some(info) = self.by_instance.get_mut(&instance) else { return };
        info.decide(Verdict::Other);
        if info.ever_python() {
            self.left.push_back((instance, Instant::now()));
        } else {
            self.remove(instance);
        }
    }

    fn remove(&mut self, instance: u64) {
        let Some(info) = self.by_instance.remove(&instance) else { return };
        if self.current.get(&info.pid) == Some(&instance) {
            self.current.remove(&info.pid);
        }
    }

    /// Forgets those that were CPython and have ended or been something else for so long that none of their records can
    /// still be on its way, unless the profile has samples of them: children that were forked to run another program,
    /// programs that hardly ran. Of those that were met too early only so many are listed one by one.
    pub fn forget_left(&mut self, age: Duration) {
        while self.left.front().is_some_and(|(_, since)| since.elapsed() >= age) {
            let Some((instance, _)) = self.left.pop_front() else { return };
            let Some(info) = self.by_instance.get(&instance) else { continue };
            // Else it runs CPython again, or may do so: when that ends it gets another entry here.
            let over = info.verdict == Verdict::Other || !info.alive;
            if !over || info.sampled {
                continue;
            }
            let to_its_end = !info.alive && info.is_python();
            if to_its_end && info.uninspected > 0 && self.uninspected_only < MAX_UNINSPECTED_ONLY {
                self.uninspected_only += 1;
                continue;
            }
            self.forgotten_cpu_ns += info.cpu_ns().unwrap_or(0);
            self.forgotten += u64::from(to_its_end);
            self.remove(instance);
        }
    }

    /// CPU time of all processes as CPython while they were selected; `None` when none could be measured.
    pub fn python_cpu_ns(&self) -> Option<u64> {
        let known: Vec<u64> = self.python().filter_map(|(_, info)| info.cpu_ns()).collect();
        (!known.is_empty() || self.forgotten_cpu_ns > 0).then(|| self.forgotten_cpu_ns + known.iter().sum::<u64>())
    }

    /// Runs that were counted as "process gone" and belong to `not_python`.
    pub fn reclaimed_gone(&self) -> u64 {
        self.not_python_gone
    }

    /// Nothing can run as this process any more. One that never was CPython has left the registry at its exit, or before.
    pub fn free(&mut self, record: &ProcessRecord) {
        if !self.by_instance.contains_key(&record.instance) {
            self.not_python_gone += record.uninspected;
        }
    }

    /// Notes a process that cannot be profiled.
    pub fn refuse(&mut self, line: String) {
        if self.refused.contains(&line) {
            return;
        }
        if self.refused.len() < MAX_REFUSED {
            self.refused.push(line);
        } else {
            self.refused_more += 1;
        }
    }

    /// Notes what is weaker than it should be.
    pub fn note(&mut self, note: String) {
        if self.notes.len() < MAX_NOTES {
            self.notes.insert(note);
        }
    }

    /// A child: what its parent is, until it execs.
    pub fn fork(&mut self, record: &ProcessRecord, comm: String) {
        let parent = self.current.get(&record.parent).and_then(|instance| self.by_instance.get(instance));
        let (container, pod) = parent.map_or_else(Default::default, |it| (it.container.clone(), it.pod.clone()));
        let (verdict, cmdline) =
            parent.map_or((Verdict::Unknown, Vec::new()), |parent| (parent.verdict.clone(), parent.cmdline.clone()));
        let info = ProcessInfo {
            container,
            pod,
            pid: record.tgid,
            image: record.image,
            last_python: verdict.python(),
            verdict,
            comm,
            cmdline,
            cpu_start_ns: 0,
            cpu_before_ns: 0,
            cpu_end_ns: None,
            uninspected: 0,
            alive: true,
            sampled: false,
        };
        self.insert(record.instance, info);
    }

    /// A new program begins: runs that met the old one uninspected get its verdict. `cpu_ns` is the process's CPU time
    /// at this moment, when it could be measured.
    pub fn exec(&mut self, record: &ProcessRecord, comm: String, cpu_ns: Option<u64>) {
        let was_python = self.get(record.instance).is_some_and(ProcessInfo::is_python);
        self.add_uninspected(record.instance, record.uninspected, was_python);
        if self.get(record.instance).is_none() {
            self.insert(record.instance, ProcessInfo::new(record.tgid, record.image, Verdict::Unknown, 0));
        }
        if let Some(info) = self.by_instance.get_mut(&record.instance) {
            info.exec(comm, cpu_ns);
        }
    }

    /// A process ended. One that never was CPython leaves no trace.
    pub fn exit(&mut self, record: &ProcessRecord) {
        if self.current.get(&record.tgid) == Some(&record.instance) {
            self.current.remove(&record.tgid);
        }
        let decided = record.flags & (flags::PYTHON | flags::NOT_PYTHON) != 0;
        let Some(info) = self.by_instance.get_mut(&record.instance) else {
            self.not_python += if decided { 0 } else { record.uninspected };
            return;
        };
        info.alive = false;
        info.cpu_end_ns.get_or_insert(record.cpu_ns);
        let (python, was_python) = (info.is_python(), info.ever_python());
        self.add_uninspected(record.instance, record.uninspected, python);
        if !was_python {
            self.by_instance.remove(&record.instance);
            return;
        }
        if self.pids_of_image(record.image).is_empty() {
            self.dead_images.push((record.image, Instant::now()));
        }
        self.left.push_back((record.instance, Instant::now()));
    }

    /// Takes the images that have been dead so long that none of their records can still be on its way.
    pub fn take_dead_images(&mut self, age: Duration) -> Vec<u64> {
        let old = self.dead_images.iter().take_while(|(_, since)| since.elapsed() >= age).count();
        self.dead_images.drain(..old).map(|(image, _)| image).collect()
    }

    /// Pids whose present image is this one.
    pub fn pids_of_image(&self, image: u64) -> Vec<u32> {
        self.live().filter(|info| info.image == image).map(|info| info.pid).collect()
    }

    /// All processes that are or were CPython.
    pub fn python(&self) -> impl Iterator<Item = (u64, &ProcessInfo)> {
        self.by_instance.iter().filter(|(_, info)| info.ever_python()).map(|(&instance, info)| (instance, info))
    }
}

#[cfg(test)]
mod tests;
