use super::*;
use crate::advice::Advice as _;
use crate::cli::plan::Keep;
use crate::sinks::Format;
use std::time::Duration;

fn words(line: &[&str]) -> Vec<OsString> {
    std::iter::once("tachyon-bpf").chain(line.iter().copied()).map(OsString::from).collect()
}

fn record(line: &[&str]) -> RecordArgs {
    match parse(words(line)) {
        Ok(Verb::Record(args)) => *args,
        other => panic!("{line:?}: {other:?}"),
    }
}

fn refused(line: &[&str]) -> (String, String) {
    match parse(words(line)) {
        Err(NoVerb::Usage(failure)) => {
            assert_eq!(failure.exit_status(), crate::cli::failure::STATUS_USAGE);
            (failure.to_string(), failure.hint().unwrap_or_default())
        }
        other => panic!("{line:?}: {other:?}"),
    }
}

#[test]
fn definition_is_consistent() {
    CommandLine::command().debug_assert();
}

#[test]
fn manual_and_completions_know_all_flags() {
    let mut man = Vec::new();
    write_man(&mut man).unwrap();
    let man = String::from_utf8(man).unwrap().replace("\\-", "-");
    let completions = |shell| {
        let mut text = Vec::new();
        write_completions(shell, &mut text).unwrap();
        String::from_utf8(text).unwrap()
    };
    let [bash, zsh, fish] =
        [clap_complete::Shell::Bash, clap_complete::Shell::Zsh, clap_complete::Shell::Fish].map(completions);
    let command = CommandLine::command();
    let verbs = command.get_subcommands();
    // Options that a debug build has for developers are hidden.
    let shown = verbs.flat_map(clap::Command::get_arguments).filter(|argument| !argument.is_hide_set());
    for flag in shown.filter_map(clap::Arg::get_long) {
        assert!(man.contains(&format!("--{flag}")), "the manual lacks --{flag}");
        for (shell, text, form) in [("bash", &bash, "--"), ("zsh", &zsh, "--"), ("fish", &fish, "-l ")] {
            assert!(text.contains(&format!("{form}{flag}")), "the completions of {shell} lack --{flag}");
        }
    }
    assert!(man.contains(".SH RECOVER") && man.contains("Exit status"));
}

#[test]
fn record_is_the_default_verb() {
    for line in [&["-p", "1", "-p", "2", "-d", "3s"][..], &["record", "--pid=1", "-p2", "--duration", "3s"]] {
        let args = record(line);
        assert_eq!(args.targets.pids, [Pid(1), Pid(2)]);
        assert_eq!(args.duration, Some(Duration::from_secs(3)));
    }
    assert!(record(&["--all-python"]).targets.all_python);
    assert!(record(&["-p", "1", "--no-native"]).sampling.no_native);
    assert_eq!(record(&["--all-python", "--split", "process"]).split, Some(Split::Process));
}

#[test]
fn what_follows_the_dashes_is_the_command() {
    assert_eq!(
        record(&["--", "python", "-c", "pass", "--", "-p"]).targets.command,
        ["python", "-c", "pass", "--", "-p"]
    );
    assert_eq!(record(&["-d", "3s", "--", "info"]).targets.command, ["info"]);
    assert_eq!(record(&["record", "--as-root", "--", "export", "-o"]).targets.command, ["export", "-o"]);
}

#[test]
fn verbs() {
    let Ok(Verb::Doctor(args)) = parse(words(&["doctor", "--json", "-v", "-p", "7"])) else { panic!("doctor") };
    assert_eq!((args.pids, args.verbose, args.json), (vec![Pid(7)], true, true));
    assert!(matches!(parse(words(&["info", "x.tach"])), Ok(Verb::Info(_))));
    let dump = parse(words(&["dump", "-p", "7", "--json"]));
    assert!(matches!(dump, Ok(Verb::Dump(DumpArgs { pid: Pid(7), json: true, native: false, .. }))));
    let Ok(Verb::Export(args)) = parse(words(&["export", "x.tach", "-o", "-", "--format", "collapsed"])) else {
        panic!("export");
    };
    assert_eq!((args.output, args.format), ("-".into(), Some(Format::Collapsed)));
    for help in [&["--help"][..], &["-h"], &["record", "--help"], &["export", "-h"], &["--version"]] {
        assert!(matches!(parse(words(help)), Err(NoVerb::Shown(_))), "{help:?}");
    }
}

#[test]
fn values_out_of_range_name_the_mend() {
    for (line, message) in [
        (&["-p", "0"][..], "invalid value '0' for '--pid <PID>': a pid is a number from 1, as `ps` shows it"),
        (
            &["-d", "0s", "-p", "1"],
            "invalid value '0s' for '--duration <TIME>': must be longer than 0, leave it out to record until Ctrl-C",
        ),
        (
            &["-d", "0", "-p", "1"],
            "invalid value '0' for '--duration <TIME>': must be longer than 0, leave it out to record until Ctrl-C",
        ),
        (
            &["-d", "30", "-p", "1"],
            "invalid value '30' for '--duration <TIME>': it has no unit, write e.g. 30s, 500ms or 5m",
        ),
        (
            &["-d=-3s", "-p", "1"],
            "invalid value '-3s' for '--duration <TIME>': expected number at 0, write e.g. 30s, 500ms or 5m",
        ),
        (
            &["-d", "1000y", "-p", "1"],
            "invalid value '1000y' for '--duration <TIME>': longer than a year, leave it out to record until Ctrl-C",
        ),
        (
            &["-F", "0", "-p", "1"],
            "invalid value '0' for '--frequency <HZ>': must be 1 to 10000 Hz: with 0 there are no samples",
        ),
        (
            &["-F", "10001", "-p", "1"],
            "invalid value '10001' for '--frequency <HZ>': must be 1 to 10000 Hz: above, sampling would take more than a tenth of the program's time",
        ),
        (
            &["-F", "99999999999", "-p", "1"],
            "invalid value '99999999999' for '--frequency <HZ>': must be 1 to 10000 Hz: above, sampling would take more than a tenth of the program's time",
        ),
        (
            &["--max-cpu", "0", "-p", "1"],
            "invalid value '0' for '--max-cpu <PERCENT>': must be a number of percent of one core, 0.01 to 10000, such as 1 or 0.5%",
        ),
        (
            &["-i", "10us", "-p", "1"],
            "invalid value '10us' for '--interval <TIME>': must be 100us to 1s: below, sampling would take more than a tenth of the program's time",
        ),
        (
            &["--format", "svg", "-p", "1"],
            "invalid value 'svg' for '--format <FORMAT>': one of tach, collapsed, gperftools, pprof, speedscope, report, flamegraph, firefox, jsonl",
        ),
        (
            &["--compression", "lz4", "-p", "1"],
            "invalid value 'lz4' for '--compression <COMPRESSION>' [possible values: zstd, none]",
        ),
        (&["-p", "1", "--all-python"], "the argument '--pid <PID>' cannot be used with '--all-python'"),
        (&["-p", "1", "--", "x"], "the argument '--pid <PID>' cannot be used with '[CMD]...'"),
        (&["-F", "9", "-i", "10ms"], "the argument '--frequency <HZ>' cannot be used with '--interval <TIME>'"),
        (&["dump"], "the following required arguments were not provided: --pid <PID>"),
        (&["export", "x.tach"], "the following required arguments were not provided: --output <OUT>"),
    ] {
        assert_eq!(refused(line).0, message, "{line:?}");
    }
}

#[test]
fn what_is_missing_is_shown_by_example() {
    for (line, hint) in [
        (&["export", "x.tach"][..], "for example: tachyon-bpf export x.tach -o report.html"),
        (&["export"], "for example: tachyon-bpf export recording.tach -o report.html"),
        (&["merge", "a.tach", "b.tach"], "for example: tachyon-bpf merge a.tach b.tach -o all.tach"),
        (&["report"], "for example: tachyon-bpf report recording.tach"),
        (&["dump"], "for example: tachyon-bpf dump -p PID"),
        (&["export", "--pid", "x"], "tachyon-bpf export --help explains all options"),
        (&["--pid"], "tachyon-bpf --help explains all options"),
    ] {
        assert_eq!(refused(line).1, hint, "{line:?}");
    }
}

#[test]
fn what_is_not_there_yet_is_said_so() {
    let (message, hint) = refused(&["python", "app.py"]);
    assert_eq!(message, "unexpected word 'python'");
    assert!(hint.contains("tachyon-bpf -- python app.py"));
    assert_eq!(refused(&["-p", "1", "--durationn", "3s"]).1, "a similar argument exists: '--duration'");
}

#[test]
fn what_is_kept_is_a_size_or_an_age() {
    let hours = |hours: u64| Ok(Keep::Age(Duration::from_secs(hours * 3600)));
    assert_eq!(values::keep("7d"), hours(7 * 24));
    assert_eq!(values::keep("1d 12h"), hours(36));
    assert_eq!(values::keep("30m"), Ok(Keep::Age(Duration::from_secs(30 * 60))));
    assert_eq!(values::keep("30M"), Ok(Keep::Bytes(30_000_000)));
    assert_eq!(values::keep("2GiB"), Ok(Keep::Bytes(2 << 30)));
    assert_eq!(values::keep("12kb"), Ok(Keep::Bytes(12_000)));
    for wrong in ["7", "0d", "0GiB", "many", "-1d", ""] {
        assert!(values::keep(wrong).is_err(), "{wrong}");
    }
}
