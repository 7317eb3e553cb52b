//! Recently mapped files, held open: the next process that maps one of them needs no helper to find it.
//!
//! Device and inode number identify a file as long as it is held open. Programs that start map the same libraries as others,
//! and asking a helper for each was most of the cost of a starting process.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::file::{FileIdentity, MappedFile};
use super::{Mapping, RemoteProcess, open_files};

/// How long a file is held after it was last met: a file system with a held file cannot be unmounted.
const HELD_FOR: Duration = Duration::from_secs(10);
/// Most files that are held, and their share of those that this process may have open beside what it needs.
const MAX_FILES: u64 = 512;
const PART_OF_FILES: u64 = 8;

/// Where mappings say that a file is: device, as `stat` gives it, and inode.
type Place = (u64, u64);

/// Files, each with the time when it was last met.
#[derive(Default)]
struct KnownFiles {
    files: HashMap<Place, (MappedFile, Instant)>,
    /// When to next look for files that need no longer be held.
    tidy_at: Option<Instant>,
}

static KNOWN: Mutex<Option<KnownFiles>> = Mutex::new(None);

/// A panic while it was locked leaves it usable, since it is a cache.
fn lock() -> MutexGuard<'static, Option<KnownFiles>> {
    KNOWN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn place(mapping: &Mapping) -> Place {
    let (major, minor) = mapping.dev;
    (libc::makedev(major, minor), mapping.inode)
}

/// The file behind a mapping, if it was recently found behind another process's.
pub(super) fn find(process: &RemoteProcess, mapping: &Mapping) -> Option<MappedFile> {
    let now = Instant::now();
    let mut known = lock();
    let (file, met) = known.as_mut()?.files.get_mut(&place(mapping))?;
    // Its content may have changed in place. This only asks a file system on this machine.
    let stat = file.stat().ok()?;
    if FileIdentity::of(&stat) != file.identity() {
        return None;
    }
    *met = now;
    Some(file.behind(process, mapping, stat.st_uid))
}

/// Remembers a file that was found behind a mapping.
pub(super) fn remember(mapping: &Mapping, file: &MappedFile) {
    let identity = file.identity();
    if !file.is_numbered() || (identity.dev, identity.inode) != place(mapping) {
        return;
    }
    let now = Instant::now();
    let mut known = lock();
    let known = known.get_or_insert_default();
    known.tidy(now);
    let most = MAX_FILES.min(open_files::spare() / PART_OF_FILES);
    let place = place(mapping);
    // It may be the same file with other content.
    if (known.files.len() as u64) < most || known.files.contains_key(&place) {
        known.files.insert(place, (file.clone(), now));
    }
}

/// Releases the files that have not been met for a while.
pub fn let_go_of_files() {
    if let Some(known) = lock().as_mut() {
        known.tidy(Instant::now());
    }
}

/// Releases all files, when a recording has ended. Another one in this process looks its files up again.
pub fn forget_files() {
    *lock() = None;
}

impl KnownFiles {
    fn tidy(&mut self, now: Instant) {
        if self.tidy_at.is_some_and(|at| now < at) {
            return;
        }
        self.files.retain(|_, (_, met)| now.saturating_duration_since(*met) < HELD_FOR);
        self.tidy_at = Some(now + HELD_FOR / 4);
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{File, OpenOptions};
    use std::io::Write as _;
    use std::os::unix::fs::MetadataExt as _;
    use std::path::Path;

    use super::*;
    use crate::remote::file::tests;
    use crate::types::Pid;

    /// A folder that is certainly on this machine, if there is one.
    fn folder() -> tempfile::TempDir {
        tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).expect("a folder")
    }

    fn mapping_of(path: &Path) -> Mapping {
        let metadata = std::fs::metadata(path).expect("it is there");
        let dev = (libc::major(metadata.dev()), libc::minor(metadata.dev()));
        Mapping { dev, ..tests::mapping_of(path, metadata.ino()) }
    }

    #[test]
    fn a_file_that_was_found_is_known_until_it_changes() {
        let folder = folder();
        let path = folder.path().join("library.so");
        File::create(&path).and_then(|mut file| file.write_all(b"text")).expect("a file");
        let (process, mapping) = (RemoteProcess::at(Pid(std::process::id())), mapping_of(&path));
        assert!(find(&process, &mapping).is_none(), "nobody has found it yet");
        let first = process.mapped_file(&mapping).expect("it is a file");
        // No matter which process maps it: this one cannot be asked anything.
        let nobody = RemoteProcess::at(Pid(u32::MAX));
        let known = find(&nobody, &mapping).expect("it is known");
        assert_eq!(known.identity(), first.identity());
        assert!(
            known.found_at().starts_with(format!("/proc/{}/map_files", u32::MAX)),
            "{}",
            known.found_at().display()
        );
        let other = Mapping { inode: mapping.inode + 1, ..mapping.clone() };
        assert!(find(&nobody, &other).is_none(), "another file is not");
        let elsewhere = Mapping { dev: (mapping.dev.0, mapping.dev.1 + 1), ..mapping.clone() };
        assert!(find(&nobody, &elsewhere).is_none(), "nor one of another file system");
        OpenOptions::new().append(true).open(&path).and_then(|mut file| file.write_all(b" and more")).expect("written");
        assert!(find(&nobody, &mapping).is_none(), "it is not what it was");
        let changed = process.mapped_file(&mapping).expect("it is a file");
        assert_eq!((changed.identity().inode, changed.identity().size), (first.identity().inode, 13));
        assert_eq!(find(&nobody, &mapping).expect("known again").identity(), changed.identity());
    }

    #[test]
    fn what_nobody_meets_any_more_is_let_go_of() {
        let folder = folder();
        let path = folder.path().join("library.so");
        File::create(&path).expect("a file");
        let (process, mapping) = (RemoteProcess::at(Pid(std::process::id())), mapping_of(&path));
        let file = process.mapped_file(&mapping).expect("it is a file");
        let (now, mut known) = (Instant::now(), KnownFiles::default());
        known.files.insert(place(&mapping), (file, now));
        known.tidy(now + HELD_FOR / 2);
        assert_eq!(known.files.len(), 1);
        known.tidy(now + HELD_FOR);
        assert!(known.files.is_empty());
    }
}
