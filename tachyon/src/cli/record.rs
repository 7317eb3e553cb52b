//! Carries out a recording: the command that is profiled, files, signals, progress, and the account at the end.

pub(super) mod files;
pub(super) mod rotation;
pub(super) mod signals;

pub(super) use self::rotation::compact_utc;

use self::files::Outputs;
use self::rotation::Rotation;
use self::signals::{End, Signals, abort_on_interrupt};
use super::account::{self, Extras};
use super::command::{CommandStatus, PreparedCommand};
use super::escape::escape;
use super::failure::Failure;
use super::output::{Destination, is_unread, write_whole};
use super::plan::{Plan, Targets};
use super::progress::{Numbers, Progress};
use crate::kernel::{drop_privileges, make_urgent};
use crate::machine::{preflight, raise_open_files};
use crate::recording::{Clock, Over, Running, Segment, Totals};
use crate::report::Report;
use std::io::Write as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// How a recording ended.
#[derive(Clone, Copy, Debug)]
pub struct Outcome {
    /// How the command of `-- CMD` ended; its exit status becomes the profiler's.
    pub command: Option<CommandStatus>,
}

/// How often to draw the progress line and check whether standard output is still being read.
const TURN: Duration = Duration::from_millis(250);

/// Records as planned.
///
/// # Errors
/// When nothing could be recorded, or the profile could not be written.
pub fn run(plan: &Plan) -> anyhow::Result<Outcome> {
    // Before anything else: the command must inherit neither signal handlers nor threads.
    let mut command = match &plan.targets {
        Targets::Command { argv, as_root } => Some(PreparedCommand::prepare(argv, *as_root, plan.command_output())?),
        Targets::Pids(_) | Targets::AllPython => None,
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    // Before the first file: no signal may leave a file behind.
    let mut signals = runtime.block_on(async { Signals::take() })?;
    let clock = Clock::start();
    raise_open_files();
    preflight()?;
    let opened = plan.request(command.as_ref().map(PreparedCommand::pid)).open_timed(clock)?;
    let mut files = Files::new(plan)?;
    let mut running = opened.start_into(|profile| files.open(plan, profile).map_err(cannot_write))?;
    if let Some(command) = &mut command {
        command.start()?;
    }
    // This thread sleeps until the end, which must not wait for other programs. The command has already been started.
    make_urgent();
    let rights =
        drop_privileges().err().map(|error| format!("cannot drop capabilities that are no longer needed: {error}"));

    let mut totals = Totals::new();
    let mut watch = Watch { plan, running: &mut running, files: &mut files, totals: &mut totals };
    let status = runtime.block_on(watch.until_the_end(&mut signals, command.as_mut()))?;
    // A second Ctrl-C, while the file is being finished, aborts.
    abort_on_interrupt();

    let mut last = running.finish()?;
    totals.add(&last);
    files.close(plan, &mut last)?;
    let report = totals.report();
    if let Some(destination) = &plan.report {
        write_whole(destination, plan.output.force, &json(&report)?)?;
    }
    last.notes.extend(rights);
    let extras = Extras {
        output: &plan.output,
        split: plan.split,
        rotated: files.rotation.as_ref().map(Rotation::kept),
        top: totals.hottest_functions(),
        waiting: last.waiting.take(),
        busy_children: std::mem::take(&mut last.busy_children),
        gil: plan.gil,
        nobody: last.nobody.then(|| plan.filter.options()),
        program: account::program(),
        colours: plan.colours,
        width: terminal_size::terminal_size_of(std::io::stderr()).map(|(width, _)| usize::from(width.0)),
    };
    let nobody = extras.nobody.clone().filter(|wanted| !wanted.is_empty());
    show_refused(&report, &last.notes, plan);
    show_unwind_memory(&report);
    // Standard error may be closed: the profile is written all the same.
    let _closed = account::write(&report, &extras, &mut std::io::stderr());
    // If the recording ends before its command, the command's own status is still what counts.
    let status = match (status, &mut command) {
        (None, Some(command)) => Some(command.wait()?),
        (status, _) => status,
    };
    if let Some(wanted) = nobody {
        return Err(Failure::new(format!("nothing was recorded: no CPython fits {wanted}")).into());
    }
    // Tests must not overlook it; users have their profile, and have been told.
    if cfg!(debug_assertions) && report.inconsistent > 0 {
        return Err(Failure::new(
            "independent counts of the same samples differ, which a debug build takes for an error",
        )
        .into());
    }
    Ok(Outcome { command: status })
}

pub(super) fn json(report: &Report) -> anyhow::Result<Vec<u8>> {
    let mut text = Vec::new();
    crate::sinks::text::write_json(&mut text, report)?;
    text.push(b'\n');
    Ok(text)
}

/// The files of a recording: those of the segment that is being written, and what becomes of the ones before.
struct Files {
    current: Option<Outputs>,
    rotation: Option<Rotation>,
}

impl Files {
    fn new(plan: &Plan) -> anyhow::Result<Self> {
        Ok(Self {
            current: None,
            rotation: plan.rotate.as_ref().map(|rotate| Rotation::begin(plan, rotate)).transpose()?,
        })
    }

    /// Opens the files of the next segment. Returns those of the previous one.
    fn open(
        &mut self,
        plan: &Plan,
        profile: &crate::profile::Profile,
    ) -> anyhow::Result<Box<dyn crate::sinks::Sink + Send>> {
        let (outputs, sink) = match &mut self.rotation {
            Some(rotation) => {
                let opened = Outputs::open(&rotation.next(plan), profile)?;
                // A file that cannot be created takes no number: the segment that goes on keeps it.
                rotation.opened();
                opened
            }
            None => Outputs::open(plan, profile)?,
        };
        if let (Some(ended), Some(rotation)) = (self.current.replace(outputs), &mut self.rotation) {
            rotation.ended = Some(ended);
        }
        Ok(sink)
    }

    /// Ends a segment that is followed by others.
    fn cut(&mut self, segment: &Segment) -> anyhow::Result<()> {
        let Some(rotation) = &mut self.rotation else { return Ok(()) };
        let Some(ended) = rotation.ended.take() else { return Ok(()) };
        rotation.finish(ended, segment)
    }

    /// Ends the last segment.
    fn close(&mut self, plan: &Plan, last: &mut Segment) -> anyhow::Result<()> {
        let Some(outputs) = self.current.take() else { return Ok(()) };
        if let Some(error) = last.sink_error.take() {
            return Err(kept(outputs.keep(), error).into());
        }
        match &mut self.rotation {
            Some(rotation) => rotation.finish(outputs, last),
            None => Ok(outputs.commit(plan.output.format)?),
        }
    }
}

/// An output that failed, and where the part that was written is.
fn kept(paths: Vec<PathBuf>, error: std::io::Error) -> Failure {
    let kept: Vec<_> = paths.iter().map(|path| path.display().to_string()).collect();
    let hint = if kept.is_empty() {
        "nothing was kept".to_owned()
    } else {
        let readable = if kept[0].ends_with(".tach.part") { ": `tachyon-bpf recover` makes it readable" } else { "" };
        format!("what was written is in {}{readable}", kept.join(", "))
    };
    Failure::new("cannot write the profile").with_source(error).with_hint(hint)
}

/// A disk that is full from the start gets the same message as one that fills up later.
fn cannot_write(error: anyhow::Error) -> anyhow::Error {
    match error.downcast::<std::io::Error>() {
        Ok(source) => Failure::new("cannot write the profile").with_source(source).into(),
        Err(other) => other,
    }
}

/// Reports which processes are missing and what works less well than it should. Standard error may be closed: the
/// profile is written all the same.
fn show_refused(report: &Report, notes: &[String], plan: &Plan) {
    let mut out = std::io::stderr();
    // For a whole host the report has all of them; a few show what the matter is.
    let most = if matches!(plan.targets, Targets::AllPython) { 5 } else { usize::MAX };
    for line in report.refused.iter().take(most).chain(notes) {
        let _closed = writeln!(out, "tachyon-bpf: {}", escape(line));
    }
    if let Some(more @ 1..) = report.refused.len().checked_sub(most) {
        let _closed =
            writeln!(out, "tachyon-bpf: and {more} more processes could not be profiled: --report lists them");
    }
}

/// Names the option that gives unwind tables more room, if there was too little.
fn show_unwind_memory(report: &Report) {
    if let Some(wanted) = report.native.as_ref().and_then(|native| native.table_bytes_wanted) {
        let _closed = writeln!(std::io::stderr(), "hint: --unwind-memory {}MiB", wanted.div_ceil(1 << 20));
    }
}

/// Watches over a recording while it runs.
struct Watch<'a> {
    plan: &'a Plan,
    running: &'a mut Running,
    files: &'a mut Files,
    totals: &'a mut Totals,
}

impl Watch<'_> {
    /// Waits until the recording is to end, and cuts it when a segment's time is over. Returns how the command ended, if it
    /// did.
    async fn until_the_end(
        &mut self,
        signals: &mut Signals,
        mut command: Option<&mut PreparedCommand>,
    ) -> anyhow::Result<Option<CommandStatus>> {
        let started = Instant::now();
        let progress = Progress::new(self.plan.progress, self.plan.colours, self.plan.duration);
        let news = self.running.news().try_clone_to_owned()?;
        // SAFETY: an owned descriptor is always the same one, and stays open until its owner is dropped.
        let news = unsafe { AsyncFd::register_with_interest(news, Interest::READABLE) }?;
        let mut turn = self.takes_turns().then(|| tokio::time::interval(TURN));
        let mut segment = self.plan.rotate.as_ref().map(|rotate| {
            let length = rotate.length;
            let mut interval = tokio::time::interval_at((started + length).into(), length);
            // A late cut must not lead to a short segment after it.
            interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Skip);
            interval
        });
        let end = async {
            match self.plan.duration {
                Some(duration) => tokio::time::sleep_until((started + duration).into()).await,
                None => std::future::pending().await,
            }
        };
        tokio::pin!(end);
        let ended = loop {
            tokio::select! {
                biased;
                () = &mut end => break None,
                told = signals.next() => match told {
                    End::ChildChanged => {}
                    End::Asked(None) => break None,
                    End::Asked(Some(signal)) => {
                        if let Some(command) = command.as_deref() {
                            // It may have ended already.
                            let _gone = command.forward(signal);
                        }
                        break None;
                    }
                },
                () = due(&mut segment) => self.cut(&progress),
                () = due(&mut turn) => if self.turn(&progress)? { break None },
                news = news.readable() => {
                    // Reading its news is what makes it unreadable again.
                    news?.clear_ready();
                    if self.turn(&progress)? {
                        break None;
                    }
                }
            }
            if let Some(command) = &mut command
                && let Some(status) = command.try_wait()?
            {
                break Some(status);
            }
        };
        progress.clear();
        Ok(ended)
    }

    /// Whether there is periodic work: everything else wakes this thread when it happens.
    fn takes_turns(&self) -> bool {
        self.plan.progress || self.plan.output.destination == Destination::Stdout
    }

    /// Shows how it is doing; returns whether it is to end.
    fn turn(&mut self, progress: &Progress) -> anyhow::Result<bool> {
        let status = self.running.status()?;
        for told in &status.told {
            progress.print(&format!("tachyon-bpf: {told}"));
        }
        progress.show(&Numbers {
            elapsed: status.elapsed,
            samples: status.samples,
            processes: status.processes,
            lost: status.lost,
        });
        let unread = self.plan.output.destination == Destination::Stdout && is_unread();
        if unread {
            progress.print("tachyon-bpf: nobody reads standard output any more: the recording ends");
        }
        // A segment whose file failed is over; the next one may have room again.
        let over = status.over.is_some_and(|over| over != Over::SinkFailed || self.plan.rotate.is_none());
        Ok(over || unread)
    }

    /// Ends a segment. If the next file cannot be created, or the last one cannot be finished, reports that and goes on.
    fn cut(&mut self, progress: &Progress) {
        let (plan, files) = (self.plan, &mut *self.files);
        let segment = match self.running.cut_into(|profile| files.open(plan, profile)) {
            Ok(segment) => segment,
            Err(error) => {
                return progress.print(&format!("tachyon-bpf: the segment goes on: {}", escape(&format!("{error:#}"))));
            }
        };
        self.totals.add(&segment);
        if let Err(error) = self.files.cut(&segment) {
            progress.print(&format!("tachyon-bpf: {}", escape(&format!("{error:#}"))));
        }
    }
}

/// Waits until something is due; for ever if nothing is.
async fn due(interval: &mut Option<tokio::time::Interval>) {
    match interval {
        Some(interval) => {
            interval.tick().await;
        }
        None => std::future::pending().await,
    }
}
