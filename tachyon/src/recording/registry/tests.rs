//! The registry, without any process behind it.

use super::*;

fn exit_of(instance: u64, tgid: u32, uninspected: u64) -> ProcessRecord {
    ProcessRecord { instance, tgid, uninspected, cpu_ns: 9, ..ProcessRecord::default() }
}

#[test]
fn uninspected_runs_follow_the_verdict() {
    let mut registry = Registry::default();
    registry.fork(&ProcessRecord { instance: 1, tgid: 10, ..ProcessRecord::default() }, "sh".to_owned());
    registry.fork(&ProcessRecord { instance: 2, tgid: 11, ..ProcessRecord::default() }, "python".to_owned());
    registry.by_pid(11).unwrap().decide(Verdict::Python(0x030c_01f0, "3.12.1".to_owned()));
    registry.exit(&exit_of(1, 10, 5));
    registry.exit(&exit_of(2, 11, 7));
    assert_eq!(registry.reclaimed(), 5);
    assert_eq!(registry.get(2).map(|info| info.uninspected), Some(7));
    assert!(registry.get(1).is_none(), "what never was CPython leaves no trace");
    assert!(!registry.any_alive());
}

#[test]
fn a_reused_pid_is_another_process() {
    let mut registry = Registry::default();
    registry.fork(&ProcessRecord { instance: 1, tgid: 10, ..ProcessRecord::default() }, String::new());
    registry.by_pid(10).unwrap().decide(Verdict::Python(0, String::new()));
    registry.fork(&ProcessRecord { instance: 2, tgid: 10, ..ProcessRecord::default() }, String::new());
    registry.exit(&exit_of(1, 10, 0));
    assert!(registry.by_pid(10).is_some(), "the later process keeps the pid");
}

fn exec_of(instance: u64, tgid: u32, uninspected: u64) -> ProcessRecord {
    ProcessRecord { instance, image: instance + 1000, tgid, uninspected, ..ProcessRecord::default() }
}

fn python() -> Verdict {
    Verdict::Python(0x030c_01f0, "3.12.1".to_owned())
}

/// Pids that no process has, so that nothing of this host is read.
const NOBODY: u32 = 1 << 30;

#[test]
fn programs_that_are_not_python_leave_no_entry() {
    let mut registry = Registry::default();
    // What the kernel side counts as uninspected, and what user space moves from there.
    let mut uninspected = 0;
    for number in 0..1000_u32 {
        let (instance, pid) = (u64::from(number) + 1, NOBODY + number % 7);
        registry.exec(&exec_of(instance, pid, 0), "sh".to_owned(), None);
        uninspected += 3;
        if number % 3 == 0 {
            // It ends before it is decided: its end is told.
            registry.exit(&exit_of(instance, pid, 3));
        } else {
            // It lives too long, is decided, and nothing is told any more, but another `exec`.
            registry.leave(instance);
            registry.add_uninspected(instance, 3, false);
            if number % 3 == 1 {
                registry.exec(&exec_of(instance, pid, 0), "cc".to_owned(), None);
                uninspected += 2;
                registry.exit(&exit_of(instance, pid, 2));
            }
        }
    }
    assert_eq!((registry.by_instance.len(), registry.current.len(), registry.left.len()), (0, 0, 0));
    assert_eq!(registry.reclaimed(), uninspected, "all of it is no loss");
    assert!(!registry.any_alive());
    assert_eq!(registry.python_cpu_ns(), None);
}

#[test]
fn children_of_python_that_run_something_else_are_forgotten() {
    let mut registry = Registry::default();
    registry.insert(1, ProcessInfo::new(NOBODY, 7, python(), 0));
    for number in 2..=100 {
        let pid = NOBODY + number;
        let instance = u64::from(number);
        let fork = ProcessRecord { instance, image: 7, tgid: pid, parent: NOBODY, ..ProcessRecord::default() };
        registry.fork(&fork, "python".to_owned());
        // 4 ns as CPython, before `exec`, then up to 9 as something else.
        registry.exec(&exec_of(instance, pid, 0), "true".to_owned(), Some(4));
        if number == 2 {
            assert!(registry.sampled(instance).is_some());
        }
        if number % 2 == 0 {
            registry.exit(&exit_of(instance, pid, 1));
        } else {
            registry.leave(instance);
        }
    }
    registry.exit(&exit_of(1, NOBODY, 0));
    registry.forget_left(Duration::from_secs(3600));
    assert_eq!(registry.by_instance.len(), 100, "records of them may be on their way");
    registry.forget_left(Duration::ZERO);
    let mut rest: Vec<_> = registry.by_instance.keys().copied().collect();
    rest.sort_unstable();
    assert_eq!(
        (rest.as_slice(), registry.forgotten),
        (&[2][..], 1),
        "the child that has samples; the parent ran CPython"
    );
    assert!(registry.current.is_empty() && registry.left.is_empty());
    assert_eq!(registry.python_cpu_ns(), Some(9 + 99 * 4), "what they used as CPython stays in the account");
    assert_eq!(registry.reclaimed(), 50);
}

#[test]
fn a_process_that_becomes_python_again_stays() {
    let mut registry = Registry::default();
    let cmdline = vec!["python".to_owned(), "a.py".to_owned()];
    registry.insert(1, ProcessInfo { cmdline, ..ProcessInfo::new(NOBODY, 7, python(), 0) });
    registry.exec(&exec_of(1, NOBODY, 2), "sh".to_owned(), Some(5));
    assert!(registry.get(1).is_some_and(|info| info.cmdline.is_empty()), "the old program's command line is over");
    registry.leave(1);
    registry.exec(&exec_of(1, NOBODY, 3), "python".to_owned(), Some(8));
    registry.by_pid(NOBODY).unwrap().decide(python());
    registry.forget_left(Duration::ZERO);
    registry.exit(&ProcessRecord { cpu_ns: 20, ..exit_of(1, NOBODY, 4) });
    registry.forget_left(Duration::ZERO);
    let info = registry.get(1).unwrap();
    assert_eq!((info.uninspected, info.cpu_ns()), (6, Some(5 + 12)), "not what the shell between used");
    assert_eq!(registry.reclaimed(), 3);
}

/// A start takes its time: what ran meanwhile could not be sampled.
#[test]
fn what_ran_before_sampling_is_not_expected() {
    let mut registry = Registry::default();
    // One has ended before, one has as far as nobody has told yet, one ran CPython twice.
    for (instance, pid) in [(1, NOBODY), (2, NOBODY + 1), (3, std::process::id())] {
        registry.insert(instance, ProcessInfo::new(pid, instance, python(), 0));
    }
    registry.exit(&exit_of(1, NOBODY, 0));
    registry.exec(&exec_of(3, std::process::id(), 0), "python".to_owned(), Some(5_000_000_000_000));
    registry.by_pid(std::process::id()).expect("it runs").decide(python());
    registry.insert(4, ProcessInfo::new(NOBODY + 2, 4, python(), 0));
    registry.exit(&exit_of(4, NOBODY + 2, 0));
    registry.forget_left(Duration::ZERO);
    registry.sampling_starts();
    registry.exit(&exit_of(2, NOBODY + 1, 0));
    registry.forget_left(Duration::ZERO);
    let used = registry.python_cpu_ns().expect("the test itself is measured");
    assert!(used < 1_000_000_000_000, "{used} ns");
    registry.sampling_ended();
    registry.exit(&exit_of(3, std::process::id(), 0));
    registry.insert(5, ProcessInfo::new(NOBODY, 5, python(), 0));
    registry.exit(&exit_of(5, NOBODY, 0));
    let with_later = registry.python_cpu_ns().expect("measured");
    registry.remove(3);
    assert!(with_later >= 9 && registry.python_cpu_ns() == Some(9), "the one that began after the start alone");
}

#[test]
fn the_version_outlives_another_program() {
    let mut registry = Registry::default();
    registry.insert(1, ProcessInfo::new(NOBODY, 7, python(), 0));
    registry.fork(&ProcessRecord { instance: 2, tgid: NOBODY + 1, parent: NOBODY, ..exec_of(2, 0, 0) }, String::new());
    for (instance, pid) in [(1, NOBODY), (2, NOBODY + 1)] {
        registry.exec(&exec_of(instance, pid, 0), "sleep".to_owned(), None);
        registry.leave(instance);
        let info = registry.get(instance).expect("it was CPython");
        assert_eq!((info.version(), info.last_python()), ("", Some((0x030c_01f0, "3.12.1"))));
    }
}

#[test]
fn own_cpu_time_is_measured() {
    assert!(cpu_time_ns(std::process::id()).is_some_and(|ns| ns > 0));
}

#[test]
fn what_grows_on_a_busy_host_is_bounded() {
    let mut registry = Registry::default();
    for number in 0..3_000_u32 {
        let (instance, pid) = (u64::from(number) + 1, NOBODY + number % 5);
        registry.exec(&exec_of(instance, pid, 0), "python".to_owned(), Some(0));
        registry.by_pid(pid).expect("it runs").decide(python());
        // Every other one is met before it is inspected.
        registry.exit(&exit_of(instance, pid, u64::from(number % 2)));
        registry.refuse(format!("pid {number}: it runs something odd"));
        registry.note(format!("/tmp/{number}: odd"));
    }
    registry.refuse("pid 7: it runs something odd".to_owned());
    registry.forget_left(Duration::ZERO);
    assert_eq!(registry.by_instance.len(), MAX_UNINSPECTED_ONLY);
    assert_eq!(registry.forgotten, 3_000 - MAX_UNINSPECTED_ONLY as u64);
    assert_eq!(registry.python_cpu_ns(), Some(3_000 * 9), "what they used stays in the account");
    assert_eq!((registry.refused.len(), registry.refused_more), (MAX_REFUSED, 3_000 - MAX_REFUSED as u64));
    assert_eq!(registry.notes.len(), MAX_NOTES);
}

#[test]
fn a_pid_that_is_used_again_ends_its_holder() {
    let mut registry = Registry::default();
    registry.insert(1, ProcessInfo::new(NOBODY, 7, python(), 0));
    // Its end was not told.
    registry.insert(2, ProcessInfo::new(NOBODY, 8, python(), 0));
    assert_eq!(registry.pids_of_image(7), Vec::<u32>::new());
    assert_eq!(registry.pids_of_image(8), [NOBODY]);
    registry.forget_left(Duration::ZERO);
    assert!(registry.get(1).is_none() && registry.get(2).is_some());
}
