//! Full tables of the kernel side.

use std::io::{Read as _, Write as _};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tachyon::kernel::{Kernel, KernelError, Options};
use tachyon_common::layout::Layout;
use tachyon_common::limits::{MAX_LAYOUTS, MAX_PROCESSES};
use tachyon_common::process::{ProcessEntry, flags};
use tachyon_common::stop::LossCause;
use tachyon_tests::live;

/// Larger than any pid (`PID_MAX_LIMIT`, 2^22): entries of no process.
const NOBODY: u32 = 1 << 22;

fn loaded(all_python: bool) -> Kernel {
    let options =
        Options { interval: Duration::from_millis(1), all_python, processes: MAX_PROCESSES, ..Options::default() };
    Kernel::load(&options).expect("the object is accepted")
}

/// Fills the table of processes, keeping this test's own process in it.
fn fill(kernel: &mut Kernel, own: &ProcessEntry) {
    kernel.set_process(std::process::id(), own).expect("the first entry");
    for other in 1..MAX_PROCESSES {
        kernel.set_process(NOBODY + other, &ProcessEntry::default()).expect("there is room for all");
    }
}

/// One child that runs something for a moment.
fn child() {
    let status = Command::new("sh").args(["-c", "i=0; while [ $i -lt 20000 ]; do i=$((i + 1)); done"]).status();
    assert!(status.expect("sh runs").success());
}

/// A full table of processes: user space is told, its entries stay, a child that found no room is counted, and so is
/// every sample.
#[test]
fn a_full_process_table() {
    let Some(_live) = live() else { return };
    let own = ProcessEntry { instance: 7, flags: flags::SELECTED | flags::FOLLOW, ..ProcessEntry::default() };
    for all_python in [false, true] {
        let mut kernel = loaded(all_python);
        fill(&mut kernel, &own);
        let refused = kernel.set_process(NOBODY, &ProcessEntry::default());
        assert!(matches!(&refused, Err(KernelError::Map { map: "PROCESSES", .. })), "{refused:?}");
        assert!(kernel.add_process(NOBODY, &ProcessEntry::default()).is_err());
        // One that has an entry can be changed all the same.
        kernel.set_process(std::process::id(), &own).expect("it has its place");
        kernel.attach_lifecycle().expect("raw tracepoints attach");
        kernel.attach_sampling(Duration::from_millis(1)).expect("the event attaches");
        child();
        kernel.detach_sampling();
        let counters = kernel.counters().expect("they can be read");
        // The child's fork, and if every program of the host is looked at, its exec.
        assert!(counters.events_lost > u64::from(all_python), "{all_python}: {counters:?}");
        let lost: u64 = counters.loss.iter().sum();
        assert_eq!(counters.ran, counters.sent + counters.idle + counters.filtered + counters.not_python + lost);
        let unknown = counters.loss[LossCause::UnknownProcess as usize];
        assert_eq!(unknown > 0, all_python, "the child was met, and nobody knows it: {counters:?}");
        assert_eq!(kernel.process(std::process::id()).map(|entry| entry.instance), Some(7), "what was there is there");
    }
}

/// More interpreter builds than there is room for: the one too many is refused by name, the others keep their numbers.
#[test]
fn a_full_layout_table() {
    let Some(_live) = live() else { return };
    let mut kernel = loaded(false);
    let build = |number: u32| Layout { version_hex: number, ..Layout::default() };
    for number in 0..MAX_LAYOUTS {
        assert_eq!(kernel.layout_number(&build(number)).expect("there is room"), number);
    }
    let refused = kernel.layout_number(&build(MAX_LAYOUTS)).expect_err("it is full");
    assert!(matches!(refused, KernelError::TooManyLayouts), "{refused}");
    assert!(refused.to_string().contains("64"), "{refused}");
    assert_eq!(kernel.layout_number(&build(5)).expect("it is known"), 5);
}

/// Waits for what the kernel side does a moment later.
fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !holds() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A child that waits for a line, and then runs `sleep` in its place.
fn waiting() -> Child {
    let mut command = Command::new("sh");
    command.args(["-c", "echo; read line; exec sleep 60"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().expect("sh runs");
    // `spawn` returns before the kernel has told of its `exec`.
    let mut ready = [0];
    child.stdout.take().expect("a pipe").read_exact(&mut ready).expect("it writes a line");
    child
}

/// User space decides on what it read a moment ago, and the process has ended or executed another program meanwhile: neither is
/// undone, and nothing is left behind.
#[test]
fn a_decision_that_comes_too_late() {
    let Some(_live) = live() else { return };
    let mut kernel = loaded(false);
    kernel.attach_lifecycle().expect("raw tracepoints attach");
    let wanted =
        |number| ProcessEntry { flags: flags::SELECTED, image: number, instance: number, ..Default::default() };
    let decided = ProcessEntry { flags: flags::SELECTED | flags::NOT_PYTHON, ..ProcessEntry::default() };

    // It has exited, and nobody has waited for it yet.
    let mut child = waiting();
    let pid = child.id();
    assert!(kernel.add_process(pid, &wanted(1)).expect("there is room"));
    assert!(!kernel.add_process(pid, &wanted(2)).expect("there is room"), "it is known");
    let read = kernel.process(pid).expect("it was added");
    child.kill().expect("it runs");
    until("its exit is not noticed", || kernel.process(pid).is_some_and(|life| life.flags & flags::EXITED != 0));
    assert!(kernel.decide(pid, &read, &decided).expect("there is room"), "it is known still");
    assert!(kernel.process(pid).is_some_and(|life| life.flags & flags::EXITED != 0), "it has exited all the same");
    child.wait().expect("a child can be waited for");
    until("it stays for ever", || kernel.process(pid).is_none());
    assert_eq!(kernel.table_sizes(), (0, 0));

    // It is gone.
    assert!(!kernel.decide(pid, &read, &decided).expect("there is room"));
    assert_eq!(kernel.table_sizes(), (0, 0));

    // It runs another program.
    let mut child = waiting();
    let pid = child.id();
    assert!(kernel.add_process(pid, &wanted(3)).expect("there is room"));
    let read = kernel.process(pid).expect("it was added");
    child.stdin.take().expect("a pipe").write_all(b"go\n").expect("it reads");
    until("its exec is not noticed", || kernel.process(pid).is_some_and(|life| life.entry != read.entry));
    assert!(!kernel.decide(pid, &read, &decided).expect("there is room"));
    let life = kernel.process(pid).expect("it runs");
    assert_eq!((life.instance, kernel.entry(&life)), (3, None), "of the new program nothing is known");
    child.kill().expect("it runs");
    child.wait().expect("a child can be waited for");
    until("it stays for ever", || kernel.table_sizes() == (0, 0));
}
