//! The registry, without any process behind it.

use super::*;
use std::collections::BTreeMap;

fn exit_of(instance: u64, tgid: u32, uninspected: u64) -> ProcessRecord {
    ProcessRecord { instance, tgid, uninspected, cpu_ns: 9, ..ProcessRecord::default() }
}

#[test]
fn uninspected_runs_follow_the_verdict() {
    let mut registry = Registry::default();
    registry.fork(&ProcessRecord { instance: 1, tgid: 10, ..ProcessRecord::default() }, "sh".to_owned());
    registry.fork(&ProcessRecord { instance: 2, tgid: 11, ..ProcessRecord::default() }, "python".to_owned());
    registry.by_pid(11).unwrap().decide(Program::Python(0x030c_01f0, "3.12.1".to_owned()));
    registry.looked_at(1, 0);
    registry.exit(&exit_of(1, 10, 5));
    registry.exit(&exit_of(2, 11, 7));
    assert_eq!(registry.reclaimed, Reclaimed { not_python: 5, ..Reclaimed::default() });
    assert_eq!(registry.get(2).map(|info| info.uninspected), Some(7));
    assert!(registry.get(1).is_none(), "what never was CPython leaves no trace");
    assert!(!registry.any_alive());
}

#[test]
fn a_reused_pid_is_another_process() {
    let mut registry = Registry::default();
    registry.fork(&ProcessRecord { instance: 1, tgid: 10, ..ProcessRecord::default() }, String::new());
    registry.by_pid(10).unwrap().decide(Program::Python(0, String::new()));
    registry.fork(&ProcessRecord { instance: 2, tgid: 10, ..ProcessRecord::default() }, String::new());
    registry.exit(&exit_of(1, 10, 0));
    assert!(registry.by_pid(10).is_some(), "the later process keeps the pid");
}

fn exec_of(instance: u64, tgid: u32, uninspected: u64) -> ProcessRecord {
    ProcessRecord { instance, image: instance + 1000, tgid, uninspected, ..ProcessRecord::default() }
}

fn python() -> Program {
    Program::Python(0x030c_01f0, "3.12.1".to_owned())
}

fn key(instance: u64, image: u64) -> ProgramKey {
    ProgramKey { instance, image }
}

/// Pids that no process has (`PID_MAX_LIMIT` is 2^22), so that nothing of this host is read. Not much larger ones: a clock's id
/// holds 29 bits of a pid.
const NOBODY: u32 = 1 << 23;

#[test]
fn programs_that_are_not_python_leave_no_entry() {
    let mut registry = Registry::default();
    // What the kernel side counts as uninspected, and what user space reclassifies.
    let mut uninspected = 0;
    for number in 0..1000_u32 {
        let (instance, pid) = (u64::from(number) + 1, NOBODY + number % 7);
        registry.exec(&exec_of(instance, pid, 0), "sh".to_owned(), None);
        uninspected += 3;
        if number % 3 == 0 {
            // It ends undecided but after a look: its end is reported.
            registry.looked_at(instance, instance + 1000);
            registry.exit(&exit_of(instance, pid, 3));
        } else {
            // It lives longer and is decided on; after that nothing but another `exec` is reported.
            registry.leave(instance);
            registry.add_uninspected(instance, 3, false);
            if number % 3 == 1 {
                registry.exec(&exec_of(instance, pid, 0), "cc".to_owned(), None);
                uninspected += 2;
                registry.looked_at(instance, instance + 1000);
                registry.exit(&exit_of(instance, pid, 2));
            }
        }
    }
    assert_eq!((registry.by_instance.len(), registry.current.len(), registry.left.len()), (0, 0, 0));
    assert_eq!(
        registry.reclaimed,
        Reclaimed { not_python: uninspected, ..Reclaimed::default() },
        "all of it is no loss"
    );
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
            assert!(registry.sampled(key(instance, 7)).is_some());
        }
        registry.looked_at(instance, instance + 1000);
        if number % 2 == 0 {
            registry.exit(&exit_of(instance, pid, 1));
        } else {
            registry.leave(instance);
        }
    }
    registry.exit(&exit_of(1, NOBODY, 0));
    registry.forget_left(Duration::from_secs(3600));
    assert_eq!((registry.by_instance.len(), registry.past.len()), (1, 99), "records of them may be on their way");
    registry.forget_left(Duration::ZERO);
    let rest: Vec<_> = registry.past.keys().copied().collect();
    assert_eq!(
        (rest.as_slice(), registry.by_instance.len(), registry.forgotten),
        (&[key(2, 7)][..], 0, 1),
        "the child that has samples; the parent ran CPython"
    );
    assert!(registry.current.is_empty() && registry.left.is_empty());
    assert_eq!(registry.python_cpu_ns(), Some(9 + 99 * 4), "what they used as CPython stays in the account");
    assert_eq!(registry.reclaimed.not_python, 50);
}

/// Each has its own entry: what the process was and used as another program does not belong to this one.
#[test]
fn a_process_that_becomes_python_again_is_two_programs() {
    let mut registry = Registry::default();
    let cmdline = vec!["python".to_owned(), "a.py".to_owned()];
    registry.insert(1, ProcessInfo { cmdline, ..ProcessInfo::new(NOBODY, 7, python(), 0) });
    registry.exec(&exec_of(1, NOBODY, 2), "sh".to_owned(), Some(5));
    assert!(registry.get(1).is_some_and(|info| info.cmdline.is_empty()), "the old program's command line is over");
    registry.leave(1);
    let other = ProcessRecord { flags: flags::NOT_PYTHON, ..exec_of(1, NOBODY, 0) };
    registry.add_uninspected(1, 3, false);
    registry.exec(&other, "python".to_owned(), Some(8));
    registry.by_pid(NOBODY).unwrap().decide(python());
    registry.forget_left(Duration::ZERO);
    registry.exit(&ProcessRecord { cpu_ns: 20, ..exit_of(1, NOBODY, 4) });
    registry.forget_left(Duration::ZERO);
    let numbers = |info: &ProcessInfo| (info.uninspected, info.cpu_ns());
    let [first, second] = [key(1, 7), key(1, 1001)].map(|key| registry.program(key).map(numbers));
    assert_eq!(first, Some((2, Some(5))));
    assert_eq!(second, Some((4, Some(12))), "not what the shell between used");
    assert_eq!(registry.reclaimed.not_python, 3);
}

/// A start takes time: what ran meanwhile could not be sampled.
#[test]
fn what_ran_before_sampling_is_not_expected() {
    let mut registry = Registry::default();
    // One ended before, one ended without having been reported yet, one ran CPython twice.
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
    for (instance, pid, image) in [(1, NOBODY, 7), (2, NOBODY + 1, 1002)] {
        registry.exec(&ProcessRecord { image: 50, ..exec_of(instance, pid, 0) }, "sleep".to_owned(), None);
        registry.leave(instance);
        assert!(registry.get(instance).is_none(), "it never was CPython");
        let info = registry.program(key(instance, image)).expect("it was CPython");
        assert_eq!(info.last_python(), Some((0x030c_01f0, "3.12.1")));
    }
}

/// The kernel side samples a known executable from its `exec` on, which may be reported later.
#[test]
fn samples_before_their_exec_was_told_count() {
    let mut registry = Registry::default();
    registry.insert(1, ProcessInfo::new(NOBODY, 7, python(), 0));
    assert!(registry.sampled(key(1, 1001)).is_none());
    registry.exec(&exec_of(1, NOBODY, 0), "python".to_owned(), Some(5));
    registry.by_pid(NOBODY).expect("it runs").decide(python());
    registry.exit(&exit_of(1, NOBODY, 0));
    registry.forget_left(Duration::ZERO);
    assert!(registry.program(key(1, 7)).is_none() && registry.program(key(1, 1001)).is_some());
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
    // Its end was not reported.
    registry.insert(2, ProcessInfo::new(NOBODY, 8, python(), 0));
    assert_eq!(registry.pids_of_image(7), Vec::<u32>::new());
    assert_eq!(registry.pids_of_image(8), [NOBODY]);
    registry.forget_left(Duration::ZERO);
    assert!(registry.get(1).is_none() && registry.get(2).is_some());
}

/// A process that was never looked at may have been CPython: it does not count as an "other program".
#[test]
fn what_was_never_looked_at_stays_lost() {
    let mut registry = Registry::default();
    // The profiler stood still: this one has run and ended, the next has executed something else before it ended.
    registry.exec(&exec_of(1, NOBODY, 0), "python".to_owned(), None);
    registry.exit(&exit_of(1, NOBODY, 200));
    registry.free(&ProcessRecord { instance: 1, uninspected: 2, ..ProcessRecord::default() });
    registry.exec(&exec_of(2, NOBODY + 1, 0), "python".to_owned(), None);
    registry.exec(&ProcessRecord { image: 7, ..exec_of(2, NOBODY + 1, 30) }, "sh".to_owned(), None);
    registry.looked_at(2, 7);
    registry.exit(&ProcessRecord { image: 7, ..exit_of(2, NOBODY + 1, 4) });
    registry.free(&ProcessRecord { instance: 2, uninspected: 1, ..ProcessRecord::default() });
    // Not even its start was reported.
    registry.exit(&exit_of(3, NOBODY + 2, 5));
    let reclaimed = registry.reclaimed;
    assert_eq!(
        reclaimed,
        Reclaimed { not_python: 4, not_python_gone: 1, filtered: 0, never_inspected: 235 },
        "the shell alone is known not to be CPython"
    );
    let mut loss = BTreeMap::from([("uninspected".to_owned(), 239), ("process_gone".to_owned(), 3)]);
    let mut left = reclaimed;
    assert_eq!((left.reclassify(&mut loss), left), (reclaimed, Reclaimed::default()));
    assert_eq!(loss["never_inspected"], 235);
    assert_eq!((loss["uninspected"], loss["process_gone"]), (0, 2));
}

#[test]
fn no_account_gives_more_than_it_has() {
    let mut loss = BTreeMap::from([("uninspected".to_owned(), 5)]);
    let mut reclaimed = Reclaimed { not_python: 4, filtered: 3, not_python_gone: 1, never_inspected: 2 };
    let moved = reclaimed.reclassify(&mut loss);
    assert_eq!(moved, Reclaimed { not_python: 4, filtered: 1, ..Reclaimed::default() });
    assert_eq!(reclaimed, Reclaimed { filtered: 2, not_python_gone: 1, never_inspected: 2, not_python: 0 });
    assert_eq!(loss.values().sum::<u64>(), 0);
}

/// The kernel side knows it by its executable; it has executed, run and ended before its `exec` was read.
#[test]
fn a_program_that_only_the_kernel_side_saw_has_its_version() {
    let mut registry = Registry::default();
    registry.set_layout(2, &Layout { version_hex: 0x030c_01f0, ..Layout::default() });
    registry.exec(&exec_of(1, NOBODY, 0), "python".to_owned(), Some(3));
    registry.exit(&ProcessRecord { flags: flags::PYTHON, layout: 2, image: 1001, ..exit_of(1, NOBODY, 0) });
    let info = registry.get(1).expect("it was CPython");
    assert_eq!((info.version(), info.cpu_ns()), ("3.12.1", Some(6)));
    assert_eq!(registry.reclaimed, Reclaimed::default());
}

#[test]
fn what_runs_after_the_end_is_not_expected() {
    let mut registry = Registry::default();
    let own = std::process::id();
    registry.insert(1, ProcessInfo::new(NOBODY, 7, python(), 0));
    registry.sampling_ended();
    let now = KtimeNs::now().0;
    // Reported late: one that started after the end, one that had run for a second before it.
    let late =
        ProcessRecord { instance: 2, tgid: NOBODY + 1, parent: NOBODY, ktime_ns: now, ..ProcessRecord::default() };
    registry.fork(&late, "python".to_owned());
    registry.exit(&ProcessRecord { cpu_ns: 5_000_000_000, ktime_ns: now + 5_000_000_000, ..exit_of(2, NOBODY + 1, 0) });
    registry.exit(&ProcessRecord { cpu_ns: 3_000_000_000, ktime_ns: now + 2_000_000_000, ..exit_of(1, NOBODY, 0) });
    assert!(registry.python_cpu_ns().is_some_and(|ns| ns.abs_diff(1_000_000_000) < 10_000_000));
    registry.exec(&ProcessRecord { ktime_ns: now, ..exec_of(3, own, 0) }, "python".to_owned(), Some(0));
    registry.by_pid(own).expect("it runs").decide(python());
    assert_eq!(registry.get(3).and_then(ProcessInfo::cpu_ns), Some(0));
}

/// A recording that is cut for years: ended processes are forgotten, and the segments' numbers add up to the whole's.
#[test]
fn segments_take_their_numbers_and_leave_no_trace() {
    let mut registry = Registry::default();
    let own = std::process::id();
    registry.insert(1, ProcessInfo::new(own, 1, python(), cpu_time_ns(own).expect("it runs")));
    let (mut cpu_ns, mut uninspected, mut largest) = (0, 0, 0);
    for segment in 0..50_u64 {
        for number in 0..20 {
            let (instance, pid) = (segment * 100 + number + 10, NOBODY + u32::try_from(number).expect("small"));
            registry.exec(&exec_of(instance, pid, 0), "python".to_owned(), Some(0));
            registry.by_pid(pid).expect("it runs").decide(python());
            if number % 2 == 0 {
                assert!(registry.sampled(key(instance, instance + 1000)).is_some());
            }
            match number {
                // Its end is lost.
                0 => {}
                _ => registry.exit(&exit_of(instance, pid, 1)),
            }
            registry.refuse(format!("pid {number}: odd"));
            registry.note("odd".to_owned());
        }
        let counts = registry.cut(Duration::ZERO);
        let instances = (0..20).map(|number| segment * 100 + number + 10);
        assert!(
            instances.clone().all(|instance| counts.get(key(instance, instance + 1000)).is_some()),
            "each is in one segment"
        );
        let of = |number: u64| &counts.processes[&key(segment * 100 + number, segment * 100 + number + 1000)];
        assert!(of(12).sampled && !of(11).sampled);
        assert_eq!(counts.processes.len(), 21, "and in no other, but for the one that lives");
        assert_eq!((counts.refused.len(), counts.notes.len(), counts.forgotten), (20, 1, 0));
        let of_ended: u64 = instances.filter_map(|instance| counts.get(key(instance, instance + 1000))?.cpu_ns()).sum();
        assert_eq!(of_ended, 19 * 9);
        cpu_ns += counts.processes[&key(1, 1)].cpu_ns().expect("it runs");
        uninspected += counts.processes.values().map(|info| info.uninspected).sum::<u64>();
        largest = largest.max(registry.by_instance.len() + registry.left.len() + registry.current.len());
    }
    assert!(largest <= 4, "the one that lives alone: {largest}");
    assert_eq!(uninspected, 50 * 19);
    assert!(cpu_ns <= cpu_time_ns(own).expect("it runs"), "no time is in two segments");
    assert!(registry.take_dead_images(Duration::ZERO).len() >= 50 * 20);
    assert_eq!((registry.reclaimed, registry.refused.len(), registry.notes.len()), (Reclaimed::default(), 0, 0));
}

/// Records of what has just ended may still be on their way: it is kept, and reported once.
#[test]
fn what_has_just_ended_outlives_a_cut() {
    let mut registry = Registry::default();
    registry.insert(1, ProcessInfo::new(NOBODY, 7, python(), 0));
    registry.exit(&exit_of(1, NOBODY, 2));
    let hour = Duration::from_secs(3600);
    assert_eq!(registry.cut(hour).python_cpu_ns(), Some(9));
    let second = registry.cut(hour);
    assert_eq!((second.python_cpu_ns(), second.forgotten), (None, 0));
    assert!(registry.sampled(key(1, 7)).is_some(), "a late sample still finds it");
    let third = registry.cut(hour);
    assert_eq!(
        third.get(key(1, 7)).map(|info| (info.sampled, info.uninspected, info.cpu_ns())),
        Some((true, 0, Some(0)))
    );
    let last = registry.cut(Duration::ZERO);
    assert_eq!((last.processes.len(), last.forgotten, registry.by_instance.len()), (0, 0, 0));
}
