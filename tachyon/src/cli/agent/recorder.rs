//! The recorder of an agent: one that is cut into segments, each a file of the spool.

use super::config::Config;
use super::spool::{Spool, share};
use super::state::State;
use crate::cli::output::{Destination, OutputPlan};
use crate::cli::plan::{Keep, Plan, Rotate, Targets};
use crate::cli::record::files::Outputs;
use crate::cli::record::rotation::Rotation;
use crate::merge::Keep as KeepFrames;
use crate::profile::Profile;
use crate::recording::{Clock, NativePlan, Running, Segment, Status, Waits};
use crate::sinks::{Format, Sink};
use std::time::Duration;

/// Bytes for unwind tables, as for a recording by hand; `max_memory` limits them further.
const UNWIND_MEMORY: u32 = 64 << 20;

/// A running recorder.
pub struct Recorder {
    plan: Plan,
    running: Running,
    segments: Segments,
}

/// Files of segments.
struct Segments {
    rotation: Rotation,
    current: Option<Outputs>,
    ended: Option<Outputs>,
    labels: super::config::Labels,
    host: String,
}

impl Recorder {
    /// Loads the kernel side and begins to sample.
    ///
    /// # Errors
    /// The errors of a recording by hand.
    pub fn start(config: &Config, spool: &Spool) -> anyhow::Result<Self> {
        let plan = plan(config, spool);
        let mut request = plan.request(None);
        request.variables = Some(config.labels.variables());
        request.arguments = config.labels.command_line;
        let rotation = Rotation::begin(&plan, plan.rotate.as_ref().expect("an agent's recording is in segments"))?;
        let host = nix::unistd::gethostname().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let mut segments = Segments { rotation, current: None, ended: None, labels: config.labels.clone(), host };
        let opened = request.open_timed(Clock::start())?;
        let running = opened.start_into(|profile| segments.open(&plan, profile))?;
        Ok(Self { plan, running, segments })
    }

    /// Changes labels and bounds, which need no new recorder.
    pub fn adjust(&mut self, config: &Config, spool: &Spool) {
        self.segments.labels = config.labels.clone();
        self.plan = plan(config, spool);
        self.segments.rotation.keep(&bounds(config));
    }

    /// How it is doing.
    ///
    /// # Errors
    /// When the counters cannot be read from the kernel.
    pub fn status(&mut self) -> anyhow::Result<Status> {
        self.running.status()
    }

    /// Ends a segment and begins the next.
    ///
    /// # Errors
    /// When the next one's file cannot be created: then the segment goes on. When the last one's could not be written:
    /// it is counted.
    pub fn cut(&mut self, state: &mut State) -> anyhow::Result<()> {
        let Self { plan, running, segments } = self;
        let segment = running.cut_into(|profile| segments.open(plan, profile))?;
        let ended = segments.ended.take();
        segments.finish(ended, segment, state)
    }

    /// Ends the last segment.
    ///
    /// # Errors
    /// As [`Recorder::cut`].
    pub fn finish(mut self, state: &mut State) -> anyhow::Result<()> {
        let last = self.running.finish()?;
        let current = self.segments.current.take();
        self.segments.finish(current, last, state)
    }
}

impl Segments {
    fn open(&mut self, plan: &Plan, profile: &Profile) -> anyhow::Result<Box<dyn Sink + Send>> {
        let (outputs, sink) = Outputs::open(&self.rotation.next(plan), profile)?;
        self.rotation.opened();
        self.ended = self.current.replace(outputs);
        Ok(sink)
    }

    /// Gives a segment's files their names, and counts it.
    fn finish(&mut self, outputs: Option<Outputs>, mut segment: Segment, state: &mut State) -> anyhow::Result<()> {
        let known = segment.profile.processes.iter().chain(&segment.unsampled);
        for (process, known) in segment.report.processes.iter_mut().zip(known) {
            process.labels = self.labels.of(&self.host, known);
        }
        let before = self.rotation.kept();
        let result = match (outputs, &segment.sink_error) {
            (Some(outputs), None) => self.rotation.finish(outputs, &segment),
            // Its unfinished file is removed: on a full disk the next one needs the room.
            (_, Some(error)) => Err(anyhow::anyhow!("the segment cannot be written: {error}")),
            (None, None) => Ok(()),
        };
        let now = self.rotation.kept();
        let written = now.finished > before.finished;
        if written {
            for extension in ["tach", "json"] {
                share(&self.rotation.path(segment.sequence, extension));
            }
        }
        state.removed_segments += now.removed - before.removed;
        state.add(&segment, written);
        result
    }
}

fn bounds(config: &Config) -> Vec<Keep> {
    vec![Keep::Bytes(config.keep_bytes), Keep::Age(config.keep_age)]
}

/// What a recording by hand with these settings would be.
fn plan(config: &Config, spool: &Spool) -> Plan {
    let record = &config.record;
    Plan {
        targets: Targets::AllPython,
        follow_children: true,
        filter: record.filter.clone(),
        duration: None,
        interval: Duration::from_secs(1) / record.frequency.max(1),
        rate_hz: f64::from(record.frequency),
        max_cpu: record.max_cpu,
        max_memory: record.max_memory,
        output: OutputPlan {
            destination: Destination::Path(spool.directory().to_owned()),
            format: Format::Tach,
            force: false,
        },
        split: false,
        rotate: Some(Rotate { length: config.length, keep: bounds(config) }),
        report: None,
        threads: false,
        source: false,
        merge_processes: false,
        gil: false,
        opcodes: false,
        native: record.native.then(|| NativePlan { keep: KeepFrames::default(), ..NativePlan::new(UNWIND_MEMORY) }),
        kernel: false,
        events: Vec::new(),
        waits: if record.wall { Waits::Too } else { Waits::Not },
        wakers: false,
        awaiting: false,
        label_env: Vec::new(),
        compression: crate::cli::args::Compression::Zstd,
        tach_layout: crate::tach::Layout::Released,
        sync: false,
        progress: false,
        colours: false,
    }
}
