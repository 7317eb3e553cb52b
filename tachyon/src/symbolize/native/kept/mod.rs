//! Names that are kept between recordings: what was found out about one file is known the next time, without its symbol tables and
//! without DWARF.
//!
//! Each answer that had to be looked up is noted; at the end, the functions of those answers are compiled: into pieces of
//! addresses within which nothing changes (`compile`). The next recording finds them by binary search (`names`), read from where
//! [`crate::kept`] has them (`stored`). What is not there is looked up as if nothing were kept.

mod compile;
mod names;
mod stored;
#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use self::names::{Names, Writer};
use super::{Detail, NativeFile, NativeName, lock};
use crate::kept::{Folder, Key, Kind};
use crate::remote::TargetFile;
use crate::remote::ledger::{self, Work};

/// Most answers of one file that are noted until they are kept.
const MAX_MISSED: usize = 4096;

/// Longest CPU time for keeping names at one time. What there is no time for is kept as far as it was met, and compiled when it is
/// met again elsewhere.
const MOST_TIME: Duration = Duration::from_millis(if cfg!(debug_assertions) { 100 } else { 10 });

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
        build_id: &[u8],
        file: &TargetFile,
        debug: Option<&TargetFile>,
    ) -> Self {
        let place = folder.filter(|_| !build_id.is_empty()).and_then(|folder| {
            let key = Key::of(build_id, file, debug)?;
            Some(Place { folder: Arc::clone(folder), name: key.file_name(Kind::Names)?, key })
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
        if Key::of(&place.key.build_id, file, debug).as_ref() != Some(&place.key) {
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
