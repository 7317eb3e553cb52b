//! Debian packages, by `cargo-deb` from `[package.metadata.deb]` in `tachyon/Cargo.toml`.
//!
//! A package is made twice and compared, `lintian` must find no error in it, and this machine's processor's is installed,
//! upgraded, rolled back, removed and purged in each suite (`deb.sh`).

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::roots::Root;
use super::{STAGE, commit_time, ensure_same};
use crate::vm::machine::Machine;
use crate::{apt, command, tools};

/// The newest version that Rust 1.95 builds.
const CARGO_DEB: &str = "3.8.0";

/// The C library of the oldest suite of `depends` in `tachyon/Cargo.toml`.
const GLIBC: [u32; 2] = [2, 34];

/// The package that a trial begins with: the same one, with an older version number.
const OLDER: &str = "0.0.1-1";

/// Makes the package from what is in the stage, and tries it out.
///
/// # Errors
/// It cannot be made, is not reproducible, or does not do what a package must.
pub(super) fn make(machine: Machine, dev: bool, suites: &[String], output: &Path) -> Result<PathBuf> {
    let version = format!("{}-1", env!("CARGO_PKG_VERSION"));
    check_changelog(&version)?;
    check_glibc(&command::project_root().join(STAGE).join("tachyon-bpf"))?;
    let deb = build(machine, dev, &version, output)?;
    let work = tempfile::tempdir().context("cannot create a directory for a package")?;
    ensure_same(&deb, &build(machine, dev, &version, work.path())?)?;
    lint(&deb)?;
    if machine == Machine::X86_64 {
        let older = build(machine, dev, OLDER, work.path())?;
        for suite in suites {
            let what = "installing, upgrading, removing and purging the package";
            Root::of(suite)?.try_out(what, include_str!("deb.sh"), &[&older, &deb])?;
        }
    }
    Ok(deb)
}

/// Only makes the package from what is in the stage, for callers that try something else with it.
///
/// # Errors
/// It cannot be made.
pub(super) fn build_for_trial(machine: Machine, dev: bool, output: &Path) -> Result<PathBuf> {
    build(machine, dev, &format!("{}-1", env!("CARGO_PKG_VERSION")), output)
}

fn build(machine: Machine, dev: bool, version: &str, output: &Path) -> Result<PathBuf> {
    let deb = output.join(format!("tachyon-bpf_{version}_{}.deb", machine.debian()));
    let mut cargo_deb = Command::new(tools::from_crates("cargo-deb", CARGO_DEB)?);
    cargo_deb.current_dir(command::project_root()).args([
        "--package",
        "tachyon",
        "--no-build",
        "--no-strip",
        "--locked",
    ]);
    cargo_deb.args(["--target", &machine.triple(), "--deb-version", version, "--output"]).arg(&deb);
    if dev {
        cargo_deb.arg("--fast");
    }
    cargo_deb.env("SOURCE_DATE_EPOCH", commit_time()?);
    command::run_quietly(&format!("packing {}", deb.display()), &mut cargo_deb)?;
    Ok(deb)
}

/// Only what `lintian` calls an error is a failure: the rest is about requirements of Debian's own archive.
fn lint(deb: &Path) -> Result<()> {
    apt::ensure(&[("lintian", "lintian")])?;
    let mut lintian = Command::new("lintian");
    lintian.args(["--allow-root", "--fail-on", "error", "--display-level", ">=warning"]).arg(deb);
    command::run(&mut lintian)
}

/// Checks that the newest entry of the package's changelog is for the version that is packed.
fn check_changelog(version: &str) -> Result<()> {
    let file = command::project_root().join("deploy/debian/changelog");
    let text = std::fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
    let first = text.lines().next().unwrap_or_default();
    ensure!(first.contains(&format!("({version})")), "{}: the newest entry is not for {version}", file.display());
    Ok(())
}

/// Checks that the package does not depend on a newer C library than the program, whose needs are in its table of needed
/// versions.
fn check_glibc(program: &Path) -> Result<()> {
    let said = command::stdout(Command::new("readelf").args(["--version-info", "--wide"]).arg(program))?;
    let newest = newest_glibc(&said).context("the program asks for no version of the C library")?;
    ensure!(newest <= GLIBC, "the program needs glibc {newest:?}, its package depends on {GLIBC:?}");
    Ok(())
}

fn newest_glibc(version_info: &str) -> Option<[u32; 2]> {
    let versions = version_info.split("GLIBC_").skip(1).filter_map(|rest| {
        let number = rest.split_whitespace().next()?;
        let mut parts = number.split('.').map(|part| part.parse().ok());
        Some([parts.next()??, parts.next()??])
    });
    versions.max()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_the_c_library_order_by_number() {
        let text = "  0x0010:   Name: GLIBC_2.9  Flags: none  Version: 4\n  0x0020:   Name: GLIBC_2.34  Flags: none\n\
                    0x0030:   Name: GLIBC_2.2.5  Flags: none  Version: 2\n 0x0040: Name: GCC_4.2.0\n";
        assert_eq!(newest_glibc(text), Some([2, 34]));
        assert_eq!(newest_glibc("Name: GCC_4.2.0"), None);
    }
}
