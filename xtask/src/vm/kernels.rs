//! The kernels of the test matrix: Debian's cloud images, fetched without installing them.

use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, Result, bail};

use super::machine::Machine;
use super::verdict::Promise;
use crate::{apt, cache};

/// One kernel of the matrix: a version for a machine.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Kernel {
    version: Version,
    pub(crate) machine: Machine,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Version {
    /// bullseye's: the oldest supported one.
    V5_10,
    /// bookworm's.
    V6_1,
    /// trixie's.
    V6_12,
    /// sid's.
    V7_2,
}

impl Version {
    const ALL: [Self; 4] = [Self::V5_10, Self::V6_1, Self::V6_12, Self::V7_2];

    fn name(self) -> &'static str {
        match self {
            Self::V5_10 => "5.10",
            Self::V6_1 => "6.1",
            Self::V6_12 => "6.12",
            Self::V7_2 => "7.2",
        }
    }
}

impl FromStr for Kernel {
    type Err = anyhow::Error;

    fn from_str(name: &str) -> Result<Self> {
        let (machine, version) = match name.strip_prefix("arm64") {
            // The one kernel for that machine that every run boots.
            Some("") => (Machine::Arm64, "6.12"),
            Some(rest) => (Machine::Arm64, rest.strip_prefix('-').unwrap_or(rest)),
            None => (Machine::X86_64, name),
        };
        let version = Version::ALL.into_iter().find(|known| known.name() == version);
        let version = version.context("known are 5.10, 6.1, 6.12, 7.2, arm64 and arm64-VERSION")?;
        Ok(Self { version, machine })
    }
}

impl Kernel {
    /// The version in its usual form, with the machine if it is not x86-64.
    pub(crate) fn name(self) -> String {
        match self.machine {
            Machine::X86_64 => self.version.name().to_owned(),
            Machine::Arm64 => format!("arm64-{}", self.version.name()),
        }
    }

    /// `qemu64` has no FSGSBASE, `max` does: the thread pointer must be right either way, so both are booted. On arm64
    /// `max` signs return addresses in software, which makes a walk 12 times slower.
    pub(crate) fn cpu(self) -> &'static str {
        match (self.machine, self.version) {
            (Machine::Arm64, _) => "neoverse-n1",
            (Machine::X86_64, Version::V5_10 | Version::V6_1) => "qemu64",
            (Machine::X86_64, Version::V6_12 | Version::V7_2) => "max",
        }
    }

    /// What the profiler must do there: before 6.0, arm64's JIT compiler cannot handle the object.
    pub(crate) fn promise(self, cpus: u32) -> Promise {
        let arm64 = self.machine == Machine::Arm64;
        let refusal = (arm64 && self.version == Version::V5_10).then_some("(needs 6.0)");
        let memlock = (!arm64).then_some(self.version == Version::V5_10);
        Promise { many_cpus: cpus > 2, refusal, memlock }
    }

    fn suite(self) -> &'static str {
        match self.version {
            Version::V5_10 => "bullseye",
            Version::V6_1 => "bookworm",
            Version::V6_12 => "trixie",
            Version::V7_2 => "sid",
        }
    }

    /// The names of the packages with the image: sid recently moved it to `linux-binary`.
    fn package_pattern(self) -> String {
        let start = match self.version {
            Version::V5_10 => r"linux-image-5\.10\.0-[0-9]+",
            Version::V6_1 => r"linux-image-6\.1\.0-[0-9]+",
            Version::V6_12 => r"linux-image-6\.12\..*deb13",
            Version::V7_2 => r"linux-binary-7\.2\..*",
        };
        format!("^{start}-cloud-{}$", self.machine.debian())
    }
}

/// The kernel's image, from the cache or from its suite.
///
/// # Errors
/// The archive has none of the versions that its index lists.
pub(crate) fn fetch(dir: &Path, kernel: Kernel) -> Result<PathBuf> {
    let home = dir.join("kernels").join(kernel.name());
    let image = home.join("vmlinuz");
    if cache::is_finished(&home, &kernel.package_pattern()) {
        return Ok(image);
    }
    cache::remove(&home)?;
    fs::create_dir_all(&home).with_context(|| format!("cannot create {}", home.display()))?;
    let mirrors = apt::Mirrors::of_this_machine()?;
    let suite = kernel.machine.suite(dir, kernel.suite(), &mirrors)?;
    if !fetch_newest(&suite, kernel, &image)? {
        // The index may be older than the archive.
        suite.update(kernel.suite())?;
        if !fetch_newest(&suite, kernel, &image)? {
            bail!("no kernel {} in {}: none of {} is there", kernel.name(), kernel.suite(), kernel.package_pattern());
        }
    }
    cache::finish(&home, &kernel.package_pattern())?;
    Ok(image)
}

/// Tries the listed versions, newest first: an archive may list one that it no longer has.
fn fetch_newest(suite: &apt::Suite, kernel: Kernel, image: &Path) -> Result<bool> {
    for (package, version) in suite.versions(&kernel.package_pattern())? {
        let unpacked = tempfile::tempdir().context("cannot create a directory for a kernel")?;
        if let Err(error) = suite.unpack(&package, &version, unpacked.path()) {
            eprintln!("trying the next version: {error:#}");
            continue;
        }
        let found = find_image(unpacked.path()).with_context(|| format!("{package} {version} has no vmlinuz"))?;
        fs::copy(&found, image).with_context(|| format!("cannot copy {}", found.display()))?;
        return Ok(true);
    }
    Ok(false)
}

/// `boot/vmlinuz-VERSION`, or `usr/lib/modules/VERSION/vmlinuz` where `/boot` is filled at install time.
fn find_image(unpacked: &Path) -> Option<PathBuf> {
    let modules = fs::read_dir(unpacked.join("usr/lib/modules")).into_iter().flatten();
    let boot = fs::read_dir(unpacked.join("boot")).into_iter().flatten();
    let candidates =
        boot.flatten().map(|entry| entry.path()).chain(modules.flatten().map(|e| e.path().join("vmlinuz")));
    candidates.into_iter().find(|path| {
        path.is_file() && path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("vmlinuz"))
    })
}
