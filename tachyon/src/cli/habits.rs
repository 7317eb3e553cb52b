//! Answers, in this program's terms, for people who type what another profiler expects: py-spy, austin, perf.
//!
//! Used only if the command line makes no sense as it is.

use super::failure::Failure;
use std::ffi::{OsStr, OsString};
use std::path::Path;

/// Other programs' options, by what clap reports as unknown: this program's option, and what to know about it.
const OPTIONS: [(&[&str], &str); 9] = [
    (&["-r", "--rate"], "the sampling rate is -F HZ here: -F 99"),
    (
        &["-f", "--output-format"],
        "the extension of the file picks the format (-o x.svg, -o x.collapsed), or give --format",
    ),
    (
        &["-s", "-C", "--children"],
        "--subprocesses profiles children too; it is always on with --all-python and `-- CMD`",
    ),
    (&["-t"], "--threads keeps threads separate; collapsed, speedscope, firefox and jsonl always do"),
    (&["-x", "--exposure"], "the length of the recording is -d TIME here: -d 30s"),
    (&["-g", "-G"], "--gil keeps only samples whose thread holds the GIL"),
    (&["-n"], "native frames are recorded by default; --no-native leaves them out"),
    (&["--nonblocking", "--non-blocking", "-b", "--blocking"], "leave it out: the process is never stopped"),
    (&["-a", "--all"], "--all-python profiles every Python process on this machine"),
];

/// Options that ask for waiting threads.
const WAITING: [&str; 2] = ["--idle", "-w"];

/// Names of py-spy's formats that are different here.
const FORMATS: [(&str, &str); 3] = [("raw", "collapsed"), ("chrometrace", "firefox"), ("folded", "collapsed")];

/// How far a misspelt verb may be from the one that was meant.
const TYPOS: usize = 2;

/// The answer, if there is one. `words` come without the program's own name, `unknown` is the one that makes no sense;
/// `verbs` are all verbs, and `can_wait` says whether this version records waiting threads.
#[must_use]
pub fn answer(words: &[OsString], unknown: Option<&str>, verbs: &[String], can_wait: bool) -> Option<Failure> {
    let texts: Vec<&str> = words.iter().filter_map(|word| word.to_str()).collect();
    match texts[..] {
        ["dump", pid] if is_pid(pid) => {
            return Some(says(pid, format!("give the process with -p: tachyon-bpf dump -p {pid}")));
        }
        ["top", pid] if is_pid(pid) => {
            return Some(says(pid, format!("give the process with -p: tachyon-bpf top -p {pid}")));
        }
        ["export", input, output] if !input.starts_with('-') && !output.starts_with('-') => {
            let hint =
                format!("give the output file with -o: tachyon-bpf export {} -o {}", quoted(input), quoted(output));
            return Some(says(output, hint));
        }
        _ => {}
    }
    if let Some(told) = texts.iter().zip(texts.iter().skip(1)).find_map(|(option, value)| {
        let ours = FORMATS.iter().find(|(theirs, _)| *option == "--format" && theirs == value)?.1;
        Some(
            Failure::usage(format!("no format '{value}'"))
                .with_hint(format!("it is called {ours} here: --format {ours}")),
        )
    }) {
        return Some(told);
    }
    if let Some(unknown) = unknown.filter(|unknown| unknown.starts_with('-')) {
        return option(unknown, can_wait);
    }
    let first = texts.iter().position(|word| *word != "record")?;
    let word = *texts.get(first)?;
    if unknown != Some(word) {
        return None;
    }
    if is_pid(word) {
        return Some(says(word, format!("give the process with -p: tachyon-bpf -p {word}")));
    }
    if has_extension(word, "tach") {
        let file = quoted(word);
        return Some(says(
            word,
            format!(
                "tachyon-bpf report {file} shows it, tachyon-bpf export {file} -o x.html makes a page with a flame graph"
            ),
        ));
    }
    let command: Vec<String> = texts[first..].iter().map(|word| quoted(word)).collect();
    let command = command.join(" ");
    if has_extension(word, "py") {
        return Some(says(word, format!("put the program to profile after `--`: tachyon-bpf -- python3 {command}")));
    }
    let near = verbs.iter().map(|verb| (strsim::damerau_levenshtein(word, verb), verb)).min();
    if let Some((_, verb)) = near.filter(|(typos, verb)| *typos <= TYPOS.min(verb.len() / 2)) {
        return Some(says(word, format!("did you mean tachyon-bpf {verb}?")));
    }
    Some(says(word, format!("put the program to profile after `--`: tachyon-bpf -- {command}")))
}

/// What a verb lacks, shown as a command line that has it. `words` come without the program's own name.
#[must_use]
pub fn missing(words: &[OsString], verbs: &[String]) -> Option<String> {
    let texts: Vec<&str> = words.iter().filter_map(|word| word.to_str()).collect();
    let (verb, rest) = texts.split_first()?;
    let files: Vec<String> = rest.iter().filter(|word| has_extension(word, "tach")).map(|word| quoted(word)).collect();
    let files = if files.is_empty() { "recording.tach".to_owned() } else { files.join(" ") };
    let line = match *verb {
        "export" => format!("export {files} -o report.html"),
        "merge" => format!("merge {files} -o all.tach"),
        "recover" => "recover recording.tach.part -o recording.tach".to_owned(),
        "report" | "info" | "symbolize" => format!("{verb} {files}"),
        "dump" => "dump -p PID".to_owned(),
        "completions" => "completions bash".to_owned(),
        verb if verbs.iter().any(|known| known == verb) => {
            return Some(format!("tachyon-bpf {verb} --help explains it"));
        }
        _ => return None,
    };
    Some(format!("for example: tachyon-bpf {line}"))
}

fn option(unknown: &str, can_wait: bool) -> Option<Failure> {
    let says = |hint: &str| Some(Failure::usage(format!("no option {unknown}")).with_hint(hint));
    if WAITING.contains(&unknown) {
        return says(if can_wait {
            "--wall records waiting threads too"
        } else {
            "only threads on a CPU are sampled; tachyon-bpf dump -p PID shows every thread once, waiting ones too"
        });
    }
    OPTIONS.iter().find(|(theirs, _)| theirs.contains(&unknown)).and_then(|(_, hint)| says(hint))
}

fn says(word: &str, hint: String) -> Failure {
    Failure::usage(format!("unexpected word '{word}'")).with_hint(hint)
}

/// A script that is not executable by itself gets the interpreter that was meant: `-- app.py`.
pub fn with_interpreter(command: &mut Vec<OsString>) {
    let Some(script) = command.first() else { return };
    let path = Path::new(script);
    if path.extension() == Some(OsStr::new("py")) && path.is_file() && !is_executable(path) {
        command.insert(0, "python3".into());
    }
}

fn is_executable(path: &Path) -> bool {
    nix::unistd::access(path, nix::unistd::AccessFlags::X_OK).is_ok()
}

fn is_pid(word: &str) -> bool {
    !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_digit())
}

fn has_extension(word: &str, extension: &str) -> bool {
    Path::new(word).extension().is_some_and(|found| found.eq_ignore_ascii_case(extension))
}

/// A word as a shell takes it.
fn quoted(word: &str) -> String {
    let plain = |character: char| character.is_alphanumeric() || "/._-+:@%,=".contains(character);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::advice::Advice as _;
    use crate::cli::args::{NoVerb, Verb, parse};

    fn refused(line: &str) -> (String, String) {
        let words = ["tachyon-bpf"].into_iter().chain(line.split(' ')).map(OsString::from);
        match parse(words) {
            Err(NoVerb::Usage(failure)) => (failure.to_string(), failure.hint().unwrap_or_default()),
            other => panic!("{line}: {other:?}"),
        }
    }

    #[test]
    fn habits_are_answered() {
        for (line, hint) in [
            ("4242", "tachyon-bpf -p 4242"),
            ("record 4242", "tachyon-bpf -p 4242"),
            ("app.tach", "tachyon-bpf report app.tach shows it"),
            ("app.py --port 80", "tachyon-bpf -- python3 app.py --port 80"),
            ("python3 app.py", "tachyon-bpf -- python3 app.py"),
            ("gunicorn app:app", "tachyon-bpf -- gunicorn app:app"),
            ("dump 4242", "tachyon-bpf dump -p 4242"),
            ("top 4242", "tachyon-bpf top -p 4242"),
            ("export a.tach b.html", "tachyon-bpf export a.tach -o b.html"),
            ("reprot app.tach", "did you mean tachyon-bpf report?"),
            ("exprot a -o b", "did you mean tachyon-bpf export?"),
            ("-p 1 -r 100", "-F HZ"),
            ("-p 1 --rate 100", "-F HZ"),
            ("record -p 1 --rate 100", "-F HZ"),
            ("-p 1 -s", "--subprocesses"),
            ("-p 1 -t", "--threads"),
            ("-p 1 -f speedscope", "--format"),
            ("-p 1 --format raw", "--format collapsed"),
            ("-p 1 --nonblocking", "never stopped"),
        ] {
            let (message, told) = refused(line);
            assert!(told.contains(hint), "{line}: {message} / {told}");
        }
        assert!(option("--idle", true).unwrap().hint().unwrap().contains("--wall"));
        assert!(option("--idle", false).unwrap().hint().unwrap().contains("dump"));
    }

    #[test]
    fn scripts_get_their_interpreter() {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().unwrap();
        let (script, program) = (dir.path().join("app.py"), dir.path().join("run.py"));
        std::fs::write(&script, "pass").unwrap();
        std::fs::write(&program, "#!/usr/bin/env python3\n").unwrap();
        std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o644)).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        let command = |path: &Path| {
            let words = ["tachyon-bpf".into(), "--".into(), path.into(), "x".into()];
            let Ok(Verb::Record(args)) = parse(words) else { panic!("it is a recording") };
            args.targets.command
        };
        assert_eq!(command(&script), ["python3".into(), script.clone().into_os_string(), "x".into()]);
        assert_eq!(command(&program), [program.clone().into_os_string(), "x".into()]);
        assert_eq!(command(Path::new("/none.py")), ["/none.py", "x"], "that it is not there is told by its own name");
    }
}
