//! `agent`: a recording of the whole host that goes on for ever, in segments that other programs ship.
//!
//! Nothing here uses the network. The agent reports through files: segments, `state.json`, metrics; and, under systemd,
//! that it is ready and alive.

mod config;
mod labels;
mod recorder;
mod spool;
mod state;

use self::config::Config;
use self::recorder::Recorder;
use self::spool::Spool;
use self::state::State;
use super::args::AgentArgs;
use super::escape::escape;
use super::table::{Column, Style, Table};
use crate::machine::{preflight, raise_open_files};
use crate::recording::Over;
use indicatif::HumanCount;
use nix::time::{ClockId, clock_gettime};
use sd_notify::NotifyState;
use std::collections::BTreeSet;
use std::io::Write;
use std::time::{Duration, Instant};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::{Interval, MissedTickBehavior, interval, interval_at};

/// How often the agent checks on the recorder and tells systemd that it is alive.
const TURN: Duration = Duration::from_secs(1);
/// Delay before the next try after a recorder could not be restarted.
const RETRY: Duration = Duration::from_secs(10);

/// Records until it is told to end.
///
/// # Errors
/// What is wrong with the configuration, the spool or the machine, before anything is written.
pub fn run(args: &AgentArgs, out: &mut dyn Write) -> anyhow::Result<()> {
    let config = load(args)?;
    if args.check {
        Spool::check_free(&config.spool)?;
        return show(&config, out);
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(Agent::until_the_end(args, config))
}

fn load(args: &AgentArgs) -> anyhow::Result<Config> {
    // Names that are not text cannot be the agent's.
    let environment =
        std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    Ok(Config::load(args.config.as_deref(), environment, &args.settings)?)
}

/// The configuration as it would be used.
fn show(config: &Config, out: &mut dyn Write) -> anyhow::Result<()> {
    let mut table = Table::new(vec![("KEY", Column::Text), ("VALUE", Column::Text), ("FROM", Column::Text)]);
    for (name, value, source) in config.shown() {
        table.push(vec![name.to_owned().into(), value.into(), source.to_owned().into()]);
    }
    let rules = config.labels.rules.len();
    table.push(vec![
        "labels.rule".to_owned().into(),
        HumanCount(rules as u64).to_string().into(),
        String::new().into(),
    ]);
    table.write(Style::plain(), out)?;
    writeln!(out, "The configuration is good, and the spool can be used. Nothing was written.")?;
    out.flush()?;
    Ok(())
}

/// Prints a message to standard error, which may be closed.
fn tell(text: &str) {
    let _closed = writeln!(std::io::stderr(), "tachyon-bpf: {}", escape(text));
}

/// Notifies systemd, if it asked to be notified.
fn notify(states: &[NotifyState<'_>]) {
    // Without systemd there is nothing to notify.
    let _nobody = sd_notify::notify(false, states);
}

/// A running agent.
struct Agent<'a> {
    args: &'a AgentArgs,
    config: Config,
    spool: Spool,
    state: State,
    /// `None` while none can be started.
    recorder: Option<Recorder>,
    retry_at: Instant,
    due: Interval,
    /// Troubles reported since all was last well: a full disk is not reported every minute.
    troubles: BTreeSet<String>,
}

/// The signals that mean something to an agent.
struct Signals {
    interrupt: Signal,
    terminate: Signal,
    hangup: Signal,
    /// Those that would otherwise end it with its files half done.
    others: [Signal; 4],
}

enum Told {
    End,
    Reload,
}

impl Signals {
    fn take() -> std::io::Result<Self> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            hangup: signal(SignalKind::hangup())?,
            others: [
                signal(SignalKind::quit())?,
                signal(SignalKind::user_defined1())?,
                signal(SignalKind::user_defined2())?,
                signal(SignalKind::alarm())?,
            ],
        })
    }

    async fn next(&mut self) -> Told {
        let [quit, user1, user2, alarm] = &mut self.others;
        tokio::select! {
            _ = self.interrupt.recv() => Told::End,
            _ = self.terminate.recv() => Told::End,
            _ = quit.recv() => Told::End,
            _ = user1.recv() => Told::End,
            _ = user2.recv() => Told::End,
            _ = alarm.recv() => Told::End,
            _ = self.hangup.recv() => Told::Reload,
        }
    }
}

impl<'a> Agent<'a> {
    async fn until_the_end(args: &'a AgentArgs, config: Config) -> anyhow::Result<()> {
        // Before the first file: no signal may leave a file behind.
        let mut signals = Signals::take()?;
        // Before anything is loaded: an unusable spool is the most common mistake.
        Spool::check(&config.spool)?;
        raise_open_files();
        preflight()?;
        let spool = Spool::open(&config.spool)?;
        for told in spool.recover()? {
            tell(&told);
        }
        let recorder = Recorder::start(&config, &spool)?;
        let due = segment_ends(config.length);
        let mut agent = Self {
            args,
            config,
            spool,
            state: State::new(),
            recorder: Some(recorder),
            retry_at: Instant::now(),
            due,
            troubles: BTreeSet::new(),
        };
        let written = agent.state.write(&agent.spool);
        agent.report(written);
        notify(&[NotifyState::Ready]);
        tell(&format!(
            "records this host at {} Hz in segments of {} to {}",
            agent.config.record.frequency,
            humantime::format_duration(agent.config.length),
            agent.spool.directory().display()
        ));
        agent.work(&mut signals).await;
        notify(&[NotifyState::Stopping]);
        agent.finish();
        agent.state.write(&agent.spool)
    }

    async fn work(&mut self, signals: &mut Signals) {
        let mut turn = interval(TURN);
        turn.set_missed_tick_behavior(MissedTickBehavior::Skip);
        loop {
            tokio::select! {
                biased;
                told = signals.next() => match told {
                    Told::End => return,
                    Told::Reload => self.reload(),
                },
                _ = self.due.tick() => self.cut(),
                _ = turn.tick() => self.turn(),
            }
        }
    }

    /// Ends a segment. If it cannot be written, sampling goes on.
    fn cut(&mut self) {
        let cut = self.recorder.as_mut().map_or(Ok(()), |recorder| recorder.cut(&mut self.state));
        let written = self.state.write(&self.spool);
        if cut.is_ok() && written.is_ok() && !self.troubles.is_empty() {
            self.troubles.clear();
            tell("segments are written again");
        }
        self.report(cut);
        self.report(written);
    }

    /// Reports once what went wrong.
    fn report(&mut self, result: anyhow::Result<()>) {
        let Err(error) = result else { return };
        let text = format!("{error:#}");
        if !self.troubles.contains(&text) {
            tell(&text);
            self.troubles.insert(text);
        }
    }

    fn turn(&mut self) {
        let Some(recorder) = &mut self.recorder else {
            if Instant::now() >= self.retry_at {
                self.begin_anew("the recorder is missing");
            }
            return notify(&[NotifyState::Watchdog]);
        };
        match recorder.status() {
            Ok(status) => {
                status.told.iter().for_each(|told| tell(told));
                // A segment whose file failed is over; the next one may have room again.
                if status.over == Some(Over::NoMemory) {
                    // There is no memory for two.
                    self.finish();
                    self.begin_anew("max_memory is reached");
                }
            }
            Err(error) => self.begin_anew(&format!("the recorder fails: {error:#}")),
        }
        notify(&[NotifyState::Watchdog]);
    }

    /// Reads the configuration again. An invalid one changes nothing.
    fn reload(&mut self) {
        notify(&[NotifyState::Reloading, NotifyState::monotonic_usec_now().unwrap_or(NotifyState::Watchdog)]);
        match load(self.args) {
            Err(error) => tell(&format!("the configuration stays as it was: {error:#}")),
            Ok(config) if config.spool != self.config.spool => {
                tell("the configuration stays as it was: another spool.path needs a restart of the agent");
            }
            Ok(config) => self.change(config),
        }
        notify(&[NotifyState::Ready]);
    }

    fn change(&mut self, config: Config) {
        let before = std::mem::replace(&mut self.config, config);
        let now = &self.config;
        if now.length != before.length {
            self.due = segment_ends(now.length);
        }
        let asked = |labels: &config::Labels| (labels.variables(), labels.command_line);
        let same = now.record == before.record && asked(&now.labels) == asked(&before.labels);
        match &mut self.recorder {
            Some(recorder) if same => {
                recorder.adjust(now, &self.spool);
                tell("the configuration was read again");
            }
            _ => self.begin_anew("the configuration was read again, and says to record something else"),
        }
    }

    /// Ends the recorder, if there is one.
    fn finish(&mut self) {
        if let Some(recorder) = self.recorder.take() {
            let finished = recorder.finish(&mut self.state);
            self.report(finished);
        }
    }

    /// Another recorder takes over: it starts sampling before the old one ends, so that nothing is missed. What both see in
    /// between, some milliseconds, is in two segments.
    fn begin_anew(&mut self, why: &str) {
        let new = Recorder::start(&self.config, &self.spool);
        self.finish();
        self.state.restarts += 1;
        match new {
            Ok(new) => {
                tell(&format!("{why}: the recorder begins anew"));
                self.recorder = Some(new);
            }
            Err(error) => {
                tell(&format!("{why}: no other recorder can be had, tried again in 10 s: {error:#}"));
                self.retry_at = Instant::now() + RETRY;
            }
        }
        let written = self.state.write(&self.spool);
        self.report(written);
    }
}

/// The moments at which segments end: multiples of their length on the monotonic clock, so that those of several agents on one
/// host end together.
fn segment_ends(length: Duration) -> Interval {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(Duration::ZERO, Duration::from);
    let into = Duration::from_nanos(u64::try_from(now.as_nanos() % length.as_nanos().max(1)).unwrap_or(0));
    let mut ends = interval_at((Instant::now() + (length - into)).into(), length);
    // A late cut must not lead to a short segment after it.
    ends.set_missed_tick_behavior(MissedTickBehavior::Skip);
    ends
}
