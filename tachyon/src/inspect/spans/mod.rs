//! What a program publishes about its spans for outside readers: OpenTelemetry's thread context (OTEP 4947), which names the
//! span that a thread is in, and its process context (OTEP 4719), which names the service.
//!
//! Takes a process with its mappings and gives [`Published`]: where each of its threads has the first, and what the second says, or
//! why they are missing. What depends only on a file is kept in a [`Spans`]. Nothing is guessed: if the variable's place cannot be
//! proved, there is none. Reading a thread's record is done elsewhere (`tachyon_common::walk::running_span`).

mod process_context;
#[cfg(test)]
mod tests;
mod thread_local;

use std::collections::HashMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tachyon_common::whose::ThreadLocal;

pub use self::process_context::{NoProcessContext, ProcessContext};
pub use self::thread_local::NoThreadLocal;

use self::thread_local::{Arch, Defined, FileFacts};
use super::budget::{Metered, ReadBudget};
use super::candidates;
use crate::remote::elf::{Elf, ElfError};
use crate::remote::{FileIdentity, MappedFile, MappedPath, Mapping, RemoteError, RemoteProcess};

/// Files remembered, and places of files that do not matter here.
const MAX_FILES: usize = 1 << 14;

/// How long a mapped file that did not matter is not looked up again: its inode may become another file's.
const KNOWN_FOR: Duration = Duration::from_secs(10);

/// When to look again at a process that has published a context, and at one that has not.
const RENEWED: Duration = Duration::from_secs(10);
const SOONEST: Duration = Duration::from_millis(100);
const LATEST: Duration = Duration::from_secs(300);

/// The layouts that a record may have, as the process context names them: both are the same, before and after the proposal's adoption.
const SCHEMAS: [&str; 2] = ["tlsdesc_v1_dev", "tls_v1"];

/// What a process publishes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Published {
    /// Where each of its threads has the pointer to its span's record.
    pub thread: Result<ThreadLocal, NoThreadLocal>,
    /// What the process says about itself.
    pub process: Result<ProcessContext, NoProcessContext>,
}

impl Published {
    /// When to look again although no event announces anything new: the context's mapping is not executable, and its contents
    /// change. `quiet` is how long the process has mapped nothing new: a process that publishes nothing is looked at again after
    /// as long again, a dozen times in its life.
    #[must_use]
    pub fn again_after(&self, quiet: Duration) -> Duration {
        if self.process.is_ok() && self.thread != Err(NoThreadLocal::NotYet) {
            return RENEWED;
        }
        quiet.clamp(SOONEST, LATEST)
    }

    /// Whether the process publishes nothing, and has no library that would.
    #[must_use]
    pub fn is_none(&self) -> bool {
        self.thread == Err(NoThreadLocal::NotDefined) && self.process == Err(NoProcessContext::NotPublished)
    }

    /// Whether the process still publishes this and nothing newer, found by one read: then there is no need to look. For a process
    /// without a context nothing is known.
    #[must_use]
    pub fn is_current(&self, process: &RemoteProcess) -> bool {
        self.process.as_ref().is_ok_and(|context| process_context::is_current(process, context))
    }
}

/// Remembers what files hold. There is one for a whole recording.
#[derive(Debug, Default)]
pub struct Spans {
    files: HashMap<FileIdentity, Arc<FileFacts>>,
    /// Device, inode and path of mapped files that do not matter here, and when that was found.
    others: HashMap<((u32, u32), u64), (MappedPath, Instant)>,
}

impl Spans {
    /// A memory that knows nothing yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Looks at a process: when it is inspected, and again when it has mapped another executable file, or may have published
    /// something. `maps` are its mappings. If nothing is new, this costs a look at each of its mappings, and two reads if the
    /// process has a context.
    pub fn look(&mut self, process: &RemoteProcess, maps: &[Mapping], now: Instant) -> Published {
        let context = process_context::read(process, maps);
        let schema = context.as_ref().ok().and_then(|context| context.thread_schema.as_deref());
        let thread = match schema {
            Some(other) if !SCHEMAS.contains(&other) => Err(NoThreadLocal::Schema(other.to_owned())),
            _ => self.thread_local(process, maps, now),
        };
        Published { thread, process: context }
    }

    /// Where each thread of a process has a variable that a library keeps to itself: its name in `.symtab`, and its offset in the
    /// library's block if that is stripped. `is_it` tells the library's mappings.
    ///
    /// # Errors
    /// When that cannot be proved.
    pub fn own_variable(
        &mut self,
        process: &RemoteProcess,
        maps: &[Mapping],
        is_it: impl Fn(&Mapping) -> bool,
        (name, if_stripped): (&str, u64),
    ) -> Result<ThreadLocal, NoThreadLocal> {
        let (budget, now) = (ReadBudget::new(), Instant::now());
        let (mut library, mut libc) = (None, None);
        let unreadable = |error: RemoteError| NoThreadLocal::File(error.to_string());
        for mappings in candidates(maps, None) {
            let Some(first) = mappings.first() else { continue };
            if mappings.iter().any(|mapping| is_it(mapping)) {
                if library.is_some() {
                    return Err(NoThreadLocal::Several);
                }
                let opened = process.mapped_file(first).and_then(|file| file.open()).map_err(unreadable)?;
                let elf = Elf::parse(Metered { source: opened, budget: &budget });
                let found = elf.and_then(|elf| Ok((elf.own_thread_local(name, if_stripped)?, elf.loads().to_vec())));
                let (symbol, loads) = found.map_err(|error| NoThreadLocal::File(error.to_string()))?;
                let symbol = symbol.ok_or(NoThreadLocal::NotDefined)?;
                library = Some((Defined { symbol, loads }, mappings));
            } else if libc.is_none() && !self.is_other((first.dev, first.inode), |known| *known == first.path, now) {
                let facts = process.mapped_file(first).and_then(|file| self.facts(&file, &budget));
                libc = facts.ok().flatten().and_then(|facts| facts.libc);
            }
        }
        let (defined, mappings) = library.ok_or(NoThreadLocal::NotDefined)?;
        let bias = only_bias(&defined, &mappings).ok_or(NoThreadLocal::NoLoadBias)?;
        thread_local::of_library(&defined.symbol, bias, libc, Arch::HERE, process)
    }

    /// Whether a file that a process maps as executable was found not to matter within the last seconds: then it is no reason to
    /// look at the process. Device, inode and path are those of its mapping.
    #[must_use]
    pub fn is_known(&self, dev: (u32, u32), inode: u64, path: &OsStr, now: Instant) -> bool {
        self.is_other((dev, inode), |known| known.is_file(path.as_bytes()), now)
    }

    fn is_other(&self, place: ((u32, u32), u64), is_there: impl FnOnce(&MappedPath) -> bool, now: Instant) -> bool {
        let known = self.others.get(&place);
        known.is_some_and(|(path, at)| now.saturating_duration_since(*at) < KNOWN_FOR && is_there(path))
    }

    /// Finds the variable.
    fn thread_local(
        &mut self,
        process: &RemoteProcess,
        maps: &[Mapping],
        now: Instant,
    ) -> Result<ThreadLocal, NoThreadLocal> {
        let exe = process.exe_file().ok().map(|file| file.identity());
        let budget = ReadBudget::new();
        let (mut definitions, mut libc, mut unreadable) = (Vec::new(), None, None);
        for mappings in candidates(maps, exe.map(|exe| exe.inode)) {
            let Some(first) = mappings.first() else { continue };
            if self.is_other((first.dev, first.inode), |known| *known == first.path, now) {
                continue;
            }
            let found = process.mapped_file(first).and_then(|file| Ok((file.identity(), self.facts(&file, &budget)?)));
            match found {
                Ok((identity, Some(facts))) => {
                    if facts.is_of_no_use() {
                        self.remember(first, now);
                    }
                    libc = libc.or(facts.libc);
                    if facts.defined.is_some() {
                        definitions.push((facts, mappings, exe == Some(identity)));
                    }
                }
                Ok((_, None)) => return Err(NoThreadLocal::TooMuchToRead),
                Err(RemoteError::NotRegular(_)) => {}
                Err(error) => unreadable = unreadable.or(Some(NoThreadLocal::File(error.to_string()))),
            }
        }
        let (facts, mappings, is_exe) = match (definitions.pop(), definitions.is_empty()) {
            (Some(one), true) => one,
            (Some(_), false) => return Err(NoThreadLocal::Several),
            (None, _) => return Err(unreadable.unwrap_or(NoThreadLocal::NotDefined)),
        };
        let Some(defined) = &facts.defined else { return Err(NoThreadLocal::NotDefined) };
        if is_exe {
            return Ok(thread_local::of_executable(&defined.symbol, Arch::HERE));
        }
        // A file that could not be read might also define it, and come first.
        if let Some(unreadable) = unreadable {
            return Err(unreadable);
        }
        let bias = only_bias(defined, &mappings).ok_or(NoThreadLocal::NoLoadBias)?;
        thread_local::of_library(&defined.symbol, bias, libc, Arch::HERE, process)
    }

    fn remember(&mut self, mapping: &Mapping, now: Instant) {
        if self.others.len() >= MAX_FILES {
            self.others.clear();
        }
        self.others.insert((mapping.dev, mapping.inode), (mapping.path.clone(), now));
    }

    /// The facts of a file, read if not known; `None`: the budget was spent before.
    fn facts(&mut self, file: &MappedFile, budget: &ReadBudget) -> Result<Option<Arc<FileFacts>>, RemoteError> {
        let identity = file.identity();
        if let Some(facts) = self.files.get(&identity) {
            return Ok(Some(Arc::clone(facts)));
        }
        let opened = file.open()?;
        let read = Elf::parse(Metered { source: opened, budget }).and_then(|elf| FileFacts::of(&elf));
        if budget.is_spent() {
            return Ok(None);
        }
        let facts = match read {
            // What did not arrive this time may arrive another time.
            Err(ElfError::Read { source, .. }) if source.kind() == std::io::ErrorKind::TimedOut => {
                return Err(RemoteError::File { path: file.found_at().to_owned(), source });
            }
            read => Arc::new(read.unwrap_or_default()),
        };
        if self.files.len() >= MAX_FILES {
            self.files.clear();
        }
        self.files.insert(identity, Arc::clone(&facts));
        Ok(Some(facts))
    }
}

/// What was added to a library's addresses. `None`: its mappings do not show it, or it is loaded more than once.
fn only_bias(defined: &Defined, mappings: &[&Mapping]) -> Option<u64> {
    let mut biases = super::biases(&defined.loads, mappings, true);
    let first = biases.next()?;
    biases.all(|other| other == first).then_some(first)
}
