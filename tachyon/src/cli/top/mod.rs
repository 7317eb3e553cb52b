//! `top`: a live view of a recording, and `--once` for scripts.
//!
//! `driver` runs the recording in a thread of its own and cuts it into segments; `seen` takes them in; `model` is the
//! state of the view and what keys (`keys`) do to it; `view` draws it; `terminal` restores the terminal whatever
//! happens. `once` needs none of these but the recording.

mod driver;
mod keys;
mod model;
mod once;
mod seen;
mod terminal;
#[cfg(test)]
mod testing;
mod view;

use self::driver::{Driver, Message};
use self::model::{Effect, Model, Sampled, Title};
use self::terminal::Screen;
use super::args::TopArgs;
use super::command::{CommandOutput, CommandStatus, PreparedCommand};
use super::escape::escape;
use super::failure::Failure;
use super::plan::{Plan, Surroundings, Targets, default_path};
use super::record::signals::{End, Signals};
use crate::kernel::drop_privileges;
use crate::machine::{preflight, raise_open_files};
use crate::recording::Opened;
use crossterm::event::Event;
use std::io::{IsTerminal as _, Write};
use std::path::Path;
use std::time::{Duration, SystemTime};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

/// How often to check on the command, and whether something has gone wrong.
const TURN: Duration = Duration::from_millis(250);

/// Shows a live view, or with `--once` writes to `out`. Returns the exit status.
///
/// # Errors
/// When nothing can be recorded, or there is no terminal to show it on.
pub fn run(args: &TopArgs, out: &mut dyn Write) -> anyhow::Result<u8> {
    let surroundings = Surroundings::current();
    if !args.once {
        check_terminal(&surroundings)?;
    }
    let plan = Plan::new(args.recording(), &surroundings)?;
    let output = if args.once { CommandOutput::StandardError } else { CommandOutput::Nowhere };
    // Before anything else: the command must inherit neither signal handlers nor threads.
    let mut command = match &plan.targets {
        Targets::Command { argv, as_root } => Some(PreparedCommand::prepare(argv, *as_root, output)?),
        Targets::Pids(_) | Targets::AllPython => None,
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut signals = runtime.block_on(async { Signals::take() })?;
    raise_open_files();
    preflight()?;
    let opened = plan.request(command.as_ref().map(PreparedCommand::pid)).open()?;
    if args.once {
        let status = once::run(args, opened, &mut signals, &runtime, command.as_mut(), out)?;
        return Ok(status.map_or(0, CommandStatus::exit_status));
    }
    let (mut driver, messages) = start(args, opened, command.as_mut())?;
    let sampled = Sampled { native: plan.native.is_some(), tasks: args.awaiting };
    let model = Model::new(title(&plan), args.delay, args.window, sampled);
    let (input, stop_input) = terminal::read_input()?;
    let screen = Screen::enter(surroundings.no_color)?;
    let mut top = Top { model, screen, messages, input, command, ended: None };
    let watched = runtime.block_on(top.watch(&mut signals));
    stop_input();
    let Top { screen, command, ended, .. } = top;
    drop(screen);
    driver.stop();
    watched?;
    if let (Some(mut command), None) = (command, ended) {
        super::record::signals::abort_on_interrupt();
        end(&mut command)?;
        return Ok(0);
    }
    Ok(ended.map_or(0, CommandStatus::exit_status))
}

/// Checks for a terminal that a view can be drawn on.
fn check_terminal(surroundings: &Surroundings) -> Result<(), Failure> {
    let dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb" || term.is_empty());
    if surroundings.stdout_is_terminal && !dumb && std::io::stdin().is_terminal() {
        return Ok(());
    }
    let what = if surroundings.stdout_is_terminal && dumb { "TERM is dumb" } else { "this is no terminal" };
    Err(Failure::usage(format!("{what}: there is nowhere to show a live view"))
        .with_hint("--once prints one look, --once --json is for scripts"))
}

/// Starts sampling, then the command.
fn start(
    args: &TopArgs,
    opened: Opened,
    command: Option<&mut PreparedCommand>,
) -> anyhow::Result<(Driver, UnboundedReceiver<Message>)> {
    let (sender, messages) = unbounded_channel();
    let (running, sink) = driver::begin(opened)?;
    if let Some(command) = command {
        command.start()?;
    }
    // If the kernel refuses, it works with more rights than it needs.
    let _refused = drop_privileges();
    Ok((Driver::start(running, sink, args.delay, sender)?, messages))
}

/// Ends a command that the profiler started. It may have ended already.
fn end(command: &mut PreparedCommand) -> anyhow::Result<CommandStatus> {
    let _gone = command.forward(nix::sys::signal::Signal::SIGTERM);
    Ok(command.wait()?)
}

/// What is watched, in the first line of the screen.
fn title(plan: &Plan) -> Title {
    let what = match &plan.targets {
        Targets::Pids(pids) => {
            let name = |pid| {
                let comm = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
                format!("{} ({pid})", escape(comm.trim_end()))
            };
            pids.iter().map(name).collect::<Vec<_>>().join(", ")
        }
        Targets::AllPython if plan.filter.is_empty() => "all Python processes".to_owned(),
        Targets::AllPython => plan.filter.options(),
        Targets::Command { argv, .. } => {
            let words: Vec<_> = argv.iter().map(|word| word.to_string_lossy()).collect();
            escape(&words.join(" ")).into_owned()
        }
    };
    Title { what, rate_hz: plan.rate_hz }
}

/// The view while it is shown.
struct Top {
    model: Model,
    screen: Screen,
    messages: UnboundedReceiver<Message>,
    input: UnboundedReceiver<std::io::Result<Event>>,
    command: Option<PreparedCommand>,
    /// How the command ended, if it ended by itself.
    ended: Option<CommandStatus>,
}

impl Top {
    /// Shows the view until the user ends it.
    async fn watch(&mut self, signals: &mut Signals) -> anyhow::Result<()> {
        let mut turn = tokio::time::interval(TURN);
        let mut recording = true;
        self.screen.draw(&self.model)?;
        loop {
            let changed = tokio::select! {
                biased;
                told = signals.next() => match told {
                    End::ChildChanged => self.look_at_command()?,
                    End::Asked(_) => return Ok(()),
                },
                input = self.input.recv() => match input {
                    Some(input) => {
                        if self.input(&input?)? {
                            return Ok(());
                        }
                        true
                    }
                    None => return Ok(()),
                },
                message = self.messages.recv(), if recording => match message {
                    Some(message) => self.message(message)?,
                    // It has said why.
                    None => {
                        recording = false;
                        false
                    }
                },
                _ = turn.tick() => self.look_at_command()?,
            };
            terminal::check_threads()?;
            if changed {
                self.screen.draw(&self.model)?;
            }
        }
    }

    fn look_at_command(&mut self) -> anyhow::Result<bool> {
        let Some(command) = self.command.as_mut().filter(|_| self.ended.is_none()) else { return Ok(false) };
        self.ended = command.try_wait()?;
        let Some(status) = self.ended else { return Ok(false) };
        self.model.over(match status {
            CommandStatus::Exited(status) => format!("the command has ended with status {status}"),
            CommandStatus::Signaled(signal) => format!("the command was ended by signal {signal}"),
        });
        Ok(true)
    }

    /// Handles a message. Returns whether there is anything new to show.
    fn message(&mut self, message: Message) -> anyhow::Result<bool> {
        match message {
            Message::Segment(taken) => {
                self.model.add(&taken);
                Ok(true)
            }
            Message::Told(text) => {
                self.model.say(&escape(&text));
                Ok(true)
            }
            Message::Over(text) => {
                self.model.over(text);
                Ok(true)
            }
            Message::Failed(error) => Err(error),
        }
    }

    /// Handles input. Returns whether the view is to end.
    fn input(&mut self, event: &Event) -> anyhow::Result<bool> {
        let Event::Key(key) = event else { return Ok(false) };
        let Some(action) = keys::action(key, self.model.mode()) else { return Ok(false) };
        match self.model.apply(action) {
            Effect::None => {}
            Effect::Quit => return Ok(true),
            Effect::Redraw => self.screen.clear()?,
            Effect::Suspend => self.screen.suspend()?,
            Effect::Write => {
                let path = default_path(".tach", SystemTime::now());
                let said = match self.model.seen().write(&path) {
                    Ok(samples) => written(&path, samples),
                    Err(error) => format!("cannot write: {error:#}"),
                };
                self.model.say(&escape(&said));
            }
        }
        Ok(false)
    }
}

fn written(path: &Path, samples: u64) -> String {
    format!("wrote {}: {} samples", path.display(), indicatif::HumanCount(samples))
}
