//! The interpreters that tests profile: a fixed list, so that a missing one fails a test run instead of reducing its coverage.
//!
//! pyenv's and the machine's own are used where they are; the newest come from Debian sid in a chroot, which also tests
//! mount namespaces and holds the judge, `python3.15 -m profiling.sampling`. `--list --json` is what tests read.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde::Serialize;

mod built;
mod wheel;

use crate::{apt, cache, command};
use built::Build;
use wheel::Wheel;

/// Arguments of `cargo xtask zoo`.
#[derive(clap::Args)]
pub(crate) struct ZooArgs {
    /// Set nothing up, only print the interpreters
    #[arg(long)]
    list: bool,
    /// Print the list as JSON
    #[arg(long)]
    json: bool,
    /// Also those that CI has no time for: debug builds, tail calls, the shape of python-build-standalone
    #[arg(long)]
    all: bool,
}

/// Where an interpreter of the list comes from.
#[derive(Clone, Copy)]
enum Source {
    /// The newest patch release of that minor version in pyenv: `--enable-shared`, if the machine's pyenv builds that way.
    Pyenv,
    /// The machine's own: static, stripped, not position-independent.
    Debian,
    /// Debian sid's, in the chroot.
    Sid,
    /// Built from a distribution's source package.
    Built(&'static Build),
    /// Extracted from a package of frozen programs.
    Wheel(&'static Wheel),
}

impl Source {
    /// The first part of the names of its interpreters.
    fn kind(self) -> &'static str {
        match self {
            Self::Pyenv => "pyenv",
            Self::Debian => "debian",
            Self::Sid => "sid",
            Self::Built(build) => build.kind,
            Self::Wheel(_) => "wheel",
        }
    }
}

/// Every interpreter that CI must have.
const CI_TIER: [(Source, &str); 13] = [
    (Source::Pyenv, "3.8"),
    (Source::Pyenv, "3.9"),
    (Source::Pyenv, "3.10"),
    (Source::Pyenv, "3.11"),
    (Source::Pyenv, "3.12"),
    (Source::Pyenv, "3.13"),
    (Source::Debian, "3.11"),
    (Source::Sid, "3.14"),
    (Source::Sid, "3.15"),
    (Source::Built(&built::FREE_THREADED_3_13), "3.13t"),
    (Source::Built(&built::MUSL_3_13), "3.13"),
    (Source::Built(&built::FREE_THREADED_3_14), "3.14t"),
    (Source::Wheel(&wheel::FREE_THREADED_3_15), wheel::FREE_THREADED_3_15.version),
];

/// Those that `--all` adds: debug builds, and those that take long to build.
const ALL_TIER: [(Source, &str); 5] = [
    (Source::Sid, "3.14d"),
    (Source::Sid, "3.15d"),
    (Source::Wheel(&wheel::FREE_THREADED_3_14), wheel::FREE_THREADED_3_14.version),
    (Source::Built(&built::TAIL_CALLS_3_14), "3.14"),
    (Source::Built(&built::STANDALONE_3_14), "3.14"),
];

/// The interpreters of a run.
fn tier(all: bool) -> impl Iterator<Item = (Source, &'static str)> {
    CI_TIER.into_iter().chain(ALL_TIER.into_iter().filter(move |_| all))
}

/// Installed into the chroot; a change to this list completes an existing chroot.
const SID_PACKAGES: [&str; 2] = ["python3.14", "python3.15"];

/// What `--all` adds to the chroot: builds with `--with-pydebug`.
const SID_DEBUG_PACKAGES: [&str; 2] = ["python3.14-dbg", "python3.15-dbg"];

/// One interpreter, in the form for tests.
#[derive(Serialize)]
pub(crate) struct Interpreter {
    /// Unique in the list, for instance `pyenv-3.12`.
    name: String,
    /// Minor version, for instance `3.12`.
    version: &'static str,
    /// `pyenv`, `debian`, `sid`, `built`, `musl`, `wheel`, `tail` or `standalone`.
    kind: &'static str,
    /// The executable; below `root` when there is one.
    path: PathBuf,
    /// The directory to `chroot` into before running `path`.
    root: Option<PathBuf>,
}

/// An interpreter that a benchmark runs.
#[derive(Clone)]
pub(crate) struct Python {
    /// The executable; below `root` when there is one.
    pub(crate) path: PathBuf,
    /// The directory to `chroot` into before running it.
    pub(crate) root: Option<PathBuf>,
}

impl Python {
    /// The executable's name.
    pub(crate) fn name(&self) -> String {
        self.path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned())
    }

    /// A path as the interpreter sees it.
    pub(crate) fn sees(&self, path: &Path) -> PathBuf {
        let below = self.root.as_ref().and_then(|root| path.strip_prefix(root).ok());
        below.map_or_else(|| path.to_owned(), |below| Path::new("/").join(below))
    }
}

/// Runs `cargo xtask zoo`.
///
/// # Errors
/// An interpreter of the list is missing, by name.
pub(crate) fn run(args: ZooArgs) -> Result<()> {
    if !args.list {
        set_up(args.all)?;
    }
    let (found, missing) = interpreters(args.all)?;
    if args.json {
        println!("{}", serde_json::to_string_pretty(&found).context("cannot write JSON")?);
    } else if args.list {
        for interpreter in &found {
            let root = interpreter.root.as_ref().map(|root| format!(" in {}", root.display())).unwrap_or_default();
            println!("{:<12} {}{root}", interpreter.name, interpreter.path.display());
        }
    }
    complain(&missing)
}

/// Makes or completes the chroot, builds the interpreters to be built, and names what is still missing.
///
/// # Errors
/// The chroot cannot be made, or an interpreter of the list is missing.
pub(crate) fn set_up(all: bool) -> Result<()> {
    set_up_sid(all)?;
    // gdb brings a CPython of its own, as the embedded one. PyPy is there to be refused.
    apt::ensure(&[("/usr/bin/python3.11", "python3.11"), ("gdb", "gdb"), ("pypy3", "pypy3")])?;
    // The others are useful even if one fails; that one is missing from the list below.
    for (source, version) in tier(all) {
        if let Source::Wheel(wheel) = source
            && let Err(error) = set_up_wheel(wheel)
        {
            eprintln!("cannot make {version}: {error:#}");
        }
    }
    let builds: Vec<_> = tier(all)
        .filter_map(|(source, _)| match source {
            Source::Built(build) => Some(build),
            _ => None,
        })
        .collect();
    for (dir, error) in built::set_up(&zoo_dir()?, &builds) {
        eprintln!("cannot make {dir}: {error:#}");
    }
    complain(&interpreters(all)?.1)
}

fn set_up_wheel(wheel: &Wheel) -> Result<()> {
    let pip = newest_supported().context("no Python with pip: pyenv has none")?;
    wheel.set_up(&zoo_dir()?, &pip, &sid_dir()?)
}

/// Those that CI must have, by their names in the tests.
pub(crate) fn ci_names() -> Vec<String> {
    CI_TIER.into_iter().map(|(source, version)| in_tests(&format!("{}-{version}", source.kind()))).collect()
}

/// The same, with the interpreters themselves.
///
/// # Errors
/// One is missing, by name.
pub(crate) fn ci_interpreters() -> Result<Vec<(String, Python)>> {
    let (found, missing) = interpreters(false)?;
    complain(&missing)?;
    let named = |found: Interpreter| (in_tests(&found.name), Python { path: found.path, root: found.root });
    Ok(found.into_iter().map(named).collect())
}

/// What a test calls the interpreter of this name.
fn in_tests(name: &str) -> String {
    name.replace(['-', '.'], "_")
}

/// Those that only `--all` sets up, by their names in the tests.
pub(crate) fn extras() -> Vec<String> {
    ALL_TIER.into_iter().map(|(source, version)| in_tests(&format!("{}-{version}", source.kind()))).collect()
}

/// Those of `--all` that are not set up, by their names in the tests.
///
/// # Errors
/// There is no cache directory.
pub(crate) fn missing_extras() -> Result<Vec<String>> {
    let (found, _) = interpreters(true)?;
    let extras = ALL_TIER.into_iter().map(|(source, version)| format!("{}-{version}", source.kind()));
    let missing = extras.filter(|name| !found.iter().any(|interpreter| interpreter.name == *name));
    Ok(missing.map(|name| in_tests(&name)).collect())
}

fn complain(missing: &[String]) -> Result<()> {
    if !missing.is_empty() {
        bail!("{} interpreters missing:\n{}", missing.len(), missing.join("\n"));
    }
    Ok(())
}

/// The interpreters found, and one line for each that is not.
fn interpreters(all: bool) -> Result<(Vec<Interpreter>, Vec<String>)> {
    let sid = sid_dir()?;
    let pyenv = pyenv_root();
    let (mut found, mut missing) = (Vec::new(), Vec::new());
    let hint = if all { "cargo xtask zoo --all" } else { "cargo xtask zoo" };
    for (source, version) in tier(all) {
        let kind = source.kind();
        let (path, root, hint) = match source {
            Source::Pyenv => {
                let path = pyenv.as_deref().and_then(|root| newest(root, version));
                (path, None, format!("pyenv install {version}"))
            }
            Source::Debian => {
                let path = PathBuf::from(format!("/usr/bin/python{version}"));
                (Some(path), None, format!("apt-get install python{version}"))
            }
            Source::Sid => {
                let path = PathBuf::from(format!("/usr/bin/python{version}"));
                (Some(path), Some(sid.clone()), hint.to_owned())
            }
            Source::Built(build) => {
                let path = build.executable(&zoo_dir()?, version);
                (Some(path), None, hint.to_owned())
            }
            Source::Wheel(wheel) => (Some(wheel.executable(&zoo_dir()?)), None, hint.to_owned()),
        };
        let name = format!("{kind}-{version}");
        let there = |path: &PathBuf| root.as_deref().map_or(path.clone(), |root| inside(root, path)).is_file();
        match path.filter(there) {
            Some(path) => found.push(Interpreter { name, version, kind, path, root }),
            None => missing.push(format!("  {name}  hint: {hint}")),
        }
    }
    Ok((found, missing))
}

/// `path`, absolute in the chroot `root`, as seen from outside.
fn inside(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

fn pyenv_root() -> Option<PathBuf> {
    let told = command::find("pyenv").and_then(|pyenv| command::stdout(Command::new(pyenv).arg("root")).ok());
    told.map(|text| PathBuf::from(text.trim()))
        .or_else(|| std::env::var_os("PYENV_ROOT").map(PathBuf::from))
        .or_else(|| std::env::home_dir().map(|home| home.join(".pyenv")))
}

/// pyenv's newest interpreter: the benchmark's target, and the one whose pip fetches what Debian does not have.
pub(crate) fn newest_supported() -> Option<PathBuf> {
    let root = pyenv_root()?;
    ["3.13", "3.12", "3.11"].into_iter().find_map(|minor| newest(&root, minor))
}

/// pyenv's interpreter of this minor version.
///
/// # Errors
/// It is not set up.
pub(crate) fn in_pyenv(minor: &str) -> Result<Python> {
    let path = pyenv_root().and_then(|root| newest(&root, minor));
    Ok(Python { path: path.with_context(|| format!("no CPython {minor} in pyenv"))?, root: None })
}

/// Debian sid's interpreter of this minor version.
///
/// # Errors
/// It is not set up.
pub(crate) fn in_sid(minor: &str) -> Result<Python> {
    let (path, root) = (PathBuf::from(format!("/usr/bin/python{minor}")), sid_dir()?);
    if !inside(&root, &path).is_file() {
        bail!("{}: no python{minor}", root.display());
    }
    Ok(Python { path, root: Some(root) })
}

/// The interpreter with musl.
///
/// # Errors
/// It is not set up.
pub(crate) fn with_musl() -> Result<PathBuf> {
    let path = built::MUSL_3_13.executable(&zoo_dir()?, "3.13");
    if !path.is_file() {
        bail!("no {}\nhint: cargo xtask zoo", path.display());
    }
    Ok(path)
}

/// The executable of the newest patch release of `minor`.
fn newest(pyenv_root: &Path, minor: &str) -> Option<PathBuf> {
    let patch = |name: &str| name.strip_prefix(minor)?.strip_prefix('.')?.parse::<u32>().ok();
    fs::read_dir(pyenv_root.join("versions"))
        .ok()?
        .filter_map(|entry| {
            let entry = entry.ok()?;
            Some((patch(entry.file_name().to_str()?)?, entry.path().join("bin").join(format!("python{minor}"))))
        })
        .max()
        .map(|(_, path)| path)
}

/// The directory of the sid chroot, whether it exists or not.
fn sid_dir() -> Result<PathBuf> {
    Ok(zoo_dir()?.join("sid"))
}

/// The directory of all that is made here.
fn zoo_dir() -> Result<PathBuf> {
    Ok(cache::dir()?.join("zoo"))
}

/// Makes the chroot; returns at once if it is complete.
fn set_up_sid(all: bool) -> Result<()> {
    let dir = sid_dir()?;
    let _lock = cache::lock(dir.parent().context("the chroot has a parent directory")?)?;
    let stamp = format!("sid {}\n", SID_PACKAGES.join(" "));
    if !cache::is_finished(&dir, &stamp) {
        command::require_root("making a chroot with Debian sid's interpreters")?;
        // A chroot with another stamp is complete, but with other packages; one without any is incomplete.
        if cache::was_finished(&dir) {
            cache::reopen(&dir)?;
            install(&dir, &SID_PACKAGES)?;
        } else {
            eprintln!("setting up Debian sid in {} (about 300 MB, a minute)", dir.display());
            make_sid(&dir)?;
        }
        cache::finish(&dir, &stamp)?;
    }
    let debug = |version: &str| inside(&dir, Path::new(&format!("/usr/bin/python{version}"))).is_file();
    if all && !(debug("3.14d") && debug("3.15d")) {
        command::require_root("installing debug builds in the chroot")?;
        install(&dir, &SID_DEBUG_PACKAGES)?;
    }
    mount_proc(&dir)?;
    judge(&dir)
}

/// Works beside the final place, so that the final name always stands for a complete chroot.
fn make_sid(dir: &Path) -> Result<()> {
    apt::ensure(&[("debootstrap", "debootstrap")])?;
    let mirror = apt::Mirrors::of_this_machine()?.debian;
    let partial = dir.with_extension("partial");
    for left in [dir, &partial] {
        unmount_all(left)?;
        cache::remove(left)?;
    }
    let program = command::find("debootstrap").context("debootstrap was installed but is not found")?;
    command::run_quietly(
        &format!("debootstrap sid from {mirror}"),
        Command::new(program).args(["--variant=minbase", "sid"]).arg(&partial).arg(mirror),
    )?;
    install(&partial, &SID_PACKAGES)?;
    unmount_all(&partial)?;
    fs::rename(&partial, dir).with_context(|| format!("cannot rename {}", partial.display()))
}

fn unmount_all(dir: &Path) -> Result<()> {
    cache::mounts_below(dir)?.iter().try_for_each(|mount| command::run(Command::new("umount").arg(mount)))
}

fn install(dir: &Path, packages: &[&str]) -> Result<()> {
    let apt_get = || {
        let mut command = Command::new("chroot");
        command.arg(dir).args(["apt-get", "-o", apt::NO_EXPIRY]).env("DEBIAN_FRONTEND", "noninteractive");
        command
    };
    command::run_quietly("apt-get update in the chroot", apt_get().arg("update"))?;
    command::run_quietly(
        &format!("apt-get install {} in the chroot", packages.join(" ")),
        apt_get().args(["install", "--yes", "--no-install-recommends"]).args(packages),
    )?;
    command::run_quietly("apt-get clean in the chroot", apt_get().arg("clean"))
}

/// A mount does not survive a reboot, so it is checked each time.
fn mount_proc(dir: &Path) -> Result<()> {
    let proc = dir.join("proc");
    if proc.join("self").exists() {
        return Ok(());
    }
    command::require_root("mounting /proc in the chroot")?;
    command::run(Command::new("mount").args(["-t", "proc", "proc"]).arg(proc))
}

/// Checks that the judge of this project's files runs.
fn judge(dir: &Path) -> Result<()> {
    command::stdout(Command::new("chroot").arg(dir).args(["python3.15", "-m", "profiling.sampling", "--help"]))
        .map(drop)
        .context("the chroot's python3.15 has no working profiling.sampling")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_patch_release_wins() {
        let root = tempfile::tempdir().unwrap();
        for version in ["3.9.2", "3.9.18", "3.10.1", "3.9-dev"] {
            fs::create_dir_all(root.path().join("versions").join(version)).unwrap();
        }
        let found = newest(root.path(), "3.9").unwrap();
        assert!(found.ends_with("versions/3.9.18/bin/python3.9"), "{}", found.display());
        assert_eq!(newest(root.path(), "3.1"), None);
    }

    #[test]
    fn names_are_unique() {
        let name = |(source, version): (Source, &str)| format!("{}-{version}", source.kind());
        let mut names: Vec<_> = tier(true).map(name).collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }

    #[test]
    fn a_path_inside_the_chroot_stays_inside() {
        assert_eq!(
            inside(Path::new("/c/sid"), Path::new("/usr/bin/python3.15")),
            Path::new("/c/sid/usr/bin/python3.15")
        );
    }
}
