//! What the arguments mean: a [`Plan`] that `recording` executes.
//!
//! Whatever can be refused before anything is loaded into the kernel is refused here.

mod outputs;

pub use outputs::{export_output, merge_output};

pub(super) use outputs::default_path;

use super::args::{Compression, DEFAULT_RATE_HZ, NativeFrames, RecordArgs};
use super::command::CommandOutput;
use super::escape::escape;
use super::events::AskedEvent;
use super::failure::Failure;
use super::output::{self, Destination, OutputDirectory, OutputPlan};
use crate::discover::Filter;
use crate::kernel::ChosenEvent;
use crate::machine::access;
use crate::merge::Keep as KeepFrames;
use crate::recording::{self, NativePlan, Request, SymbolCache, Waits};
use crate::tach::Layout;
use crate::types::Pid;
use outputs::{record_output, source_wanted};
use std::ffi::OsString;
use std::fs;
use std::io::{self, IoSliceMut, IsTerminal as _};
use std::time::{Duration, SystemTime};
use tachyon_common::limits::MAX_EVENTS;

/// What to profile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Targets {
    /// These processes, in the order given, each once.
    Pids(Vec<Pid>),
    /// Every CPython process.
    AllPython,
    /// A program that the profiler starts.
    Command {
        /// Its words, at least one.
        argv: Vec<OsString>,
        /// Whether it stays root under sudo.
        as_root: bool,
    },
}

/// Which files of `--rotate` are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// Up to this many bytes.
    Bytes(u64),
    /// Those that are not older than this.
    Age(Duration),
}

/// How a recording is made in segments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rotate {
    /// Length of one.
    pub length: Duration,
    /// Limits on what the directory holds; all of them apply.
    pub keep: Vec<Keep>,
}

/// A recording to make.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// What to profile.
    pub targets: Targets,
    /// Whether children that start from now on belong to it.
    pub follow_children: bool,
    /// Which of those processes to record.
    pub filter: Filter,
    /// How long; `None`: until it is interrupted or all targets have ended.
    pub duration: Option<Duration>,
    /// CPU time between two samples, rounded to nanoseconds.
    pub interval: Duration,
    /// The same as samples per second.
    pub rate_hz: f64,
    /// Share of one core that the profiler may use; above that, it samples less often.
    pub max_cpu: Option<f64>,
    /// Bytes of memory that the profiler and its maps may use together; near that, it gives things up.
    pub max_memory: Option<u64>,
    /// The profile.
    pub output: OutputPlan,
    /// The profile is a directory, with a file for each process.
    pub split: bool,
    /// The profile is a directory, with a file for each segment.
    pub rotate: Option<Rotate>,
    /// Where the account goes as JSON.
    pub report: Option<Destination>,
    /// Keep threads apart in formats that join them.
    pub threads: bool,
    /// The report has source text.
    pub source: bool,
    /// Merge processes of one program.
    pub merge_processes: bool,
    /// Only samples that hold the GIL.
    pub gil: bool,
    /// The opcode of each frame too.
    pub opcodes: bool,
    /// Native frames, if they are wanted.
    pub native: Option<NativePlan>,
    /// Kernel frames too.
    pub kernel: bool,
    /// Whether waiting threads are sampled.
    pub waits: Waits,
    /// Record who ends waits, too.
    pub wakers: bool,
    /// Show the tasks that await a running task, in place of the event loop.
    pub awaiting: bool,
    /// Events that are sampled in place of the clock.
    pub events: Vec<ChosenEvent>,
    /// Variables of processes' environment that are labels of their samples.
    pub label_env: Vec<String>,
    /// How a TACH file is compressed.
    pub compression: Compression,
    /// Which layout a TACH file gets.
    pub tach_layout: Layout,
    /// Whether a TACH file is synced to disk each second.
    pub sync: bool,
    /// Whether a live line is wanted on standard error. Not with a command, which shares the terminal.
    pub progress: bool,
    /// Whether standard error takes colours.
    pub colours: bool,
}

/// What the plan needs to know about its environment.
#[derive(Clone, Copy, Debug)]
pub struct Surroundings {
    /// Standard output is a terminal.
    pub stdout_is_terminal: bool,
    /// Standard error is a terminal that can redraw a line.
    pub stderr_is_terminal: bool,
    /// `NO_COLOR` is set to something.
    pub no_color: bool,
    /// The time, for the default file name.
    pub now: SystemTime,
}

impl Surroundings {
    /// The surroundings of this process.
    #[must_use]
    pub fn current() -> Self {
        let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        Self {
            stdout_is_terminal: io::stdout().is_terminal(),
            stderr_is_terminal: io::stderr().is_terminal() && !dumb,
            no_color: std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty()),
            now: SystemTime::now(),
        }
    }
}

impl Plan {
    /// The request to the recorder. `child` is the command's process, if there is one.
    #[must_use]
    pub fn request(&self, child: Option<Pid>) -> Request {
        let targets = match (&self.targets, child) {
            (Targets::Pids(pids), _) => recording::Targets::Pids(pids.clone()),
            (Targets::Command { .. }, Some(child)) => recording::Targets::Child(child),
            (Targets::Command { .. }, None) | (Targets::AllPython, _) => recording::Targets::AllPython,
        };
        let program = match &self.targets {
            Targets::Command { argv, .. } => argv.first().and_then(|program| recording::program_named(program)),
            Targets::Pids(_) | Targets::AllPython => None,
        };
        Request {
            program,
            follow_children: self.follow_children,
            filter: self.filter.clone(),
            rate_hz: self.rate_hz,
            max_cpu: self.max_cpu,
            max_memory: self.max_memory,
            gil: self.gil,
            opcodes: self.opcodes,
            native: self.native,
            symbol_cache: SymbolCache::of_environment(),
            kernel: self.kernel,
            waits: self.waits,
            wakers: self.wakers,
            awaiting: self.awaiting,
            // There are many accounts of segments.
            thread_times: self.rotate.is_none(),
            events: self.events.clone(),
            variables: (!self.label_env.is_empty()).then(|| self.label_env.clone()),
            label_env: !self.label_env.is_empty(),
            keep_stacks: false,
            ring_bytes: ring_override(),
            give_back: true,
            ..Request::new(targets, self.interval)
        }
    }

    /// Where the output of a profiled command goes: standard output is only for the profile or the report.
    #[must_use]
    pub fn command_output(&self) -> CommandOutput {
        if self.output.destination == Destination::Stdout || self.report == Some(Destination::Stdout) {
            CommandOutput::StandardError
        } else {
            CommandOutput::Inherited
        }
    }

    /// Turns arguments into a plan, and checks what can be checked before anything is loaded.
    ///
    /// # Errors
    /// [`Failure`] with exit status 2 when the arguments do not fit together, 1 when a process or the output is not
    /// available.
    pub fn new(args: RecordArgs, surroundings: &Surroundings) -> Result<Self, anyhow::Error> {
        #[cfg(debug_assertions)]
        if let Some(object) = &args.bpf_log {
            crate::kernel::log_with(object.clone());
        }
        let targets = targets(&args)?;
        let (interval, rate_hz) = interval_and_rate(&args);
        check_waits(&args, rate_hz)?;
        let events = chosen_events(&args.events)?;
        let output = record_output(&args, surroundings)?;
        let format = output.format;
        let report = args.report.map(Destination::from_argument);
        if report.as_ref().is_some_and(|report| report.is_same(&output.destination)) {
            return Err(Failure::usage("--report and --output are the same file")
                .with_hint("give the report its own path")
                .into());
        }
        if let Targets::Pids(pids) = &targets {
            for &pid in pids {
                check_process(pid)?;
            }
        }
        match &output.destination {
            Destination::Path(path) if args.split.is_some() => OutputDirectory::check(path, output.force)?,
            Destination::Path(path) if args.rotate.is_some() => output::check_directory(path)?,
            _ => output.check()?,
        }
        if let Some(report) = &report {
            output::check(report, output.force)?;
        }
        Ok(Self {
            follow_children: args.targets.subprocesses || !matches!(targets, Targets::Pids(_)),
            progress: surroundings.stderr_is_terminal && !matches!(targets, Targets::Command { .. }),
            colours: surroundings.stderr_is_terminal && !surroundings.no_color,
            duration: args.duration,
            interval,
            rate_hz,
            max_cpu: args.sampling.max_cpu,
            max_memory: args.max_memory,
            output,
            split: args.split.is_some(),
            rotate: args.rotate.map(|length| Rotate { length, keep: args.keep }),
            report,
            threads: args.threads,
            source: source_wanted(args.source, format)?,
            merge_processes: args.merge.wanted(format)?,
            gil: args.sampling.gil,
            opcodes: args.opcodes,
            kernel: args.kernel,
            waits: match (args.off_cpu, args.wall) {
                (true, _) => Waits::Alone,
                (false, true) => Waits::Too,
                (false, false) => Waits::Not,
            },
            wakers: args.wakers,
            awaiting: args.awaiting,
            events,
            label_env: args.label_env,
            native: (!args.sampling.no_native).then_some(NativePlan {
                keep: KeepFrames {
                    interpreter: args.interpreter_frames,
                    roots: args.interpreter_frames || args.sampling.native == Some(NativeFrames::All),
                },
                ..NativePlan::new(args.unwind_memory)
            }),
            compression: args.compression,
            filter: Filter {
                cgroups: args.targets.cgroups,
                containers: args.targets.containers,
                comms: args.targets.comms,
                uids: args.targets.uids,
            },
            tach_layout: args.tach_layout.into(),
            sync: args.sync,
            targets,
        })
    }
}

/// The highest rate at which waiting threads are sampled: a CPU takes as many stacks of them in a second as in any case.
const MOST_WAITS_HZ: f64 = 1000.0;

/// Checks what can be combined with waiting threads.
fn check_waits(args: &RecordArgs, rate_hz: f64) -> Result<(), Failure> {
    let option = if args.off_cpu { "--off-cpu" } else { "--wall" };
    if !(args.wall || args.off_cpu) {
        return if args.wakers {
            Err(Failure::usage("--wakers tells who ends waits, and waits are not sampled")
                .with_hint("add --wall or --off-cpu"))
        } else {
            Ok(())
        };
    }
    if rate_hz > MOST_WAITS_HZ {
        let message = format!("{option} samples waiting threads at {MOST_WAITS_HZ} Hz at most, not at {rate_hz:.0} Hz");
        return Err(Failure::usage(message).with_hint(format!(
            "give -F {MOST_WAITS_HZ} or less: each thread's waits count by their length at any rate"
        )));
    }
    Ok(())
}

/// The events of `-e`, checked to exist on this machine as far as possible.
fn chosen_events(asked: &[AskedEvent]) -> Result<Vec<ChosenEvent>, anyhow::Error> {
    let mut events: Vec<ChosenEvent> = Vec::new();
    for event in asked {
        let AskedEvent::Sample(event) = event else { continue };
        if events.iter().any(|known| known.name() == event.name()) {
            let message = format!("-e {} is there twice", event.name());
            return Err(Failure::usage(message).with_hint("an event has one period").into());
        }
        event.check()?;
        events.push(event.clone());
    }
    if events.len() > MAX_EVENTS {
        return Err(Failure::usage(format!("{} events: one recording samples up to {MAX_EVENTS}", events.len()))
            .with_hint("make a second recording: several can run at once")
            .into());
    }
    Ok(events)
}

/// `TACHYON_RING_BYTES`: a ring of another size, for tests of a full one; a power of two of whole pages.
fn ring_override() -> Option<u32> {
    let bytes: u32 = std::env::var("TACHYON_RING_BYTES").ok()?.parse().ok()?;
    (bytes.is_power_of_two() && bytes >= 4096).then_some(bytes)
}

fn targets(args: &RecordArgs) -> Result<Targets, Failure> {
    if !args.targets.command.is_empty() {
        return Ok(Targets::Command { argv: args.targets.command.clone(), as_root: args.targets.as_root });
    }
    if args.targets.as_root {
        return Err(Failure::usage("--as-root without a program to run")
            .with_hint("it is for `--as-root -- CMD`; with -p and --all-python leave it out"));
    }
    let filtered = !(args.targets.cgroups.is_empty()
        && args.targets.containers.is_empty()
        && args.targets.comms.is_empty()
        && args.targets.uids.is_empty());
    // Filters alone are enough to say what to profile: all processes that match.
    if args.targets.all_python || (args.targets.pids.is_empty() && filtered) {
        return Ok(Targets::AllPython);
    }
    if args.targets.pids.is_empty() {
        return Err(Failure::usage("no process to profile")
            .with_hint("give -p PID, --all-python, or a program to run: -- python app.py"));
    }
    let mut pids = Vec::with_capacity(args.targets.pids.len());
    for &pid in &args.targets.pids {
        if !pids.contains(&pid) {
            pids.push(pid);
        }
    }
    Ok(Targets::Pids(pids))
}

fn interval_and_rate(args: &RecordArgs) -> (Duration, f64) {
    match args.sampling.interval {
        Some(interval) => (interval, 1.0 / interval.as_secs_f64()),
        None => {
            let rate_hz = args.sampling.frequency.unwrap_or(DEFAULT_RATE_HZ).max(1);
            let interval_ns = (1_000_000_000 + u64::from(rate_hz) / 2) / u64::from(rate_hz);
            (Duration::from_nanos(interval_ns), f64::from(rate_hz))
        }
    }
}

/// Checks that the process exists and its memory may be read.
fn check_process(pid: Pid) -> Result<(), Failure> {
    let raw = nix::unistd::Pid::from_raw(pid.as_raw());
    if nix::sys::signal::kill(raw, None) == Err(nix::Error::ESRCH) {
        return Err(Failure::new(format!("no such process: {pid}"))
            .with_hint("`tachyon-bpf doctor -v` lists the Python processes that run"));
    }
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let field = |key: &str| status.lines().find_map(|line| line.strip_prefix(key)).map(str::trim);
    let name = escape(field("Name:").unwrap_or("?")).into_owned();
    if let Some(tgid) = field("Tgid:").filter(|tgid| *tgid != pid.to_string()) {
        return Err(Failure::new(format!("{pid} ({name}) is a thread of process {tgid}"))
            .with_hint(format!("give -p {tgid}; the profile keeps threads separate")));
    }
    // Address 0 is never mapped: EFAULT means that reading is allowed.
    let mut byte = [0];
    let nowhere = nix::sys::uio::RemoteIoVec { base: 0, len: 1 };
    match nix::sys::uio::process_vm_readv(raw, &mut [IoSliceMut::new(&mut byte)], &[nowhere]) {
        Err(nix::Error::ESRCH) => Err(Failure::new(format!("cannot profile pid {pid} ({name}): it has no memory"))
            .with_hint("it is a kernel thread, or has ended and waits for its parent")),
        Err(errno @ (nix::Error::EPERM | nix::Error::EACCES)) => {
            Err(Failure::new(format!("cannot read pid {pid} ({name})"))
                .with_source(io::Error::from(errno))
                .with_hint(access::hint(pid)))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests;
