//! Boots other kernels in QEMU and profiles a live interpreter on each: every kernel's verifier is different.
//!
//! A kernel comes from a Debian suite ([`kernels`]), the guest's files from this machine or, for another processor, from
//! Debian's packages ([`machine`], [`initramfs`]); the guest's part is `tests/kernel/init.sh`; [`guest`] boots it and brings
//! its files back, [`verdict`] judges them, by the same rules on every machine.

mod events;
pub(crate) mod guest;
mod hotplug;
pub(crate) mod initramfs;
pub(crate) mod kernels;
mod kick;
pub(crate) mod machine;
mod refusals;
mod verdict;
mod waits;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail};

use crate::{apt, cache, command};

/// Arguments of `cargo xtask vm-test`.
#[derive(clap::Args)]
pub(crate) struct VmTestArgs {
    /// Kernels to boot, of 5.10, 6.1, 6.12 and 7.2, on arm64 with `arm64-` before the version; `arm64` alone is one of them
    #[arg(long, value_delimiter = ',', default_value = "5.10,7.2")]
    kernel: Vec<kernels::Kernel>,
    /// Emulated processors of each guest
    #[arg(long, default_value_t = 2)]
    cpus: u32,
    /// The profiler for guests of this machine's processor, where one is built already
    #[arg(long, value_name = "PROGRAM", conflicts_with = "without_profiler")]
    profiler: Option<PathBuf>,
    /// Only boot, start Python and bring files back: a test of the harness itself
    #[arg(long)]
    without_profiler: bool,
}

/// Runs `cargo xtask vm-test`.
///
/// # Errors
/// A kernel did not boot, or its recording is not as it must be; every kernel is tried first.
pub(crate) fn run(args: VmTestArgs) -> Result<()> {
    let start = Instant::now();
    apt::ensure(&initramfs::PROGRAMS)?;
    let dir = cache::dir()?.join("vm");
    let _lock = cache::lock(&dir)?;
    let work = tempfile::tempdir()?;
    // One for each machine, made when its first kernel comes up.
    let mut archives = Vec::new();
    let (mut failed, mut times) = (Vec::new(), Vec::new());
    for kernel in args.kernel {
        let machine = kernel.machine;
        let archive = match archives.iter().find(|(known, _)| *known == machine) {
            Some((_, archive)) => PathBuf::clone(archive),
            None => {
                apt::ensure(machine.programs())?;
                let work = work.path().join(machine.debian());
                let profiler =
                    (!args.without_profiler).then(|| machine.profiler_or(args.profiler.as_deref())).transpose()?;
                let archive = initramfs::build(&dir, &work, machine, profiler.as_deref())?;
                archives.push((machine, archive.clone()));
                archive
            }
        };
        let begun = Instant::now();
        let judged = kernels::fetch(&dir, kernel)
            .and_then(|image| guest::run(kernel, guest::Given::check(args.cpus), &image, &archive, work.path()))
            .and_then(|results| verdict::judge(&results, !args.without_profiler, &kernel.promise(args.cpus)));
        times.push(format!("{} {:.0} s", kernel.name(), begun.elapsed().as_secs_f64()));
        match judged {
            Ok(summary) => eprintln!("kernel {}: passed: {summary}", kernel.name()),
            Err(error) => {
                eprintln!("kernel {}: FAILED: {error:#}", kernel.name());
                keep(&guest::directory(work.path(), kernel), &dir.join("failed").join(kernel.name()))?;
                failed.push(kernel.name());
            }
        }
    }
    eprintln!("vm-test took {:.0} s: {}; the rest to build", start.elapsed().as_secs_f64(), times.join(", "));
    if !failed.is_empty() {
        bail!("failed on kernel {}", failed.join(", "));
    }
    Ok(())
}

/// Keeps what a guest sent, to find out why it failed.
fn keep(guest: &Path, kept: &Path) -> Result<()> {
    cache::remove(kept)?;
    std::fs::create_dir_all(kept).with_context(|| format!("cannot create {}", kept.display()))?;
    command::stdout(Command::new("cp").arg("-r").arg(guest.join(".")).arg(kept))?;
    eprintln!("what it sent, and its console: {}", kept.display());
    Ok(())
}
