//! `ship`: ships segments from the spool to the backends that people run.
//!
//! It runs as an ordinary user without capabilities and only shares files with the agent. [`config`] says where it ships to; each
//! [`backend`] has a worker ([`shipper`]) with a `progress` of its own, so that one that is down does not hold back the others; the `spool`
//! itself is the queue, which workers share ([`Shared`]). `server` answers `/metrics` and `/healthz`.

pub mod backend;
mod batches;
pub mod clock;
pub mod config;
mod dry_run;
mod grpc;
mod health;
mod metrics;
pub mod otlp;
mod pprof;
mod progress;
pub mod pyroscope;
mod server;
mod shared;
pub mod shipper;
mod spool;

pub use crate::args::ShipArgs;
pub use shared::Shared;

use crate::failure::Usage;
use crate::net::secret::Secrets;
use anyhow::{Context as _, bail};
use backend::Backend;
use clock::Clock;
use config::Config;
use progress::Progress;
use sd_notify::NotifyState;
use shared::tell_standard_error;
use shipper::{Summary, Worker};
use spool::Spool;
use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tachyon::advice::Refusal;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};

/// Held by the one shipper of a state.
const LOCK: &str = ".lock";
/// Time between two looks at the agent.
const AGENT_LOOK: Duration = Duration::from_secs(10);
/// How long pushes under way may take when the shipper is to end.
const LAST_PUSH: Duration = Duration::from_secs(15);

/// Runs the command.
///
/// # Errors
/// When the configuration makes no sense, the state cannot be written, or with `--once` something was not shipped.
pub fn run(args: &ShipArgs, out: &mut dyn Write) -> anyhow::Result<()> {
    let path = args.config.clone().unwrap_or_else(|| config::DEFAULT_PATH.into());
    let config = Config::read(&path)?;
    let secrets = Secrets::of_this_service();
    let backends = backend::of_config(&config, &secrets)
        .map_err(|error| Usage::new(format!("{}: {error:#}", path.display()), "deploy/fleet.toml has all keys"))?;
    let state = config.state();
    if args.dry_run {
        let mut spool = spool(&config, &state, true)?;
        return dry_run::run(&mut spool, &state, &backends, Clock::new().unix(), out);
    }
    let _lock = take(&state)?;
    let shared = shared(&config, &state, Clock::new(), Box::new(tell_standard_error))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot begin")?;
    if args.once {
        let summaries = runtime.block_on(once(&shared, backends, &config))?;
        return finish(&summaries, out);
    }
    let outcome = runtime.block_on(forever(&shared, &path, config, backends));
    // Threads that still read a file end with the process.
    runtime.shutdown_background();
    outcome
}

/// The workers' shared state, for a configuration.
///
/// # Errors
/// When what is known about the spool cannot be read.
pub fn shared(
    config: &Config,
    state: &Path,
    clock: Clock,
    told: Box<dyn Fn(&str) + Send + Sync>,
) -> anyhow::Result<Arc<Shared>> {
    Ok(Arc::new(Shared::new(spool(config, state, false)?, state, clock, told)))
}

fn spool(config: &Config, state: &Path, read_only: bool) -> anyhow::Result<Spool> {
    Spool::new(&config.spool.path, state, config.spool.largest, config.options(), read_only)
}

/// Creates the state directory, and locks it for this process.
///
/// # Errors
/// When it cannot be made, or another shipper has it.
pub fn take(state: &Path) -> anyhow::Result<File> {
    let shown = state.display();
    let cannot = |error: io::Error| {
        let hint =
            "[state] path, or systemd's StateDirectory=, says where progress is kept; the shipper's user writes there";
        Refusal::new(format!("cannot keep progress in {shown}")).with_source(error).with_hint(hint)
    };
    fs::DirBuilder::new().mode(0o700).recursive(true).create(state).map_err(cannot)?;
    let lock = File::create(state.join(LOCK)).map_err(cannot)?;
    match lock.try_lock() {
        Ok(()) => Ok(lock),
        Err(TryLockError::WouldBlock) => {
            let hint = "end it first, or give this one another [state] path";
            Err(Refusal::new(format!("another shipper keeps its progress in {shown}")).with_hint(hint).into())
        }
        Err(TryLockError::Error(error)) => Err(cannot(error).into()),
    }
}

/// Ships everything there is, once.
///
/// # Errors
/// When progress cannot be written.
pub async fn once(shared: &Arc<Shared>, backends: Vec<Backend>, config: &Config) -> anyhow::Result<Vec<Summary>> {
    let (_go_on, stop) = watch::channel(false);
    let mut workers = JoinSet::new();
    for backend in backends {
        let worker = Worker::new(shared, backend, true, stop.clone())?;
        workers.spawn(worker.run(config.spool.look));
    }
    let mut summaries = workers.join_all().await.into_iter().collect::<anyhow::Result<Vec<Summary>>>()?;
    summaries.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(summaries)
}

/// Reports the outcome; it is an error if not everything was shipped.
fn finish(summaries: &[Summary], out: &mut dyn Write) -> anyhow::Result<()> {
    let mut left = 0;
    for summary in summaries {
        let Summary { name, segments, samples, refused, pending, not_due, doubts, error } = summary;
        let mut line = format!("{name}: {segments} segments with {samples} samples");
        for (reason, samples) in refused {
            line += &format!("; {samples} samples not taken: {}", reason.name());
        }
        if *not_due > 0 {
            line += &format!("; {not_due} segments wait for their batch");
        }
        if *doubts > 0 {
            line += &format!("; {doubts} pushes may have arrived twice");
        }
        if let Some(error) = error {
            line += &format!("; {pending} segments left: {error}");
        }
        // Standard output may be closed: it is done all the same.
        let _closed = writeln!(out, "{}", tachyon::sinks::text::escape_controls(&line));
        left += usize::from(error.is_some() || !refused.is_empty());
    }
    if left > 0 {
        let errors: Vec<_> = summaries.iter().filter_map(|summary| summary.error.as_ref()).collect();
        let hint = match errors.iter().find_map(|error| error.hint.clone()) {
            Some(hint) => hint,
            None if errors.is_empty() => {
                "what a server refuses is not tried again; docs/fleet.md has the reasons".into()
            }
            None => "what is left stays in the spool, and is tried again the next time".into(),
        };
        let error = Refusal::new(format!("{left} of {} backends did not get everything", summaries.len()));
        bail!(error.with_hint(hint));
    }
    Ok(())
}

/// Runs until SIGTERM or SIGINT; SIGHUP reloads the configuration.
async fn forever(
    shared: &Arc<Shared>,
    path: &Path,
    mut config: Config,
    mut backends: Vec<Backend>,
) -> anyhow::Result<()> {
    let wait_for = |kind| signal(kind).context("cannot wait for signals");
    let mut terminate = wait_for(SignalKind::terminate())?;
    let mut interrupt = wait_for(SignalKind::interrupt())?;
    let mut hang_up = wait_for(SignalKind::hangup())?;
    tokio::spawn(look_after(Arc::clone(shared)));
    let mut server = serve(shared, listen(&config).await?);
    notify(&[NotifyState::Ready]);
    loop {
        let names: Vec<String> = backends.iter().map(|backend| backend.name.clone()).collect();
        shared.tell(&format!("ships {} to {}", config.spool.path.display(), names.join(", ")));
        let (stop, stopped) = watch::channel(false);
        let mut workers = JoinSet::new();
        for backend in backends {
            workers.spawn(Worker::new(shared, backend, false, stopped.clone())?.run(config.spool.look));
        }
        let reloads = loop {
            tokio::select! {
                _ = terminate.recv() => break None,
                _ = interrupt.recv() => break None,
                _ = hang_up.recv() => {
                    notify(&[NotifyState::Reloading, NotifyState::monotonic_usec_now().unwrap_or(NotifyState::Reloading)]);
                    match renewed(path, &config).await {
                        Ok(renewed) => break Some(renewed),
                        Err(error) => shared.tell(&format!("nothing is changed: {error:#}")),
                    }
                    notify(&[NotifyState::Ready]);
                }
            }
        };
        // Pushes under way are completed.
        let _none_left = stop.send(true);
        if reloads.is_none() {
            notify(&[NotifyState::Stopping]);
        }
        let ended = async { while workers.join_next().await.is_some() {} };
        if tokio::time::timeout(LAST_PUSH, ended).await.is_err() {
            shared.tell("a push does not end: whether it arrives is not known");
            workers.shutdown().await;
        }
        let Some(renewed) = reloads else { return Ok(()) };
        (config, backends) = (renewed.config, renewed.backends);
        if let Some(listener) = renewed.listener {
            server.abort();
            server = serve(shared, listener);
        }
        shared.renew(config.spool.largest, config.options());
        shared.metrics.reloads.inc();
        notify(&[NotifyState::Ready]);
    }
}

/// What a reload replaces.
struct Renewed {
    config: Config,
    backends: Vec<Backend>,
    /// Set if another address is wanted; an inner `None` means not to listen at all.
    listener: Option<Option<TcpListener>>,
}

/// Reloads everything, and does everything that may fail before ending anything.
async fn renewed(path: &Path, old: &Config) -> anyhow::Result<Renewed> {
    let config = Config::read(path)?;
    if config.spool.path != old.spool.path || config.state() != old.state() {
        bail!("another spool.path or state.path needs a restart");
    }
    let backends = backend::of_config(&config, &Secrets::of_this_service())?;
    for backend in &backends {
        Progress::open(&config.state(), &backend.name)?;
    }
    let listener = if config.http == old.http { None } else { Some(listen(&config).await?) };
    Ok(Renewed { config, backends, listener })
}

async fn listen(config: &Config) -> anyhow::Result<Option<TcpListener>> {
    let Some(address) = config.http.listen else { return Ok(None) };
    let listener = TcpListener::bind(address).await.map_err(|error| {
        let hint = "[http] listen says another address of this host, or off";
        Refusal::new(format!("cannot listen on {address}")).with_source(error).with_hint(hint)
    })?;
    Ok(Some(listener))
}

fn serve(shared: &Arc<Shared>, listener: Option<TcpListener>) -> JoinHandle<()> {
    let shared = Arc::clone(shared);
    tokio::spawn(async move {
        if let Some(listener) = listener {
            server::serve(listener, shared).await;
        }
    })
}

/// Checks on the agent, and tells systemd that all is well here.
async fn look_after(shared: Arc<Shared>) {
    let mut usec = 0;
    let is_watched = sd_notify::watchdog_enabled(false, &mut usec);
    let often = if is_watched { Duration::from_micros(usec / 2).min(AGENT_LOOK) } else { AGENT_LOOK };
    let mut told = Vec::new();
    loop {
        let own = Arc::clone(&shared);
        let _looked = tokio::task::spawn_blocking(move || own.look_after()).await;
        let trouble = shared.trouble();
        if trouble != told {
            trouble.iter().for_each(|line| shared.tell(&format!("not healthy: {line}")));
            told = trouble;
        }
        let status = if told.is_empty() { "healthy".to_owned() } else { told.join("; ") };
        notify(&[NotifyState::Status(&status), NotifyState::Watchdog]);
        tokio::time::sleep(often).await;
    }
}

/// Tells systemd, if it listens.
fn notify(states: &[NotifyState<'_>]) {
    let _nobody = sd_notify::notify(false, states);
}
