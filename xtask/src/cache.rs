//! The cache directory, and directories in it that are either complete or absent.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

/// `$TACHYON_CACHE`, or else `~/.cache/tachyon-bpf`.
pub(crate) fn dir() -> Result<PathBuf> {
    if let Some(dir) = std::env::var_os("TACHYON_CACHE").filter(|dir| !dir.is_empty()) {
        return std::path::absolute(&dir).with_context(|| format!("TACHYON_CACHE is not a path: {}", dir.display()));
    }
    let home = std::env::home_dir().context("no home directory for the cache\nhint: set TACHYON_CACHE")?;
    Ok(home.join(".cache/tachyon-bpf"))
}

/// Holds back other runs of the same task until the returned file is dropped.
pub(crate) fn lock(dir: &Path) -> Result<File> {
    fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let path = dir.join(".lock");
    let file = File::create(&path).with_context(|| format!("cannot create {}", path.display()))?;
    file.lock().with_context(|| format!("cannot lock {}", path.display()))?;
    Ok(file)
}

/// Whether `dir` was finished with this very `stamp`.
pub(crate) fn is_finished(dir: &Path, stamp: &str) -> bool {
    fs::read_to_string(dir.join(STAMP)).is_ok_and(|found| found == stamp)
}

/// Written last: from now on `dir` counts as complete.
pub(crate) fn finish(dir: &Path, stamp: &str) -> Result<()> {
    fs::write(dir.join(STAMP), stamp).with_context(|| format!("cannot write the stamp of {}", dir.display()))
}

/// Whether `dir` was finished with some stamp, maybe an older one.
pub(crate) fn was_finished(dir: &Path) -> bool {
    dir.join(STAMP).is_file()
}

/// From now on, until [`finish`], `dir` counts as incomplete.
pub(crate) fn reopen(dir: &Path) -> Result<()> {
    fs::remove_file(dir.join(STAMP)).with_context(|| format!("cannot remove the stamp of {}", dir.display()))
}

const STAMP: &str = ".tachyon-stamp";

/// Removes a directory, unless something is mounted in it: removing must never reach through a mount.
///
/// # Errors
/// There is a mount below `dir`, or a file cannot be removed.
pub(crate) fn remove(dir: &Path) -> Result<()> {
    if let Some(mount) = mounts_below(dir)?.first() {
        bail!("cannot remove {}: {} is mounted in it\nhint: umount it", dir.display(), mount.display());
    }
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", dir.display()))
        }
        _ => Ok(()),
    }
}

/// The mount points at or below `dir`, innermost first.
pub(crate) fn mounts_below(dir: &Path) -> Result<Vec<PathBuf>> {
    let dir = match dir.canonicalize() {
        Ok(dir) => dir,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error).with_context(|| format!("cannot resolve {}", dir.display())),
    };
    let table = fs::read_to_string("/proc/self/mountinfo").context("cannot read /proc/self/mountinfo")?;
    let mut mounts: Vec<PathBuf> = mount_points(&table).filter(|mount| mount.starts_with(&dir)).collect();
    mounts.reverse();
    Ok(mounts)
}

/// The fifth field of each line, with the octal escapes of the characters that would split it
/// (kernel, `Documentation/filesystems/proc.rst`, 3.5).
fn mount_points(table: &str) -> impl Iterator<Item = PathBuf> {
    table.lines().filter_map(|line| line.split(' ').nth(4)).map(|field| {
        let plain = field.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\");
        PathBuf::from(plain)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_points_are_unescaped() {
        let table =
            "22 1 254:0 / / rw - ext4 /dev/vda rw\n23 22 0:21 / /a\\040b/proc rw,nosuid shared:2 - proc proc rw\n";
        let points: Vec<_> = mount_points(table).collect();
        assert_eq!(points, [PathBuf::from("/"), PathBuf::from("/a b/proc")]);
    }

    #[test]
    fn a_directory_counts_only_with_its_stamp() {
        let dir = tempfile::tempdir().unwrap();
        assert!(!is_finished(dir.path(), "1"));
        finish(dir.path(), "1").unwrap();
        assert!(is_finished(dir.path(), "1") && !is_finished(dir.path(), "2"));
        remove(dir.path()).unwrap();
        remove(dir.path()).unwrap();
    }

    #[test]
    fn what_is_mounted_is_not_removed() {
        assert!(mounts_below(Path::new("/proc")).unwrap().contains(&PathBuf::from("/proc")));
        assert!(remove(Path::new("/proc")).unwrap_err().to_string().contains("is mounted in it"));
    }
}
