//! Completions in the shells themselves, and the manual page as `man` shows it. `cargo xtask tools` installs what this needs.

use std::path::{Path, PathBuf};
use std::process::Command;
use tachyon_tests::{binary, not_run};

/// Command lines, what is offered for each, and what is not.
const LINES: &[(&str, &[&str], &[&str])] = &[
    ("tachyon-bpf exp", &["export"], &["record"]),
    ("tachyon-bpf --merge-p", &["--merge-processes"], &["--max-cpu"]),
    ("tachyon-bpf record --rot", &["--rotate"], &["--journal"]),
    ("tachyon-bpf export --no-n", &["--no-native"], &["--no-merge-processes"]),
    ("tachyon-bpf recover --j", &["--journal"], &["--json"]),
    ("tachyon-bpf report --c", &["--callers", "--callees"], &["--cgroup"]),
    ("tachyon-bpf diff --f", &["--fail-over", "--force"], &["--focus"]),
    ("tachyon-bpf symbolize --de", &["--debug-dir"], &["--duration"]),
    ("tachyon-bpf dump --int", &["--interpreter-frames"], &["--interval"]),
    ("tachyon-bpf doctor --ver", &["--verbose"], &["--version"]),
];

/// The lines that a shell's program prints: one per offer.
fn check(shell: &str, offers: impl Fn(&Path, &str) -> Command) {
    if Command::new(shell).arg("--version").output().is_err() {
        not_run(&format!("{shell}\nhint: cargo xtask tools"));
        return;
    }
    let dir = tempfile::tempdir().expect("a temporary directory can be made");
    let script = dir.path().join("completions");
    let generated = Command::new(binary()).args(["completions", shell]).output().expect("the program can be run");
    std::fs::write(&script, generated.stdout).expect("the directory is writable");
    for (line, wanted, unwanted) in LINES {
        let output = offers(&script, line).output().expect("the shell can be run");
        let text = String::from_utf8_lossy(&output.stdout);
        let offered: Vec<&str> = text.lines().map(|line| line.split('\t').next().unwrap_or(line).trim()).collect();
        let has = |word: &&&str| offered.contains(*word);
        assert!(wanted.iter().all(|word| has(&word)), "{shell}: {line}: {text}{output:?}");
        assert!(!unwanted.iter().any(|word| has(&word)), "{shell}: {line}: {text}");
    }
}

#[test]
fn bash_completes_every_verb() {
    check("bash", |script, line| {
        // As bash calls it: the function's name, the current word, and the one before.
        let program = r#"source "$1"; read -ra COMP_WORDS <<< "$2"; COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
            function=$(complete -p tachyon-bpf | grep -o -- '-F [^ ]*')
            "${function#-F }" tachyon-bpf "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
            printf '%s\n' "${COMPREPLY[@]}""#;
        let mut shell = Command::new("bash");
        shell.args(["--norc", "-c", program, "bash"]).arg(script).arg(line);
        shell
    });
}

#[test]
fn fish_completes_every_verb() {
    check("fish", |script, line| {
        let mut shell = Command::new("fish");
        shell.args(["--no-config", "-c", "source $argv[1]; complete -C $argv[2]"]).arg(script).arg(line);
        shell
    });
}

#[test]
fn zsh_completes_every_verb() {
    let capture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/capture.zsh");
    check("zsh", |script, line| {
        let directory: PathBuf = script.parent().expect("it lies in a directory").into();
        // What the terminal shows is more than the offers.
        let program = r#"zsh -f "$1" "$2" "$3" "$4" | tr -d '\r' | sed -n 's/.*offer: //p'"#;
        let mut shell = Command::new("bash");
        shell.args(["-c", program, "bash"]).arg(&capture).arg(script).arg(line).arg(directory);
        shell
    });
}

#[test]
fn the_manual_page_has_its_sections() {
    if Command::new("man").arg("--version").output().is_err() {
        not_run("man\nhint: cargo xtask tools");
        return;
    }
    let dir = tempfile::tempdir().expect("a temporary directory can be made");
    let page = dir.path().join("tachyon-bpf.1");
    let generated = Command::new(binary()).arg("man").output().expect("the program can be run");
    std::fs::write(&page, generated.stdout).expect("the directory is writable");
    let shown = Command::new("man").args(["--warnings", "-l"]).arg(&page).env("MANWIDTH", "100").output();
    let shown = shown.expect("man can be run");
    assert!(shown.status.success() && shown.stderr.is_empty(), "{}", String::from_utf8_lossy(&shown.stderr));
    let text = String::from_utf8_lossy(&shown.stdout);
    let headings: Vec<&str> = text.lines().filter(|line| line.starts_with(|c: char| c.is_ascii_uppercase())).collect();
    for heading in ["NAME", "SYNOPSIS", "OPTIONS", "RECOVER", "EXAMPLES", "EXIT STATUS", "FILES", "SEE ALSO"] {
        assert_eq!(headings.iter().filter(|line| **line == heading).count(), 1, "{heading}: {headings:?}");
    }
    for line in ["sudo tachyon-bpf -p 4242 -d 30s", "PATH.part.journal", "py-spy(1)"] {
        assert!(text.contains(line), "{line}: {text}");
    }
}
