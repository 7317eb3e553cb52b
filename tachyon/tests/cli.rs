//! The built binary's command line: help, refusals and their exit statuses, to the letter.

use std::fs;
use std::io::Read as _;
use std::path::Path;
use std::process::{Command, Output, Stdio};

fn tachyon() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tachyon-bpf"));
    command.env_remove("SUDO_UID").env_remove("SUDO_GID").stdin(Stdio::null());
    command
}

fn run(arguments: &[&str]) -> Output {
    tachyon().args(arguments).output().unwrap()
}

/// The program refuses with exactly these lines on standard error, nothing on standard output, and this status.
#[track_caller]
fn refuses(arguments: &[&str], status: i32, lines: &str) {
    let output = run(arguments);
    assert_eq!(String::from_utf8_lossy(&output.stderr), lines, "{arguments:?}");
    assert_eq!(output.status.code(), Some(status), "{arguments:?}");
    assert!(output.stdout.is_empty(), "{arguments:?}");
}

#[test]
fn help_teaches() {
    let output = run(&["--help"]);
    assert!(output.status.success());
    let help = String::from_utf8(output.stdout).unwrap();
    for word in [
        "--all-python",
        "[default: 99]",
        "sudo tachyon-bpf -p 4242 -d 30s",
        "--split",
        "--report",
        "doctor",
        "Exit status",
        "(.speedscope.json .speedscope)",
    ] {
        assert!(help.contains(word), "{word} is missing from:\n{help}");
    }
    assert!(output.stderr.is_empty());
    for arguments in [&["-h"][..], &["record", "--help"], &["export", "--help"], &["info", "-h"], &["doctor", "-h"]] {
        assert!(run(arguments).status.success(), "{arguments:?}");
    }
    let version = run(&["--version"]);
    assert_eq!(String::from_utf8(version.stdout).unwrap(), concat!("tachyon-bpf ", env!("CARGO_PKG_VERSION"), "\n"));
}

#[test]
fn the_page_names_every_flag_of_the_help() {
    let page = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/command-line.md")).unwrap();
    for verb in ["record", "export", "merge", "recover", "info", "doctor"] {
        let help = String::from_utf8(run(&[verb, "--help"]).stdout).unwrap();
        let flags = help
            .split_whitespace()
            .filter(|word| word.starts_with("--") && word.len() > 2)
            .map(|word| word.trim_end_matches([',', ')', '.', ':', ';', '`']));
        for flag in flags {
            assert!(page.contains(flag), "docs/command-line.md says nothing of {verb} {flag}");
        }
    }
    for (ending, format) in tachyon::sinks::Format::ENDINGS {
        assert!(page.contains(&format!("`{ending}`")), "docs/command-line.md says nothing of {format}'s {ending}");
    }
}

#[test]
fn usage_errors_are_two_lines_and_status_2() {
    refuses(
        &[],
        2,
        "tachyon-bpf: no process to profile\n\
         hint: give -p PID, --all-python, or a program to run: -- python app.py\n",
    );
    refuses(
        &["-p", "1", "-d", "0s"],
        2,
        "tachyon-bpf: invalid value '0s' for '--duration <TIME>': must be longer than 0, leave it out to record until \
         Ctrl-C\nhint: tachyon-bpf --help explains all options\n",
    );
    refuses(
        &["-p", "1", "-F", "20000"],
        2,
        "tachyon-bpf: invalid value '20000' for '--frequency <HZ>': must be 1 to 10000 Hz: above, sampling would take \
         more than a tenth of the program's time\nhint: tachyon-bpf --help explains all options\n",
    );
    refuses(
        &["python", "app.py"],
        2,
        "tachyon-bpf: unexpected word 'python'\n\
         hint: put the program to profile after `--`: tachyon-bpf -- python app.py\n",
    );
    refuses(
        &["--all-python", "-o", "x.gif"],
        2,
        "tachyon-bpf: cannot tell the format from the extension .gif of x.gif\n\
         hint: known are .tach .collapsed .prof .pb.gz .speedscope.json .html .svg .firefox.json .jsonl and others; --format overrides the extension\n",
    );
}

#[test]
fn what_cannot_be_profiled_is_status_1() {
    let directory = tempfile::tempdir().unwrap();
    let taken = directory.path().join("taken.tach");
    fs::write(&taken, "precious").unwrap();
    let taken = taken.to_str().unwrap();
    refuses(
        &["-p", "2147483647"],
        1,
        "tachyon-bpf: no such process: 2147483647\n\
         hint: `tachyon-bpf doctor -v` lists the Python processes that run\n",
    );
    refuses(
        &["--all-python", "-o", taken],
        1,
        &format!("tachyon-bpf: cannot write {taken}: it exists\nhint: give another path, or --force to replace it\n"),
    );
    refuses(
        &["--all-python", "-o", "/no/such/directory/x.tach"],
        1,
        "tachyon-bpf: cannot write into /no/such/directory: no such file or directory\n\
         hint: create the directory first, or give another path\n",
    );
    refuses(
        &["--all-python", "--force", "-o", directory.path().to_str().unwrap(), "--format", "tach"],
        1,
        &format!(
            "tachyon-bpf: cannot replace {}: it is a directory\n\
             hint: only a regular file is replaced: give another path\n",
            directory.path().display()
        ),
    );
    assert_eq!(fs::read(taken).unwrap(), b"precious");
}

#[test]
fn files_that_were_cut_have_a_hint() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("x.tach.part");
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/tach/v03_record_types.tach");
    let whole = fs::read(fixture).unwrap();
    let path_text = path.to_str().unwrap();
    let mut header = whole[..64].to_vec();
    header[28..56].fill(0);
    fs::write(&path, header).unwrap();
    for verb in ["read", "export"] {
        let arguments = if verb == "read" { vec!["info", path_text] } else { vec!["export", path_text, "-o", "-"] };
        refuses(
            &arguments,
            1,
            &format!(
                "tachyon-bpf: cannot {verb} {path_text}: the recording was cut before its end: the header was never completed\n\
                 hint: `tachyon-bpf recover` makes a readable file of a recording that was cut\n"
            ),
        );
    }
    // While it is being recorded, it is not broken.
    let recorder = fs::File::open(&path).unwrap();
    recorder.try_lock().unwrap();
    refuses(
        &["info", path_text],
        1,
        &format!(
            "tachyon-bpf: cannot read {path_text}: it is being recorded by pid {}\n\
             hint: `tachyon-bpf recover` makes a snapshot of it\n",
            std::process::id()
        ),
    );
    drop(recorder);
    fs::write(&path, &whole[..whole.len() / 2]).unwrap();
    let told = String::from_utf8(run(&["info", path_text]).stderr).unwrap();
    assert!(told.ends_with(" is past the end\nhint: the file may have been cut\n"), "{told}");
}

#[test]
fn a_process_that_ended_is_told_so() {
    let mut zombie = Command::new("true").stdout(Stdio::piped()).spawn().unwrap();
    // When it ends, the pipe is closed; it stays a zombie until it is waited for.
    zombie.stdout.take().unwrap().read_to_end(&mut Vec::new()).unwrap();
    let pid = zombie.id().to_string();
    while !fs::read_to_string(format!("/proc/{pid}/status")).unwrap().contains("State:\tZ") {
        std::thread::yield_now();
    }
    refuses(
        &["-p", &pid],
        1,
        &format!(
            "tachyon-bpf: cannot profile pid {pid} (true): it has no memory\n\
             hint: it is a kernel thread, or has ended and waits for its parent\n"
        ),
    );
    zombie.wait().unwrap();
}

#[test]
fn doctor_says_one_line_each() {
    let output = run(&["doctor"]);
    let text = String::from_utf8(output.stdout).unwrap();
    let (last, checks) = text.lines().collect::<Vec<_>>().split_last().map(|(l, c)| (*l, c.to_vec())).unwrap();
    for line in &checks {
        assert!(["ok    ", "note  ", "warn  ", "FAIL  "].iter().any(|word| line.starts_with(word)), "{line}");
    }
    let fails = checks.iter().any(|line| line.starts_with("FAIL"));
    assert_eq!(last.starts_with("this machine cannot profile"), fails);
    assert_eq!(output.status.code(), Some(i32::from(fails)));
    let json: serde_json::Value = serde_json::from_slice(&run(&["doctor", "--json"]).stdout).unwrap();
    assert_eq!(json["possible"], !fails);
}

#[test]
fn closed_pipes_are_no_error() {
    for arguments in [&["doctor"][..], &["--help"], &["doctor", "--json"]] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = tachyon().args(arguments).stdout(writer).stderr(Stdio::piped()).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stderr), "", "{arguments:?}");
        assert_eq!(output.status.code(), Some(0), "{arguments:?}");
    }
    // With standard error closed as well, only the status tells.
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    assert_eq!(tachyon().arg("-x").stderr(writer).status().unwrap().code(), Some(2));
}

#[test]
fn a_standard_output_that_is_full_is_told() {
    let fixture = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/tach/v09_rle_split.tach");
    let mut commands: Vec<Vec<&str>> =
        [&["doctor"][..], &["doctor", "--json"], &["man"], &["completions", "zsh"], &["info", fixture]]
            .map(<[&str]>::to_vec)
            .to_vec();
    commands.push(vec!["info", "--json", fixture]);
    // A gperftools profile is two files.
    let formats = tachyon::sinks::Format::ALL.into_iter().filter(|format| format.name() != "gperftools");
    commands.extend(formats.map(|format| vec!["export", fixture, "-o", "-", "--format", format.name()]));
    for arguments in commands {
        let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let output = tachyon().args(&arguments).stdout(full).stderr(Stdio::piped()).output().unwrap();
        let expected = "tachyon-bpf: cannot write to standard output: no space left on device\n";
        assert_eq!(String::from_utf8_lossy(&output.stderr), expected, "{arguments:?}");
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
    }
}

#[test]
fn several_files_are_one_profile() {
    let directory = tempfile::tempdir().unwrap();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/tach");
    for (name, copy) in [("v03_record_types", "a.tach"), ("v05_threads_status", "b.tach")] {
        fs::copy(golden.join(name).with_extension("tach"), directory.path().join(copy)).unwrap();
    }
    fs::write(directory.path().join("c.tach.part"), "").unwrap();
    let from = directory.path().to_str().unwrap();
    let info = |arguments: &[&str]| -> serde_json::Value {
        let output = run(&[&["info", "--json"], arguments].concat());
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let [a, b] = ["a.tach", "b.tach"].map(|name| info(&[&format!("{from}/{name}")]));
    let all = info(&[from]);
    let number = |of: &serde_json::Value, key: &str| of[key].as_u64().unwrap();
    for key in ["samples", "threads", "file_bytes", "sample_bytes", "stored_bytes"] {
        assert_eq!(number(&all, key), number(&a, key) + number(&b, key), "{key}");
    }
    assert_eq!(all["records"]["full"], number(&a["records"], "full") + number(&b["records"], "full"));
    assert_eq!(all["files"].as_array().unwrap().len(), 2);
    let report = &all["metadata"]["report"];
    assert_eq!((&report["stored"], &report["ran"]), (&all["samples"], &all["samples"]));

    let out = tempfile::tempdir().unwrap();
    let whole = out.path().join("whole.tach");
    let whole = whole.to_str().unwrap();
    let output = run(&["merge", from, "-o", whole]);
    assert_eq!(output.status.code(), Some(0));
    let told = String::from_utf8(output.stderr).unwrap();
    assert_eq!(told, format!("left out {from}/c.tach.part: it is not finished\n"));
    let merged = info(&[whole]);
    for key in ["samples", "threads", "thread_samples"] {
        assert_eq!(merged[key], all[key], "{key}");
    }
    let lines = |input: &str| String::from_utf8(run(&["export", input, "-o", "-"]).stdout).unwrap();
    assert!(!lines(from).is_empty() && lines(from) == lines(whole));

    refuses(
        &["merge", from, "-o", "x.svg"],
        2,
        "tachyon-bpf: merge writes a TACH file\n\
         hint: `tachyon-bpf export IN... -o OUT` writes several files in other formats\n",
    );
    refuses(&["info", from, "/nosuch.tach"], 1, "tachyon-bpf: cannot read /nosuch.tach: no such file or directory\n");
}
