//! The spool: a directory that one agent at a time writes to, and whose segments others read.

use crate::cli::failure::Failure;
use crate::cli::output::{Destination, OutputFile, write_whole};
use crate::cli::record::json;
use crate::cli::recover;
use crate::report::Report;
use std::ffi::OsString;
use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

/// Held as long as an agent writes there.
const LOCK: &str = ".lock";
/// Readable by the spool's group: shipping segments needs no further rights.
const FILE_MODE: u32 = 0o640;

/// A spool that this agent holds.
#[derive(Debug)]
pub struct Spool {
    directory: PathBuf,
    _lock: File,
}

impl Spool {
    /// Checks that an agent could write there, without touching anything.
    ///
    /// # Errors
    /// As [`Spool::check`]; when another agent writes there.
    pub fn check_free(directory: &Path) -> Result<(), Failure> {
        Self::check(directory)?;
        match File::open(directory.join(LOCK)).map(|lock| lock.try_lock()) {
            Ok(Err(TryLockError::WouldBlock)) => Err(taken(directory)),
            _ => Ok(()),
        }
    }

    /// The same, even if another agent writes there.
    ///
    /// # Errors
    /// When it is not a directory, is a symbolic link, belongs to another user, or others may write to it.
    pub fn check(directory: &Path) -> Result<(), Failure> {
        let shown = directory.display();
        let metadata = match fs::symlink_metadata(directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return match directory.parent().filter(|parent| !parent.is_dir()) {
                    Some(parent) => {
                        Err(Failure::new(format!("cannot make the spool {shown}: {} is not there", parent.display()))
                            .with_hint("make that directory, or give another spool.path"))
                    }
                    None => Ok(()),
                };
            }
            other => {
                other.map_err(|error| Failure::new(format!("cannot look at the spool {shown}")).with_source(error))?
            }
        };
        let us = nix::unistd::geteuid().as_raw();
        if metadata.is_symlink() {
            Err(Failure::new(format!("the spool {shown} is a symbolic link"))
                .with_hint("give the directory itself as spool.path: a link can be turned elsewhere"))
        } else if !metadata.is_dir() {
            Err(Failure::new(format!("the spool {shown} is not a directory")).with_hint("give another spool.path"))
        } else if metadata.uid() != us {
            Err(Failure::new(format!("the spool {shown} belongs to user {}, the agent is user {us}", metadata.uid()))
                .with_hint(format!("chown {us} {shown}, or give another spool.path")))
        } else if metadata.mode() & 0o022 != 0 {
            Err(Failure::new(format!("others may write to the spool {shown} (mode {:o})", metadata.mode() & 0o7777))
                .with_hint(format!("chmod go-w {shown}")))
        } else {
            Ok(())
        }
    }

    /// Creates the directory, if needed, and locks it for this agent.
    ///
    /// # Errors
    /// As [`Spool::check`]; when it cannot be made or written; when another agent has it.
    pub fn open(directory: &Path) -> Result<Self, Failure> {
        Self::check(directory)?;
        let shown = directory.display();
        let cannot = |action: &str, error: io::Error| {
            Failure::new(format!("cannot {action} the spool {shown}"))
                .with_source(error)
                .with_hint("the agent's user needs to write there; spool.path may be another directory")
        };
        match DirBuilder::new().mode(0o750).create(directory) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(cannot("make", error)),
            _ => {}
        }
        // Anyone who may write to its parent may have put something else there meanwhile.
        Self::check(directory)?;
        let mut options = OpenOptions::new();
        let options = options.create(true).truncate(false).write(true).mode(0o600).custom_flags(libc::O_NOFOLLOW);
        let lock = options.open(directory.join(LOCK)).map_err(|error| cannot("write to", error))?;
        match lock.try_lock() {
            Ok(()) => Ok(Self { directory: directory.to_owned(), _lock: lock }),
            Err(TryLockError::WouldBlock) => Err(taken(directory)),
            Err(TryLockError::Error(error)) => Err(cannot("lock", error)),
        }
    }

    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Finishes what a killed agent left. Returns messages for the user.
    ///
    /// # Errors
    /// When the directory cannot be read.
    pub fn recover(&self) -> io::Result<Vec<String>> {
        let mut told = Vec::new();
        for path in self.paths()? {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if name.ends_with(".recovered.part") || name.ends_with(".json.part") || name.ends_with(".prom.part") {
                // An unfinished file that will be made again.
                remove(&path);
            } else if let Some(finished) = name.strip_suffix(".part").filter(|name| name.ends_with(".tach")) {
                told.push(self.finish(&path, finished));
            }
        }
        Ok(told)
    }

    /// Makes a finished segment of an unfinished one.
    fn finish(&self, part: &Path, name: &str) -> String {
        let path = self.directory.join(name);
        match rescue(part, &path) {
            Ok(0) => {
                remove_with_journal(part);
                remove(&path);
                remove(&path.with_extension("json"));
                format!("{name}: left by a killed agent, without a sample: removed")
            }
            Ok(samples) => {
                remove_with_journal(part);
                share(&path);
                share(&path.with_extension("json"));
                format!("{name}: recovered {samples} samples of a killed agent")
            }
            Err(error) => {
                let broken = self.directory.join(format!("{name}.broken"));
                // What cannot be renamed will be found again at the next start.
                let _kept = fs::rename(part, &broken);
                remove_with_journal(part);
                format!("{name}: left by a killed agent, and cannot be recovered: {error:#}; it is {name}.broken now")
            }
        }
    }

    fn paths(&self) -> io::Result<Vec<PathBuf>> {
        let mut paths =
            fs::read_dir(&self.directory)?.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<_>>>()?;
        paths.sort();
        Ok(paths)
    }

    /// Bytes of all files in it.
    pub fn bytes(&self) -> u64 {
        let paths = self.paths().unwrap_or_default();
        paths.iter().filter_map(|path| fs::symlink_metadata(path).ok()).map(|metadata| metadata.len()).sum()
    }

    /// Writes one of its own files as a whole.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write(&self, name: &str, text: &[u8]) -> anyhow::Result<()> {
        let path = self.directory.join(name);
        write_whole(&Destination::Path(path.clone()), true, text)?;
        share(&path);
        Ok(())
    }
}

fn taken(directory: &Path) -> Failure {
    Failure::new(format!("another agent writes to the spool {}", directory.display()))
        .with_hint("end it first, or give this one another spool.path")
}

/// Writes the samples of `part` to `path`, with an account beside it; returns how many there are.
fn rescue(part: &Path, path: &Path) -> anyhow::Result<u64> {
    let output = OutputFile::create_recovered(&Destination::Path(path.to_owned()), true)?;
    let mut file = output.try_clone_file()?;
    let recovered = match recover::run(part, None, &mut file) {
        // Killed before its first sample.
        Err(error) if matches!(error.downcast_ref(), Some(recover::RecoverError::EmptyJournal(_))) => return Ok(0),
        Err(_) if fs::metadata(part)?.len() == 0 => return Ok(0),
        recovered => recovered?,
    };
    let account = path.with_extension("json");
    // A file that was finished except for its name already has its account.
    if recovered.cut || !account.exists() {
        let report = Report {
            schema: 1,
            stored: recovered.samples,
            cut: true,
            duration_s: recovered.recorded.as_secs_f64(),
            ..Report::default()
        };
        write_whole(&Destination::Path(account), true, &json(&report)?)?;
    }
    output.commit()?;
    Ok(recovered.samples)
}

/// Lets the spool's group read a finished file.
pub fn share(path: &Path) {
    // On a file system without modes, its own rules apply.
    let _refused = fs::set_permissions(path, fs::Permissions::from_mode(FILE_MODE));
}

fn remove_with_journal(part: &Path) {
    remove(part);
    for ending in [".journal", ".tail"] {
        let mut name = OsString::from(part.as_os_str());
        name.push(ending);
        remove(Path::new(&name));
    }
}

fn remove(path: &Path) {
    // A missing file need not be removed; one that cannot be removed will be found again.
    let _left = fs::remove_file(path);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::advice::Advice as _;
    use std::os::unix::fs::symlink;

    #[test]
    fn only_a_directory_of_our_own_that_nobody_else_writes_is_taken() {
        let around = tempfile::tempdir().unwrap();
        let path = around.path().join("spool");
        Spool::check(&path).unwrap();
        assert!(!path.exists(), "a look makes nothing");
        let spool = Spool::open(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o750);
        assert!(Spool::open(&path).unwrap_err().to_string().contains("another agent writes"));
        drop(spool);
        drop(Spool::open(&path).unwrap());

        fs::set_permissions(&path, fs::Permissions::from_mode(0o770)).unwrap();
        let error = Spool::open(&path).unwrap_err();
        assert!(error.to_string().contains("others may write") && error.hint().unwrap().starts_with("chmod go-w"));
        let link = around.path().join("link");
        symlink(&path, &link).unwrap();
        assert!(Spool::open(&link).unwrap_err().to_string().contains("is a symbolic link"));
        let file = around.path().join("file");
        fs::write(&file, "").unwrap();
        assert!(Spool::open(&file).unwrap_err().to_string().contains("is not a directory"));
        let deep = around.path().join("no/such");
        assert!(Spool::open(&deep).unwrap_err().to_string().contains("cannot make the spool"));
    }

    #[test]
    fn what_is_no_profile_is_put_aside() {
        let around = tempfile::tempdir().unwrap();
        let spool = Spool::open(&around.path().join("spool")).unwrap();
        let path = |name: &str| spool.directory().join(name);
        for (name, text) in [
            ("h-20261122T190113Z-000001.tach.part", "no profile"),
            ("h-20261122T190113Z-000002.tach.part", ""),
            ("h-20261122T190113Z-000002.tach.part.journal", ""),
            ("h-20261122T190113Z-000002.tach.part.tail", ""),
            ("state.json.part", "{"),
        ] {
            fs::write(path(name), text).unwrap();
        }
        let told = spool.recover().unwrap();
        assert!(told.len() == 2 && told[0].contains("cannot be recovered") && told[1].contains("removed"), "{told:?}");
        let mut left: Vec<_> =
            fs::read_dir(spool.directory()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, [".lock", "h-20261122T190113Z-000001.tach.broken"]);
    }
}
