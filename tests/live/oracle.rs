//! CPython 3.15's own sampling profiler, attached to the same program at the same time, sees the same shares.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use tachyon_tests::{Interpreter, Profiler, Recorded, Sample, Target, live, status};

/// How far the two shares may differ beyond their sampling errors: CPython's are shares of the time in which the thread
/// is runnable, the profiler's of that in which it runs, and some of CPython's reads fail.
const MARGIN: f64 = 0.05;

/// CPython's profiler at work, for six seconds.
struct Theirs {
    child: Child,
    file: PathBuf,
    _folder: tempfile::TempDir,
}

impl Theirs {
    /// On the last CPU.
    fn start(interpreter: &Interpreter, target: &Target, mode: &str) -> Self {
        let root = interpreter.root.clone().expect("it lies in a chroot");
        let other = (std::thread::available_parallelism().map_or(1, std::num::NonZero::get) - 1).to_string();
        let folder = tempfile::Builder::new().prefix("oracle").tempdir_in(root.join("tmp"));
        let folder = folder.expect("the chroot has a /tmp");
        let file = folder.path().join("theirs.tach");
        let inside = Path::new("/").join(file.strip_prefix(&root).expect("it was made there"));
        let mut line = Command::new("taskset");
        line.args(["-c", &other, "chroot"]).arg(&root).args(["/usr/bin/python3.15", "-m", "profiling.sampling"]);
        line.args(["attach", "-a", "--mode", mode, "-r", "500", "-d", "6", "--binary", "-o"]).arg(inside);
        line.arg(target.pid().to_string()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = line.spawn().expect("CPython's profiler can be run");
        Self { child, file, _folder: folder }
    }

    fn finish(mut self) -> Recorded {
        assert!(self.child.wait().expect("a child can be waited for").success());
        Recorded::read(&self.file)
    }
}

struct Shares {
    samples: usize,
    shares: Vec<(&'static str, f64)>,
}

fn shares(recorded: &Recorded, holders: bool) -> Shares {
    let holds = |sample: &Sample| sample.status & status::HAS_GIL != 0;
    let samples: Vec<&Sample> = recorded.samples.iter().filter(|sample| !holders || holds(sample)).collect();
    let share = |is: &dyn Fn(&Sample) -> bool| {
        samples.iter().filter(|sample| is(sample)).count() as f64 / samples.len().max(1) as f64
    };
    let bit = |bit: u8| share(&|sample| sample.status & bit != 0);
    let function = |name: &str| share(&|sample| recorded.frames_of(sample).any(|frame| frame.function == name));
    Shares {
        samples: samples.len(),
        shares: vec![
            ("HAS_GIL", bit(status::HAS_GIL)),
            ("HAS_EXCEPTION", bit(status::HAS_EXCEPTION)),
            ("MAIN_THREAD", bit(status::MAIN_THREAD)),
            ("held", function("held")),
            ("released", function("released")),
            ("handling", function("handling")),
        ],
    }
}

/// Turns of all kinds.
#[test]
fn shares_agree() {
    compare(&["held", "released", "handling"]);
}

/// Two threads that always want the GIL: each has half of it.
#[test]
fn bound_to_the_gil() {
    compare(&["held", "two"]);
}

#[test]
fn releasing_the_gil() {
    compare(&["released", "held"]);
}

#[test]
fn handling_exceptions() {
    compare(&["handling", "held"]);
}

/// Where threads wait, by wall-clock time.
#[test]
fn shares_of_waits_agree() {
    let Some(_live) = live() else { return };
    let interpreter = Interpreter::named("sid_3_15");
    let target = Target::start(&interpreter, "wall_shares.py");
    let theirs = Theirs::start(&interpreter, &target, "wall");
    let recording = Profiler::of(target.pid()).arg("--wall").rate(499).milliseconds(6_000).record();
    let theirs = theirs.finish();
    let all = [recording.recorded.samples.len(), theirs.samples.len()];
    assert!(all.iter().all(|&all| all > 3_000), "{all:?} samples");
    for name in ["forever", "sleeps", "locks"] {
        let [ours, theirs] = [&recording.recorded, &theirs].map(|recorded| {
            let is_in = |sample: &&Sample| recorded.frames_of(sample).any(|frame| frame.function == name);
            recorded.samples.iter().filter(is_in).count() as f64 / recorded.samples.len() as f64
        });
        println!("{name}: ours {ours:.3}, theirs {theirs:.3}");
        assert!((ours - theirs).abs() <= 0.03, "{name}: {ours:.3} and {theirs:.3}");
    }
}

fn compare(turns: &[&str]) {
    let Some(_live) = live() else { return };
    let interpreter = Interpreter::named("sid_3_15");
    let target = Target::start_with(&interpreter, "three_states.py", turns);
    // A thread that waits for a CPU counts for CPython and not for the profiler; and if CPython's sampler waits for the
    // target's CPU, it gets it when the target makes a system call, which C code that computes does not.
    target.make_urgent();
    let pinned = Command::new("taskset").args(["-a", "-c", "-p", "0", &target.pid().to_string()]).output();
    assert!(pinned.expect("taskset can be run").status.success());
    let theirs = Theirs::start(&interpreter, &target, "cpu");
    let recording = Profiler::of(target.pid()).rate(499).milliseconds(6_000).record();
    let theirs = theirs.finish();
    // The waiting thread wakes up now and then and needs a CPU for that: only the holders' shares are known.
    let two = turns.contains(&"two");
    let (ours, theirs) = (shares(&recording.recorded, two), shares(&theirs, two));
    assert!(ours.samples > 300 && theirs.samples > 300, "{} and {} samples", ours.samples, theirs.samples);
    for ((name, ours_share), (_, theirs_share)) in ours.shares.iter().zip(&theirs.shares) {
        // 99.999 % of the difference of two shares, by the normal distribution.
        let mean = f64::midpoint(*ours_share, *theirs_share);
        let error = 4.4172 * (mean * (1.0 - mean) * (1.0 / ours.samples as f64 + 1.0 / theirs.samples as f64)).sqrt();
        println!("{name}: ours {ours_share:.3}, theirs {theirs_share:.3}, sampling error {error:.3}");
        assert!((ours_share - theirs_share).abs() <= error + MARGIN, "{name}: {ours_share:.3} and {theirs_share:.3}");
    }
}
