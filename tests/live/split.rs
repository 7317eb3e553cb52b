//! `--split process`: every process has a self-contained file, and all of them together are the recording.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use tachyon::report::Report;
use tachyon::sinks::metadata::Metadata;
use tachyon::tach::Reader;
use tachyon_tests::{Interpreter, Profiler, Recorded, Target, judge, live};

/// More than the profiler may have open files.
const PROCESSES: usize = 135;

fn files(directory: &std::path::Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).expect("the directory is there");
    let mut files: Vec<_> = entries.map(|entry| entry.expect("it can be read").path()).collect();
    files.sort();
    files
}

fn report(profiler: &Profiler) -> Report {
    let text = fs::read(profiler.report()).expect("the report is there");
    serde_json::from_slice(&text).expect("the report is JSON of its schema")
}

#[test]
fn more_processes_than_open_files() {
    let Some(_live) = live() else { return };
    let many = PROCESSES.to_string();
    let target = Target::start_with(&Interpreter::named("pyenv_3_12"), "many_processes.py", &[&many]);
    let children: Vec<u64> = serde_json::from_value(target.facts["children"].clone()).expect("pids");
    let profiler = Profiler::new().arg("--all-python").arg("--split").arg("process");
    let profiler = profiler.rate(499).milliseconds(6_000).within(&["prlimit", "--nofile=130"]);
    let output = profiler.run();
    // Its children would slow down what follows.
    drop(target);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    let report = report(&profiler);
    let loss: u64 = report.loss.values().sum();
    assert_eq!(report.ran, report.stored + report.idle + report.filtered + report.not_python + loss, "{report:#?}");

    let directory = profiler.output();
    assert_eq!(fs::metadata(directory).unwrap().permissions().mode() & 0o777, 0o700);
    let files = files(directory);
    let (mut stored, mut by_pid) = (0, BTreeMap::new());
    for (number, file) in files.iter().enumerate() {
        let recorded = Recorded::read(file);
        // The judge is a process for each file: some stand for all.
        if number % 15 == 0 {
            judge::agrees(file, &recorded);
        }
        stored += recorded.samples.len() as u64;
        let reader = Reader::new(File::open(file).unwrap()).unwrap();
        let metadata = Metadata::find(reader.tables()).expect("it is ours");
        let [process] = &metadata.processes[..] else { panic!("{file:?}: {:?}", metadata.processes) };
        let name = file.file_name().unwrap().to_str().unwrap();
        assert!(name.starts_with(&format!("{}-", process.pid)) && name.ends_with(".tach"), "{name}");
        let own = &metadata.report;
        let loss: u64 = own.loss.values().sum();
        assert_eq!(own.stored, recorded.samples.len() as u64);
        assert_eq!(own.ran, own.stored + own.idle + own.filtered + own.not_python + loss, "{own:#?}");
        by_pid.insert(u64::from(process.pid), recorded);
    }
    assert_eq!((stored, files.len()), (report.stored, by_pid.len()), "no sample is in two files or in none");
    let shown = report.processes.iter().filter(|process| process.samples > 0).count();
    assert_eq!(files.len(), shown);
    // On a loaded machine one may not have run at all.
    let ran: Vec<_> = children.iter().filter_map(|child| Some((*child, by_pid.get(child)?))).collect();
    assert!(ran.len() > PROCESSES * 9 / 10, "{} of {PROCESSES}: {stderr}", ran.len());
    for (child, recorded) in ran {
        for sample in &recorded.samples {
            assert_eq!(sample.thread_id, child, "a child has one thread, its own");
            let root = recorded.root(sample).expect("a stack");
            assert_eq!(root.function, "<module>", "no frame names the process");
        }
    }
}

#[test]
fn other_formats_are_split_too_and_nothing_is_left_behind() {
    let Some(_live) = live() else { return };
    let _targets = [(); 3].map(|()| Target::start(&Interpreter::named("pyenv_3_12"), "spin.py"));
    let profiler = Profiler::new().arg("--all-python").arg("--split").arg("process").arg("--format").arg("collapsed");
    let profiler = profiler.rate(499).milliseconds(1_000);
    let output = profiler.run();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut total = 0;
    for file in files(profiler.output()) {
        let text = fs::read_to_string(&file).expect("collapsed stacks are text");
        total += text.lines().map(|line| line.rsplit_once(' ').unwrap().1.parse::<u64>().unwrap()).sum::<u64>();
    }
    assert_eq!(total, report(&profiler).stored);
    assert!(total > 100, "{total}");
    let around: Vec<_> = files(profiler.output().parent().unwrap());
    assert_eq!(around, [profiler.output().to_owned(), profiler.report()]);
}

#[test]
fn a_killed_recording_is_recovered_as_a_whole() {
    let Some(_live) = live() else { return };
    let _target = Target::start(&Interpreter::named("pyenv_3_12"), "spin.py");
    let profiler = Profiler::new().arg("--all-python").arg("--split").arg("process").rate(499);
    let running = profiler.start();
    std::thread::sleep(std::time::Duration::from_millis(2_500));
    let profiler = running.kill();
    let part = PathBuf::from(format!("{}.part", profiler.output().display()));
    let good = part.join("good.tach");
    let words = [part.join("recording.tach.part"), "-o".into(), good.clone()];
    let output = std::process::Command::new(tachyon_tests::binary()).arg("recover").args(words).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let recorded = Recorded::read(&good);
    judge::agrees(&good, &recorded);
    assert!(recorded.samples.len() > 100, "{}", recorded.samples.len());
}
