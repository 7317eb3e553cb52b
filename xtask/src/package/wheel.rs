//! Wheels for pip, by `maturin` from `pyproject.toml`: the program alone, static with musl, so that one file serves Pythons of
//! any C library.
//!
//! A wheel is made twice and compared. pip installs it in Debian's Python of each suite (`wheel.sh`), and its program starts
//! in a root that contains nothing else. The short form packs the unoptimised build of the tests, which needs the C library.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::ensure_same;
use super::roots::Root;
use crate::{apt, cache, command, tools, zoo};

const MATURIN: &str = "maturin==1.16.0";

/// A static program suits the oldest systems of both kinds that pip knows and Rust's targets do.
const PLATFORMS: [&str; 2] = ["manylinux2014", "musllinux_1_2"];

/// Makes the wheel, and tries it out.
///
/// # Errors
/// It cannot be made, is not reproducible, or does not do what a wheel must.
pub(super) fn make(dev: bool, suites: &[String], output: &Path) -> Result<()> {
    let work = tempfile::tempdir().context("cannot create a directory for a wheel")?;
    let again = build(dev, &work.path().join("again"))?;
    let made = build(dev, &work.path().join("wheel"))?;
    ensure_same(&made, &again)?;
    let name = made.file_name().context("a wheel has a name")?;
    let wheel = output.join(name);
    fs::copy(&made, &wheel).with_context(|| format!("cannot write {}", wheel.display()))?;
    for suite in suites {
        Root::of(suite)?.try_out("pip install of the wheel", include_str!("wheel.sh"), &[&wheel])?;
    }
    if !dev {
        alone(&wheel, work.path())?;
        suits_musl(&wheel)?;
    }
    eprintln!("{}: {} KiB", wheel.display(), fs::metadata(&wheel).context("the wheel was just written")?.len() >> 10);
    Ok(())
}

/// Without `SOURCE_DATE_EPOCH`, for which cargo would build zstd and all that needs it anew: maturin's files are of 1980.
fn build(dev: bool, output: &Path) -> Result<PathBuf> {
    let python = zoo::newest_supported().context("no CPython 3.11 to 3.13 in pyenv")?;
    let programs = tools::in_venv(&python, &cache::dir()?.join("maturin"), MATURIN)?;
    let mut maturin = Command::new(programs.join("maturin"));
    maturin.current_dir(command::project_root()).args(["build", "--locked", "--out"]).arg(output);
    if dev {
        maturin.args(["--compatibility", "linux", "--compression-method", "stored"]);
    } else {
        apt::ensure(&[("musl-gcc", "musl-tools")])?;
        let target = "x86_64-unknown-linux-musl";
        command::run_quietly(
            &format!("rustup target add {target}"),
            Command::new("rustup").args(["target", "add", target]),
        )?;
        maturin.args(["--release", "--strip", "--target", target, "--compatibility"]).args(PLATFORMS);
    }
    command::run(&mut maturin)?;
    let mut files = fs::read_dir(output).context("cannot list what maturin made")?.filter_map(Result::ok);
    let wheel = files.find(|file| file.path().extension().is_some_and(|end| end == "whl"));
    Ok(wheel.context("maturin made no wheel")?.path())
}

/// The program starts where there is no C library, no loader and no other file.
fn alone(wheel: &Path, work: &Path) -> Result<()> {
    let unpacked = work.join("unpacked");
    command::stdout(Command::new("python3").args(["-m", "zipfile", "-e"]).arg(wheel).arg(&unpacked))?;
    let scripts = unpacked.join(format!("tachyon_bpf-{}.data/scripts", env!("CARGO_PKG_VERSION")));
    command::run(Command::new("chmod").arg("755").arg(scripts.join("tachyon-bpf")))?;
    let said = command::stdout(Command::new("chroot").arg(&scripts).args(["/tachyon-bpf", "--version"]))?;
    ensure!(said.contains(env!("CARGO_PKG_VERSION")), "the wheel's program calls itself {said:?}");
    Ok(())
}

/// pip of a Python with musl would take the wheel. The zoo's has no zlib, which pip needs; what decides is pip's own
/// list of tags.
fn suits_musl(wheel: &Path) -> Result<()> {
    let python = zoo::newest_supported().context("no CPython 3.11 to 3.13 in pyenv")?;
    let pip = "import os, pip; print(os.path.dirname(os.path.dirname(pip.__file__)))";
    let pip = command::stdout(Command::new(python).args(["-c", pip]))?;
    let judge = "import sys; sys.path.append(sys.argv[1])\n\
                 from pip._vendor.packaging import tags, utils\n\
                 suits = utils.parse_wheel_filename(sys.argv[2])[3]\n\
                 known = list(tags.sys_tags())\n\
                 assert any('musllinux' in tag.platform for tag in known), known\n\
                 assert suits & set(known), (suits, known)";
    let name = wheel.file_name().context("a wheel has a name")?;
    let mut musl = Command::new(zoo::with_musl()?);
    command::stdout(musl.args(["-B", "-c", judge, pip.trim()]).arg(name)).map(drop)
}
