//! Is a process CPython, which version and build, and where does it keep things?
//!
//! Takes a process and gives a [`Verdict`]: addresses in that process plus a validated
//! [`Layout`]. Everything that depends only on the file is kept in an [`ElfCache`].
//! Nothing in the target is changed, and only its mappings and files are read, so that a process can be
//! inspected at the moment its libpython is mapped, before any of it has run; [`self_test()`] looks at an initialised
//! runtime, and [`spans`] at what a program publishes on its own. Which processes to inspect, and when, is decided elsewhere.

mod asyncio;
mod awaits;
mod budget;
mod builtin;
mod collector;
mod debug_offsets;
mod entering;
mod evaluator;
mod greenlets;
mod layout;
mod locate;
mod module_tasks;
mod objects;
mod self_test;
pub mod spans;
#[cfg(test)]
mod tests;
mod validate;
mod version;

use std::path::PathBuf;
use std::time::Instant;

use tachyon_common::layout::{Layout, flags};

pub use self::asyncio::{AsyncioOffsets, asyncio_offsets, has_asyncio, is_named_asyncio};
pub use self::awaits::{AwaitLayout, CoroutineLayout, FrameStates, StackTop};
pub use self::collector::Collector;
pub use self::entering::{EnteringError, EnteringWindow};
pub use self::evaluator::{Evaluator, EvaluatorCode, EvaluatorError};
pub use self::greenlets::{GreenletClasses, GreenletLayout, running_greenlets};
pub use self::layout::LayoutError;
pub use self::locate::ElfCache;
pub use self::module_tasks::ModuleTasks;
pub use self::objects::{Attributes, ObjectLayout};
pub use self::self_test::{SelfTestError, self_test};

use self::budget::{Metered, ReadBudget};
use self::debug_offsets::DebugOffsets;
use self::locate::{Facts, PythonFile};
use crate::remote::elf::{ElfError, Load, ReadAt};
use crate::remote::{FileIdentity, MappedPath, Mapping, RemoteError, RemoteProcess};

/// What can be walked: major and minor version, and whether the build is free-threaded. A version is added here once
/// its walk is tested; tables and debug offsets exist for 3.8 to 3.15.
pub const SUPPORTED: &[(u8, u8, bool)] = &[
    (3, 8, false),
    (3, 9, false),
    (3, 10, false),
    (3, 11, false),
    (3, 12, false),
    (3, 13, false),
    (3, 13, true),
    (3, 14, false),
    (3, 14, true),
    (3, 15, false),
    (3, 15, true),
];

/// Most files of one process that are examined.
const MAX_FILES_OF_PROCESS: usize = 4096;

/// What a process turned out to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// CPython of a supported version.
    Python(Box<Interpreter>),
    /// No mapped file looks like a Python.
    NotPython,
    /// A Python that cannot be profiled.
    Unsupported {
        /// What it is, e.g. `CPython 3.6.15` or `PyPy`.
        implementation: String,
        /// Why not.
        reason: Refusal,
    },
}

/// Why a Python cannot be profiled.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// There is no walk for its version or kind of build.
    #[error("{}supported are {}", if *.free_threaded { "free-threaded builds are not supported; " } else { "" }, supported())]
    NotSupported {
        /// It is a free-threaded build.
        free_threaded: bool,
    },
    /// Its version could not be found.
    #[error("its version cannot be told from its file")]
    VersionUnknown,
    /// It is another implementation of Python.
    #[error("only CPython can be profiled")]
    NotCPython,
    /// Its layout could not be built or does not validate.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// Its mappings do not show where it was loaded.
    #[error("its mappings do not show where it was loaded")]
    NoLoadBias,
    /// Looking through its files would take too long.
    #[error("its files are too many or too large")]
    TooMuchToRead,
}

/// The supported versions, for users.
fn supported() -> String {
    let names = SUPPORTED.iter().map(|(major, minor, free)| format!("{major}.{minor}{}", if *free { "t" } else { "" }));
    names.collect::<Vec<_>>().join(", ")
}

/// A CPython in a process. Addresses are in that process's memory and hold until it executes another program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interpreter {
    /// Address of `_PyRuntime`.
    pub runtime: u64,
    /// Address of `PyCode_Type`; 0 if the file has no symbol for it.
    pub code_type: u64,
    /// Address of `None`; 0 if the file has no symbol for it.
    pub none: u64,
    /// Where fields are; validated.
    pub layout: Layout,
    /// `sizeof(PyInterpreterState)`; taken from the headers for older versions, which do not publish it.
    pub interp_size: u64,
    /// `sizeof(PyThreadState)`, likewise.
    pub tstate_size: u64,
    /// Where fields of sets, coroutines and lists are; `None` if what is published about them makes no sense.
    pub awaits: Option<AwaitLayout>,
    /// Where the garbage collector's lists are; `None` if it has none.
    pub collector: Option<Collector>,
    /// Its file may hold `asyncio`'s C module, which then has no file of its own.
    pub asyncio_built_in: bool,
    /// Addresses of instructions before which `cframe` is published but not filled (3.11 and 3.12).
    pub entering: Option<EnteringWindow>,
    /// Why there is no such range although one is needed.
    pub entering_error: Option<EnteringError>,
    /// The file that holds it.
    pub file: FileIdentity,
    /// That file's path in the target's mount namespace.
    pub path: PathBuf,
    /// The file is always loaded at the same addresses (`ET_EXEC`): they hold for each process that runs it.
    pub static_address: bool,
    /// What is added to the file's addresses to get those of the process.
    pub load_bias: u64,
    /// The sizes of its structures are those of a version whose headers were seen. If not, the offsets are those of the
    /// nearest version, and [`self_test()`] should check them.
    pub known_build: bool,
}

impl Interpreter {
    /// `PY_VERSION_HEX`.
    #[must_use]
    pub fn version_hex(&self) -> u32 {
        self.layout.version_hex
    }

    /// Major, minor and micro version.
    #[must_use]
    pub fn version(&self) -> (u8, u8, u8) {
        let [major, minor, micro, _] = self.version_hex().to_be_bytes();
        (major, minor, micro)
    }

    /// The version in the usual form, e.g. `3.12.1` or `3.13.0rc2`.
    #[must_use]
    pub fn version_text(&self) -> String {
        version::display(self.version_hex())
    }

    /// Whether it has no GIL.
    #[must_use]
    pub fn free_threaded(&self) -> bool {
        self.layout.has(flags::FREE_THREADED)
    }
}

/// A `PY_VERSION_HEX` in the usual form, e.g. `3.12.1` or `3.13.0rc2`.
#[must_use]
pub fn version_text(hex: u32) -> String {
    version::display(hex)
}

/// Why a process could not be inspected.
#[derive(Debug, thiserror::Error)]
pub enum InspectError {
    /// The process cannot be read, or is gone.
    #[error(transparent)]
    Process(#[from] RemoteError),
    /// Nothing that could be read is a Python, but a mapped file could not be read.
    #[error("cannot tell whether it is Python: {0}")]
    File(#[source] RemoteError),
}

impl InspectError {
    /// Whether the process has ended, which is normal.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        matches!(self, Self::Process(error) if error.is_gone())
    }
}

/// Finds out whether a process is CPython and where it keeps things.
///
/// # Errors
/// When its mappings or the files behind them cannot be read.
pub fn inspect(process: &RemoteProcess, cache: &mut ElfCache) -> Result<Verdict, InspectError> {
    let maps = process.maps()?;
    if maps.is_empty() {
        // A kernel thread, or one that has ended.
        return Ok(Verdict::NotPython);
    }
    let exe = process.exe_file().ok().map(|file| file.identity());
    let mut refused = None;
    let mut unreadable = None;
    let (budget, now) = (ReadBudget::new(), Instant::now());
    for mappings in candidates(&maps, exe.map(|exe| exe.inode)) {
        let Some(first) = mappings.first() else { continue };
        let maybe_exe = exe.is_some_and(|exe| exe.inode == first.inode);
        if cache.is_known(first, maybe_exe, now) {
            continue;
        }
        let looked_up = process.mapped_file(first).and_then(|file| {
            let is_exe = exe.is_some_and(|exe| (exe.dev, exe.inode) == (file.identity().dev, file.identity().inode));
            cache.facts(&file, is_exe, &budget).map(|facts| (file.identity(), facts))
        });
        let (identity, facts) = match looked_up {
            Ok(found) => found,
            Err(error @ RemoteError::NoSuchProcess(_)) => return Err(error.into()),
            Err(RemoteError::NotRegular(_)) => continue,
            Err(error) => {
                unreadable.get_or_insert(error);
                continue;
            }
        };
        let Some(facts) = facts else {
            refused.get_or_insert(("a program that maps too much to look through".into(), Refusal::TooMuchToRead));
            break;
        };
        match &*facts {
            Facts::Other => cache.remember(first, maybe_exe, now),
            Facts::Refused { implementation, reason } => {
                refused.get_or_insert_with(|| (implementation.clone(), reason.clone()));
            }
            Facts::Python(python) => match load_bias(python, &mappings, &maps) {
                Some(bias) => return Ok(Verdict::Python(Box::new(placed(python, bias, identity, first)))),
                None => {
                    let implementation = format!("CPython {}", version::display(python.layout.version_hex));
                    refused.get_or_insert((implementation, Refusal::NoLoadBias));
                }
            },
        }
    }
    match (refused, unreadable) {
        (Some((implementation, reason)), _) => Ok(Verdict::Unsupported { implementation, reason }),
        (None, Some(error)) if process.stat().is_err() => Err(InspectError::Process(error)),
        (None, Some(error)) => Err(InspectError::File(error)),
        (None, None) => Ok(Verdict::NotPython),
    }
}

/// What an ELF file holds, as [`inspect`] would report it for a process that maps it: `CPython 3.12.1`, `None` for a file
/// that holds no Python, or the refusal. For callers that have a file and no process.
///
/// # Errors
/// When it is not a valid ELF file.
pub fn examine_file<R: ReadAt>(source: R, is_exe: bool) -> Result<Option<Result<String, Refusal>>, ElfError> {
    let budget = ReadBudget::new();
    Ok(match locate::examine(Metered { source, budget: &budget }, is_exe)? {
        Facts::Python(python) => Some(Ok(format!("CPython {}", version::display(python.layout.version_hex)))),
        Facts::Refused { reason, .. } => Some(Err(reason)),
        Facts::Other => None,
    })
}

/// The layout that an interpreter publishes in the first bytes of its `_PyRuntime`; `None` if it publishes none.
///
/// # Errors
/// When its numbers make no layout that can be walked.
pub fn published_layout(runtime: &[u8]) -> Result<Option<Layout>, LayoutError> {
    let Some(published) = DebugOffsets::decode(runtime)? else { return Ok(None) };
    let objects = layout::ObjectSizes { runtime: 0, code_type: 0 };
    layout::build(published.version_hex, Some(&published), objects).map(|built| Some(built.layout))
}

/// The mapped files that may hold code, each with its mappings: first the executable (the dynamic linker also looks at its
/// symbols first), then libraries named like CPython's, then the rest in order of address.
fn candidates(maps: &[Mapping], exe_inode: Option<u64>) -> Vec<Vec<&Mapping>> {
    let mut files: Vec<Vec<&Mapping>> = Vec::new();
    let mut places = std::collections::HashMap::new();
    for mapping in maps.iter().filter(|mapping| mapping.private && mapping.file_path().is_some()) {
        let count = files.len();
        let place = *places.entry((mapping.dev, mapping.inode)).or_insert(count);
        if let Some(file) = files.get_mut(place) {
            file.push(mapping);
        } else if count < MAX_FILES_OF_PROCESS {
            files.push(vec![mapping]);
        }
    }
    // A data file is mapped once and not executable.
    files.retain(|file| file.len() > 1 || file.iter().any(|mapping| mapping.executable));
    files.sort_by_key(|file| {
        let first = file.first();
        let is_exe = exe_inode.is_some() && first.map(|mapping| mapping.inode) == exe_inode;
        let name = first.and_then(|mapping| mapping.file_path()?.file_name());
        let named = name.is_some_and(|name| name.as_encoded_bytes().starts_with(b"libpython"));
        (!is_exe, !named)
    });
    files
}

/// What the dynamic linker added to the file's addresses, worked out from where its mappings start. `None` if they do not
/// fit the file's segments, or `_PyRuntime` would not be mapped.
fn load_bias(python: &PythonFile, mappings: &[&Mapping], all: &[Mapping]) -> Option<u64> {
    let fits = |bias: &u64| {
        let runtime = python.runtime.checked_add(*bias);
        runtime.is_some_and(|runtime| all.iter().any(|mapping| mapping.contains(runtime)))
    };
    if python.fixed_address {
        return Some(0).filter(fits);
    }
    let biases = |executable| biases(&python.loads, mappings, executable);
    biases(true).chain(biases(false)).find(fits)
}

/// What may have been added to a file's addresses, from where its mappings start: one for each mapping and segment that fit.
fn biases(loads: &[Load], mappings: &[&Mapping], executable: bool) -> impl Iterator<Item = u64> {
    let page = page_size();
    let down = move |value: u64| value - value % page;
    mappings.iter().filter(move |mapping| mapping.executable == executable).flat_map(move |mapping| {
        loads.iter().filter(move |load| load.executable == executable).filter_map(move |load| {
            // A segment is mapped from the start of the page in which it starts.
            let within = mapping.offset.checked_sub(down(load.offset))?;
            let inside = mapping.offset < load.offset.checked_add(load.file_size)?;
            let vaddr = down(load.vaddr).checked_add(within).filter(|_| inside)?;
            mapping.start.checked_sub(vaddr)
        })
    })
}

/// The system's page size in bytes.
fn page_size() -> u64 {
    let size = nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE).ok().flatten();
    size.and_then(|size| u64::try_from(size).ok()).filter(|size| size.is_power_of_two()).unwrap_or(4096)
}

/// An interpreter placed in one process.
fn placed(python: &PythonFile, bias: u64, file: FileIdentity, mapping: &Mapping) -> Interpreter {
    // Addresses of a validated file plus its bias are in mapped memory; one that wraps would only be unreadable.
    let at = |vaddr: u64| vaddr.wrapping_add(bias);
    let path = match &mapping.path {
        MappedPath::File { .. } => mapping.file_path().map(PathBuf::from).unwrap_or_default(),
        MappedPath::Anonymous | MappedPath::Special(_) => PathBuf::new(),
    };
    let (entering, entering_error) = match &python.entering {
        Some(Ok(window)) => (Some(window.moved(at)), None),
        Some(Err(error)) => (None, Some(error.clone())),
        None => (None, None),
    };
    Interpreter {
        runtime: at(python.runtime),
        code_type: python.code_type.map_or(0, at),
        none: python.none.map_or(0, at),
        layout: python.layout,
        interp_size: python.sizes.interp,
        tstate_size: python.sizes.tstate,
        awaits: python.awaits,
        collector: python.collector,
        asyncio_built_in: python.asyncio_built_in,
        entering,
        entering_error,
        file,
        path,
        static_address: python.fixed_address,
        load_bias: bias,
        known_build: python.known_build,
    }
}
