//! Recognises CPython in an ELF file and learns everything that is the same for each process running it.
//!
//! It goes by the file's contents, not its name: `_PyRuntime` among its symbols, or a section `.PyRuntime`. Facts are kept
//! by file identity in an [`ElfCache`], including that a file is *not* CPython: 200 workers cost one parse.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use object::elf;
use tachyon_common::layout::{Layout, flags};

use super::asyncio;
use super::awaits::AwaitLayout;
use super::budget::{Metered, ReadBudget};
use super::collector::Collector;
use super::debug_offsets::{self, DebugOffsets};
use super::entering::{CframeOffsets, EnteringError, EnteringWindow, arm64, entering_window};
use super::layout::{self, LayoutError, ObjectSizes, Sizes};
use super::{Refusal, SUPPORTED, version};
use crate::remote::elf::{Elf, ElfError, Load, ReadAt, Symbol};
use crate::remote::{FileIdentity, MappedFile, MappedPath, Mapping, RemoteError};

/// Files remembered. A host with more distinct ones starts over: 64 Ki entries are about 8 MiB.
pub(super) const MAX_FILES: usize = 1 << 16;

/// `e_machine` of this machine's programs: others cannot be mapped as code by a process that can be walked.
pub(super) const MACHINE: u16 = if cfg!(target_arch = "x86_64") { elf::EM_X86_64 } else { elf::EM_AARCH64 };

/// What is known about a file.
#[derive(Debug)]
pub(super) enum Facts {
    /// CPython of a version that can be walked.
    Python(Box<PythonFile>),
    /// A Python that cannot be walked.
    Refused {
        /// What it is, e.g. `CPython 3.14.2` or `PyPy`.
        implementation: String,
        /// Why not.
        reason: Refusal,
    },
    /// Anything else.
    Other,
}

/// A file that holds CPython. Addresses are the file's own: a process adds its load bias.
#[derive(Debug)]
pub(super) struct PythonFile {
    /// Loaded at the addresses it states (`ET_EXEC`).
    pub(super) fixed_address: bool,
    /// Segments, to work out the load bias from mappings.
    pub(super) loads: Vec<Load>,
    /// `_PyRuntime`.
    pub(super) runtime: u64,
    /// `PyCode_Type`, if there is a symbol for it.
    pub(super) code_type: Option<u64>,
    /// `_Py_NoneStruct`, if there is a symbol for it.
    pub(super) none: Option<u64>,
    /// Where fields are.
    pub(super) layout: Layout,
    /// Sizes of the structures that contain them.
    pub(super) sizes: Sizes,
    /// Where fields of what awaits are.
    pub(super) awaits: Option<AwaitLayout>,
    /// Where the garbage collector's lists are.
    pub(super) collector: Option<Collector>,
    /// It may hold `asyncio`'s C module.
    pub(super) asyncio_built_in: bool,
    /// The sizes of its structures are those of a version whose headers were seen.
    pub(super) known_build: bool,
    /// The window of instructions with an unfilled `cframe`; `None` for versions without a `cframe`.
    pub(super) entering: Option<Result<EnteringWindow, EnteringError>>,
}

/// How long a mapped file that was no Python is not looked up again: an inode that is reused, at the same path, would be taken
/// for the old file.
const KNOWN_FOR: Duration = Duration::from_secs(10);

/// Device and inode of a mapped file, and whether it may be the executable.
type Place = ((u32, u32), u64, bool);

/// Remembers what files hold. There is one for a whole recording.
#[derive(Debug, Default)]
pub struct ElfCache {
    files: HashMap<(FileIdentity, bool), Arc<Facts>>,
    /// Mapped files that are no Python, with their paths, and when that was found: starting programs share most of theirs.
    others: HashMap<Place, (MappedPath, Instant)>,
    /// What files say about asyncio's tasks; `None` if nothing.
    pub(super) asyncio: HashMap<FileIdentity, Option<asyncio::Words>>,
    pub(super) parsed: u64,
}

impl ElfCache {
    /// An empty cache.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// How many files have been read so far.
    #[must_use]
    pub fn files_parsed(&self) -> u64 {
        self.parsed
    }

    /// Whether a file that a process maps as a library was found to be no Python within the last seconds. Device, inode and path
    /// are those of its mapping.
    #[must_use]
    pub fn is_no_python(&self, dev: (u32, u32), inode: u64, path: &OsStr, now: Instant) -> bool {
        // In an executable more is searched for.
        let is_other = |is_exe| self.is_other((dev, inode, is_exe), |known| known.is_file(path.as_bytes()), now);
        is_other(false) || is_other(true)
    }

    /// The same for a mapping.
    pub(super) fn is_known(&self, mapping: &Mapping, maybe_exe: bool, now: Instant) -> bool {
        self.is_other((mapping.dev, mapping.inode, maybe_exe), |known| *known == mapping.path, now)
    }

    fn is_other(&self, place: Place, is_there: impl FnOnce(&MappedPath) -> bool, now: Instant) -> bool {
        let known = self.others.get(&place);
        known.is_some_and(|(path, at)| now.saturating_duration_since(*at) < KNOWN_FOR && is_there(path))
    }

    /// Remembers that a mapped file is no Python.
    pub(super) fn remember(&mut self, mapping: &Mapping, maybe_exe: bool, now: Instant) {
        if self.others.len() >= MAX_FILES {
            self.others.clear();
        }
        self.others.insert((mapping.dev, mapping.inode, maybe_exe), (mapping.path.clone(), now));
    }

    /// Looks into a file that a process is about to map. Returns whether it holds a CPython that can be walked.
    pub fn expect(&mut self, file: &MappedFile, is_exe: bool) -> bool {
        let facts = self.facts(file, is_exe, &ReadBudget::new());
        matches!(facts.ok().flatten().as_deref(), Some(Facts::Python(_)))
    }

    /// The facts of a file, read if not known. `is_exe` says that the process was started from it. `None`: the budget was spent
    /// before they were known.
    ///
    /// # Errors
    /// When it cannot be opened; that is not remembered.
    pub(super) fn facts(
        &mut self,
        file: &MappedFile,
        is_exe: bool,
        budget: &ReadBudget,
    ) -> Result<Option<Arc<Facts>>, RemoteError> {
        let key = (file.identity(), is_exe);
        if let Some(facts) = self.files.get(&key) {
            return Ok(Some(Arc::clone(facts)));
        }
        let opened = file.open()?;
        self.parsed += 1;
        let examined = examine(Metered { source: opened, budget }, is_exe);
        if budget.is_spent() {
            // What other files of this process cost must not decide what is remembered about this one.
            return Ok(None);
        }
        let facts = match examined {
            // What did not arrive this time may arrive another time.
            Err(ElfError::Read { source, .. }) if source.kind() == std::io::ErrorKind::TimedOut => {
                return Err(RemoteError::File { path: file.found_at().to_owned(), source });
            }
            // A file that is not ELF, or malformed, cannot be running code of a CPython that could be found.
            examined => Arc::new(examined.unwrap_or(Facts::Other)),
        };
        if self.files.len() >= MAX_FILES {
            self.files.clear();
        }
        self.files.insert(key, Arc::clone(&facts));
        Ok(Some(facts))
    }
}

/// Symbols that are searched for.
struct Names {
    runtime: Option<Symbol>,
    code_type: Option<Symbol>,
    none: Option<Symbol>,
    version: Option<Symbol>,
    evaluator: Option<Symbol>,
}

impl Names {
    fn dynamic<R: ReadAt>(elf: &Elf<R>) -> Result<Self, ElfError> {
        let runtime = elf.dynamic_symbol("_PyRuntime")?;
        if runtime.is_none() {
            return Ok(Self { runtime, code_type: None, none: None, version: None, evaluator: None });
        }
        Ok(Self {
            runtime,
            code_type: elf.dynamic_symbol("PyCode_Type")?,
            none: elf.dynamic_symbol("_Py_NoneStruct")?,
            version: elf.dynamic_symbol("Py_Version")?,
            evaluator: elf.dynamic_symbol("_PyEval_EvalFrameDefault")?,
        })
    }

    /// Fills in what is missing from `.symtab`, for programs that export nothing.
    fn complete<R: ReadAt>(&mut self, elf: &Elf<R>) -> Result<(), ElfError> {
        let names = ["_PyRuntime", "PyCode_Type", "_Py_NoneStruct", "Py_Version", "_PyEval_EvalFrameDefault"];
        let [runtime, code_type, none, version, evaluator] = elf.symtab_symbols(names)?;
        self.runtime = self.runtime.or(runtime);
        self.code_type = self.code_type.or(code_type);
        self.none = self.none.or(none);
        self.version = self.version.or(version);
        self.evaluator = self.evaluator.or(evaluator);
        Ok(())
    }
}

/// Reads what a file holds.
///
/// # Errors
/// When it is not a valid ELF file.
pub(super) fn examine<R: ReadAt>(source: R, is_exe: bool) -> Result<Facts, ElfError> {
    let elf = Elf::parse(source)?;
    if elf.machine() != MACHINE {
        return Ok(Facts::Other);
    }
    let mut names = Names::dynamic(&elf)?;
    // A file that exports its variables also exports the first functions of its modules (`PyMODINIT_FUNC`).
    let asyncio_built_in = names.runtime.is_none() || elf.dynamic_symbol("PyInit__asyncio")?.is_some();
    let section = elf.section(".PyRuntime").map(|section| Symbol { vaddr: section.vaddr, size: section.size });
    // Reading all of `.symtab` is expensive: only for a file that has the section, or for a program that may be a static
    // CPython 3.8 or 3.9 without exports.
    if names.runtime.is_none() && (section.is_some() || is_exe) {
        names.complete(&elf)?;
    }
    let Some(runtime) = names.runtime.or(section).filter(|runtime| runtime.vaddr != 0) else {
        return other_python(&elf);
    };
    let mut head = [0; debug_offsets::MAX_BYTES];
    // Up to 3.9 `_PyRuntime` has no initial data in the file: that is not an error, nor is a smaller one.
    let head = elf.read_vaddr(runtime.vaddr, &mut head).map_or(&[][..], |()| &head[..]);
    let exported = names.version.and_then(|symbol| version::exported(&elf, symbol));
    let soname = || elf.soname().and_then(|name| version::minor_of_soname(&name));
    let published = match DebugOffsets::decode(head) {
        Ok(published) => published,
        Err(error) => return Ok(refused(exported, error.into())),
    };
    let found = published.as_ref().map(|published| published.version_hex).or(exported);
    let Some(hex) = found.or_else(|| version::in_constants(&elf)).or_else(soname) else {
        return Ok(refused(None, Refusal::VersionUnknown));
    };
    if let (Some(published), Some(exported)) = (&published, exported)
        && published.version_hex != exported
    {
        let error = LayoutError::TwoVersions { published: published.version_hex, exported };
        return Ok(refused(Some(hex), error.into()));
    }
    let [major, minor, ..] = hex.to_be_bytes();
    let free_threaded = published.as_ref().is_some_and(|published| published.free_threaded);
    if !SUPPORTED.contains(&(major, minor, free_threaded)) {
        return Ok(refused(Some(hex), Refusal::NotSupported { free_threaded }));
    }
    let objects =
        ObjectSizes { runtime: runtime.size, code_type: names.code_type.map_or(0, |code_type| code_type.size) };
    let built = match layout::build(hex, published.as_ref(), objects) {
        Ok(built) => built,
        Err(error) => return Ok(refused(Some(hex), error.into())),
    };
    let mut layout = built.layout;
    let entering = layout.has(flags::ENTERING_EVAL).then(|| entering(&elf, names.evaluator, &layout));
    if let Some(Ok(window)) = &entering
        && let Some(unlinked) = window.unlinked_places()
    {
        layout.flags |= flags::LINKS_FIRST;
        layout.unlinked = unlinked;
    }
    Ok(Facts::Python(Box::new(PythonFile {
        fixed_address: elf.fixed_address(),
        loads: elf.loads().to_vec(),
        runtime: runtime.vaddr,
        code_type: names.code_type.map(|code_type| code_type.vaddr),
        none: names.none.map(|none| none.vaddr),
        layout,
        sizes: built.sizes,
        awaits: match &published {
            Some(published) if (major, minor) >= (3, 14) => AwaitLayout::published(published).ok().flatten(),
            _ => AwaitLayout::of_headers(&built.layout),
        },
        collector: Collector::of(&built.layout, published.as_ref()),
        asyncio_built_in,
        known_build: built.known_build,
        entering,
    })))
}

fn refused(version_hex: Option<u32>, reason: Refusal) -> Facts {
    let version = version_hex.map_or_else(String::new, |hex| format!(" {}", version::display(hex)));
    Facts::Refused { implementation: format!("CPython{version}"), reason }
}

/// Pythons without a `_PyRuntime`.
fn other_python<R: ReadAt>(elf: &Elf<R>) -> Result<Facts, ElfError> {
    // RPython's entry point, which PyPy's library exports.
    if elf.dynamic_symbol("pypy_main_startup")?.is_some() {
        return Ok(Facts::Refused { implementation: "PyPy".into(), reason: Refusal::NotCPython });
    }
    // CPython up to 3.6 keeps its state in separate variables.
    if elf.dynamic_symbol("_PyThreadState_Current")?.is_some() && elf.dynamic_symbol("PyCode_Type")?.is_some() {
        let soname = || elf.soname().and_then(|name| version::minor_of_soname(&name));
        let hex = version::in_constants(elf).or_else(soname);
        return Ok(refused(hex, Refusal::NotSupported { free_threaded: false }));
    }
    Ok(Facts::Other)
}

/// Finds the window in which `cframe` is unfilled.
fn entering<R: ReadAt>(
    elf: &Elf<R>,
    evaluator: Option<Symbol>,
    layout: &Layout,
) -> Result<EnteringWindow, EnteringError> {
    let evaluator = evaluator.ok_or(EnteringError::NoSymbol)?;
    let evaluator = evaluator.vaddr..evaluator.vaddr.saturating_add(evaluator.size);
    let offsets = CframeOffsets {
        tstate_cframe: layout.tstate_frame,
        current_frame: layout.cframe_current_frame,
        previous: layout.frame_previous,
        is_entry: Layout::present(layout.frame_is_entry).then_some(layout.frame_is_entry),
        owner: layout.frame_owner,
    };
    match elf.machine() {
        elf::EM_X86_64 => entering_window(evaluator, offsets, |vaddr, into| elf.read_vaddr(vaddr, into).is_ok()),
        elf::EM_AARCH64 => arm64::entering_window(evaluator, offsets, |vaddr| {
            let mut bytes = [0; 4];
            elf.read_vaddr(vaddr, &mut bytes).ok().map(|()| bytes)
        }),
        _ => Err(EnteringError::Machine),
    }
}
