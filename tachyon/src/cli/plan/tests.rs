use super::super::args::{self, Verb};
use super::super::failure::{STATUS_FAILED, STATUS_USAGE};
use super::*;
use crate::sinks::Format;

fn surroundings() -> Surroundings {
    Surroundings {
        stdout_is_terminal: false,
        stderr_is_terminal: true,
        no_color: false,
        now: SystemTime::UNIX_EPOCH + Duration::from_secs(1_769_847_000),
    }
}

fn plan_in(words: &[&str], surroundings: &Surroundings) -> Result<Plan, anyhow::Error> {
    let words = std::iter::once("tachyon-bpf").chain(words.iter().copied()).map(OsString::from);
    match args::parse(words) {
        Ok(Verb::Record(args)) => Plan::new(*args, surroundings),
        other => panic!("{other:?}"),
    }
}

fn plan(words: &[&str]) -> Plan {
    plan_in(words, &surroundings()).unwrap()
}

fn refused(words: &[&str]) -> (String, u8) {
    let error = plan_in(words, &surroundings()).unwrap_err();
    let mut out = Vec::new();
    let status = super::super::failure::show(&error, &mut out);
    (String::from_utf8(out).unwrap().lines().next().unwrap().to_owned(), status)
}

fn own_pid() -> String {
    std::process::id().to_string()
}

#[test]
fn defaults() {
    let pid = own_pid();
    let plan = plan(&["-p", &pid, "-p", &pid]);
    assert_eq!(plan.targets, Targets::Pids(vec![Pid(std::process::id())]));
    assert!(!plan.follow_children);
    assert_eq!(plan.duration, None);
    assert_eq!((plan.rate_hz, plan.interval), (99.0, Duration::from_nanos(10_101_010)));
    assert_eq!(plan.output.destination, Destination::Path("tachyon-20260131T081000Z.tach".into()));
    assert_eq!((plan.output.format, plan.output.force), (Format::Tach, false));
    assert_eq!(plan.compression, Compression::Zstd);
    assert!(plan.progress && plan.colours && plan.report.is_none() && !plan.threads && !plan.gil);
}

#[test]
fn limits_are_shares_of_a_core() {
    for (text, share) in [("1", 0.01), ("0.5%", 0.005), ("150 %", 1.5)] {
        assert_eq!(plan(&["--all-python", "--max-cpu", text]).max_cpu, Some(share), "{text}");
    }
    assert_eq!(plan(&["--all-python"]).max_cpu, None);
}

#[test]
fn memory_has_a_unit() {
    for (text, bytes) in [("32MiB", 32 << 20), ("1GiB", 1 << 30), ("128 mb", 128_000_000), ("134217728", 128 << 20)] {
        assert_eq!(plan(&["--all-python", "--max-memory", text]).max_memory, Some(bytes), "{text}");
    }
    assert_eq!(plan(&["--all-python"]).max_memory, None);
    for odd in ["31M", "M", "", "1 furlong", "-1"] {
        assert!(args::parse(["tachyon-bpf", "--all-python", "--max-memory", odd].map(Into::into)).is_err(), "{odd}");
    }
}

#[test]
fn interval_is_frequency_the_other_way_round() {
    let plan = plan(&["--all-python", "-i", "4ms"]);
    assert_eq!((plan.rate_hz, plan.interval), (250.0, Duration::from_millis(4)));
    let plan = self::plan(&["--all-python", "-F", "10000"]);
    assert_eq!(plan.interval, Duration::from_micros(100));
}

#[test]
fn who_brings_children() {
    let pid = own_pid();
    assert!(plan(&["-p", &pid, "--subprocesses"]).follow_children);
    assert!(plan(&["--all-python"]).follow_children);
    let plan = plan(&["--as-root", "--", "python", "-V"]);
    assert!(plan.follow_children && !plan.progress);
    assert_eq!(plan.targets, Targets::Command { argv: vec!["python".into(), "-V".into()], as_root: true });
}

#[test]
fn format_is_told_or_read_from_the_extension() {
    for (words, format) in [
        (&["--all-python", "-o", "x.collapsed"][..], Format::Collapsed),
        (&["--all-python", "-o", "x.txt", "--format", "collapsed"], Format::Collapsed),
        (&["--all-python", "-o", "x.collapsed", "--format", "tach"], Format::Tach),
        (&["--all-python", "-o", "-"], Format::Tach),
    ] {
        assert_eq!(plan(words).output.format, format, "{words:?}");
    }
    let split = plan(&["--all-python", "--split", "process", "-o", "profiles.d/"]);
    assert_eq!((split.output.format, split.split), (Format::Tach, true));
    let split = plan(&["--all-python", "--split", "process", "--format", "pprof"]).output;
    assert_eq!(split.destination, Destination::Path("tachyon-20260131T081000Z".into()));
    let named = plan(&["--all-python", "--format", "collapsed"]).output.destination;
    assert_eq!(named, Destination::Path("tachyon-20260131T081000Z.collapsed".into()));
}

#[test]
fn terminals_are_respected() {
    let terminal = Surroundings { stdout_is_terminal: true, ..surroundings() };
    assert!(plan_in(&["--all-python", "-o", "-"], &terminal).is_err());
    assert!(plan_in(&["--all-python", "-o", "-", "--format", "collapsed"], &terminal).is_ok());
    let piped = Surroundings { stderr_is_terminal: false, ..surroundings() };
    let plan = plan_in(&["--all-python"], &piped).unwrap();
    assert!(!plan.progress && !plan.colours);
    let plain = Surroundings { no_color: true, ..surroundings() };
    let plan = plan_in(&["--all-python"], &plain).unwrap();
    assert!(plan.progress && !plan.colours);
}

#[test]
fn refusals() {
    let directory = tempfile::tempdir().unwrap();
    let taken = directory.path().join("taken.tach");
    fs::write(&taken, "").unwrap();
    let taken = taken.to_str().unwrap();
    for (words, message, status) in [
        (&[][..], "tachyon-bpf: no process to profile".to_owned(), STATUS_USAGE),
        (&["--all-python", "--as-root"], "tachyon-bpf: --as-root without a program to run".to_owned(), STATUS_USAGE),
        (
            &["-o", "-", "--format", "gperftools", "--all-python"],
            "tachyon-bpf: cannot write a gperftools profile to standard output: it is two files".to_owned(),
            STATUS_USAGE,
        ),
        (
            &["-o", "x.gif", "--all-python"],
            "tachyon-bpf: cannot tell the format from the extension .gif of x.gif".to_owned(),
            STATUS_USAGE,
        ),
        (
            &["-o", "x.tach", "--report", "./x.tach", "--all-python"],
            "tachyon-bpf: --report and --output are the same file".to_owned(),
            STATUS_USAGE,
        ),
        (
            &["--all-python", "--split", "process", "-o", "-"],
            "tachyon-bpf: cannot write one file per process to standard output".to_owned(),
            STATUS_USAGE,
        ),
        (
            &["--all-python", "--split", "process", "--force", "-o", taken],
            format!("tachyon-bpf: cannot write into {taken}: it is a file"),
            STATUS_FAILED,
        ),
        (&["-p", "2147483647"], "tachyon-bpf: no such process: 2147483647".to_owned(), STATUS_FAILED),
        (&["--all-python", "-o", taken], format!("tachyon-bpf: cannot write {taken}: it exists"), STATUS_FAILED),
        (&["--all-python", "--report", taken], format!("tachyon-bpf: cannot write {taken}: it exists"), STATUS_FAILED),
        (
            &["--all-python", "-o", "/no/such/x.tach"],
            "tachyon-bpf: cannot write into /no/such: no such file or directory".to_owned(),
            STATUS_FAILED,
        ),
    ] {
        assert_eq!(refused(words), (message, status), "{words:?}");
    }
    assert!(plan_in(&["--all-python", "--force", "-o", taken], &surroundings()).is_ok());
}

#[test]
fn threads_are_no_processes() {
    let (sender, receiver) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        sender.send(nix::unistd::gettid()).unwrap();
        std::thread::park();
    });
    let tid = receiver.recv().unwrap();
    let (message, status) = refused(&["-p", &tid.to_string()]);
    assert!(message.ends_with(&format!("is a thread of process {}", std::process::id())), "{message}");
    assert_eq!(status, STATUS_FAILED);
    thread.thread().unpark();
    thread.join().unwrap();
}
