//! Runs other programs: shown before they run, and named with their status if they fail.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::LazyLock;
use std::time::Instant;

use anyhow::{Context, Result, bail};

/// The command line as a person would type it, without its environment.
pub(crate) fn shown(command: &Command) -> String {
    let words: Vec<_> = std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(|word| word.to_string_lossy().into_owned())
        .collect();
    words.join(" ")
}

/// Runs a command with its output on the terminal.
///
/// # Errors
/// It cannot be started, or it ends with a status other than 0.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let line = shown(command);
    eprintln!("+ {line}");
    let status = command.status().with_context(|| format!("cannot start `{line}`"))?;
    if !status.success() {
        bail!("`{line}` failed: {status}");
    }
    Ok(())
}

/// Runs a command whose output matters only if it fails; says how long it took.
///
/// # Errors
/// As [`run`]; the message ends with the last lines the command printed.
pub(crate) fn run_quietly(what: &str, command: &mut Command) -> Result<()> {
    eprint!("{what} ... ");
    let start = Instant::now();
    let output = finished(command);
    eprintln!("{} ({:.1} s)", if output.is_ok() { "done" } else { "failed" }, start.elapsed().as_secs_f64());
    output.map(drop)
}

/// The same for several commands at a time: says so when it is done.
///
/// # Errors
/// As [`run_quietly`].
pub(crate) fn run_beside(what: &str, command: &mut Command) -> Result<()> {
    let start = Instant::now();
    let output = finished(command);
    let how = if output.is_ok() { "done" } else { "failed" };
    eprintln!("{what}: {how} ({:.1} s)", start.elapsed().as_secs_f64());
    output.map(drop)
}

/// What a command prints to its standard output.
///
/// # Errors
/// As [`run_quietly`], or what it printed is not UTF-8.
pub(crate) fn stdout(command: &mut Command) -> Result<String> {
    let line = shown(command);
    String::from_utf8(finished(command)?.stdout).with_context(|| format!("`{line}` printed text that is not UTF-8"))
}

fn finished(command: &mut Command) -> Result<Output> {
    let line = shown(command);
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("cannot start `{line}`"))?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        let lines: Vec<&str> = text.lines().collect();
        let tail = lines.get(lines.len().saturating_sub(15)..).unwrap_or_default().join("\n");
        bail!("`{line}` failed: {}\n{tail}", output.status);
    }
    Ok(output)
}

/// Where a program is found on `PATH`, or in the administrator's directories, which not every user's `PATH` has.
pub(crate) fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin", "/sbin"].map(PathBuf::from))
        .map(|dir| dir.join(program))
        .find(|file| file.is_file())
}

/// The project's directory: the one cargo runs this in, which differs between two checkouts that share a target directory.
pub(crate) fn project_root() -> &'static Path {
    static ROOT: LazyLock<PathBuf> = LazyLock::new(|| {
        let package = std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
        Path::new(&package).parent().expect("xtask is a directory of the project").to_owned()
    });
    &ROOT
}

/// Whether this runs in CI, where anything that cannot be checked is a failure.
pub(crate) fn in_ci() -> bool {
    std::env::var_os("CI").is_some_and(|value| !matches!(value.to_str(), Some("" | "0" | "false")))
}

/// Prints something that must not be overlooked: now, and at the end of `.ci/run`, which prints the file that
/// `TACHYON_NOTICES` names.
///
/// # Errors
/// That file cannot be written.
pub(crate) fn notice(text: &str) -> Result<()> {
    eprintln!("xtask: {text}");
    let Some(path) = std::env::var_os("TACHYON_NOTICES") else { return Ok(()) };
    let file = std::fs::OpenOptions::new().create(true).append(true).open(&path);
    let written = file.and_then(|mut file| writeln!(file, "{text}"));
    written.with_context(|| format!("cannot write {}", path.display()))
}

/// Root is needed to install packages, to make a chroot and to load BPF programs.
///
/// # Errors
/// The effective user is not root.
pub(crate) fn require_root(why: &str) -> Result<()> {
    let id = stdout(Command::new("id").arg("-u"))?;
    if id.trim() != "0" {
        bail!("{why} needs root, this is user id {}\nhint: sudo -E cargo xtask ...", id.trim());
    }
    Ok(())
}
