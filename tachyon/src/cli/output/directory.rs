//! A directory of files that appears whole or not at all: one file for each process (`--split process`).
//!
//! As with a file: it is made as `PATH.part`, created new and for its owner only, and takes its name when it is done.
//! With `--force`, an existing directory at `PATH` is kept, and the files are moved into it one by one, replacing only
//! regular files of the same name. Everything goes through open directories, so that renaming them cannot redirect the
//! files elsewhere.

use super::error::CHOWN;
use super::place::Place;
use super::{OutputError, OutputFile, PART, give_to_caller};
use crate::input::not_regular;
use nix::dir::Dir;
use nix::fcntl::{OFlag, openat, renameat};
use nix::sys::stat::{Mode, SFlag, mkdirat};
use nix::unistd::{UnlinkatFlags, unlinkat};
use std::ffi::{CString, OsStr, OsString};
use std::fs::{File, TryLockError};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

/// Name in the directory of the file that holds the whole recording while it runs.
pub const WHOLE: &str = "recording.tach";

const FLAGS: OFlag = OFlag::O_RDONLY.union(OFlag::O_DIRECTORY).union(OFlag::O_NOFOLLOW).union(OFlag::O_CLOEXEC);

/// A directory that is being filled. If dropped without [`OutputDirectory::commit`] or [`OutputDirectory::keep`] it is
/// removed.
#[derive(Debug)]
pub struct OutputDirectory {
    place: Place,
    /// `PATH.part`, locked while this process lives.
    inside: File,
    force: bool,
    /// Whether it is to be removed on drop.
    pending: AtomicBool,
}

/// Checks that files could be written into a directory, or that it could be created, without touching anything.
///
/// # Errors
/// The errors of [`create_directory`].
pub fn check_directory(path: &Path) -> Result<(), OutputError> {
    if path.is_dir() {
        return Place::of(&path.join("x"), PART).map(drop);
    }
    let place = Place::of(plain(path), PART)?;
    match place.stat(&place.name) {
        Ok(_) => Err(OutputError::NotDirectory { path: path.to_owned(), found: "something that is no directory" }),
        Err(_) => Ok(()),
    }
}

/// Creates, if needed, a directory that files are put into one by one: accessible only to its owner, under sudo the
/// calling user.
///
/// # Errors
/// When something else exists there, or the directory around it cannot be written.
pub fn create_directory(path: &Path) -> Result<(), OutputError> {
    check_directory(path)?;
    if path.is_dir() {
        return Ok(());
    }
    let place = Place::of(plain(path), "")?;
    mkdirat(&place.directory, place.name.as_os_str(), Mode::S_IRWXU)
        .map_err(|errno| place.part_error("create", errno.into()))?;
    let inside = open_inside(&place).map_err(|errno| place.part_error("open", errno.into()))?;
    give_to_caller(&inside).map_err(|source| place.part_error(CHOWN, source))
}

impl OutputDirectory {
    /// Checks that it could be created now, without touching anything.
    ///
    /// # Errors
    /// The errors of [`OutputDirectory::create`].
    pub fn check(path: &Path, force: bool) -> Result<(), OutputError> {
        let place = Place::of(plain(path), PART)?;
        check_target(&place, force)?;
        judge_part(&place, force).map(drop)
    }

    /// Makes `PATH.part`.
    ///
    /// # Errors
    /// When something exists at the path, or the directory around it cannot be written.
    pub fn create(path: &Path, force: bool) -> Result<Self, OutputError> {
        let place = Place::of(plain(path), PART)?;
        check_target(&place, force)?;
        if let Some(stale) = judge_part(&place, force)? {
            remove(&place, &stale).map_err(|source| place.part_error("replace", source))?;
        }
        let failed = |action| move |errno: nix::Error| (action, io::Error::from(errno));
        mkdirat(&place.directory, place.part_name.as_os_str(), Mode::S_IRWXU)
            .map_err(failed("create"))
            .and_then(|()| open_inside(&place).map_err(failed("open")))
            .and_then(|inside| {
                // Without locks on the file system, only that distinction is lost.
                let _no_locks = inside.try_lock();
                give_to_caller(&inside).map_err(|source| (CHOWN, source))?;
                Ok(inside)
            })
            .map_err(|(action, source)| place.part_error(action, source))
            .map(|inside| Self { inside, force, pending: AtomicBool::new(true), place })
    }

    /// The name it will have.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.place.path
    }

    /// Makes a file in it, by the last part of its path.
    ///
    /// # Errors
    /// As [`OutputFile::create`].
    pub fn create_file(&self, path: &Path) -> Result<OutputFile, OutputError> {
        let name = path.file_name().ok_or_else(|| OutputError::NoFileName { path: path.to_owned() })?;
        let path = self.place.part_path().join(name);
        let directory = self.inside.try_clone().map_err(|source| self.place.part_error("open", source))?;
        OutputFile::create_at(Place::within(directory.into(), path, name, PART), false)
    }

    /// An empty file in it that no longer has a name.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn unnamed_file(&self) -> Result<File, OutputError> {
        let made = self.create_file(Path::new("spool"))?;
        // Dropped, it loses its name and stays open here.
        made.try_clone_file().map_err(|source| self.place.part_error("open", source))
    }

    /// Whether it was removed.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        nix::sys::stat::fstat(&self.inside).is_ok_and(|stat| stat.st_nlink == 0)
    }

    /// Gives the directory its name, or moves its files into the directory that has that name.
    ///
    /// # Errors
    /// When the name was taken meanwhile: `PATH.part` then stays.
    pub fn commit(&self) -> Result<(), OutputError> {
        self.pending.store(false, Ordering::Relaxed);
        let place = &self.place;
        let (directory, part, name) = (place.directory.as_fd(), place.part_name.as_os_str(), place.name.as_os_str());
        // A directory can replace nothing, or an empty directory.
        let result = match renameat(directory, part, directory, name) {
            Err(nix::Error::ENOTEMPTY | nix::Error::EEXIST) if self.force => self.merge(),
            other => other.map_err(io::Error::from),
        };
        let (part, path) = (place.part_path(), place.path.clone());
        result.map_err(|source| OutputError::Rename { part, path, source })
    }

    /// Moves the files into the directory that already has the name.
    fn merge(&self) -> io::Result<()> {
        let place = &self.place;
        let to = openat(&place.directory, place.name.as_os_str(), FLAGS, Mode::empty())?;
        for name in names(&self.inside)? {
            if let Ok(stat) = nix::sys::stat::fstatat(&to, name.as_os_str(), nix::fcntl::AtFlags::AT_SYMLINK_NOFOLLOW)
                && let Some(found) = not_regular(&stat)
            {
                return Err(io::Error::other(format!("{} is {found}", name.display())));
            }
            renameat(&self.inside, name.as_os_str(), &to, name.as_os_str())?;
        }
        Ok(unlinkat(&place.directory, place.part_name.as_os_str(), UnlinkatFlags::RemoveDir)?)
    }

    /// Leaves `PATH.part` as it is and returns its name.
    pub fn keep(&self) -> PathBuf {
        self.pending.store(false, Ordering::Relaxed);
        self.place.part_path()
    }
}

impl Drop for OutputDirectory {
    fn drop(&mut self) {
        if *self.pending.get_mut() {
            // What cannot be removed stays as `PATH.part`.
            let _left = remove(&self.place, &self.inside);
        }
    }
}

/// The path without slashes at its end, which a directory may have.
fn plain(path: &Path) -> &Path {
    let bytes = path.as_os_str().as_bytes();
    let len = bytes.iter().rposition(|&byte| byte != b'/').map_or(0, |last| last + 1);
    Path::new(OsStr::from_bytes(&bytes[..len]))
}

/// Checks that nothing is at the path, or a directory that may be added to.
fn check_target(place: &Place, force: bool) -> Result<(), OutputError> {
    let path = || place.path.clone();
    match place.stat(&place.name) {
        Err(nix::Error::ENOENT) => Ok(()),
        Err(errno) => Err(OutputError::Directory { directory: path(), source: errno.into() }),
        Ok(_) if !force => Err(OutputError::Exists { path: path() }),
        Ok(stat) if is_directory(stat.st_mode) => Ok(()),
        Ok(stat) => Err(OutputError::NotDirectory { path: path(), found: not_regular(&stat).unwrap_or("a file") }),
    }
}

fn is_directory(mode: libc::mode_t) -> bool {
    SFlag::from_bits_truncate(mode) & SFlag::S_IFMT == SFlag::S_IFDIR
}

fn open_inside(place: &Place) -> nix::Result<File> {
    openat(&place.directory, place.part_name.as_os_str(), FLAGS, Mode::empty()).map(File::from)
}

/// An existing `PATH.part`, if it may be replaced.
fn judge_part(place: &Place, force: bool) -> Result<Option<File>, OutputError> {
    let part = place.part_path();
    match place.stat(&place.part_name) {
        Err(nix::Error::ENOENT) => return Ok(None),
        Err(errno) => return Err(place.part_error("look at", errno.into())),
        Ok(stat) if is_directory(stat.st_mode) => {}
        Ok(stat) => {
            let found = not_regular(&stat).unwrap_or("a file");
            return Err(OutputError::NotDirectory { path: part, found });
        }
    }
    let inside = open_inside(place).map_err(|errno| place.part_error("open", errno.into()))?;
    match inside.try_lock() {
        Err(TryLockError::WouldBlock) => Err(OutputError::BusyPart { part }),
        _ if force => Ok(Some(inside)),
        _ => Err(OutputError::StaleDirectory { part }),
    }
}

fn names(directory: &File) -> io::Result<Vec<OsString>> {
    // A file description of its own: the locked one keeps its position at the start.
    let mut entries = Dir::openat(directory, ".", FLAGS, Mode::empty())?;
    let mut names = Vec::new();
    for entry in entries.iter() {
        let name: CString = entry?.file_name().to_owned();
        if !matches!(name.as_bytes(), b"." | b"..") {
            names.push(OsString::from_vec(name.into_bytes()));
        }
    }
    Ok(names)
}

/// Removes `PATH.part` with its files. If there is a directory in it, which this program did not make, it stays.
fn remove(place: &Place, inside: &File) -> io::Result<()> {
    for name in names(inside)? {
        unlinkat(inside, name.as_os_str(), UnlinkatFlags::NoRemoveDir)?;
    }
    Ok(unlinkat(&place.directory, place.part_name.as_os_str(), UnlinkatFlags::RemoveDir)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::advice::Advice as _;
    use std::fs;
    use std::io::Write as _;
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    fn put(directory: &OutputDirectory, name: &str, text: &str) {
        let file = directory.create_file(Path::new(name)).unwrap();
        file.file().write_all(text.as_bytes()).unwrap();
        file.commit().unwrap();
    }

    fn names_in(path: &Path) -> Vec<String> {
        let mut names: Vec<_> =
            fs::read_dir(path).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn appears_whole_at_the_end() {
        let around = tempfile::tempdir().unwrap();
        let path = around.path().join("d");
        let directory = OutputDirectory::create(&path.join(""), false).unwrap();
        put(&directory, "a", "1");
        let spool = directory.unnamed_file().unwrap();
        assert_eq!(
            (names_in(around.path()), names_in(&around.path().join("d.part"))),
            (vec!["d.part".into()], vec!["a".into()])
        );
        (&spool).write_all(b"x").unwrap();
        assert!(matches!(OutputDirectory::check(&path, true), Err(OutputError::BusyPart { .. })));
        directory.commit().unwrap();
        assert_eq!((names_in(around.path()), names_in(&path)), (vec!["d".into()], vec!["a".into()]));
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700);
        assert_eq!(fs::metadata(path.join("a")).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(matches!(OutputDirectory::check(&path, false), Err(OutputError::Exists { .. })));
    }

    #[test]
    fn vanishes_unless_kept() {
        let around = tempfile::tempdir().unwrap();
        let path = around.path().join("d");
        let directory = OutputDirectory::create(&path, false).unwrap();
        put(&directory, "a", "1");
        drop(directory);
        assert!(names_in(around.path()).is_empty());
        let directory = OutputDirectory::create(&path, false).unwrap();
        put(&directory, "a", "1");
        let kept = directory.keep();
        drop(directory);
        assert_eq!(names_in(&kept), ["a"]);
        let stale = OutputDirectory::create(&path, false).unwrap_err();
        assert!(matches!(stale, OutputError::StaleDirectory { .. }));
        assert!(stale.hint().unwrap().contains("d.part/recording.tach.part"), "{stale:?}");
        let directory = OutputDirectory::create(&path, true).unwrap();
        assert!(names_in(&kept).is_empty());
        directory.commit().unwrap();
    }

    #[test]
    fn force_adds_to_a_directory_and_replaces_regular_files_only() {
        let around = tempfile::tempdir().unwrap();
        let path = around.path().join("d");
        fs::create_dir(&path).unwrap();
        for name in ["a", "other"] {
            fs::write(path.join(name), "old").unwrap();
        }
        assert!(matches!(OutputDirectory::create(&path, false), Err(OutputError::Exists { .. })));
        let directory = OutputDirectory::create(&path, true).unwrap();
        put(&directory, "a", "new");
        put(&directory, "b", "new");
        directory.commit().unwrap();
        assert_eq!(
            (names_in(around.path()), names_in(&path)),
            (vec!["d".into()], vec!["a".into(), "b".into(), "other".into()])
        );
        let text = |name| fs::read_to_string(path.join(name)).unwrap();
        assert_eq!([text("a"), text("b"), text("other")], ["new", "new", "old"]);

        symlink("/etc/passwd", path.join("c")).unwrap();
        let directory = OutputDirectory::create(&path, true).unwrap();
        put(&directory, "c", "new");
        let error = directory.commit().unwrap_err();
        assert!(matches!(error, OutputError::Rename { .. }), "{error:?}");
        assert_eq!(fs::read_link(path.join("c")).unwrap(), Path::new("/etc/passwd"));
        assert_eq!(names_in(&around.path().join("d.part")), ["c"]);
    }

    #[test]
    fn nothing_but_a_directory_is_added_to() {
        let around = tempfile::tempdir().unwrap();
        let (path, part) = (around.path().join("d"), around.path().join("d.part"));
        fs::write(&path, "").unwrap();
        assert!(matches!(OutputDirectory::create(&path, true), Err(OutputError::NotDirectory { .. })));
        fs::remove_file(&path).unwrap();
        for target in [&path, &part] {
            symlink("/tmp", target).unwrap();
            let error = OutputDirectory::create(&path, true).unwrap_err();
            assert!(matches!(error, OutputError::NotDirectory { found: "a symbolic link", .. }), "{error:?}");
            fs::remove_file(target).unwrap();
        }
        // A directory that this program did not make is not emptied.
        fs::create_dir_all(part.join("deep")).unwrap();
        assert!(matches!(OutputDirectory::create(&path, true), Err(OutputError::Part { .. })));
        assert!(part.join("deep").is_dir());
    }

    #[test]
    fn a_directory_exchanged_meanwhile_leads_nowhere() {
        let around = tempfile::tempdir().unwrap();
        let (path, part) = (around.path().join("d"), around.path().join("d.part"));
        let elsewhere = around.path().join("elsewhere");
        fs::create_dir(&elsewhere).unwrap();
        let directory = OutputDirectory::create(&path, false).unwrap();
        fs::rename(&part, around.path().join("moved")).unwrap();
        symlink(&elsewhere, &part).unwrap();
        put(&directory, "a", "1");
        assert!(names_in(&elsewhere).is_empty());
        assert_eq!(names_in(&around.path().join("moved")), ["a"]);
    }
}
