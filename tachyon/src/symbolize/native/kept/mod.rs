//! Names that are kept between recordings: what was found out about one file is known the next time, without its symbol tables and
//! without DWARF.
//!
//! Each answer that had to be looked up is noted; at the end, the functions of those answers are compiled: into pieces of
//! addresses within which nothing changes (`compile`). The next recording finds them by binary search (`names`), read from the
//! user's own folder (`folder`) in a checked format (`stored`). What is not there is looked up as if nothing were kept.
//!
//! Build ids are whatever a file claims. So names are kept for one state of one file, and of its debug file: device, inode, size
//! and both times of change. A program may make files with any build id, content, size and time of modification, but the time of the
//! last change is set by the kernel alone, on file systems of this machine; and as long as the victim's file exists, no other has
//! its inode number. Files elsewhere (FUSE, network) are never kept: their servers say what they like.

mod compile;
mod folder;
mod names;
mod stored;
#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

pub(super) use folder::Folder;
pub use folder::SymbolCache;

use self::names::{Names, Writer};
use self::stored::Key;
use super::{Detail, NativeFile, NativeName, lock};
use crate::remote::ledger::{self, Work};
use crate::remote::{FileState, TargetFile};

/// Most answers of one file that are noted until they are kept.
const MAX_MISSED: usize = 4096;

/// Longest CPU time for keeping names at one time. What there is no time for is kept as far as it was met, and compiled when it is
/// met again elsewhere.
const MOST_TIME: Duration = Duration::from_millis(if cfg!(debug_assertions) { 100 } else { 10 });

/// A file that has changed this recently may change again without a new time: clocks of file systems tick up to 10 ms apart, and
/// those that count in seconds, once a second.
const TICK: Duration = Duration::from_millis(20);
const LONG_TICK: Duration = Duration::from_millis(2_100);

/// How many symbol tables and how many files' DWARF this process has read because no kept name answered.
static TABLES_READ: AtomicU64 = AtomicU64::new(0);

/// How often this process has read a file's symbol tables or its DWARF so far: what kept names save.
#[must_use]
pub fn tables_read() -> u64 {
    TABLES_READ.load(Ordering::Relaxed)
}

pub(super) fn count_table() {
    TABLES_READ.fetch_add(1, Ordering::Relaxed);
}

/// Writes down the names of files that had to be looked up, those first of which most were.
pub(super) fn keep(folder: &Folder, files: &[Arc<Mutex<NativeFile>>]) {
    let mut missed: Vec<_> = files.iter().map(|file| (lock(file).kept.missed.len(), file)).collect();
    missed.retain(|(missed, _)| *missed > 0);
    missed.sort_by_key(|(missed, _)| std::cmp::Reverse(*missed));
    let until = ledger::thread_time() + MOST_TIME;
    let mut written = false;
    for (_, file) in missed {
        let mut file = lock(file);
        if ledger::thread_time() >= until {
            break;
        }
        let payer = file.payer;
        if payer.is_none_or(|pid| ledger::may(Work::Symbols, pid, Duration::ZERO)) {
            let _charged = payer.map(|pid| ledger::charge(Work::Symbols, pid));
            written |= file.keep(until).is_some();
        }
    }
    if written {
        folder.tidy();
    }
}

/// What is kept of one file, and what will be.
#[derive(Debug, Default)]
pub(super) struct Kept {
    /// `None`: nothing is kept of this file.
    place: Option<Place>,
    /// As they were read, or when they were last written; `None`: not read yet, or dropped.
    names: Option<Names>,
    /// Answers that were not among them.
    missed: Vec<(NativeName, Detail)>,
}

#[derive(Debug)]
struct Place {
    folder: Arc<Folder>,
    /// The file's name in it.
    name: String,
    key: Key,
}

impl Kept {
    /// For a file and its debug file, before anything else is read from them.
    pub(super) fn of(
        folder: Option<&Arc<Folder>>,
        build_id: &str,
        file: &TargetFile,
        debug: Option<&TargetFile>,
    ) -> Self {
        let place = folder.filter(|_| !build_id.is_empty()).and_then(|folder| {
            let key = key(build_id, file, debug)?;
            Some(Place { folder: Arc::clone(folder), name: file_name(&key)?, key })
        });
        Self { place, ..Self::default() }
    }

    /// Whether names have to be read from the folder before [`Kept::find`] can know.
    pub(super) const fn is_to_be_read(&self) -> bool {
        self.place.is_some() && self.names.is_none()
    }

    /// Reads what is kept.
    pub(super) fn read(&mut self) {
        let Some(place) = &self.place else { return };
        let content = place.folder.read(&place.name);
        self.names = Some(content.and_then(|content| stored::decode(&content, &place.key)).unwrap_or_default());
    }

    /// The answer for an address, without the object's name.
    pub(super) fn find(&self, vaddr: u64, detail: Detail) -> Option<NativeName> {
        self.names.as_ref()?.find(vaddr, detail)
    }

    /// Notes an answer that had to be looked up.
    pub(super) fn note(&mut self, name: &NativeName, detail: Detail) {
        if self.place.is_some() && self.missed.len() < MAX_MISSED {
            self.missed.push((NativeName { object: String::new(), ..name.clone() }, detail));
        }
    }

    /// What is known and what was looked up, to add to the former. `None`: there is nothing to add, or the files are not what they
    /// were when they were opened.
    fn take(&mut self, file: &TargetFile, debug: Option<&TargetFile>) -> Option<(Writer, Vec<(NativeName, Detail)>)> {
        let missed = std::mem::take(&mut self.missed);
        let place = self.place.as_ref().filter(|_| !missed.is_empty())?;
        if key(&place.key.build_id, file, debug).as_ref() != Some(&place.key) {
            self.place = None;
            return None;
        }
        if self.names.is_none() {
            self.read();
        }
        // One that is full begins anew.
        let names = self.names.take().filter(|names| !names.is_full()).unwrap_or_default();
        Some((Writer::new(names), missed))
    }

    /// Writes names, and goes on with them.
    fn put(&mut self, names: Names) -> Option<()> {
        let place = self.place.as_ref()?;
        if let Some(content) = stored::encode(&place.key, &names) {
            // A folder that cannot be written is one that keeps nothing.
            let _read_only = place.folder.write(&place.name, &content);
            self.names = Some(names);
        }
        Some(())
    }

    /// Forgets what can be read again, or looked up again.
    pub(super) fn drop_tables(&mut self) {
        (self.names, self.missed) = (None, Vec::new());
    }

    /// Bytes of that.
    pub(super) fn bytes(&self) -> usize {
        /// Of a name with its texts, roughly.
        const MISSED: usize = 512;
        self.names.as_ref().map_or(0, Names::bytes) + self.missed.len() * MISSED
    }
}

/// What names of a file depend on; `None`: the file system may say anything of it, or has only just seen it change.
fn key(build_id: &str, file: &TargetFile, debug: Option<&TargetFile>) -> Option<Key> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).ok()?;
    let state = |file: &TargetFile| {
        let state = file.state().filter(|state| is_settled(state, now))?;
        Some(state.into())
    };
    let debug = match debug {
        Some(debug) => Some(state(debug)?),
        None => None,
    };
    let version = env!("CARGO_PKG_VERSION").to_owned();
    Some(Key { version, build_id: build_id.to_owned(), file: Some(state(file)?), debug })
}

/// Whether any change from now on would give the file another time.
fn is_settled(state: &FileState, now: Duration) -> bool {
    let (seconds, nanoseconds) = state.changed;
    let Some(changed) = u64::try_from(seconds).ok().zip(u32::try_from(nanoseconds).ok()) else { return false };
    let tick = if changed.1 == 0 { LONG_TICK } else { TICK };
    now.checked_sub(Duration::new(changed.0, changed.1)).is_some_and(|age| age > tick)
}

/// One for each file, so that what is kept of an earlier state of it is replaced.
fn file_name(key: &Key) -> Option<String> {
    let file = key.file.as_ref()?;
    let own = format!("{:x}-{:x}", file.dev, file.inode);
    Some(match &key.debug {
        Some(debug) => format!("{own}-{:x}-{:x}", debug.dev, debug.inode),
        None => own,
    })
}
