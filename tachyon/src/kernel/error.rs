//! Why the kernel side could not be set up, in words that name the remedy.

use super::btf::BtfError;
use crate::advice::{Advice, advises};
use aya::EbpfError;
use aya::maps::MapError;
use aya::programs::ProgramError;
use tachyon_common::limits::MAX_LAYOUTS;

/// Why the kernel side could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// The kernel's structures are not known.
    #[error(transparent)]
    Btf(#[from] BtfError),
    /// The object was refused.
    #[error("cannot load the BPF object")]
    Load(#[source] Box<EbpfError>),
    /// A program was refused.
    #[error("cannot load the BPF program {program}: {reason}")]
    Program {
        /// Its name.
        program: &'static str,
        /// The kernel's reason.
        reason: String,
    },
    /// An event could not be opened.
    #[error("cannot attach {what}")]
    Attach {
        /// The event.
        what: String,
        /// The kernel's reason.
        source: ProgramError,
    },
    /// The machine has no such event.
    #[error("this machine has no event {0}")]
    NoEvent(String),
    /// A map could not be used.
    #[error("cannot use the BPF map {map}: {reason}")]
    Map {
        /// Its name.
        map: &'static str,
        /// The kernel's reason, which is part of the message: some errors are noted without their sources.
        reason: MapError,
    },
    /// A map could not be mapped into memory.
    #[error("cannot map the BPF map {0} into memory: {1}")]
    Share(&'static str, std::io::Error),
    /// A map could not be put in the place of the one that the object declares.
    #[error("cannot put a BPF map in the place of a declared one: {0}")]
    PutInPlace(std::io::Error),
    /// The thread on which the verifier checks programs could not be made.
    #[error("cannot start a thread to load the BPF programs: {0}")]
    Thread(std::io::Error),
    /// The verifier still has the programs.
    #[error("the verifier still looks at the BPF programs")]
    Verifying,
    /// The programs are made for other processes than this, and those for all could not be loaded.
    #[error("the BPF programs are made for other interpreters, and those for all could not be loaded")]
    Narrow,
    /// The object lacks something that the loader expects.
    #[error("the BPF object has no {0}: it was not built from the sources of this program")]
    Missing(&'static str),
    /// The list of CPUs could not be read.
    #[error("cannot read {path}")]
    Cpus {
        /// The file.
        path: String,
        /// The reason.
        source: std::io::Error,
    },
    /// More interpreter builds than the table holds.
    #[error("more than {MAX_LAYOUTS} different interpreter builds on one host")]
    TooManyLayouts,
}

advises!(KernelError);

impl Advice for KernelError {
    fn hint(&self) -> Option<String> {
        let mend = match self {
            Self::Btf(error) => error.hint(),
            Self::Load(error) if matches!(&**error, EbpfError::MapError(error) if is_memlock(error)) => Some(MEMLOCK),
            Self::Map { reason, .. } if is_memlock(reason) => Some(MEMLOCK),
            Self::Load(_) | Self::Program { .. } => Some("`tachyon-bpf doctor` tells what is missing"),
            Self::Attach { .. } => {
                Some("needs root, or CAP_BPF and CAP_PERFMON with kernel.perf_event_paranoid at 2 or less")
            }
            Self::NoEvent(_) => {
                Some("`tachyon-bpf record -e list` shows what it has; virtual machines often have no hardware events")
            }
            Self::Map { .. }
            | Self::Share(..)
            | Self::PutInPlace(_)
            | Self::Thread(_)
            | Self::Verifying
            | Self::Narrow
            | Self::Missing(_)
            | Self::Cpus { .. }
            | Self::TooManyLayouts => None,
        };
        mend.map(str::to_owned)
    }
}

impl KernelError {
    pub(super) fn map(map: &'static str) -> impl FnOnce(MapError) -> Self {
        move |reason| Self::Map { map, reason }
    }
}

/// What to do where maps count as locked memory.
const MEMLOCK: &str = "before Linux 5.11 maps count as locked memory (RLIMIT_MEMLOCK): `ulimit -l unlimited` first, or add \
                       CAP_SYS_RESOURCE";

/// Whether a map was refused for its size: a map of one page was made before, so making maps is permitted.
/// (`bpf_map_charge_init`, kernel/bpf/syscall.c of 5.10, says EPERM.)
fn is_memlock(error: &MapError) -> bool {
    matches!(error, MapError::CreateError { io_error, .. } if io_error.raw_os_error() == Some(libc::EPERM))
}

pub(super) fn program_error(program: &'static str) -> impl FnOnce(ProgramError) -> KernelError {
    move |error| KernelError::Program { program, reason: refusal(&error) }
}

/// Why the kernel refused a program, in one line: the last words of the verifier's log, which may have megabytes, say what
/// was wrong.
fn refusal(error: &ProgramError) -> String {
    let ProgramError::LoadError { io_error, verifier_log } = error else { return error.to_string() };
    let log = verifier_log.to_string();
    let mut lines = log.lines().rev();
    let last = lines.find(|line| !line.is_empty() && !STATISTICS.iter().any(|start| line.starts_with(start)));
    last.map_or_else(|| io_error.to_string(), |last| format!("{io_error}: {last}"))
}

/// How the lines begin that the verifier appends after its reason (`print_verification_stats`, kernel/bpf/verifier.c).
const STATISTICS: [&str; 4] = ["verification time", "stack depth", "processed ", "insns processed"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_little_locked_memory_is_named() {
        let refused = |errno| MapError::CreateError {
            name: "SAMPLES".to_owned(),
            io_error: std::io::Error::from_raw_os_error(errno),
        };
        let load = |errno| KernelError::Load(Box::new(EbpfError::MapError(refused(errno))));
        let names_it = |error: KernelError| error.hint().is_some_and(|hint| hint.contains("ulimit -l"));
        assert!(names_it(load(libc::EPERM)) && !names_it(load(libc::EINVAL)));
        assert!(names_it(KernelError::Map { map: "ROWS", reason: refused(libc::EPERM) }));
    }

    /// Messages are shown escaped, so a hint inside one would show a literal line break.
    #[test]
    fn hints_are_no_part_of_messages() {
        let refused = std::io::Error::from_raw_os_error(libc::EPERM);
        let errors = [
            KernelError::Btf(BtfError::Unreadable(refused)),
            KernelError::Load(Box::new(EbpfError::NoBTF)),
            KernelError::Program { program: "on_sample", reason: "invalid argument".to_owned() },
            KernelError::Attach { what: "cpu-clock on CPU 0".to_owned(), source: ProgramError::NotLoaded },
        ];
        for error in errors {
            assert!(!error.to_string().contains('\n') && error.hint().is_some(), "{error}");
        }
    }
}
