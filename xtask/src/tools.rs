//! The programs that check exports: both `pprof`s, a browser, the viewers' own importers, and engines for tables. Also a server
//! to profile.

use crate::{apt, cache, command, zoo};
use anyhow::{Context as _, Result};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Programs and their Debian packages.
const PROGRAMS: [(&str, &str); 10] = [
    // For programs with a different C library.
    ("musl-gcc", "musl-tools"),
    // A kind of mount that any user may make, for attacks.
    ("fusermount3", "fuse3"),
    ("go", "golang-go"),
    ("google-pprof", "google-perftools"),
    ("chromium", "chromium"),
    ("npm", "npm"),
    ("zsh", "zsh"),
    ("fish", "fish"),
    ("man", "man-db"),
    // Spark's.
    ("java", "default-jre-headless"),
];

/// npm packages: speedscope, Firefox's importer as a command line, and the driver for the browser.
const NPM_PACKAGES: [&str; 3] =
    ["speedscope@1.25.0", "@firefox-devtools/profiler-cli@0.10.0", "playwright-core@1.65.1"];

/// Servers to try `tachyon-fleet ship` with, and the clouds' own clients, which check what arrived; all have wheels for x86-64.
const SERVERS: &str = "opentelemetry-proto==1.45.2 grpcio==1.85.1 moto[server]==5.2.5 azure-storage-blob==12.31.1";
/// Azure's blob storage, in a directory of its own: it is as large as everything else together.
const AZURITE: &str = "azurite@3.37.0";
/// The engine with executors of its own.
const SPARK: &str = "pyspark==4.3.0";

/// The server whose workers are profiled.
const SERVER: &str = "gunicorn==23.0.0";

/// The engines that `tachyon-fleet sql` is compared with: wheels for x86-64; for DuckDB, one for Python 3.11 and one for newer
/// versions. chDB's own package has only what is for data frames; its engine is in this one.
const ENGINES: &str = "\
duckdb==2.0.0 --hash=sha256:5a3601121c7cc50d0b70412995634682fafcb58a0156d5d663dfd0b3bbe30a33 \
--hash=sha256:ab51ec57d329d6f3df37c0287b55d71c3fc07bb54b61d1afed09104f953b1431
chdb-core==26.9.0 --hash=sha256:707e2ec3fe0f7953bac97942eaeb7a1ed1d66b1e56ecef3f0aa2130f61f6e735
";

/// The tracer that publishes the span that each thread is in, with what it needs: wheels for Python 3.13 and 3.14 on x86-64.
const TRACER: &str = "\
bytecode==0.19.1 --hash=sha256:211a5091abd6f16f5bb3d34f1b88fc77f8f8539801a02384b51a97bdcee45f0f
ddtrace==4.16.0 --hash=sha256:0da20fab487ac0c508e065bc4a5ecd749cc2f8e56968fa2e2757cc0b193fad75 \
--hash=sha256:8b89b06a7513db54f00a94f87f4c8d9298dc70a378b4a88064d29042de19bff8
ddtrace_internal==0.1.0 --hash=sha256:8eeac4a812e003cebafc8be35ef05103ae2b132893dfbcee00a67f4af81404a2
envier==0.6.1 --hash=sha256:73609040a76be48bbcb97074d9969666484aa0de706183a6e9ef773156a8a6a9
opentelemetry_api==1.45.2 --hash=sha256:2cbd737377e710ee740d261c94e93fa0f08e6d037c18f17513cc0a2d94479a34
typing_extensions==4.16.0 --hash=sha256:481caa481374e813c1b176ada14e97f1f67a4539ce9cfeb3f350d78d6370c2e8
wrapt==2.5.2 --hash=sha256:8b039b3a296762db1908d6108365225393c4fb33c1dbc5f00aa36f8302eaeaa0 \
--hash=sha256:59b7e6d1dea7c3f38bab21954f587499c27c16ea537058eee4add6e4da1780ea
";

/// An event loop that is not in Python: the wheels for Python 3.13 and 3.14 on x86-64.
const LOOP: &str = "uvloop==0.23.0 --hash=sha256:e2cba180d6451822763eda8364f342435a873bcfb3849cbd82fdeca248ca65eb \
--hash=sha256:31e0cf90bc8fd88784f6802cdba968a51fb1aec1cc3feec74d862b2d371d1330
";

/// What runs greenlets: wheels for Python 3.13 on x86-64.
const GREEN: &str = "\
dnspython==2.9.2 --hash=sha256:af15f7d385a6ae2fb35a796fde2138004c8c42c7389090e2addc83e3b3340fd8
eventlet==0.41.3 --hash=sha256:839ed5711fff67034e46dedf4b41cf33f8378fca541e866621895fc186933e1d
gevent==26.9.0 --hash=sha256:231058bdb60dbf1074b2e74fbb77c0b0f1b045886bf7203b816692c3663726cc
greenlet==3.5.6 --hash=sha256:f98e8215e172f567ce80eeaed9107fb4d32b6c44f26983d9b8334658136a205a
zope.event==6.2 --hash=sha256:5e755153ac4faf64c10a4b6dd3307680166a3edf65b38df22df592610f8fa874
zope.interface==8.7 --hash=sha256:d30ed06ef78e9e1b41a50683b7d01727a3c363143c5bda09017e33f19827afc2
";

/// The wheels for Python 3.14 and 3.15 on x86-64.
const GREENLET: &str = "greenlet==3.5.6 \
--hash=sha256:9a09d59bef1db94f384b5bcc2d523694d338f3df6b757aeeaf7baca5d0c0be88 \
--hash=sha256:ccadce0130fd813ec86ebfe969a6c58b42acc1d0fe55a47525375b740e07b605
";

/// Installs what is missing, the npm packages into the cache directory's `tools`.
///
/// # Errors
/// A package is not available.
pub(crate) fn set_up() -> Result<()> {
    apt::ensure(&PROGRAMS)?;
    let python = zoo::newest_supported().context("no CPython 3.11 to 3.13 in pyenv")?;
    in_venv(&python, &cache::dir()?.join("gunicorn"), SERVER)?;
    engines(&python)?;
    for_targets()?;
    in_venv(&python, &cache::dir()?.join("servers"), SERVERS)?;
    in_venv(&python, &cache::dir()?.join("spark"), SPARK)?;
    from_npm("tools", &NPM_PACKAGES)?;
    from_npm("azurite", &[AZURITE]).map(drop)
}

/// Installs only the engines for tables.
///
/// # Errors
/// A package is not available.
pub(crate) fn set_up_engines() -> Result<()> {
    apt::ensure(&[("java", "default-jre-headless")])?;
    let python = zoo::newest_supported().context("no CPython 3.11 to 3.13 in pyenv")?;
    engines(&python)?;
    in_venv(&python, &cache::dir()?.join("spark"), SPARK).map(drop)
}

/// Installs only a browser and the viewers. Returns their directory.
///
/// # Errors
/// A package is not available.
pub(crate) fn viewers() -> Result<PathBuf> {
    apt::ensure(&[("chromium", "chromium"), ("npm", "npm")])?;
    from_npm("tools", &NPM_PACKAGES)
}

/// Installs npm packages into a directory of the cache, and returns that.
fn from_npm(name: &str, packages: &[&str]) -> Result<PathBuf> {
    let dir = cache::dir()?.join(name);
    let _lock = cache::lock(&dir)?;
    let stamp = packages.join("\n");
    if cache::is_finished(&dir, &stamp) {
        return Ok(dir);
    }
    command::run_quietly(
        &format!("npm install of {}", packages.join(" ")),
        Command::new("npm")
            .args(["install", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix"])
            .arg(&dir)
            .args(packages),
    )?;
    cache::finish(&dir, &stamp)?;
    Ok(dir)
}

/// Installs packages from PyPI (with spaces between them) into a virtual environment of their own, if needed. Returns the
/// directory of its programs.
///
/// # Errors
/// They cannot be installed.
pub(crate) fn in_venv(python: &Path, venv: &Path, packages: &str) -> Result<PathBuf> {
    // The lock is not in the directory itself, which may be removed.
    let _lock = cache::lock(venv.parent().unwrap_or(venv))?;
    if !cache::is_finished(venv, packages) {
        cache::remove(venv)?;
        command::run_quietly("making a virtual environment", Command::new(python).args(["-m", "venv"]).arg(venv))?;
        let what = format!("installing {packages} into {}", venv.display());
        let mut line = Command::new(venv.join("bin/python"));
        command::run_quietly(
            &what,
            line.args(["-m", "pip", "install", "--disable-pip-version-check"]).args(packages.split_whitespace()),
        )?;
        cache::finish(venv, packages)?;
    }
    Ok(venv.join("bin"))
}

/// The engines in a virtual environment of their own. pip compares the digests.
fn engines(python: &Path) -> Result<()> {
    let venv = cache::dir()?.join("engines");
    let _lock = cache::lock(&cache::dir()?)?;
    if cache::is_finished(&venv, ENGINES) {
        return Ok(());
    }
    cache::remove(&venv)?;
    command::run_quietly("making a virtual environment", Command::new(python).args(["-m", "venv"]).arg(&venv))?;
    let wanted = venv.join("wanted.txt");
    std::fs::write(&wanted, ENGINES).with_context(|| format!("cannot write {}", wanted.display()))?;
    let mut line = Command::new(venv.join("bin/python"));
    line.args(["-m", "pip", "install", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]);
    line.args(["--require-hashes", "--requirement"]).arg(&wanted);
    command::run_quietly("installing DuckDB and chDB", &mut line)?;
    cache::finish(&venv, ENGINES)
}

/// The tracer, the loop and greenlets in directories that `PYTHONPATH` names, one for each version: in the cache, and in the root directory
/// of sid's.
fn for_targets() -> Result<()> {
    let python = zoo::in_pyenv("3.13").context("hint: pyenv install 3.13")?;
    let in_sid = cache::dir()?.join("zoo/sid/opt");
    for (name, minor, dir, packages) in [
        ("ddtrace", "3.13", cache::dir()?, TRACER),
        ("ddtrace", "3.14", in_sid.clone(), TRACER),
        ("uvloop", "3.13", cache::dir()?, LOOP),
        ("uvloop", "3.14", in_sid.clone(), LOOP),
        ("gevent", "3.13", cache::dir()?, GREEN),
        ("greenlet", "3.14", in_sid.clone(), GREENLET),
        ("greenlet", "3.15", in_sid.join("3.15"), GREENLET),
    ] {
        let dir = dir.join(name);
        let _lock = cache::lock(&cache::dir()?)?;
        if cache::is_finished(&dir, packages) {
            continue;
        }
        cache::remove(&dir)?;
        std::fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        let wanted = dir.join("wanted.txt");
        std::fs::write(&wanted, packages).with_context(|| format!("cannot write {}", wanted.display()))?;
        let mut line = Command::new(&python.path);
        line.args(["-m", "pip", "install", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]);
        line.args(["--root-user-action=ignore", "--require-hashes", "--python-version", minor, "--target"]).arg(&dir);
        command::run_quietly(&format!("installing {name} for {minor}"), line.arg("--requirement").arg(&wanted))?;
        cache::finish(&dir, packages)?;
    }
    Ok(())
}

/// A crate's program in the cache, built if needed: in the development profile, which takes a third of the time.
///
/// # Errors
/// It cannot be fetched, or does not build.
pub(crate) fn from_crates(name: &str, version: &str) -> Result<PathBuf> {
    let dir = cache::dir()?.join("crates").join(name);
    let _lock = cache::lock(&dir)?;
    let program = dir.join("bin").join(name);
    if !cache::is_finished(&dir, version) {
        let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cargo.args(["install", "--locked", "--debug", "--force", "--root"]).arg(&dir);
        // Settings for this project's own builds do not apply here.
        cargo.env_remove("RUSTFLAGS").env_remove("CARGO_TARGET_DIR");
        // Nobody debugs it.
        cargo.env("CARGO_PROFILE_DEV_DEBUG", "false");
        command::run(cargo.arg(format!("{name}@{version}")))?;
        cache::finish(&dir, version)?;
    }
    Ok(program)
}
