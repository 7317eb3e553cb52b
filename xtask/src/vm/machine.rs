//! The processors that guests are emulated for: what QEMU, Debian, cargo and the guest call things there.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::{apt, cache, command};

/// A processor.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Machine {
    /// This machine's own: its files are used as they are.
    X86_64,
    /// Programs come from Debian's packages, and the profiler is cross-compiled.
    Arm64,
}

/// The suite of the arm64 guest's Debian, with the same C library that the cross compiler links with.
const ARM64_SUITE: &str = "bookworm";
const ARM64_PACKAGES: [&str; 8] = [
    "busybox-static",
    "libc6",
    "libgcc-s1",
    "zlib1g",
    "libexpat1",
    "python3.11-minimal",
    "libpython3.11-minimal",
    "libpython3.11-stdlib",
];

impl Machine {
    /// Debian's name for it.
    pub(crate) fn debian(self) -> &'static str {
        match self {
            Self::X86_64 => "amd64",
            Self::Arm64 => "arm64",
        }
    }

    /// Rust's and GNU's name for it.
    pub(crate) fn rust(self) -> &'static str {
        match self {
            Self::X86_64 => "x86_64",
            Self::Arm64 => "aarch64",
        }
    }

    pub(crate) fn qemu(self) -> &'static str {
        match self {
            Self::X86_64 => "qemu-system-x86_64",
            Self::Arm64 => "qemu-system-aarch64",
        }
    }

    /// Programs that its tests need here, and their packages.
    pub(crate) fn programs(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::X86_64 => &[("qemu-system-x86_64", "qemu-system-x86"), ("strip", "binutils")],
            Self::Arm64 => &[
                ("qemu-system-aarch64", "qemu-system-arm"),
                // The cross compiler: for zstd, and to link. It depends on its own binutils, and recommends the C library.
                ("aarch64-linux-gnu-gcc", "gcc-aarch64-linux-gnu"),
                ("/usr/aarch64-linux-gnu/include/stdio.h", "libc6-dev-arm64-cross"),
            ],
        }
    }

    /// The C compiler.
    pub(crate) fn cc(self) -> &'static str {
        match self {
            Self::X86_64 => "cc",
            Self::Arm64 => "aarch64-linux-gnu-gcc",
        }
    }

    /// Flags of the guest's C code: as distributions build theirs, on x86-64 without frame pointers, on arm64 with signed
    /// return addresses.
    pub(crate) fn c_flags(self) -> &'static [&'static str] {
        match self {
            Self::X86_64 => &["-fomit-frame-pointer"],
            Self::Arm64 => &["-mbranch-protection=standard"],
        }
    }

    pub(crate) fn strip(self) -> &'static str {
        match self {
            Self::X86_64 => "strip",
            Self::Arm64 => "aarch64-linux-gnu-strip",
        }
    }

    /// The board, and the serial line of the results, whose other end is the character device `results`.
    pub(crate) fn devices(self) -> &'static [&'static str] {
        match self {
            Self::X86_64 => &["-serial", "chardev:results"],
            // The board has one serial line of its own.
            Self::Arm64 => &["-M", "virt", "-device", "pci-serial,chardev=results"],
        }
    }

    /// The kernel's command line. With panic=-1 a panic ends QEMU at once, because of -no-reboot.
    pub(crate) fn command_line(self) -> &'static str {
        match self {
            Self::X86_64 => "console=ttyS0 quiet panic=-1 results=ttyS1",
            Self::Arm64 => "console=ttyAMA0 quiet panic=-1 results=ttyS0",
        }
    }

    /// The index of a Debian suite for this machine, in the cache.
    pub(crate) fn suite(self, dir: &Path, suite: &str, mirrors: &apt::Mirrors) -> Result<apt::Suite> {
        let dir = dir.join("apt");
        match self {
            Self::X86_64 => apt::Suite::open(&dir.join(suite), suite, mirrors),
            Self::Arm64 => apt::Suite::open_for(&dir.join(format!("{suite}-arm64")), suite, mirrors, "arm64"),
        }
    }

    /// The root directory of the guest's programs: this machine's, or Debian's packages unpacked in the cache.
    pub(crate) fn programs_root(self, dir: &Path) -> Result<PathBuf> {
        if self == Self::X86_64 {
            return Ok(PathBuf::from("/"));
        }
        let root = dir.join("userland-arm64");
        let stamp = format!("{ARM64_SUITE} {}", ARM64_PACKAGES.join(" "));
        if cache::is_finished(&root, &stamp) {
            return Ok(root);
        }
        cache::remove(&root)?;
        std::fs::create_dir_all(&root).with_context(|| format!("cannot create {}", root.display()))?;
        let suite = self.suite(dir, ARM64_SUITE, &apt::Mirrors::of_this_machine()?)?;
        for package in ARM64_PACKAGES {
            unpack_newest(&suite, package, &root)?;
        }
        cache::finish(&root, &stamp)?;
        Ok(root)
    }

    /// Rust's name for the target.
    pub(crate) fn triple(self) -> String {
        format!("{}-unknown-linux-gnu", self.rust())
    }

    /// Rust's name for the target with static programs.
    pub(crate) fn static_triple(self) -> String {
        format!("{}-unknown-linux-musl", self.rust())
    }

    /// Builds the profiler for this machine, and says where it is.
    ///
    /// # Errors
    /// The target's standard library is not available, or it does not build.
    pub(crate) fn profiler(self, release: bool) -> Result<PathBuf> {
        // The second time there is nothing to build or complain about, only the path to learn.
        command::run(&mut self.cargo(release)?)?;
        let lines = command::stdout(self.cargo(release)?.args(["--message-format", "json"]))?;
        lines
            .lines()
            .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
            .find_map(|message| message.get("executable")?.as_str().map(PathBuf::from))
            .context("cargo named no executable of tachyon-bpf")
    }

    /// The given unoptimised build of the profiler, if there is one and the machine is this one; otherwise builds it.
    ///
    /// # Errors
    /// As [`Self::profiler`].
    pub(crate) fn profiler_or(self, given: Option<&Path>) -> Result<PathBuf> {
        match given {
            Some(given) if self == Self::X86_64 => Ok(given.to_owned()),
            _ => self.profiler(false),
        }
    }

    fn cargo(self, release: bool) -> Result<Command> {
        let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cargo.current_dir(command::project_root()).args(["build", "--package", "tachyon", "--bin", "tachyon-bpf"]);
        if release {
            cargo.args(["--release", "--locked"]);
        }
        if self == Self::Arm64 {
            let target = self.triple();
            command::run_quietly(
                &format!("rustup target add {target}"),
                Command::new("rustup").args(["target", "add", &target]),
            )?;
            cargo.args(["--target", &target]);
            cargo.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", "aarch64-linux-gnu-gcc");
        }
        Ok(cargo)
    }
}

/// Debian's static busybox for a processor: in the guest's userland, or unpacked beside it.
///
/// # Errors
/// The package is not available.
pub(crate) fn busybox(machine: Machine, dir: &Path) -> Result<PathBuf> {
    let path = "bin/busybox";
    if machine == Machine::Arm64 {
        return Ok(machine.programs_root(dir)?.join(path));
    }
    let root = dir.join("busybox-amd64");
    let stamp = ARM64_SUITE;
    if !cache::is_finished(&root, stamp) {
        cache::remove(&root)?;
        std::fs::create_dir_all(&root).with_context(|| format!("cannot create {}", root.display()))?;
        unpack_newest(&machine.suite(dir, stamp, &apt::Mirrors::of_this_machine()?)?, "busybox-static", &root)?;
        cache::finish(&root, stamp)?;
    }
    Ok(root.join(path))
}

/// Of the listed versions, the newest one that the archive has.
fn unpack_newest(suite: &apt::Suite, package: &str, root: &Path) -> Result<()> {
    let mut failure = anyhow::anyhow!("the index lists no {package}");
    for (package, version) in suite.versions(&format!("^{package}$"))? {
        match suite.unpack(&package, &version, root) {
            Ok(()) => return Ok(()),
            Err(error) => failure = error,
        }
    }
    Err(failure)
}
