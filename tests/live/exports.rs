//! One live recording in every format: the same samples for every reader. And the recording cut at many places.

use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{Cursor, Read as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use tachyon::cli::recover::{self, RecoverError};
use tachyon::report::Report;
use tachyon::sinks::Format;
use tachyon::sinks::pprof::proto;
use tachyon::tach::Reader;
use tachyon_tests::viewers::{Costs, Firefox, go_pprof, perl_pprof, run, tools};
use tachyon_tests::{Interpreter, Profiler, Recorded, Recording, ShownFrame, Target, binary, judge, live};

fn record() -> Recording {
    let target = Target::start(&Interpreter::named("pyenv_3_12"), "eight_threads.py");
    Profiler::of(target.pid()).rate(499).milliseconds(2_500).record()
}

fn export(recording: &Recording, to: PathBuf) -> PathBuf {
    run(Command::new(binary()).arg("export").arg(&recording.path).arg("-o").arg(&to));
    to
}

fn number(text: &Value) -> u64 {
    text.as_u64().unwrap_or_else(|| panic!("{text} is no count"))
}

/// Counts at the ends of lines.
pub(super) fn collapsed(text: &str) -> u64 {
    text.lines().map(|line| line.rsplit_once(' ').expect("a count").1.parse::<u64>().expect("a number")).sum()
}

pub(super) fn speedscope(file: &Path) -> u64 {
    let file: Value = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
    let profiles = file["profiles"].as_array().unwrap().iter();
    let samples = profiles.flat_map(|profile| profile["samples"].as_array().unwrap());
    samples.filter(|stack| !stack.as_array().unwrap().is_empty()).count() as u64
}

pub(super) fn firefox(file: &Path) -> u64 {
    let file: Value = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
    let threads = file["threads"].as_array().unwrap().iter();
    threads.flat_map(|thread| thread["samples"]["weight"].as_array().unwrap()).map(number).sum()
}

fn proto_of(file: &Path) -> proto::Profile {
    use prost::Message as _;
    let mut bytes = Vec::new();
    flate2::read::GzDecoder::new(fs::File::open(file).unwrap()).read_to_end(&mut bytes).unwrap();
    proto::Profile::decode(&bytes[..]).unwrap()
}

pub(super) fn pprof(file: &Path) -> u64 {
    let message = proto_of(file);
    message.sample.iter().map(|sample| sample.value[0].unsigned_abs()).sum()
}

pub(super) fn gperftools(file: &Path) -> u64 {
    let bytes = fs::read(file).unwrap();
    let words: Vec<u64> = bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap())).collect();
    let (mut rest, mut counted) = (&words[5..], 0);
    while rest[..3] != [0, 1, 0] {
        counted += rest[0];
        rest = &rest[2 + usize::try_from(rest[1]).unwrap()..];
    }
    counted
}

/// Samples by function, as leaf and anywhere in the stack: recursion counts once. With `synthetic` addresses names survive
/// readers that take brackets for C++.
fn by_function(recorded: &Recorded, synthetic: bool) -> Costs {
    let name = |frame: &ShownFrame| {
        let special = frame.is_special();
        match frame.function.split_once('!') {
            Some((_, "<unknown>")) if special && synthetic => "[unknown]".to_owned(),
            Some((_, symbol)) if special => symbol.to_owned(),
            _ if special && synthetic => frame.function.replace('<', "[").replace('>', "]"),
            _ if frame.function.starts_with('<') && synthetic => {
                let file = frame.filename.rsplit('/').next().unwrap();
                format!("{}.{}", file.strip_suffix(".py").unwrap_or(file), frame.function)
            }
            _ => frame.function.clone(),
        }
    };
    let mut costs = Costs::new();
    for sample in &recorded.samples {
        let stack = &recorded.stacks[sample.stack];
        let names: Vec<String> = stack.iter().map(|&frame| name(&recorded.frames[frame])).collect();
        costs.entry(names[0].clone()).or_default().0 += 1;
        for name in names.into_iter().collect::<BTreeSet<_>>() {
            costs.entry(name).or_default().1 += 1;
        }
    }
    costs
}

#[test]
fn every_format_and_every_reader_has_the_same_samples() {
    let Some(_live) = live() else { return };
    let recording = record();
    let dir = tempfile::tempdir().unwrap();
    let to = |name: &str| export(&recording, dir.path().join(name));
    let total = recording.report.stored;
    assert!(total > 100, "{total}");

    // CPython's own formats, by its own reader.
    for (form, count) in &judge::totals(&[&recording.path])[0] {
        assert_eq!(*count, total, "replay --{form}");
    }
    // The project's own.
    let text = |name: &str| fs::read_to_string(to(name)).unwrap();
    assert_eq!(text("a.jsonl").lines().count() as u64, total);
    assert_eq!(collapsed(&text("a.collapsed")), total);
    for name in ["a.html", "a.svg"] {
        assert!(text(name).contains(&format!("{total} samples in")), "{name}");
    }
    let (scope, fox) = (to("a.speedscope.json"), to("a.firefox.json"));
    let (proto, perftools) = (to("a.pb.gz"), to("a.prof"));
    assert_eq!([speedscope(&scope), firefox(&fox), pprof(&proto), gperftools(&perftools)], [total; 4]);
    let again = to("b.tach");
    let read = Recorded::read(&again);
    judge::agrees(&again, &read);
    // Each thread's samples; the order across threads is not kept.
    let samples = |recorded: &Recorded| {
        let each = recorded.samples.iter().map(|s| (s.thread_id, s.timestamp_us, s.status, recorded.shown(s.stack)));
        each.collect::<BTreeSet<_>>()
    };
    assert_eq!(samples(&read), samples(&recording.recorded));

    // Third-party readers of those.
    let Some(tools) = tools() else { return };
    for (file, synthetic) in [(&proto, false), (&perftools, true)] {
        let (costs, head) = go_pprof(file, &[]);
        assert!(head.contains(&format!("of {total} total")), "{head}");
        assert_eq!(costs, by_function(&recording.recorded, synthetic), "{file:?}");
    }
    let (costs, head) = perl_pprof(&perftools, &[]);
    assert_eq!(head, format!("Total: {total} samples"));
    assert_eq!(costs.values().map(|(flat, _)| flat).sum::<u64>(), total, "{costs:?}");
    let threads = Firefox::load(&tools, &fox).query(&["thread", "list"]);
    let distinct: BTreeSet<_> = recording.recorded.samples.iter().map(|s| s.thread_id).collect();
    assert!(threads.contains(&format!("{} threads across 1 process", distinct.len())), "{threads}");
}

/// The count in a flame graph's caption.
fn caption(file: &Path) -> u64 {
    let text = fs::read_to_string(file).unwrap();
    let before = text.split(" samples in").next().unwrap();
    let digits = before.rsplit(|c: char| !c.is_ascii_digit()).next().unwrap();
    digits.parse().expect("the caption begins with the count")
}

/// What a file of this format holds.
fn count(file: &Path, format: Format) -> u64 {
    match format {
        Format::Tach => Recorded::read(file).samples.len() as u64,
        Format::Collapsed => collapsed(&fs::read_to_string(file).unwrap()),
        Format::Gperftools => gperftools(file),
        Format::Pprof => pprof(file),
        Format::Speedscope => speedscope(file),
        Format::Report | Format::Flamegraph => caption(file),
        Format::Firefox => firefox(file),
        Format::Jsonl => fs::read_to_string(file).unwrap().lines().count() as u64,
    }
}

/// Records what `words` say to a file, whose ending names the format, with native frames if these have addresses.
/// Returns the account.
fn record_to(file: &Path, format: Format, words: &[&str]) -> Report {
    let report = file.with_added_extension("report");
    let mut command = Command::new(binary());
    let addresses = matches!(format, Format::Gperftools | Format::Pprof);
    command.arg(if addresses { "--native" } else { "--no-native" });
    run(command.args(words).arg("-o").arg(file).arg("--report").arg(&report));
    serde_json::from_slice(&fs::read(report).unwrap()).unwrap()
}

/// Formats that a recording writes itself hold what its account says, for each file ending there is.
#[test]
fn recorded_directly_in_every_format() {
    let Some(_live) = live() else { return };
    let target = Target::start(&Interpreter::named("pyenv_3_12"), "spin.py");
    let dir = tempfile::tempdir().unwrap();
    for (ending, format) in Format::ENDINGS {
        let file = dir.path().join(format!("a{ending}"));
        let report = record_to(&file, format, &["-p", &target.pid().to_string(), "-F", "499", "-d", "700ms"]);
        assert_eq!(count(&file, format), report.stored, "{ending}");
        assert!(report.stored > 20, "{ending}: {}", report.stored);
    }
}

/// Several processes, split by thread, in each format; and what pprof's labels say about whose sample it is.
#[test]
fn several_processes_recorded_directly_in_every_format() {
    let Some(_live) = live() else { return };
    let targets =
        ["eight_threads.py", "deep_stack.py"].map(|program| Target::start(&Interpreter::named("pyenv_3_12"), program));
    let dir = tempfile::tempdir().unwrap();
    let pids = targets.each_ref().map(|target| target.pid().to_string());
    let words = ["-p", &pids[0], "-p", &pids[1], "--threads", "-F", "499", "-d", "1s"];
    for format in Format::ALL {
        let file = dir.path().join(format!("b.{}", format.extension()));
        let report = record_to(&file, format, &words);
        assert_eq!(count(&file, format), report.stored, "{format}");
        let told = report.processes.iter().map(|process| process.samples).sum::<u64>();
        assert!(report.processes.iter().all(|process| process.samples > 20) && told == report.stored, "{report:#?}");
        if format == Format::Pprof {
            check_labels(&file, &report, &targets[0]);
        }
    }
}

/// Each sample names its process, thread and interpreter, and says whether it held the GIL.
fn check_labels(file: &Path, report: &Report, threads: &Target) {
    let message = proto_of(file);
    let text = |index: i64| message.string_table[usize::try_from(index).unwrap()].as_str();
    let (mut by_pid, mut named) = (BTreeMap::new(), BTreeMap::new());
    for sample in &message.sample {
        let labels: BTreeMap<_, _> = sample.label.iter().map(|label| (text(label.key), label)).collect();
        let pid = u32::try_from(labels["pid"].num).unwrap();
        *by_pid.entry(pid).or_insert(0) += sample.value[0].unsigned_abs();
        assert!(text(labels["comm"].str).starts_with("python"), "{labels:?}");
        assert_eq!(labels["interpreter"].num, 0);
        assert!(["held", "not held"].contains(&text(labels["gil"].str)), "{labels:?}");
        assert!(text(labels["script"].str).ends_with(".py"), "{labels:?}");
        let tid = labels["tid"].num.to_string();
        if let Some(index) = threads.facts["threads"].get(&tid) {
            assert_eq!(pid, threads.pid());
            named.insert(index.as_u64().unwrap(), labels.get("thread").map(|label| text(label.str).to_owned()));
        }
    }
    let told = report.processes.iter().map(|process| (process.pid, process.samples));
    assert_eq!(by_pid, told.collect::<BTreeMap<_, _>>());
    // Eight threads that compete for one GIL: each has run.
    assert_eq!(named.keys().copied().collect::<Vec<_>>(), (0..8).collect::<Vec<_>>(), "{named:?}");
    assert!(named.values().all(|name| name.as_deref().is_some_and(|name| name.starts_with("Thread-"))), "{named:?}");
}

/// A real recording, killed: its file, its journal and its tail, cut at many places.
#[test]
fn a_recording_cut_anywhere_is_recovered_or_refused() {
    let Some(_live) = live() else { return };
    let target = Target::start(&Interpreter::named("pyenv_3_12"), "eight_threads.py");
    let profiler = Profiler::of(target.pid()).rate(4_999);
    let part = profiler.output().with_extension("tach.part");
    let running = profiler.start();
    // The compressor emits its output 128 KiB of samples at a time.
    let begin = std::time::Instant::now();
    while fs::metadata(&part).expect("it records").len() < 1_000 {
        assert!(begin.elapsed() < std::time::Duration::from_secs(90), "nothing comes to the file");
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    std::thread::sleep(std::time::Duration::from_millis(1_300));
    let profiler = running.kill();
    let file = fs::read(&part).expect("a killed recording leaves its file");
    assert_eq!(part, profiler.output().with_extension("tach.part"));
    let beside = |ending| fs::read(part.with_added_extension(ending)).expect("and what lies beside it");
    let (journal, tail) = (beside("journal"), beside("tail"));
    assert!(file.len() > 1_000 && journal.len() > 1_000 && tail.len() > 1_000, "{} {}", file.len(), tail.len());
    let dir = tempfile::tempdir().unwrap();
    let paths = ["cut", "journal", "journal.tail"].map(|name| dir.path().join(name));
    let recovered = |file: &[u8], journal: &[u8], tail: &[u8]| {
        for (path, bytes) in paths.iter().zip([file, journal, tail]) {
            fs::write(path, bytes).unwrap();
        }
        let mut good = Cursor::new(Vec::new());
        let recovered = recover::run(&paths[0], Some(&paths[1]), &mut good)?;
        let mut reader = Reader::new(good).expect("what was recovered can be opened");
        let (mut samples, mut count) = (reader.samples().expect("and its samples"), 0);
        while samples.next_sample().expect("and read to their end").is_some() {
            count += 1;
        }
        assert_eq!(count, recovered.samples);
        anyhow::Ok(count)
    };
    // `tachyon/tests/recover.rs` cuts at every byte.
    let places = |len: usize| (0..len).step_by(len / 60 + 1).chain([len]);
    let all = recovered(&file, &journal, &tail).expect("all of it is recovered");
    for of_tail in [&tail[..], &[]] {
        let mut before = 0;
        for len in places(file.len()) {
            let count = recovered(&file[..len], &journal, of_tail).unwrap_or_else(|error| panic!("{len}: {error:#}"));
            assert!(count >= before, "{len} bytes: fewer samples than with some bytes less");
            before = count;
        }
        assert!(before <= all && (of_tail.is_empty() || before == all), "{before} of {all}");
    }
    for len in places(tail.len()) {
        let count = recovered(&file, &journal, &tail[..len]).unwrap_or_else(|error| panic!("{len}: {error:#}"));
        assert!(count <= all);
    }
    assert!(all > 100, "{all}");
    for len in places(journal.len()) {
        match recovered(&file, &journal[..len], &tail) {
            Ok(count) => assert!(count <= all),
            Err(error) => {
                assert!(matches!(error.downcast_ref(), Some(RecoverError::EmptyJournal(_))), "{len}: {error:#}");
                assert!(!journal[..len].contains(&b'\n'), "{len} bytes of the journal");
            }
        }
    }
}
