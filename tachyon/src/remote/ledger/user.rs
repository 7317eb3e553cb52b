//! Which user a process belongs to: the one who is charged for it.

use std::fs::File;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::sync::OnceLock;

use super::stock::Owner;
use crate::remote::RemoteProcess;
use crate::types::Pid;
use tachyon_common::walk::mix;

nix::ioctl_none!(ns_get_parent, 0xb7, 2);
nix::ioctl_read_bad!(ns_get_owner, 0xb704, u32);

/// Deepest nesting of user namespaces (`create_user_ns` in `kernel/user_namespace.c`).
const MOST_NESTED: usize = 33;

/// The user whom a process is charged to: its real user, whom no program without privileges can change. (The owner of its folder
/// in `/proc` is root if it has made itself undumpable.) In a user namespace, where one person may have 65,536 users, it is
/// whoever made the outermost one below the profiler's. `u32::MAX` for a process that is gone.
#[must_use]
pub fn user_of(pid: u32) -> u32 {
    owner_of_namespace(pid).or_else(|| RemoteProcess::at(Pid(pid)).real_uid().ok()).unwrap_or(u32::MAX)
}

/// The same, with what distinguishes the process from others with its pid.
#[must_use]
pub fn owner_of(pid: u32) -> Owner {
    let start = RemoteProcess::at(Pid(pid)).stat().map_or(0, |stat| stat.start_ticks);
    Owner { instance: mix(start, u64::from(pid)), pid, user: user_of(pid) }
}

/// `None` if it is in the profiler's namespace, or cannot be asked.
fn owner_of_namespace(pid: u32) -> Option<u32> {
    static OWN: OnceLock<Option<u64>> = OnceLock::new();
    let own = (*OWN.get_or_init(|| std::fs::metadata("/proc/self/ns/user").ok().map(|own| own.ino())))?;
    let path = format!("/proc/{pid}/ns/user");
    if std::fs::metadata(&path).ok()?.ino() == own {
        return None;
    }
    let mut namespace = OwnedFd::from(File::open(path).ok()?);
    for _ in 0..MOST_NESTED {
        // SAFETY: it takes no argument.
        let parent = unsafe { ns_get_parent(namespace.as_raw_fd()) }.ok()?;
        // SAFETY: the kernel has just made this descriptor for this process.
        let parent = unsafe { OwnedFd::from_raw_fd(parent) };
        if File::from(parent.try_clone().ok()?).metadata().ok()?.ino() == own {
            let mut owner = u32::MAX;
            // SAFETY: it writes one user id, for which there is room.
            unsafe { ns_get_owner(namespace.as_raw_fd(), &raw mut owner) }.ok()?;
            return Some(owner);
        }
        namespace = parent;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whose_this_process_is() {
        // SAFETY: getuid(2) cannot fail.
        let own = unsafe { libc::getuid() };
        assert_eq!(user_of(std::process::id()), own);
        assert_eq!(user_of(u32::MAX >> 1), u32::MAX);
    }

    #[test]
    fn who_makes_a_namespace_is_charged_for_all_of_its_users() {
        let words = ["--user", "--map-root-user", "unshare", "--user", "--map-user=5", "sleep", "60"];
        let Ok(mut child) = std::process::Command::new("unshare").args(words).spawn() else { return };
        // SAFETY: getuid(2) cannot fail.
        let own = unsafe { libc::getuid() };
        let pid = child.id();
        let namespaces = || std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm == "sleep\n");
        let mut tries = 0;
        while !namespaces() && child.try_wait().expect("a child").is_none() && tries < 1000 {
            std::thread::sleep(std::time::Duration::from_millis(5));
            tries += 1;
        }
        let told = namespaces().then(|| user_of(pid));
        child.kill().expect("it is a child");
        child.wait().expect("it is a child");
        // If namespaces are forbidden there is nothing to distinguish.
        assert!(told.is_none_or(|told| told == own), "{told:?}");
    }
}
