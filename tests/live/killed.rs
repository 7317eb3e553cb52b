//! SIGKILL of the profiler: `recover` restores every sample except those of the last second, and says what is not known.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tachyon_tests::{
    Interpreter, Profiler, Recorded, Target, binary, cpu_time, expect, judge, live, statistics, stretches,
    waited_for_cpu,
};

/// The clock of samples (`CLOCK_MONOTONIC`), microseconds.
fn now_us() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes a whole timespec, which outlives the call.
    let result = unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    assert_eq!(result, 0, "every Linux has this clock");
    u64::try_from(time.tv_sec * 1_000_000 + time.tv_nsec / 1_000).expect("time is positive")
}

/// What a process had used at a moment between two readings of the clock.
struct Reading {
    /// The clock before and after the reading: on a busy machine these may be far apart.
    us: (u64, u64),
    cpu: Duration,
    stretches: u64,
}

impl Reading {
    fn of(pid: u32) -> Self {
        let before = now_us();
        let (cpu, stretches) = (cpu_time(pid), stretches(pid));
        Self { us: (before, now_us()), cpu, stretches }
    }
}

/// A process's CPU time, every few milliseconds.
struct Used(Vec<Reading>);

impl Used {
    fn until(stop: &AtomicBool, pid: u32) -> Self {
        let mut readings = vec![Reading::of(pid)];
        while !stop.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(5));
            readings.push(Reading::of(pid));
        }
        Self(readings)
    }

    /// The last reading that was over by then.
    fn before(&self, moment_us: u64) -> &Reading {
        let after = self.0.partition_point(|reading| reading.us.1 <= moment_us);
        &self.0[after.saturating_sub(1)]
    }

    /// The first reading that was begun then or later.
    fn after(&self, moment_us: u64) -> &Reading {
        let after = self.0.partition_point(|reading| reading.us.0 < moment_us);
        &self.0[after.min(self.0.len() - 1)]
    }

    /// CPU time between two moments: at least and at most.
    fn between(&self, from_us: u64, to_us: u64) -> (Duration, Duration) {
        let least = self.before(to_us).cpu.saturating_sub(self.after(from_us).cpu);
        (least, self.after(to_us).cpu.saturating_sub(self.before(from_us).cpu))
    }
}

/// A recording that was killed.
struct Killed {
    profiler: Profiler,
    /// When it sampled, and when it was killed.
    from_us: u64,
    at_us: u64,
    /// How long its thread that waited longest waited for a CPU in the last two seconds.
    waited: Duration,
    /// Of each target.
    used: Vec<Used>,
}

/// Records, and kills the profiler after `milliseconds` of sampling.
fn killed(profiler: Profiler, targets: &[Target], milliseconds: u64) -> Killed {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let watch = |target: &Target| {
            let (pid, stop) = (target.pid(), &stop);
            scope.spawn(move || Used::until(stop, pid))
        };
        let watches: Vec<_> = targets.iter().map(watch).collect();
        let running = profiler.start();
        let from_us = now_us();
        let last = milliseconds.min(2_000);
        std::thread::sleep(Duration::from_millis(milliseconds - last));
        let waited = waited_for_cpu(running.pid());
        std::thread::sleep(Duration::from_millis(last));
        let waited = waited_for_cpu(running.pid()).saturating_sub(waited);
        let at_us = now_us();
        let profiler = running.kill();
        stop.store(true, Ordering::Relaxed);
        let used = watches.into_iter().map(|watch| watch.join().expect("reading a file does not fail")).collect();
        Killed { profiler, from_us, at_us, waited, used }
    })
}

fn run(verb: &str, words: &[&Path]) -> Output {
    let output = Command::new(binary()).arg(verb).args(words).output().expect("the program can be run");
    assert!(output.status.success(), "{verb}: {}", String::from_utf8_lossy(&output.stderr));
    output
}

/// What `recover` makes of it.
fn recovered(profiler: &Profiler) -> (PathBuf, Recorded) {
    let part = profiler.output().with_extension("tach.part");
    assert!(!profiler.output().exists(), "a file that is not whole has no final name");
    let good = profiler.output().with_file_name("good.tach");
    let told = run("recover", &[&part, Path::new("-o"), &good]);
    let recorded = Recorded::read(&good);
    let told = String::from_utf8_lossy(&told.stderr).into_owned();
    assert!(told.starts_with(&format!("recovered {} samples of ", recorded.samples.len())), "{told}");
    assert!(told.contains("what came later, and what was lost before, is unknown"), "{told}");
    judge::agrees(&good, &recorded);
    (good, recorded)
}

/// Every reader of the recovered file says that losses are unknown, and none says that there are none.
fn says_that_the_loss_is_unknown(good: &Path) {
    let text = run("info", &[good]).stdout;
    let text = String::from_utf8(text).expect("it is text");
    assert!(text.contains("  loss         unknown: the recording was cut"), "{text}");
    assert!(!text.contains("% errors"), "{text}");
    let json = run("info", &[good, Path::new("--json")]).stdout;
    let json: serde_json::Value = serde_json::from_slice(&json).expect("it is JSON");
    assert_eq!(json["metadata"]["report"]["cut"], true, "{json}");
    assert!(json["statistics"]["error_rate"].is_null() && json["statistics"]["missed_samples"].is_null(), "{json}");
    let graph = good.with_extension("html");
    run("export", &[good, Path::new("-o"), &graph]);
    let graph = fs::read_to_string(graph).expect("it is text");
    assert!(graph.contains("what was lost is unknown") && !graph.contains(" lost ("), "the caption");
}

/// Checks a process's samples, in order of time: they reach into the last second before the kill, and none is missing between
/// the first and the last. On a busy machine the second begins when the profiler gets a CPU.
fn check_samples(times: &[u64], rate: u32, of: &Killed, used: &Used) {
    let (Some(&first), Some(&last)) = (times.first(), times.last()) else { panic!("no samples") };
    assert!(last <= of.at_us, "a sample after the kill: {last}, {}", of.at_us);
    let (after, _) = used.between(last, of.at_us);
    let lost = Duration::from_micros(of.at_us - last);
    println!("{} samples, the last {lost:?} before the kill, {after:?} of CPU; waited {:?}", times.len(), of.waited);
    assert!(lost <= Duration::from_secs(1) + of.waited || after < Duration::from_millis(5), "{lost:?} are lost");
    // The kernel brings a running thread's time up to date with each tick (4 ms): each end can be off by that.
    let (least, most) = used.between(first, last);
    let tick = Duration::from_millis(10);
    let ran = (least.saturating_sub(tick).as_secs_f64(), (most + tick).as_secs_f64());
    let stretches = used.after(last).stretches - used.before(first).stretches;
    let fits = statistics::within_ticks(times.len(), f64::from(rate), ran, stretches, 0.05);
    assert!(fits, "{} samples at {rate} Hz of {ran:?} s in {stretches} stretches", times.len());
    // The ring is read every 0.2 s: losing one reading would leave such a gap.
    for pair in times.windows(2) {
        let (gap, _) = used.between(pair[0], pair[1]);
        assert!(gap < Duration::from_millis(100), "{gap:?} of CPU time without a sample, at {}", pair[0]);
    }
}

fn times_of(recorded: &Recorded, pid: u32) -> Vec<u64> {
    let own = recorded.samples.iter().filter(|sample| sample.thread_id == u64::from(pid));
    let mut times: Vec<u64> = own.map(|sample| sample.timestamp_us).collect();
    times.sort_unstable();
    times
}

#[test]
fn all_but_the_last_second_is_recovered() {
    let Some(_live) = live() else { return };
    let targets = [Target::start(&Interpreter::named("pyenv_3_12"), "deep_stack.py")];
    for (rate, milliseconds) in [(499, 1_250), (99, 2_950), (1_999, 3_400)] {
        let of = killed(Profiler::of(targets[0].pid()).rate(rate), &targets, milliseconds);
        let (good, recorded) = recovered(&of.profiler);
        check_samples(&times_of(&recorded, targets[0].pid()), rate, &of, &of.used[0]);
        let first = recorded.samples.iter().map(|sample| sample.timestamp_us).min().expect("there are samples");
        assert!(first < of.from_us + 200_000, "samples of the start are missing");
        expect::check_stacks(&recorded, &targets[0].facts, 0.99);
        says_that_the_loss_is_unknown(&good);
    }
}

#[test]
fn of_several_processes_too() {
    let Some(_live) = live() else { return };
    let targets = [(); 3].map(|()| Target::start(&Interpreter::named("pyenv_3_12"), "spin.py"));
    for milliseconds in [1_900, 3_100] {
        let profiler =
            targets.iter().fold(Profiler::new(), |profiler, target| profiler.arg("-p").arg(target.pid().to_string()));
        let of = killed(profiler.rate(499), &targets, milliseconds);
        let (good, recorded) = recovered(&of.profiler);
        for (target, used) in targets.iter().zip(&of.used) {
            check_samples(&times_of(&recorded, target.pid()), 499, &of, used);
        }
        assert!(recorded.samples.iter().all(|sample| {
            let root = recorded.root(sample).expect("the frame that names the process");
            root.function.ends_with(&format!(" ({})", sample.thread_id))
        }));
        says_that_the_loss_is_unknown(&good);
    }
}

/// Killed before anything was written to the file: it can still be recovered, and CPython reads it.
#[test]
fn killed_at_once() {
    let Some(_live) = live() else { return };
    let targets = [Target::start(&Interpreter::named("pyenv_3_12"), "spin.py")];
    let of = killed(Profiler::of(targets[0].pid()).rate(499), &targets, 0);
    let (good, recorded) = recovered(&of.profiler);
    assert!(recorded.samples.iter().all(|sample| sample.timestamp_us <= of.at_us));
    says_that_the_loss_is_unknown(&good);
}
