//! Boots other kernels in QEMU and profiles a live interpreter on each: the verifier of every kernel is different.
//!
//! A kernel comes from a Debian suite ([`kernels`]), the guest's files from this machine ([`initramfs`]), the guest's
//! part is `tests/kernel/init.sh`; [`guest`] boots it and brings its files back, [`verdict`] judges them.

mod guest;
mod initramfs;
mod kernels;
mod verdict;

use std::time::Instant;

use anyhow::{Result, bail};

use crate::{apt, cache};

/// Arguments of `cargo xtask vm-test`.
#[derive(clap::Args)]
pub(crate) struct VmTestArgs {
    /// Kernels to boot, of 5.10, 6.1, 6.12 and 7.2
    #[arg(long, value_delimiter = ',', default_value = "5.10,7.2")]
    kernel: Vec<kernels::Kernel>,
    /// Only boot, start Python and bring files back: a test of the harness itself
    #[arg(long)]
    without_profiler: bool,
}

/// Runs `cargo xtask vm-test`.
///
/// # Errors
/// A kernel did not boot, or what was recorded on it is not what it must be; every kernel is tried first.
pub(crate) fn run(args: VmTestArgs) -> Result<()> {
    let start = Instant::now();
    apt::ensure(&[
        ("qemu-system-x86_64", "qemu-system-x86"),
        ("busybox", "busybox-static"),
        ("cpio", "cpio"),
        ("dpkg-deb", "dpkg"),
        ("strip", "binutils"),
        ("/usr/bin/python3.11", "python3.11"),
    ])?;
    let dir = cache::dir()?.join("vm");
    let _lock = cache::lock(&dir)?;
    let work = tempfile::tempdir()?;
    let initramfs = initramfs::build(work.path(), !args.without_profiler)?;
    let mut failed = Vec::new();
    for kernel in args.kernel {
        let judged = kernels::fetch(&dir, kernel)
            .and_then(|image| guest::run(kernel, &image, &initramfs, work.path()))
            .and_then(|results| verdict::judge(&results, !args.without_profiler));
        match judged {
            Ok(summary) => eprintln!("kernel {}: passed: {summary}", kernel.name()),
            Err(error) => {
                eprintln!("kernel {}: FAILED: {error:#}", kernel.name());
                failed.push(kernel.name());
            }
        }
    }
    eprintln!("vm-test took {:.0} s", start.elapsed().as_secs_f64());
    if !failed.is_empty() {
        bail!("failed on kernel {}", failed.join(", "));
    }
    Ok(())
}
