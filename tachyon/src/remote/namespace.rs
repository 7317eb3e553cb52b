//! The pid namespace of the profiler itself, in which it and its kernel side number processes.

use crate::advice::{Advice, advises};
use std::io;
use std::os::unix::fs::MetadataExt as _;

/// `PROC_PID_INIT_INO` (include/linux/proc_ns.h): inode number of the initial pid namespace.
const INITIAL: u64 = 0xefff_fffc;

/// Why the profiler cannot know how processes are numbered.
#[derive(Debug, thiserror::Error)]
pub enum NamespaceError {
    /// `/proc` is mounted for another pid namespace than the profiler's.
    #[error("cannot tell processes apart: /proc numbers them as another pid namespace does")]
    OtherProc,
    /// `/proc` cannot be read.
    #[error("cannot read the pid namespace in /proc/self/ns/pid")]
    Unreadable(#[source] io::Error),
}

advises!(NamespaceError);

impl Advice for NamespaceError {
    fn hint(&self) -> Option<String> {
        match self {
            Self::OtherProc => {
                Some("mount the namespace's own first: unshare --mount-proc, or `mount -t proc proc /proc`".to_owned())
            }
            Self::Unreadable(_) => None,
        }
    }
}

/// Inode number of the profiler's pid namespace; `None` for the initial one, and where there are none.
///
/// # Errors
/// When `/proc` is not the one of that namespace.
pub fn own_pid_namespace() -> Result<Option<u32>, NamespaceError> {
    // `/proc/self` is the reader's pid in the mount's own namespace; absent if it has none there.
    let shown = std::fs::read_link("/proc/self").ok();
    if shown.is_none_or(|shown| shown.as_os_str() != std::process::id().to_string().as_str()) {
        return Err(NamespaceError::OtherProc);
    }
    match std::fs::metadata("/proc/self/ns/pid") {
        Ok(metadata) if metadata.ino() == INITIAL => Ok(None),
        // The kernel's own field for it has 32 bits (`ns_common.inum`).
        Ok(metadata) => Ok(u32::try_from(metadata.ino()).ok()),
        // A kernel without pid namespaces (CONFIG_PID_NS).
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(NamespaceError::Unreadable(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_know_their_namespace() {
        let own = own_pid_namespace().expect("/proc is this namespace's");
        assert_ne!(own, Some(0));
    }
}
