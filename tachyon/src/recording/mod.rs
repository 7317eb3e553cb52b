//! The one room that knows all others: start, loop, drain, stop.
//!
//! Four threads: this one waits for the end (signals, time, targets, a failed output) and draws the progress line;
//! `follow` keeps the process table; `events::Reader` empties the ring; `samples` names, merges and writes. The end
//! has an order that the account rests on: the event is detached, so the counters stand still; the reader reads what
//! is left; the maker writes it; then the counters are compared with what was written.

mod account;
mod follow;
mod memory;
mod names;
mod native;
mod output;
mod registry;
mod samples;
mod start;
mod targets;
mod throttle;
mod waiting;

use crate::cli::command::{CommandStatus, PreparedCommand};
use crate::cli::failure::Failure;
use crate::cli::output::{Destination, is_unread, write_whole};
use crate::cli::plan::{Plan, Targets};
use crate::cli::preflight::{max_sample_rate, preflight};
use crate::cli::progress::{Progress, Snapshot};
use crate::cli::{self, account::Extras};
use crate::discover::watch::Watch;
use crate::events::Reader;
use crate::kernel::{Kernel, Options, drop_privileges, ring_bytes};
use crate::profile::{Meta, Profile};
use crate::remote::own_pid_namespace;
use crate::symbolize::KernelSymbols;
use crate::symbolize::native::NativeSymbols;
use crate::types::KtimeNs;
use anyhow::Context as _;
use follow::{Follow, Follower, Wanted, lock};
use native::{KernelFrames, Mapper, Mixer, Spaces};
use nix::sys::signal::Signal;
use output::Outputs;
use registry::Registry;
use samples::{Live, Maker, NativeSide};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use throttle::Limiter;
use tokio::signal::unix::{SignalKind, signal};

pub use native::NativePlan;
pub use targets::running_interpreters;

/// How a recording ended.
#[derive(Clone, Copy, Debug)]
pub struct Outcome {
    /// How the command of `-- CMD` ended; its exit status becomes ours.
    pub command: Option<CommandStatus>,
}

/// How often the progress line is drawn and the targets are looked at.
const TURN: Duration = Duration::from_millis(250);

/// Records as planned.
///
/// # Errors
/// When nothing could be recorded, or the profile could not be written.
pub fn run(plan: Plan) -> anyhow::Result<Outcome> {
    // Before anything else: the command must inherit neither our signal handlers nor our threads.
    let mut command = match &plan.targets {
        Targets::Command { argv, as_root } => Some(PreparedCommand::prepare(argv, *as_root, plan.command_output())?),
        Targets::Pids(_) | Targets::AllPython => None,
    };
    let mut clock = start::Clock::start();
    preflight()?;
    let machine_s = clock.lap();
    let pid_namespace = own_pid_namespace()?;

    let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let wanted_native = plan.native.map(|native| native.within(plan.max_memory.map(|limit| memory::share(limit).0)));
    let (most_ring, most_queued) = plan.max_memory.map_or((u32::MAX, usize::MAX), memory::share);
    let options = Options {
        interval: plan.interval,
        all_python: plan.targets == Targets::AllPython,
        gil_only: plan.gil,
        filtered: !plan.filter.is_empty(),
        opcodes: plan.opcodes,
        kernel_stacks: plan.kernel,
        unwind_memory: wanted_native.map(|native| native.unwind_memory),
        ring_bytes: ring_override().unwrap_or_else(|| ring_bytes(plan.rate_hz, cpus).min(most_ring)),
        pid_namespace,
    };
    let mut kernel = Kernel::open(&options)?;
    clock.lap();
    let stats = Arc::new(account::Stats::start());
    let samples = kernel.take_samples()?;
    let events = kernel.take_events()?;
    let seed = kernel.seed();
    let kernel = Arc::new(Mutex::new(kernel));
    let registry = Arc::new(Mutex::new(Registry::default()));
    let wanted =
        Wanted { all_python: options.all_python, follow_children: plan.follow_children, filter: plan.filter.clone() };
    let mut follower = Follower::new(Arc::clone(&kernel), Arc::clone(&registry), wanted);
    // Mappings and process events first, processes that exist after: one that starts between is seen twice, not never.
    let watch = (plan.follow_children || plan.native.is_some()).then(Watch::open).transpose()?;
    lock(&kernel).attach_lifecycle()?;
    let verifying = lock(&kernel).verify()?;
    let (mut mapper, mixer) = match wanted_native {
        Some(wanted) => {
            let (mapper, mixer) = native(wanted, &kernel)?;
            follower.tell(mapper.news());
            (Some(mapper), Some(mixer))
        }
        None => (None, None),
    };
    let of_few = !options.all_python;
    if let Some(mapper) = mapper.as_mut().filter(|_| of_few) {
        mapper.start()?;
    }
    targets::select(&plan.targets, command.as_ref(), &mut follower, &registry)?;
    let processes_s = clock.lap();
    let follow = Follow::start(follower, events, watch)?;
    let verified = verifying.wait()?;
    lock(&kernel).add_samplers(verified)?;
    let load_times = lock(&kernel).load_times();
    clock.lap();
    if let Some(mapper) = mapper.as_mut().filter(|_| !of_few) {
        // The tables of a whole host's processes come while samples do: beside the verifier they would hold it back.
        mapper.start()?;
    }
    let children = targets::Children::of(&plan);
    let mut profile = Profile { meta: meta(&plan), ..Profile::default() };
    profile.meta.python_version = targets::newest_version(&lock(&registry)).unwrap_or_default();
    let (output, sink) = Outputs::open(&plan, &profile).map_err(cannot_write)?;

    let (sender, batches) = mpsc::channel();
    let queued = Arc::new(AtomicUsize::new(0));
    let live = Arc::new(Live::default());
    let native = mapper.as_ref().zip(mixer).map(|(mapper, mixer)| NativeSide::new(mixer, mapper.news()));
    let mut maker = Maker::new(profile, sink, Arc::clone(&registry), seed, Arc::clone(&live), native);
    if plan.kernel {
        // Now, because reading them takes CAP_SYSLOG.
        maker.kernel = Some(kernel_frames(&registry)?);
    }
    let map_bytes = lock(&kernel).live_map_bytes();
    maker.memory = plan.max_memory.map(|limit| memory::Memory::start(limit, map_bytes)).transpose()?;
    let maker = {
        let queued = Arc::clone(&queued);
        std::thread::Builder::new().name("tachyon-samples".to_owned()).spawn(move || {
            // Where the kernel refuses, the main thread says so.
            let _refused = drop_privileges();
            maker.run(&batches, &queued)
        })?
    };
    let reader = Reader::start(samples, sender, queued, most_queued)?;
    if let (Some(mapper), Targets::Pids(_)) = (&mapper, &plan.targets) {
        mapper.wait();
    }
    let started = Instant::now();
    lock(&registry).sampling_starts();
    let event = lock(&kernel).attach_sampling(plan.interval)?;
    let start = clock.finish(machine_s, load_times, processes_s);
    let limiter = Limiter::start(&plan, &stats, &kernel, &registry)?;
    if let Some(command) = &mut command {
        command.start()?;
    }
    if let Err(error) = drop_privileges() {
        lock(&registry).note(format!("cannot drop what is not needed any more: {error}"));
    }

    let status = wait(&plan, started, command.as_mut(), &registry, &live, &kernel, &limiter)?;

    let rates = limiter.stop();
    lock(&kernel).detach_sampling()?;
    lock(&registry).sampling_ended();
    let duration = started.elapsed();
    if let Some(limit) = max_sample_rate().filter(|&limit| f64::from(limit) < plan.rate_hz) {
        lock(&registry).note(format!(
            "kernel.perf_event_max_sample_rate is {limit}, the most that a CPU samples in a second: ask for less, or raise it"
        ));
    }
    // Where the targets wait and what their children do is asked before the slower part of the end.
    let waiting = waiting::place(&plan.targets, &registry);
    let busy_children = children.busy(duration);
    let counters = lock(&kernel).counters()?;
    let reader_stats = reader.stop();
    follow.stop();
    lock(&kernel).detach_lifecycle()?;
    let mut made = maker.join().map_err(|_| anyhow::anyhow!("the thread that makes samples ended early"))?;
    // The last of those who tell it things are gone by now.
    made.native.iter_mut().for_each(NativeSide::hang_up);
    let mapped = mapper.map(Mapper::stop);
    if let Some(mapped) = &mapped {
        lock(&registry).notes.extend(mapped.notes.iter().cloned());
    }
    let report = {
        let registry = lock(&registry);
        targets::complete(&mut made, &registry);
        account::report(&account::Facts {
            plan: &plan,
            rates: &rates,
            event,
            duration,
            counters: &counters,
            reader: &reader_stats,
            made: &made,
            registry: &registry,
            mapped: mapped.as_ref(),
            cost: stats.finish(&lock(&kernel), options.ring_bytes, start),
        })
    };
    if report.effective_rate_hz < report.rate_hz {
        // Formats that tell times count samples: they stand for the mean interval.
        made.profile.meta.interval_us = report.mean_interval_us();
    }
    let finished = made.sink.finish(&made.profile, &report);
    if let Some(error) = made.first_error.take().or(finished.err()) {
        let kept: Vec<_> = output.keep().iter().map(|path| path.display().to_string()).collect();
        let hint = if kept.is_empty() {
            "nothing was kept".to_owned()
        } else {
            let readable =
                if kept[0].ends_with(".tach.part") { ": `tachyon-bpf recover` makes it readable" } else { "" };
            format!("what was written is in {}{readable}", kept.join(", "))
        };
        return Err(Failure::new("cannot write the profile").with_source(error).with_hint(hint).into());
    }
    output.commit(plan.output.format)?;
    if let Some(destination) = &plan.report {
        let mut text = Vec::new();
        crate::sinks::text::write_json(&mut text, &report)?;
        text.push(b'\n');
        write_whole(destination, plan.output.force, &text)?;
    }
    let extras = Extras {
        output: &plan.output,
        split: plan.split,
        top: samples::top_functions(&made.profile, &made.leaves),
        waiting,
        busy_children,
        gil: plan.gil,
        nobody: targets::nobody(&plan, &lock(&registry)),
        colours: plan.colours,
    };
    show_refused(&lock(&registry), &plan);
    // Standard error may be closed: the profile is written all the same.
    let _closed = cli::account::write(&report, &extras, &mut std::io::stderr());
    // A recording that ends before its command: the command's own status is still what counts.
    let status = match (status, &mut command) {
        (None, Some(command)) => Some(command.wait()?),
        (status, _) => status,
    };
    Ok(Outcome { command: status })
}

/// What names the kernel's frames.
fn kernel_frames(registry: &Mutex<Registry>) -> anyhow::Result<KernelFrames> {
    let symbols = KernelSymbols::read().context("cannot read /proc/kallsyms")?;
    if symbols.is_empty() {
        let note = "kernel frames have no names: give CAP_SYSLOG (`tachyon-bpf doctor` has kptr_restrict)";
        lock(registry).notes.insert(note.to_owned());
    }
    Ok(KernelFrames::new(symbols))
}

/// What keeps the tables of native stacks, and what names their addresses.
fn native(wanted: NativePlan, kernel: &Arc<Mutex<Kernel>>) -> anyhow::Result<(Mapper, Mixer)> {
    let (spaces, symbols) = (Arc::new(Spaces::default()), Arc::new(NativeSymbols::with_budget(wanted.symbol_memory)));
    let maps = lock(kernel).take_native()?;
    let mapper = Mapper::new(maps, Arc::clone(kernel), Arc::clone(&spaces), Arc::clone(&symbols));
    Ok((mapper, Mixer::new(spaces, symbols, wanted.interpreter_frames)))
}

/// A disk that is full from the start says so as one that fills up later does.
fn cannot_write(error: anyhow::Error) -> anyhow::Error {
    match error.downcast::<std::io::Error>() {
        Ok(source) => Failure::new("cannot write the profile").with_source(source).into(),
        Err(other) => other,
    }
}

/// Says which processes are missing and what is weak. Standard error may be closed: the profile is written all the same.
fn show_refused(registry: &Registry, plan: &Plan) {
    use std::io::Write as _;
    let mut out = std::io::stderr();
    // Of a whole host the report has all; a few tell what it is about.
    let most = if matches!(plan.targets, Targets::AllPython) { 5 } else { usize::MAX };
    let notes = registry.notes.difference(&registry.said);
    for line in registry.refused.iter().take(most).chain(notes) {
        let _closed = writeln!(out, "tachyon-bpf: {}", cli::escape::escape(line));
    }
    if let Some(more @ 1..) = (registry.refused.len() as u64 + registry.refused_more).checked_sub(most as u64) {
        let _closed =
            writeln!(out, "tachyon-bpf: and {more} processes more that could not be profiled: --report lists them");
    }
}

/// `TACHYON_RING_BYTES`: a ring of another size, for tests of a full one; a power of two of whole pages.
fn ring_override() -> Option<u32> {
    let bytes: u32 = std::env::var("TACHYON_RING_BYTES").ok()?.parse().ok()?;
    (bytes.is_power_of_two() && bytes >= 4096).then_some(bytes)
}

fn meta(plan: &Plan) -> Meta {
    Meta {
        start_us: KtimeNs::now().as_micros(),
        start_unix: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64()),
        interval_us: u64::try_from(plan.interval.as_micros()).unwrap_or(u64::MAX),
        many_processes: plan.many_processes(),
        gil_only: plan.gil,
        opcodes: plan.opcodes,
        native: plan.native.is_some(),
        hostname: nix::unistd::gethostname().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default(),
        python_version: (0, 0, 0),
    }
}

/// Waits until the recording is to end. Returns how the command ended, if it did.
fn wait(
    plan: &Plan,
    started: Instant,
    mut command: Option<&mut PreparedCommand>,
    registry: &Mutex<Registry>,
    live: &Live,
    kernel: &Mutex<Kernel>,
    limiter: &Limiter,
) -> anyhow::Result<Option<CommandStatus>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let progress = Progress::new(plan.progress, plan.colours, plan.duration);
    runtime
        .block_on(async {
            let mut interrupt = signal(SignalKind::interrupt())?;
            let mut terminate = signal(SignalKind::terminate())?;
            let mut hangup = (!is_ignored(libc::SIGHUP)).then(|| signal(SignalKind::hangup())).transpose()?;
            let mut child = signal(SignalKind::child())?;
            let mut turn = tokio::time::interval(TURN);
            let end = async {
                match plan.duration {
                    Some(duration) => tokio::time::sleep_until((started + duration).into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::pin!(end);
            loop {
                tokio::select! {
                    () = &mut end => break,
                    _ = interrupt.recv() => break,
                    _ = terminate.recv() => {
                        pass_on(command.as_deref(), Signal::SIGTERM);
                        break;
                    }
                    _ = received(&mut hangup) => {
                        pass_on(command.as_deref(), Signal::SIGHUP);
                        break;
                    }
                    _ = child.recv() => {}
                    _ = turn.tick() => {
                        if let Some(told) = limiter.told() {
                            progress.print(&format!("tachyon-bpf: {told}"));
                        }
                        let counters = lock(kernel).counters()?;
                        let mut registry = lock(registry);
                        for told in std::mem::take(&mut registry.told) {
                            progress.print(&format!("tachyon-bpf: {told}"));
                            registry.said.insert(told);
                        }
                        progress.show(&Snapshot {
                            elapsed: started.elapsed(),
                            samples: live.stored.load(Ordering::Relaxed),
                            processes: registry.live_python(),
                            lost: counters.loss.iter().sum::<u64>().saturating_sub(registry.not_lost()),
                        });
                        let unread = plan.output.destination == Destination::Stdout && is_unread();
                        if unread {
                            progress.print("tachyon-bpf: nobody reads standard output any more: the recording ends");
                        }
                        let all_gone = matches!(plan.targets, Targets::Pids(_)) && !registry.any_alive();
                        let over = live.failed.load(Ordering::Relaxed) || live.no_memory.load(Ordering::Relaxed);
                        if all_gone || over || unread {
                            break;
                        }
                    }
                }
                if let Some(command) = &mut command
                    && let Some(status) = command.try_wait()?
                {
                    return Ok(Some(status));
                }
            }
            Ok(None)
        })
        .inspect(|_| {
            progress.clear();
            // A second Ctrl-C, while the file is being finished, aborts.
            abort_on_interrupt();
        })
}

/// The next of these signals; never one that is not listened to.
async fn received(signal: &mut Option<tokio::signal::unix::Signal>) -> Option<()> {
    match signal {
        Some(signal) => signal.recv().await,
        None => std::future::pending().await,
    }
}

/// What a supervisor sent to us alone.
fn pass_on(command: Option<&PreparedCommand>, signal: Signal) {
    if let Some(command) = command {
        // It may have ended already.
        let _gone = command.forward(signal);
    }
}

/// Whether a signal was ignored when we were started: SIGHUP under `nohup`, which must not end the recording.
fn is_ignored(signal: libc::c_int) -> bool {
    // SAFETY: all-zero is a valid `sigaction`: SIG_DFL, no flags, an empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: writes the current action into `action`, and changes nothing.
    let known = unsafe { libc::sigaction(signal, std::ptr::null(), &raw mut action) } == 0;
    known && action.sa_sigaction == libc::SIG_IGN
}

/// From now on an interrupt ends this process at once.
fn abort_on_interrupt() {
    // SAFETY: restores the default action, which runs no code of ours.
    unsafe { libc::signal(libc::SIGINT, libc::SIG_DFL) };
}
