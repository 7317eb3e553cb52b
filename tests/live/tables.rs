//! Tables of the kernel side that are full.

use std::process::Command;
use std::time::Duration;
use tachyon::kernel::{Kernel, KernelError, Options};
use tachyon_common::layout::Layout;
use tachyon_common::limits::{MAX_LAYOUTS, MAX_PROCESSES};
use tachyon_common::process::{ProcessEntry, flags};
use tachyon_common::stop::LossCause;
use tachyon_tests::live;

/// Larger than any pid (`PID_MAX_LIMIT`, 2^22): entries of nobody.
const NOBODY: u32 = 1 << 22;

fn loaded(all_python: bool) -> Kernel {
    let options = Options {
        interval: Duration::from_millis(1),
        all_python,
        gil_only: false,
        filtered: false,
        opcodes: false,
        kernel_stacks: false,
        unwind_memory: None,
        ring_bytes: 1 << 20,
        pid_namespace: None,
    };
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

/// A table of processes that is full: user space is told, what is in it stays, a child that found no room is counted, and
/// so is every sample.
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
        kernel.detach_sampling().expect("the event detaches");
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
