//! Kernel and native frames in the formats that have addresses: names, addresses, and the same totals in both.

use crate::exports::{gperftools, pprof};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use tachyon::report::Report;
use tachyon_tests::viewers::{Costs, go_pprof, perl_pprof, run, tools};
use tachyon_tests::{Interpreter, Profiler, Recorded, ShownFrame, Target, binary, judge, live};

/// What a frame is called in formats that separate its object from its name.
fn name(frame: &ShownFrame) -> &str {
    let function = frame.function.as_str();
    match (frame.is_special(), function.strip_prefix("[k] "), function.split_once('!')) {
        (true, Some(kernel), _) => kernel,
        (true, None, Some((_, symbol))) => symbol,
        _ => function,
    }
}

/// Samples by the name of their innermost frame, of names that the kernel has.
fn leaves(recorded: &Recorded) -> BTreeMap<&str, u64> {
    let (mut leaves, mut kernels) = (BTreeMap::new(), BTreeSet::new());
    for leaf in recorded.samples.iter().filter_map(|sample| recorded.leaf(sample)) {
        *leaves.entry(name(leaf)).or_default() += 1;
        kernels.extend(leaf.is_kernel().then(|| name(leaf)));
    }
    leaves.retain(|name, _| kernels.contains(name));
    leaves
}

/// The records of a gperftools profile, count and addresses, and the text after them.
fn records(file: &Path) -> (Vec<(u64, Vec<u64>)>, String) {
    let bytes = std::fs::read(file).expect("it is there");
    let words: Vec<u64> = bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().expect("8"))).collect();
    let (mut at, mut records) = (5, Vec::new());
    while words[at..at + 3] != [0, 1, 0] {
        let depth = usize::try_from(words[at + 1]).expect("a depth");
        records.push((words[at], words[at + 2..at + 2 + depth].to_vec()));
        at += 2 + depth;
    }
    (records, String::from_utf8(bytes[(at + 3) * 8..].to_vec()).expect("the mapped objects are text"))
}

fn flat(costs: &Costs) -> u64 {
    costs.values().map(|(flat, _)| flat).sum()
}

/// The system calls of `system_calls.py`: `reader` calls `os.read`, which spends its time in the kernel.
fn check_names(costs: &Costs, total: u64, what: &str) {
    let call = costs.iter().find(|(name, _)| name.starts_with("do_syscall_64")).map(|(_, &(_, whole))| whole);
    assert!(call.is_some_and(|whole| whole * 2 > total), "{what}: {call:?} of {total} in do_syscall_64: {costs:?}");
    assert!(costs["reader"].1 * 10 >= total * 9, "{what}: {costs:?}");
}

#[test]
fn exports_name_the_kernel_and_count_alike() {
    let Some(_live) = live() else { return };
    let target = Target::start(&Interpreter::named("pyenv_3_12"), "system_calls.py");
    let profiler = Profiler::of(target.pid()).native().arg("--kernel").rate(999);
    let recording = profiler.cpu_milliseconds(target.pid(), 600).record();
    let (total, recorded) = (recording.report.stored, &recording.recorded);
    let in_kernel =
        recorded.samples.iter().filter(|sample| recorded.leaf(sample).is_some_and(ShownFrame::is_kernel)).count();
    assert!(in_kernel as u64 * 2 > total, "{in_kernel} of {total} were met in the kernel");
    for (form, count) in &judge::totals(&[&recording.path])[0] {
        assert_eq!(*count, total, "replay --{form}");
    }

    let dir = tempfile::tempdir().expect("a temporary directory can be made");
    let to = |name: &str| {
        let out = dir.path().join(name);
        run(Command::new(binary()).arg("export").arg(&recording.path).arg("-o").arg(&out));
        out
    };
    let (perftools, proto) = (to("a.prof"), to("a.pb.gz"));
    assert_eq!((gperftools(&perftools), pprof(&proto)), (total, total));
    if tools().is_none() {
        return;
    }
    let (of_prof, _) = go_pprof(&perftools, &[]);
    let (of_proto, _) = go_pprof(&proto, &[]);
    let (of_perl, head) = perl_pprof(&perftools, &[]);
    assert_eq!(head, format!("Total: {total} samples"));
    for (costs, what) in [(&of_prof, "gperftools, Go"), (&of_proto, "pprof, Go"), (&of_perl, "gperftools, Perl")] {
        assert_eq!(flat(costs), total, "{what}: {costs:?}");
        check_names(costs, total, what);
        for (leaf, count) in leaves(recorded) {
            assert_eq!(costs.get(leaf).map(|(flat, _)| *flat), Some(count), "{what}: {leaf}: {costs:?}");
        }
    }
}

/// Recorded directly: native frames are where the process has them, and no address is one that a reader leaves out.
#[test]
fn recorded_directly_native_code_keeps_its_addresses() {
    let Some(_live) = live() else { return };
    let Some(_tools) = tools() else { return };
    let target = Target::start(&Interpreter::named("pyenv_3_12"), "system_calls.py");
    let dir = tempfile::tempdir().expect("a temporary directory can be made");
    let record = |name: &str| -> (PathBuf, u64) {
        let (file, report) = (dir.path().join(name), dir.path().join(format!("{name}.report")));
        let mut command = Command::new(binary());
        command.args(["-p", &target.pid().to_string(), "--kernel", "-F", "999", "-d", "700ms", "-o"]).arg(&file);
        run(command.arg("--report").arg(&report));
        let report: Report =
            serde_json::from_slice(&std::fs::read(report).expect("it is there")).expect("it is a report");
        assert!(report.stored > 50, "{report:#?}");
        (file, report.stored)
    };

    let (file, total) = record("a.prof");
    let (records, objects) = records(&file);
    assert_eq!(records.iter().map(|(count, _)| count).sum::<u64>(), total);
    for (_, addresses) in &records {
        // Half of the address space is the kernel's; Perl's reader counts in signed numbers, and both skip addresses of 0.
        assert!(!addresses.is_empty() && addresses.iter().all(|&at| at > 1 && at < 1 << 47), "{addresses:x?}");
    }
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", target.pid())).expect("it still runs");
    let code = maps.lines().find(|line| line.contains("r-xp") && line.contains("/libc.so.6")).expect("it has a libc");
    let range = code.split(' ').next().expect("a range");
    let (start, end) = range.split_once('-').expect("a range");
    let number = |digits| u64::from_str_radix(digits, 16).expect("hexadecimal");
    let (start, end) = (number(start), number(end));
    assert!(objects.contains(&format!("{start:012x}-{end:012x} r-xp")), "{range}: {objects}");
    let in_libc = |addresses: &Vec<u64>| addresses.iter().any(|&at| (start..=end).contains(&at));
    let in_libc: u64 = records.iter().filter(|(_, addresses)| in_libc(addresses)).map(|(count, _)| count).sum();
    assert!(in_libc * 10 >= total * 9, "{in_libc} of {total} have the C library's addresses");
    for (costs, what) in [(go_pprof(&file, &[]).0, "Go"), (perl_pprof(&file, &[]).0, "Perl")] {
        assert_eq!(flat(&costs), total, "{what}");
        check_names(&costs, total, what);
    }

    let (file, total) = record("a.pb.gz");
    let (costs, _) = go_pprof(&file, &[]);
    assert_eq!((flat(&costs), pprof(&file)), (total, total));
    check_names(&costs, total, "pprof");
    let raw = run(Command::new("go").args(["tool", "pprof", "-raw"]).arg(&file).env("PPROF_TMPDIR", dir.path()));
    assert!(raw.contains(&format!("{:#x}/{:#x}/", start, end)), "{range}: {raw}");
    assert!(raw.contains("[kernel]"), "{raw}");
}
