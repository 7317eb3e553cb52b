//! Finds out whether the machine can profile, by trying: a ring buffer, a small program, a perf event.
//!
//! [`preflight`] stops at the first thing that is missing and names the remedy; `doctor` shows them all. Everything
//! that is made here is closed again at once.

use crate::advice::{Advice, advises};
use crate::remote::open_files;
use aya::maps::MapType;
use aya::programs::ProgramType;
use caps::{CapSet, Capability};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use perf_event::Builder;
use perf_event::events::{Event, Hardware, Software};
use std::fs::{self, File};
use std::io;

/// Where the kernel publishes its types.
pub const BTF_PATH: &str = "/sys/kernel/btf/vmlinux";

/// Why this machine, or this user on it, cannot profile.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PreflightError {
    /// The BPF object reads registers of x86-64 and arm64 only.
    #[error("cannot profile on {0}: this version knows x86_64 and aarch64")]
    Architecture(String),
    /// The kernel is older than the ring buffer.
    #[error("kernel {release} has no BPF ring buffer (needs 5.8)")]
    NoRingBuffer {
        /// `uname -r`.
        release: String,
    },
    /// The kernel's JIT compiler cannot do both at once.
    #[error("kernel {release} of arm64 has no BPF tail calls in programs with functions (needs 6.0)")]
    NoTailCalls {
        /// `uname -r`.
        release: String,
    },
    /// Maps, programs and an event or two for each CPU are open files.
    #[error("only {limit} files may be open at once, a recording needs {needed}")]
    OpenFiles {
        /// The limit.
        limit: u64,
        /// What is enough for this machine's CPUs.
        needed: u64,
    },
    /// The kernel does not publish its types.
    #[error("cannot read the kernel's BTF at {BTF_PATH}")]
    Btf(#[source] io::Error),
    /// The kernel forbids BPF programs to read kernel memory.
    #[error("kernel lockdown is `confidentiality`, which forbids BPF to read kernel memory")]
    Lockdown,
    /// `bpf(2)` was refused.
    #[error("cannot {attempt}")]
    Bpf {
        /// What was attempted.
        attempt: &'static str,
        /// The kernel's error.
        source: io::Error,
        /// Missing capabilities that would allow it.
        missing: Vec<Capability>,
    },
    /// The kernel has no BPF programs for perf events.
    #[error("kernel {release} runs no BPF programs on perf events")]
    NoPerfEventPrograms {
        /// `uname -r`.
        release: String,
    },
    /// `perf_event_open(2)` was refused.
    #[error("cannot open a perf event on a whole CPU")]
    PerfEvent {
        /// The kernel's error.
        source: io::Error,
        /// `kernel.perf_event_paranoid`.
        paranoid: Option<i32>,
        /// Missing capabilities that would allow it.
        missing: Vec<Capability>,
    },
}

advises!(PreflightError);

impl Advice for PreflightError {
    fn hint(&self) -> Option<String> {
        Some(match self {
            Self::Architecture(_) => "profile on one of them".to_owned(),
            Self::NoRingBuffer { .. } => "boot Linux 5.8 or newer; 5.10 and later are tested".to_owned(),
            Self::NoTailCalls { .. } => "boot Linux 6.0 or newer; on x86-64 5.10 is enough".to_owned(),
            Self::OpenFiles { needed, .. } => {
                format!(
                    "raise the hard limit: `ulimit -Hn {needed}` as root, LimitNOFILE={needed} in a unit of systemd"
                )
            }
            Self::Btf(source) if source.kind() == io::ErrorKind::PermissionDenied => {
                "be root, or let this user read the file".to_owned()
            }
            Self::Btf(_) => {
                "boot a kernel with CONFIG_DEBUG_INFO_BTF=y; in a container mount the host's /sys".to_owned()
            }
            Self::Lockdown => "boot with lockdown=integrity or without lockdown".to_owned(),
            Self::Bpf { .. } | Self::PerfEvent { .. } if in_user_namespace() => {
                "this is a user namespace (a rootless container?), whose capabilities count for nothing here: run it \
                 outside of it"
                    .to_owned()
            }
            Self::Bpf { missing, .. } if missing.is_empty() && is_filtered() => SECCOMP.to_owned(),
            Self::Bpf { missing, .. } if missing.is_empty() => {
                "the capabilities are there: a seccomp filter, a security module or, before Linux 5.11, \
                 RLIMIT_MEMLOCK forbids it"
                    .to_owned()
            }
            Self::Bpf { missing, .. } => needs(missing),
            Self::NoPerfEventPrograms { .. } => {
                "boot a kernel with CONFIG_BPF_EVENTS=y and CONFIG_PERF_EVENTS=y".to_owned()
            }
            Self::PerfEvent { paranoid, missing, .. } => perf_hint(*paranoid, missing),
        })
    }
}

const SECCOMP: &str = "the capabilities are there, but a seccomp filter is active, as in containers: run the container with \
    `--security-opt seccomp=deploy/seccomp.json` (docs/containers.md)";

/// Whether system calls of this process go through a seccomp filter (`SECCOMP_MODE_FILTER`, proc_pid_status(5)).
fn is_filtered() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    status.lines().any(|line| line.strip_prefix("Seccomp:").is_some_and(|mode| mode.trim() == "2"))
}

fn needs(missing: &[Capability]) -> String {
    let names: Vec<_> = missing.iter().map(Capability::to_string).collect();
    let short: Vec<_> = names.iter().map(|name| format!("--cap-add {}", name.trim_start_matches("CAP_"))).collect();
    format!("needs root or {}; in a container {}", names.join(" and "), short.join(" "))
}

fn perf_hint(paranoid: Option<i32>, missing: &[Capability]) -> String {
    match paranoid {
        Some(level @ 3..) if !has(Capability::CAP_SYS_ADMIN) => format!(
            "kernel.perf_event_paranoid is {level}, where Debian's and Ubuntu's kernels want CAP_SYS_ADMIN: be root, or \
             `sysctl kernel.perf_event_paranoid=2` with CAP_PERFMON"
        ),
        _ if missing.is_empty() && is_filtered() => SECCOMP.to_owned(),
        _ if missing.is_empty() => {
            "the capabilities are there: a seccomp filter (of a container?) or a security module forbids it".to_owned()
        }
        _ => needs(missing),
    }
}

/// Whether this process can profile on this machine.
///
/// # Errors
/// The first thing that is missing.
pub fn preflight() -> Result<(), PreflightError> {
    architecture()?;
    kernel_version()?;
    lockdown()?;
    open_files()?;
    ring_buffer()?;
    btf()?;
    perf_event_program()?;
    cpu_clock()
}

/// The BPF object's architectures.
pub(crate) fn architecture() -> Result<(), PreflightError> {
    match std::env::consts::ARCH {
        "x86_64" | "aarch64" => Ok(()),
        other => Err(PreflightError::Architecture(other.to_owned())),
    }
}

/// A kernel that is new enough, as far as its release can be read.
pub(crate) fn kernel_version() -> Result<(), PreflightError> {
    new_enough(release(), cfg!(target_arch = "aarch64"))
}

/// 5.8; on arm64 6.0, whose JIT compiler is the first to count tail calls across BPF functions
/// (`bpf_jit_supports_subprog_tailcalls`, arch/arm64/net/bpf_jit_comp.c).
fn new_enough(release: String, arm64: bool) -> Result<(), PreflightError> {
    match parse_release(&release) {
        Some(version) if version < (5, 8) => Err(PreflightError::NoRingBuffer { release }),
        Some(version) if arm64 && version < (6, 0) => Err(PreflightError::NoTailCalls { release }),
        _ => Ok(()),
    }
}

/// `uname -r`.
pub(crate) fn release() -> String {
    nix::sys::utsname::uname().map(|names| names.release().to_string_lossy().into_owned()).unwrap_or_default()
}

/// Major and minor version of a release such as `5.10.0-32-cloud-amd64`.
pub(crate) fn parse_release(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// The kernel's lockdown mode, the word in brackets; `None` if there is none.
pub(crate) fn lockdown_mode() -> Option<String> {
    let text = fs::read_to_string("/sys/kernel/security/lockdown").ok()?;
    let (_, mode) = text.split_once('[')?;
    Some(mode.split_once(']')?.0.to_owned())
}

/// `confidentiality` forbids `bpf_probe_read_kernel` (`LOCKDOWN_BPF_READ_KERNEL`, include/linux/security.h).
pub(crate) fn lockdown() -> Result<(), PreflightError> {
    match lockdown_mode().as_deref() {
        Some("confidentiality") => Err(PreflightError::Lockdown),
        _ => Ok(()),
    }
}

/// Raises the soft limit of open files, mostly a thousand, to the hard one: on a machine with hundreds of CPUs it is not
/// enough, and with a higher limit more files can be held for naming native frames. It is a limit of the whole process, so
/// only the program's owner may decide this.
pub fn raise_open_files() {
    if let Ok((_, hard)) = getrlimit(Resource::RLIMIT_NOFILE) {
        // If the limit cannot be raised, `open_files` judges what there is.
        let _refused = setrlimit(Resource::RLIMIT_NOFILE, hard, hard);
    }
}

/// How many files may be open at once.
pub(crate) fn open_files() -> Result<u64, PreflightError> {
    let Some(limit) = open_files::limit() else { return Ok(u64::MAX) };
    let needed = open_files::needed();
    if limit < needed { Err(PreflightError::OpenFiles { limit, needed }) } else { Ok(limit) }
}

/// Checks that the kernel publishes its types; returns their size in bytes.
pub(crate) fn btf() -> Result<u64, PreflightError> {
    let file = File::open(BTF_PATH).map_err(PreflightError::Btf)?;
    Ok(file.metadata().map_err(PreflightError::Btf)?.len())
}

/// Checks that a ring buffer of one page can be made.
pub(crate) fn ring_buffer() -> Result<(), PreflightError> {
    match aya::sys::is_map_supported(MapType::RingBuf) {
        Ok(true) => Ok(()),
        Ok(false) => Err(PreflightError::NoRingBuffer { release: release() }),
        Err(error) => Err(PreflightError::Bpf {
            attempt: "create a BPF map",
            source: error.io_error,
            missing: missing(&[Capability::CAP_BPF]),
        }),
    }
}

/// Checks that a program for perf events can be loaded.
pub(crate) fn perf_event_program() -> Result<(), PreflightError> {
    match aya::sys::is_program_supported(ProgramType::PerfEvent) {
        Ok(true) => Ok(()),
        Ok(false) => Err(PreflightError::NoPerfEventPrograms { release: release() }),
        Err(error) => Err(PreflightError::Bpf {
            attempt: "load a BPF program",
            source: match error {
                aya::programs::ProgramError::SyscallError(error) => error.io_error,
                other => io::Error::other(other),
            },
            missing: missing(&[Capability::CAP_BPF, Capability::CAP_PERFMON]),
        }),
    }
}

/// Checks that the timer's event can be opened for a whole CPU.
#[doc(alias = "PERF_COUNT_SW_CPU_CLOCK")]
pub(crate) fn cpu_clock() -> Result<(), PreflightError> {
    open_event(Software::CPU_CLOCK).map_err(|source| PreflightError::PerfEvent {
        source,
        paranoid: paranoid(),
        missing: missing(&[Capability::CAP_PERFMON]),
    })
}

/// Checks that hardware cycles can be counted: there is a PMU that may be used.
#[doc(alias = "PERF_COUNT_HW_CPU_CYCLES")]
pub(crate) fn hardware_cycles() -> io::Result<()> {
    open_event(Hardware::CPU_CYCLES)
}

fn open_event(event: impl Event) -> io::Result<()> {
    let mut builder = Builder::new(event);
    builder.any_pid().one_cpu(first_cpu()).include_kernel().include_hv().sample_period(1_000_000_000);
    builder.build().map(drop)
}

/// A CPU that is online, which CPU 0 need not be.
fn first_cpu() -> usize {
    let online = fs::read_to_string("/sys/devices/system/cpu/online").unwrap_or_default();
    online.split(|c: char| !c.is_ascii_digit()).next().and_then(|number| number.parse().ok()).unwrap_or(0)
}

/// `kernel.perf_event_paranoid`.
pub(crate) fn paranoid() -> Option<i32> {
    fs::read_to_string("/proc/sys/kernel/perf_event_paranoid").ok()?.trim().parse().ok()
}

/// Most samples a second that the kernel lets a CPU take. It lowers this by itself if interrupts take too long
/// (`kernel.perf_cpu_time_max_percent`).
pub fn max_sample_rate() -> Option<u32> {
    fs::read_to_string("/proc/sys/kernel/perf_event_max_sample_rate").ok()?.trim().parse().ok()
}

/// Whether this process has a capability, in effect.
pub(crate) fn has(capability: Capability) -> bool {
    caps::has_cap(None, CapSet::Effective, capability).unwrap_or(false)
}

/// Whether this process is in another user namespace than the initial one, which maps every id to itself
/// (user_namespaces(7)). BPF and perf ask for capabilities of the initial one.
pub(crate) fn in_user_namespace() -> bool {
    let map = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    !map.is_empty() && map.split_whitespace().ne(["0", "0", "4294967295"])
}

/// The capability whose lack may be why something of another process could not be read, as a hint.
#[must_use]
pub fn target_hint(error: &anyhow::Error) -> Option<String> {
    let source = error.chain().find_map(|cause| cause.downcast_ref::<io::Error>())?;
    let lacking = |capability| !has(capability) && !has(Capability::CAP_SYS_ADMIN);
    match source.kind() {
        io::ErrorKind::PermissionDenied if !has(Capability::CAP_SYS_PTRACE) => {
            Some(needs(&[Capability::CAP_SYS_PTRACE]))
        }
        io::ErrorKind::PermissionDenied if !has(Capability::CAP_DAC_READ_SEARCH) => {
            Some(needs(&[Capability::CAP_DAC_READ_SEARCH]))
        }
        io::ErrorKind::NotFound if lacking(Capability::CAP_CHECKPOINT_RESTORE) => {
            Some(format!("the file was deleted or replaced: {}", needs(&[Capability::CAP_CHECKPOINT_RESTORE])))
        }
        _ => None,
    }
}

/// Those of `wanted` that are missing, unless CAP_SYS_ADMIN covers them.
fn missing(wanted: &[Capability]) -> Vec<Capability> {
    if has(Capability::CAP_SYS_ADMIN) {
        return Vec::new();
    }
    wanted.iter().copied().filter(|&capability| !has(capability)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_of_many_vendors() {
        for (release, version) in [
            ("5.10.0-32-cloud-amd64", Some((5, 10))),
            ("6.18.5", Some((6, 18))),
            ("7.2-rc1", Some((7, 2))),
            ("4.19.0-27-amd64", Some((4, 19))),
            ("odd", None),
            ("", None),
        ] {
            assert_eq!(parse_release(release), version, "{release}");
        }
    }

    #[test]
    fn arm64_needs_a_newer_kernel() {
        let release = || "5.10.0-32-cloud-arm64".to_owned();
        assert!(new_enough(release(), false).is_ok());
        let refused = new_enough(release(), true).unwrap_err();
        assert!(refused.to_string().contains("(needs 6.0)") && refused.hint().unwrap().contains("6.0"), "{refused}");
        assert!(new_enough("6.1.0-51-cloud-arm64".to_owned(), true).is_ok());
    }

    #[test]
    fn hints_name_the_mend() {
        let denied = || io::Error::from_raw_os_error(libc::EPERM);
        let missing = vec![Capability::CAP_BPF, Capability::CAP_PERFMON];
        let error = PreflightError::Bpf { attempt: "load a BPF program", source: denied(), missing };
        assert_eq!(error.to_string(), "cannot load a BPF program");
        assert_eq!(
            error.hint().unwrap(),
            "needs root or CAP_BPF and CAP_PERFMON; in a container --cap-add BPF --cap-add PERFMON"
        );
        let error = PreflightError::NoRingBuffer { release: "4.19".to_owned() };
        assert_eq!(error.to_string(), "kernel 4.19 has no BPF ring buffer (needs 5.8)");
        assert!(perf_hint(Some(1), &[Capability::CAP_PERFMON]).contains("CAP_PERFMON"));
    }
}
