//! Why the kernel side could not be set up, in words that name the mend.

use super::btf::BtfError;
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
    #[error("cannot load the BPF object: {0}\nhint: `tachyon-bpf doctor` tells what is missing")]
    Load(#[source] Box<EbpfError>),
    /// A program was refused.
    #[error("cannot load the BPF program {program}: {reason}\nhint: `tachyon-bpf doctor` tells what is missing")]
    Program {
        /// Its name.
        program: &'static str,
        /// The kernel's word.
        reason: String,
    },
    /// An event could not be opened.
    #[error(
        "cannot attach {what}: {source}\nhint: needs root, or CAP_BPF and CAP_PERFMON with kernel.perf_event_paranoid at 2 or less"
    )]
    Attach {
        /// The event.
        what: String,
        /// The kernel's word.
        source: ProgramError,
    },
    /// A map could not be used.
    #[error("cannot use the BPF map {map}: {source}")]
    Map {
        /// Its name.
        map: &'static str,
        /// The kernel's word.
        source: MapError,
    },
    /// A map could not be mapped into memory.
    #[error("cannot map the BPF map {0} into memory: {1}")]
    Share(&'static str, #[source] std::io::Error),
    /// The object lacks something the loader knows of.
    #[error("the BPF object has no {0}: it was not built from the sources of this program")]
    Missing(&'static str),
    /// The list of CPUs could not be read.
    #[error("cannot read {path}: {source}")]
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

impl KernelError {
    pub(super) fn map(map: &'static str) -> impl FnOnce(MapError) -> Self {
        move |source| Self::Map { map, source }
    }
}

pub(super) fn program_error(program: &'static str) -> impl FnOnce(ProgramError) -> KernelError {
    move |error| KernelError::Program { program, reason: refusal(&error) }
}

/// Why the kernel refused a program, in one line. Of the verifier's log, which may have megabytes, the last words: they say
/// what was wrong.
fn refusal(error: &ProgramError) -> String {
    let ProgramError::LoadError { io_error, verifier_log } = error else { return error.to_string() };
    let log = verifier_log.to_string();
    let mut lines = log.lines().rev();
    let last = lines.find(|line| !line.is_empty() && !STATISTICS.iter().any(|start| line.starts_with(start)));
    last.map_or_else(|| io_error.to_string(), |last| format!("{io_error}: {last}"))
}

/// How the lines begin that the verifier puts behind its reason (`print_verification_stats`, kernel/bpf/verifier.c).
const STATISTICS: [&str; 3] = ["verification time", "stack depth", "processed "];
