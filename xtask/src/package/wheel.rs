//! Wheels for pip, by `maturin` from `pyproject.toml`: just the program, static with musl, so that one file serves Pythons
//! with any C library, and its bill of materials. Zig is the C compiler for zstd, and links: one for all processors, from
//! PyPI.
//!
//! A wheel is made twice and compared. pip installs x86-64's in Debian's Python of each suite (`wheel.sh`), and its program starts
//! in a root that contains nothing else; arm64's starts under QEMU. The short form packs the unoptimised build of the tests, which
//! needs the C library.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::roots::Root;
use super::{ensure_same, sbom, starting};
use crate::vm::machine::Machine;
use crate::{cache, command, tools, zoo};

const TOOLS: &str = "maturin==1.16.0 ziglang==0.17.1";

/// A static program runs on the oldest systems of both kinds that pip and Rust's targets support.
const PLATFORMS: [&str; 2] = ["manylinux2014", "musllinux_1_2"];

/// Makes the wheel, and tries it out.
///
/// # Errors
/// It cannot be made, is not reproducible, or does not do what a wheel must.
pub(super) fn make(machine: Machine, dev: bool, suites: &[String], output: &Path) -> Result<PathBuf> {
    let work = tempfile::tempdir().context("cannot create a directory for a wheel")?;
    let again = build(machine, dev, &work.path().join("again"))?;
    let made = build(machine, dev, &work.path().join("wheel"))?;
    ensure_same(&made, &again)?;
    let name = made.file_name().context("a wheel has a name")?;
    let wheel = output.join(name);
    fs::copy(&made, &wheel).with_context(|| format!("cannot write {}", wheel.display()))?;
    if machine == Machine::X86_64 {
        for suite in suites {
            Root::of(suite)?.try_out("pip install of the wheel", include_str!("wheel.sh"), &[&wheel])?;
        }
    }
    if !dev {
        alone(&program(&wheel, work.path())?, machine)?;
        if machine == Machine::X86_64 {
            suits_musl(&wheel)?;
        }
    }
    eprintln!("{}: {} KiB", wheel.display(), fs::metadata(&wheel).context("the wheel was just written")?.len() >> 10);
    Ok(wheel)
}

/// Only makes the wheel.
///
/// Without `SOURCE_DATE_EPOCH`, for which cargo would rebuild zstd and everything that needs it: maturin's files are
/// dated 1980.
///
/// # Errors
/// It cannot be made.
pub(super) fn build(machine: Machine, dev: bool, output: &Path) -> Result<PathBuf> {
    let python = zoo::newest_supported().context("no CPython 3.11 to 3.13 in pyenv")?;
    let programs = tools::in_venv(&python, &cache::dir()?.join("maturin"), TOOLS)?;
    let bill = tempfile::tempdir().context("cannot create a directory for a bill of materials")?;
    let bill = bill.path().join(sbom::FILE);
    fs::write(&bill, sbom::of(machine)?).with_context(|| format!("cannot write {}", bill.display()))?;
    let mut maturin = Command::new(programs.join("maturin"));
    maturin.current_dir(command::project_root()).args(["build", "--locked", "--out"]).arg(output);
    maturin.arg("--sbom-include").arg(&bill);
    if dev {
        maturin.args(["--compatibility", "linux", "--compression-method", "stored"]);
    } else {
        let target = machine.static_triple();
        command::run_quietly(
            &format!("rustup target add {target}"),
            Command::new("rustup").args(["target", "add", &target]),
        )?;
        // It looks for Zig in the Python that it finds first.
        let path = std::env::var_os("PATH").unwrap_or_default();
        let paths = std::iter::once(programs.clone()).chain(std::env::split_paths(&path));
        maturin.env("PATH", std::env::join_paths(paths).context("a path with a colon")?);
        maturin.args(["--release", "--strip", "--zig", "--target", &target, "--compatibility"]).args(PLATFORMS);
    }
    command::run(&mut maturin)?;
    let mut files = fs::read_dir(output).context("cannot list what maturin made")?.filter_map(Result::ok);
    let wheel = files.find(|file| file.path().extension().is_some_and(|end| end == "whl"));
    Ok(wheel.context("maturin made no wheel")?.path())
}

/// Takes the program out of a wheel, where it has a directory of its own. The bill of materials must be there, too.
///
/// # Errors
/// The wheel lacks one of them.
pub(super) fn program(wheel: &Path, work: &Path) -> Result<PathBuf> {
    let unpacked = work.join("unpacked");
    command::stdout(Command::new("python3").args(["-m", "zipfile", "-e"]).arg(wheel).arg(&unpacked))?;
    let version = env!("CARGO_PKG_VERSION");
    let bill = unpacked.join(format!("tachyon_bpf-{version}.dist-info/sboms")).join(sbom::FILE);
    ensure!(bill.is_file(), "{} has no bill of materials", wheel.display());
    let program = unpacked.join(format!("tachyon_bpf-{version}.data/scripts/tachyon-bpf"));
    command::run(Command::new("chmod").arg("755").arg(&program))?;
    Ok(program)
}

/// Checks that the program starts without a C library, a loader or any other file.
fn alone(program: &Path, machine: Machine) -> Result<()> {
    let mut started = if machine == Machine::X86_64 {
        let mut chroot = Command::new("chroot");
        chroot.arg(program.parent().context("it lies in a directory")?).arg("/tachyon-bpf");
        chroot
    } else {
        let said = command::stdout(Command::new("readelf").args(["--program-headers", "--wide"]).arg(program))?;
        ensure!(!said.contains("INTERP"), "the wheel's program is not static:\n{said}");
        starting(machine, program)?
    };
    let said = command::stdout(started.arg("--version"))?;
    ensure!(said.contains(env!("CARGO_PKG_VERSION")), "the wheel's program calls itself {said:?}");
    Ok(())
}

/// Checks that pip of a Python with musl would accept the wheel. The zoo's Python has no zlib, which pip needs; pip's
/// own list of tags decides.
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
