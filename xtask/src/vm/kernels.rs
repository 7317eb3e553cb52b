//! The kernels of the test matrix: Debian's cloud images, fetched without installing them.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::{apt, cache};

/// One kernel of the matrix.
#[derive(Clone, Copy, clap::ValueEnum)]
pub(crate) enum Kernel {
    /// bullseye's: the oldest that is promised to work
    #[value(name = "5.10")]
    V5_10,
    /// bookworm's
    #[value(name = "6.1")]
    V6_1,
    /// trixie's
    #[value(name = "6.12")]
    V6_12,
    /// sid's
    #[value(name = "7.2")]
    V7_2,
}

impl Kernel {
    /// The version as people say it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::V5_10 => "5.10",
            Self::V6_1 => "6.1",
            Self::V6_12 => "6.12",
            Self::V7_2 => "7.2",
        }
    }

    /// `qemu64` has no FSGSBASE, `max` has: the thread pointer is right either way, and both ways are booted.
    pub(crate) fn cpu(self) -> &'static str {
        match self {
            Self::V5_10 | Self::V6_1 => "qemu64",
            Self::V6_12 | Self::V7_2 => "max",
        }
    }

    fn suite(self) -> &'static str {
        match self {
            Self::V5_10 => "bullseye",
            Self::V6_1 => "bookworm",
            Self::V6_12 => "trixie",
            Self::V7_2 => "sid",
        }
    }

    /// The names of the packages with the image: sid has put it into `linux-binary` of late.
    fn package_pattern(self) -> &'static str {
        match self {
            Self::V5_10 => r"^linux-image-5\.10\.0-[0-9]+-cloud-amd64$",
            Self::V6_1 => r"^linux-image-6\.1\.0-[0-9]+-cloud-amd64$",
            Self::V6_12 => r"^linux-image-6\.12\..*deb13-cloud-amd64$",
            Self::V7_2 => r"^linux-binary-7\.2\..*-cloud-amd64$",
        }
    }
}

/// The kernel's image, from the cache or from its suite.
///
/// # Errors
/// The archive has none of the versions that its index lists.
pub(crate) fn fetch(dir: &Path, kernel: Kernel) -> Result<PathBuf> {
    let home = dir.join("kernels").join(kernel.name());
    let image = home.join("vmlinuz");
    if cache::is_finished(&home, kernel.package_pattern()) {
        return Ok(image);
    }
    cache::remove(&home)?;
    fs::create_dir_all(&home).with_context(|| format!("cannot create {}", home.display()))?;
    let mirrors = apt::Mirrors::of_this_machine()?;
    let suite = apt::Suite::open(&dir.join("apt").join(kernel.suite()), kernel.suite(), &mirrors)?;
    if !fetch_newest(&suite, kernel, &image)? {
        // The index may be older than the archive.
        suite.update(kernel.suite())?;
        if !fetch_newest(&suite, kernel, &image)? {
            bail!("no kernel {} in {}: none of {} is there", kernel.name(), kernel.suite(), kernel.package_pattern());
        }
    }
    cache::finish(&home, kernel.package_pattern())?;
    Ok(image)
}

/// Tries the listed versions, newest first: an archive may list one that it no longer has.
fn fetch_newest(suite: &apt::Suite, kernel: Kernel, image: &Path) -> Result<bool> {
    for (package, version) in suite.versions(kernel.package_pattern())? {
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
