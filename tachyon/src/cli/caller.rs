//! The user who called this program through sudo.
//!
//! Files that a profiler under sudo leaves behind belong to that user, and a command it starts runs as that user.

use nix::unistd::{Gid, Uid, User};
use std::env;

/// The user behind `sudo`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caller {
    /// `SUDO_UID`.
    pub uid: Uid,
    /// `SUDO_GID`.
    pub gid: Gid,
}

impl Caller {
    /// The user who called `sudo`; `None` if this process is not root, was not called through sudo, or was called by
    /// root itself.
    ///
    /// `SUDO_UID` and `SUDO_GID` are trusted only when running as root, whose environment nobody else controls.
    #[must_use]
    pub fn through_sudo() -> Option<Self> {
        if !Uid::effective().is_root() {
            return None;
        }
        Self::from_variables(env::var("SUDO_UID").ok().as_deref(), env::var("SUDO_GID").ok().as_deref())
    }

    fn from_variables(uid: Option<&str>, gid: Option<&str>) -> Option<Self> {
        let uid = Uid::from_raw(uid?.parse().ok()?);
        // Without SUDO_GID (doas and the like do not set it), the group from the user's own entry.
        let gid = match gid {
            Some(gid) => Gid::from_raw(gid.parse().ok()?),
            None => User::from_uid(uid).ok()??.gid,
        };
        // -1 means "unchanged" to chown(2) and setresuid(2).
        let unchanged = uid.as_raw() == u32::MAX || gid.as_raw() == u32::MAX;
        (!uid.is_root() && !unchanged).then_some(Self { uid, gid })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_another_user_counts() {
        let caller = Caller { uid: Uid::from_raw(1000), gid: Gid::from_raw(100) };
        for (uid, gid, expected) in [
            (Some("1000"), Some("100"), Some(caller)),
            (Some("0"), Some("0"), None),
            (None, Some("100"), None),
            (Some("1000"), Some("x"), None),
            (Some("-1"), Some("100"), None),
            (Some("4294967295"), Some("100"), None),
            (Some("1000"), Some("4294967295"), None),
        ] {
            assert_eq!(Caller::from_variables(uid, gid), expected, "{uid:?} {gid:?}");
        }
    }
}
